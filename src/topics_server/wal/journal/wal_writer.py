"""One shard's writer: groups entries, writes, syncs and reports them.

Loop thread only, but for `_work`, which the shard's worker runs. The file side (`tail`) belongs to
the worker while a job is under way (`_job`), else to the loop; there is no lock. What one loop turn
submits is a group: small, on an idle shard, below the filled mark and with little unsynced, it is
written at the end of the turn and reported there; everything else goes to the worker, one job and
one post to the loop at a time (ARCHITECTURE, Write 5). A shard is idle also while the worker only
fills ahead, or only syncs: unless writes turn out to wait for the sync, or all that is queued waits
for one itself (`docs/decisions/0016-writes-beside-a-sync.md`).

    OPEN ──write refused──> FAILED ──reopen──> FULL ──room found──> OPEN
      └──────sync failed──────┴───────────────────┴──> READ_ONLY (for ever)

FAILED takes nothing; FULL takes urgent entries and looks for room every `RETRY_MS`. A failed group
takes everything queued behind it along, so what is undone is a suffix that nobody has seen.
Called by `journal`.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import Final

from topics_server.runtime.clock import monotonic_ms
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
from topics_server.wal.journal.wal_file import WalFile
from topics_server.wal.journal.workers import BlockingWorker
from topics_server.wal.journal.writer_jobs import (
    DISK_FULL,
    READ_ONLY,
    Outcome,
    WriteCounters,
    WriteJob,
    do_job,
)

# How often a full shard looks for room.
RETRY_MS: Final = 500
# A write beside a sync that takes longer than this may have waited for it (or for a busy machine);
# if so many syncs in a row have such a write, this file system lets nobody write meanwhile.
_SLOW_WRITE_MS: Final = 5.0
_SLOW_SYNCS_MAX: Final = 3


class WriterState(enum.Enum):
    """See the module's diagram; CLOSED is the end of a clean stop."""

    OPEN = "open"
    FAILED = "failed"
    FULL = "full"
    READ_ONLY = "read_only"
    CLOSED = "closed"


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
        self.state = WriterState.OPEN
        self.on_progress: Callable[[ShardProgress], None] | None = None
        self._worker: Final = worker
        self._loop: Final = loop
        self._sync_interval_s: Final = sync_interval_ms / 1000
        self._observe_sync_us: Final = observe_sync_us
        # Told of more submitted than the loop writes in one go.
        self._on_backlog: Final = on_backlog
        # Called on the worker when a sync failed, before anyone is answered.
        self._on_unknown: Final = on_unknown
        self._queue: Final[deque[QueuedFrame]] = deque()
        self._queue_bytes = 0
        self._submitted_lsn = self._written_lsn = self._synced_lsn = tail.last_lsn
        # Of each group, written and not synced, the first entry whose sync somebody waits for.
        self._sync_from_lsns: Final[deque[int]] = deque()
        self._sync_wanted = False
        self._probe_wanted = False
        self._job: WriteJob | None = None
        self._flush_scheduled = False
        self._writes_beside_syncs = True
        self._had_slow_write = False
        self._slow_syncs = 0
        # A write on the loop failed beside a job: what it left is cut once that is done.
        self._cut_wanted = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        # Who waits until the end mark is durable.
        self._holders: list[asyncio.Future[None]] = []
        # First entry of a group that a write on the loop failed for, until its cut is done.
        self._failed_lsn = 0
        self._idle: asyncio.Future[None] | None = None
        self._is_read_only = False

    # -- the loop's side -------------------------------------------------------------------

    @property
    def queue_depth(self) -> int:
        """Entries waiting to be written."""
        return len(self._queue)

    @property
    def queue_bytes(self) -> int:
        """What waits to be written, in bytes."""
        return self._queue_bytes

    @property
    def synced_lsn(self) -> int:
        """Every entry of the shard up to this lsn is synced."""
        return self._synced_lsn

    def submit(self, lsn: int, entry: Entry, *, urgent: bool, sync: bool) -> None:
        """Queue one entry; written at the end of this turn at the earliest."""
        if self.state is not WriterState.OPEN:
            self._check_state(urgent)
        if self._queue_bytes > SHARD_QUEUE_BYTES_MAX:
            self.counters.submit_full += 1
            raise TopicsError(
                Code.THROTTLED, "the journal's queue is full", {"limit": "journal_queue"}
            )
        assert lsn > self._submitted_lsn, "lsns of a shard ascend"
        buffers = encode_entry(lsn, entry)
        frame_bytes = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        self._queue.append(QueuedFrame(lsn, buffers, frame_bytes, sync, urgent))
        self._queue_bytes += frame_bytes
        self._submitted_lsn = lsn
        if self._queue_bytes > LOOP_WRITE_BYTES_MAX and self._on_backlog is not None:
            self._on_backlog()
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def flush(self) -> None:
        """Write what is queued now, where the loop would write it at the end of the turn."""
        if self._queue and self.state is WriterState.OPEN and self._may_write_here():
            self._write_here(self._take())

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
        """Everything from `failed_from` on is undone: take urgent entries, look for room."""
        if self.state is not WriterState.FAILED:
            return
        self.state = WriterState.FULL
        self._submitted_lsn = self._written_lsn
        self._probe()

    def _probe(self) -> None:
        self._probe_timer = None
        self._probe_wanted = True
        self._pump_later()

    def start(self) -> None:
        """Make room ahead of the first entry."""
        self._pump_later()

    def _pump_later(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    async def sync_all(self) -> None:
        """Return once everything submitted so far is synced. Raises `ReadOnly`."""
        if self.state is WriterState.READ_ONLY:
            raise ReadOnly("a sync failed", self.tail.path)
        target = self._submitted_lsn
        if self._synced_lsn >= target:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((target, future))
        self._sync_wanted = True
        self._pump_later()
        await future

    async def hold_end(self) -> None:
        """Return once the end mark says durably how far the shard is synced now, or cannot.

        Then nothing that relies on these entries outlives them unnoticed, whatever becomes of the
        journal's file.
        """
        if self.state not in (WriterState.OPEN, WriterState.FULL) or self.tail.is_held:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._holders.append(future)
        self._pump_later()
        await future

    def _release_holders(self) -> None:
        holders, self._holders = self._holders, []
        for future in holders:
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        """Write and sync what is queued, then let go of worker and files."""
        try:
            await self.sync_all()
        except ReadOnly as error:
            log.warning("shard %d ends read-only: %s", self.number, error)
        self.state = WriterState.CLOSED
        self._release_holders()
        if self._job is not None:
            await self._job_done()
        if not self._is_read_only:
            # What was synced stays known over a power cut, however old the end mark on disk was.
            self._start(WriteJob(finish=True))
            await self._job_done()
        for timer in (self._sync_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._worker.close()
        self.tail.close()

    async def _job_done(self) -> None:
        self._idle = self._loop.create_future()
        await self._idle

    # -- turns -----------------------------------------------------------------------------

    def _flush(self) -> None:
        self._flush_scheduled = False
        if len(self._queue) > self.counters.queue_depth_peak:
            self.counters.queue_depth_peak = len(self._queue)
        self._pump()

    def _pump(self) -> None:
        """Do the next thing there is to do; ends with the worker busy, or with nothing to do."""
        while self.state in (WriterState.OPEN, WriterState.FULL):
            if self._queue and self._may_write_here():
                self._write_here(self._take())
            elif self._job is not None:
                return
            elif self._may_sync_first():
                self._start(WriteJob(sync=True))
            elif self._queue:
                group = self._take()
                sync = group.sync_from_lsn is not None or self._wants_sync()
                self._start(WriteJob(group, sync=sync))
            elif self._wants_sync() or self._is_half_dirty():
                self._start(WriteJob(sync=True))
            elif self._holders:
                self._start(WriteJob(hold=True))
            elif self._probe_wanted or (self.state is WriterState.OPEN and self.tail.wants_room):
                self._start(WriteJob(prepare=True))
            else:
                if not self.tail.dirty_bytes:
                    self._mark()
                return

    def _wants_sync(self) -> bool:
        return self._sync_wanted or bool(self._sync_from_lsns)

    def _may_sync_first(self) -> bool:
        """Whether a sync is due that nobody waits for, also of those in the queue.

        The loop writes beside it: a group in the same job would be told only with the sync.
        """
        return (
            self._writes_beside_syncs
            and self._sync_wanted
            and not self._sync_from_lsns
            and not self._waiters
            and self.state is WriterState.OPEN
            and not any(frame.sync for frame in self._queue)
        )

    def _is_half_dirty(self) -> bool:
        """Whether to sync ahead of time, so that the loop may go on writing."""
        return self._writes_beside_syncs and self.tail.dirty_bytes > LOOP_UNSYNCED_BYTES_MAX // 2

    def _may_write_here(self) -> bool:
        """Whether the group about to be taken may be written from the loop, without blocking."""
        size = self._queue_bytes
        return (
            (self._job is None or self._may_write_beside(self._job))
            and size <= LOOP_WRITE_BYTES_MAX
            and (not self._wants_sync() or self._may_write_before_sync())
            and self.tail.dirty_bytes + size <= LOOP_UNSYNCED_BYTES_MAX
            and self.tail.has_room(size)
            and (self.tail.has_spare or all(frame.urgent for frame in self._queue))
        )

    def _may_write_before_sync(self) -> bool:
        """Whether to write what is queued though a sync is due: it need not hear of that sync.

        What only waits for it shares one, in one job.
        """
        return self._writes_beside_syncs and not all(frame.sync for frame in self._queue)

    def _may_write_beside(self, job: WriteJob) -> bool:
        if self.state is not WriterState.OPEN:
            return False
        if job.only_prepares:
            return not self.tail.may_rotate
        return job.hold or (self._writes_beside_syncs and job.only_syncs)

    def _take(self) -> NextGroup:
        group = take_group(self._queue)
        self._queue_bytes -= group.frames_bytes
        assert self._queue_bytes >= 0
        return group

    def _write_here(self, group: NextGroup) -> None:
        began_ms = monotonic_ms()
        try:
            self.tail.write(group)
        except StorageError as error:
            log.warning("shard %d: write refused: %s", self.number, error)
            self._fail_group(group)
            return
        took_ms = monotonic_ms() - began_ms
        if took_ms > _SLOW_WRITE_MS and self._job is not None and self._job.only_syncs:
            self._had_slow_write = True
        self.counters.loop_groups += 1
        self._note_written(group, took_ms)
        self._report(write_ms=took_ms)

    def _note_written(self, group: NextGroup, write_ms: float) -> None:
        counters = self.counters
        counters.group_frames.observe(group.frame_count)
        counters.write_us.observe(int(write_ms * 1000))
        counters.groups += 1
        counters.frames += group.frame_count
        counters.bytes += group.frames_bytes
        assert group.first_lsn > self._written_lsn
        self._written_lsn = group.last_lsn
        if group.sync_from_lsn is not None:
            self._sync_from_lsns.append(group.sync_from_lsn)
        self._sync_later()

    def _sync_later(self) -> None:
        if self._sync_timer is None:
            self._sync_timer = self._loop.call_later(self._sync_interval_s, self._sync_due)

    def _sync_due(self) -> None:
        self._sync_timer = None
        if self.tail.dirty_bytes or self._job is not None:
            self._sync_wanted = True
            self._pump()

    def _mark(self) -> None:
        try:
            self.tail.mark()
        except StorageError as error:
            log.warning("shard %d: mark refused: %s", self.number, error)
            self._start(WriteJob(cut=True))

    # -- the worker's side -----------------------------------------------------------------

    def _start(self, job: WriteJob) -> None:
        assert self._job is None
        self._job = job
        if job.sync:
            self._sync_wanted = False
        if job.prepare:
            self._probe_wanted = False
        if job.only_syncs:
            self.tail.note_syncing()
        if job.hold:
            self.tail.begin_hold()
        self._worker.run(lambda: self._work(job), self._done)

    def _work(self, job: WriteJob) -> Outcome:
        """On the worker; never raises."""
        try:
            outcome = do_job(self.tail, job)
        except Exception as error:
            # A defect must not end in silence with clients waiting: the outcome is unknown.
            log.exception("shard %d: defect in the writer", self.number)
            outcome = Outcome(job, error=READ_ONLY, reason=repr(error))
        if outcome.error == READ_ONLY and not job.finish and self._on_unknown is not None:
            self._on_unknown()
        return outcome

    def _done(self, outcome: Outcome) -> None:
        """Back on the loop: tell what came of a job, and go on."""
        self._job = None
        job = outcome.job
        self._is_read_only |= outcome.error == READ_ONLY
        if self._idle is not None:
            if outcome.error == READ_ONLY:
                log.warning("shard %d: at its end: %s", self.number, outcome.reason)
            self._idle.set_result(None)
            return
        if outcome.error == READ_ONLY:
            self._become_read_only(outcome.reason)
            return
        if job.hold:
            self._release_holders()
        if outcome.written and job.group is not None:
            self._note_written(job.group, outcome.write_ms)
        if outcome.synced:
            if job.only_syncs:
                self.tail.note_synced()
            self._note_synced(outcome.sync_ms)
        if self._cut_wanted:
            self._cut_wanted = False
            self._start(WriteJob(cut=True))
            return
        if outcome.error == DISK_FULL and job.prepare:
            # Nobody's entry failed; ordinary ones are refused until there is room.
            self._wait_for_room(outcome.reason)
        elif outcome.error == DISK_FULL or self.state is WriterState.FAILED:
            assert not outcome.written
            first = job.group.first_lsn if job.group is not None else None
            self._report_failure(first, outcome)
        else:
            if job.prepare and self.state is WriterState.FULL:
                log.info("shard %d: there is room again", self.number)
                self.state = WriterState.OPEN
            if outcome.written or outcome.synced:
                self._report(write_ms=outcome.write_ms, sync_ms=outcome.sync_ms)
        self._pump()

    def _note_synced(self, sync_ms: float) -> None:
        self.counters.syncs += 1
        if self._observe_sync_us is not None:
            self._observe_sync_us(sync_ms * 1000)
        self._synced_lsn = self.tail.synced_lsn
        waiting = self._sync_from_lsns
        while waiting and waiting[0] <= self._synced_lsn:
            waiting.popleft()
        self._sync_wanted = False
        if self.tail.dirty_bytes:
            # Written by the loop meanwhile.
            self._sync_later()
        self._judge_writes()

    def _judge_writes(self) -> None:
        """After a sync: turn writes beside syncs off where they wait for them."""
        self._slow_syncs = self._slow_syncs + 1 if self._had_slow_write else 0
        self._had_slow_write = False
        if self._slow_syncs == _SLOW_SYNCS_MAX:
            log.info(
                "shard %d: writes wait for syncs here, so none is made beside one", self.number
            )
            self._writes_beside_syncs = False

    # -- reports ---------------------------------------------------------------------------

    def _report(
        self,
        *,
        failed_from: int | None = None,
        error: str | None = None,
        write_ms: float = 0.0,
        sync_ms: float = 0.0,
    ) -> None:
        assert self._synced_lsn <= self._written_lsn
        if failed_from is not None:
            self._release_holders()
        if self.on_progress is not None:
            shard, written, synced = self.number, self._written_lsn, self._synced_lsn
            self.on_progress(
                ShardProgress(shard, written, synced, failed_from, error, write_ms, sync_ms)
            )
        if self._waiters:
            self._settle_waiters(failed_from)

    def _settle_waiters(self, failed_from: int | None) -> None:
        waiters, self._waiters = self._waiters, []
        for target, future in waiters:
            if failed_from is not None:
                # Everything above is undone; lsns between may be other shards'.
                target = min(target, self._written_lsn)
            if future.done():
                continue
            if self.state is WriterState.READ_ONLY:
                future.set_exception(ReadOnly("a sync failed", self.tail.path))
            elif self._synced_lsn >= target:
                future.set_result(None)
            else:
                self._waiters.append((target, future))
        # Somebody still waits: sync again as soon as the shard can.
        self._sync_wanted = self._sync_wanted or bool(self._waiters)

    def _fail_group(self, group: NextGroup) -> None:
        """A write on the loop was refused: cut back on the worker, then answer."""
        self.state = WriterState.FAILED
        self._failed_lsn = group.first_lsn
        self._drop_queue()
        if self._job is None:
            self._start(WriteJob(cut=True))
        else:
            self._cut_wanted = True

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._queue_bytes = 0

    def _report_failure(self, first_lsn: int | None, outcome: Outcome) -> None:
        failed_from = self._failed_lsn if first_lsn is None else first_lsn
        assert failed_from > self._written_lsn
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
        if self.state is WriterState.OPEN:
            log.warning("shard %d: no room ahead: %s", self.number, reason)
            self.state = WriterState.FULL
        if self._probe_timer is None:
            self._probe_timer = self._loop.call_later(RETRY_MS / 1000, self._probe)

    def _become_read_only(self, reason: str) -> None:
        log.error("shard %d is read-only until a restart: %s", self.number, reason)
        failed_from = self._written_lsn + 1
        if self._sync_from_lsns:
            failed_from = min(failed_from, self._sync_from_lsns[0])
        self.state = WriterState.READ_ONLY
        self._drop_queue()
        self._report(failed_from=failed_from, error=READ_ONLY)
