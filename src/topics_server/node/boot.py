"""The start of a store: recover, open the journal, wire the services into a `Node`.

The steps of `start` follow ARCHITECTURE, Recover: nothing is written before this run is counted,
and nothing is served before what was found is durable. Called by `server`, `app` and the
simulations.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from topics_server.api.context import ServerState
from topics_server.api.watch.broadcast import Fanout
from topics_server.engine.background.checkpointer import Checkpointer
from topics_server.engine.background.mender import Mender
from topics_server.engine.background.recovery import Recovery, Stop
from topics_server.engine.background.scrub import Scrubber, ScrubRules
from topics_server.engine.background.sealer import Sealer, SealingRules
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.router_pages import RouterPages
from topics_server.engine.commit.transfers import Transfers
from topics_server.engine.ports import SealedIndex
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.store import Store
from topics_server.engine.stream_writes import StreamWrites
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher
from topics_server.engine.subscribe.session_service import WatchSessions
from topics_server.engine.topic.quotas import quotas_of
from topics_server.engine.topic.topic import Topic
from topics_server.node.ground import Ground
from topics_server.node.node import Node
from topics_server.queue.service import QueueService
from topics_server.routers.pump import Pump
from topics_server.routers.service import RouterService
from topics_server.runtime.metrics import LatencyHistogram, RecoveryFacts, log
from topics_server.streams.service import Streams
from topics_server.values.entries import LEASES_ID
from topics_server.values.errors import StorageError
from topics_server.values.limits import MIB
from topics_server.values.storage_types import ReplayStart
from topics_server.views.build import ViewContext
from topics_server.views.feed import Feed
from topics_server.views.judge import RecoveredLogs, judge_files
from topics_server.views.pacing import Pacer
from topics_server.views.service import Views
from topics_server.wal import layout
from topics_server.wal.directory import lacks_heads
from topics_server.wal.journal.anchors import anchors_of
from topics_server.wal.journal.journal import Journal
from topics_server.wal.journal.replay import JournalReplay
from topics_server.wal.restored import read_restored, remove_restored

if TYPE_CHECKING:
    from topics_server.node.archiver import Archiver
    from topics_server.node.backups import Backups
    from topics_server.wal.segments.mending import PreparedMend


class Boot:
    """The start of the store in an opened data directory; closes what it has made."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.node: Node | None = None

    @property
    def state(self) -> ServerState:
        """The state that all handlers share; it holds the progress of recovery."""
        return self.ground.state

    def begin_drain(self) -> None:
        """Take no new requests; end every stream; answer every request that waits."""
        if self.node is None:
            self.state.enter("draining")
        else:
            self.node.begin_drain()

    async def close(self) -> None:
        """Close the node. If the start did not succeed, nothing is written."""
        if self.node is None:
            await self.ground.view_process.close()
            await self.ground.rest()
            self.ground.release()
        else:
            await self.node.close()

    def abandon(self) -> None:
        """Release the directory without having started."""
        self.ground.release()

    async def try_start(self) -> str | None:
        """Start; returns why the directory cannot be served, if it cannot."""
        try:
            await self.start()
        except StorageError as error:
            return str(error)
        return None

    # --- start ----------------------------------------------------------------------------

    async def start(self) -> Node:
        """Recover, open the journal, start background work; ready when it returns.

        Raises `StartRefused`, `Corrupt`: the directory cannot be served, and was not changed.
        """
        ground = self.ground
        directory, offload = ground.directory, ground.offload
        began_ms = ground.clock.monotonic_ms()
        image = await offload.run(ground.snapshots.newest)
        known = await offload.run(partial(read_restored, ground.fs, directory.root))
        replay = JournalReplay(
            ground.fs,
            directory.wal_dir,
            wal_sets=directory.wal_sets,
            synced_lsn=0 if image is None else image.last_lsn,
            anchors=anchors_of(directory.mark, image, image, same_boot=directory.same_boot),
            on_loss=directory.doubt_boot,
        )
        recovery = Recovery(
            ground.registry,
            ground.segments,
            image,
            replay,
            offload,
            self.state.large_appends,
            ground.projections,
            [ground.lease_table.observe, ground.router_table.observe],
            ground.router_table.sources,
            known,
        )
        if image is not None:
            # Recovery releases the parts once they are restored.
            image = msgspec.structs.replace(image, parts=())
        self.state.progress = lambda: recovery.progress
        # How the last run ended decides which heads are safe. No head is safe if the snapshot that
        # held the heads is unreadable or missing.
        is_whole = not (ground.snapshots.found_damaged or lacks_heads(directory.mark, image))
        stop = Stop(
            was_clean=directory.was_clean and is_whole,
            same_boot=directory.same_boot and is_whole,
        )
        found = await recovery.run(stop, ground.begin)
        next_lsn = max(found.last_lsn, 0 if image is None else image.last_lsn) + 1
        queues = ground.registry if ground.registry.queue_topics else ()
        ground.lease_table.finish_recovery(
            ground.clock.now_ms(), was_clean=stop.was_clean, topics=queues
        )
        ground.router_table.finish_recovery(ground.registry)
        recovered = await judge_files(
            ground.view_table,
            ground.registry,
            ground.views_dir,
            ground.view_process,
            offload,
            was_clean=stop.was_clean,
        )
        published = ReplayStart() if image is None else image.replay_start
        writers = self.open_journal(replay, next_lsn, published)
        await self._keep_for_archive(writers.journal)
        moved = await writers.transfers.complete(recovery.marks)
        await writers.publish(next_lsn, heads_moved=found.heads_moved > 0 or known is not None)
        if known is not None:
            # The snapshot now holds the facts of the file `RESTORED`.
            await offload.run(partial(remove_restored, ground.fs, directory.root))
        torn = "".join(f", cut a torn write in {torn.path}" for torn in replay.report.torn)
        report = (
            f"{found.topics} topics, {found.entries} journal entries replayed, "
            f"{found.heads_moved} heads moved, {found.flips} delete flags made, "
            f"{moved} moves ended{torn}"
        )
        node = _wire(writers, recovered, report)
        for topic in ground.registry:
            node.sealer.adopt(topic)
            if topic.log.sealed_count and topic.files.healed:
                _readmit_jobs(topic, node.queues)
        await node.streams.start()
        self.state.recovery = RecoveryFacts(
            duration_ms=int(ground.clock.monotonic_ms() - began_ms),
            entries=found.entries,
            records=ground.registry.records_live,
            torn_files=len(replay.report.torn),
        )
        self.node = node
        node.serve()
        return node

    async def _keep_for_archive(self, journal: Journal) -> None:
        """Keep the journal from the archive's newest part on; called before the first trim.

        A run without an archive keeps nothing, and notes it: the next stretch needs a base.
        """
        ground = self.ground
        run, root = ground.offload.run, ground.directory.root
        if not await run(partial(ground.fs.exists, layout.join(root, layout.ARCHIVE_POSITION))):
            return
        from topics_server.archive.continuous.position import note_gap, read_position

        try:
            if ground.settings.archive_url is None:
                await run(partial(note_gap, ground.fs, root))
                return
            position = await run(partial(read_position, ground.fs, root))
        except StorageError as error:
            # The archiver cannot read the position either, and will not archive.
            log.warning("the journal is not kept for the archive: %s", error)
            return
        if position is not None and position.number and not position.is_gap:
            journal.keep_for_archive(position.last_lsn + 1)
        elif position is not None and position.intents:
            # The first part of a stretch may exist already; the archiver checks and finds its lsn.
            journal.keep_for_archive(1)

    def open_journal(self, replay: JournalReplay, next_lsn: int, published: ReplayStart) -> Writers:
        """The journal and what writes through it. Recovery is over; the loop must run."""
        return Writers(self.ground, replay, next_lsn, published)


