"""The real file system: a call transfers all bytes or raises an error of our own; and a journal
with real threads.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.storage.journal.journal_rig import append
from topics_server.values.errors import DiskFull, NotThere, StartRefused, StorageError, SyncFailed
from topics_server.values.storage_types import ReplayStart, ShardProgress
from topics_server.wal.directory import Directory, read_boot_id
from topics_server.wal.fs import OsFs, storage_error
from topics_server.wal.journal.journal import Journal, thread_workers
from topics_server.wal.journal.replay import JournalReplay
from topics_server.wal.journal.wal_file import Sizes


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


def test_bytes_come_back_and_reads_stop_at_the_end(root: str) -> None:
    fs = OsFs()
    file = fs.open(f"{root}/a", create=True)
    file.pwrite(b"hello", 0)
    file.pwritev([b"-", b"", bytearray(b"wor"), memoryview(b"ld")], 5)
    file.sync()
    assert file.pread(100, 3) == b"lo-world"
    assert file.pread(3, 50) == b""
    assert file.size() == 11
    file.truncate(4)
    assert file.pread(100, 0) == b"hell"
    file.close()
    file.close()
    assert os.stat(f"{root}/a").st_mode & 0o777 == 0o600


def test_bytes_in_memory_are_read_without_a_wait(root: str) -> None:
    file = OsFs().open(f"{root}/a", create=True)
    file.pwrite(b"hello", 0)
    file.sync()
    found = file.pread_now(3, 1)
    if found is None:
        pytest.skip("the file system of the temporary directory cannot read without a wait")
    assert found == b"ell"
    assert file.pread_now(5, 1) is None, "fewer bytes are there"
    assert file.pread_now(1, 9) is None
    file.close()
    assert file.pread_now(3, 1) is None


def test_a_read_that_would_wait_reads_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsFs().open(f"{root}/a", create=True)
    file.pwrite(b"hello", 0)

    def wait(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "preadv", wait)
    assert file.pread_now(3, 1) is None
    monkeypatch.delattr(os, "preadv")
    assert file.pread_now(3, 1) is None, "a system without this call"
    assert file.pread(3, 1) == b"ell"
    file.close()


def test_short_writes_are_continued(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def short_pwrite(fd: int, data: memoryview, offset: int) -> int:
        return pwrite(fd, memoryview(data)[:3], offset)

    def short_pwritev(fd: int, buffers: Sequence[bytes], offset: int) -> int:
        return pwrite(fd, b"".join(buffers)[:4], offset)

    monkeypatch.setattr(os, "pwrite", short_pwrite)
    monkeypatch.setattr(os, "pwritev", short_pwritev)
    file = OsFs().open(f"{root}/a", create=True)
    file.pwrite(b"0123456789", 0)
    file.pwritev([b"ab", b"cdef", b"", b"ghijklmnop"], 10)
    assert file.pread(100, 0) == b"0123456789abcdefghijklmnop"
    file.close()


def test_more_buffers_than_one_call_takes_are_written(root: str) -> None:
    file = OsFs().open(f"{root}/a", create=True)
    pieces = [bytes([number % 251]) for number in range(3000)]
    file.pwritev(pieces, 7)
    assert file.pread(5000, 7) == b"".join(pieces)
    file.close()


def test_a_disk_that_takes_nothing_more_is_full(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsFs().open(f"{root}/a", create=True)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(DiskFull):
        file.pwrite(b"x", 0)
    file.close()


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EFBIG", "EMFILE", "ENFILE"])
def test_full_is_told_from_broken(code: str) -> None:
    error = OSError(getattr(errno, code), "reason")
    assert isinstance(storage_error(error, "p"), DiskFull)
    assert not isinstance(storage_error(OSError(errno.EACCES, "no"), "p"), DiskFull)
    assert not isinstance(storage_error(OSError(errno.EIO, "io"), "p"), DiskFull)
    assert isinstance(storage_error(OSError(errno.EIO, "io"), "p", writing=True), DiskFull)


def test_a_sync_that_finds_the_disk_full_is_a_failed_sync(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "late")

    file = OsFs().open(f"{root}/a", create=True)
    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(StorageError, match="late") as caught:
        file.sync()
    assert not isinstance(caught.value, DiskFull)
    file.close()


def test_errors_name_the_file(root: str) -> None:
    fs = OsFs()
    for call in (
        lambda: fs.open(f"{root}/none"),
        lambda: fs.unlink(f"{root}/none"),
        lambda: fs.file_size(f"{root}/none"),
        lambda: fs.map(f"{root}/none"),
        lambda: fs.sync_dir(f"{root}/none"),
        lambda: fs.rename(f"{root}/none", f"{root}/none2"),
        lambda: fs.free_bytes(f"{root}/none"),
        lambda: fs.total_bytes(f"{root}/none"),
        lambda: fs.open(f"{root}/none/deep", create=True),
    ):
        with pytest.raises(StorageError, match="none"):
            call()
    fs.unlink(f"{root}/none", missing_ok=True)
    fs.remove_dir(f"{root}/none")
    assert fs.list_dir(f"{root}/none") == []


def test_names(root: str) -> None:
    fs = OsFs()
    with pytest.raises(NotThere):
        fs.make_dir(f"{root}/x/y")
    fs.make_dir(f"{root}/x")
    fs.make_dir(f"{root}/x/y")
    fs.make_dir(f"{root}/x/y")
    os.symlink("nowhere", f"{root}/dangling")
    with pytest.raises(StorageError, match="a link to a path that does not exist"):
        fs.make_dir(f"{root}/dangling")
    os.unlink(f"{root}/dangling")
    fs.open(f"{root}/x/b", create=True).close()
    fs.open(f"{root}/x/a", create=True).close()
    fs.rename(f"{root}/x/b", f"{root}/x/a")
    fs.sync_dir(f"{root}/x")
    assert fs.list_dir(f"{root}/x") == ["a", "y"]
    assert fs.exists(f"{root}/x/a")
    with pytest.raises(StorageError):
        fs.remove_dir(f"{root}/x")
    with pytest.raises(StorageError):
        fs.make_dir(f"{root}/x/a")
    fs.remove_dir(f"{root}/x/y")
    assert 0 < fs.free_bytes(root) <= fs.total_bytes(root)


def test_only_absence_is_absence(root: str) -> None:
    fs = OsFs()
    fs.open(f"{root}/file", create=True).close()
    os.symlink("loop", f"{root}/loop")
    assert fs.identity(root) is not None
    for absent in (f"{root}/none", f"{root}/file/below"):
        assert not fs.exists(absent)
        assert fs.identity(absent) is None
        for call in (fs.open, fs.file_size, fs.map, fs.unlink, fs.sync_dir):
            with pytest.raises(NotThere):
                call(absent)
    for unreadable in (f"{root}/loop", f"{root}/{'x' * 300}"):
        with pytest.raises(StorageError) as refused:
            fs.exists(unreadable)
        assert not isinstance(refused.value, NotThere)


def test_a_move_takes_a_file_or_a_folder_elsewhere_and_replaces_nothing(root: str) -> None:
    fs = OsFs()
    for folder in ("a", "a/b", "c"):
        fs.make_dir(f"{root}/{folder}")
    fs.open(f"{root}/a/b/file", create=True).close()
    fs.move(f"{root}/a/b", f"{root}/c/b")
    assert fs.list_dir(f"{root}/c/b") == ["file"]
    with pytest.raises(StorageError, match="exists"):
        fs.move(f"{root}/a", f"{root}/c/b")
    with pytest.raises(NotThere):
        fs.move(f"{root}/none", f"{root}/c/none")


def test_a_path_through_a_link_has_the_identity_of_what_it_leads_to(root: str) -> None:
    fs = OsFs()
    fs.make_dir(f"{root}/a")
    os.symlink("a", f"{root}/link")
    assert fs.identity(f"{root}/link") == fs.identity(f"{root}/a")
    assert fs.real_path(f"{root}/link/new") == fs.real_path(f"{root}/a") + "/new"


def test_a_directory_that_cannot_be_opened_is_no_failed_sync(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        with pytest.raises(DiskFull):
            OsFs().sync_dir(root)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(SyncFailed):
        OsFs().sync_dir(root)


def test_a_directory_that_is_held_is_synced_without_a_descriptor(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    fs = OsFs()
    held = fs.hold_dir(root)
    synced: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        patch.setattr(os, "fsync", synced.append)
        fs.sync_dir(root)
        assert len(synced) == 1
        held.release()
        held.release()
        with pytest.raises(DiskFull):
            fs.sync_dir(root)
    fs.hold_dir(root).release()


def test_a_directory_is_locked_once(root: str) -> None:
    fs = OsFs()
    lock = fs.lock_dir(root)
    assert lock is not None
    with pytest.raises(StartRefused, match="in use by another server"):
        fs.lock_dir(root)
    lock.release()
    again = fs.lock_dir(root)
    assert again is not None
    again.release()


def test_a_lock_that_ends_soon_is_waited_for(root: str) -> None:
    """A helper that a killed server was starting holds the server's lock until its exec."""
    fs = OsFs()
    lock = fs.lock(f"{root}/LOCK", "pid 1")
    soon = threading.Timer(0.1, lock.release)
    soon.start()
    fs.lock(f"{root}/LOCK", "pid 2").release()
    soon.join()


