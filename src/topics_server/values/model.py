"""Shared values: topic configuration, gates, tag matches, names, losses.

Frozen values without behaviour that needs a clock, a file or a loop. Any module may import it.
"""

from __future__ import annotations

import enum
import re
from typing import Any, Final, NewType

import msgspec
from msgspec import UNSET, UnsetType

from topics_server.values.limits import TOPIC_NAME_CHARS_MAX

Seq = NewType("Seq", int)  # position of a record in its topic, from 1
TopicId = NewType("TopicId", int)  # interned id of one incarnation of a topic, never reused
Lsn = NewType("Lsn", int)  # server-wide order of entries, from 1

_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
_ROUTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")
# The name of a topic for a stream whose path is not a valid topic name: this prefix, then a hash of
# the path.
HASHED_PREFIX: Final = "ds:"
HASH_CHARS: Final = 40
_HASHED_NAME: Final = re.compile(f"{HASHED_PREFIX}[0-9a-f]{{{HASH_CHARS}}}")


def is_topic_name(name: str) -> bool:
    """Whether `name` is in the contract's charset and length (§1.1), byte-exact."""
    return len(name) <= TOPIC_NAME_CHARS_MAX and _TOPIC_NAME.fullmatch(name) is not None


def is_name_prefix(text: str) -> bool:
    """Whether the name of a topic may begin with `name`; every name begins with the empty text."""
    return not text or is_topic_name(text)


def is_hashed_name(name: str) -> bool:
    """Whether `name` is the hashed topic name of a stream."""
    return name[:3] == HASHED_PREFIX and _HASHED_NAME.fullmatch(name) is not None


def is_router_name(name: str) -> bool:
    """Whether `name` may be a router's: the charset of topics and `>` (§6)."""
    return len(name) <= TOPIC_NAME_CHARS_MAX and _ROUTER_NAME.fullmatch(name) is not None


class TopicType(enum.Enum):
    """Kind of a topic (§0.10); cannot change once set."""

    LOG = "log"
    QUEUE = "queue"


class Durability(enum.Enum):
    """Commit class of a topic (§0.10): where a write lands and when it is acknowledged."""

    EPHEMERAL = "ephemeral"
    MEMORY = "memory"
    DISK = "disk"
    FSYNC = "fsync"

    # Each write looks up its gate by this enum, and an enum's own hash is a Python call.
    __hash__ = object.__hash__


class Discard(enum.Enum):
    """The reaction of a full topic (§0.10): evict the oldest, or refuse the write."""

    OLD = "old"
    REJECT = "reject"


class PayloadKind(enum.IntEnum):
    """The kind of the bytes in `data`. The formats support `TEXT`; no request makes it."""

    JSON = 0
    TEXT = 1
    BYTES = 2


class Gate(enum.IntEnum):
    """The condition for applying an entry: none, its write, or its sync."""

    NONE = 0
    WRITTEN = 1
    SYNCED = 2


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The full configuration of a topic (§0.10), already resolved and clamped.

    `lease_log`, beyond the contract: the topic that receives this queue's lease events. An unset
    `lease_log` is not encoded, so the files of topics without one are unchanged by this field.
    """

    type: TopicType = TopicType.LOG
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: Discard = Discard.OLD
    durability: Durability = Durability.DISK
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = 120_000
    dedupe_node: bool = True
    lease_ms: int = 30_000
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    leases_durable: bool = False
    lease_log: str | UnsetType = UNSET


class ConsumerHold(msgspec.Struct, frozen=True):
    """The records that caps keep for a consumer: the newest ones, within both bounds."""

    max_records: int
    max_bytes: int


class LossReason(enum.Enum):
    """The reason of an involuntary loss; the value is the tombstone's `reason` (§3.3)."""

    CAP = "cap"
    TTL = "ttl"
    MIXED = "mixed"
    RECREATED = "recreated"
    SOURCE_TRIM = "source_trim"
    DAMAGED = "damaged"
    RESTART = "restart"


