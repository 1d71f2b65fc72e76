"""The journal is kept for an archive that is behind, up to a bound; then a gap is reported."""

from __future__ import annotations

import asyncio

import pytest

from tests.model.archive.archived import ARCHIVE, Archived, at_time
from topics_server.values.errors import StartRefused


async def checkpoints(made: Archived, count: int) -> None:
    """Write, and trim the journal as far as the archive allows."""
    node = made.world.node
    assert node is not None
    for _ in range(count):
        await made.append("a", 300)
        await node.checkpointer.take()
        await asyncio.sleep(1.1)


def began(seed: int, **changes: object) -> Archived:
    made = Archived(seed, archive_base_interval_ms=3_600_000, **changes)
    made.start()
    made.world.run(made.put_topics())
    made.world.run(made.load(6))
    made.world.run(made.settle())
    return made


def unreachable(made: Archived) -> None:
    """Every put to the archive fails from now on."""
    made.world.disk.fail("write", "enospc", path=f"{ARCHIVE}/*", times=None)


def test_the_journal_waits_for_the_archive() -> None:
    made = began(1)
    with made.world.life(1):
        node = made.world.node
        assert node is not None
        unreachable(made)
        first = set(made.world.disk.list_dir("data/wal"))
        made.world.run(checkpoints(made, 4))
        assert first <= set(made.world.disk.list_dir("data/wal"))
        shown = made.archiver.metrics()
        assert shown.kept_bytes > 0
        assert (shown.gaps, shown.stopped) == (0, 0)
        assert shown.errors > 0
        assert shown.lag_bytes > 10_000
        assert shown.lag_s > 1
        made.world.disk.heal()
        made.world.run(made.settle())
        assert node.journal.archive_bytes == 0
        assert not first <= set(made.world.disk.list_dir("data/wal"))
        assert made.verified().stretches == 1
        made.world.crash("kill")
        moment = made.restored("restored")
        made.world.start()
        made.check_moment(moment)


def test_beyond_its_bound_a_gap_begins_and_a_base_ends_it() -> None:
    made = began(2, archive_journal_bytes=40_000)
    with made.world.life(2):
        before = made.history().facts(made.history().newest())
        unreachable(made)
        made.world.run(checkpoints(made, 8))
        shown = made.archiver.metrics()
        assert shown.gaps >= 1
        assert shown.kept_bytes <= 60_000
        in_gap = made.world.clock.now_ms()
        made.world.run(asyncio.sleep(2))
        made.world.disk.heal()
        made.world.run(made.append("a", 1))
        made.world.run(made.settle(least_bases=2))
        found = made.verified()
        assert (found.problems, found.stretches) == ([], 2)
        made.world.run(made.load(5))
        made.world.run(made.settle())
        with pytest.raises(StartRefused, match=r"entries around .* are missing .* nearest moments"):
            made.restored("refused", at_time(in_gap))
        made.world.crash("power")
        disk, changes = made.world.disk, dict(made.world.changes)
        for target, find in (
            ("newest", None),
            ("before", at_time(before.ts_ms)),
        ):
            made.world.disk, made.world.changes = disk, dict(changes)
            moment = made.restored(target) if find is None else made.restored(target, find)
            made.world.start()
            made.check_moment(moment)
            made.world.crash("kill")
            disk = made.world.disk


def test_a_run_without_an_archive_leaves_a_gap() -> None:
    made = began(3)
    with made.world.life(3):
        made.world.stop()
        made.world.changes["archive_url"] = None
        made.start()
        made.world.run(checkpoints_without(made))
        made.world.stop()
        made.world.changes["archive_url"] = f"file://{ARCHIVE}"
        made.start()
        made.world.run(made.settle(least_bases=1))
        found = made.verified()
        assert (found.problems, found.stretches) == ([], 2)
        made.world.crash("kill")
        moment = made.restored("restored")
        made.world.start()
        made.check_moment(moment)


async def checkpoints_without(made: Archived) -> None:
    node = made.world.node
    assert node is not None
    for _ in range(3):
        await made.append("a", 300)
        await node.checkpointer.take()


def test_a_nearly_full_disk_gets_the_journal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = began(4)
    with made.world.life(4):
        node = made.world.node
        assert node is not None
        unreachable(made)
        made.world.run(checkpoints(made, 3))
        assert node.journal.archive_bytes > 0
        monkeypatch.setattr(made.archiver, "_is_disk_low", lambda: True)
        made.world.run(asyncio.sleep(40))
        assert node.journal.archive_bytes == 0
        assert made.archiver.metrics().gaps == 1
        monkeypatch.undo()
        made.world.disk.heal()
        made.world.run(made.append("a", 1))
        made.world.run(made.settle(least_bases=2))
        assert made.verified().stretches == 2


def test_damage_in_the_journal_is_a_gap_and_no_silent_loss() -> None:
    made = began(5)
    with made.world.life(5):
        node = made.world.node
        assert node is not None
        made.world.run(made.append("a", 2))
        tail = node.journal.shards[node.journal.shard_of(1)].tail
        made.world.disk.corrupt(tail.path, tail.end - 24)
        made.world.run(asyncio.sleep(6))
        shown = made.archiver.metrics()
        assert shown.gaps == 1 or shown.errors >= 1, shown
