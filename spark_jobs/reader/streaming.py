"""Micro-batches of sealed records: an offset is the next seq of each topic, exact over restarts.

An offset is `{"topics": {name: [epoch, next seq]}, "asked": ...}`; Spark's checkpoint stores it. A
batch holds the seqs between two offsets. After a crash it may be planned again, from other segments
if files moved, and gives the same seqs. A record that was deleted between two plans of one batch is
missing in the second; this is no loss, because a diff would not return the record either.

Only records that no client deleted count as lost: seqs from the cursor on that are below the evict
floor, or all seqs of an epoch that no longer exists. A loss ends the query; with `failOnDataLoss`
off it is reported and skipped. If a topic is missing, its position is kept, and the stream
continues if the topic returns with the same epoch. Planning reads only the segments of the batch:
earlier segments may move or be removed. Needs Spark 4.2, which passes the start of the batch to
`latestOffset`.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from spark_jobs.reader.listing import Lister, TopicList
from spark_jobs.reader.options import SourceOptions
from spark_jobs.reader.packing import pack
from spark_jobs.reader.places.opening import KnownPlace
from spark_jobs.reader.places.segment import Segment
from spark_jobs.reader.query import BadOption, Query
from topics_server.wal.format.manifest import Manifest, SegmentEntry

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # before Spark 4.2; `TopicsStreamReader` raises an error
    SupportsTriggerAvailableNow = object

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit

# Attempts to find a missing manifest, and the pause between two of them.
_ATTEMPTS: Final = 4
_WAIT_S: Final = 0.25

Positions = dict[str, list[int]]  # by topic: epoch, next seq


class DataLoss(RuntimeError):
    """Records are gone that the stream has not read."""


class ManifestMissing(RuntimeError):
    """A batch cannot be planned now; its records are neither lost nor skipped."""


class TopicsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Makes offsets on the driver; executors read the batches."""

    def __init__(self, options: SourceOptions, query: Query) -> None:
        try:
            from pyspark.sql.streaming.datasource import ReadAllAvailable  # noqa: F401
        except ImportError:
            raise BadOption("streams need Spark 4.2 or newer") from None
        if query.with_deleted:
            raise BadOption("a stream has no deleted records: the option deleted is for batches")
        # The end of a batch must not depend on filters, which remove rows but no seqs.
        self.options = options
        self.query = query
        self._until: Positions | None = None
        self._known = KnownPlace()
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """The state for executors: without the manifests, which they do not need."""
        return {**self.__dict__, "_known": KnownPlace(), "_warned": set()}

    # -- offsets ---------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """The offset of a new query: `earliest`, `latest`, or seqs by topic as JSON."""
        starting = self.options.starting.strip()
        if starting == "earliest":
            return _offset({})
        if starting == "latest":
            return _offset(ends_of(self._lister()))
        try:
            given = json.loads(starting)
            positions = {str(name): [0, int(seq)] for name, seq in given.items()}
        except (ValueError, AttributeError, TypeError):
            raise BadOption(
                'startingOffsets is earliest, latest or {"topic": first seq, ...}'
            ) from None
        return _offset(positions)

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxRecordsPerTrigger`, if there is one."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        limit = self.options.max_records
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch: all sealed records, or a limited number of seqs."""
        topics = self._lister().topics
        positions = _positions(start)
        left: int | None = getattr(limit, "max_rows", None)
        ends: Positions = {}
        for number, (name, topic) in enumerate(sorted(topics.items())):
            manifest = topic.manifest
            begin = self._begin(manifest, positions.get(name))
            share = None if left is None else -(-left // (len(topics) - number))
            end = _end(manifest, begin, share)
            if self._until is not None:
                end = max(begin, min(end, self._until.get(name, [0, 1])[1]))
            if left is not None:
                left -= _slots(manifest, begin, end)
            ends[name] = [manifest.epoch, end]
        for name in positions.keys() - ends.keys():
            # The topic may be back at the next trigger. If it has the same epoch, the stream
            # continues here.
            ends[name] = positions[name]
            if positions[name][0]:
                self._lose(f"{name} is gone, with its records from seq {positions[name][1]} on")
        return _offset(ends)

    def prepareForTriggerAvailableNow(self) -> None:
        """Let this run read only the records that are sealed now, in as many batches as needed."""
        self._until = ends_of(self._lister())

    def _begin(self, manifest: Manifest, place: list[int] | None) -> int:
        """The next seq to read of a topic. Checks that no earlier record was lost."""
        if place is None:
            return 1
        epoch, seq = place
        if epoch not in (0, manifest.epoch):
            self._lose(f"{manifest.name} was dropped and made again (epoch {manifest.epoch})")
            return 1
        floor = max(manifest.evict_floor, 1)
        if seq < floor and epoch:
            self._lose(f"seqs {seq}..{floor - 1} of {manifest.name} were evicted unread")
        return max(seq, 1)

    def _lose(self, what: str) -> None:
        if self.options.fails_on_loss:
            raise DataLoss(f"{what}; failOnDataLoss=false reports it and goes on")
        if what not in self._warned:
            self._warned.add(what)
            sys.stderr.write(f"topics: {what}\n")

    # -- batches ---------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The seqs from `start` on and below `end`, packed."""
        from spark_jobs.reader.partition import TopicsPartition

        begins, ends = _positions(start), _positions(end)
        changed = {name for name in ends if ends[name] != begins.get(name)}
        segments: list[Segment] = []
        lister = self._lister()
        for name in sorted(changed):
            segments += self._planned(lister, name, begins.get(name), ends[name])
        options = self.options
        packed = pack(
            segments,
            options.partition_bytes,
            options.min_partitions,
            payload=self.query.needs_payload,
        )
        return [TopicsPartition(each) for each in packed]

    def _planned(
        self, lister: Lister, name: str, begin: list[int] | None, end: list[int]
    ) -> list[Segment]:
        """The segments of one topic of a batch, cut to its seqs; reads only their flags.

        If the files of a topic exist without its manifest, the topic is neither lost nor read: the
        batch fails, and is planned again when the query is restarted.
        """
        epoch, end_seq = end
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_WAIT_S * attempt)
                lister = self._lister()
            topic = lister.topics.get(name)
            if topic is None:
                if not self._has_stray_files(lister):
                    self._lose(f"{name} is gone before its last batch was read")
                    return []
            elif topic.manifest.epoch != epoch:
                self._lose(f"epoch {epoch} of {name} is gone before its last batch was read")
                return []
            else:
                first = self._begin(topic.manifest, begin)
                narrowed = self.query.narrow_seqs(first, end_seq - 1)
                listing = lister.list_topic(name, narrowed)
                if listing is not None:
                    return _cut(listing, first, end_seq)
        raise ManifestMissing(
            f"the manifest of {name} is not there, and segments without a manifest are: nothing is "
            "passed over; start the query again when the directory is whole"
        )

    def _has_stray_files(self, lister: Lister) -> bool:
        """Whether there are segments without a manifest, whose topic is unknown."""
        return any(lister.has_files(topic_id) for topic_id in lister.without_manifest)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the Arrow batches of one partition."""
        from spark_jobs.reader.segments import read_segments

        segments = getattr(partition, "segments", [])
        return read_segments(segments, self.query)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint stores the offset."""

    def stop(self) -> None:
        """Do nothing: no file is open between batches."""

    def _lister(self) -> Lister:
        """The current manifests. Ends count all sealed records, not only the wanted rows."""
        options = self.options
        # A stream does not apply the TTL: expired records are lost once the floor has passed them,
        # and then the loss is reported.
        return Lister(
            options.data_dir,
            Query(topics=self.query.topics),
            cold_dir=options.cold_dir,
            now_ms=0,
            known=self._known,
        )


def _offset(positions: Positions) -> dict[str, Any]:
    # Spark compares offsets as texts, so names are sorted.
    return {"topics": {name: positions[name] for name in sorted(positions)}}


def _positions(offset: dict[str, Any]) -> Positions:
    return {name: [int(part) for part in place] for name, place in offset["topics"].items()}


def ends_of(lister: Lister) -> Positions:
    """The seq after the last sealed record of each topic."""
    manifests = [topic.manifest for topic in lister.topics.values()]
    return {m.name: [m.epoch, m.segments[-1].last_seq + 1] for m in manifests if m.segments}


def _from(manifest: Manifest, seq: int) -> Iterator[SegmentEntry]:
    """Listed segments that end at `seq` or later; earlier ones are not examined."""
    entries = manifest.segments
    first = bisect_left(entries, seq, key=lambda entry: entry.last_seq)
    return itertools.islice(entries, first, None)


def _end(manifest: Manifest, begin: int, limit: int | None) -> int:
    """The seq after a batch of at most `limit` slots of segments from `begin` on."""
    if limit is None:
        return max(begin, manifest.segments[-1].last_seq + 1) if manifest.segments else begin
    end, left = begin, limit
    for entry in _from(manifest, begin):
        first = max(entry.first_seq, begin)
        count = entry.last_seq - first + 1
        if count >= left:
            return first + left if left else end
        end = entry.last_seq + 1
        left -= count
    return end


def _slots(manifest: Manifest, begin: int, end: int) -> int:
    """The number of slots of segments in `[begin, end)`."""
    slots = 0
    for entry in _from(manifest, begin):
        if entry.first_seq >= end:
            break
        slots += min(entry.last_seq + 1, end) - max(entry.first_seq, begin)
    return slots


def _cut(topic: TopicList, begin: int, end: int) -> list[Segment]:
    """The topic's segments, cut to `[begin, end)`."""
    cut: list[Segment] = []
    for segment in topic.segments:
        entry = segment.entry
        first, last = max(entry.first_seq, begin), min(entry.last_seq, end - 1)
        if first <= last:
            rows = (first - entry.first_seq, last - entry.first_seq + 1)
            cut.append(replace(segment, first_row=rows[0], end_row=rows[1]))
    return cut
