"""`topic_waits`: a change ends every wait for it, a few in each turn of the loop."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.topic_waits import ENDED_MAX, TopicWaits

pytestmark = pytest.mark.anyio

LONG_MS = 3_600_000.0


class Readers:
    """Tasks that wait; `ended`: their numbers, as their waits end."""

    def __init__(self) -> None:
        self.notifier = Notifier()
        self.waits = TopicWaits(self.notifier)
        self.ended: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self, count: int, topic_id: int = 1, timeout_ms: float = LONG_MS) -> None:
        for _ in range(count):
            number = len(self.tasks)
            wait = self._wait(number, topic_id, timeout_ms)
            self.tasks.append(asyncio.get_running_loop().create_task(wait))
        await asyncio.sleep(0)

    async def _wait(self, number: int, topic_id: int, timeout_ms: float) -> None:
        await self.waits.change_or_timeout(topic_id, timeout_ms)
        self.ended.append(number)

    async def all_ended(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.notifier.listener_count == 0


async def test_a_change_ends_the_waits_of_its_topic_only() -> None:
    readers = Readers()
    await readers.begin(2, topic_id=1)
    await readers.begin(1, topic_id=2)
    readers.notifier.notify(1)
    # Although each is notified twice, it continues once.
    readers.notifier.notify(1)
    await asyncio.sleep(0)
    assert readers.ended == [0, 1]
    readers.notifier.notify(2)
    await readers.all_ended()
    assert readers.ended == [0, 1, 2]


async def test_many_waits_end_a_few_in_each_turn_in_the_order_of_arrival() -> None:
    readers = Readers()
    count = 3 * ENDED_MAX + 5
    await readers.begin(count)
    readers.notifier.notify(1)
    seen = [0]
    while len(readers.ended) < count:
        await asyncio.sleep(0)
        seen.append(len(readers.ended))
    turns = [later - sooner for sooner, later in pairwise(seen)]
    assert max(turns) == ENDED_MAX
    assert readers.ended == list(range(count))
    await readers.all_ended()


async def test_waits_whose_time_is_over_end_in_turns_too() -> None:
    readers = Readers()
    count = 2 * ENDED_MAX + 1
    await readers.begin(count, timeout_ms=1.0)
    most = before = 0
    async with asyncio.timeout(30):
        while len(readers.ended) < count:
            await asyncio.sleep(0)
            most, before = max(most, len(readers.ended) - before), len(readers.ended)
    assert most <= ENDED_MAX
    await readers.all_ended()


async def test_callers_that_are_gone_hold_nobody_up() -> None:
    readers = Readers()
    await readers.begin(3 * ENDED_MAX)
    for task in readers.tasks[: 2 * ENDED_MAX]:
        task.cancel()
    readers.notifier.notify(1)
    await asyncio.sleep(0)
    for task in readers.tasks[2 * ENDED_MAX : -1]:
        task.cancel()
    await readers.all_ended()
    assert readers.ended[-1] == 3 * ENDED_MAX - 1
    # The next change ends waits at once, as usual.
    await readers.begin(1)
    readers.notifier.notify(1)
    await asyncio.sleep(0)
    assert readers.ended[-1] == 3 * ENDED_MAX
