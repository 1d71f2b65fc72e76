"""A full disk: which calls are refused, what the ballast releases, and readiness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.storage.fake_disk import FakeDisk
from tests.unit.test_node import append, started
from topics_server.node.node import Node
from topics_server.values.errors import DiskFull, StorageError, TopicsError
from topics_server.values.model import Durability, TopicConfig
from topics_server.wal.disk_space import Space

pytestmark = pytest.mark.anyio


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FakeDisk:
    monkeypatch.setattr("topics_server.wal.disk_space._CHECK_S", 0.0)
    monkeypatch.setattr("topics_server.engine.background.sealer._RETRY_S", 0.0)
    monkeypatch.setattr("topics_server.engine.background.checkpointer._POLL_MS", 0)
    return FakeDisk(1)


async def look(node: Node, times: int = 20) -> None:
    for _ in range(times):
        node.ground.clock.move(200)  # type: ignore[attr-defined]
        await asyncio.sleep(0.002)


async def fill(node: Node, name: str) -> int:
    """Append until refused for good; return the number of accepted records."""
    taken = refused = 0
    while refused < 10:
        try:
            await append(node, name, "x" * 500)
            taken += 1
        except TopicsError:
            refused += 1
            await look(node, 5)
    return taken


def take_the_rest(disk: FakeDisk) -> None:
    """Write a foreign file up to the last byte."""
    file = disk.open("else", create=True)
    file.pwrite(bytes(disk.room_bytes()), 0)


@pytest.mark.parametrize("how", ["delete", "drop"])
async def test_a_disk_without_a_free_byte_is_emptied_through_the_store(
    disk: FakeDisk, how: str
) -> None:
    disk.capacity_bytes = 300_000
    node = await started(disk, wal_shards=1, checkpoint_interval_ms=100, min_free_bytes=5_000)
    await look(node)
    assert disk.exists("data/ballast")
    assert await fill(node, "big") > 50
    take_the_rest(disk)
    assert disk.room_bytes() == 0
    await look(node)
    assert node.store.is_disk_low
    if how == "drop":
        await node.store.drop_topic("big", if_empty=False)
    else:
        await node.store.delete("big", before_seq=10**6, match=None)
    for _ in range(2000):
        await look(node, 5)
        try:
            assert await append(node, "other", 1) == 1
            break
        except TopicsError:
            continue
    else:
        raise AssertionError("still full")
    await look(node)
    assert disk.exists("data/ballast")
    assert node.state.reasons() == []
    await node.close()


async def test_a_refused_drop_of_segments_is_done_later_without_another_change(
    disk: FakeDisk,
) -> None:
    node = await started(disk, segment_max_events=8)
    for number in range(16):
        await append(node, "t", number)
    await node.sealer.seal_topics(["t"])
    disk.fail("open", "enospc", path="data/segments/*/manifest.tmp", times=2)
    await node.store.delete("t", before_seq=17, match=None)
    await look(node, 60)
    assert not [name for name in disk.list_dir("data/segments/1") if name.endswith(".data")]
    await node.close()


async def test_files_of_a_dropped_topic_go_when_the_disk_lets_them(disk: FakeDisk) -> None:
    node = await started(disk, segment_max_events=8)
    for number in range(16):
        await append(node, "t", number)
    await node.sealer.seal_topics(["t"])
    disk.fail("unlink", "eio", path="data/segments/*", times=2)
    await node.store.drop_topic("t", if_empty=False)
    await look(node, 60)
    assert disk.list_dir("data/segments") == []
    assert node.state.reasons() == []
    await node.close()


async def test_refused_seals_have_one_later_attempt_however_many_there_were(
    disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint on a full disk requests a seal: the attempts must not multiply."""
    node = await started(disk, segment_max_events=1000)
    config = TopicConfig(durability=Durability.FSYNC)
    for _ in range(2):
        await append(node, "t", "x" * 50_000, config=config)
    (topic,) = node.registry
    disk.fail("open", "enospc", path="data/segments/*", times=None)
    later: list[tuple[object, ...]] = []
    loop = asyncio.get_running_loop()
    original = loop.call_later

    def call_later(delay_s: float, call: Callable[..., object], *args: object) -> object:
        if call != node.sealer._enqueue_again:
            return original(delay_s, call, *args)  # a timer of something else
        later.append(args)
        return None

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_later", call_later)
        for _ in range(5):
            await node.sealer.seal_tails(1)
    assert later == [(topic.topic_id,)]
    disk.heal()
    await node.sealer.seal_tails(1)
    assert node.sealer.sealed_count == 1
    await node.close()


