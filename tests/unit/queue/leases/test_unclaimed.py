"""Jobs that were never delivered: a cursor, the jobs that it jumps over and those that it left
behind.
"""

from __future__ import annotations

import pytest

from topics_server.queue.leases.unclaimed import LiveJobs, UnclaimedJobs, runs_of


def live_of(seqs: set[int], head_seq: int, floor_seq: int = 1) -> LiveJobs:
    def next_live(seq: int) -> int:
        return min((known for known in seqs if known >= seq), default=head_seq + 1)

    return LiveJobs(floor_seq, head_seq, len(seqs), next_live)


def taken_none(seq: int) -> bool:
    return False


def test_fresh_jobs_come_by_seq_and_dead_ones_are_passed() -> None:
    unclaimed = UnclaimedJobs()
    live = live_of({3, 4, 7, 9}, 10)
    assert unclaimed.first(0, live, taken_none) == []
    assert unclaimed.first(3, live, taken_none) == [3, 4, 7]
    assert unclaimed.first(9, live, {4}.__contains__) == [3, 7, 9]
    assert unclaimed.first(9, live_of({3, 4, 7, 9}, 10, floor_seq=5), taken_none) == [7, 9]
    assert unclaimed.first(9, live_of(set(), 10), taken_none) == []
    assert unclaimed.lowest_seq() == 11


def test_jobs_that_a_claim_left_behind_are_found_again() -> None:
    unclaimed = UnclaimedJobs()
    unclaimed.take(5)
    assert unclaimed.lowest_seq() == 1
    live = live_of({2, 4, 5, 6}, 6)
    assert unclaimed.first(9, live, {5}.__contains__) == [2, 4, 6]
    unclaimed.offer([(5, 5)])
    assert unclaimed.first(2, live, taken_none) == [2, 4]
    assert unclaimed.first(9, live, taken_none) == [2, 4, 5, 6]


def test_a_range_behind_a_dead_one_is_looked_at() -> None:
    unclaimed = UnclaimedJobs()
    unclaimed.take(9)
    unclaimed.offer([(4, 4), (5, 5)])
    assert unclaimed.first(1, live_of({5}, 9), taken_none) == [5]


def test_delayed_jobs_wait_and_the_cursor_leaps_over_them() -> None:
    unclaimed = UnclaimedJobs()
    for seq in range(2, 1_000_002):
        if seq < 102 or seq > 1_000_000:
            unclaimed.delay(seq, 50 if seq == 3 else 60)
    unclaimed.delay(3, 99)
    seqs = {1, *range(2, 102), 102, 1_000_001}
    live = live_of(seqs, 1_000_001)
    assert unclaimed.first(9, live, taken_none) == [1, 102]
    assert unclaimed.next_due_ms() == 50
    unclaimed.advance(50)
    assert unclaimed.first(9, live, taken_none) == [1, 3, 102]
    unclaimed.forget(1_000_001)
    unclaimed.advance(60)
    assert unclaimed.next_due_ms() is None
    assert unclaimed.first(3, live, taken_none) == [1, 2, 3]
    assert unclaimed.first(500, live, taken_none) == [*range(1, 103)]


def test_a_claim_in_the_middle_of_delayed_ones_forgets_none() -> None:
    """Replay of a claim: the cursor has not passed these jobs yet, and the claimed job is not due
    by this clock.
    """
    unclaimed = UnclaimedJobs()
    for seq in (3, 4, 5):
        unclaimed.delay(seq, 50)
    unclaimed.take(4)
    live = live_of(set(range(1, 8)), 7)
    assert unclaimed.first(9, live, {4}.__contains__) == [1, 2, 6, 7]
    unclaimed.advance(50)
    assert unclaimed.first(9, live, {4}.__contains__) == [1, 2, 3, 5, 6, 7]


def test_delays_may_come_out_of_order() -> None:
    """In a snapshot the jobs that were being moved come last."""
    unclaimed = UnclaimedJobs()
    for seq in (7, 8, 5, 1):
        unclaimed.delay(seq, 50)
    live = live_of(set(range(1, 10)), 9)
    assert unclaimed.first(9, live, taken_none) == [2, 3, 4, 6, 9]
    unclaimed.take(9)
    unclaimed.delay(2, 60)
    assert unclaimed.first(9, live, {9}.__contains__) == [3, 4, 6]


def test_runs() -> None:
    assert runs_of([]) == []
    assert runs_of([5, 1, 2, 9, 8]) == [(1, 2), (5, 5), (8, 9)]


def test_many_ranges_are_offered_one_by_one() -> None:
    unclaimed = UnclaimedJobs()
    unclaimed.take(1_000)
    unclaimed.offer([(seq, seq) for seq in range(1, 999, 2)])
    unclaimed.offer([(2, 2)])
    live = live_of(set(range(1, 1_001)), 1_000)
    assert unclaimed.first(4, live, {1_000}.__contains__) == [1, 2, 3, 4]


@pytest.mark.parametrize("seqs", [[1, 2, 3], [5, 6, 7], [5, 7, 8], [9], [2, 4]])
def test_jobs_taken_together_leave_what_jobs_taken_one_by_one_leave(seqs: list[int]) -> None:
    together, singly = UnclaimedJobs(), UnclaimedJobs()
    live = live_of({*range(1, 12)}, 11)
    for _ in range(2):
        together.take_all(seqs)
        for seq in seqs:
            singly.take(seq)
        assert (together.next_seq, together.is_plain) == (singly.next_seq, singly.is_plain)
        assert together.first(99, live, seqs.__contains__) == singly.first(
            99, live, seqs.__contains__
        )
        seqs = [seq + 3 for seq in seqs]
