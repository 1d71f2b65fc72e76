"""One shard's writer: groups entries, writes, syncs and reports them.

Loop thread only, except `_work`, which the shard's worker runs. The file side (`wal_file`) belongs
to the worker while a job is under way (`job`), else to the loop; there is no lock. `sync_policy`
stores how far the shard is written and synced, and decides when it syncs.

The entries of one loop turn form a group. At the end of the turn the loop itself writes and reports
a group, if the group is small, the shard is idle, few bytes are unsynced, and the group fits below
the filled mark. The worker does everything else, one job and one report to the loop at a time
(ARCHITECTURE, Small writes). A shard also counts as idle while the worker only fills ahead or only
syncs, unless writes wait for that sync or every queued entry waits for a sync itself
(`docs/decisions/0016-writes-beside-a-sync.md`).

    OPEN ──write refused──> FAILED ──reopen──> FULL ──room found──> OPEN
      └──────sync failed──────┴───────────────────┴──> READ_ONLY (for ever)

FAILED accepts nothing; FULL accepts urgent entries and checks for room every `RETRY_MS`. A failed
group fails everything queued behind it, so the undone entries are a suffix that no reader has seen.
Called by `journal`.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import Final

from topics_server.runtime.clock import monotonic_s
from topics_server.runtime.metrics import log
from topics_server.values.entries import Entry
from topics_server.values.errors import Code, ReadOnly, StorageError, TopicsError
from topics_server.values.limits import (
    LOOP_UNSYNCED_BYTES_MAX,
    LOOP_WRITE_BYTES_MAX,
    SHARD_QUEUE_BYTES_MAX,
)
from topics_server.values.storage_types import ShardProgress
from topics_server.wal.format.frames import encode_entry
from topics_server.wal.journal.group_commit import NextGroup, QueuedFrame, take_group
from topics_server.wal.journal.sync_policy import SYNC_AHEAD_BYTES, SyncPolicy, Watermarks
from topics_server.wal.journal.wal_file import WalFile
from topics_server.wal.journal.workers import BlockingWorker
from topics_server.wal.journal.writer_jobs import (
    DISK_FULL,
    READ_ONLY,
    CutBack,
    FinishFile,
    HoldEndMark,
    MakeRoom,
    Outcome,
    SyncOnly,
    WriteCounters,
    WriteGroup,
    WriteJob,
    do_job,
)

# How often a full shard checks for room.
RETRY_MS: Final = 500


class WriterState(enum.Enum):
    """See the module's diagram; CLOSED is the state after a clean stop."""

    OPEN = "open"
    FAILED = "failed"
    FULL = "full"
    READ_ONLY = "read_only"
    CLOSED = "closed"


# Access to an enum member costs a lookup, and each write needs several.
_OPEN: Final = WriterState.OPEN
_FULL: Final = WriterState.FULL


