"""One delete of many jobs gives the same book as one delete for each job, in a few steps."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.unit.queue.leases.test_lease_book import NOW, Desk
from tests.unit.queue.leases.test_lease_table import SOFT
from tests.unit.queue.leases.test_lease_table import Desk as Table
from topics_server.queue.leases import kept_jobs, rubbish
from topics_server.queue.leases.gone import Gone
from topics_server.queue.leases.jobs import HeldJob
from topics_server.queue.leases.unclaimed import runs_of
from topics_server.values.entries import RecordsDeleted

JOBS = 60


def _busy_desk(seed: int, *, is_moving: bool = True) -> Desk:
    """A queue with jobs in every state; the same seed gives the same queue."""
    rng = random.Random(f"purges {seed}")
    desk = Desk(JOBS)
    book = desk.book
    for seq in rng.sample(range(1, JOBS + 1), 8):
        book.delay(seq, NOW + rng.choice((5, 500)), is_time=rng.random() < 0.5)
    for step in range(6):
        at_ms = NOW + 30 * step
        desk.claim(rng.randint(1, 9), at_ms, rng.choice("ab"), rng.choice((0, 0, 3)))
    held = sorted(book.jobs)
    now_ms = NOW + 160
    entry, _ = book.decide_nack(now_ms, "a", rng.sample(held, 12), None, rng.choice((0, 40)))
    if entry is not None:
        desk.apply(entry)
    desk.counts(now_ms)
    waiting, _ = book.decide_extend(now_ms, "b", rng.sample(held, 6), None, 90)
    if waiting is not None:
        book.stage(waiting)
    book.begin_ack(book.decide_ack("a", rng.sample(held, 6), None).seqs)
    if is_moving:
        book.begin_move(book.movable(now_ms, rng.sample(range(1, JOBS + 1), 6)))
    return desk


def _told(desk: Desk, *, is_settled: bool = True) -> list[Any]:
    """The counts of the book, now and later, until nothing is left to claim. `is_settled`: the book
    holds no deleted job; otherwise it may wake too early for a deleted job.
    """
    book = desk.book
    told: list[Any] = [
        {seq: copy(job) for seq, job in book.jobs.items() if not book.is_gone(seq)},
        sorted(seq for seq in book.taking if not book.is_gone(seq)),
        {seq: at for seq, at in book.unclaimed.delayed_until.items() if not book.is_gone(seq)},
        {seq for seq in book.unclaimed.timed if not book.is_gone(seq)},
    ]
    for now_ms in (NOW + 160, NOW + 200, NOW + 1_000):
        told += [
            desk.counts(now_ms),
            book.next_due_ms(now_ms) if is_settled else 0,
            book.connection_count(now_ms, 3),
            [view.seq for view in book.leases_after(now_ms, 0, JOBS)],
            desk.claim(5, now_ms, "c"),
        ]
    return told


def _deleted(seed: int) -> list[int]:
    """Seqs to delete: all, a range, or scattered ones."""
    rng = random.Random(seed)
    first, last = sorted(rng.sample(range(1, JOBS + 1), 2))
    return [
        list(range(1, JOBS + 1)),
        list(range(first, last + 1)),
        sorted(rng.sample(range(1, JOBS + 1), rng.randint(1, JOBS))),
    ][seed % 3]


def _delete_at_once(desk: Desk, seqs: list[int]) -> None:
    """Delete them by one entry."""
    runs = runs_of(seqs)
    desk.seqs.difference_update(seqs)
    desk.book.forget_runs(*(np.array(column, np.uint64) for column in zip(*runs, strict=True)))


@pytest.mark.parametrize("seed", range(60))
def test_many_deletes_at_once_are_as_one_each(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deletes name ranges or scattered seqs of a few jobs, of most or of all; compared once all
    deleted jobs are forgotten.
    """
    monkeypatch.setattr(kept_jobs, "FREED_JOBS", 10)
    gone = _deleted(seed)
    one, many = _busy_desk(seed), _busy_desk(seed)
    assert _told(_busy_desk(seed)) == _told(_busy_desk(seed))
    one.delete(gone)
    _delete_at_once(many, gone)
    while many.book._forget_some():
        pass
    assert _told(many) == _told(one)


