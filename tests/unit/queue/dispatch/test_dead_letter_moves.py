"""`queue.dispatch.dead_letter_moves`: the state after a move that failed or whose result is
unknown.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.queue.rig import QueueRig, turns
from topics_server.engine.commit.pipeline import DISK_FULL, READ_ONLY
from topics_server.engine.topic.topic import Topic
from topics_server.queue.dead_letter import stamps_of
from topics_server.queue.leases.jobs import DeadJob
from topics_server.values.entries import RecordsAppended
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.limits import MIB

pytestmark = pytest.mark.anyio

MORTAL: dict[str, Any] = {"max_deliveries": 1, "dead_letter": "dead"}


async def dying(rig: QueueRig, count: int = 2, **config: Any) -> Topic:
    """A queue whose jobs were delivered once and released."""
    topic = await rig.queue(**{**MORTAL, **config})
    await rig.put(*range(count))
    seqs = await rig.seqs(max_jobs=count)
    await rig.queues.nack("jobs", "w", seqs, None, delay_ms=0)
    return topic


async def moved(rig: QueueRig) -> None:
    """Return when no move is in flight."""
    for _ in range(20):
        await turns()
        rig.journal.sync_everything()
    assert not rig.queues.mover._tasks


def append_of(rig: QueueRig) -> Any:
    found = [
        item
        for item in rig.journal.submitted
        if isinstance(item.entry, RecordsAppended) and item.entry.source is not None
    ]
    return found[-1]


async def test_a_dying_job_is_given_to_no_worker_until_its_letter_is_written() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await dying(rig)
    assert await rig.seqs(max_jobs=9) == []
    await turns()
    assert await rig.counts(topic) == (0, 0, 0, 0)
    assert await rig.seqs(max_jobs=9) == []
    await moved(rig)
    assert await rig.counts(topic) == (0, 0, 0, 2)
    letters = rig.store.topic("dead")
    assert letters.live(rig.clock.now_ms())[0] == 2
    rows = await rig.store.read_rows(letters, [1, 2])
    stamps = [stamps_of(block.meta(row)) for block, row in rows]
    assert [(s.from_topic, s.src_seq) for s in stamps if s] == [("jobs", 1), ("jobs", 2)]


async def test_a_move_that_surely_failed_leaves_the_job_for_a_second_later() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await dying(rig)
    assert await rig.seqs() == []
    await turns()
    item = append_of(rig)
    rig.journal.fail(item.shard, item.lsn, DISK_FULL)
    await turns()
    assert await rig.counts(topic) == (0, 0, 2, 0)
    rig.pass_time(999)
    assert await rig.seqs() == []
    assert await rig.counts(topic) == (0, 0, 2, 0)
    rig.pass_time(1)
    assert await rig.seqs() == []
    await moved(rig)
    assert await rig.counts(topic) == (0, 0, 0, 2)


async def test_a_move_of_unknown_outcome_gives_the_job_to_no_worker() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await dying(rig)
    assert await rig.seqs() == []
    await turns()
    item = append_of(rig)
    rig.journal.fail(item.shard, item.lsn, READ_ONLY)
    await turns()
    rig.pass_time(100_000)
    assert await rig.seqs() == []
    assert await rig.counts(topic) == (0, 0, 0, 0)
    assert not rig.queues.mover._tasks


async def test_a_job_that_cannot_be_read_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig()
    topic = await dying(rig)

    async def fail(*_: object) -> Any:
        raise StorageError("a file is gone")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "read_rows", fail)
        assert await rig.seqs() == []
        await turns()
    assert await rig.counts(topic) == (0, 0, 2, 0)


async def test_a_job_deleted_on_its_way_has_no_letter() -> None:
    rig = QueueRig()
    topic = await dying(rig, 1)
    book = rig.book(topic)
    await rig.delete("jobs", before_seq=2)
    rig.queues.mover.bury(topic, book, [DeadJob(1, 1)])
    await moved(rig)
    assert rig.registry.find("dead") is None
    assert await rig.counts(topic) == (0, 0, 0, 0)


async def test_large_jobs_move_in_several_appends() -> None:
    rig = QueueRig()
    topic = await rig.queue(**MORTAL)
    for _ in range(6):
        await rig.put("x" * (MIB - 100))
    await rig.queues.nack("jobs", "w", await rig.seqs(max_jobs=6), None, delay_ms=0)
    assert await rig.seqs(max_jobs=6) == []
    await moved(rig)
    counts = [
        len(item.entry.source.seqs)
        for item in rig.journal.submitted
        if isinstance(item.entry, RecordsAppended) and item.entry.source is not None
    ]
    assert counts == [4, 2], "at most 4 MiB each"
    assert await rig.counts(topic) == (0, 0, 0, 6)


# -- redrive ---------------------------------------------------------------------------------


async def redrive(rig: QueueRig, **changed: Any) -> Any:
    asked = {"seqs": None, "match": None, "after_seq": 0, "max_jobs": 1000, **changed}
    return await rig.queues.redrive("jobs", None, **asked)


async def test_a_redrive_that_surely_failed_leaves_the_letters() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await dying(rig)
    assert await rig.seqs() == []
    await moved(rig)
    driving = asyncio.ensure_future(redrive(rig))
    await turns()
    item = append_of(rig)
    assert item.entry.source.is_redrive
    rig.journal.fail(item.shard, item.lsn, DISK_FULL)
    with pytest.raises(TopicsError) as caught:
        await driving
    assert caught.value.code is Code.THROTTLED
    assert rig.queues.mover._leaving == {}
    driving = asyncio.ensure_future(redrive(rig))
    await moved(rig)
    assert (await driving).redriven == 2
    assert await rig.counts(topic) == (2, 0, 0, 2)
    assert rig.queues.mover._leaving == {}


async def test_a_redrive_of_unknown_outcome_is_not_tried_again() -> None:
    rig = QueueRig(is_prompt=False)
    await dying(rig)
    assert await rig.seqs() == []
    await moved(rig)
    driving = asyncio.ensure_future(redrive(rig))
    await turns()
    item = append_of(rig)
    rig.journal.fail(item.shard, item.lsn, READ_ONLY)
    with pytest.raises(TopicsError):
        await driving
    told = await redrive(rig, seqs=[1, 2])
    assert (told.redriven, told.skipped) == (0, [1, 2])


async def test_letters_under_way_are_skipped() -> None:
    rig = QueueRig(is_prompt=False)
    await dying(rig)
    assert await rig.seqs() == []
    await moved(rig)
    first = asyncio.ensure_future(redrive(rig, seqs=[1]))
    await turns()
    second = asyncio.ensure_future(redrive(rig, seqs=[1, 2]))
    await moved(rig)
    assert (await first).redriven == 1
    told = await second
    assert (told.redriven, told.skipped) == (1, [1])


async def test_a_search_goes_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig()
    await dying(rig, 5)
    assert await rig.seqs(max_jobs=5) == []
    await moved(rig)
    monkeypatch.setattr("topics_server.queue.dispatch.dead_letter_moves._PAGES_MAX", 1)
    monkeypatch.setattr("topics_server.queue.dispatch.dead_letter_moves._PAGE_RECORDS", 2)
    found, after_seq, calls = 0, 0, 0
    more = True
    while more:
        told = await redrive(rig, after_seq=after_seq)
        found += told.redriven
        after_seq, more = told.next_after_seq, told.more
        calls += 1
    assert (found, calls) == (5, 3)


async def test_seq_0_is_skipped_once_and_never_stepped_over() -> None:
    rig = QueueRig()
    await dying(rig, 3)
    assert await rig.seqs(max_jobs=3) == []
    await moved(rig)
    told = await redrive(rig, seqs=[0])
    assert (told.redriven, told.skipped, told.more) == (0, [0], False)
    found, skipped, after_seq = 0, [], 0
    more = True
    while more:
        told = await redrive(rig, seqs=[0, 1, 2, 3, 9], after_seq=after_seq, max_jobs=2)
        found += told.redriven
        skipped += told.skipped
        assert told.next_after_seq > after_seq
        after_seq, more = told.next_after_seq, told.more
    assert (found, skipped) == (3, [0, 9])
