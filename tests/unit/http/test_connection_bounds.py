"""Connection timeouts, and the limits beyond which a connection reads no more."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from tests.unit.api.test_direct import APPEND, JSON, Side, request
from tests.unit.http.exchange.test_joined_writes import turns
from topics_server.http import connection
from topics_server.http.connection import HttpConnection
from topics_server.http.read_scheduler import ReadScheduler
from topics_server.http.request_head import Bounds
from topics_server.http.timeouts import ConnectionTimeouts, TimeoutSettings
from topics_server.values.limits import KIB

pytestmark = pytest.mark.anyio

WAITS = TimeoutSettings(
    header_s=10, body_s=30, keep_alive_s=75, write_s=20, linger_s=3, body_bytes_min=100
)
GET = b"GET /v0/health HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD = b"POST /v0/topics/t HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"


class Clock:
    """The loop, with a clock of the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)


async def connected(**settings: Any) -> tuple[Any, Any, Clock]:
    """A connection to an engine of lists, its wire and its clock."""
    side = Side(HttpConnection, **settings)
    await side.create()
    side.state.timeouts = ConnectionTimeouts(limits=WAITS)
    side.state.read_scheduler = ReadScheduler()
    clock = Clock()
    protocol: Any = HttpConnection(config=side.config, server_state=side.uvicorn, app_state={})
    protocol.loop = clock
    wire = type(side.wire)()
    protocol.connection_made(wire)
    return protocol, wire, clock


def after(protocol: Any, clock: Clock, seconds: float) -> str | None:
    """The overdue connections after this many further seconds, checked each second as `timeouts`
    does.
    """
    kind = None
    for _ in range(int(seconds)):
        clock.now += 1
        kind = protocol.overdue(clock.now, WAITS)
        if kind is not None:
            break
    return kind


def told(wire: Any) -> tuple[int, str]:
    """Status and code of the only answer."""
    head, _, body = b"".join(wire.pieces).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def test_a_connection_that_never_sends_is_closed() -> None:
    protocol, wire, clock = await connected()
    assert after(protocol, clock, 10) is None
    assert after(protocol, clock, 1) == "header"
    protocol.time_out("header")
    assert wire.closing
    assert not wire.pieces
    protocol.connection_lost(None)


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    protocol, wire, clock = await connected()
    clock.now += 5
    protocol.data_received(GET)
    await turns()
    assert after(protocol, clock, 75) is None
    protocol.data_received(GET)
    await turns()
    assert after(protocol, clock, 75) is None
    assert after(protocol, clock, 1) == "idle"
    protocol.time_out("idle")
    assert wire.closing
    protocol.connection_lost(None)


@pytest.mark.parametrize("every_s", [1, 9])
async def test_a_head_has_its_time_however_steadily_it_comes(every_s: int) -> None:
    protocol, wire, clock = await connected()
    protocol.data_received(b"GET /v0/health HTTP/1.1\r\n")
    kind = None
    for number in range(40):
        kind = after(protocol, clock, every_s)
        if kind is not None:
            break
        protocol.data_received(b"x-%d: y\r\n" % number)
    assert kind == "header"
    assert clock.now <= 1000 + 11
    protocol.time_out(kind)
    assert told(wire) == (408, "request_timeout")
    assert wire.ended
    protocol.connection_lost(None)


async def test_a_body_has_to_get_on() -> None:
    protocol, wire, clock = await connected()
    protocol.data_received(HEAD % (JSON, 10_000) + b"{")
    await turns()
    for _ in range(9):
        protocol.data_received(b" " * 200)
        await turns()
        assert after(protocol, clock, 25) is None
    assert after(protocol, clock, 60) == "body"
    protocol.time_out("body")
    await turns()
    assert told(wire) == (408, "request_timeout")
    protocol.data_received(b" " * 10_000)
    await turns()
    assert len(wire.pieces) == 1
    protocol.connection_lost(None)


