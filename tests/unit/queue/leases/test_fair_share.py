"""A fair division: in proportion, never more than requested, and nothing is left over."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.queue.leases.fair_share import deal, divide

WANTED = st.lists(st.integers(0, 1_000), min_size=1, max_size=64)


@given(st.integers(0, 100_000), WANTED)
def test_all_that_can_be_is_given_and_never_too_much(available: int, wanted: list[int]) -> None:
    shares = divide(available, wanted)
    assert sum(shares) == min(available, sum(wanted))
    assert all(0 <= share <= most for share, most in zip(shares, wanted, strict=True))


@given(st.integers(0, 100_000), WANTED)
def test_a_share_is_less_than_a_job_off_the_proportional_one(
    available: int, wanted: list[int]
) -> None:
    total = sum(wanted)
    given = min(available, total)
    for share, most in zip(divide(available, wanted), wanted, strict=True):
        proportional = Fraction(given * most, total) if total else Fraction(0)
        assert abs(share - proportional) < 1


@given(st.integers(0, 2_000), st.integers(1, 100), st.integers(1, 64))
def test_equals_differ_by_one_job_at_most(available: int, most: int, count: int) -> None:
    shares = divide(available, [most] * count)
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True), "earlier claimers first"


@pytest.mark.parametrize(
    ("available", "wanted", "shares"),
    [
        (0, [3, 4], [0, 0]),
        (5, [0, 9], [0, 5]),
        (10, [1, 2], [1, 2]),
        (2, [8, 8, 8], [1, 1, 0]),
        (9, [1, 8, 9], [1, 4, 4]),
        (8, [16, 1], [8, 0]),
    ],
)
def test_division(available: int, wanted: list[int], shares: list[int]) -> None:
    assert divide(available, wanted) == shares


def test_jobs_are_dealt_round_after_round() -> None:
    assert deal([11, 12, 13, 14, 15, 16], [1, 3, 2]) == [[11], [12, 14, 16], [13, 15]]
    assert deal([], [0, 0]) == [[], []]
    assert deal([4, 5], [2]) == [[4, 5]]


@given(st.integers(0, 500), WANTED)
def test_every_job_is_dealt_once_and_hands_stay_in_order(available: int, wanted: list[int]) -> None:
    shares = divide(available, wanted)
    seqs = list(range(100, 100 + sum(shares)))
    hands = deal(seqs, shares)
    assert [len(hand) for hand in hands] == shares
    assert sorted(seq for hand in hands for seq in hand) == seqs
    assert all(hand == sorted(hand) for hand in hands)
