"""Makes the columns of listed segments, and keeps a bound on how many are mapped at once.

Used by `wal/segments.py`. A mapping holds a descriptor, so beyond `max_mapped` the oldest is given
up; its columns map themselves again when they are used. Invariant: what a `SealedColumns` reads is
the `.idx` in the tier its topic lists it in now. A damaged index is made again from its records; if
that fails too, or the delete flags are lost, every row of the segment reads as damaged: serving
what may have been deleted is worse than saying that it is lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from topics_server.errors import Corrupt
from topics_server.wal.fs import Fs
from topics_server.wal.handles import Handles
from topics_server.wal.listed import ListedTopic
from topics_server.wal.manifest_format import SegmentEntry
from topics_server.wal.segment_files import (
    Tiers,
    flags_of,
    found_flags,
    load_index,
    repair_index,
)
from topics_server.wal.segment_format import Columns
from topics_server.wal.segment_index import SealedColumns, blank_columns


class IndexMaps:
    """See the module; thread-safe."""

    def __init__(self, fs: Fs, tiers: Tiers, handles: Handles, max_mapped: int) -> None:
        assert max_mapped > 0
        self._fs: Final = fs
        self._tiers: Final = tiers
        self._handles: Final = handles
        self._max_mapped: Final = max_mapped
        self._mapped: deque[SealedColumns] = deque()
        self._lock: Final = threading.Lock()

    def make(
        self, topic: ListedTopic, entry: SegmentEntry, bad_rows: Sequence[int] = ()
    ) -> SealedColumns:
        """Columns of a segment whose files are known to be good, but for the flags of some rows."""
        segment_id = entry.segment_id

        def load(index: SealedColumns) -> Columns:
            tier = topic.entry(segment_id).tier
            path = self._tiers.idx_path(tier, topic.topic_id, segment_id)
            columns = load_index(self._fs, path, topic.topic_id, entry, verify=False)
            self._note(index)
            return columns

        def flags() -> bytes:
            with self._handles.lease(
                (topic.topic_id, segment_id), lambda: self.data_path(topic, segment_id)
            ) as file:
                found = flags_of(file, entry)
            if found is None:
                raise Corrupt("size of a sealed file has changed", file.path)
            return found

        return SealedColumns(segment_id, entry.first_seq, entry.last_seq, load, flags, bad_rows)

    def open(self, topic: ListedTopic, entry: SegmentEntry) -> SealedColumns:
        """Columns of a segment as found at start: checked, repaired, or blank."""
        idx_path, data_path = self._tiers.paths(entry.tier, topic.topic_id, entry.segment_id)
        bad_rows = found_flags(self._fs, data_path, entry)
        if bad_rows is None:
            return _blank(topic, entry)
        try:
            load_index(self._fs, idx_path, topic.topic_id, entry, verify=True)
        except Corrupt:
            if not repair_index(self._fs, idx_path, data_path):
                return _blank(topic, entry)
        return self.make(topic, entry, bad_rows)

    def data_path(self, topic: ListedTopic, segment_id: int) -> str:
        """Where a segment's records lie now. Raises `StorageError` if it was dropped."""
        tier = topic.entry(segment_id).tier
        return self._tiers.data_path(tier, topic.topic_id, segment_id)

    def _note(self, index: SealedColumns) -> None:
        with self._lock:
            self._mapped.append(index)
            oldest = self._mapped.popleft() if len(self._mapped) > self._max_mapped else None
        if oldest is not None:
            oldest.unmap()


def _blank(topic: ListedTopic, entry: SegmentEntry) -> SealedColumns:
    columns = blank_columns(
        topic.topic_id, entry.segment_id, entry.first_seq, entry.record_count, entry.last_ts
    )
    return SealedColumns(
        entry.segment_id,
        entry.first_seq,
        entry.last_seq,
        lambda index: columns,
        lambda: bytes(entry.record_count),
    )