@pytest.mark.parametrize("seed", range(60))
def test_deleted_jobs_that_are_still_there_are_seen_by_nobody(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are the same while the deleted jobs are being forgotten."""
    monkeypatch.setattr(kept_jobs, "FREED_JOBS", 3)
    gone = _deleted(seed)
    one = _busy_desk(seed, is_moving=False)
    one.delete(gone)
    expected = _told(one, is_settled=False)
    for stages in range(4):
        many = _busy_desk(seed, is_moving=False)
        _delete_at_once(many, gone)
        for _ in range(stages):
            many.book._forget_some()
        assert _told(many, is_settled=False) == expected
        while many.book._forget_some():
            pass
        assert not (many.book.jobs.keys() | many.book.unclaimed.delayed_until.keys()) & set(gone)
        assert many.counts(NOW + 1_000) == one.counts(NOW + 1_000)


def test_deleted_jobs_whose_delay_ends_before_they_are_forgotten_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They must not hide delayed jobs that live."""
    monkeypatch.setattr(kept_jobs, "FREED_JOBS", 3)
    desk = Desk(60)
    for seq in range(1, 21):
        desk.book.delay(seq, NOW + (10 if seq <= 10 else 500))
    _delete_at_once(desk, list(range(1, 11)))
    assert len(desk.book.unclaimed.delayed_until) == 20, "none is taken out yet"
    assert desk.counts(NOW) == (40, 0, 10, 0)
    assert desk.counts(NOW + 20) == (40, 0, 10, 0)
    while desk.book._forget_some():
        assert desk.counts(NOW + 20) == (40, 0, 10, 0)
    assert len(desk.claim(60, NOW + 20)) == 40
    assert desk.counts(NOW + 20) == (0, 40, 10, 0)


def test_nobody_holds_or_moves_a_deleted_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acks, nacks, extends, moves and ends of streams skip deleted jobs that are not forgotten
    yet.
    """
    monkeypatch.setattr(kept_jobs, "FREED_JOBS", 3)
    desk = Desk(60)
    desk.claim(40, connection=5)
    book = desk.book
    _delete_at_once(desk, list(range(1, 31)))
    assert len(book.jobs) == 40, "none is taken out yet"
    assert desk.counts() == (20, 10, 0, 0)
    assert book.connection_count(NOW, 5) == 10
    assert [view.seq for view in book.leases_after(NOW, 0, 4)] == [31, 32, 33, 34]
    acked = book.decide_ack("a", [1, 2, 31], None)
    assert (acked.seqs, acked.skipped) == ([31], [1, 2])
    assert book.decide_nack(NOW, "a", [3, 4], None, 0) == (None, [3, 4])
    assert book.decide_extend(NOW, "a", [5, 6], None, 50) == (None, [5, 6])
    assert book.movable(NOW, [7, 8, 60]) == [7, 8, 60], "whom it asks knows what lives"
    assert book.decide_give_back(NOW, [(9, 9)]) is None
    assert desk.counts() == (20, 10, 0, 0)
    released = book.decide_release(NOW, 5)
    assert released is not None
    assert [seq for seq, _ in released.jobs] == list(range(31, 41))
    assert desk.counts() == (20, 10, 0, 0)


def test_a_second_delete_may_name_what_the_first_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranges overlap, and each job is removed once."""
    monkeypatch.setattr(kept_jobs, "FREED_JOBS", 4)
    desk = Desk(60)
    desk.claim(50)
    _delete_at_once(desk, list(range(1, 21)))
    desk.book._forget_some()
    desk.delete([7, 8])
    _delete_at_once(desk, list(range(3, 41)))
    assert desk.counts() == (10, 10, 0, 0)
    while desk.book._forget_some():
        assert desk.counts() == (10, 10, 0, 0)
    assert sorted(desk.book.jobs) == list(range(41, 51))
    _delete_at_once(desk, list(range(1, 61)))
    assert desk.counts() == (0, 0, 0, 0)


def test_the_deleted_jobs_of_a_book() -> None:
    gone = Gone()
    assert not gone
    gone.add(np.array([9, 3, 5], np.uint64))
    gone.note([5, 6])
    assert (gone.count, gone.has(3), gone.has(4)) == (2, True, False)
    assert gone.take(1) == [3]
    assert (gone.count, gone.has(3)) == (1, False)
    gone.add(np.array([1, 9], np.uint64))
    assert (gone.count, gone.has(5)) == (2, False), "what was forgotten before does not come back"
    assert gone.take(5) == [1, 9]
    assert (gone.count, bool(gone)) == (0, False)


def _leased(jobs: int) -> Desk:
    """A queue of which a worker has leased every job, in batches of 100."""
    desk = Desk(jobs)
    for first in range(1, jobs + 1, 100):
        at_ms = NOW + first // 100
        seqs = range(first, first + 100)
        desk.book.lease_unclaimed(at_ms, seqs, first, "a", at_ms + 60_000)
    return desk


def _calls(work: Callable[[], object]) -> int:
    """The number of function calls, in Python and in C, that this work takes."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_a_purge_takes_as_many_steps_for_many_jobs_as_for_few() -> None:
    """Later calls free the jobs, each a bounded number of them."""
    steps = set()
    for jobs in (2_000, 20_000):
        desk = _leased(jobs)
        desk.seqs.clear()
        steps.add(_calls(partial(desk.book.forget, 1, jobs)))
        assert desk.counts() == (0, 0, 0, 0)
        assert desk.book.next_due_ms(NOW) is None
        assert desk.book.jobs == {}
        assert len(desk.book._rubbish) == jobs
    assert len(steps) == 1
    assert max(steps) < 60


def _scattered(jobs: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint64]]]:
    """Every second job, as runs of one."""
    seqs = np.arange(1, jobs + 1, 2, dtype=np.uint64)
    return iter((seqs, seqs))


def test_a_delete_of_a_part_takes_as_many_steps_for_many_jobs_as_for_few() -> None:
    """The deletes are by tag and by seq; later calls forget the jobs, each a bounded number of
    them.
    """
    deletes = set()
    for jobs in (4_000, 20_000):
        for is_scattered in (True, False):
            desk = _leased(jobs)
            book = desk.book
            half = jobs // 2
            runs = _scattered(jobs) if is_scattered else iter(np.array([[1], [half]], np.uint64))
            steps = _calls(lambda book=book, runs=runs: book.forget_runs(*runs))  # type: ignore[misc]
            deletes.add((is_scattered, steps))
            assert (len(book.jobs), book.in_flight(NOW)) == (jobs, half)
            slices = []
            while len(book.jobs) > half:
                slices.append(_calls(book._rubbish.free_some))
                assert book.in_flight(NOW) == half
            assert len(slices) == half // rubbish.FREED_JOBS
            assert max(slices) < 4 * rubbish.FREED_JOBS
    assert len(deletes) == 2, "the same steps for many jobs as for few"
    assert max(steps for _, steps in deletes) < 200


def test_later_calls_free_what_a_purge_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call, for this queue or any other, frees a bounded number of jobs."""
    monkeypatch.setattr(kept_jobs, "FREED_JOBS", 10)
    monkeypatch.setattr(rubbish, "FREED_JOBS", 10)
    table = Table(SOFT, SOFT)
    for number in range(45):
        table.append(b'{"records":[{"data":%d}]}' % number)
    table.book().lease_unclaimed(NOW, range(1, 46), 1, "a", NOW + 60_000)
    everything = np.array([1], "<u8").tobytes(), np.array([45], "<u8").tobytes()
    table.commit(RecordsDeleted(1, NOW, *everything))
    left = table.lease_table._rubbish
    assert len(left) == 45
    for expected in (35, 25, 15, 5, 0, 0):
        table.book(2)
        assert len(left) == expected


def test_turns_of_the_loop_free_what_no_call_does() -> None:
    """One call is scheduled at a time, and the last one schedules no other."""
    asked: list[Callable[[], None]] = []
    left = rubbish.Rubbish()
    left.soon = asked.append
    left.add(dict.fromkeys(range(2 * rubbish.FREED_JOBS), HeldJob()))
    forgotten = iter([True, True, False])
    left.later(lambda: next(forgotten))
    turns = 0
    while asked:
        assert len(asked) == 1
        asked.pop()()
        turns += 1
    assert len(left) == 0
    assert (turns, next(forgotten, None)) == (3, None)
