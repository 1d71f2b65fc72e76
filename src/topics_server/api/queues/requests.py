"""Request shapes of queue routes (§10).

Pure. Each request is decoded once, resolved and clamped as the contract says; wrong types are
`invalid_request` with the field's path. A lease token that this server did not make matches no
lease: it is decoded to 0, and is no error. Called by `api/queues/handlers`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from topics_server.api.messages.bounded_lists import (
    SHORT_BODY_BYTES_MAX,
    check_items,
    check_node,
    check_tag,
)
from topics_server.api.messages.requests import decode_body, tag_match
from topics_server.queue.leases.jobs import lease_numbers
from topics_server.values.appends import decode_json
from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import (
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    MATCH_PARTS,
    NACK_ERROR_BYTES_MAX,
    U32_MAX,
    U64_MAX,
)
from topics_server.values.model import TagMatch, is_topic_name

# The longest wait of a claim for its first job, and of a nacked job for its next claim.
CLAIM_WAIT_MS_MAX: Final = 30_000
NACK_DELAY_MS_MAX: Final = 86_400_000

# msgspec cannot bound above int64; `_check_u64` adds the upper end.
_U64 = Annotated[int, Meta(ge=0)]
_U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]


class QueueLimits(Protocol):
    """The configured bounds of these requests; `Settings` has them."""

    @property
    def max_claim(self) -> int:
        """The most jobs of one request."""
        ...

    @property
    def max_node_bytes(self) -> int:
        """The most bytes of a node's name."""
        ...


class ClaimRequest(msgspec.Struct, frozen=True):
    """A claim of up to `max_jobs` jobs by a node. `lease_ms`: None is the topic's setting.

    `ack`: the jobs that the node completes in the same request.
    """

    node: str
    max_jobs: int
    lease_ms: int | None
    wait_ms: int = 0
    ack: HeldRequest | None = None


class HeldRequest(msgspec.Struct, frozen=True):
    """Leases of a node: an ack, a nack (after `delay_ms`) or an extend (to `lease_ms`).

    `error`: the reason of a nack, cut to `NACK_ERROR_BYTES_MAX`; empty without one. `lease_ids`:
    one for each seq, if the node names the lease of each job. `no_more`: the push streams of these
    jobs must not deliver more jobs. `claim_next`: the claim in the same request as an ack; it holds
    this ack.
    """

    node: str
    seqs: list[int]
    lease_ids: list[int] | None
    delay_ms: int = 0
    lease_ms: int = 0
    no_more: bool = False
    error: str = ""
    claim_next: ClaimRequest | None = None


class RedriveRequest(msgspec.Struct, frozen=True):
    """The dead letters to move back: by seqs, by tag, or (neither) all of them.

    `source`: the topic that holds them, None for the queue's own dead-letter topic. Moves only dead
    letters behind `after_seq`, at most `max_jobs`.
    """

    source: str | None
    seqs: list[int] | None
    match: TagMatch | None
    after_seq: int
    max_jobs: int


class _Completed(msgspec.Struct, gc=False, kw_only=True):
    seqs: list[_U64]
    lease_ids: list[str] | None = None


class _Wanted(msgspec.Struct, gc=False, kw_only=True):
    max: _U32 = 1
    lease_ms: _U64 | None = None
    wait_ms: _U64 = 0


class _Claim(_Wanted, gc=False, kw_only=True):
    node: str
    ack: _Completed | None = None


class _Held(_Completed, gc=False, kw_only=True):
    node: str


class _Ack(_Held, gc=False, kw_only=True):
    claim_next: _Wanted | None = None


class _Nack(_Held, gc=False, kw_only=True):
    delay_ms: _U64 = 0
    error: str | None = None


class _Extend(_Held, gc=False, kw_only=True):
    lease_ms: _U64
    no_more: bool = False


class _Redrive(msgspec.Struct, gc=False, rename={"source": "from"}):
    source: str | None = None
    seqs: list[_U64] | None = None
    tag: str | None = None
    match: str | list[msgspec.Raw] | None = None
    all: bool = False
    after_seq: _U64 = 0
    max: _U32 = U32_MAX


_ABSENT: Final = msgspec.Raw(b"")


class _Lists(msgspec.Struct, gc=False):
    """The lists of a body, undecoded."""

    seqs: msgspec.Raw = _ABSENT
    lease_ids: msgspec.Raw = _ABSENT
    match: msgspec.Raw = _ABSENT


class _AckLists(msgspec.Struct, gc=False):
    """The ack of a claim, undecoded."""

    ack: msgspec.Raw = _ABSENT


