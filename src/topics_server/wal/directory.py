"""The data directory as a whole: who may use it, which format it has, how the last run ended.

Owns `LOCK` and `FORMAT`. `FORMAT` is a small JSON file, replaced atomically:

    {"format": 1, "boot_id": "...", "clean_stop": false,
     "wal_sets": [{"wal_set": 1, "shard_count": 4, "first_lsn": 1}]}

`clean_stop` is set after the final snapshot and removed, synced, before the first write of the next
run. `boot_id` is that of the last run whose heads were published (DESIGN §3, Heads). A journal file
set stands in `wal_sets` from before its first entry until it is forgotten. Called by the server's
start and stop, and by offline verbs.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from topics_server.errors import StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.fs import Fs, Lock

FORMAT_VERSION: Final = 1
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
# A file system's own folder at its root does not make a directory foreign.
_IGNORED: Final = frozenset({"lost+found", layout.LOCK, layout.temp(layout.FORMAT)})
_FORMAT_BYTES_MAX: Final = 1_000_000


class WalSet(msgspec.Struct, frozen=True):
    """A set of journal files: its shard count; all its entries have an lsn >= `first_lsn`."""

    wal_set: int
    shard_count: int
    first_lsn: int


class FormatMark(msgspec.Struct, frozen=True):
    """The content of `FORMAT`."""

    format: int = FORMAT_VERSION
    boot_id: str = ""
    clean_stop: bool = False
    wal_sets: list[WalSet] = []


class _Version(msgspec.Struct):
    format: int


def read_boot_id(fs: Fs) -> str:
    """The kernel's id of this boot; empty (never equal to another) where there is none."""
    try:
        file = fs.open(_BOOT_ID)
    except StorageError:
        return ""
    try:
        return file.pread(64, 0).decode("ascii", "replace").strip()
    finally:
        file.close()


class Directory:
    """A data directory that is locked by us."""

    def __init__(self, fs: Fs, root: str, lock: Lock, mark: FormatMark, boot_id: str) -> None:
        self.root: Final = root
        self._fs: Final = fs
        self._lock: Final = lock
        self._boot_id: Final = boot_id
        self._mark = mark
        # How the last run ended, as found at open.
        self.was_clean: Final = mark.clean_stop
        self.same_boot: Final = bool(boot_id) and mark.boot_id == boot_id
        self.is_new: Final = not mark.boot_id and not mark.wal_sets

    @classmethod
    def open(cls, fs: Fs, root: str, *, boot_id: str, mode: int = 0o700) -> Directory:
        """*Blocking.* Make the directory if it is missing, lock it, read its marks.

        Raises `StartRefused`: in use, of a newer format, or not ours (files, but no `FORMAT`).
        """
        if not fs.exists(root):
            fs.make_dir(root, mode)
        _refuse_foreign(fs, root)
        lock = fs.lock(layout.join(root, layout.LOCK), f"pid {os.getpid()}")
        try:
            # Looked at again: another server may have begun between the look and the lock.
            _refuse_foreign(fs, root)
            mark = read_format(fs, root)
            directory = cls(fs, root, lock, mark or FormatMark(), boot_id)
            if mark is None:
                # Not only when it was made just now: whoever made it may have been killed.
                fs.sync_dir(layout.parent(root))
                directory._write(FormatMark())
            for name in (layout.WAL, layout.SEGMENTS, layout.SNAPSHOTS):
                fs.make_dir(layout.join(root, name), mode)
            fs.sync_dir(root)
        except StorageError:
            lock.release()
            raise
        return directory

    @property
    def wal_dir(self) -> str:
        """Where journal files lie."""
        return layout.join(self.root, layout.WAL)

    @property
    def wal_sets(self) -> list[tuple[int, int, int]]:
        """(set, shard count, first lsn), as `JournalReplay` takes them."""
        return [(s.wal_set, s.shard_count, s.first_lsn) for s in self._mark.wal_sets]

    def wal_set_for(self, shard_count: int) -> tuple[int, bool]:
        """The set to go on with, and whether it is a new one (no set yet, or another count)."""
        sets = self._mark.wal_sets
        if sets and sets[-1].shard_count == shard_count:
            return sets[-1].wal_set, False
        return (sets[-1].wal_set + 1 if sets else 1), True

    def begin(self) -> None:
        """*Blocking.* Remove the clean-stop mark; before anything else is written."""
        if self._mark.clean_stop:
            self._write(msgspec.structs.replace(self._mark, clean_stop=False))

    def note_wal_set(
        self, wal_set: int, shard_count: int, first_lsn: int, *, oldest_start_lsn: int = 0
    ) -> None:
        """*Blocking.* Its files are there now; call before its first entry is submitted.

        Sets that hold nothing from `oldest_start_lsn` on (the older snapshot's start) are
        forgotten.
        """
        sets = [s for s in self._mark.wal_sets if s.wal_set != wal_set]
        if len(sets) != len(self._mark.wal_sets):
            return
        sets.append(WalSet(wal_set, shard_count, first_lsn))
        kept = [
            s
            for index, s in enumerate(sets)
            if index + 1 == len(sets) or sets[index + 1].first_lsn > oldest_start_lsn
        ]
        self._write(msgspec.structs.replace(self._mark, wal_sets=kept))

    def note_boot(self) -> None:
        """*Blocking.* Heads of this boot are published: a crash within it skips no seqs."""
        if self._mark.boot_id != self._boot_id:
            self._write(msgspec.structs.replace(self._mark, boot_id=self._boot_id))

    def note_clean_stop(self) -> None:
        """*Blocking.* The final snapshot is published and nothing is written any more."""
        self._write(msgspec.structs.replace(self._mark, boot_id=self._boot_id, clean_stop=True))

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.release()

    def _write(self, mark: FormatMark) -> None:
        path = layout.join(self.root, layout.FORMAT)
        file = self._fs.open(layout.temp(path), create=True)
        try:
            file.pwrite(msgspec.json.format(msgspec.json.encode(mark)) + b"\n", 0)
            file.sync()
        finally:
            file.close()
        self._fs.rename(layout.temp(path), path)
        self._fs.sync_dir(self.root)
        self._mark = mark


def read_format(fs: Fs, root: str) -> FormatMark | None:
    """The marks of a directory; `None` if it has none. Raises `StartRefused`."""
    path = layout.join(root, layout.FORMAT)
    if not fs.exists(path):
        return None
    file = fs.open(path)
    try:
        data = file.pread(_FORMAT_BYTES_MAX, 0)
    finally:
        file.close()
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version > FORMAT_VERSION:
            raise StartRefused(
                f"this data directory has format {version}, this server knows up to "
                f"{FORMAT_VERSION}: use a newer server",
                root,
            )
        return msgspec.json.decode(data, type=FormatMark)
    except msgspec.MsgspecError as error:
        raise StartRefused(f"cannot be read: {error}", path) from error


def _refuse_foreign(fs: Fs, root: str) -> None:
    names = [name for name in fs.list_dir(root) if name not in _IGNORED]
    if names and layout.FORMAT not in names:
        raise StartRefused(
            f"not a data directory of this server (no {layout.FORMAT}, but {names[0]!r}); name an "
            "empty directory, or one that a server made",
            root,
        )
