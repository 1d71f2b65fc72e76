"""Divides available jobs among several claimers (§10.2). Pure.

Shares are proportional to the requested numbers, off by less than one job; no claimer gets more
than it requested. The division depends only on its arguments. Called by `queue/leases/lease_book`.
"""

from __future__ import annotations

from collections.abc import Sequence


def divide(available: int, wanted: Sequence[int]) -> list[int]:
    """The number of jobs for each claimer: all requested jobs, or all available ones.

    First each claimer gets the whole part of its share; then one more job each, by the largest
    remainder, earlier claimers first. Only a claimer that has not got all its jobs has a remainder,
    so one more job is never too many.
    """
    assert available >= 0
    assert all(count >= 0 for count in wanted)
    total = sum(wanted)
    if available >= total:
        return list(wanted)
    shares = [available * count // total for count in wanted]
    remainders = [available * count % total for count in wanted]
    left = available - sum(shares)
    by_remainder = sorted(range(len(wanted)), key=lambda index: -remainders[index])
    for index in by_remainder[:left]:
        assert remainders[index] > 0
        shares[index] += 1
    return shares


def deal(seqs: Sequence[int], shares: Sequence[int]) -> list[list[int]]:
    """Deal the seqs one at a time, round after round, until each claimer has its share."""
    assert sum(shares) == len(seqs)
    hands: list[list[int]] = [[] for _ in shares]
    if len(hands) == 1:
        hands[0].extend(seqs)
        return hands
    waiting = [index for index, share in enumerate(shares) if share]
    position = 0
    while waiting:
        for index in waiting:
            hands[index].append(seqs[position])
            position += 1
        waiting = [index for index in waiting if len(hands[index]) < shares[index]]
    return hands
