"""§7.3, §7.5, §7.6, §7.7: the bytes of the event stream: head, frames, ids, heartbeats, its
ends.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, eventually, good, refused
from tests.contract.streams.streams import (
    Comment,
    Event,
    SseParser,
    StreamEnded,
    gauges,
    more_than,
    nothing_left,
)
from tests.contract.watch.subscriptions import (
    CaughtUp,
    Clients,
    Records,
    Topics,
    Trouble,
    id_of,
    map_of,
)

Names = Callable[[str], str]


def test_the_head_is_exactly_this(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7.3 [7.3-01, 7.1-07, 7-02, 9-03]"""
    api.put(topic)
    stream = clients.session(api, {topic: {}}).stream(api).stream
    assert stream.head.split(b"\r\n")[0] == b"HTTP/1.1 200 OK"
    named = [line.split(":")[0].lower() for line in stream.header_lines]
    assert len(named) == len(set(named)), f"a header comes twice: {named}"
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-store"
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["connection"].lower() == "keep-alive"
    assert stream.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in stream.headers
    assert "content-encoding" not in stream.headers


def test_the_bytes_of_a_stream_are_exactly_these(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7.5 [7.5-01, 7.5-02, 7.5-03, 7.4-01]"""
    # The test sends text, because libraries print a dict differently and the bytes must come back
    # unchanged.
    sent = b'{"records":[{"data":{"a":1},"tag":"t","node":"n","meta":{"m":1}},{"data":2}]}'
    added = api.raw("POST", f"/v0/topics/{topic}", sent, ["Content-Type: application/json"])
    assert added.status == 201
    first, second = (record["$ts"] for record in api.read_all(topic))
    follower = clients.session(api, {topic: {}}, include_tags=True).stream(api)
    follower.drained()
    id_ = id_of({topic: 2})
    assert (
        bytes(follower.stream.body)
        == (
            "retry: 2000\n\n"
            f"id: {id_}\nevent: record\n"
            f'data: {{"topic":"{topic}","records":['
            f'{{"$seq":1,"$ts":{first},"$node":"n","$tag":"t","data":{{"a":1}},"meta":{{"m":1}}}},'
            f'{{"$seq":2,"$ts":{second},"data":2}}],"from_seq":0,"to_seq":2,"head_seq":2}}\n\n'
            f'id: {id_}\nevent: caught-up\ndata: {{"topic":"{topic}","head_seq":2}}\n\n'
        ).encode()
    )


def test_tombstone_and_topic_deleted_are_exactly_these(
    api: Api, topic: str, clients: Clients
) -> None:
    """Contract §7.5 [7.5-04, 7.5-08, 7.4-01]"""
    api.put(topic, {"cap_records": 1})
    for number in range(3):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["earliest_seq"] == 3), "two are evicted")
    follower = clients.session(api, {topic: {}}).stream(api)
    follower.drained()
    api.drop(topic)
    follower.frame()
    body = bytes(follower.stream.body).decode()
    assert body.startswith(
        f"retry: 2000\n\nid: {id_of({topic: 2})}\nevent: tombstone\n"
        f'data: {{"topic":"{topic}","reason":"from_seq_too_old","gap_from":1,"gap_to":2,'
        '"earliest_seq":3,"head_seq":3}\n\n'
    )
    assert body.endswith(
        f"id: {id_of({topic: 3})}\nevent: topic-deleted\n"
        f'data: {{"topic":"{topic}","head_seq":3,"reason":"deleted"}}\n\n'
    )


def test_retry_is_sent_once_and_first(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7.5 [7.5-01]"""
    api.put(topic)
    session = clients.session(api, {topic: {}})
    for number in range(3):
        follower = session.stream(api)
        follower.frame()
        api.add(topic, number)
        follower.reads(topic, number + 1)
        assert [retry.ms for retry in follower.stream.retries] == [2000]
        assert follower.stream.body.startswith(b"retry: 2000\n\n")
        follower.close()


def test_line_ends_inside_a_value_never_break_a_frame(
    api: Api, topic: str, clients: Clients
) -> None:
    """§7.5, settled rules: each line of the value is a data line. [7.5-10, S-01]"""
    value = b'{\n"id": 1,\r\n"event":\r"x",\n\n"data": [\r\r]\n}'
    body = b'{"records":[{"data":' + value + b',"meta":{\n"a":\n1}}]}'
    assert api.raw("POST", f"/v0/topics/{topic}", body, ["Content-Type: application/json"]).status
    follower = clients.session(api, {topic: {}}).stream(api)
    page, _ = follower.drained()
    assert isinstance(page, Records)
    assert page.records[0]["data"] == {"id": 1, "event": "x", "data": []}
    assert b"\r" not in follower.stream.body
    text = value.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert b'"data":' + text + b',"meta":{\n"a":\n1}}' in page.text
    lines = [line for line in bytes(follower.stream.body).split(b"\n") if line]
    assert {line.split(b":")[0] for line in lines} == {b"retry", b"id", b"event", b"data"}


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n"])
def test_each_kind_of_line_end_alone(api: Api, topic: str, clients: Clients, end: bytes) -> None:
    """§7.5: no kind of line end inside a value ends the frame. [7.5-10]"""
    body = b'{"records":[{"data":[%b1,%b2]}]}' % (end, end)
    assert api.raw("POST", f"/v0/topics/{topic}", body, ["Content-Type: application/json"]).status
    follower = clients.session(api, {topic: {}}).stream(api)
    page, _ = follower.drained()
    assert isinstance(page, Records)
    assert b'"data":[\n1,\n2]}' in page.text
    assert b"\r" not in follower.stream.body


def test_the_id_is_every_position_after_the_frame(api: Api, names: Names, clients: Clients) -> None:
    """§7.4: the id has the positions of all topics of the session, in the session's order. [7.4-01,
    7.4-02, 0.7-05]
    """
    first, second, third = names("i"), names("i"), names("i")
    api.add(first, *range(5))
    api.add(second, *range(3))
    api.put(third)
    topics = {second: {}, third: {"from_seq": 0}, first: {"from_seq": 2}}
    follower = clients.session(api, topics, limit=2).stream(api)
    follower.drained()
    for id_ in follower.ids:
        positions = map_of(id_)
        assert positions is not None
        assert list(positions) == [second, third, first]
        assert "=" not in id_
    assert map_of(follower.ids[-1]) == {second: 3, third: 0, first: 5}
    api.add(third, "x")
    follower.reads(third, 1)
    assert map_of(follower.ids[-1]) == {second: 3, third: 1, first: 5}
    # Each position only grows, and each frame moves its own.
    maps = [map_of(id_) or {} for id_ in follower.ids]
    for before, after in itertools.pairwise(maps):
        assert all(after[name] >= before[name] for name in before)


def test_own_records_move_the_id_in_silence(api: Api, names: Names, clients: Clients) -> None:
    """§7.4: the id passes records that the node filter hid, and they are never read again. [7.4-01,
    7.2-02]
    """
    own, other = names("own"), names("other")
    api.append(own, [{"data": n, "node": "me"} for n in range(9)])
    api.put(other)
    follower = clients.session(api, {own: {}, other: {}}, node="me").stream(api)
    follower.drained()
    api.add(other, 1)
    follower.reads(other, 1)
    assert map_of(follower.ids[-1]) == {own: 9, other: 1}


def test_every_frame_is_flushed_at_once(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7.3 [7.3-02]"""
    api.put(topic)
    follower = clients.session(api, {topic: {}}, heartbeat_ms=60_000).stream(api)
    follower.drained()
    took_s = []
    for number in range(1, 21):
        api.add(topic, number)
        started = time.monotonic()
        follower.reads(topic, number)
        took_s.append(time.monotonic() - started)
    assert sorted(took_s)[10] < 0.1
    assert max(took_s) < 2


# --- heartbeats -----------------------------------------------------------------------------------


def test_an_idle_stream_beats_and_data_suppresses_it(
    api: Api, names: Names, clients: Clients
) -> None:
    """Contract §7.5, §7.6, settled rules [7.5-07, S-51, 7.2-07]"""
    idle, busy = names("idle"), names("busy")
    api.put(idle)
    api.put(busy)
    quiet = clients.session(api, {idle: {}}, heartbeat_ms=1000).stream(api)
    fed = clients.session(api, {busy: {}}, heartbeat_ms=1000).stream(api)
    quiet.drained()
    fed.drained()
    started = time.monotonic()
    stamp = 0
    for number in range(1, 9):
        api.add(busy, number)
        fed.reads(busy, number)
        stamp = fed.seen[busy][-1]["$ts"]
        quiet.stream.wait(0.3)
    assert time.monotonic() - started > 2.3
    assert fed.stream.comments == [], "data went out in each window"
    beats = quiet.stream.comments
    assert 1 <= len(beats) <= 3
    assert re.fullmatch(r" hb \d{13}", beats[0].text)
    assert abs(int(beats[-1].text.split()[1]) - stamp) < 3000
    assert f":{beats[0].text}\n\n".encode() in quiet.stream.body
    assert quiet.ids == [id_of({idle: 0})], "a heartbeat has no id"
    quiet.stream.comment(2)
    gaps_s = [b.at_s - a.at_s for a, b in itertools.pairwise(beats)]
    assert all(0.7 <= gap_s <= 2.5 for gap_s in gaps_s), gaps_s
    fed.stream.comment(0, within_s=4)
    api.add(idle, 1)
    quiet.reads(idle, 1)


# --- above 64 topics ------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "width"), [(65, 0), (30, 120)])
def test_a_long_id_is_a_token_that_resumes_by_itself(
    api: Api, topic: str, clients: Clients, count: int, width: int
) -> None:
    """§7.4, settled rules: above 64 topics, or 2 KiB of id. [S-67, 7.4-02, S-66, 0.7-05, 7.7-01]"""
    many = [f"{topic}.{number}".ljust(width, "x") for number in range(count)]
    for number, name in enumerate(many):
        api.add(name, *range(number % 4 + 1))
    topics: Topics = {name: {} for name in many}
    follower = clients.session(api, topics, limit=1).stream(api)
    follower.until(lambda _: len(follower.ids) == 40)
    token = follower.ids[-1]
    assert map_of(token) is None, "a token, no map"
    assert re.fullmatch(r"[A-Za-z0-9._~-]+", token)
    read = {name: list(follower.seqs(name)) for name in many}
    follower.close()

    session = clients.session(api, topics, cursor=token)
    answered = session.answer["topics"]
    assert {n: answered[n]["from_seq"] for n in many} == {n: len(read[n]) for n in many}
    rest = session.stream(api)
    rest.drained()
    for number, name in enumerate(many):
        assert read[name] + rest.seqs(name) == list(range(1, number % 4 + 2))
    # The same token takes this session back to its start.
    again = session.stream(api, token)
    again.drained()
    for name in many:
        assert again.seqs(name) == rest.seqs(name)
        api.drop(name)


def test_64_short_names_are_still_a_map(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7.4 [7.4-02, S-67]"""
    short = [f"{topic[-6:].strip('-')}.{number}" for number in range(64)]
    for name in short:
        api.put(name)
    follower = clients.session(api, {name: {} for name in short}).stream(api)
    follower.frame()
    assert map_of(follower.ids[0]) == dict.fromkeys(short, 0)
    for name in short:
        api.drop(name)


# --- establishment and ends -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "accept",
    [
        None,
        "*/*",
        "text/*",
        "text/event-stream",
        "TEXT/Event-Stream",
        "text/event-stream;q=0.1",
        "text/event-stream; charset=utf-8",
        "application/json, text/event-stream",
        "text/html, */*;q=0.1",
        "text/plain;q=0, text/event-stream",
        " text/event-stream ",
    ],
)
def test_these_accept_a_stream(api: Api, topic: str, clients: Clients, accept: str | None) -> None:
    """Contract §7.7, settled rules [S-57]"""
    api.put(topic)
    stream = clients.session(api, {topic: {}}).stream(api, accept=accept)
    assert stream.frame() == CaughtUp(topic, 0)


@pytest.mark.parametrize(
    "accept",
    [
        "application/json",
        "text/html",
        "text/event-stream;q=0",
        "*/*;q=0",
        "text/*;q=0.0",
        "text/event-stream;q=0, */*",
        "text/eventstream",
        "application/*",
        "image/png, text/plain",
    ],
)
def test_these_exclude_a_stream(api: Api, topic: str, clients: Clients, accept: str) -> None:
    """Contract §0.6, §7.7 [0.6-06, 7.7-04]"""
    api.put(topic)
    before = gauges(api)[0]
    url = clients.session(api, {topic: {}}).answer["stream_url"]
    stream = clients.get(api, url, accept=accept)
    refused(stream.refusal(), 406, "not_acceptable")
    assert gauges(api)[0] == before
    # The session is unharmed.
    assert clients.get(api, url).event().name == "caught-up"


def test_a_second_stream_takes_the_session_over(api: Api, topic: str, clients: Clients) -> None:
    """The older stream gets an error and ends; nothing is lost or doubled. [S-19, 7.5-09]"""
    api.add(topic, *range(5))
    before = gauges(api)[0]
    session = clients.session(api, {topic: {}})
    older = session.stream(api)
    older.drained()
    newer = session.stream(api)
    last = older.rest(within_s=5)
    assert len(last) == 1
    assert isinstance(last[0], Trouble)
    assert last[0].code == 409
    assert isinstance(last[0].fields["error"], str)
    assert older.stream.is_whole, "the response ended, it did not break"
    assert newer.frame() == CaughtUp(topic, 5)
    api.add(topic, "new")
    newer.reads(topic, 6)
    assert newer.seqs(topic) == [6]
    eventually(lambda: gauges(api)[0] == before + 1, "one stream is left")


def test_many_take_overs_leave_one_stream(api: Api, topic: str, clients: Clients) -> None:
    """Settled rules of the contract [S-19, 8.3-06]"""
    api.put(topic)
    before = gauges(api)[0]
    session = clients.session(api, {topic: {}})
    followers = [session.stream(api) for _ in range(10)]
    for follower in followers[:-1]:
        assert isinstance(follower.rest(within_s=5)[-1], Trouble)
    api.add(topic, 1)
    followers[-1].reads(topic, 1)
    eventually(lambda: gauges(api)[0] == before + 1, "one stream is left")
    followers[-1].close()
    eventually(lambda: gauges(api)[0] == before, "none is left")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_a_stream_accepts_only_get(api: Api, topic: str, clients: Clients, method: str) -> None:
    """Contract §0.6, §7.3 [0.6-05]"""
    api.put(topic)
    before = gauges(api)
    url = clients.session(api, {topic: {}}).answer["stream_url"]
    answer = api.raw(method, url, b"{}" if method[0] == "P" else b"")
    refused(answer, 405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]
    assert more_than(api, before, sessions=1)


def test_a_head_of_a_stream_opens_none(api: Api, topic: str, clients: Clients) -> None:
    """§0.6, §7.3: a head like that of a GET, or 405; open streams continue. [7.3-01, S-19]"""
    api.put(topic)
    session = clients.session(api, {topic: {}})
    follower = session.stream(api)
    follower.drained()
    before = gauges(api)
    answer = api.raw("HEAD", session.answer["stream_url"])
    assert answer.body == b""
    assert answer.status in (200, 405)
    if answer.status == 200:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    nothing_left(api, before)
    api.add(topic, 1)
    follower.reads(topic, 1)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_a_session_accepts_only_post(api: Api, method: str) -> None:
    """Contract §0.6, §7.2 [0.6-05]"""
    answer = api.raw(method, "/v0/watch", b"{}" if method[0] == "P" else b"")
    refused(answer, 405, "method_not_allowed")
    assert "POST" in answer.headers["allow"]


def test_streams_and_sockets_are_capped_and_the_end_of_one_makes_room(
    own: NewServer, topic: str, clients: Clients
) -> None:
    """Contract §7.7, §7-ws, §11 [7.7-05, 7-ws-03, 11-05, 11-12, 11-15, 8.3-06]"""
    api = own(TOPICS_MAX_SSE_CONNECTIONS="2").start()
    api.put(topic)
    session = clients.session(api, {topic: {}})
    first = session.stream(api)
    socket = clients.ws(api)
    assert gauges(api)[0] == 2
    other = clients.session(api, {topic: {}})
    answer = clients.get(api, other.answer["stream_url"])
    detail = refused(answer.refusal(), 429, "throttled")
    assert (detail["limit"], detail["max"]) == ("max_sse_connections", 2)
    assert int(answer.headers["retry-after"]) >= 1
    raw = api.raw(
        "GET",
        "/v0/ws",
        headers=[
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        ],
    )
    assert refused(raw, 429, "throttled")["limit"] == "max_sse_connections"
    # A take-over needs no free slot.
    taken_over, first = first, session.stream(api)
    assert isinstance(taken_over.rest(within_s=5)[-1], Trouble)
    assert gauges(api)[0] == 2
    # Requests that are no streams are accepted.
    good(api.state(topic))
    first.close()
    eventually(lambda: gauges(api)[0] == 1, "the stream is gone")
    second = other.stream(api)
    second.frame()
    socket.close()
    eventually(lambda: gauges(api)[0] == 1, "the socket is gone")
    third = clients.ws(api)
    assert third.ask(op="ping")["op"] == "pong"


def test_an_unknown_wid_is_404(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7.7, settled rules [7.7-03, S-36]"""
    api.put(topic)
    wid = clients.session(api, {topic: {}}).wid
    last = "A" if wid[-1] != "A" else "Q"
    for other in (
        wid[:-1] + last,
        wid + "A",
        wid[:-1],
        wid.upper(),
        wid[4:],
        "x",
        "wid_",
        "wid_%00",
    ):
        answer = clients.get(api, f"/v0/watch/{other}")
        refused(answer.refusal(), 404, "not_found")


def test_the_parser_of_these_tests_follows_the_standard() -> None:
    """The client side must follow the standard too, because a lenient parser would hide a broken
    frame. [7.5-01]
    """
    stream = (
        b"\xef\xbb\xbf: note\r\nretry: 5\r\rid: 1\nevent:  two\ndata:a\rdata: b\r\ndata\n\n"
        b"id\n\ndata\n\nevent: gone\n\n:x\nid: \0\nother: 1\ndata: {}\n\ndata: unfinished\n"
    )
    for size in (1, 2, 3, 7, 1000):
        parser = SseParser()
        found = [
            item
            for start in range(0, len(stream), size)
            for item in parser.feed(stream[start : start + size])
        ]
        events = [(e.name, e.data, e.id) for e in found if isinstance(e, Event)]
        assert events == [
            (" two", "a\nb\n", "1"),
            ("message", "", None),
            ("message", "{}", None),
        ], size
        assert [c.text for c in found if isinstance(c, Comment)] == [" note", "x"]


def test_a_stream_reads_to_its_end(api: Api, topic: str, clients: Clients) -> None:
    """§7.7: an ended stream differs from an idle one. [S-19]"""
    api.put(topic)
    session = clients.session(api, {topic: {}})
    older = session.stream(api)
    session.stream(api)
    older.rest()
    with pytest.raises(StreamEnded):
        older.stream.event(0.1)
    assert json.loads(bytes(older.stream.body).decode().split("data: ")[-1])["code"] == 409
