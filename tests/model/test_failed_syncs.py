"""A sync that failed, then a restart in the same boot: nothing is told twice, nothing stops."""

from __future__ import annotations

import pytest

from tests.design7.bench import TOPIC, Bench
from tests.model.judging import covers
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Durability, TopicConfig

_CONFIG = TopicConfig(durability=Durability.DISK)


def fail_syncs(bench: Bench, shard: int) -> None:
    bench.world.disk.fail("sync", "eio", path=f"data/wal/000001-{shard:02d}-*.wal", times=None)


@pytest.mark.parametrize("can_forget", [True, False])
def test_no_seq_is_given_twice_after_a_failed_sync(can_forget: bool) -> None:
    """Guards: `Directory.forget_boot`, and the end mark that says a sync was under way."""
    for seed in range(20):
        bench = Bench(seed)
        world = bench.world
        world.disk.evicts = True
        bench.put(Durability.DISK)
        bench.append(3)
        bench.wait(1)
        fail_syncs(bench, 0)
        if not can_forget:
            world.disk.fail("open", "eio", path="data/FORMAT.tmp", times=None)
        told = bench.append(4).last_seq
        bench.wait(1)
        with pytest.raises(TopicsError) as refused:
            bench.append()
        assert refused.value.code is Code.STORAGE_READ_ONLY
        bench.crash("kill")
        seen = bench.look()
        for seq in range(1, told + 1):
            assert seq in seen.records or covers(seen.gaps, seq, seq), f"seed {seed}, seq {seq}"
        assert bench.append().first_seq > told, f"seed {seed}"
        world.abandon()


def test_a_read_only_shard_stops_no_checkpoint_and_the_others_are_trimmed() -> None:
    """Guard: `Journal.sync_open_shards`."""
    for seed in range(8):
        bench = Bench(seed, wal_shards=2)
        world = bench.world
        world.run(bench.store.put_topic("other", _CONFIG, keep_type=False))
        bench.put(Durability.DISK)
        shard = bench.node.journal.shard_of(_id(bench, TOPIC))
        assert shard != bench.node.journal.shard_of(_id(bench, "other"))
        bench.append(3)
        bench.checkpoint()
        last = bench.append(2).last_seq
        fail_syncs(bench, shard)
        bench.wait(1)
        assert list(bench.store.read_only_shards()) == [shard]
        for _ in range(60):
            bench.append(5, name="other")
            bench.checkpoint()
        bench.wait(1)
        files = [name for name in world.disk.list_dir("data/wal") if name.endswith(".wal")]
        of_other = [name for name in files if not name.startswith(f"000001-{shard:02d}")]
        assert len(of_other) <= 4, of_other
        world.disk.heal()
        bench.crash("kill")
        assert set(bench.seqs()) == set(range(1, last + 1)), "the snapshot has what was applied"
        assert len(bench.look("other").records) == 300
        bench.append()
        bench.restart()
        assert len(bench.seqs()) == last + 1
        world.abandon()


def _id(bench: Bench, name: str) -> int:
    topic = bench.node.registry.find(name)
    assert topic is not None
    return topic.topic_id
