"""`topics dump` and `verify`: reads a data directory, changes nothing.

Called by `topics verify` and `topics dump`, and at the end of every crash test. It reads the files
that a killed server left: torn tails above the synced end are information, not problems. `dump`
assembles the same state as recovery: segments with their flags, the newest snapshot's tails, the
journal. If recovery would refuse the journal, `dump` lacks only the entries from the damage on.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from topics_server.values.blocks import TRACE_MARK, Block, make_block, split_trace
from topics_server.values.copies import ReplayPayloads
from topics_server.values.entries import (
    RESERVED_ID_MIN,
    Entry,
    FloorMoved,
    RecordsAppended,
    RecordsDeleted,
    RouterPut,
    TopicDropped,
    TopicPut,
)
from topics_server.values.errors import Damaged, StartRefused, StorageError
from topics_server.values.limits import BLOCK_RECORDS_MAX
from topics_server.values.model import PayloadKind
from topics_server.values.record_codecs import decode_body
from topics_server.values.storage_types import EPOCHS_PART, SnapshotImage, TopicPart
from topics_server.wal import layout
from topics_server.wal.directory import FormatMark, lacks_heads, read_format
from topics_server.wal.format.manifest import Manifest, SegmentEntry
from topics_server.wal.format.segment import Array, SegmentColumns
from topics_server.wal.format.segment_blocks import unpack_block
from topics_server.wal.fs import File, Fs
from topics_server.wal.journal.replay import JournalReplay
from topics_server.wal.segments.files import Tiers, flags_of, load_index
from topics_server.wal.segments.topic_manifest import read_manifest
from topics_server.wal.snapshots.parts import decode_part, flipped_rows, tail_blocks
from topics_server.wal.tools.offline_inventory import AnchoredFiles
from topics_server.wal.tools.verify import (
    VerifyReport,
    meet,
    open_journal,
    router_sources,
    verify_cold,
    verify_journal,
    verify_segments,
    verify_snapshots,
)

__all__ = ["JournalUnread", "VerifyReport", "dump", "verify"]

Item = dict[str, Any]


def _mark(fs: Fs, data_dir: str) -> FormatMark:
    mark = read_format(fs, data_dir)
    if mark is None:
        raise StartRefused("not a data directory: it has no FORMAT", data_dir)
    return mark


def _tiers(data_dir: str, cold_dir: str | None) -> Tiers:
    return Tiers(layout.join(data_dir, layout.SEGMENTS), cold_dir)


def verify(fs: Fs, data_dir: str, cold_dir: str | None = None) -> VerifyReport:
    """Check everything. Raises `StartRefused` only for a folder that is not our data directory."""
    mark = _mark(fs, data_dir)
    report = VerifyReport()
    report.counts["clean_stop"] = int(mark.clean_stop)
    try:
        # The file holds no data, but a start reads it.
        fs.exists(layout.join(data_dir, layout.BALLAST))
    except StorageError as error:
        report.problems.append(str(error))
    if cold_dir is not None:
        verify_cold(fs, data_dir, cold_dir, mark, report)
    tiers = _tiers(data_dir, cold_dir)
    verify_segments(fs, tiers, report)
    snapshots = verify_snapshots(fs, data_dir, report)
    if lacks_heads(mark, snapshots[0] if snapshots else None):
        folder = layout.join(data_dir, layout.SNAPSHOTS)
        which = f"of run {mark.heads_run} or later"
        if mark.final_lsn:
            which = f"of the clean stop, up to lsn {mark.final_lsn},"
        report.problems.append(
            f"{folder}: a snapshot {which} is missing: heads will skip what it may have held"
        )
    files = AnchoredFiles(fs, tiers, mark.store_id, snapshots[0] if snapshots else None)
    verify_journal(fs, data_dir, mark, snapshots, files, report)
    return report


# -- dump --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Topic:
    """The facts about one topic before its records are read."""

    name: str
    floor: int = 0
    manifest: Manifest | None = None
    part: TopicPart | None = None
    appends: list[tuple[int, RecordsAppended]] = field(default_factory=list)
    # The runs that the journal deletes: first and last seqs in two parallel lists.
    firsts: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)

    def is_deleted(self, seqs: Array) -> Array:
        """For each of these seqs: whether the journal or the floor has removed it."""
        gone: Array = seqs < self.floor
        if self.firsts:
            order = np.argsort(np.array(self.firsts))
            firsts = np.array(self.firsts)[order]
            # For each run: the highest end of all runs that begin at or before it, because runs may
            # overlap.
            reach = np.maximum.accumulate(np.array(self.lasts)[order])
            at = np.searchsorted(firsts, seqs, side="right") - 1
            gone |= (at >= 0) & (reach[at] >= seqs)
        return gone


class JournalUnread(StorageError):
    """Part of the journal could not be read. `last_lsn`: the last entry read, or 0.

    The effects of later entries, deletes included, are unknown. The text names file and offset.
    """

    def __init__(self, cause: StorageError, last_lsn: int) -> None:
        extent = f"was read up to lsn {last_lsn} only" if last_lsn else "could not be read"
        super().__init__(
            f"the journal {extent}; what it adds or deletes behind that is not shown: {cause}"
        )
        self.path = cause.path
        self.last_lsn = last_lsn


def dump(
    fs: Fs, data_dir: str, cold_dir: str | None = None, *, with_journal: bool = False
) -> Iterator[Item]:
    """One dict per record, by topic and seq; then, `with_journal`, one per entry.

    `data` and `meta` are `msgspec.Raw`, verbatim. An unreadable record has `damaged`. Raises
    `JournalUnread` after the last item if the journal is damaged or incomplete; `StorageError` at
    once if the directory is not ours, or a manifest cannot be read.
    """
    mark = _mark(fs, data_dir)
    report = VerifyReport()
    snapshots = verify_snapshots(fs, data_dir, report)
    newest = snapshots[0] if snapshots else None
    tiers = _tiers(data_dir, cold_dir)
    topics = _topics_of(fs, tiers, newest)
    entries: list[Item] = []
    replay = open_journal(fs, data_dir, mark, newest, newest)
    unread = _note_entries(topics, replay, newest, entries if with_journal else None)
    for topic_id in sorted(topics):
        yield from _records_of(fs, tiers, topic_id, topics[topic_id])
    yield from entries
    if unread is not None:
        raise unread


def _note_entries(
    topics: dict[int, _Topic],
    replay: JournalReplay,
    newest: SnapshotImage | None,
    items: list[Item] | None,
) -> JournalUnread | None:
    """Apply the readable part of the journal; add each entry to `items`."""
    last_lsn = 0
    sources = router_sources(newest)
    payloads = ReplayPayloads(sources)
    try:
        for lsn, entry in replay.entries(newest.start_lsn if newest else 0):
            assert lsn >= last_lsn, "merged by lsn: what was read is a whole prefix"
            last_lsn = lsn
            if isinstance(entry, RouterPut):
                sources.add(entry.source_id)
            whole: Entry | None = entry
            if isinstance(entry, RecordsAppended):
                whole = meet(payloads, lsn, entry, newest)
            if whole is not None:
                _note_entry(topics, lsn, whole)
            if items is not None:
                items.append(_entry_item(lsn, entry))
    except StorageError as error:
        return JournalUnread(error, last_lsn)
    return None


def _topics_of(fs: Fs, tiers: Tiers, newest: SnapshotImage | None) -> dict[int, _Topic]:
    """Topics that have a manifest or a part in the newest snapshot."""
    topics: dict[int, _Topic] = {}
    for topic_id, encoded in newest.parts if newest else ():
        if topic_id == EPOCHS_PART or topic_id >= RESERVED_ID_MIN:
            continue
        part = decode_part(encoded)
        topics[topic_id] = _Topic(part.name, part.evict_floor, part=part)
    for name in fs.list_dir(tiers.hot):
        topic_id_found = layout.parse_topic_dir(name)
        if topic_id_found is None:
            continue
        manifest = read_manifest(fs, layout.join(tiers.hot, name, layout.MANIFEST))
        if manifest is not None:
            topic = topics.setdefault(topic_id_found, _Topic(manifest.name))
            topic.manifest = manifest
            topic.floor = max(topic.floor, manifest.evict_floor)
    return topics


def _note_entry(topics: dict[int, _Topic], lsn: int, entry: Entry) -> None:
    """Apply a journal entry's effects on the dumped topics."""
    match entry:
        case TopicDropped():
            topics.pop(entry.topic_id, None)
        case TopicPut():
            topic = topics.setdefault(entry.topic_id, _Topic(entry.name))
            topic.floor = max(topic.floor, entry.floor.seq if entry.floor else 0)
        case RecordsAppended():
            name = entry.creation.name if entry.creation else str(entry.topic_id)
            topic = topics.setdefault(entry.topic_id, _Topic(name))
            topic.floor = max(topic.floor, entry.floor.seq if entry.floor else 0)
            topic.appends.append((lsn, entry))
        case RecordsDeleted() if entry.topic_id in topics:
            topics[entry.topic_id].firsts += np.frombuffer(entry.firsts, "<u8").tolist()
            topics[entry.topic_id].lasts += np.frombuffer(entry.lasts, "<u8").tolist()
        case FloorMoved() if entry.topic_id in topics:
            topic = topics[entry.topic_id]
            topic.floor = max(topic.floor, entry.floor.seq)


