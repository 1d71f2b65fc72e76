"""The cold folder's root: its owner store and its lock.

Owns `LOCK`, the lock on the folder itself, and `STORE`, a checked JSON file, replaced atomically:

    {"format": 1, "store_id": "...", "run": 7, "checksum": "..."}

`store_id` is that of the data directory, `run` the last run that used the folder. The field `cold`
of the data directory's `FORMAT` says whether a cold folder has the store's id: "none", "adopting"
(a start is about to write `STORE` into the folder of an older version) or "held". The two files
show whether the folders are halves of one store. If one half is empty and the other half belongs to
a store, a disk is not mounted: the start is refused. Nothing is written before this check, and
`STORE` only after `Directory.begin`. Called by the node's start and by offline verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from topics_server.runtime.metrics import log
from topics_server.values.errors import StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.atomic_write import rename_temp, write_temp
from topics_server.wal.directory import (
    Directory,
    FormatMark,
    lock_folder,
    read_format,
    refuse_inside_store,
)
from topics_server.wal.folders import make_durable_dirs, sync_ancestors
from topics_server.wal.format.checked_json import encode_checked, is_checked
from topics_server.wal.fs import Fs, Lock

STORE_VERSION: Final = 1
_STORE_BYTES_MAX: Final = 100_000
# Names that may exist in a cold folder without a store.
_IGNORED: Final = frozenset(
    {"lost+found", layout.LOCK, layout.SET_ASIDE, layout.temp(layout.STORE)}
)


class StoreMark(msgspec.Struct, frozen=True):
    """The content of `STORE`."""

    format: int = STORE_VERSION
    store_id: str = ""
    run: int = 0


_STORE_MARK: Final = msgspec.json.Decoder(StoreMark)


class _Version(msgspec.Struct):
    """The members that every `STORE` has. `folder_id`: only backup folders have it."""

    format: int
    folder_id: str = ""


_VERSION: Final = msgspec.json.Decoder(_Version)


class ColdFolder:
    """A cold folder that this process has locked and that belongs to this store, or is free."""

    def __init__(self, fs: Fs, root: str, locks: Sequence[Lock]) -> None:
        self._fs: Final = fs
        self._root: Final = root
        self._locks: Final = locks

    @classmethod
    def open(cls, fs: Fs, root: str, directory: Directory, *, mode: int = 0o700) -> ColdFolder:
        """*Blocking.* Lock the folder. Raises `StartRefused`: in use, or not this store's."""
        judge_cold(fs, root, directory.root, directory.found)
        if not fs.exists(root):
            make_durable_dirs(fs, root, mode)
        locks = lock_folder(fs, root)
        try:
            # Check again: another server may have claimed the folder before it was locked.
            judge_cold(fs, root, directory.root, directory.found)
        except StorageError:
            for lock in locks:
                lock.release()
            raise
        return cls(fs, root, locks)

    def claim(self, directory: Directory) -> None:
        """*Blocking.* Write the store's id and this run into the folder; after `begin`."""
        is_new = read_store(self._fs, self._root) is None
        if is_new:
            # An earlier start may have made the folder and its parents, and died before it synced
            # them.
            sync_ancestors(self._fs, self._root)
            log.info("%s is now the cold folder of store %s", self._root, directory.store_id)
        write_store(self._fs, self._root, StoreMark(store_id=directory.store_id, run=directory.run))
        directory.note_cold()

    def close(self) -> None:
        """Release the locks."""
        for lock in self._locks:
            lock.release()


def judge_cold(fs: Fs, root: str, data_dir: str, mark: FormatMark | None) -> None:
    """Raise `StartRefused` unless the cold folder `root` belongs to this store or to none.

    `mark` is the mark of the data directory, or `None` if it has no mark. This check
    changes nothing on disk.
    """
    refuse_overlap(fs, data_dir, root)
    refuse_inside_store(fs, root)
    names = [name for name in fs.list_dir(root) if name not in _IGNORED]
    store = read_store(fs, root)
    path = layout.join(root, layout.STORE)
    if store is None:
        _judge_unmarked(root, data_dir, mark, names)
    elif mark is None:
        raise StartRefused(
            f"is of store {store.store_id}, but {data_dir} holds no store: is its disk mounted? To "
            f"begin anew: {_begin_anew(data_dir, root, store.store_id)}",
            path,
        )
    elif store.store_id != mark.store_id:
        own = f"store {mark.store_id}" if mark.store_id else "a store of an older version"
        raise StartRefused(
            f"is of store {store.store_id}, but {data_dir} is {own}: name that store's own cold "
            "folder, or an empty one",
            path,
        )
    elif store.run > mark.run:
        raise StartRefused(
            f"was used by run {store.run} of this store, but {data_dir} knows {mark.run} runs "
            "only: one of the two is an older copy; put back both as of one moment",
            path,
        )


