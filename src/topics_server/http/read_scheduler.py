"""Defers connections with much input, so that no loop turn is long.

The loop delivers the input of all sockets before anything else runs: when hundreds of clients send
at once, every other task waits until all were served. So a loop turn reads for a limited time.
Later input is held, unread. The following turns read a slice each, the most urgent topics first, if
the first bytes name the topic. A connection that has waited long enough counts as urgent. Small
pieces of a request that has been incomplete for a while are always held, gathered, and read in
small shares: ten thousand clients that send a byte from time to time get a share of the loop, not
all of it.

The input of a connection is never reordered: new bytes are held behind its held bytes. One instance
for all connections, in `api/context`; called by `http/connection` and `http/websocket`. Loop thread
only.
"""

from __future__ import annotations

import asyncio
import heapq
import re
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import log
from topics_server.values.limits import MIB

# Up to this number of connections, no turn is long, and connections read without the scheduler.
FEW: Final = 8
# How long one turn reads new or held input, ms. The second value applies under pressure, when
# requests wait for their turn, unless an input has waited for the third.
_TURN_MS: Final = 2.0
_PRESSED_MS: Final = 0.5
_LONG_MS: Final = 100.0
# If inputs wait this long in this many slices in a row, more arrives than is read. The throttle
# then makes requests take turns. A single late input may only mean that the machine paused.
_LATE_MS: Final = 6.0
_LATE_SLICES: Final = 4
# How far a priority step moves input ahead of input that arrived earlier, ms.
_AHEAD_MS: Final = 1.0
# How long the advance of a request line is remembered, ms, and for how many lines of which length.
_KEPT_MS: Final = 20.0
_KEPT_LINES_MAX: Final = 1024
_KEPT_BYTES_MAX: Final = 256
# How many more urgent connections are read at once in a turn whose time is over.
_PASSING_MAX: Final = 2
# A request is slow if, this long after its start, it still receives at most this many bytes at a
# time.
PIECE_BYTES: Final = 512
SLOW_S: Final = 0.25
# How long slow requests are read in one go, ms, and the pause for other tasks after that, seconds.
_SLOW_MS: Final = 0.2
_PAUSE_S: Final = 0.001
# The most bytes that are held.
_HELD_MAX: Final = 64 * MIB
_TOPIC: Final = re.compile(rb"/v0/topics/([A-Za-z0-9._:-]+)")
_REQUEST: Final = re.compile(rb"[A-Z]+ " + _TOPIC.pattern)


class DeferredReader(Protocol):
    """A connection whose input may be deferred."""

    loop: Any
    transport: Any

    @property
    def url(self) -> bytes:
        """The URL of its last request."""
        ...

    def take(self, data: bytes) -> None:
        """Read the received bytes."""
        ...


class Pressure(Protocol):
    """The part of the throttle (`engine/pressure/throttle`) that the scheduler reads and
    informs.
    """

    is_active: bool

    @property
    def has_urgent(self) -> bool:
        """Whether turns must be short, because urgent requests arrived lately."""
        ...

    priority_of: Callable[[str], int]

    def press(self) -> None:
        """Report pressure to the throttle."""
        ...


