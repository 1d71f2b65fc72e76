"""The body formats of an append: JSON records, stream bodies, router copies.

Grammars 1 and 2 are the append body of `appends`. A stream's request bodies are kept as they were
sent:

    3  one bytes record: its content type, a newline, the bytes
    4  JSON messages: an array, whose elements are the records, or one value that is no array
    5  columns: msgpack `[datas, metas, tags, nodes]`, for copies that no JSON body can carry
    6  an append body whose records have an idempotency key each: one line of JSON, the body
    7  columns as in 5, where a record may have a trace

In columns, a space before the object in `meta` marks a bytes record, and a tab marks a record with
a trace: its `traceparent` follows, then the rest of `meta`. No `meta` of a request begins with
either:

    b' {"$content_type":"image/png"}'
    TAB 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01{"k":1}

The line of grammar 6 is `[base, indexes]`. Record i of the body has the key `base:i`; `indexes` are
the records that the call appended, ascending, null for all. The body is the request's own.

The trace of a request is not in its body but in the frame (`with_trace`). Frames name the grammar,
so this module decodes bodies of every version. A leaf, pure; any module may import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import msgspec

from topics_server.values.appends import (
    GRAMMAR,
    DecodedAppend,
    batch_too_large,
    check_utf8,
    decode_append,
    not_json,
    of_columns,
)
from topics_server.values.blocks import BYTES_MARK, MARKS, TRACE_MARK, copy_in_steps
from topics_server.values.errors import invalid
from topics_server.values.json_shape import exceeds_depth, has_more_items
from topics_server.values.limits import (
    DELAY_MS_MAX,
    JSON_DEPTH_MAX,
    KIB,
    RECORD_FRAMING_BYTES,
    TRACE_BYTES,
    TRACEPARENT_BYTES,
)

BYTES_GRAMMAR: Final = 3
MESSAGES_GRAMMAR: Final = 4
COLUMNS_GRAMMAR: Final = 5
KEYED_GRAMMAR: Final = 6
TRACED_COLUMNS_GRAMMAR: Final = 7
NEWEST_GRAMMAR: Final = TRACED_COLUMNS_GRAMMAR

_Columns = tuple[list[bytes], list[bytes], list[str | None], list[str | None]]

_encode: Final = msgspec.msgpack.Encoder().encode
_encode_json: Final = msgspec.json.Encoder().encode
_COLUMNS_DECODER: Final = msgspec.msgpack.Decoder(_Columns)
_MESSAGES_DECODER: Final = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE_DECODER: Final = msgspec.json.Decoder(msgspec.Raw)
_META_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KEYED_LINE_DECODER: Final = msgspec.json.Decoder(tuple[str, list[int] | None])
_SPACES: Final = b" \t\r\n"
_COPIED_BYTES_MAX: Final = 64 * KIB


def decode_body(body: bytes, grammar: int, trace: bytes = b"") -> DecodedAppend:
    """Decode the records of a body with the grammar and the trace that its frame names.

    Raises `TopicsError` `invalid_request` for a body that does not follow that grammar.
    """
    if trace:
        return with_trace(decode_body(body, grammar), trace)
    if grammar <= GRAMMAR:
        return decode_append(body, grammar)
    if grammar == BYTES_GRAMMAR:
        return _decode_bytes(body)
    if grammar == MESSAGES_GRAMMAR:
        return decode_messages(body)
    if grammar == KEYED_GRAMMAR:
        return _decode_keyed(body)
    return _decode_columns(body)


def with_trace(decoded: DecodedAppend, trace: bytes) -> DecodedAppend:
    """The append with this `traceparent` in the `meta` of each record; unchanged without one."""
    if not trace:
        return decoded
    assert len(trace) == TRACEPARENT_BYTES
    mark, added = TRACE_MARK + trace, TRACE_BYTES * decoded.count
    return msgspec.structs.replace(
        decoded,
        metas=[mark + meta for meta in decoded.metas],
        weight=decoded.weight + added,
        payload_bytes=decoded.payload_bytes + added,
        has_metas=True,
        trace=trace,
        payloads=(),
    )


def decode_copies(body: bytes) -> DecodedAppend:
    """The records of a body that `body_of` made."""
    return decode_append(body) if body[:1] == b"{" else _decode_columns(body)


def deliver_times(
    body: bytes, decoded: DecodedAppend | None, grammar: int, ts: int
) -> list[tuple[int, int, bool]]:
    """The records of an append that become available later than its commit time `ts`.

    Returns (index, time in ms, whether the record names an absolute time). `decoded` is None in
    replay. Times are at most `DELAY_MS_MAX` after the commit.
    """
    if grammar not in (GRAMMAR, KEYED_GRAMMAR):
        return []
    delays = (decoded or decode_body(body, grammar)).delays
    times = ((index, ms if is_time else ts + ms, is_time) for index, ms, is_time in delays)
    latest = ts + DELAY_MS_MAX
    return [(index, min(at_ms, latest), is_time) for index, at_ms, is_time in times if at_ms > ts]


# -- bytes -----------------------------------------------------------------------------------------


def bytes_body(content_type: str, data: bytes) -> bytes:
    """The body of an append of one bytes record; the content type is ASCII without a newline."""
    # Joining releases the interpreter's lock; formatting does not.
    return b"\n".join((content_type.encode("ascii"), data))


def decode_bytes(content_type: str, data: bytes) -> DecodedAppend:
    """Make the append of one bytes record; as an append to a stream it creates no topic."""
    meta, size = bytes_meta(content_type), len(data)
    payload_bytes = size + len(meta)
    return DecodedAppend(
        [data],
        [meta],
        [None],
        [None],
        1,
        RECORD_FRAMING_BYTES + payload_bytes,
        size,
        payload_bytes,
        0,
        0,
        has_metas=True,
        create=False,
        form=BYTES_GRAMMAR,
    )


def _decode_bytes(body: bytes) -> DecodedAppend:
    newline = body.find(b"\n")
    if newline < 0:
        raise invalid("bytes without their content type")
    content_type = body[:newline]
    if not content_type.isascii():
        raise invalid("a content type is not ASCII")
    data = copy_in_steps(body, newline + 1, len(body))
    return decode_bytes(content_type.decode("ascii"), data)


@lru_cache(maxsize=256)
def bytes_meta(content_type: str) -> bytes:
    """The `meta` of a bytes record with this content type."""
    return BYTES_MARK + b'{"$content_type":' + _encode_json(content_type) + b"}"


def split_bytes_meta(meta: bytes) -> tuple[str, bytes]:
    """The content type of a bytes record and the rest of its `meta`; empty if there is none."""
    members = _META_DECODER.decode(meta)
    content_type = msgspec.json.decode(members.pop("$content_type"), type=str)
    return content_type, _encode_json(members) if members else b""


# -- messages --------------------------------------------------------------------------------------


def decode_messages(body: bytes, max_records: int | None = None) -> DecodedAppend:
    """The JSON messages of a body: one level of an array is removed; the array may be empty.

    `max_records`: refuse a body with more messages before any message is built. Raises
    `batch_too_large`, and `invalid_request` for bad UTF-8, syntax or depth.
    """
    check_utf8(body)
    try:
        if body.lstrip(_SPACES)[:1] == b"[":
            if max_records is not None and body.count(b",") >= max_records:
                whole = _VALUE_DECODER.decode(body)
                if has_more_items(whole, max_records):
                    raise batch_too_large(max_records)
            found = _MESSAGES_DECODER.decode(body)
            # The messages of a large body stay views, because they are nearly the whole body.
            is_large = len(body) > _COPIED_BYTES_MAX
            datas: list[bytes] = [raw if is_large else bytes(raw) for raw in found]
        else:
            _VALUE_DECODER.decode(body)
            datas = [body.strip(_SPACES)]
    except msgspec.DecodeError as error:
        raise not_json(error, body) from None
    except RecursionError:
        raise invalid(f"JSON is nested deeper than {JSON_DEPTH_MAX} levels") from None
    sizes = list(map(len, datas))
    count, payload_bytes, longest_bytes = len(datas), sum(sizes), max(sizes, default=0)
    if longest_bytes > 2 * JSON_DEPTH_MAX and any(
        len(data) > 2 * JSON_DEPTH_MAX and exceeds_depth(data) for data in datas
    ):
        raise invalid(f"JSON is nested deeper than {JSON_DEPTH_MAX} levels")
    return DecodedAppend(
        datas,
        [b""] * count,
        [None] * count,
        [None] * count,
        count,
        RECORD_FRAMING_BYTES * count + payload_bytes,
        longest_bytes,
        payload_bytes,
        0,
        0,
        create=False,
        form=MESSAGES_GRAMMAR,
    )


# -- records with keys -----------------------------------------------------------------------------


def keyed_body(base: str, indexes: Sequence[int] | None, body: bytes) -> bytes:
    """The body of an append of these records of a request; `indexes` is None for all of them."""
    return b"%b\n%b" % (_encode_json((base, indexes)), body)


def record_keys(base: str, indexes: Iterable[int]) -> tuple[str, ...]:
    """The keys of these records of a request."""
    return tuple(f"{base}:{index}" for index in indexes)


def with_record_keys(
    decoded: DecodedAppend, base: str, indexes: Sequence[int] | None
) -> DecodedAppend:
    """Make the append of these records, each with its key; None for `indexes`: all records."""
    keys = record_keys(base, range(decoded.count) if indexes is None else indexes)
    if indexes is not None:
        place = {index: at for at, index in enumerate(indexes)}
        chosen = of_columns(
            # Copy the records: a few of them must not keep a large body in memory.
            [bytes(decoded.datas[index]) for index in indexes],
            [decoded.metas[index] for index in indexes],
            [decoded.tags[index] for index in indexes],
            [decoded.nodes[index] for index in indexes],
            delays=tuple(
                (place[index], ms, is_time)
                for index, ms, is_time in decoded.delays
                if index in place
            ),
        )
        decoded = msgspec.structs.replace(
            chosen,
            batch_node=decoded.batch_node,
            create=decoded.create,
            disable_backpressure=decoded.disable_backpressure,
            trace=decoded.trace,
        )
    return msgspec.structs.replace(
        decoded, form=KEYED_GRAMMAR, idempotency_key=None, record_keys=keys
    )


def _decode_keyed(body: bytes) -> DecodedAppend:
    line, newline, sent = body.partition(b"\n")
    try:
        base, indexes = _KEYED_LINE_DECODER.decode(line)
    except msgspec.DecodeError as error:
        raise invalid(f"not the keys of records: {error}") from None
    decoded = decode_append(sent)
    if not newline or (indexes is not None and not _ascend_below(indexes, decoded.count)):
        raise invalid("the keys of records do not match their body")
    return with_record_keys(decoded, base, indexes)


def _ascend_below(indexes: Sequence[int], count: int) -> bool:
    ascends = all(first < second for first, second in pairwise(indexes))
    return bool(indexes) and ascends and indexes[0] >= 0 and indexes[-1] < count


# -- copies ----------------------------------------------------------------------------------------


def body_of(decoded: DecodedAppend) -> bytes:
    """The body of an append of these records, for a frame: JSON, or columns.

    `with_grammar(decoded)` sets the matching grammar.
    """
    if _columns_form(decoded):
        return _encode(
            (
                [bytes(data) for data in decoded.datas],
                [bytes(meta) for meta in decoded.metas],
                decoded.tags,
                decoded.nodes,
            )
        )
    records: list[bytes] = []
    for data, meta, tag, node in zip(
        decoded.datas, decoded.metas, decoded.tags, decoded.nodes, strict=True
    ):
        record = b'{"data":' + data
        if meta:
            record += b',"meta":' + meta
        if tag is not None:
            record += b',"tag":' + _encode_json(tag)
        if node is not None:
            record += b',"node":' + _encode_json(node)
        records.append(record + b"}")
    return b'{"records":[' + b",".join(records) + b"]}"


def with_grammar(decoded: DecodedAppend) -> DecodedAppend:
    """The records of a copy, marked with the grammar of the body that `body_of` makes."""
    form = _columns_form(decoded)
    return decoded if decoded.form == form else msgspec.structs.replace(decoded, form=form)


def _columns_form(decoded: DecodedAppend) -> int:
    """The column grammar that these records need; 0 if a JSON body can hold them."""
    if not decoded.has_metas:
        return 0
    marks = {meta[:1] for meta in decoded.metas} & MARKS
    if TRACE_MARK in marks:
        return TRACED_COLUMNS_GRAMMAR
    return COLUMNS_GRAMMAR if marks else 0


def _decode_columns(body: bytes) -> DecodedAppend:
    try:
        columns = _COLUMNS_DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise invalid(f"not the columns of an append: {error}") from None
    if len(set(map(len, columns))) != 1:
        raise invalid("columns of an append differ in length")
    decoded = of_columns(*columns)
    return msgspec.structs.replace(decoded, form=_columns_form(decoded) or COLUMNS_GRAMMAR)
