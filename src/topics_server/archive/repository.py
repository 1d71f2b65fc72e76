"""The backups of a folder: list, verify, prune.

Called by the command line, `backup` and `restore`. Reading needs no lock: a backup that has its
`backup.json` is complete and never changes. Pruning takes the lock. It first marks a backup as
unfinished and removes its `backup.json`, so that a partly removed backup does not count; last, it
removes the segments that no backup needs any more. If the folder of a backup has neither
`backup.json` nor that mark, the file was lost: the backup is reported by name, and no call removes
it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from topics_server.archive.format import (
    BACKUPS,
    FACTS,
    OWNER,
    SEGMENTS,
    UNFINISHED,
    BackupFacts,
    Owner,
    SealedTopic,
    StoredPiece,
    decode_facts,
    decode_journal,
    decode_known,
    decode_owner,
    decode_sealed,
    folder_of,
    is_segment_object,
    parse_folder,
)
from topics_server.archive.known import KnownBuilder
from topics_server.archive.object_store import ObjectStore, read_whole
from topics_server.archive.sealed import problems_of
from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt, DiskFull, NotThere, StartRefused, StorageError
from topics_server.values.storage_types import KnownPositions
from topics_server.wal import layout


@dataclass(slots=True)
class Verified:
    """The result of `verify`: one line for each problem."""

    backups: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Pruned:
    """The backups and objects that `prune` removed."""

    kept: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    segments: int = 0
    bytes: int = 0


class FolderState(enum.Enum):
    """The state of a folder that holds backups."""

    WHOLE = enum.auto()
    # The folder of a backup or a prune that was killed; it is not needed.
    UNFINISHED = enum.auto()
    # The folder of a complete backup that has lost its `backup.json`.
    LOST = enum.auto()


def number_state(store: ObjectStore, number: int) -> FolderState:
    """The state of the folder of this number. Raises `StorageError`."""
    folder = folder_of(number)
    if store.size(f"{folder}/{FACTS}") is not None:
        return FolderState.WHOLE
    if store.size(f"{folder}/{UNFINISHED}") is not None or not store.names(folder):
        return FolderState.UNFINISHED
    return FolderState.LOST


class StoredBackup:
    """One backup: its facts, and the objects in its folder."""

    def __init__(self, store: ObjectStore, folder: str, facts: BackupFacts) -> None:
        self.store: Final = store
        self.folder: Final = folder
        self.facts: Final = facts

    def piece(self, piece: StoredPiece) -> bytes:
        """The content of a small piece, checked. Raises `Corrupt`."""
        return b"".join(self.chunks(piece))

    def chunks(self, piece: StoredPiece) -> Iterator[bytes]:
        """The content of a piece; compared with its checksum at the end. Raises `Corrupt`."""
        name = f"{self.folder}/{piece.name}"
        digest, size = xxhash.xxh3_64(), 0
        for chunk in self.store.read(name):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
        if (size, digest.hexdigest()) != (piece.bytes, piece.xxh3):
            raise Corrupt("fails its check", self.store.path_of(name))

    def sealed(self) -> Iterator[SealedTopic]:
        """Every topic with sealed segments."""
        for piece in self.facts.sealed:
            yield from decode_sealed(self.piece(piece), self._path(piece))

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """The journal, by lsn. Raises `Corrupt`."""
        facts, last_lsn = self.facts, 0
        for piece in facts.journal:
            for lsn, entry in decode_journal(self.piece(piece), self._path(piece)):
                if not max(last_lsn + 1, facts.start_lsn) <= lsn <= facts.last_lsn:
                    raise Corrupt(
                        f"holds lsn {lsn}, which does not follow {last_lsn}", self._path(piece)
                    )
                last_lsn = lsn
                yield lsn, entry

    def known(self) -> KnownPositions:
        """The seqs that clients may have seen up to this backup. Raises `Corrupt`."""
        piece = self.facts.known
        return decode_known(self.piece(piece), self._path(piece))

    def damaged(self) -> Iterator[str]:
        """A line for every damaged or missing object, segments included."""
        facts = self.facts
        pieces = [facts.known] if facts.snapshot is None else [facts.snapshot, facts.known]
        for piece in (*pieces, *facts.journal):
            try:
                for _ in self.chunks(piece):
                    pass
            except StorageError as error:
                yield str(error)
        try:
            for _ in self.entries():
                pass
        except StorageError as error:
            # This is a consequence of a damaged piece that is already reported.
            yield str(error)
        for piece in facts.sealed:
            try:
                topics = decode_sealed(self.piece(piece), self._path(piece))
            except StorageError as error:
                yield str(error)
                continue
            for topic in topics:
                yield from problems_of(self.store, topic)

    def _path(self, piece: StoredPiece) -> str:
        return self.store.path_of(f"{self.folder}/{piece.name}")


class Repository:
    """The backups in one folder."""

    def __init__(self, store: ObjectStore) -> None:
        self._store: Final = store

    def owner(self) -> Owner:
        """The store of these backups. Raises `StartRefused` for a folder without `STORE`."""
        path = self._store.path_of(OWNER)
        if self._store.size(OWNER) is None:
            raise StartRefused("is missing: this is no backup folder, or its disk is away", path)
        return decode_owner(read_whole(self._store, OWNER), path)

    def numbers(self) -> list[int]:
        """The backups that exist, oldest first, including those that lost their `backup.json`."""
        found = map(parse_folder, self._store.names(BACKUPS))
        return [
            number
            for number in found
            if number is not None
            and number_state(self._store, number) is not FolderState.UNFINISHED
        ]

    def facts(self, number: int) -> BackupFacts:
        """The facts of one backup. Raises `StorageError`."""
        name = f"{folder_of(number)}/{FACTS}"
        path = self._store.path_of(name)
        try:
            facts = decode_facts(read_whole(self._store, name), path)
        except NotThere:
            raise Corrupt("is missing", path) from None
        if facts.number != number:
            raise Corrupt("is of another backup", path)
        return facts

    def stored(self, facts: BackupFacts) -> StoredBackup:
        """Open the backup with these facts."""
        return StoredBackup(self._store, folder_of(facts.number), facts)

    def sealed(self, facts: BackupFacts) -> Iterator[SealedTopic]:
        """Every topic with sealed segments."""
        return self.stored(facts).sealed()

    def known(self, store_id: str, skipped: Collection[int] = ()) -> KnownPositions:
        """The seqs that clients may have seen, from all backups in the folder.

        Raises `Corrupt`: a backup that cannot be read may know more than the others. `skipped`:
        backups that are ignored.
        """
        builder = KnownBuilder()
        for number in self.numbers():
            if number in skipped:
                continue
            try:
                facts = self.facts(number)
                known = self.stored(facts).known()
            except StorageError as error:
                if number_state(self._store, number) is FolderState.UNFINISHED:
                    continue  # pruned meanwhile
                raise Corrupt(
                    f"{error}. Backup {number} may know seqs that were assigned after the others "
                    f"were made; --skip {number} restores without asking it"
                ) from None
            if facts.store_id == store_id:
                builder.note(known)
        return builder.result()

    def verify(self, numbers: Sequence[int] | None = None) -> Verified:
        """Read everything that these backups (None: all) need, and compare the checksums."""
        found = Verified()
        owner = None
        try:
            owner = self.owner()
        except StorageError as error:
            found.problems.append(str(error))
        for number in self.numbers() if numbers is None else numbers:
            problems = list(self._problems_of(number, owner))
            if problems and number_state(self._store, number) is FolderState.UNFINISHED:
                continue  # pruned meanwhile
            found.backups += 1
            # Backups share segments: report each damaged segment once.
            before = set(found.problems)
            found.problems += [each for each in dict.fromkeys(problems) if each not in before]
        return found

    def _problems_of(self, number: int, owner: Owner | None) -> Iterator[str]:
        """Every damaged or missing object of a backup, by name."""
        try:
            facts = self.facts(number)
        except StorageError as error:
            yield str(error)
            return
        if owner is not None and facts.store_id != owner.store_id:
            path = self._store.path_of(f"{folder_of(number)}/{FACTS}")
            yield f"{path}: is a backup of another store ({facts.store_id})"
        yield from self.stored(facts).damaged()

    def prune(self, keep: Collection[int]) -> Pruned:
        """Remove all backups but these, and the segments that none of these needs.

        The folder must be locked. Changes nothing if a backup cannot be read. Files that are not
        part of a backup stay.
        """
        found = Pruned(kept=sorted(keep))
        assert found.kept, "the newest backup is always kept"
        facts = {number: self.facts(number) for number in self.numbers()}
        needed = {name for number in keep for name in segment_objects(self.stored(facts[number]))}
        for name in self._store.names(BACKUPS):
            number = parse_folder(name)
            if number is None or number in keep:
                continue
            self._mark_unfinished(number)
            # From here on the backup does not exist.
            self._store.delete(f"{folder_of(number)}/{FACTS}")
            self._store.delete_folder(folder_of(number))
            found.removed.append(number)
        found.segments, found.bytes = remove_segments(self._store, needed)
        return found

    def _mark_unfinished(self, number: int) -> None:
        """Mark a backup that is being pruned as unfinished, if the disk has room for the mark."""
        try:
            self._store.put_if_absent(f"{folder_of(number)}/{UNFINISHED}", [])
        except DiskFull:
            pass


def segment_objects(backup: StoredBackup) -> Iterator[str]:
    """The names of all objects of segments that a backup needs."""
    for topic in backup.sealed():
        for segment in topic.segments:
            yield segment.data
            yield segment.idx


def remove_segments(store: ObjectStore, needed: Collection[str]) -> tuple[int, int]:
    """Remove the objects of unneeded segments; returns how many, and their bytes.

    No other process may make or prune a backup meanwhile. Files that are not part of a backup stay.
    """
    removed = size = 0
    for topic in store.names(SEGMENTS):
        if layout.parse_topic_dir(topic) is None:
            continue
        folder = f"{SEGMENTS}/{topic}"
        # The partial copies of a killed backup contain payloads too.
        store.remove_unfinished(folder)
        for name in filter(is_segment_object, store.names(folder)):
            if f"{folder}/{name}" not in needed:
                size += store.size(f"{folder}/{name}") or 0
                removed += 1
                store.delete(f"{folder}/{name}")
        if not store.names(folder):
            store.delete_folder(folder)
    return removed, size