async def test_readiness_says_what_fails_until_it_succeeds(disk: FakeDisk) -> None:
    node = await started(disk, checkpoint_interval_ms=100)
    assert node.state.reasons() == []
    disk.fail("open", "enospc", path="data/snapshots/*", times=None)
    disk.fail("open", "eio", path="data/segments/*", times=None)
    for number in range(16):
        await append(node, "t", number, config=TopicConfig(durability=Durability.FSYNC))
    await look(node)
    assert node.state.reasons() == [
        "checkpoints fail: the disk takes no more",
        "sealing fails: see the log",
    ]
    disk.heal()
    await look(node)
    assert node.state.reasons() == []
    await node.close()


class NowOffload:
    async def run(self, call):  # type: ignore[no-untyped-def]
        return call()


def space_of(disk: FakeDisk, **changes: int) -> Space:
    return Space(
        disk,
        "data",
        min_free_bytes=changes.get("min_free_bytes", 1000),
        ballast_bytes=lambda: changes.get("ballast_bytes", 5000),
        offload=NowOffload(),
    )


def test_journal_files_leave_the_floor_and_what_the_ballast_lacks() -> None:
    disk = FakeDisk(1, capacity_bytes=20_000)
    disk.make_dir("data")
    space = space_of(disk)
    # The snapshot is not written yet, but there is room for it.
    assert (space.floor_bytes, space.may_seal()) == (6000, True)
    assert space.may_fill(14_000)
    assert not space.may_fill(14_001)
    assert space._look(was_refused=False) == (15_000, 0)
    assert (space.floor_bytes, space.may_seal()) == (1000, True)
    assert not space.may_fill(14_001)


def test_a_start_seals_before_it_wrote_its_ballast_only_where_that_fits() -> None:
    for room, may_seal in ((6_000, True), (5_999, False)):
        disk = FakeDisk(1, capacity_bytes=room)
        disk.make_dir("data")
        assert space_of(disk).may_seal() is may_seal
    # After the first check only a complete ballast counts.
    disk, space = whole(1_000_000, 500_000)
    assert space.may_seal()
    fill_up(disk, 500_000)
    space._look(was_refused=True)
    assert not space.may_seal()


def test_segments_are_sealed_while_a_larger_ballast_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {"ballast_bytes": 5_000}
    disk = FakeDisk(1, capacity_bytes=1_000_000)
    disk.make_dir("data")
    space = Space(
        disk,
        "data",
        min_free_bytes=1000,
        ballast_bytes=lambda: wanted["ballast_bytes"],
        offload=NowOffload(),
    )
    space._look(was_refused=False)
    wanted["ballast_bytes"] = 50_000
    seen: list[bool] = []
    grow = space._ballast._grow

    def noted() -> None:
        seen.append(space.may_seal())
        grow()

    monkeypatch.setattr(space._ballast, "_grow", noted)
    space._look(was_refused=False)
    assert seen == [True]
    # One that does not fit stops the seals until it does.
    wanted["ballast_bytes"] = 2_000_000
    space._look(was_refused=False)
    assert not space.may_seal()
    wanted["ballast_bytes"] = 50_000
    space._look(was_refused=False)
    assert space.may_seal()


def test_a_refused_manifest_gets_a_piece_and_the_rest_stays() -> None:
    disk, space = whole(1_000_000, 500_000)
    fill_up(disk, 500_000)
    assert space._look(was_refused=False) == (0, 0)
    assert space._look(was_refused=True) == (65_536, 65_536)
    assert space._look(was_refused=True) == (131_072, 65_536)
    assert space.floor_bytes == 1000 + 131_072
    disk.unlink("else")
    assert space._look(was_refused=False) == (500_000, 0)
    # Another refusal, with enough room.
    assert space._look(was_refused=True) == (500_000, 0)


async def test_a_snapshot_gets_what_it_lacks_if_that_makes_it_fit() -> None:
    disk, space = whole(1_000_000, 500_000)
    fill_up(disk, 490_000)
    with pytest.raises(DiskFull, match="a snapshot takes 600000 bytes, and"):
        await space.make_room(600_000)
    assert disk.room_bytes() == 10_000
    await space.make_room(200_000)
    assert disk.room_bytes() == 200_000 + 65_536
    await space.make_room(100_000)
    assert disk.room_bytes() == 200_000 + 65_536


