"""The bytes of one journal frame: entry to frame and back.

`docs/FORMATS.md` shows the full layout. Little-endian.

    frame, 44 bytes + payload
    +0  u32 length    +4 u8 kind   +5 u8 format   +6 u16 extra length
    +8  u64 lsn       +16 u64 topic id   +24 u64 first seq   +32 i64 ts   +40 u32 count
    +44 extra (msgpack, `RecordsAppended` only), payload

An entry that belongs to no topic has a reserved id as its topic id (`entries.RESERVED_ID_MIN`).

The meaning of a kind or format never changes. Frames are read only inside a group whose checksum
holds (`groups`), so an unreadable frame was made by another program: `Corrupt`, never torn. A copy
of the journal keeps the raw bytes of frames (`raw_frames`). Called by `wal_writer` (encode) and
`groups` (decode).
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

import msgspec

from topics_server.values.appends import PLAIN_GRAMMAR
from topics_server.values.blocks import copy_in_steps
from topics_server.values.entries import (
    ConsumerDeleted,
    ConsumerMoved,
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
    ViewDeleted,
    ViewEntry,
    ViewPut,
)
from topics_server.values.errors import Corrupt
from topics_server.values.limits import FRAME_BYTES_MAX, KIB, TRACEPARENT_BYTES
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
_TRACED_FORMAT: Final = 6
_APPEND_FORMATS: Final = range(_FORMAT, _TRACED_FORMAT + 1)
# A body smaller than this is copied behind its header: cheaper than one more buffer in `writev`.
_COPY_BYTES_MAX: Final = 4096
# A frame longer than this is a view of the buffer that it was read into.
_RAW_BYTES_MAX: Final = 64 * KIB

assert _FRAME.size == FRAME_HEADER_BYTES
assert FRAME_BYTES_MAX < 2**32


class Kind(enum.IntEnum):
    """The kind of a frame; 0 is preallocated space and never valid."""

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
    VIEW_PUT = 19
    VIEW_DELETED = 20
    CONSUMER_MOVED = 21
    CONSUMER_DELETED = 22


class Opening(NamedTuple):
    """First frame of a file: the previous file, that file's end, and the last lsn of the shard.

    All three are 0 in the first file of a shard.
    """

    previous_number: int
    previous_end: int
    previous_lsn: int


class RawFrame(msgspec.Struct, frozen=True, gc=False):
    """The raw bytes of a frame, and the facts that a copy of the journal needs.

    `last_seq`: the highest seq that it assigns or reserves, 0 for none. `creation`: the topic that
    it makes or changes.
    """

    lsn: int
    topic_id: int
    last_seq: int
    creation: TopicPut | None
    content: bytes | memoryview


_FORMATS_OF: Final[dict[int, range]] = {
    kind.value: _APPEND_FORMATS if kind is Kind.RECORDS_APPENDED else range(_FORMAT, _FORMAT + 1)
    for kind in Kind
}

WholeEntry = (
    TopicPut
    | ProducerMoved
    | StreamChanged
    | ConsumerMoved
    | ConsumerDeleted
    | SessionEntry
    | LeaseEntry
    | RouterEntry
    | ViewEntry
)


class _ExtraStart(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of an append's extra, in all formats."""

    header_key: str | None
    creation: TopicPut | None


class _AppendExtra(msgspec.Struct, frozen=True, array_like=True):
    """Extra of format 1: the plain append."""

    header_key: str | None
    creation: TopicPut | None
    floor: Floor | None
    grammar: int


class _SourcedExtra(_AppendExtra, frozen=True, array_like=True):
    """Extra of format 2: record grammars after the first one, and moved records."""

    source: Source | None


class _RoutedExtra(_SourcedExtra, frozen=True, array_like=True):
    """Extra of format 3: appends of routers."""

    page: RouterPage


class _ProducedExtra(_SourcedExtra, frozen=True, array_like=True):
    """Extra of format 4: requests of producers."""

    producer: ProducerStamp


class _SteppedExtra(_SourcedExtra, frozen=True, array_like=True):
    """Extra of format 5: appends that change a stream."""

    producer: ProducerStamp | None
    step: StreamStep


