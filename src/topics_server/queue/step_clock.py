"""The wall clock of queues; it detects when the clock is set.

Leases and delays are stored in ms of the wall clock, because clients and the next process read
them; within a process they keep their granted length. The difference between the wall clock and the
monotonic clock changes only when the wall clock is set (or when the machine was suspended, which
the monotonic clock may not count). Each reading compares the difference with the last one. Made by
`queue/service`, which shifts the books and the timers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics_server.engine.ports import Clock

# Two readings may differ this much, by rounding and by pauses of the thread between them.
_STEP_MS_MIN: Final = 10
_LOOKS_MAX: Final = 5


class StepClock:
    """Satisfies `Clock`. `on_step` is called with the ms by which the wall clock was set.

    Its owner sets `on_step` once the tables exist; before that a step changes nothing.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.on_step: Callable[[int], None] = _nothing_to_shift
        now_ms = clock.now_ms()
        difference = now_ms - int(clock.monotonic_ms())
        self._difference_ms = self._agreed(now_ms, difference)[1]

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

    def _agreed(self, now_ms: int, difference: int) -> tuple[int, int]:
        """Read again until two readings agree: a pause of the thread between them is not a step.

        Returns the last reading and its difference, after at most `_LOOKS_MAX` readings.
        """
        for _ in range(_LOOKS_MAX):
            before = difference
            now_ms = self._clock.now_ms()
            difference = now_ms - int(self._clock.monotonic_ms())
            if abs(difference - before) < _STEP_MS_MIN:
                break
        return now_ms, difference

    def _stepped(self, now_ms: int, difference: int) -> int:
        now_ms, difference = self._agreed(now_ms, difference)
        step_ms = difference - self._difference_ms
        if abs(step_ms) >= _STEP_MS_MIN:
            self._difference_ms = difference
            self.on_step(step_ms)
        return now_ms


def _nothing_to_shift(_step_ms: int) -> None:
    """Used before the tables exist."""
