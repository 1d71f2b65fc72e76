"""`dispatcher`: claims of a queue that is dropped end a few in each turn of the loop."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.queue.rig import QueueRig, turns
from topics_server.values.errors import Code, TopicsError

pytestmark = pytest.mark.anyio


async def test_claims_of_a_dropped_queue_end_in_turns() -> None:
    """Every claim gets an error that names the dropped queue, whether it waits or not."""
    rig = QueueRig()
    await rig.queue()
    loop = asyncio.get_running_loop()
    waiting = [loop.create_task(rig.claim(f"w{number}", wait_ms=60_000)) for number in range(100)]
    await turns()
    dropping = loop.create_task(rig.store.drop_topic("jobs", if_empty=False))
    most = done = 0
    for _ in range(1_000):
        await asyncio.sleep(0)
        rig.journal.sync_everything()
        now_done = sum(task.done() for task in waiting)
        most, done = max(most, now_done - done), now_done
        if done == len(waiting):
            break
    await dropping
    assert done == len(waiting)
    assert most <= 2 * 32
    for task in waiting:
        error = task.exception()
        assert isinstance(error, TopicsError)
        assert error.code is Code.TOPIC_NOT_FOUND
    assert rig.queues.dispatcher.queues == {}
