"""The changes that applying one entry made."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

Flips = dict[int, "array[int]"]


class Applied(msgspec.Struct, frozen=True, gc=False):
    """The effects of applying one entry beside the changed state.

    `flips`: sealed rows newly deleted, by segment, to be flipped on disk (they are pending in the
    topic too). `dead_segments`: those without a live record, see `seal_plan.plan_drops`. `notify`:
    readers may find something new.
    """

    notify: bool = False
    deleted: int = 0
    flips: Flips = {}
    dead_segments: Sequence[int] = ()


NOTHING: Final = Applied()
NOTIFY: Final = Applied(notify=True)


class RouterCursor(msgspec.Struct):
    """A router's progress into this topic: it examined its source up to `seq`; number of copies."""

    seq: int
    copy_count: int = 0
