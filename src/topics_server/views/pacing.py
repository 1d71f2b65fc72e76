"""How many records a batch has, and how long a view rests behind one. Pure.

A batch costs the event loop a message there and back, however few records it has. With many views
of busy topics these messages would take the loop from the appends, so all views together send a
bounded number of them a second; each batch then has more records. Loop thread only; called by
`build`.
"""

from __future__ import annotations

from typing import Final

# One transaction for what arrived in so long.
PAUSE_S: Final = 0.005
# All views together: 400 batches a second.
_SPACE_S: Final = 0.0025
# The rows of a view that nobody waits for are at most so much older for the sake of others.
_PAUSE_MAX_S: Final = 0.25


class Pacer:
    """The batches of all views of a server."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """How long a view rests behind a batch; `now_s`: the time of the loop."""
        self._free_s = min(max(now_s, self._free_s) + _SPACE_S, now_s + _PAUSE_MAX_S)
        return max(PAUSE_S, self._free_s - now_s)


# Records of a batch: first so many, then as many as one transaction applies in good time.
_RECORDS: Final = 500
_RECORDS_MIN: Final = 250
_RECORDS_MAX: Final = 8_000
_FAST_MS: Final = 15.0
_SLOW_MS: Final = 60.0


class BatchSize:
    """The records of one view's next batch, as many as others who wait for the process can bear."""

    def __init__(self) -> None:
        self.records = _RECORDS

    def note(self, count: int, ms: float) -> None:
        """A batch of `count` records took so long to apply."""
        if ms > _SLOW_MS:
            self.records = max(_RECORDS_MIN, self.records // 2)
        elif ms < _FAST_MS and count >= self.records:
            self.records = min(_RECORDS_MAX, self.records * 2)
