"""A leased job, and the values that a lease book returns. Pure.

All are immutable except `HeldJob`, which only its `LeaseBook` changes. Lease ids are numbers inside
and `lease_<hex>` outside. Used by `lease_book`, `lease_parts` and their callers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from topics_server.values.entries import LeaseEntry, LeasesExtended, LeasesGranted, LeasesReleased

_TOKEN_START: Final = "lease_"
_TOKEN_DIGITS: Final = 16
_HEX_DIGITS: Final = b"0123456789abcdef"
_LEASE_ID: Final = re.compile(r"lease_([0-9a-f]{1,16})")
# From this number on it is faster to convert tokens together.
_MANY_TOKENS: Final = 16
# The last three digits of numbers, as text. Consecutive lease ids mostly share all other digits.
_LAST_DIGITS: Final = tuple(f"{number:03x}" for number in range(0x1000))
_LAST_BYTES: Final = tuple(digits.encode() for digits in _LAST_DIGITS)

# Reasons why a job is busy, other than pending entries (`HeldJob.pending`).
LEAVING: Final = 1  # one of these ends the current lease
ACKING: Final = 2
MOVING: Final = 4


class SkipReason(StrEnum):
    """The reason why a seq of an ack, nack or extend is skipped."""

    NOT_FOUND = "not_found"  # completed, deleted, expired, or never existed
    NOT_LEASED = "not_leased"  # no lease exists
    HELD_BY_ANOTHER_NODE = "held_by_another_node"
    LEASE_SUPERSEDED = "lease_superseded"  # the node has another lease on it
    ACKING = "acking"  # its ack is in flight
    DEAD_LETTERING = "dead_lettering"  # it is moving to the dead-letter topic


def lease_text(lease_id: int) -> str:
    """A lease id as clients see it."""
    return f"lease_{lease_id:x}"


def lease_digits(first_id: int, count: int) -> tuple[bytes, Sequence[bytes]]:
    """The digits that ascending ids share, and the other digits of each id."""
    last = first_id & 0xFFF
    if first_id > 0xFFF and last + count <= len(_LAST_BYTES):
        return b"%x" % (first_id >> 12), _LAST_BYTES[last : last + count]
    return b"", [b"%x" % lease_id for lease_id in range(first_id, first_id + count)]


def lease_number(text: str) -> int:
    """The lease id of a client's token; 0 (the id of no lease) for a malformed token."""
    found = _LEASE_ID.fullmatch(text)
    return int(found.group(1), 16) if found else 0


def lease_numbers(texts: list[str]) -> list[int]:
    """The ids of several tokens, see `lease_number`."""
    if len(texts) >= _MANY_TOKENS:
        numbers = _ascending_numbers(texts) or _numbers_of_one_length(texts)
        if numbers is not None:
            return numbers
    match = _LEASE_ID.fullmatch
    return [int(found[1], 16) if (found := match(text)) else 0 for text in texts]


def _ascending_numbers(texts: list[str]) -> list[int] | None:
    """`lease_numbers` of tokens whose ids ascend by one, as those of one claim; else None.

    None, too, if the ids differ in more than the last digits.
    """
    count, first = len(texts), lease_number(texts[0])
    shared, last = texts[0][:-3], first & 0xFFF
    # The first token is well formed, so each text of the same digits and three others is, too. No
    # text contains a comma if the joined texts have no other commas than the expected ones.
    if (
        first == 0
        or last + count > len(_LAST_DIGITS)
        or ",".join(texts) != shared + f",{shared}".join(_LAST_DIGITS[last : last + count])
    ):
        return None
    return list(range(first, first + count))


def _numbers_of_one_length(texts: list[str]) -> list[int] | None:
    """`lease_numbers` of tokens that have the same length and are all well formed; else None.

    The ids of one claim ascend by one, so that their tokens nearly always have the same length.
    """
    count, width = len(texts), len(texts[0]) - len(_TOKEN_START)
    # Each token becomes a comma and its digits; the text must have no other comma.
    text = ",".join(["", *texts])
    digits = text.replace(f",{_TOKEN_START}", ",")
    if (
        not 1 <= width <= _TOKEN_DIGITS
        or len(text) - len(digits) != count * len(_TOKEN_START)
        or len(digits) != count * (width + 1)
        or digits[:: width + 1] != "," * count
        or digits.count(",") != count
        or not digits.isascii()
    ):
        return None
    digits = digits.replace(",", "0" * (_TOKEN_DIGITS - width))
    if len(digits) != count * _TOKEN_DIGITS or digits.encode().translate(None, _HEX_DIGITS):
        return None
    return list(struct.unpack(f">{count}Q", bytes.fromhex(digits)))


