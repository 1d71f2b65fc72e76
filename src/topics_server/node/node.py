"""The complete running store: its parts, the facts about it, and its stop.

`boot` makes it. Called by `server`, `app` and the simulations.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from topics_server.api.context import ServerState
from topics_server.api.watch.broadcast import Fanout
from topics_server.engine.background.checkpointer import Checkpointer
from topics_server.engine.background.mender import Mender
from topics_server.engine.background.scrub import Scrubber
from topics_server.engine.background.sealer import Sealer
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.router_pages import RouterPages
from topics_server.engine.commit.transfers import Transfers
from topics_server.engine.store import Store
from topics_server.engine.subscribe.session_service import WatchSessions
from topics_server.engine.topic.registry import Registry
from topics_server.node.ground import Ground
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.queue.service import QueueService
from topics_server.routers.pump import Pump
from topics_server.routers.router_table import RouterTable
from topics_server.routers.service import RouterService
from topics_server.runtime.logging import log_defect
from topics_server.runtime.metrics import LatencyHistogram, log
from topics_server.runtime.thread_offload import ThreadOffload
from topics_server.streams.service import Streams
from topics_server.values.errors import StorageError
from topics_server.values.storage_types import Offload
from topics_server.views.service import Views
from topics_server.wal.disk_space import reasons_of
from topics_server.wal.journal.journal import Journal
from topics_server.wal.journal.sizing import WAL_SHARE
from topics_server.wal.segments.store import SealedSegments

if TYPE_CHECKING:
    from topics_server.node.archiver import Archiver
    from topics_server.node.backups import Backups
    from topics_server.wal.segments.mending import PreparedMend


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """Storage and engine of one data directory. `report`: the results of recovery, one line."""

    ground: Ground
    journal: Journal
    commits: CommitPipeline
    transfers: Transfers
    checkpointer: Checkpointer
    sealer: Sealer
    scrubber: Scrubber
    store: Store
    sessions: WatchSessions
    fanout: Fanout
    queues: QueueService
    pages: RouterPages
    pump: Pump
    routers: RouterService
    views: Views
    streams: Streams
    sync_latency: Sequence[LatencyHistogram]
    report: str
    backups: Backups | None = None
    archiver: Archiver | None = None
    mender: Mender[PreparedMend] | None = None
    _tasks: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)

    @property
    def state(self) -> ServerState:
        """The state of all handlers."""
        return self.ground.state

    @property
    def registry(self) -> Registry:
        """All topics."""
        return self.ground.registry

    @property
    def notifier(self) -> Notifier:
        """Wakes the readers of topics."""
        return self.ground.notifier

    @property
    def segments(self) -> SealedSegments:
        """The sealed segments of all topics."""
        return self.ground.segments

    @property
    def lease_table(self) -> LeaseTable:
        """The leases of all queues."""
        return self.ground.lease_table

    @property
    def router_table(self) -> RouterTable:
        """All routers."""
        return self.ground.router_table

    # --- serve ----------------------------------------------------------------------------

    def serve(self) -> None:
        """Start the background work, and open the services to requests."""
        self._start_tasks()
        self.pump.start()
        self.views.start()
        state = self.state
        state.store = self.store
        state.keys.paths.find = self.registry.path_of
        state.fanout = self.fanout
        state.sessions = self.sessions
        state.queues = self.queues
        state.routers = self.routers
        state.views = self.views
        state.streams = self.streams
        state.sealing = self.sealer
        state.shards = lambda: self.journal.facts(self.sync_latency)
        state.reasons = self._reasons
        state.backups = self.backups
        state.archiver = self.archiver
        state.scrub = self.scrubber.metrics
        state.mending = None if self.mender is None else self.mender.metrics
        if state.phase == "replaying":
            state.enter("ready")

    def _start_tasks(self) -> None:
        ground, settings = self.ground, self.ground.settings
        self.state.throttle.watch_backlog(self._backlog_bytes)
        self.state.throttle.start()
        self.state.busy_polling.is_resting = _resting(self.journal, ground.offload)
        self._spawn(self.sealer.run())
        self._spawn(
            self.checkpointer.run(
                settings.checkpoint_interval_ms,
                min(settings.checkpoint_wal_bytes, ground.total_bytes // WAL_SHARE),
                self._wal_bytes,
                lambda: self.store.is_disk_low,
            )
        )
        self._spawn(ground.space.watch(self._note_space))
        self._spawn(self.streams.run())
        self._spawn(self.scrubber.run())
        if self.backups is not None:
            self._spawn(self.backups.find_newest())
        if self.archiver is not None:
            self.archiver.start()
        if self.mender is not None:
            self._spawn(self.mender.run())

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
                self.ground.space.floor_bytes,
                "refused" if is_low else "accepted again",
            )

    # --- facts ----------------------------------------------------------------------------

    def _wal_bytes(self) -> int:
        return sum(shard.counters.bytes for shard in self.journal.shards)

    def _backlog_bytes(self) -> int:
        return max([shard.queue_bytes for shard in self.journal.shards], default=0)

    def _reasons(self) -> list[str]:
        """Failures of background work, without names of topics and files."""
        sealing = next(iter(self.sealer.failures.values()), None)
        failed = 0 if self.mender is None else self.mender.failed
        return [
            *reasons_of(self.checkpointer.failure, sealing),
            *([f"{failed} damaged segments are not mended: see the log"] if failed else []),
            *([] if self.archiver is None else self.archiver.failures),
        ]

    # --- stop -----------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Take no new requests; end every stream; answer every request that waits."""
        self.state.enter("draining")
        # The next start treats a session whose stream ends here as open.
        self.state.throttle.close()
        self.sessions.drain()
        self.queues.drain()
        self.views.drain()
        self.fanout.drain()
        self.store.drain()

    async def close(self) -> None:
        """Finish what is in flight, take the final snapshot, release the directory."""
        if self.backups is not None:
            await self.backups.close()
        if self.archiver is not None:
            await self.archiver.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # The final snapshot must not overtake one that is being written.
        await self.ground.rest()
        try:
            await self._close_journal()
        finally:
            self.ground.release()

    async def _close_journal(self) -> None:
        await self.views.close()
        await self.queues.close()
        await self.pump.close()
        self.sessions.close()
        self.sealer.expire()
        try:
            await self.journal.sync_open_shards()
            await self.checkpointer.take(final=True)
            # If a shard is read-only, the next start must examine which of its writes reached the
            # disk.
            is_clean = not self.journal.read_only_shards()
        except StorageError as error:
            log.warning("no final snapshot, the next start replays the journal: %s", error)
            is_clean = False
        await self.journal.close()
        if is_clean:
            self.ground.directory.note_clean_stop(self.checkpointer.last_lsn)


def _resting(journal: Journal, offload: Offload) -> Callable[[], bool]:
    """Returns a function: whether no thread writes to the journal or works for the engine."""
    calls = offload.under_way if isinstance(offload, ThreadOffload) else ()

    def is_resting() -> bool:
        for shard in journal.shards:
            if shard.job is not None:
                return False
        return not calls

    return is_resting
