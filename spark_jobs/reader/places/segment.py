"""One listed segment, with the paths of its files; executors open the files from it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from spark_jobs.reader.places.files import BucketObject, LocalFile, OpenFile
from topics_server.values.errors import NotThere, StorageError
from topics_server.wal import layout
from topics_server.wal.format.manifest import COLD, HOT, SegmentEntry

_NO_TIME: Final = -(2**63)


class SegmentGone(StorageError):
    """A listed segment's files are in neither folder, or its object is not in the archive."""


@dataclass(frozen=True, slots=True)
class SegmentObjects:
    """A segment's objects in an archive. `root`: the path of a folder, or the URL of a bucket.

    `has_flags`: the object is a copy of a damaged file, with its delete flags. The flags of all
    other objects are in the base.
    """

    root: str
    data: str
    idx: str
    has_flags: bool

    @property
    def is_in_bucket(self) -> bool:
        """Whether the objects are in a bucket, so that each read is a request."""
        return "://" in self.root


@dataclass(frozen=True, slots=True)
class Segment:
    """One listed segment. It is picklable, because its partition is sent to an executor.

    Rows below `floor_seq` or before `since_ts` are no longer served. `dead`: flags of the listing,
    one bit a row, compressed; empty if none is set; None if they are read with the rows.
    `first_row` and `end_row` cut a large segment into pieces. `objects`: the objects of a segment
    in an archive, which has no files in the folders.
    """

    topic: str
    topic_id: int
    epoch: int
    hot_dir: str
    cold_dir: str | None
    entry: SegmentEntry
    floor_seq: int = 0
    since_ts: int = _NO_TIME
    dead: bytes | None = None
    first_row: int = 0
    end_row: int = 0
    objects: SegmentObjects | None = None

    @property
    def stored_bytes(self) -> int:
        """How many bytes the file or object with the records must have."""
        if self.objects is None or self.objects.has_flags:
            return self.entry.data_bytes
        return self.entry.data_bytes - self.entry.record_count

    def paths(self, suffix: str) -> list[str]:
        """The possible paths of the file: in the listed folder, then in the other one."""
        if self.objects is not None:
            return [f"{self.objects.root}/{_object_of(self.objects, suffix)}"]
        name = layout.segment_data(self.entry.segment_id)
        if suffix == layout.IDX_SUFFIX:
            name = layout.segment_idx(self.entry.segment_id)
        roots = {HOT: self.hot_dir, COLD: self.cold_dir}
        order = (COLD, HOT) if self.entry.tier == COLD else (HOT, COLD)
        return [
            layout.join(root, layout.topic_dir(self.topic_id), name)
            for tier in order
            if (root := roots[tier]) is not None
        ]

    def dead_rows(self) -> np.ndarray | None:
        """Flags as of the listing, True for dead rows; None if they are read with the rows."""
        if self.dead is None:
            return None
        count = self.entry.record_count
        if not self.dead:
            return np.zeros(count, "?")
        packed = np.frombuffer(zlib.decompress(self.dead), "u1")
        return np.unpackbits(packed, count=count).astype("?")


def open_file(segment: Segment, suffix: str) -> OpenFile:
    """A segment's file in either folder, or its object. Raises `SegmentGone`, `StorageError`."""
    paths, objects = segment.paths(suffix), segment.objects
    try:
        if objects is not None and objects.is_in_bucket:
            return BucketObject(objects.root, _object_of(objects, suffix))
        return _open_path(paths)
    except NotThere:
        raise SegmentGone(_why_gone(segment), paths[0]) from None


def _open_path(paths: list[str]) -> OpenFile:
    for path in paths:
        try:
            return LocalFile(path)
        except NotThere:
            continue
    # the file may have moved meanwhile, so try the first folder again
    return LocalFile(paths[0])


def _object_of(objects: SegmentObjects, suffix: str) -> str:
    return objects.idx if suffix == layout.IDX_SUFFIX else objects.data


def _why_gone(segment: Segment) -> str:
    entry = segment.entry
    where = f"seqs {entry.first_seq}..{entry.last_seq} of {segment.topic}"
    if segment.objects is not None:
        return (
            f"{where} are in the base that was listed and this object is not in the archive: it "
            "was pruned since the listing (read again), or it is lost (topics archive verify)"
        )
    if entry.tier == COLD and segment.cold_dir is None:
        return f"{where} are in the cold folder: name it with the option coldDir"
    return (
        f"{where} are listed and their file is in neither folder: it was dropped since the listing "
        "(read again), the cold folder is not named (option coldDir) or not mounted, or it is lost"
    )
