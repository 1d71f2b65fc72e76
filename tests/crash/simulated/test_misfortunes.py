"""Thousands of lives with worse faults: lost files, errors, two servers, set clocks.

`tests/model/misfortunes.py` has the faults of a seed and the rules. `--misfortunes 10000` sets the
number of seeds, `--first-seed` the first one, `--misfortune-kinds files,errors` the kinds of each
(by default two, chosen by the seed). They run on all cores.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import pytest

from tests.model.misfortunes import KINDS, Kind, Misfortunes

_CHUNK: Final = 20


def _run(kinds: Sequence[Kind], seeds: range) -> tuple[int, int, list[str]]:
    """The faults, the number of acknowledged calls, and the problems."""
    struck = calls = 0
    findings: list[str] = []
    for seed in seeds:
        life = Misfortunes(seed, kinds)
        try:
            life.run()
        except Exception as error:
            findings.append(f"seed {seed} {sorted(life.kinds)}: {error!r}"[:2_000])
        struck += life.struck
        calls += life.acknowledged
    return struck, calls, findings


def _chunks(seeds: range) -> Iterator[range]:
    for start in range(seeds.start, seeds.stop, _CHUNK):
        yield range(start, min(start + _CHUNK, seeds.stop))


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_no_misfortune_takes_a_record_in_silence(
    request: pytest.FixtureRequest, first_seed: int
) -> None:
    began = time.monotonic()
    option = request.config.getoption
    seeds = range(first_seed, first_seed + int(option("--misfortunes", default=150)))
    asked = str(option("--misfortune-kinds", default="")).split(",")
    kinds = [kind for kind in KINDS if kind in asked]
    struck = calls = 0
    findings: list[str] = []
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for part in pool.map(partial(_run, kinds), _chunks(seeds)):
            struck, calls = struck + part[0], calls + part[1]
            findings += part[2]
            for finding in part[2]:
                print(f"\n{finding}", flush=True)
    seconds = time.monotonic() - began
    print(
        f"\n{len(seeds)} seeds from {seeds.start}, {struck} strikes, {calls} calls acknowledged, "
        f"{len(seeds) / seconds:.1f} seeds/s"
    )
    told = "\n".join(findings[:20])
    assert not findings, f"{len(findings)} findings:\n{told}"
    assert struck >= len(seeds) // 4