class _TracedExtra(_SourcedExtra, frozen=True, array_like=True):
    """Extra of format 6: requests with a trace."""

    producer: ProducerStamp | None
    step: StreamStep | None
    trace: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_START_DECODER: Final = msgspec.msgpack.Decoder(_ExtraStart)
_PUT_DECODER: Final = msgspec.msgpack.Decoder(TopicPut)
_EXTRA_DECODER: Final = msgspec.msgpack.Decoder(_AppendExtra)
_SOURCED_DECODER: Final = msgspec.msgpack.Decoder(_SourcedExtra)
_ROUTED_DECODER: Final = msgspec.msgpack.Decoder(_RoutedExtra)
_PRODUCED_DECODER: Final = msgspec.msgpack.Decoder(_ProducedExtra)
_STEPPED_DECODER: Final = msgspec.msgpack.Decoder(_SteppedExtra)
_TRACED_DECODER: Final = msgspec.msgpack.Decoder(_TracedExtra)
_FLOOR_DECODER: Final = msgspec.msgpack.Decoder(Floor)
# Entries whose payload is the whole struct as MessagePack. The frame's header repeats the topic's
# id.
_WHOLE: Final[dict[Kind, type[WholeEntry]]] = {
    Kind.TOPIC_PUT: TopicPut,
    Kind.PRODUCER_MOVED: ProducerMoved,
    Kind.STREAM_CHANGED: StreamChanged,
    Kind.SESSION_OPENED: SessionOpened,
    Kind.SESSION_MOVED: SessionMoved,
    Kind.SESSIONS_CLOSED: SessionsClosed,
    Kind.LEASES_GRANTED: LeasesGranted,
    Kind.LEASES_RELEASED: LeasesReleased,
    Kind.LEASES_EXTENDED: LeasesExtended,
    Kind.ROUTER_PUT: RouterPut,
    Kind.ROUTER_DELETED: RouterDeleted,
    Kind.VIEW_PUT: ViewPut,
    Kind.VIEW_DELETED: ViewDeleted,
    Kind.CONSUMER_MOVED: ConsumerMoved,
    Kind.CONSUMER_DELETED: ConsumerDeleted,
}
_KIND_OF: Final = {entry_type: kind for kind, entry_type in _WHOLE.items()}
_WHOLE_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[WholeEntry]]] = {
    kind.value: msgspec.msgpack.Decoder(entry_type) for kind, entry_type in _WHOLE.items()
}
_PLAIN: Final = _AppendExtra(None, None, None, 1)
_NOTHING_ASKED: Final = (None, None, None, 1)
_NO_MORE: Final = (None, None, None, None, b"")
# The bytes before the producer in an extra of which all other fields are absent.
_ONLY_PRODUCED: Final = _encode((*_NOTHING_ASKED, None, None))[:-1]
# The bytes after an extra's first byte if it has no header key and no creation.
_NO_CREATION: Final = _encode((None, None))[1:]


