"""`cli.following.tail`: the output of each frame, for people and for scripts, and its end."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from tests.unit.cli.scripted import RETRY, Script, frame, id_of, page, session
from topics_server.cli.connection import ServerConnection
from topics_server.cli.following import tail


def run(client: ServerConnection, *words: str) -> Result:
    """Run the verb in this process."""
    return CliRunner().invoke(tail.command, ["--url", client.url, *words])


def gap(topic: str, reason: str, first: int, last: int) -> bytes:
    """A tombstone frame."""
    place = {"gap_from": first, "gap_to": last, "earliest_seq": last + 1, "head_seq": 99}
    return frame("tombstone", id_of(**{topic: last}), topic=topic, reason=reason, **place)


def test_what_is_asked_for(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)] * 4
    script.streams = [[RETRY, page(1, 1)]] * 4
    words = ("--node", "a", "--node", "b", "--strong", "--no-meta", "--tags")
    for more in ((), ("--from", "7", "--heartbeat-ms", "1000"), ("--from-start",), words):
        assert run(client, "t", "--limit", "1", *more).exit_code == 0
    bodies = [body for method, _, body in script.asked if method == "POST"]
    plain = {"heartbeat_ms": 15_000, "include_meta": True, "include_tags": False}
    assert bodies == [
        {**plain, "topics": {"t": {"tail": True}}},
        {**plain, "heartbeat_ms": 1000, "topics": {"t": {"from_seq": 7}}},
        {**plain, "topics": {"t": {"from_seq": 0}}},
        {
            **plain,
            "include_meta": False,
            "include_tags": True,
            "consistency": "strong",
            "node": ["a", "b"],
            "topics": {"t": {"tail": True}},
        },
    ]


def test_the_limit_cuts_inside_a_frame(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)]
    script.streams = [[RETRY, page(1, 3), page(4, 9), b""]]
    ran = run(client, "t", "--limit", "5")
    assert ran.exit_code == 0
    assert [json.loads(line)["$seq"] for line in ran.stdout.splitlines()] == [1, 2, 3, 4, 5]


def test_losses_are_printed_for_people_and_for_scripts(
    script: Script, client: ServerConnection
) -> None:
    script.posts = [session("wid_a", t=0)] * 2
    advice = frame("error", "", code=429, error="busy", retry_after_ms=1)
    frames = [gap("t", "cap", 1, 10), page(11, 11), gap("t", "recreated", 1, 0), advice, page(1, 1)]
    script.streams = [[RETRY, *frames]] * 2
    ran = run(client, "t", "--limit", "2", "--json")
    first, _, again, last = map(json.loads, ran.stdout.splitlines())
    assert first["tombstone"]["gap_to"] == 10
    assert again["tombstone"]["reason"] == "recreated"
    assert last["$seq"] == 1
    words = [
        "gap: seqs 1-10 of t are gone (cap)",
        "gap: t starts again at seq 1 (recreated)",
        "the server slows this stream down: busy",
    ]
    assert ran.stderr.splitlines() == words
    table = run(client, "t", "--limit", "2", "--table")
    assert [line.split()[0] for line in table.stdout.splitlines()] == ["11", "1"]
    assert table.stderr.splitlines() == words


def test_several_topics_are_named(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0, u=0)] * 2
    ids = {"t": 1, "u": 1}
    script.streams = [[RETRY, page(1, 1, "t", **ids), page(1, 1, "u", **ids)]] * 2
    ran = run(client, "t", "u", "--limit", "2", "--json")
    assert ran.stdout.splitlines()[1].startswith('{"topic":"u","$seq": 1,')
    table = run(client, "t", "u", "--limit", "2", "--table")
    assert [line.split()[:2] for line in table.stdout.splitlines()] == [["t", "1"], ["u", "1"]]


def test_the_end_of_the_last_topic_is_a_failure(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)]
    gone = frame("topic-deleted", id_of(t=3), topic="t", head_seq=3, reason="deleted")
    script.streams = [[RETRY, page(1, 3), gone, b""]]
    ran = run(client, "t")
    assert ran.exit_code == 1
    assert len(ran.stdout.splitlines()) == 3
    assert ran.stderr.splitlines() == [
        "t is deleted",
        "every topic is deleted; nothing is left to follow",
    ]
