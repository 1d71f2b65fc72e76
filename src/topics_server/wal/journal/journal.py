"""The open journal: all shards, lsn, trim. Implements the engine's journal port.

A journal is always opened on new files, after `replay` has made the found files durable; it never
appends to a file of an earlier run. A topic's shard is its id modulo the shard count, for the life
of the wal set; another shard count means another wal set; reserved ids are on shard 0. Loop thread
only. `engine` calls it through the port; `node/boot` makes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from topics_server.runtime.clock import random_id
from topics_server.runtime.metrics import LatencyHistogram, ShardFacts, log
from topics_server.values.entries import RESERVED_ID_MIN, Entry
from topics_server.values.errors import ReadOnly, StorageError
from topics_server.values.limits import WAL_SHARDS_MAX
from topics_server.values.storage_types import ReplayStart, ShardProgress, SyncedShard
from topics_server.wal.folders import make_durable_dirs
from topics_server.wal.format.frames import Opening
from topics_server.wal.fs import Fs
from topics_server.wal.journal.replay import JournalReplay, OldFile, ShardEnd
from topics_server.wal.journal.wal_file import Sizes, WalFile
from topics_server.wal.journal.wal_writer import WalWriter, WriterState
from topics_server.wal.journal.workers import BlockingWorker, ThreadWorker

_FIRST: Final = ShardEnd(1, Opening(0, 0, 0))


def new_file_id() -> int:
    """A random u64, so that bytes of another file never pass a group's checksum."""
    return xxhash.xxh3_64_intdigest(random_id(16).encode())


def thread_workers(loop: asyncio.AbstractEventLoop) -> Callable[[str], BlockingWorker]:
    """The factory of real workers: one thread each, started when first used."""
    return lambda name: ThreadWorker(loop, name)


