"""Rebuilds a damaged index from its data file, row by row. Pure.

A record holds its own lengths and ends with its checksum. After a damaged record, the next intact
record is found by its seq. A JSON object is found by its stamp. The other rows are lost: the index
gives them checksum 0, so that every read of them fails. From an undamaged `.data` file the whole
index is rebuilt. Used by `wal/segments/maps.py` and `wal/segments/mending.py`.
"""

from __future__ import annotations

import json
import re
import struct
from array import array
from collections.abc import Iterator
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import xxhash

from topics_server.values.blocks import Block
from topics_server.values.errors import Corrupt, StartRefused
from topics_server.wal.format.json_objects import (
    GROUP_RECORDS,
    MEMBER_BYTES,
    STAMP,
    STAMP_BYTES,
    hashes_beside_sums,
    sums_of,
)
from topics_server.wal.format.manifest import SegmentEntry
from topics_server.wal.format.segment import (
    COMBINED_VERSION,
    DATA_HEADER_BYTES,
    HAS_NODE,
    HAS_TAG,
    HASH_BYTES,
    JSON_VERSION,
    NO_SUMS,
    RECORD_HEADER_BYTES,
    TRACED_KIND,
    TRACED_VERSION,
    VERSION,
    decode_data_header,
    encode_index,
)
from topics_server.wal.segments.packing import RunColumns

# seq, ts, bytes of data, meta, node, tag; kind, hop, marks
_RECORD: Final = struct.Struct("<QqIIHHBBBx")
_SEARCHED_BYTES: Final = 1 << 20
# The start of a JSON object, up to its `data`.
_HEAD: Final = re.compile(rb'\{"\$seq":\d+,"\$ts":-?\d+(?:,"\$node":"(?:[^"\\]|\\.)*")?', re.DOTALL)

assert _RECORD.size == RECORD_HEADER_BYTES


class _Record(NamedTuple):
    row: int
    start: int
    end: int
    ts: int
    node: str | None
    tag: str | None
    kind: int
    hop: int
    data: bytes
    meta: bytes
    checksum: int


def rebuild_index(data: bytes, topic_id: int, entry: SegmentEntry) -> bytes:
    """The whole `.idx` of a listed segment from its `.data`, which has the listed size."""
    assert len(data) == entry.data_bytes
    count = entry.record_count
    records, versions = _intact(data, entry)
    kept = {record.row: record for record in records}
    times, ends, body = array("q"), array("I"), bytearray()
    tags: list[str | None] = []
    nodes: list[str | None] = []
    kinds, hops = bytearray(count), bytearray(count)
    offsets, checksums = np.zeros(count, "<u4"), np.zeros(count, "<u8")
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
            checksums[row] = record.checksum
            tags.append(record.tag)
            nodes.append(record.node)
            kinds[row], hops[row] = record.kind, record.hop
            body += record.data
            ends.append(len(body))
            body += record.meta
            ends.append(len(body))
        times.append(ts)
    block = Block(entry.first_seq, times, ends, bytes(body), tags, nodes, bytes(kinds), bytes(hops))
    run = RunColumns([block], bytes(lost))
    rows, flags_offset = run.rows(), entry.data_bytes - count
    rows["offset"], rows["xxh3"] = offsets, checksums
    sums = NO_SUMS
    if versions[0] >= COMBINED_VERSION:
        records_end = flags_offset - count * STAMP_BYTES
        sums = sums_of(memoryview(data)[:flags_offset], rows, records_end)
        # A group with a lost record fails its check, so that its records are checked one by one.
        sums[np.flatnonzero(np.frombuffer(lost, "u1")) // GROUP_RECORDS] = 0
        if any(lost):
            sums[-1] = 0
    elif (run.kinds & TRACED_KIND).any():
        versions = (TRACED_VERSION,)
    idx = b""
    for each in versions:
        parts = run.index_parts(
            topic_id,
            entry.segment_id,
            rows,
            flags_offset=flags_offset,
            data_checksum=entry.data_checksum,
            version=each,
            sums=sums,
        )
        idx = encode_index(parts)
        if len(idx) == entry.idx_bytes:
            break
    return idx


def _intact(data: bytes, entry: SegmentEntry) -> tuple[list[_Record], tuple[int, ...]]:
    """The intact records in seq order, and the versions that the segment may have."""
    try:
        version = decode_data_header(data[:DATA_HEADER_BYTES]).version
    except (Corrupt, StartRefused):
        # The layout of which more records are intact.
        objects = list(_objects(data, entry))
        records = [] if len(objects) == entry.record_count else list(_records(data, entry))
        if len(records) > len(objects):
            return records, (VERSION,)
        # The size of the index tells which.
        return objects, (COMBINED_VERSION, JSON_VERSION)
    is_json = version >= COMBINED_VERSION
    return list(_objects(data, entry) if is_json else _records(data, entry)), (version,)


def _objects(data: bytes, entry: SegmentEntry) -> Iterator[_Record]:
    """The intact records of a segment of JSON objects, each found by its own stamp."""
    count = entry.record_count
    end = entry.data_bytes - count - count * STAMP_BYTES
    if end <= DATA_HEADER_BYTES:
        return
    stamps = np.frombuffer(data, STAMP, count, end)
    sums = (stamps["sum"] ^ hashes_beside_sums(stamps)).tolist()
    for row, (checksum, stamp) in enumerate(zip(sums, stamps.tolist(), strict=True)):
        _, start, data_bytes, meta_bytes, tag_start, tag_bytes, hop, marks = stamp
        head = _HEAD.match(data, start, end)
        if head is None:
            continue
        data_start = head.end() + (MEMBER_BYTES if data_bytes else 0)
        data_end = data_start + data_bytes
        meta_start = data_end + (MEMBER_BYTES if meta_bytes else 0)
        meta_end = meta_start + meta_bytes
        text, tag = data[start : meta_end + 2], data[tag_start : tag_start + tag_bytes]
        found = xxhash.xxh3_64_intdigest(text)
        if found ^ xxhash.xxh3_64_intdigest(tag) != checksum:
            continue
        names = json.loads(head[0] + b"}")
        if names["$seq"] == entry.first_seq + row:
            yield _Record(
                row=row,
                start=start,
                end=meta_end + 2,
                ts=names["$ts"],
                node=names.get("$node"),
                tag=str(tag, "utf-8") if marks & HAS_TAG else None,
                kind=0,
                hop=hop,
                data=data[data_start:data_end],
                meta=data[meta_start:meta_end],
                checksum=found,
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
    checksum = xxhash.xxh3_64_intdigest(data[start:stop])
    if data[stop : stop + HASH_BYTES] != checksum.to_bytes(HASH_BYTES, "little"):
        return None
    return _Record(
        row=row,
        start=start,
        end=stop + HASH_BYTES,
        ts=ts,
        node=str(data[start + RECORD_HEADER_BYTES : tag_at], "utf-8") if marks & HAS_NODE else None,
        tag=str(data[tag_at:data_at], "utf-8") if marks & HAS_TAG else None,
        kind=kind,
        hop=hop,
        data=data[data_at:meta_at],
        meta=data[meta_at:stop],
        checksum=checksum,
    )


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
