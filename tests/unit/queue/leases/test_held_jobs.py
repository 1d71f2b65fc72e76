"""Jobs of one claim that share a value, beside a plain dictionary of jobs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.unit.queue.leases.test_lease_book import NOW, Desk
from topics_server.queue.leases import held_jobs, kept_jobs, lease_book
from topics_server.queue.leases.held_jobs import HeldJobs, LeasedTogether, peek
from topics_server.queue.leases.jobs import ACKING, HeldJob

SEQS = [3, 4, 5, 9]


def _shared() -> tuple[HeldJobs, LeasedTogether]:
    jobs = HeldJobs()
    together = LeasedTogether(100, "w", 50, 1, 7, seqs=SEQS)
    jobs.add_together(together)
    return jobs, together


def test_a_job_that_is_accessed_has_a_value_of_its_own() -> None:
    jobs, together = _shared()
    assert jobs.together(SEQS) is together
    assert jobs.look(9) == HeldJob(103, "w", 50, 1, 7)
    assert jobs.look(6) is jobs.get(6) is None
    assert jobs.together(SEQS) is together, "a look changes nothing"
    assert jobs.together([3, 4, 5]) is jobs.together([3, 4, 5, 8]) is jobs.together([4]) is None
    job = jobs[4]
    assert job == HeldJob(101, "w", 50, 1, 7)
    assert jobs.get(4) is job
    job.node = "other"
    assert jobs.together(SEQS) is None, "none of them is shared any more"
    assert (jobs[3].node, jobs[4].node) == ("w", "other")
    assert [job.lease_id for _, job in jobs.items()] == [100, 101, 102, 103]
    assert [type(peek(jobs, seq)) for seq in SEQS] == [HeldJob] * 4


def test_a_flag_of_all_is_the_flag_of_each() -> None:
    jobs, together = _shared()
    together.flags = ACKING
    assert jobs[5].flags == ACKING
    jobs.remove_together(together)
    assert jobs == {}


def test_an_access_separates_few_jobs_of_a_large_claim() -> None:
    """One call may access jobs of a thousand claims, and must not make a million values."""
    jobs = HeldJobs()
    seqs = [*range(10, 2_010, 2)]
    together = LeasedTogether(100, "w", 50, 1, 7, flags=ACKING, seqs=seqs)
    jobs.add_together(together)
    assert jobs[1_010] == HeldJob(600, "w", 50, 1, 7, flags=ACKING)
    own = [seq for seq in seqs if type(peek(jobs, seq)) is HeldJob]
    assert 1_010 in own
    assert len(own) <= 16
    assert jobs.together(seqs) is None, "not all of them share the value"
    del jobs[1_010]
    assert [job.lease_id for _, job in jobs.items()] == [*range(100, 600), *range(601, 1_100)]
    assert len(jobs) == 999


class Books:
    """Two books with the same calls; only the second one shares values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.desks = (Desk(80), Desk(80))
        self._set = monkeypatch.setattr
        self.now_ms = NOW
        self.next_id = 1_000
        self.claims: list[tuple[list[int], list[int]]] = [([1], [1])]
        self.acking: list[list[int]] = []

    def both(self, call: Callable[[Desk], object]) -> object:
        """Make a call on both books; returns what both returned."""
        found = []
        for desk, many in zip(self.desks, (1_000, 2), strict=True):
            self._set(lease_book, "MANY_JOBS", many)
            self._set(kept_jobs, "MANY_JOBS", many)
            found.append(call(desk))
        assert found[0] == found[1]
        return found[0]

    def state(self, desk: Desk) -> object:
        """Everything that a caller may see."""
        book = desk.book
        views = book.leases_after(self.now_ms, 0, 100)
        looked = [(seq, book.jobs.look(seq)) for seq in sorted(book.jobs)]
        return desk.counts(self.now_ms), book.next_due_ms(self.now_ms), views, str(looked)

    def claim(self, most: int, lease_ms: int) -> None:
        def claimed(desk: Desk) -> list[int]:
            live = desk.live

            def live_from(seq: int, limit: int) -> list[int]:
                return sorted(each for each in desk.seqs if each >= seq)[:limit]

            seqs = desk.book.first_unclaimed(self.now_ms, most, live, live_from)
            if not seqs:
                return desk.claim(most, self.now_ms)
            deadline_ms = self.now_ms + lease_ms
            desk.book.lease_unclaimed(self.now_ms, seqs, self.next_id, "a", deadline_ms)
            return seqs

        seqs = self.both(claimed)
        assert isinstance(seqs, list)
        if seqs:
            self.claims.append((seqs, [*range(self.next_id, self.next_id + len(seqs))]))
            self.next_id += most

    def ack(self, node: str, seqs: list[int], tokens: list[int] | None) -> None:
        def acked(desk: Desk) -> tuple[list[int], list[int], list[int]]:
            found = desk.book.decide_ack(node, seqs, tokens)
            desk.book.begin_ack(found.seqs)
            return found.seqs, found.skipped, found.joining

        found = self.both(acked)
        assert isinstance(found, tuple)
        self.acking += [sorted(found[0])] if found[0] else []

    def settle(self, *, fails: bool) -> None:
        if not self.acking:
            return
        seqs = self.acking.pop(0)

        def settled(desk: Desk) -> None:
            if fails:
                desk.book.cancel_ack(seqs)
                return
            desk.seqs.difference_update(seqs)
            desk.book.forget_deleted(seqs)

        self.both(settled)

    def nack(self, seqs: list[int], tokens: list[int] | None) -> None:
        def nacked(desk: Desk) -> list[int]:
            entry, skipped = desk.book.decide_nack(self.now_ms, "a", seqs, tokens, 20)
            if entry is not None:
                desk.apply(entry)
            return skipped

        self.both(nacked)

    def delete(self, seqs: list[int]) -> None:
        def deleted(desk: Desk) -> None:
            desk.seqs.difference_update(seqs)
            desk.book.forget_deleted(seqs)

        self.both(deleted)


@pytest.mark.parametrize("seed", range(80))
def test_a_book_with_shared_values_answers_like_one_without(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"shared values {seed}")
    monkeypatch.setattr(held_jobs, "_GROUP_JOBS", (16, 3, 1)[seed % 3])
    books = Books(monkeypatch)
    books.claim(9, 1_000)
    assert type(peek(books.desks[1].book.jobs, 1)) is LeasedTogether
    for _ in range(50):
        books.now_ms += rng.choice((0, 1, 30))
        seqs, tokens = rng.choice(books.claims[-4:])
        if rng.random() < 0.25:
            first = rng.randrange(len(seqs))
            seqs, tokens = seqs[first:], tokens[first:]
        given = rng.choice((tokens, None))
        match rng.choice(("claim", "ack", "ack", "settle", "settle", "nack", "delete", "shift")):
            case "claim":
                books.claim(rng.randint(1, 9), rng.choice((40, 1_000, 1_000)))
            case "ack":
                books.ack(rng.choice("aaab"), seqs, given)
            case "settle":
                books.settle(fails=rng.random() < 0.4)
            case "nack" if rng.random() < 0.5:
                books.nack(seqs, given)
            case "delete" if rng.random() < 0.5:
                books.delete(seqs)
            case "shift" if rng.random() < 0.3:
                by_ms = rng.choice((-20, 20))
                books.both(lambda desk, by_ms=by_ms: desk.book.shift(by_ms))  # type: ignore[misc]
        books.both(books.state)
        plain = books.desks[0].book.jobs
        assert all(type(peek(plain, seq)) is HeldJob for seq in plain)
