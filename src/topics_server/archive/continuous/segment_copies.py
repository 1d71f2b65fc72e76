"""The segments of an archive, as copies for a server with damaged segments.

A segment's objects are named by the checksum in its manifest entry, so no listing is needed, and a
copy of another history has another name. Read by `wal/segments/mending`; made by `node/mending`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from topics_server.archive.continuous.bases import ArchiveBases
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.format import segment_object
from topics_server.archive.object_store import ObjectStore
from topics_server.archive.sealed import index_content, object_chunks
from topics_server.runtime.clock import pause
from topics_server.values.errors import StorageError
from topics_server.wal import layout
from topics_server.wal.format.manifest import SegmentEntry


class ArchivedSegments:
    """The segments of one archive. *Blocking.*"""

    def __init__(self, store: ObjectStore, bytes_per_s: int, check: Callable[[], None]) -> None:
        """`bytes_per_s`: the maximum rate at which records are read; 0: no limit.

        `check` is called between chunks; an error that it raises ends the copy.
        """
        self._store: Final = store
        self._bytes_per_s: Final = bytes_per_s
        self._check: Final = check

    def data(self, topic_id: int, entry: SegmentEntry) -> Iterator[bytes]:
        """See `SegmentCopies`."""
        for chunk in object_chunks(self._store, _name(topic_id, entry, layout.DATA_SUFFIX)):
            self._check()
            yield chunk
            if self._bytes_per_s:
                pause(len(chunk) / self._bytes_per_s)

    def idx(self, topic_id: int, entry: SegmentEntry) -> bytes:
        """See `SegmentCopies`."""
        self._check()
        return index_content(self._store, _name(topic_id, entry, layout.IDX_SUFFIX), entry)

    def flags(self, topic_id: int, segment_id: int) -> Iterator[bytes]:
        """See `SegmentCopies`: the flags in the bases; skips unreadable bases."""
        bases = ArchiveBases(self._store, ArchiveHistory(self._store))
        for kept in bases.kept():
            self._check()
            try:
                for topic in bases.opened(kept).backup.sealed():
                    if topic.topic_id != topic_id:
                        continue
                    for segment in topic.segments:
                        if segment.segment_id == segment_id and segment.flags is not None:
                            yield segment.flags
            except StorageError:
                continue


def _name(topic_id: int, entry: SegmentEntry, suffix: str) -> str:
    return segment_object(topic_id, entry.segment_id, entry.data_checksum, suffix)