class TagMatch(msgspec.Struct, frozen=True, gc=False):
    """A delete's predicate on tags (§5): exact, or a literal prefix (an empty prefix: any tag)."""

    text: str
    is_prefix: bool = False

    def matches(self, tag: str | None) -> bool:
        """Whether a record with this tag matches; a record without a tag never does."""
        if tag is None:
            return False
        return tag.startswith(self.text) if self.is_prefix else tag == self.text


class SentCondition(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The condition of a small write: its `if`, decoded but not checked.

    `none_match`: the JSON of a filter.
    """

    head_seq: int | None = None
    none_match: Any = None
    after: int | None = None
    exists: bool | None = None
    epoch: int | None = None


class ProducerStamp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The producer, its epoch and the number of its request (producer headers)."""

    producer_id: str
    epoch: int
    seq: int


class Ancestor(msgspec.Struct, frozen=True, array_like=True):
    """A stream from which a fork was made, directly or not; both are equal up to `upto_seq`."""

    path: str
    topic_id: int
    upto_seq: int


class StreamFacts(msgspec.Struct, frozen=True, array_like=True):
    """The facts of a stream beside its topic (Durable Streams). Times in ms.

    `content_type`: as it was sent. The stream expires `ttl_s` after its last use, or at
    `expires_ms`, the parsed `expires_at`; 0 and None: never. `used_ms`: the last journaled use; a
    later use is journaled once a sixteenth of the time to live has passed. `closed_by`: the
    producer's request that closed the stream. `last_seq`: the last value of `Stream-Seq`.
    `ancestors`: those of a fork; its source is the last one. `fork_at`: the seq and sub-offset that
    the fork was requested at. `is_copying`: the fork's copy is unfinished.
    """

    path: str
    content_type: str
    ttl_s: int | None = None
    expires_at: str | None = None
    expires_ms: int = 0
    used_ms: int = 0
    is_closed: bool = False
    closed_by: ProducerStamp | None = None
    last_seq: str | None = None
    ancestors: tuple[Ancestor, ...] = ()
    fork_at: tuple[int, int] | None = None
    is_copying: bool = False


class StreamStep(msgspec.Struct, frozen=True, array_like=True):
    """How an append changes its stream: `last_seq` is the new last `Stream-Seq`, if any.

    `closes`: whether the append closes the stream.
    """

    last_seq: str | None = None
    closes: bool = False


class Hole(msgspec.Struct, frozen=True, array_like=True):
    """A run of lost seqs `first_seq..last_seq` (inclusive), and the reason.

    `missed`: the number of lost records; 0 if there is one for each seq.
    """

    first_seq: int
    last_seq: int
    reason: LossReason
    missed: int = 0

    @property
    def missed_count(self) -> int:
        """The number of lost records."""
        return self.missed or self.last_seq - self.first_seq + 1


class SeqRun(msgspec.Struct, frozen=True, array_like=True):
    """Seqs `first_seq..last_seq`, both inclusive."""

    first_seq: int
    last_seq: int


class Guarantee(enum.Enum):
    """Delivery mode of a router (§6)."""

    AT_LEAST_ONCE = "at_least_once"
    EXACTLY_ONCE = "exactly_once"


class OnDelete(enum.Enum):
    """The reaction of a view to deleted records of its topic: keep its rows, or rebuild."""

    KEEP = "keep"
    REBUILD = "rebuild"


class ViewDefinition(msgspec.Struct, frozen=True):
    """The definition of a view, in SQL.

    `schema`: statements that make its tables. `apply`: statements that run for each record, with
    the parameters `:seq :ts :node :tag :data :meta`. `queries`: named statements. `shortcut`: the
    short form from which the server expanded these three, as the client sent it.
    """

    schema: list[str]
    apply: list[str]
    queries: dict[str, str]
    shortcut: dict[str, Any] | None = None
    on_delete: OnDelete = OnDelete.KEEP


class RouterDefinition(msgspec.Struct, frozen=True):
    """A router's definition (§6): which records of `source` it copies to `dest`, and how.

    `filter`: copy only records with a matching tag; None copies all.
    """

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    filter: TagMatch | None = None
    allow_cycle: bool = False
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
