"""Backups that end early: killed at any call, refused by a full disk, stopped with the server.

Whatever happens, the backups that exist are whole, the next one succeeds, and pruning leaves
nothing that no backup needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.model.backups.backed_up import FOLDER, BackedUp
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.archive.object_store import FolderStore
from topics_server.archive.repository import Repository
from topics_server.values.model import Durability, TopicConfig
from topics_server.values.storage_types import SyncedShard


def began(seed: int) -> BackedUp:
    """A node with one backup and some more records."""
    made = BackedUp(seed)
    made.start()
    made.world.run(made.put_topics())
    made.world.run(made.load(12))
    made.world.run(made.back_up())
    assert made.backups.state.status == "done", made.backups.state
    made.world.run(made.load(12))
    return made


def finish(made: BackedUp, least: int) -> None:
    """Back up once more, prune all others, and restore what is left."""
    found = made.repository().verify()
    assert found.problems == []
    assert found.backups >= least
    expected, heads = made.records(), made.heads()
    made.world.run(made.back_up())
    assert made.backups.state.status == "done", made.backups.state
    number = made.backups.state.number
    assert number is not None
    store = FolderStore.open(made.world.disk, FOLDER, write=True)
    repository = Repository(store)
    repository.prune({number})
    store.close()
    assert repository.numbers() == [number]
    assert repository.verify().problems == []
    topics = list(repository.sealed(repository.facts(number)))
    needed = {name for t in topics for s in t.segments for name in (s.data, s.idx)}
    there = {path.removeprefix(f"{FOLDER}/") for path in made.world.disk._files}
    assert {path for path in there if path.startswith("segments/")} == needed
    assert {path.split("/")[1] for path in there if path.startswith("backups/")} == {
        f"{number:010d}"
    }
    made.world.crash("kill")
    made.restore("restored")
    made.world.start()
    made.check_records(expected, heads)


@pytest.mark.parametrize("seed", range(20))
def test_a_crash_at_any_call_leaves_whole_backups(seed: int) -> None:
    made = BackedUp(seed)
    with made.world.life(seed):
        made = began(seed)
        made.world.disk.fail("any", "crash", path=f"{FOLDER}/*", nth=made.rng.randrange(1, 90))
        mode: Mode = made.rng.choice(("kill", "power"))
        try:
            made.world.run(made.back_up_under_load())
        except SimulatedCrash:
            made.world.crash(mode)
            made.start()
        made.world.disk.heal()
        finish(made, 1)
        made.world.abandon()


@pytest.mark.parametrize("seed", range(8))
def test_a_full_backup_disk_fails_the_backup_and_nothing_else(seed: int) -> None:
    made = began(seed)
    with made.world.life(seed):
        nth = made.rng.randrange(1, 25)
        made.world.disk.fail("write", "enospc", path=f"{FOLDER}/*", nth=nth, times=None)
        made.world.run(made.back_up_under_load())
        failed = made.backups.state.status == "failed"
        made.world.run(made.append("a", 1))
        made.world.disk.heal()
        assert not [path for path in made.world.disk._files if path.endswith(".tmp")]
        assert made.backups.metrics().failed == int(failed)
        finish(made, 1)


def test_a_stopping_server_ends_its_backup() -> None:
    made = began(3)
    with made.world.life(3):

        async def begin() -> None:
            made.backups.begin()

        made.world.run(begin())
        made.world.stop()
        assert made.repository().numbers() == [1]
        made.start()
        finish(made, 1)


def test_the_journal_is_trimmed_again_after_a_backup() -> None:
    made = began(5)
    with made.world.life(5):
        node = made.world.node
        assert node is not None
        release = node.journal.hold_trim()
        before = set(made.world.disk.list_dir("data/wal"))
        for _ in range(4):
            made.world.run(made.append("a", 200))
            made.world.run(node.checkpointer.take())
        held = set(made.world.disk.list_dir("data/wal"))
        assert before <= held
        release()
        made.world.run(made.load(1))
        assert not before <= set(made.world.disk.list_dir("data/wal"))


def test_a_restored_store_is_backed_up_into_a_folder_of_its_own() -> None:
    """It is another store: the old folder refuses it, so that no history has two continuations."""
    made = began(6)
    with made.world.life(6):
        made.world.crash("kill")
        made.restore("restored")
        made.start()
        made.world.run(made.back_up())
        assert made.backups.state.status == "failed"
        assert "belongs to store" in str(made.backups.state.reason)
        assert made.repository().numbers() == [1]


def test_heads_of_every_class_are_behind_all_backups() -> None:
    """A restore of the first backup respects the seqs, topic ids and epochs of the second."""
    made = began(7)
    with made.world.life(7):
        run, store = made.world.run, made.store
        run(store.drop_topic("q", if_empty=False))
        run(store.put_topic("q", TopicConfig(durability=Durability.FSYNC), keep_type=False))
        run(made.append("a", 3_000))
        run(made.append("new", 5))
        epoch, head = store.state("q", touch=False).epoch, store.state("a", touch=False).head_seq
        node = made.world.node
        assert node is not None
        ids = node.registry.next_topic_id
        run(made.back_up())
        made.world.crash("kill")
        made.restore("restored", 1)
        node = made.world.start()
        assert node.store.state("a", touch=False).head_seq >= head
        assert node.registry.next_topic_id >= ids
        run = made.world.run
        run(node.store.drop_topic("q", if_empty=False))
        run(node.store.put_topic("q", TopicConfig(), keep_type=False))
        assert node.store.state("q", touch=False).epoch > epoch
        # That also holds after the next start, when the store no longer has the mark of a restore.
        assert "restored/RESTORED" not in made.world.disk._files
        made.world.crash("power")
        node = made.world.start()
        assert node.store.state("a", touch=False).head_seq >= head
        assert node.registry.next_topic_id >= ids


@pytest.mark.parametrize("nth", range(1, 60, 4))
def test_a_first_start_that_dies_does_the_same_again(nth: int) -> None:
    made = began(8)
    with made.world.life(8):
        made.world.run(made.back_up())
        made.world.crash("kill")
        facts = made.restore("restored", 1)
        made.world.disk.crash_at(nth)
        try:
            made.world.start()
        except SimulatedCrash:
            made.world.crash("power")
            made.world.disk.heal()
            made.world.start()
        made.check(facts)


@pytest.mark.parametrize("ending", ["nearly full", "the server stops"])
def test_the_copy_of_the_journal_ends_as_well(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy may take long, and the journal keeps its files meanwhile."""
    made = began(9)
    with made.world.life(9):
        node = made.world.node
        assert node is not None
        synced = node.journal.sync_open_shards
        taken = node.checkpointer.take

        async def take_and_write() -> None:
            await taken()
            await made.append("a", 1)

        async def sync_and_end() -> Sequence[SyncedShard]:
            found = await synced()
            if made.backups.state.status == "running" and node.checkpointer.taken_count > before:
                node.store.is_disk_low = ending == "nearly full"
                made.backups._is_closing = ending != "nearly full"
            return found

        before = node.checkpointer.taken_count
        monkeypatch.setattr(node.checkpointer, "take", take_and_write)
        monkeypatch.setattr(node.journal, "sync_open_shards", sync_and_end)
        made.world.run(made.back_up())
        assert made.backups.state.status == "failed"
        assert ending in str(made.backups.state.reason)
        assert made.repository().numbers() == [1]
        node.store.is_disk_low = made.backups._is_closing = False
        monkeypatch.undo()
        finish(made, 1)