async def test_whoever_takes_the_room_of_a_large_snapshot_leaves_that_of_a_small_one() -> None:
    """The release for a large snapshot may not suffice: then a delete of everything, and its small
    snapshot, must still find room.
    """
    disk, space = whole(1_000_000, 500_000)
    fill_up(disk, 500_000)
    await space.make_room(300_000)
    fill_up(disk, 300_000 + 65_536)
    assert disk.room_bytes() == 0
    with pytest.raises(DiskFull):
        await space.make_room(140_000)
    await space.make_room(10_000)
    assert disk.room_bytes() == 10_000 + 65_536
    fill_up(disk, 10_000 + 65_536)
    assert space._look(was_refused=True)[1] > 50_000


async def test_whoever_takes_the_first_piece_leaves_the_others() -> None:
    """A refused manifest gets one piece, however much of the ballast is missing already."""
    disk, space = whole(1_000_000, 500_000)
    fill_up(disk, 500_000)
    await space.make_room(200_000)
    fill_up(disk, 200_000 + 65_536)
    assert space._look(was_refused=True) == (65_536, 65_536)


async def test_a_segment_that_cannot_fit_is_refused_before_its_first_byte(
    disk: FakeDisk,
) -> None:
    """Else every attempt fills the disk for a moment, and all other writes fail meanwhile."""
    disk.capacity_bytes = 1_000_000
    node = await started(disk, wal_shards=1)
    for _ in range(8):
        await append(node, "t", "x" * 20_000)
    fill_up(disk, disk.room_bytes() - 200_000)
    opened_before = len(disk.log)
    with pytest.raises(DiskFull, match="a segment takes"):
        await node.sealer.seal_topics(["t"])
    assert [path for op, path in disk.log[opened_before:] if "segments" in path] == []
    disk.unlink("else")
    assert await node.sealer.seal_topics(["t"]) == (0, 1)
    await node.close()


async def test_what_the_disk_refused_is_tried_again_as_soon_as_it_has_room(
    disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topics_server.engine.background.sealer._RETRY_S", 1e6)
    node = await started(disk, segment_max_events=8)
    for number in range(16):
        await append(node, "t", number)
    await node.sealer.seal_topics(["t"])
    disk.fail("open", "enospc", path="data/segments/*/manifest.tmp", times=1)
    monkeypatch.setattr(node.ground.space, "_give_back", lambda size, free: size)
    await node.store.delete("t", before_seq=17, match=None)
    await look(node, 60)
    assert not [name for name in disk.list_dir("data/segments/1") if name.endswith(".data")]
    await node.close()


def test_a_start_on_a_full_disk_has_the_ballast() -> None:
    disk, space = whole(6000, 5000)
    space.make_room_for_start(500)
    assert disk.room_bytes() == 1000
    space.make_room_for_start(2000)
    assert disk.room_bytes() == 2000


def whole(capacity: int, ballast: int) -> tuple[FakeDisk, Space]:
    """A disk with a complete ballast."""
    disk = FakeDisk(1, capacity_bytes=capacity)
    disk.make_dir("data")
    space = space_of(disk, ballast_bytes=ballast)
    space._look(was_refused=False)
    assert disk.room_bytes() == capacity - ballast
    return disk, space


def fill_up(disk: FakeDisk, size: int) -> None:
    """Write, or lengthen, a foreign file."""
    file = disk.open("else", write=True) if disk.exists("else") else disk.open("else", create=True)
    file.pwrite(bytes(size), file.size())


async def test_a_disk_that_cannot_be_asked_changes_nothing() -> None:
    disk = FakeDisk(1)
    disk.make_dir("data")
    space = space_of(disk)
    told: list[bool] = []

    def broken(path: str) -> int:
        raise StorageError("EIO", path)

    disk.free_bytes = broken  # type: ignore[method-assign]
    watch = asyncio.ensure_future(space.watch(lambda low, free: told.append(low)))
    await asyncio.sleep(0.01)
    assert (told, watch.done()) == ([], False)
    watch.cancel()


async def test_a_full_disk_is_no_cause_to_name_files(disk: FakeDisk) -> None:
    node = await started(disk)
    node.checkpointer.failure = DiskFull("No space left on device", "data/secret")
    assert node.state.reasons() == ["checkpoints fail: the disk takes no more"]
    await node.close()
