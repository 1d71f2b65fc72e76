"""Packs blocks into the bytes of a segment. Pure.

`wal/format/segment_blocks` is the inverse. `pack` runs in a helper process
(`wal/segments/packing_process`), because it holds the interpreter's lock. Rows that are already
dead keep their slot, without payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Final

import numpy as np
import xxhash

from topics_server.values.blocks import Block
from topics_server.values.columns.cutting import cut
from topics_server.values.columns.json_rows import (
    PayloadSpans,
    render_beside_dead,
    render_payloads,
)
from topics_server.values.limits import (
    RECORD_FRAMING_BYTES,
    SEGMENT_DATA_BYTES_MAX,
    SEGMENT_RECORDS_MAX,
)
from topics_server.wal.format.json_objects import (
    stamps_of,
    sums_of,
)
from topics_server.wal.format.segment import (
    ABSENT,
    DATA_HEADER_BYTES,
    DEAD,
    HAS_NODE,
    HAS_TAG,
    HASH_BYTES,
    JSON_VERSION,
    LIVE,
    NAME_BYTES_MAX,
    NO_SUMS,
    RECORD_HEADER,
    RECORD_HEADER_BYTES,
    ROW,
    TRACED_KIND,
    TRACED_VERSION,
    VERSION,
    Array,
    DataHeader,
    IndexParts,
    encode_data_header,
    encode_index,
)

# A segment with JSON objects is not larger than this: the members and the stamp of each record, and
# names of which every character is escaped.
_OBJECT_BYTES_MAX: Final = 128
_ESCAPE_BYTES_MAX: Final = 6
_FILE_BYTES_MAX: Final = 2**31 - SEGMENT_RECORDS_MAX
# Rows whose objects are made together: their bytes stay in the processor's cache.
_OBJECTS_TOGETHER: Final = 4096


def pack(
    topic_id: int, segment_id: int, blocks: Sequence[Block], dead: bytes
) -> tuple[bytes, bytes]:
    """`(.data, .idx)` of consecutive blocks; `dead` holds one byte a record, nonzero if dead."""
    run = RunColumns(blocks, dead)
    rows, has_objects, tags = run.rows(), run.fits_objects(), b""
    if has_objects:
        version, tags = JSON_VERSION, b"".join(run.tags.encoded())
        pieces, sizes, rows["xxh3"] = _objects(run)
    else:
        version = TRACED_VERSION if (run.kinds & TRACED_KIND).any() else VERSION
        pieces, sizes, rows["xxh3"] = _records(rows, run)
    ends = DATA_HEADER_BYTES + len(tags) + np.cumsum(sizes)
    rows["offset"], records_end = ends - sizes, int(ends[-1])
    stamps = b""
    if has_objects:
        stamps = stamps_of(rows, run.tags.texts, DATA_HEADER_BYTES).tobytes()
    flags_offset = records_end + len(stamps)
    assert flags_offset < _FILE_BYTES_MAX, "cut the run before it is packed"

    header = encode_data_header(
        DataHeader(
            topic_id=topic_id,
            segment_id=segment_id,
            record_count=run.count,
            flags_offset=flags_offset,
            first_seq=run.first_seq,
            first_ts=int(run.times[0]),
            last_ts=int(run.times[-1]),
            version=version,
        )
    )
    # Join the pieces only once: each further copy of a segment would use new memory pages.
    data = b"".join(chain((header, tags), pieces, (stamps, run.flags.tobytes())))
    body = memoryview(data)[:flags_offset]
    assert len(data) == len(body) + run.count
    parts = run.index_parts(
        topic_id,
        segment_id,
        rows,
        flags_offset=flags_offset,
        data_checksum=xxhash.xxh3_64_intdigest(body),
        version=version,
        sums=sums_of(body, rows, records_end) if has_objects else NO_SUMS,
    )
    return data, encode_index(parts)


class _Names:
    """The tags or nodes of a run as a sorted dictionary, with the live rows of each.

    `every`: the name of each row; `texts`: the distinct names in UTF-8.
    """

    def __init__(self, every: list[str | None]) -> None:
        count = len(every)
        distinct = sorted({name for name in every if name is not None})
        self.every, self.texts = every, [name.encode() for name in distinct]
        lengths = np.fromiter(map(len, self.texts), "<i8", len(distinct))
        assert not len(lengths) or int(lengths.max()) <= NAME_BYTES_MAX
        self.text = b"".join(self.texts)
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        self.ids: Array = np.full(count, ABSENT, "<i8")
        if distinct:
            numbers: dict[str | None, int] = dict(zip(distinct, range(len(distinct)), strict=True))
            numbers[None] = ABSENT
            self.ids = np.fromiter(map(numbers.__getitem__, every), "<i8", count)
        named = np.flatnonzero(self.ids != ABSENT)
        self.rows: Array = named[np.argsort(self.ids[named], kind="stable")]
        per_name = np.bincount(self.ids[named], minlength=len(distinct))
        self.starts = np.concatenate(([0], np.cumsum(per_name)))
        chars = np.fromiter(map(len, distinct), "<i8", len(distinct))
        # One more entry stands for the absent name and gives it a length of zero.
        at = np.minimum(self.ids, len(distinct))
        self.byte_lengths: Array = np.append(lengths, 0)[at]
        self.char_lengths: Array = np.append(chars, 0)[at]

    def encoded(self) -> list[bytes]:
        """The UTF-8 bytes of every row's name, empty where absent."""
        texts = [*self.texts, b""]
        return list(map(texts.__getitem__, np.minimum(self.ids, len(self.texts)).tolist()))


