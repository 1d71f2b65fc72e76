"""The reasons of lost seqs: bounded ranges below the floor, holes above it."""

from __future__ import annotations

from topics_server.engine.log.losses import Losses, only_reason, with_hole
from topics_server.values.limits import LOSS_RANGES_MAX
from topics_server.values.model import Hole, LossReason

CAP, TTL, MIXED = LossReason.CAP, LossReason.TTL, LossReason.MIXED
DAMAGED, RESTART = LossReason.DAMAGED, LossReason.RESTART


def test_neighbours_of_one_reason_are_one_range() -> None:
    losses = Losses()
    losses.add(1, 5, CAP)
    losses.add(6, 9, CAP)
    losses.add(10, 10, TTL)
    assert losses.ranges == [Hole(1, 9, CAP), Hole(10, 10, TTL)]


def test_a_range_is_asked_for_its_reasons() -> None:
    losses = Losses([Hole(1, 9, CAP), Hole(10, 20, TTL)])
    assert losses.reasons(1, 9) == {CAP}
    assert losses.reasons(9, 10) == {CAP, TTL}
    assert losses.reasons(20, 30) == {TTL}
    assert losses.reasons(21, 30) == set()


def test_beyond_the_bound_the_oldest_two_become_mixed() -> None:
    losses = Losses()
    for number in range(LOSS_RANGES_MAX + 1):
        losses.add(2 * number + 1, 2 * number + 2, CAP if number % 2 else TTL)
    assert len(losses.ranges) == LOSS_RANGES_MAX
    assert losses.ranges[0] == Hole(1, 4, MIXED)
    assert losses.reasons(5, 6) == {TTL}


def test_the_only_reason_is_told_and_several_are_mixed() -> None:
    assert only_reason({TTL}) is TTL
    assert only_reason({TTL, CAP}) is MIXED
    assert only_reason(set()) is MIXED


def test_holes_are_ascending_and_merge_when_they_touch() -> None:
    holes = with_hole([Hole(10, 12, DAMAGED)], Hole(1, 3, DAMAGED))
    assert holes == [Hole(1, 3, DAMAGED), Hole(10, 12, DAMAGED)]
    assert with_hole(holes, Hole(4, 9, DAMAGED)) == [Hole(1, 12, DAMAGED)]
    assert with_hole(holes, Hole(2, 3, DAMAGED)) == holes


def test_a_seq_in_two_holes_is_told_once_with_the_first_cause() -> None:
    assert with_hole([Hole(5, 9, DAMAGED)], Hole(7, 12, RESTART)) == [
        Hole(5, 9, DAMAGED),
        Hole(10, 12, RESTART),
    ]
    assert with_hole([Hole(5, 9, DAMAGED)], Hole(6, 8, RESTART)) == [Hole(5, 9, DAMAGED)]
