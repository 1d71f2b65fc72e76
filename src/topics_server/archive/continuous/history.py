"""Reads an archive: its parts, and which of them follow each other.

A part never changes, so reading needs no lock. Called by `shipper`, `bases`, `moments`,
`restoring`, `verifying` and `prune`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from topics_server.archive.continuous.format import (
    PARTS,
    PRUNED,
    PartFacts,
    PrunedFacts,
    decode_part,
    decode_part_facts,
    decode_pruned,
    is_part_group,
    parse_part,
    part_group,
    part_name,
    pruned_name,
)
from topics_server.archive.object_store import ObjectStore, read_whole
from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt, NotThere


class NeededPart(NamedTuple):
    """The few facts that a restore keeps of each part; there may be tens of thousands."""

    number: int
    run: int
    first_lsn: int
    last_lsn: int
    frames_bytes: int
    body_xxh3: str

    @classmethod
    def of(cls, facts: PartFacts) -> NeededPart:
        """Take the facts of a part that a restore keeps."""
        return cls(
            facts.number,
            facts.run,
            facts.first_lsn,
            facts.last_lsn,
            facts.frames_bytes,
            facts.body_xxh3,
        )


class ArchiveHistory:
    """The current parts of one archive."""

    def __init__(self, store: ObjectStore) -> None:
        self._store: Final = store

    # -- numbers -------------------------------------------------------------------------------

    def newest(self) -> int:
        """The number of the newest part; 0 if there is none."""
        for group in reversed(self._groups()):
            numbers = self._numbers_in(group)
            if numbers:
                return numbers[-1]
        return 0

    def numbers(self) -> list[int]:
        """The numbers of all existing parts, ascending, without pruned ones."""
        first = self.first()
        found = (number for group in self._groups() for number in self._numbers_in(group))
        return [number for number in found if number >= first]

    def first(self) -> int:
        """The number of the oldest part that no prune removed."""
        pruned = self.pruned()
        return 1 if pruned is None else pruned.first_part

    def _groups(self) -> list[str]:
        return [f"{PARTS}/{name}" for name in self._store.names(PARTS) if is_part_group(name)]

    def _numbers_in(self, group: str) -> list[int]:
        found = map(parse_part, self._store.names(group))
        return [number for number in found if number is not None and part_group(number) == group]

    def pruned(self) -> PrunedFacts | None:
        """The report of the newest prune; None if there was none. Raises `Corrupt`."""
        gone: int | None = None
        while True:
            found = map(parse_part, self._store.names(PRUNED))
            numbers = [each for each in found if each is not None]
            if not numbers:
                return None
            name = pruned_name(max(numbers))
            try:
                content = read_whole(self._store, name)
            except NotThere:
                # A prune has ended meanwhile and left a higher number: look again.
                if gone == max(numbers):
                    raise
                gone = max(numbers)
            else:
                return decode_pruned(content, self._store.path_of(name))

    # -- parts ---------------------------------------------------------------------------------

    def path_of(self, number: int) -> str:
        """The path of a part, for messages."""
        return self._store.path_of(part_name(number))

    def content(self, number: int) -> bytes:
        """The bytes of a part. Raises `NotThere`."""
        return read_whole(self._store, part_name(number))

    def facts(self, number: int) -> PartFacts:
        """The facts of a part; does not read its frames.

        Raises `NotThere`, `Corrupt`.
        """
        path = self.path_of(number)
        content = next(iter(self._store.read(part_name(number))), b"")
        try:
            found, _ = decode_part_facts(content, path)
        except Corrupt:
            # The facts are longer than a chunk, or damaged.
            found, _ = decode_part_facts(self.content(number), path)
        if found.number != number:
            raise Corrupt(f"is part {found.number}", path)
        return found

    def part(self, number: int) -> tuple[PartFacts, list[tuple[int, Entry]], bytes]:
        """A part, its entries and its bytes. Raises `NotThere`, `Corrupt`."""
        content = self.content(number)
        facts, entries = decode_part(content, self.path_of(number))
        if facts.number != number:
            raise Corrupt(f"is part {facts.number}", self.path_of(number))
        return facts, entries, content

    def entries_of(self, needed: NeededPart) -> list[tuple[int, Entry]]:
        """The entries of a part. Raises `Corrupt`, also if it is not the needed part."""
        try:
            facts, entries, _ = self.part(needed.number)
        except NotThere:
            raise Corrupt("is missing", self.path_of(needed.number)) from None
        if NeededPart.of(facts) != needed:
            raise Corrupt("is another part than before", self.path_of(needed.number))
        return entries

    # -- moments -------------------------------------------------------------------------------

    def last_part(self, numbers: list[int], is_within: Callable[[PartFacts], bool]) -> int | None:
        """The newest part for which `is_within` is true; it must be true for all earlier parts."""
        low, high = 0, len(numbers)
        while low < high:
            middle = (low + high) // 2
            if is_within(self.facts(numbers[middle])):
                low = middle + 1
            else:
                high = middle
        return numbers[low - 1] if low else None

    def needed_parts(self, stretch: int, base_lsn: int, last: int) -> Iterator[NeededPart]:
        """The parts of a stretch with entries after a base, up to a part. Reads each of them.

        Raises `Corrupt` if a part is missing or does not continue the part before it.
        """
        first = self.first_behind(stretch, base_lsn, last)
        lsn = None
        for number in range(first, last + 1):
            try:
                facts = self.facts(number)
            except NotThere:
                raise Corrupt("is missing", self.path_of(number)) from None
            follows = facts.first_lsn <= base_lsn + 1 if lsn is None else facts.first_lsn == lsn + 1
            if facts.stretch != stretch or not follows:
                raise Corrupt("does not continue the part before it", self.path_of(number))
            lsn = facts.last_lsn
            yield NeededPart.of(facts)

    def first_behind(self, stretch: int, base_lsn: int, last: int) -> int:
        """Find, by halving, the first part of a stretch that may have entries after an lsn.

        An unreadable part counts as one that has such entries; reading the parts reports it later.
        """
        low, high = max(stretch, self.first()), last
        while low < high:
            middle = (low + high) // 2
            try:
                is_behind = self.facts(middle).last_lsn > base_lsn
            except (NotThere, Corrupt):
                is_behind = True
            if is_behind:
                high = middle
            else:
                low = middle + 1
        return low
