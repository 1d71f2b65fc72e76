"""Rows of sealed segments that are read without a wait: the rows of `read`, or none."""

from __future__ import annotations

import pytest

from tests.storage.fake_disk import FakeDisk
from tests.storage.segments.segment_samples import TOPIC, sample_block, sample_facts
from tests.storage.segments.test_segments import (
    COUNT,
    HOT_FOLDER,
    empty_disk,
    listed,
    opened,
    two_segments,
)
from topics_server.values.errors import Damaged
from topics_server.values.limits import MIB
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


def test_no_more_bytes_are_read_than_asked_for(segments: SealedSegments) -> None:
    columns = segments._topic(TOPIC).index(2).columns()
    start, end = columns.span(0, COUNT)
    assert segments.read_now(TOPIC, 2, ALL, end - start) is not None
    assert segments.read_now(TOPIC, 2, ALL, end - start - 1) is None


def test_damaged_rows_are_none_and_others_are_read(disk: FakeDisk) -> None:
    two_segments(disk)
    disk.corrupt(f"{HOT_FOLDER}/0000000001.data", 64 + 40)
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
