"""The bytes of a sealed segment: `.data` and `.idx`.

Pure, and needs only numpy and xxhash beside the standard library, so that a reader without the
server (a Spark executor) can load it. `wal/segments/packing` packs blocks, `segment_blocks` makes
blocks from the bytes; docs/FORMATS.md shows their full layout. Everything is little-endian; row r
is seq `first_seq + r`.

`.data`: header (64) | records | flags (one byte a record: 0x00 live, 0xFF deleted)

    record: seq u64 | ts i64 | data_bytes u32 | meta_bytes u32 | node_bytes u16 | tag_bytes u16
            | kind u8 | hop u8 | marks u8 | 0 | node | tag | data | meta | XXH3-64 of all before it

    versions 3 and 4 (`json_objects`): tags | records | stamps | flags, each record a JSON object

`.idx`: header (128) | rows (48 each) | tag offsets u32 (n + 1) | offsets into tag rows u32 (n + 1)
        | tag rows u32 | tag text | node offsets u32 (n + 1) | node text   (each padded to 8)
        | version 4: XXH3-64 of each group of records, of the rows of each, of tags and stamps,
        |   of the texts of tags and nodes with their offsets
        | version 3: as version 4, with one checksum of a group and its rows, combined by xor,
        |   and without the last one

Invariants: files stay under 2 GiB; a tag's rows ascend; dictionaries ascend by their UTF-8 bytes;
the flags are the only bytes that ever change, and only from 0x00 to 0xFF.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from topics_server.values.errors import Corrupt, StartRefused
from topics_server.values.limits import (
    RECORD_FRAMING_BYTES,
    SEGMENT_DATA_BYTES_MAX,
    SEGMENT_RECORDS_MAX,
    TEXT_BYTES_MAX,
)
from topics_server.values.limits import TRACE_BYTES as TRACE_BYTES
from topics_server.values.limits import TRACED_KIND as TRACED_KIND
from topics_server.wal.format.json_objects import (
    GROUP_RECORDS,
    MEMBER_BYTES,
    STAMP_BYTES,
    row_sums,
)

VERSION: Final = 1
# The version of a segment that has a record with a trace; older servers refuse it.
TRACED_VERSION: Final = 2
# The version of a segment whose records are stored as JSON objects; older servers refuse it.
JSON_VERSION: Final = 4
# The same with fewer checksums; the server reads it and does not pack it.
COMBINED_VERSION: Final = 3
_NEWEST_VERSION: Final = JSON_VERSION
DATA_MAGIC: Final = b"topicsSD"
IDX_MAGIC: Final = b"topicsSI"
LIVE: Final = 0x00
DEAD: Final = 0xFF
ABSENT: Final = 0xFFFF_FFFF  # dictionary id of an absent tag or node
HAS_NODE: Final = 1
HAS_TAG: Final = 2
NAME_BYTES_MAX: Final = 0xFFFF  # of one tag or node

Buffer = bytes | memoryview
Array = npt.NDArray[Any]

# magic, version, header bytes, records, topic id, segment id, flags offset, first seq, first ts,
# last ts; then XXH3-64 of these 56 bytes
_DATA_HEADER: Final = struct.Struct("<8sHHIQIIQqq")
DATA_HEADER_BYTES: Final = 64
# magic, version, row bytes, records, topic id, segment id, flags offset, first seq, data checksum,
# tags, tag text bytes, tagged rows, nodes, node text bytes; zeros; then XXH3-64 of all the rest
_IDX_HEADER: Final = struct.Struct("<8sHHIQIIQQIIIII52x")
IDX_HEADER_BYTES: Final = 128
_HASH: Final = struct.Struct("<Q")
HASH_BYTES: Final = _HASH.size

RECORD_HEADER: Final = np.dtype(
    [
        ("seq", "<u8"),
        ("ts", "<i8"),
        ("data_bytes", "<u4"),
        ("meta_bytes", "<u4"),
        ("node_bytes", "<u2"),
        ("tag_bytes", "<u2"),
        ("kind", "u1"),
        ("hop", "u1"),
        ("marks", "u1"),
        ("zero", "u1"),
    ]
)
RECORD_HEADER_BYTES: Final = RECORD_HEADER.itemsize
# `offset`: the start of the record's header in `.data`. `counted_bytes`: the record's share of a
# topic's `bytes` (tags and nodes count in characters, which are not known without decoding).
ROW: Final = np.dtype(
    [
        ("ts", "<i8"),
        ("xxh3", "<u8"),
        ("offset", "<u4"),
        ("data_bytes", "<u4"),
        ("meta_bytes", "<u4"),
        ("counted_bytes", "<u4"),
        ("tag_id", "<u4"),
        ("node_id", "<u4"),
        ("tag_bytes", "<u2"),
        ("node_bytes", "<u2"),
        ("kind", "u1"),
        ("hop", "u1"),
        ("marks", "u1"),
        ("zero", "u1"),
    ]
)

assert RECORD_HEADER_BYTES == 32
assert ROW.itemsize == 48
assert _DATA_HEADER.size + HASH_BYTES == DATA_HEADER_BYTES
assert _IDX_HEADER.size + HASH_BYTES == IDX_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class DataHeader:
    """The first 64 bytes of `.data`; `flags_offset` is where the delete flags begin."""

    topic_id: int
    segment_id: int
    record_count: int
    flags_offset: int
    first_seq: int
    first_ts: int
    last_ts: int
    version: int = VERSION

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.flags_offset + self.record_count


def encode_data_header(header: DataHeader) -> bytes:
    """64 bytes; `decode_data_header` is the inverse."""
    assert 0 < header.record_count <= SEGMENT_RECORDS_MAX
    assert DATA_HEADER_BYTES < header.flags_offset <= SEGMENT_DATA_BYTES_MAX * 4 // 3
    packed = _DATA_HEADER.pack(
        DATA_MAGIC,
        header.version,
        DATA_HEADER_BYTES,
        header.record_count,
        header.topic_id,
        header.segment_id,
        header.flags_offset,
        header.first_seq,
        header.first_ts,
        header.last_ts,
    )
    return packed + _HASH.pack(xxhash.xxh3_64_intdigest(packed))


def decode_data_header(encoded: Buffer) -> DataHeader:
    """Decode a header. Raises `Corrupt` for an invalid one, `StartRefused` for a newer version."""
    if len(encoded) < DATA_HEADER_BYTES:
        raise Corrupt("shorter than a segment's header")
    fields = _DATA_HEADER.unpack_from(encoded)
    _check_magic(fields, DATA_MAGIC)
    if xxhash.xxh3_64_intdigest(encoded[: _DATA_HEADER.size]) != _hash_at(
        encoded, _DATA_HEADER.size
    ):
        raise Corrupt("checksum of the segment's header fails")
    _, _, _, count, topic_id, segment_id, flags_offset, first_seq, first_ts, last_ts = fields
    header = DataHeader(
        topic_id, segment_id, count, flags_offset, first_seq, first_ts, last_ts, fields[1]
    )
    assert header.record_count > 0
    return header


def _check_magic(fields: tuple[Any, ...], magic: bytes) -> None:
    if fields[0] != magic:
        raise Corrupt(f"does not start with {magic!r}")
    if fields[1] > _NEWEST_VERSION:
        raise StartRefused(f"segment format {fields[1]} is newer than {_NEWEST_VERSION}")
    if fields[1] < VERSION:
        raise Corrupt(f"unknown segment format {fields[1]}")


def _hash_at(encoded: Buffer, offset: int) -> int:
    digest: int = _HASH.unpack_from(encoded, offset)[0]
    return digest


def padded(length: int) -> int:
    """`length` rounded up to 8."""
    return (length + 7) & ~7


@dataclass(frozen=True, slots=True)
class Dictionary:
    """Sorted distinct texts: `offsets` (n + 1) into `text`, UTF-8."""

    offsets: Array
    text: Buffer

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        return bytes(self.text[int(self.offsets[number]) : int(self.offsets[number + 1])])

    def lower_bound(self, wanted: bytes) -> int:
        """The number of the first text that is >= `wanted`."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        return low

    def prefix_end(self, prefix: bytes) -> int:
        """The number of the first text after those that start with `prefix`."""
        low, high = self.lower_bound(prefix), len(self)
        while low < high:
            middle = (low + high) // 2
            if self[middle].startswith(prefix):
                low = middle + 1
            else:
                high = middle
        return low


