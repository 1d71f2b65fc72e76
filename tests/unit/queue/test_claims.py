"""`queue.claims` and `queue.acks`: which calls are answered at once, and which continue as a
task.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.queue.rig import QueueRig, turns
from topics_server.queue.answers import FirstLeases
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import U64_MAX

pytestmark = pytest.mark.anyio


def claim_at_once(rig: QueueRig, most: int = 1, **more: Any) -> FirstLeases | None:
    return rig.queues.claim_at_once("jobs", "w", most, None, waits=more.get("waits", False))


async def test_first_leases_are_those_that_the_general_path_gives() -> None:
    rig = QueueRig()
    topic = await rig.queue(lease_ms=1_000)
    await rig.put("a", "b", "c")
    leased = claim_at_once(rig, 2)
    assert leased is not None
    assert (leased.seqs, leased.ready) == ([1, 2], 1)
    assert leased.deadline_ms == rig.clock.now_ms() + 1_000
    assert isinstance(leased.rows, list)
    assert [bytes(row[3]) for row in leased.rows] == [b'"a"', b'"b"']
    assert await rig.counts(topic) == (1, 2, 0, 0)
    assert rig.moved == 1
    held = await rig.queues.leases("jobs", after_seq=0, page_size=9)
    assert [lease.lease_id for lease in held.leases] == [leased.first_id, leased.first_id + 1]
    assert await rig.seqs("other", 9) == [3]
    rig.pass_time(1_001)
    assert await rig.seqs("other", 9) == [1, 2, 3]
    assert topic.last_read_ts == rig.clock.now_ms()


async def test_a_claim_that_finds_nothing_is_answered_unless_it_waits() -> None:
    rig = QueueRig()
    await rig.queue()
    empty = claim_at_once(rig)
    assert empty is not None
    assert (empty.seqs, empty.ready) == ([], 0)
    assert claim_at_once(rig, waits=True) is None
    assert rig.moved == 0


@pytest.mark.parametrize(
    "config", [{"leases_durable": True}, {"claim_jitter_ms": 5}, {"lease_log": "log"}]
)
async def test_these_queues_take_the_general_path(config: dict[str, Any]) -> None:
    rig = QueueRig()
    topic = await rig.queue(**config)
    await rig.put("a")
    before = await rig.counts(topic)
    assert claim_at_once(rig) is None
    assert await rig.counts(topic) == before


async def test_a_claim_does_not_pass_one_that_waits_nor_a_job_that_came_back() -> None:
    rig = QueueRig()
    await rig.queue()
    waiting = asyncio.ensure_future(rig.claim(wait_ms=1_000))
    await turns()
    assert claim_at_once(rig) is None
    await rig.put("a")
    assert (await waiting) is not None
    await rig.put("b")
    await rig.queues.nack("jobs", "w", [1], None, delay_ms=0)
    assert claim_at_once(rig) is None
    assert await rig.seqs() == [1]
    leased = claim_at_once(rig)
    assert leased is not None
    assert leased.seqs == [2]


async def test_a_queue_that_is_no_queue_or_absent_is_refused_at_once() -> None:
    rig = QueueRig()
    await rig.append("jobs", "a")
    with pytest.raises(TopicsError) as refused:
        claim_at_once(rig)
    assert refused.value.code is Code.NOT_A_QUEUE
    with pytest.raises(TopicsError) as refused:
        rig.queues.begin_ack("absent", "w", [1], None)
    assert refused.value.code is Code.TOPIC_NOT_FOUND


async def test_an_ack_that_would_join_another_takes_the_general_path() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue()
    await rig.put("a", "b")
    await rig.seqs(max_jobs=2)
    first = rig.queues.begin_ack("jobs", "w", [2, 1, 2, 9], None)
    assert first is not None
    assert rig.queues.begin_ack("jobs", "w", [1], None) is None
    told: list[int] = []
    first.when_resolved(lambda: told.append(1))
    assert told == []
    rig.journal.sync_everything()
    assert told == [1]
    done = first.outcome()
    assert (done.acked, done.skipped, done.counts.in_flight) == (2, [9], 0)
    assert await rig.counts(topic) == (0, 0, 0, 0)
    # There is nothing to wait for, so the answer comes at once.
    late = rig.queues.begin_ack("jobs", "w", [1], None)
    assert late is not None
    late.when_resolved(lambda: told.append(2))
    assert told == [1, 2]
    assert late.outcome().skipped == [1]


async def test_lease_ids_start_again_behind_the_last_number() -> None:
    rig = QueueRig()
    rig.lease_table._last_id = U64_MAX - 1
    await rig.queue()
    await rig.put("a", "b", "c")
    leased = claim_at_once(rig, 2)
    assert leased is not None
    assert leased.first_id == 1
