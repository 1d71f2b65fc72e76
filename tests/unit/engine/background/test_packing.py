"""A segment is packed while the one before it is written, and only that segment is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import RULES, NowOffload, Rig
from topics_server.engine.background import seal_plan
from topics_server.engine.background.packing import Packing, size_of
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.delete import decide_delete
from topics_server.values.errors import DiskFull
from topics_server.values.storage_types import SegmentPlan

pytestmark = pytest.mark.anyio


def packing_of(rig: Rig, check: Callable[[int], None] = lambda size: None) -> Packing:
    return Packing(NowOffload(), rig.segments, check)


def delete_now(rig: Rig, topic: Topic, before_seq: int) -> None:
    entry = decide_delete(topic, before_seq, None, {}, rig.clock.now_ms())
    assert entry is not None
    rig.commits.submit(entry, gate_of(entry, topic), topic)
    rig.journal.sync_everything()


async def grown(rig: Rig, count: int) -> Topic:
    """A topic with this many records, one block each."""
    for number in range(count):
        await rig.append("t", number)
    topic = rig.registry.find("t")
    assert topic is not None
    return topic


def plans_of(rig: Rig, topic: Topic) -> tuple[SegmentPlan, SegmentPlan | None]:
    """The segment that is due, and the next one."""
    synced_lsn = rig.commits.synced_lsn(topic.topic_id)
    rules = RULES.max_records, RULES.max_bytes
    plan = seal_plan.plan_seal(topic, synced_lsn, 0, *rules, RULES.max_age_ms)
    assert plan is not None
    return plan, seal_plan.plan_next(topic, plan, synced_lsn, *rules)


async def two_due() -> tuple[Rig, SegmentPlan, SegmentPlan]:
    """A topic with two whole segments: the one that is due, and the next one."""
    rig = Rig()
    plan, coming = plans_of(rig, await grown(rig, 2 * RULES.max_records))
    assert coming is not None
    return rig, plan, coming


async def test_each_segment_is_packed_once() -> None:
    rig = Rig()
    topic = await grown(rig, 3 * RULES.max_records)
    await rig.sealer.tend(topic)
    assert rig.segments.packed == [1, 2, 3]
    assert rig.segments.events == ["put 1", "put 2", "put 3"]
    assert seqs_of(await rig.read("t")) == list(range(1, 3 * RULES.max_records + 1))


async def test_the_next_segment_is_packed_before_it_is_due() -> None:
    rig, _, coming = await two_due()
    packing = packing_of(rig)
    packing.begin(coming)
    await asyncio.sleep(0)
    assert rig.segments.packed == [2]
    plan, _ = await packing.take(coming)
    assert plan is coming
    assert rig.segments.packed == [2]


async def test_the_sealer_packs_ahead() -> None:
    rig = Rig()
    topic = await grown(rig, 2 * RULES.max_records)
    packed: list[int] = []

    def note() -> None:
        packed.extend(rig.segments.packed)

    rig.segments.meanwhile = note
    rig.sealer._sync_what_killed = a_turn  # type: ignore[method-assign]
    await rig.sealer.tend(topic)
    assert packed == [1, 2], "when the first was written"


async def a_turn(topic: Topic) -> None:
    await asyncio.sleep(0)


async def test_a_short_run_is_not_packed_ahead() -> None:
    rig = Rig()
    topic = await grown(rig, 2 * RULES.max_records - 1)
    _, coming = plans_of(rig, topic)
    assert coming is None


async def test_a_run_with_dead_records_is_not_packed_ahead() -> None:
    rig = Rig()
    topic = await grown(rig, 2 * RULES.max_records)
    await rig.store.delete_seqs("t", [RULES.max_records + 3])
    _, coming = plans_of(rig, topic)
    assert coming is None


async def test_nothing_is_packed_ahead_once_the_tail_has_changed() -> None:
    rig = Rig()
    topic = await grown(rig, 2 * RULES.max_records)
    plan, coming = plans_of(rig, topic)
    assert coming is not None
    delete_now(rig, topic, RULES.max_records + 1)
    synced_lsn = rig.commits.synced_lsn(topic.topic_id)
    found = seal_plan.plan_next(topic, plan, synced_lsn, RULES.max_records, RULES.max_bytes)
    assert found is None


async def test_records_that_die_meanwhile_are_flipped() -> None:
    rig, plan, coming = await two_due()
    packing = packing_of(rig)
    packing.begin(coming)
    dead = msgspec.structs.replace(coming, dead=b"\x01" + coming.dead[1:])
    taken, _ = await packing.take(dead)
    assert taken is coming, "its file has the record, whose flag is set afterwards"
    assert rig.segments.packed == [coming.segment_id] == [plan.segment_id + 1]


@pytest.mark.parametrize("change", ["none", "drop", "delete"])
async def test_only_the_segment_that_is_due_next_stays_packed(change: str) -> None:
    rig, plan, _ = await two_due()
    packing, topic = rig.sealer._packing, rig.registry.find("t")
    assert topic is not None
    packing.begin(plan)
    if change == "drop":
        await rig.store.drop_topic("t", if_empty=False)
    elif change == "delete":
        delete_now(rig, topic, 2 * RULES.max_records + 1)
    packing.drop_stale(rig.registry)
    assert (packing._ahead is None) == (change != "none")


async def test_the_sealer_drops_a_segment_that_was_packed_for_nothing() -> None:
    rig, plan, _ = await two_due()
    rig.sealer._packing.begin(plan)
    await rig.store.drop_topic("t", if_empty=False)
    task = asyncio.create_task(rig.sealer.run())
    for _ in range(100):
        await asyncio.sleep(0)
    assert rig.sealer._packing._ahead is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_another_segment_than_the_one_packed_ahead_is_packed() -> None:
    rig, plan, coming = await two_due()
    packing = packing_of(rig)
    packing.begin(coming)
    await asyncio.sleep(0)
    assert (await packing.take(plan))[0] is plan
    # The same records under another id.
    packing.begin(coming)
    await asyncio.sleep(0)
    moved = msgspec.structs.replace(coming, segment_id=9)
    assert (await packing.take(moved))[0] is moved
    # Other blocks with the same records.
    packing.begin(coming)
    copied = msgspec.structs.replace(
        coming, blocks=[msgspec.structs.replace(block) for block in coming.blocks]
    )
    assert (await packing.take(copied))[0] is copied


async def test_an_error_of_packing_ahead_is_raised_when_the_segment_is_due() -> None:
    rig, plan, coming = await two_due()
    sizes: list[int] = []

    def check(size: int) -> None:
        sizes.append(size)
        raise DiskFull("no room", "segments")

    packing = packing_of(rig, check)
    packing.begin(coming)
    await asyncio.sleep(0)
    with pytest.raises(DiskFull):
        await packing.take(coming)
    assert sizes == [size_of(coming)]
    with pytest.raises(DiskFull):
        await packing.take(plan)
    packing.begin(coming)
    packing.drop()
    await asyncio.sleep(0)