def names_sum(tags: Dictionary, nodes: Dictionary) -> int:
    """The checksum of the texts of tags and nodes, and of their offsets."""
    digest = xxhash.xxh3_64()
    for part in (tags.offsets.data, tags.text, nodes.offsets.data, nodes.text):
        digest.update(part)
    return digest.intdigest()


def sums_of_rows(rows: Array) -> Array:
    """The `sums` of columns without JSON objects."""
    found = np.array(row_sums(rows), "<u8")
    return np.concatenate((np.zeros_like(found), found))


# The checksums in an index without JSON objects.
NO_SUMS: Final[Array] = np.zeros(0, "<u8")


@dataclass(frozen=True, slots=True)
class SegmentColumns:
    """The parts of an `.idx` as views of its buffer; nothing is copied."""

    topic_id: int
    segment_id: int
    first_seq: int
    flags_offset: int
    data_checksum: int
    rows: Array
    tags: Dictionary
    tag_starts: Array
    tag_rows: Array
    nodes: Dictionary
    version: int
    # The checksums of groups, those of their rows, and that of tags and stamps. Without JSON
    # objects only those of rows: the first ones are zeros, and the last one is missing.
    sums: Array
    # The checksum of the texts of tags and nodes.
    names_sum: int

    @property
    def is_json(self) -> bool:
        """Whether the records are JSON objects."""
        return self.version >= COMBINED_VERSION

    @property
    def records_end(self) -> int:
        """The offset in `.data` after the last record."""
        return self.flags_offset - (len(self.rows) * STAMP_BYTES if self.is_json else 0)

    @property
    def tail_bytes(self) -> int:
        """The bytes of the checksum at the end of a record."""
        return 0 if self.is_json else HASH_BYTES

    @property
    def record_count(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def tag_range(self, text: bytes, *, is_prefix: bool) -> Array:
        """Rows with exactly this tag, ascending; with a prefix, tag by tag.

        Raises `Corrupt` if they are not all the rows that have these tags.
        """
        self.check_names()
        first = self.tags.lower_bound(text)
        if is_prefix:
            end = self.tags.prefix_end(text)
        else:
            found = first < len(self.tags) and self.tags[first] == text
            end = first + 1 if found else first
        start, stop = int(self.tag_starts[first]), int(self.tag_starts[end])
        rows = self.tag_rows[start:stop]
        # One more on each side: a damaged start of a tag may leave out some of its rows.
        around = self.tag_rows[max(start - 1, 0) : stop + 1]
        if not (start <= stop <= len(self.tag_rows)) or (around >= len(self.rows)).any():
            raise self._damaged()
        ids = self.rows["tag_id"][around]
        is_found = (ids >= first) & (ids < end)
        before = start - max(start - 1, 0)
        if not is_found[before : before + len(rows)].all() or is_found.sum() != len(rows):
            raise self._damaged()
        # A row has one tag, so it stands in one place.
        ascending = np.sort(rows) if is_prefix else rows
        if (ascending[1:] <= ascending[:-1]).any():
            raise self._damaged()
        return rows

    def check_names(self) -> None:
        """Raise `Corrupt` if the text of a tag or a node was damaged since the index was made."""
        if names_sum(self.tags, self.nodes) != self.names_sum:
            raise self._damaged()

    def _damaged(self) -> Corrupt:
        return Corrupt(f"the index of segment {self.segment_id} is damaged")

    def check_rows(self, rows: range) -> None:
        """Raise `Corrupt` if these rows, or one behind them, were damaged since the index was made.

        The rows of each group have one checksum.
        """
        # A record ends where the next one begins.
        first = rows.start // GROUP_RECORDS
        last = min(rows.stop, len(self.rows) - 1) // GROUP_RECORDS
        count = _group_count(len(self.rows))
        found = row_sums(self.rows[first * GROUP_RECORDS : (last + 1) * GROUP_RECORDS])
        if found != self.sums[count + first : count + last + 1].tolist():
            raise self._damaged()

    def are_groups(self, rows: range) -> bool:
        """Whether these rows are whole groups."""
        is_end = rows.stop % GROUP_RECORDS == 0 or rows.stop == len(self.rows)
        return is_end and rows.start % GROUP_RECORDS == 0

    def span(self, first_row: int, end_row: int) -> tuple[int, int]:
        """The bytes of rows `first_row..end_row - 1` in `.data`: their start and their end."""
        return int(self.rows["offset"][first_row]), self.record_end(end_row - 1)

    def bytes_at_most(self, first_row: int, end_row: int) -> int:
        """A bound of the `counted_bytes` of live rows.

        Reads only the first row and the one behind the last: others may not be in memory. A record
        in `.data` has at least the bytes of its `data` and `meta`.
        """
        start, end = self.span(first_row, end_row)
        names_bytes = min(len(self.tags.text), TEXT_BYTES_MAX)
        names_bytes += min(len(self.nodes.text), TEXT_BYTES_MAX)
        return end - start + (RECORD_FRAMING_BYTES + names_bytes) * (end_row - first_row)

    def record_end(self, row: int) -> int:
        """The offset in `.data` after a record and its checksum."""
        if row + 1 < len(self.rows):
            return int(self.rows["offset"][row + 1])
        return self.records_end

    @property
    def records_start(self) -> int:
        """The offset in `.data` of the first record."""
        return int(self.rows["offset"][0])

    def boundaries(self) -> Array:
        """Where each record begins in `.data`, and where the last one ends; shape (count + 1,)."""
        return np.append(self.rows["offset"], self.records_end).astype("<i8")

    def payloads(self, rows: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
        """Where `data` and `meta` of records begin, whose bytes are `starts .. ends - 1`.

        `rows`: their rows of the index. An absent `meta` begins where `data` ends.
        """
        lengths = rows["data_bytes"].astype("<i8")
        if not self.is_json:
            names_bytes = rows["node_bytes"].astype("<i8") + rows["tag_bytes"]
            datas = starts + names_bytes + RECORD_HEADER_BYTES
            return datas, datas + lengths
        # Before the brace and the comma.
        metas = ends - 2 - rows["meta_bytes"]
        datas = metas - MEMBER_BYTES * (rows["meta_bytes"] != 0) - lengths
        return datas, np.where(rows["meta_bytes"] != 0, metas, datas + lengths)


@dataclass(frozen=True, slots=True)
class IndexParts:
    """The input of `encode_index`: the same arrays as `SegmentColumns`, newly made."""

    topic_id: int
    segment_id: int
    first_seq: int
    flags_offset: int
    data_checksum: int
    rows: Array
    tag_offsets: Array
    tag_starts: Array
    tag_rows: Array
    tag_text: bytes
    node_offsets: Array
    node_text: bytes
    version: int
    sums: Array


def encode_index(parts: IndexParts) -> bytes:
    """The whole `.idx`; `decode_index` is the inverse."""
    tag_count, node_count = len(parts.tag_offsets) - 1, len(parts.node_offsets) - 1
    assert len(parts.tag_starts) == tag_count + 1
    assert int(parts.tag_starts[-1]) == len(parts.tag_rows)
    sums, groups = parts.sums, _group_count(len(parts.rows))
    if parts.version == COMBINED_VERSION:
        sums = np.append(sums[:groups] ^ sums[groups : 2 * groups], sums[-1])
    elif parts.version == JSON_VERSION:
        tags = Dictionary(parts.tag_offsets.astype("<u4"), parts.tag_text)
        nodes = Dictionary(parts.node_offsets.astype("<u4"), parts.node_text)
        sums = np.append(sums, np.uint64(names_sum(tags, nodes)))
    assert len(sums) == _sum_count(parts.version, len(parts.rows))
    header = _IDX_HEADER.pack(
        IDX_MAGIC,
        parts.version,
        ROW.itemsize,
        len(parts.rows),
        parts.topic_id,
        parts.segment_id,
        parts.flags_offset,
        parts.first_seq,
        parts.data_checksum,
        tag_count,
        len(parts.tag_text),
        len(parts.tag_rows),
        node_count,
        len(parts.node_text),
    )
    sections = (
        parts.rows.tobytes(),
        parts.tag_offsets.astype("<u4").tobytes(),
        parts.tag_starts.astype("<u4").tobytes(),
        parts.tag_rows.astype("<u4").tobytes(),
        parts.tag_text,
        parts.node_offsets.astype("<u4").tobytes(),
        parts.node_text,
        sums.astype("<u8").tobytes(),
    )
    body = b"".join([section.ljust(padded(len(section)), b"\0") for section in sections])
    return header + _HASH.pack(_index_hash(header, body)) + body


def _group_count(record_count: int) -> int:
    return -(-record_count // GROUP_RECORDS)


def _sum_count(version: int, record_count: int) -> int:
    groups = _group_count(record_count)
    return {COMBINED_VERSION: groups + 1, JSON_VERSION: 2 * groups + 2}.get(version, 0)


def _index_hash(header: Buffer, body: Buffer) -> int:
    digest = xxhash.xxh3_64(header)
    digest.update(body)
    return digest.intdigest()


def decode_index(encoded: Buffer, *, verify: bool = True) -> SegmentColumns:
    """Views of an `.idx`; `verify` checks its checksum first (reads every byte).

    An index before version 4 is always verified: the checksums of its rows and names are made here.

    Raises `Corrupt` for damage, `StartRefused` for a newer version.
    """
    if len(encoded) < IDX_HEADER_BYTES:
        raise Corrupt("shorter than an index's header")
    fields = _IDX_HEADER.unpack_from(encoded)
    _check_magic(fields, IDX_MAGIC)
    _, version, stride, count, topic_id, segment_id, flags_offset, first_seq, checksum = fields[:9]
    tag_count, tag_text_bytes, tagged_count, node_count, node_text_bytes = fields[9:]
    lengths = (
        count * ROW.itemsize,
        (tag_count + 1) * 4,
        (tag_count + 1) * 4,
        tagged_count * 4,
        tag_text_bytes,
        (node_count + 1) * 4,
        node_text_bytes,
        _sum_count(version, count) * 8,
    )
    if stride != ROW.itemsize or len(encoded) != IDX_HEADER_BYTES + sum(map(padded, lengths)):
        raise Corrupt("the size of the index does not match its header")
    view = memoryview(encoded)
    if verify or version != JSON_VERSION:
        expected = _hash_at(encoded, _IDX_HEADER.size)
        if _index_hash(view[: _IDX_HEADER.size], view[IDX_HEADER_BYTES:]) != expected:
            raise Corrupt("checksum of the index fails")
    offsets = [IDX_HEADER_BYTES]
    for length in lengths:
        offsets.append(offsets[-1] + padded(length))
    rows, tag_offsets, tag_starts, tag_rows, tag_text, node_offsets, node_text, sums = (
        view[offset : offset + length] for offset, length in zip(offsets, lengths, strict=False)
    )
    each_row, each_sum = np.frombuffer(rows, ROW), np.frombuffer(sums, "<u8")
    tags = Dictionary(np.frombuffer(tag_offsets, "<u4"), tag_text)
    nodes = Dictionary(np.frombuffer(node_offsets, "<u4"), node_text)
    if version == JSON_VERSION:
        of_names, each_sum = int(each_sum[-1]), each_sum[:-1]
    else:
        of_names, of_rows = names_sum(tags, nodes), np.array(row_sums(each_row), "<u8")
        if version == COMBINED_VERSION:
            each_sum = np.concatenate((each_sum[:-1] ^ of_rows, of_rows, each_sum[-1:]))
        else:
            each_sum = sums_of_rows(each_row)
    return SegmentColumns(
        topic_id=topic_id,
        segment_id=segment_id,
        first_seq=first_seq,
        flags_offset=flags_offset,
        data_checksum=checksum,
        rows=each_row,
        tags=tags,
        tag_starts=np.frombuffer(tag_starts, "<u4"),
        tag_rows=np.frombuffer(tag_rows, "<u4"),
        nodes=nodes,
        version=version,
        sums=each_sum,
        names_sum=of_names,
    )


def damaged_flags(flags: Buffer) -> Array:
    """Rows whose delete flag has neither of the two valid values."""
    column = np.frombuffer(flags, "u1")
    return np.flatnonzero((column != LIVE) & (column != DEAD))


def bad_rows(data: Buffer, columns: SegmentColumns, first_row: int, end_row: int) -> list[int]:
    """Rows of a range whose record fails its checksum. `data` is exactly that range of `.data`."""
    rows = columns.rows[first_row:end_row]
    base = int(rows["offset"][0])
    starts = (rows["offset"] - base).tolist()
    spans = map(slice, starts, [*starts[1:], len(data)])
    # A span may end with the record's own checksum: hash the bytes before it.
    tail = columns.tail_bytes
    found = [xxhash.xxh3_64_intdigest(data[span][: -tail or None]) for span in spans]
    return np.flatnonzero(np.array(found, "<u8") != rows["xxh3"]).tolist()


def outside(rows: Array, ranges: Sequence[tuple[int, int]]) -> Array:
    """The rows that lie in none of the ranges (first, last)."""
    kept = np.ones(len(rows), bool)
    for first, last in ranges:
        kept &= (rows < first) | (rows > last)
    return rows[kept]


def ranges_of(rows: Array) -> list[tuple[int, int]]:
    """Ascending, distinct rows (at least one) as ranges of (first, last)."""
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts = rows[np.concatenate(([0], breaks + 1))]
    lasts = rows[np.concatenate((breaks, [len(rows) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
