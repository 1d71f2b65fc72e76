"""`read_scheduler`: deferred bytes are read completely, in order, the most urgent first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.api.test_direct import APPEND, CASES, JSON, SETTINGS, Side, request
from tests.unit.http.exchange.test_joined_writes import turns
from topics_server.engine.pressure.throttle import Throttle
from topics_server.http import connection
from topics_server.http import read_scheduler as module
from topics_server.http.connection import HttpConnection
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
    """A connection that keeps its received bytes; `log` has the names of all, in order."""

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

    def asks(self, read_scheduler: ReadScheduler, topic: str = "t", rest: bytes = b"") -> bool:
        """Receive a request; return whether it was read at once."""
        return read_scheduler.takes(
            self, b"POST /v0/topics/%b HTTP/1.1\r\n" % topic.encode() + rest, 0.0
        )


class Clock:
    """The read scheduler's clock, in ms."""

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


async def read(read_scheduler: ReadScheduler) -> None:
    """Return when no bytes are held any more."""
    for _ in range(60_000):
        if not read_scheduler.held_bytes:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("what is held is never read")


async def test_a_turn_reads_for_so_long_and_the_next_ones_read_the_rest(clock: Clock) -> None:
    read_scheduler, log = ReadScheduler(turn_ms=2.0), list[str]()
    readers = [Reader(str(number), log) for number in range(6)]
    taken = []
    for reader in readers:
        taken.append(reader.asks(read_scheduler))
        clock.now += 1
    assert taken == [True, True, False, False, False, False]
    assert read_scheduler.put_off == 4
    assert read_scheduler.held_bytes > 0
    original = readers[2].take

    def slow(data: bytes) -> None:
        original(data)
        clock.now += 5

    readers[2].take = slow  # type: ignore[method-assign]
    await turns(1)
    assert log == ["2"], "a slice, then others have the loop"
    await turns(3)
    assert log == ["2", "3", "4", "5"]
    assert read_scheduler.held_bytes == 0
    assert readers[0].asks(read_scheduler), "a new turn"


async def test_the_urgent_are_read_first_and_a_few_at_once(clock: Clock) -> None:
    read_scheduler, log = ReadScheduler(throttled(), turn_ms=0.0), list[str]()
    names = ["t", "bulk", "t", "bulk"]
    read_scheduler._passed = 2
    assert not any(Reader(name, log).asks(read_scheduler, name) for name in names)
    read_scheduler._passed = 0
    passing = [Reader("urgent", log).asks(read_scheduler, "urgent") for _ in range(4)]
    assert passing == [True, True, False, False]
    await turns(20)
    assert log == ["urgent", "urgent", "t", "t", "bulk", "bulk"]


async def test_who_has_waited_for_long_is_as_urgent_as_anybody(clock: Clock) -> None:
    read_scheduler, log = ReadScheduler(throttled(), turn_ms=0.0), list[str]()
    assert not Reader("bulk", log).asks(read_scheduler, "bulk")
    clock.now += 1200
    assert not Reader("urgent", log).asks(read_scheduler, "urgent")
    await turns(20)
    assert log == ["bulk", "urgent"]


async def test_a_priority_is_looked_up_once_for_a_moment(clock: Clock) -> None:
    priorities = {"t": 0}
    asked: list[str] = []

    def priority_of(name: str) -> int:
        asked.append(name)
        return priorities[name]

    log: list[str] = []
    read_scheduler = ReadScheduler(Throttle(priority_of))
    readers = [Reader(str(number), log) for number in range(6)]
    assert readers[0].asks(read_scheduler, "t")
    clock.now += module._TURN_MS
    for reader in readers[1:4]:
        assert not reader.asks(read_scheduler, "t")
    assert asked == ["t"]
    priorities["t"] = 900
    clock.now += module._KEPT_MS + 0.1
    # The turn is over, and the higher priority is seen: the request is read at once.
    assert readers[4].asks(read_scheduler, "t")
    assert asked == ["t", "t"]