class ReadScheduler:
    """Connections whose received bytes are deferred; `held_bytes` is their total.

    `put_off` counts deferrals.
    """

    def __init__(
        self,
        throttle: Pressure | None = None,
        *,
        turn_ms: float = _TURN_MS,
        slow_s: float = SLOW_S,
    ) -> None:
        self.held_bytes = 0
        self.put_off = 0
        self._slow_s = slow_s
        self._throttle = throttle
        self._turn_ms = turn_ms
        # When this turn stops reading; 0: the turn has not begun to read.
        self._until_ms = 0.0
        self._passed = 0
        self._held: dict[DeferredReader, list[bytes]] = {}
        # A heap, ordered by arrival minus the advance of urgent topics, then by arrival.
        self._waiting: list[tuple[float, int, float, DeferredReader]] = []
        # The advance of request lines that came lately, and until when it holds.
        self._ahead: dict[bytes, float] = {}
        self._ahead_until_ms = 0.0
        # How long the last deferred input waited before it was read.
        self._waited_ms = 0.0
        self._late_slices = 0
        self._slow: deque[DeferredReader] = deque()
        self._reading: asyncio.Handle | None = None
        self._reading_slow: asyncio.TimerHandle | None = None

    def takes(self, reader: DeferredReader, data: bytes, partial_since: float) -> bool:
        """Whether to read `data` now. If not, `data` is held and passed to `reader.take` later.

        `partial_since`: the start of the incomplete request that `data` continues, on the loop's
        clock, seconds; 0 if `data` begins a request.
        """
        now_ms = monotonic_ms()
        if not self._until_ms:
            self._until_ms = now_ms + self._slice_ms()
            reader.loop.call_soon(self._end_turn)
        if self._held and reader in self._held:
            self._hold(reader, data)
            if self.held_bytes > _HELD_MAX:
                self.release(reader)
            return False
        if (
            partial_since
            and len(data) <= PIECE_BYTES
            and reader.loop.time() - partial_since > self._slow_s
            and self.held_bytes <= _HELD_MAX
        ):
            self._hold(reader, data)
            self._slow.append(reader)
            if self._reading_slow is None:
                self._reading_slow = reader.loop.call_later(_PAUSE_S, self._read_slow)
            return False
        if not self._waiting and now_ms < self._until_ms:
            return True
        return not self._puts_off(reader, data, now_ms)

    def _end_turn(self) -> None:
        """End the turn: the loop has delivered the input of all sockets."""
        self._until_ms = 0.0
        self._passed = 0

    def _slice_ms(self) -> float:
        throttle = self._throttle
        is_short = throttle is not None and throttle.is_active and throttle.has_urgent
        if is_short and self._waited_ms < _LONG_MS:
            return min(_PRESSED_MS, self._turn_ms)
        return self._turn_ms

    def _puts_off(self, reader: DeferredReader, data: bytes, now_ms: float) -> bool:
        """Hold input that would make the turn long. Returns False for input to read now."""
        if self.held_bytes > _HELD_MAX:
            return False
        if now_ms > self._ahead_until_ms or len(self._ahead) > _KEPT_LINES_MAX:
            self._ahead.clear()
            self._ahead_until_ms = now_ms + _KEPT_MS
        line = data[: data.find(b" HTTP/", 0, _KEPT_BYTES_MAX) + 1]
        known_ms = self._ahead.get(line)
        ahead_ms = self._ahead_ms(reader, data, line) if known_ms is None else known_ms
        due_ms = now_ms - ahead_ms
        is_first = due_ms < self._waiting[0][0] if self._waiting else ahead_ms > 0
        if is_first and self._passed < _PASSING_MAX:
            self._passed += 1
            return False
        self.put_off += 1
        self._hold(reader, data)
        heapq.heappush(self._waiting, (due_ms, self.put_off, now_ms, reader))
        if self._reading is None:
            self._reading = reader.loop.call_soon(self._read_on)
        return True

    def add(self, reader: DeferredReader, data: bytes) -> None:
        """Hold more bytes of a reader that has held bytes."""
        self._hold(reader, data)

    def put_back(self, reader: DeferredReader, data: bytes) -> None:
        """Hold bytes that a reader could not parse in time.

        They are read after all waiting input.
        """
        self._held.setdefault(reader, []).insert(0, data)
        self.held_bytes += len(data)
        self.put_off += 1
        now_ms = monotonic_ms()
        heapq.heappush(self._waiting, (now_ms, self.put_off, now_ms, reader))
        if self._reading is None:
            self._reading = reader.loop.call_soon(self._read_on)

    def _ahead_ms(self, reader: DeferredReader, data: bytes, line: bytes) -> float:
        """The advance of the input by its topic's priority, ms; 0 if the first bytes name no
        topic.

        It is remembered by `line`, the request line, if the input begins with one.
        """
        own = _REQUEST.match(data)
        found = own or _TOPIC.match(reader.url)
        if found is None or self._throttle is None:
            return 0.0
        ahead_ms = _AHEAD_MS * self._throttle.priority_of(found[1].decode("ascii"))
        if own is not None and line:
            self._ahead[line] = ahead_ms
        return ahead_ms

    def _hold(self, reader: DeferredReader, data: bytes) -> None:
        self._held.setdefault(reader, []).append(data)
        self.held_bytes += len(data)

    def holds(self, reader: DeferredReader) -> bool:
        """Whether bytes of a connection are held."""
        return bool(self._held) and reader in self._held

    def forget(self, reader: DeferredReader) -> None:
        """Drop the held bytes of a connection that is gone."""
        if self._held:
            self.held_bytes -= sum(map(len, self._held.pop(reader, ())))

    def _read_on(self) -> None:
        """Read a slice of the held bytes; the rest in later turns."""
        self._reading = None
        now_ms = monotonic_ms()
        until_ms = now_ms + self._slice_ms()
        longest_ms = 0.0
        while self._waiting:
            _, _, came_ms, reader = heapq.heappop(self._waiting)
            self._waited_ms = now_ms - came_ms
            longest_ms = max(longest_ms, self._waited_ms)
            self.release(reader)
            now_ms = monotonic_ms()
            if now_ms >= until_ms:
                break
        self._late_slices = self._late_slices + 1 if longest_ms > _LATE_MS else 0
        if self._late_slices >= _LATE_SLICES and self._throttle is not None:
            self._throttle.press()
        if not self._waiting:
            self._late_slices = 0
        elif self._reading is None:
            self._reading = self._waiting[0][-1].loop.call_soon(self._read_on)

    def _read_slow(self) -> None:
        self._reading_slow = None
        until_ms = monotonic_ms() + _SLOW_MS
        while self._slow:
            self.release(self._slow.popleft())
            if monotonic_ms() >= until_ms:
                break
        if self._slow:
            self._reading_slow = self._slow[0].loop.call_later(_PAUSE_S, self._read_slow)

    def release(self, reader: DeferredReader) -> None:
        """Pass the held bytes of a connection, if any, to its `take`."""
        pieces = self._held.pop(reader, None)
        if pieces is None:
            return
        data = b"".join(pieces)
        self.held_bytes -= len(data)
        if reader.transport.is_closing():
            return
        try:
            reader.take(data)
        except Exception:
            log.exception("defect while reading a request")
            reader.transport.abort()