def encode_entry(lsn: int, entry: Entry) -> list[bytes]:
    """One frame as buffers that follow each other; a large body is referenced, not copied."""
    assert lsn > 0
    topic_id = entry.topic_id
    ts = first_seq = count = 0
    payload = b""
    if isinstance(entry, RecordsAppended):
        form, extra, body = _FORMAT, b"", entry.body
        asked = (entry.header_key, entry.creation, entry.floor, entry.grammar)
        more = (entry.source, entry.producer, entry.page, entry.step, entry.trace)
        if asked != _NOTHING_ASKED or more != _NO_MORE:
            form, extra = _extra_of(entry, asked)
        length = FRAME_HEADER_BYTES + len(extra) + len(body)
        assert length <= FRAME_BYTES_MAX
        head = _FRAME.pack(
            length,
            4,  # Kind.RECORDS_APPENDED; an enum member costs a lookup on the hottest path
            form,
            len(extra),
            lsn,
            topic_id,
            entry.first_seq,
            entry.ts,
            entry.count,
        )
        return [head + extra + body] if len(body) <= _COPY_BYTES_MAX else [head + extra, body]
    kind: int
    match entry:
        case RecordsDeleted():
            firsts, lasts = entry.firsts, entry.lasts
            count, rest = divmod(len(firsts), 8)
            assert len(lasts) == len(firsts)
            assert not rest
            # Kind.RECORDS_DELETED; see above.
            kind, ts, payload = 5, entry.ts, firsts + lasts
        case TopicDropped():
            kind, ts, payload = Kind.TOPIC_DROPPED, entry.ts, entry.name.encode()
        case FloorMoved():
            kind, ts, payload = Kind.FLOOR_MOVED, entry.ts, _encode(entry.floor)
        case HeadReserved():
            kind, first_seq = Kind.HEAD_RESERVED, entry.ceiling_seq
        case CursorMoved():
            kind, first_seq = Kind.CURSOR_MOVED, entry.cursor_seq
            payload = entry.router_id.to_bytes(8, "little")
        case _:
            kind, ts, payload = _KIND_OF[type(entry)], entry.ts, _encode(entry)
    length = FRAME_HEADER_BYTES + len(payload)
    assert length <= FRAME_BYTES_MAX
    head = _FRAME.pack(length, kind, _FORMAT, 0, lsn, topic_id, first_seq, ts, count)
    return [head + payload]


def _extra_of(
    entry: RecordsAppended, asked: tuple[str | None, TopicPut | None, Floor | None, int]
) -> tuple[int, bytes]:
    """The format of an append's frame and its extra: as the structs above, field by field."""
    source, producer = entry.source, entry.producer
    if entry.trace:
        assert entry.page is None, "copies have their traces in the body"
        extra = _encode((*asked, source, producer, entry.step, entry.trace))
        assert len(extra) < 2**16
        return _TRACED_FORMAT, extra
    if asked == _NOTHING_ASKED and source is None and entry.page is None and entry.step is None:
        assert producer is not None, "a plain append has no extra"
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


def encode_opening(opening: Opening) -> bytes:
    """The frame that says which file this one continues."""
    length = FRAME_HEADER_BYTES + _OPENING.size
    head = _FRAME.pack(length, Kind.OPENING, _FORMAT, 0, opening.previous_lsn, 0, 0, 0, 0)
    return head + _OPENING.pack(opening.previous_number, opening.previous_end)


def decode_frames(
    buffer: bytes, offset: int, end: int, count: int, position: int
) -> tuple[Opening | None, list[tuple[int, Entry]]]:
    """The `count` frames in `buffer[offset:end]`, of the group at file position `position`.

    Raises `Corrupt` for an unreadable frame.
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
    if end - offset >= 8:  # the padding of a group is shorter
        raise Corrupt(f"{end - offset} bytes behind the frames of the group at {position}")
    return opening, entries


def raw_frames(buffer: bytes, offset: int, end: int, count: int, position: int) -> list[RawFrame]:
    """The raw bytes of these frames, without an opening; decodes only what makes or changes topics.

    Raises `Corrupt`.
    """
    found: list[RawFrame] = []
    for _ in range(count):
        if end - offset < FRAME_HEADER_BYTES:
            raise Corrupt(f"frames run past their group at {position}")
        length, kind, form, extra_length, lsn, topic_id, first_seq, _, records = _FRAME.unpack_from(
            buffer, offset
        )
        if not FRAME_HEADER_BYTES <= length <= end - offset:
            raise Corrupt(f"frame of {length} bytes in the group at {position}")
        start = offset
        offset += length
        if form not in _FORMATS_OF.get(kind, ()):
            raise Corrupt(f"frame of kind {kind}, format {form} at {position}: not known")
        if FRAME_HEADER_BYTES + extra_length > length or (lsn == 0 and kind != Kind.OPENING):
            raise Corrupt(f"frame of kind {kind} at {position}: impossible frame header")
        last_seq, creation = 0, None
        if kind == 4:  # Kind.RECORDS_APPENDED; see `encode_entry`
            last_seq = first_seq + records - 1
            if extra_length:
                creation = _creation_of(buffer, start + FRAME_HEADER_BYTES, extra_length, position)
        elif kind == Kind.OPENING:
            continue
        elif kind == Kind.HEAD_RESERVED:
            last_seq = first_seq
        elif kind == Kind.TOPIC_PUT:
            try:
                creation = _PUT_DECODER.decode(buffer[start + FRAME_HEADER_BYTES : offset])
            except msgspec.MsgspecError as error:
                raise Corrupt(f"frame of kind {kind} at {position}: {error}") from error
        content: bytes | memoryview
        if length <= _RAW_BYTES_MAX:
            content = buffer[start:offset]
        else:
            content = memoryview(buffer)[start:offset]
        found.append(RawFrame(lsn, topic_id, last_seq, creation, content))
    if end - offset >= 8:  # the padding of a group is shorter
        raise Corrupt(f"{end - offset} bytes behind the frames of the group at {position}")
    return found


def _creation_of(buffer: bytes, at: int, length: int, position: int) -> TopicPut | None:
    """The topic that an append creates, from the append's extra; None if there is none."""
    if buffer[at + 1 : at + 1 + len(_NO_CREATION)] == _NO_CREATION:
        return None
    try:
        return _START_DECODER.decode(buffer[at : at + length]).creation
    except msgspec.MsgspecError as error:
        raise Corrupt(f"an append at {position}: {error}") from error


