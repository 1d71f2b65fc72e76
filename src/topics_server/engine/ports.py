"""The protocols that the engine needs: journal, segments, snapshots, clock. Pure.

`wal/` satisfies the storage protocols without importing the engine; tests satisfy them with lists.
All callbacks run on the loop's thread. Methods marked *blocking* are called off the loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from topics_server.values.appends import DecodedAppend
from topics_server.values.blocks import Block
from topics_server.values.columns.json_rows import JsonBlock
from topics_server.values.entries import Entry
from topics_server.values.file_inventory import Anchor, FlagsDigest, FoundTopic
from topics_server.values.model import TagMatch, TopicConfig
from topics_server.values.storage_types import (
    PackedSegment,
    ReplayStart,
    SegmentPlan,
    ShardProgress,
    SnapshotImage,
    SyncedShard,
    TopicFacts,
)


class JournalPort(Protocol):
    """The write-ahead log. One writer, the loop; entries of one shard are written in lsn order."""

    @property
    def shard_count(self) -> int:
        """The number of shards that are open for writing."""
        ...

    def shard_of(self, topic_id: int) -> int:
        """The shard for a topic's entries, fixed for the life of the wal set.

        Reserved ids go to shard 0.
        """
        ...

    def listen(self, callback: Callable[[ShardProgress], None]) -> None:
        """Set the callback for progress (once, before the first submit)."""
        ...

    def submit(self, lsn: int, entry: Entry, *, shard: int, urgent: bool, sync: bool) -> None:
        """Queue one entry. Raises `TopicsError` `throttled` (queue full), `storage_read_only`.

        `urgent`: may use the reserve when the disk is full (deletes, drops, floors). `sync`: a
        ticket waits for its sync.
        """
        ...

    def flush(self, shard: int) -> None:
        """Write the queued entries before the end of the turn, if that delays no request."""
        ...

    def reopen(self, shard: int) -> None:
        """Accept submissions again: the loop has undone everything from `failed_from` on."""
        ...

    def read_only_shards(self) -> Sequence[int]:
        """Shards whose sync failed."""
        ...

    async def sync_all(self) -> None:
        """Return once everything submitted before the call is synced on every shard."""
        ...

    async def sync_open_shards(self) -> Sequence[SyncedShard]:
        """Like `sync_all`, but only for shards that accept writes.

        Returns how far every shard is synced.
        """
        ...

    async def hold_end(self, topic_id: int) -> None:
        """Make the topic's shard's synced position durable: the next write relies on it.

        Best effort; raises no error of the disk.
        """
        ...

    def trim(self, start: ReplayStart) -> None:
        """Allow the removal of files before the start of the older snapshot's replay."""
        ...

    async def close(self) -> None:
        """Write and sync the queued entries, end the threads."""
        ...


class SealedIndex(Protocol):
    """The mapped columns of one sealed segment; row r is seq `first_seq + r`."""

    @property
    def segment_id(self) -> int:
        """Number of the segment within its topic, never reused there."""
        ...

    @property
    def first_seq(self) -> int:
        """Seq of row 0."""
        ...

    @property
    def last_seq(self) -> int:
        """Seq of the last row."""
        ...

    def time(self, row: int) -> int:
        """Commit time of a row, ms."""
        ...

    def first_row_since(self, ts: int) -> int:
        """The first row whose commit time is >= `ts`; the row count if there is none."""
        ...

    def record_bytes(self, row: int) -> int:
        """The row's share of `bytes` (see `blocks.record_bytes`)."""
        ...

    def record_bytes_between(self, first_row: int, end_row: int, dead: bytes | bytearray) -> int:
        """Sum of `record_bytes` over rows `first_row..end_row - 1` whose `dead` byte is 0."""
        ...

    def bytes_at_most(self, first_row: int, end_row: int) -> int:
        """A bound of `record_bytes_between` for live rows, which takes less time."""
        ...

    def record_bytes_of(self, rows: NDArray[np.int64]) -> int:
        """Sum of `record_bytes` over these rows."""
        ...

    def node_rows(self, nodes: frozenset[str], first_row: int, end_row: int) -> bytes:
        """One byte per row of the range: 1 where the row's node is in `nodes`."""
        ...

    def flags(self) -> bytes:
        """A copy of the delete flags as found on disk: 0 live, 1 dead; one byte a row."""
        ...

    def damaged_rows(self, first_row: int, end_row: int) -> Sequence[tuple[int, int]]:
        """*Blocking.* Ranges (first, last) of unreadable rows of a range, ascending."""
        ...


