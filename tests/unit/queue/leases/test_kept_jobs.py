"""Two books with the same random calls: one finishes its deletes later, one at once. They give the
same claims, acks and counts at any time.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.unit.queue.leases.test_lease_book import NOW, Desk
from tests.unit.queue.leases.test_lease_book_purges import _delete_at_once
from topics_server.queue.leases import kept_jobs

JOBS = 60
CALLS = ["delay"] * 4 + ["claim"] * 3 + ["delete", "ack"] * 2 + ["nack", "floor", "release"]


class Calls:
    """Random calls; time and floor only rise."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"kept jobs {seed}")
        self.now_ms = NOW
        self._floor_seq = 1

    def next(self) -> tuple[str, Any]:
        """A call and its arguments."""
        rng = self.rng
        self.now_ms += rng.choice((0, 0, 1, 7, 40))
        name = rng.choice(CALLS)
        match name:
            case "delay":
                return name, (rng.randint(1, JOBS), self.now_ms + rng.choice((5, 9, 50, 300)))
            case "claim":
                return name, (rng.randint(1, 8), rng.choice("ab"), rng.choice((0, 0, 3)))
            case "delete":
                if rng.random() < 0.4:
                    return name, self._some(rng.randint(1, 30))
                first = rng.randint(1, JOBS)
                return name, list(range(first, min(JOBS, first + rng.randint(0, 25)) + 1))
            case "floor":
                self._floor_seq = min(JOBS + 1, self._floor_seq + rng.choice((1, 1, 1, 2, 5)))
                return name, self._floor_seq
            case "release":
                return name, None
            case _:
                return name, (rng.choice("ab"), self._some(12), rng.choice((0, 20, 100)))

    def _some(self, count: int) -> list[int]:
        return sorted(self.rng.sample(range(1, JOBS + 1), count))


def called(desk: Desk, name: str, asked: Any, now_ms: int) -> list[int]:
    """Make a call; returns the jobs that it claimed or acked."""
    book = desk.book
    match name:
        case "delay":
            seq, at_ms = asked
            if seq in desk.seqs and seq >= book.unclaimed.next_seq:
                book.delay(seq, at_ms)
        case "claim":
            most, node, connection = asked
            return desk.claim(most, now_ms, node, connection)
        case "delete":
            seqs = [seq for seq in asked if seq in desk.seqs]
            if seqs:
                _delete_at_once(desk, seqs)
        case "floor":
            desk.seqs = {seq for seq in desk.seqs if seq >= asked}
            book.forget_below(asked)
        case "release":
            released = book.decide_release(now_ms, 3)
            if released is not None:
                desk.apply(released)
        case "nack":
            node, seqs, delay_ms = asked
            nacked, _ = book.decide_nack(now_ms, node, seqs, None, delay_ms)
            if nacked is not None:
                desk.apply(nacked)
        case _:
            node, seqs, _ = asked
            acked = book.decide_ack(node, seqs, None).seqs
            book.begin_ack(acked)
            desk.seqs.difference_update(acked)
            if acked:
                book.forget_deleted(sorted(acked))
            return acked
    return []


@pytest.mark.parametrize("seed", range(120))
def test_a_book_that_forgets_later_answers_as_one_that_forgets_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, later, at_once = Calls(seed), Desk(JOBS), Desk(JOBS)
    for _ in range(40):
        name, asked = calls.next()
        answers = []
        for desk, freed_jobs in ((later, 3), (at_once, JOBS**2)):
            monkeypatch.setattr(kept_jobs, "FREED_JOBS", freed_jobs)
            answers.append(called(desk, name, asked, calls.now_ms))
        assert answers[0] == answers[1], name
        monkeypatch.setattr(kept_jobs, "FREED_JOBS", 3)
        if calls.rng.random() < 0.3:
            later.book._forget_some()
        if calls.rng.random() < 0.5:
            assert later.counts(calls.now_ms) == at_once.counts(calls.now_ms), name


@pytest.mark.parametrize("acked", [[1, 2], [2, 3], [1, 3], [1, 2, 3, 4, 5]])
def test_the_floor_of_a_book_moves_no_further_than_the_deleted_jobs(acked: list[int]) -> None:
    desk = Desk(10)
    assert desk.claim(6) == [1, 2, 3, 4, 5, 6]
    book = desk.book
    book.begin_ack(acked)
    book.forget_deleted(acked)
    desk.seqs -= set(acked)
    assert sorted(book.jobs) == [seq for seq in range(1, 7) if seq not in acked]
    # A loss of the first jobs forgets those that no ack has taken out.
    book.forget_below(6)
    desk.seqs -= set(range(1, 6))
    assert sorted(book.jobs) == [6]
    assert desk.counts() == (4, 1, 0, 0)
