"""Makes a data directory as of a moment of an archive.

Uses the newest base up to the cut, and the entries of the parts up to the cut. The result is a
separate store with a new id; the first start recovers it like a killed server, and moves every head
past the seqs in any base or part of the archive. Unwanted topics are dropped by entries after the
cut, and their segments are not written. Called by the command line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from topics_server.archive.continuous.bases import ArchiveBases
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.moments import (
    Moments,
    RestorePoint,
    names_in_snapshot,
    names_of,
    note_name,
)
from topics_server.archive.known import KnownBuilder
from topics_server.archive.object_store import ObjectStore
from topics_server.archive.repository import StoredBackup
from topics_server.archive.restore import make_target, needed_bytes, write_store
from topics_server.values.entries import Entry, TopicDropped
from topics_server.values.errors import Corrupt, NotThere, StartRefused, StorageError
from topics_server.values.storage_types import KnownPositions
from topics_server.wal.format.manifest import decode_manifest
from topics_server.wal.fs import Fs
from topics_server.wal.journal.wal_file import Sizes


@dataclass(slots=True)
class RestoredMoment:
    """The result of a restore. `ts`: the server's time of the cut; `topics`: their number."""

    lsn: int
    ts: int
    base: str
    part: int
    store_id: str
    topics: int
    segment_bytes: int
    entries: int


def restore_moment(
    fs: Fs,
    store: ObjectStore,
    target: str,
    find: Callable[[Moments], RestorePoint],
    *,
    is_wanted: Callable[[str], bool] | None = None,
    skipped: Collection[int] = (),
    mode: int = 0o700,
    sizes: Sizes = Sizes(),  # noqa: B008 -- an immutable value
) -> RestoredMoment:
    """*Blocking.* Make `target` as of the moment that `find` returns.

    `is_wanted`: decides by name which topics are restored; None: all. `skipped`: numbers of parts
    after the cut whose known seqs are ignored. Raises `StartRefused`, `Corrupt`; a failed call
    leaves no usable store. A prune may run meanwhile: objects that it removes do not count as
    damage.
    """
    history = ArchiveHistory(store)
    pruned = history.pruned()
    try:
        return _restored(fs, store, history, target, find, is_wanted, skipped, mode, sizes)
    except (Corrupt, NotThere, StartRefused) as error:
        if history.pruned() == pruned:
            raise
        raise StartRefused(f"{error}. A prune ran meanwhile: restore once more") from None


def _restored(
    fs: Fs,
    store: ObjectStore,
    history: ArchiveHistory,
    target: str,
    find: Callable[[Moments], RestorePoint],
    is_wanted: Callable[[str], bool] | None,
    skipped: Collection[int],
    mode: int,
    sizes: Sizes,
) -> RestoredMoment:
    bases = ArchiveBases(store, history)
    point = find(Moments(history, bases.all()[0]))
    known = _known(history, bases, point, skipped)
    base = point.base
    needed, run = needed_bytes(base.backup.facts), base.backup.facts.run
    for part in point.needed:
        needed += part.frames_bytes
        run = max(run, part.run)
    dropped: dict[int, str] = {}
    if is_wanted is not None:
        names = names_of(base)
        for _, entry in _part_entries(history, point):
            note_name(entry, names)
        dropped = {each: name for each, name in names.items() if not is_wanted(name)}
        if len(dropped) == len(names):
            raise StartRefused("the archive has no such topic at this moment")
        needed -= _segment_bytes(base.backup, dropped)
    alive = names_in_snapshot(base)
    locks = make_target(fs, store, target, needed, mode)
    try:
        made = write_store(
            fs,
            base.backup,
            target,
            known,
            _entries(history, point, dropped, alive),
            run,
            is_wanted=lambda topic_id: topic_id not in dropped,
            sizes=sizes,
        )
    finally:
        for lock in locks:
            lock.release()
    return RestoredMoment(
        lsn=point.lsn,
        ts=point.ts_ms,
        base=base.name,
        part=point.part,
        store_id=made.store_id,
        topics=len(alive),
        segment_bytes=made.segment_bytes,
        entries=made.entries,
    )


def _segment_bytes(backup: StoredBackup, topic_ids: Collection[int]) -> int:
    """The bytes of the segments of these topics."""
    return sum(
        entry.data_bytes + entry.idx_bytes
        for topic in backup.sealed()
        if topic.topic_id in topic_ids
        for entry in decode_manifest(topic.manifest).segments
    )


def _entries(
    history: ArchiveHistory, point: RestorePoint, dropped: dict[int, str], alive: dict[int, str]
) -> Iterator[tuple[int, Entry]]:
    """The whole journal of the restored store. Fills `alive` with the topics at its end, by id."""
    lsn = point.base.last_lsn
    for lsn, entry in itertools.chain(point.base.backup.entries(), _part_entries(history, point)):
        note_name(entry, alive)
        if isinstance(entry, TopicDropped):
            alive.pop(entry.topic_id, None)
        yield lsn, entry
    lsn = max(lsn, point.base.last_lsn)
    for topic_id, name in sorted(dropped.items()):
        if alive.pop(topic_id, None) is not None:
            lsn += 1
            yield lsn, TopicDropped(topic_id=topic_id, ts=point.ts_ms, name=name)


def _part_entries(history: ArchiveHistory, point: RestorePoint) -> Iterator[tuple[int, Entry]]:
    """The entries after the base, up to the cut. Raises `Corrupt`."""
    last_lsn = point.base.last_lsn
    for part in point.needed:
        for lsn, entry in history.entries_of(part):
            if lsn > point.lsn:
                return
            if lsn > last_lsn:
                last_lsn = lsn
                yield lsn, entry


def _known(
    history: ArchiveHistory, bases: ArchiveBases, point: RestorePoint, skipped: Collection[int]
) -> KnownPositions:
    """The seqs that clients may have seen, from the parts and bases that go beyond the cut.

    Ids and epochs of topics that were dropped before are in the restored base.
    """
    builder = KnownBuilder()
    start = point.part or point.base.part
    for base in bases.kept():
        if base.part < start or base.part in skipped:
            continue
        try:
            builder.note(bases.opened(base).backup.known())
        except StorageError as error:
            raise _unknown(error, base.part) from None
    for number in history.numbers():
        if number < start or number in skipped:
            continue
        try:
            builder.note(history.facts(number).known)
        except StorageError as error:
            raise _unknown(error, number) from None
    # Read the prune's note last: a prune writes it before it removes a part, so it covers every
    # part that was missing above.
    pruned = history.pruned()
    if pruned is not None:
        builder.note(pruned.known)
    return builder.result()


def _unknown(error: StorageError, number: int) -> Corrupt:
    return Corrupt(
        f"{error}. Part {number} may know seqs that were assigned after the moment of the restore; "
        f"--skip {number} restores without asking it"
    )
