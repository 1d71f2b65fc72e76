"""Leases, delays and counts of a whole node over restarts: clean ones, kills and power cuts."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.model.world import World
from topics_server.engine.answers import QueueCounts
from topics_server.engine.store import Store
from topics_server.queue.answers import LeasedJob
from topics_server.queue.service import QueueService
from topics_server.values.appends import decode_append
from topics_server.values.entries import LeasesGranted
from topics_server.values.model import Durability, TopicConfig, TopicType
from topics_server.wal.format.segment import decode_index
from topics_server.wal.layout import segment_data, segment_idx
from topics_server.wal.tools.dump import dump, verify

LEASE_MS = 60_000
WAYS = ("clean", "kill", "power")


class Queue:
    """A node with one queue, `jobs`. `durable`: of the leases; the jobs are of class fsync."""

    def __init__(self, *, durable: bool, count: int = 3, delay_ms: int = 0, **changes: int) -> None:
        self.world = World(11, wal_shards=2, **changes)
        self.world.start()
        config = TopicConfig(
            type=TopicType.QUEUE, durability=Durability.FSYNC, leases_durable=durable
        )
        self.world.run(self.store.put_topic("jobs", config, keep_type=False))
        self.append(count, delay_ms)

    @property
    def store(self) -> Store:
        assert self.world.node is not None
        return self.world.node.store

    @property
    def service(self) -> QueueService:
        assert self.world.node is not None
        return self.world.node.queues

    def append(self, count: int, delay_ms: int = 0) -> None:
        more = {"delay_ms": delay_ms} if delay_ms else {}
        records = [{"data": number, **more} for number in range(count)]
        body = json.dumps({"records": records}).encode()
        decoded = decode_append(body)
        self.world.run(self.store.append("jobs", body, decoded, header_key=None, config=None))

    def claim(self, max_jobs: int) -> list[LeasedJob]:
        async def stays() -> None:
            await asyncio.get_running_loop().create_future()

        claimed = self.world.run(
            self.service.claim("jobs", "w", max_jobs, LEASE_MS, wait_ms=0, gone=stays)
        )
        assert claimed is not None
        return claimed.jobs

    def counts(self) -> QueueCounts:
        state = self.store.state("jobs", touch=False)
        assert state.queue is not None
        return state.queue

    def wait(self, ms: int) -> None:
        self.world.run(asyncio.sleep(ms / 1000))

    def checkpoint(self) -> None:
        assert self.world.node is not None
        self.world.run(self.world.node.checkpointer.take())

    def restart(self, how: str) -> None:
        if how == "clean":
            self.world.stop()
        else:
            self.world.crash("kill" if how == "kill" else "power")
        self.world.start()


@pytest.mark.parametrize("how", WAYS)
def test_a_durable_lease_that_was_answered_survives_everything(how: str) -> None:
    queue = Queue(durable=True)
    first, second = queue.claim(2)
    queue.world.run(queue.service.extend("jobs", "w", [second.seq], None, lease_ms=2 * LEASE_MS))
    for _ in range(2):
        queue.restart(how)
        assert queue.counts() == QueueCounts(1, 2, 0, 0)
        page = queue.world.run(queue.service.leases("jobs", after_seq=0, page_size=10))
        kept = {lease.seq: lease for lease in page.leases}
        assert kept[first.seq].lease_id == first.lease_id
        assert kept[first.seq].deadline_ms == first.deadline_ms
        assert kept[second.seq].deadline_ms > second.deadline_ms
        # The server restarts twice: it recovers first from the journal, then from a snapshot.
        queue.checkpoint()
    acked = queue.world.run(queue.service.ack("jobs", "w", [first.seq], [first.lease_id]))
    assert (acked.acked, acked.skipped) == (1, [])
    queue.restart(how)
    assert queue.counts() == QueueCounts(1, 1, 0, 0), "an acked job never comes back"
    queue.world.abandon()


@pytest.mark.parametrize("how", WAYS)
def test_soft_leases_outlive_a_clean_stop_only_and_counts_are_of_the_last_checkpoint(
    how: str,
) -> None:
    queue = Queue(durable=False)
    queue.claim(1)
    queue.checkpoint()
    queue.claim(1)
    queue.restart(how)
    is_clean = how == "clean"
    assert queue.counts() == (QueueCounts(1, 2, 0, 0) if is_clean else QueueCounts(3, 0, 0, 0))
    queue.wait(2 * LEASE_MS)
    again = {job.seq: job.deliveries for job in queue.claim(3)}
    assert again == ({1: 2, 2: 2, 3: 1} if is_clean else {1: 2, 2: 1, 3: 1})
    queue.world.abandon()


def test_soft_leases_leave_nothing_in_the_journal_and_make_a_checkpoint_due() -> None:
    queue = Queue(durable=False, checkpoint_interval_ms=1_000)
    node = queue.world.node
    assert node is not None
    queue.world.run(asyncio.sleep(10))
    before = node.checkpointer.taken_count
    queue.world.run(asyncio.sleep(10))
    assert node.checkpointer.taken_count == before, "an idle server takes none"
    queue.claim(2)
    queue.world.run(asyncio.sleep(3))
    assert node.checkpointer.taken_count > before
    queue.world.crash("kill")
    entries = [
        item for item in dump(queue.world.disk, "data", with_journal=True) if "entry" in item
    ]
    assert not [item for item in entries if item["entry"] == LeasesGranted.__name__]
    queue.world.start()
    queue.wait(2 * LEASE_MS)
    assert [job.deliveries for job in queue.claim(3)] == [2, 2, 1]
    queue.world.abandon()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_delay_survives_everything(how: str, is_sealed: bool) -> None:
    queue = Queue(durable=False, count=20, delay_ms=600_000, segment_max_events=4)
    queue.append(1)
    if is_sealed:
        # The server restarts twice: the second time the journal with the delays is gone.
        for _ in range(2):
            queue.world.run(asyncio.sleep(2))
            queue.append(1)
            queue.checkpoint()
    ready = 3 if is_sealed else 1
    for _ in range(2):
        queue.restart(how)
        assert queue.counts() == QueueCounts(ready, 0, 20, 0)
        queue.checkpoint()
    assert len(queue.claim(30)) == ready
    queue.wait(600_001)
    assert queue.counts().ready + queue.counts().delayed == 20 + ready
    assert len(queue.claim(30)) == 20 + ready, "the leases have expired, too"
    queue.world.abandon()


def test_a_directory_with_leases_verifies_clean_and_serves_other_shard_counts() -> None:
    queue = Queue(durable=True, count=6)
    for shards in (3, 1, 2):
        queue.claim(1)
        queue.world.crash("kill")
        queue.world.changes["wal_shards"] = shards
        queue.world.start()
    assert queue.counts() == QueueCounts(3, 3, 0, 0)
    queue.world.stop()
    report = verify(queue.world.disk, "data")
    assert report.problems == []
    assert report.counts["leases"] == 3
    queue.world.start()
    queue.world.abandon()


@pytest.mark.parametrize("durable", [False, True])
def test_a_queue_of_a_name_that_comes_again_has_none_of_the_old_leases(durable: bool) -> None:
    queue = Queue(durable=durable)
    queue.claim(2)
    queue.checkpoint()
    queue.world.run(queue.store.drop_topic("jobs", if_empty=False))
    config = TopicConfig(type=TopicType.QUEUE, leases_durable=durable)
    queue.world.run(queue.store.put_topic("jobs", config, keep_type=False))
    queue.append(2)
    for how in ("kill", "clean"):
        assert queue.counts() == QueueCounts(2, 0, 0, 0)
        queue.restart(how)
    assert [job.deliveries for job in queue.claim(5)] == [1, 1]
    queue.world.abandon()


def test_jobs_whose_damaged_file_was_put_back_are_claimed_behind_the_cursor() -> None:
    queue = Queue(durable=False, count=8)
    world = queue.world
    assert world.node is not None
    world.run(world.node.sealer.seal_topics(["jobs"]))
    queue.append(1)
    world.stop()
    path = f"data/segments/1/{segment_data(1)}"
    whole = world.disk.content(path)
    # The records of seqs 6 to 8.
    columns = decode_index(world.disk.content(f"data/segments/1/{segment_idx(1)}"))
    start, end = columns.span(5, 8)
    world.disk.put(path, whole[:start] + bytes(end - start) + whole[end:])
    world.start()
    queue.claim(9)
    # The leases of the damaged jobs end too, and the other jobs are done.
    queue.wait(2 * LEASE_MS)
    readable = [job.seq for job in queue.claim(9)]
    assert readable == [1, 2, 3, 4, 5, 9]
    acked = queue.world.run(queue.service.ack("jobs", "w", readable, None))
    assert acked.acked == 6
    assert queue.claim(9) == []
    world.stop()
    world.disk.put(path, whole)
    world.start()
    assert queue.counts() == QueueCounts(3, 0, 0, 0)
    assert [job.seq for job in queue.claim(9)] == [6, 7, 8]
    world.abandon()
