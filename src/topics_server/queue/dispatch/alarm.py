"""A timer on the event loop with at most one pending call.

The clock decides: a timer that fires before it is set again, and a clock that is moved by hand may
ring an alarm (`tick`) that no timer would have rung yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from topics_server.engine.ports import Clock

# A loop that rounds down would otherwise be asked again at once.
_AGAIN_MS_MIN: Final = 1.0


class Alarm:
    """Calls `ring` once, in `after_ms`, unless it is cancelled before."""

    __slots__ = ("_clock", "_due_ms", "_ring", "_timer")

    def __init__(self, clock: Clock, after_ms: float, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._due_ms = clock.monotonic_ms() + after_ms
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._set(after_ms)

    def _set(self, after_ms: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_ms / 1000, self._fire)

    def _fire(self) -> None:
        if not self.tick():
            left_ms = self._due_ms - self._clock.monotonic_ms()
            self._set(max(_AGAIN_MS_MIN, left_ms))

    def tick(self) -> bool:
        """Ring if it is time; False if it is not, or is over."""
        if self._timer is None or self._clock.monotonic_ms() < self._due_ms:
            return False
        self.cancel()
        self._ring()
        return True

    def cancel(self) -> None:
        """Never ring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
