"""One timer for the checks of all streams: heartbeats, and clients that do not read.

Each stream has at most one scheduled check; an earlier check replaces it. Loop thread only. Used by
`broadcast`.
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from math import ceil
from typing import Final, Protocol

from topics_server.runtime.clock import monotonic_ms

# Heartbeats that are due within this share of their interval, and at least this time, are sent
# together: an idle process pays for each time that it wakes up.
_TOGETHER_SHARE: Final = 60
_TOGETHER_MS: Final = 50
# A heartbeat may be sent this much before it is due, so that the next one, which follows the time
# at which this one was sent, does not fall into the next step.
EARLY_MS: Final = 5
# The most checks in one turn of the loop; a heartbeat takes some 30 us.
_LOOKS_MAX: Final = 32


class Checked(Protocol):
    """The part of a stream that the timer uses."""

    next_look: Look | None

    def look(self, now: float) -> None:
        """Run a check that is due. `now`: the monotonic clock, ms."""
        ...


class Look:
    """A scheduled check of a stream.

    `stream` is None if the check was moved or the stream is over.
    """

    __slots__ = ("due_ms", "stream", "tie")

    def __init__(self, due_ms: float, tie: int, stream: Checked) -> None:
        self.due_ms = due_ms
        self.tie = tie
        self.stream: Checked | None = stream

    def __lt__(self, other: Look) -> bool:
        return (self.due_ms, self.tie) < (other.due_ms, other.tie)


class StreamTimer:
    """The scheduled checks of all streams."""

    def __init__(self) -> None:
        # A heap of the next check of each stream.
        self._looks: list[Look] = []
        self._ties = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0.0
        self._is_looking = False

    def beat_at(self, stream: Checked, due_ms: float, heartbeat_ms: int) -> None:
        """Check the stream when its heartbeat is due. `heartbeat_ms`: the interval.

        The time is rounded up, so that streams share checks, unless that is `EARLY_MS` or less
        after a step.
        """
        step_ms = max(_TOGETHER_MS, heartbeat_ms // _TOGETHER_SHARE)
        self.look_at(stream, ceil((due_ms - EARLY_MS) / step_ms) * step_ms)

    def look_at(self, stream: Checked, due_ms: float) -> None:
        """Check the stream at `due_ms`, unless an earlier check is scheduled."""
        look = stream.next_look
        if look is not None:
            if look.due_ms <= due_ms:
                return
            look.stream = None
        stream.next_look = look = Look(due_ms, next(self._ties), stream)
        heapq.heappush(self._looks, look)
        self._set_timer()

    def _set_timer(self) -> None:
        looks = self._looks
        if self._is_looking or not looks:
            return
        due_ms = looks[0].due_ms
        if self._timer is not None:
            if self._timer_ms <= due_ms:
                return
            self._timer.cancel()
        self._timer_ms = due_ms
        # The loop rounds to milliseconds. A timer that ends early would find nothing to do.
        delay_s = ceil(max(0.0, due_ms - monotonic_ms())) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now = monotonic_ms()
        looks = self._looks
        self._is_looking = True
        try:
            for _ in range(_LOOKS_MAX):
                if not looks or looks[0].due_ms > now:
                    break
                stream = heapq.heappop(looks).stream
                if stream is not None:
                    stream.next_look = None
                    stream.look(now)
        finally:
            self._is_looking = False
            self._set_timer()
