"""Plans one page of a topic: cursor, gaps, filters, budgets. Pure.

`plan_page` decides which rows belong to the page without touching payloads: rows of blocks in
memory become pieces, rows of sealed segments become fetches of blocks. `complete` inserts the
fetched blocks. Rules: a page never spans a hole and reports at most one gap, always before its
records; deleted and filtered records advance the cursor silently; the cursor is the last examined
seq. Only this module has the tombstone rule (§3.3). Called by `engine/reads`, `subscribe/`,
`segment_reader` and `routers/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from topics_server.engine.answers import Gap, Page, Piece, ReadRequest
from topics_server.engine.log.log import Log
from topics_server.engine.log.losses import only_reason
from topics_server.engine.log.runs import OpenBlock, Rows, Run, SealedRun, TailBlock
from topics_server.engine.read.filtered import Search
from topics_server.engine.topic import retention
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import Block
from topics_server.values.errors import StorageError
from topics_server.values.limits import (
    BLOCK_RECORDS_MAX,
    PAGE_SCAN_SLOTS_MAX,
    SEQ_MAX,
)
from topics_server.values.model import LossReason

# Up to this many rows of a group are read one by one.
FEW_ROWS: Final = 4


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Rows `first_row .. end_row - 1` of a segment, to be read as one block.

    Either an aligned group of `BLOCK_RECORDS_MAX` rows, cut at damaged rows, which is worth
    caching, or only a few rows of a group, if the page needs only these.
    """

    segment_id: int
    first_row: int
    end_row: int
    is_group: bool = True


class SealedPiece(msgspec.Struct, frozen=True, gc=False):
    """The rows of a fetched block that belong to the page; row 0 is `fetch.first_row`."""

    fetch: Fetch
    rows: Sequence[int]


class SealedSpan(msgspec.Struct, frozen=True, gc=False):
    """Rows `first_row .. end_row - 1` of a segment, all live, which are a whole page.

    A fetch stays within rows `low .. high - 1`.
    """

    segment_id: int
    first_row: int
    end_row: int
    low: int
    high: int

    @property
    def groups(self) -> range:
        """The rows of the groups that have a row of the page."""
        first, end = self.first_row, self.end_row
        aligned = first - first % BLOCK_RECORDS_MAX
        return range(max(self.low, aligned), min(self.high, end + -end % BLOCK_RECORDS_MAX))

    def pieces(self) -> list[Piece | SealedPiece]:
        """The rows of each group."""
        made: list[Piece | SealedPiece] = []
        row, end = self.first_row, self.end_row
        while row < end:
            group = row - row % BLOCK_RECORDS_MAX
            first = max(self.low, group)
            last = min(self.high, group + BLOCK_RECORDS_MAX)
            inside = range(row - first, min(end, last) - first)
            made.append(SealedPiece(Fetch(self.segment_id, first, last), inside))
            row = group + BLOCK_RECORDS_MAX
        return made


