"""Views in thousands of simulated lives with crashes and power cuts; `--view-seeds` of them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.model.views.viewed import ViewedSimulation

_CHUNK = 10


def _run(seeds: range) -> Counter[str]:
    """Counts of the run; the first failure ends it and names its seed."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        simulation = ViewedSimulation(seed)
        try:
            simulation.run()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        for name in ("crashes", "ahead", "judged", "records", "rebuilt"):
            totals[name] += getattr(simulation, name)
        for name in ("older", "torn", "gone", "deaths"):
            totals[name] += getattr(simulation.disk, name)
    return totals


def _chunks(seeds: range) -> Iterator[range]:
    for start in range(seeds.start, seeds.stop, _CHUNK):
        yield range(start, min(start + _CHUNK, seeds.stop))


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_views_are_the_fold_of_their_topics(view_seeds: int, first_seed: int) -> None:
    seeds = range(first_seed, first_seed + view_seeds)
    totals: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in pool.map(_run, _chunks(seeds)):
            totals += done
    print(f"\n{len(seeds)} seeds from {seeds.start}: {dict(totals)}")
    assert totals["crashes"] >= len(seeds)
    assert totals["judged"] >= len(seeds)
