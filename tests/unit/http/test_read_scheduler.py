"""`inbox`: what is read later is read whole, in order, and by whoever is most urgent first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.api.test_direct import APPEND, CASES, JSON, SETTINGS, Side, request
from tests.unit.http.test_joined_writes import turns
from topics_server.api import framing
from topics_server.api.connection import HttpConnection
from topics_server.engine.pressure.throttle import Throttle
from topics_server.http import read_scheduler as module
from topics_server.http.read_scheduler import PIECE_BYTES, ReadScheduler

pytestmark = pytest.mark.anyio

PRIORITIES = {"urgent": 900, "bulk": -200}


class Wire:
    closing = aborted = False

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


class Reader:
    """A connection that keeps what it is given; `log` has the names of all, in order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport = Wire()
        self.url = b""
        self.name = name
        self.log = log
        self.read: list[bytes] = []

    def take(self, data: bytes) -> None:
        self.log.append(self.name)
        self.read.append(data)

    def asks(self, inbox: ReadScheduler, topic: str = "t", rest: bytes = b"") -> bool:
        """Receive a request; whether it was read at once."""
        return inbox.takes(self, b"POST /v0/topics/%b HTTP/1.1\r\n" % topic.encode() + rest, 0.0)


class Clock:
    """What the inbox takes for the time, ms."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "monotonic_ms", made)
    return made


def throttled() -> Throttle:
    return Throttle(lambda name: PRIORITIES.get(name, 0))


async def read(inbox: ReadScheduler) -> None:
    """Return when nothing is held any more."""
    for _ in range(60_000):
        if not inbox.held_bytes:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("what is held is never read")


async def test_a_turn_reads_for_so_long_and_the_next_ones_read_the_rest(clock: Clock) -> None:
    inbox, log = ReadScheduler(turn_ms=2.0), list[str]()
    readers = [Reader(str(number), log) for number in range(6)]
    taken = []
    for reader in readers:
        taken.append(reader.asks(inbox))
        clock.now += 1
    assert taken == [True, True, False, False, False, False]
    assert inbox.put_off == 4
    assert inbox.held_bytes > 0
    original = readers[2].take

    def slow(data: bytes) -> None:
        original(data)
        clock.now += 5

    readers[2].take = slow  # type: ignore[method-assign]
    await turns(1)
    assert log == ["2"], "a slice, then others have the loop"
    await turns(3)
    assert log == ["2", "3", "4", "5"]
    assert inbox.held_bytes == 0
    assert readers[0].asks(inbox), "a new turn"


async def test_the_urgent_are_read_first_and_a_few_at_once(clock: Clock) -> None:
    inbox, log = ReadScheduler(throttled(), turn_ms=0.0), list[str]()
    names = ["t", "bulk", "t", "bulk"]
    inbox._passed = 2
    assert not any(Reader(name, log).asks(inbox, name) for name in names)
    inbox._passed = 0
    passing = [Reader("urgent", log).asks(inbox, "urgent") for _ in range(4)]
    assert passing == [True, True, False, False]
    await turns(20)
    assert log == ["urgent", "urgent", "t", "t", "bulk", "bulk"]


async def test_who_has_waited_for_long_is_as_urgent_as_anybody(clock: Clock) -> None:
    inbox, log = ReadScheduler(throttled(), turn_ms=0.0), list[str]()
    assert not Reader("bulk", log).asks(inbox, "bulk")
    clock.now += 1200
    assert not Reader("urgent", log).asks(inbox, "urgent")
    await turns(20)
    assert log == ["bulk", "urgent"]


async def test_whose_topic_cannot_be_seen_is_known_by_what_was_asked_for_last(
    clock: Clock,
) -> None:
    inbox, log = ReadScheduler(throttled(), turn_ms=0.0), list[str]()
    for name in ("t", "urgent"):
        reader = Reader(name, log)
        reader.url = b"/v0/topics/%b/diff" % name.encode()
        # The rest of a body.
        inbox._passed = 9
        assert not inbox.takes(reader, b"x" * (PIECE_BYTES + 1), 1.0)
    await turns(20)
    assert log == ["urgent", "t"]


async def test_what_a_connection_sends_joins_what_is_held_of_it(clock: Clock) -> None:
    inbox, log = ReadScheduler(turn_ms=0.0), list[str]()
    reader, gone = Reader("a", log), Reader("b", log)
    assert not inbox.takes(reader, b"one ", 0.0)
    assert not inbox.takes(gone, b"never read", 0.0)
    assert not inbox.takes(reader, b"two", 0.0)
    inbox.forget(gone)
    assert inbox.held_bytes == len(b"one two")
    await turns(20)
    assert reader.read == [b"one two"]
    assert log == ["a"]


async def test_pieces_of_a_slow_request_are_gathered_and_read_in_passing() -> None:
    inbox, log = ReadScheduler(slow_s=0.25), list[str]()
    slow, other = Reader("slow", log), Reader("other", log)
    began = slow.loop.time() - 1.0
    assert not inbox.takes(slow, b"a", began)
    assert not inbox.takes(slow, b"b", began)
    assert other.asks(inbox), "nobody waits for them"
    # What is large, or comes soon after its beginning, is no such piece.
    assert inbox.takes(other, b"x" * (PIECE_BYTES + 1), began)
    assert inbox.takes(other, b"x", other.loop.time())
    await read(inbox)
    assert slow.read == [b"ab"]


async def test_ten_thousand_slow_requests_are_all_read() -> None:
    inbox, log = ReadScheduler(), list[str]()
    readers = [Reader(str(number), log) for number in range(10_000)]
    began = readers[0].loop.time() - 1.0
    for reader in readers:
        assert not inbox.takes(reader, b"x", began)
    await read(inbox)
    assert log == [reader.name for reader in readers]
    assert inbox.held_bytes == 0


async def test_who_waits_for_long_is_pressure_if_slice_after_slice_finds_one(clock: Clock) -> None:
    throttle = throttled()
    inbox, log = ReadScheduler(throttle, turn_ms=0.0), list[str]()

    async def wait(count: int, for_ms: float) -> bool:
        """So many wait for so long, each read in a slice of its own; is that pressure?"""
        for number in range(count):
            assert not Reader(str(number), log).asks(inbox)
        clock.now += for_ms
        await turns(count + 1)
        assert not inbox.held_bytes
        return throttle.is_active

    assert not await wait(20, 5)
    assert not await wait(3, 10), "the machine stood still"
    assert not await wait(3, 10), "and again, but not in a row"
    assert await wait(4, 10)


async def test_no_more_is_held_than_there_is_room_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HELD_MAX", 1000)
    inbox, log = ReadScheduler(turn_ms=0.0), list[str]()
    first, second, slow = (Reader(name, log) for name in ("first", "second", "slow"))
    assert not first.asks(inbox)
    assert not first.asks(inbox, rest=b"x" * 1000)
    assert first.read, "what is too much is read at once, with what was held"
    assert inbox.held_bytes == 0
    assert not first.asks(inbox, rest=b"x" * 1000)
    assert second.asks(inbox)
    assert inbox.takes(slow, b"x", slow.loop.time() - 10)


async def test_a_defect_ends_its_connection_and_nobody_elses(clock: Clock) -> None:
    inbox, log = ReadScheduler(turn_ms=0.0), list[str]()
    broken, other, closed = (Reader(name, log) for name in ("broken", "other", "closed"))

    def fails(data: bytes) -> None:
        raise LookupError

    broken.take = fails  # type: ignore[method-assign]
    closed.transport.closing = True
    for reader in (broken, closed, other):
        assert not reader.asks(inbox)
    await turns(20)
    assert broken.transport.aborted
    assert log == ["other"]


@pytest.fixture(name="crowded")
def are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection is a crowd already."""
    monkeypatch.setattr(framing, "FEW", 0)


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", CASES)
async def test_what_is_read_later_is_answered_with_the_same_bytes(name: str, size: int) -> None:
    pieces, _ = CASES[name]
    if sum(map(len, pieces)) > 20_000:
        size = max(size, 10_000)
    seen: list[Any] = []
    for inbox in (None, ReadScheduler(turn_ms=0.0), ReadScheduler(slow_s=-1.0)):
        side = Side(HttpConnection, **SETTINGS)
        side.state.inbox = inbox
        await side.create()
        side.protocol, side.wire = side.connect()
        for piece in pieces:
            for start in range(0, len(piece), size):
                if not side.wire.is_closing():
                    side.protocol.data_received(piece[start : start + size])
            await turns(12)
        if inbox is not None:
            await read(inbox)
        await turns(30)
        page = await side.rig.read("t")
        records = [row.block.data(r) for row in page.pieces for r in row.rows]
        seen.append((side.sent, side.wire.is_closing(), records))
        side.protocol.connection_lost(None)
    assert seen[0][0]
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


