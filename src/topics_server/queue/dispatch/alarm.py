"""A timer on the event loop with at most one pending call.

The clock decides when an alarm is due: a loop timer that fires early is set again. When tests move
the clock by hand, `tick` calls an alarm that no loop timer would have called yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from topics_server.engine.ports import Clock

# Otherwise a loop that rounds down would call again at once.
_AGAIN_MS_MIN: Final = 1.0


class Alarm:
    """Calls `callback` once, in `after_ms`, unless it is cancelled before."""

    __slots__ = ("_clock", "_due_ms", "_callback", "_timer")

    def __init__(self, clock: Clock, after_ms: float, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._due_ms = clock.monotonic_ms() + after_ms
        self._callback: Callable[[], None] | None = callback
        self._timer: asyncio.TimerHandle | None = None
        self._set(after_ms)

    def _set(self, after_ms: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_ms / 1000, self._fire)

    def _fire(self) -> None:
        if not self.tick():
            left_ms = self._due_ms - self._clock.monotonic_ms()
            self._set(max(_AGAIN_MS_MIN, left_ms))

    def tick(self) -> bool:
        """Call the callback if it is due; False if it is not due, or if the alarm is over."""
        callback = self._callback
        if callback is None or self._clock.monotonic_ms() < self._due_ms:
            return False
        self.cancel()
        callback()
        return True

    def cancel(self) -> None:
        """Do not call the callback any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            # Break the cycle: the callback refers to the owner of this alarm.
            self._timer = self._callback = None
