"""Splits work on many frames into short steps, between which other threads run.

A thread that computes holds the interpreter's lock until another one has asked for it for as long
as the switch interval, so the loop would often wait that long: at 1,000 appends a second, for more
than one append in a hundred. Between two steps the thread sleeps, and the loop gets the lock at
once. Called by `journal_tail` and `shipper`.
"""

from __future__ import annotations

from typing import Final

from topics_server.runtime.clock import pause

# The frames of one step: about a fifth of a millisecond.
STEP_FRAMES: Final = 64
_PAUSE_S: Final = 0.0005


class Steps:
    """Counts frames, and sleeps after each step. *Blocking.*"""

    def __init__(self) -> None:
        self._frames = 0.0

    def did(self, frames: float) -> None:
        """Count this many frames, or other work that takes as long."""
        self._frames += frames
        if self._frames >= STEP_FRAMES:
            self._frames = 0
            pause(_PAUSE_S)
