"""Plans reads from the end: the last records of a topic, and pages in descending order. Pure.

A backward page has the seqs below a cursor, newest first. Like a forward page it never spans a hole
and reports at most one gap: the one directly below its cursor. The cost depends on the records of
the page, not on those of the topic. Called by `engine/reads`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from topics_server.engine.answers import BackwardRequest, Gap
from topics_server.engine.log.log import Log
from topics_server.engine.log.losses import only_reason
from topics_server.engine.log.runs import OpenBlock, Rows, Run, SealedRun, TailBlock
from topics_server.engine.read.filtered import Search
from topics_server.engine.topic import retention
from topics_server.engine.topic.topic import Topic
from topics_server.values.limits import PAGE_SCAN_SLOTS_MAX
from topics_server.values.model import LossReason


class BackwardPlan(msgspec.Struct, frozen=True):
    """The seqs of a page, descending; all seqs from `next_before_seq` up were examined.

    `unsearched`: segments that must be searched before the page can be planned.
    """

    seqs: list[int]
    next_before_seq: int
    gap: Gap | None = None
    scanned: int = 0
    unsearched: tuple[int, ...] = ()


def cursor_since(log: Log, since_ms: int) -> int:
    """The cursor before the first record that was committed at a time or later.

    If all remaining records are younger, lost records may be younger as well: the reader
    begins at the start and gets their tombstone.
    """
    first = log.first_seq_since(since_ms)
    has_older = first > log.earliest_seq
    return first - 1 if has_older else 0


def first_of_last(log: Log, count: int, upto_seq: int) -> int:
    """The seq of the `count`-th live record from `upto_seq` down, or of the first live record."""
    assert count > 0
    for index in range(min(log.run_at(upto_seq), len(log.runs) - 1), -1, -1):
        run = log.runs[index]
        end = min(run.count, upto_seq - run.first_seq + 1)
        if end <= 0:
            continue
        live = run.live_count if end == run.count else run.dead.count(0, 0, end)
        if live < count:
            count -= live
            continue
        for _ in range(count):
            end = run.dead.rfind(0, 0, end)
        return run.first_seq + end
    return log.earliest_seq


def plan_backward(
    topic: Topic, request: BackwardRequest, now_ms: int, search: Search | None
) -> BackwardPlan:
    """Plan the page below `request.before_seq` of the topic as it is now; changes nothing."""
    log = topic.log
    before = min(request.before_seq, log.head_seq + 1)
    first = request.after_seq + 1
    earliest = topic.earliest_seq(now_ms)
    gap, before = _gap_below(topic, before, first, earliest, now_ms)
    low = max(first, earliest)
    if log.holes:
        ends = [hole.last_seq + 1 for hole in log.holes if hole.last_seq < before]
        low = max([low, *ends])
    nodes = request.nodes if topic.config.dedupe_node else frozenset[str]()
    scan = _Scan(log, request, nodes, search)
    next_before = scan.run(before, low) if before > low else before
    floor = retention.expired_floor(log, topic.config.ttl_ms, now_ms)
    if first < next_before <= earliest and floor <= first:
        next_before = first  # only deleted records are below
    return BackwardPlan(scan.seqs, next_before, gap, scan.scanned, scan.unsearched)


def _gap_below(
    topic: Topic, before: int, first: int, earliest: int, now_ms: int
) -> tuple[Gap | None, int]:
    """The tombstone directly below the cursor, if any, and the cursor below it."""
    log = topic.log
    if before - 1 < first:
        return None, before
    for hole in log.holes:
        if hole.first_seq <= before - 1 <= hole.last_seq:
            top, low = before - 1, max(first, hole.first_seq)
            return Gap(low, top, hole.reason, hole.missed or top - low + 1), hole.first_seq
    floor = retention.expired_floor(log, topic.config.ttl_ms, now_ms)
    if before <= earliest and first < floor:
        reasons = log.losses.reasons(first, log.evict_floor - 1)
        if floor > log.evict_floor:
            reasons.add(LossReason.TTL)
        top = min(before, floor) - 1
        if top >= first:
            return Gap(first, top, only_reason(reasons), top - first + 1), first
    return None, before


class _Scan:
    """Collects the seqs of one page, newest first, until a budget is used up."""

    def __init__(
        self, log: Log, request: BackwardRequest, nodes: frozenset[str], search: Search | None
    ) -> None:
        self._log = log
        self._limit = request.limit
        self._bytes_left = request.max_bytes
        self._nodes = nodes
        self._search = search
        self.seqs: list[int] = []
        self.scanned = 0
        self.unsearched: tuple[int, ...] = ()
        if search is not None:
            search.begin()

    def run(self, before: int, low: int) -> int:
        """Examine `before - 1` down to `low`; returns the last examined seq, or `before`."""
        log = self._log
        index = min(log.run_at(before - 1), len(log.runs) - 1)
        while index >= 0 and before > low:
            run = log.runs[index]
            index -= 1
            if run.last_seq < low:
                break
            end = min(run.count, before - run.first_seq)
            if end <= 0 or run.live_count == 0:
                continue
            row = max(0, low - run.first_seq)
            search = self._search
            if search is not None and isinstance(run, SealedRun):
                if run.segment_id not in search.found:
                    if not search.is_spent:
                        self.unsearched = self._previous_segments(index + 1, low)
                    return run.first_seq + end
                scanned = 0
            else:
                row = max(row, end - (PAGE_SCAN_SLOTS_MAX - self.scanned))
                scanned = end - row
            self.scanned += scanned
            stopped = self._take(run, self._rows(run, row, end))
            if stopped is not None:
                return stopped
            before = run.first_seq + row
            if self.scanned >= PAGE_SCAN_SLOTS_MAX or (search is not None and search.is_tired):
                return before
        return low

    def _rows(self, run: Run, row: int, end: int) -> Rows:
        if self._search is not None:
            return self._search.live_rows(run, row, end)
        if self._limit < end - row and not self._nodes:
            # Only the rows at the end matter, so make no array of the whole run.
            found: list[int] = []
            while len(found) < self._limit and (end := run.dead.rfind(0, row, end)) >= 0:
                found.append(end)
            return np.asarray(found[::-1], np.int64)
        return np.flatnonzero(np.frombuffer(run.dead, np.uint8)[row:end] == 0) + row

    def _take(self, run: Run, rows: Rows) -> int | None:
        """Take rows from the end; return the last examined seq if the page is full."""
        picked: list[int] = rows[::-1].tolist()
        for row in picked:
            if self._nodes and self._is_hidden(run, row):
                continue
            size = run.row_bytes(row)
            if self.seqs and size > self._bytes_left:
                return run.first_seq + row + 1
            self._bytes_left -= size
            self.seqs.append(run.first_seq + row)
            if len(self.seqs) == self._limit:
                return run.first_seq + row
        return None

    def _is_hidden(self, run: Run, row: int) -> bool:
        if isinstance(run, SealedRun):
            return run.index.node_rows(self._nodes, row, row + 1) == b"\1"
        assert isinstance(run, TailBlock | OpenBlock)
        block = run.block if isinstance(run, TailBlock) else run
        return block.nodes[row] in self._nodes

    def _previous_segments(self, index: int, low: int) -> tuple[int, ...]:
        """The segments to search together, from the run at `index` down."""
        assert self._search is not None
        found: list[int] = []
        while index >= 0 and len(found) < self._search.searched_next:
            run = self._log.runs[index]
            index -= 1
            if not isinstance(run, SealedRun) or run.last_seq < low:
                break
            if run.live_count and run.segment_id not in self._search.found:
                found.append(run.segment_id)
        return tuple(found)