class _Cursor(msgspec.Struct):
    after_seq: _U64


_CLAIM: Final = msgspec.json.Decoder(_Claim)
_ACK: Final = msgspec.json.Decoder(_Ack)
_NACK: Final = msgspec.json.Decoder(_Nack)
_EXTEND: Final = msgspec.json.Decoder(_Extend)
_REDRIVE: Final = msgspec.json.Decoder(_Redrive)
_CURSOR: Final = msgspec.json.Decoder(_Cursor)
_NESTED: Final = msgspec.json.Decoder(_AckLists)
_LISTS: Final[msgspec.json.Decoder[msgspec.Struct]] = msgspec.json.Decoder(_Lists)


def decode_claim(body: bytes, limits: QueueLimits) -> ClaimRequest:
    """A claim (§10.2)."""
    if len(body) > SHORT_BODY_BYTES_MAX:
        ack = decode_json(_NESTED, body).ack
        _check_lists(bytes(ack), limits, "ack.")
    sent = decode_body(_CLAIM, body)
    node = _node(sent.node, limits)
    completed = None
    if sent.ack is not None:
        seqs = _seqs(sent.ack.seqs, limits, "ack.")
        completed = HeldRequest(node, seqs, _lease_ids(sent.ack, "ack."))
    return _claim_of(sent, node, limits, completed)


def _claim_of(
    sent: _Wanted, node: str, limits: QueueLimits, ack: HeldRequest | None, where: str = ""
) -> ClaimRequest:
    lease_ms, wait_ms, most = sent.lease_ms, sent.wait_ms, sent.max
    if lease_ms is not None:
        lease_ms = _lease_ms(lease_ms, where)
    if wait_ms:
        wait_ms = min(_checked_u64(wait_ms, f"{where}wait_ms"), CLAIM_WAIT_MS_MAX)
    if not 0 < most <= limits.max_claim:
        most = _max_jobs(most, limits.max_claim, where)
    return ClaimRequest(node, most, lease_ms, wait_ms, ack)


def decode_ack(body: bytes, limits: QueueLimits) -> HeldRequest:
    """An ack (§10.4)."""
    _check_lists(body, limits)
    sent = decode_body(_ACK, body)
    node, seqs, lease_ids = _held(sent, limits)
    wanted = sent.claim_next
    if wanted is None:
        return HeldRequest(node, seqs, lease_ids)
    completed = HeldRequest(node, seqs, lease_ids)
    claim = _claim_of(wanted, node, limits, completed, "claim_next.")
    return HeldRequest(node, seqs, lease_ids, claim_next=claim)


def decode_nack(body: bytes, limits: QueueLimits) -> HeldRequest:
    """A nack (§10.5)."""
    _check_lists(body, limits)
    sent = decode_body(_NACK, body)
    delay_ms = min(_checked_u64(sent.delay_ms, "delay_ms"), NACK_DELAY_MS_MAX)
    return HeldRequest(*_held(sent, limits), delay_ms=delay_ms, error=_cut(sent.error or ""))


def _cut(error: str) -> str:
    """Cut the reason after a whole character: a nack never fails because of its reason."""
    kept = error.encode()[:NACK_ERROR_BYTES_MAX]
    return kept.decode(errors="ignore")


def decode_extend(body: bytes, limits: QueueLimits) -> HeldRequest:
    """An extend (§10.6)."""
    _check_lists(body, limits)
    sent = decode_body(_EXTEND, body)
    lease_ms = _lease_ms(sent.lease_ms)
    return HeldRequest(*_held(sent, limits), lease_ms=lease_ms, no_more=sent.no_more)


def decode_redrive(body: bytes, topic: str, limits: QueueLimits) -> RedriveRequest:
    """A redrive to the queue `topic`."""
    _check_lists(body, limits)
    sent = decode_body(_REDRIVE, body)
    if sent.source is not None:
        if not is_topic_name(sent.source):
            raise invalid("from must be a topic name", "from")
        if sent.source == topic:
            raise invalid("from must be another topic", "from")
    ways = [name for name in ("seqs", "tag", "match") if getattr(sent, name) is not None]
    ways += ["all"] if sent.all else []
    if len(ways) != 1:
        raise invalid(
            "exactly one of seqs, tag, match and all: true is required", (ways or [""])[-1]
        )
    seqs = None if sent.seqs is None else sorted(set(_seqs(sent.seqs, limits)))
    if sent.tag is not None:
        check_tag(sent.tag, "tag")
    match = tag_match(sent.match) if sent.tag is None else TagMatch(sent.tag)
    return RedriveRequest(
        source=sent.source,
        seqs=seqs,
        match=match,
        after_seq=_checked_u64(sent.after_seq, "after_seq"),
        max_jobs=_max_jobs(sent.max, limits.max_claim),
    )


