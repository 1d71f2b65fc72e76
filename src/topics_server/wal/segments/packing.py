"""Packs blocks into segment bytes and unpacks rows.

Pure. `pack` runs in a helper process (`wal/segments/packing_process.py`), because it holds the
interpreter's lock; rows that are already dead keep their slot, without payload. `unpack_block`
makes pages of sealed records, so it consists of a few C loops: about 1 us a record. `unpack_row`
and `unpack_rows` are for pages of few, scattered records.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain, pairwise, repeat
from typing import Final

import numpy as np
import xxhash

from topics_server.values.blocks import Block
from topics_server.values.columns.cutting import can_cut, cut, texts_of
from topics_server.values.errors import Damaged
from topics_server.values.limits import (
    RECORD_FRAMING_BYTES,
    SEGMENT_DATA_BYTES_MAX,
    SEGMENT_RECORDS_MAX,
)
from topics_server.wal.format.segment import (
    ABSENT,
    DATA_HEADER_BYTES,
    DEAD,
    HAS_NODE,
    HAS_TAG,
    HASH_BYTES,
    NAME_BYTES_MAX,
    RECORD_HEADER,
    RECORD_HEADER_BYTES,
    ROW,
    Array,
    Buffer,
    DataHeader,
    IndexParts,
    SegmentColumns,
    encode_data_header,
    encode_index,
    outside,
    ranges_of,
    version_of,
)

# A row of the index, and the position of the offset in it.
_RowFields = tuple[int, ...]
_OFFSET: Final = 2
# Rows that lie together within this many bytes are read in one call.
_READ_AS_ONE_BYTES: Final = 65_536
# A name is decoded once for all its rows if the names have as many rows on average.
_ROWS_OF_A_NAME: Final = 4


def pack(
    topic_id: int, segment_id: int, blocks: Sequence[Block], dead: bytes
) -> tuple[bytes, bytes]:
    """`(.data, .idx)` of consecutive blocks; `dead` holds one byte a record, nonzero if dead."""
    count = sum(block.count for block in blocks)
    assert 0 < count <= SEGMENT_RECORDS_MAX
    assert len(dead) == count
    assert all(a.last_seq + 1 == b.first_seq for a, b in pairwise(blocks))
    flags = np.where(np.frombuffer(dead, "u1") != 0, DEAD, 0).astype("u1")
    is_dead = flags != 0
    run = _Run(blocks, is_dead)
    first_seq = blocks[0].first_seq

    rows = np.zeros(count, ROW)
    rows["ts"] = run.times
    rows["data_bytes"], rows["meta_bytes"] = run.data_bytes, run.meta_bytes
    rows["tag_id"], rows["node_id"] = run.tags.ids, run.nodes.ids
    rows["tag_bytes"], rows["node_bytes"] = run.tags.byte_lengths, run.nodes.byte_lengths
    rows["kind"], rows["hop"] = run.kinds, run.hops
    rows["marks"] = HAS_NODE * (run.nodes.ids != ABSENT) + HAS_TAG * (run.tags.ids != ABSENT)
    payload_bytes = run.data_bytes + run.meta_bytes
    rows["counted_bytes"] = (
        payload_bytes + RECORD_FRAMING_BYTES + run.tags.char_lengths + run.nodes.char_lengths
    )
    names_bytes = run.tags.byte_lengths + run.nodes.byte_lengths
    sizes = RECORD_HEADER_BYTES + names_bytes + payload_bytes + HASH_BYTES
    ends = DATA_HEADER_BYTES + np.cumsum(sizes)
    assert int(ends[-1]) < 2**31 - SEGMENT_RECORDS_MAX, "cut the run before it is packed"
    rows["offset"] = ends - sizes

    header = encode_data_header(
        DataHeader(
            topic_id=topic_id,
            segment_id=segment_id,
            record_count=count,
            flags_offset=int(ends[-1]),
            first_seq=first_seq,
            first_ts=int(run.times[0]),
            last_ts=int(run.times[-1]),
            version=version_of(run.kinds),
        )
    )
    records = _records(rows, first_seq, run)
    rows["xxh3"] = np.fromiter(map(xxhash.xxh3_64_intdigest, records), "<u8", count)
    hashes = rows["xxh3"].tobytes()
    stamps = map(hashes.__getitem__, map(slice, range(0, 8 * count, 8), range(8, 8 * count + 1, 8)))
    # Join the pieces only once: each further copy of a segment would use new memory pages.
    stamped = chain.from_iterable(zip(records, stamps, strict=True))
    data = b"".join(chain((header,), stamped, (flags.tobytes(),)))
    body = memoryview(data)[: int(ends[-1])]
    assert len(data) == len(body) + count
    parts = IndexParts(
        topic_id=topic_id,
        segment_id=segment_id,
        first_seq=first_seq,
        flags_offset=len(body),
        data_checksum=xxhash.xxh3_64_intdigest(body),
        rows=rows,
        tag_offsets=run.tags.offsets,
        tag_starts=run.tags.starts,
        tag_rows=run.tags.rows,
        tag_text=run.tags.text,
        node_offsets=run.nodes.offsets,
        node_text=run.nodes.text,
    )
    return data, encode_index(parts)


class _Names:
    """The tags or nodes of a run as a sorted dictionary, with the live rows of each."""

    def __init__(self, names: list[str | None]) -> None:
        distinct = sorted({name for name in names if name is not None})
        encoded = [name.encode() for name in distinct]
        lengths = np.fromiter(map(len, encoded), "<i8", len(encoded))
        assert not len(lengths) or int(lengths.max()) <= NAME_BYTES_MAX
        numbers: dict[str | None, int] = dict(zip(distinct, range(len(distinct)), strict=True))
        numbers[None] = ABSENT
        self.text = b"".join(encoded)
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        self.ids: Array = np.fromiter(map(numbers.__getitem__, names), "<i8", len(names))
        named = np.flatnonzero(self.ids != ABSENT)
        self.rows: Array = named[np.argsort(self.ids[named], kind="stable")]
        per_name = np.bincount(self.ids[named], minlength=len(distinct))
        self.starts = np.concatenate(([0], np.cumsum(per_name)))
        chars = np.fromiter(map(len, distinct), "<i8", len(distinct))
        # One more entry stands for the absent name and gives it a length of zero.
        at = np.where(self.ids == ABSENT, len(distinct), self.ids)
        self.byte_lengths: Array = np.append(lengths, 0)[at]
        self.char_lengths: Array = np.append(chars, 0)[at]
        self._bytes_of: dict[str | None, bytes] = {None: b""}
        self._bytes_of.update(zip(distinct, encoded, strict=True))
        self._names = names

    def encoded(self) -> list[bytes]:
        """The UTF-8 bytes of every row's name, empty where absent."""
        return list(map(self._bytes_of.__getitem__, self._names))


