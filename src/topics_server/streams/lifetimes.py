"""Deletes streams at the end of their TTL or at their expiry time.

Requests see an expired stream as deleted at once; this task drops its topic within a second. A heap
holds the earliest possible end of each stream; a stream that was used meanwhile returns to the heap
with its new time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from heapq import heappop, heappush

from topics_server.engine.ports import Clock
from topics_server.engine.store import Store
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.values.errors import TopicsError

_SWEEP_S = 1.0
# Streams examined in one loop turn.
_SLICE = 256
# Pause after a refused drop (a full disk).
_RETRY_MS = 10_000


class Lifetimes:
    """The end times of streams.

    `waiting`: the number of readers that wait for more, by topic id.
    """

    def __init__(
        self, store: Store, registry: Registry, clock: Clock, waiting: Mapping[int, int]
    ) -> None:
        self._store = store
        self._registry = registry
        self._clock = clock
        self._waiting = waiting
        self._due: list[tuple[int, int]] = []

    def adopt(self, topic: Topic) -> None:
        """Add a stream to the heap if it has a lifetime."""
        ends_ms = None if topic.stream is None else topic.stream.ends_ms()
        if ends_ms is not None:
            heappush(self._due, (ends_ms, topic.topic_id))

    def is_over(self, topic: Topic) -> bool:
        """Whether the stream has expired."""
        if topic.stream is None:
            return False
        ends_ms = topic.stream.ends_ms()
        if ends_ms is None or self._clock.now_ms() < ends_ms:
            return False
        return topic.stream.facts.ttl_s is None or topic.topic_id not in self._waiting

    async def run(self) -> None:
        """Drop each stream when it expires; runs until it is cancelled."""
        for number, topic in enumerate(self._registry):
            self.adopt(topic)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._sweep()

    async def _sweep(self) -> None:
        looked_at = 0
        while self._due and self._due[0][0] <= self._clock.now_ms():
            _, topic_id = heappop(self._due)
            topic = self._registry.get(topic_id)
            if topic is None or topic.stream is None:
                continue
            if self.is_over(topic):
                await self._drop(topic)
            else:
                if topic_id in self._waiting:
                    topic.stream.used(self._clock.now_ms())
                self.adopt(topic)
            looked_at += 1
            if looked_at % _SLICE == 0:
                await asyncio.sleep(0)

    async def _drop(self, topic: Topic) -> None:
        try:
            await self._store.drop_topic(topic.name, if_empty=False)
        except TopicsError:
            heappush(self._due, (self._clock.now_ms() + _RETRY_MS, topic.topic_id))