class SegmentsPort(Protocol):
    """Sealed segments of all topics, hot and cold, with their manifests."""

    def pack(self, plan: SegmentPlan) -> PackedSegment:
        """*Blocking.* The contents of the files of a segment."""
        ...

    def put(
        self, plan: SegmentPlan, facts: TopicFacts, packed: PackedSegment | None = None
    ) -> SealedIndex:
        """*Blocking.* Pack, write, sync, rename, list in the manifest; return its columns.

        `packed`: what `pack` returned for the plan.
        """
        ...

    def read(
        self,
        topic_id: int,
        segment_id: int,
        first_row: int,
        end_row: int,
        unwanted: Sequence[tuple[int, int]] = (),
    ) -> Block:
        """*Blocking.* Read rows as a block and verify every record's checksum.

        A record that fails is damage: raises `errors.Damaged` with the ranges of bad rows. Rows of
        `unwanted` ranges (first, last) stay blank: no reader gets them.
        """
        ...

    def read_now(self, topic_id: int, segment_id: int, rows: range, most: int) -> Block | None:
        """What `read` returns, if it takes no wait for the disk and at most `most` bytes of a file.

        For the loop's thread. Returns None for rows with damage, too: `read` reports it.
        """
        ...

    def read_json_now(
        self, topic_id: int, segment_id: int, rows: range, most: int, shown: int
    ) -> JsonBlock | None:
        """The objects that a diff returns for these rows, under the conditions of `read_now`.

        The rows are whole groups. `shown`: their members, see `json_cache`; `DATA` is among them.
        Returns None, too, where only `read_now` can make them.
        """
        ...

    def read_json(
        self, topic_id: int, segment_id: int, rows: range, most: int, shown: int
    ) -> JsonBlock | None:
        """*Blocking.* What `read_json_now` returns, also if it takes a wait for the disk.

        Raises `StorageError`. Returns None for rows with damage: `read` reports it.
        """
        ...

    def read_rows(
        self, topic_id: int, segment_id: int, rows: Sequence[int], max_bytes: int
    ) -> list[Block]:
        """*Blocking.* Read a few rows, each as a block, like `read`.

        The rows ascend or descend. Stops after the block with which `max_bytes` are reached. Raises
        what `read` raises, even for damage that a repeated `read` would not find.
        """
        ...

    def find_tags(self, topic_id: int, segment_id: int, match: TagMatch) -> Sequence[int]:
        """*Blocking.* Rows (ascending) whose tag matches, dead ones included."""
        ...

    def check_index(self, topic_id: int, segment_id: int) -> None:
        """*Blocking.* Read a segment's index and flags from the disk.

        Raises `StorageError` for damage.
        """
        ...

    def flip(self, topic_id: int, rows: dict[int, Sequence[int]]) -> dict[int, FlagsDigest]:
        """*Blocking.* Set delete flags {segment id: rows}, in every tier's copy, and sync.

        Returns the digests of the flags after that; without segments that are damaged or were
        dropped.
        """
        ...

    def drop(self, topic_id: int, segment_ids: Sequence[int], facts: TopicFacts) -> None:
        """*Blocking.* Remove segments from the manifest, sync it, then unlink their files."""
        ...

    def drop_topic(self, topic_id: int) -> None:
        """*Blocking.* Remove every file of a dropped topic, in both tiers. Idempotent."""
        ...

    def relocate(self, topic_id: int, segment_id: int, facts: TopicFacts) -> None:
        """*Blocking.* Copy the segment to the cold folder, sync it, list it, unlink the hot file.

        Delete flags that are set meanwhile are written to both files.
        """
        ...

    def write_manifest(self, facts: TopicFacts) -> None:
        """*Blocking.* Replace the manifest with these facts and the current segments."""
        ...

    def open_topic(
        self, topic_id: int, anchor: Anchor | None = None
    ) -> tuple[FoundTopic, Sequence[SealedIndex]]:
        """*Blocking, recovery.* The files on disk for a topic, and its columns. Changes nothing.

        Never raises for damaged files: the report lists them, and recovery evaluates it after
        replay. `anchor`: the snapshot's expectations about them.
        """
        ...

    def finish_recovery(self, topic_id: int, untrusted: Collection[int] = ()) -> None:
        """*Blocking, recovery.* Make the found files durable, remove superseded ones.

        Called after the files were checked, for a topic that was opened. `untrusted` segments are
        not changed.
        """
        ...

    def topics_on_disk(self) -> list[int]:
        """*Blocking, recovery.* Ids that have a folder, in either tier."""
        ...

    def manifest_path(self, topic_id: int) -> str:
        """The path of a topic's manifest, for messages."""
        ...

    def bytes_of(self, topic_id: int) -> tuple[int, int]:
        """(hot, cold) bytes of the topic's files, from memory."""
        ...

    def generation_of(self, topic_id: int) -> int:
        """Generation of the topic's newest published manifest, from memory; 0: there was none."""
        ...

    def flags_digest(self, topic_id: int, segment_id: int) -> FlagsDigest:
        """Digest of a listed segment's last synced flags, from memory."""
        ...

    def published_config(self, topic_id: int) -> TopicConfig | None:
        """Configuration in the topic's manifest, from memory; `None` if there is no manifest."""
        ...

    def is_cold(self, topic_id: int, segment_id: int) -> bool:
        """Whether the segment is in the cold folder, from memory."""
        ...


