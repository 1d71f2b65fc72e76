"""Finds rows of runs: those that seq runs cover, and those that a walk passes. Pure.

Vectorised, because a delete may cover thousands of runs. Called by `engine/log/log.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topics_server.engine.log.runs import Rows, Run


def end_of_walk(
    run: Run, start: int, count: int, weight: int, *, weighs: bool
) -> tuple[int, int, int]:
    """The first row after `start` before which there are `count` live rows of at least `weight`.

    Returns the row (the run's count if there is none), the number of live rows before it, and their
    bytes if `weighs`.
    """
    low, high = start, run.count
    walked = walked_bytes = 0
    while low < high:
        # The rows up to `low` do not suffice; those up to `high` do, or are all rows.
        mid = (low + high + 1) // 2
        passed = run.dead.count(0, low, mid)
        passed_bytes = run.live_bytes_between(low, mid) if weighs else 0
        is_enough = walked + passed >= count and walked_bytes + passed_bytes >= weight
        if is_enough and mid - low == 1:
            return mid, walked + passed, walked_bytes + passed_bytes
        if is_enough:
            high = mid
        else:
            low, walked, walked_bytes = mid, walked + passed, walked_bytes + passed_bytes
    return low, walked, walked_bytes


def covers(firsts: Rows, lasts: Rows, runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    """For each run: the half-open range of the seq runs that overlap it."""
    if len(runs) == 1:
        run = runs[0]
        low = np.searchsorted(lasts, run.first_seq)
        return [int(low)], [int(np.searchsorted(firsts, run.last_seq, side="right"))]
    low_ends = np.fromiter((run.first_seq for run in runs), np.int64, len(runs))
    high_ends = low_ends + np.fromiter((len(run.dead) for run in runs), np.int64, len(runs)) - 1
    lows = np.searchsorted(lasts, low_ends)
    highs = np.searchsorted(firsts, high_ends, side="right")
    return lows.tolist(), highs.tolist()


def rows_within(firsts: Rows, lasts: Rows, run: Run, are_single: bool) -> Rows:
    """Rows of the run that these seq runs cover, ascending; each of them overlaps the run.

    `are_single`: whether each seq run is one seq.
    """
    if are_single:
        return firsts - run.first_seq
    first, last = run.first_seq, run.last_seq
    starts = np.maximum(firsts, first) - first
    sizes = np.minimum(lasts, last) - first - starts + 1
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + sizes[0], dtype=np.int64)
    total = int(sizes.sum())
    # Each run's start, repeated for its rows, plus the position within the run.
    offsets = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    rows: Rows = offsets + np.arange(total, dtype=np.int64)
    return rows
