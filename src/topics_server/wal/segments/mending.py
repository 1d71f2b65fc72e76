"""Replaces the damaged files of a segment with undamaged copies.

`prepare` writes the copies beside the damaged files and checks them against the manifest. It
changes nothing else, so a killed server leaves only temporary files, which the next start removes.
`put` keeps each damaged file in quarantine and puts the copy in its place. If the delete flags that
were synced last cannot be restored exactly, the segment is not changed: no deleted record may come
back. Called by `wal/segments/store.py`, which holds the topic's lock around `put`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from topics_server.runtime.metrics import log
from topics_server.values.errors import Corrupt, DiskFull, StorageError
from topics_server.values.file_inventory import FlagsDigest, KnownFlags
from topics_server.values.limits import MIB
from topics_server.wal import layout
from topics_server.wal.atomic_write import remove_quietly, rename_temp, write_temp
from topics_server.wal.format.manifest import SegmentEntry
from topics_server.wal.format.segment import DEAD, SegmentColumns, decode_index
from topics_server.wal.fs import Fs
from topics_server.wal.segments.files import (
    Tiers,
    check_header,
    digest_of,
    has_sound_stamps,
    is_whole,
    load_index,
    mended,
    read_flags,
    write_flags,
)
from topics_server.wal.segments.index import SealedColumns
from topics_server.wal.segments.maps import IndexMaps
from topics_server.wal.segments.quarantine import Quarantine
from topics_server.wal.segments.salvage import rebuild_index
from topics_server.wal.segments.topic_manifest import TopicManifest


class SegmentCopies(Protocol):
    """Undamaged copies of segments in another place. All calls block."""

    def data(self, topic_id: int, entry: SegmentEntry) -> Iterator[bytes]:
        """Header and records of a segment, without flags. Raises `StorageError` without a copy.

        When the content ends, it is compared with the checksum of the entry.
        """
        ...

    def idx(self, topic_id: int, entry: SegmentEntry) -> bytes:
        """The columns of a segment. Raises `StorageError` if they are missing or damaged."""
        ...

    def flags(self, topic_id: int, segment_id: int) -> Iterator[bytes]:
        """Delete flags that the segment had once, newest first. Raises `StorageError`."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedMend:
    """The temporary files of a mend. `has_data`, `has_idx`: whether this file is replaced."""

    topic_id: int
    entry: SegmentEntry
    idx_path: str
    data_path: str
    has_data: bool
    has_idx: bool
    # Older delete flags of the segment.
    older_flags: list[bytes] = field(default_factory=list)


def check_data(
    fs: Fs,
    data_path: str,
    columns: SegmentColumns,
    entry: SegmentEntry,
    flags: FlagsDigest | None,
) -> None:
    """*Blocking.* Check what reads of records do not: header, delete flags, tags and stamps.

    `flags`: the digest of the flags that were synced last. Raises `StorageError` for damage.
    """
    check_header(fs, data_path, columns)
    if columns.is_json and not has_sound_stamps(fs, data_path, columns):
        raise Corrupt("the tags or the stamps of its records are damaged", data_path)
    found = read_flags(fs, data_path, entry)
    if flags is not None and (found is None or digest_of(found) != flags):
        raise Corrupt("its delete flags are not those that were synced last", data_path)


def prepare(
    fs: Fs,
    tiers: Tiers,
    topic_id: int,
    entry: SegmentEntry,
    copies: SegmentCopies,
    known: KnownFlags,
) -> PreparedMend:
    """*Blocking.* Write new copies of the damaged files beside them. Raises `StorageError`."""
    idx_path, data_path = tiers.paths(entry.tier, topic_id, entry.segment_id)
    has_data = not _is_sound(fs, data_path, entry)
    mend = PreparedMend(topic_id, entry, idx_path, data_path, has_data, has_idx=False)
    try:
        if has_data:
            size = write_temp(fs, data_path, _with_room(copies.data(topic_id, entry), entry))
            if size != entry.data_bytes:
                raise Corrupt("has another size than the manifest says", layout.temp(data_path))
        if not _has_index(fs, idx_path, topic_id, entry):
            write_temp(fs, idx_path, [_index(fs, mend, copies)])
            mend = PreparedMend(topic_id, entry, idx_path, data_path, has_data, has_idx=True)
        if _right_flags(fs, mend, known) is None:
            mend.older_flags.extend(copies.flags(topic_id, entry.segment_id))
    except BaseException:
        discard(fs, mend)
        raise
    return mend


