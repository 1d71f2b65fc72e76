"""The newest base of an archive as a place of sealed segments; driver only.

A base has the manifests and the delete flags of all topics as of one moment, and names the objects
of all segments. So only the parts are listed: the newest part names the newest base, and every read
has the state of one base. Records that were sealed or deleted later are in the next base; unsealed
records are not read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from spark_jobs.reader.places.folder import decoded_manifest, read_flags
from spark_jobs.reader.places.segment import Segment, SegmentObjects
from topics_server.archive.continuous.bases import ArchiveBase, ArchiveBases
from topics_server.archive.continuous.format import BASES, KeptBase
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.places.opening import open_archive
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.archive.continuous.verifying import owner_of
from topics_server.archive.format import SealedSegment, SealedTopic, decode_sealed
from topics_server.archive.object_store import ObjectStore
from topics_server.values.errors import Corrupt, NotThere, StartRefused, StorageError
from topics_server.wal.format.manifest import Manifest, SegmentEntry
from topics_server.wal.fs import OsFs

# How often the newest base is looked up again if a prune has removed the base that was found.
_ATTEMPTS: Final = 5


@dataclass(slots=True)
class SealedBase:
    """The content of a base: the selected topics with the objects and flags of their segments.

    `flags`: compressed, by topic and segment; None if the object holds its flags. `problems`:
    errors of unreadable objects of the base, with the topics in them.
    """

    base: KeptBase
    ts_ms: int
    manifests: dict[int, Manifest] = field(default_factory=dict)
    objects: dict[tuple[int, int], SegmentObjects] = field(default_factory=dict)
    flags: dict[tuple[int, int], bytes | None] = field(default_factory=dict)
    problems: list[StorageError] = field(default_factory=list)


class ArchivePlace:
    """See `SealedPlace`. `root`: the path of a folder, or the URL of a bucket.

    `known`: the base of an earlier place, which is reused if there is no newer base. Raises
    `StorageError` naming the object.
    """

    has_fixed_flags: Final = True

    def __init__(
        self, root: str, known: SealedBase | None, wants_topic: Callable[[str], bool]
    ) -> None:
        self._root: Final = root
        self._wants_topic: Final = wants_topic
        is_bucket = "://" in root
        store = open_archive(OsFs(), root) if is_bucket else SharedFolder.open(OsFs(), root)
        try:
            self.base: Final = self._newest(store, known)
        finally:
            store.close()

    @property
    def as_of_ts(self) -> int:
        """See `SealedPlace`."""
        return self.base.ts_ms

    @property
    def problems(self) -> list[StorageError]:
        """See `SealedPlace`."""
        return self.base.problems

    def topic_ids(self) -> list[int]:
        """See `SealedPlace`."""
        return sorted(self.base.manifests)

    def manifest(self, topic_id: int) -> Manifest | None:
        """See `SealedPlace`."""
        return self.base.manifests.get(topic_id)

    def segment(self, manifest: Manifest, entry: SegmentEntry, since_ts: int) -> Segment:
        """See `SealedPlace`."""
        return Segment(
            manifest.name,
            manifest.topic_id,
            manifest.epoch,
            "",
            None,
            entry,
            manifest.evict_floor,
            since_ts,
            end_row=entry.record_count,
            objects=self.base.objects[manifest.topic_id, entry.segment_id],
        )

    def flags(self, segment: Segment) -> bytes:
        """See `SealedPlace`. The flags of a damaged file are in that file."""
        packed = self.base.flags[segment.topic_id, segment.entry.segment_id]
        return read_flags(segment) if packed is None else zlib.decompress(packed)

    def has_files(self, topic_id: int) -> bool:
        """See `SealedPlace`: a base has no segment without a manifest."""
        return False

    # -- reading the base ----------------------------------------------------------------------

    def _newest(self, store: ObjectStore, known: SealedBase | None) -> SealedBase:
        """The newest base; returns the known base if it is still the newest."""
        owner = owner_of(store)
        history = ArchiveHistory(store)
        bases = ArchiveBases(store, history)
        newest = bases.newest()
        for attempt in range(_ATTEMPTS):
            if newest is None:
                raise StartRefused(
                    "the archive has no base yet: nothing can be read", store.path_of(BASES)
                )
            if known is not None and known.base == newest:
                return known
            try:
                return self._read(bases.opened(newest), newest, owner.store_id)
            except StorageError:
                found, newest = newest, bases.newest()
                if newest == found or attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _read(self, opened: ArchiveBase, base: KeptBase, store_id: str) -> SealedBase:
        backup = opened.backup
        if backup.facts.store_id != store_id:
            path = backup.store.path_of(backup.folder)
            raise Corrupt(f"is a base of another store ({backup.facts.store_id})", path)
        found = SealedBase(base, opened.ts_ms)
        for piece in backup.facts.sealed:
            path = backup.store.path_of(f"{backup.folder}/{piece.name}")
            try:
                for topic in decode_sealed(backup.piece(piece), path):
                    self._add(found, topic, path)
            except NotThere:
                found.problems.append(Corrupt("is missing, and the base names it", path))
            except Corrupt as error:
                found.problems.append(error)
        return found

    def _add(self, found: SealedBase, topic: SealedTopic, path: str) -> None:
        """Add a topic of the base, if the query selects it."""
        manifest = decoded_manifest(topic.manifest, topic.topic_id, path)
        if not self._wants_topic(manifest.name):
            return
        segments = {each.segment_id: each for each in topic.segments}
        for entry in manifest.segments:
            segment = segments.get(entry.segment_id)
            if segment is None or not _fits(segment, entry):
                raise Corrupt(f"segment {entry.segment_id} of {manifest.name} is not in it", path)
            key = (topic.topic_id, entry.segment_id)
            flags = segment.flags
            found.flags[key] = None if flags is None else zlib.compress(flags, 1)
            found.objects[key] = SegmentObjects(
                self._root, segment.data, segment.idx, has_flags=flags is None
            )
        found.manifests[topic.topic_id] = manifest


def _fits(segment: SealedSegment, entry: SegmentEntry) -> bool:
    return segment.flags is None or len(segment.flags) == entry.record_count