class PagePlan(msgspec.Struct, frozen=True):
    """A page without its sealed payloads.

    `span`: the whole page, which then has no pieces before `grouped`.
    """

    pieces: list[Piece | SealedPiece]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    gap: Gap | None
    scanned: int
    epoch: int
    # Segments that must be searched for the filter before the page can be planned.
    unsearched: tuple[int, ...] = ()
    span: SealedSpan | None = None

    def grouped(self) -> PagePlan:
        """The same plan with pieces instead of a span."""
        if self.span is None:
            return self
        return msgspec.structs.replace(self, pieces=self.span.pieces(), span=None)

    def fetches(self) -> list[Fetch]:
        """The fetches that `complete` needs, in order."""
        return [piece.fetch for piece in self.pieces if isinstance(piece, SealedPiece)]

    def fetched_blocks(self, page: Page) -> dict[Fetch, Block]:
        """The blocks that were read for `page`, the page that this plan completed."""
        return {
            planned.fetch: piece.block
            for planned, piece in zip(self.pieces, page.pieces, strict=True)
            if isinstance(planned, SealedPiece)
        }

    def wants(self, fetch: Fetch, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether the page needs a row in these ranges (first, last) of the fetch's segment."""
        return any(
            first <= fetch.first_row + row <= last
            for piece in self.pieces
            if isinstance(piece, SealedPiece) and piece.fetch == fetch
            for row in piece.rows
            for first, last in ranges
        )


def complete(plan: PagePlan, fetched: Mapping[Fetch, Block]) -> Page:
    """The page, made of the plan and the blocks of all its fetches."""
    pieces: list[Piece] = []
    for piece in plan.pieces:
        if isinstance(piece, SealedPiece):
            block = fetched[piece.fetch]
            assert block.count == piece.fetch.end_row - piece.fetch.first_row
            piece = Piece(block, piece.rows)
        pieces.append(piece)
    return page_of(plan, pieces)


def page_of(plan: PagePlan, pieces: list[Piece]) -> Page:
    """The page of a plan, made of these pieces."""
    return Page(
        pieces=pieces,
        next_from_seq=plan.next_from_seq,
        head_seq=plan.head_seq,
        earliest_seq=plan.earliest_seq,
        gap=plan.gap,
        scanned=plan.scanned,
        epoch=plan.epoch,
    )


def plan_page(
    topic: Topic,
    request: ReadRequest,
    now_ms: int,
    upto_seq: int = SEQ_MAX,
    search: Search | None = None,
    *,
    may_span: bool = False,
) -> PagePlan:
    """Plan the page after `request.from_seq` of the topic as it is now; changes nothing.

    Seqs after `upto_seq` are not examined: a reader with strong consistency stops there. `search`
    has the results of the request's filter so far; the plan lists the segments that must still be
    searched. `may_span`: live rows of one segment that end the page may be a span.
    """
    log, seq, ttl_ms = topic.log, request.from_seq + 1, topic.config.ttl_ms
    gap: Gap | None = None
    if ttl_ms == 0 and not log.holes and log.evict_floor <= seq <= log.head_seq + 1:
        # By far the most frequent case: nothing expires, and nothing is missing after the cursor.
        earliest = log.earliest_seq
    else:
        earliest = retention.first_unexpired(log, ttl_ms, now_ms)
        gap, seq = _gap(topic, request.from_seq, earliest, now_ms)
    last = min(log.head_seq, upto_seq)
    hole = log.hole_at_or_after(seq) if log.holes else None
    if hole is not None:
        last = min(last, hole.first_seq - 1)
    if gap is not None and seq < retention.expired_floor(log, ttl_ms, now_ms):
        # The records after the hole have expired; the next page reports them.
        last = seq - 1
    nodes = request.nodes if topic.config.dedupe_node else frozenset[str]()
    scan = _Scan(log, request.limit, request.max_bytes, nodes, search, may_span=may_span)
    next_from_seq = scan.run(seq, last) if seq <= last else seq - 1
    return PagePlan(
        pieces=scan.pieces,
        next_from_seq=next_from_seq,
        head_seq=log.head_seq,
        earliest_seq=earliest,
        gap=gap,
        scanned=scan.scanned,
        epoch=topic.epoch,
        unsearched=scan.unsearched,
        span=scan.span,
    )


def _gap(topic: Topic, from_seq: int, earliest: int, now_ms: int) -> tuple[Gap | None, int]:
    """The tombstone for a cursor, if any, and the first seq to examine after it."""
    log = topic.log
    seq = from_seq + 1
    if from_seq > log.head_seq:
        return Gap(1, earliest - 1, LossReason.RECREATED, earliest - 1), earliest
    if log.holes:
        hole = log.hole_at_or_after(seq)
        if hole is not None and hole.first_seq <= seq:
            missed = hole.missed if hole.missed else hole.last_seq - seq + 1
            return Gap(seq, hole.last_seq, hole.reason, missed), hole.last_seq + 1
    expired = retention.expired_floor(log, topic.config.ttl_ms, now_ms)
    if seq >= expired:
        return None, seq
    reasons = log.losses.reasons(seq, log.evict_floor - 1)
    if expired > log.evict_floor:
        reasons.add(LossReason.TTL)
    last = earliest - 1
    if log.holes:
        hole = log.hole_at_or_after(seq)
        if hole is not None:
            # A hole has its own reason, which the next page reports.
            last = min(last, hole.first_seq - 1)
    assert last >= seq
    return Gap(seq, last, only_reason(reasons), last - seq + 1), last + 1


def _bytes_at_most(run: Run, row: int, stop: int) -> int:
    """A bound of the bytes of live rows of a run, for less time than weighing takes."""
    if not isinstance(run, SealedRun):
        return run.live_bytes
    try:
        return min(run.live_bytes, run.index.bytes_at_most(row, stop))
    except StorageError:
        return run.live_bytes


class _Scan:
    """Collects the rows of one page until a budget is used up."""

    __slots__ = (
        "bytes_left",
        "is_full",
        "limit",
        "log",
        "may_span",
        "nodes",
        "pieces",
        "scanned",
        "search",
        "span",
        "unsearched",
    )

    def __init__(
        self,
        log: Log,
        limit: int,
        max_bytes: int,
        nodes: frozenset[str],
        search: Search | None = None,
        *,
        may_span: bool = False,
    ) -> None:
        assert limit > 0
        self.log = log
        self.limit = limit
        self.bytes_left = max_bytes
        self.nodes = nodes
        self.search = search
        self.unsearched: tuple[int, ...] = ()
        self.may_span = may_span
        self.span: SealedSpan | None = None
        self.pieces: list[Piece | SealedPiece] = []
        self.scanned = 0
        self.is_full = False
        if search is not None:
            search.begin()

    def run(self, seq: int, last: int) -> int:
        """Examine `seq..last`; returns the last examined seq."""
        log = self.log
        runs = log.runs
        for index in range(log.run_at(seq), len(runs)):
            run = runs[index]
            if run.first_seq > last:
                break
            if run.live_count == 0:
                continue
            if isinstance(run, TailBlock) and self._takes_whole(run, seq, last):
                if self.is_full:
                    return self._over_dead(run.last_seq, last)
                continue
            row = max(0, seq - run.first_seq)
            end = min(len(run.dead), last - run.first_seq + 1)
            if isinstance(run, SealedRun):
                if self.search is not None and run.segment_id not in self.search.found:
                    if not self.search.is_spent:
                        self.unsearched = _next_segments(log, index, last, self.search)
                    return max(seq, run.first_seq) - 1
                ceiling = last if last < log.head_seq else SEQ_MAX
                low = max(0, self._hole_before(seq) - run.first_seq)
                high = min(run.count, ceiling - run.first_seq + 1)
                row = self._sealed(run, row, end, low, high)
            else:
                row = self._resident(run, row, end)
            if row < end or self.is_full:
                return self._over_dead(run.first_seq + row - 1, last)
        return last

    def _takes_whole(self, run: TailBlock, seq: int, last: int) -> bool:
        """Take all rows of a frozen block in one step, like `_take`: the common case."""
        count = len(run.dead)
        if (
            not run.live_count == count <= self.limit
            or not seq <= run.first_seq <= last - count + 1
            or run.live_bytes > self.bytes_left
            or self.scanned + count > PAGE_SCAN_SLOTS_MAX
            or self.nodes
            or self.search
        ):
            return False
        self.pieces.append(Piece(run.block, range(count)))
        self.limit -= count
        self.bytes_left -= run.live_bytes
        self.scanned += count
        self.is_full = self.limit == 0
        return True

    def _over_dead(self, examined: int, last: int) -> int:
        """If only deleted records follow, move the cursor past them at once."""
        return last if self.log.next_live(examined + 1) > last else examined

    def _hole_before(self, seq: int) -> int:
        ends = [hole.last_seq + 1 for hole in self.log.holes if hole.last_seq < seq]
        return max(ends, default=0)

    def _resident(self, run: Run, row: int, end: int) -> int:
        rows, stop = self._take(run, row, end)
        if rows:
            if isinstance(run, TailBlock):
                self.pieces.append(Piece(run.block, rows))
            else:
                assert isinstance(run, OpenBlock)
                first = rows[0]
                block = run.block_of(first, rows[-1] + 1)
                is_whole = isinstance(rows, range)
                self.pieces.append(
                    Piece(block, range(len(rows)) if is_whole else shifted(rows, first))
                )
        return stop

    def _sealed(self, run: SealedRun, row: int, end: int, low: int, high: int) -> int:
        """Like `_resident`, group by group; a fetch stays within rows `low..high - 1`."""
        if self.search is not None:
            return self._sealed_found(run, row, end, low, high)
        stop = min(end, row + self.limit)
        if not (self.nodes or run.has_damage) and run.dead.find(1, row, stop) < 0:
            # Usually all rows are live: weigh those of all groups at once.
            first_row = row
            _, row = self._take(run, row, stop)
            span = SealedSpan(run.segment_id, first_row, row, low, high)
            if self.may_span and self.is_full and not self.pieces and first_row < row:
                self.span = span
            else:
                self.pieces += span.pieces()
            return row
        while row < end and not self.is_full:
            live = run.dead.find(0, row, end)
            if live < 0:
                return end
            group = live - live % BLOCK_RECORDS_MAX
            stop = min(end, group + BLOCK_RECORDS_MAX)
            rows, row = self._take(run, live, stop)
            if rows:
                first = max(low, group)
                last = min(high, group + BLOCK_RECORDS_MAX)
                fetch = Fetch(run.segment_id, first, last)
                self.pieces.append(SealedPiece(fetch, shifted(rows, first)))
            if row < stop:
                break
        return row

    def _sealed_found(self, run: SealedRun, row: int, end: int, low: int, high: int) -> int:
        """Take the rows that a search found; the rows between them are not examined."""
        assert self.search is not None
        picked: Sequence[int]
        few = None if self.nodes else self.search.few_rows(run, row, end, self.limit)
        if few is None:
            rows = self.search.live_rows(run, row, end)
            picked, stop = self._pick(run, rows, row, end)
        else:
            picked, stop = few, end
            if len(few) == self.limit:
                stop = few[-1] + 1
            weight = run.weigh_few(few) if few else 0
            if weight > self.bytes_left:
                picked, weight = self._cut(run, few)
                stop = picked[-1] + 1 if picked else row
            self.bytes_left -= weight
        groups: dict[int, list[int]] = {}
        for each in picked:
            groups.setdefault(each - each % BLOCK_RECORDS_MAX, []).append(each)
        for group, inside in groups.items():
            first, last = max(low, group), min(high, group + BLOCK_RECORDS_MAX)
            self.pieces += pieces_of_group(run.segment_id, first, last, inside)
        self.limit -= len(picked)
        self.scanned += len(picked)
        if self.limit == 0 or stop < end:
            self.is_full = True
        return stop

    def _take(self, run: Run, row: int, end: int) -> tuple[Sequence[int], int]:
        """The rows of `row..end - 1` for the page, and the first row that was not examined."""
        scan_end = min(end, row + PAGE_SCAN_SLOTS_MAX - self.scanned)
        is_plain = (
            not (self.nodes or self.search or run.has_damage)
            and run.dead.find(1, row, scan_end) < 0
        )
        taken: Sequence[int]
        if is_plain:
            # An unbroken range of rows, by arithmetic.
            stop = min(scan_end, row + self.limit)
            if not self._surely_fits(run, row, stop):
                stop = self._weighed(run, row, stop)
            taken = range(row, stop)
        else:
            taken, stop = self._take_picked(run, row, scan_end)
        self.limit -= len(taken)
        self.scanned += stop - row
        if self.limit == 0 or stop < end or (self.search is not None and self.search.is_tired):
            self.is_full = True
        return taken, stop

    def _surely_fits(self, run: Run, row: int, stop: int) -> bool:
        """Whether nothing follows live rows in the page, and a bound of their bytes fits."""
        if stop - row == self.limit:
            return _bytes_at_most(run, row, stop) <= self.bytes_left
        # More rows of this run may follow; nothing follows if all of the last run fits.
        return run is self.log.runs[-1] and run.live_bytes <= self.bytes_left

    def _weighed(self, run: Run, row: int, stop: int) -> int:
        """Weigh live rows that follow each other; returns the end of those that fit."""
        if row == 0 and stop == len(run.dead):
            weight = run.live_bytes
        else:
            weight = run.live_bytes_between(row, stop)
        if weight > self.bytes_left:
            stop = self._fitting(run, row, stop)
            weight = run.live_bytes_between(row, stop)
        self.bytes_left -= weight
        return stop

    def _fitting(self, run: Run, row: int, stop: int) -> int:
        """The end of the rows that fit the remaining bytes; a page has at least one record."""
        low, high = row, stop
        while low < high:
            middle = (low + high + 1) // 2
            if run.live_bytes_between(row, middle) <= self.bytes_left:
                low = middle
            else:
                high = middle - 1
        return max(low, row + 1) if not self.pieces else low

    def _take_picked(self, run: Run, row: int, end: int) -> tuple[Sequence[int], int]:
        """Take the live rows that pass all filters, one by one."""
        if self.search is not None:
            rows = self.search.live_rows(run, row, end)
        else:
            rows = np.flatnonzero(np.frombuffer(run.dead, np.uint8)[row:end] == 0) + row
        return self._pick(run, rows, row, end)

    def _pick(self, run: Run, rows: Rows, row: int, end: int) -> tuple[Sequence[int], int]:
        """The live rows that fit, and the first row that was not examined."""
        if self.nodes:
            rows = rows[_kept(run, rows, self.nodes)]
        stop = end
        if len(rows) > self.limit:
            rows = rows[: self.limit]
        if len(rows) == self.limit:
            stop = int(rows[-1]) + 1
        if len(rows) == 0:
            return (), stop
        weight = run.weigh_rows(rows)
        picked: list[int] = rows.tolist()
        if weight > self.bytes_left:
            picked, weight = self._cut(run, picked)
            stop = picked[-1] + 1 if picked else row
        self.bytes_left -= weight
        if picked and picked[-1] - picked[0] + 1 == len(picked):
            return range(picked[0], picked[-1] + 1), stop
        return picked, stop

    def _cut(self, run: Run, rows: list[int]) -> tuple[list[int], int]:
        weight = 0
        for position, row in enumerate(rows):
            size = run.row_bytes(row)
            if weight + size > self.bytes_left and (self.pieces or position):
                return rows[:position], weight
            weight += size
        return rows, weight


def _next_segments(log: Log, index: int, last: int, search: Search) -> tuple[int, ...]:
    """The segments to search together, from the run at `index` on."""
    found: list[int] = []
    for run in islice(log.runs, index, None):
        if not isinstance(run, SealedRun) or run.first_seq > last:
            break
        if run.live_count and run.segment_id not in search.found:
            found.append(run.segment_id)
            if len(found) == search.searched_next:
                break
    return tuple(found)


def _kept(run: Run, rows: Rows, nodes: frozenset[str]) -> Rows:
    """The positions in `rows` whose record has none of the omitted nodes."""
    if len(rows) == 0:
        return np.zeros(0, np.int64)
    if isinstance(run, SealedRun):
        first, end = int(rows[0]), int(rows[-1]) + 1
        hidden = np.frombuffer(run.index.node_rows(nodes, first, end), np.uint8)
        return np.flatnonzero(hidden[rows - first] == 0)
    assert isinstance(run, TailBlock | OpenBlock)
    column = run.block.nodes if isinstance(run, TailBlock) else run.nodes
    kept = [position for position, row in enumerate(rows.tolist()) if column[row] not in nodes]
    return np.asarray(kept, np.int64)


def pieces_of_group(
    segment_id: int, first: int, end: int, rows: Sequence[int]
) -> list[Piece | SealedPiece]:
    """The pieces of these rows of `first .. end - 1`: from their group, or each row alone.

    Otherwise a page of rare rows would read and unpack hundreds of other rows for each row.
    """
    if len(rows) > FEW_ROWS:
        return [SealedPiece(Fetch(segment_id, first, end), shifted(rows, first))]
    return [SealedPiece(Fetch(segment_id, row, row + 1, is_group=False), range(1)) for row in rows]


def shifted(rows: Sequence[int], offset: int) -> Sequence[int]:
    """The rows, counted from row `offset` on."""
    if isinstance(rows, range):
        return range(rows.start - offset, rows.stop - offset)
    return [row - offset for row in rows]
