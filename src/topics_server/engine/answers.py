"""The values that the store returns to its callers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from topics_server.engine.filters import Filter
from topics_server.values.blocks import Block
from topics_server.values.columns.json_rows import JsonBlock
from topics_server.values.limits import SEQ_MAX
from topics_server.values.model import ConsumerHold, LossReason, StreamFacts, TopicConfig


class ProducerRepeat(msgspec.Struct, frozen=True):
    """A producer's repeated request; `seq`: the highest accepted seq of the epoch.

    `is_last`: whether the request has that seq, and records.
    """

    epoch: int
    seq: int
    is_last: bool


class Appended(msgspec.Struct, frozen=True, gc=False):
    """The result of an append: seqs `first_seq..last_seq`, and the head right after it (§2).

    `throttle_wait_ms`: how long the append waited under pressure and for the topic's tail to be
    sealed. `repeat`: nothing was appended, and the seqs are those of the producer's last request.
    `seqs`: if each record has a key, the seq of each; `first_seq..last_seq` may contain other seqs
    too.
    """

    first_seq: int
    last_seq: int
    head_seq: int
    created: bool = False
    deduped: bool = False
    write_ms: float = 0.0
    sync_ms: float = 0.0
    throttle_wait_ms: float = 0.0
    repeat: ProducerRepeat | None = None
    seqs: list[int] | None = None


class Gap(msgspec.Struct, frozen=True):
    """A tombstone: seqs `gap_from..gap_to` (inclusive) are lost, and why (§3.3)."""

    gap_from: int
    gap_to: int
    reason: LossReason
    missed_estimate: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Rows of one block that belong to a page, ascending. `rows` is a `range` when unbroken.

    `is_kept`: whether later pages may have the same block, so that its JSON is worth keeping.
    """

    block: Block
    rows: Sequence[int]
    is_kept: bool = True


class JsonPiece(msgspec.Struct, frozen=True, gc=False):
    """Rows of JSON objects that belong to a page, like `Piece`."""

    block: JsonBlock
    rows: Sequence[int]
    is_kept: bool = False


class Page(msgspec.Struct, frozen=True):
    """One read of one topic (§3): records in pieces, at most one gap, and the next cursor."""

    pieces: list[Piece]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    gap: Gap | None = None
    scanned: int = 0
    # The epoch of the topic.
    epoch: int = 1

    @property
    def caught_up(self) -> bool:
        """Whether the reader has examined everything up to the head."""
        return self.next_from_seq == self.head_seq

    @property
    def is_empty(self) -> bool:
        """Whether the page has neither a record nor a gap."""
        return not self.pieces and self.gap is None


class JsonPage(msgspec.Struct, frozen=True):
    """A page of which some records are JSON objects; `page` has no records."""

    pieces: list[Piece | JsonPiece]
    page: Page

    @property
    def is_empty(self) -> bool:
        """False, because the page has records."""
        return False

    @property
    def scanned(self) -> int:
        """The number of examined records."""
        return self.page.scanned


class BackwardRequest(msgspec.Struct, frozen=True):
    """A page of the seqs in `after_seq + 1 .. before_seq - 1`, newest first, already clamped.

    Only records committed at `since` or later, and before `until`.
    """

    before_seq: int
    after_seq: int
    limit: int
    max_bytes: int
    nodes: frozenset[str] = frozenset()
    since: Moment | None = None
    until: Moment | None = None


class BackwardPage(msgspec.Struct, frozen=True):
    """A backward read of one topic from a cursor. The pieces ascend; callers reverse them.

    The page began at `before_seq` and examined every seq down to `next_before_seq`.
    """

    pieces: list[Piece]
    before_seq: int
    next_before_seq: int
    head_seq: int
    earliest_seq: int
    gap: Gap | None = None
    scanned: int = 0
    epoch: int = 1
    # Whether the page reaches the lower end of the range.
    is_complete: bool = False


class RangeMark(msgspec.Struct, frozen=True):
    """Identifies the state of a range of seqs: `live` is the number of its live records."""

    topic_id: int
    epoch: int
    earliest_seq: int
    live: int


class ConsumerState(msgspec.Struct, frozen=True):
    """A consumer's position; times in ms. `lag`: seqs after it; `lag_ms`: age of the next one.

    `held_records`: records that caps keep only because of the consumer's `hold`.
    """

    topic: str
    consumer: str
    seq: int
    head_seq: int
    earliest_seq: int
    lag: int
    lag_ms: int
    created_ts: int
    committed_ts: int
    seen_ts: int
    epoch: int
    hold: ConsumerHold | None = None
    held_records: int = 0


class ReadAs(msgspec.Struct, frozen=True):
    """The consumer that a read is for.

    `commits`: whether a read commits the position where it begins, and a stream the records that
    its socket accepted.
    """

    consumer: str
    commits: bool


class ReadRequest(msgspec.Struct, frozen=True):
    """A read request, already clamped. `nodes`: records of these nodes are omitted.

    `filter`: only records that pass are read. `start` replaces `from_seq`: it becomes a cursor when
    the topic is read. Seqs from `before_seq` on, and records committed at `until` or later, are not
    examined. `read_as`: resolved before the topic is read.
    """

    from_seq: int
    limit: int
    max_bytes: int
    nodes: frozenset[str] = frozenset()
    wait_ms: int = 0
    filter: Filter | None = None
    start: ReadStart | None = None
    before_seq: int = SEQ_MAX + 1
    until: Moment | None = None
    read_as: ReadAs | None = None


class Moment(msgspec.Struct, frozen=True):
    """A point in time: ms since the epoch, or ms back from the time of the read."""

    ms: int
    is_back: bool = False

    def at(self, now_ms: int) -> int:
        """Milliseconds since the epoch."""
        return max(0, now_ms - self.ms) if self.is_back else self.ms


class ReadStart(msgspec.Struct, frozen=True):
    """Where a read begins if not after a seq: at a time, or a number of records before the end."""

    since: Moment | None = None
    last: int | None = None


class QueueCounts(msgspec.Struct, frozen=True):
    """The job counts of a queue (§10.7). `delayed` jobs are neither ready nor in flight yet."""

    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int


class TopicState(msgspec.Struct, frozen=True):
    """A topic as `GET` shows it (§1.2). Times in ms, `None` if never; `stream`: of a stream."""

    name: str
    topic_id: int
    epoch: int
    config: TopicConfig
    head_seq: int
    earliest_seq: int
    evict_floor: int
    count: int
    bytes: int
    disk_bytes: int
    effective_priority: int
    last_write_ts: int | None
    last_read_ts: int | None
    damaged_records: int = 0
    queue: QueueCounts | None = None
    stream: StreamFacts | None = None


class PutOutcome(msgspec.Struct, frozen=True):
    """The result of creating or configuring a topic (§1.1); `before` is None if it was created."""

    config: TopicConfig
    before: TopicConfig | None = None
    write_ms: float = 0.0
    sync_ms: float = 0.0

    @property
    def created(self) -> bool:
        """Whether the topic is new."""
        return self.before is None


class Deleted(msgspec.Struct, frozen=True):
    """The result of a delete (§5), and the topic right after it."""

    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int
    write_ms: float = 0.0
    sync_ms: float = 0.0


class DeletedSeqs(msgspec.Struct, frozen=True):
    """The result of a delete of exact seqs: those that were live; each is reported only once."""

    seqs: list[int]
    write_ms: float = 0.0
    sync_ms: float = 0.0


class TopicPage(msgspec.Struct, frozen=True):
    """One page of the topic list (§1.3), in name order; `next_after` when more follow."""

    topics: list[TopicState]
    next_after: str | None = None
