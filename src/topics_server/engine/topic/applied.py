"""What applying one entry changed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

Flips = dict[int, "array[int]"]


class Applied(msgspec.Struct, frozen=True, gc=False):
    """What applying one entry did beside changing state.

    `flips`: sealed rows newly deleted, by segment, to be flipped on disk (they are pending in the
    topic too). `dead_segments`: those without a live record, see `sealing.plan_drops`. `ring`:
    readers may find something new.
    """

    ring: bool = False
    deleted: int = 0
    flips: Flips = {}
    dead_segments: Sequence[int] = ()


NOTHING: Final = Applied()
RUNG: Final = Applied(ring=True)


class RouterCursor(msgspec.Struct):
    """How far a router into this topic is: it examined its source up to `seq`; copies made."""

    seq: int
    copy_count: int = 0
