"""The journal's entry types: every durable fact of the server.

`decide` makes an entry with all seqs, times and ids fixed. The entry is submitted to the journal
and applied when its gate is met; recovery applies the same entries again. A new kind of entry is
added here and in `wal/format/frames.py`. The meaning of an entry never changes.

`topic_id` names the FIFO that an entry joins: the FIFO of a topic, or a reserved one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec
from msgspec import UNSET, UnsetType

from topics_server.values.appends import DecodedAppend
from topics_server.values.limits import U64_MAX
from topics_server.values.model import (
    ConsumerHold,
    LossReason,
    ProducerStamp,
    RouterDefinition,
    StreamFacts,
    StreamStep,
    TopicConfig,
    ViewDefinition,
)

# Ids from here on are reserved: each has its own FIFO on shard 0 and its own part in snapshots.
RESERVED_ID_MIN: Final = U64_MAX - 255
# The watch sessions.
SESSIONS_ID: Final = U64_MAX
# The leases of all queues.
LEASES_ID: Final = U64_MAX - 1
# The router table.
ROUTERS_ID: Final = U64_MAX - 2
# The views. `U64_MAX - 3` is the id of the journal's part in snapshots.
VIEWS_ID: Final = U64_MAX - 4


class Floor(msgspec.Struct, frozen=True, array_like=True):
    """An involuntary loss: the records of all seqs below `seq` are lost.

    `reason` is the reason for the newly lost seqs.
    """

    seq: int
    reason: LossReason


class TopicPut(msgspec.Struct, frozen=True):
    """A topic is created, or its configuration is replaced.

    `epoch` counts incarnations of the name from 1. `head_seq` is the head visible at decide.
    `floor` is the current floor when a cap or the TTL is loosened (ARCHITECTURE, Floor). `stream`:
    the facts of a topic created as a stream; an unset `stream` is not encoded.
    """

    topic_id: int
    name: str
    epoch: int
    config: TopicConfig
    ts: int
    head_seq: int = 0
    created: bool = True
    floor: Floor | None = None
    stream: StreamFacts | UnsetType = UNSET


class TopicDropped(msgspec.Struct, frozen=True):
    """A topic was dropped, with its records, keys and tags. Its id is never reused."""

    topic_id: int
    name: str
    ts: int


class Source(msgspec.Struct, frozen=True, array_like=True):
    """The source of moved records: record i was `seqs[i]` in this topic and is deleted there.

    `is_redrive`: dead letters that return to their queue; otherwise jobs that are dead-lettered.
    """

    topic_id: int
    seqs: list[int]
    is_redrive: bool = False


class RouterStamp(msgspec.Struct, frozen=True, array_like=True):
    """The values that an `exactly_once` router adds to the `meta` of its copies (§6)."""

    router: str
    source: str
    epoch: int


class RouterPage(msgspec.Struct, frozen=True, array_like=True):
    """The origin of the records of an append that a router made.

    The records are copies of the seqs `firsts[i]..lasts[i]` of a topic, in that order.
    `cursor_seq`: how far the router has examined its source with this page. `lost`: how many
    records the source lost before they were forwarded; if there are any, the entry's first seq is a
    dead slot that reports the loss. `hops`: one byte a copy, the number of routers that the copy
    passed; empty if every copy passed only this router. An append with a page and without a body
    takes `data`, `meta`, `tag` and `node` from the entries that appended the records to the source
    (ARCHITECTURE, Routers); `preserve_node`, `preserve_tag` and `stamp` say which members change.
    """

    router_id: int
    source_id: int
    cursor_seq: int
    firsts: list[int]
    lasts: list[int]
    preserve_node: bool = True
    preserve_tag: bool = True
    stamp: RouterStamp | None = None
    lost: int = 0
    hops: bytes = b""

    @property
    def copy_count(self) -> int:
        """The number of copied records."""
        return sum(self.lasts) - sum(self.firsts) + len(self.firsts)


class RecordsAppended(msgspec.Struct, frozen=True):
    """The records of one call: seqs `first_seq .. first_seq + count - 1`, one commit time.

    `body` is the request's own bytes (inflated), decoded with the grammar of version `grammar`.
    `header_key` is an idempotency key from a header (a key in the body wins). `creation` is set
    when this call creates its topic. `floor` is what this append evicts, itself included. `decoded`
    is the decoded body while it is in memory; it is never encoded and absent in replay. `source`
    marks moved records: once this entry is durable, they are deleted at their source. `page` is set
    if a router made the append; then `count` includes the dead slot, which has no record in the
    body. `producer`: the producer and the number of its request; the request becomes that
    producer's last one together with the records. `step`: the change of the topic's stream.
    `trace`: the `traceparent` of the request, empty without one; the traces of copies are in the
    body.
    """

    topic_id: int
    first_seq: int
    count: int
    ts: int
    body: bytes
    header_key: str | None = None
    creation: TopicPut | None = None
    floor: Floor | None = None
    grammar: int = 1
    decoded: DecodedAppend | None = None
    source: Source | None = None
    page: RouterPage | None = None
    producer: ProducerStamp | None = None
    step: StreamStep | None = None
    trace: bytes = b""

    @property
    def slot_count(self) -> int:
        """How many first seqs have no record: 1 if a router's source lost records, else 0."""
        return 1 if self.page is not None and self.page.lost else 0


