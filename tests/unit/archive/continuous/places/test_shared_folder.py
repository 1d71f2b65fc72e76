"""A folder to which several servers write: each object is put once, by one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from topics_server.archive.continuous.format import ARCHIVE, part_group, part_name
from topics_server.archive.continuous.places.retrying import RetryingStore
from topics_server.archive.continuous.places.shared_folder import SharedFolder, is_lock, put_same
from topics_server.archive.continuous.prune import _remove_parts
from topics_server.archive.object_store import read_whole
from topics_server.values.errors import NotThere, StartRefused, StorageError
from topics_server.wal.fs import OsFs

FS = OsFs()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "archive"
    made.mkdir()
    return made


def test_of_many_writers_one_puts(folder: Path) -> None:
    stores = [SharedFolder.open(FS, str(folder)) for _ in range(4)]
    won: list[tuple[int, int]] = []

    def put(writer: int) -> None:
        for number in range(20):
            if stores[writer].put_if_absent(f"parts/{number}", [b"%d" % writer] * 3):
                won.append((number, writer))

    threads = [threading.Thread(target=put, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in won) == list(range(20))
    for number, writer in won:
        assert read_whole(stores[0], f"parts/{number}") == b"%d" % writer * 3
    names = sorted(path.name for path in (folder / "parts").iterdir())
    assert names == sorted(map(str, range(20))), "nothing unfinished stays"


def test_a_failed_put_leaves_nothing(folder: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise StorageError("the source is gone")

    store = SharedFolder.open(FS, str(folder))
    with pytest.raises(StorageError, match="source is gone"):
        store.put_if_absent("a/b", pieces())
    assert list((folder / "a").iterdir()) == []


def test_the_same_content_counts_as_put_and_another_does_not(folder: Path) -> None:
    store = SharedFolder.open(FS, str(folder))
    assert put_same(store, "a", b"1")
    assert put_same(store, "a", b"1")
    assert not put_same(store, "a", b"2")


def test_bases_and_prunes_keep_each_other_away(folder: Path) -> None:
    store, other = (SharedFolder.open(FS, str(folder)) for _ in range(2))
    lock = store.lock_bases()
    with pytest.raises(StartRefused, match="a base or a prune"):
        other.lock_bases()
    assert other.put_if_absent("parts/1", [b"1"]), "a part needs no such lock"
    lock.release()
    other.lock_bases().release()
    assert [name for name in other.names("") if not is_lock(name)] == ["parts"]


def test_nothing_is_written_into_a_folder_that_took_its_place(folder: Path) -> None:
    store = SharedFolder.open(FS, str(folder))
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    for change in (
        lambda: store.put_if_absent("a", [b"2"]),
        lambda: store.delete("a"),
        store.lock_bases,
    ):
        with pytest.raises(StorageError, match="another took its place"):
            change()
    assert list(folder.iterdir()) == []


class TimesOut(SharedFolder):
    """Puts reach the folder, and are reported as failures."""

    def put_if_absent(self, name: str, pieces: object) -> bool:
        super().put_if_absent(name, pieces)  # type: ignore[arg-type]
        raise StorageError("timed out")


def test_a_put_that_timed_out_and_arrived_counts(folder: Path) -> None:
    store = RetryingStore(TimesOut.open(FS, str(folder)), wait=lambda seconds: None)
    with pytest.raises(StorageError, match="timed out"):
        # Every try is reported as a failure.
        store.put_if_absent("a", [b"1"])
    plain = RetryingStore(SharedFolder.open(FS, str(folder)), wait=lambda seconds: None)
    assert plain.put_if_absent("a", [b"1"]), "it is there"
    assert not plain.put_if_absent("a", [b"2"])
    assert read_whole(plain, "a") == b"1"


class FailsOnce(SharedFolder):
    """The first put reaches the folder, but is reported as a failure; later ones work."""

    has_failed = False

    def put_if_absent(self, name: str, pieces: object) -> bool:
        is_put = super().put_if_absent(name, pieces)  # type: ignore[arg-type]
        if not self.has_failed:
            self.has_failed = True
            raise StorageError("timed out")
        return is_put


def test_after_a_failure_the_same_content_is_ours(folder: Path) -> None:
    waited: list[float] = []
    store = RetryingStore(FailsOnce.open(FS, str(folder)), wait=waited.append)
    assert store.put_if_absent("a", [b"1", b"2"])
    assert read_whole(store, "a") == b"12"
    assert len(waited) == 1
    with pytest.raises(NotThere):
        read_whole(store, "b")
    assert len(waited) == 1, "absence is an answer, not a failure"


def test_a_folder_that_another_process_removed_is_made_again(folder: Path) -> None:
    """A prune removes the folder of a topic that has no segments left; new segments come later."""
    store, prune = (SharedFolder.open(FS, str(folder)) for _ in range(2))
    assert store.put_if_absent("segments/1/a", [b"1"])
    prune.delete("segments/1/a")
    prune.delete_folder("segments/1")
    prune.delete_folder("segments")
    assert store.put_if_absent("segments/1/b", [b"2"])
    assert read_whole(store, "segments/1/b") == b"2"


def test_an_archive_that_was_emptied_takes_nothing(folder: Path) -> None:
    store = SharedFolder.open(FS, str(folder))
    assert store.put_if_absent(ARCHIVE, [b"mark"])
    assert store.put_if_absent("parts/1", [b"1"])
    (folder / "parts" / "1").unlink()
    (folder / ARCHIVE).rename(folder.with_name("away"))
    with pytest.raises(StorageError, match="somebody emptied this archive"):
        store.put_if_absent("parts/2", [b"2"])
    assert list((folder / "parts").iterdir()) == []
    folder.with_name("away").rename(folder / ARCHIVE)
    assert store.put_if_absent("parts/2", [b"2"])


def test_a_prune_leaves_the_folder_alone_into_which_a_part_is_put(folder: Path) -> None:
    store = SharedFolder.open(FS, str(folder))
    for number in (1, 2, 10_000):
        store.put_if_absent(part_name(number), [b"1"])
    # The temporary file of the part that the server is writing now.
    begun = folder / part_group(20_000) / "begun.tmp"
    begun.parent.mkdir()
    begun.write_bytes(b"half")
    assert _remove_parts(store, 10_000) == 2
    assert begun.read_bytes() == b"half"
    assert store.names("parts") == ["00000001", "00000002"]
