"""Values that engine and storage exchange beside entries and blocks.

`engine` and `wal` do not import each other; both import this module. A leaf, pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, Literal, Protocol, TypeVar

import msgspec

from topics_server.values.blocks import Block
from topics_server.values.entries import (
    LEASES_ID,
    ROUTERS_ID,
    SESSIONS_ID,
    VIEWS_ID,
    CursorAt,
    SessionOptions,
)
from topics_server.values.limits import U64_MAX
from topics_server.values.model import (
    ConsumerHold,
    Hole,
    RouterDefinition,
    SeqRun,
    StreamFacts,
    TopicConfig,
    ViewDefinition,
)

T = TypeVar("T")
# One part of a snapshot: encoded here, or a view of the bytes that were read.
EncodedPart = bytes | memoryview


class ShardProgress(msgspec.Struct, frozen=True):
    """One report of a shard to the loop: its progress, in lsn.

    `failed_from` is the lsn of the first entry of a failed group: that entry and everything later
    on the shard is undone. `error` gives the reason: `disk_full` (the shard continues after
    `reopen`) or `read_only` (a sync failed; the shard accepts no writes until a restart).
    """

    shard: int
    written_lsn: int
    synced_lsn: int
    failed_from: int | None = None
    error: str | None = None
    write_ms: float = 0.0
    sync_ms: float = 0.0


class SegmentPlan(msgspec.Struct, frozen=True):
    """A run of records to be sealed: consecutive blocks and their dead flags, one byte a record."""

    topic_id: int
    segment_id: int
    blocks: list[Block]
    dead: bytes


class PackedSegment(msgspec.Struct, frozen=True):
    """The contents of the two files of a segment."""

    data: bytes
    idx: bytes


class TopicFacts(msgspec.Struct, frozen=True):
    """The facts about a topic that its manifest holds beside the segments."""

    topic_id: int
    name: str
    epoch: int
    config: TopicConfig
    head_seq: int
    evict_floor: int
    holes: list[SeqRun]


# Ids of snapshot parts that do not belong to a topic (topic ids count from 1): epochs of dropped
# names, watch sessions, leases, routers and views. Each part may have several pieces.
EPOCHS_PART: Final = 0
SESSIONS_PART: Final = SESSIONS_ID
LEASES_PART: Final = LEASES_ID
ROUTERS_PART: Final = ROUTERS_ID
VIEWS_PART: Final = VIEWS_ID
# The snapshot's facts about the journal; the engine never gets this part.
JOURNAL_PART: Final = U64_MAX - 3


class TailPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An encoded block of the unsealed tail and its dead flags, one byte a record.

    `block`: in a decoded part, a view of the part's bytes, so that a long block is not copied.
    """

    block: memoryview
    dead: bytes
    last_lsn: int


class TopicPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A captured topic; the fields are encoded in this order.

    `keys`: idempotency keys, with the values that `engine/topic/dedupe` keeps for each. `flips`: by
    segment, `<u4` rows that are dead while their flag may not be set yet. `cursors`: by the id of
    each router into the topic: the seq up to which it has examined its source, and how many copies
    it made. `producers`: by id: the epoch and seq of the last accepted request, and its records
    (first seq, count, commit time in ms). `stream`: the facts of a stream. `manifest_generation`:
    that of the last published manifest; 0: there was none; -1: the part is older than manifest
    generations. `flags`: by segment, the number of dead rows and XXH3-64 of all delete flags, as
    synced last. `whole_flips`: segments with a damaged file; for them `flips` holds all deleted
    rows. `consumers`: by name: seq, and the times of its creation and of its last commit in ms.
    `holds`: by name, for consumers that have a hold.
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
    consumers: dict[str, tuple[int, int, int]] = {}
    holds: dict[str, ConsumerHold] = {}


class SessionImage(msgspec.Struct, frozen=True, array_like=True):
    """A watch session as captured. `lsn`: the newest entry of the session that is included.

    `owner`, `filter`, `prefixes`, `acks`: see `entries.SessionOpened`.
    """

    wid: str
    options: SessionOptions
    cursors: list[CursorAt]
    opened_ts: int
    last_used_ts: int
    is_streaming: bool
    lsn: int
    owner: str | None = None
    filter: str | None = None
    prefixes: tuple[str, ...] = ()
    acks: dict[str, str] = {}


