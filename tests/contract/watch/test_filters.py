"""Subscriptions that begin at a time or at the last records, and those with a filter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.streams.streams import SseStream, WsClient, gauges
from tests.contract.watch.test_live import ACCEPT, records

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


def open_session(api: Api, topic: str, wanted: Any, **more: Any) -> str:
    """The URL of the stream of a new session."""
    body = {"topics": {topic: more}, "filter": wanted}
    opened = good(api.http.post("/v0/watch", json=body))
    assert "ignored" not in opened
    return str(opened["stream_url"])


def test_a_session_with_a_filter_gets_the_records_that_pass(api: Api, filled: str) -> None:
    wanted = ["And", ["tag", "Glob", "o*"], ["Not", ["node", "Eq", "n"]]]
    stream = SseStream(api.url, open_session(api, filled, wanted))
    assert [record["$seq"] for record in records(stream, 3)[0]] == [1, 3, 5]
    good(api.append(filled, [{"data": 7, "tag": "odd", "node": "n"}, {"data": 8}]))
    good(api.append(filled, [{"data": 9, "tag": "odd"}, {"data": 10}]))
    assert [record["$seq"] for record in records(stream, 1)[0]] == [9]
    stream.close()
    # `last` counts only records that pass; without a filter all of them.
    stream = SseStream(api.url, open_session(api, filled, "odd", last=2))
    assert [record["$seq"] for record in records(stream, 2)[0]] == [7, 9]
    stream.close()
    stream = SseStream(api.url, open_session(api, filled, None, last=2))
    assert [record["$seq"] for record in records(stream, 2)[0]] == [9, 10]
    stream.close()


def test_a_session_keeps_its_filter_and_its_place_over_restarts_and_kills(own: NewServer) -> None:
    server = own()
    api = server.start()
    good(api.append("jobs", [{"data": n, "tag": ("even", "odd")[n % 2]} for n in range(1, 7)]))
    url = open_session(api, "jobs", ["Not", "even"])
    stream = SseStream(api.url, url)
    found, last_id = records(stream, 3)
    assert [record["$seq"] for record in found] == [1, 3, 5]
    stream.close()
    for number, stop in ((7, server.crash), (9, server.restart), (11, server.crash)):
        good(api.append("jobs", [{"data": number, "tag": "odd"}, {"data": 0, "tag": "even"}]))
        api = stop()
        good(api.append("jobs", [{"data": 0, "tag": "even"}]))
        stream = SseStream(api.url, url, (ACCEPT, f"Last-Event-ID: {last_id}"))
        found, last_id = records(stream, 1)
        assert [record["data"] for record in found] == [number]
        while stream.event().name != "caught-up":
            pass
        stream.close()


def test_a_filter_that_is_stored_is_short(api: Api, filled: str) -> None:
    tags = [f"{number:03}{'x' * 200}" for number in range(100)]
    body = {"topics": {filled: {}}, "filter": ["tag", "In", tags]}
    error = refused(api.http.post("/v0/watch", json=body), 400, "invalid_request")
    assert error["field"] == "filter"
    # A read stores no filter.
    good(api.http.post(f"/v0/topics/{filled}/diff", json={"filter": body["filter"]}))


def test_a_stream_of_a_session_moves_it_past_records_that_do_not_pass(
    api: Api, filled: str
) -> None:
    streams = gauges(api)[0]
    url = open_session(api, filled, "odd")
    stream = SseStream(api.url, url)
    records(stream, 3)
    while stream.event().name != "caught-up":
        pass
    for _ in range(3):
        good(api.append(filled, [{"data": 0, "tag": "even"}, {"data": 0}]))
    good(api.append(filled, [{"data": 7, "tag": "odd"}]))
    found, _ = records(stream, 1)
    assert [record["$seq"] for record in found] == [13]
    good(api.append(filled, [{"data": 0}]))
    stream.close()
    eventually(lambda: gauges(api)[0] <= streams, "the stream is over")
    # Without an id the session's own position counts.
    good(api.append(filled, [{"data": 8, "tag": "odd"}]))
    again = SseStream(api.url, url)
    event = again.event()
    assert event.name == "record"
    told = json.loads(event.data)
    assert told["from_seq"] >= 13
    assert [record["$seq"] for record in told["records"]] == [15]
    again.close()


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
        # A later read without a filter returns all records again.
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