def query_work(query: Mapping[str, str], limits: QueueLimits) -> ClaimRequest:
    """The query of a push stream (§10.8)."""
    node = query.get("node")
    if node is None:
        raise invalid("node is required", "node")
    sent = query.get("lease_ms")
    most = _number(query.get("max", "1"), "max")
    if most > U32_MAX:
        raise invalid(f"max must be at most {U32_MAX}", "max")
    return ClaimRequest(
        node=_node(node, limits),
        max_jobs=_max_jobs(most, limits.max_claim),
        lease_ms=None if sent is None else _lease_ms(_number(sent, "lease_ms")),
    )


def encode_leases_cursor(after_seq: int) -> str:
    """The opaque cursor of the page of leases behind a seq."""
    return base64.urlsafe_b64encode(msgspec.json.encode(_Cursor(after_seq))).decode("ascii")


def query_leases_cursor(query: Mapping[str, str]) -> int:
    """The seq after which a page of leases starts; raises for an invalid cursor."""
    sent = query.get("cursor")
    if sent is None:
        return 0
    try:
        standard = sent.replace("-", "+").replace("_", "/")
        after_seq = _CURSOR.decode(base64.b64decode(standard, validate=True)).after_seq
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise invalid("the cursor was not issued by this server", "cursor") from None
    return _checked_u64(after_seq, "cursor")


def _held(sent: _Held, limits: QueueLimits) -> tuple[str, list[int], list[int] | None]:
    return _node(sent.node, limits), _seqs(sent.seqs, limits), _lease_ids(sent)


def _lease_ids(sent: _Completed, where: str = "") -> list[int] | None:
    tokens = sent.lease_ids
    if tokens is None:
        return None
    count = len(sent.seqs)
    if len(tokens) != count:
        raise invalid(
            f"{where}lease_ids has {len(tokens)} entries, {where}seqs has {count}: "
            "one for each is required",
            f"{where}lease_ids",
        )
    return lease_numbers(tokens)


def _check_lists(body: bytes, limits: QueueLimits, where: str = "") -> None:
    """Refuse a body with too many items before the items are decoded."""
    if len(body) <= SHORT_BODY_BYTES_MAX:
        return
    most = {"seqs": limits.max_claim, "lease_ids": limits.max_claim, "match": MATCH_PARTS}
    check_items(body, _LISTS, most, partial(_too_many, where))


def _too_many(where: str, field: str, most: int) -> TopicsError:
    if field == "match":
        return invalid('match has three parts: ["tag", "Eq"|"Glob", value]', field)
    return TopicsError(
        Code.BATCH_TOO_LARGE,
        f"there are more than {most} {where}{field}",
        {"field": f"{where}{field}", "max_claim": most},
    )


def _seqs(seqs: list[int], limits: QueueLimits, where: str = "") -> list[int]:
    if not seqs:
        raise invalid(f"{where}seqs must not be empty", f"{where}seqs")
    if len(seqs) > limits.max_claim:
        raise TopicsError(
            Code.BATCH_TOO_LARGE,
            f"{where}seqs has {len(seqs)} items; the limit is {limits.max_claim}",
            {"field": f"{where}seqs", "max_claim": limits.max_claim},
        )
    if max(seqs) > U64_MAX:
        for index, seq in enumerate(seqs):
            _checked_u64(seq, f"{where}seqs[{index}]")
    return seqs


def _node(node: str, limits: QueueLimits) -> str:
    if not node:
        raise invalid("node must not be empty", "node")
    # A character has at most four bytes. A lone surrogate cannot occur here: bodies and queries are
    # UTF-8.
    if 4 * len(node) > limits.max_node_bytes:
        check_node(node, limits.max_node_bytes)
    return node


def _max_jobs(sent: int, most: int, where: str = "") -> int:
    if sent < 1:
        raise invalid(f"{where}max must be at least 1", f"{where}max")
    return min(sent, most)


def _lease_ms(sent: int, where: str = "") -> int:
    return max(LEASE_MS_MIN, min(LEASE_MS_MAX, _checked_u64(sent, f"{where}lease_ms")))


def _number(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        raise invalid(f"{field} must be a non-negative integer", field)
    return _checked_u64(int(text), field)


def _checked_u64(value: int, field: str) -> int:
    if value > U64_MAX:
        raise invalid(f"{field} must be at most {U64_MAX}", field)
    return value
