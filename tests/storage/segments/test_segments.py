"""Sealed segments on a disk that crashes, tears writes, fills up and lies: no listed record is ever
lost.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest

from tests.storage.fake_disk import FakeDisk, Fault, Mode, Op, SimulatedCrash
from tests.storage.segments.segment_samples import (
    TOPIC,
    sample_block,
    sample_facts,
    sample_plan,
    with_bytes,
)
from topics_server.values.errors import Corrupt, Damaged, DiskFull, StartRefused, StorageError
from topics_server.values.file_inventory import Anchor, FoundTopic
from topics_server.values.model import TagMatch
from topics_server.wal.format.manifest import COLD, HOT
from topics_server.wal.format.segment import (
    DATA_HEADER_BYTES,
    IDX_HEADER_BYTES,
    ROW,
    SegmentColumns,
)
from topics_server.wal.segments import mending
from topics_server.wal.segments.index import SealedColumns
from topics_server.wal.segments.packing_process import InlinePacker
from topics_server.wal.segments.store import SealedSegments

HOT_FOLDER = f"data/segments/{TOPIC}"
COLD_FOLDER = f"cold/{TOPIC}"
COUNT = 40
FLIPPED = (2, 3, 4, 20)


def empty_disk(seed: int = 0) -> FakeDisk:
    disk = FakeDisk(seed)
    disk.make_dir("data")
    disk.make_dir("cold")
    disk.sync_dir(".")
    return disk


def opened(disk: FakeDisk, max_open_files: int = 64) -> SealedSegments:
    return SealedSegments(disk, "data", "cold", InlinePacker(), max_open_files)


def two_segments(disk: FakeDisk) -> SealedSegments:
    """Segments 1 (seqs 1..40, four rows flipped) and 2 (41..80)."""
    segments = opened(disk)
    segments.put(sample_plan(1, 1, COUNT), sample_facts())
    segments.put(sample_plan(2, COUNT + 1, COUNT), sample_facts())
    segments.flip(TOPIC, {1: FLIPPED})
    return segments


def dead(index: SealedColumns) -> set[int]:
    return {row for row, flag in enumerate(index.flags()) if flag}


def listed(segments: SealedSegments) -> dict[int, SealedColumns]:
    """Open, judge and settle, as recovery does for a topic that exists."""
    return {index.segment_id: index for index in recovered(segments)[1]}


def recovered(
    segments: SealedSegments, anchor: Anchor | None = None
) -> tuple[FoundTopic, list[SealedColumns]]:
    report, indexes = segments.open_topic(TOPIC, anchor)
    for path, reason in report.objections:
        raise StartRefused(reason, path)
    untrusted = {key for key, suspect in report.suspects.items() if suspect.has_lost_deletes}
    segments.finish_recovery(TOPIC, untrusted)
    return report, indexes


def check_readable(segments: SealedSegments, index: SealedColumns) -> None:
    block = segments.read(TOPIC, index.segment_id, 0, index.record_count)
    assert block == sample_block(index.first_seq, index.record_count)


def files(disk: FakeDisk) -> list[str]:
    return [f"{f}/{name}" for f in (HOT_FOLDER, COLD_FOLDER) for name in disk.list_dir(f)]


# -- a segment's answers -----------------------------------------------------------------------


def test_what_is_put_is_read_back_after_a_restart() -> None:
    disk = empty_disk()
    two_segments(disk)
    segments = opened(disk)
    report, indexes = recovered(segments)
    assert report.facts == sample_facts()
    assert [(i.segment_id, i.first_seq, i.last_seq) for i in indexes] == [(1, 1, 40), (2, 41, 80)]
    for index in indexes:
        check_readable(segments, index)
    assert segments.read(TOPIC, 2, 5, 9) == sample_block(46, 4)
    assert dead(indexes[0]) == set(FLIPPED)
    assert dead(indexes[1]) == set()


def test_the_bound_of_bytes_is_that_of_the_columns_in_use() -> None:
    """Known mistake: after a mend, pages kept the bound of the damaged columns."""
    index = listed(two_segments(empty_disk()))[2]
    before = index.bytes_at_most(5, 30)
    columns = index.columns()
    index.hold(replace(columns, rows=np.zeros_like(columns.rows)))
    assert index.bytes_at_most(5, 30) < before
    index.release()
    assert index.bytes_at_most(5, 30) == before


def test_columns_answer_as_the_records_do() -> None:
    segments = two_segments(empty_disk())
    index = listed(segments)[2]
    block = sample_block(41, COUNT)
    from topics_server.values.blocks import record_bytes

    sizes = [
        record_bytes(block.data(row), block.meta(row), block.tags[row], block.nodes[row])
        for row in range(COUNT)
    ]
    assert [index.record_bytes(row) for row in range(COUNT)] == sizes
    assert [index.time(row) for row in range(COUNT)] == list(block.times)
    gone = bytes(row % 4 == 0 for row in range(COUNT))
    assert index.record_bytes_between(5, 30, gone) == sum(
        size for row, size in enumerate(sizes) if 5 <= row < 30 and row % 4
    )
    assert index.record_bytes_between(5, 30, gone[5:30]) == index.record_bytes_between(5, 30, gone)
    assert sum(sizes[5:30]) <= index.bytes_at_most(5, 30) < 100 * sum(sizes[5:30])
    nodes = frozenset({"", "u1", "unknown"})
    assert index.node_rows(nodes, 3, 33) == bytes(block.nodes[row] in nodes for row in range(3, 33))
    assert index.node_rows(frozenset({"unknown"}), 3, 33) == bytes(30)
    for ts in (0, block.times[0], block.times[7], block.times[-1], block.times[-1] + 1):
        first = next((row for row in range(COUNT) if block.times[row] >= ts), COUNT)
        assert index.first_row_since(ts) == first


@pytest.mark.parametrize(
    "match",
    [
        TagMatch("ähre"),
        TagMatch("room:1"),
        TagMatch(""),
        TagMatch("room"),
        TagMatch("room:", is_prefix=True),
        TagMatch("", is_prefix=True),
        TagMatch("zzz", is_prefix=True),
    ],
)
def test_tags_are_found_exactly_and_by_prefix(match: TagMatch) -> None:
    segments = two_segments(empty_disk())
    block = sample_block(1, COUNT)
    found = segments.find_tags(TOPIC, 1, match)
    assert list(found) == [row for row in range(COUNT) if match.matches(block.tags[row])]


def test_rows_packed_dead_are_empty_slots() -> None:
    segments = opened(empty_disk())
    gone = bytes(row < 10 for row in range(COUNT))
    index = segments.put(sample_plan(1, 1, COUNT, gone), sample_facts())
    assert dead(index) == set(range(10))
    block = segments.read(TOPIC, 1, 0, COUNT)
    assert block.data(9) == b""
    assert block.data(10) == sample_block(1, COUNT).data(10)
    assert min(segments.find_tags(TOPIC, 1, TagMatch("", is_prefix=True))) >= 10


def test_few_files_stay_open_however_many_segments_are_read() -> None:
    disk = empty_disk()
    segments = opened(disk, max_open_files=8)
    indexes = [
        segments.put(sample_plan(number, number * 5 + 1, 5), sample_facts())
        for number in range(1, 40)
    ]
    for _ in range(2):
        for index in indexes:
            check_readable(segments, index)
    mapped = [index for index in indexes if index._columns is not None]
    assert len(mapped) <= 6
    assert len(segments._file_handles) <= 2


def test_a_flip_is_idempotent_and_survives_power_loss() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    segments.flip(TOPIC, {1: [3, 2, 39, 39], 2: [0]})
    segments.flip(TOPIC, {1: [39], 9: [1]})
    disk.crash("power")
    indexes = listed(opened(disk.reopen()))
    assert dead(indexes[1]) == {*FLIPPED, 39}
    assert dead(indexes[2]) == {0}


def test_facts_and_sizes_follow() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    hot, cold = segments.bytes_of(TOPIC)
    assert cold == 0
    assert hot == sum(disk.file_size(path) for path in files(disk) if "manifest" not in path)
    segments.relocate(TOPIC, 1, sample_facts())
    assert segments.is_cold(TOPIC, 1)
    assert not segments.is_cold(TOPIC, 2)
    assert sum(segments.bytes_of(TOPIC)) == hot
    segments.write_manifest(sample_facts(head_seq=5000))
    reopened = opened(disk)
    facts = recovered(reopened)[0].facts
    assert facts is not None
    assert facts.head_seq == 5000
    assert reopened.bytes_of(TOPIC) == segments.bytes_of(TOPIC)
    assert reopened.topics_on_disk() == [TOPIC]
    absent, none = reopened.open_topic(99)
    assert (absent.generation, absent.objections, none) == (0, [], [])


# -- tiers -------------------------------------------------------------------------------------


def test_a_relocated_segment_is_read_from_the_cold_folder_only() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    index = listed(segments)[1]
    check_readable(segments, index)
    segments.relocate(TOPIC, 1, sample_facts())
    check_readable(segments, index)
    assert disk.exists(f"{COLD_FOLDER}/0000000001.data")
    assert not disk.exists(f"{HOT_FOLDER}/0000000001.data")
    segments.flip(TOPIC, {1: [30]})
    disk.crash("power")
    again = opened(disk.reopen())
    indexes = listed(again)
    assert dead(indexes[1]) == {*FLIPPED, 30}
    check_readable(again, indexes[1])


@pytest.mark.parametrize(
    ("moment", "where"),
    [
        ("open", f"{COLD_FOLDER}/0000000001.data.tmp"),
        ("sync", f"{COLD_FOLDER}/0000000001.data.tmp"),
        ("sync_dir", COLD_FOLDER),
        ("rename", f"{HOT_FOLDER}/manifest"),
        ("unlink", f"{HOT_FOLDER}/0000000001.data"),
    ],
)
def test_a_delete_acked_while_its_segment_moves_to_the_cold_tier_stays_deleted(
    moment: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flip of another thread waits for the move, at every step of it."""
    disk = empty_disk()
    segments = two_segments(disk)
    flips: list[threading.Thread] = []
    plain_step = disk.step

    def step(op: Op, path: str) -> None:
        if (op, path) == (moment, where) and not flips:
            flips.append(threading.Thread(target=segments.flip, args=(TOPIC, {1: [33]})))
            flips[0].start()
            flips[0].join(0.05)
        plain_step(op, path)

    monkeypatch.setattr(disk, "step", step)
    segments.relocate(TOPIC, 1, sample_facts())
    flips[0].join(10)
    disk.crash("power")
    assert dead(listed(opened(disk.reopen()))[1]) == {*FLIPPED, 33}


