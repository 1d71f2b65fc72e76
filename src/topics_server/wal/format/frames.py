"""The bytes of one journal frame: entry to frame and back.

Drawn in full in `docs/FORMATS.md`. Little-endian.

    frame, 44 bytes + payload
    +0  u32 length    +4 u8 kind   +5 u8 format   +6 u16 extra length
    +8  u64 lsn       +16 u64 topic id   +24 u64 first seq   +32 i64 ts   +40 u32 count
    +44 extra (msgpack, `RecordsAppended` only), payload

What belongs to no topic has a reserved id there (`entries.RESERVED_ID_MIN`).

No kind or format ever changes its meaning. Frames are never read outside a group whose checksum
holds (`groups`), so one that cannot be read was made by something else: `Corrupt`, never torn.
Called by `shard` (encode) and `groups` (decode).
"""

from __future__ import annotations

import enum
import struct
from io import BytesIO
from typing import Final, NamedTuple, assert_never

import msgspec

from topics_server.values.appends import PLAIN_GRAMMAR
from topics_server.values.entries import (
    LEASES_ID,
    ROUTERS_ID,
    SESSIONS_ID,
    CursorMoved,
    Entry,
    Floor,
    FloorMoved,
    HeadReserved,
    LeaseEntry,
    LeasesExtended,
    LeasesGranted,
    LeasesReleased,
    ProducerMoved,
    RecordsAppended,
    RecordsDeleted,
    RouterDeleted,
    RouterEntry,
    RouterPage,
    RouterPut,
    SessionEntry,
    SessionMoved,
    SessionOpened,
    SessionsClosed,
    Source,
    StreamChanged,
    TopicDropped,
    TopicPut,
)
from topics_server.values.errors import Corrupt
from topics_server.values.limits import FRAME_BYTES_MAX, MIB
from topics_server.values.model import ProducerStamp, StreamStep
from topics_server.values.record_codecs import NEWEST_GRAMMAR

FRAME_HEADER_BYTES: Final = 44

_FRAME: Final = struct.Struct("<IBBHQQQqI")
_OPENING: Final = struct.Struct("<QQ")
_FORMAT: Final = 1
_SOURCED_FORMAT: Final = 2
_ROUTED_FORMAT: Final = 3
_PRODUCED_FORMAT: Final = 4
_STEPPED_FORMAT: Final = 5
_APPEND_FORMATS: Final = range(_FORMAT, _STEPPED_FORMAT + 1)
# A body smaller than this is copied behind its header: cheaper than one more vector.
_COPY_BYTES_MAX: Final = 4096
# What is copied at a time of a body that is read.
_CUT_BYTES: Final = MIB

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
    SESSION_OPENED = 8
    SESSION_MOVED = 9
    SESSIONS_CLOSED = 10
    LEASES_GRANTED = 11
    LEASES_RELEASED = 12
    LEASES_EXTENDED = 13
    CURSOR_MOVED = 14
    ROUTER_PUT = 15
    ROUTER_DELETED = 16
    PRODUCER_MOVED = 17
    STREAM_CHANGED = 18


class Opening(NamedTuple):
    """First frame of a file: which one it continues, how far that went, its shard's last lsn.

    All three are 0 in the first file of a shard.
    """

    previous_number: int
    previous_end: int
    previous_lsn: int


class _AppendExtra(msgspec.Struct, frozen=True, array_like=True):
    """Of an append of format 1."""

    header_key: str | None
    creation: TopicPut | None
    floor: Floor | None
    grammar: int


class _SourcedExtra(_AppendExtra, frozen=True, array_like=True):
    """Of format 2: grammars after the first, and records that were moved."""

    source: Source | None


class _RoutedExtra(_SourcedExtra, frozen=True, array_like=True):
    """Of format 3: what a router made."""

    page: RouterPage


class _ProducedExtra(_SourcedExtra, frozen=True, array_like=True):
    """Of format 4: a producer's request."""

    producer: ProducerStamp


class _SteppedExtra(_SourcedExtra, frozen=True, array_like=True):
    """Of format 5: what does something to a stream beside bringing records."""

    producer: ProducerStamp | None
    step: StreamStep


