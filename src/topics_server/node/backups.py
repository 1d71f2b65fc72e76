"""Backups of the running store: one at a time, on request.

The steps of `archive/backup` run off the loop, one after the other. Appends go on; only the journal
keeps its files between the snapshot and the end of the copy. Called by the route
`POST /v0/admin/backup`, by `node` and `archiver`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec

from topics_server.archive.backup import BackupStopped, BackupWriter
from topics_server.archive.format import BackupFacts
from topics_server.archive.journal_copy import copied_entries
from topics_server.archive.object_store import FolderStore
from topics_server.archive.repository import Repository
from topics_server.engine.background.checkpointer import Checkpointer
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.node.ground import Ground
from topics_server.runtime.logging import log_defect
from topics_server.runtime.metrics import BackupMetrics, log
from topics_server.values.errors import DiskFull, ReadOnly, StorageError
from topics_server.values.storage_types import BackupState
from topics_server.wal.journal.journal import Journal

T = TypeVar("T")


class Runs(Protocol):
    """Makes a blocking call off the loop; `engine.ports.Offload.run`."""

    async def __call__(self, call: Callable[[], T]) -> T:
        """Make the call off the loop and return its result."""
        ...


class Backups:
    """Makes backups of this store into one folder. Loop thread."""

    def __init__(
        self,
        ground: Ground,
        journal: Journal,
        commits: CommitPipeline,
        checkpointer: Checkpointer,
        folder: str,
        is_disk_low: Callable[[], bool],
    ) -> None:
        self._ground: Final = ground
        self._journal: Final = journal
        self._commits: Final = commits
        self._checkpointer: Final = checkpointer
        self._folder: Final = folder
        self._is_disk_low: Final = is_disk_low
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._newest_ts_ms = 0
        self._made = self._failed = 0
        self.state = BackupState()

    def begin(self) -> BackupState:
        """Start a backup unless one is under way; return the state of the running one."""
        if self._task is None and not self._is_closing:
            self.state = BackupState("running", started_ts=self._ground.clock.now_ms())
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(log_defect)
        return self.state

    def metrics(self) -> BackupMetrics:
        """Facts for a scrape."""
        running = int(self._task is not None)
        return BackupMetrics(running, self._made, self._failed, self._newest_ts_ms)

    async def wait(self) -> None:
        """Return when no backup is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def find_newest(self) -> None:
        """Note when the newest backup in the folder was made, for the metrics."""
        try:
            newest = await self._ground.offload.run(self._read_newest)
        except StorageError as error:
            log.warning("the backup folder cannot be read: %s", error)
            return
        self._newest_ts_ms = max(self._newest_ts_ms, newest)

    def _read_newest(self) -> int:
        """The time of the newest readable backup; 0 if there is none."""
        repository = Repository(FolderStore.open(self._ground.fs, self._folder, write=False))
        for number in reversed(repository.numbers()):
            try:
                return repository.facts(number).ts_ms
            except StorageError as error:
                log.warning("backup %d cannot be read: %s", number, error)
        return 0

    async def close(self) -> None:
        """Stop a backup that is under way; it leaves no backup in the folder."""
        self._is_closing = True
        await self.wait()

    # -- one backup ----------------------------------------------------------------------------

    async def _run(self) -> None:
        clock = self._ground.clock
        try:
            facts = await self._make()
        except StorageError as error:
            if not isinstance(error, BackupStopped):
                log.warning("the backup failed: %s", error)
            self._failed += 1
            self.state = msgspec.structs.replace(
                self.state, status="failed", finished_ts=clock.now_ms(), reason=str(error)
            )
        else:
            self._made += 1
            self._newest_ts_ms = facts.ts_ms
            self.state = _done(self.state, facts, clock.now_ms())
            for path in facts.damaged_segments:
                log.warning("backup %d has a damaged file as it is: %s", facts.number, path)
            log.info("backup %d is made, up to lsn %d", facts.number, facts.last_lsn)
        finally:
            self._task = None
            if self.state.status == "running":
                self._failed += 1
                self.state = msgspec.structs.replace(
                    self.state, status="failed", reason="a defect: the log has its traceback"
                )

    async def _make(self) -> BackupFacts:
        ground, run = self._ground, self._ground.offload.run
        directory = ground.directory
        cold = None if ground.settings.cold_dir is None else str(ground.settings.cold_dir)
        writer = await run(
            partial(
                BackupWriter.open,
                ground.fs,
                self._folder,
                directory.root,
                cold,
                directory.store_id,
                self._check,
            )
        )
        self.state = msgspec.structs.replace(self.state, number=writer.number)
        try:
            for topic_id in await run(writer.topic_ids):
                await run(partial(writer.copy_ahead, topic_id))
            release = self._journal.hold_trim()
            try:
                last_lsn, now_ms = await copy_cut(
                    writer, ground, self._journal, self._commits, self._checkpointer, run
                )
            finally:
                release()
            return await run(partial(writer.finish, last_lsn, directory.run, now_ms))
        finally:
            await run(writer.close)

    def _check(self) -> None:
        """Raise if the backup must end. Called by the thread that copies; reads two flags."""
        if self._is_closing:
            raise BackupStopped("the server stops, and the backup ends unfinished")
        if self._is_disk_low():
            raise DiskFull("the data disk is nearly full, and the journal needs what is left")


async def copy_cut(
    writer: BackupWriter,
    ground: Ground,
    journal: Journal,
    commits: CommitPipeline,
    checkpointer: Checkpointer,
    run: Runs,
) -> tuple[int, int]:
    """Copy everything up to one lsn; return that lsn and the time when it was the newest.

    The caller keeps the journal from being trimmed. `run`: makes a blocking call off the loop.
    """
    writer.begin_cut()
    await checkpointer.take()
    await run(writer.put_snapshot)
    for topic_id in await run(writer.topic_ids):
        await run(partial(writer.put_topic, topic_id))
    await run(writer.end_topics)
    last_lsn, now_ms = commits.next_lsn - 1, ground.clock.now_ms()
    # Everything that has an lsn now is synced when this returns, or was refused.
    synced = await journal.sync_open_shards()
    if any(each.is_read_only for each in synced):
        raise ReadOnly("a shard takes no writes until a restart: back up after it")
    entries = copied_entries(
        ground.fs, ground.directory.wal_dir, writer.start_lsn, last_lsn, synced
    )
    await run(partial(writer.put_journal, entries))
    return last_lsn, now_ms


def _done(state: BackupState, facts: BackupFacts, now_ms: int) -> BackupState:
    return msgspec.structs.replace(
        state,
        status="done",
        finished_ts=now_ms,
        topics=facts.topics,
        segments=facts.segments,
        segment_bytes=facts.segment_bytes,
        copied_bytes=facts.copied_bytes,
        damaged_segments=len(facts.damaged_segments),
    )
