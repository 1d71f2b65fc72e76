"""Transfers between two topics over every kind of stop: each job is at the source or once at the
destination.
"""

from __future__ import annotations

import pytest

from tests.model.queues.moving import MovingSimulation

_SEEDS = 25


@pytest.mark.parametrize("faults", [False, True])
def test_a_moved_job_is_at_its_source_or_once_at_its_destination(faults: bool) -> None:
    moves = crashes = ended = 0
    for seed in range(_SEEDS):
        simulation = MovingSimulation(seed, faults=faults)
        simulation.run()
        moves += simulation.moves
        crashes += simulation.crashes
        ended += simulation.ended_at_start
    # The test would prove nothing if no crash came between the two halves.
    assert moves > 2 * _SEEDS
    assert crashes > _SEEDS
    assert ended > 0
