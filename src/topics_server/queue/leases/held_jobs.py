"""The jobs of a lease book by seq; jobs that one claim leased share one value. Pure.

A worker mostly completes the jobs of a claim together, and nothing else happens to them. So a
claim of many jobs stores one `LeasedTogether` under each of their seqs. The first access to a
single job gives this job and its neighbors a value of their own (`HeldJob`), which then may change.
The jobs of a large claim are not separated all at once: one call may access a thousand jobs, each
of another claim. Used by `kept_jobs` and `lease_book`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import ItemsView, Sequence
from itertools import repeat
from typing import Final

from topics_server.queue.leases.jobs import HeldJob

# From this number of jobs on, a claim stores one value for all of them.
MANY_JOBS: Final = 8
# How many neighbors one access separates. The rows of `LeasedTogether.seqs` form groups of this
# many; all jobs of a group share the value, or none.
_GROUP_JOBS: Final = 16
# `peek(jobs, seq)`: `jobs.get(seq)` that may return a shared value, which must not be changed.
peek: Final = dict.get


class LeasedTogether(HeldJob, gc=False, kw_only=True):
    """Jobs that one claim leased, each for the first time: `seqs`, ascending.

    The fields of `HeldJob` are those of each job, except that `lease_id` is the id of the first
    job; the ids ascend by one. The book has all of these jobs while the value `is_whole`: none of
    them was separated. After that the value does not change any more.
    """

    seqs: list[int]
    is_whole: bool = True


class HeldJobs(dict[int, HeldJob]):
    """`get`, `[]` and `items` give each job a value of its own; `look` and `together` do not."""

    __slots__ = ()

    def add_together(self, together: LeasedTogether) -> None:
        """Add the jobs of a claim; none may be here yet."""
        self.update(dict.fromkeys(together.seqs, together))

    def together(self, seqs: Sequence[int]) -> LeasedTogether | None:
        """The value that exactly these jobs share; None if there is none."""
        found = peek(self, seqs[0])
        if type(found) is LeasedTogether and found.is_whole and found.seqs == seqs:
            return found
        return None

    def remove_together(self, together: LeasedTogether) -> None:
        """Remove the jobs that share this value."""
        for seq in together.seqs:
            del self[seq]

    def get(self, seq: int, default: None = None) -> HeldJob | None:  # type: ignore[override]
        """The job of this seq; None if there is none."""
        job = peek(self, seq)
        return self._split(seq, job) if type(job) is LeasedTogether else job

    def __getitem__(self, seq: int) -> HeldJob:
        """The job of this seq, which must be here."""
        job = super().__getitem__(seq)
        return self._split(seq, job) if type(job) is LeasedTogether else job

    def each(self, seqs: Sequence[int]) -> list[HeldJob | None]:
        """`get` of several seqs; faster than one by one."""
        if len(seqs) == 1:
            return [self.get(seqs[0])]
        found = list(map(peek, repeat(self), seqs))
        if LeasedTogether in map(type, found):
            found = [self.get(seq) for seq in seqs]
        return found

    def items(self) -> ItemsView[int, HeldJob]:  # type: ignore[override]
        """All jobs, each with a value of its own."""
        for seq in self:
            self.get(seq)
        return super().items()

    def look(self, seq: int) -> HeldJob | None:
        """`get` for a caller that changes nothing: the jobs go on sharing their value."""
        job = peek(self, seq)
        if type(job) is not LeasedTogether:
            return job
        lease_id = job.lease_id + bisect_left(job.seqs, seq)
        return HeldJob(lease_id, job.node, job.at_ms, 1, job.claimed_ts, flags=job.flags)

    def _split(self, seq: int, together: LeasedTogether) -> HeldJob:
        """Give the jobs of a group their own values; returns that of `seq`."""
        seqs, node, at_ms, ts, flags = (
            together.seqs,
            together.node,
            together.at_ms,
            together.claimed_ts,
            together.flags,
        )
        together.is_whole = False
        at = bisect_left(seqs, seq)
        at -= at % _GROUP_JOBS
        for lease_id, each in enumerate(seqs[at : at + _GROUP_JOBS], together.lease_id + at):
            self[each] = HeldJob(lease_id, node, at_ms, 1, ts, 0, 0, 0, flags)
        return self[seq]
