"""Published snapshots on a failing disk: the newest valid one wins, two are kept."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from tests.storage.fake_disk import FakeDisk, Mode, SimulatedCrash
from topics_server.values.errors import DiskFull, StartRefused
from topics_server.values.storage_types import ReplayStart, ShardSync, SnapshotImage
from topics_server.wal.snapshots.store import PublishedSnapshots

FOLDER = "data/snapshots"
VECTORS = Path(__file__).parents[1] / "vectors" / "snapshots"


def image(start_lsn: int) -> SnapshotImage:
    parts = [(n, b"%d-%d" % (n, start_lsn)) for n in range(5)]
    shards = [ShardSync(1, shard, start_lsn + shard, start_lsn - shard) for shard in range(3)]
    return SnapshotImage(start_lsn, start_lsn + 10, 6, parts, 7, shards)


def disk_with_folder(seed: int = 0) -> FakeDisk:
    disk = FakeDisk(seed)
    disk.make_dir("data")
    disk.sync_dir(".")
    return disk


def files(disk: FakeDisk) -> list[str]:
    return [f"{FOLDER}/{name}" for name in disk.list_dir(FOLDER)]


def test_nothing_is_found_in_an_empty_directory() -> None:
    assert PublishedSnapshots(disk_with_folder(), "data").newest() is None


def test_write_returns_the_start_of_the_older_kept_one() -> None:
    snapshots = PublishedSnapshots(disk_with_folder(), "data")
    assert [snapshots.write(image(lsn)).lsn for lsn in (10, 20, 30)] == [0, 10, 20]


def test_a_shard_may_be_needed_from_further_back() -> None:
    snapshots = PublishedSnapshots(disk_with_folder(), "data")
    snapshots.write(image(10))
    start = snapshots.write(image(20))
    assert start == ReplayStart(10, image(10).shards)
    assert [start.of(1, shard) for shard in range(3)] == [10, 9, 8]
    assert start.of(2, 1) == 10


def test_a_snapshot_of_version_1_knows_nothing_of_the_journal() -> None:
    disk = disk_with_folder()
    disk.make_dir(FOLDER)
    old = (VECTORS / "three_parts.snap").read_bytes()
    disk.open(f"{FOLDER}/{1:020d}.snap", create=True).pwrite(old, 0)
    found = PublishedSnapshots(disk, "data").newest()
    assert found is not None
    assert (len(found.parts), found.run, list(found.shards)) == (3, 0, [])


def test_two_snapshots_are_kept_and_the_newest_wins() -> None:
    disk = disk_with_folder()
    snapshots = PublishedSnapshots(disk, "data")
    for lsn in (10, 20, 30):
        snapshots.write(image(lsn))
    assert len(files(disk)) == 2
    assert PublishedSnapshots(disk, "data").newest() == image(30)


def test_a_corrupt_snapshot_is_removed_and_does_not_count() -> None:
    disk = disk_with_folder()
    snapshots = PublishedSnapshots(disk, "data")
    for lsn in (10, 20):
        snapshots.write(image(lsn))
    disk.corrupt(files(disk)[-1], 70)
    again = PublishedSnapshots(disk, "data")
    assert again.newest() == image(10)
    # If a start ends before it has written its own snapshot, this one stays for the next start.
    assert again.found_damaged
    assert len(files(disk)) == 2
    assert again.write(image(30)).lsn == 10
    assert PublishedSnapshots(disk, "data").newest() == image(30)
    assert len(files(disk)) == 2
    assert again.write(image(40)).lsn == 30


def test_an_older_one_that_was_never_read_does_not_decide_the_trim() -> None:
    disk = disk_with_folder()
    snapshots = PublishedSnapshots(disk, "data")
    for lsn in (10, 20):
        snapshots.write(image(lsn))
    disk.corrupt(files(disk)[0], 70)
    again = PublishedSnapshots(disk, "data")
    assert again.newest() == image(20)
    assert again.write(image(30)).lsn == 20
    assert len(files(disk)) == 2


def test_a_newer_format_is_neither_read_nor_removed() -> None:
    disk = disk_with_folder()
    PublishedSnapshots(disk, "data").write(image(10))
    (path,) = files(disk)
    disk.corrupt(path, 8, 0x01)
    with pytest.raises(StartRefused, match="newer"):
        PublishedSnapshots(disk, "data").newest()
    assert files(disk) == [path]


def test_a_temporary_file_that_cannot_be_opened_is_replaced() -> None:
    """Another user may have left such a file; it must not make a start fail that needs to write a
    snapshot.
    """
    disk = disk_with_folder()
    snapshots = PublishedSnapshots(disk, "data")
    snapshots.write(image(10))
    left = f"{FOLDER}/{2:020d}.snap.tmp"
    disk.put(left, b"half a snapshot")
    disk.forbid(left, "eacces", "stat", "open", "map")
    snapshots.write(image(20))
    assert files(disk) == [f"{FOLDER}/{number:020d}.snap" for number in (1, 2)]
    assert PublishedSnapshots(disk, "data").newest() is not None


def test_a_full_disk_keeps_what_was_published() -> None:
    disk = disk_with_folder()
    snapshots = PublishedSnapshots(disk, "data")
    snapshots.write(image(10))
    disk.fail("write", "enospc")
    with pytest.raises(DiskFull):
        snapshots.write(image(20))
    assert len(files(disk)) == 1
    assert snapshots.write(image(30)).lsn == 10
    assert PublishedSnapshots(disk, "data").newest() == image(30)


@pytest.mark.parametrize("mode", ["kill", "power"])
@pytest.mark.parametrize("seed", range(8))
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_one(mode: Mode, seed: int) -> None:
    for nth in itertools.count(1):
        disk = disk_with_folder(seed)
        snapshots = PublishedSnapshots(disk, "data")
        for lsn in (10, 20):
            snapshots.write(image(lsn))
        disk.crash_at(nth)
        acknowledged = False
        try:
            snapshots.write(image(30))
            acknowledged = True
        except SimulatedCrash:
            pass
        disk.crash(mode)
        disk = disk.reopen()
        found = PublishedSnapshots(disk, "data").newest()
        assert found in ([image(30)] if acknowledged else [image(20), image(30)]), nth
        assert not [name for name in files(disk) if name.endswith(".tmp")]
        # Recovered state stays: a later power loss must not undo it.
        disk.crash("power")
        assert PublishedSnapshots(disk.reopen(), "data").newest() == found
        if acknowledged:
            return


@pytest.mark.parametrize("lower", [10, 20])
def test_an_older_copy_under_a_higher_number_does_not_count(lower: int) -> None:
    """The journal for its replay was trimmed: two snapshots with lower numbers are newer."""
    disk = disk_with_folder()
    snapshots = PublishedSnapshots(disk, "data")
    contents = {}
    for lsn in (10, 20, 30, 40):
        snapshots.write(image(lsn))
        contents[lsn] = disk.content(files(disk)[-1])
    disk.put(files(disk)[-1], contents[lower])
    again = PublishedSnapshots(disk, "data")
    assert again.newest() == image(30)
    assert again.found_damaged
    assert again.write(image(50)).lsn == 30
    assert PublishedSnapshots(disk, "data").newest() == image(50)
    assert len(files(disk)) == 2


def test_of_two_runs_the_later_one_counts_though_its_lsns_are_lower() -> None:
    """After a start without the newest snapshot, lsns that left no frame are assigned again."""
    disk = disk_with_folder()
    snapshots = PublishedSnapshots(disk, "data")
    snapshots.write(image(20))
    kept = disk.content(files(disk)[-1])
    later = msgspec.structs.replace(image(10), run=8)
    PublishedSnapshots(disk, "data").write(image(30))
    disk.put(files(disk)[-1], encoded(later))
    disk.put(files(disk)[0], kept)
    again = PublishedSnapshots(disk, "data")
    assert again.newest() == later
    assert not again.found_damaged


def encoded(snapshot: SnapshotImage) -> bytes:
    """The file of a snapshot."""
    disk = disk_with_folder()
    PublishedSnapshots(disk, "data").write(snapshot)
    return disk.content(files(disk)[0])
