"""The bases of an archive.

A base counts once a part names it, with the checksum of its `backup.json`. The newest part names
the part of the newest base, which names that of the base before it, and so on. Of the bases that a
prune has examined, only those that it kept count. A folder that no part names was left by a killed
or stopped archiver. Called by `restoring`, `verifying`, `prune` and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from topics_server.archive.continuous.format import KeptBase, base_folder, digest_of
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.format import FACTS, decode_facts
from topics_server.archive.object_store import ObjectStore, read_whole
from topics_server.archive.repository import StoredBackup
from topics_server.values.errors import Corrupt, NotThere, StorageError


class ArchiveBase(NamedTuple):
    """A base that counts. `backup_xxh3`: the checksum of its `backup.json`; `part` names it."""

    name: str
    backup_xxh3: str
    part: int
    stretch: int
    backup: StoredBackup

    @property
    def last_lsn(self) -> int:
        """The base has every entry up to this lsn, and none after it."""
        return self.backup.facts.last_lsn

    @property
    def ts_ms(self) -> int:
        """The server's time at `last_lsn`."""
        return self.backup.facts.ts_ms


class ArchiveBases:
    """The bases of one archive."""

    def __init__(self, store: ObjectStore, history: ArchiveHistory) -> None:
        self._store: Final = store
        self._history: Final = history

    def kept(self) -> list[KeptBase]:
        """Every base that counts, newest first. Raises `Corrupt` if a part is lost."""
        return list(self._kept())

    def newest(self) -> KeptBase | None:
        """The newest base that counts, by few reads; None if there is none. Raises `Corrupt`."""
        return next(self._kept(), None)

    def _kept(self) -> Iterator[KeptBase]:
        history = self._history
        pruned = history.pruned()
        judged = 0 if pruned is None else pruned.judged_part
        newest = history.newest()
        number = history.facts(newest).base_part if newest else 0
        while number > judged:
            try:
                facts = history.facts(number)
            except NotThere:
                raise Corrupt("is missing, and it names a base", history.path_of(number)) from None
            yield KeptBase(facts.base, facts.base_xxh3, number, facts.stretch)
            number = facts.base_before
        if pruned is not None:
            yield from sorted(pruned.bases, key=lambda base: -base.part)

    def opened(self, base: KeptBase) -> ArchiveBase:
        """Open a base and read its facts. Raises `StorageError`."""
        folder = base_folder(base.name)
        name = f"{folder}/{FACTS}"
        path = self._store.path_of(name)
        try:
            content = read_whole(self._store, name)
        except NotThere:
            raise Corrupt(f"is missing, and part {base.part} names it", path) from None
        if digest_of(content) != base.xxh3:
            raise Corrupt(f"is not the one that part {base.part} names", path)
        backup = StoredBackup(self._store, folder, decode_facts(content, path))
        return ArchiveBase(base.name, base.xxh3, base.part, base.stretch, backup)

    def all(self) -> tuple[list[ArchiveBase], list[str]]:
        """The readable bases, newest first, and a line for each unreadable one."""
        bases: list[ArchiveBase] = []
        problems: list[str] = []
        for each in self.kept():
            try:
                bases.append(self.opened(each))
            except StorageError as error:
                problems.append(str(error))
        return bases, problems
