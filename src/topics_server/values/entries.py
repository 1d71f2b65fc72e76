"""The journal's entry types: every durable fact of the server.

An entry is decided once, with its seqs, times and ids fixed, submitted to the journal, and applied
when its gate is met; recovery applies the same entries again. Later parts of the server (routers,
leases) add their kinds here and in `wal/format/frames.py`. No entry ever changes its meaning.

`topic_id` names the FIFO an entry joins: a topic's own, or one of the reserved ones.
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec
from msgspec import UNSET, UnsetType

from topics_server.values.appends import DecodedAppend
from topics_server.values.limits import U64_MAX
from topics_server.values.model import (
    LossReason,
    ProducerStamp,
    RouterDefinition,
    StreamFacts,
    StreamStep,
    TopicConfig,
)

# Ids from here on are no topic's: each is a FIFO of its own, on shard 0, and a part of snapshots.
RESERVED_ID_MIN: Final = U64_MAX - 255
# The watch sessions.
SESSIONS_ID: Final = U64_MAX
# The leases of all queues.
LEASES_ID: Final = U64_MAX - 1
# The router table.
ROUTERS_ID: Final = U64_MAX - 2


class Floor(msgspec.Struct, frozen=True, array_like=True):
    """Involuntary loss: every seq below `seq` is gone; `reason` says why those newly lost are."""

    seq: int
    reason: LossReason


class TopicPut(msgspec.Struct, frozen=True):
    """A topic is created, or its configuration replaced.

    `epoch` counts incarnations of the name from 1; `head_seq` is the head visible at decide;
    `floor` is the floor as of now when a cap or the TTL is loosened (ARCHITECTURE, Floor).
    `stream`: it is created as a stream; unset, it is not encoded.
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
    """A topic is gone for good, with its records, keys and tags. Its id is never reused."""

    topic_id: int
    name: str
    ts: int


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Where moved records come from: record i was `seqs[i]` of this topic, and leaves it.

    `is_redrive`: dead letters that go back to their queue; else jobs that are dead-lettered.
    """

    topic_id: int
    seqs: list[int]
    is_redrive: bool = False


class RouterStamp(msgspec.Struct, frozen=True, array_like=True):
    """What an `exactly_once` router writes into the `meta` of its copies, beside the seq (§6)."""

    router: str
    source: str
    epoch: int


class RouterPage(msgspec.Struct, frozen=True, array_like=True):
    """Where the records of an append come from that a router made.

    They are copies of the seqs `firsts[i]..lasts[i]` of a topic, in that order, and with them the
    router has examined its source up to `cursor_seq`. `lost`: so many records the source had lost
    before they were forwarded; if any, the entry's first seq is a dead slot that says so. `hops`:
    one byte a copy, how many routers it went through; empty if all came through this one only.
    An append with a page and without a body takes `data`, `meta`, `tag` and `node` from the entries
    that brought them to the source (ARCHITECTURE, Routers), and these flags and the stamp say how.
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
        """How many records were copied."""
        return sum(self.lasts) - sum(self.firsts) + len(self.firsts)


class RecordsAppended(msgspec.Struct, frozen=True):
    """The records of one call: seqs `first_seq .. first_seq + count - 1`, one commit time.

    `body` is the request's own bytes (inflated), decoded by the grammar of version `grammar`.
    `header_key` is an idempotency key that came as a header (a key in the body wins). `creation`
    is set when this call creates its topic. `floor` is what this append evicts, itself included.
    `decoded` is the decoded body while it is at hand; never encoded, absent in replay. `source`
    marks records that were moved: once this is durable, they are deleted where they come from.
    `page`: a router made it; then `count` includes the dead slot, which is in no body. `producer`:
    whose request it is, and which; it becomes that producer's last one together with the records.
    `step`: what it does to the topic's stream.
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

    @property
    def slot_count(self) -> int:
        """How many of its first seqs have no record: 1 for what a router's source had lost."""
        return 1 if self.page is not None and self.page.lost else 0


class RecordsDeleted(msgspec.Struct, frozen=True):
    """Deleted seqs, exact and final: sorted, disjoint, inclusive runs as two parallel columns.

    The runs name every hit, sealed or not, so that replay needs neither tags nor segments.
    `firsts` and `lasts` are little-endian u64 columns of equal length (numpy `<u8`).
    """

    topic_id: int
    ts: int
    firsts: bytes
    lasts: bytes


class FloorMoved(msgspec.Struct, frozen=True):
    """The floor moves without an append (expiry, or a cap that was tightened)."""

    topic_id: int
    ts: int
    floor: Floor