class HeldJob(msgspec.Struct, gc=False):
    """A job that was leased, or is about to be.

    `lease_id`: 0 if it is not leased. `at_ms`: claimable from then on (for a lease: its deadline +
    1). `deliveries`: leases so far. `lsn`: the newest included journaled entry. `pending`: entries
    in flight; `flags`: other reasons why it is busy. `is_timed`: it was never leased, and its
    record named `at_ms`. `error`: the reason of the last nack that gave one.
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
    def is_busy(self) -> bool:
        """Whether an entry or a move of it is in flight."""
        return self.pending > 0 or self.flags != 0

    @property
    def is_unclaimed(self) -> bool:
        """Whether the job was never leased."""
        return self.deliveries == 0


class Ask(msgspec.Struct, frozen=True, gc=False):
    """One claimer. `connection`: its push stream; 0 for a poll."""

    node: str
    max_jobs: int
    lease_ms: int
    connection: int = 0


class LeasedJobs(msgspec.Struct, frozen=True, gc=False):
    """A leased job; `deliveries` includes this one."""

    seq: int
    lease_id: int
    deliveries: int


class Claim(msgspec.Struct, frozen=True):
    """The jobs of one claimer, by seq, and the entry that grants them."""

    entry: LeasesGranted
    jobs: list[LeasedJobs]

    @property
    def deadline_ms(self) -> int:
        """When these leases end."""
        return self.entry.deadline_ms


class DeadJob(msgspec.Struct, frozen=True, gc=False):
    """A job with the maximum of deliveries; `error`: see `HeldJob`."""

    seq: int
    deliveries: int
    error: str = ""


class LostLease(msgspec.Struct, frozen=True, gc=False):
    """An expired lease whose job is given to another claimer now."""

    seq: int
    lease_id: int
    node: str
    deadline_ms: int
    deliveries: int


class Claims(msgspec.Struct, frozen=True):
    """One pass over the queue: a claim for each claimer, None for one that gets nothing."""

    claims: list[Claim | None]
    to_dead_letter: list[DeadJob]
    lost: list[LostLease]


class Matched(msgspec.Struct, frozen=True):
    """The seqs of an ack: valid ones, skipped ones, and those that another ack is deleting."""

    seqs: list[int]
    skipped: list[int]
    joining: list[int]


class Counts(msgspec.Struct, frozen=True, gc=False):
    """The gauges of a queue (§10.7); `moving`: jobs that are moving to another topic."""

    ready: int
    in_flight: int
    delayed: int
    moving: int
    dead_lettered: int


class LeaseView(msgspec.Struct, frozen=True, gc=False):
    """A lease as the API shows it."""

    seq: int
    lease_id: int
    node: str
    deadline_ms: int
    deliveries: int
    claimed_ts: int
    connection: int


def why_skipped(job: HeldJob | None, node: str, fence: int | None) -> SkipReason:
    """Why a node does not hold an existing job. `fence`: the lease id that it sent, if any."""
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
    return SkipReason.NOT_FOUND  # another request is deleting it


def seqs_of(entry: LeaseEntry) -> list[int]:
    """The seqs of the jobs in an entry."""
    if isinstance(entry, LeasesGranted):
        return [seq for seq, _ in entry.leases]
    if isinstance(entry, LeasesReleased):
        return [seq for seq, _ in entry.jobs]
    assert isinstance(entry, LeasesExtended)
    return entry.seqs


def view_of(seq: int, job: HeldJob) -> LeaseView:
    """The lease as the API shows it."""
    return LeaseView(
        seq,
        job.lease_id,
        job.node,
        job.at_ms - 1,
        job.deliveries,
        job.claimed_ts,
        job.connection,
    )
