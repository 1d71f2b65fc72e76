"""Journaled state beside topics: its interface for commit and recovery. Pure.

A projection is what its entries made of it: applied live and in replay alike, captured into parts
of a snapshot and restored from them. Each has a reserved id (`entries.RESERVED_ID_MIN`), which is
the FIFO of its entries and the id of its parts. Topics are not listed here: the registry holds
them, and their path is too hot for a look-up. Satisfied by `sessions`; made known by the wiring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from topics_server.engine.topic.topic import Applied
from topics_server.values.entries import Entry


class ProjectionOwner(Protocol):
    """Who decides the entries of one FIFO, and so has to know which are under way. A topic, too."""

    def stage(self, lsn: int, entry: Entry) -> None:
        """Note that this entry is under way."""
        ...

    def commit_staged(self, lsn: int) -> None:
        """Take the oldest entry off, it is about to be applied."""
        ...

    def undo_from(self, lsn: int) -> None:
        """Forget the entries of this lsn and later: nobody has seen them."""
        ...


class Projection(ProjectionOwner, Protocol):
    """State that is no topic's."""

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """Change visible state. Never fails; an entry that is in already changes nothing."""
        ...

    def capture(self) -> Iterator[bytes]:
        """The parts of a snapshot, each encoded in a slice; entries may be applied in between."""
        ...

    def restore(self, part: bytes) -> None:
        """Take one captured part over. Raises `ValueError` for bytes that are no such part."""
        ...


Projections = Mapping[int, Projection]
NO_PROJECTIONS: Final[Projections] = {}