class Writers:
    """The journal, and all that writes through it without a request."""

    def __init__(
        self, ground: Ground, replay: JournalReplay, next_lsn: int, published: ReplayStart
    ) -> None:
        self.ground = ground
        directory, settings = ground.directory, ground.settings
        registry, clock = ground.registry, ground.clock
        self.wal_set, self._is_new_set = directory.wal_set_for(settings.wal_shards)
        self.sync_latency = [LatencyHistogram() for _ in range(settings.wal_shards)]
        loop = asyncio.get_running_loop()
        self.journal = Journal.create(
            ground.fs,
            directory.wal_dir,
            replay,
            wal_set=self.wal_set,
            shard_count=settings.wal_shards,
            loop=loop,
            workers=ground.workers(loop),
            sync_interval_ms=settings.wal_fsync_interval_ms,
            sizes=ground.sizes,
            observe_sync_us=[histogram.observe for histogram in self.sync_latency],
            on_backlog=ground.state.throttle.press,
            run=directory.run,
            on_unknown=directory.forget_boot,
            may_fill=ground.space.may_fill,
        )
        self.commits = CommitPipeline(
            registry, self.journal, ground.notifier, next_lsn, ground.projections
        )
        self.pages = RouterPages(registry, self.commits, ground.router_table.sources)
        for router in ground.router_table:
            self.pages.add_source(router.source_id)
        self.commits.change_observers.append(ground.lease_table.observe)
        self.commits.delete_observers.append(ground.lease_table.observe)
        self.commits.job_observers.append(ground.lease_table.observe)
        self.commits.change_observers += [ground.router_table.observe, self.pages.observe]
        self.transfers = Transfers(registry, self.commits, clock)
        # Make this before the first snapshot, because it ends the recovery of the session table.
        self.sessions = WatchSessions(
            ground.session_table,
            self.commits,
            clock,
            ttl_ms=settings.session_ttl_ms,
            max_sessions=settings.max_watch_sessions,
            max_per_prefix=settings.max_watch_sessions_per_prefix,
        )
        self.sealer = Sealer(
            registry,
            self.commits,
            self.journal,
            ground.segments,
            ground.offload,
            clock,
            SealingRules(
                max_records=settings.segment_max_events,
                max_bytes=settings.segment_max_bytes,
                max_age_ms=settings.segment_max_age_ms,
                retain_segments=settings.hot_retain_segments,
                retain_bytes=settings.hot_retain_bytes,
                has_cold=settings.cold_dir is not None,
            ),
            ground.space.may_seal,
            ground.space.check_seal,
        )
        self.sealer.on_refused.append(ground.space.note_refused)
        ground.space.on_given.append(self.sealer.retry_now)
        self.checkpointer = Checkpointer(
            registry,
            self.commits,
            self.journal,
            ground.snapshots,
            ground.offload,
            clock,
            self.sealer.seal_tails,
            ground.projections,
            self.pages,
            run=directory.run,
            published=published,
        )
        self.checkpointer.make_room = ground.space.make_room
        self.checkpointer.on_taken.append(self.sealer.snapshot_taken)
        self.sealer.on_moved += [self.checkpointer.moved, ground.notifier.notify]

    async def publish(self, next_lsn: int, *, heads_moved: bool) -> None:
        """Record this boot and the wal set in `FORMAT`; take a snapshot first if one is needed.

        Heads that moved are published before this boot is noted, and a new wal set starts on a
        snapshot, so that no entry of it depends on how the old one was sharded.
        """
        directory, shards = self.ground.directory, self.ground.settings.wal_shards
        if heads_moved or (self._is_new_set and not directory.is_new):
            # Each shard of a listed set must have a file, so update the list before trimming the
            # files.
            await self.checkpointer.take(final=True, trim=False)
        oldest = self.checkpointer.trim_lsn
        await self.ground.offload.run(
            lambda: directory.note_journal(
                self.wal_set, shards, next_lsn, oldest_start_lsn=oldest, heads_moved=heads_moved
            )
        )
        self.checkpointer.trim()


