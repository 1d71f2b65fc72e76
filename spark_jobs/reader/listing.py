"""Manifests of a data directory to the list of its sealed segments: one snapshot.

A manifest is replaced atomically, so each topic's list is one of its states. The listing includes
the delete flags (a delete never changes records, it only flags them). So all later reads of a
listing see its state, whatever the server deletes, moves to the cold folder or seals meanwhile. If
the files of a segment are gone, the segment was dropped; reading it raises an error and never
returns fewer rows silently. Runs on the driver. Reads manifests and flags only.
"""

from __future__ import annotations

import os
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from spark_jobs.reader.query import Query
from spark_jobs.reader.report import Skipped
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.format.manifest import COLD, HOT, Manifest, SegmentEntry, decode_manifest
from topics_server.wal.format.segment import LIVE, damaged_flags

_ATTEMPTS: Final = 5
_THREADS: Final = 8
# Above this number of segments or records, executors read the flags: see `Query.flags_may_wait`.
FLAG_SEGMENTS_MAX: Final = 4_096
FLAG_RECORDS_MAX: Final = 200_000_000

# Manifests by topic id, with the file identity that tells whether the file was replaced.
Manifests = dict[int, tuple[tuple[int, int, int], Manifest]]


class SegmentGone(StorageError):
    """A listed segment's files are in neither folder."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sealed segment as listed; picklable, because its partition takes it to an executor.

    Rows below `floor_seq` or before `since_ts` are no longer served. `dead`: flags of the listing,
    one bit a row, compressed; empty if none is set; None if they are read with the rows.
    `first_row` and `end_row` cut a large segment into pieces.
    """

    topic: str
    topic_id: int
    epoch: int
    hot_dir: str
    cold_dir: str | None
    entry: SegmentEntry
    floor_seq: int = 0
    since_ts: int = -(2**63)
    dead: bytes | None = None
    first_row: int = 0
    end_row: int = 0

    def paths(self, suffix: str) -> list[str]:
        """The possible paths of the file: in the listed folder, then in the other one."""
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


@dataclass(slots=True)
class TopicList:
    """A topic of the snapshot. `unsealed`: seqs above the last sealed one, as of its manifest."""

    manifest: Manifest
    segments: list[Segment] = field(default_factory=list)

    @property
    def unsealed(self) -> int:
        """The number of seqs in the manifest that are in no segment; a lower bound."""
        entries = self.manifest.segments
        return max(0, self.manifest.head_seq - (entries[-1].last_seq if entries else 0))


@dataclass(slots=True)
class Listing:
    """All selected topics, their segments that may hold a wanted row, and what was left out."""

    topics: list[TopicList] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def segments(self) -> list[Segment]:
        """The segments of all topics, by topic and seq."""
        return [segment for topic in self.topics for segment in topic.segments]

    @property
    def unsealed(self) -> int:
        """The unsealed seqs of all topics."""
        return sum(topic.unsealed for topic in self.topics)


