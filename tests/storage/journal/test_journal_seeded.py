"""Seeded lives on a failing disk: no promise is ever broken (see `journal_rig`)."""

from __future__ import annotations

import pytest

from tests.storage.fake_disk import Mode
from tests.storage.journal.journal_rig import Promises, new_disk, run_life
from topics_server.values.errors import Corrupt, StartRefused, StorageError

LIVES = 4


def run_seed(
    seed: int, *, faults: bool = False, evicts: bool = False, changes_shards: bool = False
) -> None:
    disk = new_disk(seed)
    disk.evicts = evicts
    rng = disk.rng
    promises = Promises()
    mode: Mode | None = None
    for _ in range(LIVES):
        if rng.random() < 0.7:
            disk.crash_at(rng.randint(1, 150))
        if faults and rng.random() < 0.6:
            disk.fail("write", rng.choice(("eio", "enospc", "partial")), nth=rng.randint(1, 60))
        if faults and rng.random() < (0.6 if evicts else 0.2):
            path = rng.choice(("*.wal", "*.wal", "*"))
            disk.fail("sync", "eio", nth=rng.randint(4, 30), path=path)
        if faults and rng.random() < 0.2:
            disk.fail("open", "emfile", nth=rng.randint(4, 20))
        recovered = False
        try:
            steps = rng.randint(1, 60)
            recovered = run_life(disk, promises, mode, steps, changes_shards=changes_shards)
        except Exception as error:
            if faults and is_refusal(error):
                # A fault hit recovery itself: the server does not start, and loses nothing.
                disk.heal()
            else:
                raise
        ending: Mode = rng.choice(("kill", "power"))
        # If a recovery failed, a power loss before it counts for the next recovery.
        mode = "power" if ending == "power" or (mode == "power" and not recovered) else "kill"
        disk.crash(ending)
        disk = disk.reopen()
    run_life(disk, promises, mode, 0)


def is_refusal(error: Exception) -> bool:
    return isinstance(error, StorageError) and not isinstance(error, (Corrupt, StartRefused))


@pytest.mark.parametrize("chunk", range(10))
def test_no_promise_is_broken_by_crashes(chunk: int) -> None:
    for seed in range(chunk * 50, chunk * 50 + 50):
        try:
            run_seed(seed, faults=False)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.parametrize("chunk", range(10))
def test_no_promise_is_broken_by_crashes_and_refusals(chunk: int) -> None:
    for seed in range(chunk * 50, chunk * 50 + 50):
        try:
            run_seed(10_000 + seed, faults=True)
        except BaseException as error:
            raise AssertionError(f"seed {10_000 + seed}: {error!r}") from error


@pytest.mark.parametrize("chunk", range(4))
def test_no_promise_is_broken_when_shards_come_and_go(chunk: int) -> None:
    for seed in range(chunk * 50, chunk * 50 + 50):
        try:
            run_seed(20_000 + seed, faults=seed % 2 == 0, changes_shards=True)
        except BaseException as error:
            raise AssertionError(f"seed {20_000 + seed}: {error!r}") from error


@pytest.mark.parametrize("chunk", range(6))
def test_entries_lost_to_a_failed_sync_are_reported(chunk: int) -> None:
    """The kernel forgets pages whose sync failed; a restart in the same boot finds less."""
    for seed in range(chunk * 50, chunk * 50 + 50):
        try:
            run_seed(30_000 + seed, faults=True, evicts=True)
        except BaseException as error:
            raise AssertionError(f"seed {30_000 + seed}: {error!r}") from error
