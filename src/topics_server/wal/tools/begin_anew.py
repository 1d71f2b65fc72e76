"""`topics repair --begin-anew` and `--adopt-cold`.

A start refuses an empty data directory or cold folder if the other half belongs to a store.
`begin_anew` moves the rest of that store aside, so that the next start makes a new one; nothing is
deleted. `adopt_cold` writes the store's id into a cold folder without one. Both take the same locks
as a server, report the store's id, and may be repeated after a crash. Called by `topics repair`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from topics_server.values.errors import StartRefused
from topics_server.wal import layout
from topics_server.wal.cold_folder import (
    StoreMark,
    judge_cold,
    read_store,
    refuse_overlap,
    write_store,
)
from topics_server.wal.directory import Directory, lock_folder, read_format
from topics_server.wal.folders import make_durable_dirs
from topics_server.wal.fs import Fs

# Names that stay in place when a half is moved aside.
_STAYS: Final = frozenset({"lost+found", layout.LOCK, layout.SET_ASIDE})


def begin_anew(fs: Fs, data_dir: str, cold_dir: str | None, store_id: str) -> list[str]:
    """*Blocking.* Move every half of the store `store_id` aside; returns the new folders.

    Raises `StartRefused` if neither half belongs to that store, or one belongs to another store.
    """
    if cold_dir is not None:
        refuse_overlap(fs, data_dir, cold_dir)
    with _locked(fs, data_dir), _locked(fs, cold_dir):
        data_id = _id_of_data(fs, data_dir)
        cold_id = None if cold_dir is None else _id_of_cold(fs, cold_dir)
        for folder, found in ((data_dir, data_id), (cold_dir, cold_id)):
            if found is not None and found != store_id:
                raise StartRefused(f"is of store {found}, not of {store_id}", folder)
        if store_id not in (data_id, cold_id):
            raise StartRefused(f"no folder named here is of store {store_id}", data_dir)
        moved: list[str] = []
        # The file that names the store is moved last: until then this may be repeated.
        if data_id is not None:
            moved.append(_move_aside(fs, data_dir, store_id, layout.FORMAT))
        if cold_dir is not None and cold_id is not None:
            moved.append(_move_aside(fs, cold_dir, store_id, layout.STORE))
    return moved


def adopt_cold(fs: Fs, directory: Directory, cold_dir: str) -> None:
    """*Blocking.* Write the store's id into a cold folder that has no `STORE`.

    This process has locked the directory. Raises `StartRefused` if the folder is another store's.
    """
    refuse_overlap(fs, directory.root, cold_dir)
    if directory.found is None or directory.is_adopted:
        raise StartRefused("has no store id yet: start the server on it first", directory.root)
    with _locked(fs, cold_dir):
        if read_store(fs, cold_dir) is not None:
            # The folder has an id: check it as a start does.
            judge_cold(fs, cold_dir, directory.root, directory.found)
        else:
            mark = StoreMark(store_id=directory.store_id, run=directory.run)
            write_store(fs, cold_dir, mark)
        directory.note_cold()


def _id_of_data(fs: Fs, data_dir: str) -> str | None:
    mark = read_format(fs, data_dir)
    if mark is None:
        return None
    if not mark.store_id:
        raise StartRefused("is of an older version and has no store id", data_dir)
    return mark.store_id


def _id_of_cold(fs: Fs, cold_dir: str) -> str | None:
    mark = read_store(fs, cold_dir)
    return None if mark is None else mark.store_id


def _move_aside(fs: Fs, root: str, store_id: str, last: str) -> str:
    """Move everything in a root to `set-aside/STORE_ID[.N]`, the file `last` as the last one."""
    target = _free(layout.join(root, layout.SET_ASIDE, store_id), fs, last)
    make_durable_dirs(fs, target)
    names = [name for name in fs.list_dir(root) if name not in _STAYS and name != last]
    # Move the journal first: without it a start refuses the rest.
    for name in sorted(names, key=lambda name: (name != layout.WAL, name)):
        fs.move(layout.join(root, name), layout.join(target, name))
    _sync_both(fs, root, target)
    fs.move(layout.join(root, last), layout.join(target, last))
    _sync_both(fs, root, target)
    return target


def _sync_both(fs: Fs, root: str, target: str) -> None:
    # Sync the new names first: a name missing in both folders after a power cut would be a loss.
    fs.sync_dir(target)
    fs.sync_dir(root)


def _free(folder: str, fs: Fs, last: str) -> str:
    """The first folder that no completed run has filled; interrupted runs continue."""
    number, target = 1, folder
    while fs.exists(layout.join(target, last)):
        number += 1
        target = f"{folder}.{number}"
    return target


@contextmanager
def _locked(fs: Fs, root: str | None) -> Iterator[None]:
    # A missing folder holds nothing that another process could use.
    locks = [] if root is None or not fs.exists(root) else lock_folder(fs, root)
    try:
        yield
    finally:
        for lock in locks:
            lock.release()
