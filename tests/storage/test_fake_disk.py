"""The fake disk keeps synced bytes, may lose unsynced bytes, and fails on request."""

from __future__ import annotations

import pytest

from tests.storage.fake_disk import SECTOR, FakeDisk, SimulatedCrash
from topics_server.values.errors import DiskFull, StartRefused, StorageError


def synced_file(disk: FakeDisk, path: str, data: bytes) -> None:
    file = disk.open(path, create=True)
    file.pwrite(data, 0)
    file.sync()
    file.close()
    disk.sync_dir("data")


def test_synced_bytes_survive_a_power_loss() -> None:
    for seed in range(50):
        disk = FakeDisk(seed)
        disk.make_dir("data")
        disk.sync_dir(".")
        synced_file(disk, "data/a", b"kept")
        disk.crash("power")
        assert disk.reopen().content("data/a") == b"kept"


def test_unsynced_sectors_are_kept_or_lost_each_on_its_own() -> None:
    outcomes = set()
    for seed in range(1500):
        disk = FakeDisk(seed)
        disk.make_dir("data")
        disk.sync_dir(".")
        synced_file(disk, "data/a", b"o" * 4 * SECTOR)
        disk.open("data/a", write=True).pwrite(b"n" * 4 * SECTOR, 0)
        disk.crash("power")
        content = disk.reopen().content("data/a")
        sectors = [content[i : i + SECTOR] for i in range(0, len(content), SECTOR)]
        assert all(sector in (b"o" * SECTOR, b"n" * SECTOR) for sector in sectors)
        outcomes.add(tuple(sector[:1] for sector in sectors))
    assert len(outcomes) == 16


def test_a_sector_never_holds_a_later_write_without_an_earlier_one() -> None:
    for seed in range(300):
        disk = FakeDisk(seed)
        disk.make_dir("data")
        disk.sync_dir(".")
        synced_file(disk, "data/a", bytes(SECTOR))
        file = disk.open("data/a", write=True)
        file.pwrite(b"1", 0)
        file.pwrite(b"2", 8)
        disk.crash("power")
        content = disk.reopen().content("data/a")
        assert not (content[8] and not content[0])


def test_everything_written_survives_a_kill(disk: FakeDisk) -> None:
    disk.open("data/a", create=True).pwrite(b"cached", 0)
    disk.crash("kill")
    again = disk.reopen()
    assert again.content("data/a") == b"cached"
    assert again.boot_id == "boot-1"
    again.crash("power")
    assert again.boot_id == "boot-2"


def test_a_rename_is_kept_or_undone_but_never_both() -> None:
    outcomes = set()
    for seed in range(100):
        disk = FakeDisk(seed)
        disk.make_dir("data")
        disk.sync_dir(".")
        synced_file(disk, "data/f", b"old")
        new = disk.open("data/f.tmp", create=True)
        new.pwrite(b"new", 0)
        new.sync()
        disk.rename("data/f.tmp", "data/f")
        disk.crash("power")
        found = disk.reopen()
        outcomes.add((found.content("data/f"), found.exists("data/f.tmp")))
    assert outcomes == {(b"old", False), (b"old", True), (b"new", False)}


def test_an_unsynced_creation_may_be_gone() -> None:
    found = set()
    for seed in range(50):
        disk = FakeDisk(seed)
        disk.make_dir("data")
        disk.sync_dir(".")
        file = disk.open("data/a", create=True)
        file.pwrite(b"x", 0)
        file.sync()
        disk.crash("power")
        found.add(disk.reopen().exists("data/a"))
    assert found == {True, False}


def test_a_failed_sync_is_not_mended_by_the_next_but_by_writing_again() -> None:
    lost = 0
    for seed in range(50):
        disk = FakeDisk(seed)
        disk.make_dir("data")
        disk.sync_dir(".")
        synced_file(disk, "data/a", b"old")
        file = disk.open("data/a", write=True)
        file.pwrite(b"new", 0)
        disk.fail("sync", "eio")
        with pytest.raises(StorageError, match="EIO"):
            file.sync()
        file.sync()
        assert disk.content("data/a") == b"new"
        lost += disk.durable_content("data/a") == b"old"
        file.pwrite(b"new", 0)
        file.sync()
        assert disk.durable_content("data/a") == b"new"
    assert 0 < lost < 50


def test_faults_hit_the_operation_they_name(disk: FakeDisk) -> None:
    disk.fail("write", "enospc", nth=2, path="data/*")
    file = disk.open("data/a", create=True)
    file.pwrite(b"1", 0)
    with pytest.raises(DiskFull):
        file.pwrite(b"2", 1)
    file.pwrite(b"3", 1)
    disk.fail("open", "emfile", times=None)
    for _ in range(3):
        with pytest.raises(DiskFull, match="EMFILE"):
            disk.open("data/b", create=True)
    disk.heal()
    disk.open("data/b", create=True)


def test_capacity_is_what_all_files_share(disk: FakeDisk) -> None:
    disk.capacity_bytes = 10
    file = disk.open("data/a", create=True)
    file.pwrite(b"12345678", 0)
    assert disk.free_bytes("data") == 2
    with pytest.raises(DiskFull):
        file.pwrite(b"abcd", 8)
    assert disk.content("data/a") == b"12345678ab"
    file.pwrite(b"xx", 0)
    disk.unlink("data/a")
    assert disk.free_bytes("data") == 10


def test_nothing_works_after_a_crash_until_reopen(disk: FakeDisk) -> None:
    file = disk.open("data/a", create=True)
    disk.crash_at(2)
    file.sync()
    with pytest.raises(SimulatedCrash):
        file.pwrite(b"x", 0)
    with pytest.raises(SimulatedCrash):
        disk.list_dir("data")
    disk.crash("kill")
    assert disk.reopen().list_dir("data") == ["a"]


def test_a_map_shows_later_writes(disk: FakeDisk) -> None:
    synced_file(disk, "data/a", b"....")
    view = disk.map("data/a")
    disk.open("data/a", write=True).pwrite(b"X", 2)
    assert bytes(view) == b"..X."


def test_a_lock_is_held_until_release_or_death(disk: FakeDisk) -> None:
    disk.lock("data/LOCK", "pid 7")
    with pytest.raises(StartRefused, match="pid 7"):
        disk.lock("data/LOCK", "pid 8")
    disk.crash("kill")
    again = disk.reopen()
    lock = again.lock("data/LOCK", "pid 9")
    lock.release()
    again.lock("data/LOCK", "pid 10")
