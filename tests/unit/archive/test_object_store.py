"""A folder of objects: each is put once and completely, and only into the folder that was
opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.storage.fake_disk import FakeDisk, SimulatedCrash
from topics_server.archive.backup import BackupWriter
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.archive.folder_owner import own_folder, refuse_same_place
from topics_server.archive.object_store import FolderStore, read_whole
from topics_server.values.errors import Corrupt, NotThere, StartRefused, StorageError
from topics_server.wal.format.checked_json import encode_checked
from topics_server.wal.fs import OsFs

FS = OsFs()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "backups"
    made.mkdir()
    (tmp_path / "data").mkdir()
    return made


@pytest.fixture
def store(folder: Path) -> Iterator[FolderStore]:
    opened = FolderStore.open(FS, str(folder), write=True)
    yield opened
    opened.close()


def test_an_object_is_put_once_and_never_changes(store: FolderStore) -> None:
    assert store.put_if_absent("a/b/c", [b"one", b"two"])
    assert not store.put_if_absent("a/b/c", [b"other"])
    assert read_whole(store, "a/b/c") == b"onetwo"
    assert (store.size("a/b/c"), store.size("a/b/d")) == (6, None)
    assert (store.names("a"), store.names("a/b"), store.names("x")) == (["b"], ["c"], [])
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert store.size("a/b/c") is None
    with pytest.raises(NotThere):
        read_whole(store, "a/b/c")


def test_a_failed_put_leaves_nothing(store: FolderStore, folder: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise StorageError("the source is gone")

    with pytest.raises(StorageError, match="source is gone"):
        store.put_if_absent("a/b", pieces())
    assert store.size("a/b") is None
    assert list((folder / "a").iterdir()) == []


def test_a_missing_folder_is_refused_and_never_made(tmp_path: Path) -> None:
    for write in (False, True):
        with pytest.raises(StorageError, match="is its disk mounted"):
            FolderStore.open(FS, str(tmp_path / "gone"), write=write)
    assert list(tmp_path.iterdir()) == []


def test_two_do_not_write_at_once(store: FolderStore, folder: Path) -> None:
    with pytest.raises(StartRefused):
        FolderStore.open(FS, str(folder), write=True)
    assert FolderStore.open(FS, str(folder), write=False).names("") == ["LOCK"]
    store.close()
    FolderStore.open(FS, str(folder), write=True).close()


def test_nothing_is_written_once_the_folder_is_gone(store: FolderStore, folder: Path) -> None:
    store.put_if_absent("a/b", [b"1"])
    folder.rename(folder.with_name("moved"))
    for change in (
        lambda: store.put_if_absent("a/c", [b"2"]),
        lambda: store.delete("a/b"),
        lambda: store.delete_folder("a"),
    ):
        with pytest.raises(StorageError, match="is gone"):
            change()
    assert not folder.exists()


def test_nothing_is_written_into_a_folder_that_took_its_place(
    store: FolderStore, folder: Path
) -> None:
    """The folder is an empty mount point after its disk was unmounted."""
    store.put_if_absent("a/b", [b"1"])
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    with pytest.raises(StorageError, match="another took its place"):
        store.put_if_absent("a/c", [b"2"])
    assert list(folder.iterdir()) == []


def test_an_exchange_while_an_object_is_written_is_noticed(
    store: FolderStore, folder: Path
) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        folder.rename(folder.with_name("moved"))
        (folder / "a").mkdir(parents=True)
        yield b"whole"

    with pytest.raises(StorageError, match="another took its place"):
        store.put_if_absent("a/b", pieces())
    assert list((folder / "a").iterdir()) == []


# -- whose folder it is --------------------------------------------------------------------------


def test_a_folder_belongs_to_one_store(store: FolderStore, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    first = own_folder(FS, store, data, "1" * 32)
    assert own_folder(FS, store, data, "1" * 32) == first
    with pytest.raises(StartRefused, match="belongs to store 1111"):
        own_folder(FS, store, data, "2" * 32)


def test_a_used_folder_without_its_store_is_an_unmounted_disk(
    store: FolderStore, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    own_folder(FS, store, data, "1" * 32)
    store.delete("STORE")
    with pytest.raises(StartRefused, match="is its disk mounted") as refused:
        own_folder(FS, store, data, "1" * 32)
    assert store.size("STORE") is None
    assert str(tmp_path / "data" / "BACKUP_FOLDER") in str(refused.value)
    (tmp_path / "data" / "BACKUP_FOLDER").unlink()
    own_folder(FS, store, data, "1" * 32)


def test_another_folder_under_the_same_path_is_refused(store: FolderStore, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    own_folder(FS, store, data, "1" * 32)
    store.delete("STORE")
    other = tmp_path / "data-2"
    other.mkdir()
    own_folder(FS, store, str(other), "1" * 32)
    with pytest.raises(StartRefused, match="another backup folder"):
        own_folder(FS, store, data, "1" * 32)


def test_a_folder_with_other_files_is_refused(store: FolderStore, tmp_path: Path) -> None:
    store.put_if_absent("photo", [b"1"])
    with pytest.raises(StartRefused, match="holds other files"):
        own_folder(FS, store, str(tmp_path / "data"), "1" * 32)
    assert store.names("") == ["LOCK", "photo"]


def test_nothing_is_written_into_a_folder_that_is_refused(folder: Path, tmp_path: Path) -> None:
    data = str(tmp_path / "data")

    def refused(match: str) -> None:
        before = sorted(folder.iterdir())
        with pytest.raises(StartRefused, match=match):
            BackupWriter.open(FS, str(folder), data, None, "1" * 32)
        assert sorted(folder.iterdir()) == before

    (folder / "photo").write_bytes(b"1")
    refused("holds other files")
    (folder / "photo").unlink()
    BackupWriter.open(FS, str(folder), data, None, "1" * 32).close()
    folder.rename(tmp_path / "away")
    folder.mkdir()
    refused("is its disk mounted")


def test_a_damaged_owner_says_what_to_do(store: FolderStore, tmp_path: Path) -> None:
    store.put_if_absent("STORE", [b"{}"])
    with pytest.raises(Corrupt, match="is damaged, so new backups need another, empty folder"):
        own_folder(FS, store, str(tmp_path / "data"), "1" * 32)


def test_a_note_of_another_version_says_what_to_do(store: FolderStore, tmp_path: Path) -> None:
    class Other(msgspec.Struct):
        format: int
        folders: list[str]

    (tmp_path / "data" / "BACKUP_FOLDER").write_bytes(encode_checked(Other(2, [])))
    with pytest.raises(Corrupt, match="remove it if the backup folder is the right one"):
        own_folder(FS, store, str(tmp_path / "data"), "1" * 32)


def test_no_backup_folder_lies_in_the_store_or_around_it(tmp_path: Path) -> None:
    inside = tmp_path / "data" / "backups"
    inside.mkdir(parents=True)
    data, cold = str(tmp_path / "data"), str(tmp_path / "cold")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "data")
    for folder in (data, str(inside), str(tmp_path), cold, str(link)):
        with pytest.raises(StartRefused, match="inside the other"):
            refuse_same_place(FS, folder, data, cold)
    refuse_same_place(FS, str(tmp_path / "data-backups"), data, cold)


def test_a_pipe_in_the_place_of_an_object_holds_nobody_up(store: FolderStore, folder: Path) -> None:
    store.put_if_absent("a/b", [b"1"])
    os.mkfifo(folder / "a" / "pipe")
    (folder / "a" / "folder").mkdir()
    with pytest.raises(StorageError, match="a/pipe: not a regular file"):
        read_whole(store, "a/pipe")
    with pytest.raises(StorageError, match="a/folder: Is a directory"):
        read_whole(store, "a/folder")


def test_a_backup_folder_that_is_the_data_directory_under_another_path_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bind mount has a path of its own and the inode of its source."""
    disk = FakeDisk(1)
    for folder in ("data", "data/wal", "mount", "mount/backups"):
        disk.make_dir(folder)
    refuse_same_place(disk, "mount/backups", "data", None)
    inode = disk.identity

    def identity(path: str) -> tuple[int, int] | None:
        return inode("data" if path == "mount" else path)

    monkeypatch.setattr(disk, "identity", identity)
    with pytest.raises(StartRefused, match="one lies inside the other"):
        refuse_same_place(disk, "mount/backups", "data", None)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [FolderStore, SharedFolder])
