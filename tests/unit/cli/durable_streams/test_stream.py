"""`cli.durable_streams.stream` and its follower: the requests, the counted data, and the output."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tests.unit.cli.door import Door, Said, opened
from topics_server.cli.connection import ServerConnection
from topics_server.cli.durable_streams import stream, stream_following
from topics_server.cli.durable_streams.stream_calls import url_of

JSONS = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}
EVENTS = {"Content-Type": "text/event-stream"}


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(stream_following, "PAUSE_S", 0.001)
    with opened() as found:
        yield found


def run(door: Door, *words: str, stdin: bytes | None = None, token: str | None = None) -> Result:
    """Run the verb in this process; it must use up all answers."""
    more = [] if token is None else ["--token", token]
    ran = CliRunner().invoke(stream.command, [*words, "--url", door.url, *more], input=stdin)
    assert door.answers == []
    return ran


def page(
    body: bytes = b"", offset: str = "1", *, kind: dict[str, str] = JSONS, **more: str
) -> Said:
    """An answer of a read; `done="true"`: up to date."""
    names = {"done": "Stream-Up-To-Date", "closed": "Stream-Closed", "cursor": "Stream-Cursor"}
    told = {names[name]: value for name, value in more.items()}
    return Said(200, {**kind, "Stream-Next-Offset": offset, **told}, body)


def data(text: str) -> bytes:
    return f"event: data\ndata:{text}\n\n".encode()


def control(offset: str, **more: Any) -> bytes:
    told = json.dumps({"streamNextOffset": offset, **more})
    return f"event: control\ndata:{told}\n\n".encode()


def queries(door: Door) -> list[str]:
    return [asked.path.partition("?")[2] for asked in door.asked]


def test_create_says_what_it_is_asked_to(door: Door) -> None:
    made = Said(201, {"Stream-Next-Offset": "0", "Content-Type": "text/plain"})
    door.answers = [made]
    ran = run(door, "create", "a b/c", "-t", "text/plain", "--ttl", "5", token="k")
    assert json.loads(ran.stdout) == {
        "stream": "/v1/stream/a%20b/c",
        "created": True,
        "content_type": "text/plain",
        "next_offset": "0",
    }
    (asked,) = door.asked
    assert (asked.method, asked.path) == ("PUT", "/v1/stream/a%20b/c")
    assert asked.headers["stream-ttl"] == "5"
    assert asked.headers["authorization"] == "Bearer k"
    door.answers = [Said(200, {"Content-Type": "text/x"}), Said(200)]
    ran = run(door, "create", "f", "--fork", "a", "--fork-offset", "7", "--closed")
    assert json.loads(ran.stdout)["created"] is False
    told = door.asked[-1].headers
    assert (told["stream-forked-from"], told["stream-fork-offset"]) == ("/v1/stream/a", "7")
    assert (told["content-type"], told["stream-closed"]) == ("text/x", "true")


def test_append_in_lots(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BATCH_RECORDS", 2)
    door.answers = [Said(200, JSONS), Said(204), Said(204), Said(204)]
    assert run(door, "append", "s", "--close", stdin=b"1\n[2]\n3\n").exit_code == 0
    assert [asked.body for asked in door.asked] == [b"", b"[1,[2]]", b"[3]", b""]
    assert door.asked[-1].headers["stream-closed"] == "true"
    door.answers = [Said(204)]
    assert run(door, "append", "s", "-t", "text/plain", "ab", "c").exit_code == 0
    assert door.asked[-1].body == b"abc"


def test_append_as_a_producer(door: Door) -> None:
    door.answers = [Said(200, JSONS), Said(200)]
    ran = run(door, "append", "s", "1", "--producer", "p", "--epoch", "3", token="k")
    assert ran.exit_code == 0
    assert door.asked[1].headers["producer-epoch"] == "3"
    assert door.asked[1].headers["authorization"] == "Bearer k"
    door.answers = [Said(403, {"Producer-Epoch": "9"})]
    ran = run(door, "append", "s", "1", "-t", "application/json", "--producer", "p", "--epoch", "3")
    assert ran.exit_code == 1
    assert "the producer has moved to epoch 9" in ran.stderr
    assert run(door, "append", "s", "1", "-t", "x/y", "--producer", "\n").exit_code == 2


def test_read_goes_on_to_the_end(door: Door) -> None:
    door.answers = [page(b'[1, {"a":\n2}]', "1"), page(b"", "2", done="true")]
    ran = run(door, "read", "s", "--from", "0", "--offset")
    assert (ran.stdout, ran.stderr) == ('1\n{"a": 2}\n', "next offset: 2\n")
    assert queries(door) == ["offset=0", "offset=1"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (Said(200, JSONS), "bad_answer"),
        (page(b"{}", done="true"), "bad_answer"),
        (Said(409, {"Stream-Closed": "true"}), "stream_closed"),
        (Said(410, {}, b'{"error":{"code":"gone","message":"m"}}'), "gone: m"),
        (Said(200, JSONS, b"[", is_cut=True), "broke"),
    ],
)
def test_what_is_wrong_is_one_line(door: Door, said: Said, message: str) -> None:
    door.answers = [said]
    ran = run(door, "read", "s")
    assert ran.exit_code in {1, 2}
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_events_count_once_their_control_event_came(door: Door) -> None:
    door.answers = [
        page(b"[1]", "1", cursor="c", done="true"),
        Said(200, EVENTS, data("[2]") + control("2", streamCursor="d") + data("[3]")),
        Said(200, EVENTS, data("[3]"), is_cut=True),
        Said(503),
        None,
        Said(200, EVENTS, b": hb\n\n" + data("[3]") + data("[4]") + control("4", upToDate=True)),
        Said(200, EVENTS, control("4", streamClosed=True)),
    ]
    ran = run(door, "follow", "s")
    assert ran.exit_code == 0
    assert ran.stdout == "1\n2\n3\n4\n"
    assert [query.partition("&live")[0] for query in queries(door)] == [
        "offset=-1",
        "offset=1&cursor=c",
        *["offset=2&cursor=d"] * 4,
        "offset=4&cursor=d",
    ]
    assert ran.stderr.count("reconnecting") == 1


def test_bytes_come_by_long_polling_or_in_base64(door: Door) -> None:
    odd = b"\xff\r\n\x00"
    poll = {"kind": BYTES, "cursor": "c"}
    door.answers = [
        page(odd, "1", kind=BYTES, done="true"),
        Said(204, {"Stream-Next-Offset": "1", "Stream-Up-To-Date": "true"}),
        page(b"ab", "2", done="true", **poll),  # type: ignore[arg-type]
        page(b"c", "3", closed="true", **poll),  # type: ignore[arg-type]
    ]
    ran = run(door, "follow", "s")
    assert ran.stdout_bytes == odd + b"abc"
    assert queries(door)[1:] == [
        "offset=1&live=long-poll",
        "offset=1&live=long-poll",
        "offset=2&cursor=c&live=long-poll",
    ]
    text = base64.b64encode(odd).decode()
    coded = {**EVENTS, "Stream-SSE-Data-Encoding": "base64"}
    lines = data(text[:3] + "\ndata:" + text[3:]) + data(base64.b64encode(b"z").decode())
    door.answers = [
        page(b"", "1", kind=BYTES, done="true"),
        Said(200, coded, lines + control("2", streamClosed=True)),
    ]
    assert run(door, "follow", "s", "--live", "sse").stdout_bytes == odd + b"z"


@pytest.mark.parametrize("events", [b"event: control\ndata:{}\n\n", b"event: data\ndata:?\n\n"])
def test_events_that_are_none(door: Door, events: bytes) -> None:
    coded = {**EVENTS, "Stream-SSE-Data-Encoding": "base64"}
    door.answers = [page(done="true"), Said(200, coded, events)]
    ran = run(door, "follow", "s")
    assert (ran.exit_code, "bad_answer" in ran.stderr) == (1, True)


def test_a_stream_that_is_removed_ends_following(door: Door) -> None:
    door.answers = [page(done="true"), Said(404)]
    ran = run(door, "follow", "s")
    assert ran.exit_code == 1
    door.answers = [page(done="true"), Said(200, {"Content-Type": "text/html"}, b"<html>")]
    assert run(door, "follow", "s").exit_code == 1


def test_close_and_rm(door: Door) -> None:
    door.answers = [Said(204)]
    assert run(door, "close", "s").exit_code == 0
    door.answers = [Said(204)]
    assert run(door, "rm", "/v1/stream/s", "--yes").exit_code == 0
    assert [(asked.method, asked.path) for asked in door.asked] == [
        ("POST", "/v1/stream/s"),
        ("DELETE", "/v1/stream/s"),
    ]


@pytest.mark.parametrize(
    "place", ["../../v0/topics/orders", "a/../b", ".", "http://h/v1/stream/../../v0/topics/orders"]
)
def test_a_stream_is_below_its_root(place: str) -> None:
    """A URL resolves dots in a path: `rm` would then remove a topic."""
    with pytest.raises(click.UsageError, match="segment"):
        url_of(ServerConnection("http://127.0.0.1:1"), place)