_encode: Final = msgspec.msgpack.Encoder().encode
_EXTRA_DECODER: Final = msgspec.msgpack.Decoder(_AppendExtra)
_SOURCED_DECODER: Final = msgspec.msgpack.Decoder(_SourcedExtra)
_ROUTED_DECODER: Final = msgspec.msgpack.Decoder(_RoutedExtra)
_PRODUCED_DECODER: Final = msgspec.msgpack.Decoder(_ProducedExtra)
_STEPPED_DECODER: Final = msgspec.msgpack.Decoder(_SteppedExtra)
_CHANGED_DECODER: Final = msgspec.msgpack.Decoder(StreamChanged)
_ACCEPTED_DECODER: Final = msgspec.msgpack.Decoder(ProducerMoved)
_PUT_DECODER: Final = msgspec.msgpack.Decoder(TopicPut)
_FLOOR_DECODER: Final = msgspec.msgpack.Decoder(Floor)
_OPENED_DECODER: Final = msgspec.msgpack.Decoder(SessionOpened)
_MOVED_DECODER: Final = msgspec.msgpack.Decoder(SessionMoved)
_CLOSED_DECODER: Final = msgspec.msgpack.Decoder(SessionsClosed)
_GRANTED_DECODER: Final = msgspec.msgpack.Decoder(LeasesGranted)
_RELEASED_DECODER: Final = msgspec.msgpack.Decoder(LeasesReleased)
_EXTENDED_DECODER: Final = msgspec.msgpack.Decoder(LeasesExtended)
_ROUTER_DECODER: Final = msgspec.msgpack.Decoder(RouterPut)
_GONE_DECODER: Final = msgspec.msgpack.Decoder(RouterDeleted)
_PLAIN: Final = _AppendExtra(None, None, None, 1)
_NOTHING_ASKED: Final = (None, None, None, 1)
# Such an extra up to its producer, which is all that is asked: none of the fields before it.
_ONLY_PRODUCED: Final = _encode((*_NOTHING_ASKED, None, None))[:-1]


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
        case CursorMoved():
            kind, first_seq = Kind.CURSOR_MOVED, entry.cursor_seq
            payload = entry.router_id.to_bytes(8, "little")
        case ProducerMoved():
            kind, ts, payload = Kind.PRODUCER_MOVED, entry.ts, _encode(entry)
        case StreamChanged():
            kind, ts, payload = Kind.STREAM_CHANGED, entry.ts, _encode(entry)
        case SessionOpened():
            kind, ts, payload = Kind.SESSION_OPENED, entry.ts, _encode(entry)
        case SessionMoved():
            kind, ts, payload = Kind.SESSION_MOVED, entry.ts, _encode(entry)
        case SessionsClosed():
            kind, ts, payload = Kind.SESSIONS_CLOSED, entry.ts, _encode(entry)
        case LeasesGranted():
            kind, ts, payload = Kind.LEASES_GRANTED, entry.ts, _encode(entry)
        case LeasesReleased():
            kind, ts, payload = Kind.LEASES_RELEASED, entry.ts, _encode(entry)
        case LeasesExtended():
            kind, ts, payload = Kind.LEASES_EXTENDED, entry.ts, _encode(entry)
        case RouterPut():
            kind, ts, payload = Kind.ROUTER_PUT, entry.ts, _encode(entry)
        case RouterDeleted():
            kind, ts, payload = Kind.ROUTER_DELETED, entry.ts, _encode(entry)
        case _:
            assert_never(entry)
    length = FRAME_HEADER_BYTES + len(payload)
    assert length <= FRAME_BYTES_MAX
    head = _FRAME.pack(length, kind, _FORMAT, 0, lsn, topic_id, first_seq, ts, count)
    return [head + payload]


def _extra_of(entry: RecordsAppended) -> tuple[int, bytes]:
    """The format of an append's frame and its extra: as the structs above, field by field."""
    asked = (entry.header_key, entry.creation, entry.floor, entry.grammar)
    source, producer = entry.source, entry.producer
    if asked == _NOTHING_ASKED and source is None and entry.page is None and entry.step is None:
        if producer is None:
            return _FORMAT, b""
        return _PRODUCED_FORMAT, _ONLY_PRODUCED + _encode(producer)
    if entry.page is not None:
        form, extra = _ROUTED_FORMAT, _encode((*asked, source, entry.page))
    elif entry.step is not None:
        form, extra = _STEPPED_FORMAT, _encode((*asked, source, producer, entry.step))
    elif producer is not None:
        form, extra = _PRODUCED_FORMAT, _encode((*asked, source, producer))
    elif entry.grammar != PLAIN_GRAMMAR or source is not None:
        form, extra = _SOURCED_FORMAT, _encode((*asked, source))
    else:
        form, extra = _FORMAT, _encode(asked)
    assert len(extra) < 2**16
    return form, extra


