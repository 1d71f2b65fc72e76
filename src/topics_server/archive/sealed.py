"""Copies segments into a backup folder and back.

A segment's header, records and columns never change, so their objects are named by the checksum of
the records and shared by all backups. Only the delete flags change; each backup has its own. Called
by `backup` and `restore`.

While a server runs, files may vanish between the reading of a manifest and their opening (a segment
is dropped, or moved to the cold folder): then the manifest is read again. An open file stays
readable. The flags may be newer than the manifest; but each delete is synced before its flag is
set, so the journal, which is copied later, has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import xxhash

from topics_server.archive.expected import ExpectedManifests
from topics_server.archive.format import SealedSegment, SealedTopic, segment_object
from topics_server.archive.object_store import ObjectStore
from topics_server.values.errors import Corrupt, NotThere, StorageError
from topics_server.values.limits import MIB
from topics_server.wal import layout
from topics_server.wal.atomic_write import rename_temp, write_temp
from topics_server.wal.format.manifest import (
    HOT,
    SegmentEntry,
    decode_manifest,
    encode_manifest,
)
from topics_server.wal.format.segment import decode_index
from topics_server.wal.fs import File, Fs
from topics_server.wal.segments.files import Tiers

# How often a manifest is read again at most, because its files changed meanwhile.
_TRIES = 10
_DAMAGED = ".damaged"


@dataclass(slots=True)
class CopyCounts:
    """Counts of a copy: `bytes` of all segments, `copied_bytes` of the new objects."""

    segments: int = 0
    bytes: int = 0
    copied_bytes: int = 0


class SealedCopier:
    """Copies the segments of one data directory. `check` is called between chunks and may raise."""

    def __init__(
        self,
        fs: Fs,
        store: ObjectStore,
        tiers: Tiers,
        check: Callable[[], None],
        expected: ExpectedManifests,
    ) -> None:
        self._expected = expected
        self._fs = fs
        self._store = store
        self._tiers = tiers
        self._check = check
        self.counts = CopyCounts()
        self.damaged: set[str] = set()

    def topic_ids(self) -> list[int]:
        """The topics that have a folder now."""
        found = map(layout.parse_topic_dir, self._fs.list_dir(self._tiers.hot))
        return sorted(topic_id for topic_id in found if topic_id is not None)

    def copy(self, topic_id: int) -> SealedTopic | None:
        """Store all objects of the topic's segments; return its manifest and segments.

        None if it has no manifest. Raises `StorageError`.
        """
        for attempt in range(_TRIES):
            manifest = self._read_manifest(topic_id)
            if manifest is None:
                return None
            try:
                return self._copy(topic_id, manifest)
            except NotThere:
                if attempt + 1 == _TRIES:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _read_manifest(self, topic_id: int) -> bytes | None:
        path = layout.join(self._tiers.folder(HOT, topic_id), layout.MANIFEST)
        try:
            file = self._fs.open(path)
        except NotThere:
            return None
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()

    def _copy(self, topic_id: int, encoded: bytes) -> SealedTopic:
        path = layout.join(self._tiers.folder(HOT, topic_id), layout.MANIFEST)
        try:
            manifest = decode_manifest(encoded)
        except StorageError as error:
            raise type(error)(str(error), path) from None
        if manifest.topic_id != topic_id:
            raise Corrupt(f"is the manifest of topic {manifest.topic_id}", path)
        self._expected.note_found(manifest)
        segments = [self._copy_segment(topic_id, entry) for entry in manifest.segments]
        self.counts.segments += len(segments)
        self.counts.bytes += sum(e.data_bytes + e.idx_bytes for e in manifest.segments)
        return SealedTopic(topic_id, encoded, segments)

    def _copy_segment(self, topic_id: int, entry: SegmentEntry) -> SealedSegment:
        data, flags = self._copy_data(topic_id, entry)
        return SealedSegment(entry.segment_id, data, self._copy_idx(topic_id, entry), flags)

    def _copy_data(self, topic_id: int, entry: SegmentEntry) -> tuple[str, bytes | None]:
        name = segment_object(topic_id, entry.segment_id, entry.data_checksum, layout.DATA_SUFFIX)
        path = self._tiers.data_path(entry.tier, topic_id, entry.segment_id)
        end = entry.data_bytes - entry.record_count
        file = self._fs.open(path)
        try:
            if file.size() == entry.data_bytes:
                flags = file.pread(entry.record_count, end)
                stored = self._stored_size(name)
                if stored == end:
                    return name, flags
                if self._hash_of(file, end) == entry.data_checksum:
                    if stored is not None:
                        # The stored object is cut off; replacing it mends every backup that needs
                        # it.
                        self._store.delete(name)
                    self._put(name, file, end, entry.data_checksum)
                    return name, flags
            return self._put_damaged(topic_id, entry.segment_id, layout.DATA_SUFFIX, file), None
        finally:
            file.close()

    def _copy_idx(self, topic_id: int, entry: SegmentEntry) -> str:
        name = segment_object(topic_id, entry.segment_id, entry.data_checksum, layout.IDX_SUFFIX)
        path = self._tiers.idx_path(entry.tier, topic_id, entry.segment_id)
        file = self._fs.open(path)
        try:
            stored = self._stored_size(name)
            if stored == entry.idx_bytes:
                return name
            content = file.pread(file.size(), 0)
            if not _is_index_of(content, entry):
                return self._put_damaged(topic_id, entry.segment_id, layout.IDX_SUFFIX, file)
            if stored is not None and stored != len(content):
                self._store.delete(name)
            if self._store.put_if_absent(name, [content]):
                self.counts.copied_bytes += len(content)
            return name
        finally:
            file.close()

    def _stored_size(self, name: str) -> int | None:
        """Make a stored object durable and return its length; None if it does not exist."""
        size = self._store.size(name)
        if size is not None:
            self._store.make_durable(name)
        return size

    def _put_damaged(self, topic_id: int, segment_id: int, suffix: str, file: File) -> str:
        """Store a damaged file unchanged, under a name of its own."""
        size = file.size()
        checksum = self._hash_of(file, size)
        name = segment_object(topic_id, segment_id, checksum, _DAMAGED + suffix)
        self.damaged.add(file.path)
        self._put(name, file, size, checksum)
        return name

    def _put(self, name: str, file: File, size: int, checksum: int) -> None:
        if self._store.put_if_absent(name, self._chunks(file, size, checksum)):
            self.counts.copied_bytes += size

    def _hash_of(self, file: File, size: int) -> int:
        digest = xxhash.xxh3_64()
        for chunk in self._plain_chunks(file, size):
            digest.update(chunk)
        return digest.intdigest()

    def _chunks(self, file: File, size: int, checksum: int) -> Iterator[bytes]:
        """Read the bytes again; raises at the end if they differ from those that were hashed."""
        digest = xxhash.xxh3_64()
        for chunk in self._plain_chunks(file, size):
            digest.update(chunk)
            yield chunk
        if digest.intdigest() != checksum:
            raise StorageError("changed while it was copied", file.path)

    def _plain_chunks(self, file: File, size: int) -> Iterator[bytes]:
        for at in range(0, size, MIB):
            self._check()
            chunk = file.pread(min(MIB, size - at), at)
            if len(chunk) < min(MIB, size - at):
                raise StorageError("became shorter while it was copied", file.path)
            yield chunk


def _is_index_of(content: bytes, entry: SegmentEntry) -> bool:
    try:
        columns = decode_index(content)
    except StorageError:
        return False
    return (columns.segment_id, columns.data_checksum) == (entry.segment_id, entry.data_checksum)


# -- the way back ----------------------------------------------------------------------------------


def restore_topic(
    fs: Fs, store: ObjectStore, segments_dir: str, topic: SealedTopic, store_id: str
) -> int:
    """*Blocking.* Write a topic's folder, all segments hot; returns how many bytes.

    Raises `Corrupt` with the object's name.
    """
    folder = layout.join(segments_dir, layout.topic_dir(topic.topic_id))
    manifest = decode_manifest(topic.manifest)
    entries = {entry.segment_id: entry for entry in manifest.segments}
    fs.make_dir(folder)
    written = 0
    for segment in topic.segments:
        entry = entries[segment.segment_id]
        path = layout.join(folder, layout.segment_data(segment.segment_id))
        flags = b"" if segment.flags is None else segment.flags
        written += _write(fs, path, _with_flags(object_chunks(store, segment.data), flags))
        path = layout.join(folder, layout.segment_idx(segment.segment_id))
        written += _write(fs, path, _index_chunks(store, segment.idx, entry))
    hot = tuple(replace(entry, tier=HOT) for entry in manifest.segments)
    content = encode_manifest(replace(manifest, segments=hot, store_id=store_id))
    written += _write(fs, layout.join(folder, layout.MANIFEST), [content])
    fs.sync_dir(folder)
    return written


def problems_of(store: ObjectStore, topic: SealedTopic) -> Iterator[str]:
    """*Blocking.* Read every object of the topic; a line for each that is damaged or missing."""
    try:
        manifest = decode_manifest(topic.manifest)
    except StorageError as error:
        yield f"the manifest of topic {topic.topic_id}: {error}"
        return
    entries = {entry.segment_id: entry for entry in manifest.segments}
    if entries.keys() != {segment.segment_id for segment in topic.segments}:
        yield f"the segments of topic {topic.topic_id} do not fit its manifest"
        return
    for segment in topic.segments:
        entry = entries[segment.segment_id]
        for chunks in (
            object_chunks(store, segment.data),
            _index_chunks(store, segment.idx, entry),
        ):
            try:
                for _ in chunks:
                    pass
            except StorageError as error:
                yield str(error)


def object_chunks(store: ObjectStore, name: str) -> Iterator[bytes]:
    """The content of an object whose name has its checksum; compares that at the end."""
    digest = xxhash.xxh3_64()
    for chunk in store.read(name):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != _checksum_in(name):
        raise Corrupt("fails its check", store.path_of(name))


def _index_chunks(store: ObjectStore, name: str, entry: SegmentEntry) -> Iterator[bytes]:
    """The content of an index; the name of an undamaged one has the checksum of its records."""
    if _DAMAGED in name:
        yield from object_chunks(store, name)
        return
    yield index_content(store, name, entry)


def index_content(store: ObjectStore, name: str, entry: SegmentEntry) -> bytes:
    """The columns of a segment, checked. Raises `Corrupt`."""
    content = b"".join(store.read(name))
    if not _is_index_of(content, entry):
        raise Corrupt("fails its check", store.path_of(name))
    return content


def _checksum_in(name: str) -> str:
    return name.rpartition("-")[2].partition(".")[0]


def _with_flags(chunks: Iterator[bytes], flags: bytes) -> Iterator[bytes]:
    yield from chunks
    if flags:
        yield flags


def _write(fs: Fs, path: str, pieces: Iterator[bytes] | list[bytes]) -> int:
    size = write_temp(fs, path, pieces)
    rename_temp(fs, path)
    return size
