"""The data directory: who may use it, its format, how the last run ended."""

from __future__ import annotations

import pytest

from tests.storage.fake_disk import FakeDisk, SimulatedCrash
from topics_server.errors import StartRefused
from topics_server.wal.directory import Directory, read_boot_id, read_format


def opened(disk: FakeDisk, boot_id: str = "boot-1") -> Directory:
    return Directory.open(disk, "data", boot_id=boot_id)


def test_a_new_directory_is_made_with_its_folders(disk: FakeDisk) -> None:
    directory = Directory.open(disk, "data/deeper/still", boot_id="b")
    assert disk.list_dir("data/deeper/still") == ["FORMAT", "LOCK", "segments", "snapshots", "wal"]
    assert directory.is_new
    assert not directory.was_clean
    assert not directory.same_boot
    assert directory.wal_dir == "data/deeper/still/wal"


def test_two_servers_cannot_share_a_directory(disk: FakeDisk) -> None:
    first = opened(disk)
    with pytest.raises(StartRefused, match=r"in use by another server \(pid"):
        opened(disk)
    first.close()
    opened(disk).close()


def test_a_foreign_directory_is_refused_and_left_as_it_was(disk: FakeDisk) -> None:
    disk.open("data/holiday.jpg", create=True)
    with pytest.raises(StartRefused, match=r"not a data directory.*holiday"):
        opened(disk)
    assert disk.list_dir("data") == ["holiday.jpg"]


def test_leftovers_of_a_first_start_that_was_cut_short_are_not_foreign(disk: FakeDisk) -> None:
    disk.open("data/LOCK", create=True)
    disk.open("data/FORMAT.tmp", create=True)
    disk.make_dir("data/lost+found")
    opened(disk)


def test_a_first_start_cut_short_anywhere_can_be_repeated() -> None:
    for seed in range(40):
        disk = FakeDisk(seed)
        disk.make_dir("data")
        disk.sync_dir(".")
        disk.crash_at(1 + seed % 12)
        try:
            opened(disk)
        except SimulatedCrash:
            pass
        disk.crash("power")
        directory = opened(disk.reopen())
        assert not directory.was_clean


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"format": 2, "unheard": []}', "has format 2, this server knows up to 1"),
        (b"", "cannot be read"),
        (b'{"format": 1, "boot_id": 3}', "cannot be read"),
        (b"{}", "cannot be read"),
    ],
)
def test_an_unreadable_or_newer_format_is_refused(
    disk: FakeDisk, text: bytes, sentence: str
) -> None:
    disk.open("data/FORMAT", create=True).pwrite(text, 0)
    with pytest.raises(StartRefused, match=sentence):
        opened(disk)
    disk.lock("data/LOCK", "not held any more").release()


def test_the_clean_stop_mark_lives_until_the_next_run_begins(disk: FakeDisk) -> None:
    directory = opened(disk)
    directory.note_clean_stop()
    directory.close()
    disk.crash("power")
    disk = disk.reopen()
    directory = opened(disk)
    assert directory.was_clean
    assert directory.same_boot
    directory.begin()
    disk.crash("power")
    directory = opened(disk.reopen())
    assert not directory.was_clean


def test_another_boot_is_told_from_the_same_one(disk: FakeDisk) -> None:
    directory = opened(disk)
    directory.note_boot()
    directory.close()
    assert opened(disk).same_boot
    disk.crash("kill")
    disk = disk.reopen()
    assert not opened(disk, "boot-2").same_boot
    disk.crash("kill")
    disk = disk.reopen()
    unknown = opened(disk, "")
    assert not unknown.same_boot


def test_the_wal_set_stays_while_the_shard_count_does(disk: FakeDisk) -> None:
    directory = opened(disk)
    assert directory.wal_set_for(4) == (1, True)
    directory.note_wal_set(1, 4, 1)
    directory.note_wal_set(1, 4, 7)
    assert directory.wal_sets == [(1, 4, 1)]
    assert directory.wal_set_for(4) == (1, False)
    assert directory.wal_set_for(2) == (2, True)
    directory.note_wal_set(2, 2, 50, oldest_start_lsn=20)
    assert directory.wal_sets == [(1, 4, 1), (2, 2, 50)]
    directory.note_wal_set(3, 8, 90, oldest_start_lsn=60)
    assert directory.wal_sets == [(2, 2, 50), (3, 8, 90)]
    mark = read_format(disk, "data")
    assert mark is not None
    assert [s.wal_set for s in mark.wal_sets] == [2, 3]


def test_the_boot_id_is_empty_where_the_kernel_has_none(disk: FakeDisk) -> None:
    assert read_boot_id(disk) == ""
