"""Keeps the continuous archive of the running store: parts all the time, bases now and then.

Blocking calls run on threads of their own, so that a slow archive takes no thread from the store.
Appends never wait: a part holds only what is synced already, and if the archive lags by more bytes
than the journal may keep for it, a gap begins: the log reports the gap, and the next stretch starts
from a new base. The archiver retries after every failure except one: it stops if another server has
taken over the archive. Made by `boot`; started and closed by `node`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeVar

from topics_server.archive.backup import BackupStopped, BackupWriter
from topics_server.archive.continuous.format import PART_BYTES, base_folder, base_name, digest_of
from topics_server.archive.continuous.places.opening import open_archive
from topics_server.archive.continuous.places.shared_folder import ArchiveStore
from topics_server.archive.continuous.position import note_gap
from topics_server.archive.continuous.shipper import (
    ArchiveShipper,
    ArchiveTaken,
    JournalLost,
    ReadyBase,
    Shipped,
)
from topics_server.archive.format import BackupFacts, encode_json
from topics_server.engine.background.checkpointer import Checkpointer
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.node.backups import copy_cut
from topics_server.node.ground import Ground
from topics_server.runtime.clock import random_hex
from topics_server.runtime.logging import log_defect
from topics_server.runtime.metrics import ArchiveMetrics, log
from topics_server.runtime.thread_offload import ThreadOffload
from topics_server.values.errors import DiskFull, StorageError
from topics_server.values.limits import MIB
from topics_server.values.storage_types import Offload
from topics_server.wal.fs import Lock
from topics_server.wal.journal.journal import Journal

# How often the archiver checks whether a second has passed or enough bytes for a part are
# journaled.
_POLL_S: Final = 0.1
_INTERVAL_S: Final = 1.0
_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 30.0
# Threads: one for parts, one for a base, one for copies of damaged segments.
_THREADS: Final = 3
# Journaled bytes after which a base is made early: a restore replays the journal after a base.
_BASE_BYTES: Final = 1024 * MIB
# How many parts a stop still writes at most.
_LAST_PARTS: Final = 16

T = TypeVar("T")
OpenStore = Callable[[], ArchiveStore]


class _Base(NamedTuple):
    """A complete base. `lost`: the value of `Archiver._lost` when the base was made."""

    ready: ReadyBase
    lost: int
    announced: asyncio.Future[None]


class Archiver:
    """The archive of one store. Loop thread."""

    def __init__(
        self,
        ground: Ground,
        journal: Journal,
        commits: CommitPipeline,
        checkpointer: Checkpointer,
        url: str,
        is_disk_low: Callable[[], bool],
        open_store: OpenStore | None = None,
    ) -> None:
        """`open_store`: for tests; otherwise the store that the URL names is opened."""
        self._ground: Final = ground
        self._journal: Final = journal
        self._commits: Final = commits
        self._checkpointer: Final = checkpointer
        self._url: Final = url
        self._is_disk_low: Final = is_disk_low
        self._open_store: Final = open_store or self._open_named
        self._offload: Final[Offload] = (
            ThreadOffload(_THREADS, "archive")
            if isinstance(ground.offload, ThreadOffload)
            else ground.offload
        )
        self._shipper: ArchiveShipper | None = None
        self._task: asyncio.Task[None] | None = None
        self._base_task: asyncio.Task[None] | None = None
        self._base: _Base | None = None
        self._next_base_ms = 0.0
        self._is_closing = False
        self._woken = asyncio.Event()
        # Set when the last part is written, or will not be written.
        self._ended = asyncio.Event()
        self._retry_s = self._base_retry_s = 0.0
        # At `_seen_ms` (monotonic clock) everything up to `_seen_lsn` was archived, and
        # `_seen_bytes` were journaled.
        self._seen_lsn = 0
        self._seen_ms = ground.clock.monotonic_ms()
        self._seen_bytes = 0
        self._base_bytes = 0
        self._parts = self._part_bytes = self._bases = self._gaps = self._errors = 0
        # How often the journal was released although the archive lacked entries, and the reason to
        # release it again now.
        self._lost = 0
        self._lost_reason = ""
        self._is_stopped = False
        self._last_error = self._base_error = ""

    def start(self) -> None:
        """Begin to archive."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(log_defect)

    @property
    def failures(self) -> list[str]:
        """The current failures, in texts that name no archive location."""
        if self._is_stopped:
            return ["nothing is archived any more: see the log"]
        found = ["archiving fails: see the log"] if self._last_error else []
        if self._base_error:
            found.append("no base of the archive can be made: see the log")
        return found

    def metrics(self) -> ArchiveMetrics:
        """Facts for a scrape."""
        is_behind = self._commits.next_lsn - 1 > self._seen_lsn
        shipper = self._shipper
        return ArchiveMetrics(
            lag_s=(self._ground.clock.monotonic_ms() - self._seen_ms) / 1000 if is_behind else 0.0,
            lag_bytes=self._journaled_bytes() - self._seen_bytes if is_behind else 0,
            kept_bytes=self._journal.archive_bytes,
            parts=self._parts,
            bytes=self._part_bytes,
            bases=self._bases,
            base_ts_ms=0 if shipper is None else shipper.position.base_ts_ms,
            gaps=self._gaps,
            errors=self._errors,
            stopped=int(self._is_stopped),
        )

    async def read(self, call: Callable[[ArchiveStore, Callable[[], None]], T]) -> T:
        """Read from the archive on a thread of its own.

        `call` receives the store and a function `check`. It calls `check` between chunks; `check`
        raises an error once `call` must end. Raises `StorageError` while the archive is not open.
        """
        while self._shipper is None and not (self._is_stopped or self._last_error):
            if self._is_closing:
                break
            await self._pause(_POLL_S)
        shipper = self._shipper
        if shipper is None or self._is_closing:
            raise StorageError(self._last_error or "the archive is not open")
        return await self._run_off(partial(call, shipper.store, self._check))

    async def close(self) -> None:
        """End the running calls; then ship the entries that are left, if the archive takes them."""
        self._is_closing = True
        self._woken.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        shipper = self._shipper
        is_well = not (self._is_stopped or self._last_error)
        if shipper is not None and is_well and not shipper.needs_base:
            await self._ship_last(shipper)
        self._ended.set()
        if self._base_task is not None:
            await asyncio.wait([self._base_task])
        if shipper is not None:
            await self._run_off(shipper.close)
        if isinstance(self._offload, ThreadOffload):
            await self._offload.idle()
            self._offload.close()

    async def _ship_last(self, shipper: ArchiveShipper) -> None:
        try:
            await self._journal.sync_open_shards()
            for _ in range(_LAST_PARTS):
                if not (await self._ship(shipper)).has_more:
                    return
        except StorageError as error:
            log.warning("the last part is not archived; the next start does it: %s", error)

    # -- the loop ------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._is_closing:
            try:
                await self._work()
            except ArchiveTaken as error:
                await self._stop(error)
                return
            except StorageError as error:
                if isinstance(error, JournalLost):
                    self._lost_reason = str(error)
                self._note_error(error)
                await self._pause(self._retry_s)

    async def _work(self) -> None:
        """Open the archive, and write to it until the server stops."""
        if self._shipper is None:
            await self._keep_bound()
            self._shipper = await self._opened()
            position = self._shipper.position
            kept_lsn = None if self._shipper.needs_base else position.last_lsn + 1
            self._journal.keep_for_archive(kept_lsn)
            log.info("the archive goes on behind part %d", position.number)
        while not self._is_closing:
            await self._keep_bound()
            self._begin_base_if_due(self._shipper)
            await self._ship_all(self._shipper)
            self._last_error, self._retry_s = "", 0.0
            await self._wait_for_work()

    async def _ship_all(self, shipper: ArchiveShipper) -> None:
        while (await self._ship(shipper)).has_more:
            if self._is_closing:
                return

    async def _wait_for_work(self) -> None:
        """Return after a second, or once a part's bytes are journaled or a base is complete."""
        before, base = self._journaled_bytes(), self._base
        for _ in range(int(_INTERVAL_S / _POLL_S)):
            await self._pause(_POLL_S)
            if self._is_closing or self._base is not base:
                return
            if self._journaled_bytes() - before >= PART_BYTES:
                return

    async def _pause(self, seconds: float) -> None:
        if self._is_closing:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _opened(self) -> ArchiveShipper:
        ground = self._ground
        directory = ground.directory
        store = await self._run_off(self._open_store)
        shipper = await self._run_off(
            partial(
                ArchiveShipper.open,
                ground.fs,
                store,
                directory.root,
                directory.wal_dir,
                store_id=directory.store_id,
                run=directory.run,
                url=self._url,
            )
        )
        if shipper.last_lsn >= self._commits.next_lsn:
            raise ArchiveTaken(
                f"is at lsn {shipper.last_lsn}, and this store at {self._commits.next_lsn - 1}: "
                "this data directory is an older state of the one whose archive this is. Name an "
                "empty archive",
                store.path_of(""),
            )
        return shipper

    def _open_named(self) -> ArchiveStore:
        """*Blocking.*"""
        rate = self._ground.settings.archive_rate_bytes
        return open_archive(
            self._ground.fs,
            self._url,
            bytes_per_s=rate,
            holder=self._ground.directory.store_id,
            is_ending=lambda: self._is_closing,
        )

    # -- parts ---------------------------------------------------------------------------------

    async def _ship(self, shipper: ArchiveShipper) -> Shipped:
        """Write one part, if there is anything to write."""
        base = self._base
        if base is not None and base.lost != self._lost:
            # The journal after this base was not kept, so the base is useless.
            base.announced.set_result(None)
            base = self._base = None
        if shipper.needs_base and base is None:
            return Shipped()
        clock, journaled = self._ground.clock, self._journaled_bytes()
        now_ms, seen_ms = clock.now_ms(), clock.monotonic_ms()
        upto_lsn, synced = self._journal.synced_up_to(self._commits.next_lsn - 1)
        ready = None if base is None else base.ready
        shipped = await self._run_off(partial(shipper.ship, upto_lsn, now_ms, synced, ready))
        if shipped.bytes:
            self._parts += 1
            self._part_bytes += shipped.bytes
        if shipped.is_base_announced and base is not None:
            self._bases += 1
            base.announced.set_result(None)
            self._base = None
        if not shipper.needs_base:
            self._journal.keep_for_archive(shipper.last_lsn + 1)
            if not shipped.has_more:
                self._seen_lsn = max(upto_lsn, shipper.last_lsn)
                self._seen_ms, self._seen_bytes = seen_ms, journaled
        return shipped

    def _journaled_bytes(self) -> int:
        return sum(shard.counters.bytes for shard in self._journal.shards)

    async def _keep_bound(self) -> None:
        """Begin a gap if the kept journal exceeds its limit, or if the disk is nearly full."""
        kept, reason = self._journal.archive_bytes, self._lost_reason
        if reason:
            await self._begin_gap(reason)
        elif kept > self._ground.settings.archive_journal_bytes:
            await self._begin_gap(f"{kept} bytes of journal files wait for the archive")
        elif kept and self._is_disk_low():
            await self._begin_gap("the disk is nearly full, and the journal waits for the archive")

    async def _begin_gap(self, reason: str) -> None:
        """Stop keeping the journal; moments from now to the next base cannot be restored."""
        shipper = self._shipper
        if shipper is None:
            await self._run_off(partial(note_gap, self._ground.fs, self._ground.directory.root))
            self._gaps += 1
        elif not shipper.needs_base:
            await self._run_off(shipper.begin_gap)
            self._gaps += 1
        self._lost += 1
        self._lost_reason = ""
        self._journal.keep_for_archive(None)
        log.error("moments from now until the archive's next base cannot be restored: %s", reason)

    # -- bases ---------------------------------------------------------------------------------

    def _begin_base_if_due(self, shipper: ArchiveShipper) -> None:
        if self._base_task is not None and not self._base_task.done():
            return
        now_ms = self._ground.clock.monotonic_ms()
        if now_ms < self._next_base_ms:
            return
        if not shipper.needs_base:
            position = shipper.position
            age_ms = self._ground.clock.now_ms() - position.base_ts_ms
            # A negative age means that the clock was set back after the base was made.
            is_old = not 0 <= age_ms < self._ground.settings.archive_base_interval_ms
            is_long = self._journaled_bytes() - self._base_bytes >= _BASE_BYTES
            if position.last_lsn <= position.base_lsn or not (is_old or is_long):
                return
        # No further attempt before this time, whatever the outcome of this one.
        self._next_base_ms = now_ms + _RETRY_S * 1000
        self._base_task = asyncio.get_running_loop().create_task(self._make_base(shipper))
        self._base_task.add_done_callback(log_defect)

    async def _make_base(self, shipper: ArchiveShipper) -> None:
        try:
            lock: Lock = await self._run_off(shipper.store.lock_bases)
            try:
                base = await self._made_base(shipper)
                self._base_error, self._base_retry_s = "", 0.0
                if self._is_stopped:
                    return
                # Until a part names the base, a prune must not remove files that only the base
                # needs. The last part of a stop may name it.
                self._base = base
                await self._until_named(base)
            finally:
                await self._run_off(lock.release)
        except BackupStopped:
            pass
        except StorageError as error:
            self._errors += 1
            self._base_retry_s = _longer(self._base_retry_s)
            if str(error) != self._base_error:
                log.warning("a base of the archive waits, and is tried again: %s", error)
            self._base_error = str(error)
            self._next_base_ms = self._ground.clock.monotonic_ms() + self._base_retry_s * 1000

    async def _until_named(self, base: _Base) -> None:
        """Return once a part names the base, or no part will be written any more."""

        def end(_: object) -> None:
            if not base.announced.done():
                base.announced.set_result(None)

        ended = asyncio.ensure_future(self._ended.wait())
        ended.add_done_callback(end)
        await asyncio.wait([base.announced])
        ended.cancel()

    async def _made_base(self, shipper: ArchiveShipper) -> _Base:
        ground, run = self._ground, self._run_off
        directory = ground.directory
        cold = None if ground.settings.cold_dir is None else str(ground.settings.cold_dir)
        number = shipper.position.number + 1
        name = base_name(number, random_hex(16))
        writer = BackupWriter(
            ground.fs,
            shipper.store,
            directory.root,
            cold,
            directory.store_id,
            number,
            base_folder(name),
            self._check,
        )
        for topic_id in await run(writer.topic_ids):
            await run(partial(writer.copy_ahead, topic_id))
        release = self._journal.hold_trim()
        try:
            _, ts_ms = await copy_cut(
                writer, ground, self._journal, self._commits, self._checkpointer, run
            )
            lost, journaled = self._lost, self._journaled_bytes()
            if shipper.needs_base:
                self._journal.keep_for_archive(writer.entries_lsn + 1)
        finally:
            release()
        facts: BackupFacts = await run(
            partial(writer.finish, writer.entries_lsn, directory.run, ts_ms)
        )
        for path in facts.damaged_segments:
            log.warning("base %s has a damaged file as it is: %s", name, path)
        self._base_bytes = journaled
        ready = ReadyBase(name, digest_of(encode_json(facts)), facts.last_lsn, facts.ts_ms)
        return _Base(ready, lost, asyncio.get_running_loop().create_future())

    def _check(self) -> None:
        """Raise if the base must end. Called by the thread that copies; reads two flags."""
        if self._is_closing:
            raise BackupStopped("the server stops, and the base ends unfinished")
        if self._is_disk_low():
            raise DiskFull("the data disk is nearly full, and the journal needs what is left")

    # -- failures ------------------------------------------------------------------------------

    def _note_error(self, error: StorageError) -> None:
        self._errors += 1
        self._retry_s = _longer(self._retry_s)
        if str(error) != self._last_error:
            log.warning("the archive waits, and tries again: %s", error)
        self._last_error = str(error)

    async def _stop(self, error: ArchiveTaken) -> None:
        """Stop archiving: another server has taken over the archive."""
        self._is_stopped = True
        log.error("nothing is archived any more: %s", error)
        shipper = self._shipper
        try:
            if shipper is None:
                await self._run_off(partial(note_gap, self._ground.fs, self._ground.directory.root))
            else:
                await self._run_off(shipper.begin_gap)
        except StorageError as failure:
            log.warning("ARCHIVE_POSITION was not written: %s", failure)
        self._journal.keep_for_archive(None)
        base, self._base = self._base, None
        if base is not None and not base.announced.done():
            base.announced.set_result(None)

    async def _run_off(self, call: Callable[[], T]) -> T:
        return await self._offload.run(call)


def _longer(retry_s: float) -> float:
    """The pause after one more failure: twice the last one, within the limits."""
    return min(_RETRY_MAX_S, max(_RETRY_S, 2 * retry_s))
