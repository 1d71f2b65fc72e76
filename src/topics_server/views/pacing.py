"""Spaces the batches of views that nobody waits for.

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