def _entry_item(lsn: int, entry: Entry) -> Item:
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    fields.pop("decoded", None)
    if isinstance(entry, RecordsAppended):
        fields["body"] = entry.body.decode(errors="backslashreplace")
    if isinstance(entry, RecordsDeleted):
        for name in ("firsts", "lasts"):
            fields[name] = np.frombuffer(fields[name], "<u8").tolist()
    return {"lsn": lsn, "entry": type(entry).__name__, **fields}


def _records_of(fs: Fs, tiers: Tiers, topic_id: int, topic: _Topic) -> Iterator[Item]:
    """Every record of a topic once: sealed, then the snapshot's tail, then the journal."""
    last_seq = 0
    for entry in topic.manifest.segments if topic.manifest else ():
        yield from _segment_items(fs, tiers, topic_id, topic, entry)
        last_seq = entry.last_seq
    for block, dead in tail_blocks(topic.part) if topic.part else ():
        yield from _block_items(topic, block, dead, "snapshot", last_seq)
        last_seq = max(last_seq, block.last_seq)
    for lsn, append in topic.appends:
        made = _block_of(append)
        if made is None:
            continue
        block = made
        yield from _block_items(topic, block, bytes(block.count), f"journal {lsn}", last_seq)
        last_seq = max(last_seq, block.last_seq)


