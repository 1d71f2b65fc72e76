"""The data directory: lock, format, store id, boot and clean-stop marks.

Owns `LOCK`, the lock on the directory itself, and `FORMAT`: a small JSON file, replaced atomically.

    {"format": 2, "store_id": "...", "run": 7, "boot_id": "...", "clean_stop": false,
     "journal_run": 7, "heads_run": 5, "final_lsn": 0,
     "wal_sets": [{"wal_set": 1, "shard_count": 4, "first_lsn": 1, "has_marks": true}],
     "cold": "held", "checksum": "..."}

`store_id` names the store: 32 random hexadecimal digits, made once. `run` counts the starts that
wrote. `journal_run` is the last run that created its journal files and end marks. `heads_run` is
the last run whose start published moved heads: the heads are unknown without a snapshot of that run
or a later one (`lacks_heads`). `clean_stop` is set after the final snapshot, with its last lsn as
`final_lsn`; without that snapshot the heads are unknown too. `begin` removes these two fields,
counts the run, and syncs `FORMAT` before the first write of a run. `boot_id` is that of the last
run whose heads were published (ARCHITECTURE, Heads); a failed sync clears it. A journal file set is
listed in `wal_sets` from before its first entry until it is forgotten. `cold` says whether a cold
folder carries the store's id (`wal/cold_folder.py`). Version 1 has no `store_id` and no `run`:
`open` makes the id, the first write stores it. Called by the server's start and stop, by a shard
whose sync failed, and by offline verbs.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from topics_server.runtime.clock import random_hex
from topics_server.runtime.metrics import log
from topics_server.values.errors import StartRefused, StorageError
from topics_server.values.storage_types import SnapshotImage
from topics_server.wal import layout
from topics_server.wal.folders import make_durable_dirs, sync_ancestors
from topics_server.wal.format.checked_json import encode_checked, is_checked
from topics_server.wal.fs import Fs, Lock

FORMAT_VERSION: Final = 2
# Version 1 has neither a store id nor a run number.
_VERSION_WITHOUT_ID: Final = 1
_STORE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_STORE_ID_BYTES: Final = 16
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
# File systems have such folders at their root; a directory with one is not foreign.
_IGNORED: Final = frozenset(
    {"lost+found", layout.LOCK, layout.SET_ASIDE, layout.temp(layout.FORMAT)}
)
_FOLDERS: Final = (layout.WAL, layout.SEGMENTS, layout.SNAPSHOTS)
_FORMAT_BYTES_MAX: Final = 1_000_000


class WalSet(msgspec.Struct, frozen=True):
    """A set of journal files: its shard count; all its entries have an lsn >= `first_lsn`.

    `has_marks`: every shard of the set has an end mark beside its files.
    """

    wal_set: int
    shard_count: int
    first_lsn: int
    has_marks: bool = False


class FormatMark(msgspec.Struct, frozen=True):
    """The content of `FORMAT`."""

    format: int = FORMAT_VERSION
    store_id: str = ""
    run: int = 0
    journal_run: int = 0
    heads_run: int = 0
    boot_id: str = ""
    clean_stop: bool = False
    final_lsn: int = 0
    wal_sets: list[WalSet] = []
    cold: Literal["none", "adopting", "held"] = "none"


_FORMAT_MARK: Final = msgspec.json.Decoder(FormatMark)


class _Version(msgspec.Struct):
    format: int


_VERSION: Final = msgspec.json.Decoder(_Version)


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


def is_same_boot(fs: Fs, mark: FormatMark) -> bool:
    """Whether the current boot is the one whose heads were published last."""
    return bool(mark.boot_id) and mark.boot_id == read_boot_id(fs)


class Directory:
    """A data directory that this process has locked."""

    def __init__(
        self, fs: Fs, root: str, locks: Sequence[Lock], mark: FormatMark | None, boot_id: str
    ) -> None:
        self.root: Final = root
        self._fs: Final = fs
        self._locks: Final = locks
        self._held: Final[list[Lock]] = []
        self._boot_id: Final = boot_id
        # The mark found by `open`; `None` if `open` created the directory.
        self.found: Final = mark
        mark = mark or FormatMark()
        # Marks are written by the server's start and stop, and by shards whose sync failed.
        self._writing: Final = threading.Lock()
        self._is_boot_forgotten = False
        # The next write turns an older version into the newest one, with an id if it had none.
        self.is_adopted: Final = mark.format == _VERSION_WITHOUT_ID
        self._mark = msgspec.structs.replace(
            mark,
            format=FORMAT_VERSION,
            store_id=mark.store_id or random_hex(_STORE_ID_BYTES),
        )
        # How the last run ended, according to the mark found by `open`.
        self.was_clean: Final = mark.clean_stop
        self.same_boot: Final = bool(boot_id) and mark.boot_id == boot_id
        self.is_new: Final = not mark.boot_id and not mark.wal_sets

    @classmethod
    def open(cls, fs: Fs, root: str, *, boot_id: str, mode: int = 0o700) -> Directory:
        """*Blocking.* Make the directory if it is missing, lock it, read its marks.

        Raises `StartRefused`: in use, of a newer format, or foreign (files, but no `FORMAT`).
        """
        refuse_inside_store(fs, root)
        if not fs.exists(root):
            make_durable_dirs(fs, root, mode)
        _refuse_foreign(fs, root)
        locks = lock_folder(fs, root)
        try:
            # Read again: another server may have started between the first read and the lock.
            _refuse_foreign(fs, root)
            mark = read_format(fs, root)
            directory = cls(fs, root, locks, mark, boot_id)
            if mark is None:
                # Sync also an existing directory: the process that made it may have been killed
                # before its sync.
                sync_ancestors(fs, root)
                directory._write(directory._mark)
            if directory.is_new:
                # Only in a new directory: in an older one a missing folder was lost, and recovery
                # must decide.
                for name in _FOLDERS:
                    fs.make_dir(layout.join(root, name), mode)
            fs.sync_dir(root)
            directory._hold_folders()
        except StorageError:
            for lock in locks:
                lock.release()
            raise
        return directory

    @property
    def wal_dir(self) -> str:
        """The folder of the journal files."""
        return layout.join(self.root, layout.WAL)

    @property
    def store_id(self) -> str:
        """The store's id; durable from `begin` on, and at once in a new directory."""
        return self._mark.store_id

    @property
    def run(self) -> int:
        """The number of this run from `begin` on; before it, the number of the last one."""
        return self._mark.run

    @property
    def mark(self) -> FormatMark:
        """The current content of `FORMAT`."""
        return self._mark

    @property
    def marked_sets(self) -> frozenset[int]:
        """The wal sets whose shards all have an end mark."""
        return frozenset(s.wal_set for s in self._mark.wal_sets if s.has_marks)

    @property
    def wal_sets(self) -> list[tuple[int, int, int]]:
        """(set, shard count, first lsn), as `JournalReplay` takes them."""
        return [(s.wal_set, s.shard_count, s.first_lsn) for s in self._mark.wal_sets]

    def wal_set_for(self, shard_count: int) -> tuple[int, bool]:
        """The current wal set, and whether it is new (no set yet, or another shard count)."""
        sets = self._mark.wal_sets
        if sets and sets[-1].shard_count == shard_count:
            return sets[-1].wal_set, False
        return (sets[-1].wal_set + 1 if sets else 1), True

    def begin(self, *, with_cold: bool = False) -> None:
        """*Blocking.* Count the run and remove the clean-stop mark, before anything is written.

        `with_cold`: a cold folder gets the store's id next, unless it has it. The cold folder of an
        older version may hold segments and no id; the note that it is about to get one survives a
        crash.
        """
        with self._writing:
            mark = msgspec.structs.replace(
                self._mark, run=self._mark.run + 1, clean_stop=False, final_lsn=0
            )
            if with_cold and self.is_adopted and mark.cold == "none":
                mark = msgspec.structs.replace(mark, cold="adopting")
            self._write(mark)

    def note_cold(self) -> None:
        """*Blocking.* Record that a cold folder has the store's id; it must never be empty now."""
        with self._writing:
            if self._mark.cold != "held":
                self._write(msgspec.structs.replace(self._mark, cold="held"))

    def note_wal_set(
        self,
        wal_set: int,
        shard_count: int,
        first_lsn: int,
        *,
        oldest_start_lsn: int = 0,
        has_marks: bool = False,
    ) -> None:
        """*Blocking.* Record that the set's files exist; call before its first entry is submitted.

        Sets without entries from `oldest_start_lsn` on (the older snapshot's start) are forgotten.
        `has_marks`: the end marks of all its shards exist as well.
        """
        with self._writing:
            self._note_wal_set(WalSet(wal_set, shard_count, first_lsn, has_marks), oldest_start_lsn)

    def _note_wal_set(self, new: WalSet, oldest_start_lsn: int) -> None:
        sets = [s for s in self._mark.wal_sets if s.wal_set != new.wal_set]
        if len(sets) != len(self._mark.wal_sets):
            if new.has_marks and new.wal_set not in self.marked_sets:
                # A set of an older version continues in use, and has end marks from now on.
                marked = [
                    msgspec.structs.replace(s, has_marks=s.has_marks or s.wal_set == new.wal_set)
                    for s in self._mark.wal_sets
                ]
                self._write(msgspec.structs.replace(self._mark, wal_sets=marked))
            return
        sets.append(new)
        kept = [
            s
            for index, s in enumerate(sets)
            if index + 1 == len(sets) or sets[index + 1].first_lsn > oldest_start_lsn
        ]
        self._write(msgspec.structs.replace(self._mark, wal_sets=kept))

    def note_journal(
        self,
        wal_set: int,
        shard_count: int,
        first_lsn: int,
        *,
        oldest_start_lsn: int,
        heads_moved: bool = False,
    ) -> None:
        """*Blocking.* The run's journal files and end marks exist, and heads are published.

        `heads_moved`: some heads jumped, and a snapshot of this run holds them.
        """
        self.note_wal_set(
            wal_set, shard_count, first_lsn, oldest_start_lsn=oldest_start_lsn, has_marks=True
        )
        self.note_boot(heads_moved=heads_moved)

    def note_boot(self, *, heads_moved: bool = False) -> None:
        """*Blocking.* Record that this boot's heads are published: a crash within it skips no seqs.

        The journal files and end marks of this run exist: older ones count as copies from now on.
        """
        with self._writing:
            old = self._mark
            boot_id = "" if self._is_boot_forgotten else self._boot_id
            heads_run = old.run if heads_moved else old.heads_run
            new = msgspec.structs.replace(
                old, boot_id=boot_id, journal_run=old.run, heads_run=heads_run
            )
            if new != old:
                self._write(new)

    def doubt_boot(self) -> None:
        """*Blocking.* Writes of this boot are lost: treat it as another boot until `note_boot`.

        Called before the loss is repaired. Raises `StorageError`.
        """
        with self._writing:
            if self._mark.boot_id:
                self._write(msgspec.structs.replace(self._mark, boot_id=""))

    def forget_boot(self) -> None:
        """*Blocking.* Record a failed sync: this boot's page cache proves nothing any more.

        The next start then treats this boot as another one. Best effort: a disk that fails a sync
        may fail this write too. Until the process ends, neither a boot id nor a clean stop is
        written. Any thread may call it.
        """
        with self._writing:
            self._is_boot_forgotten = True
            if self._mark.boot_id:
                try:
                    self._write(msgspec.structs.replace(self._mark, boot_id=""))
                except StorageError as error:
                    log.warning("the boot id cannot be cleared after a failed sync: %s", error)

    def note_clean_stop(self, final_lsn: int) -> None:
        """*Blocking.* Record that the final snapshot is published and nothing is written after it.

        `final_lsn`: the last lsn of that snapshot.
        """
        with self._writing:
            if not self._is_boot_forgotten:
                mark = msgspec.structs.replace(
                    self._mark, boot_id=self._boot_id, clean_stop=True, final_lsn=final_lsn
                )
                self._write(mark)

    def close(self) -> None:
        """Release the locks and folders; nothing is written after that."""
        for handle in (*self._held, *self._locks):
            handle.release()

    def _hold_folders(self) -> None:
        """Keep the often synced folders open: syncing them then needs no free descriptor."""
        for folder in (self.root, *(layout.join(self.root, name) for name in _FOLDERS)):
            if self._fs.exists(folder):
                self._held.append(self._fs.hold_dir(folder))

    def _write(self, mark: FormatMark) -> None:
        path = layout.join(self.root, layout.FORMAT)
        file = self._fs.open(layout.temp(path), create=True)
        try:
            file.pwrite(encode_checked(mark), 0)
            file.sync()
        finally:
            file.close()
        self._fs.rename(layout.temp(path), path)
        self._fs.sync_dir(self.root)
        self._mark = mark


