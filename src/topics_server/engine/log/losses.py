"""The losses of a log: holes, and the reasons below the floor.

A `Hole` is a range of seqs whose records were lost without a delete: damage, or a restart of an
ephemeral topic. `Losses` keeps the reasons of the seqs below the evict floor, in a bounded number
of ranges. `engine/read/page` reads both to make tombstones; `engine/log/log.py` keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics_server.values.limits import LOSS_RANGES_MAX
from topics_server.values.model import Hole, LossReason


class Losses:
    """The reasons of lost ranges below the floor.

    The ranges are ascending and disjoint; adjacent ranges with the same reason are merged.
    """

    __slots__ = ("ranges",)

    def __init__(self, ranges: list[Hole] | None = None) -> None:
        self.ranges: list[Hole] = list(ranges or ())

    def add(self, first_seq: int, last_seq: int, reason: LossReason) -> None:
        """Note a range above all noted ones; beyond the bound the two oldest ranges are merged."""
        assert first_seq <= last_seq
        ranges = self.ranges
        if ranges:
            newest = ranges[-1]
            assert newest.last_seq < first_seq, "the floor only rises"
            if newest.reason is reason:
                ranges[-1] = Hole(newest.first_seq, last_seq, reason)
                return
        ranges.append(Hole(first_seq, last_seq, reason))
        if len(ranges) > LOSS_RANGES_MAX:
            one, two = ranges[0], ranges[1]
            both = one.reason if one.reason is two.reason else LossReason.MIXED
            ranges[0:2] = [Hole(one.first_seq, two.last_seq, both)]
        assert len(ranges) <= LOSS_RANGES_MAX

    def reasons(self, first_seq: int, last_seq: int) -> set[LossReason]:
        """All reasons that are noted for seqs of the range."""
        return {
            hole.reason
            for hole in self.ranges
            if hole.first_seq <= last_seq and hole.last_seq >= first_seq
        }


def with_hole(holes: list[Hole], new: Hole) -> list[Hole]:
    """Add a hole. The result is ascending and disjoint; adjacent holes of one reason are merged.

    The hole for records that a router could not copy is never merged.
    """
    assert new.first_seq <= new.last_seq
    merged: list[Hole] = []
    for hole in sorted([*holes, new], key=lambda hole: hole.first_seq):
        before = merged[-1] if merged else None
        is_alike = before and before.reason is hole.reason and not (before.missed or hole.missed)
        if before and is_alike and hole.first_seq <= before.last_seq + 1:
            last = max(before.last_seq, hole.last_seq)
            merged[-1] = Hole(before.first_seq, last, hole.reason)
        elif before and hole.first_seq <= before.last_seq:
            # If a seq has two causes, the first one is reported, once.
            if hole.last_seq > before.last_seq:
                merged.append(Hole(before.last_seq + 1, hole.last_seq, hole.reason))
        else:
            merged.append(hole)
    return merged


def without_damage(holes: Sequence[Hole], ranges: Sequence[tuple[int, int]]) -> list[Hole]:
    """The holes without damage inside these ascending ranges of seqs."""
    kept: list[Hole] = []
    for hole in holes:
        first = hole.first_seq
        if hole.reason is LossReason.DAMAGED:
            for start, end in ranges:
                if start <= hole.last_seq and end >= first:
                    if first < start:
                        kept.append(Hole(first, start - 1, hole.reason))
                    first = end + 1
        if first == hole.first_seq:
            kept.append(hole)
        elif first <= hole.last_seq:
            kept.append(Hole(first, hole.last_seq, hole.reason))
    return kept


def only_reason(reasons: set[LossReason]) -> LossReason:
    """The only reason, or `mixed` for several reasons or none."""
    return next(iter(reasons)) if len(reasons) == 1 else LossReason.MIXED
