"""Routers over every kind of stop: each destination has what its source and its rule require."""

from __future__ import annotations

import pytest

from tests.model.routers.routed import RoutedSimulation

_SEEDS = 20


@pytest.mark.parametrize("faults", [False, True])
def test_a_destination_is_the_fold_of_its_source(faults: bool) -> None:
    pages = bare = lost = crashes = older = refused = stalls = 0
    for seed in range(_SEEDS):
        simulation = RoutedSimulation(seed, faults=faults)
        simulation.run()
        judge = simulation.judge
        pages += judge.pages
        bare += judge.bare
        lost += judge.lost
        crashes += simulation.crashes
        older += simulation.older_snapshots
        refused += simulation.refused
        stalls += simulation.stalls
    # The test would prove nothing if its events never happened.
    assert bare > _SEEDS
    assert pages - bare > _SEEDS
    assert min(crashes, refused, lost) > _SEEDS // 2
    assert older + stalls > 0