def lacks_heads(mark: FormatMark, newest: SnapshotImage | None) -> bool:
    """Whether the snapshot with the last heads is missing or replaced by an older copy.

    The start that moved heads writes that snapshot; after a clean stop it is the final one.
    """
    run, last_lsn = (newest.run, newest.last_lsn) if newest else (0, 0)
    return mark.heads_run > run or mark.final_lsn > last_lsn


def lock_folder(fs: Fs, root: str) -> list[Lock]:
    """Lock a folder for this process: its `LOCK` and the folder itself.

    `LOCK` names its holder; older servers take only this lock, and network file systems support
    only this one. Removing the file under a running server releases its lock; the lock on the
    folder stays. Raises `StartRefused` when another process holds either.
    """
    lock = fs.lock(layout.join(root, layout.LOCK), f"pid {os.getpid()}")
    try:
        folder_lock = fs.lock_dir(root)
    except StorageError:
        lock.release()
        raise
    if folder_lock is None:
        log.warning("%s: directories cannot be locked here; never remove %s", root, layout.LOCK)
        return [lock]
    return [lock, folder_lock]


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
        version = _VERSION.decode(data).format
        if version > FORMAT_VERSION:
            raise StartRefused(
                f"this data directory has format {version}, this server knows up to "
                f"{FORMAT_VERSION}: use a newer server",
                root,
            )
        if version > _VERSION_WITHOUT_ID and not is_checked(data):
            raise StartRefused("cannot be read: its checksum does not match", path)
        mark = _FORMAT_MARK.decode(data)
    except msgspec.MsgspecError as error:
        raise StartRefused(f"cannot be read: {error}", path) from error
    if version > _VERSION_WITHOUT_ID and not _STORE_ID.fullmatch(mark.store_id):
        raise StartRefused("cannot be read: store_id is not 32 hexadecimal digits", path)
    return mark


