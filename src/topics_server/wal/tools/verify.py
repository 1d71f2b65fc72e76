"""Checks a data directory at rest: segments, manifests, snapshots, journal.

Called by `wal/tools/dump.py`. The normal remains of a crash (torn tails, leftovers, a segment in
both tiers) are information; anything else that is wrong is a problem. Nothing here repairs
anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from topics_server.values.copies import ReplayPayloads
from topics_server.values.entries import RESERVED_ID_MIN, RecordsAppended, RouterPut
from topics_server.values.errors import Corrupt, StorageError
from topics_server.values.storage_types import (
    EPOCHS_PART,
    LEASES_PART,
    ROUTERS_PART,
    SESSIONS_PART,
    VIEWS_PART,
    EncodedPart,
    SnapshotImage,
)
from topics_server.wal import layout
from topics_server.wal.cold_folder import judge_cold
from topics_server.wal.directory import FormatMark, is_same_boot
from topics_server.wal.format.json_objects import differing_objects, stamps_of
from topics_server.wal.format.manifest import COLD, HOT, SegmentEntry
from topics_server.wal.format.segment import (
    ABSENT,
    DATA_HEADER_BYTES,
    RECORD_HEADER,
    SegmentColumns,
    bad_rows,
    damaged_flags,
    decode_data_header,
)
from topics_server.wal.fs import File, Fs
from topics_server.wal.journal.anchors import anchors_of
from topics_server.wal.journal.end_mark_file import read_end_mark
from topics_server.wal.journal.replay import JournalReplay
from topics_server.wal.segments.files import Tiers, load_index
from topics_server.wal.segments.topic_manifest import read_manifest
from topics_server.wal.snapshots.parts import (
    decode_leases,
    decode_part,
    decode_routers,
    decode_sessions,
    decode_views,
    tail_blocks,
)
from topics_server.wal.snapshots.store import age_of, load_snapshot
from topics_server.wal.tools.offline_inventory import AnchoredFiles, topics_on_disk

_ROWS_AT_ONCE = 4096


@dataclass(slots=True)
class VerifyReport:
    """The findings. `problems`: damage; `infos`: normal remains of a crash; `counts`: by kind."""

    problems: list[str] = field(default_factory=list)
    infos: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


# -- the cold folder ---------------------------------------------------------------------------


def verify_cold(
    fs: Fs, data_dir: str, cold_dir: str, mark: FormatMark, report: VerifyReport
) -> None:
    """Check whether a start would accept the cold folder as this store's."""
    try:
        judge_cold(fs, cold_dir, data_dir, mark)
    except StorageError as error:
        report.problems.append(str(error))


# -- segments ----------------------------------------------------------------------------------


def verify_segments(fs: Fs, tiers: Tiers, report: VerifyReport) -> None:
    """Check every topic folder of both tiers."""
    for topic_id in topics_on_disk(fs, tiers):
        report.counts["topic_folders"] += 1
        path = layout.join(tiers.folder(HOT, topic_id), layout.MANIFEST)
        try:
            manifest = read_manifest(fs, path)
        except StorageError as error:
            # `AnchoredFiles` reports it, if the topic exists.
            report.infos.append(str(error))
            continue
        if manifest is None:
            report.infos.append(f"{tiers.folder(HOT, topic_id)}: no manifest, files are leftovers")
            continue
        for entry in manifest.segments:
            _verify_segment(fs, tiers, topic_id, entry, report)
        named = {entry.segment_id for entry in manifest.segments}
        for folder in tiers.folders(topic_id):
            for name in fs.list_dir(folder):
                found = layout.parse_segment_file(name)
                if layout.is_temp(name) or (found is not None and found[0] not in named):
                    report.infos.append(f"{folder}/{name}: leftover of an unfinished job")


