"""Reads records of sealed segments: on worker threads, or on the loop's thread without a wait.

Part of `wal/segments/store.py`, which owns the topics' manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from topics_server.values.blocks import Block
from topics_server.values.columns.json_rows import JsonBlock
from topics_server.values.errors import Corrupt, Damaged
from topics_server.values.model import TagMatch
from topics_server.wal.format.segment import SegmentColumns
from topics_server.wal.format.segment_blocks import (
    unpack_block,
    unpack_json,
    unpack_row,
    unpack_rows,
)
from topics_server.wal.segments.file_handles import FileHandles
from topics_server.wal.segments.index import SealedColumns
from topics_server.wal.segments.maps import IndexMaps
from topics_server.wal.segments.topic_manifest import TopicManifest


def _json_span(
    index: SealedColumns, rows: range, most: int
) -> tuple[SegmentColumns, int, int] | None:
    """`SealedColumns.span_now` for rows that are JSON objects; None for other rows, too."""
    span = index.span_now(rows, most)
    if span is None:
        return None
    columns, _, _ = span
    # The groups of a segment with damaged rows may begin and end anywhere.
    return span if columns.is_json and columns.are_groups(rows) else None


class SegmentReads:
    """The reading methods of the segments port; `topic_of` returns a topic's manifest."""

    def __init__(
        self,
        file_handles: FileHandles,
        maps: IndexMaps,
        topic_of: Callable[[int], TopicManifest],
        mend_index: Callable[[int, int], None],
    ) -> None:
        self._mend_index: Final = mend_index
        self._file_handles: Final = file_handles
        self._maps: Final = maps
        self._topic: Final = topic_of

    def read(
        self,
        topic_id: int,
        segment_id: int,
        first_row: int,
        end_row: int,
        unwanted: Sequence[tuple[int, int]] = (),
    ) -> Block:
        """See `ports.Segments.read`."""
        topic = self._topic(topic_id)
        index = topic.index(segment_id)
        index.check_flags(first_row, end_row, unwanted)
        assert 0 <= first_row < end_row <= index.record_count
        try:
            return self._read(topic, index, first_row, end_row, unwanted)
        except (Damaged, Corrupt):
            # Read the file and the index from disk once more before the result is used.
            self.forget(topic_id, segment_id, index)
        try:
            return self._read(topic, index, first_row, end_row, unwanted)
        except Corrupt:
            self._mend_index(topic_id, segment_id)
        return self._read(topic, index, first_row, end_row, unwanted)

    def _read(
        self,
        topic: TopicManifest,
        index: SealedColumns,
        first_row: int,
        end_row: int,
        unwanted: Sequence[tuple[int, int]],
    ) -> Block:
        columns, segment_id = index.columns(), index.segment_id
        start, end = columns.span(first_row, end_row)
        if not start < end <= columns.records_end:
            raise Corrupt(f"the index of segment {segment_id} is damaged")
        with self._file_handles.lease(
            (topic.topic_id, segment_id), lambda: self._maps.data_path(topic, segment_id)
        ) as file:
            data = file.pread(end - start, start)
        if end_row == first_row + 1:
            return unpack_row(data, columns, first_row, unwanted)
        return unpack_block(data, columns, first_row, end_row, unwanted)

    def read_now(self, topic_id: int, segment_id: int, rows: range, most: int) -> Block | None:
        """See `ports.Segments.read_now`."""
        index = self._topic(topic_id).indexes.get(segment_id)
        span = None if index is None else index.span_now(rows, most)
        if span is None:
            return None
        columns, start, size = span
        data = self._file_handles.read_now((topic_id, segment_id), size, start)
        try:
            return None if data is None else unpack_block(data, columns, rows.start, rows.stop)
        except (Damaged, Corrupt):
            return None

    def read_json_now(
        self, topic_id: int, segment_id: int, rows: range, most: int, shown: int
    ) -> JsonBlock | None:
        """See `ports.Segments.read_json_now`."""
        index = self._topic(topic_id).indexes.get(segment_id)
        span = None if index is None else _json_span(index, rows, most)
        if span is None:
            return None
        columns, start, size = span
        data = self._file_handles.read_now((topic_id, segment_id), size, start)
        try:
            return None if data is None else unpack_json(data, columns, rows, shown)
        except Corrupt:
            return None

    def read_json(
        self, topic_id: int, segment_id: int, rows: range, most: int, shown: int
    ) -> JsonBlock | None:
        """See `ports.Segments.read_json`."""
        topic = self._topic(topic_id)
        index = topic.index(segment_id)
        index.columns()  # maps them
        span = _json_span(index, rows, most)
        if span is None:
            return None
        columns, start, size = span
        with self._file_handles.lease(
            (topic_id, segment_id), lambda: self._maps.data_path(topic, segment_id)
        ) as file:
            data = file.pread(size, start)
        return unpack_json(data, columns, rows, shown)

    def read_rows(
        self, topic_id: int, segment_id: int, rows: Sequence[int], max_bytes: int
    ) -> list[Block]:
        """See `ports.Segments.read_rows`."""
        topic = self._topic(topic_id)
        index = topic.index(segment_id)
        if index.bad_rows or not index.is_readable:
            for row in rows:
                index.check_flags(row, row + 1)
        with self._file_handles.lease(
            (topic_id, segment_id), lambda: self._maps.data_path(topic, segment_id)
        ) as file:
            return unpack_rows(file.pread, index.columns(), rows, max_bytes)

    def find_tags(self, topic_id: int, segment_id: int, match: TagMatch) -> Sequence[int]:
        """See `ports.Segments.find_tags`; rows that were dead when packed are not found."""
        topic = self._topic(topic_id)
        index = topic.index(segment_id)
        try:
            return index.rows_of(match)
        except Corrupt:
            index.unmap()
        try:
            return index.rows_of(match)
        except Corrupt:
            self._mend_index(topic_id, segment_id)
        return index.rows_of(match)

    def forget(self, topic_id: int, segment_id: int, index: SealedColumns | None) -> None:
        """Close files that are about to be unlinked; current readers keep theirs."""
        self._file_handles.drop((topic_id, segment_id))
        if index is not None:
            index.unmap()
