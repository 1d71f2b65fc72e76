"""Values that engine and storage exchange beside entries and blocks.

`engine` and `wal` do not import each other; both know these. A leaf, pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from topics_server.values.blocks import Block
from topics_server.values.entries import (
    LEASES_ID,
    ROUTERS_ID,
    SESSIONS_ID,
    CursorAt,
    SessionOptions,
)
from topics_server.values.limits import U64_MAX
from topics_server.values.model import Hole, RouterDefinition, SeqRun, StreamFacts, TopicConfig


class ShardProgress(msgspec.Struct, frozen=True):
    """One post of a shard to the loop: how far it got, in lsn.

    `failed_from` is the lsn of the first entry of a failed group: it and everything later on the
    shard is undone. `error` says why: `disk_full` (the shard goes on once `reopen` is called) or
    `read_only` (a sync failed; the shard takes nothing until a restart).
    """

    shard: int
    written_lsn: int
    synced_lsn: int
    failed_from: int | None = None
    error: str | None = None
    write_ms: float = 0.0
    sync_ms: float = 0.0


class SegmentPlan(msgspec.Struct, frozen=True):
    """A run to be sealed: consecutive blocks and, one byte a record, which are dead already."""

    topic_id: int
    segment_id: int
    blocks: list[Block]
    dead: bytes


class TopicFacts(msgspec.Struct, frozen=True):
    """What the manifest says of a topic beside its segments."""

    topic_id: int
    name: str
    epoch: int
    config: TopicConfig
    head_seq: int
    evict_floor: int
    holes: list[SeqRun]


# Parts of a snapshot that are no topic's (topics count from 1): epochs of dropped names, the watch
# sessions, the leases and the routers, each in as many pieces as there are.
EPOCHS_PART: Final = 0
SESSIONS_PART: Final = SESSIONS_ID
LEASES_PART: Final = LEASES_ID
ROUTERS_PART: Final = ROUTERS_ID
# What the snapshot knows of the journal; it is not handed to the engine.
JOURNAL_PART: Final = U64_MAX - 3


class TailPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An encoded block of the unsealed tail and, one byte a record, which are dead."""

    block: bytes
    dead: bytes
    last_lsn: int


class TopicPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A topic as captured, in the order in which its fields lie there.

    `keys`: of idempotency, with what `engine/topic/dedupe` remembers of each. `flips`: by segment,
    `<u4` rows that are dead though their flag may not be set yet. `cursors`: of the routers into
    the topic, by id, the seq up to which each examined its source and how many copies it made.
    `producers`: by id, epoch and seq of the last request accepted, and its records: first seq,
    count, commit time in ms. `stream`: its facts, if it is one. `manifest_generation`: of the
    manifest published last; 0: none was; -1: of a part that was written before manifests had any.
    `flags`: by segment, how many rows are dead and XXH3-64 of all delete flags, as synced last.
    `whole_flips`: segments of which `flips` has all deleted rows, for their file was damaged.
    """

    version: int
    topic_id: int
    name: str
    epoch: int
    config: TopicConfig
    created_ts: int
    applied_lsn: int
    head_seq: int
    ceiling_seq: int
    journaled_seq: int
    evict_floor: int
    last_ts: int
    last_write_ts: int | None
    last_read_ts: int | None
    damaged_records: int
    next_segment_id: int
    holes: list[Hole]
    losses: list[Hole]
    keys: dict[str, tuple[int, int, int]]
    flips: dict[int, bytes]
    tail: list[TailPart]
    cursors: dict[int, tuple[int, int]] = {}
    producers: dict[str, tuple[int, int, int, int, int]] = {}
    stream: StreamFacts | None = None
    manifest_generation: int = -1
    flags: dict[int, tuple[int, int]] = {}
    whole_flips: list[int] = []


class SessionImage(msgspec.Struct, frozen=True, array_like=True):
    """A watch session as captured. `lsn`: its newest entry that is in here already.

    `owner`: see `entries.SessionOpened`.
    """

    wid: str
    options: SessionOptions
    cursors: list[CursorAt]
    opened_ts: int
    last_used_ts: int
    is_streaming: bool
    lsn: int
    owner: str | None = None


class SessionsPart(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the captured sessions. `applied_lsn`: entries up to it are in all pieces."""

    version: int
    applied_lsn: int
    sessions: list[SessionImage]


