"""Restores that end early: the remaining files are no store, and no server starts on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.backups.backed_up import FOLDER, BackedUp
from tests.model.world import SMALL
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.archive.object_store import FolderStore
from topics_server.archive.restore import restore
from topics_server.values.errors import DiskFull, StartRefused
from topics_server.wal import layout
from topics_server.wal.directory import Directory


def stopped(seed: int) -> BackedUp:
    """A backup of a node that is gone."""
    made = BackedUp(seed)
    made.start()
    run, node = made.world.run, made.world.node
    assert node is not None
    run(made.put_topics())
    run(made.append("a", 20))
    topic = node.registry.find("a")
    assert topic is not None
    run(node.sealer.tend(topic, force_seal=True))
    run(made.append("b", 5))
    run(made.back_up())
    assert made.backups.state.status == "done", made.backups.state
    made.world.crash("kill")
    return made


def again(made: BackedUp) -> None:
    store = FolderStore.open(made.world.disk, FOLDER, write=False)
    restore(made.world.disk, store, "restored", sizes=SMALL)


@pytest.mark.parametrize("mode", ["kill", "power"])
@pytest.mark.parametrize("step", range(5))
def test_a_restore_that_is_killed_leaves_a_whole_store_or_none(mode: Mode, step: int) -> None:
    made = stopped(1)
    facts = made.repository().facts(1)
    with made.world.life(1):
        survived = 0
        for nth in range(1 + step, 400, 5):
            made.world.disk.fail("any", "crash", path="restored*", nth=nth)
            try:
                again(made)
            except SimulatedCrash:
                made.world.disk.crash(mode)
                made.world.disk = made.world.disk.reopen()
            else:
                survived += 1
                made.world.disk.heal()
            names = made.world.disk.list_dir("restored")
            made.world.changes["data_dir"] = Path("restored")
            if "FORMAT" in names:
                made.world.start()
                made.check(facts)
                made.world.crash("kill")
            elif set(names) - {"LOCK", "FORMAT.tmp"}:
                with pytest.raises(StartRefused, match="not a data directory"):
                    Directory.open(made.world.disk, "restored", boot_id="boot")
                with pytest.raises(StartRefused, match="is not empty"):
                    again(made)
            else:
                again(made)
            if survived:
                break
            _remove(made)
        assert survived


def _remove(made: BackedUp) -> None:
    """Remove the files that the restore left, as a user would."""
    disk = made.world.disk
    for path in [path for path in disk._files if path.startswith("restored/")]:
        disk.lose(path)
    for folder in sorted((d for d in disk._dirs if d.startswith("restored")), reverse=True):
        disk.sync_dir(folder)
        disk.remove_dir(folder)
        disk.sync_dir(layout.parent(folder))


def test_a_disk_without_room_is_refused_before_anything_is_written() -> None:
    made = stopped(2)
    with made.world.life(2):
        disk = made.world.disk
        disk.capacity_bytes = disk.used_bytes() + 1_000
        before = disk.image()
        with pytest.raises(DiskFull, match=r"needs \d+ bytes, and \d+ are free"):
            again(made)
        assert disk.image() == before
