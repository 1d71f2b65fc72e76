"""The jobs of one queue in a book, and the removal of deleted ones. Pure.

A delete removes a bounded number of jobs at once. The jobs of a larger delete stay, as `gone`, and
later calls remove them; every query skips such jobs. If all jobs are deleted, they are removed in
one step. This is the base of `lease_book`, which holds the rules of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from topics_server.queue.leases.gone import Gone, among
from topics_server.queue.leases.held_jobs import MANY_JOBS as MANY_JOBS
from topics_server.queue.leases.held_jobs import HeldJobs, LeasedTogether, peek
from topics_server.queue.leases.jobs import ACKING, MOVING, HeldJob
from topics_server.queue.leases.rubbish import FREED_JOBS, Rubbish
from topics_server.queue.leases.timers import JobPlaces
from topics_server.queue.leases.unclaimed import Seqs, UnclaimedJobs, seqs_in_runs


class KeptJobs:
    """`jobs`: jobs that were leased, or are about to be; `unclaimed`: all other jobs.

    `taking`: busy jobs that were never leased; a capture stores them as unclaimed.
    """

    def __init__(self, rubbish: Rubbish | None) -> None:
        self.unclaimed = UnclaimedJobs()
        self.jobs = HeldJobs()
        self.taking: set[int] = set()
        self._rubbish = Rubbish() if rubbish is None else rubbish
        self._places = JobPlaces()
        # Deleted jobs that are still in `jobs` and in `unclaimed`.
        self._gone, self._gone_delayed = Gone(), Gone()
        self._connections: dict[int, set[int]] = {}
        self._floor_seq = 1
        self._busy_count = 0
        self._moving_count = 0

    def is_gone(self, seq: int) -> bool:
        """Whether a job of the book is deleted."""
        return self._gone.has(seq) or self._gone_delayed.has(seq)

    def forget(self, first_seq: int, last_seq: int) -> None:
        """Forget deleted records, with their lease, delivery count and delay."""
        known = len(self.jobs) + len(self.unclaimed.delayed_until)
        if last_seq - first_seq < min(known, FREED_JOBS):
            self.forget_seqs(range(first_seq, last_seq + 1))
        elif known <= FREED_JOBS:
            seqs = chain(self.jobs, self.unclaimed.delayed_until)
            self.forget_seqs([seq for seq in seqs if first_seq <= seq <= last_seq])
        else:
            self._forget_many(np.array([first_seq], np.uint64), np.array([last_seq], np.uint64))

    def forget_runs(self, firsts: Seqs, lasts: Seqs) -> None:
        """`forget` of ascending runs, which may be many."""
        if len(firsts) == 1:
            self.forget(int(firsts[0]), int(lasts[0]))
        elif len(firsts) + int((lasts - firsts).sum()) <= FREED_JOBS:
            runs = map(range, firsts.tolist(), (lasts + 1).tolist())
            self.forget_seqs(chain.from_iterable(runs))
        else:
            self._forget_many(firsts, lasts)

    def _forget_many(self, firsts: Seqs, lasts: Seqs) -> None:
        """`forget` for more jobs than a turn of the loop can remove."""
        jobs = seqs_in_runs(self.jobs, firsts, lasts)
        delayed = seqs_in_runs(self.unclaimed.delayed_until, firsts, lasts)
        if len(jobs) + len(delayed) <= FREED_JOBS:
            self.forget_seqs(chain(jobs.tolist(), delayed.tolist()))
            return
        if len(jobs) == len(self.jobs) and len(delayed) == len(self.unclaimed.delayed_until):
            self._forget_all()
            return
        # Remove at once those that would be leased again next, so that no claim examines them.
        is_waiting = among(jobs, np.fromiter(self._places.waiting(), np.uint64))
        self.forget_seqs(jobs[is_waiting].tolist())
        self._gone.add(jobs[~is_waiting])
        self._gone_delayed.add(delayed)
        self._rubbish.later(self._forget_some)

    def _forget_some(self) -> bool:
        """Forget some of the deleted jobs; returns whether there are more."""
        for gone in (self._gone, self._gone_delayed):
            if gone:
                self._take_out(gone.take(FREED_JOBS))
                break
        return bool(self._gone or self._gone_delayed)

    def _forget_gone(self, seqs: Iterable[int]) -> None:
        """Forget those of these jobs that are deleted."""
        if self._gone.count:
            self.forget_seqs([seq for seq in seqs if self._gone.has(seq)])

    def _forget_all(self) -> None:
        """Forget every job, including those of entries in flight."""
        self._rubbish.add(self.jobs)
        self._gone.clear()
        self._gone_delayed.clear()
        self.jobs, self._places = HeldJobs(), JobPlaces()
        self._connections, self.taking = {}, set()
        self._busy_count = self._moving_count = 0
        self.unclaimed.forget_all()

    def forget_seqs(self, seqs: Iterable[int]) -> None:
        """`forget` of exact seqs."""
        if self._gone.count or self._gone_delayed.count:
            seqs = list(seqs)
            self._gone.note(seqs)
            self._gone_delayed.note(seqs)
        self._take_out(seqs)

    def forget_deleted(self, seqs: Sequence[int]) -> None:
        """`forget` of the ascending seqs of one delete; the floor moves along with them."""
        together = self.jobs.together(seqs) if len(seqs) >= MANY_JOBS else None
        if together is not None and together.flags == ACKING and not self._gone.count:
            self.jobs.remove_together(together)
            self._busy_count -= len(seqs)
        else:
            self.forget_seqs(seqs)
        if seqs[0] == self._floor_seq and seqs[-1] - seqs[0] == len(seqs) - 1:
            self._floor_seq = seqs[-1] + 1

    def _take_out(self, seqs: Iterable[int]) -> None:
        jobs, delayed_until = self.jobs, self.unclaimed.delayed_until
        # Most jobs are in a timer; remove them from it together.
        timed: dict[int, list[int]] = {}
        acked = 0
        for seq in seqs:
            job = peek(jobs, seq)
            if type(job) is LeasedTogether:
                job = jobs[seq]
            if job is None:
                if seq in delayed_until:
                    self.unclaimed.forget(seq)
            elif job.pending or job.connection or job.flags not in (0, ACKING):
                self._remove(seq)
            else:
                if job.flags:
                    acked += 1
                else:
                    timed.setdefault(job.at_ms, []).append(seq)
                del jobs[seq]
        self._busy_count -= acked
        for at_ms, together in timed.items():
            self._places.take_out(together, at_ms)

    def forget_below(self, seq: int) -> None:
        """Forget every record below the floor."""
        first = self._floor_seq
        if seq > first:
            self._floor_seq = seq
            # Most often the jobs were acked: their deletes have taken them out.
            if seq - first > FREED_JOBS or not self._knows_none(range(first, seq)):
                self.forget(first, seq - 1)

    def _knows_none(self, seqs: range) -> bool:
        """Whether the book has none of these jobs; may be False for many seqs and few jobs."""
        jobs, delayed_until = self.jobs, self.unclaimed.delayed_until
        if len(seqs) > max(1, len(jobs) + len(delayed_until)):
            return False
        return jobs.keys().isdisjoint(seqs) and not (
            delayed_until and any(seq in delayed_until for seq in seqs)
        )

    def _remove(self, seq: int) -> None:
        job = self.jobs[seq]
        if not job.is_busy:
            self._make_busy(seq, job)
        self._end_lease(seq, job)
        self._busy_count -= 1
        self._moving_count -= bool(job.flags & MOVING)
        self.taking.discard(seq)
        del self.jobs[seq]

    def _make_busy(self, seq: int, job: HeldJob) -> None:
        """Take the job out of its timer; the caller sets the reason in the same step."""
        self._places.take_one(seq, job.at_ms)
        self._busy_count += 1

    def _end_lease(self, seq: int, job: HeldJob) -> None:
        if job.connection:
            held = self._connections[job.connection]
            held.discard(seq)
            if not held:
                del self._connections[job.connection]
        job.lease_id = job.connection = 0
        job.node = ""
