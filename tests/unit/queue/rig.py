"""The queue service over an engine of lists: a journal that the test completes."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.unit.engine.rig import Rig
from topics_server.engine.topic.topic import Topic
from topics_server.queue.answers import ClaimResult
from topics_server.queue.leases.lease_book import LeaseBook
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.queue.service import QueueService
from topics_server.values.entries import LEASES_ID
from topics_server.values.model import TopicConfig, TopicType


async def stays() -> None:
    """A client that stays connected."""
    await asyncio.get_running_loop().create_future()


class QueueRig(Rig):
    """A `Rig` with queues. `moved`: the number of changes without an entry."""

    def __init__(self, *, is_prompt: bool = True) -> None:
        super().__init__(is_prompt=is_prompt)
        self.lease_table = LeaseTable(1000)
        self.commits._projections = {LEASES_ID: self.lease_table}
        self.commits.observers.append(self.lease_table.observe)
        self.moved = 0
        self.queues = QueueService(
            self.store,
            self.lease_table,
            self.commits,
            self.notifier,
            self.clock,
            on_moved=self._on_moved,
        )

    def _on_moved(self) -> None:
        self.moved += 1

    async def queue(self, name: str = "jobs", **config: Any) -> Topic:
        """Create or configure a queue."""
        made = TopicConfig(type=TopicType.QUEUE, **config)
        putting = asyncio.ensure_future(self.store.put_topic(name, made, keep_type=False))
        await turns()
        self.journal.sync_everything()
        await putting
        topic = self.registry.find(name)
        assert topic is not None
        return topic

    async def put(self, *datas: object, name: str = "jobs") -> None:
        """Append jobs, whether or not the journal finishes entries by itself."""
        appending = asyncio.ensure_future(self.append(name, *datas))
        await turns()
        self.journal.sync_everything()
        await appending

    def book(self, topic: Topic) -> LeaseBook:
        found = self.lease_table.find(topic.topic_id)
        assert found is not None
        return found

    async def claim(
        self,
        node: str = "w",
        max_jobs: int = 1,
        *,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        gone: Any = stays,
    ) -> ClaimResult | None:
        return await self.queues.claim("jobs", node, max_jobs, lease_ms, wait_ms=wait_ms, gone=gone)

    async def seqs(self, node: str = "w", max_jobs: int = 1, **more: Any) -> list[int]:
        found = await self.claim(node, max_jobs, **more)
        assert found is not None
        return [job.seq for job in found.jobs]

    async def counts(self, topic: Topic) -> tuple[int, int, int, int]:
        found = self.lease_table.counts(topic, self.clock.now_ms())
        return found.ready, found.in_flight, found.delayed, found.dead_lettered

    def pass_time(self, by_ms: int) -> None:
        self.clock.move(by_ms)
        self.queues.tick()


async def turns(count: int = 10) -> None:
    """Run all callbacks that are ready."""
    for _ in range(count):
        await asyncio.sleep(0)