def lsns_below(
    buffer: bytes, offset: int, end: int, count: int, from_lsn: int
) -> tuple[int, int] | None:
    """The first and the last lsn of the `count` frames in `buffer[offset:end]`.

    None if they are not all below `from_lsn`, if one of them is an opening, or if the frames are
    invalid: then `decode_frames` raises the error.
    """
    first = last = 0
    for _ in range(count):
        if end - offset < FRAME_HEADER_BYTES:
            return None
        length, kind, _, _, lsn, *_ = _FRAME.unpack_from(buffer, offset)
        if not FRAME_HEADER_BYTES <= length <= end - offset or kind == Kind.OPENING:
            return None
        if not last < lsn < from_lsn:
            return None
        first, last = first or lsn, lsn
        offset += length
    return (first, last) if last and end - offset < 8 else None


def _decode_opening(fields: tuple[int, ...], frame: bytes, position: int) -> Opening:
    if len(frame) != FRAME_HEADER_BYTES + _OPENING.size or fields[2] != _FORMAT:
        raise Corrupt(f"opening frame of the group at {position}")
    number, end = _OPENING.unpack_from(frame, FRAME_HEADER_BYTES)
    return Opening(number, end, fields[4])


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
        trace = b""
        if form == _ROUTED_FORMAT:
            extra = routed = _ROUTED_DECODER.decode(buffer[start:body_start])
            source, page = routed.source, routed.page
        elif form == _PRODUCED_FORMAT:
            extra = produced = _PRODUCED_DECODER.decode(buffer[start:body_start])
            source, producer = produced.source, produced.producer
        elif form == _STEPPED_FORMAT:
            extra = stepped = _STEPPED_DECODER.decode(buffer[start:body_start])
            source, producer, step = stepped.source, stepped.producer, stepped.step
        elif form == _TRACED_FORMAT:
            extra = traced = _TRACED_DECODER.decode(buffer[start:body_start])
            source, producer, step = traced.source, traced.producer, traced.step
            trace = traced.trace
            if len(trace) != TRACEPARENT_BYTES:
                raise ValueError(f"a trace of {len(trace)} bytes")
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
            copy_in_steps(buffer, body_start, end),
            extra.header_key,
            extra.creation,
            extra.floor,
            extra.grammar,
            source=source,
            page=page,
            producer=producer,
            step=step,
            trace=trace,
        )
    payload = buffer[start:end]
    if (decoder := _WHOLE_DECODERS.get(kind)) is not None:
        entry = decoder.decode(payload)
        if entry.topic_id != topic_id:
            raise ValueError("topic ids differ")
        return lsn, entry
    match kind:
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
        case _:
            raise ValueError("kind is not known; was it written by a newer version?")