class Lister:
    """The current manifests of the selected topics, and their segments on request.

    The lister reads only manifests until `list_topic` is called for a topic, and then only the
    flags of the segments that the query selects. So it does not touch files of topics or ranges of
    seqs that the caller did not select. `manifests`: those of an earlier lister by topic id;
    unchanged ones are reused.
    """

    def __init__(
        self,
        data_dir: str,
        query: Query,
        *,
        cold_dir: str | None = None,
        now_ms: int | None = None,
        manifests: Manifests | None = None,
    ) -> None:
        """Read the manifests. Raises `StorageError` naming the file, unless the query is tolerant.

        `now_ms` is the time for TTLs (default: now).
        """
        self._root = layout.join(data_dir, layout.SEGMENTS)
        if not os.path.isdir(data_dir):
            raise StartRefused("there is no such data directory", data_dir)
        if not os.path.exists(layout.join(data_dir, layout.FORMAT)):
            raise StartRefused("is not a data directory: it has no FORMAT", data_dir)
        self._query = query
        self._cold_dir = cold_dir
        self._now_ms = int(time.time() * 1000) if now_ms is None else now_ms
        self._manifests = {} if manifests is None else manifests
        self.skipped: list[Skipped] = []
        self.topics: dict[str, TopicList] = {}
        self.without_manifest: list[int] = []
        if not query.is_empty:
            self._read_all()

    def _read_all(self) -> None:
        """Manifests of the selected topics; the newest incarnation of each name."""
        names = os.listdir(self._root) if os.path.isdir(self._root) else []
        topic_ids = sorted(filter(None, map(layout.parse_topic_dir, names)))
        for topic_id in self._manifests.keys() - set(topic_ids):
            del self._manifests[topic_id]
        newest: dict[str, tuple[int, Manifest]] = {}
        for topic_id in topic_ids:
            try:
                manifest = _read_manifest(self._root, topic_id, self._manifests)
            except StorageError as error:
                self._leave_out(f"topic {topic_id}", str(error.path), (0, 0), error)
                continue
            if manifest is None:
                self.without_manifest.append(topic_id)
                continue
            if not self._query.wants_topic(manifest.name):
                continue
            known = newest.get(manifest.name)
            if known is None or (known[1].epoch, known[0]) < (manifest.epoch, topic_id):
                newest[manifest.name] = (topic_id, manifest)
        for name in sorted(newest):
            self.topics[name] = TopicList(newest[name][1])

    def list_topic(
        self, name: str, query: Query | None = None, *, reads_flags: bool | None = None
    ) -> TopicList | None:
        """A topic's segments that may hold a wanted row, with their flags if the driver reads
        these.

        If files disappear meanwhile, the topic is listed again; None if the topic is gone. `query`
        narrows the one that selected the topics.
        """
        query = self._query if query is None else query
        reads_flags = query.flags_at_listing if reads_flags is None else reads_flags
        manifest: Manifest | None = self.topics[name].manifest
        for attempt in range(_ATTEMPTS):
            if manifest is None:
                return None  # dropped since it was listed
            wanted = self._wanted(manifest, query)
            is_last = attempt == _ATTEMPTS - 1
            try:
                if reads_flags:
                    wanted = self._with_flags(wanted, query, is_strict=not is_last)
            except SegmentGone:
                if is_last:
                    raise
                again = _read_manifest(self._root, manifest.topic_id, None)
                if again == manifest:
                    # the server removes the manifest before the files, so the manifest changes soon
                    time.sleep(0.02)
                manifest = again
                continue
            return TopicList(manifest, wanted)
        return None

    def has_files(self, topic_id: int) -> bool:
        """Whether segments of a topic are in either folder, listed or not."""
        roots = [self._root, *([self._cold_dir] if self._cold_dir is not None else [])]
        return any(segment_files(layout.join(root, layout.topic_dir(topic_id))) for root in roots)

    def count(self) -> tuple[int, int]:
        """The number of segments that the query selects, and of their records."""
        found = [self._wanted(topic.manifest, self._query) for topic in self.topics.values()]
        records = sum(each.entry.record_count for segments in found for each in segments)
        return sum(map(len, found)), records

    def _wanted(self, manifest: Manifest, query: Query) -> list[Segment]:
        """Segments that may hold a wanted row, by their manifest entries."""
        ttl_ms = manifest.config.get("ttl_ms") or 0
        since_ts = self._now_ms - int(ttl_ms) if ttl_ms else -(2**63)
        entries = manifest.segments
        first = bisect_left(entries, query.first_seq, key=lambda entry: entry.last_seq)
        wanted = []
        for entry in entries[first:]:
            if entry.first_seq > query.last_seq:
                break
            if entry.last_ts < query.start_ts or entry.first_ts >= query.end_ts:
                continue
            if query.tier not in ("both", entry.tier):
                continue
            is_lost = entry.last_seq < manifest.evict_floor or entry.last_ts < since_ts
            if is_lost and not query.with_deleted:
                continue
            wanted.append(
                Segment(
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
            )
        return wanted

    def _with_flags(
        self, segments: Sequence[Segment], query: Query, *, is_strict: bool
    ) -> list[Segment]:
        """The segments with the current flags. Raises `SegmentGone`, `Corrupt`."""
        found: list[Segment] = []
        for segment, result in zip(segments, _flags_of(segments), strict=True):
            if isinstance(result, _Flags):
                for seq in result.damaged:
                    path = segment.paths(layout.DATA_SUFFIX)[0]
                    error = Corrupt(f"delete flag of seq {seq} is neither live nor dead", path)
                    self._leave_out(segment.topic, path, (seq, seq), error)
                found.append(replace(segment, dead=result.dead))
            elif isinstance(result, SegmentGone) and is_strict:
                raise result
            else:
                seqs = (segment.entry.first_seq, segment.entry.last_seq)
                self._leave_out(segment.topic, str(result.path), seqs, result)
        return found

    def _leave_out(self, topic: str, file: str, seqs: tuple[int, int], error: StorageError) -> None:
        """Raise, or note what is left out. A newer format always raises, because it is not
        damage.
        """
        if not self._query.is_tolerant or isinstance(error, StartRefused):
            raise placed(error, file, topic, seqs) if seqs[1] else error
        self.skipped.append(Skipped(topic, file, *seqs, str(error)))


def list_segments(
    data_dir: str, query: Query, *, cold_dir: str | None = None, now_ms: int | None = None
) -> Listing:
    """The snapshot of a data directory: all selected topics. Errors are those of `Lister`.

    The driver reads the flags here, unless the query says otherwise or there are so many that
    executors are faster.
    """
    lister = Lister(data_dir, query, cold_dir=cold_dir, now_ms=now_ms)
    reads_flags = query.flags_at_listing
    if reads_flags and query.flags_may_wait:
        segments, records = lister.count()
        reads_flags = segments <= FLAG_SEGMENTS_MAX and records <= FLAG_RECORDS_MAX
    listing = Listing(skipped=lister.skipped)
    for name in lister.topics:
        topic = lister.list_topic(name, reads_flags=reads_flags)
        if topic is not None:
            listing.topics.append(topic)
    return listing


def segment_files(folder: str) -> list[str]:
    """Names of segment files in a topic's folder; none if the folder does not exist."""
    try:
        return sorted(filter(layout.parse_segment_file, os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_manifest(root: str, topic_id: int, known: Manifests | None) -> Manifest | None:
    """A topic's manifest; None if there is none. `known`: reused if unchanged."""
    path = layout.join(root, layout.topic_dir(topic_id), layout.MANIFEST)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            mark = (status.st_ino, status.st_mtime_ns, status.st_size)
            if known is not None and topic_id in known and known[topic_id][0] == mark:
                return known[topic_id][1]
            encoded = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None  # files of a topic that is being dropped
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", path) from None
    try:
        manifest = decode_manifest(encoded)
    except StorageError as error:
        raise type(error)(str(error), path) from None
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt(f"its body cannot be read: {error}", path) from None
    if manifest.topic_id != topic_id:
        raise Corrupt(f"is the manifest of topic {manifest.topic_id}", path)
    if known is not None:
        known[topic_id] = (mark, manifest)
    return manifest


@dataclass(frozen=True, slots=True)
class _Flags:
    """Dead rows as compressed bits (empty if there are none), and seqs with a damaged flag."""

    dead: bytes
    damaged: tuple[int, ...] = ()


def _flags_of(segments: Sequence[Segment]) -> Iterable[_Flags | StorageError]:
    if len(segments) < 2 * _THREADS:
        return map(_dead_bits, segments)
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_dead_bits, segments))


def _dead_bits(segment: Segment) -> _Flags | StorageError:
    try:
        flags = read_flags(segment)
    except StorageError as error:
        return error
    dead = np.frombuffer(flags, "u1") != LIVE
    if not dead.any():
        return _Flags(b"")
    damaged = (segment.entry.first_seq + damaged_flags(flags)).tolist()
    return _Flags(zlib.compress(np.packbits(dead).tobytes(), 1), tuple(damaged))


def read_flags(segment: Segment) -> bytes:
    """Read the current delete flags. Raises `SegmentGone`, `Corrupt` naming the file."""
    path, descriptor = open_file(segment, layout.DATA_SUFFIX)
    try:
        size = os.fstat(descriptor).st_size
        if size != segment.entry.data_bytes:
            raise Corrupt(f"{size} bytes, listed with {segment.entry.data_bytes}", path)
        count = segment.entry.record_count
        return os.pread(descriptor, count, size - count)
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", path) from None
    finally:
        os.close(descriptor)


def open_file(segment: Segment, suffix: str) -> tuple[str, int]:
    """Path and descriptor of a segment's file in either folder. Raises `SegmentGone`."""
    paths = segment.paths(suffix)
    # the file may move between two looks, so try the first folder again
    for path in (*paths, paths[0]):
        try:
            return path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise StorageError(f"cannot be opened: {error.strerror}", path) from None
    raise SegmentGone(_why_gone(segment), paths[0])


def _why_gone(segment: Segment) -> str:
    entry = segment.entry
    where = f"seqs {entry.first_seq}..{entry.last_seq} of {segment.topic}"
    if entry.tier == COLD and segment.cold_dir is None:
        return f"{where} are in the cold folder: name it with the option coldDir"
    return (
        f"{where} are listed and their file is in neither folder: it was dropped since the listing "
        "(read again), the cold folder is not named (option coldDir) or not mounted, or it is lost"
    )


def placed(error: StorageError, path: str, topic: str, seqs: tuple[int, int]) -> StorageError:
    """The error with its seqs, if it does not have them already."""
    text = str(error).removeprefix(f"{path}: ")
    if f"seqs {seqs[0]}..{seqs[1]} of " not in text:
        text = f"{text} (seqs {seqs[0]}..{seqs[1]} of topic {topic})"
    return type(error)(text, path)
