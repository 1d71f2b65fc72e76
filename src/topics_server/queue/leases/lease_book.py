"""One queue's leases: holder, deadline, next job, delivery count. Pure.

No I/O and no clock: times are arguments, in ms of the wall clock; when the clock is set, `shift`
moves every duration's end. `decide_*` methods return the entry that makes the change; the only
change that they make themselves is to move due jobs. A pending entry makes its jobs *busy*: no
claimer gets them until the entry is applied or undone. Acks and moves make their jobs busy too.

A job that was never leased is not in the book (see `unclaimed`). A lease is over when `now >
deadline`; then any claimer may get the job. Until then the job stays with its holder, whose late
ack, nack or extend is still valid. Invariants: a job is in at most one of the three timers, and in
none while it is busy; every job in the book is live, because the book observes deletes and floors.
Called by `queue/leases/lease_table` (entries) and `queue/service` (everything else); on the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from topics_server.queue.leases.fair_share import deal, divide
from topics_server.queue.leases.held_jobs import MANY_JOBS as MANY_JOBS
from topics_server.queue.leases.held_jobs import LeasedTogether
from topics_server.queue.leases.holders import holds_together, leased, matched, views_after
from topics_server.queue.leases.jobs import (
    ACKING,
    LEAVING,
    MOVING,
    Counts,
    HeldJob,
    LeaseView,
    Matched,
    seqs_of,
)
from topics_server.queue.leases.jobs import Ask as Ask
from topics_server.queue.leases.jobs import Claim as Claim
from topics_server.queue.leases.jobs import Claims as Claims
from topics_server.queue.leases.jobs import DeadJob as DeadJob
from topics_server.queue.leases.jobs import LeasedJobs as Claimed
from topics_server.queue.leases.jobs import LostLease as LostLease
from topics_server.queue.leases.kept_jobs import KeptJobs
from topics_server.queue.leases.rubbish import Rubbish
from topics_server.queue.leases.timers import shifted
from topics_server.queue.leases.unclaimed import LiveJobs as LiveJobs
from topics_server.values.entries import LeaseEntry, LeasesExtended, LeasesGranted, LeasesReleased

# The maximum of dead jobs that one claim reports for the dead-letter topic; the next claim
# continues.
DEAD_JOBS_PER_CLAIM: Final = 64


class LeaseBook(KeptJobs):
    """The leases of one queue. `next_id` gives lease ids, each once and never 0.

    `leases_lsn`, `topic_lsn`: the newest included entries of the leases and of the topic.
    `rubbish`: takes the jobs of a purge.
    """

    def __init__(
        self, queue_id: int, next_id: Callable[[], int], rubbish: Rubbish | None = None
    ) -> None:
        super().__init__(rubbish)
        self.queue_id = queue_id
        self.leases_lsn = 0
        self.topic_lsn = 0
        self.dead_lettered = 0
        self._next_id = next_id

    # -- claiming --------------------------------------------------------------------------

    def decide_claim(
        self, now_ms: int, live: LiveJobs, asks: Sequence[Ask], max_deliveries: int
    ) -> Claims:
        """Jobs for every claimer, in one pass: returned jobs first, then unclaimed ones.

        `max_deliveries`: 0 if there is no limit or no dead-letter topic. The caller stages every
        entry and begins the move of every dead job before it does anything else.
        """
        self._advance(now_ms, live)
        wanted = [ask.max_jobs for ask in asks]
        limit = sum(wanted)
        seqs, dead = self._find_returned(limit, live, max_deliveries)
        lost = [self._lost(seq) for seq in [*seqs, *dead] if self.jobs[seq].lease_id]
        seqs += self.unclaimed.first(limit - len(seqs), live, self.jobs.__contains__)
        hands = deal(seqs, divide(len(seqs), wanted))
        return Claims(
            [
                self._claim(now_ms, ask, sorted(hand)) if hand else None
                for ask, hand in zip(asks, hands, strict=True)
            ],
            [DeadJob(seq, self.jobs[seq].deliveries, self.jobs[seq].error) for seq in dead],
            lost,
        )

    def _find_returned(
        self, limit: int, live: LiveJobs, max_deliveries: int
    ) -> tuple[list[int], list[int]]:
        """Returned jobs to lease, in order, and those without deliveries left."""
        found: list[int] = []
        dead: list[int] = []
        gone: list[int] = []

        def wants_more(seq: int) -> bool:
            if live.next_live(seq) != seq:
                gone.append(seq)  # lost by damage, which has no entry
            elif max_deliveries and self.jobs[seq].deliveries >= max_deliveries:
                dead.append(seq)
            else:
                found.append(seq)
            return len(found) < limit and len(dead) < DEAD_JOBS_PER_CLAIM

        if limit > 0:
            self._places.returned.visit(wants_more)
        self.forget_seqs(gone)
        return found, dead

    def _claim(self, now_ms: int, ask: Ask, seqs: list[int]) -> Claim:
        jobs: list[Claimed] = []
        for seq in seqs:
            known = self.jobs.get(seq)
            deliveries = known.deliveries + 1 if known is not None else 1
            jobs.append(Claimed(seq, self._next_id(), deliveries))
        entry = LeasesGranted(
            queue_id=self.queue_id,
            node=ask.node,
            ts=now_ms,
            deadline_ms=now_ms + ask.lease_ms,
            connection=ask.connection,
            leases=[(job.seq, job.lease_id) for job in jobs],
        )
        return Claim(entry, jobs)

    def _lost(self, seq: int) -> LostLease:
        job = self.jobs[seq]
        return LostLease(seq, job.lease_id, job.node, job.at_ms - 1, job.deliveries)

    # -- claims without an entry -----------------------------------------------------------

    def first_unclaimed(
        self, now_ms: int, limit: int, live: LiveJobs, live_from: Callable[[int, int], list[int]]
    ) -> list[int] | None:
        """The jobs that a single claimer gets now; None if there are returned jobs, which go first.

        `live_from(seq, limit)`: the first live seqs from `seq` on. Like a decision, it only moves
        due jobs.
        """
        self._advance(now_ms, live)
        if self._places.returned.count:
            return None
        unclaimed = self.unclaimed
        if unclaimed.is_plain:
            seqs = live_from(max(unclaimed.next_seq, live.floor_seq), limit)
            if self.jobs.keys().isdisjoint(seqs):
                return seqs
        return unclaimed.first(limit, live, self.jobs.__contains__)

    def lease_unclaimed(
        self, now_ms: int, seqs: Sequence[int], first_id: int, node: str, deadline_ms: int
    ) -> None:
        """Lease jobs that were never leased and are due; the ids of the leases ascend by one.

        The effect is that of `stage` and `apply` for an entry that is not journaled.
        """
        assert seqs
        jobs, at_ms, lease_id = self.jobs, deadline_ms + 1, first_id
        if len(seqs) >= MANY_JOBS:
            jobs.add_together(LeasedTogether(first_id, node, at_ms, 1, now_ms, seqs=list(seqs)))
        else:
            for seq in seqs:
                jobs[seq] = HeldJob(lease_id, node, at_ms, 1, now_ms)
                lease_id += 1
        self._places.leased.put_all(seqs, at_ms)
        self.unclaimed.take_all(seqs)

    # -- acks, nacks, extends, releases ----------------------------------------------------

    def decide_ack(
        self, node: str, seqs: Sequence[int], lease_ids: Sequence[int] | None
    ) -> Matched:
        """The jobs that the node may complete (§10.4); each counts once."""
        self._forget_gone(seqs)
        together = self.jobs.together(seqs) if len(seqs) >= MANY_JOBS else None
        if together is not None and holds_together(together, node, lease_ids):
            return Matched(list(seqs), [], [])
        return matched(self.jobs, node, seqs, lease_ids)

    def decide_nack(
        self,
        now_ms: int,
        node: str,
        seqs: Sequence[int],
        lease_ids: Sequence[int] | None,
        delay_ms: int,
        error: str = "",
    ) -> tuple[LeasesReleased | None, list[int]]:
        """The release of these jobs, claimable again after the delay, and the skipped seqs.

        `error`: the reason; a job keeps it until another nack gives one.
        """
        self._forget_gone(seqs)
        hit, skipped = leased(self.jobs, node, seqs, lease_ids)
        if not hit:
            return None, skipped
        jobs = [(seq, now_ms + delay_ms) for seq in hit]
        return LeasesReleased(self.queue_id, now_ms, jobs, error), skipped

    def decide_extend(
        self,
        now_ms: int,
        node: str,
        seqs: Sequence[int],
        lease_ids: Sequence[int] | None,
        lease_ms: int,
    ) -> tuple[LeasesExtended | None, list[int]]:
        """New deadlines for these jobs, and the skipped seqs."""
        self._forget_gone(seqs)
        hit, skipped = leased(self.jobs, node, seqs, lease_ids)
        if not hit:
            return None, skipped
        return LeasesExtended(self.queue_id, now_ms, now_ms + lease_ms, hit), skipped

    def decide_release(self, now_ms: int, connection: int) -> LeasesReleased | None:
        """The release of the unfinished jobs of a push stream that has ended."""
        held = sorted(self._connections.get(connection, ()))
        self._forget_gone(held)
        held = sorted(self._connections.get(connection, ()))
        jobs = [(seq, now_ms) for seq in held if not self.jobs[seq].flags]
        return LeasesReleased(self.queue_id, now_ms, jobs) if jobs else None

    def decide_give_back(
        self, now_ms: int, leases: Iterable[tuple[int, int]]
    ) -> LeasesReleased | None:
        """The release of these leases: their jobs could not be delivered."""
        jobs: list[tuple[int, int]] = []
        leases = list(leases)
        self._forget_gone([seq for seq, _ in leases])
        for seq, lease_id in leases:
            job = self.jobs.get(seq)
            if job is not None and job.lease_id == lease_id and not job.flags:
                jobs.append((seq, now_ms))
        return LeasesReleased(self.queue_id, now_ms, jobs) if jobs else None

    # -- acks and moves under way ----------------------------------------------------------

    def begin_ack(self, seqs: Sequence[int]) -> None:
        """The delete of these jobs was submitted; once it is applied, they are forgotten."""
        jobs = self.jobs
        together = jobs.together(seqs) if len(seqs) >= MANY_JOBS else None
        if together is not None and self._places.leased.discard_all(seqs, together.at_ms):
            assert together.flags == 0
            self._busy_count += len(seqs)
            together.flags = ACKING
            return
        if seqs and self._places.leased.discard_all(seqs, jobs[seqs[0]].at_ms):
            # The jobs have one deadline, so that most likely one claim leased them; none is busy.
            self._busy_count += len(seqs)
            for job in jobs.each(seqs):
                assert job is not None
                assert job.flags == job.pending == 0
                job.flags = ACKING
            return
        for seq in seqs:
            job = jobs[seq]
            assert not job.flags
            if not job.is_busy:
                self._make_busy(seq, job)
            job.flags |= ACKING

    def cancel_ack(self, seqs: Iterable[int]) -> None:
        """The delete failed: restore the leases."""
        for seq in seqs:
            job = self.jobs.get(seq)
            if job is not None and job.flags & ACKING:
                job.flags &= ~ACKING
                self._unpark(seq, job)

    def movable(self, now_ms: int, seqs: Iterable[int]) -> list[int]:
        """The seqs that are neither leased nor busy."""
        self._advance(now_ms, None)
        seqs = list(seqs)
        self._forget_gone(seqs)
        return [seq for seq in seqs if self._is_movable(now_ms, self.jobs.get(seq))]

    def _is_movable(self, now_ms: int, job: HeldJob | None) -> bool:
        return job is None or not (job.is_busy or (job.lease_id and job.at_ms > now_ms))

    def begin_move(self, seqs: Iterable[int]) -> list[int]:
        """Reserve these jobs for a move to another topic; returns those that were not busy."""
        begun: list[int] = []
        for seq in seqs:
            job = self.jobs.get(seq)
            if job is None:
                job = self._add_busy(seq)
            elif job.is_busy:
                continue
            else:
                self._make_busy(seq, job)
                self._end_lease(seq, job)
            job.flags |= MOVING
            self._moving_count += 1
            begun.append(seq)
        return begun

    def cancel_move(self, seqs: Iterable[int], available_ms: int) -> None:
        """Make jobs that certainly did not move claimable again from this time on."""
        for seq in seqs:
            job = self.jobs.get(seq)
            if job is None or not job.flags & MOVING:
                continue
            job.flags &= ~MOVING
            self._moving_count -= 1
            job.at_ms = max(job.at_ms, available_ms)
            self._unpark(seq, job)

    # -- looking ---------------------------------------------------------------------------

    def counts(self, now_ms: int, live: LiveJobs) -> Counts:
        """The gauges as of now."""
        self._advance(now_ms, live)
        # The body of `ready` and `in_flight`, for one moment.
        (taken, delayed), moving = self._unready(), self._moving_count
        ready = max(0, live.count - max(0, taken) - delayed)
        return Counts(ready, max(0, taken - moving), delayed, moving, self.dead_lettered)

    def ready(self, live: LiveJobs) -> int:
        """The number of claimable jobs, as of the moment of the preceding call."""
        # Damage removes records without an entry: a damaged job counts until a claim finds it.
        taken, delayed = self._unready()
        return max(0, live.count - max(0, taken) - delayed)

    def in_flight(self, now_ms: int) -> int:
        """Unexpired leases and busy jobs."""
        self._advance(now_ms, None)
        return max(0, self._unready()[0] - self._moving_count)

    def _unready(self) -> tuple[int, int]:
        """The numbers of jobs that are leased or busy, and of delayed ones."""
        places = self._places
        delayed = len(self.unclaimed.delayed_until) - self._gone_delayed.count
        taken = places.leased.count + self._busy_count - self._gone.count
        return taken, places.resting.count + max(0, delayed)

    def next_due_ms(self, now_ms: int) -> int | None:
        """The time, after now, at which the next job becomes claimable."""
        self._advance(now_ms, None)
        times = (
            self._places.leased.next_ms(),
            self._places.resting.next_ms(),
            self.unclaimed.next_due_ms(),
        )
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    def leases_after(self, now_ms: int, after_seq: int, limit: int) -> list[LeaseView]:
        """Leases that have not expired, by seq."""
        return views_after(self.jobs, self._gone.has, now_ms, after_seq, limit)

    def connection_count(self, now_ms: int, connection: int) -> int:
        """The number of unexpired leases of a push stream."""
        held = self._connections.get(connection, ())
        return sum(self.jobs[seq].at_ms > now_ms and not self._gone.has(seq) for seq in held)

    def connections_of(self, seqs: Iterable[int]) -> set[int]:
        """The push streams that delivered these leases."""
        found = {self.jobs[seq].connection for seq in seqs}
        found.discard(0)
        return found

    # -- entries ---------------------------------------------------------------------------

    def stage(self, entry: LeaseEntry) -> None:
        """Make the jobs of a staged entry busy."""
        for seq in seqs_of(entry):
            job = self.jobs.get(seq)
            if job is None:
                assert isinstance(entry, LeasesGranted), "only a claim takes a fresh job"
                job = self._add_busy(seq)
            elif not job.is_busy:
                self._make_busy(seq, job)
            job.pending += 1
            if not isinstance(entry, LeasesExtended):
                assert not job.flags & LEAVING, "a lease ends once"
                job.flags |= LEAVING

    def undo(self, entry: LeaseEntry) -> None:
        """Undo a staged entry that has failed."""
        for seq in seqs_of(entry):
            job = self._unstage(seq, entry)
            if job is not None:
                self._unpark(seq, job)

    def _unstage(self, seq: int, entry: LeaseEntry) -> HeldJob | None:
        """The job without this pending entry, still busy; None if it was deleted meanwhile."""
        job = self.jobs.get(seq)
        if job is not None:
            job.pending -= 1
            assert job.pending >= 0
            if not isinstance(entry, LeasesExtended):
                job.flags &= ~LEAVING
        return job

    def apply(self, lsn: int, entry: LeaseEntry, *, is_staged: bool, shift_ms: int = 0) -> None:
        """Apply an entry. `lsn`: 0 if it is not journaled. `is_staged`: live, not replayed.

        `shift_ms`: by how much the wall clock was set since the entry was decided.
        """
        for index, seq in enumerate(seqs_of(entry)):
            job = self._unstage(seq, entry) if is_staged else self._replayed(lsn, seq, entry)
            if job is None:
                continue
            job.lsn = max(job.lsn, lsn)
            if isinstance(entry, LeasesExtended):
                if job.lease_id:
                    job.at_ms = shifted(entry.deadline_ms + 1, shift_ms)
            else:
                self._end_lease(seq, job)
                if isinstance(entry, LeasesGranted):
                    self._grant(seq, job, entry, entry.leases[index][1])
                    job.at_ms = shifted(job.at_ms, shift_ms)
                else:
                    job.at_ms = shifted(entry.jobs[index][1], shift_ms)
                    job.error = entry.error or job.error
            self._unpark(seq, job)

    def _replayed(self, lsn: int, seq: int, entry: LeaseEntry) -> HeldJob | None:
        """The job that a replayed entry changes, made busy; None if the entry is included."""
        job = self.jobs.get(seq)
        if job is None:
            # A release or extend of a job that was not leased in the capture has no effect.
            return self._add_busy(seq) if isinstance(entry, LeasesGranted) else None
        if lsn <= job.lsn:
            return None
        assert not job.is_busy
        self._make_busy(seq, job)
        return job

    def _grant(self, seq: int, job: HeldJob, entry: LeasesGranted, lease_id: int) -> None:
        job.lease_id = lease_id
        job.node = entry.node
        job.at_ms = entry.deadline_ms + 1
        job.deliveries += 1
        self.taking.discard(seq)
        job.claimed_ts = entry.ts
        job.connection = entry.connection
        if entry.connection:
            self._connections.setdefault(entry.connection, set()).add(seq)

    # -- facts of the topic ----------------------------------------------------------------

    def delay(self, seq: int, at_ms: int, *, is_time: bool = False) -> None:
        """Note a record that is claimable only from `at_ms` on.

        `is_time`: the record named that time, so it does not move if the clock is set.
        """
        if seq not in self.jobs:
            self.unclaimed.delay(seq, at_ms, is_time=is_time)

    # -- places ----------------------------------------------------------------------------

    def _advance(self, now_ms: int, live: LiveJobs | None) -> None:
        """Move jobs whose time has come to their new place."""
        if self._gone.count:
            self._forget_gone(list(self._places.due(now_ms)))
        self._places.advance(now_ms)
        if self.unclaimed.delayed_until:
            if self._gone_delayed.count:
                due = self.unclaimed.due(now_ms)
                self.forget_seqs([seq for seq in due if self._gone_delayed.has(seq)])
            self.unclaimed.advance(now_ms)
        if live is not None and live.floor_seq > self._floor_seq:
            self.forget_below(live.floor_seq)

    def shift(self, by_ms: int) -> None:
        """Adjust times to a wall clock set by `by_ms`: leases and delays keep their length."""
        self._places.shift(self.jobs, by_ms)
        self.unclaimed.shift(by_ms)

    def _add_busy(self, seq: int) -> HeldJob:
        unclaimed = self.unclaimed
        job = HeldJob(at_ms=unclaimed.delayed_until.get(seq, 0), is_timed=seq in unclaimed.timed)
        self.jobs[seq] = job
        self.unclaimed.take(seq)
        self.taking.add(seq)
        self._busy_count += 1
        return job

    def _unpark(self, seq: int, job: HeldJob) -> None:
        """Put the job into its place, unless it is still busy."""
        if job.is_busy:
            return
        self._busy_count -= 1
        if job.is_unclaimed:
            del self.jobs[seq]
            self.taking.remove(seq)
            if job.at_ms:
                self.unclaimed.delay(seq, job.at_ms, is_time=job.is_timed)
            else:
                self.unclaimed.offer([(seq, seq)])
        elif job.lease_id:
            self._places.leased.put(seq, job.at_ms)
        else:
            self._places.resting.put(seq, job.at_ms)

    # -- snapshots and restarts ------------------------------------------------------------

    def adopt(self, seq: int, job: HeldJob) -> None:
        """Add a job from a snapshot."""
        assert seq not in self.jobs
        assert not job.is_busy
        assert not job.is_unclaimed
        job.connection = 0
        self.unclaimed.forget(seq)
        self.jobs[seq] = job
        self._busy_count += 1
        self._unpark(seq, job)

    def finish_recovery(self, live: LiveJobs, *, keeps_leases: bool) -> None:
        """After replay: forget jobs that do not exist, and leases that are not durable."""
        self.forget_below(live.floor_seq)
        while self._forget_some():
            pass
        for seq in [*self.jobs, *self.unclaimed.delayed_until]:
            if live.next_live(seq) != seq:
                self.forget(seq, seq)
        # No client is connected now; a kept lease lasts until its deadline.
        self._connections.clear()
        for seq, job in self.jobs.items():
            assert not job.is_busy
            job.connection = 0
            if job.lease_id and not keeps_leases:
                self._make_busy(seq, job)
                self._end_lease(seq, job)
                job.at_ms = 0
                self._unpark(seq, job)
