"""The files of a topic's segments in both tiers, and their delete flags.

Flags lie outside every checksum of `.data`, because they change in place. A snapshot keeps their
digest (`file_inventory.FlagsDigest`).

Used by `wal/segments/store.py` and `wal/segments/topic_scan.py`, and by the offline verbs. Changes
nothing but the flags that its caller passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import xxhash

from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.file_inventory import FlagsDigest
from topics_server.values.limits import MIB
from topics_server.wal import layout
from topics_server.wal.atomic_write import write_temp
from topics_server.wal.format.json_objects import beside_sum
from topics_server.wal.format.manifest import HOT, SegmentEntry
from topics_server.wal.format.segment import (
    DATA_HEADER_BYTES,
    DEAD,
    LIVE,
    SegmentColumns,
    damaged_flags,
    decode_data_header,
    decode_index,
)
from topics_server.wal.fs import File, Fs

# The digest restores at most this many damaged flags, by trying both values of each.
_GUESSED_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Tiers:
    """The folders of the tiers; `cold` is `None` when there is no cold folder."""

    hot: str
    cold: str | None

    def folder(self, tier: str, topic_id: int) -> str:
        """A topic's folder in a tier. Raises `StartRefused` if there is no cold folder."""
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
        """Both paths, `.idx` first: the order in which the files are copied and removed."""
        return (
            self.idx_path(tier, topic_id, segment_id),
            self.data_path(tier, topic_id, segment_id),
        )


def copy_to_temp(fs: Fs, source: str, target: str) -> None:
    """Copy a file to a temporary name in another tier and sync it; the caller renames it."""
    file = fs.open(source)
    try:
        size = file.size()
        write_temp(fs, target, (file.pread(MIB, at) for at in range(0, size, MIB)))
    finally:
        file.close()


def read_flags(fs: Fs, path: str, entry: SegmentEntry) -> bytes | None:
    """The delete flags; `None` if the file does not have its listed size."""
    file = fs.open(path)
    try:
        return flags_of(file, entry)
    finally:
        file.close()


def is_whole(fs: Fs, path: str, entry: SegmentEntry) -> bool:
    """*Blocking.* Whether header and records of a `.data` have the listed checksum."""
    file = fs.open(path)
    try:
        end = entry.data_bytes - entry.record_count
        digest = xxhash.xxh3_64()
        for at in range(0, end, MIB):
            digest.update(file.pread(min(MIB, end - at), at))
        return file.size() == entry.data_bytes and digest.intdigest() == entry.data_checksum
    except StorageError:
        return False
    finally:
        file.close()


def check_header(fs: Fs, path: str, columns: SegmentColumns) -> None:
    """*Blocking.* Raise `Corrupt` if the header of a `.data` is damaged or of another segment."""
    file = fs.open(path)
    try:
        encoded = file.pread(DATA_HEADER_BYTES, 0)
    finally:
        file.close()
    try:
        header = decode_data_header(encoded)
    except (Corrupt, StartRefused) as error:
        raise Corrupt(str(error), path) from None
    found = header.topic_id, header.segment_id, header.record_count, header.first_seq
    if found != (columns.topic_id, columns.segment_id, columns.record_count, columns.first_seq):
        raise Corrupt("its header is that of another segment", path)


def has_sound_stamps(fs: Fs, path: str, columns: SegmentColumns) -> bool:
    """*Blocking.* Whether tags and stamps of a `.data` with JSON objects have their checksum."""
    file = fs.open(path)
    try:
        tags = file.pread(columns.records_start - DATA_HEADER_BYTES, DATA_HEADER_BYTES)
        stamps = file.pread(columns.flags_offset - columns.records_end, columns.records_end)
    finally:
        file.close()
    return beside_sum(tags, stamps) == int(columns.sums[-1])


def flags_of(file: File, entry: SegmentEntry) -> bytes | None:
    """Like `read_flags`, for an open file."""
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


