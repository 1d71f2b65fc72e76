"""Defers connections with much input, so that no loop turn is long.

The loop hands over what all its sockets have before anything else runs: when hundreds of clients
speak at once, whoever is behind them waits until each was served. So a turn reads for so long and
no longer. What comes then is held, unread; the following turns read on, a slice each, the most
urgent topics first (as far as the first bytes tell; who has waited long enough is as urgent as
anybody). Pieces of a few bytes of a request that has been incomplete for a while are held always,
gathered, and read in passing: ten thousand clients that send a byte now and then get a share of the
loop, not all of it.

Nothing is read out of order: what a connection sends joins what is held of it. One for all
connections, in `api/context`; asked by `api/framing`. Loop thread only.
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

# So many connections make no long turn: nobody asks then.
FEW: Final = 8
# How long one turn reads, ms: whom it finds with something to say, or of what was held. Under
# pressure, when all wait for their turn, it is less, unless that kept somebody waiting for so long.
_TURN_MS: Final = 2.0
_PRESSED_MS: Final = 0.5
_LONG_MS: Final = 100.0
# Who waits for so long, so many slices in a row, shows that more comes than is read: the throttle
# has work take turns. One that was late shows no more than that the machine stood still.
_LATE_MS: Final = 6.0
_LATE_SLICES: Final = 4
# A topic as urgent as can be goes before what came up to so much earlier, ms a step of priority.
_AHEAD_MS: Final = 1.0
# Connections of one turn that need not wait when that is over, being more urgent than who does.
_PASSING_MAX: Final = 2
# A request of which no more than so much comes at a time, so long after it began, is a slow one.
PIECE_BYTES: Final = 512
SLOW_S: Final = 0.25
# How long slow requests are read in one go, ms, and what others have the loop for then, seconds.
_SLOW_MS: Final = 0.2
_PAUSE_S: Final = 0.001
# Nothing is held beyond this.
_HELD_MAX: Final = 64 * MIB
_TOPIC: Final = re.compile(rb"/v0/topics/([A-Za-z0-9._:-]+)")
_REQUEST: Final = re.compile(rb"[A-Z]+ " + _TOPIC.pattern)


class DeferredReader(Protocol):
    """A connection."""

    loop: Any
    transport: Any
    # What it asked for last.
    url: bytes

    def take(self, data: bytes) -> None:
        """Read what was received."""
        ...


class Pressure(Protocol):
    """What is known of pressure, and is to be known: `engine/pressure/throttle`."""

    is_active: bool
    priority_of: Callable[[str], int]

    def press(self) -> None:
        """There is pressure."""
        ...


class ReadScheduler:
    """Who is read later, and what of them is held: `held_bytes`. `put_off` counts receptions."""

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
        # Until when this turn reads; 0: it has not begun to.
        self._until_ms = 0.0
        self._passed = 0
        self._held: dict[DeferredReader, list[bytes]] = {}
        # By when they came, less what the urgent have ahead; then when they came.
        self._waiting: list[tuple[float, int, float, DeferredReader]] = []
        # How long the last one of those waited that were read.
        self._waited_ms = 0.0
        self._late_slices = 0
        self._slow: deque[DeferredReader] = deque()
        self._reading: asyncio.Handle | None = None
        self._reading_slow: asyncio.TimerHandle | None = None

    def takes(self, reader: DeferredReader, data: bytes, partial_since: float) -> bool:
        """Whether `data` is to be read now; else it is held, and `reader.take` gets it later.

        `partial_since`: when the request began that it goes on with, on the loop's clock, seconds;
        0 if it begins one.
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
        """What all sockets had was handed over."""
        self._until_ms = 0.0
        self._passed = 0

    def _slice_ms(self) -> float:
        is_pressed = self._throttle is not None and self._throttle.is_active
        if is_pressed and self._waited_ms < _LONG_MS:
            return min(_PRESSED_MS, self._turn_ms)
        return self._turn_ms

    def _puts_off(self, reader: DeferredReader, data: bytes, now_ms: float) -> bool:
        """Hold what would make the turn long; false where it is to be read all the same."""
        if self.held_bytes > _HELD_MAX:
            return False
        ahead_ms = self._ahead_ms(reader, data)
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
        """Hold more of a reader of which something is held."""
        self._hold(reader, data)

    def put_back(self, reader: DeferredReader, data: bytes) -> None:
        """Hold what a reader was given and had not the time for: it comes behind who waits."""
        self._held.setdefault(reader, []).insert(0, data)
        self.held_bytes += len(data)
        self.put_off += 1
        now_ms = monotonic_ms()
        heapq.heappush(self._waiting, (now_ms, self.put_off, now_ms, reader))
        if self._reading is None:
            self._reading = reader.loop.call_soon(self._read_on)

    def _ahead_ms(self, reader: DeferredReader, data: bytes) -> float:
        """By the topic it is about, as far as that can be seen without reading it."""
        found = _REQUEST.match(data) or _TOPIC.match(reader.url)
        if found is None or self._throttle is None:
            return 0.0
        return _AHEAD_MS * self._throttle.priority_of(found[1].decode("ascii"))

    def _hold(self, reader: DeferredReader, data: bytes) -> None:
        self._held.setdefault(reader, []).append(data)
        self.held_bytes += len(data)

    def holds(self, reader: DeferredReader) -> bool:
        """Whether something of a connection is held."""
        return bool(self._held) and reader in self._held

    def forget(self, reader: DeferredReader) -> None:
        """The connection is gone."""
        if self._held:
            self.held_bytes -= sum(map(len, self._held.pop(reader, ())))

    def _read_on(self) -> None:
        """Read a slice of what is held; the rest in later turns."""
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
        """Have read what is held of a connection, if anything is."""
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