def _block_of(append: RecordsAppended) -> Block | None:
    """The records of an append; None if it has none."""
    decoded = append.decoded or decode_body(append.body, append.grammar, append.trace)
    if not decoded.count:
        return None
    times = array("q", [append.ts]) * decoded.count
    first_seq = append.first_seq + append.slot_count
    return make_block(
        first_seq, times, decoded.datas, decoded.metas, decoded.tags, decoded.nodes, decoded.hops
    )


def _block_items(
    topic: _Topic, block: Block, dead: bytes, where: str, after_seq: int
) -> Iterator[Item]:
    """The records of a block above `after_seq`; `dead` is one byte a record."""
    gone = topic.is_deleted(np.arange(block.first_seq, block.last_seq + 1))
    for row in range(max(0, after_seq + 1 - block.first_seq), block.count):
        data, (trace, meta) = block.data(row), split_trace(block.meta(row))
        item: Item = {
            "topic": topic.name,
            "seq": block.first_seq + row,
            "ts": block.times[row],
            "node": block.nodes[row],
            "tag": block.tags[row],
            "data": msgspec.Raw(data) if data else None,
            "meta": msgspec.Raw(meta) if meta else None,
            "deleted": bool(dead[row]) or bool(gone[row]),
            "where": where,
        }
        if trace:
            item["trace"] = trace[len(TRACE_MARK) :].decode()
        if block.kinds[row] & PayloadKind.BYTES:
            item["data"] = base64.b64encode(data).decode()
            item["encoding"] = "base64"
        yield item


def _segment_items(
    fs: Fs, tiers: Tiers, topic_id: int, topic: _Topic, entry: SegmentEntry
) -> Iterator[Item]:
    where = f"{entry.tier} segment {entry.segment_id}"
    idx_path, data_path = tiers.paths(entry.tier, topic_id, entry.segment_id)
    try:
        columns = load_index(fs, idx_path, topic_id, entry, verify=True)
        file = fs.open(data_path)
    except StorageError as error:
        for seq in range(entry.first_seq, entry.last_seq + 1):
            yield {"topic": topic.name, "seq": seq, "damaged": str(error), "where": where}
        return
    try:
        dead = bytearray(flags_of(file, entry) or bytes(entry.record_count))
        for row in flipped_rows(topic.part, entry.segment_id) if topic.part else ():
            dead[row] = 1
        for first in range(0, entry.record_count, BLOCK_RECORDS_MAX):
            end = min(first + BLOCK_RECORDS_MAX, entry.record_count)
            start = int(columns.rows["offset"][first])
            data = file.pread(columns.record_end(end - 1) - start, start)
            try:
                block = unpack_block(data, columns, first, end)
            except Damaged:
                yield from _one_by_one(topic, file, columns, (first, end), dead, where)
                continue
            yield from _block_items(topic, block, bytes(dead[first:end]), where, 0)
    finally:
        file.close()


def _one_by_one(
    topic: _Topic,
    file: File,
    columns: SegmentColumns,
    rows: tuple[int, int],
    dead: bytearray,
    where: str,
) -> Iterator[Item]:
    """The records of a range that contains damaged records, read one at a time."""
    for row in range(*rows):
        start = int(columns.rows["offset"][row])
        data = file.pread(columns.record_end(row) - start, start)
        try:
            block = unpack_block(data, columns, row, row + 1)
        except Damaged as error:
            seq = columns.first_seq + row
            yield {"topic": topic.name, "seq": seq, "damaged": str(error), "where": where}
            continue
        yield from _block_items(topic, block, bytes(dead[row : row + 1]), where, 0)
