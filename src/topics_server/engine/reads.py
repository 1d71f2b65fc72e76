"""Reads: one page after a cursor, with or without waiting for records.

`plan_page` decides which records a page has; `Fetcher` reads sealed payloads off the loop. Called
through `store`; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from topics_server.engine.answers import (
    BackwardPage,
    BackwardRequest,
    JsonPage,
    Page,
    RangeMark,
    ReadRequest,
)
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.topic_waits import TopicWaits
from topics_server.engine.filters import Filter
from topics_server.engine.log.log import Log
from topics_server.engine.ports import Clock
from topics_server.engine.read.backward import cursor_since, first_of_last, plan_backward
from topics_server.engine.read.exact_read import (
    MANY_ROWS,
    Row,
    plan_rows,
    row_of,
    tail_columns,
    tail_rows,
)
from topics_server.engine.read.filtered import Search
from topics_server.engine.read.page import Fetch, PagePlan, plan_page
from topics_server.engine.read.row_columns import RowColumns
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import Block
from topics_server.values.errors import topic_not_found
from topics_server.values.limits import PAGE_BYTES_MAX


class Reads:
    """The reads of all topics. `is_draining`: the server is stopping, and no reader waits."""

    def __init__(
        self, registry: Registry, notifier: Notifier, fetcher: Fetcher, clock: Clock
    ) -> None:
        self._registry = registry
        self._notifier = notifier
        self._waits = TopicWaits(notifier)
        self._fetcher = fetcher
        self._clock = clock
        self.is_draining = False

    async def read(self, name: str, request: ReadRequest) -> Page:
        """One page after a cursor; waits up to `wait_ms` while there is nothing to report (§3)."""
        deadline = self._clock.monotonic_ms() + request.wait_ms
        search = None if request.filter is None else Search(request.filter)
        while True:
            topic, now_ms = self._read_by(name)
            if request.start is not None:
                placed = await self._placed(topic, request, now_ms)
                if self._registry.get(topic.topic_id) is topic:
                    request = placed
                continue  # the topic may have changed meanwhile
            upto_seq = _upto_seq(topic, request, now_ms)
            if search is not None:
                search.of_topic(topic.topic_id)
                cursor = max(request.from_seq, topic.log.earliest_seq - 1)
                search.expect(cursor, request.limit, request.max_bytes)
            plan = plan_page(topic, request, now_ms, upto_seq, search)
            if plan.unsearched:
                assert search is not None
                await self._fetcher.search(topic, plan.unsearched, search)
                continue
            page = await self._fetcher.complete(
                topic, plan, None if search is None else search.ahead
            )
            if page is None:
                continue  # something moved or was found damaged: plan again
            # A range that ends below the head gets no new records.
            is_over = upto_seq < page.head_seq and page.next_from_seq >= upto_seq
            if not page.is_empty or is_over or not request.wait_ms:
                return page
            left_ms = deadline - self._clock.monotonic_ms()
            if left_ms <= 0 or self.is_draining:
                return page
            request = msgspec.structs.replace(request, from_seq=page.next_from_seq)
            if search is not None:
                search.forget()
            if page.caught_up and topic.log.head_seq == page.head_seq:
                await self._waits.change_or_timeout(topic.topic_id, left_ms)
            else:
                # Pages of records in memory need no wait.
                await asyncio.sleep(0)

    def read_resident(self, name: str, request: ReadRequest) -> Page | None:
        """The page that `read` would return without waiting; None if it is not in memory.

        For callers that do not run in a task (docs/decisions/0142-one-form.md has the figures).
        """
        page = self.read_json(name, request, 0)
        assert not isinstance(page, JsonPage)
        return page

    def read_json(self, name: str, request: ReadRequest, shown: int) -> Page | JsonPage | None:
        """`read_resident` for a caller that renders the records as JSON.

        `shown`: a sum of `json_cache.TAGS`, `META` and `DATA`.
        """
        # The body of `_read_by`, inlined, because most reads need nothing else.
        topic = self._registry.existing(name)
        topic.last_read_ts = now_ms = self._clock.now_ms()
        if request.start or request.until or request.filter:
            return None
        plan = plan_page(topic, request, now_ms, request.before_seq - 1, may_span=shown != 0)
        return self._fetcher.read_now(topic, plan, shown)

    async def read_json_from_disk(
        self, name: str, request: ReadRequest, shown: int
    ) -> Page | JsonPage | None:
        """`read_json` for a page that is not in memory: a worker thread reads its JSON objects.

        None where `read` must make the page.
        """
        topic, now_ms = self._read_by(name)
        if request.start or request.until or request.filter:
            return None
        upto_seq = request.before_seq - 1
        plan = plan_page(topic, request, now_ms, upto_seq)
        return await self._fetcher.read_json_from_disk(topic, plan, shown)

    def _read_by(self, name: str) -> tuple[Topic, int]:
        """The topic and the time; the read counts as a use of the topic."""
        topic = self._registry.existing(name)
        topic.last_read_ts = now_ms = self._clock.now_ms()
        return topic, now_ms

    async def read_backward(
        self, name: str, request: BackwardRequest, wanted: Filter | None
    ) -> BackwardPage:
        """One page of the records below a cursor, newest first."""
        search = None if wanted is None else Search(wanted)
        while True:
            topic, now_ms = self._read_by(name)
            if search is not None:
                search.of_topic(topic.topic_id)
            asked = _within(topic, request, now_ms)
            if search is not None:
                search.expect(asked.before_seq, asked.limit, asked.max_bytes, is_backward=True)
            plan = plan_backward(topic, asked, now_ms, search)
            if plan.unsearched:
                assert search is not None
                await self._fetcher.search(topic, plan.unsearched, search)
                continue
            seqs = plan.seqs[::-1]
            rows = plan_rows(topic, seqs, alone=search is not None)
            ahead = None if search is None else search.ahead
            page = await self._fetcher.complete(topic, rows, ahead)
            if page is not None:
                log = topic.log
                return BackwardPage(
                    pieces=page.pieces,
                    before_seq=asked.before_seq,
                    next_before_seq=plan.next_before_seq,
                    head_seq=log.head_seq,
                    earliest_seq=topic.earliest_seq(now_ms),
                    gap=plan.gap,
                    scanned=plan.scanned,
                    epoch=topic.epoch,
                    is_complete=plan.next_before_seq <= asked.after_seq + 1,
                )

    async def _placed(self, topic: Topic, request: ReadRequest, now_ms: int) -> ReadRequest:
        """The request with its `start` replaced by a cursor."""
        start = request.start
        if start is None:
            return request
        if start.since is not None:
            from_seq = cursor_since(topic.log, start.since.at(now_ms))
        else:
            assert start.last is not None
            from_seq = await self._before_last(topic, start.last, request, now_ms)
        return msgspec.structs.replace(request, from_seq=from_seq, start=None)

    async def _before_last(
        self, topic: Topic, count: int, request: ReadRequest, now_ms: int
    ) -> int:
        """The cursor before the last records that a read takes, as many as requested."""
        upto_seq = min(_upto_seq(topic, request, now_ms), topic.log.head_seq)
        earliest = topic.earliest_seq(now_ms)
        if count <= 0 or upto_seq < earliest:
            return upto_seq
        if request.filter is None and not request.nodes:
            return max(first_of_last(topic.log, count, upto_seq), earliest) - 1
        search = None if request.filter is None else Search(request.filter)
        before = upto_seq + 1
        while before > earliest:
            asked = BackwardRequest(before, earliest - 1, count, PAGE_BYTES_MAX, request.nodes)
            if search is not None:
                search.expect(before, count, is_backward=True)
            plan = plan_backward(topic, asked, now_ms, search)
            if plan.unsearched:
                assert search is not None
                if not await self._fetcher.search(topic, plan.unsearched, search):
                    return upto_seq  # The topic was dropped: the caller looks up its successor.
                continue
            count -= len(plan.seqs)
            if count <= 0:
                return plan.seqs[-1] - 1
            before = plan.next_before_seq
            if search is not None:
                search.forget()
            await asyncio.sleep(0)
        return earliest - 1

    async def cursor_of(self, name: str, request: ReadRequest) -> int:
        """The cursor at which a read of the topic would begin now."""
        while True:
            topic = self._registry.existing(name)
            placed = await self._placed(topic, request, self._clock.now_ms())
            if self._registry.get(topic.topic_id) is topic:
                return placed.from_seq

    async def complete(self, topic: Topic, plan: PagePlan) -> Page | None:
        """The page of a plan, read from disk where necessary; None: plan it again."""
        return await self._fetcher.complete(topic, plan)

    def resident(
        self, topic: Topic, plan: PagePlan, held: Mapping[Fetch, Block] | None = None
    ) -> Page | None:
        """The page of a plan if nothing must be read from disk; `held`: see `Fetcher`."""
        return self._fetcher.resident(topic, plan, held)

    async def read_rows(self, topic: Topic, seqs: Sequence[int]) -> list[tuple[Block, int]]:
        """The records of these seqs (ascending), each as a block and its row in it.

        Deleted, lost and damaged records are omitted. Raises `topic_not_found` once the topic is
        dropped.
        """
        while (page := await self._fetcher.complete(topic, plan_rows(topic, seqs))) is None:
            if self._registry.get(topic.topic_id) is not topic:
                raise topic_not_found(topic.name)
        return [(piece.block, row) for piece in page.pieces for row in piece.rows]

    def resident_rows(self, topic: Topic, seqs: Sequence[int]) -> list[Row] | RowColumns | None:
        """The records of these live seqs (ascending); None if one is not in memory.

        Many records are columns.
        """
        is_many = len(seqs) >= MANY_ROWS
        rows = tail_columns(topic.log, seqs) if is_many else tail_rows(topic.log, seqs)
        if rows is not None:
            return rows
        page = self._fetcher.resident(topic, plan_rows(topic, seqs))
        if page is None:
            return None
        if is_many:
            columns = RowColumns()
            for piece in page.pieces:
                columns.add_block(piece.block, piece.rows)
            return columns if len(columns.times) == len(seqs) else None
        rows = [row_of(piece.block, row) for piece in page.pieces for row in piece.rows]
        return rows if len(rows) == len(seqs) else None

    def upto_seq(self, name: str, request: ReadRequest) -> int:
        """The last seq that a read examines."""
        return _upto_seq(self._registry.existing(name), request, self._clock.now_ms())

    def range_mark(self, name: str, first_seq: int, last_seq: int) -> RangeMark:
        """A value that differs between two states of a range of seqs; for the ETag of a page."""
        topic = self._registry.existing(name)
        log, now_ms = topic.log, self._clock.now_ms()
        live = _live_count(log, first_seq, min(last_seq, log.head_seq))
        return RangeMark(topic.topic_id, topic.epoch, topic.earliest_seq(now_ms), live)

    def dead_slots(self, name: str) -> tuple[int, int]:
        """The topic of a name, and its number of seqs without a record, which losses change."""
        topic = self._registry.existing(name)
        return topic.topic_id, topic.log.head_seq - topic.log.live_count

    def drain(self) -> None:
        """Answer every reader that waits for records now: the server is stopping."""
        self.is_draining = True
        self._notifier.notify_all()


def _live_count(log: Log, first_seq: int, last_seq: int) -> int:
    """The number of live records in the inclusive range; cheaper than `Log.live_between`."""
    count, runs = 0, log.runs
    for index in range(log.run_at(first_seq), len(runs)):
        run = runs[index]
        if run.first_seq > last_seq:
            break
        start = max(0, first_seq - run.first_seq)
        end = min(run.count, last_seq - run.first_seq + 1)
        if run.live_count == run.count:
            count += max(0, end - start)
        elif run.live_count:
            count += run.dead.count(0, start, end)
    return count


def _upto_seq(topic: Topic, request: ReadRequest, now_ms: int) -> int:
    """The last seq that a read examines."""
    upto_seq = request.before_seq - 1
    if request.until is not None:
        upto_seq = min(upto_seq, topic.log.first_seq_since(request.until.at(now_ms)) - 1)
    return upto_seq


def _within(topic: Topic, request: BackwardRequest, now_ms: int) -> BackwardRequest:
    """The request with its times resolved to seqs."""
    log, before_seq, after_seq = topic.log, request.before_seq, request.after_seq
    if request.until is not None:
        before_seq = min(before_seq, log.first_seq_since(request.until.at(now_ms)))
    if request.since is not None:
        after_seq = max(after_seq, cursor_since(log, request.since.at(now_ms)))
    return msgspec.structs.replace(
        request, before_seq=before_seq, after_seq=after_seq, since=None, until=None
    )
