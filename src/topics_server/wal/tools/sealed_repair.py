"""Reads sealed segments for `topics repair`, and rebuilds damaged indexes.

It opens every listed segment as a start does, and reports which seqs cannot be read, which indexes
are damaged, and which seqs of an earlier damage are readable again. It rebuilds an index from the
segment's records and keeps the damaged file in `quarantine/`. It does not change damaged records:
they become readable only if their undamaged file is put back. Called by `cli/server/repair.py`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from topics_server.values.entries import RESERVED_ID_MIN, RecordsDeleted, TopicDropped
from topics_server.values.errors import StorageError
from topics_server.values.file_inventory import NO_TOPIC, FoundTopic, anchor_of, note_delete
from topics_server.values.model import LossReason
from topics_server.values.storage_types import EPOCHS_PART, SnapshotImage, TopicPart
from topics_server.wal.cold_folder import judge_cold
from topics_server.wal.directory import FormatMark
from topics_server.wal.format.segment import Array, ranges_of
from topics_server.wal.fs import Fs
from topics_server.wal.segments.index import SealedColumns
from topics_server.wal.segments.packing_process import InlinePacker
from topics_server.wal.segments.store import SealedSegments
from topics_server.wal.snapshots.parts import decode_part, flipped_rows
from topics_server.wal.tools.verify import open_journal


class SealedSeqs(msgspec.Struct, frozen=True):
    """The seqs of a topic in one segment, as ranges of (first, last)."""

    topic: str
    topic_id: int
    segment_id: int
    seqs: list[tuple[int, int]]


class SealedSurvey(msgspec.Struct):
    """The findings. `indexes`: paths of damaged indexes. `lost`: records that cannot be read.

    `readable_again`: records that the snapshot lists as damaged, and that the next start serves.
    `not_looked_at`: files that a start refuses, or cold files without a cold folder.
    """

    indexes: list[str] = []
    lost: list[SealedSeqs] = []
    readable_again: list[SealedSeqs] = []
    not_looked_at: list[str] = []

    @property
    def is_damaged(self) -> bool:
        """Whether anything is unreadable or must be rebuilt."""
        return bool(self.indexes or self.lost)


def survey_segments(
    fs: Fs,
    data_dir: str,
    cold_dir: str | None,
    mark: FormatMark,
    image: SnapshotImage | None,
    *,
    remake: bool,
) -> SealedSurvey:
    """*Blocking.* Check every listed segment; `remake`: rebuild damaged indexes.

    Changes nothing else. Raises `StorageError` for a cold folder that is not this store's.
    """
    if cold_dir is not None:
        judge_cold(fs, cold_dir, data_dir, mark)
    parts = {
        topic_id: decode_part(encoded)
        for topic_id, encoded in (image.parts if image else ())
        if topic_id != EPOCHS_PART and topic_id < RESERVED_ID_MIN
    }
    found = SealedSurvey()
    segments = SealedSegments(fs, data_dir, cold_dir, InlinePacker(), store_id=mark.store_id)
    opened: list[tuple[FoundTopic, list[SealedColumns]]] = []
    try:
        for topic_id in segments.topics_on_disk():
            part = parts.get(topic_id)
            report, indexes = segments.open_topic(topic_id, anchor_of(part) if part else None)
            found.not_looked_at += [f"{path}: {reason}" for path, reason in report.objections]
            if indexes:
                opened.append((report, indexes))
                found.indexes += segments.damaged_indexes(topic_id).values()
        _note_deletes(fs, data_dir, mark, image, parts, [report for report, _ in opened])
        for report, indexes in opened:
            for index in indexes:
                _look(found, report, index, parts.get(report.topic_id))
            if remake:
                segments.remake_indexes(report.topic_id)
    finally:
        segments.close()
    return found


def _note_deletes(
    fs: Fs,
    data_dir: str,
    mark: FormatMark,
    image: SnapshotImage | None,
    parts: dict[int, TopicPart],
    reports: list[FoundTopic],
) -> None:
    """Note the journal's deletes: they explain flags that are not in the snapshot."""
    suspected = {report.topic_id: report for report in reports if report.suspects}
    if not suspected:
        return
    is_known = True
    try:
        start_lsn = image.start_lsn if image else 0
        for lsn, entry in open_journal(fs, data_dir, mark, image, image).entries(start_lsn):
            if isinstance(entry, TopicDropped) and entry.topic_id == NO_TOPIC:
                is_known = False
            report, part = suspected.get(entry.topic_id), parts.get(entry.topic_id)
            is_new = part is None or lsn > part.applied_lsn
            if isinstance(entry, RecordsDeleted) and report is not None and is_new:
                note_delete(report, entry.firsts, entry.lasts)
    except StorageError:
        is_known = False
    for report in suspected.values() if not is_known else ():
        # A journal that is damaged, or was repaired, may lack the deletes.
        for suspect in report.suspects.values():
            suspect.is_touched = True


def _look(
    found: SealedSurvey, report: FoundTopic, index: SealedColumns, part: TopicPart | None
) -> None:
    """Compare the readable records of a segment with the snapshot's facts about it."""
    count, first_seq = index.record_count, index.first_seq
    wanted = np.frombuffer(index.flags(), "u1") == 0
    if part is not None:
        wanted[: max(0, part.evict_floor - first_seq)] = False
        wanted[flipped_rows(part, index.segment_id)] = False
    suspect = report.suspects.get(index.segment_id)
    damaged = np.zeros(count, bool)
    if suspect is not None and suspect.has_lost_deletes:
        damaged[:] = True
    for first, last in index.damaged_rows(0, count):
        damaged[first : last + 1] = True
    reported = np.zeros(count, bool)
    for hole in part.holes if part is not None else ():
        if hole.reason is LossReason.DAMAGED:
            low, high = hole.first_seq - first_seq, hole.last_seq - first_seq + 1
            reported[max(0, low) : max(0, high)] = True
    name, where = report.facts.name if report.facts else "", (report.topic_id, index.segment_id)
    if lost := _seqs(wanted & damaged, first_seq):
        found.lost.append(SealedSeqs(name, *where, lost))
    if healed := _seqs(wanted & reported & ~damaged, first_seq):
        found.readable_again.append(SealedSeqs(name, *where, healed))


def _seqs(rows: Array, first_seq: int) -> list[tuple[int, int]]:
    hit = np.flatnonzero(rows)
    if not len(hit):
        return []
    return [(first_seq + first, first_seq + last) for first, last in ranges_of(hit)]
