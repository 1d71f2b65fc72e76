"""Reads one sealed segment into Arrow batches; runs on executors.

The whole index is read and verified. It shows which rows match, without reading records. Records
are read only if `data` or `meta` is wanted: the whole file with its one checksum if most rows are
wanted, else the wanted ranges with each record's own checksum. Deleted rows are left out. Damage
raises an error with file name and seqs; a tolerant query leaves it out and reports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import xxhash

from spark_jobs.reader.columns import Rows, picked, schema_of
from spark_jobs.reader.listing import placed
from spark_jobs.reader.places.folder import read_flags
from spark_jobs.reader.places.segment import Segment, open_file
from spark_jobs.reader.query import Names, Query
from spark_jobs.reader.report import ReadReport
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.format.segment import (
    DATA_HEADER_BYTES,
    DEAD,
    LIVE,
    Array,
    SegmentColumns,
    decode_data_header,
    decode_index,
)

# Most rows, and about the most bytes of records, in a batch.
BATCH_ROWS: Final = 16_384
BATCH_BYTES: Final = 16 * 2**20
# A file up to this size is read whole if more than a quarter of it is wanted.
_WHOLE_FILE_BYTES: Final = 192 * 2**20
_WHOLE_FILE_SHARE: Final = 4
_NONE: Final = np.zeros(0, "<i8")


def read_segments(
    segments: Iterable[Segment], query: Query, report: ReadReport | None = None
) -> Iterator[Any]:
    """Yield Arrow batches of all segments, in order. Raises `StorageError` unless tolerant."""
    report = ReadReport() if report is None else report
    try:
        for segment in segments:
            report.segments += 1
            yield from _read_segment(segment, query, report)
    finally:
        if query.report_dir is not None:
            report.keep(query.report_dir)


def _read_segment(segment: Segment, query: Query, report: ReadReport) -> Iterator[Any]:
    seqs = (segment.entry.first_seq + segment.first_row, segment.entry.first_seq + segment.end_row)
    seqs = (seqs[0], seqs[1] - 1)
    try:
        columns = read_index(segment, report)
        chosen, is_dead = _choose(segment, columns, query, report)
        lost = _lost_rows(segment, columns, query, report)
    except StorageError as error:
        _refuse(error, segment, query, report, str(error.path), seqs)
        return
    if len(lost):
        for first_seq, last_seq in _runs(columns.first_seq + lost):
            path = segment.paths(layout.DATA_SUFFIX)[0]
            found = Corrupt("records are lost: the index has no checksum of them", path)
            _refuse(found, segment, query, report, path, (first_seq, last_seq))
        is_kept = ~np.isin(chosen, lost)
        chosen, is_dead = chosen[is_kept], None if is_dead is None else is_dead[is_kept]
    if len(chosen):
        yield from _batches(segment, columns, chosen, is_dead, query, report)


def _refuse(
    error: StorageError,
    segment: Segment,
    query: Query,
    report: ReadReport,
    path: str,
    seqs: tuple[int, int],
) -> None:
    """Raise with the affected seqs, or record them as left out. A newer format always raises."""
    if query.is_tolerant and not isinstance(error, StartRefused):
        report.skip(segment.topic, path, seqs, str(error))
        return
    raise placed(error, path, segment.topic, seqs)


# -- choosing rows
# ----------------------------------------------------------------------------------


def read_index(segment: Segment, report: ReadReport) -> SegmentColumns:
    """The verified index. It must be the index that was listed."""
    entry = segment.entry
    file = open_file(segment, layout.IDX_SUFFIX)
    path = file.path
    report.opened(path)
    try:
        encoded = file.read(0, file.size())
    finally:
        file.close()
    report.bytes += len(encoded)
    try:
        columns = decode_index(encoded)
    except StorageError as error:
        raise type(error)(str(error), path) from None
    expected = (
        segment.topic_id,
        entry.segment_id,
        entry.first_seq,
        entry.record_count,
        entry.data_checksum,
    )
    found = (
        columns.topic_id,
        columns.segment_id,
        columns.first_seq,
        columns.record_count,
        columns.data_checksum,
    )
    if len(encoded) != entry.idx_bytes or found != expected:
        raise Corrupt("is the index of another segment than the listed one", path)
    return columns


def _choose(
    segment: Segment, columns: SegmentColumns, query: Query, report: ReadReport
) -> tuple[Array, Array | None]:
    """Wanted rows, ascending, and which of them are dead (None: no row is)."""
    first = max(segment.first_row, query.first_seq - columns.first_seq)
    end = min(segment.end_row, query.last_seq - columns.first_seq + 1)
    if first >= end:
        return np.zeros(0, "<i8"), None
    first, end = _cut_times(columns, first, end, query.start_ts, query.end_ts)
    wanted: Array | None = None
    for names in query.tags:
        wanted = _both(wanted, _tag_rows(columns, names, first, end))
    for names in query.nodes:
        wanted = _both(wanted, _node_rows(columns, names, first, end))
    chosen = np.arange(first, end, dtype="<i8") if wanted is None else wanted
    if not len(chosen):
        return chosen, None
    is_dead = _dead_of(segment, columns, chosen, query, report)
    if not is_dead.any():
        return chosen, None
    if query.with_deleted:
        return chosen, is_dead
    return chosen[~is_dead], None


def _cut_times(
    columns: SegmentColumns, first: int, end: int, start_ts: int, end_ts: int
) -> tuple[int, int]:
    """Times never decrease within a topic, so a range of times is a range of rows."""
    if start_ts <= int(columns.rows["ts"][first]) and int(columns.rows["ts"][end - 1]) < end_ts:
        return first, end
    times = columns.rows["ts"][first:end].astype("<i8")
    return first + int(np.searchsorted(times, start_ts)), first + int(
        np.searchsorted(times, end_ts)
    )


def _lost_rows(
    segment: Segment, columns: SegmentColumns, query: Query, report: ReadReport
) -> Array:
    """Wanted rows whose record the server could not read when it rebuilt the index, ascending.

    Such a row has checksum 0. Its time, names and sizes in the index are invented: its record may
    have any name, and any time between the good rows before and after it. So it counts as damage in
    every read that its seq and time may belong to, even without payloads.
    """
    first = max(segment.first_row, query.first_seq - columns.first_seq, 0)
    end = min(segment.end_row, query.last_seq - columns.first_seq + 1)
    lost = np.flatnonzero(columns.rows["xxh3"][first:end] == 0) + first if first < end else _NONE
    if not len(lost):
        return lost
    good = np.flatnonzero(columns.rows["xxh3"] != 0)
    times = columns.rows["ts"][good].astype("<i8")
    entry = segment.entry
    behind = np.searchsorted(good, lost)
    latest = np.append(times, entry.last_ts)[behind]
    earliest = np.insert(times, 0, entry.first_ts)[behind]
    lost = lost[(earliest < query.end_ts) & (latest >= query.start_ts)]
    if not len(lost) or query.with_deleted:
        return lost
    dead = segment.dead_rows()
    if dead is None:
        dead = _flags_now(segment, query, report)
    is_gone = dead[lost] | (columns.first_seq + lost < segment.floor_seq)
    return np.asarray(lost[~is_gone])


def _both(rows: Array | None, others: Array) -> Array:
    return others if rows is None else np.intersect1d(rows, others, assume_unique=True)


def _tag_rows(columns: SegmentColumns, names: Names, first: int, end: int) -> Array:
    """Rows with one of the tags: one search for each name, without examining other rows."""
    found = [
        columns.tag_range(_encoded(text), is_prefix=is_prefix)
        for texts, is_prefix in ((names.exact or (), False), (names.prefixes, True))
        for text in texts
    ]
    rows = np.unique(np.concatenate([np.zeros(0, "<u4"), *found])).astype("<i8")
    return rows[(rows >= first) & (rows < end)]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _node_rows(columns: SegmentColumns, names: Names, first: int, end: int) -> Array:
    nodes = columns.nodes
    numbers: list[int] = []
    for text in map(_encoded, names.exact or ()):
        number = nodes.lower_bound(text)
        if number < len(nodes) and nodes[number] == text:
            numbers.append(number)
    for text in map(_encoded, names.prefixes):
        numbers += range(nodes.lower_bound(text), nodes.prefix_end(text))
    if not numbers:
        return np.zeros(0, "<i8")
    return first + np.flatnonzero(np.isin(columns.rows["node_id"][first:end], numbers))


def _dead_of(
    segment: Segment, columns: SegmentColumns, chosen: Array, query: Query, report: ReadReport
) -> Array:
    """Which of the chosen rows are not served: deleted, below the floor, expired."""
    dead = segment.dead_rows()
    if dead is None:
        dead = _flags_now(segment, query, report)
    lost = dead[chosen]
    if segment.floor_seq > columns.first_seq:
        lost = lost | (columns.first_seq + chosen < segment.floor_seq)
    if int(columns.rows["ts"][chosen[0]]) < segment.since_ts:
        lost = lost | (columns.rows["ts"][chosen] < segment.since_ts)
    return np.asarray(lost)


def _flags_now(segment: Segment, query: Query, report: ReadReport) -> Array:
    """The current flags on disk; damaged ones raise, or count as dead."""
    entry = segment.entry
    path = segment.paths(layout.DATA_SUFFIX)[0]
    content = read_flags(segment)
    report.opened(path)
    report.bytes += len(content)
    flags = np.frombuffer(content, "u1")
    for row in np.flatnonzero((flags != LIVE) & (flags != DEAD)).tolist():
        seq = entry.first_seq + row
        error = Corrupt(f"delete flag of seq {seq} is neither live nor dead", path)
        _refuse(error, segment, query, report, path, (seq, seq))
    return np.asarray(flags != LIVE)


# -- reading records ----------------------------------------------------------------------------


def _batches(
    segment: Segment,
    columns: SegmentColumns,
    chosen: Array,
    is_dead: Array | None,
    query: Query,
    report: ReadReport,
) -> Iterator[Any]:
    if not query.needs_payload:
        for begin in range(0, len(chosen), BATCH_ROWS):
            part = slice(begin, begin + BATCH_ROWS)
            dead = None if is_dead is None else is_dead[part]
            yield _batch(Rows(columns, chosen[part], dead), segment, query, report)
        return
    seqs = (columns.first_seq + int(chosen[0]), columns.first_seq + int(chosen[-1]))
    try:
        records = SegmentRecords(segment, columns, chosen, report)
    except StorageError as error:
        _refuse(error, segment, query, report, str(error.path), seqs)
        return
    with records:
        for begin, end in pieces_of(columns, chosen):
            dead = None if is_dead is None else is_dead[begin:end]
            try:
                content, starts, ends, bad = records.read(chosen[begin:end])
            except StorageError as error:
                seqs = tuple((columns.first_seq + chosen[[begin, end - 1]]).tolist())
                _refuse(error, segment, query, report, records.path, seqs)
                continue
            rows = chosen[begin:end]
            if len(bad):
                for first_seq, last_seq in _runs(columns.first_seq + rows[bad]):
                    failed = Corrupt("records fail their checksum", records.path)
                    _refuse(failed, segment, query, report, records.path, (first_seq, last_seq))
                good = np.setdiff1d(np.arange(len(rows)), bad)
                rows, starts, ends = rows[good], starts[good], ends[good]
                dead = None if dead is None else dead[good]
            if len(rows):
                made = Rows(
                    columns,
                    rows,
                    dead,
                    content,
                    starts,
                    ends,
                    struct=query.payload_type,
                    is_failfast=query.is_failfast,
                )
                yield _batch(made, segment, query, report)


def pieces_of(columns: SegmentColumns, chosen: Array) -> Iterator[tuple[int, int]]:
    """Ranges of `chosen` of at most a batch's size; a larger record is a range by itself."""
    rows = picked(columns.rows, chosen)
    sizes = rows["data_bytes"].astype("<i8") + rows["meta_bytes"] + 64
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(chosen):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + BATCH_BYTES, "right"))
        end = min(max(end, begin + 1), begin + BATCH_ROWS, len(chosen))
        yield begin, end
        begin = end


