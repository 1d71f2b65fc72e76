"""The size of a batch, and the pause of a view between two batches.

Even a small batch costs the event loop one message to the apply process and one back, and the
transaction in that process takes a processor from the server. So views without a waiting query
pause after each batch and continue together: `feed` serves all of them in one step, and between two
steps the loop serves appends. Loop thread only; called by `build` and `feed`.
"""

from __future__ import annotations

import asyncio
from typing import Final

# The shortest pause: a view applies the records of this time in one transaction.
PAUSE_S: Final = 0.005
# The pause for each busy view: all views together make at most 400 transactions a second.
_SPACE_S: Final = 0.0025
# The longest pause of a view without a waiting query.
_PAUSE_MAX_S: Final = 0.25


def pause_s(views: int) -> float:
    """Pause in seconds between two batches of a view, for this number of busy views."""
    return min(max(PAUSE_S, views * _SPACE_S), _PAUSE_MAX_S)


class Pacer:
    """The pauses of all views of a server: they end together."""

    def __init__(self) -> None:
        self._resting: list[asyncio.Future[None]] = []
        # The number of views that continued after the last pause: as many are expected after the
        # next.
        self._views = 1

    def rest(self) -> asyncio.Future[None]:
        """A future that ends when the paused views continue; to end its pause, a view sets it."""
        loop = asyncio.get_running_loop()
        if not self._resting:
            loop.call_later(pause_s(self._views), self._go_on)
        rest: asyncio.Future[None] = loop.create_future()
        self._resting.append(rest)
        return rest

    def _go_on(self) -> None:
        resting, self._resting = self._resting, []
        self._views = len(resting)
        for rest in resting:
            if not rest.done():
                rest.set_result(None)


# The records of a batch: first this many, then as many as one transaction applies quickly.
_RECORDS: Final = 500
_RECORDS_MIN: Final = 250
_RECORDS_MAX: Final = 8_000
_FAST_MS: Final = 15.0
_SLOW_MS: Final = 60.0


class BatchSize:
    """The number of records of a view's next batch, so that other views do not wait too long."""

    def __init__(self) -> None:
        self.records = _RECORDS

    def note(self, count: int, ms: float) -> None:
        """Note how long it took to apply a batch of `count` records."""
        if ms > _SLOW_MS:
            self.records = max(_RECORDS_MIN, self.records // 2)
        elif ms < _FAST_MS and count >= self.records:
            self.records = min(_RECORDS_MAX, self.records * 2)
