"""Defects that the simulation found, as small tests of their own."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.design7.bench import TOPIC, Bench
from tests.storage.fake_disk import Fault, SimulatedCrash
from topics_server.values.errors import StorageError
from topics_server.values.model import Durability, LossReason


def test_expired_records_behind_a_hole_are_not_read() -> None:
    """Guard: engine/read/page.py, `plan_page` ends the page where expired seqs follow a hole."""
    bench = Bench()
    try:
        bench.put(Durability.DISK, ttl_ms=60_000)
        bench.append(3)
        bench.crash("power")
        first = bench.append(2).first_seq
        bench.world.clock.step(61_000)
        seen = bench.look()
        assert list(seen.records) == []
        assert seen.gaps[-1].gap_to == first + 1
    finally:
        bench.world.abandon()


def test_a_record_too_large_for_its_cap_evicts_nothing_that_was_deleted() -> None:
    """Guard: engine/topic/retention.py, `_evict_point` stops before the newest record."""
    bench = Bench()
    try:
        bench.put(cap_bytes=1)
        bench.append()
        bench.delete(before_seq=2)
        bench.append()
        seen = bench.look()
        assert (list(seen.records), seen.gaps) == ([2], [])
        bench.append()
        assert [(g.gap_from, g.gap_to) for g in bench.look().gaps] == [(1, 2)]
    finally:
        bench.world.abandon()


def test_a_topic_dropped_while_it_is_sealed_leaves_no_files() -> None:
    """Guard: engine/background/sealer.py, a drop waits for the job and the job looks for the
    drop.
    """
    bench = Bench()
    try:
        bench.put()
        for _ in range(20):
            bench.append(8)
        topic = bench.node.registry.find(TOPIC)
        assert topic is not None

        async def both() -> None:
            sealing = asyncio.ensure_future(bench.node.sealer.tend(topic, force_seal=True))
            await bench.store.drop_topic(TOPIC, if_empty=False)
            await sealing
            await asyncio.sleep(2)

        bench.world.run(both())
        left = [path for path in bench.world.disk._files if "segments" in path]
        assert left == []
    finally:
        bench.world.abandon()


def test_a_start_with_another_shard_count_can_be_killed_anywhere() -> None:
    """Guard: node.py, `_publish` trims the old set's files only after it is no longer listed."""
    # The seed decides which of the two comes first.
    for seed, nth in itertools.product(range(1, 13), range(38, 49)):
        bench = Bench(seed, wal_shards=2)
        try:
            bench.put()
            bench.append(3)
            world = bench.world
            world.stop()
            world.changes["wal_shards"] = 1
            world.disk.crash_at(nth)
            try:
                world.start()
                world.run(asyncio.sleep(0.1))
            except SimulatedCrash:
                world.crash("kill")
                world.start()
            assert list(bench.look().records) == [1, 2, 3]
        finally:
            bench.world.abandon()


@pytest.mark.parametrize("fault", ["eio", "emfile"])
def test_an_append_that_cannot_see_what_its_cap_evicts_stores_nothing(fault: Fault) -> None:
    """The sizes of the oldest records are only in their segment's index."""
    bench = Bench()
    try:
        bench.put()
        bench.append(8)
        bench.tend(force_seal=True)
        topic = bench.node.registry.find(TOPIC)
        assert topic is not None
        bench.put(cap_bytes=topic.log.live_bytes)
        before = bench.look()
        for run in topic.log.sealed():
            run.index.unmap()  # type: ignore[attr-defined]
        bench.world.disk.fail("map", fault, path="*.idx", times=None)
        with pytest.raises(StorageError):
            bench.append()
        bench.world.disk.heal()
        assert bench.look() == before
        assert bench.append().first_seq == before.head + 1
        assert bench.look().gaps[0].reason is LossReason.CAP
    finally:
        bench.world.abandon()


def test_a_delete_that_is_applied_is_answered_whatever_index_fails_then() -> None:
    """Guard: engine/deletes.py, `_left` counts without expiry where it cannot read an index."""
    bench = Bench(segment_max_events=8)
    try:
        bench.put(ttl_ms=60_000)
        for _ in range(2):
            bench.append(8)
            bench.tend(force_seal=True)
        # The decision has read the index of the first segment; the answer needs that of the second.
        bench.world.disk.fail("map", "eio", path="*.idx", times=None)
        assert bench.delete(before_seq=9) == 8
        bench.world.disk.heal()
        assert bench.seqs() == list(range(9, 17))
    finally:
        bench.world.abandon()
