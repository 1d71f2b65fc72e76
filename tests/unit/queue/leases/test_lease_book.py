"""One queue's book: claims, fences, expiry and entries in flight, by a clock that is a number."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from topics_server.queue.leases import lease_book as module
from topics_server.queue.leases.jobs import (
    HeldJob,
    Matched,
    lease_number,
    lease_numbers,
    lease_text,
)
from topics_server.queue.leases.lease_book import (
    Ask,
    Claim,
    Claims,
    DeadJob,
    LeaseBook,
    LiveJobs,
    LostLease,
)
from topics_server.values.entries import LeaseEntry, LeasesExtended, LeasesGranted, LeasesReleased

NOW = 1_000_000


class Desk:
    """A book, its topic's records, and entries that are applied as they are decided."""

    def __init__(self, count: int = 10) -> None:
        self.book = LeaseBook(7, iter(range(1, 10_000)).__next__)
        self.seqs = set(range(1, count + 1))
        self.head_seq = count
        self.max_deliveries = 0

    @property
    def live(self) -> LiveJobs:
        def next_live(seq: int) -> int:
            return min((known for known in self.seqs if known >= seq), default=self.head_seq + 1)

        floor_seq = min(self.seqs, default=self.head_seq + 1)
        return LiveJobs(floor_seq, self.head_seq, len(self.seqs), next_live)

    def decide(self, *asks: Ask, now_ms: int = NOW) -> Claims:
        return self.book.decide_claim(now_ms, self.live, asks, self.max_deliveries)

    def apply(self, entry: LeaseEntry | None) -> None:
        assert entry is not None
        self.book.stage(entry)
        self.book.apply(0, entry, is_staged=True)

    def claim(
        self, most: int = 1, now_ms: int = NOW, node: str = "a", connection: int = 0
    ) -> list[int]:
        claim = self.decide(Ask(node, most, 100, connection), now_ms=now_ms).claims[0]
        if claim is None:
            return []
        self.apply(claim.entry)
        return [job.seq for job in claim.jobs]

    def delete(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self.seqs.discard(seq)
            self.book.forget(seq, seq)

    def counts(self, now_ms: int = NOW) -> tuple[int, int, int, int]:
        counts = self.book.counts(now_ms, self.live)
        return counts.ready, counts.in_flight, counts.delayed, counts.moving


def first(claims: Claims) -> Claim:
    claim = claims.claims[0]
    assert claim is not None
    return claim


@pytest.mark.parametrize("text", ["", "lease_", "lease_G", "lease_1_0", "1", "lease_" + "f" * 17])
def test_what_is_no_token_matches_no_lease(text: str) -> None:
    assert lease_number(text) == 0


@pytest.mark.parametrize("digits", range(1, 17))
def test_no_comma_is_a_digit_of_a_token(digits: int) -> None:
    tokens = [lease_text(int("1" * digits, 16))] * 20
    for at in range(len(tokens[7])):
        wrong = [*tokens]
        wrong[7] = f"{tokens[7][:at]},{tokens[7][at + 1 :]}"
        assert lease_numbers(wrong) == [*map(lease_number, wrong)]
        assert lease_numbers(wrong)[7] == 0


def test_tokens_are_hex() -> None:
    assert lease_text(0x7F3A9C) == "lease_7f3a9c"
    assert lease_number("lease_7f3a9c") == 0x7F3A9C


@pytest.mark.parametrize(
    "odd",
    [
        *("", "lease_", "lease_G", "lease_1_0", "1", "lease_" + "f" * 17, "lease_0", "lease_ab"),
        *("lease_7F3A9C", "lease_7f3a9c,", "lease_7f,lease_", "xease_7f3a9c", ",lease_7f3a9"),
        *("lease_ 7f3a9", "lease_7f3a9 ", "7f3a9clease_", "lease_7f3a\u0669c", "lease_7f,a9c"),
        *("lease_" + "f" * 16, "lease_7f3a9d", "7f3a9c"),
    ],
)
@pytest.mark.parametrize("at", [0, 7, 19])
def test_many_tokens_are_converted_like_each_of_them(odd: str, at: int) -> None:
    for first in (0x7F3A80, 0x7F3A80 + 2**63, 0xFF8):
        texts = [lease_text(first + index) for index in range(20)]
        assert lease_numbers(texts) == [*range(first, first + 20)]
        texts[at] = odd
        assert lease_numbers(texts) == [lease_number(text) for text in texts]


def test_commas_that_only_look_like_those_between_tokens_make_no_token() -> None:
    texts = ["lease_11"] * 18 + ["lease_1,lease_2", "22"]
    assert lease_numbers(texts) == [0x11] * 18 + [0, 0]
    texts = ["lease_1"] * 18 + ["", "lease_1,lease_1"]
    assert lease_numbers(texts) == [1] * 18 + [0, 0]
    # Two lengths that together are twice the length of the others.
    texts = ["lease_11"] * 18 + ["lease_1", "lease_111"]
    assert lease_numbers(texts) == [0x11] * 18 + [1, 0x111]
    # The joined tokens are those of ids that ascend, but two are in one.
    ascending = [lease_text(0x7F3A80 + index) for index in range(20)]
    texts = [*ascending[:7], ",".join(ascending[7:9]), *ascending[9:], ""]
    assert lease_numbers(texts) == [lease_number(text) for text in texts]
    texts = [*ascending[:7], "".join(ascending[7:9]), "", *ascending[9:]]
    assert lease_numbers(texts) == [lease_number(text) for text in texts]


def test_a_claim_grants_in_order_and_counts() -> None:
    desk = Desk()
    claim = first(desk.decide(Ask("a", 3, 100)))
    assert [job.seq for job in claim.jobs] == [1, 2, 3]
    assert {job.deliveries for job in claim.jobs} == {1}
    assert claim.entry == LeasesGranted(7, "a", NOW, NOW + 100, 0, [(1, 1), (2, 2), (3, 3)])
    assert claim.deadline_ms == NOW + 100
    assert desk.counts() == (10, 0, 0, 0), "deciding changes nothing"
    desk.apply(claim.entry)
    assert desk.counts() == (7, 3, 0, 0)
    assert desk.claim(20) == [4, 5, 6, 7, 8, 9, 10]
    assert desk.claim() == []
    assert desk.decide(Ask("a", 0, 100)).claims == [None]


def test_a_lease_ends_after_its_deadline_and_goes_first() -> None:
    desk = Desk()
    desk.claim(2)
    assert desk.counts(NOW + 100) == (8, 2, 0, 0)
    assert desk.book.next_due_ms(NOW + 100) == NOW + 101
    assert desk.counts(NOW + 101) == (10, 0, 0, 0)
    assert desk.book.next_due_ms(NOW + 101) is None
    found = desk.decide(Ask("b", 3, 100), now_ms=NOW + 101)
    assert [(job.seq, job.deliveries) for job in first(found).jobs] == [(1, 2), (2, 2), (3, 1)]
    assert found.lost == [
        LostLease(1, 1, "a", NOW + 100, 1),
        LostLease(2, 2, "a", NOW + 100, 1),
    ]


def test_a_late_holder_counts_until_another_worker_has_the_job() -> None:
    desk = Desk(3)
    desk.claim(3)
    late = NOW + 500
    entry, skipped = desk.book.decide_extend(late, "a", [1], [1], 100)
    desk.apply(entry)
    assert skipped == []
    assert desk.counts(late) == (2, 1, 0, 0)
    assert desk.claim(1, late, "b") == [2]
    assert desk.book.decide_ack("a", [1, 2, 3], None).skipped == [2]
    assert desk.book.decide_nack(late, "a", [2], None, 0) == (None, [2])
    assert desk.book.decide_extend(late, "a", [2], None, 100) == (None, [2])


def test_fences() -> None:
    desk = Desk(2)
    desk.claim(2)
    assert desk.book.decide_ack("a", [1, 2], [1, 1]).seqs == [1]
    assert desk.book.decide_ack("b", [1, 2], [1, 2]).skipped == [1, 2]
    # A seq counts once, and is skipped only if none of its leases is held.
    assert desk.book.decide_ack("a", [1, 9, 1, 9], None) == Matched([1], [9], [])
    assert desk.book.decide_ack("a", [1, 1], [9, 1]) == Matched([1], [], [])
    assert desk.book.decide_ack("a", [1, 1], [1, 9]) == Matched([1], [], [])
    assert desk.book.decide_extend(NOW, "a", [1, 1, 9], None, 5)[1] == [9]
    entry, skipped = desk.book.decide_nack(NOW, "a", [1, 2, 2], [0, 2, 2], 5)
    assert entry is not None
    assert (entry.jobs, skipped) == ([(2, NOW + 5)], [1])


def test_a_nack_returns_the_job_now_or_later() -> None:
    desk = Desk(3)
    desk.claim(3)
    desk.apply(desk.book.decide_nack(NOW, "a", [2], None, 0)[0])
    desk.apply(desk.book.decide_nack(NOW, "a", [1], None, 50)[0])
    assert desk.counts() == (1, 1, 1, 0)
    assert desk.claim(3, NOW + 1, "b") == [2]
    assert desk.claim(3, NOW + 50, "b") == [1]
    assert desk.book.jobs[1].deliveries == 2


def test_an_ack_under_way_keeps_the_job_past_its_deadline() -> None:
    desk = Desk(2)
    desk.claim(2)
    desk.book.begin_ack([1])
    assert desk.claim(2, NOW + 101, "b") == [2]
    matched = desk.book.decide_ack("a", [1], None)
    assert (matched.seqs, matched.joining) == ([], [1])
    assert desk.book.decide_nack(NOW, "a", [1], None, 0) == (None, [1])
    desk.book.cancel_ack([1, 9])
    assert desk.claim(2, NOW + 102, "b") == [1]
    desk.book.begin_ack([1])
    desk.delete([1])
    desk.book.cancel_ack([1])
    assert desk.counts(NOW + 102) == (0, 1, 0, 0)


def test_a_durable_claim_keeps_its_jobs_until_it_is_settled() -> None:
    desk = Desk(3)
    desk.claim(1)
    later = NOW + 101
    first_claim = first(desk.decide(Ask("b", 2, 100), now_ms=later))
    desk.book.stage(first_claim.entry)
    assert desk.counts(later) == (1, 2, 0, 0)
    assert desk.book.decide_ack("a", [1], None).skipped == [1], "it is on its way to b"
    second = first(desk.decide(Ask("c", 9, 100), now_ms=later))
    assert [job.seq for job in second.jobs] == [3]
    desk.book.undo(first_claim.entry)
    assert desk.book.decide_ack("a", [1], None).seqs == [1], "and was not, after all"
    assert desk.claim(9, later, "c") == [1, 2, 3]


def test_a_job_deleted_under_a_claim_stays_gone() -> None:
    desk = Desk(2)
    claim = first(desk.decide(Ask("a", 2, 100)))
    desk.book.stage(claim.entry)
    desk.delete([1])
    desk.book.apply(5, claim.entry, is_staged=True)
    assert desk.counts() == (0, 1, 0, 0)
    assert list(desk.book.jobs) == [2]


def test_an_extend_under_way_bars_nothing_but_claims() -> None:
    desk = Desk(1)
    desk.claim(1)
    extend = desk.book.decide_extend(NOW, "a", [1], None, 300)[0]
    assert extend is not None
    desk.book.stage(extend)
    assert desk.claim(1, NOW + 101, "b") == []
    desk.book.begin_ack([1])
    desk.book.apply(5, extend, is_staged=True)
    desk.book.cancel_ack([1])
    assert desk.claim(1, NOW + 300, "b") == []
    assert desk.claim(1, NOW + 301, "b") == [1]


def test_a_stream_that_ends_returns_its_jobs() -> None:
    desk = Desk(5)
    desk.claim(2, connection=3)
    desk.claim(1)
    assert desk.book.connection_count(NOW, 3) == 2
    assert desk.book.connection_count(NOW + 101, 3) == 0
    desk.book.begin_ack([2])
    entry = desk.book.decide_release(NOW, 3)
    assert entry is not None
    assert entry.jobs == [(1, NOW)]
    desk.apply(entry)
    desk.delete([2])
    assert desk.book.decide_release(NOW, 3) is None
    assert desk.claim(9, node="b") == [1, 4, 5]


def test_undeliverable_jobs_are_returned() -> None:
    desk = Desk(2)
    desk.claim(2)
    desk.apply(desk.book.decide_give_back(NOW, [(1, 1), (2, 9), (8, 1)]))
    assert desk.book.decide_give_back(NOW, [(1, 1)]) is None
    assert desk.claim(2) == [1]
    assert desk.book.jobs[1].deliveries == 2, "the delivery stays counted"


def test_the_dead_are_told_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEAD_JOBS_PER_CLAIM", 2)
    desk = Desk(5)
    desk.max_deliveries = 1
    desk.claim(4)
    later = NOW + 101
    found = desk.decide(Ask("b", 3, 100), now_ms=later)
    assert found.to_dead_letter == [DeadJob(1, 1), DeadJob(2, 1)]
    assert [job.seq for job in first(found).jobs] == [5]
    assert desk.book.begin_move([1, 2]) == [1, 2]
    assert desk.book.begin_move([1]) == []
    assert desk.counts(later) == (3, 0, 0, 2)
    assert desk.book.decide_ack("a", [1], None).skipped == [1]
    assert [job.seq for job in desk.decide(Ask("b", 3, 100), now_ms=later).to_dead_letter] == [3, 4]
    desk.book.cancel_move([1, 8], later + 50)
    desk.delete([2])
    desk.book.cancel_move([2], later)
    assert desk.counts(later) == (3, 0, 1, 0)


def test_only_unclaimed_jobs_are_movable() -> None:
    desk = Desk(6)
    desk.book.delay(4, NOW + 80)
    desk.book.delay(5, NOW + 20)
    desk.claim(2)
    desk.apply(desk.book.decide_nack(NOW, "a", [2], None, 10)[0])
    assert desk.book.movable(NOW, [1, 2, 3, 4]) == [2, 3, 4]
    assert desk.book.begin_move([3, 4, 5]) == [3, 4, 5]
    assert desk.book.movable(NOW, [3]) == []
    desk.book.cancel_move([3, 4, 5], NOW + 30)
    assert desk.counts(NOW + 30) == (4, 1, 1, 0), "a longer delay stays"
    assert desk.claim(9, NOW + 30, "b") == [2, 3, 5, 6]
    assert desk.claim(9, NOW + 80, "b") == [4]


def test_jobs_lost_to_damage_are_not_delivered() -> None:
    desk = Desk(3)
    desk.claim(2)
    desk.seqs.discard(2)
    assert desk.claim(9, NOW + 101, "b") == [1, 3]
    assert desk.counts(NOW + 101) == (0, 2, 0, 0)


def test_what_falls_below_the_floor_is_forgotten() -> None:
    desk = Desk(6)
    desk.book.delay(3, NOW + 50)
    desk.claim(2)
    desk.seqs -= {1, 2, 3}
    assert desk.counts() == (3, 0, 0, 0)
    desk.book.forget_below(2)
    assert desk.book.jobs == {}
    assert desk.book.next_due_ms(NOW) is None


def test_large_deletes_look_at_the_book_and_not_at_the_range() -> None:
    desk = Desk(6)
    desk.book.delay(6, NOW + 50)
    desk.claim(3)
    desk.book.forget(2, 2**62)
    assert list(desk.book.jobs) == [1]
    assert desk.book.unclaimed.delayed_until == {}


def test_leases_are_listed_by_seq_in_pages() -> None:
    desk = Desk(9)
    desk.claim(2, NOW - 100)
    desk.claim(3, NOW, "b", connection=4)
    assert [view.seq for view in desk.book.leases_after(NOW, 0, 3)] == [1, 2, 3]
    page = desk.book.leases_after(NOW + 1, 3, 10)
    assert [(view.seq, view.node, view.connection) for view in page] == [(4, "b", 4), (5, "b", 4)]
    assert (page[0].deadline_ms, page[0].claimed_ts, page[0].deliveries) == (NOW + 100, NOW, 1)


def test_replay_takes_each_entry_once_and_invents_no_job() -> None:
    desk = Desk(4)
    grant = LeasesGranted(7, "a", NOW, NOW + 100, 0, [(1, 5), (3, 6)])
    book = desk.book
    book.apply(9, grant, is_staged=False)
    book.apply(9, grant, is_staged=False)
    assert book.jobs[1].deliveries == 1
    book.apply(10, LeasesReleased(7, NOW, [(2, NOW), (3, NOW + 7)]), is_staged=False)
    book.apply(11, LeasesExtended(7, NOW, NOW + 500, [1, 2, 3]), is_staged=False)
    assert desk.counts(NOW + 101) == (3, 1, 0, 0)
    assert desk.claim(9, NOW + 200, "b") == [2, 3, 4]


def test_after_recovery_only_live_jobs_and_vouched_leases_are_left() -> None:
    for keeps in (True, False):
        desk = Desk(5)
        book = desk.book
        book.adopt(1, HeldJob(lease_id=5, node="a", at_ms=NOW + 101, deliveries=2, connection=9))
        book.adopt(2, HeldJob(at_ms=NOW + 7, deliveries=1))
        book.adopt(4, HeldJob(lease_id=6, node="a", at_ms=NOW + 101, deliveries=1))
        book.delay(3, NOW + 20)
        book.delay(5, NOW + 20)
        desk.seqs -= {4, 5}
        book.finish_recovery(desk.live, keeps_leases=keeps)
        assert sorted(book.jobs) == [1, 2]
        assert desk.counts() == ((0, 1, 2, 0) if keeps else (1, 0, 2, 0))
        assert book.jobs[1].deliveries == 2
        assert book.decide_release(NOW, 9) is None, "nobody is connected after a restart"
