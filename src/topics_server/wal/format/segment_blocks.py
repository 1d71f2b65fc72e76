"""Makes blocks and JSON objects from the bytes of a segment: `.data` and its index. Pure.

`unpack_block` makes pages of sealed records, so it consists of a few C loops: about 1 us a record.
`unpack_row` and `unpack_rows` are for pages of few, scattered records. `wal/segments/packing` is
the inverse.

The server verifies an `.idx` when it starts, and maps it again later. In a segment with JSON
objects each read checks the rows of the index that it uses, by groups, and the names if it needs
them, and raises `Corrupt` if one was damaged meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Final

import msgspec
import numpy as np
import xxhash

from topics_server.values.blocks import Block
from topics_server.values.columns.cutting import can_cut, cut, texts_of
from topics_server.values.columns.json_rows import DATA, META, TAGS, JsonBlock
from topics_server.values.errors import Corrupt, Damaged
from topics_server.wal.format.json_objects import (
    GROUP_RECORDS,
    MEMBER_BYTES,
    group_sums,
)
from topics_server.wal.format.segment import (
    ABSENT,
    RECORD_HEADER_BYTES,
    Array,
    Buffer,
    Dictionary,
    SegmentColumns,
    outside,
    ranges_of,
)

# A row of the index, and the position of the offset in it.
_RowFields = tuple[int, ...]
_OFFSET: Final = 2
# Rows that lie together within this many bytes are read in one call.
_READ_AS_ONE_BYTES: Final = 65_536
# A name is decoded once for all its rows if the names have as many rows on average.
_ROWS_OF_A_NAME: Final = 4
_NO_ROWS: Final = np.zeros(0, "<i8")
_encode: Final = msgspec.json.Encoder().encode


def unpack_block(
    data: Buffer,
    columns: SegmentColumns,
    first_row: int,
    end_row: int,
    unwanted: Sequence[tuple[int, int]] = (),
) -> Block:
    """Rows `first_row..end_row - 1` from exactly their range of `.data`; verifies each checksum.

    Raises `Damaged` with the rows that fail, and `Corrupt` for a damaged index. Rows in `unwanted`
    ranges (first, last) become blank.
    """
    assert 0 <= first_row < end_row <= columns.record_count
    columns.check_rows(range(first_row, end_row))
    rows = columns.rows[first_row:end_row]
    base = int(rows["offset"][0])
    starts = rows["offset"].astype("<i8") - base
    stops = np.append(starts[1:], columns.record_end(end_row - 1) - base)
    datas, metas = columns.payloads(rows, starts, stops)
    data_ends, meta_ends = datas + rows["data_bytes"], metas + rows["meta_bytes"]

    raw = bytes(data)
    wrong = _wrong_rows(raw, columns, range(first_row, end_row), rows, starts, stops)
    if len(wrong):
        bad = outside(wrong + first_row, unwanted)
        if len(bad):
            raise Damaged(*ranges_of(bad))
        rows = rows.copy()
        rows["tag_id"][wrong] = rows["node_id"][wrong] = ABSENT
        data_ends[wrong] = metas[wrong] = meta_ends[wrong] = datas[wrong]

    times, block_ends = array("q"), array("I")
    times.frombytes(rows["ts"].tobytes())
    lengths = np.empty(2 * len(rows), "<i8")
    lengths[::2], lengths[1::2] = data_ends - datas, meta_ends - metas
    block_ends.frombytes(np.cumsum(lengths).astype("<u4").tobytes())
    try:
        if columns.is_json:
            columns.check_names()
            tags = _names_by_number(columns.tags, rows["tag_id"])
            nodes = _names_by_number(columns.nodes, rows["node_id"])
            body = b"".join(_payloads(raw, (datas, data_ends), (metas, meta_ends)))
        else:
            at = starts + RECORD_HEADER_BYTES
            nodes = _names_of(raw, rows["node_id"], at, rows["node_bytes"], len(columns.nodes))
            at = at + rows["node_bytes"]
            tags = _names_of(raw, rows["tag_id"], at, rows["tag_bytes"], len(columns.tags))
            body = b"".join(_pieces(raw, datas, meta_ends))
    except UnicodeDecodeError:
        raise Corrupt(f"the index of segment {columns.segment_id} is damaged") from None
    return Block(
        first_seq=columns.first_seq + first_row,
        times=times,
        ends=block_ends,
        body=body,
        tags=tags,
        nodes=nodes,
        kinds=rows["kind"].tobytes(),
        hops=rows["hop"].tobytes(),
    )


def _wrong_rows(
    raw: bytes, columns: SegmentColumns, span: range, rows: Array, starts: Array, stops: Array
) -> Array:
    """The places of the rows whose record fails its checksum."""
    if columns.is_json and columns.are_groups(span):
        end = columns.record_end(span.stop - 1)
        if _has_sound_groups(raw, columns, span, rows["offset"], end):
            return _NO_ROWS
    found = b"".join(map(xxhash.xxh3_64_digest, _pieces(raw, starts, stops - columns.tail_bytes)))
    # A digest has its highest byte first.
    expected = rows["xxh3"].astype(">u8")
    if found == expected.tobytes():
        return _NO_ROWS
    return np.flatnonzero(np.frombuffer(found, ">u8") != expected)


def unpack_json(
    data: bytes | memoryview, columns: SegmentColumns, rows: range, shown: int
) -> JsonBlock | None:
    """The objects of these rows, from exactly their range of `.data`.

    `shown`: their members, see `json_rows`. None if a checksum fails, or if tags are added and
    `meta` is removed. The segment has JSON objects, and the range is one of whole groups. Raises
    `Corrupt` for a damaged index.
    """
    assert shown & DATA
    columns.check_rows(rows)
    part = columns.rows[rows.start : rows.stop]
    starts = part["offset"]
    base, end = columns.span(rows.start, rows.stop)
    size = end - base
    if len(data) != size:
        return None
    # Copied before the objects are hashed, while the processor's cache still has the rows; of the
    # type of `starts`, because numpy needs more time to subtract another type.
    bounds = np.empty(len(starts) + 1, "<u4")
    np.subtract(starts, np.uint32(base), bounds[:-1])
    bounds[-1] = size
    if not _has_sound_groups(data, columns, rows, bounds[:-1], size):
        return None
    has_tags = shown & TAGS and int(part["tag_id"].min()) != ABSENT
    has_metas = not shown & META and part["meta_bytes"].any()
    if has_tags and has_metas:
        return None
    if has_tags:
        data, bounds = _with_tags(bytes(data), columns, part, bounds.astype("<i8"))
    elif has_metas:
        data, bounds = _without_metas(bytes(data), columns, part, bounds.astype("<i8"))
    offsets = array("I")
    offsets.frombytes(bounds.astype("<u4", copy=False).tobytes())
    return JsonBlock(data, offsets)


def _has_sound_groups(
    data: bytes | memoryview, columns: SegmentColumns, span: range, offsets: Array, end: int
) -> bool:
    """Whether these groups have their checksums.

    `offsets`, `end`: where records begin, and where the last one ends, from any place on.
    """
    assert columns.is_json
    assert columns.are_groups(span)
    found = group_sums(data, offsets, end)
    first = span.start // GROUP_RECORDS
    expected: list[int] = columns.sums[first : first + len(found)].tolist()
    return found == expected


def _with_tags(
    data: bytes, columns: SegmentColumns, rows: Array, bounds: Array
) -> tuple[bytes, Array]:
    """The objects with the member `$tag` before `data`, and their bounds."""
    datas, _ = columns.payloads(rows, bounds[:-1], bounds[1:])
    at = datas - MEMBER_BYTES
    columns.check_names()
    names = _names_by_number(columns.tags, rows["tag_id"])
    members = {name: b"" if name is None else b',"$tag":%b' % _encode(name) for name in set(names)}
    tags = list(map(members.__getitem__, names))
    texts = _pieces(data, np.append(0, at), np.append(at, len(data)))
    made = b"".join(chain.from_iterable(zip(texts, tags, strict=False)))
    lengths = np.fromiter(map(len, tags), "<i8", len(tags))
    return made + texts[-1], bounds + np.append(0, np.cumsum(lengths))


def _without_metas(
    data: bytes, columns: SegmentColumns, rows: Array, bounds: Array
) -> tuple[bytes, Array]:
    """The objects without the member `meta`, and their bounds."""
    _, metas = columns.payloads(rows, bounds[:-1], bounds[1:])
    ends = bounds[1:] - 2
    starts = np.where(rows["meta_bytes"] != 0, metas - MEMBER_BYTES, ends)
    made = b"".join(_pieces(data, np.append(0, ends), np.append(starts, len(data))))
    return made, bounds - np.append(0, np.cumsum(ends - starts))


def unpack_row(
    data: bytes,
    columns: SegmentColumns,
    row: int,
    unwanted: Sequence[tuple[int, int]] = (),
) -> Block:
    """`unpack_block` of one row, at a tenth of the cost: no pass over columns."""
    columns.check_rows(range(row, row + 1))
    if columns.is_json:
        # In other segments the names are read from the record.
        columns.check_names()
    block = _row_block(
        data[: len(data) - columns.tail_bytes], columns, row, columns.rows[row].item()
    )
    return unpack_block(data, columns, row, row + 1, unwanted) if block is None else block


def unpack_rows(
    read: Callable[[int, int], bytes], columns: SegmentColumns, rows: Sequence[int], max_bytes: int
) -> list[Block]:
    """These rows, each as a block; stops after the row with which `max_bytes` are reached.

    The rows ascend or descend. `read(size, offset)` returns bytes of `.data`. Raises `Damaged` with
    the first row that fails its check, `Corrupt` for a damaged index.
    """
    for group in {at // GROUP_RECORDS for row in rows for at in (row, row + 1)}:
        at = min(group * GROUP_RECORDS, columns.record_count - 1)
        columns.check_rows(range(at, at))
    if columns.is_json:
        columns.check_names()
    every = columns.rows[rows].tolist()
    starts = [fields[_OFFSET] for fields in every]
    ends = [columns.record_end(row) - columns.tail_bytes for row in rows]
    start, end = min(starts[0], starts[-1]), max(ends[0], ends[-1])
    near = read(end - start, start) if 0 < end - start <= _READ_AS_ONE_BYTES else None
    found: list[Block] = []
    for row, fields, offset, stop in zip(rows, every, starts, ends, strict=True):
        block = None
        if offset < stop <= columns.records_end:
            if near is None:
                data = read(stop - offset, offset)
            else:
                data = near[offset - start : stop - start]
            block = _row_block(data, columns, row, fields)
        if block is None:
            raise Damaged((row, row))
        found.append(block)
        max_bytes -= len(block.body)
        if max_bytes <= 0:
            break
    return found


def _row_block(data: bytes, columns: SegmentColumns, row: int, fields: _RowFields) -> Block | None:
    """The block of one record, from exactly its bytes; None for a failed checksum or a bad name."""
    ts, checksum, _, data_bytes, meta_bytes, _, tag_id, node_id = fields[:8]
    tag_bytes, node_bytes, kind, hop = fields[8:12]
    if xxhash.xxh3_64_intdigest(data) != checksum:
        return None
    try:
        if columns.is_json:
            tag, node = _name(columns.tags, tag_id), _name(columns.nodes, node_id)
        else:
            tag_start = RECORD_HEADER_BYTES + node_bytes
            start = tag_start + tag_bytes
            tag = None if tag_id == ABSENT else str(data[tag_start:start], "utf-8")
            node = None if node_id == ABSENT else str(data[RECORD_HEADER_BYTES:tag_start], "utf-8")
            body = data[start:]
    except (IndexError, UnicodeDecodeError):
        return None
    if columns.is_json:
        meta_start = len(data) - 2 - meta_bytes
        data_end = meta_start - (MEMBER_BYTES if meta_bytes else 0)
        body = data[data_end - data_bytes : data_end] + data[meta_start : meta_start + meta_bytes]
    return Block(
        first_seq=columns.first_seq + row,
        times=array("q", (ts,)),
        ends=array("I", (data_bytes, data_bytes + meta_bytes)),
        body=body,
        tags=[tag],
        nodes=[node],
        kinds=bytes((kind,)),
        hops=bytes((hop,)),
    )


def _pieces(raw: bytes, starts: Array, ends: Array) -> Sequence[bytes]:
    """The bytes of each range; ranges of a damaged index may lie anywhere."""
    if can_cut(raw, starts, ends):
        return cut(raw, starts, ends)
    return list(map(raw.__getitem__, map(slice, starts.tolist(), ends.tolist())))


def _payloads(
    raw: bytes, datas: tuple[Array, Array], metas: tuple[Array, Array]
) -> Sequence[bytes]:
    """`data` and `meta` of each row, from the starts and the ends of both."""
    if np.array_equal(*metas):
        return _pieces(raw, *datas)
    starts = np.column_stack((datas[0], metas[0])).ravel()
    return _pieces(raw, starts, np.column_stack((datas[1], metas[1])).ravel())


def _name(names: Dictionary, number: int) -> str | None:
    return None if number == ABSENT else str(names[number], "utf-8")


def _names_by_number(names: Dictionary, ids: Array) -> list[str | None]:
    """The tags or nodes of the rows, from the index."""
    numbers: list[int] = ids.tolist()
    distinct = sorted(set(numbers))
    texts: dict[int, str | None] = {ABSENT: None}
    if distinct[-1] == ABSENT:
        distinct.pop()
    if distinct:
        try:
            texts.update(zip(distinct, _texts_of(names, distinct), strict=True))
        except (IndexError, UnicodeDecodeError):
            raise Corrupt("the names in the index of a segment are damaged") from None
    return list(map(texts.__getitem__, numbers))


def _texts_of(names: Dictionary, numbers: list[int]) -> list[str]:
    """The names of ascending numbers; those that lie near each other are decoded together."""
    at = np.array(numbers)
    starts, ends = names.offsets[at].astype("<i8"), names.offsets[at + 1].astype("<i8")
    first, last = int(starts[0]), int(ends[-1])
    if last - first > _READ_AS_ONE_BYTES:
        return [str(names[number], "utf-8") for number in numbers]
    return texts_of(_pieces(bytes(names.text[first:last]), starts - first, ends - first))


def _names_of(
    raw: bytes, ids: Array, starts: Array, lengths: Array, distinct: int
) -> list[str | None]:
    """The tags or nodes of the rows, from the records. The segment has `distinct` of them."""
    count = len(ids)
    is_absent = ids == ABSENT
    absent = int(np.count_nonzero(is_absent))
    if absent == count:
        return [None] * count
    # Usually either nearly every row has its own name, or only few names exist.
    if distinct > count // _ROWS_OF_A_NAME:
        ends = starts + np.where(is_absent, 0, lengths)
        each: list[str | None] = [*texts_of(_pieces(raw, starts, ends))]
        for row in np.flatnonzero(is_absent).tolist() if absent else ():
            each[row] = None
        return each
    # Decode each name once, from its last row.
    numbers: list[int] = ids.tolist()
    last: dict[int, int] = dict(zip(numbers, range(count), strict=True))
    last.pop(ABSENT, None)
    names: dict[int, str | None] = {ABSENT: None}
    at = np.fromiter(last.values(), "<i8", len(last))
    begins = starts[at]
    spans = map(slice, begins.tolist(), (begins + lengths[at]).tolist())
    pieces = map(raw.__getitem__, spans)
    names.update(zip(last, map(str, pieces, repeat("utf-8")), strict=True))
    return list(map(names.__getitem__, numbers))