def test_a_flip_after_a_failed_move_is_made_in_both_tiers() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    disk.fail("rename", "enospc", path="*/manifest")
    with pytest.raises(StorageError):
        segments.relocate(TOPIC, 1, sample_facts())
    segments.flip(TOPIC, {1: [33]})
    for folder in (HOT_FOLDER, COLD_FOLDER):
        flags = disk.durable_content(f"{folder}/0000000001.data")[-COUNT:]
        assert {row for row, flag in enumerate(flags) if flag} == {*FLIPPED, 33}


@pytest.mark.parametrize("tier", [HOT, COLD])
def test_a_segment_in_both_tiers_keeps_the_flags_of_both_and_one_copy(tier: str) -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    if tier == COLD:
        disk.fail("unlink", "eio", path=f"{HOT_FOLDER}/*")
    else:
        disk.fail("rename", "enospc", path="*/manifest")
    with pytest.raises(StorageError):
        segments.relocate(TOPIC, 1, sample_facts())
    for folder, row in ((HOT_FOLDER, 30), (COLD_FOLDER, 31)):
        file = disk.open(f"{folder}/0000000001.data", write=True)
        file.pwrite(b"\xff", file.size() - COUNT + row)
        file.sync()
    again = opened(disk)
    index = listed(again)[1]
    assert dead(index) == {*FLIPPED, 30, 31}
    assert again.is_cold(TOPIC, 1) == (tier == COLD)
    copies = [path for path in files(disk) if path.endswith("0000000001.data")]
    assert len(copies) == 1
    check_readable(again, index)


