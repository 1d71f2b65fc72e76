"""The files of one topic's segments in both tiers, and what they are worth when found at start.

Used by `wal/segments.py`. `settle` brings a topic's folders back to what its manifest says, after
a crash at any point: unfinished and unlisted files go, a segment found in both tiers keeps the
union of its delete flags and loses one copy, flags that were found are written again and synced
(they may only be in the page cache). Every step may be interrupted and repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from topics_server.errors import Corrupt, StartRefused, StorageError
from topics_server.limits import MIB
from topics_server.wal import layout
from topics_server.wal.fs import File, Fs
from topics_server.wal.manifest_format import COLD, HOT, Manifest, SegmentEntry
from topics_server.wal.publishing import rename_temp, write_temp
from topics_server.wal.segment_blocks import rebuild_index
from topics_server.wal.segment_format import DEAD, Columns, damaged_flags, decode_index


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where the tiers lie; `cold` is `None` when there is no cold folder."""

    hot: str
    cold: str | None

    def folder(self, tier: str, topic_id: int) -> str:
        """A topic's folder in a tier. Raises `StartRefused` for the cold one without a folder."""
        root = self.hot if tier == HOT else self.cold
        if root is None:
            raise StartRefused(f"topic {topic_id} has cold segments and no cold folder is set")
        return layout.join(root, layout.topic_dir(topic_id))

    def folders(self, topic_id: int) -> list[str]:
        """A topic's folders, hot first."""
        roots = [self.hot] if self.cold is None else [self.hot, self.cold]
        return [layout.join(root, layout.topic_dir(topic_id)) for root in roots]

    def data_path(self, tier: str, topic_id: int, segment_id: int) -> str:
        """Path of a segment's records."""
        return layout.join(self.folder(tier, topic_id), layout.segment_data(segment_id))

    def idx_path(self, tier: str, topic_id: int, segment_id: int) -> str:
        """Path of a segment's columns."""
        return layout.join(self.folder(tier, topic_id), layout.segment_idx(segment_id))

    def paths(self, tier: str, topic_id: int, segment_id: int) -> tuple[str, str]:
        """Both, `.idx` first: it is the order in which they are copied and removed."""
        return (
            self.idx_path(tier, topic_id, segment_id),
            self.data_path(tier, topic_id, segment_id),
        )


def copy_to_temp(fs: Fs, source: str, target: str) -> None:
    """Copy a file beside its place in another tier, synced, not yet renamed."""
    file = fs.open(source)
    try:
        size = file.size()
        write_temp(fs, target, (file.pread(MIB, at) for at in range(0, size, MIB)))
    finally:
        file.close()


def settle(fs: Fs, tiers: Tiers, manifest: Manifest) -> Manifest:
    """Bring the folders to what the manifest lists; the manifest with the tiers as they are now.

    Raises `StartRefused` for a listed file that is missing.
    """
    topic_id = manifest.topic_id
    folders = tiers.folders(topic_id)
    present = {folder: set(fs.list_dir(folder)) for folder in folders}
    for folder in folders:
        if present[folder]:
            # A rename that recovery relies on must not be undone by a later power cut.
            fs.sync_dir(folder)
    entries = tuple(_settle_segment(fs, tiers, topic_id, entry) for entry in manifest.segments)
    listed = {entry.segment_id for entry in entries}
    for folder in folders:
        for name in sorted(present[folder]):
            found = layout.parse_segment_file(name)
            if layout.is_temp(name) or (found is not None and found[0] not in listed):
                fs.unlink(layout.join(folder, name), missing_ok=True)
    return replace(manifest, segments=entries)


