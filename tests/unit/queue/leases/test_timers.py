"""Jobs by time: due jobs come in buckets, jobs to deliver again come oldest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topics_server.queue.leases.timers import JobTimers, Returned

STEPS = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 5), st.booleans()), max_size=60)


def visited(returned: Returned, limit: int) -> list[int]:
    seen: list[int] = []

    def wants_more(seq: int) -> bool:
        seen.append(seq)
        return len(seen) < limit

    returned.visit(wants_more)
    return seen


def test_what_is_due_is_taken_once_and_by_the_millisecond() -> None:
    schedule = JobTimers()
    for seq, at_ms in [(1, 20), (2, 10), (3, 20), (4, 30)]:
        schedule.put(seq, at_ms)
    assert schedule.next_ms() == 10
    assert list(schedule.take_due(9)) == []
    assert list(schedule.take_due(20)) == [(10, {2}), (20, {1, 3})]
    assert (schedule.count, schedule.next_ms()) == (1, 30)
    assert not schedule.discard(1, 20)
    assert schedule.discard(4, 30)
    assert schedule.next_ms() is None


@given(STEPS)
def test_a_schedule_is_a_dict_of_times(steps: list[tuple[int, int, bool]]) -> None:
    schedule, plain = JobTimers(), dict[int, int]()
    for seq, at_ms, takes in steps:
        if seq not in plain:
            schedule.put(seq, at_ms)
            plain[seq] = at_ms
        elif takes:
            assert schedule.discard(seq, plain.pop(seq))
        assert not schedule.discard(9, at_ms)
        assert schedule.count == len(plain)
        assert schedule.next_ms() == min(plain.values(), default=None)
    taken = {seq: at_ms for at_ms, seqs in schedule.take_due(3) for seq in seqs}
    assert taken == {seq: at_ms for seq, at_ms in plain.items() if at_ms <= 3}


@given(STEPS, st.integers(1, 10))
def test_returned_jobs_come_by_time_and_then_by_seq(
    steps: list[tuple[int, int, bool]], limit: int
) -> None:
    returned, plain = Returned(), dict[int, int]()
    for seq, at_ms, takes in steps:
        if seq not in plain:
            returned.add(at_ms, {seq})
            plain[seq] = at_ms
        elif takes:
            assert returned.discard(seq, plain.pop(seq))
        assert not returned.discard(9, at_ms)
        assert returned.count == len(plain)
        order = sorted(plain, key=lambda seq: (plain[seq], seq))
        assert visited(returned, limit) == order[:limit]


def test_buckets_that_are_gone_leave_nothing_behind() -> None:
    """A worker that always acks far before the deadline must cost no memory."""
    schedule, returned = JobTimers(), Returned()
    for at_ms in range(10_000):
        schedule.put(1, at_ms)
        assert schedule.discard(1, at_ms)
        returned.add(at_ms, {1})
        assert returned.discard(1, at_ms)
    assert len(schedule.times) < 100
    assert len(returned._times) < 100