async def test_few_request_lines_are_remembered(clock: Clock) -> None:
    read_scheduler = ReadScheduler(throttled())
    reader = Reader("first", [])
    assert reader.asks(read_scheduler)
    clock.now += module._TURN_MS
    for number in range(3 * module._KEPT_LINES_MAX):
        Reader("other", []).asks(read_scheduler, f"t{number}")
    long = "t" * module._KEPT_BYTES_MAX
    Reader("other", []).asks(read_scheduler, long)
    assert 0 < len(read_scheduler._ahead) <= module._KEPT_LINES_MAX + 1
    assert max(map(len, read_scheduler._ahead)) < module._KEPT_BYTES_MAX


async def test_whose_topic_cannot_be_seen_is_known_by_what_was_asked_for_last(
    clock: Clock,
) -> None:
    read_scheduler, log = ReadScheduler(throttled(), turn_ms=0.0), list[str]()
    for name in ("t", "urgent"):
        reader = Reader(name, log)
        reader.url = b"/v0/topics/%b/diff" % name.encode()
        # The rest of a body.
        read_scheduler._passed = 9
        assert not read_scheduler.takes(reader, b"x" * (PIECE_BYTES + 1), 1.0)
    await turns(20)
    assert log == ["urgent", "t"]


async def test_what_a_connection_sends_joins_what_is_held_of_it(clock: Clock) -> None:
    read_scheduler, log = ReadScheduler(turn_ms=0.0), list[str]()
    reader, gone = Reader("a", log), Reader("b", log)
    assert not read_scheduler.takes(reader, b"one ", 0.0)
    assert not read_scheduler.takes(gone, b"never read", 0.0)
    assert not read_scheduler.takes(reader, b"two", 0.0)
    read_scheduler.forget(gone)
    assert read_scheduler.held_bytes == len(b"one two")
    await turns(20)
    assert reader.read == [b"one two"]
    assert log == ["a"]


async def test_pieces_of_a_slow_request_are_gathered_and_read_in_passing() -> None:
    # A turn lasts a minute, so that a slow machine does not end it.
    read_scheduler, log = ReadScheduler(turn_ms=60_000.0, slow_s=0.25), list[str]()
    slow, other = Reader("slow", log), Reader("other", log)
    began = slow.loop.time() - 1.0
    assert not read_scheduler.takes(slow, b"a", began)
    assert not read_scheduler.takes(slow, b"b", began)
    assert other.asks(read_scheduler), "nobody waits for them"
    # Large pieces, or pieces soon after the beginning, are not slow pieces.
    assert read_scheduler.takes(other, b"x" * (PIECE_BYTES + 1), began)
    assert read_scheduler.takes(other, b"x", other.loop.time())
    await read(read_scheduler)
    assert slow.read == [b"ab"]


async def test_ten_thousand_slow_requests_are_all_read() -> None:
    read_scheduler, log = ReadScheduler(), list[str]()
    readers = [Reader(str(number), log) for number in range(10_000)]
    began = readers[0].loop.time() - 1.0
    for reader in readers:
        assert not read_scheduler.takes(reader, b"x", began)
    await read(read_scheduler)
    assert log == [reader.name for reader in readers]
    assert read_scheduler.held_bytes == 0


async def test_who_waits_for_long_is_pressure_if_slice_after_slice_finds_one(clock: Clock) -> None:
    throttle = throttled()
    read_scheduler, log = ReadScheduler(throttle, turn_ms=0.0), list[str]()

    async def wait(count: int, for_ms: float) -> bool:
        """Let this many connections wait this long, each read in a slice of its own; return whether
        that counts as pressure.
        """
        for number in range(count):
            assert not Reader(str(number), log).asks(read_scheduler)
        clock.now += for_ms
        await turns(count + 1)
        assert not read_scheduler.held_bytes
        return throttle.is_active

    assert not await wait(20, 5)
    assert not await wait(3, 10), "the machine stood still"
    assert not await wait(3, 10), "and again, but not in a row"
    assert await wait(4, 10)


