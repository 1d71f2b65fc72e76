"""Rows of sealed segments that are read without a wait: the rows of `read`, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import msgspec
import pytest

from tests.storage.fake_disk import FakeDisk
from tests.storage.segments.segment_samples import (
    TOPIC,
    sample_block,
    sample_facts,
    sample_plan,
    with_bytes,
)
from tests.storage.segments.test_segments import (
    COUNT,
    HOT_FOLDER,
    empty_disk,
    listed,
    opened,
    two_segments,
)
from topics_server.values.blocks import Block
from topics_server.values.errors import Corrupt, Damaged, StorageError
from topics_server.values.json_cache import DATA, META, TAGS, render_block
from topics_server.values.limits import MIB
from topics_server.wal.format.json_objects import GROUP_RECORDS
from topics_server.wal.format.segment import DATA_HEADER_BYTES
from topics_server.wal.fs import File
from topics_server.wal.segments.store import SealedSegments

ALL = range(COUNT)


@pytest.fixture
def disk() -> FakeDisk:
    disk = empty_disk()
    disk.is_cached = True
    return disk


@pytest.fixture
def segments(disk: FakeDisk) -> SealedSegments:
    """Two segments whose files are open."""
    segments = two_segments(disk)
    for segment_id in (1, 2):
        segments.read(TOPIC, segment_id, 8, 9)
    return segments


@pytest.mark.parametrize("rows", [ALL, range(1), range(7, 30), range(39, 40)])
def test_rows_in_memory_are_the_rows_of_a_read(segments: SealedSegments, rows: range) -> None:
    for segment_id, first_seq in ((1, 1), (2, COUNT + 1)):
        found = segments.read_now(TOPIC, segment_id, rows, MIB)
        assert found == segments.read(TOPIC, segment_id, rows.start, rows.stop)
        assert found == sample_block(first_seq + rows.start, len(rows))


def test_rows_that_the_system_must_load_are_none(disk: FakeDisk, segments: SealedSegments) -> None:
    disk.is_cached = False
    assert segments.read_now(TOPIC, 1, ALL, MIB) is None


def test_a_file_is_not_opened_for_it(disk: FakeDisk) -> None:
    two_segments(disk)
    segments = opened(disk)
    listed(segments)[1].columns()
    assert segments.read_now(TOPIC, 1, ALL, MIB) is None
    segments.read(TOPIC, 1, 0, 1)
    assert segments.read_now(TOPIC, 1, ALL, MIB) == sample_block(1, COUNT)


def test_a_closed_file_is_not_read(segments: SealedSegments) -> None:
    segments._file_handles.drop((TOPIC, 1))
    assert segments.read_now(TOPIC, 1, ALL, MIB) is None
    assert segments.read_now(TOPIC, 2, ALL, MIB) is not None


def test_an_index_is_not_mapped_for_it(segments: SealedSegments) -> None:
    index = segments._topic(TOPIC).index(1)
    index.unmap()
    assert segments.read_now(TOPIC, 1, ALL, MIB) is None
    index.columns()
    assert segments.read_now(TOPIC, 1, ALL, MIB) is not None


def test_it_does_not_wait_for_a_thread_that_opens_a_file(segments: SealedSegments) -> None:
    with segments._file_handles._lock:
        assert segments.read_now(TOPIC, 1, ALL, MIB) is None
    assert segments.read_now(TOPIC, 1, ALL, MIB) is not None


class NoWaiting:
    """A lock that fails a caller that would wait for it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        assert not blocking
        return True

    def release(self) -> None:
        pass


def test_the_lock_is_asked_without_a_wait(
    segments: SealedSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments._file_handles, "_lock", NoWaiting())
    assert segments.read_now(TOPIC, 1, ALL, MIB) is not None


class _During:
    """A file during whose read another thread runs a call to its end."""

    def __init__(self, file: File, call: Callable[[], object]) -> None:
        self._file = file
        self._call = call
        self.is_closed = False

    def pread_now(self, length: int, offset: int) -> bytes | memoryview | None:
        thread = threading.Thread(target=self._call)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "the thread waits for the end of this read"
        assert not self.is_closed
        return self._file.pread_now(length, offset)

    def close(self) -> None:
        self.is_closed = True
        self._file.close()


def _during(segments: SealedSegments, call: Callable[[], object]) -> _During:
    """Run `call` in another thread during the next read of segment 1 at once."""
    handle = segments._file_handles._open[TOPIC, 1]
    file = _During(handle.file, call)
    handle.file = cast(File, file)
    return file


def test_threads_read_other_files_meanwhile(segments: SealedSegments) -> None:
    found: list[Block] = []
    _during(segments, lambda: found.append(segments.read(TOPIC, 2, 8, 9)))
    assert segments.read_now(TOPIC, 1, ALL, MIB) == sample_block(1, COUNT)
    assert found == [sample_block(COUNT + 9, 1)]


