"""The values that the queue service returns. Pure."""

from __future__ import annotations

import msgspec

from topics_server.engine.answers import QueueCounts
from topics_server.engine.read.exact_read import Row
from topics_server.engine.read.row_columns import RowColumns
from topics_server.queue.leases.jobs import LeaseView, SkipReason
from topics_server.values.blocks import Block


class LeasedJob(msgspec.Struct, frozen=True, gc=False):
    """A job that was leased, and its record: row `row` of `block`."""

    seq: int
    lease_id: int
    deadline_ms: int
    deliveries: int
    block: Block
    row: int


class ClaimResult(msgspec.Struct, frozen=True):
    """The result of a claim (§10.2): jobs by seq, and the number of other claimable jobs."""

    jobs: list[LeasedJob]
    ready: int


class FirstLeases(msgspec.Struct, frozen=True, gc=False):
    """Jobs that were leased for the first time, with their records.

    Job i has the seq `seqs[i]`, row i of `rows` and the lease id `first_id + i`. `ready`: the
    number of other claimable jobs.
    """

    seqs: list[int]
    rows: list[Row] | RowColumns
    first_id: int
    deadline_ms: int
    ready: int


class AckResult(msgspec.Struct, frozen=True):
    """The result of an ack (§10.4): the number of completed and deleted jobs.

    `reasons`: the reason of each skipped job; nacks and extends have reasons too.
    """

    acked: int
    skipped: list[int]
    counts: QueueCounts
    reasons: list[SkipReason]
    write_ms: float = 0.0
    sync_ms: float = 0.0


class NackResult(msgspec.Struct, frozen=True):
    """The result of a nack (§10.5)."""

    nacked: int
    skipped: list[int]
    counts: QueueCounts
    reasons: list[SkipReason]


class ExtendResult(msgspec.Struct, frozen=True):
    """The result of an extend (§10.6): the leases of `seqs` end at `deadline_ms`."""

    seqs: list[int]
    deadline_ms: int
    skipped: list[int]
    reasons: list[SkipReason]


class Redriven(msgspec.Struct, frozen=True):
    """The result of a redrive: dead letters of `source` that are jobs again.

    `skipped`: requested letters that do not exist, come from another queue or are leased. `more`:
    there may be other letters after `next_after_seq`.
    """

    source: str
    redriven: int
    skipped: list[int]
    more: bool
    next_after_seq: int


class LeasePage(msgspec.Struct, frozen=True):
    """Leases by seq; `next_after_seq` is set when more follow."""

    leases: list[LeaseView]
    next_after_seq: int | None = None
