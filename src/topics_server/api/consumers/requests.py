"""Request shapes of the routes of consumers. Pure.

Decoded once; wrong types are `invalid_request` with the field's path. Called by
`api/consumers/handlers`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from topics_server.api.messages.requests import U64, consumer_name, decode_body
from topics_server.values.errors import invalid
from topics_server.values.limits import U64_MAX
from topics_server.values.model import ConsumerHold


class _Hold(msgspec.Struct, gc=False):
    max_records: U64
    max_bytes: U64


class _Put(msgspec.Struct, gc=False):
    from_: U64 | Literal["earliest", "head"] = msgspec.field(default="earliest", name="from")
    hold: _Hold | UnsetType | None = UNSET


class _Commit(msgspec.Struct, gc=False):
    seq: U64
    rewind: bool = False
    if_seq: U64 | None = None


_PUT: Final = msgspec.json.Decoder(_Put)
_COMMIT: Final = msgspec.json.Decoder(_Commit)
PUT_MEMBERS: Final = _Put.__struct_encode_fields__
COMMIT_MEMBERS: Final = _Commit.__struct_encode_fields__
_HOLD_FIELDS: Final = _Hold.__struct_fields__


class PutRequest(msgspec.Struct, frozen=True):
    """The requested consumer. `start`: where a new consumer begins; None is the head.

    `hold`: the records that caps keep for it; None ends the hold; unset leaves the hold unchanged.
    """

    start: int | None
    hold: ConsumerHold | UnsetType | None


class CommitRequest(msgspec.Struct, frozen=True):
    """A requested commit."""

    seq: int
    rewind: bool
    if_seq: int | None


def consumer_of(below: tuple[str, ...]) -> str:
    """The consumer that a path names. Raises `invalid_request`."""
    return consumer_name(below[0])


def decode_put(body: bytes) -> PutRequest:
    """The body of a `PUT`; an empty body means the defaults."""
    sent = decode_body(_PUT, body or b"{}")
    start = sent.from_
    if isinstance(start, int):
        begin: int | None = _checked(start, "from")
    else:
        begin = 0 if start == "earliest" else None
    if not isinstance(sent.hold, _Hold):
        return PutRequest(begin, sent.hold)
    for field in _HOLD_FIELDS:
        if _checked(getattr(sent.hold, field), f"hold.{field}") == 0:
            raise invalid(f"hold.{field} must be at least 1", f"hold.{field}")
    return PutRequest(begin, ConsumerHold(sent.hold.max_records, sent.hold.max_bytes))


def decode_commit(body: bytes) -> CommitRequest:
    """The body of a commit."""
    sent = decode_body(_COMMIT, body)
    if_seq = None if sent.if_seq is None else _checked(sent.if_seq, "if_seq")
    return CommitRequest(_checked(sent.seq, "seq"), sent.rewind, if_seq)


def _checked(value: int, field: str) -> int:
    if value > U64_MAX:
        raise invalid(f"{field} must be at most {U64_MAX}", field)
    return value
