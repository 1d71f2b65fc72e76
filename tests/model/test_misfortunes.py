"""A few lives with worse faults, and each kind of fault with its protection removed.

Thousands of seeds: tests/crash/simulated/test_misfortunes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import pytest

from tests.model.misfortunes import KINDS, Kind, Misfortunes
from tests.model.simulation import Simulation
from tests.storage.fake_disk import FakeDisk
from topics_server.engine.background import recovery
from topics_server.engine.commit import gates
from topics_server.engine.topic import registry, retention
from topics_server.values import file_inventory
from topics_server.values.errors import StorageError
from topics_server.wal import cold_folder, directory
from topics_server.wal.format.manifest import COLD, HOT
from topics_server.wal.journal import replay
from topics_server.wal.segments import topic_scan

_SEEDS: Final = 5
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_life_with_one_kind_of_misfortune(kind: Kind) -> None:
    for seed in range(1, _SEEDS + 1):
        Misfortunes(seed, (kind,)).run()


def test_lives_with_two_kinds_of_it() -> None:
    for seed in range(1, 2 * _SEEDS + 1):
        Misfortunes(seed).run()


# -- removed protections -------------------------------------------------------------------


def _no_parents_synced(patch: pytest.MonkeyPatch) -> None:
    def make_dirs(fs: FakeDisk, path: str, mode: int = 0o700) -> None:
        if not fs.exists(path):
            make_dirs(fs, path.rpartition("/")[0] or ".", mode)
            fs.make_dir(path, mode)

    for module in (directory, cold_folder):
        patch.setattr(module, "make_durable_dirs", make_dirs)
        patch.setattr(module, "sync_ancestors", lambda fs, path: None)


def _errors_are_absence(patch: pytest.MonkeyPatch) -> None:
    list_dir, exists = FakeDisk.list_dir, FakeDisk.exists

    def quiet_list(disk: FakeDisk, path: str) -> list[str]:
        try:
            return list_dir(disk, path)
        except StorageError:
            return []

    def quiet_exists(disk: FakeDisk, path: str) -> bool:
        try:
            return exists(disk, path)
        except StorageError:
            return False

    patch.setattr(FakeDisk, "list_dir", quiet_list)
    patch.setattr(FakeDisk, "exists", quiet_exists)


def _no_locks(patch: pytest.MonkeyPatch) -> None:
    for module in (directory, cold_folder):
        patch.setattr(module, "lock_folder", lambda fs, root: [])


def _only_the_lock_file(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeDisk, "lock_dir", lambda disk, path: None)


def _any_cold_folder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cold_folder, "judge_cold", lambda *args: None)


def _expiry_by_the_clock(patch: pytest.MonkeyPatch) -> None:
    def expires(log: Any, since_ms: int) -> bool:
        if not log.live_count or log.time_of(log.earliest_seq) >= since_ms:
            return False
        log.expired_seq = log.first_seq_since(since_ms)
        return True

    patch.setattr(retention, "_expires", expires)


def _no_floor_of_epochs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry.Registry, "raise_epoch_floor", lambda registry, epoch: None)


def _older_creations_win(patch: pytest.MonkeyPatch) -> None:
    """Two guards prevent these faults; either one is enough for the simulation's runs."""
    patch.setattr(registry.Registry, "_is_superseded", lambda registry, creation: False)
    patch.setattr(recovery.Recovery, "_is_stale", lambda recovery, lsn, entry: False)


def _boots_are_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(directory.Directory, "forget_boot", lambda directory: None)


def _any_files_are_a_store(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(file_inventory, "objections_to", lambda *args: [])


def _no_end_marks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay, "read_marks", lambda *args: {})


def _any_flags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(file_inventory.Suspect, "has_lost_deletes", False)


def _half_a_copy_counts(patch: pytest.MonkeyPatch) -> None:
    """A faulty server: a copy counts as soon as its index has its final name."""
    scan = topic_scan._segment

    def hasty(fs: Any, tiers: Any, report: Any, entry: Any, present: Any, anchor: Any) -> Any:
        path = tiers.idx_path(COLD, report.topic_id, entry.segment_id)
        if entry.tier == HOT and path in present:
            entry = replace(entry, tier=COLD)
        return scan(fs, tiers, report, entry, present, anchor)

    patch.setattr(topic_scan, "_segment", hasty)


_GUARDS: Final[list[tuple[Kind, Patch, int]]] = [
    ("evicted", _older_creations_win, 120),
    ("nested", _no_parents_synced, 40),
    ("errors", _errors_are_absence, 60),
    ("files", _any_files_are_a_store, 20),
    ("files", _no_end_marks, 60),
    ("files", _any_flags, 60),
    ("moves", _half_a_copy_counts, 60),
    ("second", _no_locks, 10),
    ("second", _only_the_lock_file, 30),
    ("cold", _any_cold_folder, 20),
    ("clock", _expiry_by_the_clock, 60),
    ("names", _no_floor_of_epochs, 60),
]


@pytest.mark.parametrize(
    ("kind", "take_out", "seeds"), _GUARDS, ids=lambda each: getattr(each, "__name__", None)
)
def test_without_its_guard_a_kind_is_noticed(
    kind: Kind, take_out: Patch, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_out(monkeypatch)
    assert _is_noticed(Misfortunes(seed, (kind,)) for seed in range(1, seeds + 1))


def test_a_creation_that_is_not_synced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "CREATES_TOPIC", gates.WRITTEN)
    assert _is_noticed(Simulation(seed, faults=False) for seed in range(1, 81))


def _is_noticed(lives: Iterable[Simulation]) -> bool:
    for life in lives:
        try:
            life.run()
        except (AssertionError, StorageError):
            return True
    return False


@pytest.mark.parametrize(
    "seed",
    [
        *(42401, 43234, 43358, 43429, 43494, 51442, 51751, 61312),
        *(71507, 77120, 201503, 207037, 208860, 301809),
        *(1330, 4609, 4750),
    ],
)
def test_lives_in_which_something_was_found(seed: int) -> None:
    """Seeds that once showed defects: caps not enforced yet, unread indexes, flags set by a start,
    lost snapshots, cut syncs, and torn bytes that a start could not keep aside.
    """
    Misfortunes(seed).run()
