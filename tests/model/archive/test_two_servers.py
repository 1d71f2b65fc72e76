"""Two servers with copies of one data directory use one archive: it keeps one history."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.model.archive.archived import ARCHIVE, Archived, inject
from topics_server.archive.continuous.places.shared_folder import ArchiveStore, SharedFolder
from topics_server.wal.fs import Buffer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--archive-rounds`: how many pairs of servers."""
    if "round_seed" in metafunc.fixturenames:
        metafunc.parametrize("round_seed", range(metafunc.config.getoption("--archive-rounds")))


class Overwriting(SharedFolder):
    """A folder whose puts replace what is there: the mistake that the tests must notice."""

    def put_if_absent(self, name: str, pieces: Iterable[Buffer]) -> bool:
        if "/parts/" in f"/{name}" and self._fs.exists(self.path_of(name)):
            self._fs.unlink(self.path_of(name))
        return super().put_if_absent(name, pieces)


def copied(made: Archived, other: Archived) -> None:
    """Give the other server a copy of the data directory, on the same disk."""
    disk = made.world.disk
    other.world.disk = disk
    other.world.changes["data_dir"] = Path("copy")
    other.world.clock.base_ms = made.world.clock.now_ms()
    for path in sorted(each for each in disk._dirs if each == "data" or each.startswith("data/")):
        disk.make_dir("copy" + path[len("data") :])
    for path, inode in list(disk._files.items()):
        if path.startswith("data/") and path != "data/LOCK":
            disk.put("copy" + path[len("data") :], bytes(inode.data))


def both_run(seed: int) -> tuple[Archived, Archived]:
    """Run two servers in turns of random length."""
    made, other = Archived(seed), Archived(seed + 1000)
    made.start()
    made.world.run(made.put_topics())
    made.world.run(made.load(12))
    if seed % 2:
        made.world.run(made.settle())
    copied(made, other)
    other.start()
    for _ in range(6):
        each = made.rng.choice((made, other))
        each.world.run(each.load(6, pauses=(0, 0.2, 0.9)))
        each.world.run(asyncio.sleep(made.rng.choice((0, 1.3))))
    for each in (made, other):
        each.world.run(each.append("a", 3))
        each.world.run(asyncio.sleep(8))
    return made, other


def test_one_of_the_two_goes_on_and_the_archive_is_one_history(round_seed: int) -> None:
    seed = round_seed
    holder = Archived(seed)
    with holder.world.life(seed):
        made, other = both_run(seed)
        try:
            shown = [each.archiver.metrics() for each in (made, other)]
            assert sum(each.stopped for each in shown) >= 1, shown
            found = made.verified()
            assert found.problems == []
            writers = [made.history().facts(number).writer for number in made.history().numbers()]
            changes = sum(a != b for a, b in itertools.pairwise(writers))
            assert changes <= 1, "the second writer, once it has begun, goes on alone"
            # Both servers continue to serve.
            for each in (made, other):
                each.world.run(each.append("a", 1))
            winner = next(each for each in (made, other) if not each.archiver.metrics().stopped)
            winner.world.run(winner.settle())
            expected, heads = winner.records(), winner.heads()
            moment = winner.restored("restored")
            made.world.abandon()
            holder.world = winner.world
            _start_restored(holder, winner)
            holder.check_records(expected, heads)
            assert moment.lsn
        finally:
            for each in (made, other):
                each.world.abandon()


def _start_restored(holder: Archived, winner: Archived) -> None:
    """Start the restored directory on the same disk."""
    winner.world.crash("kill")
    winner.world.disk.heal()
    holder.world = winner.world
    holder.world.start()


def test_without_put_if_absent_the_history_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above can fail: here parts overwrite each other."""

    def overwriting(store: ArchiveStore) -> ArchiveStore:
        assert isinstance(store, SharedFolder)
        return Overwriting.open(store._fs, ARCHIVE)

    inject(monkeypatch, overwriting)
    broken = 0
    for seed in range(4):
        holder = Archived(seed)
        with holder.world.life(seed):
            made, other = both_run(seed)
            try:
                stopped = sum(each.archiver.metrics().stopped for each in (made, other))
                broken += stopped == 0 or bool(made.verified().problems)
            finally:
                for each in (made, other):
                    each.world.abandon()
    assert broken >= 3