@pytest.mark.parametrize("place", [70, 200, -1])
def test_the_good_copy_of_a_segment_in_both_tiers_outlives_the_damaged_one(place: int) -> None:
    """The listed copy is damaged: the server cannot tell which one is good, and removes neither."""
    disk = empty_disk()
    segments = two_segments(disk)
    disk.fail("rename", "enospc", path="*/manifest")
    with pytest.raises(StorageError):
        segments.relocate(TOPIC, 1, sample_facts())
    listed_path, other = f"{HOT_FOLDER}/0000000001.data", f"{COLD_FOLDER}/0000000001.data"
    good = disk.content(other)
    disk.corrupt(listed_path, place % len(good), 0x10)
    again = opened(disk)
    assert not again.is_cold(TOPIC, 1)
    listed(again)
    assert disk.content(other) == good
    again.relocate(TOPIC, 1, sample_facts())
    assert disk.content(other) == good
    assert disk.content(listed_path) != good, "told as damaged, until somebody puts it right"
    disk.put(listed_path, good)
    check_readable(whole := opened(disk), listed(whole)[1])
    assert not disk.exists(other)
    disk = empty_disk()
    segments = two_segments(disk)
    disk.fail("rename", "enospc", path="*/manifest")
    with pytest.raises(StorageError):
        segments.relocate(TOPIC, 1, sample_facts())
    again = opened(disk)
    listed(again)
    again.drop(TOPIC, [1], sample_facts())
    assert [path for path in files(disk) if "0000000001" in path] == []


def test_damaged_flags_of_a_segment_no_snapshot_knows_are_no_anchor() -> None:
    """Otherwise the right file, once it is back, has flags that differ from those anchored
    meanwhile.
    """
    disk = empty_disk()
    two_segments(disk)
    path = f"{HOT_FOLDER}/0000000002.data"
    disk.corrupt(path, len(disk.content(path)) - 1, 0x10)
    report, _ = opened(disk).open_topic(TOPIC, Anchor(1, 1, {}, {}))
    suspect = report.suspects[2]
    assert suspect.has_damaged_flags
    assert not suspect.has_lost_deletes, "its other rows are served"
    assert 1 not in report.suspects


@pytest.mark.parametrize("suffix", ["data", "idx"])
def test_a_missing_listed_file_refuses_start_by_name(suffix: str) -> None:
    disk = empty_disk()
    two_segments(disk)
    disk.unlink(f"{HOT_FOLDER}/0000000002.{suffix}")
    with pytest.raises(StartRefused, match=rf"0000000002\.{suffix}.*missing"):
        listed(opened(disk))