def _wire(writers: Writers, recovered: RecoveredLogs, report: str) -> Node:
    """The services over the engine."""
    ground, commits = writers.ground, writers.commits
    settings, registry = ground.settings, ground.registry
    notifier, clock, moved = ground.notifier, ground.clock, writers.checkpointer.moved
    fetcher = Fetcher(registry, ground.segments, ground.offload)
    fetcher.on_moved.append(moved)
    store = Store(
        registry,
        commits,
        notifier,
        fetcher,
        clock,
        ground.append_limits,
        quotas_of(settings, ground.state.keys.prefixes),
        writers.transfers,
    )
    store.checks.is_seal_refused = writers.sealer.is_refused
    queues = QueueService(
        store, ground.lease_table, commits, notifier, clock, on_moved=partial(moved, LEASES_ID)
    )
    store.topics.queue_counts = queues.counts
    pump = Pump(ground.router_table, store, commits, notifier, writers.pages, clock, moved)
    archiver = _archiver(writers, store)
    return Node(
        ground=ground,
        journal=writers.journal,
        commits=commits,
        transfers=writers.transfers,
        checkpointer=writers.checkpointer,
        sealer=writers.sealer,
        scrubber=Scrubber(
            registry,
            fetcher,
            clock,
            ScrubRules(settings.scrub_mib_per_second * MIB, settings.scrub_pass_ms),
            lambda: writers.sealer.is_working,
        ),
        store=store,
        sessions=writers.sessions,
        fanout=Fanout(
            SubscriptionDispatcher(registry, commits, notifier, fetcher, clock),
            ground.state.json_cache,
            buffer_grace_ms=settings.buffer_grace_ms,
            slow_consumer_timeout_ms=settings.slow_consumer_timeout_ms,
        ),
        queues=queues,
        pages=writers.pages,
        pump=pump,
        routers=RouterService(
            ground.router_table, pump, store, commits, clock, max_routers=settings.max_routers
        ),
        views=Views(
            ground.view_table,
            ground.views_dir,
            ViewContext(
                store,
                notifier,
                ground.view_process,
                ground.offload,
                settings.view_max_bytes,
                Feed(store, ground.view_process, Pacer()),
            ),
            ground.view_queries,
            commits,
            clock,
            settings,
            recovered,
            ground.state.keys.prefixes,
        ),
        streams=Streams(
            store,
            registry,
            StreamWrites(store, registry, commits, clock),
            notifier,
            clock,
            ground.state.large_appends,
        ),
        sync_latency=writers.sync_latency,
        report=report,
        backups=_backups(writers, store),
        archiver=archiver,
        mender=_mender(writers, archiver, fetcher, queues, pump),
    )


