"""Makes a damaged journal readable again and reports the losses.

Offline, under the directory's lock; called by `cli/server/repair.py`. Recovery refuses a journal
with damage below its synced end. This module overwrites each damaged region with valid groups
without content, so that every rule of recovery still holds. Seqs that the region may have assigned
are never assigned again. For this, a new file at the end of the journal first gets a `TopicPut` for
each affected topic, with a head above every seq that the region can have assigned; readers see the
skipped seqs as `damaged`. So a crash at any point leaves a journal that is refused as before, or a
repaired one. Bytes are copied to `set-aside/` before anything changes.

If a topic has an entry after the region, the entry's seq shows what is missing. For other topics
the contents of a region count only if they decode to frames whose lsns and seqs continue those
around them; otherwise the topic's head is raised by more seqs than the region can have held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from topics_server.values.entries import (
    RESERVED_ID_MIN,
    Entry,
    HeadReserved,
    RecordsAppended,
    RecordsDeleted,
    TopicDropped,
    TopicPut,
)
from topics_server.values.errors import StartRefused, StorageError, TopicsError
from topics_server.values.limits import HEAD_RESERVE_SEQS, PAGE_SCAN_SLOTS_MAX
from topics_server.values.record_codecs import decode_body
from topics_server.values.storage_types import EPOCHS_PART, SnapshotImage
from topics_server.wal import layout
from topics_server.wal.directory import FormatMark, is_same_boot
from topics_server.wal.format.frames import (
    FRAME_HEADER_BYTES,
    Opening,
    decode_frames,
    encode_entry,
    encode_opening,
)
from topics_server.wal.format.groups import (
    ALIGNMENT,
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    FileHeader,
    Group,
    encode_file_header,
    encode_group,
    group_bounds,
)
from topics_server.wal.fs import Fs
from topics_server.wal.journal.anchors import anchors_of
from topics_server.wal.journal.file_chain import JournalFile, Key, open_files
from topics_server.wal.snapshots.parts import decode_part
from topics_server.wal.tools.end_mark_repair import NOTHING_KNOWN, KnownEnd, known_ends, mark_ends
from topics_server.wal.tools.set_aside import set_aside

# The smallest record of a body, with its comma: {"data":1},
_RECORD_BYTES_MIN: Final = 11
_NO_TOPIC: Final = 0
# Errors that decoders raise for changed bytes: here bytes are decoded without a valid checksum.
_UNREADABLE: Final = (
    *(TopicsError, StorageError, msgspec.MsgspecError),
    *(ValueError, TypeError, OverflowError, AssertionError, RecursionError),
)
_LEAST_BYTES: Final = GROUP_HEADER_BYTES + FRAME_HEADER_BYTES + 4


class LostRecords(msgspec.Struct, frozen=True):
    """Seqs of a topic that readers will see as `damaged`; `is_bound`: an upper bound."""

    topic: str
    topic_id: int
    first_seq: int
    last_seq: int
    is_bound: bool


class Region(msgspec.Struct):
    """Damaged bytes of a journal file; their lsns are above `after_lsn`, at most `upto_lsn`."""

    path: str
    shard: Key
    number: int
    start: int
    end: int
    after_lsn: int
    upto_lsn: int | None = None
    fill_lsn: int = 0
    opening: Opening | None = None
    entries: list[tuple[int, Entry]] | None = None

    @property
    def length(self) -> int:
        """The length in bytes."""
        return self.end - self.start


class Survey(msgspec.Struct):
    """The damage, what it may have lost, and where the journal continues after it.

    `end_marks`: paths of marks that are missing, unreadable, or do not fit their files.
    """

    end_marks: list[str] = []
    regions: list[Region] = []
    lost: list[LostRecords] = []
    nameless: dict[int, int] = {}
    jumps: list[tuple[TopicPut, int]] = []
    last_lsn: int = 0
    ends: dict[Key, tuple[int, Opening, int]] = {}
    # Whether an unproven tail counts as damaged too.
    is_suspicious: bool = False
    torn: list[tuple[str, int, int]] = []

    @property
    def is_damaged(self) -> bool:
        """Whether recovery refuses the journal."""
        return bool(self.regions or self.end_marks)


class _Known(msgspec.Struct):
    put: TopicPut
    head: int
    ceiling: int
    applied_lsn: int = 0
    # The regions of the topic's shard after the topic's last entry, each with the topic's head as
    # the region shows it (None: not known).
    doubts: list[tuple[Region, int | None]] = []


def survey(fs: Fs, data_dir: str, mark: FormatMark, image: SnapshotImage | None) -> Survey:
    """*Blocking.* Find all damage; change nothing.

    Raises `StorageError` for damage that cannot be repaired.
    """
    found = _survey(fs, data_dir, mark, image, is_suspicious=False)
    if found.regions and found.torn:
        # The disk has changed bytes, so an apparently unfinished write may have been acknowledged.
        return _survey(fs, data_dir, mark, image, is_suspicious=True)
    return found


def _survey(
    fs: Fs, data_dir: str, mark: FormatMark, image: SnapshotImage | None, *, is_suspicious: bool
) -> Survey:
    wal_dir = layout.join(data_dir, layout.WAL)
    found = Survey(last_lsn=image.last_lsn if image else 0, is_suspicious=is_suspicious)
    start_lsn = image.start_lsn if image else 0
    synced_lsn = max(found.last_lsn, start_lsn - 1)
    shards, _ = open_files(fs, wal_dir, write=False, is_whole=False)
    anchors = anchors_of(mark, image, image, same_boot=is_same_boot(fs, mark))
    of_snapshot = {(s.wal_set, s.shard): s for s in anchors.shards}
    events: list[tuple[int, int, Entry | Region]] = []
    try:
        ends, found.end_marks = known_ends(fs, wal_dir, mark, anchors, shards, start_lsn)
        for key, files in sorted(shards.items()):
            known, start = synced_lsn, start_lsn
            if key in of_snapshot:
                start = min(start_lsn, of_snapshot[key].start_lsn)
                known = max(of_snapshot[key].synced_lsn, start - 1)
            for region, groups in _shard(
                found, key, files, known, start, ends.get(key, NOTHING_KNOWN)
            ):
                if region is not None:
                    found.regions.append(region)
                    events.append((region.after_lsn, 1, region))
                for group in groups:
                    events += [(lsn, 0, entry) for lsn, entry in group.entries]
    finally:
        for files in shards.values():
            for each in files:
                each.file.close()
    events.sort(key=lambda event: event[:2])
    counts = {s.wal_set: s.shard_count for s in mark.wal_sets}
    _cost(found, events, image, start_lsn, counts)
    return found


# -- which bytes -----------------------------------------------------------------------------------


def _shard(
    found: Survey,
    key: Key,
    files: list[JournalFile],
    synced_lsn: int,
    start_lsn: int,
    known: KnownEnd,
) -> list[tuple[Region | None, list[Group]]]:
    """The regions and the groups after each, in order; notes the shard's end."""
    by_file = [(each, each.every_group()) for each in files]
    begun = known.number if known.end > FILE_HEADER_BYTES else 0
    used = [(each, groups) for each, groups in by_file if groups or each.header.number == begun]
    claimed = max([known.lsn, *(each.header.after_lsn for each in files)])
    pieces: list[tuple[Region | None, list[Group]]] = []
    waiting: list[Region] = []  # for the next entry, which shows how far their lsns went
    last_lsn = 0
    before = files[0].header.after_lsn
    previous = Opening(0, 0, before)
    for index, (each, groups) in enumerate(used):
        is_last = index + 1 == len(used)
        behind = [] if is_last else used[index + 1][1]
        follower = behind[0].opening if behind else None
        least_end = known.end if each.header.number == known.number else 0
        if follower is not None and follower.previous_lsn < start_lsn:
            # The snapshot includes the whole file: recovery does not read it.
            last_lsn = follower.previous_lsn
            previous = Opening(each.header.number, follower.previous_end, last_lsn)
            continue
        position = FILE_HEADER_BYTES
        regions: list[Region] = []
        for at, group in enumerate(groups):
            if group.position > position:
                is_proven = found.is_suspicious or _is_proven(groups[at:], position, synced_lsn)
                if is_last and not is_proven and position >= least_end:
                    break  # torn: recovery handles it
                regions.append(_region(each, key, position, group.position, last_lsn))
                last_lsn = regions[-1].fill_lsn
                waiting.append(regions[-1])
                pieces.append((regions[-1], []))
            pieces.append((None, [group]))
            if group.entries:
                for region in waiting:
                    region.upto_lsn = group.entries[0][0] - 1
                waiting.clear()
                last_lsn = group.entries[-1][0]
            position = group.end
        end = position
        if follower is not None:
            end = follower.previous_end
        elif not is_last:
            end = _aligned(each.dirty_end(position))
        elif (found.is_suspicious and each.dirty_end(position) > position) or (
            claimed > last_lsn and claimed > synced_lsn
        ):
            end = max(_aligned(each.dirty_end(position)), position + _LEAST_BYTES, least_end)
        elif position < least_end:
            # The snapshot includes all entries of the shard: only the end mark claims more.
            found.end_marks.append(known.path)
        if end > position:
            region = _region(each, key, position, end, last_lsn)
            upto = follower.previous_lsn if follower is not None else claimed
            if upto > last_lsn:
                region.upto_lsn = region.fill_lsn = upto
            elif follower is not None:
                region.upto_lsn = last_lsn
            last_lsn = region.fill_lsn
            regions.append(region)
            pieces.append((region, []))
        if each.dirty_end(end) > end:
            found.torn.append((each.path, end, each.dirty_end(end)))
        for region in regions:
            if region.start == FILE_HEADER_BYTES:
                region.opening = previous
            _read(region, each)
        previous = Opening(each.header.number, end, last_lsn)
    found.ends[key] = (max(each.header.number for each in files) + 1, previous, last_lsn)
    found.last_lsn = max(found.last_lsn, last_lsn, claimed)
    return pieces