class _Run:
    """The columns of the whole run; dead rows are empty."""

    def __init__(self, blocks: Sequence[Block], is_dead: Array) -> None:
        self.times = np.concatenate([np.frombuffer(block.times, "<i8") for block in blocks])
        lengths = np.concatenate(
            [np.diff(np.frombuffer(block.ends, "<u4").astype("<i8"), prepend=0) for block in blocks]
        )
        starts = np.cumsum(lengths) - lengths
        self.payload_starts = starts[::2]
        self.data_bytes, self.meta_bytes = lengths[::2].copy(), lengths[1::2].copy()
        self.body = b"".join([block.body for block in blocks])
        assert len(self.body) == int(lengths.sum()) <= SEGMENT_DATA_BYTES_MAX
        self.kinds = np.frombuffer(b"".join([block.kinds for block in blocks]), "u1")
        self.hops = np.frombuffer(b"".join([block.hops for block in blocks]), "u1")
        tags = list(chain.from_iterable(block.tags for block in blocks))
        nodes = list(chain.from_iterable(block.nodes for block in blocks))
        self.data_bytes[is_dead] = 0
        self.meta_bytes[is_dead] = 0
        for row in np.flatnonzero(is_dead).tolist():
            tags[row] = nodes[row] = None
        self.tags, self.nodes = _Names(tags), _Names(nodes)


def _records(rows: Array, first_seq: int, run: _Run) -> list[bytes]:
    """All records, each as header, node, tag, data and meta in one piece, without its checksum."""
    count = len(rows)
    headers = np.zeros(count, RECORD_HEADER)
    headers["seq"] = np.arange(first_seq, first_seq + count, dtype="<u8")
    for name in ("ts", "data_bytes", "meta_bytes", "node_bytes", "tag_bytes", "kind", "hop"):
        headers[name] = rows[name]
    headers["marks"] = rows["marks"]
    packed = headers.tobytes()
    starts = run.payload_starts.tolist()
    ends = (run.payload_starts + run.data_bytes + run.meta_bytes).tolist()
    at = range(0, RECORD_HEADER_BYTES * count, RECORD_HEADER_BYTES)
    nodes, tags = run.nodes.encoded(), run.tags.encoded()
    body = run.body
    return [
        b"".join((packed[offset : offset + RECORD_HEADER_BYTES], node, tag, body[start:end]))
        for offset, node, tag, start, end in zip(at, nodes, tags, starts, ends, strict=True)
    ]