class RunColumns:
    """The columns of consecutive blocks; `dead` holds one byte a record, nonzero if dead.

    Dead rows are empty.
    """

    def __init__(self, blocks: Sequence[Block], dead: bytes) -> None:
        self.count = sum(block.count for block in blocks)
        assert 0 < self.count <= SEGMENT_RECORDS_MAX
        assert len(dead) == self.count
        assert all(a.last_seq + 1 == b.first_seq for a, b in pairwise(blocks))
        self.first_seq = blocks[0].first_seq
        self.flags: Array = np.where(np.frombuffer(dead, "u1") != 0, DEAD, LIVE).astype("u1")
        is_dead = self.flags == DEAD
        self.times = np.frombuffer(b"".join([block.times for block in blocks]), "<i8")
        # Each block counts its bytes from zero.
        stops = np.frombuffer(b"".join([block.ends for block in blocks]), "<u4").astype("<i8")
        lengths = np.diff(stops, prepend=0)
        firsts = np.cumsum([0] + [2 * block.count for block in blocks[:-1]])
        lengths[firsts] = stops[firsts]
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

    def rows(self) -> Array:
        """The rows of the index, without offsets and checksums."""
        rows, tags, nodes = np.zeros(self.count, ROW), self.tags, self.nodes
        rows["ts"] = self.times
        rows["data_bytes"], rows["meta_bytes"] = self.data_bytes, self.meta_bytes
        rows["tag_id"], rows["node_id"] = tags.ids, nodes.ids
        rows["tag_bytes"], rows["node_bytes"] = tags.byte_lengths, nodes.byte_lengths
        rows["kind"], rows["hop"] = self.kinds, self.hops
        rows["marks"] = HAS_NODE * (nodes.ids != ABSENT) + HAS_TAG * (tags.ids != ABSENT)
        payload_bytes = self.data_bytes + self.meta_bytes
        names_chars = tags.char_lengths + nodes.char_lengths
        rows["counted_bytes"] = payload_bytes + RECORD_FRAMING_BYTES + names_chars
        return rows

    def fits_objects(self) -> bool:
        """Whether the records are stored as JSON objects: all are JSON, without a trace."""
        names_bytes = self.tags.byte_lengths.sum() + self.nodes.byte_lengths.sum()
        most = int(self.data_bytes.sum() + self.meta_bytes.sum() + _ESCAPE_BYTES_MAX * names_bytes)
        return not self.kinds.any() and most + _OBJECT_BYTES_MAX * self.count < _FILE_BYTES_MAX

    def index_parts(
        self,
        topic_id: int,
        segment_id: int,
        rows: Array,
        *,
        flags_offset: int,
        data_checksum: int,
        version: int,
        sums: Array,
    ) -> IndexParts:
        """The input of `encode_index`; `rows` have offsets and checksums."""
        return IndexParts(
            topic_id=topic_id,
            segment_id=segment_id,
            first_seq=self.first_seq,
            flags_offset=flags_offset,
            data_checksum=data_checksum,
            rows=rows,
            tag_offsets=self.tags.offsets,
            tag_starts=self.tags.starts,
            tag_rows=self.tags.rows,
            tag_text=self.tags.text,
            node_offsets=self.nodes.offsets,
            node_text=self.nodes.text,
            version=version,
            sums=sums,
        )