@pytest.mark.parametrize(("sent", "expected"), [(10, ("body", 50)), (50, (None, 300))])
async def test_waiting_for_its_turn_saves_no_slow_body(
    sent: int, expected: tuple[str | None, int]
) -> None:
    """In an earlier build each check during a wait restarted the time-out: of hundreds of large
    uploads that sent a byte from time to time, hardly one was ended.
    """
    protocol, _, clock = await connected()
    protocol.data_received(HEAD % (JSON, 10_000) + b"{")
    await turns()
    protocol.flow.end_turn()
    kind, lasted = None, 0
    while kind is None and lasted < 300:
        protocol.flow.begin_turn()
        protocol.data_received(b" " * sent)
        protocol.flow.end_turn()
        kind = after(protocol, clock, 10)
        lasted += 10
    assert (kind, lasted) == expected
    if kind is None:
        # Without a turn to read, the server cannot tell whether the client sends.
        assert after(protocol, clock, 1000) is None
    protocol.connection_lost(None)


async def test_a_request_behind_one_that_is_being_answered_is_not_timed() -> None:
    protocol, wire, clock = await connected()
    body = b'{"from_seq":1,"wait_ms":30000}'
    head = HEAD.replace(b"/t ", b"/t/diff ")
    protocol.data_received(head % (JSON, len(body)) + body + GET[:20])
    await turns()
    assert after(protocol, clock, 100) is None
    assert not wire.pieces
    protocol.connection_lost(None)
    await turns()


async def test_an_answer_that_is_not_read_is_given_up() -> None:
    protocol, wire, clock = await connected()
    protocol.data_received(GET)
    await turns()
    wire.unsent = 5000
    assert after(protocol, clock, 15) is None
    wire.unsent = 4000
    assert after(protocol, clock, 20) is None, "some of it was read"
    assert after(protocol, clock, 2) == "write"
    protocol.time_out("write")
    assert wire.aborted
    protocol.connection_lost(None)


