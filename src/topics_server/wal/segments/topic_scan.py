"""Scans one topic's folders at start and applies the manifest.

`scan` reads and changes nothing: manifest, files of both tiers, delete flags, indexes. Its report
(`file_inventory.FoundTopic`) is evaluated after replay. Then `tidy` makes durable what recovery
relies on, writes rebuilt indexes, and removes superseded files: unfinished ones, the second copy of
a segment that is in both tiers, and unlisted files whose id the manifest has assigned before. Every
step may be interrupted and repeated.

A file whose id no manifest has assigned is a stray: it belongs to an unfinished seal, or to a
segment of a lost manifest. Its records are in the journal or the snapshot. It stays until a
published manifest has assigned its id. Used by `wal/segments/store.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.file_inventory import Anchor, FoundTopic, Objection, Stray, Suspect
from topics_server.wal import layout
from topics_server.wal.format.manifest import COLD, HOT, Manifest, SegmentEntry
from topics_server.wal.format.segment import (
    DATA_HEADER_BYTES,
    DataHeader,
    damaged_flags,
    decode_data_header,
)
from topics_server.wal.fs import Fs
from topics_server.wal.segments.files import (
    Tiers,
    dead_with,
    digest_of,
    is_whole,
    mended,
    read_flags,
    union_of,
    write_flags,
)
from topics_server.wal.segments.topic_manifest import facts_of, read_manifest

NO_ANCHOR: Final = Anchor(0, 1, {}, {})


@dataclass(slots=True)
class FoundSegment:
    """One listed segment. `entry` has the tier in which the segment is now.

    `flags`: the union of the flags of its copies, with damaged bytes corrected where the anchor
    allows it; `None` if the file does not have its listed size: then the flags are lost. `index`:
    the rebuilt `.idx`, if the one on disk is damaged. `seconds`: the files of a copy in the other
    tier, complete or not. `keeps_seconds`: both copies stay, because it is not known which one is
    undamaged.
    """

    entry: SegmentEntry
    flags: bytes | None
    is_mended: bool
    seconds: list[str]
    index: bytes | None = None
    keeps_seconds: bool = False

    @property
    def bad_rows(self) -> list[int]:
        """Rows whose flag has neither of the two valid values."""
        rows: list[int] = [] if self.flags is None else damaged_flags(self.flags).tolist()
        return rows


@dataclass(slots=True)
class FoundFiles:
    """A topic's files. `temps`: unfinished ones; `passed`: unlisted ones with an assigned id."""

    report: FoundTopic
    manifest: Manifest | None = None
    folders: list[str] = field(default_factory=list)
    segments: list[FoundSegment] = field(default_factory=list)
    temps: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    strays: dict[int, list[str]] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        """Whether there is a manifest and no fault in the files that it lists."""
        return self.manifest is not None and not self.report.objections


def scan(
    fs: Fs, tiers: Tiers, topic_id: int, store_id: str, anchor: Anchor | None = None
) -> FoundFiles:
    """*Blocking.* Scan everything on disk under a topic's id."""
    path = layout.join(tiers.folder(HOT, topic_id), layout.MANIFEST)
    found = FoundFiles(FoundTopic(topic_id, path))
    report = found.report
    try:
        manifest = found.manifest = read_manifest(fs, path)
    except StorageError as error:
        report.objections.append(objection_of(error, path))
        return found
    names = {folder: fs.list_dir(folder) for folder in tiers.folders(topic_id)}
    found.folders = [folder for folder in names if names[folder]]
    if manifest is not None:
        _note_manifest(report, manifest, store_id)
        if not report.objections:
            present = {layout.join(folder, name) for folder in names for name in names[folder]}
            for entry in manifest.segments:
                segment = _segment(fs, tiers, report, entry, present, anchor or NO_ANCHOR)
                if segment is not None:
                    found.segments.append(segment)
    _sort_files(fs, found, names)
    return found


def objection_of(error: StorageError, path: str) -> Objection:
    """The message of a failed read, with the file's path (`path` if the error has none)."""
    path = error.path or path
    return Objection(path, str(error).removeprefix(f"{path}: "))


def _note_manifest(report: FoundTopic, manifest: Manifest, store_id: str) -> None:
    report.generation = manifest.generation
    report.next_segment_id = report.first_free_id = manifest.next_segment_id
    report.last_seq = manifest.segments[-1].last_seq if manifest.segments else 0
    report.facts = facts_of(manifest)
    if manifest.topic_id != report.topic_id:
        text = f"is the manifest of topic {manifest.topic_id}"
        report.objections.append(Objection(report.path, text))
    elif manifest.store_id and store_id and manifest.store_id != store_id:
        text = f"is the manifest of another store ({manifest.store_id}, this one is {store_id})"
        report.objections.append(Objection(report.path, text))


