"""Lists the sealed segments of a data directory or an archive: one snapshot, from the manifests.

A manifest is replaced atomically, so each topic's list shows one state of it. The listing includes
the delete flags (a delete never changes records, it only flags them). So all later reads of a
listing have this state, even if the server deletes, moves to the cold folder or seals records
meanwhile. If the files of a segment are gone, the segment was dropped; reading it raises an error
and never returns fewer rows silently. Runs on the driver. Reads manifests and flags only.
"""

from __future__ import annotations

import time
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from spark_jobs.reader.places.opening import KnownPlace, open_place
from spark_jobs.reader.places.segment import Segment, SegmentGone
from spark_jobs.reader.query import Query
from spark_jobs.reader.report import Skipped
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.format.manifest import Manifest
from topics_server.wal.format.segment import LIVE, damaged_flags

_ATTEMPTS: Final = 5
_THREADS: Final = 8
# Above these numbers of segments or records, executors read the flags: see `Query.flags_may_wait`.
FLAG_SEGMENTS_MAX: Final = 4_096
FLAG_RECORDS_MAX: Final = 200_000_000


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
    """All selected topics, their segments that may hold a wanted row, and the parts that were left
    out.

    `as_of_ts`: the moment of an archive's base, ms; None for a data directory.
    """

    topics: list[TopicList] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    as_of_ts: int | None = None

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
    flags of the segments that the query selects. So it does not read files of topics or ranges of
    seqs that the caller did not select. `known`: the facts that an earlier lister of the same place
    read; unchanged facts are reused.
    """

    def __init__(
        self,
        data_dir: str,
        query: Query,
        *,
        cold_dir: str | None = None,
        now_ms: int | None = None,
        known: KnownPlace | None = None,
    ) -> None:
        """Read the manifests. Raises `StorageError` naming the file, unless the query is tolerant.

        `data_dir`: also an archive, as a path or URL. `now_ms` is the time for TTLs (default: now).
        """
        known = KnownPlace() if known is None else known
        self._place: Final = open_place(data_dir, cold_dir, query.wants_topic, known)
        self._query = query
        self._now_ms = int(time.time() * 1000) if now_ms is None else now_ms
        self.skipped: list[Skipped] = []
        self.topics: dict[str, TopicList] = {}
        self.without_manifest: list[int] = []
        if not query.is_empty:
            self._read_all()

    def _read_all(self) -> None:
        """Manifests of the selected topics; the newest incarnation of each name."""
        for problem in self._place.problems:
            self._leave_out("unknown topics", str(problem.path), (0, 0), problem)
        newest: dict[str, tuple[int, Manifest]] = {}
        for topic_id in self._place.topic_ids():
            try:
                manifest = self._place.manifest(topic_id)
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
        flags.

        If files disappear meanwhile, the topic is listed again; None if the topic is gone. `query`
        is the query of the lister, or a narrower one.
        """
        query = self._query if query is None else query
        reads_flags = query.flags_at_listing if reads_flags is None else reads_flags
        reads_flags = reads_flags or self._place.has_fixed_flags
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
                again = self._place.manifest(manifest.topic_id)
                if again == manifest:
                    # the server removes the manifest before the files, so the manifest changes soon
                    time.sleep(0.02)
                manifest = again
                continue
            return TopicList(manifest, wanted)
        return None

    def has_files(self, topic_id: int) -> bool:
        """Whether segments of a topic are in either folder, listed or not."""
        return self._place.has_files(topic_id)

    @property
    def as_of_ts(self) -> int | None:
        """The moment of an archive's base, ms; None for a data directory."""
        return self._place.as_of_ts

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
            wanted.append(self._place.segment(manifest, entry, since_ts))
        return wanted

    def _with_flags(
        self, segments: Sequence[Segment], query: Query, *, is_strict: bool
    ) -> list[Segment]:
        """The segments with the current flags. Raises `SegmentGone`, `Corrupt`."""
        found: list[Segment] = []
        for segment, result in zip(segments, self._flags_of(segments), strict=True):
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

    def _flags_of(self, segments: Sequence[Segment]) -> Iterable[_Flags | StorageError]:
        if len(segments) < 2 * _THREADS or self._place.has_fixed_flags:
            return map(self._dead_bits, segments)
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._dead_bits, segments))

    def _dead_bits(self, segment: Segment) -> _Flags | StorageError:
        try:
            flags = self._place.flags(segment)
        except StorageError as error:
            return error
        dead = np.frombuffer(flags, "u1") != LIVE
        if not dead.any():
            return _Flags(b"")
        damaged = (segment.entry.first_seq + damaged_flags(flags)).tolist()
        return _Flags(zlib.compress(np.packbits(dead).tobytes(), 1), tuple(damaged))

    def _leave_out(self, topic: str, file: str, seqs: tuple[int, int], error: StorageError) -> None:
        """Raise, or record a part as left out.

        A newer format always raises, because it is not damage.
        """
        if not self._query.is_tolerant or isinstance(error, StartRefused):
            raise placed(error, file, topic, seqs) if seqs[1] else error
        self.skipped.append(Skipped(topic, file, *seqs, str(error)))


def list_segments(
    data_dir: str, query: Query, *, cold_dir: str | None = None, now_ms: int | None = None
) -> Listing:
    """The snapshot of a data directory or archive: all selected topics.

    Errors are those of `Lister`.

    The driver reads the flags here, unless the query forbids it or the flags are so many that
    executors are faster.
    """
    lister = Lister(data_dir, query, cold_dir=cold_dir, now_ms=now_ms)
    reads_flags = query.flags_at_listing
    if reads_flags and query.flags_may_wait:
        segments, records = lister.count()
        reads_flags = segments <= FLAG_SEGMENTS_MAX and records <= FLAG_RECORDS_MAX
    listing = Listing(skipped=lister.skipped, as_of_ts=lister.as_of_ts)
    for name in lister.topics:
        topic = lister.list_topic(name, reads_flags=reads_flags)
        if topic is not None:
            listing.topics.append(topic)
    return listing


@dataclass(frozen=True, slots=True)
class _Flags:
    """Dead rows as compressed bits (empty if there are none), and seqs with a damaged flag."""

    dead: bytes
    damaged: tuple[int, ...] = ()


def placed(error: StorageError, path: str, topic: str, seqs: tuple[int, int]) -> StorageError:
    """The error, with the segment's seqs if it has none."""
    text = str(error).removeprefix(f"{path}: ")
    if f"seqs {seqs[0]}..{seqs[1]} of " not in text:
        text = f"{text} (seqs {seqs[0]}..{seqs[1]} of topic {topic})"
    return type(error)(text, path)
