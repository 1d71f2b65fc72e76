"""Micro-batches of what gets sealed: offsets are the next seq of each topic, exact over restarts.

An offset is `{"topics": {name: [epoch, next seq]}, "asked": ...}` and lies in Spark's checkpoint. A
batch is the seqs between two offsets; it may be planned again after a crash, from other segments if
files moved, and gives the same seqs. What was deleted between two plans of one batch is missing in
the second: that is no loss, a diff would not show it either.

Loss is what nobody deleted: seqs from the cursor on that are below the evict floor or expired, or
an epoch that is gone. It ends the query, or is reported and passed over with `failOnDataLoss` off.
Needs Spark 4.2, whose `latestOffset` is told where the batch begins.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from spark_jobs.listing import Listing, Segment, TopicList, list_segments
from spark_jobs.options import Options
from spark_jobs.packing import pack
from spark_jobs.query import BadOption, Query

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # before Spark 4.2; `TopicsStreamReader` says so
    SupportsTriggerAvailableNow = object

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit

Places = dict[str, list[int]]  # by topic: epoch, next seq


class DataLoss(RuntimeError):
    """Records are gone that the stream has not read."""


class TopicsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module. Offsets are made on the driver; batches are read by executors."""

    def __init__(self, options: Options, query: Query) -> None:
        try:
            from pyspark.sql.streaming.datasource import ReadAllAvailable  # noqa: F401
        except ImportError:
            raise BadOption("streams need Spark 4.2 or newer") from None
        if query.with_deleted:
            raise BadOption("a stream has no deleted records: the option deleted is for batches")
        # Where a batch ends must not depend on filters: they leave rows out of it, not seqs.
        self.options = options
        self.query = query
        self._until: Places | None = None

    # -- offsets ---------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query begins: `earliest`, `latest`, or seqs by topic as JSON."""
        starting = self.options.starting.strip()
        if starting == "earliest":
            return _offset({})
        if starting == "latest":
            return _offset(ends_of(self._listing()))
        try:
            given = json.loads(starting)
            places = {str(name): [0, int(seq)] for name, seq in given.items()}
        except (ValueError, AttributeError, TypeError):
            raise BadOption(
                'startingOffsets is earliest, latest or {"topic": first seq, ...}'
            ) from None
        return _offset(places)

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxRecordsPerTrigger`, if there is one."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        limit = self.options.max_records
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch: all that is sealed, or so many seqs of it."""
        listing = self._listing()
        places = _places(start)
        left: int | None = getattr(limit, "max_rows", None)
        ends: Places = {}
        todo = {topic.manifest.name: topic for topic in listing.topics}
        for number, (name, topic) in enumerate(sorted(todo.items())):
            begin = self._begin(topic, places.get(name))
            share = None if left is None else -(-left // (len(todo) - number))
            end = _end(topic, begin, share)
            if self._until is not None:
                end = max(begin, min(end, self._until.get(name, [0, 1])[1]))
            if left is not None:
                left -= _live_seqs(topic, begin, end)
            ends[name] = [topic.manifest.epoch, end]
        for name in places.keys() - ends.keys():
            if places[name][0]:
                self._lose(f"{name} is gone, with whatever it had from seq {places[name][1]} on")
            else:
                ends[name] = places[name]  # not there yet
        return _offset(ends)

    def prepareForTriggerAvailableNow(self) -> None:
        """What is sealed now is all that this run reads, in as many batches as it takes."""
        self._until = ends_of(self._listing())

    def _begin(self, topic: TopicList, place: list[int] | None) -> int:
        """The next seq to read of a topic; checks that nothing before it was lost."""
        manifest = topic.manifest
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
        sys.stderr.write(f"topics: {what}\n")

    # -- batches ---------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The seqs from `start` on, below `end`, packed."""
        from spark_jobs.datasource import TopicsPartition

        begins, ends = _places(start), _places(end)
        listing = self._listing(self.query)
        segments: list[Segment] = []
        found: set[str] = set()
        for topic in listing.topics:
            name = topic.manifest.name
            if name not in ends or ends[name] == begins.get(name):
                continue
            found.add(name)
            epoch, end_seq = ends[name]
            if epoch != topic.manifest.epoch:
                self._lose(f"epoch {epoch} of {name} is gone before its last batch was read")
                continue
            segments += _cut(topic, self._begin(topic, begins.get(name)), end_seq)
        for name in ends.keys() - found:
            if ends[name] != begins.get(name):
                self._lose(f"{name} is gone before its last batch was read")
        options = self.options
        packed = pack(
            segments,
            options.partition_bytes,
            options.min_partitions,
            payload=self.query.needs_payload,
        )
        return [TopicsPartition(each) for each in packed]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one partition."""
        from spark_jobs.segments import read_segments

        segments = getattr(partition, "segments", [])
        return read_segments(segments, self.query)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is kept here: the checkpoint has the offset."""

    def stop(self) -> None:
        """Nothing is open between batches."""

    def _listing(self, query: Query | None = None) -> Listing:
        options = self.options
        if query is None:
            # Ends are of all that is sealed, whatever rows are asked for.
            query = Query(topics=self.query.topics, flags_at_listing=False, with_deleted=True)
        # Time takes nothing from a stream on its own: what expired is gone when the floor says so,
        # and then it is told.
        return list_segments(options.data_dir, query, cold_dir=options.cold_dir, now_ms=0)


def _offset(places: Places) -> dict[str, Any]:
    # Spark compares offsets as texts, so names are in order.
    return {"topics": {name: places[name] for name in sorted(places)}}


def _places(offset: dict[str, Any]) -> Places:
    return {name: [int(part) for part in place] for name, place in offset["topics"].items()}


def ends_of(listing: Listing) -> Places:
    """Behind the last sealed seq of each topic."""
    return {
        topic.manifest.name: [topic.manifest.epoch, topic.segments[-1].entry.last_seq + 1]
        for topic in listing.topics
        if topic.segments
    }


def _end(topic: TopicList, begin: int, limit: int | None) -> int:
    """The seq behind a batch of at most `limit` slots of segments from `begin` on."""
    end, left = begin, limit
    for segment in topic.segments:
        first, last = max(segment.entry.first_seq, begin), segment.entry.last_seq
        if last < begin:
            continue
        count = last - first + 1
        if left is not None and count >= left:
            return first + left if left else end
        end = last + 1
        left = None if left is None else left - count
    return end


def _live_seqs(topic: TopicList, begin: int, end: int) -> int:
    """Slots of segments in `[begin, end)`."""
    return sum(
        max(0, min(s.entry.last_seq + 1, end) - max(s.entry.first_seq, begin))
        for s in topic.segments
    )


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