def put(fs: Fs, mend: PreparedMend, known: KnownFlags, keep: Callable[[str], None]) -> None:
    """*Blocking.* Give the copies their names. `keep` is called with each file that is replaced.

    Raises `StorageError` if the flags that were synced last cannot be restored.
    """
    entry = mend.entry
    try:
        flags = _right_flags(fs, mend, known)
        if flags is None:
            raise Corrupt("its delete flags are lost, and no copy has them", mend.data_path)
        has_data = mend.has_data
        if not has_data and _flags_on_disk(fs, mend) != flags:
            # The records of the segment are undamaged.
            write_temp(fs, mend.data_path, _chunks(fs, mend.data_path, entry))
            has_data = True
        if has_data:
            write_flags(fs, layout.temp(mend.data_path), entry, flags)
        for path, is_new in ((mend.idx_path, mend.has_idx), (mend.data_path, has_data)):
            if is_new:
                if fs.exists(path):
                    keep(path)
                rename_temp(fs, path)
        fs.sync_dir(layout.parent(mend.data_path))
    finally:
        discard(fs, mend)


def discard(fs: Fs, mend: PreparedMend) -> None:
    """*Blocking.* Remove the remaining temporary files."""
    for path in (mend.idx_path, mend.data_path):
        remove_quietly(fs, layout.temp(path))


# -- flags -----------------------------------------------------------------------------------------


def _right_flags(fs: Fs, mend: PreparedMend, known: KnownFlags) -> bytes | None:
    """The flags that were synced last, from any source; their digest proves it."""
    local = _flags_on_disk(fs, mend)
    older = ([] if local is None else [local]) + mend.older_flags
    for flags in _candidates(older, known):
        if len(flags) == mend.entry.record_count and digest_of(flags) == known.digest:
            return flags
    return None if local is None else mended(local, known.digest)


def _candidates(older: list[bytes], known: KnownFlags) -> Iterator[bytes]:
    yield from older
    deleted = (np.frombuffer(known.deleted, "u1") * DEAD).astype("u1").tobytes()
    first = known.first_row
    for flags in [*older, bytes(len(deleted))]:
        yield flags[:first] + deleted[first:]


def _flags_on_disk(fs: Fs, mend: PreparedMend) -> bytes | None:
    try:
        return read_flags(fs, mend.data_path, mend.entry)
    except StorageError:
        return None


# -- files -----------------------------------------------------------------------------------------


def _is_sound(fs: Fs, path: str, entry: SegmentEntry) -> bool:
    """Whether the records of a `.data` are readable and match the manifest's checksum."""
    try:
        return is_whole(fs, path, entry)
    except StorageError:
        return False


def _has_index(fs: Fs, path: str, topic_id: int, entry: SegmentEntry) -> bool:
    """Whether an `.idx` is undamaged, and was not rebuilt from damaged records."""
    try:
        columns = load_index(fs, path, topic_id, entry, verify=True)
    except StorageError:
        return False
    return bool((columns.rows["xxh3"] != 0).all())


def _index(fs: Fs, mend: PreparedMend, copies: SegmentCopies) -> bytes:
    """The columns from the other place, or rebuilt from the undamaged records."""
    try:
        content = copies.idx(mend.topic_id, mend.entry)
        if bool((decode_index(content, verify=False).rows["xxh3"] != 0).all()):
            return content
    except StorageError:
        pass
    path = layout.temp(mend.data_path) if mend.has_data else mend.data_path
    return rebuild_index(b"".join(_chunks(fs, path, mend.entry)), mend.topic_id, mend.entry)