def _records(rows: Array, run: RunColumns) -> tuple[list[bytes], Array, Array]:
    """All records with header, node, tag, data, meta and checksum: their bytes in pieces.

    Also returns the size and the checksum of each record.
    """
    count = run.count
    headers = np.zeros(count, RECORD_HEADER)
    headers["seq"] = np.arange(run.first_seq, run.first_seq + count, dtype="<u8")
    for name in ("ts", "data_bytes", "meta_bytes", "node_bytes", "tag_bytes", "kind", "hop"):
        headers[name] = rows[name]
    headers["marks"] = rows["marks"]
    packed = headers.tobytes()
    starts = run.payload_starts.tolist()
    ends = (run.payload_starts + run.data_bytes + run.meta_bytes).tolist()
    at = range(0, len(packed), RECORD_HEADER_BYTES)
    nodes, tags = run.nodes.encoded(), run.tags.encoded()
    body = run.body
    records = [
        b"".join((packed[offset : offset + RECORD_HEADER_BYTES], node, tag, body[start:end]))
        for offset, node, tag, start, end in zip(at, nodes, tags, starts, ends, strict=True)
    ]
    sizes = np.fromiter(map(len, records), "<i8", count) + HASH_BYTES
    checksums = np.fromiter(map(xxhash.xxh3_64_intdigest, records), "<u8", count)
    hashes = checksums.tobytes()
    own = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    return list(chain.from_iterable(zip(records, own, strict=True))), sizes, checksums


def _objects(run: RunColumns) -> tuple[list[bytes], Array, Array]:
    """All records as JSON objects, each with a comma: their bytes in pieces.

    The objects are those of `values/json_cache` without tags; that of a dead record has only its
    seq and its time. Also returns the size and the checksum of each record.
    """
    pieces: list[bytes] = []
    sizes, checksums = np.empty(run.count, "<i8"), np.empty(run.count, "<u8")
    for first in range(0, run.count, _OBJECTS_TOGETHER):
        rows = slice(first, min(first + _OBJECTS_TOGETHER, run.count))
        text, sizes[rows] = _objects_of(run, rows)
        pieces += (text, b",")
        bounds = np.append(0, np.cumsum(sizes[rows]))
        # The last comma stands alone.
        records = cut(text + b",", bounds[:-1], bounds[1:])
        checksums[rows] = np.fromiter(map(xxhash.xxh3_64_intdigest, records), "<u8", len(records))
    return pieces, sizes, checksums


def _objects_of(run: RunColumns, rows: slice) -> tuple[bytes, Array]:
    """The objects of these rows, joined by commas, and the length of each with a comma."""
    first_seq, times, nodes = run.first_seq + rows.start, run.times[rows], run.nodes.every[rows]
    starts = run.payload_starts[rows]
    splits = starts + run.data_bytes[rows]
    spans = PayloadSpans(run.body, starts, splits, splits + run.meta_bytes[rows])
    if not run.data_bytes[rows].all():
        return render_beside_dead(first_seq, times, nodes, spans)
    labels = [(b"$node", nodes)]
    return render_payloads(first_seq, times, labels, spans, with_data=True, with_meta=True)