def test_a_cold_disk_that_is_not_mounted_is_not_an_empty_one() -> None:
    disk = empty_disk()
    two_segments(disk).relocate(TOPIC, 1, sample_facts())
    elsewhere = SealedSegments(disk, "data", "mnt", InlinePacker())
    with pytest.raises(StartRefused, match="is the cold disk mounted"):
        listed(elsewhere)
    without = SealedSegments(disk, "data", None, InlinePacker())
    with pytest.raises(StartRefused, match="no cold folder is set"):
        listed(without)
    assert dead(listed(opened(disk))[1]) == set(FLIPPED)


# -- damage ------------------------------------------------------------------------------------


def test_a_damaged_record_takes_out_its_range_only() -> None:
    disk = empty_disk()
    start = two_segments(disk)._topic(TOPIC).index(1).columns().records_start
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", start + 40)
    segments = opened(disk)
    listed(segments)
    with pytest.raises(Damaged) as caught:
        segments.read(TOPIC, 1, 0, COUNT)
    assert (caught.value.first_row, caught.value.last_row) == (0, 0)
    assert segments.read(TOPIC, 1, 1, COUNT) == sample_block(2, COUNT - 1)


def test_a_damaged_flag_makes_its_row_damaged_not_live() -> None:
    disk = empty_disk()
    two_segments(disk)
    path = f"{HOT_FOLDER}/0000000001.data"
    disk.corrupt(path, disk.file_size(path) - COUNT + 7, 0x10)
    disk.corrupt(path, disk.file_size(path) - COUNT + 2, 0x10)
    segments = opened(disk)
    index = listed(segments)[1]
    assert dead(index) == {3, 4, 20}
    with pytest.raises(Damaged) as caught:
        segments.read(TOPIC, 1, 0, COUNT)
    assert (caught.value.first_row, caught.value.last_row) == (2, 7)
    assert segments.read(TOPIC, 1, 8, COUNT) == sample_block(9, COUNT - 8)


@pytest.mark.parametrize("offset", [3, 60, 130, 700, -1])
def test_a_damaged_index_is_made_again_from_its_records(offset: int) -> None:
    disk = empty_disk()
    two_segments(disk)
    path = f"{HOT_FOLDER}/0000000001.idx"
    good = disk.content(path)
    disk.corrupt(path, offset % len(good))
    segments = opened(disk)
    index = listed(segments)[1]
    assert dead(index) == set(FLIPPED)
    check_readable(segments, index)
    disk.crash("power")
    assert disk.reopen().content(path) == good


def test_an_index_that_is_damaged_while_it_is_mapped_is_found() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    for segment_id in (1, 2, 3):  # there is no segment 3
        segments.check_index(TOPIC, segment_id)
    disk.corrupt(f"{HOT_FOLDER}/0000000001.idx", 200)
    segments.check_index(TOPIC, 2)
    with pytest.raises(StorageError):
        segments.check_index(TOPIC, 1)
    segments.relocate(TOPIC, 2, sample_facts())
    segments.check_index(TOPIC, 2)
    disk.corrupt(f"{COLD_FOLDER}/0000000002.idx", 200)
    with pytest.raises(StorageError):
        segments.check_index(TOPIC, 2)
    segments.drop(TOPIC, [1, 2], sample_facts())
    segments.check_index(TOPIC, 1)


def test_an_index_and_a_record_damaged_cost_that_record_only() -> None:
    disk = empty_disk()
    two_segments(disk)
    disk.corrupt(f"{HOT_FOLDER}/0000000001.idx", 200)
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", 300)
    damaged = disk.content(f"{HOT_FOLDER}/0000000001.idx")
    segments = opened(disk)
    indexes = listed(segments)
    with pytest.raises(Damaged) as caught:
        segments.read(TOPIC, 1, 0, COUNT)
    ((row, last),) = caught.value.ranges
    assert row == last
    assert segments.read(TOPIC, 1, row + 1, COUNT) == sample_block(row + 2, COUNT - row - 1)
    assert indexes[1].damaged_rows(0, COUNT) == [(row, row)]
    segments.flip(TOPIC, {1: [5]})
    check_readable(segments, indexes[2])
    # The damaged index is kept, and nothing is rebuilt a second time.
    kept = f"data/quarantine/{TOPIC}/0000000001.idx.1"
    assert disk.content(kept) == damaged
    listed(opened(disk))
    assert disk.list_dir(f"data/quarantine/{TOPIC}") == ["0000000001.idx.1"]