class RecordsDeleted(msgspec.Struct, frozen=True):
    """Deleted seqs, exact and final: sorted, disjoint, inclusive runs as two parallel columns.

    The runs contain every deleted seq, sealed or not, so that replay needs neither tags nor
    segments. `firsts` and `lasts` are little-endian u64 columns of equal length (numpy `<u8`).
    `seqs`: the same seqs as a list, for a delete of a few exact seqs (an ack) in memory; it is
    never encoded and absent in replay.
    """

    topic_id: int
    ts: int
    firsts: bytes
    lasts: bytes
    seqs: Sequence[int] | None = None


class FloorMoved(msgspec.Struct, frozen=True):
    """The floor moves without an append (expiry, or a cap that was tightened)."""

    topic_id: int
    ts: int
    floor: Floor


class HeadReserved(msgspec.Struct, frozen=True):
    """Seqs up to `ceiling_seq` may be assigned without a sync for each of them."""

    topic_id: int
    ceiling_seq: int


class CursorMoved(msgspec.Struct, frozen=True):
    """A router examined its source up to `cursor_seq` and had nothing to copy.

    The entry joins the FIFO of the destination, which holds the cursors of the routers into it.
    """

    topic_id: int
    router_id: int
    cursor_seq: int


class ProducerMoved(msgspec.Struct, frozen=True):
    """A producer's request was accepted, but an idempotency key found its records already stored.

    The records are seqs `first_seq .. first_seq + count - 1` of the topic.
    """

    topic_id: int
    ts: int
    producer: ProducerStamp
    first_seq: int
    count: int


class ConsumerMoved(msgspec.Struct, frozen=True):
    """A consumer was created or moved: its reader has finished every record up to `seq`.

    `hold`: the records that caps keep for this consumer from now on; None: no records. An unset
    `hold` is not encoded and changes nothing.
    """

    topic_id: int
    ts: int
    consumer: str
    seq: int
    hold: ConsumerHold | UnsetType | None = UNSET


class ConsumerDeleted(msgspec.Struct, frozen=True):
    """A consumer was deleted."""

    topic_id: int
    ts: int
    consumer: str


