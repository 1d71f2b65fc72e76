"""A journal file's room is reserved instead of filled while groups are large and few are synced."""

from __future__ import annotations

import pytest

from tests.storage.fake_disk import FakeDisk, Mode
from tests.storage.journal.journal_rig import Life, append, new_disk
from topics_server.values.limits import KIB, MIB
from topics_server.wal.journal.wal_file import Sizes

# A group is large from 1 KiB on, and a sync covers much from 16 KiB on.
SIZES = Sizes(file_bytes=4 * MIB, fill_step_bytes=64 * KIB, reserve_bytes=8 * KIB)


def written(disk: FakeDisk, record_bytes: int, *, syncs: bool = False) -> Life:
    """A life that has appended 400 KiB, a record in each group, since its file had room."""
    life = Life(disk, shards=1, sizes=SIZES)
    life.recover()
    life.settle()
    before = disk.allocations
    for seq in range(1, 400 * KIB // record_bytes):
        life.submit(append(0, seq, b"x" * record_bytes), sync=syncs)
        life.turn(4)
    disk.allocations -= before
    return life


def reserved_in(disk: FakeDisk, record_bytes: int, *, syncs: bool = False) -> int:
    """How often room was reserved."""
    life = written(disk, record_bytes, syncs=syncs)
    life.close()
    return disk.allocations


def test_room_for_large_groups_is_reserved() -> None:
    # The first step is filled: nothing is known about the groups yet.
    assert 5 <= reserved_in(new_disk(1), 2_000) <= 16


def test_room_for_small_groups_is_filled() -> None:
    """A small write into reserved room costs more than one into zeros."""
    assert reserved_in(new_disk(1), 300) == 0


def test_room_is_filled_if_each_group_is_synced() -> None:
    """The first sync of reserved room also writes the file system's own records."""
    assert reserved_in(new_disk(1), 2_000, syncs=True) == 0


def test_room_is_filled_where_none_can_be_reserved() -> None:
    disk = new_disk(1)
    disk.can_allocate = False
    life = written(disk, 2_000)
    assert disk.allocations == 0
    assert life.journal.shards[0].tail.end > 400 * KIB
    again = Life(life.die("kill"), life.promises, shards=1)
    assert len(again.recover("kill")) == life.next_lsn - 1
    again.close()


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_groups_in_reserved_room_are_recovered(mode: Mode) -> None:
    life = written(new_disk(2), 2_000)
    last = life.submit(append(0, 1_000), sync=True)
    assert last is not None
    life.settle()
    again = Life(life.die(mode), life.promises, shards=1)
    assert set(again.recover(mode)) == set(range(1, last + 1))
    again.close()


def test_a_disk_that_has_no_room_to_reserve_refuses_appends_until_it_has() -> None:
    disk = new_disk(3)
    life = written(disk, 2_000)
    disk.capacity_bytes = disk.used_bytes() + 4 * KIB
    life.submit(append(0, 1_000, b"x" * 60 * KIB))
    life.settle()
    failure = next(p for p in life.progress if p.failed_from is not None)
    assert failure.error == "disk_full"
    disk.capacity_bytes = None
    life.journal.shards[0].reopen()
    while life.submit(append(0, 1_001)) is None:
        life.settle()
    life.settle()
    again = Life(life.die("power"), life.promises, shards=1)
    again.recover("power")
    again.close()
