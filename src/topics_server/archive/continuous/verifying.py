"""Reads a whole archive and reports what is damaged, missing or in the wrong place.

Called by the command line, beside a running server: objects that a prune removes meanwhile are no
problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from topics_server.archive.continuous.bases import ArchiveBases
from topics_server.archive.continuous.format import ARCHIVE, ArchiveMark, decode_mark, digest_of
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.object_store import ObjectStore, read_whole
from topics_server.values.errors import Corrupt, NotThere, StartRefused, StorageError


@dataclass(slots=True)
class VerifiedArchive:
    """Counts of the objects that were read, and a line for each problem."""

    bases: int = 0
    parts: int = 0
    stretches: int = 0
    problems: list[str] = field(default_factory=list)


def owner_of(store: ObjectStore) -> ArchiveMark:
    """The store of this archive. Raises `StartRefused` if there is no archive, `Corrupt`."""
    path = store.path_of(ARCHIVE)
    if store.size(ARCHIVE) is None:
        raise StartRefused("is missing: this is no archive, or its disk is away", path)
    return decode_mark(read_whole(store, ARCHIVE), path)


def verify_archive(store: ObjectStore) -> VerifiedArchive:
    """*Blocking.* Read every byte of an archive, and compare it with its checksum."""
    found = VerifiedArchive()
    mark = None
    try:
        mark = owner_of(store)
    except StorageError as error:
        found.problems.append(str(error))
    history = ArchiveHistory(store)
    bases = ArchiveBases(store, history)
    problems = [*_parts(history, mark, found), *_bases(bases, found)]
    found.problems += dict.fromkeys(problems)
    return found


def _parts(
    history: ArchiveHistory, mark: ArchiveMark | None, found: VerifiedArchive
) -> Iterator[str]:
    """Read the parts; each must continue the one before it."""
    first, newest = history.first(), history.newest()
    digest, last_lsn, ts_ms, stretch = "", 0, 0, 0
    is_known = first == 1
    for number in range(first, newest + 1):
        try:
            facts, _, content = history.part(number)
        except StorageError as error:
            is_known = False
            if number < history.first():
                continue  # pruned meanwhile
            is_gone = isinstance(error, NotThere)
            yield str(Corrupt("is missing", history.path_of(number)) if is_gone else error)
            continue
        found.parts += 1
        found.stretches += facts.begins_stretch or number == first
        path = history.path_of(number)
        if mark is not None and facts.archive_id != mark.archive_id:
            yield f"{path}: is a part of another archive"
        if is_known:
            follows = facts.begins_stretch or facts.first_lsn == last_lsn + 1
            if facts.begins_stretch:
                follows = facts.first_lsn > last_lsn
            elif facts.stretch != stretch:
                follows = False
            if facts.previous != digest or not follows or facts.ts_ms < ts_ms:
                yield f"{path}: does not continue the part before it"
        digest, is_known = digest_of(content), True
        last_lsn, ts_ms, stretch = facts.last_lsn, facts.ts_ms, facts.stretch


def _bases(bases: ArchiveBases, found: VerifiedArchive) -> Iterator[str]:
    try:
        kept = bases.kept()
    except StorageError as error:
        yield str(error)
        return
    for each in kept:
        problems: list[str] = []
        try:
            base = bases.opened(each)
            problems += base.backup.damaged()
        except StorageError as error:
            problems.append(str(error))
        if problems and each not in bases.kept():
            continue  # pruned meanwhile
        found.bases += 1
        yield from problems