class Journal:
    """The shards of one wal set, and the files of earlier runs until they are trimmed."""

    def __init__(
        self,
        fs: Fs,
        wal_dir: str,
        wal_set: int,
        shards: Sequence[WalWriter],
        old: list[OldFile],
        worker: BlockingWorker,
    ) -> None:
        assert 1 <= len(shards) <= WAL_SHARDS_MAX
        self.shards: Final = tuple(shards)
        self._fs: Final = fs
        self._wal_dir: Final = wal_dir
        self._wal_set: Final = wal_set
        self._old: Final = old
        self._housekeeper: Final = worker
        self._trims_under_way = 0
        # While a backup copies the journal, no file is removed; the newest trim request waits.
        self._trim_holds = 0
        self._held_trim: ReplayStart | None = None
        # The newest trim request, and the first lsn that the archive still needs; None: it needs no
        # entry.
        self._trim_start: ReplayStart | None = None
        self._archive_lsn: int | None = None
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    def create(
        cls,
        fs: Fs,
        wal_dir: str,
        replay: JournalReplay,
        *,
        wal_set: int,
        shard_count: int,
        loop: asyncio.AbstractEventLoop,
        workers: Callable[[str], BlockingWorker],
        sync_interval_ms: int = 200,
        sizes: Sizes = Sizes(),  # noqa: B008 -- an immutable value
        file_ids: Callable[[], int] = new_file_id,
        observe_sync_us: Sequence[Callable[[float], None]] = (),
        on_backlog: Callable[[], None] | None = None,
        run: int = 0,
        on_unknown: Callable[[], None] | None = None,
        may_fill: Callable[[int], bool] = lambda size: True,
    ) -> Journal:
        """*Blocking, briefly.* Make and sync one new file per shard; the workers fill them.

        `replay` has been read to its end. `wal_set` is a set with `shard_count` shards, or a new
        set; record it in `FORMAT` after this call and before the first submit. `run`: the run
        number in `FORMAT`. `on_unknown` is called on a worker after a failed sync, when it is
        unknown what reached the disk; it may block.
        """
        assert replay.is_finished, "what was found is made durable before anything is added"
        make_durable_dirs(fs, wal_dir)
        shards: list[WalWriter] = []
        for number in range(shard_count):
            end = replay.ends.get((wal_set, number), _FIRST)
            tail = WalFile(
                fs,
                wal_dir,
                wal_set,
                number,
                number=end.next_number,
                opening=end.opening,
                new_file_id=file_ids,
                sizes=sizes,
                run=run,
                may_fill=may_fill,
            )
            shards.append(
                WalWriter(
                    number,
                    tail,
                    workers(f"wal-{number}"),
                    loop,
                    sync_interval_ms=sync_interval_ms,
                    observe_sync_us=observe_sync_us[number] if observe_sync_us else None,
                    on_backlog=on_backlog,
                    on_unknown=on_unknown,
                )
            )
        return cls(fs, wal_dir, wal_set, shards, list(replay.old_files), workers("wal-trim"))

    @property
    def shard_count(self) -> int:
        """How many shards are open for writing."""
        return len(self.shards)

    def shard_of(self, topic_id: int) -> int:
        """The shard of a topic's entries; reserved ids belong to the first shard."""
        return topic_id % len(self.shards) if topic_id < RESERVED_ID_MIN else 0

    def listen(self, callback: Callable[[ShardProgress], None]) -> None:
        """Set the callback for progress, and make room for the first entries."""
        for shard in self.shards:
            assert shard.on_progress is None, "one listener, told once"
            shard.on_progress = callback
            shard.start()

    def submit(self, lsn: int, entry: Entry, *, shard: int, urgent: bool, sync: bool) -> None:
        """Queue one entry. Raises `TopicsError` `throttled` or `storage_read_only`."""
        self.shards[shard].submit(lsn, entry, urgent=urgent, sync=sync)

    def flush(self, shard: int) -> None:
        """Write the queued entries before the loop turn ends, if the loop may write them."""
        self.shards[shard].flush()

    def reopen(self, shard: int) -> None:
        """Accept submissions again: everything from `failed_from` on is undone."""
        self.shards[shard].reopen()

    def read_only_shards(self) -> Sequence[int]:
        """Shards whose sync failed."""
        return [shard.number for shard in self.shards if shard.state is WriterState.READ_ONLY]

    def facts(self, sync_latency: Sequence[LatencyHistogram]) -> Sequence[ShardFacts]:
        """Each shard's metrics; `sync_latency` has one histogram a shard."""
        return [
            ShardFacts(
                frames=shard.counters.frames,
                groups=shard.counters.groups,
                syncs=shard.counters.syncs,
                bytes=shard.counters.bytes,
                rotations=shard.tail.rotations,
                queue_depth=shard.queue_depth,
                queue_depth_peak=shard.counters.queue_depth_peak,
                submit_full=shard.counters.submit_full,
                read_only=shard.state is WriterState.READ_ONLY,
                sync_latency=latency,
                group_frames=shard.counters.group_frames,
                write_us=shard.counters.write_us,
            )
            for shard, latency in zip(self.shards, sync_latency, strict=True)
        ]

    async def sync_all(self) -> None:
        """Return once everything submitted is synced on every shard. Raises `ReadOnly`."""
        results = await asyncio.gather(
            *(shard.sync_all() for shard in self.shards), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        # A raised error refers to this frame, so the frame must not refer to the error.
        del results
        if errors:
            raise errors.pop(0)

    async def sync_open_shards(self) -> Sequence[SyncedShard]:
        """Like `sync_all`, for shards that accept writes; returns how far each shard is synced.

        Their end marks are durable as well.
        """
        results = await asyncio.gather(
            *(shard.sync_all() for shard in self.shards), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ReadOnly):
                raise result
        await asyncio.gather(*(shard.hold_end() for shard in self.shards))
        return [
            SyncedShard(self._wal_set, shard.number, shard.synced_lsn, isinstance(result, ReadOnly))
            for shard, result in zip(self.shards, results, strict=True)
        ]

    async def hold_end(self, topic_id: int) -> None:
        """See `ports.Journal.hold_end`."""
        await self.shards[self.shard_of(topic_id)].hold_end()

    def hold_trim(self) -> Callable[[], None]:
        """Remove no file until the returned function is called (once)."""
        self._trim_holds += 1
        return self._release_trim

    def _release_trim(self) -> None:
        self._trim_holds -= 1
        assert self._trim_holds >= 0
        if not self._trim_holds and self._held_trim is not None:
            start, self._held_trim = self._held_trim, None
            self.trim(start)

    def synced_up_to(self, last_lsn: int) -> tuple[int, Sequence[SyncedShard]]:
        """The lsn up to which every shard is synced, at most `last_lsn`; and each shard's lsn.

        Syncs nothing.
        """
        behind = [shard.synced_lsn for shard in self.shards if not shard.is_synced]
        synced = [
            SyncedShard(self._wal_set, shard.number, shard.synced_lsn) for shard in self.shards
        ]
        return min([last_lsn, *behind]), synced

    def keep_for_archive(self, start_lsn: int | None) -> None:
        """Keep files with entries from this lsn on for the archive; None: keep no file for it."""
        if start_lsn == self._archive_lsn:
            return
        self._archive_lsn = start_lsn
        if self._trim_start is not None:
            self.trim(self._trim_start)

    @property
    def archive_bytes(self) -> int:
        """Bytes of the files that are kept for the archive only."""
        start, archive_lsn = self._trim_start, self._archive_lsn
        if start is None or archive_lsn is None:
            return 0
        old = sum(
            each.bytes for each in self._old if archive_lsn <= each.last_lsn < start.of(*each.key)
        )
        return old + sum(
            each.bytes
            for shard in self.shards
            for each in list(shard.tail.closed)
            if archive_lsn <= each.last_lsn < start.of(self._wal_set, shard.number)
        )

    def _needed_from(self, start: ReplayStart, wal_set: int, shard: int) -> int:
        """The lsn from which on the shard's files are needed; older files may be removed."""
        lsn = start.of(wal_set, shard)
        return lsn if self._archive_lsn is None else min(lsn, self._archive_lsn)

    def trim(self, start: ReplayStart) -> None:
        """Unlink, on a worker, files whose entries all lie before the start of the replay."""
        self._trim_start = start
        if self._trim_holds:
            self._held_trim = start
            return
        paths = [old.path for old in self._old if old.last_lsn < self._needed_from(start, *old.key)]
        self._old[:] = [
            old for old in self._old if old.last_lsn >= self._needed_from(start, *old.key)
        ]
        for shard in self.shards:
            closed = shard.tail.closed
            start_lsn = self._needed_from(start, self._wal_set, shard.number)
            # The shard's worker may append meanwhile; only this thread uses the front of the list.
            while closed and closed[0].last_lsn < start_lsn:
                paths.append(closed.pop(0).path)
        if paths:
            self._trims_under_way += 1
            self._housekeeper.run(lambda: self._unlink(paths), self._trimmed)

    def _unlink(self, paths: Sequence[str]) -> str | None:
        try:
            # Unlink in order: even after a power cut, a chain of files must be removed from the
            # front.
            for path in paths:
                self._fs.unlink(path, missing_ok=True)
            self._fs.sync_dir(self._wal_dir)
        except StorageError as error:
            return str(error)
        return None

    def _trimmed(self, failure: str | None) -> None:
        self._trims_under_way -= 1
        if failure is not None:
            log.warning("journal files were not removed; the next start removes them: %s", failure)
        if self._closing is not None and not self._trims_under_way:
            self._closing.set_result(None)

    async def close(self) -> None:
        """Write and sync the queued entries, and end the threads.

        Of a read-only shard nothing is written.
        """
        for shard in self.shards:
            await shard.close()
        if self._trims_under_way:
            self._closing = asyncio.get_running_loop().create_future()
            await self._closing
        self._housekeeper.close()
