"""Damages every file of a small data directory in every way: no loss may be silent.

`tests/storage/damage.py` defines the kinds of damage and the allowed results of the next start. The
default is a sample; `--damage-cases 0` judges every case (over 20,000) on all cores. `--damage-only
'data/wal/*'` selects files, `--damage-kinds cut,flipped` kinds of damage.
"""

from __future__ import annotations

import concurrent.futures
import fnmatch
import functools
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from tests.storage.damage import (
    ENDS,
    OUTCOMES,
    TOGETHER,
    Case,
    End,
    Tally,
    cases_of,
    judge_together,
    make_store,
    run_cases,
)

_CHUNK: Final = 100
_STORE: Final = functools.lru_cache(make_store)


@dataclass(frozen=True)
class Asked:
    """The selected cases: how many of each end (0: all), of which files, of which kinds (none:
    all).
    """

    count: int
    only: str
    kinds: tuple[str, ...]

    def _is_wanted(self, path: str) -> bool:
        return not self.only or fnmatch.fnmatch(path, self.only)

    def of(self, end: End) -> list[Case]:
        """The cases of one end; the same arguments give the same cases."""
        cases = [
            case
            for case in cases_of(_STORE(end))
            if self._is_wanted(case.path) and (not self.kinds or case.kind in self.kinds)
        ]
        if not self.count:
            return cases
        # Each kind of damage of each file is included; most cases are flips.
        rng = random.Random(f"{end} {self.count}")
        rng.shuffle(cases)
        seen: dict[tuple[str, str], int] = {}
        ranked: list[tuple[int, Case]] = []
        for case in cases:
            key = (case.path, case.kind)
            seen[key] = rank = seen.get(key, 0) + 1
            ranked.append((rank, case))
        ranked.sort(key=lambda each: each[0])
        return [case for _, case in ranked[: self.count]]


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Asked:
    """The cases selected on the command line."""
    option = request.config.getoption
    kinds = tuple(str(option("--damage-kinds", default="")).split(","))
    return Asked(
        int(option("--damage-cases", default=250)),
        str(option("--damage-only", default="")),
        tuple(kind for kind in kinds if kind),
    )


def _run(cases: list[Case]) -> Tally:
    return run_cases(_STORE(cases[0].end), cases)


def _chunks(cases: list[Case]) -> Iterator[list[Case]]:
    for start in range(0, len(cases), _CHUNK):
        yield cases[start : start + _CHUNK]


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("end", ENDS)
def test_damage_is_harmless_reported_or_refused_by_name(end: End, asked: Asked) -> None:
    began = time.monotonic()
    cases = asked.of(end)
    tally = Tally()
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for part in pool.map(_run, _chunks(cases)):
            tally.add(part)
            # A run of all cases takes a quarter of an hour, so print each problem at once.
            for finding in part.findings:
                print(f"\n{tally.count} of {len(cases)}: {finding}", flush=True)
    seconds = time.monotonic() - began
    assert tally.count == len(cases) > 0
    print(f"\n{end}: {len(cases)} cases, {len(cases) / seconds:.0f} cases/s\n{tally.table()}")
    told = "\n".join(map(str, tally.findings[:40]))
    assert not tally.findings, f"{len(tally.findings)} findings:\n{told}"


# The kinds of files that must all be replaced together, because a start notices any smaller set.
_ANCHORS: Final[dict[tuple[str, End], frozenset[str]]] = {
    ("an earlier run", "killed"): frozenset(TOGETHER),
    ("an earlier run", "power"): frozenset(TOGETHER),
    ("an earlier run", "clean"): frozenset(TOGETHER),
    ("the same run", "killed"): frozenset({"journal", "end marks"}),
    ("the same run", "power"): frozenset({"journal", "end marks"}),
    ("the same run", "clean"): frozenset({"journal", "end marks", "snapshots"}),
}


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("copy", ["an earlier run", "the same run"])
def test_only_older_copies_of_every_anchor_together_are_silent(copy: str, end: End) -> None:
    """Replace every set of kinds of files by an older copy; print the sets that no start notices.

    In these sets no remaining file shows the replacement: a copy of the whole store from an earlier
    run; or journal and end marks of the same run, if no snapshot, flag or segment was made since.
    """
    store = _STORE(end)
    older = store.older if copy == "an earlier run" else store.same_run
    assert older is not None
    kinds = tuple(TOGETHER)
    outcomes = {
        names: judge_together(store, older, names)
        for count in range(1, len(kinds) + 1)
        for names in itertools.combinations(kinds, count)
    }
    silent = {names: found for names, found in outcomes.items() if found not in OUTCOMES}
    print(f"\n{end}, copies of {copy}: {len(silent)} of {len(outcomes)} sets are silent")
    for names, found in silent.items():
        print(f"  {' + '.join(names)}: {found}")
    assert kinds in silent, "all of a store as it was is a store"
    for names in silent:
        assert _ANCHORS[copy, end] <= set(names), (names, silent[names])