def _readmit_jobs(topic: Topic, queues: QueueService) -> None:
    """Jobs whose damaged file was put back: the queue's cursor may have passed them."""
    for run in topic.log.sealed():
        if run.segment_id in topic.files.healed:
            queues.readmit(topic.topic_id, run.first_seq, run.last_seq)


def _archiver(writers: Writers, store: Store) -> Archiver | None:
    """The archiver, if an archive is set: only then are its modules imported."""
    ground = writers.ground
    if ground.settings.archive_url is None:
        return None
    from topics_server.node.archiver import Archiver

    return Archiver(
        ground,
        writers.journal,
        writers.commits,
        writers.checkpointer,
        ground.settings.archive_url,
        lambda: store.is_disk_low,
    )


def _mender(
    writers: Writers,
    archiver: Archiver | None,
    fetcher: Fetcher,
    queues: QueueService,
    pump: Pump,
) -> Mender[PreparedMend] | None:
    """The mender of damaged segments, if an archive has copies of them."""
    if archiver is None:
        return None
    from topics_server.node.mending import ArchiveMending

    ground = writers.ground

    def on_mended(topic: Topic, index: SealedIndex) -> None:
        topic_id = topic.topic_id
        fetcher.forget(topic_id, index.segment_id)
        pump.forget_blocks(topic_id)
        queues.readmit(topic_id, index.first_seq, index.last_seq)
        writers.checkpointer.moved(topic_id)
        ground.notifier.notify(topic_id)

    mender = Mender(
        ground.registry,
        writers.sealer,
        ArchiveMending(ground, archiver),
        ground.clock,
        on_mended,
    )
    fetcher.on_damaged.append(mender.note)
    return mender


def _backups(writers: Writers, store: Store) -> Backups | None:
    """The maker of backups, if a folder is set: only then are its modules imported."""
    ground = writers.ground
    if ground.settings.backup_dir is None:
        return None
    from topics_server.node.backups import Backups

    return Backups(
        ground,
        writers.journal,
        writers.commits,
        writers.checkpointer,
        str(ground.settings.backup_dir),
        lambda: store.is_disk_low,
    )