def _runs(seqs: Array) -> list[tuple[int, int]]:
    """Group ascending seqs into inclusive ranges."""
    breaks = np.flatnonzero(np.diff(seqs) != 1) + 1
    return [(int(run[0]), int(run[-1])) for run in np.split(seqs, breaks)]


def _batch(rows: Rows, segment: Segment, query: Query, report: ReadReport) -> Any:
    report.rows += len(rows.chosen)
    arrays = [rows.column(name, kind, segment.topic, segment.epoch) for name, kind in query.columns]
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows.chosen), pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=schema_of(query.columns, query.payload_type))


class SegmentRecords:
    """The open `.data` of a segment; `read` returns bytes and the rows whose checksum fails."""

    def __init__(
        self, segment: Segment, columns: SegmentColumns, chosen: Array, report: ReadReport
    ) -> None:
        self._columns = columns
        self._report = report
        entry = segment.entry
        # Records are adjacent: one ends where the next begins.
        self._offsets = columns.boundaries()
        self._file = open_file(segment, layout.DATA_SUFFIX)
        self.path = self._file.path
        report.opened(self.path)
        self._whole: bytes | None = None
        self._is_verified = False
        try:
            self._check_header(segment)
            wanted = int(np.sum(self._offsets[chosen + 1] - self._offsets[chosen]))
            is_piece = segment.end_row - segment.first_row < entry.record_count
            if (
                not is_piece
                and entry.data_bytes <= _WHOLE_FILE_BYTES
                and wanted * _WHOLE_FILE_SHARE >= columns.flags_offset
            ):
                self._whole = self._pread(0, columns.flags_offset)
                digest = xxhash.xxh3_64_intdigest(self._whole)
                self._is_verified = digest == columns.data_checksum
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SegmentRecords:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._file.close()

    def _check_header(self, segment: Segment) -> None:
        entry, columns = segment.entry, self._columns
        size = self._file.size()
        if size != segment.stored_bytes:
            raise Corrupt(f"{size} bytes, listed with {segment.stored_bytes}", self.path)
        try:
            header = decode_data_header(self._pread(0, DATA_HEADER_BYTES))
        except StorageError as error:
            raise type(error)(str(error), self.path) from None
        found = (header.topic_id, header.segment_id, header.first_seq, header.record_count)
        expected = (segment.topic_id, entry.segment_id, entry.first_seq, entry.record_count)
        if found != expected or header.flags_offset != columns.flags_offset:
            raise Corrupt("the header is that of another segment", self.path)

    def _pread(self, start: int, length: int) -> bytes:
        content = self._file.read(start, length)
        self._report.bytes += len(content)
        if len(content) != length:
            raise Corrupt(f"ends at {start + len(content)}, in the middle", self.path)
        return content

    def read(self, rows: Array) -> tuple[bytes, Array, Array, Array]:
        """The bytes of the rows' records, the start and the end of each record in them, and the
        damaged rows.
        """
        starts, ends = self._offsets[rows], self._offsets[rows + 1]
        if self._whole is not None:
            content = self._whole
        else:
            content, starts, ends = self._gather(starts, ends)
        if self._is_verified:
            return content, starts, ends, np.zeros(0, "<i8")
        hashed_ends = ends - self._columns.tail_bytes
        expected = self._columns.rows["xxh3"][rows]
        return content, starts, ends, _damaged(content, starts, hashed_ends, expected)

    def _gather(self, starts: Array, ends: Array) -> tuple[bytes, Array, Array]:
        """Read distant ranges one by one and join them."""
        breaks = np.flatnonzero(starts[1:] - ends[:-1] > self._file.gap_bytes) + 1
        firsts = np.concatenate(([0], breaks))
        lasts = np.concatenate((breaks, [len(starts)])) - 1
        parts = [
            self._pread(start, end - start)
            for start, end in zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True)
        ]
        lengths = np.fromiter(map(len, parts), "<i8", len(parts))
        shift = np.repeat(np.cumsum(lengths) - lengths - starts[firsts], lasts - firsts + 1)
        return b"".join(parts), starts + shift, ends + shift


def _damaged(content: bytes, starts: Array, ends: Array, expected: Array) -> Array:
    """The positions of records that fail their own checksum, without Python code per record."""
    spans = map(slice, starts.tolist(), ends.tolist())
    pieces = map(memoryview(content).__getitem__, spans)
    found = np.fromiter(map(xxhash.xxh3_64_intdigest, pieces), "<u8", len(starts))
    return np.flatnonzero(found != expected)