class SessionsPart(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the captured sessions; all pieces include entries up to `applied_lsn`."""

    version: int
    applied_lsn: int
    sessions: list[SessionImage]


class LeaseImage(msgspec.Struct, frozen=True, array_like=True):
    """A lease as captured; `deliveries` includes this lease."""

    seq: int
    lease_id: int
    node: str
    deadline_ms: int
    deliveries: int
    claimed_ts: int
    connection: int


class QueueImage(msgspec.Struct, frozen=True, array_like=True):
    """A queue's state beside its records, or a piece of it; the lists of several pieces add up.

    `heard_lsn`: entries of the queue's own topic up to this lsn are included. `returned` and
    `delayed`: pairs of a seq and the time in ms from which the job can be claimed. A third number
    in `delayed`, 1, says that the record itself named that time. `deliveries`: pairs of seq and
    delivery count, for jobs that are not leased. `moved`: jobs whose copy is in the dead-letter
    topic, to be deleted here. `errors`: pairs of seq and the reason of the last nack that gave one;
    older parts have none.
    """

    queue_id: int
    heard_lsn: int
    next_unclaimed_seq: int
    dead_lettered: int
    leases: list[LeaseImage]
    returned: list[tuple[int, int]]
    delayed: list[tuple[int, ...]]
    deliveries: list[tuple[int, int]]
    moved: list[int]
    errors: list[tuple[int, str]] = []


class LeasesPart(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the captured leases; all pieces include entries up to `applied_lsn`."""

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
    """One piece of the captured routers; all pieces include entries up to `applied_lsn`.

    `sources`: ids of topics that are the source of a router at the start of this snapshot's replay,
    or were added later. `next_router_id`: ids below it may have been used.
    """

    version: int
    applied_lsn: int
    next_router_id: int
    sources: list[int]
    routers: list[RouterImage]


class _Versioned(Protocol):
    @property
    def version(self) -> int: ...


class ViewImage(msgspec.Struct, frozen=True, array_like=True):
    """A view as captured: its definition. Its results are in its own files."""

    view_id: int
    topic: str
    name: str
    created_ts: int
    definition: ViewDefinition


class ViewsPart(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the captured views; all pieces include entries up to `applied_lsn`."""

    version: int
    applied_lsn: int
    next_view_id: int
    views: list[ViewImage]


_Part = TypeVar("_Part", bound=_Versioned)


class PartDecoder(Generic[_Part]):
    """Decodes the snapshot parts of one kind. `version`: the version that is written and read."""

    def __init__(self, kind: type[_Part], version: int, of: str) -> None:
        self.version: Final = version
        self._of = of
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, encoded: EncodedPart) -> _Part:
        """Decode a part. Raises `ValueError` for invalid bytes and for another version."""
        try:
            part = self._decoder.decode(encoded)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a part of {self._of}: {error}") from None
        if part.version != self.version:
            raise ValueError(f"part of {self._of} has version {part.version}, not {self.version}")
        return part


# Recovery and the offline tools decode with these.
TOPIC_PARTS: Final = PartDecoder(TopicPart, 1, "a topic")
SESSIONS_PARTS: Final = PartDecoder(SessionsPart, 1, "the watch sessions")
LEASES_PARTS: Final = PartDecoder(LeasesPart, 1, "the leases")
ROUTERS_PARTS: Final = PartDecoder(RoutersPart, 1, "the routers")
VIEWS_PARTS: Final = PartDecoder(ViewsPart, 1, "the views")


class ShardSync(msgspec.Struct, frozen=True, array_like=True):
    """The progress of one shard of the journal, as stored in a snapshot.

    The shard was synced up to `synced_lsn`; replay needs its entries from `start_lsn` on.
    """

    wal_set: int
    shard: int
    synced_lsn: int
    start_lsn: int


class SyncedShard(msgspec.Struct, frozen=True):
    """How far a shard is synced. `is_read_only`: the shard accepts no writes until a restart."""

    wal_set: int
    shard: int
    synced_lsn: int
    is_read_only: bool = False


class ReplayStart(msgspec.Struct, frozen=True):
    """The start of a snapshot's replay: at `lsn`, or for a shard at the lsn that `shards` names.

    A read-only shard has a lower start: the next start searches for its last writes.
    """

    lsn: int = 0
    shards: Sequence[ShardSync] = ()

    def of(self, wal_set: int, shard: int) -> int:
        """The lsn at which the replay of one shard begins."""
        for each in self.shards:
            if (each.wal_set, each.shard) == (wal_set, shard):
                return min(self.lsn, each.start_lsn)
        return self.lsn


class SnapshotImage(msgspec.Struct, frozen=True):
    """A complete snapshot in memory: opaque parts, each `(id, bytes)`, and the start of replay.

    The parts of a loaded snapshot are views of the pieces in which its file was read. A piece stays
    in memory as long as a view of it does.

    `start_lsn`: replay needs every entry from this lsn on, and those that `shards` names.
    `last_lsn`: the highest lsn that any part includes. `next_topic_id`: ids below it may have been
    used. `run`: the run that took the snapshot; a snapshot of version 1 has run 0 and no `shards`.
    """

    start_lsn: int
    last_lsn: int
    next_topic_id: int
    parts: Sequence[tuple[int, EncodedPart]]
    run: int = 0
    shards: Sequence[ShardSync] = ()

    @property
    def replay_start(self) -> ReplayStart:
        """The start of this snapshot's replay."""
        return ReplayStart(self.start_lsn, self.shards)


class BackupState(msgspec.Struct, frozen=True):
    """The newest backup that this server began. Times are ms since the epoch.

    `reason`: why the backup failed.
    """

    status: Literal["none", "running", "done", "failed"] = "none"
    number: int | None = None
    started_ts: int | None = None
    finished_ts: int | None = None
    topics: int | None = None
    segments: int | None = None
    segment_bytes: int | None = None
    copied_bytes: int | None = None
    damaged_segments: int | None = None
    reason: str | None = None


class KnownPositions(msgspec.Struct, frozen=True):
    """Seqs, ids and epochs that a restored store must not use again: clients may know them.

    `heads`: by topic id, a seq; later records must have higher seqs. Ids from `next_topic_id` on
    and epochs above `epoch` are free.
    """

    next_topic_id: int = 1
    epoch: int = 0
    heads: dict[int, int] = {}


class JournalPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a snapshot with the facts about the journal."""

    version: int
    run: int
    shards: Sequence[ShardSync]


class Offload(Protocol):
    """Runs blocking calls off the loop; tests run them on the loop, deterministically."""

    async def run(self, call: Callable[[], T]) -> T:
        """The result (or exception) of `call`, run on a worker thread."""
        ...