class LeaseImage(msgspec.Struct, frozen=True, array_like=True):
    """A lease as captured; `deliveries` counts this one."""

    seq: int
    lease_id: int
    node: str
    deadline_ms: int
    deliveries: int
    claimed_ts: int
    connection: int


class QueueImage(msgspec.Struct, frozen=True, array_like=True):
    """What a queue has beside its records, or a piece of it: lists of several pieces add up.

    `heard_lsn`: entries of the queue's own topic up to it are in here. `returned` and `delayed`:
    pairs of seq and when it can be claimed, ms. `deliveries`: pairs of seq and count of jobs that
    are not leased. `moved`: jobs whose copy is in the dead-letter topic, yet to be deleted here.
    Of `delayed` a third number, 1, says that the record named that time itself. `errors`: pairs of
    seq and the reason of the last nack that gave one; older parts have none.
    """

    queue_id: int
    heard_lsn: int
    next_fresh_seq: int
    dead_lettered: int
    leases: list[LeaseImage]
    returned: list[tuple[int, int]]
    delayed: list[tuple[int, ...]]
    deliveries: list[tuple[int, int]]
    moved: list[int]
    errors: list[tuple[int, str]] = []


class LeasesPart(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the captured leases. `applied_lsn`: lease entries up to it are in all pieces."""

    version: int
    applied_lsn: int
    queues: list[QueueImage]


class RouterImage(msgspec.Struct, frozen=True, array_like=True):
    """A router as captured; its cursor is in the part of its destination."""

    router_id: int
    name: str
    created_ts: int
    definition: RouterDefinition
    source_id: int
    dest_id: int
    start_seq: int
    known_seq: int


class RoutersPart(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the captured routers. `applied_lsn`: their entries up to it are in all pieces.

    `sources`: ids of topics that were the source of some router when or after replay of this
    snapshot begins. `next_router_id`: ids below it may have been used.
    """

    version: int
    applied_lsn: int
    next_router_id: int
    sources: list[int]
    routers: list[RouterImage]


class ShardSync(msgspec.Struct, frozen=True, array_like=True):
    """What a snapshot says of one shard of the journal.

    The shard was synced up to `synced_lsn`; replay needs its entries from `start_lsn` on.
    """

    wal_set: int
    shard: int
    synced_lsn: int
    start_lsn: int


class SyncedShard(msgspec.Struct, frozen=True):
    """How far a shard is synced. `is_read_only`: it takes nothing until a restart."""

    wal_set: int
    shard: int
    synced_lsn: int
    is_read_only: bool = False


class ReplayStart(msgspec.Struct, frozen=True):
    """Where replay of a snapshot begins: at `lsn`; of a shard at what `shards` says of it.

    That is lower of a shard that is read-only: what it wrote last is looked for by the next start.
    """

    lsn: int = 0
    shards: Sequence[ShardSync] = ()

    def of(self, wal_set: int, shard: int) -> int:
        """Where replay of one shard begins."""
        for each in self.shards:
            if (each.wal_set, each.shard) == (wal_set, shard):
                return min(self.lsn, each.start_lsn)
        return self.lsn


class SnapshotImage(msgspec.Struct, frozen=True):
    """A whole snapshot in memory: opaque parts, each `(id, bytes)`, and where replay starts.

    `start_lsn`: replay needs every entry from this lsn on, and those that `shards` says.
    `last_lsn`: the highest lsn any part has applied. `next_topic_id`: ids below it may have been
    used. `run`: the run that took it; 0 and no `shards` in a snapshot of version 1.
    """

    start_lsn: int
    last_lsn: int
    next_topic_id: int
    parts: Sequence[tuple[int, bytes]]
    run: int = 0
    shards: Sequence[ShardSync] = ()

    @property
    def replay_start(self) -> ReplayStart:
        """Where its replay begins."""
        return ReplayStart(self.start_lsn, self.shards)


class JournalPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a snapshot that says what it knows of the journal."""

    version: int
    run: int
    shards: Sequence[ShardSync]
