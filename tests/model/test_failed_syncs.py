"""After a failed sync and a restart in the same boot no seq is assigned twice, and the server keeps
working.
"""

from __future__ import annotations

import pytest

from tests.design7.bench import TOPIC, Bench
from tests.model.judging import covers
from topics_server.values import limits
from topics_server.values.errors import Code, Corrupt, TopicsError
from topics_server.values.model import Durability, TopicConfig
from topics_server.wal.directory import read_format
from topics_server.wal.tools.repair import mend, survey

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


def _refused_notes(seed: int) -> Bench:
    """A sync failed, and neither the end mark nor `FORMAT` can be written."""
    bench = Bench(seed, wal_shards=1)
    disk = bench.world.disk
    disk.evicts = True
    bench.put(Durability.DISK)
    bench.append(3)
    bench.wait(1)
    bench.append(4)
    disk.fail("write", "eio", path="data/wal/*.end", times=None)
    disk.fail("open", "eio", path="data/FORMAT.tmp", times=None)
    fail_syncs(bench, 0)
    bench.wait(1)
    return bench


def test_a_failed_sync_is_noted_as_soon_as_the_disk_takes_it() -> None:
    """Guard: `WalWriter._tell_failure`. Without it some seeds refuse a start after a kill."""
    for seed in range(20):
        bench = _refused_notes(seed)
        bench.world.disk.heal()
        bench.wait(1)
        bench.crash("kill")
        seen = bench.look()
        assert {1, 2, 3} <= seen.records.keys()
        for seq in range(4, 8):
            assert seq in seen.records or covers(seen.gaps, seq, seq), f"seed {seed}, seq {seq}"
        assert bench.append().first_seq > 7, f"seed {seed}"
        bench.world.abandon()


def test_a_failed_sync_that_nothing_notes_is_refused_by_name_and_repaired() -> None:
    """Bytes that the failed sync lost look like a shortened file."""
    refused = 0
    for seed in range(20):
        bench = _refused_notes(seed)
        world = bench.world
        world.crash("kill")
        refusal: Corrupt | None = None
        try:
            world.start()
        except Corrupt as error:
            refusal = error
        if refusal is not None:
            refused += 1
            assert refusal.path == "data/wal/000001-00-0000000001.wal"
            world.crash("kill")
            disk = world.disk
            disk.put("/proc/sys/kernel/random/boot_id", disk.boot_id.encode())
            mark = read_format(disk, "data")
            assert mark is not None
            found = survey(disk, "data", mark, None)
            assert [region.path for region in found.regions] == [refusal.path]
            mend(disk, "data", mark, found, lambda: 7)
            world.start()
        seen = bench.look()
        assert {1, 2, 3} <= seen.records.keys()
        for seq in range(4, 8):
            assert seq in seen.records or covers(seen.gaps, seq, seq), f"seed {seed}, seq {seq}"
        assert bench.append().first_seq > 7, f"seed {seed}"
        world.abandon()
    assert refused


def test_a_refused_creation_is_not_back_once_its_name_is_dropped_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guard: `Recovery._is_stale`. The refused entry may have reached the platter all the same."""
    monkeypatch.setattr(limits, "DROPPED_NAMES_MAX", 1)
    for seed in range(12):
        bench = Bench(seed, wal_shards=2)
        world = bench.world
        shard = bench.node.journal.shard_of(bench.node.registry.next_topic_id)
        fail_syncs(bench, shard)
        with pytest.raises(TopicsError):
            bench.put()
        world.disk.heal()
        while bench.node.journal.shard_of(bench.node.registry.next_topic_id) == shard:
            with pytest.raises(TopicsError):
                world.run(bench.store.put_topic("skipped", _CONFIG, keep_type=False))
        bench.put()
        world.run(bench.store.drop_topic(TOPIC, if_empty=False))
        while bench.node.journal.shard_of(bench.node.registry.next_topic_id) == shard:
            with pytest.raises(TopicsError):
                world.run(bench.store.put_topic("skipped", _CONFIG, keep_type=False))
        world.run(bench.store.put_topic("other", _CONFIG, keep_type=False))
        world.run(bench.store.drop_topic("other", if_empty=False))
        bench.checkpoint()
        bench.crash("kill")
        assert bench.node.registry.find(TOPIC) is None, f"seed {seed}"
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
