"""Reads: one page after a cursor, with or without waiting for records.

`plan_page` decides what a page holds; sealed payloads come off the loop through `Fetcher`. Called
through `store`; loop thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from topics_server.engine.answers import Page, ReadRequest
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pending_names import change_or_timeout
from topics_server.engine.ports import Clock
from topics_server.engine.read.exact_read import Row, plan_rows, row_of, tail_rows
from topics_server.engine.read.page import PagePlan, plan_page
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import Block


class Reads:
    """The reads of all topics. `is_draining`: the server is going down, and nobody waits."""

    def __init__(
        self, registry: Registry, notifier: Notifier, fetcher: Fetcher, clock: Clock
    ) -> None:
        self._registry = registry
        self._notifier = notifier
        self._fetcher = fetcher
        self._clock = clock
        self.is_draining = False

    async def read(self, name: str, request: ReadRequest) -> Page:
        """One page after a cursor; waits up to `wait_ms` while there is nothing to tell (§3)."""
        deadline = self._clock.monotonic_ms() + request.wait_ms
        while True:
            topic = self._registry.existing(name)
            now_ms = self._clock.now_ms()
            topic.last_read_ts = now_ms
            plan = plan_page(topic, request, now_ms)
            page = await self._fetcher.complete(topic, plan)
            if page is None:
                continue  # something moved or was found damaged: plan again
            if not page.is_empty or not request.wait_ms:
                return page
            left_ms = deadline - self._clock.monotonic_ms()
            if left_ms <= 0 or self.is_draining:
                return page
            request = msgspec.structs.replace(request, from_seq=page.next_from_seq)
            if page.caught_up and topic.log.head_seq == page.head_seq:
                await change_or_timeout(self._notifier, topic.topic_id, left_ms)

    def read_now(self, name: str, request: ReadRequest) -> Page | None:
        """The page that `read` gives without waiting for records; None if it is not in memory."""
        topic = self._registry.existing(name)
        now_ms = self._clock.now_ms()
        topic.last_read_ts = now_ms
        return self._fetcher.resident(topic, plan_page(topic, request, now_ms))

    async def complete(self, topic: Topic, plan: PagePlan) -> Page | None:
        """The page of a plan, read from disk where it has to be; None: plan it again."""
        return await self._fetcher.complete(topic, plan)

    def resident(self, topic: Topic, plan: PagePlan) -> Page | None:
        """The page of a plan if nothing of it has to be read from disk."""
        return self._fetcher.resident(topic, plan)

    async def read_rows(self, topic: Topic, seqs: Sequence[int]) -> list[tuple[Block, int]]:
        """The records of these seqs (ascending), each as a block and its row in it.

        What is deleted, lost or found damaged is left out.
        """
        page = None
        while page is None:
            page = await self._fetcher.complete(topic, plan_rows(topic, seqs))
        return [(piece.block, row) for piece in page.pieces for row in piece.rows]

    def rows_now(self, topic: Topic, seqs: Sequence[int]) -> list[Row] | None:
        """The records of these live seqs (ascending); None if one is not in memory."""
        rows = tail_rows(topic.log, seqs)
        if rows is not None:
            return rows
        page = self._fetcher.resident(topic, plan_rows(topic, seqs))
        if page is None:
            return None
        rows = [row_of(piece.block, row) for piece in page.pieces for row in piece.rows]
        return rows if len(rows) == len(seqs) else None

    def drain(self) -> None:
        """The server is going down: whoever waits for records is answered now."""
        self.is_draining = True
        self._notifier.notify_all()