def _encode_append(lsn: int, entry: RecordsAppended) -> list[bytes]:
    form, extra = _extra_of(entry)
    body = entry.body
    length = FRAME_HEADER_BYTES + len(extra) + len(body)
    assert length <= FRAME_BYTES_MAX
    head = _FRAME.pack(
        length,
        4,  # Kind.RECORDS_APPENDED; an enum member costs a lookup on the hottest path
        form,
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


def _cut(buffer: bytes, start: int, end: int) -> bytes:
    """A body, copied in steps if it is long: one copy of all holds the interpreter's lock."""
    if end - start <= _CUT_BYTES:
        return buffer[start:end]
    view = memoryview(buffer)
    made = BytesIO()
    for at in range(start, end, _CUT_BYTES):
        made.write(view[at : min(end, at + _CUT_BYTES)])
    return made.getvalue()


def _decode_frame(fields: tuple[int, ...], buffer: bytes, offset: int) -> tuple[int, Entry]:
    length, kind, form, extra_length, lsn, topic_id, first_seq, ts, count = fields
    start, end = offset + FRAME_HEADER_BYTES, offset + length
    if form != _FORMAT and not (kind == Kind.RECORDS_APPENDED and form in _APPEND_FORMATS):
        raise ValueError(f"format {form} is not known; was it written by a newer version?")
    if lsn == 0 or start + extra_length > end:
        raise ValueError("impossible frame header")
    if kind == Kind.RECORDS_APPENDED:
        body_start = start + extra_length
        extra: _AppendExtra = _PLAIN
        source: Source | None = None
        page: RouterPage | None = None
        producer: ProducerStamp | None = None
        step: StreamStep | None = None
        if form == _ROUTED_FORMAT:
            extra = routed = _ROUTED_DECODER.decode(buffer[start:body_start])
            source, page = routed.source, routed.page
        elif form == _PRODUCED_FORMAT:
            extra = produced = _PRODUCED_DECODER.decode(buffer[start:body_start])
            source, producer = produced.source, produced.producer
        elif form == _STEPPED_FORMAT:
            extra = stepped = _STEPPED_DECODER.decode(buffer[start:body_start])
            source, producer, step = stepped.source, stepped.producer, stepped.step
        elif form == _SOURCED_FORMAT:
            extra = sourced = _SOURCED_DECODER.decode(buffer[start:body_start])
            source = sourced.source
        elif extra_length:
            extra = _EXTRA_DECODER.decode(buffer[start:body_start])
        if not PLAIN_GRAMMAR <= extra.grammar <= NEWEST_GRAMMAR:
            raise ValueError(f"grammar {extra.grammar} is not known; is it of a newer version?")
        return lsn, RecordsAppended(
            topic_id,
            first_seq,
            count,
            ts,
            _cut(buffer, body_start, end),
            extra.header_key,
            extra.creation,
            extra.floor,
            extra.grammar,
            source=source,
            page=page,
            producer=producer,
            step=step,
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
        case Kind.CURSOR_MOVED:
            if len(payload) != 8:
                raise ValueError("not a router's id")
            return lsn, CursorMoved(topic_id, int.from_bytes(payload, "little"), first_seq)
        case Kind.PRODUCER_MOVED:
            moved = _ACCEPTED_DECODER.decode(payload)
            if moved.topic_id != topic_id:
                raise ValueError("topic ids differ")
            return lsn, moved
        case Kind.STREAM_CHANGED:
            changed = _CHANGED_DECODER.decode(payload)
            if changed.topic_id != topic_id:
                raise ValueError("topic ids differ")
            return lsn, changed
        case Kind.ROUTER_PUT | Kind.ROUTER_DELETED:
            if topic_id != ROUTERS_ID:
                raise ValueError("not the id of the routers")
            return lsn, _decode_router(kind, payload)
        case Kind.SESSION_OPENED | Kind.SESSION_MOVED | Kind.SESSIONS_CLOSED:
            if topic_id != SESSIONS_ID:
                raise ValueError("not the id of the watch sessions")
            return lsn, _decode_session(kind, payload)
        case Kind.LEASES_GRANTED | Kind.LEASES_RELEASED | Kind.LEASES_EXTENDED:
            if topic_id != LEASES_ID:
                raise ValueError("not the id of the leases")
            return lsn, _decode_lease(kind, payload)
        case _:
            raise ValueError("kind is not known; was it written by a newer version?")


def _decode_session(kind: int, payload: bytes) -> SessionEntry:
    if kind == Kind.SESSION_OPENED:
        return _OPENED_DECODER.decode(payload)
    if kind == Kind.SESSION_MOVED:
        return _MOVED_DECODER.decode(payload)
    return _CLOSED_DECODER.decode(payload)


def _decode_lease(kind: int, payload: bytes) -> LeaseEntry:
    if kind == Kind.LEASES_GRANTED:
        return _GRANTED_DECODER.decode(payload)
    if kind == Kind.LEASES_RELEASED:
        return _RELEASED_DECODER.decode(payload)
    return _EXTENDED_DECODER.decode(payload)


def _decode_router(kind: int, payload: bytes) -> RouterEntry:
    if kind == Kind.ROUTER_PUT:
        return _ROUTER_DECODER.decode(payload)
    return _GONE_DECODER.decode(payload)