def test_an_object_of_a_killed_process_is_durable_once_the_next_one_relies_on_it(
    kind: type[FolderStore], seed: int
) -> None:
    """The process was killed after it named the object and before it synced the folder; later the
    power fails.
    """
    disk = FakeDisk(seed)
    disk.make_dir("store")
    disk.sync_dir(".")
    killed = kind.open(disk, "store", write=True)
    assert killed.put_if_absent("a/first", [b"1"])
    disk.fail("sync_dir", "crash", path="store/a")
    with pytest.raises(SimulatedCrash):
        killed.put_if_absent("a/next", [b"2"])
    disk.crash("kill")
    disk = disk.reopen()
    later = kind.open(disk, "store", write=True)
    assert later.size("a/next") == 1
    if seed % 2:
        later.make_durable("a/next")
    else:
        assert not later.put_if_absent("a/next", [b"2"])
    disk.crash("power")
    disk = disk.reopen()
    assert read_whole(kind.open(disk, "store", write=True), "a/next") == b"2"


@pytest.mark.parametrize("kind", [FolderStore, SharedFolder])
def test_a_put_whose_sync_failed_is_not_taken_for_durable(kind: type[FolderStore]) -> None:
    disk = FakeDisk(1)
    disk.make_dir("store")
    store = kind.open(disk, "store", write=True)
    assert store.put_if_absent("a/first", [b"1"])
    disk.fail("sync_dir", "eio", path="store/a", times=2)
    for _ in range(2):
        with pytest.raises(StorageError):
            store.put_if_absent("a/next", [b"2"])
    assert not store.put_if_absent("a/next", [b"2"])