def test_a_lock_file_that_was_removed_lets_no_second_server_in(root: str) -> None:
    fs = OsFs()
    first = Directory.open(fs, f"{root}/data", boot_id="b")
    os.unlink(f"{root}/data/LOCK")
    with pytest.raises(StartRefused, match="in use by another server"):
        Directory.open(fs, f"{root}/data", boot_id="b")
    # The refused start has released its locks.
    first.close()
    Directory.open(fs, f"{root}/data", boot_id="b").close()


def test_a_map_shows_later_writes_and_cannot_be_written(root: str) -> None:
    fs = OsFs()
    file = fs.open(f"{root}/a", create=True)
    assert bytes(fs.map(f"{root}/a")) == b""
    file.pwrite(b"....", 0)
    view = fs.map(f"{root}/a")
    file.pwrite(b"X", 2)
    assert bytes(view) == b"..X."
    assert view.readonly
    file.close()


def test_a_lock_names_its_holder(root: str) -> None:
    fs = OsFs()
    lock = fs.lock(f"{root}/LOCK", "pid 42")
    with pytest.raises(StartRefused, match="pid 42"):
        fs.lock(f"{root}/LOCK", "pid 43")
    lock.release()
    lock.release()
    fs.lock(f"{root}/LOCK", "pid 43").release()