def test_an_index_stays_in_memory_where_the_disk_has_no_room_for_it() -> None:
    disk = empty_disk()
    two_segments(disk)
    disk.corrupt(f"{HOT_FOLDER}/0000000001.idx", 200)
    disk.fail("write", "enospc", path="*quarantine*", times=None)
    segments = opened(disk)
    index = listed(segments)[1]
    check_readable(segments, index)
    segments.relocate(TOPIC, 1, sample_facts())
    assert not segments.is_cold(TOPIC, 1)
    disk.heal()
    again = opened(disk)
    check_readable(again, listed(again)[1])


@pytest.mark.parametrize("first", ["idx", "data"])
def test_half_of_a_copy_in_the_other_tier_goes(first: str) -> None:
    disk = empty_disk()
    two_segments(disk)
    disk.make_dir(COLD_FOLDER)
    file = disk.open(f"{COLD_FOLDER}/0000000001.{first}", create=True)
    file.pwrite(disk.content(f"{HOT_FOLDER}/0000000001.{first}")[:100], 0)
    file.close()
    segments = opened(disk)
    check_readable(segments, listed(segments)[1])
    assert disk.list_dir(COLD_FOLDER) == []


def test_a_copy_of_something_else_in_the_other_tier_gives_no_flags() -> None:
    disk = empty_disk()
    two_segments(disk)
    disk.make_dir(COLD_FOLDER)
    path = f"{COLD_FOLDER}/0000000001.data"
    file = disk.open(path, create=True)
    file.pwrite(b"\xff" * disk.file_size(f"{HOT_FOLDER}/0000000001.data"), 0)
    file.close()
    assert dead(listed(opened(disk))[1]) == set(FLIPPED)


def test_a_copy_is_kept_while_the_listed_one_is_not_trusted() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    disk.fail("unlink", "eio", path=f"{HOT_FOLDER}/*")
    with pytest.raises(StorageError):
        segments.relocate(TOPIC, 1, sample_facts())
    disk.heal()
    file = disk.open(f"{COLD_FOLDER}/0000000001.data", write=True)
    file.truncate(10)
    again = opened(disk)
    index = listed(again)[1]
    assert index.damaged_rows(0, COUNT) == [(0, COUNT - 1)]
    assert disk.exists(f"{HOT_FOLDER}/0000000001.data")
    # A flip that failed is not reported as done.
    assert again.flip(TOPIC, {1: [9]}) == {}


def test_flags_that_lost_deletes_are_found_by_their_digest() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    path = f"{HOT_FOLDER}/0000000001.data"
    older = disk.content(path)
    digests = segments.flip(TOPIC, {1: [30], 2: [1]})
    assert digests[1] == segments.flags_digest(TOPIC, 1)
    file = disk.open(path, write=True)
    file.pwrite(older, 0)
    anchor = Anchor(1, 3, digests, {})
    report, _ = recovered(opened(disk), anchor)
    assert set(report.suspects) == {1}
    assert report.suspects[1].has_lost_deletes
    assert disk.content(path) == older
    # A replayed delete can explain additional dead rows, but no missing ones.
    report.suspects[1].is_touched = True
    assert report.suspects[1].has_lost_deletes
    # Flips of all deleted rows repair the flags of an older file.
    rows = np.array([*FLIPPED, 30], "<u4").tobytes()
    whole = Anchor(1, 3, digests, {1: rows}, whole_flips=[1])
    report, _ = recovered(opened(disk), whole)
    assert not report.suspects[1].has_lost_deletes


def test_few_rows_are_read_together_and_their_damage_is_told() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    rows = [3, 9, 30]
    alone = [segments.read(TOPIC, 1, row, row + 1) for row in rows]
    assert segments.read_rows(TOPIC, 1, rows, 1 << 20) == alone
    assert segments.read_rows(TOPIC, 1, rows[::-1], 1 << 20) == alone[::-1]
    assert segments.read_rows(TOPIC, 1, rows, len(alone[0].body)) == alone[:1]
    columns = listed(opened(disk))[1].columns()
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", int(columns.rows["offset"][9]) + 40)
    with pytest.raises(Damaged) as caught:
        segments.read_rows(TOPIC, 1, rows, 1 << 20)
    assert caught.value.ranges == ((9, 9),)
    assert segments.read_rows(TOPIC, 1, [3, 30], 1 << 20) == [alone[0], alone[2]]
    # Flag bytes with no meaning: their rows may have been deleted.
    flags_offset = columns.flags_offset
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", flags_offset + 30)
    restarted = opened(disk)
    listed(restarted)
    with pytest.raises(Damaged) as caught:
        restarted.read_rows(TOPIC, 1, [3, 30], 1 << 20)
    assert caught.value.ranges == ((30, 30),)
    segments.drop(TOPIC, [1], sample_facts())
    with pytest.raises(StorageError):
        segments.read_rows(TOPIC, 1, [3], 1 << 20)


def test_a_segment_cut_short_has_lost_its_flags_and_is_damaged_whole() -> None:
    disk = empty_disk()
    two_segments(disk)
    file = disk.open(f"{HOT_FOLDER}/0000000001.data", write=True)
    file.truncate(file.size() - 1)
    segments = opened(disk)
    index = listed(segments)[1]
    with pytest.raises(Damaged):
        segments.read(TOPIC, 1, 30, 31)
    assert index.flags() == bytes(COUNT)


