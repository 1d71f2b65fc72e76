"""The data directory: which process may use it, its format, and how the last run ended."""

from __future__ import annotations

import re

import pytest

from tests.storage.fake_disk import FakeDisk, SimulatedCrash
from topics_server.values.errors import StartRefused
from topics_server.wal.directory import Directory, FormatMark, read_boot_id, read_format
from topics_server.wal.format.checked_json import encode_checked


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


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_takes_no_parent_of_a_new_directory(seed: int) -> None:
    disk = FakeDisk(seed)
    directory = Directory.open(disk, "a/b/data", boot_id="b")
    directory.note_wal_set(1, 2, 1)
    disk.crash("power")
    assert Directory.open(disk.reopen(), "a/b/data", boot_id="b").wal_sets == [(1, 2, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_nor_of_one_that_a_killed_start_has_made(seed: int) -> None:
    disk = FakeDisk(seed)
    # One start makes a/b/data and dies before its first sync; the next start finds the directory.
    for folder in ("a", "a/b", "a/b/data"):
        disk.make_dir(folder)
    Directory.open(disk, "a/b/data", boot_id="b").note_wal_set(1, 2, 1)
    disk.crash("power")
    assert Directory.open(disk.reopen(), "a/b/data", boot_id="b").wal_sets == [(1, 2, 1)]


def test_a_lock_file_that_was_removed_lets_no_second_server_in(disk: FakeDisk) -> None:
    first = opened(disk)
    disk.unlink("data/LOCK")
    with pytest.raises(StartRefused, match="in use by another server"):
        opened(disk)
    first.close()
    opened(disk).close()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"format": 3, "unheard": []}', "has format 3, this server knows up to 2"),
        (b'{"format": 2, "run": 1}', "its checksum does not match"),
        (encode_checked(FormatMark(store_id="../../..")), "store_id is not 32 hexadecimal digits"),
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


def test_no_byte_of_the_format_can_change_unseen(disk: FakeDisk) -> None:
    directory = opened(disk)
    directory.note_wal_set(1, 2, 1, has_marks=True)
    directory.note_boot()
    directory.close()
    good = disk.content("data/FORMAT")
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
            disk.open("data/FORMAT", create=True).pwrite(bad, 0)
            with pytest.raises(StartRefused, match=r"data.*: (cannot be read|this data directory)"):
                read_format(disk, "data")
    disk.open("data/FORMAT", create=True).pwrite(good, 0)
    assert opened(disk).marked_sets == {1}


def test_the_clean_stop_mark_lives_until_the_next_run_begins(disk: FakeDisk) -> None:
    directory = opened(disk)
    directory.note_clean_stop(7)
    directory.close()
    disk.crash("power")
    disk = disk.reopen()
    directory = opened(disk)
    assert directory.was_clean
    assert directory.same_boot
    assert directory.mark.final_lsn == 7
    directory.begin()
    assert directory.mark.final_lsn == 0
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


def test_a_new_store_has_an_id_at_once_and_keeps_it(disk: FakeDisk) -> None:
    first = opened(disk)
    store_id = first.store_id
    assert re.fullmatch("[0-9a-f]{32}", store_id)
    assert not first.is_adopted
    disk.crash("power")
    disk = disk.reopen()
    assert opened(disk).store_id == store_id
    other = FakeDisk(1)
    other.make_dir("data")
    assert opened(other).store_id != store_id


def test_every_start_that_writes_has_a_number_of_its_own(disk: FakeDisk) -> None:
    for run in (1, 2, 3):
        directory = opened(disk)
        assert directory.run == run - 1
        directory.begin()
        assert directory.run == run
        disk.crash("power")
        disk = disk.reopen()
    assert opened(disk).run == 3


def test_a_store_of_version_1_gets_an_id_with_its_first_write(disk: FakeDisk) -> None:
    text = (
        b'{"format": 1, "boot_id": "boot-1", "clean_stop": true,'
        b' "wal_sets": [{"wal_set": 1, "shard_count": 4, "first_lsn": 1}]}'
    )
    disk.make_dir("data")
    disk.open("data/FORMAT", create=True).pwrite(text, 0)
    directory = opened(disk)
    assert disk.content("data/FORMAT") == text
    assert directory.is_adopted
    assert directory.was_clean
    assert directory.same_boot
    assert directory.wal_sets == [(1, 4, 1)]
    assert not directory.marked_sets
    directory.begin()
    directory.close()
    again = opened(disk)
    assert not again.is_adopted
    assert (again.store_id, again.run) == (directory.store_id, 1)
    mark = read_format(disk, "data")
    assert mark is not None
    assert mark.format == 2


def test_which_wal_sets_have_end_marks_is_stored(disk: FakeDisk) -> None:
    directory = opened(disk)
    directory.note_wal_set(1, 2, 1)
    directory.note_wal_set(2, 3, 9, has_marks=True)
    directory.close()
    assert opened(disk).marked_sets == {2}


def test_after_a_failed_sync_the_boot_is_another_one(disk: FakeDisk) -> None:
    directory = opened(disk)
    directory.note_wal_set(1, 2, 1)
    directory.note_boot()
    directory.forget_boot()
    # Neither a later publication nor a stop undoes that.
    directory.note_boot()
    directory.note_clean_stop(7)
    directory.close()
    again = opened(disk)
    assert not again.same_boot
    assert not again.was_clean
    assert not again.is_new


def test_a_boot_that_cannot_be_cleared_is_said_and_stops_nobody(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    directory = opened(disk)
    directory.note_boot()
    disk.fail("open", "eio", path="data/FORMAT.tmp")
    directory.forget_boot()
    assert "boot id cannot be cleared" in caplog.text
    directory.note_clean_stop(7)
    directory.close()
    assert not opened(disk).was_clean
