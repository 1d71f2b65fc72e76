"""The wall clock of queues, which notices when somebody sets it.

Leases and delays are kept in ms of the wall clock, for that is what clients are told and what the
next process knows, but within a process they last as long as they were given for. The difference
between the wall clock and the monotonic one changes only when the wall clock is set (or the machine
was suspended, which the monotonic clock may not count): each look compares it with the last.
Made by `queue/service`, which moves the books and the timers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics_server.engine.ports import Clock

# Two looks differ by rounding, and by what the thread is held up between them.
_STEP_MS_MIN: Final = 10
_LOOKS_MAX: Final = 5


class StepClock:
    """Satisfies `Clock`. `on_step` is told by how many ms the wall clock was set."""

    def __init__(self, clock: Clock, on_step: Callable[[int], None]) -> None:
        self._clock = clock
        self._on_step = on_step
        self._difference_ms = self._look()[1]

    def now_ms(self) -> int:
        """Wall clock in ms; `on_step` has heard of every step before it."""
        now_ms, difference = self._look()
        if abs(difference - self._difference_ms) >= _STEP_MS_MIN:
            now_ms = self._stepped(now_ms, difference)
        return now_ms

    def monotonic_ms(self) -> float:
        """Monotonic clock in ms."""
        return self._clock.monotonic_ms()

    def _look(self) -> tuple[int, int]:
        now_ms = self._clock.now_ms()
        return now_ms, now_ms - int(self._clock.monotonic_ms())

    def _stepped(self, now_ms: int, difference: int) -> int:
        """Look again until two looks agree: a thread held up between the clocks is no step."""
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
