"""What exists before recovery: the locked directory, empty tables, resources outside the process.

Opening locks the data directory and the cold folder and changes nothing else. Called by `boot`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from topics_server.api.context import ServerState
from topics_server.engine.background.large_appends import LargeAppends
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.projections import Projections
from topics_server.engine.ports import Clock
from topics_server.engine.pressure.priority import effective_priority
from topics_server.engine.pressure.throttle import Throttle
from topics_server.engine.subscribe.sessions import SessionTable
from topics_server.engine.topic.registry import Registry
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.routers.router_table import RouterTable
from topics_server.runtime.busy_polling import BusyPolling
from topics_server.runtime.clock import SystemClock, random_u64
from topics_server.runtime.metrics import DiskFacts, log
from topics_server.runtime.open_files import store_files
from topics_server.runtime.thread_offload import ThreadOffload
from topics_server.settings import Settings
from topics_server.values.appends import AppendLimits
from topics_server.values.entries import LEASES_ID, ROUTERS_ID, SESSIONS_ID, VIEWS_ID
from topics_server.values.errors import StartRefused, StorageError
from topics_server.values.storage_types import Offload
from topics_server.values.texts.key_list import KeysError
from topics_server.views.processes import Applying, Querying, QueryPool, ViewProcess
from topics_server.views.view_table import ViewTable
from topics_server.wal.cold_folder import ColdFolder, judge_before_start
from topics_server.wal.directory import Directory, read_boot_id
from topics_server.wal.disk_space import Space
from topics_server.wal.fs import Fs, OsFs
from topics_server.wal.journal.journal import thread_workers
from topics_server.wal.journal.sizing import (
    ballast_bytes,
    journal_sizes,
    min_free_bytes,
)
from topics_server.wal.journal.wal_file import Sizes
from topics_server.wal.journal.workers import BlockingWorker
from topics_server.wal.layout import VIEWS
from topics_server.wal.segments.packing_process import Packer, ProcessPacker
from topics_server.wal.segments.store import SealedSegments
from topics_server.wal.snapshots.store import PublishedSnapshots

WorkerFactory = Callable[[asyncio.AbstractEventLoop], Callable[[str], BlockingWorker]]


@dataclasses.dataclass(frozen=True)
class World:
    """Everything outside the process, so that one node runs on real and on failing disks."""

    fs: Fs
    clock: Clock
    offload: Offload
    workers: WorkerFactory


class Ground:
    """An opened data directory, and the tables that recovery fills."""

    def __init__(
        self,
        settings: Settings,
        directory: Directory,
        cold: ColdFolder | None,
        segments: SealedSegments,
        world: World,
        sizes: Sizes,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.cold = cold
        self.segments = segments
        self.fs = world.fs
        self.clock = world.clock
        self.offload = world.offload
        self.workers = world.workers
        self.sizes = sizes
        self.registry = Registry()
        self.notifier = Notifier()
        self.session_table = SessionTable()
        self.lease_table = LeaseTable(random_u64())
        self.router_table = RouterTable()
        self.view_table = ViewTable()
        # These start processes at first use.
        self.views_dir = Path(directory.root) / VIEWS
        self.view_process: Applying = ViewProcess("apply_worker", [str(self.views_dir)])
        self.view_queries: Querying = QueryPool(settings.view_query_processes)
        self.projections: Projections = {
            SESSIONS_ID: self.session_table,
            LEASES_ID: self.lease_table,
            ROUTERS_ID: self.router_table,
            VIEWS_ID: self.view_table,
        }
        self.total_bytes = self.fs.total_bytes(directory.root)
        self.snapshots = PublishedSnapshots(self.fs, directory.root)
        self.space = self._make_space()
        self.append_limits = msgspec.convert(settings, AppendLimits, from_attributes=True)
        self.state = self._make_state()

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
    ) -> Self:
        """*Blocking.* Lock the data directory and the cold folder.

        Raises `StartRefused` with one clear line.
        """
        fs = fs or OsFs()
        cold_dir = None if settings.cold_dir is None else str(settings.cold_dir)
        if cold_dir is not None:
            # Check first: if the disk of the old data directory is not mounted, no new directory
            # may be made in its place.
            judge_before_start(fs, cold_dir, str(settings.data_dir))
        if settings.archive_url is not None:
            from topics_server.archive.continuous.places.opening import refuse_place

            refuse_place(fs, settings.archive_url, str(settings.data_dir), cold_dir)
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
        world = World(fs, clock or SystemClock(), offload or ThreadOffload(), workers)
        sizes = sizes or journal_sizes(fs.total_bytes(directory.root), settings.wal_shards)
        return cls(settings, directory, cold, segments, world, sizes)

    def _make_space(self) -> Space:
        least = self.settings.min_free_bytes
        return Space(
            self.fs,
            self.directory.root,
            min_free_bytes=min_free_bytes(self.total_bytes) if least is None else least,
            ballast_bytes=lambda: ballast_bytes(
                self.snapshots.newest_bytes, self.total_bytes, self.sizes
            ),
            offload=self.offload,
        )

    def _make_state(self) -> ServerState:
        settings = self.settings
        try:
            grants = settings.grants()
        except KeysError as error:
            raise StartRefused(str(error)) from None
        state = ServerState(
            settings=settings,
            busy_polling=BusyPolling(settings.busy_poll_us),
            progress=lambda: 0.0,
            disk=self._disk_facts,
            throttle=Throttle(self._priority_of),
            large_appends=LargeAppends(self.append_limits),
        )
        state.restrict_to(grants)
        state.defer_reads()
        return state

    def begin(self) -> None:
        """*Blocking.* Count this run. Recovery calls it before it writes anything else."""
        self.space.make_room_for_start(self.sizes.fill_step_bytes)
        self.directory.begin(with_cold=self.cold is not None)
        if self.cold is not None:
            self.cold.claim(self.directory)

    async def reload_keys(self) -> None:
        """Read the key file again. An unusable file changes nothing and is logged."""
        if self.settings.api_keys_file is None:
            log.info("reloading: there is no TOPICS_API_KEYS_FILE, so nothing changes")
            return
        try:
            grants = await asyncio.to_thread(self.settings.grants)
        except KeysError as error:
            log.error("reloading: the keys stay as they are: %s", error)
            return
        touched = self.state.keys.replace(grants)
        log.info("reloading: %d keys; %d were taken away or changed", len(grants), len(touched))

    async def rest(self) -> None:
        """Return once no snapshot or segment is being written."""
        if isinstance(self.offload, ThreadOffload):
            await self.offload.idle()

    def release(self) -> None:
        """Close files, helper processes and threads, and unlock the directory."""
        # No request is left for its helper process, so the process ends at once.
        self.state.large_appends.close()
        self.segments.close()
        if isinstance(self.offload, ThreadOffload):
            self.offload.close()
        if self.cold is not None:
            self.cold.close()
        self.directory.close()

    def _priority_of(self, name: str) -> int:
        topic = self.registry.find(name)
        if topic is None:
            return 0
        return effective_priority(topic.config, topic.last_read_ts, self.clock.now_ms())

    def _disk_facts(self) -> DiskFacts:
        """*Blocking.*"""
        (hot_files, hot_bytes), (cold_files, cold_bytes) = self.segments.totals()
        return DiskFacts(
            hot_files=hot_files,
            hot_bytes=hot_bytes,
            cold_files=cold_files,
            cold_bytes=cold_bytes,
            free_bytes=self.fs.free_bytes(self.directory.root),
            total_bytes=self.total_bytes,
            min_free_bytes=self.space.min_free_bytes,
        )
