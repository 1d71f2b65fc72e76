"""Makes a data directory from a backup.

Writes only into a folder that does not exist or is empty. The result is a separate store with a new
id: the first start replays the journal up to the backup's last lsn, and moves every head past the
seqs in any backup of the folder, so that a seq never identifies two records. `FORMAT` is written
last: without it no server accepts the folder as a store. Views are not in a backup; the server
rebuilds them. Called by the command line and `continuous/restoring`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from topics_server.archive.format import BackupFacts
from topics_server.archive.journal_restore import SHARD_COUNT, WAL_SET, write_journal
from topics_server.archive.object_store import ObjectStore
from topics_server.archive.repository import Repository, StoredBackup
from topics_server.archive.sealed import restore_topic
from topics_server.runtime.clock import random_hex
from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt, DiskFull, StartRefused, StorageError
from topics_server.values.storage_types import KnownPositions
from topics_server.wal import layout
from topics_server.wal.atomic_write import rename_temp, write_temp
from topics_server.wal.cold_folder import lies_in
from topics_server.wal.directory import FormatMark, WalSet, lock_folder, refuse_inside_store
from topics_server.wal.folders import make_durable_dirs
from topics_server.wal.format.checked_json import encode_checked
from topics_server.wal.fs import Fs, Lock
from topics_server.wal.journal.wal_file import Sizes
from topics_server.wal.restored import write_restored
from topics_server.wal.snapshots.store import PublishedSnapshots, load_snapshot

_FOLDERS: Final = (layout.WAL, layout.SEGMENTS, layout.SNAPSHOTS)
_ID_BYTES: Final = 16
# Names made by the file system and by a lock; a folder with only these counts as empty.
_IGNORED: Final = frozenset({"lost+found", layout.LOCK})


@dataclass(slots=True)
class RestoredStore:
    """The result of `restore`."""

    backup: int
    store_id: str
    topics: int = 0
    segment_bytes: int = 0
    entries: int = 0


def restore(
    fs: Fs,
    store: ObjectStore,
    target: str,
    number: int | None = None,
    *,
    skipped: Collection[int] = (),
    mode: int = 0o700,
    sizes: Sizes = Sizes(),  # noqa: B008 -- an immutable value
) -> RestoredStore:
    """*Blocking.* Make `target` from a backup, the newest if `number` is None.

    `skipped`: backups that are ignored. Raises `StartRefused` if the target is in use or there is
    no such backup; `Corrupt` with the damaged object. A failed call leaves no usable store: remove
    the folder.
    """
    repository = Repository(store)
    facts = _chosen(repository, store, number, skipped)
    known = repository.known(facts.store_id, skipped)
    backup = repository.stored(facts)
    locks = make_target(fs, store, target, needed_bytes(facts), mode)
    try:
        return write_store(fs, backup, target, known, backup.entries(), facts.run, sizes=sizes)
    finally:
        for lock in locks:
            lock.release()


def write_store(
    fs: Fs,
    backup: StoredBackup,
    target: str,
    known: KnownPositions,
    entries: Iterable[tuple[int, Entry]],
    run: int,
    *,
    is_wanted: Callable[[int], bool] = lambda topic_id: True,
    sizes: Sizes = Sizes(),  # noqa: B008 -- an immutable value
) -> RestoredStore:
    """*Blocking.* Write a store into a folder that `make_target` made.

    `entries`: the whole journal, from the backup's start on. `is_wanted` decides which topics'
    segments are written; the entries drop all other topics. `run`: that of the newest entry.
    """
    facts = backup.facts
    made = RestoredStore(facts.number, random_hex(_ID_BYTES), facts.topics)
    segments = layout.join(target, layout.SEGMENTS)
    for topic in backup.sealed():
        if is_wanted(topic.topic_id):
            made.segment_bytes += restore_topic(fs, backup.store, segments, topic, made.store_id)
    fs.sync_dir(segments)
    _write_snapshot(fs, backup, run, target)
    made.entries = write_journal(fs, layout.join(target, layout.WAL), run, entries, sizes)
    write_restored(fs, target, known)
    fs.sync_dir(target)
    _write_format(fs, target, made.store_id, run)
    return made


def _chosen(
    repository: Repository, store: ObjectStore, number: int | None, skipped: Collection[int]
) -> BackupFacts:
    """The facts of the backup. Does not need `STORE`, because every backup names its store."""
    numbers = [each for each in repository.numbers() if each not in skipped]
    if not numbers:
        repository.owner()
        raise StartRefused("there is no backup in this folder", store.path_of("backups"))
    if number is not None and number not in numbers:
        there = ", ".join(map(str, numbers))
        raise StartRefused(f"there is no backup {number}, only {there}", store.path_of("backups"))
    return repository.facts(numbers[-1] if number is None else number)


def needed_bytes(facts: BackupFacts) -> int:
    """The bytes that a restore of this backup needs."""
    pieces = [*facts.journal, *([] if facts.snapshot is None else [facts.snapshot])]
    return facts.segment_bytes + sum(piece.bytes for piece in pieces)


def _refuse_small_disk(fs: Fs, needed: int, target: str) -> None:
    folder = fs.real_path(target)
    while not fs.exists(folder) and folder != layout.parent(folder):
        folder = layout.parent(folder)
    free = fs.free_bytes(folder)
    if free < needed:
        raise DiskFull(f"the restore needs {needed} bytes, and {free} are free", target)


def make_target(
    fs: Fs, store: ObjectStore, target: str, needed: int, mode: int = 0o700
) -> list[Lock]:
    """*Blocking.* Make the folders, and lock them as a server does.

    The locks prevent two restores into one folder. Refuses a disk with less room than `needed`, a
    folder in use, and one inside `store` or another data directory.
    """
    _refuse_small_disk(fs, needed, target)
    if lies_in(fs, target, store.path_of("").rstrip("/")):
        raise StartRefused("lies in the backup folder: name a folder outside it", target)
    refuse_inside_store(fs, target)
    _refuse_used(fs, target)
    make_durable_dirs(fs, target, mode)
    locks = lock_folder(fs, target)
    try:
        # Check again: another restore or a server may have been faster.
        _refuse_used(fs, target)
        for name in _FOLDERS:
            fs.make_dir(layout.join(target, name), mode)
        fs.sync_dir(target)
    except StorageError:
        for lock in locks:
            lock.release()
        raise
    return locks


def _refuse_used(fs: Fs, target: str) -> None:
    names = [name for name in fs.list_dir(target) if name not in _IGNORED]
    if names:
        raise StartRefused(
            f"this folder is not empty ({names[0]}): a restore writes into a new one", target
        )


def _write_snapshot(fs: Fs, backup: StoredBackup, run: int, target: str) -> None:
    """Write the backup's snapshot without its facts about the old store's journal."""
    facts = backup.facts
    if facts.snapshot is None:
        return
    folder = layout.join(target, layout.SNAPSHOTS)
    path = layout.join(folder, layout.snapshot_file(1))
    write_temp(fs, path, backup.chunks(facts.snapshot))
    image = load_snapshot(fs, layout.temp(path))
    if image.start_lsn != facts.start_lsn or image.run > run:
        raise Corrupt("the snapshot does not fit its backup", path)
    PublishedSnapshots(fs, target).write(msgspec.structs.replace(image, shards=()))


def _write_format(fs: Fs, target: str, store_id: str, run: int) -> None:
    """Write `FORMAT` durably, without a boot id: the start counts as one after a power loss."""
    mark = FormatMark(
        store_id=store_id,
        run=run,
        journal_run=run,
        wal_sets=[WalSet(WAL_SET, SHARD_COUNT, 1, has_marks=True)],
    )
    path = layout.join(target, layout.FORMAT)
    write_temp(fs, path, [encode_checked(mark)])
    rename_temp(fs, path)
    fs.sync_dir(target)