def test_a_damaged_manifest_is_corrupt_and_named() -> None:
    disk = empty_disk()
    two_segments(disk)
    disk.corrupt(f"{HOT_FOLDER}/manifest", 50)
    with pytest.raises(StartRefused, match=f"{HOT_FOLDER}/manifest"):
        listed(opened(disk))


# -- crashes and faults at every operation -----------------------------------------------------

Change = Callable[[SealedSegments], None]


def put_third(segments: SealedSegments) -> None:
    segments.put(sample_plan(3, 81, COUNT), sample_facts())


def flip_more(segments: SealedSegments) -> None:
    segments.flip(TOPIC, {1: [10, 30, 31], 2: range(0, COUNT, 3)})


def relocate_first(segments: SealedSegments) -> None:
    segments.relocate(TOPIC, 1, sample_facts())


def drop_first(segments: SealedSegments) -> None:
    segments.drop(TOPIC, [1], sample_facts())


def move_then_flip(segments: SealedSegments) -> None:
    segments.relocate(TOPIC, 1, sample_facts())
    segments.flip(TOPIC, {1: [10, 30, 31], 2: range(0, COUNT, 3)})


CHANGES: dict[str, tuple[Change, set[int], set[int]]] = {
    # name: the change, segments that may exist after it began, segments once it is acknowledged
    "put": (put_third, {1, 2, 3}, {1, 2, 3}),
    "flip": (flip_more, {1, 2}, {1, 2}),
    "relocate": (relocate_first, {1, 2}, {1, 2}),
    "drop": (drop_first, {1, 2}, {2}),
    "relocate and flip": (move_then_flip, {1, 2}, {1, 2}),
}
FLIPPING = {"flip", "relocate and flip"}


def check_found(disk: FakeDisk, name: str, acknowledged: bool) -> dict[int, set[int]]:
    """Recover and check the files that every crash must leave; return the flags found, by
    segment.
    """
    _, possible, final = CHANGES[name]
    segments = opened(disk)
    indexes = listed(segments)
    assert set(indexes) <= possible
    assert set(indexes) >= (final if acknowledged else final & {1, 2})
    seqs = [seq for i in indexes.values() for seq in range(i.first_seq, i.last_seq + 1)]
    assert len(seqs) == len(set(seqs))
    for index in indexes.values():
        check_readable(segments, index)
    flags = {number: dead(index) for number, index in indexes.items()}
    if 1 in flags:
        assert flags[1] >= set(FLIPPED)
    if acknowledged and name in FLIPPING:
        assert flags == {1: {*FLIPPED, 10, 30, 31}, 2: set(range(0, COUNT, 3))}
    names = [path.rpartition("/")[2] for path in files(disk)]
    expected = ["manifest", *(f"{n:010d}.{s}" for n in indexes for s in ("data", "idx"))]
    if 3 not in indexes and not acknowledged:
        # A file of a seal that no manifest lists stays until a manifest passes its id.
        names = [name for name in names if not name.startswith("0000000003")]
    assert sorted(names) == sorted(expected)
    return flags