def unpack_block(
    data: Buffer,
    columns: SegmentColumns,
    first_row: int,
    end_row: int,
    unwanted: Sequence[tuple[int, int]] = (),
) -> Block:
    """Rows `first_row..end_row - 1` from exactly their range of `.data`; verifies each checksum.

    Raises `Damaged` with the rows that fail. Rows in `unwanted` ranges (first, last) become blank.
    """
    assert 0 <= first_row < end_row <= columns.record_count
    rows = columns.rows[first_row:end_row]
    base = int(rows["offset"][0])
    starts = rows["offset"].astype("<i8") - base
    names_bytes = rows["node_bytes"].astype("<i8") + rows["tag_bytes"]
    data_starts = starts + names_bytes + RECORD_HEADER_BYTES
    lengths = np.empty(2 * len(rows), "<i8")
    lengths[::2], lengths[1::2] = rows["data_bytes"], rows["meta_bytes"]
    ends = data_starts + lengths[::2] + lengths[1::2]

    raw = bytes(data)
    spans = _pieces(raw, starts, ends)
    found = b"".join(map(xxhash.xxh3_64_digest, spans))
    # A digest has its highest byte first.
    expected = rows["xxh3"].astype(">u8")
    if found != expected.tobytes():
        wrong = np.flatnonzero(np.frombuffer(found, ">u8") != expected)
        bad = outside(wrong + first_row, unwanted)
        if len(bad):
            raise Damaged(*ranges_of(bad))
        rows = rows.copy()
        rows["tag_id"][wrong] = rows["node_id"][wrong] = ABSENT
        lengths[2 * wrong] = lengths[2 * wrong + 1] = 0
        ends[wrong] = data_starts[wrong]

    times, block_ends = array("q"), array("I")
    times.frombytes(rows["ts"].tobytes())
    block_ends.frombytes(np.cumsum(lengths).astype("<u4").tobytes())
    node_starts = starts + RECORD_HEADER_BYTES
    tag_starts = node_starts + rows["node_bytes"]
    return Block(
        first_seq=columns.first_seq + first_row,
        times=times,
        ends=block_ends,
        body=b"".join(_pieces(raw, data_starts, ends)),
        tags=_names_of(raw, rows["tag_id"], tag_starts, rows["tag_bytes"], len(columns.tags)),
        nodes=_names_of(raw, rows["node_id"], node_starts, rows["node_bytes"], len(columns.nodes)),
        kinds=rows["kind"].tobytes(),
        hops=rows["hop"].tobytes(),
    )


def unpack_row(
    data: bytes,
    columns: SegmentColumns,
    row: int,
    unwanted: Sequence[tuple[int, int]] = (),
) -> Block:
    """`unpack_block` of one row, at a tenth of the cost: no pass over columns."""
    fields = columns.rows[row].item()
    block = _row_block(data[: _row_bytes(fields)], fields, columns.first_seq + row)
    return unpack_block(data, columns, row, row + 1, unwanted) if block is None else block


def unpack_rows(
    read: Callable[[int, int], bytes], columns: SegmentColumns, rows: Sequence[int], max_bytes: int
) -> list[Block]:
    """These rows, each as a block; stops after the row with which `max_bytes` are reached.

    The rows ascend or descend. `read(size, offset)` returns bytes of `.data`. Raises `Damaged` with
    the first row that fails its check.
    """
    every = columns.rows[rows].tolist()
    sizes = list(map(_row_bytes, every))
    start, end = every[0][_OFFSET], every[-1][_OFFSET] + sizes[-1]
    if end < start:
        start, end = every[-1][_OFFSET], every[0][_OFFSET] + sizes[0]
    near = read(end - start, start) if 0 < end - start <= _READ_AS_ONE_BYTES else None
    found: list[Block] = []
    for row, fields, size in zip(rows, every, sizes, strict=True):
        offset = fields[_OFFSET]
        block = None
        if offset + size <= columns.flags_offset:
            if near is None:
                data = read(size, offset)
            else:
                data = near[offset - start : offset - start + size]
            block = _row_block(data, fields, columns.first_seq + row)
        if block is None:
            raise Damaged((row, row))
        found.append(block)
        max_bytes -= len(block.body)
        if max_bytes <= 0:
            break
    return found


def _row_bytes(fields: _RowFields) -> int:
    """The length of a record in `.data`, without its checksum."""
    _, _, _, data_bytes, meta_bytes, _, _, _, tag_bytes, node_bytes = fields[:10]
    return RECORD_HEADER_BYTES + data_bytes + meta_bytes + tag_bytes + node_bytes


def _row_block(data: bytes, fields: _RowFields, seq: int) -> Block | None:
    """The block of one record, from exactly its bytes; None if the checksum fails."""
    ts, checksum, _, data_bytes, meta_bytes, _, tag_id, node_id = fields[:8]
    tag_bytes, node_bytes, kind, hop = fields[8:12]
    if xxhash.xxh3_64_intdigest(data) != checksum:
        return None
    tag_start = RECORD_HEADER_BYTES + node_bytes
    start = tag_start + tag_bytes
    tag = None if tag_id == ABSENT else str(data[tag_start:start], "utf-8")
    node = None if node_id == ABSENT else str(data[RECORD_HEADER_BYTES:tag_start], "utf-8")
    return Block(
        first_seq=seq,
        times=array("q", (ts,)),
        ends=array("I", (data_bytes, data_bytes + meta_bytes)),
        body=data[start:],
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
