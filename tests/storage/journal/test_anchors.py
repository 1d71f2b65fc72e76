"""Journal files that are missing, emptied, shortened or replaced: refused by name, never replayed.

Each case is a small journal that ended in one of three ways, and one change of its files. With the
original file back, the journal opens with everything that was acknowledged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import pytest

from tests.storage.fake_disk import FakeDisk
from tests.storage.journal.journal_rig import WAL, Life, Promises, append, new_disk
from tests.storage.journal.test_replay import groups_of
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.storage_types import ReplayStart, ShardSync
from topics_server.wal.format.end_marks import FILE_BYTES, SLOT_BYTES, SLOT_DISTANCE
from topics_server.wal.journal.end_mark_file import read_end_mark

MARK: Final = f"{WAL}/000001-00.end"


def path_of(number: int) -> str:
    return f"{WAL}/000001-00-{number:010d}.wal"


def lived(disk: FakeDisk, count: int, *, sync: bool, size: int = 100) -> Life:
    """A life that wrote `count` groups of one entry into its only shard."""
    life = Life(disk, shards=1, turns=lambda: 1)
    life.recover()
    life.settle()
    for seq in range(1, count + 1):
        life.submit(append(0, seq, b"b" * size), sync=sync)
        life.turn(3)
    life.settle()
    return life


def ended(life: Life, how: str) -> FakeDisk:
    """The disk after a clean stop, a kill, or a stop and a new boot."""
    if how == "kill":
        return life.die("kill")
    life.close()
    life.disk.crash("power" if how == "power" else "kill")
    return life.disk.reopen()


def copy_of(disk: FakeDisk) -> FakeDisk:
    """Another disk with the same content."""
    return copy.deepcopy(disk)


def opens(disk: FakeDisk, promises: Promises) -> set[int]:
    """Recover on the disk itself, then leave it as after a kill."""
    life = Life(disk, promises, shards=1)
    try:
        return set(life.recover("kill"))
    finally:
        life.end()


def used_files(disk: FakeDisk) -> list[str]:
    """Journal files up to the one that the end mark names."""
    mark = read_end_mark(disk, WAL, 1, 0)
    names = [f"{WAL}/{name}" for name in disk.list_dir(WAL) if name.endswith(".wal")]
    return [name for name in names if name <= path_of(mark.number)]


def remove(disk: FakeDisk, path: str) -> None:
    disk.unlink(path)


def empty(disk: FakeDisk, path: str) -> None:
    disk.open(path, write=True).truncate(0)


def zero(disk: FakeDisk, path: str) -> None:
    size = len(disk.content(path))
    disk.open(path, write=True).pwrite(bytes(size), 0)


def keep_header(disk: FakeDisk, path: str) -> None:
    disk.open(path, write=True).truncate(64)


def halve(disk: FakeDisk, path: str) -> None:
    disk.open(path, write=True).truncate(groups_of(disk, path)[-1][1] // 2)


def cut_last_group(disk: FakeDisk, path: str) -> None:
    """The last group with entries: a mark group after it goes too."""
    groups = groups_of(disk, path)
    position = max(start for start, end in groups if end - start > 32)
    disk.open(path, write=True).pwrite(bytes(groups[-1][1] - position), position)


DAMAGES: Final = [remove, empty, zero, keep_header, halve, cut_last_group]


def put_back(disk: FakeDisk, path: str, content: bytes) -> None:
    file = disk.open(path, create=True)
    file.pwrite(content, 0)
    file.sync()
    disk.sync_dir(WAL)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("how", ["clean", "kill", "power"])
@pytest.mark.parametrize("count", [4, 14])
def test_a_used_file_that_is_not_what_it_was_is_refused_by_name_and_healed_by_the_original(
    damage: Callable[[FakeDisk, str], None], how: str, count: int
) -> None:
    size = 100 if count == 4 else 3_000
    life = lived(new_disk(1), count, sync=True, size=size)
    promises, disk = life.promises, ended(life, how)
    paths = used_files(disk)
    assert len(paths) >= (1 if count == 4 else 3)
    for path in paths:
        before = {f"{WAL}/{name}": disk.content(f"{WAL}/{name}") for name in disk.list_dir(WAL)}
        damage(disk, path)
        names = disk.list_dir(WAL)
        with pytest.raises((Corrupt, StartRefused)) as refused:
            opens(disk, promises)
        assert path.rpartition("/")[2] in str(refused.value)
        assert disk.list_dir(WAL) == names, "nothing is removed by a start that is refused"
        put_back(disk, path, before[path])
        assert {p: disk.content(p) for p in before} == before
    assert opens(disk, promises) == set(range(1, count + 1))


@pytest.mark.parametrize("damage", [empty, zero, keep_header, halve, cut_last_group])
def test_what_was_only_written_binds_within_the_boot(
    damage: Callable[[FakeDisk, str], None],
) -> None:
    """Class disk: nothing was synced, but the process was merely killed."""
    life = lived(new_disk(1), 4, sync=False)
    promises, disk = life.promises, life.die("kill")
    mark = read_end_mark(disk, WAL, 1, 0)
    assert mark.written_end > mark.synced_end
    (path,) = used_files(disk)
    before = disk.content(path)
    damage(disk, path)
    with pytest.raises(Corrupt, match=path):
        opens(disk, promises)
    put_back(disk, path, before)
    assert opens(disk, promises) == {1, 2, 3, 4}


def test_a_flipped_byte_of_what_was_only_written_is_refused_within_the_boot() -> None:
    life = lived(new_disk(1), 4, sync=False)
    promises, disk = life.promises, life.die("kill")
    (path,) = used_files(disk)
    mark = read_end_mark(disk, WAL, 1, 0)
    for offset in range(64, mark.written_end, 7):
        disk.corrupt(path, offset)
        with pytest.raises(Corrupt, match=path):
            opens(disk, promises)
        disk.corrupt(path, offset)
    assert opens(disk, promises) == {1, 2, 3, 4}


def test_what_was_only_written_binds_no_longer_after_a_power_loss() -> None:
    for seed in range(60):
        life = lived(new_disk(seed), 4, sync=False)
        promises, disk = life.promises, life.die("power")
        found = Life(disk, promises, shards=1)
        assert set(found.recover("power")) <= {1, 2, 3, 4}
        # The recovered entries are durable now, and the mark says so in every later boot.
        again = Life(found.die("power"), promises, shards=1)
        again.recover("power")
        again.close()


@pytest.mark.parametrize("damage", [empty, zero, keep_header, halve, cut_last_group])
def test_what_something_else_relies_on_binds_after_a_power_loss(
    damage: Callable[[FakeDisk, str], None],
) -> None:
    """Before a snapshot, a segment or delete flags follow, the end mark on disk is renewed."""
    for seed in range(12):
        life = lived(new_disk(seed), 4, sync=True)
        life.loop.run_until_complete(life.journal.hold_end(0))
        promises, disk = life.promises, life.die("power")
        (path,) = used_files(disk)
        before = disk.content(path)
        damage(disk, path)
        with pytest.raises(Corrupt, match=path):
            opens(disk, promises)
        put_back(disk, path, before)
        assert opens(disk, promises) == {1, 2, 3, 4}


def test_a_bad_first_group_names_its_own_file_and_not_the_trimmed_one_before_it() -> None:
    life = lived(new_disk(2), 14, sync=True, size=3_000)
    promises, path = life.promises, life.journal.shards[0].tail.path
    first = groups_of(life.disk, path)[0]
    promises.start_lsn = 14
    life.journal.trim(ReplayStart(14))
    life.settle()
    disk = life.die("kill")
    assert used_files(disk) == [path]
    disk.corrupt(path, first[0] + 40)
    with pytest.raises(Corrupt, match=path):
        opens(disk, promises)
    disk.corrupt(path, first[0] + 40)
    assert 14 in opens(disk, promises)


@pytest.mark.parametrize("count", [4, 14])
def test_an_older_copy_of_a_file_is_refused(count: int) -> None:
    size = 100 if count == 4 else 3_000
    disk = new_disk(1)
    life = Life(disk, shards=1, turns=lambda: 1)
    life.recover()
    life.settle()
    copies: list[dict[str, bytes]] = []
    for seq in range(1, count + 1):
        copies.append({name: disk.content(f"{WAL}/{name}") for name in disk.list_dir(WAL)})
        life.submit(append(0, seq, b"b" * size), sync=True)
        life.settle()
    promises, disk = life.promises, ended(life, "clean")
    used = [path.rpartition("/")[2] for path in used_files(disk)]
    refused = 0
    for older in copies:
        for name in (*used, MARK.rpartition("/")[2]):
            now = disk.content(f"{WAL}/{name}")
            if name not in older or older[name].rstrip(b"\0") == now.rstrip(b"\0"):
                continue
            other = copy_of(disk)
            put_back(other, f"{WAL}/{name}", older[name])
            try:
                found = opens(other, Promises.following(promises))
            except (Corrupt, StartRefused):
                refused += 1
            else:
                # A mark of the same file that is behind the file: nothing is missing.
                assert name.endswith(".end")
                assert found == set(range(1, count + 1))
    assert refused >= count
    assert opens(disk, promises) == set(range(1, count + 1))


def test_files_and_mark_of_an_earlier_run_are_refused_together() -> None:
    """Files and mark are valid together: only `FORMAT` names a later run."""
    life = lived(new_disk(1), 3, sync=True)
    promises, disk = life.promises, ended(life, "clean")
    kept = {name: disk.content(f"{WAL}/{name}") for name in disk.list_dir(WAL)}
    second = Life(disk, promises, shards=1, turns=lambda: 1)
    second.recover("kill")
    second.submit(append(0, 9), sync=True)
    second.settle()
    disk = ended(second, "clean")
    for name in disk.list_dir(WAL):
        disk.unlink(f"{WAL}/{name}")
    for name, content in kept.items():
        put_back(disk, f"{WAL}/{name}", content)
    with pytest.raises(Corrupt, match=r"000001-00\.end: is an older copy: it is of run 1"):
        opens(disk, promises)


def test_files_and_mark_that_the_snapshot_knows_better_are_refused_together() -> None:
    """The files are a copy of the same run, but the snapshot records how far the shard was
    synced.
    """
    disk = new_disk(1)
    life = lived(disk, 3, sync=True)
    kept = {name: disk.content(f"{WAL}/{name}") for name in disk.list_dir(WAL)}
    life.submit(append(0, 9), sync=True)
    life.settle()
    promises, disk = life.promises, ended(life, "clean")
    for name, content in kept.items():
        put_back(disk, f"{WAL}/{name}", content)
    promises.noted.shards = [ShardSync(1, 0, 4, 2)]
    with pytest.raises(Corrupt, match="synced up to lsn 4, but its entries end at lsn 3"):
        opens(disk, promises)


def test_an_older_format_is_refused() -> None:
    life = lived(new_disk(1), 3, sync=True)
    promises, disk = life.promises, ended(life, "clean")
    promises.noted.run = 0
    with pytest.raises(Corrupt, match=r"data/FORMAT: is an older copy: it counts 0 runs"):
        opens(disk, promises)


@pytest.mark.parametrize("how", ["clean", "kill", "power"])
def test_a_mark_that_is_gone_or_fails_its_check_is_refused_by_name(how: str) -> None:
    life = lived(new_disk(1), 3, sync=True)
    promises, disk = life.promises, ended(life, how)
    before = disk.content(MARK)
    disk.unlink(MARK)
    with pytest.raises(Corrupt, match=r"000001-00\.end: the end mark of this shard is missing"):
        opens(disk, promises)
    for damaged in (b"", before[:50], bytes(FILE_BYTES)):
        put_back(disk, MARK, damaged)
        with pytest.raises(Corrupt, match=r"000001-00\.end: the end mark of this shard fails"):
            opens(disk, promises)
    put_back(disk, MARK, before)
    assert opens(disk, promises) == {1, 2, 3}


def test_a_mark_that_cannot_be_read_is_an_error_and_no_absence() -> None:
    life = lived(new_disk(1), 3, sync=True)
    promises, disk = life.promises, ended(life, "clean")
    disk.fail("open", "eio", path=MARK)
    with pytest.raises(StorageError, match="EIO"):
        opens(disk, promises)


@pytest.mark.parametrize("slot", range(4))
def test_any_flipped_byte_of_a_mark_is_refused_or_costs_nothing(slot: int) -> None:
    for offset in range(0, SLOT_BYTES, 3):
        life = lived(new_disk(1), 3, sync=True)
        promises, disk = life.promises, ended(life, "clean")
        if slot * SLOT_DISTANCE < len(disk.content(MARK)):
            disk.corrupt(MARK, slot * SLOT_DISTANCE + offset)
        assert opens(disk, promises) == {1, 2, 3}


def test_a_shard_whose_files_are_all_gone_names_the_one_that_matters() -> None:
    life = lived(new_disk(1), 3, sync=True)
    promises, disk = life.promises, ended(life, "clean")
    (path,) = used_files(disk)
    for name in disk.list_dir(WAL):
        if name.endswith(".wal"):
            disk.unlink(f"{WAL}/{name}")
    with pytest.raises(Corrupt, match=path):
        opens(disk, promises)


def test_a_file_that_was_full_is_missed_before_the_next_one_has_a_group() -> None:
    """Only the header of the file in use names the full file."""
    for seed in range(30):
        disk = new_disk(seed)
        life = lived(disk, 5, sync=True, size=3_000)
        tail = life.journal.shards[0].tail
        full = tail.path
        tail._rotate()
        promises, disk = life.promises, life.die(disk.rng.choice(("kill", "power")))
        assert not disk.content(tail.path)[64:].strip(b"\0")
        before = disk.content(full)
        disk.unlink(full)
        with pytest.raises(StartRefused, match="journal file 1 of wal set 1, shard 0 is missing"):
            opens(disk, promises)
        put_back(disk, full, before)
        assert opens(disk, promises) == {1, 2, 3, 4, 5}


def test_a_shard_without_an_entry_survives_starts_that_end_early() -> None:
    """The file that the mark names stays until the mark names another one."""
    for seed in range(40):
        disk, promises = new_disk(seed), Promises()
        first = Life(disk, promises, shards=1)
        first.recover()
        first.end()
        for _ in range(4):
            disk.crash(disk.rng.choice(("kill", "power")))
            disk = disk.reopen()
            disk.crash_at(disk.rng.randint(1, 30))
            life = Life(disk, promises, shards=1)
            try:
                life.recover()
            except BaseException as error:
                assert disk.crashed, repr(error)  # noqa: PT017 -- it is the simulated one
            life.end()
        disk.crash("kill")
        assert opens(disk.reopen(), promises) == set()


def test_room_that_was_given_back_is_no_damage() -> None:
    """On a full disk, which takes no zeros, the file is cut: it is shorter than it declared."""
    disk = new_disk(8)
    life = lived(disk, 5, sync=True, size=3_000)
    life.journal.shards[0].tail._rotate()
    disk.fail("write", "enospc", path=f"{WAL}/*.wal", times=2)
    life.submit(append(0, 6))
    life.settle()
    promises = life.promises
    assert promises.failed == {6}
    path = life.journal.shards[0].tail.path
    disk = life.die("kill")
    disk.open(path, write=True).truncate(64)
    assert opens(disk, promises) == {1, 2, 3, 4, 5}


def test_a_file_shorter_than_its_header_declares_is_refused() -> None:
    """After a power cut the mark may be old, but the header's size was synced with it."""
    disk = new_disk(3)
    life = lived(disk, 5, sync=True, size=3_000)
    tail = life.journal.shards[0].tail
    tail._rotate()
    life.submit(append(0, 6, b"b" * 300), sync=True)
    life.settle()
    promises, path = life.promises, tail.path
    old = disk.durable_content(MARK)
    disk = ended(life, "power")
    put_back(disk, MARK, old)
    disk.open(path, write=True).truncate(100)
    with pytest.raises(Corrupt, match="it has 100 bytes, and had 1024 when its header was synced"):
        opens(disk, promises)
