"""What waiting claims leave for the garbage collector: nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.garbage import nothing_for_the_collector
from tests.unit.queue.rig import QueueRig, turns
from topics_server.values.errors import TopicsError

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("config", [{}, {"claim_jitter_ms": 5}], ids=["at once", "in a window"])
async def test_a_claim_whose_wait_ends_leaves_nothing_for_the_collector(
    config: dict[str, Any],
) -> None:
    rig = QueueRig()
    await rig.queue(**config)
    with nothing_for_the_collector():
        claiming = asyncio.ensure_future(rig.claim(wait_ms=1_000))
        await turns()
        rig.pass_time(1_001)
        await turns()
        rig.pass_time(10)
        found = await claiming
        await turns()
        assert found is not None
        assert found.jobs == []


async def test_a_claim_whose_client_leaves_leaves_nothing_for_the_collector() -> None:
    rig = QueueRig()
    await rig.queue()
    left = asyncio.Event()
    with nothing_for_the_collector():
        claiming = asyncio.ensure_future(rig.claim(wait_ms=1_000, gone=left.wait))
        await turns()
        left.set()
        assert await claiming is None
        await turns()
        left.clear()


async def test_a_claim_of_a_dropped_queue_leaves_nothing_for_the_collector() -> None:
    rig = QueueRig()
    await rig.queue()
    await rig.queue("other")
    with nothing_for_the_collector():
        claiming = asyncio.ensure_future(rig.claim(wait_ms=1_000))
        await turns()
        await rig.store.drop_topic("jobs", if_empty=False)
        await turns()
        with pytest.raises(TopicsError):
            await claiming
        del claiming
        await turns()
