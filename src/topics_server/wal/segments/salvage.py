"""Rebuilds a damaged index from its data file, row by row. Pure.

A record holds its own lengths and ends with its checksum. After a damaged record, the next intact
record is found by its seq. The rows between them are lost: the index gives them checksum 0, so that
every read of them fails; all other rows stay readable. From an undamaged `.data` file the whole
index is rebuilt. Pure; used by `wal/segments/store.py` and by `wal/tools/repair.py`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import xxhash

from topics_server.values.blocks import Block
from topics_server.wal.format.manifest import SegmentEntry
from topics_server.wal.format.segment import (
    DATA_HEADER_BYTES,
    HAS_NODE,
    HAS_TAG,
    HASH_BYTES,
    RECORD_HEADER_BYTES,
    IndexParts,
    decode_index,
    encode_index,
)
from topics_server.wal.segments.packing import pack

# seq, ts, bytes of data, meta, node, tag; kind, hop, marks
_RECORD: Final = struct.Struct("<QqIIHHBBBx")
_SEARCHED_BYTES: Final = 1 << 20

assert _RECORD.size == RECORD_HEADER_BYTES


class _Record(NamedTuple):
    row: int
    start: int
    end: int
    ts: int
    data_end: int
    meta_end: int
    node: str | None
    tag: str | None
    kind: int
    hop: int
    data_start: int


def rebuild_index(data: bytes, topic_id: int, entry: SegmentEntry) -> bytes:
    """The whole `.idx` of a listed segment from its `.data`, which has the listed size."""
    assert len(data) == entry.data_bytes
    count = entry.record_count
    kept = {record.row: record for record in _records(data, entry)}
    times, ends, body = array("q"), array("I"), bytearray()
    tags: list[str | None] = []
    nodes: list[str | None] = []
    kinds, hops = bytearray(count), bytearray(count)
    offsets = np.zeros(count, "<u4")
    lost = bytearray(count)
    position, ts = DATA_HEADER_BYTES, entry.first_ts
    for row in range(count):
        offsets[row] = position
        record = kept.get(row)
        if record is None:
            lost[row] = 1
            tags.append(None)
            nodes.append(None)
            ends.extend(repeat(len(body), 2))
        else:
            offsets[row], position, ts = record.start, record.end, record.ts
            tags.append(record.tag)
            nodes.append(record.node)
            kinds[row], hops[row] = record.kind, record.hop
            ends.append(len(body) + record.data_end - record.data_start)
            body += data[record.data_start : record.meta_end]
            ends.append(len(body))
        times.append(ts)
    block = Block(entry.first_seq, times, ends, bytes(body), tags, nodes, bytes(kinds), bytes(hops))
    _, packed = pack(topic_id, entry.segment_id, [block], bytes(lost))
    columns = decode_index(packed, verify=False)
    rows = columns.rows.copy()
    rows["offset"] = offsets
    rows["xxh3"][np.frombuffer(lost, "u1") != 0] = 0
    return encode_index(
        IndexParts(
            topic_id=topic_id,
            segment_id=entry.segment_id,
            first_seq=entry.first_seq,
            flags_offset=entry.data_bytes - count,
            data_checksum=entry.data_checksum,
            rows=rows,
            tag_offsets=columns.tags.offsets,
            tag_starts=columns.tag_starts,
            tag_rows=columns.tag_rows,
            tag_text=bytes(columns.tags.text),
            node_offsets=columns.nodes.offsets,
            node_text=bytes(columns.nodes.text),
        )
    )


def _records(data: bytes, entry: SegmentEntry) -> Iterator[_Record]:
    """The intact records in seq order."""
    end = entry.data_bytes - entry.record_count
    position, row = DATA_HEADER_BYTES, 0
    while row < entry.record_count:
        record = _record_at(data, position, end, row, entry)
        if record is None:
            record = _next_good(data, position + 1, end, row, entry)
            if record is None:
                return
        yield record
        row, position = record.row + 1, record.end


def _record_at(data: bytes, start: int, end: int, row: int, entry: SegmentEntry) -> _Record | None:
    """The record of a row at an offset; None if it is damaged."""
    if start + RECORD_HEADER_BYTES + HASH_BYTES > end:
        return None
    seq, ts, data_bytes, meta_bytes, node_bytes, tag_bytes, kind, hop, marks = _RECORD.unpack_from(
        data, start
    )
    tag_at = start + RECORD_HEADER_BYTES + node_bytes
    data_at = tag_at + tag_bytes
    meta_at = data_at + data_bytes
    stop = meta_at + meta_bytes
    if seq != entry.first_seq + row or stop + HASH_BYTES > end:
        return None
    stamp = data[stop : stop + HASH_BYTES]
    if stamp != xxhash.xxh3_64_intdigest(data[start:stop]).to_bytes(HASH_BYTES, "little"):
        return None
    node = str(data[start + RECORD_HEADER_BYTES : tag_at], "utf-8") if marks & HAS_NODE else None
    tag = str(data[tag_at:data_at], "utf-8") if marks & HAS_TAG else None
    behind = stop + HASH_BYTES
    return _Record(row, start, behind, ts, meta_at, stop, node, tag, kind, hop, data_at)


def _next_good(
    data: bytes, position: int, end: int, row: int, entry: SegmentEntry
) -> _Record | None:
    """The next intact record after a damaged one; it is of a later row."""
    first, last = entry.first_seq + row, entry.last_seq
    while position + 8 <= end:
        count = min(_SEARCHED_BYTES, end - position - 7)
        # For every byte: the number that is encoded from there on.
        seqs = np.ndarray((count,), "<u8", data, position, (1,))
        for found in np.flatnonzero((seqs >= first) & (seqs <= last)).tolist():
            at = position + found
            record = _record_at(data, at, end, int(seqs[found]) - entry.first_seq, entry)
            if record is not None:
                return record
        position += count
    return None