def _is_proven(behind: Sequence[Group], position: int, synced_lsn: int) -> bool:
    """Whether the bytes after a position prove a sync, by the rules of `replay`."""
    return any(
        group.synced_bytes > position or (group.entries and group.entries[0][0] <= synced_lsn)
        for group in behind
    )


def _region(each: JournalFile, key: Key, start: int, end: int, after_lsn: int) -> Region:
    return Region(each.path, key, each.header.number, start, end, after_lsn, fill_lsn=after_lsn + 1)


def _aligned(position: int) -> int:
    return (position + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _read(region: Region, each: JournalFile) -> None:
    """Decode the region's entries if it consists of whole groups with fitting lsns."""
    raw = each.file.pread(region.length, region.start)
    offset, entries, last_lsn = 0, [], region.after_lsn
    while offset < len(raw):
        bounds = group_bounds(raw, offset, region.start + offset, each.size)
        if bounds is None or offset + bounds[0] > len(raw):
            return
        length, count = bounds
        try:
            inside = offset + GROUP_HEADER_BYTES, offset + length
            _, of_group = decode_frames(raw, *inside, count, region.start + offset)
        except _UNREADABLE:
            return
        entries += of_group
        offset += length
    for lsn, _ in entries:
        if lsn <= last_lsn or (region.upto_lsn is not None and lsn > region.upto_lsn):
            return
        last_lsn = lsn
    region.entries = entries


# -- losses ----------------------------------------------------------------------------------------


def _topics_of(image: SnapshotImage | None) -> dict[int, _Known]:
    known: dict[int, _Known] = {}
    for topic_id, encoded in image.parts if image else ():
        if topic_id == EPOCHS_PART or topic_id >= RESERVED_ID_MIN:
            continue
        part = decode_part(encoded)
        put = TopicPut(topic_id, part.name, part.epoch, part.config, part.created_ts, created=False)
        known[topic_id] = _Known(put, part.head_seq, part.ceiling_seq, part.applied_lsn)
    return known


def _cost(
    found: Survey,
    events: Sequence[tuple[int, int, Entry | Region]],
    image: SnapshotImage | None,
    start_lsn: int,
    counts: dict[int, int],
) -> None:
    """Apply the journal as recovery does, and note for each topic what it may have lost."""
    known = _topics_of(image)
    for lsn, _, event in events:
        if isinstance(event, Region):
            if event.upto_lsn is None or event.upto_lsn >= start_lsn:
                _doubt(known, event, counts)
        elif lsn >= start_lsn and event.topic_id < RESERVED_ID_MIN:
            _fold(found, known, lsn, event)
    for topic_id, topic in sorted(known.items()):
        target, is_bound = topic.head, False
        for region, claim in topic.doubts:
            bound = topic.head + _most_seqs(region) if claim is None else claim
            is_bound |= claim is None
            target = max(target, bound)
        if target > topic.head:
            found.lost.append(
                LostRecords(topic.put.name, topic_id, topic.head + 1, target, is_bound)
            )
        if topic.doubts:
            slack = sum(region.length // FRAME_HEADER_BYTES + 1 for region, _ in topic.doubts)
            ceiling = max(topic.ceiling, target) + HEAD_RESERVE_SEQS * slack
            put = msgspec.structs.replace(topic.put, head_seq=target, created=False, floor=None)
            found.jumps.append((put, ceiling))


def _most_seqs(region: Region) -> int:
    """An upper bound of the seqs in a region, in bodies or in pages without payloads."""
    frames = region.length // FRAME_HEADER_BYTES + 1
    return region.length // _RECORD_BYTES_MIN + frames * PAGE_SCAN_SLOTS_MAX


def _doubt(known: dict[int, _Known], region: Region, counts: dict[int, int]) -> None:
    claims = _claims(known, region) if region.entries is not None else None
    shard_count = counts.get(region.shard[0], 0)
    for topic_id, topic in known.items():
        if shard_count and topic_id % shard_count != region.shard[1]:
            continue
        if claims is None:
            topic.doubts = [*topic.doubts, (region, None)]
        elif topic_id in claims:
            topic.doubts = [*topic.doubts, (region, claims[topic_id])]


def _claims(known: dict[int, _Known], region: Region) -> dict[int, int | None] | None:
    """For each topic in a readable region: the highest seq.

    None if the region's seqs do not continue those around it.
    """
    claims: dict[int, int | None] = {}
    assert region.entries is not None
    for lsn, entry in region.entries:
        topic = known.get(entry.topic_id)
        if topic is None or not isinstance(entry, RecordsAppended):
            if isinstance(entry, HeadReserved | TopicPut | TopicDropped) and topic is not None:
                claims.setdefault(entry.topic_id, topic.head)
            elif isinstance(entry, RecordsAppended):
                return None  # of a topic that no other entry names
            continue
        head = claims.get(entry.topic_id) or topic.head
        is_in = lsn <= topic.applied_lsn and entry.first_seq <= head
        if entry.page is not None or not (is_in or entry.first_seq == head + 1):
            return None
        try:
            is_right = decode_body(entry.body, entry.grammar).count == entry.count
        except _UNREADABLE:
            is_right = False
        if not is_right:
            return None
        claims[entry.topic_id] = max(head, entry.first_seq + entry.count - 1)
    return claims


def _fold(found: Survey, known: dict[int, _Known], lsn: int, entry: Entry) -> None:
    topic = known.get(entry.topic_id)
    if isinstance(entry, RecordsAppended):
        creation = entry.creation
        if topic is None and creation is not None:
            topic = known[entry.topic_id] = _Known(creation, creation.head_seq, HEAD_RESERVE_SEQS)
        if topic is None:
            found.nameless[entry.topic_id] = found.nameless.get(entry.topic_id, 0) + entry.count
            return
        _refuse_page(entry, topic)
        if entry.first_seq > topic.head:
            # Seqs of a topic ascend within a shard, so an earlier region had no higher seq.
            _note_gap(found, topic, entry.first_seq - 1)
            topic.doubts = []
        topic.head = max(topic.head, entry.first_seq + entry.count - 1)
    elif isinstance(entry, TopicPut):
        if topic is None:
            known[entry.topic_id] = _Known(entry, entry.head_seq, HEAD_RESERVE_SEQS)
        else:
            # Staged, invisible seqs may have come before this entry, so the doubts stay.
            topic.put = entry
            _note_gap(found, topic, entry.head_seq)
    elif isinstance(entry, TopicDropped):
        known.pop(entry.topic_id, None)
        found.nameless.pop(entry.topic_id, None)
    elif topic is not None and isinstance(entry, HeadReserved):
        topic.ceiling = max(topic.ceiling, entry.ceiling_seq)
    elif topic is not None and isinstance(entry, RecordsDeleted) and len(entry.lasts):
        _note_gap(found, topic, int(np.frombuffer(entry.lasts, "<u8")[-1]))


def _refuse_page(entry: RecordsAppended, topic: _Known) -> None:
    if entry.page is not None and not entry.body and entry.page.copy_count and topic.doubts:
        raise StartRefused(
            f"the records of a router's copies in {topic.put.name} are in the damaged part: this "
            "cannot be repaired, restore a backup"
        )


def _note_gap(found: Survey, topic: _Known, head: int) -> None:
    """Note a proven head of a topic: the missing seqs below the head were lost."""
    if topic.doubts and head > topic.head:
        name, topic_id = topic.put.name, topic.put.topic_id
        found.lost.append(LostRecords(name, topic_id, topic.head + 1, head, is_bound=False))
    topic.head = max(topic.head, head)


# -- mending ---------------------------------------------------------------------------------------


def mend(
    fs: Fs, data_dir: str, mark: FormatMark, found: Survey, new_file_id: Callable[[], int]
) -> str:
    """*Blocking.* Set bytes aside, raise heads, fill regions; returns the set-aside folder."""
    pieces = [(region.path, region.start, region.end) for region in found.regions] + found.torn
    folder = set_aside(fs, data_dir, pieces, facts_of(found))
    fillings = [(region, _filling(fs, region)) for region in found.regions]
    # Cut torn ends as recovery would: no client got an answer for them, and a file that has a
    # successor must end cleanly.
    for path, start, end in found.torn:
        _write(fs, path, bytes(end - start), start)
    wal_dir = layout.join(data_dir, layout.WAL)
    _jump(fs, wal_dir, mark, found, new_file_id)
    for region, filling in fillings:
        _write(fs, region.path, filling, region.start)
    mark_ends(fs, wal_dir, mark)
    return folder


def _write(fs: Fs, path: str, data: bytes, position: int) -> None:
    file = fs.open(path, write=True)
    try:
        file.pwrite(data, position)
        file.sync()
    finally:
        file.close()


def facts_of(found: Survey) -> dict[str, object]:
    """The survey as a report for people and programs."""
    return {
        "regions": [
            {"file": r.path, "start": r.start, "end": r.end, "bytes": r.length}
            for r in found.regions
        ],
        "lost": [msgspec.structs.asdict(each) for each in found.lost],
        "end_marks": found.end_marks,
        "nameless": {str(topic_id): count for topic_id, count in found.nameless.items()},
    }


def _filling(fs: Fs, region: Region) -> bytes:
    """Valid groups that fill a region; without effect, except for the opening of the file."""
    file = fs.open(region.path)
    try:
        raw = file.pread(FILE_HEADER_BYTES, 0)
    finally:
        file.close()
    file_id = int.from_bytes(raw[32:40], "little")
    has_room = region.upto_lsn is None or region.fill_lsn <= region.upto_lsn
    frames = [] if region.opening is None else [encode_opening(region.opening)]
    used = GROUP_HEADER_BYTES + sum(map(len, frames))
    left = region.length - used - FRAME_HEADER_BYTES
    position, buffers = region.start, list[bytes]()
    is_said = left >= 0 and has_room
    if is_said:
        frames += encode_entry(region.fill_lsn, TopicDropped(_NO_TOPIC, "x" * left, 0))
    if frames:
        size = sum(map(len, frames))
        count = (region.opening is not None) + is_said
        buffers += encode_group(
            frames, size, count, file_id=file_id, position=position, synced_bytes=FILE_HEADER_BYTES
        )
        position += sum(map(len, buffers))
    while region.end - position >= GROUP_HEADER_BYTES:
        buffers += encode_group(
            [], 0, 0, file_id=file_id, position=position, synced_bytes=FILE_HEADER_BYTES
        )
        position += GROUP_HEADER_BYTES
    if position != region.end:
        raise StartRefused(f"{region.length} bytes at {region.start} cannot be filled", region.path)
    return b"".join(buffers)


def _jump(
    fs: Fs, wal_dir: str, mark: FormatMark, found: Survey, new_file_id: Callable[[], int]
) -> None:
    """Write a new last file for each shard that has topics whose heads jump."""
    if not found.jumps:
        return
    newest = mark.wal_sets[-1]
    slack = sum(region.length // FRAME_HEADER_BYTES + 1 for region in found.regions)
    lsn = found.last_lsn + slack
    by_shard: dict[int, list[Entry]] = {}
    for put, ceiling in found.jumps:
        entries = by_shard.setdefault(put.topic_id % newest.shard_count, [])
        entries += [put, HeadReserved(put.topic_id, ceiling)]
    for shard, entries in sorted(by_shard.items()):
        number, opening, _ = found.ends[newest.wal_set, shard]
        frames = [encode_opening(opening)]
        for entry in entries:
            lsn += 1
            frames += encode_entry(lsn, entry)
        _write_file(
            fs,
            wal_dir,
            layout.WalName(newest.wal_set, shard, number),
            frames,
            new_file_id(),
            opening.previous_number,
            mark.run,
        )
    fs.sync_dir(wal_dir)


def _write_file(
    fs: Fs,
    wal_dir: str,
    name: layout.WalName,
    frames: list[bytes],
    file_id: int,
    predecessor: int,
    run: int,
) -> None:
    header = FileHeader(
        *(name.wal_set, name.shard, name.number, file_id, 0),
        predecessor=predecessor,
        run=run,
        declared_bytes=FILE_HEADER_BYTES,
    )
    groups = encode_group(
        frames,
        sum(map(len, frames)),
        len(frames),
        file_id=file_id,
        position=FILE_HEADER_BYTES,
        synced_bytes=FILE_HEADER_BYTES,
    )
    file = fs.open(layout.join(wal_dir, layout.wal_file(name)), create=True)
    try:
        file.pwrite(encode_file_header(header), 0)
        file.sync()
        fs.sync_dir(wal_dir)
        file.pwrite(b"".join(groups), FILE_HEADER_BYTES)
        file.sync()
    finally:
        file.close()
