"""Schedules Python's garbage collector so that no loop turn is long.

A collection stops the loop for about 1 us per examined object. So young objects are examined often
and a few at a time, and old objects never. Examining the objects of 100,000 topics would take 130
ms, and the server leaves no cycles (docs/decisions/0352; `tests/crash/garbage` finds them).

Python collects when 700 more objects were allocated than freed. Under pressure as many are freed as
are allocated, so thousands are young when a collection starts: it takes 4 ms and more, a dozen
times a second. Under pressure this module therefore collects by the clock, every ten milliseconds.

Used by `server`; one per process.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

_THRESHOLDS: Final = (700, 2, 1_000_000)
# The interval of collections under pressure, in seconds. One in `_AGAIN` also examines the objects
# that survived the other collections.
_EVERY_S: Final = 0.01
_AGAIN: Final = 3


def rest() -> None:
    """Disable collections until `begin`: the objects of the start live as long as the process."""
    gc.disable()


def begin() -> None:
    """Freeze existing objects and collect new ones.

    Does not collect first: that would examine every object.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()


def freeze() -> None:
    """Collect the young garbage, then freeze all existing objects.

    Otherwise the first collection after many topics were created examines all of them at once.
    """
    gc.collect(0)
    gc.freeze()


class Collections:
    """Under pressure, collect often and briefly. The throttle calls `on_pressure`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._looking: asyncio.TimerHandle | None = None
        self._looks = 0

    def on_pressure(self, is_pressed: bool) -> None:
        """Start or stop the collections by the clock, as pressure begins or ends."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if is_pressed:
            self._looking = self._loop.call_later(_EVERY_S, self._look)

    def _look(self) -> None:
        self._looks += 1
        gc.collect(0 if self._looks % _AGAIN else 1)
        self._looking = self._loop.call_later(_EVERY_S, self._look)