class Snapshots(Protocol):
    """Published snapshots; two are kept, and the newest valid one is used."""

    def write(self, image: SnapshotImage) -> ReplayStart:
        """*Blocking.* Publish (temp, sync, rename, directory sync) and prune; keeps no reference.

        Returns the start of the older kept snapshot, to which the journal may be trimmed (0 while
        only one exists).
        """
        ...

    def newest(self) -> SnapshotImage | None:
        """*Blocking, recovery.* The newest valid snapshot; corrupt ones do not count."""
        ...


class Replay(Protocol):
    """The journal as found at start, before it is open for writing."""

    def entries(self, start_lsn: int) -> Iterator[tuple[int, Entry]]:
        """*Blocking.* Entries of all shards with lsn >= start, merged by lsn.

        Raises `StartRefused` if the journal does not reach back to `start_lsn`, `Corrupt` for
        damage below the synced end. A torn tail ends a shard and is kept aside.
        """
        ...

    @property
    def progress(self) -> float:
        """The share of the bytes that was read, 0.0 to 1.0."""
        ...

    def may_have_lost(self, topic_id: int) -> bool:
        """Whether acknowledged entries may be lost, even in this boot. After the last entry."""
        ...


class KeptAppends(Protocol):
    """Decodes the journal's large appends off the loop."""

    def takes(self, body: bytes) -> bool:
        """Whether a body is too large to decode on the loop."""
        ...

    async def decode_kept(self, body: bytes, grammar: int, trace: bytes = b"") -> DecodedAppend:
        """The records of a body, with this trace, whatever the limits are now."""
        ...


class Clock(Protocol):
    """The clocks that the engine's drivers use."""

    def now_ms(self) -> int:
        """Wall clock, ms since the epoch; may step."""
        ...

    def monotonic_ms(self) -> float:
        """Monotonic clock, ms."""
        ...
