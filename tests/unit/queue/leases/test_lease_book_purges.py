"""Deletes of many jobs at once: the same book as by one delete each, in a few steps."""

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
from topics_server.queue.leases import lease_book, rubbish
from topics_server.queue.leases.unclaimed import runs_of
from topics_server.values.entries import RecordsDeleted

JOBS = 60


def _busy_desk(seed: int) -> Desk:
    """A queue with jobs in every state, in the same one for the same seed."""
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
    book.begin_move(book.movable(now_ms, rng.sample(range(1, JOBS + 1), 6)))
    return desk


def _told(desk: Desk) -> list[Any]:
    """What the book says of itself, now and later, until nothing is left to claim."""
    book = desk.book
    told: list[Any] = [
        {seq: copy(job) for seq, job in book.jobs.items()},
        sorted(book.taking),
        dict(book.unclaimed.delayed_until),
        set(book.unclaimed.timed),
    ]
    for now_ms in (NOW + 160, NOW + 200, NOW + 1_000):
        told += [
            desk.counts(now_ms),
            book.next_due_ms(now_ms),
            book.connection_count(now_ms, 3),
            [view.seq for view in book.leases_after(now_ms, 0, JOBS)],
            desk.claim(5, now_ms, "c"),
        ]
    return told


@pytest.mark.parametrize("seed", range(60))
def test_many_deletes_at_once_are_as_one_each(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranges and by scattered seqs, of a few jobs, of most and of all."""
    monkeypatch.setattr(lease_book, "FREED_JOBS", 10)
    rng = random.Random(seed)
    first, last = sorted(rng.sample(range(1, JOBS + 1), 2))
    gone = [
        list(range(1, JOBS + 1)),
        list(range(first, last + 1)),
        sorted(rng.sample(range(1, JOBS + 1), rng.randint(1, JOBS))),
    ][seed % 3]
    one, many = _busy_desk(seed), _busy_desk(seed)
    assert _told(_busy_desk(seed)) == _told(_busy_desk(seed))
    one.delete(gone)
    runs = runs_of(gone)
    many.seqs.difference_update(gone)
    many.book.forget_runs(*(np.array(column, np.uint64) for column in zip(*runs, strict=True)))
    assert _told(many) == _told(one)


def _leased(jobs: int) -> Desk:
    """A queue of which a worker has leased every job, in batches of 100."""
    desk = Desk(jobs)
    for first in range(1, jobs + 1, 100):
        at_ms = NOW + first // 100
        seqs = range(first, first + 100)
        desk.book.lease_unclaimed(at_ms, seqs, first, "a", at_ms + 60_000)
    return desk


def _calls(work: Callable[[], object]) -> int:
    """Calls of functions, of Python and of C, that this work takes."""
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
    """The jobs are freed by later calls, each a bounded number of them."""
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


def test_jobs_of_one_lease_leave_their_timer_together() -> None:
    """A delete by tag of many leased jobs: a few calls each, and one search for each batch."""
    desk = _leased(20_000)
    calls = _calls(lambda: desk.book.forget_runs(*_scattered(20_000)))
    assert desk.book.in_flight(NOW) == 10_000
    assert calls < 4 * 10_000


def test_later_calls_free_what_a_purge_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks at the queue, or any other one, and frees a bounded number."""
    monkeypatch.setattr(lease_book, "FREED_JOBS", 10)
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
