"""The backups of a folder: list, verify, prune.

Called by the command line and `restore`. Reading needs no lock: a backup that has its
`backup.json` is whole and never changes. Pruning takes the lock, removes `backup.json` first, so
that a backup that is half removed does not count, and removes segments last, those that no backup
needs any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from topics_server.archive.format import (
    BACKUPS,
    FACTS,
    OWNER,
    SEGMENTS,
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
    parse_folder,
)
from topics_server.archive.known import KnownBuilder
from topics_server.archive.object_store import ObjectStore, read_whole
from topics_server.archive.sealed import check_topic
from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.storage_types import KnownPositions


@dataclass(slots=True)
class Verified:
    """What `verify` found: a line for each problem."""

    backups: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Pruned:
    """What `prune` removed."""

    kept: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    segments: int = 0
    bytes: int = 0


class Repository:
    """The backups in one folder."""

    def __init__(self, store: ObjectStore) -> None:
        self._store: Final = store

    def owner(self) -> Owner:
        """Whose backups these are. Raises `StartRefused` for a folder without `STORE`."""
        path = self._store.path_of(OWNER)
        if self._store.size(OWNER) is None:
            raise StartRefused("is missing: this is no backup folder, or its disk is away", path)
        return decode_owner(read_whole(self._store, OWNER), path)

    def numbers(self) -> list[int]:
        """Backups that exist, oldest first."""
        found = map(parse_folder, self._store.names(BACKUPS))
        return [
            number
            for number in found
            if number is not None and self._store.size(f"{folder_of(number)}/{FACTS}") is not None
        ]

    def facts(self, number: int) -> BackupFacts:
        """The facts of one backup. Raises `StorageError`."""
        name = f"{folder_of(number)}/{FACTS}"
        path = self._store.path_of(name)
        facts = decode_facts(read_whole(self._store, name), path)
        if facts.number != number or facts.store_id != self.owner().store_id:
            raise Corrupt("is of another backup", path)
        return facts

    def piece(self, facts: BackupFacts, piece: StoredPiece) -> bytes:
        """The content of a small piece, checked. Raises `Corrupt`."""
        return b"".join(self.chunks(facts, piece))

    def chunks(self, facts: BackupFacts, piece: StoredPiece) -> Iterator[bytes]:
        """The content of a piece; compared with its checksum at the end. Raises `Corrupt`."""
        name = f"{folder_of(facts.number)}/{piece.name}"
        digest, size = xxhash.xxh3_64(), 0
        for chunk in self._store.read(name):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
        if (size, digest.hexdigest()) != (piece.bytes, piece.xxh3):
            raise Corrupt("fails its check", self._store.path_of(name))

    def sealed(self, facts: BackupFacts) -> Iterator[SealedTopic]:
        """Every topic with sealed segments."""
        for piece in facts.sealed:
            yield from decode_sealed(self.piece(facts, piece), self._path(facts, piece))

    def entries(self, facts: BackupFacts) -> Iterator[tuple[int, Entry]]:
        """The journal, by lsn. Raises `Corrupt`."""
        last_lsn = 0
        for piece in facts.journal:
            for lsn, entry in decode_journal(self.piece(facts, piece), self._path(facts, piece)):
                if not max(last_lsn + 1, facts.start_lsn) <= lsn <= facts.last_lsn:
                    raise Corrupt(
                        f"holds lsn {lsn}, which does not follow {last_lsn}",
                        self._path(facts, piece),
                    )
                last_lsn = lsn
                yield lsn, entry

    def known(self) -> KnownPositions:
        """What clients may have seen, as far as any backup in the folder tells.

        Raises `StorageError`: a backup that cannot be read may know more than the others.
        """
        builder = KnownBuilder()
        for number in self.numbers():
            facts = self.facts(number)
            content = self.piece(facts, facts.known)
            builder.note(decode_known(content, self._path(facts, facts.known)))
        return builder.result()

    def verify(self, numbers: Sequence[int] | None = None) -> Verified:
        """Read everything that these backups need (all if None), and compare it."""
        found = Verified()
        for number in self.numbers() if numbers is None else numbers:
            found.backups += 1
            try:
                facts = self.facts(number)
            except StorageError as error:
                found.problems.append(str(error))
                continue
            found.problems += self._problems_of(facts)
        return found

    def _problems_of(self, facts: BackupFacts) -> list[str]:
        problems: list[str] = []
        pieces = [facts.known] if facts.snapshot is None else [facts.snapshot, facts.known]
        for piece in pieces:
            try:
                for _ in self.chunks(facts, piece):
                    pass
            except StorageError as error:
                problems.append(str(error))
        try:
            for _ in self.entries(facts):
                pass
        except StorageError as error:
            problems.append(str(error))
        try:
            for topic in self.sealed(facts):
                try:
                    check_topic(self._store, topic)
                except StorageError as error:
                    problems.append(f"backup {facts.number}: {error}")
        except StorageError as error:
            problems.append(str(error))
        return problems

    def prune(self, keep: Collection[int]) -> Pruned:
        """Remove all backups but these, and the segments that none of these needs.

        The folder must be locked. Changes nothing if a kept backup cannot be read.
        """
        found = Pruned(kept=sorted(keep))
        assert found.kept, "the newest backup is always kept"
        needed = {
            name
            for number in keep
            for topic in self.sealed(self.facts(number))
            for segment in topic.segments
            for name in (segment.data, segment.idx)
        }
        for name in self._store.names(BACKUPS):
            number = parse_folder(name)
            if number is None or number in keep:
                continue
            # From here on it does not exist.
            self._store.delete(f"{folder_of(number)}/{FACTS}")
            self._store.delete_folder(folder_of(number))
            found.removed.append(number)
        for topic in self._store.names(SEGMENTS):
            folder = f"{SEGMENTS}/{topic}"
            names = self._store.names(folder)
            for name in names:
                self._remove_unneeded(f"{folder}/{name}", needed, found)
            if not self._store.names(folder):
                self._store.delete_folder(folder)
        return found

    def _remove_unneeded(self, name: str, needed: set[str], found: Pruned) -> None:
        if name not in needed:
            found.bytes += self._store.size(name) or 0
            found.segments += 1
            self._store.delete(name)

    def _path(self, facts: BackupFacts, piece: StoredPiece) -> str:
        return self._store.path_of(f"{folder_of(facts.number)}/{piece.name}")
