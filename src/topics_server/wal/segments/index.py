"""The mapped index columns of one sealed segment. Pure.

Satisfies `engine.ports.SealedIndex`. Made by `wal/segments/store.py`, which also supplies the
functions that map its `.idx` again (mappings hold a descriptor, so only a bounded number stay) and
read its flags. Invariant: beyond the object itself a sealed record costs no anonymous memory. Only
during recovery's check of the files are the flags and a rebuilt index kept in memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from topics_server.values.errors import Corrupt, Damaged
from topics_server.values.model import TagMatch
from topics_server.wal.format.manifest import SegmentEntry
from topics_server.wal.format.segment import (
    ABSENT,
    LIVE,
    ROW,
    VERSION,
    Dictionary,
    SegmentColumns,
    names_sum,
    outside,
    ranges_of,
    sums_of_rows,
)


class SealedColumns:
    """Columns of one segment; thread-safe for reading. Row r is seq `first_seq + r`."""

    __slots__ = (
        "_columns",
        "_find_damaged",
        "_held",
        "_load",
        "_mend_soon",
        "_read_flags",
        "bad_rows",
        "first_seq",
        "found_flags",
        "is_readable",
        "is_reported",
        "last_seq",
        "segment_id",
    )

    def __init__(
        self,
        segment_id: int,
        first_seq: int,
        last_seq: int,
        load: Callable[[SealedColumns], SegmentColumns],
        read_flags: Callable[[], bytes],
        find_damaged: Callable[[SealedColumns, int, int], Sequence[int]],
        mend_soon: Callable[[], None],
        bad_rows: Sequence[int] = (),
        found_flags: bytes | None = None,
        is_readable: bool = True,
    ) -> None:
        assert first_seq <= last_seq
        self.segment_id: Final = segment_id
        self.first_seq: Final = first_seq
        self.last_seq: Final = last_seq
        # Rows whose delete flag is neither live nor dead: these rows may have been deleted.
        self.bad_rows: Final = array("I", bad_rows)
        # The flags that recovery found, until they are checked and made durable.
        self.found_flags = found_flags
        # False if the delete flags are lost, so that any row may have been deleted.
        self.is_readable: Final = is_readable
        self._load = load
        self._read_flags = read_flags
        self._find_damaged = find_damaged
        self._mend_soon = mend_soon
        # The columns that are in memory because the file does not have them.
        self._held: SegmentColumns | None = None
        # Whether the scrub knows that the file is damaged.
        self.is_reported = True
        self._columns: SegmentColumns | None = None

    @property
    def record_count(self) -> int:
        """The number of rows."""
        return self.last_seq - self.first_seq + 1

    def columns(self) -> SegmentColumns:
        """The columns; maps them if they are not mapped.

        Raises `Corrupt` if the file cannot be mapped, and asks for another one.
        """
        columns = self._held or self._columns
        if columns is None:
            try:
                columns = self._columns = self._load(self)
            except Corrupt:
                self._mend_soon()
                raise
            assert columns.record_count == self.record_count
        return columns

    @property
    def is_held(self) -> bool:
        """Whether the columns are in memory because the file does not have them."""
        return self._held is not None

    def _checked(self, rows: range, *, names: bool = False) -> SegmentColumns:
        """The columns. Raises `Corrupt` if these rows are damaged, and asks for another file."""
        columns = self.columns()
        try:
            columns.check_rows(rows)
            if names:
                columns.check_names()
        except Corrupt:
            self._mend_soon()
            raise
        return columns

    def span_now(self, rows: range, most: int) -> tuple[SegmentColumns, int, int] | None:
        """The columns, and offset and length of these rows in `.data`, if they have `most` bytes.

        None if they have more, if the columns are not mapped, or if a delete flag is unknown.
        """
        columns = self._held or self._columns
        if columns is None or self.bad_rows or not self.is_readable:
            return None
        start, end = columns.span(rows.start, rows.stop)
        return (columns, start, end - start) if start < end <= start + most else None

    def unmap(self) -> None:
        """Unmap after the last use; the next use maps it again."""
        self._columns = None

    def time(self, row: int) -> int:
        """Commit time of a row, ms."""
        return int(self._checked(range(row, row)).rows["ts"][row])

    def first_row_since(self, ts: int) -> int:
        """The first row whose commit time is >= `ts`; the row count if there is none."""
        # numpy's own search would copy the strided column.
        return bisect_left(range(self.record_count), ts, key=self.time)

    def record_bytes(self, row: int) -> int:
        """The row's share of `bytes`."""
        return int(self.columns().rows["counted_bytes"][row])

    def record_bytes_between(self, first_row: int, end_row: int, dead: bytes | bytearray) -> int:
        """The sum over the rows whose `dead` byte is 0; `dead` covers the segment or the range."""
        assert len(dead) in (self.record_count, end_row - first_row)
        counted = self.columns().rows["counted_bytes"][first_row:end_row]
        if len(dead) == len(counted) and not dead.strip(b"\0"):
            return int(np.add.reduce(counted, dtype="<i8"))
        flags = np.frombuffer(dead, "u1")
        if len(flags) != len(counted):
            flags = flags[first_row:end_row]
        return int(np.sum(counted, where=flags == 0, dtype="<i8"))

    def bytes_at_most(self, first_row: int, end_row: int) -> int:
        """A bound of `record_bytes_between` for live rows, from two rows of the index."""
        return self.columns().bytes_at_most(first_row, end_row)

    def record_bytes_of(self, rows: NDArray[np.int64]) -> int:
        """The sum of `record_bytes` over these rows."""
        return int(np.sum(self.columns().rows["counted_bytes"][rows], dtype="<i8"))

    def node_rows(self, nodes: frozenset[str], first_row: int, end_row: int) -> bytes:
        """One byte per row of the range: 1 where the row's node is in `nodes`."""
        columns = self._checked(range(first_row, end_row), names=True)
        numbers = [_find(columns.nodes, node.encode()) for node in nodes]
        wanted = [number for number in numbers if number is not None]
        if not wanted:
            return bytes(end_row - first_row)
        # Do not use `np.isin`: it imports a module when it first runs.
        ids = columns.rows["node_id"][first_row:end_row]
        known = np.sort(np.asarray(wanted, ids.dtype))
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        hits: bytes = (known[at] == ids).tobytes()
        return hits

    def flags(self) -> bytes:
        """A copy of the delete flags as found on disk: 0 live (or damaged), 1 dead."""
        if not self.is_readable:
            return bytes(self.record_count)
        found = np.frombuffer(self.found_flags or self._read_flags(), "u1")
        assert len(found) == self.record_count
        dead = found != LIVE
        dead[np.frombuffer(self.bad_rows, "<u4")] = False
        flags: bytes = dead.tobytes()
        return flags

    def rows_of(self, match: TagMatch) -> Sequence[int]:
        """Rows (ascending) whose tag matches, dead ones included unless they were packed dead.

        Raises `Corrupt` for a segment without an index: the matching rows are not known.
        """
        if self.columns().flags_offset == 0:
            raise Corrupt(f"the tags of segment {self.segment_id} are lost")
        rows = self.columns().tag_range(match.text.encode(), is_prefix=match.is_prefix)
        found = array("I")
        found.frombytes((np.sort(rows) if match.is_prefix else rows).tobytes())
        return found

    def check_flags(
        self, first_row: int, end_row: int, unwanted: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Raise `Damaged` for rows of the range with unknown delete flags.

        Rows of `unwanted` ranges (first, last) are not checked.
        """
        if self.is_readable and not self.bad_rows:
            return
        if not self.is_readable:
            bad = np.arange(first_row, end_row)
        else:
            low, high = bisect_left(self.bad_rows, first_row), bisect_left(self.bad_rows, end_row)
            bad = np.array(self.bad_rows[low:high])
        bad = outside(bad, unwanted)
        if len(bad):
            raise Damaged(*ranges_of(bad))

    def hold(self, columns: SegmentColumns, *, is_reported: bool = True) -> None:
        """Use these columns until `release`, because the file does not have them."""
        assert columns.record_count == self.record_count
        self.is_reported = is_reported
        self._held = columns

    def release(self) -> None:
        """Map the file again: it has the columns now."""
        self.unmap()
        self._held, self.is_reported = None, True

    def damaged_rows(self, first_row: int, end_row: int) -> list[tuple[int, int]]:
        """See `ports.SealedIndex.damaged_rows`."""
        if not self.is_readable:
            return [(first_row, end_row - 1)]
        low, high = bisect_left(self.bad_rows, first_row), bisect_left(self.bad_rows, end_row)
        rows = {*self.bad_rows[low:high], *self._find_damaged(self, first_row, end_row)}
        return ranges_of(np.array(sorted(rows))) if rows else []


def _find(names: Dictionary, wanted: bytes) -> int | None:
    number = names.lower_bound(wanted)
    return number if number < len(names) and names[number] == wanted else None


def blank_columns(topic_id: int, entry: SegmentEntry) -> SegmentColumns:
    """Columns of a segment with unreadable index and records: no row passes its check."""
    rows = np.zeros(entry.record_count, ROW)
    rows["ts"] = entry.last_ts
    rows["tag_id"] = rows["node_id"] = ABSENT
    none = Dictionary(np.zeros(1, "<u4"), b"")
    empty = np.zeros(0, "<u4")
    return SegmentColumns(
        topic_id=topic_id,
        segment_id=entry.segment_id,
        first_seq=entry.first_seq,
        flags_offset=0,
        data_checksum=0,
        rows=rows,
        tags=none,
        tag_starts=np.zeros(1, "<u4"),
        tag_rows=empty,
        nodes=none,
        version=VERSION,
        sums=sums_of_rows(rows),
        names_sum=names_sum(none, none),
    )