def refuse_inside_store(fs: Fs, path: str) -> None:
    """Raise `StartRefused` if a folder lies inside a store's data directory or cold folder.

    The server of that store owns all files there, and removes files that it does not know.
    """
    at = fs.real_path(path)
    while at != layout.parent(at):
        at = layout.parent(at)
        for name in (layout.FORMAT, layout.STORE):
            if _is_mark(fs, layout.join(at, name)):
                raise StartRefused(
                    f"lies inside {at}, which is a folder of another store; name a folder of its "
                    "own",
                    path,
                )


def _is_mark(fs: Fs, path: str) -> bool:
    """Whether the server makes files of this name; foreign files may have the same name."""
    if not fs.exists(path):
        return False
    file = fs.open(path)
    try:
        _VERSION.decode(file.pread(_FORMAT_BYTES_MAX, 0))
    except msgspec.MsgspecError:
        return False
    finally:
        file.close()
    return True


def _refuse_foreign(fs: Fs, root: str) -> None:
    names = [name for name in fs.list_dir(root) if name not in _IGNORED]
    if names and layout.FORMAT not in names:
        raise StartRefused(
            f"not a data directory of this server (no {layout.FORMAT}, but {names[0]!r}); name an "
            "empty directory, or one that a server made",
            root,
        )