async def test_no_more_is_held_than_there_is_room_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HELD_MAX", 1000)
    read_scheduler, log = ReadScheduler(turn_ms=0.0), list[str]()
    first, second, slow = (Reader(name, log) for name in ("first", "second", "slow"))
    assert not first.asks(read_scheduler)
    assert not first.asks(read_scheduler, rest=b"x" * 1000)
    assert first.read, "what is too much is read at once, with what was held"
    assert read_scheduler.held_bytes == 0
    assert not first.asks(read_scheduler, rest=b"x" * 1000)
    assert second.asks(read_scheduler)
    assert read_scheduler.takes(slow, b"x", slow.loop.time() - 10)


async def test_a_defect_ends_its_connection_and_nobody_elses(clock: Clock) -> None:
    read_scheduler, log = ReadScheduler(turn_ms=0.0), list[str]()
    broken, other, closed = (Reader(name, log) for name in ("broken", "other", "closed"))

    def fails(data: bytes) -> None:
        raise LookupError

    broken.take = fails  # type: ignore[method-assign]
    closed.transport.closing = True
    for reader in (broken, closed, other):
        assert not reader.asks(read_scheduler)
    await turns(20)
    assert broken.transport.aborted
    assert log == ["other"]


@pytest.fixture(name="crowded")
def are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection already counts as a crowd."""
    monkeypatch.setattr(connection, "FEW", 0)


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", CASES)
async def test_what_is_read_later_is_answered_with_the_same_bytes(name: str, size: int) -> None:
    pieces, _ = CASES[name]
    if sum(map(len, pieces)) > 20_000:
        size = max(size, 10_000)
    seen: list[Any] = []
    for read_scheduler in (None, ReadScheduler(turn_ms=0.0), ReadScheduler(slow_s=-1.0)):
        side = Side(HttpConnection, **SETTINGS)
        side.state.read_scheduler = read_scheduler
        await side.create()
        side.protocol, side.wire = side.connect()
        for piece in pieces:
            for start in range(0, len(piece), size):
                if not side.wire.is_closing():
                    side.protocol.data_received(piece[start : start + size])
            await turns(12)
        if read_scheduler is not None:
            await read(read_scheduler)
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
    read_scheduler = side.state.read_scheduler = ReadScheduler(turn_ms=0.0)
    await side.create()
    several = [side.connect() for _ in range(7)]
    for protocol, _ in several:
        protocol.data_received(request(APPEND))
    counts = [read_scheduler.put_off]
    one_more, _ = side.connect()
    one_more.data_received(request(APPEND))
    counts.append(read_scheduler.put_off)
    assert counts == [0, 1]
    await turns(30)
    one_more.connection_lost(None)
    # When there are few connections again, held bytes come before newly received ones.
    protocol, wire = several[0]
    wire.pieces.clear()
    read_scheduler._hold(protocol, request(APPEND)[:40])
    protocol.data_received(request(APPEND)[40:])
    assert not wire.pieces
    read_scheduler.release(protocol)
    await turns(12)
    assert b"200 OK" in b"".join(wire.pieces)
    for protocol, _ in (*several, (side.protocol, None)):
        protocol.connection_lost(None)


@pytest.mark.usefixtures("crowded")
async def test_what_is_held_of_who_sends_no_more_is_read() -> None:
    side = Side(HttpConnection)
    side.state.read_scheduler = ReadScheduler(turn_ms=0.0)
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
    read_scheduler = side.state.read_scheduler = ReadScheduler(turn_ms=0.0)
    await side.create()
    protocol, wire = side.connect()
    protocol.data_received(request(APPEND, headers=JSON))
    assert read_scheduler.held_bytes
    protocol.connection_lost(None)
    assert not read_scheduler.held_bytes
    await turns(5)
    assert not wire.pieces
