"""Jobs of one queue that were not claimed yet. Pure.

A ready job needs no memory here: `next_seq` is a cursor over the topic's log, so a million ready
jobs cost nothing. Only two kinds are stored: delayed jobs until they are due, and ranges before the
cursor that may still have unclaimed jobs (due jobs, and jobs that a claim skipped). A range only
says where to search: the log shows which jobs are live, and the book which are leased. Used by
`lease_book` and `kept_jobs`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

import msgspec
import numpy as np
import numpy.typing as npt

from topics_server.queue.leases.timers import JobTimers, shifted

Seqs = npt.NDArray[np.uint64]


class LiveJobs(msgspec.Struct, frozen=True, gc=False):
    """A topic's live records at one moment.

    `floor_seq`: the first live, unexpired seq, `head_seq + 1` if there is none; `count`: the number
    of live records; `next_live(seq)`: the first live seq from `seq` on, `head_seq + 1` if there is
    none.
    """

    floor_seq: int
    head_seq: int
    count: int
    next_live: Callable[[int], int]


class UnclaimedJobs:
    """The jobs of one queue that were never leased."""

    __slots__ = ("_delayed", "_ranges", "_runs", "delayed_until", "next_seq", "timed")

    def __init__(self) -> None:
        self.next_seq = 1
        # The due time of each delayed job, and the delayed jobs by due time.
        self.delayed_until: dict[int, int] = {}
        # Delayed jobs whose records named the time; the other jobs have a delay.
        self.timed: set[int] = set()
        self._delayed = JobTimers()
        # Runs of jobs appended with a delay, from the cursor on: the cursor skips them.
        self._runs: deque[tuple[int, int]] = deque()
        self._ranges: list[tuple[int, int]] = []

    @property
    def is_plain(self) -> bool:
        """Whether no unclaimed job is below the cursor, and no job from it on is delayed."""
        return not (self._ranges or self._runs)

    def delay(self, seq: int, at_ms: int, *, is_time: bool = False) -> None:
        """Note a job that is claimable from `at_ms` on. `is_time`: its record named that time."""
        if seq in self.delayed_until:
            return
        self.delayed_until[seq] = at_ms
        if is_time:
            self.timed.add(seq)
        self._delayed.put(seq, at_ms)
        if seq < self.next_seq:
            return
        runs = self._runs
        if not runs or runs[-1][1] < seq - 1:
            runs.append((seq, seq))
        elif runs[-1][1] == seq - 1:
            runs[-1] = (runs[-1][0], seq)
        else:
            # This is a replayed entry that a snapshot includes, or a move that was undone.
            merged = runs_of([*self.delayed_until])
            self._runs = deque(run for run in merged if run[1] >= self.next_seq)

    def forget(self, seq: int) -> None:
        """Forget the delay of a job that was deleted or claimed."""
        at_ms = self.delayed_until.pop(seq, None)
        if at_ms is not None:
            self._delayed.discard(seq, at_ms)
            self.timed.discard(seq)

    def forget_all(self) -> None:
        """Forget all delays: every job is deleted."""
        self.delayed_until, self.timed, self._delayed = {}, set(), JobTimers()

    def shift(self, by_ms: int) -> None:
        """Adjust times after the wall clock was set by `by_ms`: delays keep their length."""
        for seq, at_ms in self.delayed_until.items():
            if seq not in self.timed:
                self._delayed.discard(seq, at_ms)
                self.delayed_until[seq] = moved = shifted(at_ms, by_ms)
                self._delayed.put(seq, moved)

    def advance(self, now_ms: int) -> None:
        """Make jobs whose time has come claimable."""
        due: list[int] = []
        for _, seqs in self._delayed.take_due(now_ms):
            due.extend(seqs)
        if due:
            for seq in due:
                del self.delayed_until[seq]
            self.timed.difference_update(due)
            self.offer(runs_of(due))

    def next_due_ms(self) -> int | None:
        """The time of the next delayed job; None if there is none."""
        return self._delayed.next_ms()

    def due(self, now_ms: int) -> list[int]:
        """The delayed jobs whose time has come."""
        first_ms = self._delayed.next_ms()
        return [] if first_ms is None or first_ms > now_ms else list(self._delayed.due(now_ms))

    def offer(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Search these seqs too, although the cursor has passed them."""
        new = list(ranges)
        if len(new) * 4 > len(self._ranges):
            self._ranges += new
            heapify(self._ranges)
        else:
            for found in new:
                heappush(self._ranges, found)

    def readmit(self, first_seq: int, last_seq: int) -> None:
        """Search those of these seqs again that the cursor has passed."""
        if first_seq < self.next_seq:
            self.offer([(first_seq, min(last_seq, self.next_seq - 1))])

    def take(self, seq: int) -> None:
        """Note that the job is leased, and no longer unclaimed."""
        self.forget(seq)
        while self._runs and self._runs[0][0] <= seq:
            first, last = self._runs.popleft()
            self._pass(first, last)
        self._pass(seq, seq)

    def take_all(self, seqs: Sequence[int]) -> None:
        """`take` for ascending jobs."""
        if self._runs or self.delayed_until:
            for seq in seqs:
                self.take(seq)
            return
        if seqs[-1] - seqs[0] == len(seqs) - 1:
            self._pass(seqs[0], seqs[-1])
            return
        for seq in seqs:
            if self.next_seq < seq:
                self.offer([(self.next_seq, seq - 1)])
            if self.next_seq <= seq:
                self.next_seq = seq + 1

    def _pass(self, first_seq: int, last_seq: int) -> None:
        """Move the cursor past a range; the part before the cursor must still be searched."""
        if self.next_seq < first_seq:
            self.offer([(self.next_seq, first_seq - 1)])
        self.next_seq = max(self.next_seq, last_seq + 1)

    def first(self, limit: int, live: LiveJobs, is_taken: Callable[[int], bool]) -> list[int]:
        """The lowest seqs that may be leased, ascending, up to `limit`."""
        if limit <= 0:
            return []
        passed = self._first_passed(limit, live, is_taken)
        unseen = self._first_unseen(limit, live, is_taken)
        if not passed:
            return unseen
        return sorted({*passed, *unseen})[:limit]

    def _first_passed(
        self, limit: int, live: LiveJobs, is_taken: Callable[[int], bool]
    ) -> list[int]:
        """Live jobs of the ranges. Useless parts of the ranges are dropped."""
        found: list[int] = []
        kept: list[tuple[int, int]] = []
        seq = live.floor_seq
        while self._ranges and len(found) < limit:
            first, last = heappop(self._ranges)
            seq = max(seq, first)
            start = 0
            while len(found) < limit:
                seq = live.next_live(seq)
                if seq > last:
                    break
                if not is_taken(seq) and seq not in self.delayed_until:
                    found.append(seq)
                    start = start or seq
                seq += 1
            if start or seq <= last:
                kept.append((start or seq, last))
        self.offer(kept)
        return found

    def _first_unseen(
        self, limit: int, live: LiveJobs, is_taken: Callable[[int], bool]
    ) -> list[int]:
        """Live jobs from the cursor on; the cursor skips useless seqs."""
        found: list[int] = []
        runs = iter(self._runs)
        run = next(runs, None)
        seq = max(self.next_seq, live.floor_seq)
        while len(found) < limit:
            seq = live.next_live(seq)
            if seq > live.head_seq:
                break
            while run is not None and run[1] < seq:
                run = next(runs, None)
            if run is not None and run[0] <= seq:
                seq = run[1] + 1
                continue
            if not is_taken(seq):
                found.append(seq)
            seq += 1
        self.next_seq = max(self.next_seq, found[0] if found else live.head_seq + 1)
        while self._runs and self._runs[0][1] < self.next_seq:
            self._runs.popleft()
        return found

    def lowest_seq(self) -> int:
        """Every unclaimed job, except delayed ones, is at this seq or above."""
        return min(self.next_seq, self._ranges[0][0]) if self._ranges else self.next_seq


def seqs_in_runs(known: Collection[int], firsts: Seqs, lasts: Seqs) -> Seqs:
    """The known seqs of these ascending runs, in any order; by numpy, without a step for each."""
    seqs = np.fromiter(known, np.uint64, len(known))
    runs = np.searchsorted(firsts, seqs, "right")
    return seqs[(runs > 0) & (seqs <= lasts[runs - 1])]


def runs_of(seqs: list[int]) -> list[tuple[int, int]]:
    """Unbroken runs of distinct seqs, ascending."""
    return list(_runs(sorted(seqs)))


def _runs(seqs: list[int]) -> Iterator[tuple[int, int]]:
    first = last = 0
    for seq in seqs:
        if seq == last + 1 and first:
            last = seq
            continue
        if first:
            yield first, last
        first = last = seq
    if first:
        yield first, last
