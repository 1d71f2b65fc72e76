"""One topic's list of segments, in memory and as its manifest.

Owned by `wal/segments/store.py`, which holds a topic's `lock` around every change. The manifest is
replaced in two steps, so that a full disk is noticed before anything has changed: `prepare` writes
a temporary file, `publish` renames it. Invariant: `entries` is the list of the synced manifest,
unless `is_unsure`: a publish failed, and the manifest on disk may be the old or the new one. Then
no file that one of the two lists may be removed before another manifest is published. Every written
manifest has a higher generation than any before it, whether its publish succeeds or not:
`generation` is that of the last one known to be published.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from topics_server.values.errors import StorageError
from topics_server.values.file_inventory import FlagsDigest
from topics_server.values.model import SeqRun, TopicConfig
from topics_server.values.storage_types import TopicFacts
from topics_server.wal import layout
from topics_server.wal.atomic_write import rename_temp, write_temp
from topics_server.wal.format.manifest import (
    Manifest,
    SegmentEntry,
    decode_manifest,
    encode_manifest,
)
from topics_server.wal.fs import Fs
from topics_server.wal.segments.index import SealedColumns

Entries = dict[int, SegmentEntry]

# The high bits of a generation are the run's number, the low bits count manifests.
RUN_SHIFT: Final = 24


class ManifestStore(NamedTuple):
    """The store that writes, and the number of its run (see `wal/directory.py`)."""

    store_id: str
    run: int


@dataclass(slots=True)
class TopicManifest:
    """Segments by id. `entries` and `indexes` are replaced, never changed: readers hold no lock."""

    topic_id: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    entries: Entries = field(default_factory=dict)
    indexes: dict[int, SealedColumns] = field(default_factory=dict)
    next_segment_id: int = 0
    # The generation of the last published manifest (0: none), and the highest one ever written.
    generation: int = 0
    written_generation: int = 0
    config: TopicConfig | None = None
    # Strays, path by segment id: no manifest has listed or assigned the id.
    strays: dict[int, list[str]] = field(default_factory=dict)
    # The digest of each segment's last synced flags.
    digests: dict[int, FlagsDigest] = field(default_factory=dict)
    # The quarantined copies of replaced files, with their sizes.
    quarantined: dict[str, int] = field(default_factory=dict)
    # Segments that may have files in both tiers: a flip is made in both.
    doubled: set[int] = field(default_factory=set)
    # Segments that the start found in both tiers, with the listed copy damaged: both copies stay.
    disputed: set[int] = field(default_factory=set)
    # Segments with a failed flip: the flags on disk may be newer than `digests`.
    torn: set[int] = field(default_factory=set)
    # Segments whose drop failed: their manifest entries or files still exist.
    dropping: set[int] = field(default_factory=set)
    # Tiers in which the name of this topic's folder is known to be durable.
    safe_folders: set[str] = field(default_factory=set)
    is_unsure: bool = False

    def entry(self, segment_id: int) -> SegmentEntry:
        """The manifest entry of a segment. Raises `StorageError` if it was dropped."""
        entry = self.entries.get(segment_id)
        if entry is None:
            raise StorageError(f"segment {segment_id} of topic {self.topic_id} is gone")
        return entry

    def index(self, segment_id: int) -> SealedColumns:
        """The columns of a segment. Raises `StorageError` if it was dropped."""
        index = self.indexes.get(segment_id)
        if index is None:
            raise StorageError(f"segment {segment_id} of topic {self.topic_id} is gone")
        return index

    def prepare(
        self, fs: Fs, path: str, facts: TopicFacts, entries: Entries, store: ManifestStore
    ) -> int:
        """Write and sync the next manifest beside the current one; returns its generation."""
        assert self.lock.locked()
        assert facts.topic_id == self.topic_id
        # The first generation of a run is above those of all earlier runs, even if an older copy of
        # this manifest was restored.
        generation = max(self.written_generation + 1, store.run << RUN_SHIFT)
        manifest = Manifest(
            topic_id=facts.topic_id,
            name=facts.name,
            epoch=facts.epoch,
            config=msgspec.to_builtins(facts.config),
            head_seq=facts.head_seq,
            evict_floor=facts.evict_floor,
            holes=tuple((hole.first_seq, hole.last_seq) for hole in facts.holes),
            next_segment_id=max([self.next_segment_id, *(key + 1 for key in entries)]),
            segments=tuple(sorted(entries.values(), key=lambda entry: entry.first_seq)),
            generation=generation,
            store_id=store.store_id,
        )
        self.written_generation = generation
        write_temp(fs, path, [encode_manifest(manifest)])
        self.next_segment_id = manifest.next_segment_id
        return generation

    def publish(
        self, fs: Fs, path: str, facts: TopicFacts, entries: Entries, generation: int
    ) -> None:
        """Publish the prepared manifest; from then on `entries` is its list."""
        self.is_unsure = True
        rename_temp(fs, path)
        fs.sync_dir(layout.parent(path))
        self.is_unsure = False
        self.entries = entries
        self.generation = generation
        self.config = facts.config


def read_manifest(fs: Fs, path: str) -> Manifest | None:
    """The manifest on disk; `None` if there is none. Raises `Corrupt`, `StartRefused` (newer)."""
    if not fs.exists(path):
        return None
    file = fs.open(path)
    try:
        encoded = file.pread(file.size(), 0)
    finally:
        file.close()
    try:
        return decode_manifest(encoded)
    except StorageError as error:
        raise type(error)(str(error), path) from None


def facts_of(manifest: Manifest) -> TopicFacts:
    """The facts of a manifest other than its segments, as the engine's type."""
    return TopicFacts(
        topic_id=manifest.topic_id,
        name=manifest.name,
        epoch=manifest.epoch,
        config=msgspec.convert(manifest.config, TopicConfig),
        head_seq=manifest.head_seq,
        evict_floor=manifest.evict_floor,
        holes=[SeqRun(first, last) for first, last in manifest.holes],
    )
