"""When a shard syncs, what the loop writes meanwhile, and how far both have come."""

from __future__ import annotations

from collections import deque

import pytest

from topics_server.values.limits import LOOP_UNSYNCED_BYTES_MAX
from topics_server.wal.journal.group_commit import QueuedFrame
from topics_server.wal.journal.sync_policy import (
    SLOW_SYNCS_MAX,
    SLOW_WRITE_MS,
    SyncPolicy,
    Watermarks,
)


def queue(*syncs: bool) -> deque[QueuedFrame]:
    """One frame for each argument, which says whether its ticket waits for a sync."""
    return deque(QueuedFrame(lsn, [b"x"], 1, sync, False) for lsn, sync in enumerate(syncs, 1))


def serialised() -> SyncPolicy:
    """A policy that has seen writes wait for syncs."""
    policy = SyncPolicy()
    for _ in range(SLOW_SYNCS_MAX):
        policy.write_took(SLOW_WRITE_MS + 1)
        policy.synced(0)
    return policy


# -- when to sync ----------------------------------------------------------------------------------


def test_a_new_policy_wants_nothing_and_allows_every_write() -> None:
    policy = SyncPolicy()
    assert not policy.wants_sync
    assert not policy.wants_sync_of(0)
    assert policy.allows_write(queue(True, True))


def test_a_waiting_ticket_wants_a_sync_until_a_sync_has_reached_it() -> None:
    policy = SyncPolicy()
    policy.ticket_waits(3)
    policy.ticket_waits(7)
    policy.synced(6)
    assert (policy.wants_sync, policy.waiting_lsns) == (True, [7])
    policy.synced(7)
    assert not policy.wants_sync


def test_a_sync_answers_what_was_due() -> None:
    policy = SyncPolicy()
    policy.is_due = True
    assert policy.wants_sync_of(0)
    policy.synced(0)
    assert not policy.wants_sync_of(0)


def test_half_of_the_unsynced_bytes_that_the_loop_may_leave_is_synced_ahead_of_time() -> None:
    half = LOOP_UNSYNCED_BYTES_MAX // 2
    assert not SyncPolicy().wants_sync_of(half)
    assert SyncPolicy().wants_sync_of(half + 1)
    assert not serialised().wants_sync_of(half + 1), "no write would go on beside it"


# -- what goes first -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("syncs", "may_write"), [((False,), True), ((True, False), True), ((True, True), False)]
)
def test_before_a_sync_frames_are_written_unless_all_of_them_wait_for_one(
    syncs: tuple[bool, ...], may_write: bool
) -> None:
    policy = SyncPolicy()
    policy.is_due = True
    assert policy.allows_write(queue(*syncs)) is may_write
    policy.is_due = False
    policy.ticket_waits(1)
    assert policy.allows_write(queue(*syncs)) is may_write


@pytest.mark.parametrize(("syncs", "may"), [((False, False), True), ((False, True), False)])
def test_a_sync_goes_first_if_no_queued_ticket_waits_for_one(
    syncs: tuple[bool, ...], may: bool
) -> None:
    policy = SyncPolicy()
    assert not policy.may_sync_first(queue(*syncs)), "none is due"
    policy.is_due = True
    assert policy.may_sync_first(queue(*syncs)) is may
    policy.ticket_waits(1)
    assert not policy.may_sync_first(queue(*syncs)), "a written ticket waits: it shares the next"


# -- file systems that serialise writes and syncs --------------------------------------------------


def test_some_slow_syncs_in_a_row_end_writes_beside_syncs_and_say_so_once() -> None:
    policy = SyncPolicy()
    news: list[bool] = []
    for _ in range(SLOW_SYNCS_MAX + 2):
        policy.write_took(SLOW_WRITE_MS + 1)
        news.append(policy.synced(0))
    assert news == [n == SLOW_SYNCS_MAX for n in range(1, SLOW_SYNCS_MAX + 3)]
    assert not policy.writes_beside_syncs
    policy.is_due = True
    assert not policy.allows_write(queue(False))
    assert not policy.may_sync_first(queue(False))


def test_a_sync_without_a_slow_write_starts_the_count_again() -> None:
    policy = SyncPolicy()
    for took_ms in (9.0, 9.0, SLOW_WRITE_MS, 9.0, 9.0):
        policy.write_took(took_ms)
        policy.synced(0)
    assert policy.writes_beside_syncs


# -- failures and watermarks -----------------------------------------------------------------------


def test_a_failed_sync_takes_back_the_first_waiting_ticket_and_everything_behind() -> None:
    policy = SyncPolicy()
    assert policy.failed_from(9) == 10, "what was only written stays answered"
    policy.ticket_waits(4)
    policy.ticket_waits(8)
    assert policy.failed_from(9) == 4


def test_watermarks_follow_one_another() -> None:
    marks = Watermarks(5)
    assert (marks.submitted_lsn, marks.written_lsn, marks.synced_lsn) == (5, 5, 5)
    marks.submit(7)
    marks.submit(9)
    marks.write(7, 7)
    marks.sync(7)
    marks.take_back()
    assert (marks.submitted_lsn, marks.written_lsn, marks.synced_lsn) == (7, 7, 7)
    marks.submit(8)


def test_watermarks_refuse_what_cannot_be() -> None:
    marks = Watermarks(5)
    with pytest.raises(AssertionError):
        marks.submit(5)
    marks.submit(6)
    with pytest.raises(AssertionError):
        marks.write(6, 7)
    with pytest.raises(AssertionError):
        marks.sync(6)
    marks.write(6, 6)
    with pytest.raises(AssertionError):
        marks.write(6, 6)
    marks.sync(6)
    with pytest.raises(AssertionError):
        marks.sync(5)