async def test_a_few_connections_are_read_at_once() -> None:
    side = Side(HttpConnection)
    inbox = side.state.inbox = ReadScheduler(turn_ms=0.0)
    await side.create()
    several = [side.connect() for _ in range(7)]
    for protocol, _ in several:
        protocol.data_received(request(APPEND))
    counts = [inbox.put_off]
    one_more, _ = side.connect()
    one_more.data_received(request(APPEND))
    counts.append(inbox.put_off)
    assert counts == [0, 1]
    await turns(30)
    one_more.connection_lost(None)
    # What is held of a connection comes before what it sends when there are few again.
    protocol, wire = several[0]
    wire.pieces.clear()
    inbox._hold(protocol, request(APPEND)[:40])
    protocol.data_received(request(APPEND)[40:])
    assert not wire.pieces
    inbox.release(protocol)
    await turns(12)
    assert b"200 OK" in b"".join(wire.pieces)
    for protocol, _ in (*several, (side.protocol, None)):
        protocol.connection_lost(None)


@pytest.mark.usefixtures("crowded")
async def test_what_is_held_of_who_sends_no_more_is_read() -> None:
    side = Side(HttpConnection)
    side.state.inbox = ReadScheduler(turn_ms=0.0)
    await side.create()
    protocol, wire = side.connect()
    protocol.data_received(request(b'{"from_seq":0}', b"/v0/topics/t/diff"))
    assert not wire.pieces
    protocol.eof_received()
    assert b"200 OK" in b"".join(wire.pieces)
    protocol.connection_lost(None)


@pytest.mark.usefixtures("crowded")
async def test_a_connection_that_ends_leaves_nothing_held() -> None:
    side = Side(HttpConnection)
    inbox = side.state.inbox = ReadScheduler(turn_ms=0.0)
    await side.create()
    protocol, wire = side.connect()
    protocol.data_received(request(APPEND, headers=JSON))
    assert inbox.held_bytes
    protocol.connection_lost(None)
    assert not inbox.held_bytes
    await turns(5)
    assert not wire.pieces
