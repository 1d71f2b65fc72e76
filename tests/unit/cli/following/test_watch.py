"""`cli.following.watch`: each frame is a line, and it ends when all remaining topics have caught
up.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from tests.unit.cli.scripted import RETRY, Script, frame, id_of, page, session
from topics_server.cli.connection import ServerConnection
from topics_server.cli.following import watch

IDS = {"t": 3, "u": 0}


def run(client: ServerConnection, *words: str) -> Result:
    """Run the verb in this process."""
    return CliRunner().invoke(watch.command, ["--url", client.url, *words])


def caught_up(topic: str) -> bytes:
    """A caught-up frame."""
    return frame("caught-up", id_of(**IDS), topic=topic, head_seq=IDS[topic])


def deleted(topic: str) -> bytes:
    """A topic-deleted frame."""
    return frame("topic-deleted", id_of(**IDS), topic=topic, head_seq=IDS[topic], reason="deleted")


def test_frames_are_printed_as_they_came(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)]
    split = (
        b'id: x\nevent: record\ndata: {"topic":"t","from_seq":0,"to_seq":0,\ndata: "records":[]}'
    )
    error = frame("error", "", code=429, error="busy")
    script.streams = [[RETRY, split + b"\n\n", page(1, 3), error, caught_up("t"), b""]]
    ran = run(client, "t", "--until-caught-up")
    assert ran.exit_code == 0
    first, *rest = ran.stdout.splitlines()
    assert first == (
        '{"event":"record","id":"x","data":{"topic":"t","from_seq":0,"to_seq":0, "records":[]}}'
    )
    assert [json.loads(line)["event"] for line in rest] == ["record", "error", "caught-up"]
    assert json.loads(rest[0])["id"] == id_of(t=3)


@pytest.mark.parametrize(
    "frames",
    [
        [caught_up("t"), caught_up("u")],
        [deleted("t"), caught_up("u")],
        [caught_up("u"), deleted("t")],
        [caught_up("u"), caught_up("u"), page(1, 3), caught_up("t")],
    ],
)
def test_it_ends_when_what_is_left_has_caught_up(
    script: Script, client: ServerConnection, frames: list[bytes]
) -> None:
    script.posts = [session("wid_a", t=0, u=0)]
    script.streams = [[RETRY, *frames, b""]]
    ran = run(client, "t", "u", "--until-caught-up")
    assert ran.exit_code == 0
    assert len(ran.stdout.splitlines()) == len(frames)


def test_nothing_left_is_a_failure(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0, u=0)]
    script.streams = [[RETRY, caught_up("u"), deleted("u"), deleted("t"), b""]]
    ran = run(client, "t", "u", "--until-caught-up")
    assert ran.exit_code == 1
    assert "every topic is deleted" in ran.stderr


def test_where_each_topic_begins(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0, u=0, v=0)]
    script.streams = [[RETRY, deleted("t"), deleted("u"), frame("topic-deleted", "", topic="v")]]
    run(client, "t", "u=17", "v=tail", "--limit", "5", "--max-batch-bytes", "0", "--no-data")
    body = script.asked[0][2]
    assert body["topics"] == {"t": {"from_seq": 0}, "u": {"from_seq": 17}, "v": {"tail": True}}
    assert (body["limit"], body["max_batch_bytes"], body["include_data"]) == (5, 0, False)
