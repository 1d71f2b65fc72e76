"""Producers over crashes: random requests through both APIs, in thousands of simulations.

Each seed is a whole life of a data directory (`tests/model/produced`): every answer is that of the
contract, and after a kill or a power loss the topic has the result of some prefix of the requests,
which includes all acknowledged ones. `--seeds` sets their number, `--first-seed` the first one;
they run on all cores. `tests/model/test_produced` shows that the test can fail.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.model.producers.produced import ProducedSimulation

_CHUNK = 25


def _run(seeds: range) -> tuple[int, Counter[object]]:
    """The crashes, and the count of each answer; the first failure ends the run, with its seed."""
    crashes, answers = 0, Counter[object]()
    for seed in seeds:
        simulation = ProducedSimulation(seed)
        try:
            simulation.run()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        crashes += simulation.crashes
        answers += simulation.answers
    return crashes, answers


def _chunks(seeds: range) -> Iterator[range]:
    for start in range(seeds.start, seeds.stop, _CHUNK):
        yield range(start, min(start + _CHUNK, seeds.stop))


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_producer_is_answered_by_the_contract_over_every_crash(seeds: range) -> None:
    began = time.monotonic()
    crashes, answers = 0, Counter[object]()
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in pool.map(_run, _chunks(seeds)):
            crashes += done[0]
            answers += done[1]
    seconds = time.monotonic() - began
    assert crashes >= len(seeds)
    told = ", ".join(f"{count} {name}" for name, count in answers.most_common())
    print(
        f"\n{len(seeds)} seeds from {seeds.start}, {crashes} crashes, answers: {told}; "
        f"{len(seeds) / seconds:.1f} seeds/s"
    )