class StreamChanged(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stream was closed or used; the fields are its facts from now on.

    `producer`: the producer of the request, which has no records; `first_seq` is the seq of the
    next record.
    """

    topic_id: int
    ts: int
    facts: StreamFacts
    producer: ProducerStamp | None = None
    first_seq: int = 0


class SessionOptions(msgspec.Struct, frozen=True, array_like=True):
    """The options of a watch session, clamped and with defaults filled in (§7.2).

    `nodes`: records of these nodes are left out. `shown`: a sum of `json_cache.TAGS`, `META`,
    `DATA`.
    """

    nodes: list[str]
    limit: int
    max_batch_bytes: int
    heartbeat_ms: int
    shown: int
    strong: bool


class CursorAt(msgspec.Struct, frozen=True, array_like=True):
    """A session's position in a topic: the client received every record up to `seq`."""

    name: str
    topic_id: int
    epoch: int
    seq: int


class SessionOpened(msgspec.Struct, frozen=True, omit_defaults=True):
    """A watch session was opened, with its topics in the order of the request.

    `owner`: the key that opened it, as `auth/api_keys` numbers keys; None if the server has no
    keys. `filter`: JSON; only records that pass it are sent. `prefixes`: topics whose names begin
    with one of these also belong to the session, even if they are created later. `acks`: by topic,
    the consumer for which its streams commit.
    """

    topic_id: ClassVar[int] = SESSIONS_ID

    wid: str
    ts: int
    options: SessionOptions
    cursors: list[CursorAt]
    owner: str | None = None
    filter: str | None = None
    prefixes: tuple[str, ...] = ()
    acks: dict[str, str] = {}


class SessionMoved(msgspec.Struct, frozen=True):
    """A stream of a session began or ended; topics without a new cursor keep their old one."""

    topic_id: ClassVar[int] = SESSIONS_ID

    wid: str
    ts: int
    is_streaming: bool
    cursors: list[CursorAt]


class SessionsClosed(msgspec.Struct, frozen=True):
    """These sessions expired: no client used them during their lifetime."""

    topic_id: ClassVar[int] = SESSIONS_ID

    wids: list[str]
    ts: int


class LeasesGranted(msgspec.Struct, frozen=True):
    """Jobs of a queue are leased to a node: `leases` are pairs of seq and lease id, by seq.

    `connection`: the push stream that delivers them; 0 for jobs that were claimed.
    """

    topic_id: ClassVar[int] = LEASES_ID

    queue_id: int
    node: str
    ts: int
    deadline_ms: int
    connection: int
    leases: list[tuple[int, int]]


class LeasesReleased(msgspec.Struct, frozen=True, omit_defaults=True):
    """Leased jobs are released.

    `jobs` are pairs of a seq and the time in ms at which the job is claimable again.

    `error`: the worker's reason; empty if it gave none.
    """

    topic_id: ClassVar[int] = LEASES_ID

    queue_id: int
    ts: int
    jobs: list[tuple[int, int]]
    error: str = ""


class LeasesExtended(msgspec.Struct, frozen=True):
    """The leases of these jobs end at a new time."""

    topic_id: ClassVar[int] = LEASES_ID

    queue_id: int
    ts: int
    deadline_ms: int
    seqs: list[int]


class RouterPut(msgspec.Struct, frozen=True):
    """A router was created or changed.

    The router ignores its source up to `start_seq`. The destination may already hold copies of
    records up to `known_seq`, made by an earlier router of this name.
    """

    topic_id: ClassVar[int] = ROUTERS_ID

    router_id: int
    name: str
    ts: int
    definition: RouterDefinition
    source_id: int
    dest_id: int
    start_seq: int
    known_seq: int = 0


class RouterDeleted(msgspec.Struct, frozen=True):
    """A router was deleted; its id is never reused.

    Dropping a topic deletes its routers without an entry.
    """

    topic_id: ClassVar[int] = ROUTERS_ID

    router_id: int
    name: str
    ts: int


class ViewPut(msgspec.Struct, frozen=True):
    """A view was created or changed to this definition.

    `topic` is a name: the view outlives the topic and starts again with the next topic of that
    name.
    """

    topic_id: ClassVar[int] = VIEWS_ID

    view_id: int
    topic: str
    name: str
    ts: int
    definition: ViewDefinition


class ViewDeleted(msgspec.Struct, frozen=True):
    """A view was deleted; its id is never reused."""

    topic_id: ClassVar[int] = VIEWS_ID

    view_id: int
    topic: str
    name: str
    ts: int


SessionEntry = SessionOpened | SessionMoved | SessionsClosed
LeaseEntry = LeasesGranted | LeasesReleased | LeasesExtended
RouterEntry = RouterPut | RouterDeleted
ViewEntry = ViewPut | ViewDeleted
OfNoTopic = SessionEntry | LeaseEntry | RouterEntry | ViewEntry
Entry = (
    TopicPut
    | TopicDropped
    | RecordsAppended
    | RecordsDeleted
    | FloorMoved
    | HeadReserved
    | CursorMoved
    | ProducerMoved
    | StreamChanged
    | ConsumerMoved
    | ConsumerDeleted
    | SessionEntry
    | LeaseEntry
    | RouterEntry
    | ViewEntry
)
