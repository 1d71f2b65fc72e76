"""Backups of the golden directories: what a killed server of any version left comes back.

The tests make an offline backup with cold segments, restore it, and compare the records by `topics
dump`. They also change a byte in each file of a backup: `verify` and a restore must notice it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.vectors.stored import VECTORS, unpack
from topics_server.archive.format import BackupFacts
from topics_server.archive.object_store import FolderStore
from topics_server.archive.offline import back_up
from topics_server.archive.repository import Repository, Verified
from topics_server.archive.restore import restore
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import dump, verify

FS = OsFs()
NAMES = sorted((path.name for path in VECTORS.glob("store-v*")), key=lambda name: (len(name), name))
# The oldest vector with a store id, and the newest vector.
WITH_ID = ["store-v7", NAMES[-1]]


def made(name: str, tmp_path: Path) -> BackupFacts:
    """A backup of a copy of this vector."""
    unpack(VECTORS / name, tmp_path)
    (tmp_path / "backups").mkdir()
    return back_up(FS, str(tmp_path / "data"), str(tmp_path / "cold"), str(tmp_path / "backups"))


def restored(tmp_path: Path, target: str = "restored") -> Path:
    store = FolderStore.open(FS, str(tmp_path / "backups"), write=False)
    restore(FS, store, str(tmp_path / target))
    return tmp_path / target


def records(data: Path, cold: Path | None) -> list[bytes]:
    """Every record as `topics dump` prints it; a restore has no cold segments."""
    items = dump(FS, str(data), None if cold is None else str(cold))
    lines = (msgspec.json.encode(item) for item in items)
    return [line.replace(b'"where":"cold', b'"where":"hot') for line in lines]


def verified(tmp_path: Path) -> Verified:
    return Repository(FolderStore.open(FS, str(tmp_path / "backups"), write=False)).verify()


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ID)
def test_a_restore_holds_the_same_records(name: str, tmp_path: Path) -> None:
    facts = made(name, tmp_path)
    assert facts.segments > 0
    assert facts.journal
    assert (verified(tmp_path).backups, verified(tmp_path).problems) == (1, [])
    before = records(tmp_path / "data", tmp_path / "cold")
    target = restored(tmp_path)
    assert verify(FS, str(target)).problems == []
    assert records(target, None) == before
    assert len(before) > 100


def test_a_second_backup_copies_no_segment_again(tmp_path: Path) -> None:
    first = made(NAMES[-1], tmp_path)
    paths = str(tmp_path / "data"), str(tmp_path / "cold"), str(tmp_path / "backups")
    second = back_up(FS, *paths)
    assert (first.number, second.number) == (1, 2)
    assert first.copied_bytes > 0
    assert second.copied_bytes == 0
    assert second.segment_bytes == first.segment_bytes


def test_a_store_without_an_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="start it once"):
        made("store-v1", tmp_path)


def test_a_target_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    made(NAMES[-1], tmp_path)
    target = restored(tmp_path)
    before = sorted(target.rglob("*"))
    with pytest.raises(StartRefused, match="is not empty"):
        restored(tmp_path)
    assert sorted(target.rglob("*")) == before


@pytest.mark.slow
def test_every_damaged_file_is_found(tmp_path: Path) -> None:
    """`verify` must find one changed byte in the middle of each file; a restore must find it in a
    file of each kind.
    """
    made(NAMES[-1], tmp_path)
    folder = tmp_path / "backups"
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "LOCK"]
    kinds: set[str] = set()
    for number, path in enumerate(files):
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 0x10
        path.write_bytes(changed)
        assert _is_found(tmp_path), path
        kind = path.suffix or path.name.partition("-")[0]
        if kind not in kinds and kind != "STORE":
            with pytest.raises(StorageError):
                restored(tmp_path, f"target-{number}")
        kinds.add(kind)
        path.write_bytes(whole)
    assert kinds == {"STORE", ".json", ".data", ".idx", "snapshot", "sealed", "journal", "known"}
    assert not _is_found(tmp_path)


def test_every_missing_file_is_found(tmp_path: Path) -> None:
    made(NAMES[-1], tmp_path)
    folder = tmp_path / "backups"
    for kind in ("*.data", "*.idx", "snapshot", "sealed-1", "journal-1", "known", "STORE"):
        path = next(iter(sorted(folder.rglob(kind))))
        whole = path.read_bytes()
        path.unlink()
        assert _is_found(tmp_path), path
        path.write_bytes(whole)
    (folder / "STORE").write_bytes(b"{}")
    assert _is_found(tmp_path)
    restored(tmp_path, "without-its-owner")
    next(folder.rglob("backup.json")).unlink()
    assert _is_found(tmp_path)
    with pytest.raises(Corrupt, match=r"backup\.json: is missing"):
        restored(tmp_path)


def _is_found(tmp_path: Path) -> bool:
    try:
        return bool(verified(tmp_path).problems)
    except StorageError:
        return True