def flip_file(
    fs: Fs,
    path: str,
    entry: SegmentEntry,
    hit: Sequence[int],
    known: FlagsDigest | None,
) -> FlagsDigest | None:
    """Set the delete flags of rows and sync them; return the digest of all flags after that.

    `known`: the digest of the flags that were synced last. If the file has another size or other
    flags, it is damaged: this sets nothing and returns `None`, because trusting its flags could
    bring a deleted record back. It also returns `None` if a flag of another row has neither of the
    two valid values: no later start may compare an undamaged file with such flags.
    """
    # Do not use `np.unique`: it imports a module when it first runs.
    rows = np.sort(np.asarray(hit, "<i8"))
    rows = rows[np.diff(rows, prepend=-1) > 0]
    assert 0 <= int(rows[0]) <= int(rows[-1]) < entry.record_count
    firsts = rows[np.diff(rows, prepend=-2) > 1]
    lasts = rows[np.diff(rows, append=entry.record_count + 1) > 1]
    base = entry.data_bytes - entry.record_count
    file = fs.open(path, write=True)
    try:
        before = flags_of(file, entry)
        if before is None:
            return None
        if known is not None and digest_of(before) != known:
            return None
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            file.pwrite(bytes([DEAD]) * (last - first + 1), base + first)
        file.sync()
    finally:
        file.close()
    flags = np.frombuffer(before, "u1").copy()
    flags[rows] = DEAD
    now = flags.tobytes()
    return None if len(damaged_flags(now)) else digest_of(now)


def load_index(
    fs: Fs, path: str, topic_id: int, entry: SegmentEntry, *, verify: bool
) -> SegmentColumns:
    """Map an `.idx` and check that it belongs to the listed segment. Raises `Corrupt`."""
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


def entry_of(segment_id: int, data: bytes, idx: bytes) -> SegmentEntry:
    """The manifest entry of a segment that was just packed."""
    columns = decode_index(idx, verify=False)
    assert columns.segment_id == segment_id
    assert len(data) == columns.flags_offset + columns.record_count
    return SegmentEntry(
        segment_id=segment_id,
        tier=HOT,
        first_seq=columns.first_seq,
        last_seq=columns.first_seq + columns.record_count - 1,
        first_ts=int(columns.rows["ts"][0]),
        last_ts=int(columns.rows["ts"][-1]),
        data_bytes=len(data),
        idx_bytes=len(idx),
        data_checksum=columns.data_checksum,
    )


def digest_of(flags: bytes) -> FlagsDigest:
    """The digest of a segment's flags; a damaged one counts as neither live nor dead."""
    return FlagsDigest(flags.count(DEAD), xxhash.xxh3_64_intdigest(flags))


def union_of(flags: bytes, others: bytes) -> bytes:
    """Merge two copies: rows dead in either are dead; ignores damaged flags of `others`."""
    ours, theirs = np.frombuffer(flags, "u1"), np.frombuffer(others, "u1")
    union: bytes = np.where(theirs == DEAD, DEAD, ours).astype("u1").tobytes()
    return union


def dead_with(flags: bytes, rows: bytes) -> int:
    """The number of rows that are dead by their flag or listed in `rows` (`<u4` row numbers)."""
    dead = np.frombuffer(flags, "u1") == DEAD
    dead[np.frombuffer(rows, "<u4")] = True
    return int(np.count_nonzero(dead))


def mended(flags: bytes, anchored: FlagsDigest) -> bytes | None:
    """The flags with damaged bytes set so that the anchored digest fits; None if none fits."""
    damaged = damaged_flags(flags).tolist()
    if not 0 < len(damaged) <= _GUESSED_MAX:
        return None
    column = bytearray(flags)
    for values in product((LIVE, DEAD), repeat=len(damaged)):
        for row, value in zip(damaged, values, strict=True):
            column[row] = value
        if digest_of(bytes(column)) == anchored:
            return bytes(column)
    return None
