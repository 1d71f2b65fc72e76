"""Deletes by tag: searched in slices, decided at one point in time."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import HandClock, Rig
from topics_server.values.limits import BLOCK_RECORDS_MAX
from topics_server.values.model import Durability, TopicConfig

pytestmark = pytest.mark.anyio

BLOCKS = 12


class WorkingClock(HandClock):
    """Every reading moves this clock by half a millisecond."""

    def monotonic_ms(self) -> float:
        self.steady_ms += 0.5
        return self.steady_ms


async def filled() -> Rig:
    """An unsealed topic of many blocks; every other record has the tag."""
    rig = Rig()
    await rig.store.put_topic("t", TopicConfig(durability=Durability.EPHEMERAL), keep_type=False)
    for _ in range(BLOCKS * 2):
        await rig.append("t", *range(BLOCK_RECORDS_MAX // 2), tag="a")
        await rig.append("t", *range(BLOCK_RECORDS_MAX // 2), tag="b")
    clock = WorkingClock()
    clock.wall_ms = rig.clock.wall_ms
    rig.store.deletes._clock = clock
    return rig


async def turns_of(task: asyncio.Task[object]) -> int:
    """The number of turns of the loop until the delete is done."""
    turns = 0
    while not task.done():
        turns += 1
        assert turns < 1_000
        await asyncio.sleep(0)
    return turns


async def test_the_search_of_many_blocks_leaves_the_loop_to_others() -> None:
    rig = await filled()
    deleting = asyncio.create_task(rig.delete("t", tag="a"))
    assert await turns_of(deleting) >= BLOCKS
    count = BLOCKS * BLOCK_RECORDS_MAX
    assert (deleting.result().deleted, deleting.result().count) == (count, count)


async def test_what_is_appended_while_a_delete_searches_is_matched_too() -> None:
    rig = await filled()
    deleting = asyncio.create_task(rig.delete("t", tag="a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = await rig.append("t", *range(2 * BLOCK_RECORDS_MAX), tag="a")
    assert not deleting.done()
    await deleting
    assert seqs_of(await rig.read("t", from_seq=late.first_seq - 1)) == []


async def test_a_topic_created_again_while_a_delete_searches_is_searched_anew() -> None:
    rig = await filled()
    deleting = asyncio.create_task(rig.delete("t", tag="a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await rig.store.drop_topic("t", if_empty=False)
    await rig.append("t", *range(8), tag="b")
    await rig.append("t", *range(8), tag="a")
    await rig.sealer.seal_topics(["t"])
    assert not deleting.done()
    assert (await deleting).deleted == 8
    assert seqs_of(await rig.read("t")) == list(range(1, 9))
