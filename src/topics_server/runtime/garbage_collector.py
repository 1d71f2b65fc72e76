"""Schedules Python's garbage collector so that no loop turn is long.

A collection stops the loop for about 1 us an object it looks at. So the young are looked at often
and few at a time, the old never: all of 100,000 topics would be 130 ms, and nothing of ours is a
cycle that lives that long (`api/connection` sees to it that uvicorn's are not either).

Python looks when 700 more objects were made than went. Under pressure as many go as are made, so
that thousands are young by then, and a collection is 4 ms and more, a dozen times a second. Then
there are more of them, by the clock, each of what ten milliseconds brought.

Used by `server`; one a process.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

_THRESHOLDS: Final = (700, 2, 1_000_000)
# Under pressure: how often there is a collection, seconds; one of so many looks again at what the
# others left.
_EVERY_S: Final = 0.01
_AGAIN: Final = 3


def rest() -> None:
    """No collections until `begin`: all that is made now stays."""
    gc.disable()


def begin() -> None:
    """Leave alone what lives; look at what comes. No collection first: it would walk everything."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()


def settle() -> None:
    """Take what has lived until now out of the collector's sight; young garbage goes first.

    Otherwise the first collection after many topics were made walks all of them at once.
    """
    gc.collect(0)
    gc.freeze()


class Collections:
    """More of them, and shorter ones, under pressure: `told` is called when it begins and ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._looking: asyncio.TimerHandle | None = None
        self._looks = 0

    def told(self, is_pressed: bool) -> None:
        """Pressure has begun, or is over."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if is_pressed:
            self._looking = self._loop.call_later(_EVERY_S, self._look)

    def _look(self) -> None:
        self._looks += 1
        gc.collect(0 if self._looks % _AGAIN else 1)
        self._looking = self._loop.call_later(_EVERY_S, self._look)
