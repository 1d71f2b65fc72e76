"""`queue.service`: calls that wait for the journal and calls that do not, failures, shared
calls.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.engine.rig import ListJournal, throttled
from tests.unit.queue.rig import QueueRig, turns
from topics_server.engine.commit.pipeline import DISK_FULL, READ_ONLY
from topics_server.values.entries import (
    LeasesExtended,
    LeasesGranted,
    LeasesReleased,
    RecordsDeleted,
)
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.model import Durability

pytestmark = pytest.mark.anyio


def task(work: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(work)


def lsn_of(journal: ListJournal, kind: type) -> int:
    return max(item.lsn for item in journal.submitted if isinstance(item.entry, kind))


# -- soft leases -----------------------------------------------------------------------------


async def test_soft_leases_never_see_the_journal() -> None:
    rig = QueueRig(is_prompt=False)
    await rig.queue()
    await rig.put("a", "b")
    before = len(rig.journal.submitted)
    assert await rig.seqs(max_jobs=2) == [1, 2]
    assert (await rig.queues.nack("jobs", "w", [1], None, delay_ms=0)).nacked == 1
    assert (await rig.queues.extend("jobs", "w", [2], None, lease_ms=500)).seqs == [2]
    assert len(rig.journal.submitted) == before
    assert rig.moved == 3


async def test_an_ack_is_a_delete_of_the_topic_s_class() -> None:
    rig = QueueRig(is_prompt=False)
    await rig.queue(durability=Durability.FSYNC)
    await rig.put("a")
    await rig.seqs()
    acking = task(rig.queues.ack("jobs", "w", [1], None))
    await turns()
    deletes = [item for item in rig.journal.submitted if isinstance(item.entry, RecordsDeleted)]
    assert [(item.urgent, item.sync) for item in deletes] == [(True, True)]
    rig.journal.write(deletes[0].shard)
    await turns()
    assert not acking.done()
    rig.journal.sync(deletes[0].shard)
    done = await acking
    assert (done.acked, done.skipped, done.sync_ms) == (1, [], 2.0)


async def test_a_job_with_an_ack_in_flight_is_given_to_no_worker_past_its_deadline() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(lease_ms=1_000)
    await rig.put("a")
    await rig.seqs()
    acking = task(rig.queues.ack("jobs", "w", [1], None))
    await turns()
    rig.pass_time(5_000)
    assert await rig.seqs("other") == []
    rig.journal.sync_everything()
    assert (await acking).acked == 1
    assert await rig.counts(topic) == (0, 0, 0, 0)


async def test_a_second_ack_waits_with_the_first_and_counts() -> None:
    rig = QueueRig(is_prompt=False)
    await rig.queue()
    await rig.put("a", "b")
    await rig.seqs(max_jobs=2)
    first = task(rig.queues.ack("jobs", "w", [1], None))
    await turns()
    second = task(rig.queues.ack("jobs", "w", [2, 1, 7], None))
    await turns()
    assert not second.done()
    rig.journal.sync_everything()
    assert (await first).acked == 1
    told = await second
    assert (told.acked, told.skipped) == (2, [7])
    assert rig.queues.acks.in_flight == {}


@pytest.mark.parametrize("error", [DISK_FULL, READ_ONLY])
async def test_an_ack_that_fails_leaves_the_lease(error: str) -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(lease_ms=1_000)
    await rig.put("a")
    await rig.seqs()
    acks = [task(rig.queues.ack("jobs", "w", [1], None)) for _ in range(2)]
    await turns()
    lsn = lsn_of(rig.journal, RecordsDeleted)
    rig.journal.fail(rig.journal.shard_of(topic.topic_id), lsn, error)
    for ack in acks:
        with pytest.raises(TopicsError) as caught:
            await ack
        assert caught.value.code in (Code.THROTTLED, Code.STORAGE_READ_ONLY)
    assert await rig.counts(topic) == (0, 1, 0, 0)
    assert rig.queues.acks.in_flight == {}
    rig.pass_time(1_001)
    assert await rig.seqs("other") == [1]


async def test_an_ack_that_is_refused_changes_nothing() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    await rig.put("a")
    await rig.seqs()
    rig.journal.refusal = throttled()
    with pytest.raises(TopicsError):
        await rig.queues.ack("jobs", "w", [1], None)
    rig.journal.refusal = None
    assert await rig.counts(topic) == (0, 1, 0, 0)
    assert (await rig.queues.ack("jobs", "w", [1], None)).acked == 1


async def test_an_ack_of_what_is_being_deleted_is_skipped() -> None:
    rig = QueueRig(is_prompt=False)
    await rig.queue()
    await rig.put("a", "b")
    await rig.seqs(max_jobs=2)
    deleting = task(rig.delete("jobs", before_seq=2))
    await turns()
    acking = task(rig.queues.ack("jobs", "w", [1, 2], None))
    await turns()
    rig.journal.sync_everything()
    told = await acking
    assert (told.acked, told.skipped) == (1, [1])
    assert (await deleting).deleted == 1


async def test_an_ack_of_an_ephemeral_queue_waits_for_nothing() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(durability=Durability.EPHEMERAL)
    await rig.append("jobs", "a")
    assert await rig.seqs() == [1]
    told = await rig.queues.ack("jobs", "w", [1], None)
    assert (told.acked, told.sync_ms) == (1, 0.0)
    assert await rig.counts(topic) == (0, 0, 0, 0)


# -- durable leases --------------------------------------------------------------------------


async def test_a_durable_claim_waits_for_its_sync_and_no_other_worker_gets_the_job() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(leases_durable=True)
    await rig.put("a", "b")
    first = task(rig.seqs("one"))
    await turns()
    second = task(rig.seqs("two", 9))
    await turns()
    assert not first.done()
    assert await rig.counts(topic) == (0, 2, 0, 0)
    granted = [i for i in rig.journal.submitted if isinstance(i.entry, LeasesGranted)]
    assert [item.sync for item in granted] == [True, True]
    rig.journal.sync_everything()
    assert [await first, await second] == [[1], [2]]
    assert rig.moved == 0


@pytest.mark.parametrize("error", [DISK_FULL, READ_ONLY])
async def test_a_durable_claim_that_fails_gives_nothing(error: str) -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(leases_durable=True)
    await rig.put("a")
    claiming = task(rig.seqs())
    await turns()
    lsn = lsn_of(rig.journal, LeasesGranted)
    rig.journal.fail(rig.journal.shard_of(2**64 - 2), lsn, error)
    with pytest.raises(TopicsError):
        await claiming
    assert await rig.counts(topic) == (1, 0, 0, 0)


@pytest.mark.parametrize("kind", [LeasesReleased, LeasesExtended])
async def test_durable_changes_wait_too(kind: type) -> None:
    rig = QueueRig(is_prompt=False)
    await rig.queue(leases_durable=True)
    await rig.put("a")
    claiming = task(rig.seqs())
    await turns()
    rig.journal.sync_everything()
    await claiming
    verb: Any = (
        rig.queues.nack("jobs", "w", [1], None, delay_ms=0)
        if kind is LeasesReleased
        else rig.queues.extend("jobs", "w", [1], None, lease_ms=500)
    )
    changing = task(verb)
    await turns()
    assert not changing.done()
    assert lsn_of(rig.journal, kind)
    rig.journal.sync_everything()
    assert (await changing).skipped == []


async def test_a_refused_claim_fails_for_each_claimer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig()
    topic = await rig.queue(leases_durable=True)
    waiting = task(rig.seqs("waits", wait_ms=9_000))
    await turns()
    submit = rig.commits.submit

    def refuse(entry: Any, *args: Any, **more: Any) -> Any:
        if isinstance(entry, LeasesGranted):
            raise throttled()
        return submit(entry, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(rig.commits, "submit", refuse)
        await rig.put("a")
        with pytest.raises(TopicsError):
            await waiting
        with pytest.raises(TopicsError):
            await rig.seqs()
    assert await rig.counts(topic) == (1, 0, 0, 0)
    assert await rig.seqs() == [1]


# -- payloads --------------------------------------------------------------------------------


async def test_a_claim_that_cannot_read_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig()
    topic = await rig.queue()
    await rig.put("a")

    async def fail(*_: object) -> Any:
        raise StorageError("a file is gone")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "read_rows", fail)
        with pytest.raises(StorageError):
            await rig.seqs()
    assert await rig.counts(topic) == (1, 0, 0, 0)
    found = await rig.claim()
    assert found is not None
    assert found.jobs[0].deliveries == 2, "it was handed out, as far as anybody knows"


async def test_sealed_jobs_are_read_from_their_segments() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    await rig.put(*range(20))
    await rig.sealer.tend(topic)
    assert topic.log.sealed_seq > 0
    found = await rig.claim(max_jobs=20)
    assert found is not None
    assert [bytes(job.block.data(job.row)) for job in found.jobs] == [
        str(n).encode() for n in range(20)
    ]


# -- waiting ---------------------------------------------------------------------------------


async def test_a_disconnected_claimer_gets_none() -> None:
    rig = QueueRig()
    await rig.queue()
    left = asyncio.Event()

    async def gone() -> None:
        await left.wait()

    waiting = task(rig.claim(wait_ms=30_000, gone=gone))
    await turns()
    left.set()
    assert await waiting is None
    assert rig.notifier.listener_count == 0
    await rig.put("a")
    assert await rig.seqs() == [1]


async def test_a_durable_grant_to_a_disconnected_client_is_returned_once_it_is_safe() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(leases_durable=True)
    left = asyncio.Event()

    async def gone() -> None:
        await left.wait()

    waiting = task(rig.claim(wait_ms=30_000, gone=gone))
    await turns()
    left.set()
    appending = task(rig.append("jobs", "a"))
    await turns(1)
    rig.journal.sync_everything()
    assert await waiting is None
    await appending
    for _ in range(3):
        await turns()
        rig.journal.sync_everything()
    assert await rig.counts(topic) == (1, 0, 0, 0)


async def test_passes_are_one_a_turn_however_much_moved() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    waiting = task(rig.seqs(max_jobs=9, wait_ms=30_000))
    await turns()
    for _ in range(5):
        rig.queues.dispatcher.stir(topic.topic_id)
    await rig.put("a", "b", "c")
    assert await waiting == [1, 2, 3]


async def test_a_stop_answers_claims_and_takes_no_new_ones_in_line() -> None:
    rig = QueueRig()
    await rig.queue()
    waiting = task(rig.seqs(wait_ms=30_000))
    await turns()
    rig.queues.drain()
    assert await waiting == []
    assert await rig.seqs(wait_ms=30_000) == []
    await rig.queues.close()
    assert rig.notifier.listener_count == 0


async def test_a_late_claim_in_an_open_window_still_shares() -> None:
    rig = QueueRig()
    await rig.queue(claim_jitter_ms=500)
    await rig.put("a")
    claiming = task(rig.seqs(wait_ms=100))
    await turns()
    rig.pass_time(100)
    await turns()
    assert not claiming.done()
    rig.pass_time(400)
    assert await claiming == [1]


@pytest.mark.parametrize("early_ms", [0, 1, 2, 3, 4, 5])
async def test_a_clock_that_ticks_in_the_middle_of_a_pass_hides_no_expiry(
    early_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = QueueRig()
    await rig.queue(lease_ms=1_000)
    await rig.put("a")
    await rig.seqs("other")
    waiting = task(rig.seqs(wait_ms=30_000))
    await turns()
    rig.clock.move(1_001 - early_ms)
    looks = 0

    def ticking() -> int:
        nonlocal looks
        looks += 1
        # Each reading of the clock is a millisecond later, until the whole time has passed.
        return rig.clock.wall_ms + min(looks, 20)

    monkeypatch.setattr(rig.clock, "now_ms", ticking)
    rig.queues.dispatcher.stir(1)
    async with asyncio.timeout(5):
        assert await waiting == [1]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_waiting_claim_learns_of_a_durable_grant_to_another(fails: bool) -> None:
    rig = QueueRig(is_prompt=False)
    await rig.queue(leases_durable=True, lease_ms=1_000)
    await rig.put("a")
    first = task(rig.seqs("one"))
    await turns()
    second = task(rig.seqs("two", wait_ms=30_000))
    await turns()
    if fails:
        lsn = lsn_of(rig.journal, LeasesGranted)
        rig.journal.fail(rig.journal.shard_of(2**64 - 2), lsn, DISK_FULL)
        with pytest.raises(TopicsError):
            await first
    else:
        rig.journal.sync_everything()
        assert await first == [1]
        await turns()
        rig.pass_time(1_001)
    await turns()
    rig.journal.sync_everything()
    assert await asyncio.wait_for(second, 5) == [1]