class HeadReserved(msgspec.Struct, frozen=True):
    """Seqs up to `ceiling_seq` may be handed out without each of them being synced."""

    topic_id: int
    ceiling_seq: int


class CursorMoved(msgspec.Struct, frozen=True):
    """A router examined its source up to `cursor_seq` and had nothing to copy.

    In the FIFO of the destination, which holds the cursors of the routers into it.
    """

    topic_id: int
    router_id: int
    cursor_seq: int


class ProducerMoved(msgspec.Struct, frozen=True):
    """A producer's request was accepted, but its records were there already (idempotency key).

    They are seqs `first_seq .. first_seq + count - 1` of the topic.
    """

    topic_id: int
    ts: int
    producer: ProducerStamp
    first_seq: int
    count: int


class StreamChanged(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stream is closed, or was used: these are its facts from now on.

    `producer`: whose request it was, which brought no records; `first_seq` is the next one's.
    """

    topic_id: int
    ts: int
    facts: StreamFacts
    producer: ProducerStamp | None = None
    first_seq: int = 0


class SessionOptions(msgspec.Struct, frozen=True, array_like=True):
    """What a watch session was opened with, clamped and with defaults filled in (§7.2).

    `nodes`: records of these are left out. `shown`: a sum of `rendered.TAGS`, `META`, `DATA`.
    """

    nodes: list[str]
    limit: int
    max_batch_bytes: int
    heartbeat_ms: int
    shown: int
    strong: bool


class CursorAt(msgspec.Struct, frozen=True, array_like=True):
    """Where a session stood in a topic: everything up to `seq`, it included, was handed over."""

    name: str
    topic_id: int
    epoch: int
    seq: int


class SessionOpened(msgspec.Struct, frozen=True, omit_defaults=True):
    """A watch session is there, its topics in the order in which they were named.

    `owner`: whose key made it, as `auth/api_keys` tells keys apart; None where there were no keys.
    """

    topic_id: ClassVar[int] = SESSIONS_ID

    wid: str
    ts: int
    options: SessionOptions
    cursors: list[CursorAt]
    owner: str | None = None


class SessionMoved(msgspec.Struct, frozen=True):
    """A stream of a session began or ended; a topic that `cursors` does not name stays."""

    topic_id: ClassVar[int] = SESSIONS_ID

    wid: str
    ts: int
    is_streaming: bool
    cursors: list[CursorAt]


class SessionsClosed(msgspec.Struct, frozen=True):
    """These sessions are gone: nobody used them for as long as they live."""

    topic_id: ClassVar[int] = SESSIONS_ID

    wids: list[str]
    ts: int


class LeasesGranted(msgspec.Struct, frozen=True):
    """Jobs of a queue are leased to a node: `leases` are pairs of seq and lease id, by seq.

    `connection`: the push stream that delivers them, 0 if they were claimed.
    """

    topic_id: ClassVar[int] = LEASES_ID

    queue_id: int
    node: str
    ts: int
    deadline_ms: int
    connection: int
    leases: list[tuple[int, int]]


class LeasesReleased(msgspec.Struct, frozen=True, omit_defaults=True):
    """Leased jobs are given back: `jobs` are pairs of seq and when it is claimable again, ms.

    `error`: why, in the worker's words; empty if it gave no reason.
    """

    topic_id: ClassVar[int] = LEASES_ID

    queue_id: int
    ts: int
    jobs: list[tuple[int, int]]
    error: str = ""


class LeasesExtended(msgspec.Struct, frozen=True):
    """The leases of these jobs end at another time now."""

    topic_id: ClassVar[int] = LEASES_ID

    queue_id: int
    ts: int
    deadline_ms: int
    seqs: list[int]


class RouterPut(msgspec.Struct, frozen=True):
    """A router is there, or works differently from now on.

    What its source has up to `start_seq` is not its business (any more). Copies of what lies up to
    `known_seq` may be in the destination already, made by an earlier router of this name.
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
    """A router is gone; its id is never reused. Those of a dropped topic go without an entry."""

    topic_id: ClassVar[int] = ROUTERS_ID

    router_id: int
    name: str
    ts: int


SessionEntry = SessionOpened | SessionMoved | SessionsClosed
LeaseEntry = LeasesGranted | LeasesReleased | LeasesExtended
RouterEntry = RouterPut | RouterDeleted
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
    | SessionEntry
    | LeaseEntry
    | RouterEntry
)