def _segment(
    fs: Fs,
    tiers: Tiers,
    report: FoundTopic,
    entry: SegmentEntry,
    present: set[str],
    anchor: Anchor,
) -> FoundSegment | None:
    """The path and flags of a listed segment; `None` with an objection if it is missing."""
    topic_id, segment_id = report.topic_id, entry.segment_id
    if entry.tier == COLD and tiers.cold is None:
        text = f"topic {topic_id} has cold segments and no cold folder is set"
        report.objections.append(Objection(report.path, text))
        return None
    paths = {HOT: tiers.paths(HOT, topic_id, segment_id)}
    if tiers.cold is not None:
        paths[COLD] = tiers.paths(COLD, topic_id, segment_id)
    complete = {tier for tier in paths if present.issuperset(paths[tier])}
    if entry.tier == HOT and complete == {COLD}:
        entry = replace(entry, tier=COLD)
    elif entry.tier not in complete:
        # A hot copy cannot replace a listed cold one, which may hold newer flags.
        missing = [path for path in paths[entry.tier] if path not in present]
        hint = "; is the cold disk mounted?" if entry.tier == COLD else ""
        text = f"a listed segment file is missing{hint} ({report.path} lists it)"
        report.objections.append(Objection(missing[0], text))
        return None
    other = COLD if entry.tier == HOT else HOT
    seconds = [path for path in paths.get(other, ()) if path in present]
    try:
        flags = _read_flags_twice(fs, paths[entry.tier][1], entry)
        if flags is not None and other in paths and paths[other][1] in seconds:
            copy = paths[other][1]
            extra = read_flags(fs, copy, entry) if _is_of(fs, copy, topic_id, entry) else None
            flags = flags if extra is None else union_of(flags, extra)
    except StorageError as error:
        report.objections.append(objection_of(error, paths[entry.tier][1]))
        return None
    right = _anchored(report, entry, flags, anchor)
    return FoundSegment(entry, right, right is not flags, seconds)


def _read_flags_twice(fs: Fs, path: str, entry: SegmentEntry) -> bytes | None:
    """Read the flags; a read that fails or finds another size is repeated once."""
    try:
        flags = read_flags(fs, path, entry)
    except StorageError:
        flags = None
    return read_flags(fs, path, entry) if flags is None else flags


def _is_of(fs: Fs, path: str, topic_id: int, entry: SegmentEntry) -> bool:
    """Whether the header of a `.data` belongs to the listed segment."""
    header = _header(fs, path)
    return header is not None and (
        (header.topic_id, header.segment_id, header.first_seq, header.file_bytes)
        == (topic_id, entry.segment_id, entry.first_seq, entry.data_bytes)
    )


def _header(fs: Fs, path: str) -> DataHeader | None:
    """The header of a `.data`; `None` if it is invalid."""
    file = fs.open(path)
    try:
        return decode_data_header(file.pread(DATA_HEADER_BYTES, 0))
    except (Corrupt, StartRefused):
        return None
    finally:
        file.close()


def _anchored(
    report: FoundTopic, entry: SegmentEntry, flags: bytes | None, anchor: Anchor
) -> bytes | None:
    """Correct the flags where the anchor allows it, and report a difference from the anchor."""
    if flags is None:
        return None
    segment_id = entry.segment_id
    anchored = anchor.flags.get(segment_id)
    digest = digest_of(flags)
    if anchored is not None and digest != anchored:
        right = mended(flags, anchored)
        if right is not None:
            flags, digest = right, anchored
        else:
            is_whole = segment_id in anchor.whole_flips
            rows = anchor.flips.get(segment_id, b"") if is_whole else b""
            # A damaged flag may be a dead one: only its row is reported as damaged.
            unclear = len(damaged_flags(flags))
            report.suspects[segment_id] = Suspect(
                entry.first_seq,
                entry.last_seq,
                known_dead=dead_with(flags, rows) + unclear,
                anchored_dead=anchored.dead_count,
                is_touched=segment_id in anchor.flips,
                has_damaged_flags=unclear > 0,
            )
    elif anchored is None and len(damaged_flags(flags)):
        # The segment is newer than the snapshot: its flags can be compared with nothing.
        dead = dead_with(flags, b"") + len(damaged_flags(flags))
        report.suspects[segment_id] = Suspect(
            *(entry.first_seq, entry.last_seq, dead),
            anchored_dead=0,
            is_touched=True,
            has_damaged_flags=True,
        )
    report.flags[segment_id] = digest
    return flags


def _sort_files(fs: Fs, found: FoundFiles, names: dict[str, list[str]]) -> None:
    """Sort unlisted files: unfinished, superseded, or a stray."""
    report = found.report
    named = {entry.segment_id for entry in found.manifest.segments} if found.manifest else set()
    for folder, name in ((where, each) for where in names for each in names[where]):
        path = layout.join(folder, name)
        if layout.is_temp(name):
            found.temps.append(path)
            continue
        parsed = layout.parse_segment_file(name)
        if parsed is None or parsed[0] in named:
            continue
        segment_id, suffix = parsed
        if segment_id < report.next_segment_id and found.manifest is not None:
            found.passed.append(path)
            continue
        found.strays.setdefault(segment_id, []).append(path)
        report.first_free_id = max(report.first_free_id, segment_id + 1)
        header = _header(fs, path) if suffix == layout.DATA_SUFFIX else None
        if header is not None:
            last_seq = header.first_seq + header.record_count - 1
            report.strays.append(Stray(path, last_seq))


# -- after the judgement -----------------------------------------------------------------------


def tidy(fs: Fs, tiers: Tiers, found: FoundFiles, untrusted: Collection[int]) -> None:
    """*Blocking.* Make the folders match the manifest. `untrusted`: segments to leave as is."""
    for folder in found.folders:
        # A power cut must not undo a rename that recovery relies on.
        fs.sync_dir(folder)
    for segment in found.segments:
        entry = segment.entry
        path = tiers.data_path(entry.tier, found.report.topic_id, entry.segment_id)
        if segment.flags is None or entry.segment_id in untrusted:
            segment.keeps_seconds = bool(segment.seconds)
            continue
        if any(segment.flags) or segment.is_mended:
            # The flags may be in the page cache only, and a sync does not repeat what an earlier
            # sync failed to write: write the flags again.
            write_flags(fs, path, entry, segment.flags)
        if segment.seconds and (segment.bad_rows or not is_whole(fs, path, entry)):
            segment.keeps_seconds = True
            continue
        for second in segment.seconds:
            fs.unlink(second, missing_ok=True)
    for path in (*found.temps, *found.passed):
        fs.unlink(path, missing_ok=True)
