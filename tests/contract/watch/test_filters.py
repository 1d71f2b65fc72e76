"""Subscriptions that begin at a time or at the last records, and those with a filter."""

from __future__ import annotations

import json

import pytest

from tests.contract.driver import Api, Json, good
from tests.contract.streams.streams import SseStream, WsClient
from tests.contract.watch.test_live import records

STARTS: dict[str, tuple[Json, list[int]]] = {
    "last": ({"last": 2}, [5, 6]),
    "more than there are": ({"last": 1000}, [1, 2, 3, 4, 5, 6]),
    "since": ({"since": "10m"}, [1, 2, 3, 4, 5, 6]),
    "since a time to come": ({"since": 99_999_999_999_999}, []),
}


@pytest.fixture
def filled(api: Api, topic: str) -> str:
    """Six records, tagged `odd` and `even`."""
    for number in range(1, 7):
        good(api.append(topic, [{"data": number, "tag": ("even", "odd")[number % 2]}]))
    return topic


def frames_until(socket: WsClient, op: str) -> list[Json]:
    frames = [socket.frame()]
    while frames[-1]["op"] != op:
        frames.append(socket.frame())
    return frames


def seqs(frames: list[Json]) -> list[int]:
    return [
        record["$seq"] for frame in frames if frame["op"] == "record" for record in frame["records"]
    ]


@pytest.mark.parametrize("case", STARTS)
def test_a_subscription_begins_where_it_says(api: Api, filled: str, case: str) -> None:
    start, found = STARTS[case]
    begin = found[0] - 1 if found else 6
    opened = good(api.http.post("/v0/watch", json={"topics": {filled: start}}))
    assert opened["topics"][filled]["from_seq"] == begin
    stream = SseStream(api.url, opened["stream_url"])
    if found:
        assert [record["$seq"] for record in records(stream, len(found))[0]] == found
    assert stream.event().name == "caught-up"
    stream.close()
    socket = WsClient(api.url)
    try:
        for command in ({"topic": filled, **start}, {"topics": {filled: start}}):
            socket.send(op="subscribe", **command)
            frames = frames_until(socket, "caught_up")
            assert frames[0]["topics"][filled]["from_seq"] == begin
            assert seqs(frames) == found
    finally:
        socket.close()


def test_a_socket_with_a_filter_gets_the_records_that_pass(api: Api, filled: str) -> None:
    socket = WsClient(api.url)
    try:
        wanted = ["And", ["tag", "Glob", "o*"], ["Not", ["node", "Eq", "n"]]]
        socket.send(op="subscribe", topic=filled, filter=wanted)
        assert seqs(frames_until(socket, "caught_up")) == [1, 3, 5]
        good(api.append(filled, [{"data": 7, "tag": "odd", "node": "n"}, {"data": 8}]))
        good(api.append(filled, [{"data": 9, "tag": "odd"}, {"data": 10}]))
        frame = socket.frame()
        assert seqs([frame]) == [9]
        assert frame["to_seq"] == 10
        socket.send(op="subscribe", topic=filled, filter="odd", last=2)
        assert seqs(frames_until(socket, "caught_up")) == [7, 9]
        # Without a filter again.
        socket.send(op="subscribe", topic=filled, last=2, filter=None)
        assert seqs(frames_until(socket, "caught_up")) == [9, 10]
    finally:
        socket.close()


def test_a_socket_is_told_its_position_after_many_records_that_do_not_pass(
    api: Api, topic: str
) -> None:
    good(api.append(topic, [{"data": 0, "tag": "rare"}]))
    socket = WsClient(api.url)
    stream = SseStream(api.url, f"/v0/topics/{topic}/live?tag=rare")
    try:
        socket.send(op="subscribe", topic=topic, filter="rare")
        assert seqs(frames_until(socket, "caught_up")) == [1]
        records(stream, 1)
        for _ in range(8):
            good(api.append(topic, [{"data": 0}] * 10_000))
        skipped = frames_until(socket, "skipped")[-1]
        assert skipped["to_seq"] > 65_536
        good(api.append(topic, [{"data": 1, "tag": "rare"}]))
        frames = frames_until(socket, "record")
        assert seqs(frames) == [80_002]
        records(stream, 1)
        ids = [line for line in stream.body.split(b"\n\n") if line.startswith(b"id: ")]
        assert any(b"event" not in block for block in ids[1:])
        again = SseStream(api.url, f"/v0/topics/{topic}/live?tag=rare&last=1")
        assert json.dumps(records(again, 1)[0][0]["$seq"]) == "80002"
        again.close()
    finally:
        socket.close()
        stream.close()
