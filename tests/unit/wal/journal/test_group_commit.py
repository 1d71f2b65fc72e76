"""Which frames form a group."""

from __future__ import annotations

from collections import deque

from topics_server.wal.journal.group_commit import NextGroup, QueuedFrame, take_group


def frame(lsn: int, size: int = 10, *, sync: bool = False, urgent: bool = False) -> QueuedFrame:
    return QueuedFrame(lsn, [bytes(size)], size, sync, urgent)


def test_one_frame_is_a_group() -> None:
    queue = deque([frame(5, sync=True, urgent=True)])
    assert take_group(queue) == NextGroup([bytes(10)], 10, 1, 5, 5, 5, True)
    assert not queue


def test_a_group_takes_what_fits_and_leaves_the_rest_in_order() -> None:
    queue = deque([frame(1), frame(2), frame(3, 15), frame(4, 1)])
    group = take_group(queue, 30)
    assert (group.first_lsn, group.last_lsn, group.frame_count, group.frames_bytes) == (1, 2, 2, 20)
    assert [queued.lsn for queued in queue] == [3, 4]


def test_a_frame_larger_than_a_group_goes_alone() -> None:
    queue = deque([frame(1, 100), frame(2, 1)])
    assert take_group(queue, 30).frame_count == 1


def test_the_first_waiting_sync_is_named() -> None:
    queue = deque([frame(1), frame(4, sync=True), frame(6, sync=True)])
    assert take_group(queue).sync_from_lsn == 4
    assert take_group(deque([frame(1), frame(2)])).sync_from_lsn is None


def test_a_group_is_urgent_only_if_all_of_it_is() -> None:
    assert not take_group(deque([frame(1, urgent=True), frame(2)])).urgent
    assert take_group(deque([frame(1, urgent=True), frame(2, urgent=True)])).urgent
