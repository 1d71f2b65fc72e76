"""The wall clock of queues; it detects when the clock is set.

Leases and delays are kept in ms of the wall clock, because clients and the next process read them;
within a process they last as long as they were granted for. The difference between the wall clock
and the monotonic clock changes only when the wall clock is set (or the machine was suspended, which
the monotonic clock may not count). Each reading compares the difference with the last one. Made by
`queue/service`, which shifts the books and the timers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics_server.engine.ports import Clock

# Two readings differ by rounding, and by pauses of the thread between them.
_STEP_MS_MIN: Final = 10
_LOOKS_MAX: Final = 5


class StepClock:
    """Satisfies `Clock`. `on_step` gets by how many ms the wall clock was set."""

    def __init__(self, clock: Clock, on_step: Callable[[int], None]) -> None:
        self._clock = clock
        self._on_step = on_step
        self._difference_ms = self._look()[1]

    def now_ms(self) -> int:
        """Wall clock in ms; `on_step` was called for every earlier step."""
        now_ms = self._clock.now_ms()
        difference = now_ms - int(self._clock.monotonic_ms())
        if -_STEP_MS_MIN < difference - self._difference_ms < _STEP_MS_MIN:
            return now_ms
        return self._stepped(now_ms, difference)

    def monotonic_ms(self) -> float:
        """Monotonic clock in ms."""
        return self._clock.monotonic_ms()

    def _look(self) -> tuple[int, int]:
        now_ms = self._clock.now_ms()
        return now_ms, now_ms - int(self._clock.monotonic_ms())

    def _stepped(self, now_ms: int, difference: int) -> int:
        """Read again until two readings agree: a thread paused between the clocks is not a step."""
        for _ in range(_LOOKS_MAX):
            before = difference
            now_ms, difference = self._look()
            if abs(difference - before) < _STEP_MS_MIN:
                break
        step_ms = difference - self._difference_ms
        if abs(step_ms) >= _STEP_MS_MIN:
            self._difference_ms = difference
            self._on_step(step_ms)
        return now_ms
