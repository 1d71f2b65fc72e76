"""`queue.push`: how many jobs a stream wants, how it gets them, and what it releases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.garbage import nothing_for_the_collector
from tests.unit.engine.rig import throttled
from tests.unit.queue.rig import QueueRig, turns
from topics_server.engine.commit.pipeline import READ_ONLY
from topics_server.engine.topic.topic import Topic
from topics_server.queue.answers import LeasedJob
from topics_server.queue.push import Push
from topics_server.values.entries import LeasesGranted
from topics_server.values.errors import Code, StorageError, TopicsError

pytestmark = pytest.mark.anyio


class Far:
    """The connection of a stream: accepts jobs while `room` is set."""

    def __init__(self, rig: QueueRig, topic: Topic, max_jobs: int = 1, node: str = "w") -> None:
        self.lots: list[list[int]] = []
        self.told: list[tuple[Code, bool]] = []
        self.room = asyncio.Event()
        self.room.set()
        self.push = Push(
            rig.queues,
            topic,
            node,
            max_jobs,
            None,
            deliver=self._deliver,
            tell=lambda error, is_last: self.told.append((error.code, is_last)),
        )
        self.push.start()

    async def _deliver(self, jobs: Sequence[LeasedJob]) -> None:
        self.lots.append([job.seq for job in jobs])
        await self.room.wait()

    @property
    def seqs(self) -> list[int]:
        return [seq for lot in self.lots for seq in lot]


async def test_it_keeps_max_in_flight() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    far = Far(rig, topic, 3)
    await rig.put(*range(5))
    await turns()
    assert far.seqs == [1, 2, 3]
    await rig.queues.ack("jobs", "w", [2], None)
    await turns()
    assert far.seqs == [1, 2, 3, 4]
    far.push.close()
    assert await rig.counts(topic) == (4, 0, 0, 0)


async def test_jobs_go_in_lots_each_after_the_socket_took_the_one_before() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    await rig.put(*range(40))
    far = Far(rig, topic, 40)
    far.room.clear()
    await turns()
    assert far.lots == [[*range(1, 17)]]
    far.room.set()
    await turns()
    assert [len(lot) for lot in far.lots] == [16, 16, 8]
    far.push.close()


async def test_closing_while_jobs_are_handed_over_releases_all_of_them() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    await rig.put(*range(40))
    far = Far(rig, topic, 40)
    far.room.clear()
    await turns()
    far.push.close()
    far.push.close()
    assert await rig.counts(topic) == (40, 0, 0, 0)
    far.room.set()
    await turns()
    assert len(far.lots) == 1
    assert rig.notifier.listener_count == 0


async def test_a_durable_grant_on_its_way_is_given_back_when_the_stream_ends() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(leases_durable=True)
    await rig.put("a")
    far = Far(rig, topic)
    await turns()
    assert far.lots == []
    far.push.close()
    for _ in range(3):
        rig.journal.sync_everything()
        await turns()
    assert far.lots == []
    assert await rig.counts(topic) == (1, 0, 0, 0)


async def test_it_claims_nothing_more_while_a_durable_grant_is_on_its_way() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(leases_durable=True)
    await rig.put("a", "b", "c")
    far = Far(rig, topic, 1)
    await turns()
    rig.queues.dispatcher.stir(topic.topic_id)
    await turns()
    granted = [i for i in rig.journal.submitted if isinstance(i.entry, LeasesGranted)]
    assert len(granted) == 1
    rig.journal.sync_everything()
    await turns()
    assert far.seqs == [1]
    far.push.close()


async def test_two_streams_hold_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig()
    topic = await rig.queue()
    await rig.put(*range(4))
    one, two = Far(rig, topic, 1), Far(rig, topic, 1)
    await turns()
    assert one.push.connection != two.push.connection
    assert (one.seqs, two.seqs) == ([1], [2])
    one.push.close()
    await turns()
    assert await rig.counts(topic) == (3, 1, 0, 0)
    two.push.close()


async def test_throttling_is_reported_and_a_pause_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig()
    topic = await rig.queue(leases_durable=True)
    far = Far(rig, topic)
    submit = rig.commits.submit

    def refuse(entry: Any, *args: Any, **more: Any) -> Any:
        if isinstance(entry, LeasesGranted):
            raise throttled()
        return submit(entry, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(rig.commits, "submit", refuse)
        await rig.put("a")
        await turns()
        assert far.told == [(Code.THROTTLED, False)]
        rig.queues.dispatcher.stir(topic.topic_id)
        await turns()
        assert len(far.told) == 1, "it asks once a second"
    rig.pass_time(1_000)
    await turns()
    assert far.seqs == [1]
    far.push.close()


async def test_a_failed_sync_ends_it() -> None:
    rig = QueueRig(is_prompt=False)
    topic = await rig.queue(leases_durable=True)
    await rig.put("a")
    far = Far(rig, topic)
    await turns()
    lsn = max(i.lsn for i in rig.journal.submitted if isinstance(i.entry, LeasesGranted))
    rig.journal.fail(rig.journal.shard_of(2**64 - 2), lsn, READ_ONLY)
    await turns()
    assert far.told == [(Code.STORAGE_READ_ONLY, True)]
    assert rig.notifier.listener_count == 0
    assert await rig.counts(topic) == (1, 0, 0, 0)


async def test_jobs_that_cannot_be_read_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig()
    topic = await rig.queue()

    async def fail(*_: object) -> Any:
        raise StorageError("a file is gone")

    monkeypatch.setattr(rig.store, "read_rows", fail)
    await rig.put("a")
    far = Far(rig, topic)
    await turns()
    assert far.told == [(Code.INTERNAL, True)]
    assert await rig.counts(topic) == (1, 0, 0, 0)


async def test_a_dropped_queue_ends_it() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    far = Far(rig, topic)
    await rig.store.drop_topic("jobs", if_empty=False)
    await turns()
    assert far.told == [(Code.TOPIC_NOT_FOUND, True)]


async def test_a_stop_releases_and_takes_nothing_more() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    await rig.put("a", "b")
    far = Far(rig, topic)
    await turns()
    rig.queues.drain()
    assert await rig.counts(topic) == (2, 0, 0, 0)
    await turns()
    assert far.seqs == [1]


async def test_refusals_of_others_are_not_its_own() -> None:
    """If the journal refuses a release, the leases expire."""
    rig = QueueRig()
    topic = await rig.queue(leases_durable=True, lease_ms=1_000)
    await rig.put("a")
    far = Far(rig, topic)
    await turns()
    rig.journal.refusal = TopicsError(Code.THROTTLED, "full")
    far.push.close()
    rig.journal.refusal = None
    assert await rig.counts(topic) == (0, 1, 0, 0)
    rig.pass_time(1_001)
    assert await rig.seqs() == [1]


async def test_a_push_stream_that_is_over_leaves_nothing_for_the_collector() -> None:
    rig = QueueRig()
    topic = await rig.queue()
    await rig.put("a")
    with nothing_for_the_collector():
        far = Far(rig, topic)
        await turns()
        assert far.seqs == [1]
        far.push.close()
        del far
        await turns()
