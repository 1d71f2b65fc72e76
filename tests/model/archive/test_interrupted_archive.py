"""An archiver that dies at any call, and a store that fails: the archive has no gap and one correct
history.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

import pytest

from tests.model.archive.archived import ARCHIVE, Archived, Faulty, inject, patient
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.archive.continuous.bases import ArchiveBases
from topics_server.archive.continuous.position import read_position
from topics_server.archive.continuous.prune import plan_prune, prune_archive
from topics_server.archive.repository import segment_objects
from topics_server.archive.retention import parse_rules
from topics_server.values.errors import StartRefused
from topics_server.wal.fs import Lock

# A killed archiver had put an object whose name was not durable yet; the next archiver relied on
# the object, and then the power failed.
FOUND: Final = (3649, 9362, 9992)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--archive-crash-seeds`: how many crashes."""
    if "crash_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("--archive-crash-seeds")
        metafunc.parametrize("crash_seed", sorted({*range(count), *FOUND}))


def test_a_crash_at_any_call_leaves_one_history_without_a_gap(crash_seed: int) -> None:
    seed = crash_seed
    made = Archived(seed, archive_base_interval_ms=1_500, wal_shards=1 + seed % 2)
    rng = made.rng
    with made.world.life(seed):
        made.start()
        made.world.run(made.put_topics())
        for _ in range(3):
            # Calls to the archive, and calls to the file that holds its position.
            path = rng.choice((f"{ARCHIVE}/*", f"{ARCHIVE}/*", "data/ARCHIVE_POSITION*"))
            made.world.disk.fail("any", "crash", path=path, nth=rng.randrange(1, 60))
            mode: Mode = rng.choice(("kill", "power"))
            try:
                made.world.run(made.load(8))
                made.world.run(made.settle())
            except SimulatedCrash:
                made.world.crash(mode)
                made.world.disk.heal()
                made.start()
            made.world.disk.heal()
        made.world.run(made.load(4))
        made.world.run(made.settle())
        found = made.verified()
        assert found.problems == []
        assert found.stretches == 1, "no gap"
        assert made.archiver.metrics().stopped == 0
        _prune_to_one(made)
        # Entries in flight at a crash may have survived: expect what the running server shows.
        expected, heads = made.records(), made.heads()
        made.world.crash("kill")
        made.restored("restored")
        made.world.start()
        made.check_records(expected, heads)


def test_a_death_behind_the_first_part_leaves_no_gap() -> None:
    """The part exists, but the position file does not name it yet: the journal must still be
    kept.
    """
    unknown = 0
    for nth in range(8, 13):
        made = Archived(313, archive_base_interval_ms=1_500)
        with made.world.life(nth):
            made.start()
            made.world.run(made.put_topics())
            made.world.disk.fail("any", "crash", path="data/ARCHIVE_POSITION*", nth=nth)
            with pytest.raises(SimulatedCrash):
                made.world.run(_two_loads(made))
            made.world.crash("power")
            made.world.disk.heal()
            position = read_position(made.world.disk, "data")
            unknown += position is not None and not position.number and made.history().newest() == 1
            # A start whose heads move takes a checkpoint, and trims the journal.
            made.start()
            made.world.run(made.load(4))
            made.world.run(made.settle())
            assert made.verified().stretches == 1, f"nth {nth}"
    assert unknown


async def _two_loads(made: Archived) -> None:
    for _ in range(2):
        await made.load(8)
        await made.settle()


def locked(made: Archived) -> Lock:
    """The lock of the bases, once no base is being made."""
    for _ in range(100):
        try:
            return made.folder.lock_bases()
        except StartRefused:
            made.world.run(asyncio.sleep(0.3))
    raise AssertionError("a base does not end")


def _prune_to_one(made: Archived) -> None:
    """Keep one base; check that nothing else stays."""
    folder = made.folder
    lock = locked(made)
    prune_archive(folder, plan_prune(folder, parse_rules("1")))
    lock.release()
    assert made.verified().problems == []
    left = {path for path in made.world.disk._files if path.startswith(f"{ARCHIVE}/bases/")}
    assert len({path.split("/")[3] for path in left}) == 1, left
    history = made.history()
    (base,), problems = ArchiveBases(folder, history).all()
    assert problems == []
    needed = {f"{ARCHIVE}/{name}" for name in segment_objects(base.backup)}
    segments = {
        path
        for path in made.world.disk._files
        if path.startswith(f"{ARCHIVE}/segments/") and not path.endswith(".tmp")
    }
    assert segments == needed


@pytest.mark.parametrize("seed", range(4))
def test_a_prune_that_dies_is_completed_by_the_next(seed: int) -> None:
    made = Archived(seed, archive_base_interval_ms=1_000)
    with made.world.life(seed):
        made.start()
        made.world.run(made.put_topics())
        for _ in range(3):
            made.world.run(made.load(10))
            made.world.run(made.settle())
        expected, heads = made.records(), made.heads()
        made.world.crash("kill")
        disk = made.world.disk
        folder = made.folder
        plan = plan_prune(folder, parse_rules("1"))
        assert plan.gone
        disk.fail("any", "crash", path=f"{ARCHIVE}/*", nth=made.rng.randrange(2, 12))
        with pytest.raises(SimulatedCrash):
            prune_archive(folder, plan)
        disk.crash(made.rng.choice(("kill", "power")))
        made.world.disk = disk.reopen()
        assert made.verified().problems == []
        _prune_to_one(made)
        made.restored("restored")
        made.world.start()
        made.check_records(expected, heads)


@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_fails_often_is_waited_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all calls fail for a while, even after the repeated tries of one call."""
    made = Archived(seed)
    stores: list[Faulty] = []

    def opened(store: object) -> object:
        stores.append(Faulty(store, random.Random(seed), 0.5))  # type: ignore[arg-type]
        return patient(stores[-1])

    inject(monkeypatch, opened)  # type: ignore[arg-type]
    with made.world.life(seed):
        made.start()
        made.world.run(made.put_topics())
        made.world.run(made.load(20))
        for store in stores:
            store.share = 0.05
        made.world.run(made.settle())
        assert sum(store.failed for store in stores) > 3
        assert made.verified().problems == []
        assert made.verified().stretches == 1
        made.world.crash("power")
        moment = made.restored("restored")
        made.world.start()
        made.check_moment(moment)
