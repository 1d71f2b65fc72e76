"""Encodes a reader's positions in all its topics as a frame `id` (§7.4). Pure.

With up to 64 topics and 2 KiB, an id is base64url (no padding) of compact JSON `{topic: seq}`, in
the session's order. Beyond these bounds, or if a topic was created again under its name, the id is
a checkpoint token: `c1.` and base64url of msgpack `[[topic id, epoch, seq], ...]`, in the same
order. So the JSON form always means epoch 1, and a position in an earlier topic is never taken for
a position in the new topic of that name.

Decoding raises only `ValueError`, for any input. Called by `api/watch/handlers` and
`api/watch/requests`.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from topics_server.engine.subscribe.cursors import Cursor
from topics_server.values.limits import U64_MAX

# An id beyond either bound would be too long for the header of a reconnect.
TOPICS_MAX: Final = 64
ID_BYTES_MAX: Final = 2048
# Longer than any id of this server, even with the most topics of a session.
_READ_BYTES_MAX: Final = 4 * 1024 * 1024
_TOKEN: Final = b"c1."
_FIRST_EPOCH: Final = 1

_TO_URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL: Final = bytes.maketrans(b"-_", b"+/")

U64 = Annotated[int, Meta(ge=0)]


class CursorPosition(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A reader's position in one incarnation of a topic."""

    topic_id: U64
    epoch: U64
    seq: U64


# Seqs by topic name, all in epoch 1; or positions in the order of the session that issued the id.
Positions = dict[str, int] | tuple[CursorPosition, ...]

_NAMED: Final = msgspec.json.Decoder(dict[str, U64])
_POSITIONS: Final = msgspec.msgpack.Decoder(tuple[CursorPosition, ...])
_pack: Final = msgspec.msgpack.Encoder().encode


class IdOf:
    """Returns the id of the cursors' current positions at each call."""

    __slots__ = ("_cursors", "_is_small", "_keys")

    def __init__(self, cursors: Iterable[Cursor]) -> None:
        self.take(cursors)

    def take(self, cursors: Iterable[Cursor]) -> None:
        """Use these cursors in the ids from now on."""
        self._cursors = tuple(cursors)
        self._is_small = 0 < len(self._cursors) <= TOPICS_MAX
        # JSON escapes no character of topic names.
        self._keys = tuple(f'"{cursor.name}":' for cursor in self._cursors)

    def __call__(self) -> bytes:
        """The id, as bytes for an `id:` line."""
        if self._is_small:
            text = self._named()
            if text is not None:
                return text
        positions = [(cursor.topic_id, cursor.epoch, cursor.seq) for cursor in self._cursors]
        return _TOKEN + _to_base64(_pack(positions))

    def _named(self) -> bytes | None:
        """The JSON form; None if it cannot be used."""
        members: list[str] = []
        for key, cursor in zip(self._keys, self._cursors, strict=True):
            if cursor.epoch != _FIRST_EPOCH:
                return None
            members.append(f"{key}{cursor.seq}")
        text = _to_base64(("{" + ",".join(members) + "}").encode("ascii"))
        return text if len(text) <= ID_BYTES_MAX else None


def decode_id(text: bytes) -> Positions:
    """The positions of an id. Raises `ValueError` for an invalid one."""
    if len(text) > _READ_BYTES_MAX:
        raise ValueError("an id is not so long")
    try:
        if text.startswith(_TOKEN):
            positions = _POSITIONS.decode(_from_base64(text[len(_TOKEN) :]))
            seqs: Iterable[int] = (value for position in positions for value in _values(position))
            found: Positions = positions
        else:
            named = _NAMED.decode(_from_base64(text))
            found, seqs = named, named.values()
        if any(value > U64_MAX for value in seqs):
            raise ValueError("a seq has 64 bits")
    except (binascii.Error, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"not an id: {error}") from None
    return found


def _values(position: CursorPosition) -> Sequence[int]:
    return (position.topic_id, position.epoch, position.seq)


def _to_base64(raw: bytes) -> bytes:
    return binascii.b2a_base64(raw, newline=False).translate(_TO_URL).rstrip(b"=")


def _from_base64(text: bytes) -> bytes:
    text = text.rstrip(b"=").translate(_FROM_URL)
    return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