def after_crashes(name: str, seed: int, mode: Mode) -> Iterator[tuple[FakeDisk, bool]]:
    """The disk after a crash at each operation of a change, and whether it was acknowledged."""
    for nth in itertools.count(1):
        disk = empty_disk(seed * 1000 + nth)
        segments = two_segments(disk)
        disk.crash_at(nth)
        try:
            CHANGES[name][0](segments)
        except SimulatedCrash:
            disk.crash(mode)
            yield disk.reopen(), False
        else:
            disk.crash(mode)
            yield disk.reopen(), True
            return


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["kill", "power"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_crash_at_any_operation_loses_nothing(name: str, mode: Mode, seed: int) -> None:
    for disk, acknowledged in after_crashes(name, seed, mode):
        flags = check_found(disk, name, acknowledged)
        # Files that recovery has used stay, also after a power loss right after it.
        disk.crash("power")
        again = check_found(disk.reopen(), name, acknowledged)
        assert again == flags


@pytest.mark.parametrize("mode", ["kill", "power"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_crash_within_recovery_loses_nothing(name: str, mode: Mode) -> None:
    for disk, acknowledged in after_crashes(name, 77, mode):
        for nth in itertools.count(1):
            disk.crash_at(nth)
            try:
                listed(opened(disk))
            except SimulatedCrash:
                disk.crash("power")
                disk = disk.reopen()
                continue
            break
        disk.crash("power")
        check_found(disk.reopen(), name, acknowledged)


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_a_topic_dropped_half_is_dropped_by_the_next_call(mode: Mode) -> None:
    for nth in itertools.count(1):
        disk = empty_disk(nth)
        segments = two_segments(disk)
        segments.relocate(TOPIC, 1, sample_facts())
        disk.crash_at(nth)
        acknowledged = False
        try:
            segments.drop_topic(TOPIC)
            acknowledged = True
        except SimulatedCrash:
            pass
        disk.crash(mode)
        disk = disk.reopen()
        again = opened(disk)
        if TOPIC in again.topics_on_disk():
            report, indexes = again.open_topic(TOPIC)
            assert not report.generation or {i.segment_id for i in indexes} == {1, 2}
            assert not (report.generation and acknowledged)
            again.drop_topic(TOPIC)
        assert again.topics_on_disk() == []
        assert files(disk) == []
        if acknowledged:
            return


@pytest.mark.parametrize("fault", ["eio", "enospc", "emfile", "partial"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_fault_at_any_operation_can_be_tried_again(name: str, fault: Fault) -> None:
    change = CHANGES[name][0]
    for nth in itertools.count(1):
        disk = empty_disk(nth)
        segments = two_segments(disk)
        disk.fail("any", fault, nth=nth)
        failed = False
        try:
            change(segments)
        except StorageError:
            failed = True
        disk.heal()
        for number in CHANGES[name][2] & {1, 2}:
            if failed:
                block = segments.read(TOPIC, number, 0, COUNT)
                assert block == sample_block((number - 1) * COUNT + 1, COUNT)
        if failed:
            change(segments)
        disk.crash("power")
        check_found(disk.reopen(), name, acknowledged=True)
        if not failed:
            return


def test_a_put_after_a_manifest_of_unknown_outcome_is_listed_as_it_is() -> None:
    """The retry may be packed differently: the manifest in between must not list its first form."""
    for nth in itertools.count(1):
        disk = empty_disk(nth)
        segments = two_segments(disk)
        disk.fail("sync_dir", "eio", nth=2, path=HOT_FOLDER)
        with pytest.raises(StorageError):
            put_third(segments)
        disk.heal()
        disk.crash_at(nth)
        acknowledged = False
        gone = bytes([1]) + bytes(COUNT - 1)
        try:
            segments.put(sample_plan(3, 81, COUNT, gone), sample_facts())
            acknowledged = True
        except SimulatedCrash:
            pass
        disk.crash("kill")
        again = opened(disk.reopen())
        indexes = listed(again)
        assert set(indexes) >= ({1, 2, 3} if acknowledged else {1, 2})
        for index in indexes.values():
            again.read(TOPIC, index.segment_id, 0, index.record_count)
        if acknowledged:
            assert dead(indexes[3]) == {0}
            return


def test_a_full_disk_gets_its_room_back_from_a_segment_that_was_not_listed() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    before = disk.used_bytes()
    disk.fail("write", "enospc", path="*/manifest.tmp")
    with pytest.raises(StorageError):
        put_third(segments)
    assert disk.used_bytes() == before


@pytest.mark.parametrize("op", ["write", "sync", "rename", "sync_dir", "unlink"])
def test_a_drop_that_failed_is_made_up_for_by_the_next_change(op: Op) -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    disk.fail(op, "enospc", path=f"{HOT_FOLDER}*")
    with pytest.raises(StorageError):
        drop_first(segments)
    put_third(segments)
    disk.crash("power")
    disk = disk.reopen()
    assert set(listed(opened(disk))) == {2, 3}
    assert not [path for path in files(disk) if "0000000001" in path]


def one_segment(disk: FakeDisk, layout: str) -> SealedSegments:
    """Segment 1, as JSON objects or as records: a bytes record keeps it from JSON objects."""
    segments = opened(disk)
    plan = sample_plan(1, 1, COUNT)
    if layout == "records":
        plan = msgspec.structs.replace(plan, blocks=with_bytes(plan.blocks))
    segments.put(plan, sample_facts())
    return segments


@pytest.mark.parametrize("layout", ["objects", "records"])
@pytest.mark.parametrize("where", ["tag number", "time", "tag rows", "tag text", "header"])
@pytest.mark.parametrize("first", ["read", "search", "check"])
def test_a_mapped_index_that_is_damaged_is_replaced_by_one_from_the_records(
    where: str, first: str, layout: str
) -> None:
    disk = empty_disk()
    segments = one_segment(disk, layout)
    index = listed(segments)[1]
    expected = segments.read(TOPIC, 1, 8, COUNT)
    path = f"{HOT_FOLDER}/0000000001.idx"
    sound, content = index.columns(), disk.content(path)
    at = {
        "tag number": IDX_HEADER_BYTES + 10 * ROW.itemsize + 32,
        "time": IDX_HEADER_BYTES + 10 * ROW.itemsize,
        "tag rows": content.index(sound.tag_rows.tobytes()) + 4 * int(sound.tag_starts[1]),
        "tag text": content.index(bytes(sound.tags.text)),
        "header": 12,
    }[where]
    match = TagMatch(str(sound.tags[1], "utf-8"))
    rows = list(index.rows_of(match))
    disk.corrupt(path, at)
    damaged = disk.content(path)
    if where == "header":
        # Only a mapping reads it.
        index.unmap()
    if first == "read":
        segments.read(TOPIC, 1, 8, 16)
    elif first == "search":
        segments.find_tags(TOPIC, 1, match)
    else:
        with pytest.raises(Corrupt):
            segments.check_index(TOPIC, 1)
    for _ in range(2):
        assert segments.read(TOPIC, 1, 8, COUNT) == expected
        assert list(segments.find_tags(TOPIC, 1, match)) == rows
    segments.check_index(TOPIC, 1)
    assert segments.read(TOPIC, 1, 8, COUNT) == expected
    assert not index.is_held
    assert disk.content(path) == content
    (kept,) = disk.list_dir(f"data/quarantine/{TOPIC}")
    assert disk.content(f"data/quarantine/{TOPIC}/{kept}") == damaged


def test_an_index_of_damaged_records_is_not_rebuilt_again_and_again() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    index = listed(segments)[1]
    disk.corrupt(f"{HOT_FOLDER}/0000000001.idx", IDX_HEADER_BYTES)
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", int(index.columns().rows["offset"][20]) + 5)
    with pytest.raises(Damaged) as caught:
        segments.read(TOPIC, 1, 0, COUNT)
    assert caught.value.ranges == ((20, 20),)
    with pytest.raises(Damaged):
        segments.read(TOPIC, 1, 16, 24)
    assert len(disk.list_dir(f"data/quarantine/{TOPIC}")) == 1
    assert segments.read(TOPIC, 1, 0, 20) == sample_block(1, 20)


def test_a_damaged_header_of_a_data_file_is_found_by_a_check() -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    for at in range(DATA_HEADER_BYTES):
        segments.check_index(TOPIC, 1)
        disk.corrupt(f"{HOT_FOLDER}/0000000001.data", at)
        with pytest.raises(Corrupt):
            segments.check_index(TOPIC, 1)
        disk.corrupt(f"{HOT_FOLDER}/0000000001.data", at)


@pytest.mark.parametrize("error", [DiskFull, StorageError])
def test_an_index_that_the_disk_refuses_stays_in_memory(error: type[StorageError]) -> None:
    disk = empty_disk()
    segments = two_segments(disk)
    index = listed(segments)[1]
    disk.corrupt(f"{HOT_FOLDER}/0000000001.idx", IDX_HEADER_BYTES)
    with mock.patch.object(mending, "write_temp", side_effect=error("refused")):
        assert segments.read(TOPIC, 1, 8, COUNT) == sample_block(9, COUNT - 8)
        assert index.is_held
        # The scrub does not try again and again.
        segments.check_index(TOPIC, 1)
    index.unmap()
    assert segments.read(TOPIC, 1, 8, COUNT) == sample_block(9, COUNT - 8)


@pytest.mark.parametrize("layout", ["objects", "records"])
@pytest.mark.parametrize("use", ["time", "first_row_since", "node_rows", "names of nodes", "map"])
def test_uses_of_an_index_on_the_loop_ask_for_a_sound_one(use: str, layout: str) -> None:
    disk = empty_disk()
    segments = one_segment(disk, layout)
    index, path = listed(segments)[1], f"{HOT_FOLDER}/0000000001.idx"
    content, sound = disk.content(path), index.columns()
    node = str(sound.nodes[0], "utf-8")
    row = IDX_HEADER_BYTES + 10 * ROW.itemsize
    uses: dict[str, tuple[int, Callable[[], object]]] = {
        "time": (row, lambda: index.time(10)),
        "first_row_since": (row, lambda: index.first_row_since(int(sound.rows["ts"][20]))),
        "node_rows": (row + 36, lambda: index.node_rows(frozenset([node]), 0, COUNT)),
        "names of nodes": (
            content.index(bytes(sound.nodes.text)),
            lambda: index.node_rows(frozenset([node]), 0, COUNT),
        ),
        "map": (12, lambda: index.time(10)),
    }
    at, ask = uses[use]
    expected = ask()
    disk.corrupt(path, at)
    if use == "map":
        index.unmap()
    with pytest.raises(Corrupt):
        ask()
    for thread in threading.enumerate():
        if thread.name == "mend-index":
            thread.join()
    assert ask() == expected
    assert disk.content(path) == content


def test_a_late_mapping_does_not_replace_the_columns_that_are_held() -> None:
    segments = two_segments(empty_disk())
    index = listed(segments)[1]
    mapped, held = index.columns(), replace(index.columns())
    load = index._load

    def late(found: SealedColumns) -> SegmentColumns:
        columns = load(found)
        index.hold(held, is_reported=False)
        return columns

    index._load = late
    index.unmap()
    assert index.columns().record_count == mapped.record_count
    assert index.columns() is held
    index.unmap()
    assert index.columns() is held
