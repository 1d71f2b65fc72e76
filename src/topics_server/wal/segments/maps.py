"""Maps segment indexes into memory and bounds how many are mapped.

Used by `wal/segments/store.py`. A mapping holds a descriptor, so beyond `max_mapped` the oldest is
unmapped; its columns map themselves again when they are used. Invariant: a `SealedColumns` reads
the `.idx` in the tier that its topic lists now. A damaged index is rebuilt from its records, row by
row. If the delete flags are lost, every row of the segment is reported as damaged, because serving
records that may have been deleted would be worse.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from topics_server.values.errors import Corrupt, StorageError
from topics_server.wal.format.manifest import SegmentEntry
from topics_server.wal.format.segment import SegmentColumns, bad_rows, decode_index
from topics_server.wal.fs import Fs
from topics_server.wal.segments.file_handles import FileHandles
from topics_server.wal.segments.files import Tiers, flags_of, load_index
from topics_server.wal.segments.index import SealedColumns, blank_columns
from topics_server.wal.segments.salvage import rebuild_index
from topics_server.wal.segments.topic_manifest import TopicManifest
from topics_server.wal.segments.topic_scan import FoundSegment

_ROWS_AT_ONCE: Final = 4096


class IndexMaps:
    """See the module; thread-safe."""

    def __init__(
        self,
        fs: Fs,
        tiers: Tiers,
        file_handles: FileHandles,
        max_mapped: int,
        mend_soon: Callable[[int, int], None],
    ) -> None:
        """`mend_soon`: called with topic and segment of an index that is damaged."""
        assert max_mapped > 0
        self._mend_soon: Final = mend_soon
        self._fs: Final = fs
        self._tiers: Final = tiers
        self._file_handles: Final = file_handles
        self._max_mapped: Final = max_mapped
        self._mapped: deque[SealedColumns] = deque()
        self._lock: Final = threading.Lock()

    def make(
        self, topic: TopicManifest, entry: SegmentEntry, found: FoundSegment | None = None
    ) -> SealedColumns:
        """Columns of a segment that was just written, or found at start."""
        segment_id = entry.segment_id

        def load(index: SealedColumns) -> SegmentColumns:
            tier = topic.entry(segment_id).tier
            path = self._tiers.idx_path(tier, topic.topic_id, segment_id)
            columns = load_index(self._fs, path, topic.topic_id, entry, verify=False)
            self._note(index)
            return columns

        def flags() -> bytes:
            with self._file_handles.lease(
                (topic.topic_id, segment_id), lambda: self.data_path(topic, segment_id)
            ) as file:
                found = flags_of(file, entry)
            if found is None:
                raise Corrupt("size of a sealed file has changed", file.path)
            return found

        def damaged(index: SealedColumns, first_row: int, end_row: int) -> list[int]:
            columns = index.columns()
            found: list[int] = []
            try:
                for first in range(first_row, end_row, _ROWS_AT_ONCE):
                    end = min(end_row, first + _ROWS_AT_ONCE)
                    start, stop = columns.span(first, end)
                    if not start < stop <= columns.records_end:
                        return list(range(first_row, end_row))
                    with self._file_handles.lease(
                        (topic.topic_id, segment_id), lambda: self.data_path(topic, segment_id)
                    ) as file:
                        data = file.pread(stop - start, start)
                    found += [first + row for row in bad_rows(data, columns, first, end)]
            except StorageError:
                return list(range(first_row, end_row))
            return found

        return SealedColumns(
            segment_id,
            entry.first_seq,
            entry.last_seq,
            load,
            flags,
            damaged,
            partial(self._mend_soon, topic.topic_id, segment_id),
            bad_rows=found.bad_rows if found else (),
            found_flags=found.flags if found else None,
            is_readable=found is None or found.flags is not None,
        )

    def open(self, topic: TopicManifest, found: FoundSegment) -> SealedColumns:
        """Columns of a segment as found at start; a rebuilt index is kept in memory.

        `found.index` then holds the content for its file. Changes nothing on disk.
        """
        entry = found.entry
        index = self.make(topic, entry, found)
        idx_path, data_path = self._tiers.paths(entry.tier, topic.topic_id, entry.segment_id)
        columns = self._verified(idx_path, topic.topic_id, entry)
        if columns is not None and (columns.rows["xxh3"] != 0).all():
            return index
        data = self._whole(data_path, entry)
        if data is not None:
            rebuilt = rebuild_index(data, topic.topic_id, entry)
            if columns is None or rebuilt != self._whole(idx_path, entry, is_index=True):
                found.index = rebuilt
            index.hold(decode_index(rebuilt, verify=False))
        elif columns is None:
            index.hold(blank_columns(topic.topic_id, entry))
        return index

    def rebuild(self, topic: TopicManifest, index: SealedColumns) -> bytes:
        """*Blocking.* Make the index from the records, because its file is damaged, and hold it.

        Raises `Corrupt` if the records have not their listed size.
        """
        topic_id, segment_id = topic.topic_id, index.segment_id
        entry = topic.entry(segment_id)
        data = self._whole(self.data_path(topic, segment_id), entry)
        if data is None:
            raise Corrupt(f"index and size of segment {segment_id} are damaged")
        content = rebuild_index(data, topic_id, entry)
        index.hold(decode_index(content, verify=False), is_reported=False)
        return content

    def _verified(self, path: str, topic_id: int, entry: SegmentEntry) -> SegmentColumns | None:
        """The columns of an `.idx`; `None` if two reads find damage."""
        for _ in range(2):
            try:
                return load_index(self._fs, path, topic_id, entry, verify=True)
            except Corrupt:
                continue
        return None

    def _whole(self, path: str, entry: SegmentEntry, *, is_index: bool = False) -> bytes | None:
        """The content of a file; `None` for records whose size is not the listed one."""
        file = self._fs.open(path)
        try:
            size = file.size()
            return file.pread(size, 0) if is_index or size == entry.data_bytes else None
        finally:
            file.close()

    def data_path(self, topic: TopicManifest, segment_id: int) -> str:
        """The current path of a segment's records. Raises `StorageError` if it was dropped."""
        tier = topic.entry(segment_id).tier
        return self._tiers.data_path(tier, topic.topic_id, segment_id)

    def _note(self, index: SealedColumns) -> None:
        with self._lock:
            self._mapped.append(index)
            oldest = self._mapped.popleft() if len(self._mapped) > self._max_mapped else None
        if oldest is not None:
            oldest.unmap()
