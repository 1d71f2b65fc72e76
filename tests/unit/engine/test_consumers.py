"""Consumers whose entries are in flight, and the limits on the number of consumers."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import UNSET

from tests.unit.engine.rig import Rig
from topics_server.engine import consumers as service
from topics_server.engine.topic.consumers import changes
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import ConsumerHold, TopicConfig

pytestmark = pytest.mark.anyio


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def slow_rig() -> Rig:
    """A topic with five records and a consumer; its journal writes when the test says so."""
    rig = Rig(is_prompt=False)
    store = rig.store
    for start in (asyncio.create_task(rig.append("t", *range(5))),):
        await settled()
        rig.journal.sync_everything()
        await start
    making = asyncio.create_task(store.put_consumer("t", "c", 0))
    await settled()
    assert not making.done()
    rig.journal.sync_everything()
    state, created = await making
    assert (state.seq, created) == (0, True)
    return rig


async def test_commits_in_flight_count_when_the_next_is_decided() -> None:
    rig = await slow_rig()
    store = rig.store
    first = asyncio.create_task(store.commit_consumer("t", "c", 4))
    await settled()
    late = asyncio.create_task(store.commit_consumer("t", "c", 2))
    compared = asyncio.create_task(store.commit_consumer("t", "c", 5, if_seq=0))
    await settled()
    assert not late.done()
    assert store.consumer("t", "c").seq == 0
    rig.journal.sync_everything()
    assert (await first)[1]
    assert [(await late)[0].seq, (await late)[1]] == [4, False]
    with pytest.raises(TopicsError) as caught:
        await compared
    assert caught.value.detail["seq"] == 4


async def test_a_commit_of_an_earlier_topic_moves_no_consumer_of_a_later_one() -> None:
    rig = Rig()
    await rig.append("t", *range(5))
    before = rig.store.topic("t").topic_id
    await rig.store.drop_topic("t", if_empty=False)
    await rig.append("t", *range(9))
    await rig.store.put_consumer("t", "c", 0)
    with pytest.raises(TopicsError) as refused:
        await rig.store.commit_consumer("t", "c", 5, topic_id=before)
    assert refused.value.code is Code.TOPIC_NOT_FOUND
    assert rig.store.consumer("t", "c").seq == 0
    now = rig.store.topic("t").topic_id
    assert (await rig.store.commit_consumer("t", "c", 5, topic_id=now))[1]


async def test_a_consumer_that_is_deleted_in_the_turn_that_made_it_was_made() -> None:
    rig = await slow_rig()
    store = rig.store
    making = asyncio.create_task(store.put_consumer("t", "new", 2))
    await settled()
    deleting = asyncio.create_task(store.delete_consumer("t", "new"))
    await settled()
    rig.journal.sync_everything()
    state, created = await making
    assert (state.seq, created) == (2, True)
    assert await deleting


async def test_a_put_that_finds_a_consumer_which_is_deleted_then_makes_it() -> None:
    rig = await slow_rig()
    store = rig.store
    first = asyncio.create_task(store.put_consumer("t", "new", 2))
    await settled()
    second = asyncio.create_task(store.put_consumer("t", "new", 3))
    await settled()
    deleting = asyncio.create_task(store.delete_consumer("t", "new"))
    await settled()
    rig.journal.sync_everything()
    assert (await first)[1]
    assert await deleting
    await settled()
    rig.journal.sync_everything()
    state, created = await second
    assert (state.seq, created) == (3, True)


async def test_a_commit_that_fails_is_undone() -> None:
    rig = await slow_rig()
    store = rig.store
    failing = asyncio.create_task(store.commit_consumer("t", "c", 4))
    await settled()
    newest = rig.journal.submitted[-1]
    rig.journal.fail(newest.shard, newest.lsn, "disk_full")
    with pytest.raises(TopicsError):
        await failing
    again = asyncio.create_task(store.commit_consumer("t", "c", 3, if_seq=0))
    await settled()
    rig.journal.sync_everything()
    assert (await again)[0].seq == 3


async def test_a_deletion_in_flight_counts() -> None:
    rig = await slow_rig()
    store = rig.store
    deleting = asyncio.create_task(store.delete_consumer("t", "c"))
    await settled()
    with pytest.raises(TopicsError) as caught:
        await store.commit_consumer("t", "c", 1)
    assert caught.value.code is Code.CONSUMER_NOT_FOUND
    rig.journal.sync_everything()
    assert await deleting


async def test_consumers_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    store = rig.store
    for name in ("a", "b"):
        await rig.append(name, 1)
    monkeypatch.setattr(changes, "CONSUMERS_PER_TOPIC_MAX", 2)
    monkeypatch.setattr(service, "CONSUMERS_MAX", 3)
    made = await asyncio.gather(
        *(store.put_consumer("a", f"c{number}", 0) for number in range(3)), return_exceptions=True
    )
    refusal = made[2]
    assert isinstance(refusal, TopicsError)
    assert refusal.detail["limit"] == "max_consumers_per_topic"
    await store.put_consumer("b", "c0", 0)
    with pytest.raises(TopicsError) as caught:
        await store.put_consumer("b", "c1", 0)
    assert caught.value.detail == {"limit": "max_consumers", "max": 3}
    # An existing consumer does not count as new; deleting a consumer, or its topic, makes room.
    await store.put_consumer("b", "c0", 0)
    await store.drop_topic("a", if_empty=False)
    assert store.consumers.consumer_count == 1
    await store.put_consumer("b", "c1", 0)
    assert sorted(store.consumer_lags()) == [("b", "c0", 1, 0), ("b", "c1", 1, 0)]


async def test_a_put_gives_an_existing_consumer_another_hold() -> None:
    rig = Rig()
    store = rig.store
    await rig.append("t", *range(5), config=TopicConfig(cap_records=2))
    hold = ConsumerHold(4, 1 << 40)
    state, created = await store.put_consumer("t", "c", 3, hold)
    assert (state.seq, state.hold, created) == (3, hold, True)
    await rig.append("t", 6, 7)
    state = store.consumer("t", "c")
    assert (state.held_records, state.lag) == (2, 4)
    assert list(store.consumer_lags()) == [("t", "c", 4, 2)]
    for asked, kept in ((UNSET, hold), (ConsumerHold(3, 1), ConsumerHold(3, 1)), (None, None)):
        state, created = await store.put_consumer("t", "c", None, asked)
        assert (state.seq, state.hold, created) == (3, kept, False)
    assert store.consumers.consumer_count == 1


async def test_the_floor_follows_the_consumers_that_caps_wait_for() -> None:
    rig = Rig()
    store = rig.store
    await rig.append("t", *range(3), config=TopicConfig(cap_records=2))
    for name in ("c", "d"):
        await store.put_consumer("t", name, None, ConsumerHold(100, 1 << 40))
    await rig.append("t", *range(6))
    topic = rig.registry.existing("t")

    async def earliest() -> int:
        """The earliest seq after the background work has run once."""
        looking = asyncio.create_task(rig.sealer.run())
        await settled()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        return topic.log.earliest_seq

    assert await earliest() == 4
    await store.commit_consumer("t", "c", 8)
    assert await earliest() == 4
    await store.commit_consumer("t", "d", 6)
    assert await earliest() == 7
    # After the last hold ends, the caps apply again, without an append.
    await store.put_consumer("t", "d", None, None)
    await rig.append("t", 10, 11)
    assert await earliest() == 9
    await store.delete_consumer("t", "c")
    assert await earliest() == 10
