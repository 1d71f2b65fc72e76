"""DESIGN §7, the rows this store touches: each mistake has a test of its own name.

Each docstring ends with the line that guards, by file and words; with that line taken out the test
fails. That was tried by hand in a copy of the tree for all but these: a missing segment, damage in
the middle of the journal, sealing at start, a delete while its segment moves.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.design7.bench import TOPIC, Bench
from tests.design7.conftest import NewBench
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.appends import decode_append
from topics_server.errors import Code, Corrupt, StartRefused, TopicsError
from topics_server.model import Durability, LossReason, TagMatch
from topics_server.wal import layout

HOWS = ["kill", "power", "clean", "kill after checkpoint", "power after sealing"]


def again(bench: Bench, how: str) -> None:
    """Another process on what this one leaves."""
    if how.endswith("checkpoint"):
        bench.checkpoint()
        bench.checkpoint()
    if how.endswith("sealing"):
        bench.tend(force_seal=True)
        bench.checkpoint()
        bench.checkpoint()
    if how == "clean":
        bench.restart()
    else:
        mode: Mode = "kill" if how.startswith("kill") else "power"
        bench.crash(mode)


def refused(bench: Bench, count: int = 1) -> Code:
    """The code with which an append is refused."""
    with pytest.raises(TopicsError) as caught:
        bench.append(count)
    return caught.value.code


@pytest.mark.parametrize("how", HOWS)
def test_deleting_the_newest_records_never_frees_their_seqs(bench: Bench, how: str) -> None:
    """Guard: engine/capture.py, the part carries `head_seq`; engine/log.py never derives it."""
    bench.put()
    bench.append(9)
    assert bench.delete(before_seq=10) == 9
    again(bench, how)
    assert bench.look().head == 9
    assert bench.append().first_seq == 10
    again(bench, how)
    assert bench.seqs() == [10]


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.MEMORY])
def test_what_follows_a_jumped_head_survives_the_next_crash(
    bench: Bench, durability: Durability
) -> None:
    """Guard: node.py, the checkpoint `publish=found.heads_moved > 0` before this boot is noted."""
    bench.put(durability)
    bench.append(3)
    bench.crash("power")
    jumped = bench.look().head
    assert jumped > 3
    bench.crash("kill")
    assert bench.look().head == jumped, "seqs of before the power loss are free again"
    first = bench.append(5).first_seq
    assert first == jumped + 1
    for _ in range(3):
        bench.crash("kill")
        seen = bench.look()
        assert [seq for seq in seen.records if seq >= first] == list(range(first, first + 5))
        assert seen.head == first + 4
    assert bench.append().first_seq == first + 5


@pytest.mark.parametrize("how", HOWS)
def test_the_evict_floor_survives_without_its_cap(bench: Bench, how: str) -> None:
    """Guard: wal/frames.py, an append's frame carries `entry.floor`; engine/capture.py its part."""
    bench.put(cap_records=3)
    bench.append(4)
    bench.append(6)
    for _ in range(2):
        again(bench, how)
        seen = bench.look()
        assert list(seen.records) == [8, 9, 10]
        assert [(g.gap_from, g.gap_to, g.reason) for g in seen.gaps] == [(1, 7, LossReason.CAP)]
        bench.put()  # without the cap, nothing comes back


@pytest.mark.parametrize("how", HOWS)
def test_an_idempotency_key_outlives_the_process(bench: Bench, how: str) -> None:
    """Guard: engine/capture.py carries the keys; `apply` of an append remembers the body's key."""
    bench.put()
    assert bench.append(2, key="k").first_seq == 1
    again(bench, how)
    retried = bench.append(2, key="k")
    assert (retried.first_seq, retried.last_seq, retried.deduped) == (1, 2, True)
    assert bench.seqs() == [1, 2]


@pytest.mark.parametrize("how", HOWS)
def test_an_idempotency_key_sent_as_a_header_is_in_the_journal(bench: Bench, how: str) -> None:
    """Guard: engine/topic.py, `header_key=` of the entry; wal/frames.py writes it."""
    bench.put()
    bench.append(2, header_key="k")
    again(bench, how)
    assert bench.append(2, header_key="k").deduped
    assert bench.append(2, key="k").deduped
    assert bench.seqs() == [1, 2]


def _snapshots(bench: Bench) -> list[str]:
    folder = layout.join("data", layout.SNAPSHOTS)
    return [layout.join(folder, name) for name in bench.world.disk.list_dir(folder)]


def _checkpoint_and_trim(bench: Bench) -> None:
    bench.put()
    for _ in range(4):
        for _ in range(40):
            bench.append(40)
        bench.checkpoint()
        bench.wait(1)
    assert bench.node.journal.shards[0].tail.rotations > 4


