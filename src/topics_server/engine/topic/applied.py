"""The changes that applying one entry made."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

Flips = dict[int, "array[int]"]


class Applied(msgspec.Struct, frozen=True, gc=False):
    """The effects of applying one entry, other than the changed state.

    `flips`: by segment, the newly deleted sealed rows whose flags must be set on disk (the topic
    has them as pending too). `dead_segments`: the segments without a live record, see
    `seal_plan.plan_drops`. `notify`: readers may find something new.
    """

    notify: bool = False
    deleted: int = 0
    flips: Flips = {}
    dead_segments: Sequence[int] = ()


NOTHING: Final = Applied()
NOTIFY: Final = Applied(notify=True)


class RouterCursor(msgspec.Struct):
    """A router's progress: it has examined its source up to `seq`, and made this many copies."""

    seq: int
    copy_count: int = 0