def test_a_file_that_is_dropped_meanwhile_is_closed_afterwards(segments: SealedSegments) -> None:
    file = _during(segments, lambda: segments._file_handles.drop((TOPIC, 1)))
    assert segments.read_now(TOPIC, 1, ALL, MIB) == sample_block(1, COUNT)
    assert file.is_closed


def test_a_file_is_not_closed_meanwhile_to_open_another_one(segments: SealedSegments) -> None:
    file = _during(segments, segments._file_handles.close)
    assert segments.read_now(TOPIC, 1, ALL, MIB) == sample_block(1, COUNT)
    assert list(segments._file_handles._open) == [(TOPIC, 1)], "the other one is closed"
    assert not file.is_closed
    segments._file_handles.close()
    assert file.is_closed


def test_no_more_bytes_are_read_than_asked_for(segments: SealedSegments) -> None:
    columns = segments._topic(TOPIC).index(2).columns()
    start, end = columns.span(0, COUNT)
    assert segments.read_now(TOPIC, 2, ALL, end - start) is not None
    assert segments.read_now(TOPIC, 2, ALL, end - start - 1) is None


def test_damaged_rows_are_none_and_others_are_read(disk: FakeDisk) -> None:
    start = two_segments(disk)._topic(TOPIC).index(1).columns().records_start
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", start + 40)
    segments = opened(disk)
    listed(segments)
    segments.read(TOPIC, 1, 1, 2)
    assert segments.read_now(TOPIC, 1, ALL, MIB) is None
    assert segments.read_now(TOPIC, 1, range(1, COUNT), MIB) == sample_block(2, COUNT - 1)
    with pytest.raises(Damaged):
        segments.read(TOPIC, 1, 0, COUNT)


def test_rows_of_unknown_flags_are_none(disk: FakeDisk) -> None:
    two_segments(disk)
    path = f"{HOT_FOLDER}/0000000001.data"
    disk.corrupt(path, disk.file_size(path) - COUNT + 7, 0x10)
    segments = opened(disk)
    listed(segments)
    segments.read(TOPIC, 1, 8, 9)
    assert segments.read_now(TOPIC, 1, range(7, 8), MIB) is None


def test_a_dropped_segment_is_none(segments: SealedSegments) -> None:
    segments.drop(TOPIC, [1], sample_facts())
    assert segments.read_now(TOPIC, 1, ALL, MIB) is None


# -- JSON objects ------------------------------------------------------------------------------

ALL_MEMBERS = DATA | META | TAGS
MANY = 2 * GROUP_RECORDS + 30


def json_of(first_seq: int, count: int, shown: int = ALL_MEMBERS) -> bytes:
    return bytes(render_block(sample_block(first_seq, count), shown).body)


@pytest.fixture
def many(disk: FakeDisk) -> SealedSegments:
    """One segment of three groups whose files are open."""
    segments = opened(disk)
    segments.put(sample_plan(1, 1, MANY), sample_facts())
    segments.read(TOPIC, 1, 8, 9)
    return segments


@pytest.mark.parametrize(
    "rows", [range(MANY), range(256), range(256, 512), range(512, MANY), range(256, MANY)]
)
def test_objects_in_memory_are_the_json_of_a_read(many: SealedSegments, rows: range) -> None:
    found = many.read_json_now(TOPIC, 1, rows, MIB, ALL_MEMBERS)
    assert found is not None
    assert found.body == b"%b," % json_of(1 + rows.start, len(rows))
    assert found.rows(3, 20) == json_of(1 + rows.start + 3, 18)
    last = len(rows) - 1
    assert found.rows(last, last) == json_of(1 + rows.stop - 1, 1)


@pytest.mark.parametrize("rows", [range(MANY), range(256), range(256, 512), range(5)])
def test_objects_on_the_disk_are_those_in_memory(disk: FakeDisk, rows: range) -> None:
    segments = opened(disk)
    segments.put(sample_plan(1, 1, MANY), sample_facts())
    segments = opened(disk)
    listed(segments)
    disk.is_cached = False
    for shown in (DATA, DATA | META, ALL_MEMBERS, DATA | TAGS):
        found = segments.read_json(TOPIC, 1, rows, MIB, shown)
        disk.is_cached = True
        assert found == segments.read_json_now(TOPIC, 1, rows, MIB, shown)
        assert (found is None) == (rows.stop == 5 or shown == DATA | TAGS)
        disk.is_cached = False
    start, end = segments._topic(TOPIC).index(1).columns().span(0, 256)
    assert segments.read_json(TOPIC, 1, range(256), end - start - 1, DATA) is None