class WalWriter:
    """One shard, open for writing."""

    def __init__(
        self,
        number: int,
        tail: WalFile,
        worker: BlockingWorker,
        loop: asyncio.AbstractEventLoop,
        *,
        sync_interval_ms: int,
        observe_sync_us: Callable[[float], None] | None = None,
        on_backlog: Callable[[], None] | None = None,
        on_unknown: Callable[[], None] | None = None,
    ) -> None:
        self.number: Final = number
        self.tail: Final = tail
        self.counters: Final = WriteCounters()
        self.state = _OPEN
        self.on_progress: Callable[[ShardProgress], None] | None = None
        self._worker: Final = worker
        self._loop: Final = loop
        self._sync_interval_s: Final = sync_interval_ms / 1000
        self._observe_sync_us: Final = observe_sync_us
        # Called when more was submitted than the loop can write at once.
        self._on_backlog: Final = on_backlog
        # Called on the worker after a failed sync, before any answer is sent.
        self._on_unknown: Final = on_unknown
        self._queue: Final[deque[QueuedFrame]] = deque()
        self._queue_bytes = 0
        self._marks: Final = Watermarks(tail.last_lsn)
        self._policy: Final = SyncPolicy()
        self._probe_wanted = False
        self.job: WriteJob | None = None
        self._flush_scheduled = False
        # A write on the loop failed beside a job: its remains are cut once the job is done.
        self._cut_wanted = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        # Callers that wait until the end mark is durable.
        self._holders: list[asyncio.Future[None]] = []
        # Whether they have waited for a job already: then the mark is written before the queue.
        self._is_hold_due = False
        # The first entry of a group whose write on the loop failed, until its remains are cut.
        self._failed_lsn = 0
        # While the shard is closing: the future that gets the outcome of the job under way.
        self._closing_job: asyncio.Future[Outcome] | None = None

    # -- the loop's side -------------------------------------------------------------------

    @property
    def queue_depth(self) -> int:
        """Entries waiting to be written."""
        return len(self._queue)

    @property
    def queue_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._queue_bytes

    @property
    def synced_lsn(self) -> int:
        """Every entry of the shard up to this lsn is synced."""
        return self._marks.synced_lsn

    @property
    def is_synced(self) -> bool:
        """Whether everything that was submitted is synced."""
        return self._marks.synced_lsn >= self._marks.submitted_lsn

    def submit(self, lsn: int, entry: Entry, *, urgent: bool, sync: bool) -> None:
        """Queue one entry; written at the end of this turn at the earliest."""
        if self.state is not _OPEN:
            self._check_state(urgent)
        if self._queue_bytes > SHARD_QUEUE_BYTES_MAX:
            self.counters.submit_full += 1
            raise TopicsError(
                Code.THROTTLED, "the journal's queue is full", {"limit": "journal_queue"}
            )
        marks = self._marks
        assert lsn > marks.submitted_lsn, "lsns of a shard ascend"
        marks.submitted_lsn = lsn
        buffers = encode_entry(lsn, entry)
        frame_bytes = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        self._queue.append(QueuedFrame(lsn, buffers, frame_bytes, sync, urgent))
        self._queue_bytes += frame_bytes
        if self._queue_bytes > LOOP_WRITE_BYTES_MAX and self._on_backlog is not None:
            self._on_backlog()
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def flush(self) -> None:
        """Write the queued entries now, if the loop would write them at the end of the turn."""
        if self._queue and self.state is _OPEN and self._may_write_here():
            self._write_here()

    def _check_state(self, urgent: bool) -> None:
        if self.state is WriterState.READ_ONLY:
            raise TopicsError(
                Code.STORAGE_READ_ONLY,
                "a disk sync failed: this storage is read-only until the server restarts",
                {"shard": self.number},
            )
        assert self.state is not WriterState.CLOSED, "nothing is submitted after close"
        if self.state is WriterState.FAILED or not urgent:
            self.counters.submit_full += 1
            raise TopicsError(Code.THROTTLED, "the disk is full", {"limit": "disk"})

    def reopen(self) -> None:
        """Accept urgent entries and check for room: everything from `failed_from` on is undone."""
        if self.state is not WriterState.FAILED:
            return
        self.state = _FULL
        self._marks.take_back()
        self._probe()

    def _probe(self) -> None:
        self._probe_timer = None
        self._probe_wanted = True
        self._pump_later()

    def start(self) -> None:
        """Make room before the first entry arrives."""
        self._pump_later()

    def _pump_later(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    async def sync_all(self) -> None:
        """Return once everything submitted so far is synced. Raises `ReadOnly`."""
        if self.state is WriterState.READ_ONLY:
            raise ReadOnly("a sync failed", self.tail.path)
        target = self._marks.submitted_lsn
        if self._marks.synced_lsn >= target:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((target, future))
        self._policy.is_due = True
        self._pump_later()
        try:
            await future
        finally:
            # An error refers to this frame, so the frame must not refer to the future.
            del future

    async def hold_end(self) -> None:
        """Return once a durable end mark covers the synced entries, or cannot cover them.

        If the journal's file is damaged later, the next start then notices the loss of these
        entries, on which other files may rely.
        """
        if self.state not in (_OPEN, _FULL) or self.tail.is_held:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._holders.append(future)
        self._pump_later()
        await future

    def _release_holders(self) -> None:
        holders, self._holders = self._holders, []
        self._is_hold_due = False
        for future in holders:
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        """Write and sync the queued entries, then close the worker and the files."""
        try:
            await self.sync_all()
        except ReadOnly as error:
            log.warning("shard %d ends read-only: %s", self.number, error)
        is_read_only = self.state is WriterState.READ_ONLY
        self.state = WriterState.CLOSED
        self._release_holders()
        if self.job is not None:
            is_read_only |= (await self._job_done()).error == READ_ONLY
        if not is_read_only:
            # Write the end mark, so that the sync is known after a power cut too.
            self._start(FinishFile())
            await self._job_done()
        for timer in (self._sync_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._worker.close()
        self.tail.close()

    async def _job_done(self) -> Outcome:
        self._closing_job = self._loop.create_future()
        return await self._closing_job

    # -- turns -----------------------------------------------------------------------------

    def _flush(self) -> None:
        self._flush_scheduled = False
        if len(self._queue) > self.counters.queue_depth_peak:
            self.counters.queue_depth_peak = len(self._queue)
        self._pump()

    def _pump(self) -> None:
        """Start jobs or write, until the worker is busy or nothing is left to do."""
        tail, policy = self.tail, self._policy
        while self.state is _OPEN or self.state is _FULL:
            if self._queue and self._may_write_here():
                self._write_here()
            elif self.job is not None:
                return
            elif self._is_hold_due:
                self._start(HoldEndMark())
            elif policy.is_due and self._may_sync_first():
                self._start(SyncOnly())
            elif self._queue:
                group = self._take()
                sync = group.sync_from_lsn is not None or policy.wants_sync
                self._start(WriteGroup(group, sync))
            elif (
                policy.is_due
                or policy.from_lsns
                or tail.written_bytes - tail.covered_bytes > SYNC_AHEAD_BYTES
            ) and policy.wants_sync_of(tail.written_bytes - tail.covered_bytes):
                self._start(SyncOnly())
            elif self._holders:
                self._start(HoldEndMark())
            elif self._probe_wanted or (self.state is _OPEN and tail.wants_room):
                self._start(MakeRoom())
            else:
                if tail.written_bytes == tail.covered_bytes:
                    self._mark()
                return

    def _may_sync_first(self) -> bool:
        """Whether a sync is due for which no ticket waits: the loop writes the queue during it."""
        return (
            self._policy.is_due
            and not self._waiters
            and self.state is _OPEN
            and self._policy.may_sync_first(self._queue)
        )

    def _may_write_here(self) -> bool:
        """Whether the loop may write the next group itself, without blocking."""
        size, tail, policy = self._queue_bytes, self.tail, self._policy
        return (
            (self.job is None or self._may_write_beside(self.job))
            and size <= LOOP_WRITE_BYTES_MAX
            and (not (policy.is_due or policy.from_lsns) or policy.allows_write(self._queue))
            and tail.written_bytes - tail.covered_bytes + size <= LOOP_UNSYNCED_BYTES_MAX
            and tail.has_room(size)
            and (bool(tail.spares) or all(frame.urgent for frame in self._queue))
        )

    def _may_write_beside(self, job: WriteJob) -> bool:
        if self.state is not _OPEN:
            return False
        match job:
            case SyncOnly():
                return self._policy.writes_beside_syncs
            case MakeRoom():
                return not self.tail.may_rotate
            case _:
                return isinstance(job, HoldEndMark)

    def _take(self) -> NextGroup:
        group = take_group(self._queue)
        self._queue_bytes -= group.frames_bytes
        assert self._queue_bytes >= 0
        return group

    def _write_here(self) -> None:
        queue = self._queue
        if len(queue) == 1:
            # A single entry in this turn is by far the most frequent case.
            frame = queue.popleft()
            lsn, sync_from = frame.lsn, frame.lsn if frame.sync else None
            group = NextGroup(
                frame.buffers, frame.frame_bytes, 1, lsn, lsn, sync_from, frame.urgent
            )
        else:
            group = take_group(queue)
        self._queue_bytes -= group.frames_bytes
        assert self._queue_bytes >= 0
        began_s = monotonic_s()
        # An entry that waits for a sync is synced next, so its end mark already says so.
        sync_follows = group.sync_from_lsn is not None and self.job is None
        try:
            self.tail.write(group, sync_follows=sync_follows)
        except StorageError as error:
            log.warning("shard %d: write refused: %s", self.number, error)
            self._fail_group(group)
            return
        took_ms = (monotonic_s() - began_s) * 1000
        if self.job is not None and isinstance(self.job, SyncOnly):
            self._policy.write_took(took_ms)
        # The body of `_note_written`, inlined, because every small group is written here.
        assert self._marks.written_lsn < group.first_lsn <= group.last_lsn
        self._marks.written_lsn = group.last_lsn
        if group.sync_from_lsn is not None:
            self._policy.ticket_waits(group.sync_from_lsn)
        if self._sync_timer is None:
            self._sync_later()
        self._report(write_ms=took_ms)
        # The answers are sent: none of them waits for the counters and the end mark.
        self.counters.loop_groups += 1
        self._count(group, took_ms)
        # A report may write more. If that fails, the worker may cut and write the end mark.
        if not self.tail.is_noted and not isinstance(self.job, CutBack):
            self.tail.note_end()

    def _count(self, group: NextGroup, write_ms: float) -> None:
        counters = self.counters
        count, write_us = group.frame_count, int(write_ms * 1000)
        counters.groups += 1
        counters.frames += count
        counters.bytes += group.frames_bytes
        # The body of `StepHistogram.observe`, inlined twice, because every group is counted.
        frames, times = counters.group_frames, counters.write_us
        frames.counts[count.bit_length()] += 1
        frames.total += count
        times.counts[write_us.bit_length()] += 1
        times.total += write_us

    def _note_written(self, group: NextGroup) -> None:
        marks = self._marks
        assert marks.written_lsn < group.first_lsn <= group.last_lsn <= marks.submitted_lsn
        marks.written_lsn = group.last_lsn
        if group.sync_from_lsn is not None:
            self._policy.ticket_waits(group.sync_from_lsn)
        if self._sync_timer is None:
            self._sync_later()

    def _sync_later(self) -> None:
        self._sync_timer = self._loop.call_later(self._sync_interval_s, self._sync_due)

    def _sync_due(self) -> None:
        self._sync_timer = None
        if self.tail.dirty_bytes or self.job is not None:
            self._policy.is_due = True
            self._pump()

    def _mark(self) -> None:
        try:
            self.tail.mark()
        except StorageError as error:
            log.warning("shard %d: mark refused: %s", self.number, error)
            self._start(CutBack())

    # -- the worker's side -----------------------------------------------------------------

    def _start(self, job: WriteJob) -> None:
        assert self.job is None
        self.job = job
        match job:
            case WriteGroup(sync=True):
                self._policy.is_due = False
            case SyncOnly():
                self._policy.is_due = False
                self.tail.note_syncing()
            case MakeRoom():
                self._probe_wanted = False
            case HoldEndMark():
                self.tail.begin_hold()
            case _:
                pass
        self._worker.run(lambda: self._work(job), self._done)

    def _work(self, job: WriteJob) -> Outcome:
        """On the worker; never raises."""
        try:
            outcome = do_job(self.tail, job)
        except Exception as error:
            # A defect must not leave clients waiting for ever: report the outcome as unknown.
            log.exception("shard %d: defect in the writer", self.number)
            outcome = Outcome(job, error=READ_ONLY, reason=repr(error))
        is_finish = isinstance(job, FinishFile)
        if outcome.error == READ_ONLY and not is_finish and self._on_unknown is not None:
            self._on_unknown()
        return outcome

    def _done(self, outcome: Outcome) -> None:
        """Report the outcome of a job and start the next one; runs on the loop."""
        self.job = None
        job = outcome.job
        if self._closing_job is not None:
            if outcome.error == READ_ONLY:
                log.warning("shard %d: read-only while closing: %s", self.number, outcome.reason)
            self._closing_job.set_result(outcome)
            return
        if outcome.error == READ_ONLY:
            self._become_read_only(outcome.reason)
            return
        group = job.group if isinstance(job, WriteGroup) else None
        if isinstance(job, HoldEndMark):
            self._release_holders()
        self._is_hold_due = bool(self._holders)
        if outcome.written and group is not None:
            self._note_written(group)
            self._count(group, outcome.write_ms)
        if outcome.synced:
            self._note_synced(outcome.sync_ms)
        if self._cut_wanted:
            self._cut_wanted = False
            self._start(CutBack())
            return
        if outcome.error == DISK_FULL and isinstance(job, MakeRoom):
            # No entry has failed, but ordinary entries are refused until there is room.
            self._wait_for_room(outcome.reason)
        elif outcome.error == DISK_FULL or self.state is WriterState.FAILED:
            assert not outcome.written
            self._report_failure(group.first_lsn if group is not None else None, outcome)
        else:
            if isinstance(job, MakeRoom) and self.state is _FULL:
                log.info("shard %d: there is space again", self.number)
                self.state = _OPEN
            if outcome.written or outcome.synced:
                self._report(write_ms=outcome.write_ms, sync_ms=outcome.sync_ms)
        if outcome.synced and isinstance(job, SyncOnly):
            # The answers are sent: none of them waits for the end mark.
            self.tail.note_synced()
        self._pump()

    def _note_synced(self, sync_ms: float) -> None:
        self.counters.syncs += 1
        if self._observe_sync_us is not None:
            self._observe_sync_us(sync_ms * 1000)
        self._marks.sync(self.tail.synced_lsn)
        if self._policy.synced(self._marks.synced_lsn):
            log.info(
                "shard %d: on this disk writes wait for syncs; it no longer overlaps them",
                self.number,
            )
        if self.tail.dirty_bytes and self._sync_timer is None:
            # The loop wrote these meanwhile.
            self._sync_later()

    # -- reports ---------------------------------------------------------------------------

    def _report(
        self,
        *,
        failed_from: int | None = None,
        error: str | None = None,
        write_ms: float = 0.0,
        sync_ms: float = 0.0,
    ) -> None:
        if failed_from is not None:
            self._release_holders()
        if self.on_progress is not None:
            shard, marks = self.number, self._marks
            written, synced = marks.written_lsn, marks.synced_lsn
            self.on_progress(
                ShardProgress(shard, written, synced, failed_from, error, write_ms, sync_ms)
            )
        if self._waiters:
            self._resolve_waiters(failed_from)

    def _resolve_waiters(self, failed_from: int | None) -> None:
        waiters, self._waiters = self._waiters, []
        for target, future in waiters:
            if failed_from is not None:
                # Everything above is undone; lsns between may belong to other shards.
                target = min(target, self._marks.written_lsn)
            if future.done():
                continue
            if self.state is WriterState.READ_ONLY:
                future.set_exception(ReadOnly("a sync failed", self.tail.path))
            elif self._marks.synced_lsn >= target:
                future.set_result(None)
            else:
                self._waiters.append((target, future))
        # Another caller waits: sync again as soon as possible.
        self._policy.is_due = self._policy.is_due or bool(self._waiters)

    def _fail_group(self, group: NextGroup) -> None:
        """Cut the remains of the loop's failed write on the worker, then answer."""
        self.state = WriterState.FAILED
        self._failed_lsn = group.first_lsn
        self._drop_queue()
        if self.job is None:
            self._start(CutBack())
        else:
            self._cut_wanted = True

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._queue_bytes = 0

    def _report_failure(self, first_lsn: int | None, outcome: Outcome) -> None:
        failed_from = self._failed_lsn if first_lsn is None else first_lsn
        assert failed_from > self._marks.written_lsn
        self.state = WriterState.FAILED
        self._drop_queue()
        log.warning(
            "shard %d: entries from lsn %d refused: %s",
            self.number,
            failed_from,
            outcome.reason or "write failed",
        )
        self._report(failed_from=failed_from, error=DISK_FULL)

    def _wait_for_room(self, reason: str) -> None:
        if self.state is _OPEN:
            log.warning("shard %d: no space for the next journal file: %s", self.number, reason)
            self.state = _FULL
        if self._probe_timer is None:
            self._probe_timer = self._loop.call_later(RETRY_MS / 1000, self._probe)

    def _become_read_only(self, reason: str) -> None:
        log.error("shard %d is read-only until a restart: %s", self.number, reason)
        failed_from = self._policy.failed_from(self._marks.written_lsn)
        self.state = WriterState.READ_ONLY
        self._drop_queue()
        self._report(failed_from=failed_from, error=READ_ONLY)
        self._tell_failure()

    def _tell_failure(self) -> None:
        """Write the end mark: before it has the failed sync, a loss looks like damage."""
        if self.state is WriterState.READ_ONLY and self.tail.is_mark_refused:
            self.tail.note_syncing()
            self._loop.call_later(RETRY_MS / 1000, self._tell_failure)