def _settle_segment(fs: Fs, tiers: Tiers, topic_id: int, entry: SegmentEntry) -> SegmentEntry:
    """One listed segment: where it is; copies in both tiers get each other's flags first."""
    has_cold = tiers.cold is not None and _is_complete(fs, tiers, COLD, topic_id, entry)
    has_hot = _is_complete(fs, tiers, HOT, topic_id, entry)
    if entry.tier == HOT and has_cold and not has_hot:
        entry = replace(entry, tier=COLD)
    elif not (has_hot if entry.tier == HOT else has_cold):
        # A hot copy cannot stand in for a listed cold one, which may hold newer flags.
        paths = tiers.paths(entry.tier, topic_id, entry.segment_id)
        missing = [path for path in paths if not fs.exists(path)]
        hint = "; is the cold disk mounted?" if entry.tier == COLD else ""
        raise StartRefused(f"a listed segment file is missing{hint}", missing[0])
    if tiers.cold is not None:
        other = COLD if entry.tier == HOT else HOT
        kept = tiers.data_path(entry.tier, topic_id, entry.segment_id)
        merge_flags(fs, tiers.data_path(other, topic_id, entry.segment_id), kept, entry)
        for path in tiers.paths(other, topic_id, entry.segment_id):
            if fs.exists(path):
                fs.unlink(path)
    return entry


def _is_complete(fs: Fs, tiers: Tiers, tier: str, topic_id: int, entry: SegmentEntry) -> bool:
    return all(fs.exists(path) for path in tiers.paths(tier, topic_id, entry.segment_id))


def merge_flags(fs: Fs, source: str, target: str, entry: SegmentEntry) -> None:
    """Set in `target` what is set in `source` (if it is there), durably."""
    if not fs.exists(source):
        return
    extra = read_flags(fs, source, entry)
    own = read_flags(fs, target, entry)
    if extra is None or own is None:
        return
    union = np.frombuffer(own, "u1") | np.where(np.frombuffer(extra, "u1") == DEAD, DEAD, 0)
    write_flags(fs, target, entry, union.astype("u1").tobytes())


def read_flags(fs: Fs, path: str, entry: SegmentEntry) -> bytes | None:
    """The delete flags; `None` when the file has not the size it was listed with."""
    file = fs.open(path)
    try:
        return flags_of(file, entry)
    finally:
        file.close()


def flags_of(file: File, entry: SegmentEntry) -> bytes | None:
    """As `read_flags`, of an open file."""
    if file.size() != entry.data_bytes:
        return None
    flags = file.pread(entry.record_count, entry.data_bytes - entry.record_count)
    assert len(flags) == entry.record_count
    return flags


def write_flags(fs: Fs, path: str, entry: SegmentEntry, flags: bytes) -> None:
    """Write all flags in place and sync them."""
    assert len(flags) == entry.record_count
    file = fs.open(path, write=True)
    try:
        file.pwrite(flags, entry.data_bytes - entry.record_count)
        file.sync()
    finally:
        file.close()


def found_flags(fs: Fs, path: str, entry: SegmentEntry) -> list[int] | None:
    """Make the flags found at start durable; rows whose flag is damaged, `None`: no flags left.

    Flags found may be in the page cache only, and a sync that failed before would not be repeated
    by another one: they are written again.
    """
    flags = read_flags(fs, path, entry)
    if flags is None:
        return None
    if any(flags):
        write_flags(fs, path, entry, flags)
    bad: list[int] = damaged_flags(flags).tolist()
    return bad


def load_index(fs: Fs, path: str, topic_id: int, entry: SegmentEntry, *, verify: bool) -> Columns:
    """Map an `.idx` and see that it belongs to the listed segment. Raises `Corrupt`."""
    try:
        columns = decode_index(fs.map(path), verify=verify)
    except Corrupt as error:
        raise Corrupt(str(error), path) from None
    except StartRefused as error:
        raise StartRefused(str(error), path) from None
    found = (
        columns.topic_id,
        columns.segment_id,
        columns.first_seq,
        columns.record_count,
        columns.flags_offset,
        columns.data_checksum,
    )
    if found != (
        topic_id,
        entry.segment_id,
        entry.first_seq,
        entry.record_count,
        entry.data_bytes - entry.record_count,
        entry.data_checksum,
    ):
        raise Corrupt("the index belongs to another segment than the one listed", path)
    return columns


def repair_index(fs: Fs, idx_path: str, data_path: str) -> bool:
    """Make a damaged `.idx` again from its records; False if they are damaged too."""
    file = fs.open(data_path)
    try:
        data = file.pread(file.size(), 0)
    finally:
        file.close()
    index = rebuild_index(data)
    if index is None:
        return False
    try:
        write_temp(fs, idx_path, [index])
    except StorageError:
        return False
    rename_temp(fs, idx_path)
    fs.sync_dir(layout.parent(idx_path))
    return True
