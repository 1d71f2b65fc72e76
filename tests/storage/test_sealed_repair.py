"""The findings of `topics repair` in sealed segments, and the indexes that it rebuilds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.design7.bench import Bench
from tests.storage.fake_disk import FakeDisk
from topics_server.values.errors import StartRefused
from topics_server.wal.directory import read_format
from topics_server.wal.snapshots.store import PublishedSnapshots
from topics_server.wal.tools.dump import verify
from topics_server.wal.tools.sealed_repair import SealedSurvey, survey_segments

COUNT = 8
DATA = "data/segments/1/0000000001.data"
IDX = "data/segments/1/0000000001.idx"


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Two sealed segments of eight records each."""
    made = Bench(segment_max_events=COUNT)
    made.put()
    for _ in range(2):
        made.append(COUNT, tag="a")
        made.tend()
    made.checkpoint()
    yield made
    made.world.abandon()


def looked(disk: FakeDisk, *, remake: bool = False, cold_dir: str | None = None) -> SealedSurvey:
    mark = read_format(disk, "data")
    assert mark is not None
    image = PublishedSnapshots(disk, "data").newest()
    return survey_segments(disk, "data", cold_dir, mark, image, remake=remake)


def damage_record(bench: Bench, number: int) -> None:
    """Change one byte of the record whose data is this number."""
    content = bench.world.disk.content(DATA)
    at = content.index(b'"data":%d' % number) + len(b'"data":')
    bench.world.disk.corrupt(DATA, at, 0x04)


def test_whole_segments_are_left_alone(bench: Bench) -> None:
    bench.world.crash("kill")
    before = bench.world.disk.image().files
    found = looked(bench.world.disk, remake=True)
    assert (found.is_damaged, found.readable_again, found.not_looked_at) == (False, [], [])
    assert bench.world.disk.image().files == before


@pytest.mark.parametrize("offset", [3, 60, 200, -1])
def test_a_damaged_index_is_made_again_byte_for_byte_and_kept(bench: Bench, offset: int) -> None:
    bench.world.crash("kill")
    disk = bench.world.disk
    whole = disk.content(IDX)
    disk.corrupt(IDX, offset % len(whole))
    bad = disk.content(IDX)
    before = disk.image().files
    found = looked(disk)
    assert (found.indexes, found.lost) == ([IDX], [])
    assert disk.image().files == before, "looking changes nothing"
    assert looked(disk, remake=True).indexes == [IDX]
    assert disk.content(IDX) == whole
    assert disk.content("data/quarantine/1/0000000001.idx.1") == bad
    assert not looked(disk).is_damaged
    assert verify(disk, "data").problems == []
    bench.world.start()
    assert bench.seqs() == list(range(1, 17))


def test_damaged_records_are_named_by_their_seqs_and_stay(bench: Bench) -> None:
    bench.world.crash("kill")
    disk = bench.world.disk
    damage_record(bench, 3)
    disk.corrupt(IDX, 60)
    data = disk.content(DATA)
    found = looked(disk, remake=True)
    assert found.indexes == [IDX]
    assert [(each.topic, each.segment_id, each.seqs) for each in found.lost] == [("t", 1, [(3, 3)])]
    assert disk.content(DATA) == data
    found = looked(disk)
    assert (found.indexes, len(found.lost)) == ([], 1), "the index is as good as its records"
    bench.world.start()
    assert bench.seqs() == [seq for seq in range(1, 17) if seq != 3]


def test_a_hole_whose_file_is_back_is_told_as_readable_again(bench: Bench) -> None:
    bench.world.crash("kill")
    disk = bench.world.disk
    whole = disk.content(DATA)
    damage_record(bench, 3)
    bench.world.start()
    assert 3 not in bench.seqs(), "somebody reads it, and it becomes a hole"
    bench.delete(before_seq=3)
    bench.append()
    bench.checkpoint()
    bench.world.stop()
    disk = bench.world.disk
    assert [each.seqs for each in looked(disk).lost] == [[(3, 3)]]
    damaged = disk.content(DATA)
    flags = damaged[-COUNT:]
    disk.put(DATA, whole[:-COUNT] + flags)
    found = looked(disk)
    assert not found.is_damaged
    assert [each.seqs for each in found.readable_again] == [[(3, 3)]]
    bench.world.start()
    assert bench.seqs() == list(range(3, 18))


def test_flags_of_an_older_copy_are_all_of_a_segment(bench: Bench) -> None:
    """The copy has lost deletes, so the server serves none of its rows, and repair reports that."""
    older = bench.world.disk.content(DATA)
    bench.delete(before_seq=4)
    bench.tend()
    for _ in range(2):
        bench.checkpoint()
    bench.world.crash("kill")
    disk = bench.world.disk
    assert disk.content(DATA) != older
    disk.put(DATA, older)
    assert [each.seqs for each in looked(disk).lost] == [[(1, 8)]]


def test_a_topic_that_a_start_refuses_is_named(bench: Bench) -> None:
    bench.world.crash("kill")
    disk = bench.world.disk
    disk.lose(DATA)
    found = looked(disk)
    assert [line.split(":")[0] for line in found.not_looked_at] == [DATA]


def test_another_stores_cold_folder_is_refused(bench: Bench) -> None:
    bench.world.crash("kill")
    disk = bench.world.disk
    disk.put("cold/1/0000000001.data", b"x")
    with pytest.raises(StartRefused, match="cold"):
        looked(disk, cold_dir="cold")
