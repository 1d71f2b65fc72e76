"""Shared values: topic configuration, gates, tag matches, names, losses.

Frozen values without behaviour that needs a clock, a file or a loop. Any module may import it.
"""

from __future__ import annotations

import enum
import re
from typing import Final, NewType

import msgspec
from msgspec import UNSET, UnsetType

from topics_server.values.limits import TOPIC_NAME_CHARS_MAX

Seq = NewType("Seq", int)  # position of a record in its topic, from 1
TopicId = NewType("TopicId", int)  # interned id of one incarnation of a topic, never reused
Lsn = NewType("Lsn", int)  # server-wide order of entries, from 1

_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
_ROUTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")
# What the topic of a stream is called whose path is no topic name: this and a hash of the path.
HASHED_PREFIX: Final = "ds:"
HASH_CHARS: Final = 40
_HASHED_NAME: Final = re.compile(f"{HASHED_PREFIX}[0-9a-f]{{{HASH_CHARS}}}")


def is_topic_name(name: str) -> bool:
    """Whether `name` is in the contract's charset and length (§1.1), byte-exact."""
    return len(name) <= TOPIC_NAME_CHARS_MAX and _TOPIC_NAME.fullmatch(name) is not None


def is_hashed_name(name: str) -> bool:
    """Whether `name` is the topic name of a stream whose path is no topic name."""
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


class Discard(enum.Enum):
    """What a full topic does (§0.10): evict the oldest, or refuse the write."""

    OLD = "old"
    REJECT = "reject"


class PayloadKind(enum.IntEnum):
    """What the bytes of `data` are. Nothing makes texts so far; formats carry them."""

    JSON = 0
    TEXT = 1
    BYTES = 2


class Gate(enum.IntEnum):
    """What an entry waits for before it is applied: nothing, its write, or its sync."""

    NONE = 0
    WRITTEN = 1
    SYNCED = 2


GATE_OF: Final[dict[Durability, Gate]] = {
    Durability.EPHEMERAL: Gate.NONE,
    Durability.MEMORY: Gate.WRITTEN,
    Durability.DISK: Gate.WRITTEN,
    Durability.FSYNC: Gate.SYNCED,
}
# A topic's creation, in every class: a power cut that took back an acknowledged creation would
# hand out the same topic id, epoch and seqs a second time.
CREATION_GATE: Final = Gate.SYNCED


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The full configuration of a topic (§0.10), already resolved and clamped.

    `lease_log`, beyond the contract: the topic that is told of this queue's leases. Unset, it is
    not encoded: files of topics without one are what they were before there was such a field.
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


class LossReason(enum.Enum):
    """Why records are gone involuntarily; the value is the tombstone's `reason` (§3.3)."""

    CAP = "cap"
    TTL = "ttl"
    MIXED = "mixed"
    RECREATED = "recreated"
    SOURCE_TRIM = "source_trim"
    DAMAGED = "damaged"
    RESTART = "restart"


class TagMatch(msgspec.Struct, frozen=True):
    """A delete's predicate on tags (§5): exact, or a literal prefix (an empty prefix: any tag)."""

    text: str
    is_prefix: bool = False

    def matches(self, tag: str | None) -> bool:
        """Whether a record with this tag is hit; a record without a tag never is."""
        if tag is None:
            return False
        return tag.startswith(self.text) if self.is_prefix else tag == self.text


class ProducerStamp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who appends, in which of its lives, and which of its requests this is (producer headers)."""

    producer_id: str
    epoch: int
    seq: int


class Ancestor(msgspec.Struct, frozen=True, array_like=True):
    """A stream that a fork comes from, directly or not: up to `upto_seq` they are the same."""

    path: str
    topic_id: int
    upto_seq: int


class StreamFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a stream is beside its topic (Durable Streams). Times in ms.

    `content_type` as it was sent. It ends `ttl_s` after its last use, or at `expires_ms`, which is
    `expires_at` as it was sent; 0 and None: never. `used_ms`: a use of it that is known, and
    whoever used it since within a sixteenth of its time to live. `closed_by`: the producer's
    request that closed it. `last_seq`: the last value of `Stream-Seq`. `ancestors`: of a fork, its
    source last; `fork_at`: seq and sub-offset it was asked for; `is_copying`: it is not whole yet.
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
    """What an append does to its stream: the new last `Stream-Seq`, if any; and whether it ends."""

    last_seq: str | None = None
    closes: bool = False


class Hole(msgspec.Struct, frozen=True, array_like=True):
    """Seqs `first_seq..last_seq` (inclusive) are lost, and why.

    `missed`: how many records that stands for; 0 if one for each seq.
    """

    first_seq: int
    last_seq: int
    reason: LossReason
    missed: int = 0

    @property
    def missed_count(self) -> int:
        """How many records are lost."""
        return self.missed or self.last_seq - self.first_seq + 1


class SeqRun(msgspec.Struct, frozen=True, array_like=True):
    """Seqs `first_seq..last_seq`, both inclusive."""

    first_seq: int
    last_seq: int


class Guarantee(enum.Enum):
    """Delivery mode of a router (§6)."""

    AT_LEAST_ONCE = "at_least_once"
    EXACTLY_ONCE = "exactly_once"


class RouterDefinition(msgspec.Struct, frozen=True):
    """What a router does (§6): which records of `source` are copied to `dest`, and how.

    `filter`: only records whose tag matches; None for all.
    """

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    filter: TagMatch | None = None
    allow_cycle: bool = False
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
