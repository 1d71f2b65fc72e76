"""Work on many frames in short steps, between which the other threads run.

A thread that computes holds the interpreter's lock until another one has asked for it for as long
as the switch interval, so the loop would wait that long again and again: at 1,000 appends a second,
for more than one of a hundred. Between the steps the thread sleeps, and the loop has the lock at
once. Called by `journal_tail` and `shipper`.
"""

from __future__ import annotations

from typing import Final

from topics_server.runtime.clock import pause

# About a fifth of a millisecond.
STEP_FRAMES: Final = 64
_PAUSE_S: Final = 0.0005


class Steps:
    """Counts frames, and sleeps behind each step of them. *Blocking.*"""

    def __init__(self) -> None:
        self._frames = 0.0

    def did(self, frames: float) -> None:
        """So many frames were worked on, or as much was done as for so many."""
        self._frames += frames
        if self._frames >= STEP_FRAMES:
            self._frames = 0
            pause(_PAUSE_S)