def test_an_older_snapshot_is_used_only_with_its_whole_journal(bench: Bench) -> None:
    """Guard: engine/checkpointer.py trims to `trim_lsn`, the start of the older snapshot."""
    _checkpoint_and_trim(bench)
    bench.append(3)
    before = bench.look()
    bench.world.crash("kill")
    newest = _snapshots(bench)[-1]
    bench.world.disk.corrupt(newest, bench.world.disk.file_size(newest) // 2)
    bench.world.start()
    after = bench.look()
    assert after.records == before.records
    assert after.head == before.head


def test_a_journal_that_does_not_reach_back_refuses_start(bench: Bench) -> None:
    """Guards: wal/chain.py, `needed_chain`; behind it engine/recovery.py, `_check_known`."""
    _checkpoint_and_trim(bench)
    assert len(_snapshots(bench)) == 2
    bench.world.crash("kill")
    for path in _snapshots(bench):
        bench.world.disk.corrupt(path, bench.world.disk.file_size(path) // 2)
    with pytest.raises(StartRefused):
        bench.world.start()


async def _move_and_delete(bench: Bench, done: list[str]) -> None:
    """Deletes during a seal and a move, two checkpoints; `done`: the acknowledged ones."""

    async def delete(tag: str) -> None:
        await bench.store.delete(TOPIC, before_seq=None, match=TagMatch(tag))
        done.append(tag)

    topic = bench.node.registry.find(TOPIC)
    assert topic is not None
    moving = bench.node.sealer.tend(topic, force_seal=True)
    await asyncio.gather(moving, delete("a"), delete("b"))
    await bench.node.checkpointer.take()
    await delete("c")
    await bench.node.checkpointer.take()


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_a_delete_acknowledged_while_its_segment_moves_stays(
    new_bench: NewBench, mode: Mode
) -> None:
    """At every disk operation of move, flip and two checkpoints. Guard: wal/segments.py, a flip
    during a relocation goes into both files.
    """
    acknowledged = 0
    for nth in range(1, 90, 2):
        bench = new_bench(seed=nth, cold_dir="cold", hot_retain_segments=1, segment_max_events=100)
        bench.put()
        for tag in ("a", "b", "c"):
            bench.append(6, tag=tag)
            bench.append(1, tag="keep")
            if tag != "a":
                bench.tend(force_seal=True)
        done: list[str] = []
        bench.world.disk.crash_at(nth)
        try:
            bench.world.run(_move_and_delete(bench, done))
        except SimulatedCrash:
            pass
        bench.crash(mode)
        tags = [record.tag for record in bench.look().records.values()]
        assert not set(tags) & set(done), f"operation {nth}: {done} are back"
        assert tags.count("keep") == 3
        acknowledged += len(done)
        bench.world.abandon()
    assert acknowledged > 20


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_a_flip_pending_at_a_checkpoint_is_in_the_snapshot(bench: Bench, mode: Mode) -> None:
    """The flags cannot be written, the journal is trimmed. Guard: engine/capture.py, the part
    carries `pending_flips`.
    """
    bench.put()
    bench.append(8, tag="a")
    bench.append(8, tag="b")
    bench.tend(force_seal=True)
    bench.world.disk.fail("write", "eio", path="*.data", times=None)
    assert bench.delete(tag="a") == 8
    for _ in range(3):
        for _ in range(30):
            bench.append(12)
        bench.checkpoint()
        bench.wait(0.1)
    bench.crash(mode)
    assert not [seq for seq in bench.seqs() if seq <= 8]
    assert [seq for seq in bench.seqs() if seq <= 16] == list(range(9, 17))


@pytest.mark.parametrize("where", ["hot", "cold"])
def test_a_listed_segment_that_is_missing_refuses_start(new_bench: NewBench, where: str) -> None:
    """Guard: wal/segments.py, `open_topic` refuses a listed file that is in neither folder."""
    bench = new_bench(cold_dir="cold", hot_retain_segments=1)
    bench.put()
    for _ in range(5):
        bench.append(8)
        bench.tend()
    bench.world.stop()
    bench.world.disk.crash("kill")
    disk = bench.world.disk = bench.world.disk.reopen()
    root = "cold" if where == "cold" else "data/segments"
    gone = [p for p in disk._files if p.startswith(root + "/") and p.endswith(".data")]
    assert gone
    for path in gone:
        disk.unlink(path)
    with pytest.raises(StartRefused, match=r"\.data|segment"):
        bench.world.start()


def test_preallocation_never_runs_beside_a_write(bench: Bench) -> None:
    """While the shard's worker has a job (zero-filling, syncing), the loop writes nothing.

    Guard: wal/shard.py, `_pump` goes on only `while not self._busy`.
    """
    bench.put(Durability.DISK)
    shard = bench.node.journal.shards[0]
    zeroed: list[str] = []
    written = 0
    for _ in range(300):
        ended = shard.tail.end
        bench.append(3)
        written += shard.tail.end != ended
        content = bench.world.disk.content(shard.tail.path)
        if content[shard.tail.end - 8 : shard.tail.end] == bytes(8):
            zeroed.append(f"{shard.tail.path} at {shard.tail.end}")
    assert not zeroed
    assert written > 200
    assert shard.tail.rotations > 1
    bench.wait(2)
    assert not shard._busy
    shard._busy = True
    before = shard.tail.end
    body = bench.body(1)

    async def append() -> bool:
        call = bench.store.append(TOPIC, body, decode_append(body), header_key=None, config=None)
        task = asyncio.ensure_future(call)
        for _ in range(50):
            await asyncio.sleep(0)
        was_written = shard.tail.end != before or task.done()
        shard._busy = False
        shard._pump()
        await task
        return was_written

    assert not bench.world.run(append())


@pytest.mark.parametrize("fault", ["enospc", "partial", "eio"])
def test_one_full_disk_leaves_no_hole(bench: Bench, fault: str) -> None:
    """Guard: engine/commits.py, `_cut` undoes what is staged from the failed entry on."""
    bench.put()
    bench.append(2)
    assert fault in ("enospc", "partial", "eio")
    bench.world.disk.fail("write", fault, path="data/wal/*")  # type: ignore[arg-type]
    assert refused(bench, 4) is Code.THROTTLED
    bench.wait(3)
    assert bench.append(2).first_seq == 3
    bench.crash("power")
    assert bench.seqs() == [1, 2, 3, 4]
    assert bench.append().first_seq == 5
    bench.crash("kill")
    seen = bench.look()
    assert list(seen.records) == [1, 2, 3, 4, 5]
    assert not seen.gaps


def test_damage_in_the_middle_of_the_journal_refuses_start(bench: Bench) -> None:
    """One flipped bit below what was synced. Guard: wal/replay.py, `_judge_tail` and `_groups`."""
    bench.put()
    for _ in range(6):
        bench.append(3)
    path = bench.node.journal.shards[0].tail.path
    bench.world.crash("kill")
    disk = bench.world.disk
    place = disk.content(path).index(b'"data":7')
    disk.corrupt(path, place)
    damaged = disk.content(path)
    with pytest.raises(Corrupt, match="wal"):
        bench.world.start()
    assert disk.content(path) == damaged
    bench.world.abandon()
    bench.world.disk = disk = disk.reopen()
    disk.corrupt(path, place)
    bench.world.start()
    assert bench.seqs() == list(range(1, 19))


def test_starting_seals_and_syncs_nothing_per_topic(new_bench: NewBench) -> None:
    """Guard: engine/sealing.py, a small tail is not sealed by `force` or age at start."""
    syncs = []
    for topics in (4, 80):
        bench = new_bench(segment_max_events=1000)
        for number in range(topics):
            for _ in range(3):
                bench.append(name=f"t{number}")
        bench.restart()
        bench.wait(5)
        assert bench.node.sealer.sealed_count == 0
        log = bench.world.disk.log
        syncs.append(sum(op in ("sync", "sync_dir") for op, _ in log))
        bench.world.abandon()
    few, many = syncs
    # The last boot alone differs by nothing; both boots share the disk's log.
    assert many - few < 80 * 4


@pytest.mark.parametrize("sealed", [False, True])
def test_a_delete_is_durable_before_it_is_acknowledged(new_bench: NewBench, sealed: bool) -> None:
    """Guard: engine/topic.py, `delete_gate` is that of the class (fsync: synced)."""
    for seed in range(12):
        bench = new_bench(seed=seed)
        bench.put()
        bench.append(5, tag="a")
        bench.append(5, tag="b")
        if sealed:
            bench.tend(force_seal=True)
        for tag in "ab":
            bench.delete(tag=tag)
            bench.crash("power")
            assert tag not in [record.tag for record in bench.look().records.values()]


def test_a_failed_sync_is_never_tried_again(bench: Bench) -> None:
    """The shard is read-only: reads go on, nothing is acknowledged, nothing synced. Guard:
    wal/shard.py, `_become_read_only` and `_check_state`.
    """
    bench.put()
    bench.append(3)
    disk = bench.world.disk
    disk.fail("sync", "eio", path="data/wal/*")
    assert refused(bench) is Code.STORAGE_READ_ONLY
    assert bench.store.read_only_shards() == [0]
    at = len(disk.log)
    for _ in range(5):
        assert refused(bench) is Code.STORAGE_READ_ONLY
        bench.wait(1)
    touched = [entry for entry in disk.log[at:] if entry[1].startswith("data/wal/")]
    assert touched == []
    assert bench.seqs() == [1, 2, 3]
    bench.crash("power")
    seqs = bench.seqs()
    assert seqs[:3] == [1, 2, 3]
    assert bench.append().first_seq == len(seqs) + 1