def _verify_segment(
    fs: Fs, tiers: Tiers, topic_id: int, entry: SegmentEntry, report: VerifyReport
) -> None:
    report.counts["segments"] += 1
    report.counts[f"segments_{entry.tier}"] += 1
    if entry.tier == COLD and tiers.cold is None:
        report.problems.append(
            f"topic {topic_id}: segment {entry.segment_id} is cold, and no cold folder was named"
        )
        return
    idx_path, data_path = tiers.paths(entry.tier, topic_id, entry.segment_id)
    missing = [path for path in (idx_path, data_path) if not fs.exists(path)]
    if missing:
        hint = "; is the cold disk mounted?" if entry.tier == COLD else ""
        report.problems.append(f"{missing[0]}: a listed segment file is missing{hint}")
        return
    other = HOT if entry.tier == COLD else COLD
    if tiers.cold is not None and fs.exists(tiers.data_path(other, topic_id, entry.segment_id)):
        report.infos.append(f"{data_path}: in both tiers, its move was interrupted")
    columns: SegmentColumns | None = None
    try:
        columns = load_index(fs, idx_path, topic_id, entry, verify=True)
    except StorageError as error:
        report.problems.append(str(error))
    file = fs.open(data_path)
    try:
        if file.size() != entry.data_bytes:
            report.problems.append(
                f"{data_path}: {file.size()} bytes, listed with {entry.data_bytes}"
            )
            return
        for problem in _data_problems(file, topic_id, entry, columns, report):
            report.problems.append(f"{data_path}: {problem}")
    except StorageError as error:
        report.problems.append(f"{data_path}: {error}")
    finally:
        file.close()


def _data_problems(
    file: File,
    topic_id: int,
    entry: SegmentEntry,
    columns: SegmentColumns | None,
    report: VerifyReport,
) -> list[str]:
    """The problems in header, records, checksum and flags of a `.data` of the right size."""
    problems: list[str] = []
    encoded = file.pread(DATA_HEADER_BYTES, 0)
    try:
        header = decode_data_header(encoded)
        if (header.topic_id, header.segment_id, header.first_seq, header.file_bytes) != (
            topic_id,
            entry.segment_id,
            entry.first_seq,
            entry.data_bytes,
        ):
            problems.append("the header is that of another segment")
    except StorageError as error:
        problems.append(str(error))
    flags_offset = entry.data_bytes - entry.record_count
    digest = xxhash.xxh3_64(encoded)
    if columns is None:
        for at in range(DATA_HEADER_BYTES, flags_offset, 2**20):
            digest.update(file.pread(min(2**20, flags_offset - at), at))
    else:
        tags = file.pread(int(columns.rows["offset"][0]) - DATA_HEADER_BYTES, DATA_HEADER_BYTES)
        digest.update(tags)
        for first in range(0, entry.record_count, _ROWS_AT_ONCE):
            end = min(first + _ROWS_AT_ONCE, entry.record_count)
            start = int(columns.rows["offset"][first])
            data = file.pread(columns.record_end(end - 1) - start, start)
            digest.update(data)
            problems += _record_problems(data, columns, first, end)
        stamps = file.pread(flags_offset - columns.records_end, columns.records_end)
        digest.update(stamps)
        names = [columns.tags[number] for number in range(len(columns.tags))]
        if columns.is_json and (
            tags != _tags_of(columns, names)
            or stamps != stamps_of(columns.rows, names, DATA_HEADER_BYTES).tobytes()
        ):
            problems.append("tags or stamps of the records differ from the index")
    if digest.intdigest() != entry.data_checksum:
        problems.append("checksum of the records fails")
    flags = file.pread(entry.record_count, flags_offset)
    for row in damaged_flags(flags).tolist():
        problems.append(f"delete flag of seq {entry.first_seq + row} is {flags[row]:#04x}")
    report.counts["sealed_records"] += entry.record_count
    report.counts["sealed_deleted"] += entry.record_count - flags.count(0)
    return problems


