"""Checkpoints: captures topics in slices, publishes, trims the journal.

A topic is captured with its applied lsn, so the slices need not belong to one moment. The
snapshot's start is the oldest lsn that was not applied (or was held) when the capture began; replay
from there covers every part. Before the snapshot is published, every shard is synced up to the last
captured lsn. The journal is trimmed to the start of the *older* kept snapshot (ARCHITECTURE,
Checkpoint). A read-only shard does not delay the others: its last writes may or may not be on disk,
so its replay begins at the start of the snapshot before its failure, and its files stay. Topics
without a change since the last capture reuse their encoded form; projections are always captured
again, because they may change without an entry. Loop thread, writing off the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final

from topics_server.engine.background.capture import Captured, capture, prepare
from topics_server.engine.background.epochs import capture_epochs
from topics_server.engine.background.kept_parts import KeptParts
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.projections import NO_PROJECTIONS, Projections
from topics_server.engine.commit.router_pages import RouterPages
from topics_server.engine.ports import Clock, JournalPort, Snapshots
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import log
from topics_server.values.entries import RESERVED_ID_MIN, Entry
from topics_server.values.errors import StorageError
from topics_server.values.limits import CAPTURE_SLICE_MS
from topics_server.values.storage_types import (
    EPOCHS_PART,
    Offload,
    ReplayStart,
    ShardSync,
    SnapshotImage,
    SyncedShard,
)

# A tail this large is sealed before a capture, not written into every snapshot.
SEAL_BEFORE_CAPTURE_BYTES: Final = 1024 * 1024
# Encoded parts up to this size are kept for the next checkpoint; larger ones are encoded again.
_KEPT_PART_BYTES_MAX: Final = 4096
# How often the amount of journaled bytes is checked.
_POLL_MS: Final = 500
_FREED_AT_ONCE: Final = 5_000
# A tail above either bound is encoded off the loop. It is never kept for the next checkpoint: the
# topic may have changed meanwhile.
_ENCODED_HERE_RECORDS_MAX: Final = 2_048
_ENCODED_HERE_BYTES_MAX: Final = 64 * 1024
_LOW_DISK_INTERVAL_MS: Final = 1000


class Checkpointer:
    """Takes checkpoints, on a timer or on request. One at a time."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        journal: JournalPort,
        snapshots: Snapshots,
        offload: Offload,
        clock: Clock,
        seal_tails: Callable[[int], Awaitable[None]],
        projections: Projections = NO_PROJECTIONS,
        pages: RouterPages | None = None,
        *,
        run: int = 0,
        published: ReplayStart = ReplayStart(),  # noqa: B008 -- an immutable value
    ) -> None:
        """`run`: the run's number. `published`: the replay start of the newest snapshot."""
        self._run = run
        self._published = published
        self._pages = pages
        self._registry = registry
        self._commits = commits
        self._journal = journal
        self._snapshots = snapshots
        self._offload = offload
        self._clock = clock
        self._seal_tails = seal_tails
        self._projections = projections
        self._busy = asyncio.Lock()
        self._parts = KeptParts()
        self._last_lsn = 0
        # Whether captured state has changed without an entry.
        self._has_moved = False
        self._trim_start = ReplayStart()
        self.taken_count = 0
        self.longest_slice_ms = 0.0
        self.last_duration_ms = 0.0
        # The error of the last checkpoint; empty once one is published.
        self.failure: StorageError | None = None
        # Called before a snapshot is written, with its size in bytes.
        self.make_room: Callable[[int], Awaitable[None]] | None = None
        # Called after each published snapshot.
        self.on_taken: list[Callable[[], None]] = []
        commits.change_observers.append(self._observe)

    def _observe(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Free the encoded part of a changed topic; appends change the topic's revision instead."""
        self._parts.discard(entry.topic_id)

    def moved(self, topic_id: int) -> None:
        """Discard the part of a topic that changed without an entry (sealed, flipped, damaged).

        The id may also be that of a projection whose state changed without an entry.
        """
        if topic_id >= RESERVED_ID_MIN:
            self._has_moved = True
        self._parts.discard(topic_id)

    async def take(self, *, final: bool = False, trim: bool = True) -> None:
        """Take one checkpoint. Raises `StorageError` if it could not be published.

        `final`: the server is stopping, so tails stay in the snapshot and are not sealed. `trim`:
        remove journal files that no snapshot needs; otherwise `self.trim` does it later.
        """
        async with self._busy:
            if self._commits.is_broken:
                raise StorageError("after a defect the state in memory must not be published")
            began_ms = self._clock.monotonic_ms()
            if not final:
                await self._seal_tails(SEAL_BEFORE_CAPTURE_BYTES)
            if self._pages is not None:
                await self._pages.quiesced()
                self._pages.begin_capture()
            start_lsn = self._commits.start_lsn()
            self._has_moved = False
            parts, size = await self._capture()
            last_lsn = self._commits.next_lsn - 1
            assert start_lsn <= last_lsn + 1
            next_topic_id = self._registry.next_topic_id
            synced = await self._journal.sync_open_shards()
            image = SnapshotImage(
                start_lsn=start_lsn,
                last_lsn=last_lsn,
                next_topic_id=next_topic_id,
                parts=parts,
                run=self._run,
                shards=[self._shard_sync(each, start_lsn) for each in synced],
            )
            if self.make_room is not None:
                await self.make_room(size)
            trim_start = await self._offload.run(partial(self._snapshots.write, image))
            self._published = image.replay_start
            del image
            # Freeing 100,000 parts at once would block the loop.
            while parts:
                del parts[-_FREED_AT_ONCE:]
                await _give_way()
            if trim_start.lsn:
                self._trim_start = trim_start
            if trim:
                self.trim()
            self.taken_count += 1
            self._last_lsn = last_lsn
            self.last_duration_ms = self._clock.monotonic_ms() - began_ms
        for callback in self.on_taken:
            callback()

    @property
    def last_lsn(self) -> int:
        """The last lsn of the newest published snapshot; 0: there was none."""
        return self._last_lsn

    @property
    def trim_lsn(self) -> int:
        """The first needed lsn, on shards that accept writes; 0: all entries are needed."""
        return self._trim_start.lsn

    def trim(self) -> None:
        """Remove journal files that no kept snapshot needs."""
        if self.trim_lsn:
            self._journal.trim(self._trim_start)

    def _shard_sync(self, synced: SyncedShard, start_lsn: int) -> ShardSync:
        """The snapshot's facts about a shard.

        The next start decides about the entries that were in flight on a read-only shard. Their
        pages without payloads may refer to records from the previous snapshot's start on.
        """
        if synced.is_read_only:
            start_lsn = min(start_lsn, self._published.of(synced.wal_set, synced.shard))
        return ShardSync(synced.wal_set, synced.shard, synced.synced_lsn, start_lsn)

    async def _capture(self) -> tuple[list[tuple[int, bytes]], int]:
        """Encode every part, never holding the loop longer than a slice.

        Returns the parts and their size in bytes. The size is counted here, because to go through
        100,000 parts once more would block the loop.
        """
        parts: list[tuple[int, bytes]] = [(EPOCHS_PART, b"")]
        size = 0
        slice_began_ms = self._clock.monotonic_ms()
        for part_id, part in self._captured():
            if not isinstance(part, bytes):
                part = await self._offload.run(part.encode)
                slice_began_ms = self._clock.monotonic_ms()
            parts.append((part_id, part))
            size += len(part)
            spent_ms = self._clock.monotonic_ms() - slice_began_ms
            if spent_ms >= CAPTURE_SLICE_MS:
                self.longest_slice_ms = max(self.longest_slice_ms, spent_ms)
                await _give_way()
                slice_began_ms = self._clock.monotonic_ms()
        # Capture the epochs last: a topic that was dropped before its own capture is only in this
        # part.
        epochs = capture_epochs(self._registry)
        parts[0] = (EPOCHS_PART, epochs)
        return parts, size + len(epochs)

    def _captured(self) -> Iterator[tuple[int, bytes | Captured]]:
        """Yield the parts one after the other, each with the state at the time of the request.

        A part that would take long to encode is yielded unencoded.
        """
        for reserved_id, projection in self._projections.items():
            for part in projection.capture():
                yield reserved_id, part
        for topic_id in self._registry.ids():
            topic = self._registry.get(topic_id)
            if topic is None:
                continue  # dropped while others were captured
            revision, kept = self._parts.get(topic_id)
            if revision != topic.revision:
                if _has_long_tail(topic):
                    self._parts.discard(topic_id)
                    yield topic_id, prepare(topic)
                    continue
                kept = capture(topic)
                if len(kept) <= _KEPT_PART_BYTES_MAX:
                    self._parts.keep(topic_id, topic.revision, kept)
                else:
                    self._parts.discard(topic_id)
            yield topic_id, kept

    async def run(
        self,
        interval_ms: int,
        max_wal_bytes: int,
        wal_bytes: Callable[[], int],
        is_disk_low: Callable[[], bool],
    ) -> None:
        """Take a checkpoint every interval, or after so many journal bytes, until cancelled.

        Takes none while nothing is written, except one more that lets journal files be removed.
        `wal_bytes`: bytes journaled since the start. While disk space is low, or after a failure,
        checkpoints are more frequent: removing journal files frees space.
        """
        taken_ms = self._clock.monotonic_ms()
        taken_bytes = wal_bytes()
        while True:
            await asyncio.sleep(min(interval_ms, _POLL_MS) / 1000)
            next_lsn = self._commits.next_lsn
            # Take one more after the last write: the older snapshot still keeps journal files.
            is_published = next_lsn - 1 == self._last_lsn and not self._has_moved
            # With a single snapshot nothing is trimmed; take a second one if space is low.
            is_trimmed = self.trim_lsn == next_lsn or (self.trim_lsn == 0 and not is_disk_low())
            if is_published and is_trimmed:
                continue
            is_urgent = is_disk_low() or self.failure is not None
            wait_ms = min(interval_ms, _LOW_DISK_INTERVAL_MS) if is_urgent else interval_ms
            is_due = self._clock.monotonic_ms() - taken_ms >= wait_ms
            if not is_due and wal_bytes() - taken_bytes < max_wal_bytes:
                continue
            taken_ms = self._clock.monotonic_ms()
            taken_bytes = wal_bytes()
            try:
                await self.take()
            except StorageError as error:
                log.warning("checkpoint failed, the journal is kept: %s", error)
                # Without its traceback, which refers to all parts of the failed snapshot.
                self.failure = error.with_traceback(None)
            else:
                self.failure = None


async def _give_way() -> None:
    """Let the requests that wait be read and answered before the next slice.

    One turn of the loop reads them, and the next one answers them: most answers wait for the end of
    a turn, appends for the write to the journal. After a single turn an answer would wait for one
    slice more.
    """
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def _has_long_tail(topic: Topic) -> bool:
    """Whether the topic's part has many records; that of an ephemeral topic has none."""
    log_ = topic.log
    is_long = (
        log_.tail_count > _ENCODED_HERE_RECORDS_MAX or log_.tail_bytes > _ENCODED_HERE_BYTES_MAX
    )
    return is_long and not topic.is_ephemeral
