"""Must-show 4, the part that `kill -9` does not show: power loss, in thousands of simulations.

Each seed is a whole life of a data directory on a disk in memory that drops or tears unsynced bytes
(`tests/model/simulation.py`): class fsync loses nothing acknowledged; disk and memory lose only an
unsynced tail, and readers get a tombstone for it. `--seeds` sets their number; they run on all
cores.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Iterator

import pytest

from tests.model.simulation import Simulation
from tests.storage import fake_disk
from topics_server.values.errors import StorageError

_CHUNK = 25


def _run(seeds: range) -> list[tuple[int, int]]:
    """(crashes, acknowledged calls) of each seed; the first failure ends the run, with its seed."""
    done: list[tuple[int, int]] = []
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            simulation.run()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        done.append((simulation.crashes, simulation.acknowledged))
    return done


def _chunks(seeds: range) -> Iterator[range]:
    for start in range(seeds.start, seeds.stop, _CHUNK):
        yield range(start, min(start + _CHUNK, seeds.stop))


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_power_loss_takes_nothing_that_was_synced(seeds: range) -> None:
    began = time.monotonic()
    crashes = calls = 0
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in pool.map(_run, _chunks(seeds)):
            crashes += sum(one[0] for one in done)
            calls += sum(one[1] for one in done)
    seconds = time.monotonic() - began
    assert crashes >= len(seeds)
    print(
        f"\n{len(seeds)} seeds from {seeds.start}, {crashes} crashes, {calls} calls acknowledged, "
        f"{len(seeds) / seconds:.1f} seeds/s"
    )


@pytest.mark.parametrize("what", ["files", "directories"])
def test_without_syncs_the_simulation_fails(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the protecting call some seed must fail; otherwise the other tests prove nothing."""

    def sync_nothing(self: object, path: str = "") -> None:
        pass

    if what == "files":
        monkeypatch.setattr(fake_disk._FakeFile, "sync", sync_nothing)
    else:
        monkeypatch.setattr(fake_disk.FakeDisk, "sync_dir", sync_nothing)
    failed = 0
    for seed in range(1, 41):
        try:
            Simulation(seed, faults=False).run()
        except (AssertionError, StorageError):
            failed += 1
    assert failed >= 3, f"only {failed} of 40 runs without syncs were noticed"
