"""Views over every kind of stop: incremental = rebuilt = a fold in plain Python."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.model.views.viewed import ViewedSimulation
from topics_server.views import judge, view

_SEEDS = 36
# The first seeds, one of which needs the rule; most power cuts lose no record that a view had
# applied.
_SEEDS_OF_THE_RULE = 60


def test_a_view_is_the_fold_of_its_topic() -> None:
    totals = dict.fromkeys(("crashes", "ahead", "judged", "records", "rebuilt"), 0)
    lost = joined = 0
    for seed in range(_SEEDS):
        simulation = ViewedSimulation(seed)
        simulation.run()
        for name in totals:
            totals[name] += getattr(simulation, name)
        joined += simulation.disk.joined
        lost += simulation.disk.older + simulation.disk.torn + simulation.disk.gone
    # The test would prove nothing if its events never happened.
    assert min(totals.values()) > _SEEDS, totals
    assert lost > _SEEDS
    assert joined > _SEEDS


def test_what_an_ephemeral_topic_lost_by_a_clean_stop_is_not_held_behind_a_crash() -> None:
    """The crash comes before the view has opened its file, and later records evict the hole."""
    ViewedSimulation(501068).run()


def test_without_the_rule_of_files_that_are_ahead_a_view_is_wrong() -> None:
    """Recovery must find a file that has records which a power cut removed from the log; otherwise
    the fold differs.
    """
    with (
        mock.patch.object(judge, "is_ahead", return_value=False),
        mock.patch.object(view, "is_ahead", return_value=False),
        pytest.raises(AssertionError, match=r"lost records|another one|lacks the live records"),
    ):
        _run_all(_SEEDS_OF_THE_RULE)


def _run_all(seeds: int) -> None:
    for seed in range(seeds):
        ViewedSimulation(seed).run()