def test_the_boot_has_an_id_on_linux() -> None:
    assert len(read_boot_id(OsFs())) in (0, 36)


async def live(root: str, start: int, count: int) -> list[int]:
    """Open, recover, append with real threads, stop; return the recovered lsns."""
    fs = OsFs()
    directory = Directory.open(fs, f"{root}/data", boot_id="b")
    replay = JournalReplay(fs, directory.wal_dir, wal_sets=directory.wal_sets)
    found = [lsn for lsn, _ in replay.entries(0)]
    loop = asyncio.get_running_loop()
    wal_set, _ = directory.wal_set_for(2)
    journal = Journal.create(
        fs,
        directory.wal_dir,
        replay,
        wal_set=wal_set,
        shard_count=2,
        loop=loop,
        workers=thread_workers(loop),
        sync_interval_ms=5,
        sizes=Sizes(262_144, 65_536, 16_384),
    )
    directory.note_wal_set(wal_set, 2, start)
    synced = [0, 0]

    def on_progress(progress: ShardProgress) -> None:
        assert progress.failed_from is None
        synced[progress.shard] = progress.synced_lsn

    journal.listen(on_progress)
    for lsn in range(start, start + count):
        body = b"x" * (lsn * 37 % 5000)
        journal.submit(lsn, append(lsn % 2, lsn, body), shard=lsn % 2, urgent=False, sync=True)
        if lsn % 3 == 0:
            await asyncio.sleep(0)
    await journal.sync_all()
    assert max(synced) == start + count - 1
    journal.trim(ReplayStart(1))
    await journal.close()
    directory.note_clean_stop(7)
    directory.close()
    return found


@pytest.mark.anyio
async def test_a_journal_on_a_real_disk_with_real_threads(root: str) -> None:
    assert await live(root, 1, 400) == []
    assert await live(root, 401, 300) == list(range(1, 401))
    assert await live(root, 701, 1) == list(range(1, 701))
