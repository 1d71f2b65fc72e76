"""A data directory as a place of sealed segments. Reads manifests and delete flags only."""

from __future__ import annotations

import os
from typing import Final

from spark_jobs.reader.places.segment import Segment, open_file
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.format.manifest import Manifest, SegmentEntry, decode_manifest

# Manifests by topic id, with the identity of their file, which changes when the file is replaced.
Manifests = dict[int, tuple[tuple[int, int, int], Manifest]]


class FolderPlace:
    """See `SealedPlace`.

    `manifests`: those of an earlier place, by topic id; unchanged ones are reused. Raises
    `StartRefused` for a folder that is no data directory.
    """

    has_fixed_flags: Final = False
    as_of_ts: Final = None
    problems: Final[tuple[StorageError, ...]] = ()

    def __init__(self, data_dir: str, cold_dir: str | None, manifests: Manifests) -> None:
        if not os.path.isdir(data_dir):
            raise StartRefused("there is no such data directory", data_dir)
        if not os.path.exists(layout.join(data_dir, layout.FORMAT)):
            raise StartRefused("is not a data directory: it has no FORMAT", data_dir)
        self._root: Final = layout.join(data_dir, layout.SEGMENTS)
        self._cold_dir: Final = cold_dir
        self._manifests: Final = manifests

    def topic_ids(self) -> list[int]:
        """See `SealedPlace`."""
        names = os.listdir(self._root) if os.path.isdir(self._root) else []
        topic_ids = sorted(filter(None, map(layout.parse_topic_dir, names)))
        for topic_id in self._manifests.keys() - set(topic_ids):
            del self._manifests[topic_id]
        return topic_ids

    def manifest(self, topic_id: int) -> Manifest | None:
        """See `SealedPlace`. A manifest that was not replaced is decoded once."""
        known = self._manifests
        path = layout.join(self._root, layout.topic_dir(topic_id), layout.MANIFEST)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                mark = (status.st_ino, status.st_mtime_ns, status.st_size)
                if topic_id in known and known[topic_id][0] == mark:
                    return known[topic_id][1]
                encoded = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None  # files of a topic that is being dropped
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", path) from None
        manifest = decoded_manifest(encoded, topic_id, path)
        known[topic_id] = (mark, manifest)
        return manifest

    def segment(self, manifest: Manifest, entry: SegmentEntry, since_ts: int) -> Segment:
        """See `SealedPlace`."""
        return Segment(
            manifest.name,
            manifest.topic_id,
            manifest.epoch,
            self._root,
            self._cold_dir,
            entry,
            manifest.evict_floor,
            since_ts,
            end_row=entry.record_count,
        )

    def flags(self, segment: Segment) -> bytes:
        """See `SealedPlace`."""
        return read_flags(segment)

    def has_files(self, topic_id: int) -> bool:
        """See `SealedPlace`."""
        roots = [self._root, *([self._cold_dir] if self._cold_dir is not None else [])]
        return any(segment_files(layout.join(root, layout.topic_dir(topic_id))) for root in roots)


def segment_files(folder: str) -> list[str]:
    """Names of segment files in a topic's folder; none if the folder does not exist."""
    try:
        return sorted(filter(layout.parse_segment_file, os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def decoded_manifest(encoded: bytes, topic_id: int, path: str) -> Manifest:
    """A topic's manifest. Raises `Corrupt`, `StartRefused` for a newer format."""
    try:
        manifest = decode_manifest(encoded)
    except StorageError as error:
        raise type(error)(str(error), path) from None
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt(f"its body cannot be read: {error}", path) from None
    if manifest.topic_id != topic_id:
        raise Corrupt(f"is the manifest of topic {manifest.topic_id}", path)
    return manifest


def read_flags(segment: Segment) -> bytes:
    """Read the delete flags behind the records. Raises `SegmentGone`, `Corrupt`."""
    file = open_file(segment, layout.DATA_SUFFIX)
    try:
        size, count = file.size(), segment.entry.record_count
        if size != segment.stored_bytes:
            raise Corrupt(f"{size} bytes, listed with {segment.stored_bytes}", file.path)
        return file.read(size - count, count)
    finally:
        file.close()