def test_damaged_objects_on_the_disk_are_none(disk: FakeDisk, many: SealedSegments) -> None:
    at = many._topic(TOPIC).index(1).columns().record_end(300) - 1
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", at, 0x20)
    disk.is_cached = False
    assert many.read_json(TOPIC, 1, range(256, 512), MIB, ALL_MEMBERS) is None
    assert many.read_json(TOPIC, 1, range(256), MIB, ALL_MEMBERS) is not None
    many.drop(TOPIC, [1], sample_facts())
    with pytest.raises(StorageError):
        many.read_json(TOPIC, 1, range(256), MIB, ALL_MEMBERS)


@pytest.mark.parametrize("shown", [DATA, DATA | META])
def test_objects_have_the_members_that_are_shown(many: SealedSegments, shown: int) -> None:
    found = many.read_json_now(TOPIC, 1, range(256), MIB, shown)
    assert found is not None
    assert found.body == b"%b," % json_of(1, 256, shown)
    for row in (0, 1, 100, 255):
        assert found.rows(row, row) == json_of(1 + row, 1, shown)
    # Tags without `meta` are rendered from blocks.
    assert many.read_json_now(TOPIC, 1, range(256), MIB, DATA | TAGS) is None


@pytest.mark.parametrize("rows", [range(1, 256), range(255), range(512, MANY - 1), range(5, 6)])
def test_objects_are_read_in_whole_groups(many: SealedSegments, rows: range) -> None:
    assert many.read_json_now(TOPIC, 1, rows, MIB, ALL_MEMBERS) is None
    assert many.read_now(TOPIC, 1, rows, MIB) is not None


def test_objects_that_the_system_must_load_are_none(disk: FakeDisk, many: SealedSegments) -> None:
    disk.is_cached = False
    assert many.read_json_now(TOPIC, 1, range(MANY), MIB, ALL_MEMBERS) is None


def test_no_more_bytes_of_objects_are_read_than_asked_for(many: SealedSegments) -> None:
    start, end = many._topic(TOPIC).index(1).columns().span(0, 256)
    assert many.read_json_now(TOPIC, 1, range(256), end - start, ALL_MEMBERS) is not None
    assert many.read_json_now(TOPIC, 1, range(256), end - start - 1, ALL_MEMBERS) is None


def test_damage_of_a_group_leaves_the_other_groups(disk: FakeDisk, many: SealedSegments) -> None:
    columns = many._topic(TOPIC).index(1).columns()
    path = f"{HOT_FOLDER}/0000000001.data"
    for row in (256, 300, 511):
        for at in (int(columns.rows["offset"][row]), columns.record_end(row) - 2):
            disk.corrupt(path, at, 0x20)
            assert many.read_json_now(TOPIC, 1, range(MANY), MIB, ALL_MEMBERS) is None
            assert many.read_json_now(TOPIC, 1, range(256, 512), MIB, ALL_MEMBERS) is None
            assert many.read_json_now(TOPIC, 1, range(256), MIB, ALL_MEMBERS) is not None
            assert many.read_json_now(TOPIC, 1, range(512, MANY), MIB, ALL_MEMBERS) is not None
            disk.corrupt(path, at, 0x20)
    assert many.read_json_now(TOPIC, 1, range(MANY), MIB, ALL_MEMBERS) is not None


def test_a_damaged_comma_is_damage_of_its_record(disk: FakeDisk, many: SealedSegments) -> None:
    at = many._topic(TOPIC).index(1).columns().record_end(300) - 1
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", at, 0x20)
    assert many.read_json_now(TOPIC, 1, range(256, 512), MIB, ALL_MEMBERS) is None
    with pytest.raises(Damaged) as damage:
        many.read(TOPIC, 1, 256, 512)
    assert damage.value.ranges == ((300, 300),)


def test_damaged_tags_and_stamps_are_found_by_a_check(disk: FakeDisk, many: SealedSegments) -> None:
    """No read of a record touches them: only an index that is rebuilt needs them."""
    columns = many._topic(TOPIC).index(1).columns()
    path = f"{HOT_FOLDER}/0000000001.data"
    first, last = columns.records_end, columns.flags_offset - 1
    for at in (DATA_HEADER_BYTES, columns.records_start - 1, first, first + 9, last):
        many.check_index(TOPIC, 1)
        disk.corrupt(path, at, 0x20)
        with pytest.raises(Corrupt, match="tags or the stamps"):
            many.check_index(TOPIC, 1)
        assert many.read(TOPIC, 1, 0, MANY) == sample_block(1, MANY)
        disk.corrupt(path, at, 0x20)


def test_a_segment_with_a_bytes_record_has_no_objects(disk: FakeDisk) -> None:
    segments = opened(disk)
    plan = sample_plan(1, 1, MANY)
    segments.put(msgspec.structs.replace(plan, blocks=with_bytes(plan.blocks)), sample_facts())
    segments.read(TOPIC, 1, 8, 9)
    assert segments.read_json_now(TOPIC, 1, range(256), MIB, ALL_MEMBERS) is None
    assert segments.read_now(TOPIC, 1, range(256), MIB) is not None