def _judge_unmarked(root: str, data_dir: str, mark: FormatMark | None, names: list[str]) -> None:
    if mark is not None and mark.cold == "held":
        if not names:
            raise StartRefused(
                f"is empty, but {data_dir} has used a cold folder: is the cold disk mounted? If it "
                f"is lost: {_begin_anew(data_dir, root, mark.store_id)}; if it held nothing: "
                f"topics repair {data_dir} --cold-dir {root} --adopt-cold",
                root,
            )
        raise StartRefused(
            "is missing, and says which store this cold folder belongs to: put it back, or, if the "
            f"folder is this store's: topics repair {data_dir} --cold-dir {root} --adopt-cold",
            layout.join(root, layout.STORE),
        )
    # A directory of version 1 has no facts about its cold folder; recovery checks its listed
    # segments later.
    is_free = mark is not None and (not mark.store_id or mark.cold == "adopting")
    if names and not is_free:
        raise StartRefused(
            f"is not the cold folder of {data_dir} (no {layout.STORE}, but {names[0]!r}); name an "
            f"empty folder, or, if it is: topics repair {data_dir} --cold-dir {root} --adopt-cold",
            root,
        )


def _begin_anew(data_dir: str, root: str, store_id: str) -> str:
    return f"topics repair {data_dir} --cold-dir {root} --begin-anew {store_id}"


def judge_before_start(fs: Fs, root: str, data_dir: str) -> None:
    """Like `judge_cold`, but called before anything is created or locked."""
    judge_cold(fs, root, data_dir, read_format(fs, data_dir))


def refuse_overlap(fs: Fs, data_dir: str, cold_dir: str) -> None:
    """Raise `StartRefused` if one folder is the other or lies inside it; resolves links.

    Recovery removes unknown files from both, so neither may contain files of the other.
    """
    real_data, real_cold = fs.real_path(data_dir), fs.real_path(cold_dir)
    data_ids = _identities(fs, real_data)
    cold_ids = _identities(fs, real_cold)
    # The same folder may have two paths (a bind mount), so compare folders, not only their names.
    subfolders = (layout.WAL, layout.SEGMENTS, layout.SNAPSHOTS, layout.SET_ASIDE)
    parts = {fs.identity(layout.join(real_data, name)) for name in subfolders}
    parts.add(fs.identity(real_data))
    parts.discard(None)
    own = fs.identity(real_cold)
    if (
        _is_within(real_cold, real_data)
        or _is_within(real_data, real_cold)
        or parts & cold_ids
        or (own is not None and own in data_ids)
    ):
        raise StartRefused(
            f"the cold folder and the data directory {data_dir} are one, or one lies inside the "
            "other; name a folder beside it",
            cold_dir,
        )


def lies_in(fs: Fs, path: str, folder: str) -> bool:
    """Whether `path` is the folder or lies in it; resolves links and bind mounts."""
    real, root = fs.real_path(path), fs.real_path(folder)
    own = fs.identity(root)
    return _is_within(real, root) or (own is not None and own in _identities(fs, real))


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _identities(fs: Fs, path: str) -> set[tuple[int, int] | None]:
    """The identities of a path and of its parents, as far as they exist."""
    found: set[tuple[int, int] | None] = set()
    at = path
    while True:
        found.add(fs.identity(at))
        if at == layout.parent(at):
            found.discard(None)
            return found
        at = layout.parent(at)


def read_store(fs: Fs, root: str) -> StoreMark | None:
    """The mark of a cold folder; `None` if it has none. Raises `StartRefused`."""
    path = layout.join(root, layout.STORE)
    if not fs.exists(path):
        return None
    file = fs.open(path)
    try:
        data = file.pread(_STORE_BYTES_MAX, 0)
    finally:
        file.close()
    try:
        found = _VERSION.decode(data)
        if found.folder_id:
            raise StartRefused(
                "is that of a folder of backups: name another folder for cold segments", path
            )
        if found.format > STORE_VERSION:
            raise StartRefused(
                f"has format {found.format}, this server knows up to {STORE_VERSION}: use a newer "
                "server",
                path,
            )
        if not is_checked(data):
            raise StartRefused("cannot be read: its checksum does not match", path)
        return _STORE_MARK.decode(data)
    except msgspec.MsgspecError as error:
        raise StartRefused(f"cannot be read: {error}", path) from error


def write_store(fs: Fs, root: str, mark: StoreMark) -> None:
    """Write a mark, durably."""
    path = layout.join(root, layout.STORE)
    write_temp(fs, path, [encode_checked(mark)])
    rename_temp(fs, path)
    fs.sync_dir(root)