def _tags_of(columns: SegmentColumns, names: Sequence[bytes]) -> bytes:
    """The tags of all rows, one behind the other; `names`: the tags by their number."""
    texts = dict(enumerate(names)) | {ABSENT: b""}
    return b"".join(map(texts.__getitem__, columns.rows["tag_id"].tolist()))


def _record_problems(data: bytes, columns: SegmentColumns, first: int, end: int) -> list[str]:
    rows = bad_rows(data, columns, first, end)
    problems = [f"checksum of seq {columns.first_seq + first + row} fails" for row in rows]
    starts = columns.rows["offset"][first:end].astype("<i8") - int(columns.rows["offset"][first])
    if columns.is_json:
        if not problems:
            part, seqs = columns.rows[first:end], columns.first_seq + np.arange(first, end)
            stops = np.append(starts[1:], len(data))
            problems += [
                f"the record of seq {int(seqs[place])} differs from the index"
                for place in differing_objects(data, starts, stops, part, seqs).tolist()
            ]
        return problems
    width = RECORD_HEADER.itemsize
    content = np.frombuffer(data, "u1")
    if not problems and int(starts[-1]) + width <= len(content):
        headers = content[starts[:, None] + np.arange(width)].view(RECORD_HEADER).ravel()
        expected = np.arange(columns.first_seq + first, columns.first_seq + end, dtype="<u8")
        if (headers["seq"] != expected).any():
            problems.append(f"seqs from {int(expected[0])} on do not follow each other")
        if (headers["ts"] != columns.rows["ts"][first:end]).any():
            problems.append(f"times from seq {int(expected[0])} on differ from the index")
    return problems


# -- snapshots ---------------------------------------------------------------------------------


def verify_snapshots(fs: Fs, data_dir: str, report: VerifyReport) -> list[SnapshotImage]:
    """Verify every snapshot; return the valid ones, newest first.

    A snapshot that is older than one with a lower number is an older copy in the place of another.
    """
    folder = layout.join(data_dir, layout.SNAPSHOTS)
    valid: list[SnapshotImage] = []
    paths: list[str] = []
    for name in sorted(fs.list_dir(folder), reverse=True):
        path = layout.join(folder, name)
        if layout.is_temp(name):
            report.infos.append(f"{path}: leftover of an unfinished job")
        if layout.parse_snapshot_file(name) is None:
            continue
        report.counts["snapshots"] += 1
        try:
            image = load_snapshot(fs, path)
            valid.append(image)
            paths.append(path)
            session_count, lease_count = _verify_parts(image)
            if len(valid) == 1:
                report.counts["watch_sessions"] = session_count
                report.counts["leases"] = lease_count
        except StorageError as error:
            report.problems.append(str(error) if error.path else f"{path}: {error}")
    for index, image in enumerate(valid):
        if any(age_of(lower) > age_of(image) for lower in valid[index + 1 :]):
            report.problems.append(f"{paths[index]}: is older than a snapshot of a lower number")
    # The sort is stable: of equally old snapshots the highest number comes first.
    valid.sort(key=age_of, reverse=True)
    report.counts["snapshot_parts"] = len(valid[0].parts) if valid else 0
    return valid


def _verify_parts(image: SnapshotImage) -> tuple[int, int]:
    """Check all parts; returns how many sessions and leases. Raises `StorageError`."""
    wids: set[str] = set()
    leased: set[tuple[int, int]] = set()
    routers: set[str] = set()
    views: set[tuple[str, str]] = set()
    for part_id, encoded in image.parts:
        if part_id == SESSIONS_PART:
            for session in decode_sessions(encoded).sessions:
                if session.wid in wids:
                    raise StorageError(f"watch session {session.wid} occurs twice")
                if session.lsn > image.last_lsn:
                    raise StorageError(f"watch session {session.wid} is newer than its snapshot")
                wids.add(session.wid)
        elif part_id == LEASES_PART:
            _verify_leases(image, encoded, leased)
        elif part_id == ROUTERS_PART:
            _verify_routers(image, encoded, routers)
        elif part_id == VIEWS_PART:
            _verify_views(image, encoded, views)
        elif part_id >= RESERVED_ID_MIN:
            raise StorageError(f"part {part_id} is not known; was it written by a newer version?")
        elif part_id != EPOCHS_PART:
            _verify_part(part_id, encoded)
    return len(wids), len(leased)


