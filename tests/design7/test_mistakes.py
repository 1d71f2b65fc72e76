"""Known mistakes of stores like this one: each has a test named after it.

Each docstring names the protecting line, by file and words; with that line removed in a copy of the
tree the test fails by its own assertion. If two lines protect the same, the docstring says which
one is tested alone and which stands before or behind it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from tests.design7.bench import TOPIC, Bench
from tests.design7.conftest import NewBench
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.engine.topic.topic import Topic
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, Corrupt, StartRefused, StorageError, TopicsError
from topics_server.values.model import Durability, LossReason, TagMatch, TopicConfig
from topics_server.values.storage_types import Offload
from topics_server.wal import layout
from topics_server.wal.journal.writer_jobs import MakeRoom

T = TypeVar("T")

HOWS = ["kill", "power", "clean", "kill after checkpoint", "power after sealing"]


def again(bench: Bench, how: str) -> None:
    """Start another process on the files that this one leaves."""
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
    """The code of an append's refusal."""
    with pytest.raises(TopicsError) as caught:
        bench.append(count)
    return caught.value.code


@pytest.mark.parametrize("how", HOWS)
def test_deleting_the_newest_records_never_frees_their_seqs(bench: Bench, how: str) -> None:
    """Guard: engine/background/capture.py, the part carries `head_seq`; engine/log/log.py never
    derives it.
    """
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
    """Guard: wal/format/frames.py, an append's frame carries `entry.floor`;
    engine/background/capture.py its part.
    """
    bench.put(cap_records=3)
    bench.append(4)
    bench.append(6)
    for _ in range(2):
        again(bench, how)
        seen = bench.look()
        assert list(seen.records) == [8, 9, 10]
        assert [(g.gap_from, g.gap_to, g.reason) for g in seen.gaps] == [(1, 7, LossReason.CAP)]
        bench.put()  # without the cap, no record returns


@pytest.mark.parametrize("how", HOWS)
def test_an_idempotency_key_outlives_the_process(bench: Bench, how: str) -> None:
    """Guard: engine/background/capture.py carries the keys; `apply` of an append remembers the
    body's key.
    """
    bench.put()
    assert bench.append(2, key="k").first_seq == 1
    again(bench, how)
    retried = bench.append(2, key="k")
    assert (retried.first_seq, retried.last_seq, retried.deduped) == (1, 2, True)
    assert bench.seqs() == [1, 2]