async def test_one_that_closes_and_is_not_read_is_given_up_too() -> None:
    protocol, wire, clock = await connected()
    protocol.data_received(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    await turns()
    assert wire.closing
    wire.unsent = 5000
    assert after(protocol, clock, 30) == "write"
    protocol.connection_lost(None)


async def test_a_refused_request_is_released() -> None:
    protocol, wire, clock = await connected()
    protocol.data_received(b"garbage\r\n\r\n")
    assert told(wire) == (400, "invalid_request")
    assert wire.ended
    assert not wire.closing
    assert after(protocol, clock, 3) is None
    assert after(protocol, clock, 1) == "linger"
    protocol.time_out("linger")
    assert wire.aborted
    protocol.connection_lost(None)


async def test_a_refused_client_that_keeps_sending_is_disconnected() -> None:
    protocol, wire, _ = await connected()
    protocol.data_received(b"garbage\r\n\r\n")
    protocol.data_received(b" " * 200 * KIB)
    assert not wire.aborted
    protocol.data_received(b" " * 100 * KIB)
    assert wire.aborted
    protocol.connection_lost(None)


async def test_a_body_that_is_all_framing_is_refused() -> None:
    protocol, wire, _ = await connected()
    protocol.data_received(
        b"POST /v0/topics/t HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: chunked\r\n\r\n" % JSON
    )
    for _ in range(200):
        protocol.data_received(b"1;" + b"a" * 1000 + b"\r\n \r\n")
        await turns(2)
        if wire.pieces:
            break
    assert told(wire) == (400, "invalid_request")
    protocol.connection_lost(None)


SMALL: bytes = b'{"records":[{"data":"%b"}]}' % (b"x" * 6000)
CHUNKED = b"POST /v0/topics/t HTTP/1.1\r\nhost: x\r\n%b%b: chunked\r\n\r\n"


def in_chunks(body: bytes, size: int) -> bytes:
    """A body in chunks of this many bytes, with the last one."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "received",
    [
        [CHUNKED % (JSON, b"transfer-encoding") + in_chunks(SMALL, 1)],
        [CHUNKED % (JSON, b"TRANSFER-encoding"), in_chunks(SMALL, 1)],
        # In the middle of a head, and after another request.
        [
            b"POST /v0/topics/t HTT",
            (CHUNKED % (JSON, b"Transfer-Encoding"))[21:] + in_chunks(SMALL, 2),
        ],
        [GET + CHUNKED % (JSON, b"transfer-encoding") + in_chunks(SMALL, 1)],
        [
            (HEAD % (JSON, len(SMALL)))[:-1],
            b"\n" + SMALL + CHUNKED % (JSON, b"transfer-encoding") + in_chunks(SMALL, 1),
        ],
    ],
)
async def test_small_chunks_are_parsed_in_many_turns(
    monkeypatch: pytest.MonkeyPatch, received: list[bytes]
) -> None:
    """Each chunk costs a callback: 40,000 in 256 KiB of received bytes. Other work runs in
    between.
    """
    protocol, wire, _ = await connected()
    clock = [0.0]

    def monotonic_ms() -> float:
        clock[0] += 0.6
        return clock[0]

    monkeypatch.setattr(connection, "monotonic_ms", monotonic_ms)
    paused: list[bool] = []
    monkeypatch.setattr(wire, "pause_reading", lambda: paused.append(True))
    monkeypatch.setattr(wire, "resume_reading", lambda: paused.append(False))
    for piece in received:
        protocol.data_received(piece)
    assert protocol.read_scheduler.held_bytes > 2 * len(SMALL)
    assert paused[-1:] == [True], "the rest waits in the kernel"
    while protocol.read_scheduler.held_bytes:
        await turns(1)
    await turns(600)
    assert paused[-1:] == [False]
    answers = b"".join(wire.pieces)
    assert answers.count(b"HTTP/1.1 200 ") == len(re.findall(rb"HTTP/1.1\r", b"".join(received)))
    protocol.connection_lost(None)


async def test_small_chunks_before_the_end_of_a_connection_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protocol, wire, _ = await connected()
    monkeypatch.setattr(connection, "monotonic_ms", iter(range(100_000)).__next__)
    protocol.data_received(CHUNKED % (JSON, b"transfer-encoding") + in_chunks(SMALL, 1))
    assert protocol.read_scheduler.held_bytes
    protocol.eof_received()
    assert not protocol.read_scheduler.held_bytes
    await turns(600)
    assert b"".join(wire.pieces).startswith(b"HTTP/1.1 200 ")
    protocol.connection_lost(None)


async def test_a_refusal_in_the_middle_of_small_chunks_lets_read_what_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protocol, wire, _ = await connected()
    monkeypatch.setattr(connection, "monotonic_ms", iter(range(100_000)).__next__)
    sent = CHUNKED % (JSON, b"transfer-encoding") + in_chunks(SMALL, 1)[:-5] + b"what\r\n\r\n"
    protocol.data_received(sent)
    assert protocol.flow.is_behind
    await turns(600)
    assert told(wire) == (400, "invalid_request")
    assert not protocol.flow.is_behind
    protocol.connection_lost(None)


async def test_trailers_without_an_end_are_refused() -> None:
    protocol, wire, _ = await connected()
    protocol.data_received(
        b"POST /v0/topics/t HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: chunked\r\n\r\n0\r\n" % JSON
    )
    for _ in range(200):
        protocol.data_received(b"a: " + b"b" * 1000 + b"\r\n")
        if wire.pieces:
            break
    assert told(wire) == (400, "invalid_request")
    protocol.connection_lost(None)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("more", "status", "limit"),
    [
        (b"a" * 1000, 414, "max_url_bytes"),
        (b" HTTP/1.1\r\nhost: x\r\na: " + b"b" * 3000, 431, "max_header_bytes"),
        (b" HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20, 431, "max_headers"),
        (
            b" HTTP/1.1\r\nhost: x" + b"".join(b"\r\na%d:" % n for n in range(20)),
            431,
            "max_headers",
        ),
    ],
)
async def test_the_bounds_of_a_head(cut: bool, more: bytes, status: int, limit: str) -> None:
    protocol, wire, _ = await connected()
    protocol.bounds = Bounds(url_bytes=500, header_count=16, header_bytes=2000)
    raw = b"GET /v0/health?" + more
    raw += b" HTTP/1.1\r\nhost: x\r\n\r\n" if status == 414 else b"\r\n\r\n"
    for start in range(0, len(raw), 7 if cut else len(raw)):
        protocol.data_received(raw[start : start + (7 if cut else len(raw))])
    answer = b"".join(wire.pieces)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'"limit":"%b"' % limit.encode() in answer
    protocol.connection_lost(None)


async def test_a_head_at_its_bounds_is_taken() -> None:
    protocol, wire, _ = await connected()
    protocol.bounds = Bounds(url_bytes=50, header_count=3, header_bytes=50)
    url = b"/v0/health?".ljust(50, b"a")
    # host: x\r\n is 9, a: b\r\n is 6 bytes.
    protocol.data_received(
        b"GET %b HTTP/1.1\r\nhost: x\r\na: b\r\nc: %b\r\n\r\n" % (url, b"d" * 30)
    )
    await turns()
    assert b"".join(wire.pieces).startswith(b"HTTP/1.1 200 ")
    protocol.connection_lost(None)


async def test_requests_in_a_row_are_bounded() -> None:
    protocol, wire, _ = await connected()
    protocol.data_received(GET * 129)
    await turns(600)
    assert b"".join(wire.pieces).count(b"HTTP/1.1 200 ") == 129
    protocol.data_received(GET * 140)
    await turns(600)
    answers = b"".join(wire.pieces)
    assert answers.count(b"HTTP/1.1 200 ") == 129 + 129
    assert answers.count(b"HTTP/1.1 429 ") == 1
    assert b'"limit":"pipelined","max":128' in answers.rpartition(b"\r\n\r\n")[2]
    assert wire.ended
    protocol.connection_lost(None)


async def test_a_short_body_behind_its_refusal_keeps_the_connection() -> None:
    protocol, wire, _ = await connected()
    body = b"x" * 2000
    protocol.data_received(b"POST /v0/no HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n")
    await turns()
    assert b"".join(wire.pieces).startswith(b"HTTP/1.1 404 ")
    protocol.data_received(body + request(APPEND))
    await turns()
    assert b"".join(wire.pieces).count(b"HTTP/1.1 200 ") == 1
    assert not wire.ended
    protocol.connection_lost(None)


async def test_a_long_body_behind_its_refusal_ends_the_connection() -> None:
    protocol, wire, clock = await connected()
    protocol.data_received(HEAD % (JSON, 10**9))
    await turns()
    assert told(wire) == (413, "payload_too_large")
    assert wire.ended
    assert after(protocol, clock, 10) == "linger"
    protocol.connection_lost(None)


async def test_connections_over_the_cap_make_the_idle_leave_or_are_refused() -> None:
    side = Side(HttpConnection)
    side.uvicorn.connections.clear()
    side.state.timeouts = timeouts = ConnectionTimeouts(most=4)
    held = []
    for _ in range(4):
        protocol, wire = side.connect()
        protocol.data_received(GET[:20])
        held.append((protocol, wire))
    _, wire = side.connect()
    assert told(wire) == (429, "throttled")
    assert b"\r\nretry-after: 1\r\n" in wire.pieces[0]
    assert wire.closing
    assert timeouts.refused == 1
    side.uvicorn.connections = {protocol for protocol, _ in held}
    held[1][0].data_received(GET[20:])
    await turns()
    held[1][0].connections = held[0][0].connections = side.uvicorn.connections
    timeouts._evicted_at = -1.0
    protocol, wire = side.connect()
    assert not wire.pieces
    assert timeouts.evicted == 1
    assert [w.closing for _, w in held] == [False, True, False, False]
    for each, _ in held:
        each.connection_lost(None)
    protocol.connection_lost(None)


async def test_nothing_is_begun_for_a_client_that_does_not_read() -> None:
    protocol, wire, _ = await connected()
    protocol.pause_writing()
    protocol.data_received(GET + GET)
    await turns()
    assert not wire.pieces
    protocol.resume_writing()
    await turns(20)
    assert b"".join(wire.pieces).count(b"HTTP/1.1 200 ") == 2
    protocol.pause_writing()
    protocol.data_received(GET)
    protocol.connection_lost(None)
    assert not protocol.pipeline


async def test_of_all_that_is_not_read_the_oldest_goes() -> None:
    side = Side(HttpConnection)
    timeouts = side.state.timeouts
    held = []
    for size in (100, 120, 30, 10):
        protocol, wire = side.connect()
        wire.unsent = size * 2**20
        protocol.pause_writing()
        held.append((protocol, wire))
    assert [wire.aborted for _, wire in held] == [True, False, False, False]
    assert timeouts.unread_bytes == 160 * 2**20
    assert timeouts.timeouts["write"] == 1
    held[1][0].resume_writing()
    assert timeouts.unread_bytes == 40 * 2**20
    for protocol, _ in held:
        protocol.connection_lost(None)
    assert timeouts.unread_bytes == 0


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["quick form", "general way"])
async def test_a_large_answer_counts_whole_while_its_last_bytes_are_not_read(
    is_pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Side(HttpConnection)
    for _ in range(3):
        await side.rig.append("t", "x" * 100_000)
    timeouts = side.state.timeouts
    ask = request(b"{}", b"/v0/topics/t/diff")

    def takes_nearly_all(pieces: tuple[bytes, ...]) -> None:
        side.wire.unsent = 70_000
        side.protocol.pause_writing()
        side.wire.pieces.append(b"".join(pieces))

    monkeypatch.setattr(side.wire, "writelines", takes_nearly_all)
    side.protocol.data_received(GET + ask if is_pipelined else ask)
    await turns(20)
    assert len(side.wire.pieces[-1]) > 300_000
    assert timeouts.unread_bytes == pytest.approx(300_000, rel=0.01)
    side.protocol.resume_writing()
    assert timeouts.unread_bytes == 0
    # A partly sent answer counts with the bytes that are left.
    side.wire.unsent = 80_000
    side.protocol.pause_writing()
    assert timeouts.unread_bytes == 80_000
    side.protocol.connection_lost(None)


@pytest.mark.parametrize(
    ("open_now", "header_s", "every_s"),
    [
        (0, 10.0, 1.0),
        (500, 10.0, 1.0),
        (1000, 10.0, 2.0),
        # The server ends a connection at most a quarter of the timeout late.
        (50_000, 10.0, 2.5),
        (50_000, 1.0, 1.0),
        (50_000, 60.0, 7.5),
    ],
)
def test_many_connections_are_looked_at_less_often(
    open_now: int, header_s: float, every_s: float
) -> None:
    timeouts = ConnectionTimeouts(limits=TimeoutSettings(header_s=header_s))
    timeouts.open = open_now
    assert timeouts.look_every_s() == every_s


async def test_all_connections_are_looked_at() -> None:
    timeouts = ConnectionTimeouts(limits=WAITS)
    ended: list[tuple[int, str]] = []

    class Late:
        idle_rank = None

        def __init__(self, number: int) -> None:
            self.number = number

        def overdue(self, now: float, limits: TimeoutSettings) -> str | None:
            return "body" if self.number % 2 else None

        def time_out(self, kind: str) -> None:
            ended.append((self.number, kind))

    connections: set[object] = {Late(number) for number in range(1000)} | {object()}
    await timeouts.look(connections)
    assert sorted(ended) == [(number, "body") for number in range(1, 1000, 2)]
    assert timeouts.timeouts == {"header": 0, "body": 500, "idle": 0, "write": 0, "linger": 0}
    assert timeouts.open == 1001
