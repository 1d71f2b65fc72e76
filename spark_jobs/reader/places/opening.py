"""Distinguishes an archive from a data directory, and opens the place; driver only."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from spark_jobs.reader.places.folder import FolderPlace, Manifests
from spark_jobs.reader.places.segment import Segment
from topics_server.values.errors import StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.format.manifest import Manifest, SegmentEntry

if TYPE_CHECKING:
    from spark_jobs.reader.places.archive import SealedBase

ARCHIVE: Final = "ARCHIVE"


class SealedPlace(Protocol):
    """The sealed segments of all topics, from their manifests."""

    @property
    def has_fixed_flags(self) -> bool:
        """Whether delete flags never change, so that a listing always has them."""
        ...

    @property
    def as_of_ts(self) -> int | None:
        """The moment (ms, server's clock) of which the place is a copy; None if it is no copy."""
        ...

    @property
    def problems(self) -> Sequence[StorageError]:
        """Errors of unreadable parts, whose topics are unknown."""
        ...

    def topic_ids(self) -> list[int]:
        """The ids of all topics, ascending."""
        ...

    def manifest(self, topic_id: int) -> Manifest | None:
        """The topic's current manifest; None without one. Raises `StorageError`."""
        ...

    def segment(self, manifest: Manifest, entry: SegmentEntry, since_ts: int) -> Segment:
        """A listed segment; rows before `since_ts` are no longer served."""
        ...

    def flags(self, segment: Segment) -> bytes:
        """The delete flags, a byte a row. Raises `SegmentGone`, `Corrupt`."""
        ...

    def has_files(self, topic_id: int) -> bool:
        """Whether there are segments of a topic, listed or not."""
        ...


@dataclass(slots=True)
class KnownPlace:
    """Facts that an earlier place of this name read; a later place reuses them if they are
    unchanged.
    """

    manifests: Manifests = field(default_factory=dict)
    base: SealedBase | None = None


def is_archive(where: str) -> bool:
    """Whether a path or URL belongs to an archive."""
    if "://" in where:
        return True
    names = (layout.join(where, name) for name in (ARCHIVE, layout.FORMAT))
    return [os.path.exists(each) for each in names] == [True, False]


def open_place(
    where: str, cold_dir: str | None, wants_topic: Callable[[str], bool], known: KnownPlace
) -> SealedPlace:
    """Open the place that a path or URL names, and update `known`.

    Raises `StartRefused` if it is neither a data directory nor an archive, and `StorageError` with
    the name of an unreadable file or object.
    """
    if not is_archive(where):
        return FolderPlace(where, cold_dir, known.manifests)
    if cold_dir is not None:
        raise StartRefused("an archive has no cold folder: leave the option coldDir out", where)
    # Imported here, because only the driver needs it: executors import this module without it.
    from spark_jobs.reader.places.archive import ArchivePlace

    place = ArchivePlace(where, known.base, wants_topic)
    known.base = place.base
    return place