@pytest.mark.parametrize("how", HOWS)
def test_an_idempotency_key_sent_as_a_header_is_in_the_journal(bench: Bench, how: str) -> None:
    """Guard: engine/topic/writes/append.py, `header_key=`; wal/format/frames.py writes it."""
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
    """Guard: engine/background/checkpointer.py trims to `trim_lsn`, the start of the older
    snapshot.
    """
    _checkpoint_and_trim(bench)
    bench.append(3)
    before = bench.look()
    bench.world.crash("kill")
    newest = _snapshots(bench)[-1]
    bench.world.disk.corrupt(newest, bench.world.disk.file_size(newest) // 2)
    try:
        bench.world.start()
    except StartRefused as error:
        pytest.fail(f"trimmed too far: {error}")
    after = bench.look()
    assert after.records == before.records
    assert after.head == before.head


def test_a_journal_that_does_not_reach_back_refuses_start(new_bench: NewBench) -> None:
    """Nothing is sealed, so only the journal can show it. Guard: wal/journal/file_chain.py,
    `needed_chain`, `if after_lsn >= max(start_lsn, 1)`. For topics with segments
    engine/background/recovery.py, `_check_known`, stands behind it.
    """
    bench = new_bench(segment_max_events=100_000)
    _checkpoint_and_trim(bench)
    assert bench.node.sealer.sealed_count == 0
    assert len(_snapshots(bench)) == 2
    bench.world.crash("kill")
    for path in _snapshots(bench):
        bench.world.disk.corrupt(path, bench.world.disk.file_size(path) // 2)
    with pytest.raises(StartRefused, match=r"begins after lsn \d+, but replay starts at lsn 1"):
        bench.world.start()


async def _move_and_delete(bench: Bench, done: list[str]) -> None:
    """Deletes during a seal and a move, with two checkpoints; `done`: the acknowledged ones."""

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
    """At every other disk operation of move, flip and two checkpoints. Guard:
    engine/topic/topic.py, `flips_done`, `np.setdiff1d`: what was not in the flip stays pending.
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


class _Meanwhile:
    """An offload that first runs another action on the loop, once."""

    def __init__(self, offload: Offload, work: Coroutine[Any, Any, object]) -> None:
        self._offload = offload
        self._work: Coroutine[Any, Any, object] | None = work

    async def run(self, call: Callable[[], T]) -> T:
        """See `values.storage_types.Offload`."""
        work, self._work = self._work, None
        if work is not None:
            await work
        return await self._offload.run(call)


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_a_delete_acknowledged_while_its_segment_is_written_stays(bench: Bench, mode: Mode) -> None:
    """The file is packed with its records alive. Guard: engine/topic/topic.py, `mark_sealed`,
    `self.add_pending(flips)`.
    """
    bench.put()
    bench.append(3, tag="a")
    bench.append(3, tag="b")
    sealer = bench.node.sealer
    deleting = bench.store.delete(TOPIC, before_seq=None, match=TagMatch("a"))
    sealer._offload = _Meanwhile(sealer._offload, deleting)
    bench.tend(force_seal=True)
    assert sealer.sealed_count == 1
    assert bench.seqs() == [4, 5, 6]
    bench.checkpoint()
    bench.checkpoint()
    bench.crash(mode)
    assert bench.seqs() == [4, 5, 6]


def _one_hot_segment(new_bench: NewBench) -> tuple[Bench, Topic, dict[str, str]]:
    """A bench whose topic has 8 records in segment 1, hot, and the paths of its records by tier."""
    bench = new_bench(cold_dir="cold", hot_retain_segments=5)
    bench.put()
    bench.append(8, tag="a")
    bench.tend(force_seal=True)
    topic = bench.node.registry.find(TOPIC)
    assert topic is not None
    ours = layout.join(layout.topic_dir(topic.topic_id), layout.segment_data(1))
    paths = {"hot": layout.join("data", layout.SEGMENTS, ours), "cold": layout.join("cold", ours)}
    assert bench.world.disk.exists(paths["hot"])
    assert not bench.world.disk.exists(paths["cold"])
    return bench, topic, paths


def _flagged(bench: Bench, path: str) -> list[int]:
    """Rows of a segment of 8 whose delete flag is set on disk."""
    return [row for row, flag in enumerate(bench.world.disk.content(path)[-8:]) if flag]


def test_a_flip_waits_for_the_copy_that_is_under_way(
    new_bench: NewBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has been read, and is not in its place yet. Guard: wal/segments/store.py, `flip` is
    `with topic.lock`. Before it, in a running server: engine/background/sealer.py, `async with
    self._one_job`.
    """
    bench, topic, paths = _one_hot_segment(new_bench)
    segments, disk = bench.node.segments, bench.world.disk
    flipping = threading.Thread(target=segments.flip, args=(topic.topic_id, {1: [2, 5]}))
    rename = disk.rename

    def rename_while_flipping(old: str, new: str) -> None:
        if new == paths["cold"]:
            flipping.start()
            flipping.join(0.2)  # without the guard it ends long before
        rename(old, new)

    monkeypatch.setattr(disk, "rename", rename_while_flipping)
    segments.relocate(topic.topic_id, 1, topic.facts())
    flipping.join(10)
    assert not flipping.is_alive()
    assert not disk.exists(paths["hot"])
    assert _flagged(bench, paths["cold"]) == [2, 5]


def test_a_flip_after_half_a_move_is_in_both_copies(new_bench: NewBench) -> None:
    """Which of them the manifest on disk lists is not known. Guard: wal/segments/store.py, `flip`
    writes `for tier in (HOT, COLD) if both`. Behind it, at start: wal/segments/files.py,
    `merge_flags`.
    """
    bench, topic, paths = _one_hot_segment(new_bench)
    disk = bench.world.disk
    disk.fail("sync_dir", "eio", path=layout.parent(paths["hot"]))
    with pytest.raises(StorageError, match="EIO"):
        bench.node.segments.relocate(topic.topic_id, 1, topic.facts())
    assert disk.exists(paths["hot"])
    assert disk.exists(paths["cold"])
    assert bench.delete(before_seq=4) == 3
    bench.tend()
    assert _flagged(bench, paths["hot"]) == [0, 1, 2]
    assert _flagged(bench, paths["cold"]) == [0, 1, 2]
    bench.crash("power")
    assert bench.seqs() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_a_flip_pending_at_a_checkpoint_is_in_the_snapshot(bench: Bench, mode: Mode) -> None:
    """The flags cannot be written, the journal is trimmed. Guard: engine/background/capture.py, the
    part carries `pending_flips`.
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


@pytest.mark.parametrize("suffix", [".data", ".idx"])
@pytest.mark.parametrize("where", ["hot", "cold"])
def test_a_listed_segment_that_is_missing_refuses_start(
    new_bench: NewBench, where: str, suffix: str
) -> None:
    """Guard: wal/segments/files.py, `_settle_segment`, `elif not (has_hot if ...)`. Behind it start
    fails anyway, by ENOENT, as soon as such a file is opened.
    """
    bench = new_bench(cold_dir="cold", hot_retain_segments=1)
    bench.put()
    for _ in range(5):
        bench.append(8)
        bench.tend()
    bench.world.stop()
    bench.world.disk.crash("kill")
    disk = bench.world.disk = bench.world.disk.reopen()
    root = "cold" if where == "cold" else "data/segments"
    gone = [p for p in disk._files if p.startswith(root + "/") and p.endswith(suffix)]
    assert gone
    for path in gone:
        disk.unlink(path)
    with pytest.raises(StorageError) as caught:
        bench.world.start()
    assert "a listed segment file is missing" in str(caught.value)
    assert isinstance(caught.value, StartRefused)
    assert caught.value.path in gone


def test_preallocation_never_fills_what_was_written(bench: Bench) -> None:
    """Filling begins where filling ended last, and the loop never writes beyond that: so both may
    run at once. While filling may continue in the next file, the loop writes nothing. Guards:
    wal/journal/wal_writer.py, `_may_write_beside`, `return not self.tail.may_rotate`;
    `_may_write_here`, `self.tail.has_room(size)`; wal/journal/wal_file.py, `fill`, `position =
    self.filled`. A write in the middle of filling: tests/storage/journal/test_shard.py,
    `test_preallocation_never_fills_what_was_just_written`.
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

    async def append(count: int) -> bool:
        """Append; return whether the entry was written while a filling job ran."""
        body = bench.body(count)
        before = shard.tail.end
        shard.job = MakeRoom()
        call = bench.store.append(TOPIC, body, decode_append(body), header_key=None, config=None)
        task = asyncio.ensure_future(call)
        for _ in range(50):
            await asyncio.sleep(0)
        was_written = shard.tail.end != before
        assert shard.tail.end <= shard.tail._live.filled
        shard.job = None
        shard.tail._refused_bytes = 0
        shard._pump()
        await task
        return was_written

    assert shard.job is None
    assert bench.world.run(append(1))
    bench.wait(2)
    shard.tail._refused_bytes = 1
    assert not bench.world.run(append(1))
    bench.wait(2)
    too_many = shard.tail._live.filled - shard.tail.end
    assert not bench.world.run(append(too_many)), "that is more than there is room for"


@pytest.mark.parametrize("fault", ["enospc", "partial", "eio"])
def test_one_full_disk_leaves_no_hole(bench: Bench, fault: str) -> None:
    """Guard: engine/commit/pipeline.py, `_cut`, `cut[0].topic.undo_from(cut[0].lsn)`."""
    bench.put()
    bench.append(2)
    topic = bench.node.registry.find(TOPIC)
    assert topic is not None
    assert fault in ("enospc", "partial", "eio")
    bench.world.disk.fail("write", fault, path="data/wal/*")  # type: ignore[arg-type]
    assert refused(bench, 4) is Code.THROTTLED
    assert topic.staged_seq == topic.log.head_seq == 2, "seqs of what was refused are given away"
    bench.wait(3)
    assert bench.append(2).first_seq == 3
    bench.crash("power")
    assert bench.seqs() == [1, 2, 3, 4]
    assert bench.append().first_seq == 5
    bench.crash("kill")
    seen = bench.look()
    assert list(seen.records) == [1, 2, 3, 4, 5]
    assert not seen.gaps


@pytest.mark.parametrize("has_follower", [False, True])
def test_damage_in_the_middle_of_the_journal_refuses_start(
    bench: Bench, has_follower: bool
) -> None:
    """One flipped bit below what was synced. Guards in wal/journal/replay.py, by what is behind it:
    a group of the same file, `_judge_tail`, `if group.synced_bytes > position`; another file,
    `_groups`, `if result.ending is Ending.FAILED or position != expected`.
    """
    bench.put()
    for _ in range(6):
        bench.append(3)
    shard = bench.node.journal.shards[0]
    path = shard.tail.path
    while has_follower and shard.tail.rotations < 2:
        bench.append(40)
    before = bench.seqs()
    bench.world.crash("kill")
    disk = bench.world.disk
    place = disk.content(path).index(b'"data":7')
    disk.corrupt(path, place)
    damaged = disk.content(path)
    shown = "a later file holds groups" if has_follower else "the end mark says it was synced"
    with pytest.raises(Corrupt, match=f"^{path}: .*{shown}"):
        bench.world.start()
    assert disk.content(path) == damaged
    bench.world.abandon()
    bench.world.disk = disk = disk.reopen()
    disk.corrupt(path, place)
    bench.world.start()
    assert bench.seqs() == before


def _start_up_log(bench: Bench, topics: int, how: str, capped: bool) -> list[str]:
    """Make small topics and end by `how`; return what the next start does to the disk until it is
    idle.
    """
    config = TopicConfig(durability=Durability.FSYNC, cap_records=100 if capped else 0)
    for number in range(topics):
        name = f"t{number}"
        bench.world.run(bench.store.put_topic(name, config, keep_type=False))
        for _ in range(3):
            bench.append(name=name)
    bench.checkpoint()
    if how == "clean":
        bench.world.stop()
    else:
        bench.world.crash("kill" if how == "kill" else "power")
    disk = bench.world.disk
    at = len(disk.log)
    bench.world.start()
    bench.wait(5)
    assert bench.node.sealer.sealed_count == 0
    assert len(bench.look(f"t{topics - 1}").records) == 3
    return [f"{op} {path}" for op, path in disk.log[at:] if op != "open"]


@pytest.mark.parametrize("how", ["clean", "kill", "power"])
@pytest.mark.parametrize("capped", [False, True])
def test_starting_seals_and_syncs_nothing_per_topic(
    new_bench: NewBench, how: str, capped: bool
) -> None:
    """80 small topics cost exactly the writes and syncs of 4. Guard:
    engine/background/seal_plan.py, `plan_seal`, `if not (is_full or force or is_old(...))`. Without
    a cap engine/background/sealer.py, `adopt`, `if log_.sealed_count or ...`, stands before it:
    those runs fail with both lines out.
    """
    few, many = (
        _start_up_log(new_bench(segment_max_events=1000), topics, how, capped) for topics in (4, 80)
    )
    assert not [line for line in many if f"/{layout.SEGMENTS}/" in line]
    assert sum(line.startswith("sync") for line in few) > 0
    assert len(many) == len(few), many


@pytest.mark.parametrize("sealed", [False, True])
def test_a_delete_is_durable_before_it_is_acknowledged(new_bench: NewBench, sealed: bool) -> None:
    """Guard: engine/commit/gates.py, a delete has the gate of its class (fsync: synced)."""
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
    """The shard is read-only: reads continue, nothing is acknowledged or synced. Guards, each
    alone: wal/journal/wal_writer.py, `self.state = State.READ_ONLY`; engine/commit/pipeline.py,
    `_fail`, `self.read_only_shards.append(shard)`. Behind both: wal/journal/wal_writer.py,
    `_check_state`.
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
