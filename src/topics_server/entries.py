"""The closed union of durable facts of the whole server.

An entry is decided once, with its seqs, times and ids fixed, submitted to the journal, and applied
when its gate is met; recovery applies the same entries again. Later parts of the server (routers,
leases, sessions) add their kinds here and in `wal/frames.py`. No entry ever changes its meaning.
"""

from __future__ import annotations

import msgspec

from topics_server.appends import DecodedAppend
from topics_server.model import LossReason, TopicConfig


class Floor(msgspec.Struct, frozen=True, array_like=True):
    """Involuntary loss: every seq below `seq` is gone; `reason` says why those newly lost are."""

    seq: int
    reason: LossReason


class TopicPut(msgspec.Struct, frozen=True):
    """A topic is created, or its configuration replaced.

    `epoch` counts incarnations of the name from 1; `head_seq` is the head visible at decide;
    `floor` is the floor as of now when a cap or the TTL is loosened (DESIGN §3, Floor).
    """

    topic_id: int
    name: str
    epoch: int
    config: TopicConfig
    ts: int
    head_seq: int = 0
    created: bool = True
    floor: Floor | None = None


class TopicDropped(msgspec.Struct, frozen=True):
    """A topic is gone for good, with its records, keys and tags. Its id is never reused."""

    topic_id: int
    name: str
    ts: int


class RecordsAppended(msgspec.Struct, frozen=True):
    """The records of one call: seqs `first_seq .. first_seq + count - 1`, one commit time.

    `body` is the request's own bytes (inflated), decoded by the grammar of version `grammar`.
    `header_key` is an idempotency key that came as a header (a key in the body wins). `creation`
    is set when this call creates its topic. `floor` is what this append evicts, itself included.
    `decoded` is the decoded body while it is at hand; never encoded, absent in replay.
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


Entry = TopicPut | TopicDropped | RecordsAppended | RecordsDeleted | FloorMoved | HeadReserved
