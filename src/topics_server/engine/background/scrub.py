"""Reads every sealed record periodically, so that damage is found before a reader needs it.

A pass reads all topics and segments. It takes about `pass_ms`: its speed depends on the size of the
store, and is at most `max_bytes_per_s`. A range of rows is read off the loop as for a reader, and
damage has the same effect as if a reader had found it: the range becomes a hole, readers get a
tombstone, state and metrics show it. The index and delete flags of a segment are checked too. The
scrub waits while the sealer has work. It keeps no state on the disk: the first pass after a start
begins at a topic that depends on the time of the start, so that a server that restarts often still
reaches all topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from topics_server.engine.log.runs import SealedRun
from topics_server.engine.ports import Clock
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import ScrubMetrics, log
from topics_server.values.errors import StorageError
from topics_server.values.limits import BLOCK_RECORDS_MAX, MIB

# A range that is read in one call ends at the first of these bounds; it has at least one record.
RANGE_BYTES: Final = MIB
RANGE_RECORDS: Final = 4 * BLOCK_RECORDS_MAX
# The bytes of a record in the files in addition to its payload: header, columns, flag.
_RECORD_OVERHEAD: Final = 64
# The pause while the sealer works, and the longest sleep before the next check of the store.
_BUSY_S: Final = 1.0
_LOOK_S: Final = 60.0
# Topics examined in one loop turn.
_SLICE: Final = 256


class SealedReads(Protocol):
    """Reads sealed records for the scrub; `engine.read.segment_reader.Fetcher` satisfies it."""

    async def check(self, topic: Topic, segment_id: int, first_row: int, end_row: int) -> int:
        """Read rows and note damage; returns how many lost records were found."""
        ...

    async def check_index(self, topic: Topic, segment_id: int) -> bool:
        """Check index and delete flags on disk; returns whether they are damaged."""
        ...

    def note_broken(self, topic_id: int, segment_id: int) -> None:
        """Note a segment with a file that could not be read."""
        ...

    def disk_bytes(self, topic_id: int) -> int:
        """Bytes of the topic's sealed files."""
        ...


class ScrubRules(msgspec.Struct, frozen=True):
    """The speed: a pass takes `pass_ms`, at most `max_bytes_per_s` are read; 0: no scrub."""

    max_bytes_per_s: int
    pass_ms: int


class Scrubber:
    """See the module."""

    def __init__(
        self,
        registry: Registry,
        reads: SealedReads,
        clock: Clock,
        rules: ScrubRules,
        is_busy: Callable[[], bool],
    ) -> None:
        """`is_busy`: whether other background work uses the disk."""
        self._registry = registry
        self._reads = reads
        self._clock = clock
        self._rules = rules
        self._is_busy = is_busy
        self._bytes = 0
        self._passes = 0
        self._last_pass_ts_ms = 0
        self._damaged_records = 0
        self._failures = 0
        # The bytes a second in this pass, and the time at which the next range is due.
        self._pace = 0.0
        self._due_ms = 0.0

    def metrics(self) -> ScrubMetrics:
        """Facts for a scrape."""
        return ScrubMetrics(
            self._bytes,
            self._passes,
            self._last_pass_ts_ms,
            self._damaged_records,
            self._failures,
        )

    async def run(self) -> None:
        """Scrub until cancelled."""
        if not self._rules.max_bytes_per_s:
            return
        begin_at = self._clock.now_ms()
        while True:
            total = await self._sealed_bytes()
            if not total:
                await asyncio.sleep(_LOOK_S)
                continue
            self._pace = self._pace_of(total)
            self._due_ms = self._clock.monotonic_ms()
            await self._pass(begin_at)
            begin_at = 0

    async def _sealed_bytes(self) -> int:
        """The bytes of the sealed files of all topics, summed in slices."""
        total = 0
        for number, topic_id in enumerate(self._registry.ids()):
            total += self._reads.disk_bytes(topic_id)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        return total

    def _pace_of(self, total_bytes: int) -> float:
        """The speed in bytes a second."""
        return min(self._rules.max_bytes_per_s, total_bytes * 1000 / self._rules.pass_ms)

    async def _pass(self, begin_at: int) -> None:
        """Visit every topic once; topics that are created meanwhile wait for the next pass."""
        topic_ids = self._registry.ids()
        first = begin_at % len(topic_ids) if topic_ids else 0
        read_before = self._bytes
        for number, topic_id in enumerate(topic_ids[first:] + topic_ids[:first]):
            if number % _SLICE == 0:
                await asyncio.sleep(0)
            topic = self._registry.get(topic_id)
            if topic is None:
                continue  # dropped meanwhile
            # The next pass reads runs that are sealed meanwhile.
            for run in list(topic.log.sealed()):
                if self._registry.get(topic_id) is topic:
                    await self._segment(topic, run)
        if self._bytes > read_before:
            self._passes += 1
            self._last_pass_ts_ms = self._clock.now_ms()
        else:
            await asyncio.sleep(_LOOK_S)

    async def _segment(self, topic: Topic, run: SealedRun) -> None:
        index, count = run.index, len(run.dead)
        first, has_failed = 0, False
        try:
            # Check the index first: the lengths of the records come from it.
            has_failed = await self._reads.check_index(topic, index.segment_id)
            while first < count:
                end, size = _range(run, first)
                if size > RANGE_BYTES:
                    # A damaged index may claim any length, for which the scrub would wait very
                    # long.
                    size = min(size, self._reads.disk_bytes(topic.topic_id))
                await self._wait(size)
                if run.segment_id not in topic.log.segment_ids():
                    return  # dropped meanwhile
                found = await self._reads.check(topic, index.segment_id, first, end)
                self._damaged_records += found
                self._bytes += size
                first = end
        except StorageError as error:
            # A file is missing or cannot be read: a reader gets the same error.
            has_failed = True
            self._reads.note_broken(topic.topic_id, run.segment_id)
            log.error("scrub: segment %d of topic %s: %s", run.segment_id, topic.name, error)
        finally:
            self._failures += has_failed

    async def _wait(self, size: int) -> None:
        """Wait until a range of this size is due and the sealer does not use the disk."""
        self._due_ms = max(self._due_ms, self._clock.monotonic_ms() - 1000)
        self._due_ms += size * 1000 / self._pace
        while True:
            left_s = (self._due_ms - self._clock.monotonic_ms()) / 1000
            if left_s <= 0:
                if not self._is_busy():
                    return
                left_s = _BUSY_S
            await asyncio.sleep(min(left_s, _LOOK_S))


def _range(run: SealedRun, first: int) -> tuple[int, int]:
    """The end of the range that begins at a row, and its approximate bytes."""
    most = min(len(run.dead), first + RANGE_RECORDS)
    end, size = first + 1, run.index.record_bytes(first) + _RECORD_OVERHEAD
    while end < most:
        more = run.index.record_bytes(end) + _RECORD_OVERHEAD
        if size + more > RANGE_BYTES:
            break
        size += more
        end += 1
    return end, size