def _verify_leases(
    image: SnapshotImage, encoded: EncodedPart, leased: set[tuple[int, int]]
) -> None:
    """Check a part of the leases.

    Raises `StorageError`; `leased`: (queue, seq) of all leases so far.
    """
    part = decode_leases(encoded)
    if part.applied_lsn > image.last_lsn:
        raise StorageError("the leases are newer than their snapshot")
    for queue in part.queues:
        if queue.heard_lsn > image.last_lsn:
            raise StorageError(
                f"the leases of queue {queue.queue_id} are newer than their snapshot"
            )
        for lease in queue.leases:
            key = (queue.queue_id, lease.seq)
            if key in leased:
                raise StorageError(f"seq {lease.seq} of queue {queue.queue_id} is leased twice")
            leased.add(key)


def router_sources(image: SnapshotImage | None) -> set[int]:
    """Topics from which pages without payloads may copy, in the replay from a snapshot."""
    sources: set[int] = set()
    for part_id, encoded in image.parts if image else ():
        if part_id == ROUTERS_PART:
            sources.update(decode_routers(encoded).sources)
    return sources


def meet(
    payloads: ReplayPayloads, lsn: int, entry: RecordsAppended, image: SnapshotImage | None
) -> RecordsAppended | None:
    """The entry with its records; None for a page whose records are in the snapshot only.

    Raises `StorageError` for a page whose records are missing everywhere.
    """
    try:
        return payloads.meet(entry)
    except StorageError:
        # Replay begins at the oldest entry that was not applied when the capture began. A later
        # page that was already applied may copy records from before that entry.
        if image is None or lsn > image.last_lsn:
            raise
        return None


def _verify_routers(image: SnapshotImage, encoded: EncodedPart, names: set[str]) -> None:
    """Check a part of the routers. Raises `StorageError`; `names`: all names so far."""
    part = decode_routers(encoded)
    if part.applied_lsn > image.last_lsn:
        raise StorageError("the routers are newer than their snapshot")
    for router in part.routers:
        if router.name in names:
            raise StorageError(f"router {router.name} occurs twice")
        if router.router_id >= part.next_router_id:
            raise StorageError(f"router {router.name} has an id that was not assigned yet")
        names.add(router.name)


def _verify_views(image: SnapshotImage, encoded: EncodedPart, names: set[tuple[str, str]]) -> None:
    """Check a part of the views. Raises `StorageError`; `names`: (topic, view) so far."""
    part = decode_views(encoded)
    if part.applied_lsn > image.last_lsn:
        raise StorageError("the views are newer than their snapshot")
    for view in part.views:
        if (view.topic, view.name) in names:
            raise StorageError(f"view {view.name} of {view.topic} occurs twice")
        if view.view_id >= part.next_view_id:
            raise StorageError(f"view {view.name} has an id that was not assigned yet")
        names.add((view.topic, view.name))


def _verify_part(topic_id: int, encoded: EncodedPart) -> None:
    """Check a topic's part. Raises `StorageError`."""
    part = decode_part(encoded)
    if part.topic_id != topic_id:
        raise StorageError(f"part of topic {topic_id} says it is topic {part.topic_id}")
    last_seq = 0
    for block, _ in tail_blocks(part):
        if block.first_seq <= last_seq:
            raise StorageError(f"topic {topic_id}: seq {block.first_seq} twice in the tail")
        last_seq = block.last_seq
    if last_seq > part.head_seq:
        raise StorageError(f"topic {topic_id}: the tail ends above its head {part.head_seq}")