def _with_room(chunks: Iterator[bytes], entry: SegmentEntry) -> Iterator[bytes]:
    """The bytes of the records, then a zero byte for the delete flag of each record."""
    yield from chunks
    yield bytes(entry.record_count)


def _chunks(fs: Fs, path: str, entry: SegmentEntry) -> Iterator[bytes]:
    """All bytes of a `.data`, flags included."""
    file = fs.open(path)
    try:
        at = 0
        while chunk := file.pread(MIB, at):
            at += len(chunk)
            yield chunk
        if at != entry.data_bytes:
            raise Corrupt("has another size than the manifest says", path)
    finally:
        file.close()


# -- indexes ---------------------------------------------------------------------------------------


class IndexFiles:
    """Replaces damaged index files of a running server by indexes from the records.

    The damaged files go to quarantine. Any thread may call it; it takes the topic's lock.
    """

    def __init__(
        self,
        fs: Fs,
        tiers: Tiers,
        maps: IndexMaps,
        quarantine: Quarantine,
        topic_of: Callable[[int], TopicManifest],
    ) -> None:
        self._fs: Final = fs
        self._tiers: Final = tiers
        self._maps: Final = maps
        self._quarantine: Final = quarantine
        self._topic: Final = topic_of
        # The segments whose index a thread checks.
        self._mending: Final[set[tuple[int, int]]] = set()
        self._lock: Final = threading.Lock()

    def mend(self, topic_id: int, segment_id: int) -> None:
        """*Blocking.* Replace the index file of a segment if it is damaged."""
        topic = self._topic(topic_id)
        with topic.lock:
            entry, index = topic.entries.get(segment_id), topic.indexes.get(segment_id)
            if entry is not None and index is not None:
                with contextlib.suppress(Corrupt):
                    self.check(topic, entry, index)

    def mend_soon(self, topic_id: int, segment_id: int) -> None:
        """`mend` on a thread of its own, because the caller may be the loop."""
        key = topic_id, segment_id
        with self._lock:
            if key in self._mending:
                return
            self._mending.add(key)

        def run() -> None:
            try:
                self.mend(topic_id, segment_id)
            except StorageError as error:
                log.warning("the index of segment %d cannot be mended: %s", segment_id, error)
            finally:
                with self._lock:
                    self._mending.discard(key)

        threading.Thread(target=run, name="mend-index", daemon=True).start()

    def check(
        self, topic: TopicManifest, entry: SegmentEntry, index: SealedColumns
    ) -> SegmentColumns:
        """*Blocking.* The verified columns of the file; the caller holds the topic's lock.

        Raises `Corrupt` for damage, after it replaced the file. If the disk refuses the new file,
        its content stays in memory.
        """
        path = self._tiers.idx_path(entry.tier, topic.topic_id, entry.segment_id)
        try:
            columns = load_index(self._fs, path, topic.topic_id, entry, verify=True)
        except Corrupt:
            content = self._maps.rebuild(topic, index)
            index.is_reported = True
            try:
                self.replace(topic, entry, content, index)
            except StorageError as error:
                log.warning("the index %s is rebuilt in memory only: %s", path, error)
            raise
        if not index.is_reported:
            # Only one reading of the file was damaged.
            index.release()
        return columns

    def replace(
        self, topic: TopicManifest, entry: SegmentEntry, content: bytes, index: SealedColumns
    ) -> None:
        """Write a rebuilt index, and keep the damaged one in quarantine."""
        path = self._tiers.idx_path(entry.tier, topic.topic_id, entry.segment_id)
        log.warning("the index %s is damaged: rebuilding it from its records", path)
        try:
            copy = self._quarantine.keep(topic.topic_id, path)
            topic.quarantined[copy] = self._fs.file_size(copy)
            write_temp(self._fs, path, [content])
        except DiskFull as error:
            log.warning("the index %s is rebuilt in memory only: %s", path, error)
            return
        rename_temp(self._fs, path)
        self._fs.sync_dir(layout.parent(path))
        index.release()
