"""When Python's collector of cycles looks at what lives, so that no turn of the loop is long.

A collection stops the loop for about 1 us an object it looks at. So the young are looked at often
and few at a time, the old never: all of 100,000 topics would be 130 ms, and nothing of ours is a
cycle that lives that long (`api/connections` sees to it that uvicorn's are not either).

Under pressure few does not hold: what hundreds of clients wait for is all young, and a collection
is 4 ms and more, a dozen times a second, in which it finds nothing. Then there is one in ten
seconds, and one when so much more lives than before that there may be many cycles among it.

Used by `server`; one a process.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

_THRESHOLDS: Final = (700, 2, 1_000_000)
# Under pressure: how often there is a collection, seconds; how many objects more than at the last
# one bring one before that; how often that is asked.
_EVERY_S: Final = 10.0
_MORE_MAX: Final = 10_000
_LOOK_S: Final = 0.1


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
    """Has fewer of them while there is pressure: `told` is called when it begins and ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._looking: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def told(self, is_pressed: bool) -> None:
        """Pressure has begun, or is over."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if is_pressed:
            gc.disable()
            self._due_s = self._loop.time() + _EVERY_S
            self._looking = self._loop.call_later(_LOOK_S, self._look)
        else:
            gc.enable()

    def _look(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._due_s or gc.get_count()[0] > _MORE_MAX:
            gc.collect(0)
            self._due_s = now_s + _EVERY_S
        self._looking = self._loop.call_later(_LOOK_S, self._look)