# -- journal -----------------------------------------------------------------------------------


def open_journal(
    fs: Fs,
    data_dir: str,
    mark: FormatMark,
    newest: SnapshotImage | None,
    oldest: SnapshotImage | None,
) -> JournalReplay:
    """Open the journal for reading from the start of `oldest`."""
    return JournalReplay(
        fs,
        layout.join(data_dir, layout.WAL),
        wal_sets=[(s.wal_set, s.shard_count, s.first_lsn) for s in mark.wal_sets],
        synced_lsn=newest.last_lsn if newest else 0,
        read_only=True,
        anchors=anchors_of(mark, newest, oldest, same_boot=is_same_boot(fs, mark)),
    )


def _verify_unread_marks(fs: Fs, wal_dir: str, mark: FormatMark, report: VerifyReport) -> None:
    """End marks of wal sets that `FORMAT` does not list yet: a start continues in their slots.

    Their contents prove nothing, but a start that cannot read one is refused.
    """
    named = {s.wal_set for s in mark.wal_sets if s.has_marks}
    names = map(layout.parse_end_mark, fs.list_dir(wal_dir))
    for key in sorted(name for name in names if name is not None and name[0] not in named):
        try:
            read_end_mark(fs, wal_dir, *key)
        except Corrupt as error:
            report.infos.append(str(error))
        except StorageError as error:
            report.problems.append(f"journal: {error}")


def verify_journal(
    fs: Fs,
    data_dir: str,
    mark: FormatMark,
    snapshots: list[SnapshotImage],
    files: AnchoredFiles,
    report: VerifyReport,
) -> None:
    """Check every group from the oldest valid snapshot's start on; no seq may occur twice.

    Then check the files against all known facts, as a start does.
    """
    newest, oldest = (snapshots[0], snapshots[-1]) if snapshots else (None, None)
    replay = open_journal(fs, data_dir, mark, newest, oldest)
    start_lsn = snapshots[-1].start_lsn if snapshots else 0
    last_seqs: dict[int, int] = {}
    sources = router_sources(snapshots[-1] if snapshots else None)
    payloads = ReplayPayloads(sources)
    try:
        for lsn, entry in replay.entries(start_lsn):
            report.counts["journal_entries"] += 1
            files.note(lsn, entry)
            if isinstance(entry, RouterPut):
                sources.add(entry.source_id)
            if not isinstance(entry, RecordsAppended):
                continue
            meet(payloads, lsn, entry, snapshots[-1] if snapshots else None)
            report.counts["journal_records"] += entry.count
            last_seq = last_seqs.get(entry.topic_id, 0)
            if entry.first_seq <= last_seq:
                report.problems.append(
                    f"lsn {lsn}: seq {entry.first_seq} of topic {entry.topic_id} is given twice"
                )
            elif last_seq and entry.first_seq != last_seq + 1:
                report.infos.append(
                    f"lsn {lsn}: topic {entry.topic_id} goes from seq {last_seq} to "
                    f"{entry.first_seq} (a head that jumped after a crash)"
                )
            last_seqs[entry.topic_id] = entry.first_seq + entry.count - 1
        known = set(report.problems)
        report.problems += [problem for problem in files.problems() if problem not in known]
    except StorageError as error:
        report.problems.append(f"journal: {error}")
    else:
        _verify_unread_marks(fs, layout.join(data_dir, layout.WAL), mark, report)
    report.counts["journal_files"] = replay.report.files
    for torn in replay.report.torn:
        report.infos.append(
            f"{torn.path}: unfinished write of {torn.length} bytes at {torn.offset} ({torn.reason})"
        )
        try:
            # A start writes these bytes to this file, and replaces what an earlier start wrote.
            if fs.exists(torn.kept):
                fs.open(torn.kept).close()
        except StorageError as error:
            report.problems.append(f"unfinished write: {error}")
