"""Journaled state beside topics: its interface for commit and recovery. Pure.

A projection is the result of its entries: applied live and in replay alike, captured into parts of
a snapshot and restored from them. Each has a reserved id (`entries.RESERVED_ID_MIN`), which names
the FIFO of its entries and its parts. Topics are in the registry instead, because a look-up here
would slow their path. `sessions`, the lease table and the router table satisfy `Projection`;
`node/boot` registers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from topics_server.engine.topic.applied import Applied
from topics_server.values.entries import Entry


class ProjectionOwner(Protocol):
    """The owner of one FIFO: decides its entries and keeps those in flight. A topic is one too."""

    def stage(self, lsn: int, entry: Entry) -> None:
        """Note that this entry is in flight."""
        ...

    def commit_staged(self, lsn: int) -> None:
        """Remove the oldest entry: it is about to be applied."""
        ...

    def undo_from(self, lsn: int) -> None:
        """Forget the entries of this lsn and later: no reader has seen them."""
        ...


class Projection(ProjectionOwner, Protocol):
    """State that does not belong to one topic."""

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """Change visible state. Never fails; an entry that is already included changes nothing."""
        ...

    def capture(self) -> Iterator[bytes]:
        """The parts of a snapshot, each encoded in one slice; entries may be applied in between."""
        ...

    def restore(self, part: bytes) -> None:
        """Add one captured part. Raises `ValueError` for invalid bytes."""
        ...


Projections = Mapping[int, Projection]
NO_PROJECTIONS: Final[Projections] = {}
