"""One running store: opens and recovers it, serves it, closes it.

Takes everything that touches the world as a parameter, so that the same node runs on a real disk
and on a failing one in tests. The order of `start` is the order of ARCHITECTURE, Recover; nothing
is written before the clean-stop mark is removed, nothing is served before what was found is
durable. Called by `server.py` and by the simulations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from topics_server.api.context import ServerState
from topics_server.api.watch.broadcast import Fanout
from topics_server.auth.api_keys import KeyRing
from topics_server.engine.background.checkpointer import Checkpointer
from topics_server.engine.background.large_appends import LargeAppends
from topics_server.engine.background.recovery import Recovery, Stop
from topics_server.engine.background.sealer import Sealer, SealingRules
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.projections import Projections
from topics_server.engine.commit.router_pages import RouterPages
from topics_server.engine.commit.transfers import Transfers
from topics_server.engine.ports import Clock, Offload
from topics_server.engine.pressure.priority import effective_priority
from topics_server.engine.pressure.throttle import Throttle
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.store import Store
from topics_server.engine.stream_writes import StreamWrites
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher
from topics_server.engine.subscribe.session_service import WatchSessions
from topics_server.engine.subscribe.sessions import SessionTable
from topics_server.engine.topic.admission import AppendLimits
from topics_server.engine.topic.quotas import quotas_of
from topics_server.engine.topic.registry import Registry
from topics_server.http.read_scheduler import ReadScheduler
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.queue.service import QueueService
from topics_server.routers.pump import Pump
from topics_server.routers.router_table import RouterTable
from topics_server.routers.service import RouterService
from topics_server.runtime.clock import SystemClock, random_u64
from topics_server.runtime.logging import log_defect
from topics_server.runtime.metrics import (
    DiskFacts,
    LatencyHistogram,
    RecoveryFacts,
    ShardFacts,
    log,
)
from topics_server.runtime.thread_offload import ThreadOffload
from topics_server.settings import Settings
from topics_server.streams.service import Streams
from topics_server.values.entries import LEASES_ID, ROUTERS_ID, SESSIONS_ID, VIEWS_ID
from topics_server.values.errors import StorageError
from topics_server.values.storage_types import ReplayStart
from topics_server.views.service import Views
from topics_server.views.view_table import ViewTable
from topics_server.wal.cold_folder import ColdFolder, judge_before_start
from topics_server.wal.directory import Directory, lacks_heads, read_boot_id
from topics_server.wal.disk_space import Space, reasons_of
from topics_server.wal.fs import Fs, OsFs
from topics_server.wal.journal.anchors import anchors_of
from topics_server.wal.journal.journal import Journal, thread_workers
from topics_server.wal.journal.replay import JournalReplay
from topics_server.wal.journal.sizing import (
    WAL_SHARE,
    ballast_bytes,
    journal_sizes,
    min_free_bytes,
    store_files,
)
from topics_server.wal.journal.wal_file import Sizes
from topics_server.wal.journal.workers import BlockingWorker
from topics_server.wal.segments.packing_process import Packer, ProcessPacker
from topics_server.wal.segments.store import SealedSegments
from topics_server.wal.snapshots.store import PublishedSnapshots

WorkerFactory = Callable[[asyncio.AbstractEventLoop], Callable[[str], BlockingWorker]]


class Node:
    """Storage and engine of one data directory."""

    def __init__(
        self,
        settings: Settings,
        directory: Directory,
        cold: ColdFolder | None,
        segments: SealedSegments,
        *,
        fs: Fs,
        clock: Clock,
        offload: Offload,
        workers: WorkerFactory,
        sizes: Sizes,
    ) -> None:
        self.settings = settings
        self.registry = Registry()
        self.notifier = Notifier()
        self.segments = segments
        self.report = ""
        self._directory = directory
        self._cold = cold
        self._fs = fs
        self._clock = clock
        self._offload = offload
        self._workers = workers
        self._sizes = sizes
        self._total_bytes = fs.total_bytes(directory.root)
        self._snapshots = PublishedSnapshots(fs, directory.root)
        self._space = self._make_space()
        self._recovery: Recovery | None = None
        self._wal_set = 0
        self._is_new_set = False
        self._session_table = SessionTable()
        self.lease_table = LeaseTable(random_u64())
        self.router_table = RouterTable()
        self.view_table = ViewTable()
        self._projections: Projections = {
            SESSIONS_ID: self._session_table,
            LEASES_ID: self.lease_table,
            ROUTERS_ID: self.router_table,
            VIEWS_ID: self.view_table,
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._sync_latency = [LatencyHistogram() for _ in range(settings.wal_shards)]
        self.state = ServerState(
            settings=settings,
            progress=self._progress,
            keys=KeyRing(settings.grants(), covers_probes=settings.probe_auth),
            hosts=settings.hosts,
            shards=self._shard_facts,
            disk=self._disk_facts,
            reasons=self._reasons,
        )
        self.state.throttle = Throttle(self._priority_of, self._backlog_bytes)
        self.state.read_scheduler = ReadScheduler(self.state.throttle)
        self._append_limits = msgspec.convert(settings, AppendLimits, from_attributes=True)
        self.state.large_appends = LargeAppends(self._append_limits)
        # Set by `start`.
        self.journal: Journal
        self.commits: CommitPipeline
        self.transfers: Transfers
        self.checkpointer: Checkpointer
        self.sealer: Sealer
        self.store: Store
        self.sessions: WatchSessions
        self.fanout: Fanout
        self.queues: QueueService
        self.pages: RouterPages
        self.pump: Pump
        self.routers: RouterService
        self.views: Views
        self.streams: Streams

    @classmethod
    def open(
        cls,
        settings: Settings,
        open_files: int,
        *,
        fs: Fs | None = None,
        clock: Clock | None = None,
        offload: Offload | None = None,
        workers: WorkerFactory = thread_workers,
        packer: Packer | None = None,
        boot_id: str | None = None,
        sizes: Sizes | None = None,
    ) -> Node:
        """*Blocking.* Lock the data directory and the cold folder.

        Raises `StartRefused` with one clear line.
        """
        fs = fs or OsFs()
        cold_dir = None if settings.cold_dir is None else str(settings.cold_dir)
        if cold_dir is not None:
            # Before a new data directory is made where the disk of the old one is not mounted.
            judge_before_start(fs, cold_dir, str(settings.data_dir))
        directory = Directory.open(
            fs,
            str(settings.data_dir),
            boot_id=read_boot_id(fs) if boot_id is None else boot_id,
            mode=settings.data_dir_mode,
        )
        cold = None
        if cold_dir is not None:
            try:
                cold = ColdFolder.open(fs, cold_dir, directory, mode=settings.data_dir_mode)
            except StorageError:
                directory.close()
                raise
        segments = SealedSegments(
            fs,
            directory.root,
            cold_dir,
            packer or ProcessPacker(),
            store_files(open_files),
            settings.data_dir_mode,
            directory.store_id,
            lambda: directory.run,
        )
        return cls(
            settings,
            directory,
            cold,
            segments,
            fs=fs,
            clock=clock or SystemClock(),
            offload=offload or ThreadOffload(),
            workers=workers,
            sizes=sizes or journal_sizes(fs.total_bytes(directory.root), settings.wal_shards),
        )

    def _make_space(self) -> Space:
        least = self.settings.min_free_bytes
        return Space(
            self._fs,
            self._directory.root,
            min_free_bytes=min_free_bytes(self._total_bytes) if least is None else least,
            ballast_bytes=lambda: ballast_bytes(
                self._snapshots.newest_bytes, self._total_bytes, self._sizes
            ),
            offload=self._offload,
        )

    def abandon(self) -> None:
        """Let go of the directory without having started."""
        self.state.large_appends.close()
        self.segments.close()
        self._release()

    def _release(self) -> None:
        if self._cold is not None:
            self._cold.close()
        self._directory.close()

    # --- start ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover, open the journal, start background work; ready when it returns.

        Raises `StartRefused`, `Corrupt`: the directory cannot be served, and was not changed.
        """
        directory = self._directory
        began_ms = self._clock.monotonic_ms()
        image = await self._offload.run(self._snapshots.newest)
        replay = JournalReplay(
            self._fs,
            directory.wal_dir,
            wal_sets=directory.wal_sets,
            synced_lsn=0 if image is None else image.last_lsn,
            anchors=anchors_of(directory.mark, image, image, same_boot=directory.same_boot),
            on_loss=directory.doubt_boot,
        )
        self._published = ReplayStart() if image is None else image.replay_start
        self._recovery = Recovery(
            self.registry,
            self.segments,
            image,
            replay,
            self._offload,
            self.state.large_appends,
            self._projections,
            [self.lease_table.observe, self.router_table.observe],
            self.router_table.sources,
        )
        # How the last run ended tells which heads are safe; if they were in a snapshot that cannot
        # be read or is gone, they are not.
        is_whole = not (self._snapshots.found_damaged or lacks_heads(directory.mark, image))
        stop = Stop(
            was_clean=directory.was_clean and is_whole,
            same_boot=directory.same_boot and is_whole,
        )
        found = await self._recovery.run(stop, self._begin)
        next_lsn = max(found.last_lsn, 0 if image is None else image.last_lsn) + 1
        self.lease_table.finish_recovery(
            self._clock.now_ms(), was_clean=stop.was_clean, topics=self.registry
        )
        self.router_table.finish_recovery(self.registry)
        self._open_journal(replay, next_lsn)
        moved = await self.transfers.complete(self._recovery.marks)
        await self._publish(next_lsn, must=found.heads_moved > 0)
        self._wire_store()
        for topic in self.registry:
            self.sealer.adopt(topic)
        await self.streams.start()
        self._start_tasks()
        self.pump.start()
        self.views.start()
        torn = "".join(f", cut a torn write in {torn.path}" for torn in replay.report.torn)
        self.report = (
            f"{found.topics} topics, {found.entries} journal entries replayed, "
            f"{found.heads_moved} heads moved, {found.flips} delete flags made, "
            f"{moved} moves ended{torn}"
        )
        self.state.recovery = RecoveryFacts(
            duration_ms=int(self._clock.monotonic_ms() - began_ms),
            entries=found.entries,
            records=self.registry.records_live,
            torn_files=len(replay.report.torn),
        )
        self.state.store = self.store
        self.state.keys.paths.find = self.registry.path_of
        self.state.fanout = self.fanout
        self.state.sessions = self.sessions
        self.state.queues = self.queues
        self.state.routers = self.routers
        self.state.views = self.views
        self.state.streams = self.streams
        self.state.sealing = self.sealer
        if self.state.phase == "replaying":
            self.state.enter("ready")

    def _begin(self) -> None:
        """*Blocking.* The run is counted before anything else is written."""
        self._space.make_room_for_start(self._sizes.fill_step_bytes)
        self._directory.begin(with_cold=self._cold is not None)
        if self._cold is not None:
            self._cold.claim(self._directory)

    def _open_journal(self, replay: JournalReplay, next_lsn: int) -> None:
        directory, settings = self._directory, self.settings
        self._wal_set, self._is_new_set = directory.wal_set_for(settings.wal_shards)
        self.journal = Journal.create(
            self._fs,
            directory.wal_dir,
            replay,
            wal_set=self._wal_set,
            shard_count=settings.wal_shards,
            loop=asyncio.get_running_loop(),
            workers=self._workers(asyncio.get_running_loop()),
            sync_interval_ms=settings.wal_fsync_interval_ms,
            sizes=self._sizes,
            observe_sync_us=[histogram.observe for histogram in self._sync_latency],
            on_backlog=self.state.throttle.press,
            run=directory.run,
            on_unknown=directory.forget_boot,
            may_fill=self._space.may_fill,
        )
        self.commits = CommitPipeline(
            self.registry, self.journal, self.notifier, next_lsn, self._projections
        )
        self.pages = RouterPages(self.registry, self.commits, self.router_table.sources)
        for router in self.router_table:
            self.pages.add_source(router.source_id)
        self.commits.observers += [
            self.lease_table.observe,
            self.router_table.observe,
            self.pages.observe,
        ]
        self.transfers = Transfers(self.registry, self.commits, self._clock)
        # Before the first snapshot: it ends the table's recovery.
        self.sessions = WatchSessions(
            self._session_table,
            self.commits,
            self._clock,
            ttl_ms=settings.session_ttl_ms,
            max_sessions=settings.max_watch_sessions,
            max_per_prefix=settings.max_watch_sessions_per_prefix,
        )
        self.sealer = Sealer(
            self.registry,
            self.commits,
            self.journal,
            self.segments,
            self._offload,
            self._clock,
            SealingRules(
                max_records=settings.segment_max_events,
                max_bytes=settings.segment_max_bytes,
                max_age_ms=settings.segment_max_age_ms,
                retain_segments=settings.hot_retain_segments,
                retain_bytes=settings.hot_retain_bytes,
                has_cold=settings.cold_dir is not None,
            ),
            self._space.may_seal,
        )
        self.sealer.on_refused.append(self._space.note_refused)
        self.checkpointer = Checkpointer(
            self.registry,
            self.commits,
            self.journal,
            self._snapshots,
            self._offload,
            self._clock,
            self.sealer.seal_tails,
            self._projections,
            self.pages,
            run=directory.run,
            published=self._published,
        )
        self.checkpointer.make_room = self._space.make_room
        self.sealer.on_moved += [self.checkpointer.moved, self.notifier.notify]

    async def _publish(self, next_lsn: int, *, must: bool) -> None:
        """Note this boot and the wal set, on a snapshot where it `must` be.

        Heads that moved are published before this boot is noted, and a new wal set starts on a
        snapshot, so that no entry of it depends on how the old one was sharded.
        """
        directory, wal_set = self._directory, self._wal_set
        if must or (self._is_new_set and not directory.is_new):
            # While a set is listed each of its shards must have a file: listed anew, then trimmed.
            await self.checkpointer.take(final=True, trim=False)
        oldest = self.checkpointer.trim_lsn
        shards = self.settings.wal_shards
        await self._offload.run(
            lambda: directory.note_journal(
                wal_set, shards, next_lsn, oldest_start_lsn=oldest, heads_moved=must
            )
        )
        self.checkpointer.trim()

    def _wire_store(self) -> None:
        settings = self.settings
        fetcher = Fetcher(self.registry, self.segments, self._offload)
        fetcher.on_moved.append(self.checkpointer.moved)
        self.store = Store(
            self.registry,
            self.commits,
            self.notifier,
            fetcher,
            self._clock,
            self._append_limits,
            quotas_of(settings, self.state.keys.prefixes),
            self.transfers,
        )
        self.queues = QueueService(
            self.store,
            self.lease_table,
            self.commits,
            self.notifier,
            self._clock,
            on_moved=lambda: self.checkpointer.moved(LEASES_ID),
        )
        self.store.topics.queue_counts = self.queues.counts
        self.pump = Pump(
            self.router_table,
            self.store,
            self.commits,
            self.notifier,
            self.pages,
            self._clock,
            self.checkpointer.moved,
        )
        self.routers = RouterService(
            self.router_table,
            self.pump,
            self.store,
            self.commits,
            self._clock,
            max_routers=settings.max_routers,
        )
        self.views = Views(
            self.view_table, self._directory.root, self.store, self.commits, self._clock, settings
        )
        writes = StreamWrites(self.store, self.registry, self.commits, self._clock)
        self.streams = Streams(
            self.store, self.registry, writes, self.notifier, self._clock, self.state.large_appends
        )
        self.fanout = Fanout(
            SubscriptionDispatcher(
                self.registry, self.commits, self.notifier, fetcher, self._clock
            ),
            self.state.json_cache,
            buffer_grace_ms=settings.buffer_grace_ms,
            slow_consumer_timeout_ms=settings.slow_consumer_timeout_ms,
        )

    def _start_tasks(self) -> None:
        settings = self.settings
        self.state.throttle.start()
        self._spawn(self.sealer.run())
        self._spawn(
            self.checkpointer.run(
                settings.checkpoint_interval_ms,
                min(settings.checkpoint_wal_bytes, self._total_bytes // WAL_SHARE),
                self._wal_bytes,
                lambda: self.store.is_disk_low,
            )
        )
        self._spawn(self._space.watch(self._note_space))
        self._spawn(self.streams.run())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(log_defect)
        self._tasks.append(task)

    def _note_space(self, is_low: bool, free: int) -> None:
        """Refuse appends while the disk is nearly full (contract README, Disk nearly full)."""
        if is_low != self.store.is_disk_low:
            self.store.is_disk_low = is_low
            log.warning(
                "%d bytes are free, appends need %d: %s",
                free,
                self._space.floor_bytes,
                "refused" if is_low else "accepted again",
            )

    # --- facts ----------------------------------------------------------------------------

    def _progress(self) -> float:
        return 0.0 if self._recovery is None else self._recovery.progress

    def _wal_bytes(self) -> int:
        return sum(shard.counters.bytes for shard in self.journal.shards)

    def _backlog_bytes(self) -> int:
        return max([shard.queue_bytes for shard in self.journal.shards], default=0)

    def _priority_of(self, name: str) -> int:
        topic = self.registry.find(name)
        if topic is None:
            return 0
        return effective_priority(topic.config, topic.last_read_ts, self._clock.now_ms())

    def _shard_facts(self) -> Sequence[ShardFacts]:
        return () if self.state.store is None else self.journal.facts(self._sync_latency)

    def _reasons(self) -> list[str]:
        """What fails in the background, in words that name no topic and no file."""
        if self.state.store is None:
            return []
        sealing = next(iter(self.sealer.failures.values()), None)
        return reasons_of(self.checkpointer.failure, sealing)

    def _disk_facts(self) -> DiskFacts:
        """*Blocking.*"""
        (hot_files, hot_bytes), (cold_files, cold_bytes) = self.segments.totals()
        return DiskFacts(
            hot_files=hot_files,
            hot_bytes=hot_bytes,
            cold_files=cold_files,
            cold_bytes=cold_bytes,
            free_bytes=self._fs.free_bytes(self._directory.root),
            total_bytes=self._total_bytes,
            min_free_bytes=self._space.min_free_bytes,
        )

    # --- stop -----------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Take no new requests; end every stream; answer whoever waits."""
        self.state.enter("draining")
        if self.state.store is not None:
            # A session whose stream is ended here counts as open for the next start.
            self.state.throttle.close()
            self.sessions.drain()
            self.queues.drain()
            self.views.drain()
            self.fanout.drain()
            self.store.drain()

    async def close(self) -> None:
        """Finish what is in flight, take the final snapshot, let go of everything.

        If the start did not succeed, nothing is written.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(self._offload, ThreadOffload):
            # A snapshot or segment that is being written is not overtaken by the final ones.
            await self._offload.idle()
        try:
            if self.state.store is not None:
                await self._close_journal()
        finally:
            # Its process has nothing to do any more: it ends at once.
            self.state.large_appends.close()
            self.segments.close()
            if isinstance(self._offload, ThreadOffload):
                self._offload.close()
            self._release()

    async def _close_journal(self) -> None:
        await self.views.close()
        await self.queues.close()
        await self.pump.close()
        self.sessions.close()
        self.sealer.expire()
        try:
            await self.journal.sync_open_shards()
            await self.checkpointer.take(final=True)
            # Of a shard that is read-only the next start has to look what reached the disk.
            is_clean = not self.journal.read_only_shards()
        except StorageError as error:
            log.warning("no final snapshot, the next start replays the journal: %s", error)
            is_clean = False
        await self.journal.close()
        if is_clean:
            self._directory.note_clean_stop(self.checkpointer.last_lsn)
