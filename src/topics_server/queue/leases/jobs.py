"""A leased job, and the values that queue questions return. Pure.

Values but for `HeldJob`, which only its `LeaseBook` changes. Lease ids are numbers inside and
`lease_<hex>` outside. Used by `leases`, `lease_parts` and all who ask them.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

import msgspec

from topics_server.values.entries import LeaseEntry, LeasesExtended, LeasesGranted, LeasesReleased

_LEASE_ID: Final = re.compile(r"lease_([0-9a-f]{1,16})")

# Why a job is parked, beside entries under way (`HeldJob.pending`).
LEAVING: Final = 1  # one of these ends the lease there is
ACKING: Final = 2
MOVING: Final = 4


class SkipReason(StrEnum):
    """Why a seq of an ack, nack or extend does not count."""

    NOT_FOUND = "not_found"  # completed, deleted, expired, or never there
    NOT_LEASED = "not_leased"  # nobody holds it
    HELD_BY_ANOTHER_NODE = "held_by_another_node"
    LEASE_SUPERSEDED = "lease_superseded"  # the node holds it by another lease
    ACKING = "acking"  # its ack is under way
    DEAD_LETTERING = "dead_lettering"  # it leaves for the dead-letter topic


def lease_text(lease_id: int) -> str:
    """A lease id as clients see it."""
    return f"lease_{lease_id:x}"


def lease_number(text: str) -> int:
    """The id behind a client's token; 0, which no lease has, if it is no such token."""
    found = _LEASE_ID.fullmatch(text)
    return int(found.group(1), 16) if found else 0


class HeldJob(msgspec.Struct, gc=False):
    """A job that was handed out, or is about to be.

    `lease_id`: 0 if nobody holds it. `at_ms`: claimable from then on (of a lease: its deadline
    + 1). `deliveries`: leases so far. `lsn`: the newest journaled entry that is in here. `pending`:
    entries under way; `flags`: why else it is parked. `is_timed`: nobody was given it yet, and it
    named `at_ms` itself. `error`: the reason of the last nack that gave one.
    """

    lease_id: int = 0
    node: str = ""
    at_ms: int = 0
    deliveries: int = 0
    claimed_ts: int = 0
    connection: int = 0
    lsn: int = 0
    pending: int = 0
    flags: int = 0
    is_timed: bool = False
    error: str = ""

    @property
    def is_parked(self) -> bool:
        """Whether something is under way with it."""
        return self.pending > 0 or self.flags != 0

    @property
    def is_fresh(self) -> bool:
        """Whether nobody was ever given it."""
        return self.deliveries == 0


class Ask(msgspec.Struct, frozen=True, gc=False):
    """One claimer. `connection`: its push stream, 0 if it polls."""

    node: str
    max_jobs: int
    lease_ms: int
    connection: int = 0


class LeasedJobs(msgspec.Struct, frozen=True, gc=False):
    """A job handed out; `deliveries` counts this time."""

    seq: int
    lease_id: int
    deliveries: int


class Claim(msgspec.Struct, frozen=True):
    """What one claimer gets, by seq, and the entry that says so."""

    entry: LeasesGranted
    jobs: list[LeasedJobs]

    @property
    def deadline_ms(self) -> int:
        """When these leases end."""
        return self.entry.deadline_ms


class DeadJob(msgspec.Struct, frozen=True, gc=False):
    """A job that was delivered as often as it may be; `error`: see `HeldJob`."""

    seq: int
    deliveries: int
    error: str = ""


class LostLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that has expired and whose job somebody else is given now."""

    seq: int
    lease_id: int
    node: str
    deadline_ms: int
    deliveries: int


class Claims(msgspec.Struct, frozen=True):
    """One pass over the queue: a claim for each who asked, None for who gets nothing."""

    claims: list[Claim | None]
    to_dead_letter: list[DeadJob]
    lost: list[LostLease]


class Matched(msgspec.Struct, frozen=True):
    """Seqs of an ack that count, those that do not, and those whose ack is under way already."""

    seqs: list[int]
    skipped: list[int]
    joining: list[int]


class Counts(msgspec.Struct, frozen=True, gc=False):
    """The gauges of a queue (§10.7); `moving`: on their way to another topic."""

    ready: int
    in_flight: int
    delayed: int
    moving: int
    dead_lettered: int


class LeaseView(msgspec.Struct, frozen=True, gc=False):
    """A lease as it is shown."""

    seq: int
    lease_id: int
    node: str
    deadline_ms: int
    deliveries: int
    claimed_ts: int
    connection: int


def why_skipped(job: HeldJob | None, node: str, fence: int | None) -> SkipReason:
    """Why a job that is there is not the node's. `fence`: the lease the node showed, if any."""
    if job is None:
        return SkipReason.NOT_LEASED
    if job.flags & MOVING:
        return SkipReason.DEAD_LETTERING
    if job.flags & ACKING:
        return SkipReason.ACKING
    if job.lease_id == 0 or job.flags & LEAVING:
        return SkipReason.NOT_LEASED
    if job.node != node:
        return SkipReason.HELD_BY_ANOTHER_NODE
    if fence is not None and fence != job.lease_id:
        return SkipReason.LEASE_SUPERSEDED
    return SkipReason.NOT_FOUND  # somebody else is deleting it


def seqs_of(entry: LeaseEntry) -> list[int]:
    """The jobs an entry is about."""
    if isinstance(entry, LeasesGranted):
        return [seq for seq, _ in entry.leases]
    if isinstance(entry, LeasesReleased):
        return [seq for seq, _ in entry.jobs]
    assert isinstance(entry, LeasesExtended)
    return entry.seqs


def view_of(seq: int, job: HeldJob) -> LeaseView:
    """A lease as it is shown."""
    return LeaseView(
        seq,
        job.lease_id,
        job.node,
        job.at_ms - 1,
        job.deliveries,
        job.claimed_ts,
        job.connection,
    )
