"""The bytes of one frame: entry <-> frame. Pure.

Drawn in full in `docs/FORMATS.md`. Little-endian.

    frame, 44 bytes + payload
    +0  u32 length    +4 u8 kind   +5 u8 format   +6 u16 extra length
    +8  u64 lsn       +16 u64 topic id   +24 u64 first seq   +32 i64 ts   +40 u32 count
    +44 extra (msgpack, `RecordsAppended` only), payload

No kind or format ever changes its meaning. Frames are never read outside a group whose checksum
holds (`groups`), so one that cannot be read was made by something else: `Corrupt`, never torn.
Called by `shard` (encode) and `groups` (decode).
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple, assert_never

import msgspec

from topics_server.entries import (
    Entry,
    Floor,
    FloorMoved,
    HeadReserved,
    RecordsAppended,
    RecordsDeleted,
    TopicDropped,
    TopicPut,
)
from topics_server.errors import Corrupt
from topics_server.limits import FRAME_BYTES_MAX

FRAME_HEADER_BYTES: Final = 44

_FRAME: Final = struct.Struct("<IBBHQQQqI")
_OPENING: Final = struct.Struct("<QQ")
_FORMAT: Final = 1
# A body smaller than this is copied behind its header: cheaper than one more vector.
_COPY_BYTES_MAX: Final = 4096

assert _FRAME.size == FRAME_HEADER_BYTES
assert FRAME_BYTES_MAX < 2**32


class Kind(enum.IntEnum):
    """What a frame is; 0 is preallocated space and never valid."""

    OPENING = 1
    TOPIC_PUT = 2
    TOPIC_DROPPED = 3
    RECORDS_APPENDED = 4
    RECORDS_DELETED = 5
    FLOOR_MOVED = 6
    HEAD_RESERVED = 7


class Opening(NamedTuple):
    """First frame of a file: which one it continues, how far that went, its shard's last lsn.

    All three are 0 in the first file of a shard.
    """

    previous_number: int
    previous_end: int
    previous_lsn: int


class _AppendExtra(msgspec.Struct, frozen=True, array_like=True):
    header_key: str | None
    creation: TopicPut | None
    floor: Floor | None
    grammar: int


_encode: Final = msgspec.msgpack.Encoder().encode
_EXTRA_DECODER: Final = msgspec.msgpack.Decoder(_AppendExtra)
_PUT_DECODER: Final = msgspec.msgpack.Decoder(TopicPut)
_FLOOR_DECODER: Final = msgspec.msgpack.Decoder(Floor)
_PLAIN: Final = _AppendExtra(None, None, None, 1)


def encode_entry(lsn: int, entry: Entry) -> list[bytes]:
    """One frame as buffers that follow each other; a large body is referenced, not copied."""
    assert lsn > 0
    topic_id = entry.topic_id
    ts = first_seq = count = 0
    payload = b""
    match entry:
        case RecordsAppended():
            return _encode_append(lsn, entry)
        case TopicPut():
            kind, ts, payload = Kind.TOPIC_PUT, entry.ts, _encode(entry)
        case TopicDropped():
            kind, ts, payload = Kind.TOPIC_DROPPED, entry.ts, entry.name.encode()
        case RecordsDeleted():
            assert len(entry.firsts) == len(entry.lasts)
            assert len(entry.firsts) % 8 == 0
            kind, ts, count = Kind.RECORDS_DELETED, entry.ts, len(entry.firsts) // 8
            payload = entry.firsts + entry.lasts
        case FloorMoved():
            kind, ts, payload = Kind.FLOOR_MOVED, entry.ts, _encode(entry.floor)
        case HeadReserved():
            kind, first_seq = Kind.HEAD_RESERVED, entry.ceiling_seq
        case _:
            assert_never(entry)
    length = FRAME_HEADER_BYTES + len(payload)
    assert length <= FRAME_BYTES_MAX
    head = _FRAME.pack(length, kind, _FORMAT, 0, lsn, topic_id, first_seq, ts, count)
    return [head + payload]


def _encode_append(lsn: int, entry: RecordsAppended) -> list[bytes]:
    extra = b""
    if (
        entry.header_key is not None
        or entry.creation is not None
        or entry.floor is not None
        or entry.grammar != 1
    ):
        extra = _encode(_AppendExtra(entry.header_key, entry.creation, entry.floor, entry.grammar))
    body = entry.body
    length = FRAME_HEADER_BYTES + len(extra) + len(body)
    assert length <= FRAME_BYTES_MAX
    head = _FRAME.pack(
        length,
        4,  # Kind.RECORDS_APPENDED; an enum member costs a lookup on the hottest path
        _FORMAT,
        len(extra),
        lsn,
        entry.topic_id,
        entry.first_seq,
        entry.ts,
        entry.count,
    )
    if len(body) <= _COPY_BYTES_MAX:
        return [head + extra + body]
    return [head + extra, body]


def encode_opening(opening: Opening) -> bytes:
    """The frame that says which file this one continues."""
    length = FRAME_HEADER_BYTES + _OPENING.size
    head = _FRAME.pack(length, Kind.OPENING, _FORMAT, 0, opening.previous_lsn, 0, 0, 0, 0)
    return head + _OPENING.pack(opening.previous_number, opening.previous_end)


def decode_frames(
    buffer: bytes, offset: int, end: int, count: int, position: int
) -> tuple[Opening | None, list[tuple[int, Entry]]]:
    """The `count` frames in `buffer[offset:end]`, of the group at file position `position`.

    Raises `Corrupt` for anything that cannot be read.
    """
    opening: Opening | None = None
    entries: list[tuple[int, Entry]] = []
    for _ in range(count):
        if end - offset < FRAME_HEADER_BYTES:
            raise Corrupt(f"frames run past their group at {position}")
        fields = _FRAME.unpack_from(buffer, offset)
        length, kind = fields[0], fields[1]
        if not FRAME_HEADER_BYTES <= length <= end - offset:
            raise Corrupt(f"frame of {length} bytes in the group at {position}")
        if kind == Kind.OPENING:
            opening = _decode_opening(fields, buffer[offset : offset + length], position)
        else:
            try:
                entries.append(_decode_frame(fields, buffer, offset))
            except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
                raise Corrupt(f"frame of kind {kind} at {position}: {error}") from error
        offset += length
    if end - offset >= 8:  # what pads a group is shorter
        raise Corrupt(f"{end - offset} bytes behind the frames of the group at {position}")
    return opening, entries


def _decode_opening(fields: tuple[int, ...], frame: bytes, position: int) -> Opening:
    if len(frame) != FRAME_HEADER_BYTES + _OPENING.size or fields[2] != _FORMAT:
        raise Corrupt(f"opening frame of the group at {position}")
    number, end = _OPENING.unpack_from(frame, FRAME_HEADER_BYTES)
    return Opening(number, end, fields[4])


def _decode_frame(fields: tuple[int, ...], buffer: bytes, offset: int) -> tuple[int, Entry]:
    length, kind, form, extra_length, lsn, topic_id, first_seq, ts, count = fields
    start, end = offset + FRAME_HEADER_BYTES, offset + length
    if form != _FORMAT:
        raise ValueError(f"format {form} is not known; was it written by a newer version?")
    if lsn == 0 or start + extra_length > end:
        raise ValueError("impossible frame header")
    if kind == Kind.RECORDS_APPENDED:
        body_start = start + extra_length
        extra = _EXTRA_DECODER.decode(buffer[start:body_start]) if extra_length else _PLAIN
        return lsn, RecordsAppended(
            topic_id,
            first_seq,
            count,
            ts,
            buffer[body_start:end],
            extra.header_key,
            extra.creation,
            extra.floor,
            extra.grammar,
        )
    payload = buffer[start:end]
    match kind:
        case Kind.TOPIC_PUT:
            put = _PUT_DECODER.decode(payload)
            if put.topic_id != topic_id:
                raise ValueError("topic ids differ")
            return lsn, put
        case Kind.TOPIC_DROPPED:
            return lsn, TopicDropped(topic_id, payload.decode(), ts)
        case Kind.RECORDS_DELETED:
            if len(payload) != 16 * count:
                raise ValueError("columns do not match the count")
            return lsn, RecordsDeleted(topic_id, ts, payload[: 8 * count], payload[8 * count :])
        case Kind.FLOOR_MOVED:
            return lsn, FloorMoved(topic_id, ts, _FLOOR_DECODER.decode(payload))
        case Kind.HEAD_RESERVED:
            return lsn, HeadReserved(topic_id, first_seq)
        case _:
            raise ValueError("kind is not known; was it written by a newer version?")
