"""Backups with lost, damaged or foreign files: each is reported by name and never removed."""

from __future__ import annotations

import pytest

from tests.model.backups.backed_up import FOLDER, BackedUp
from topics_server.archive.format import BackupFacts
from topics_server.archive.object_store import FolderStore
from topics_server.archive.repository import Pruned, Repository
from topics_server.archive.restore import restore
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal.directory import lock_folder

FACTS = "backups/{:010d}/backup.json"


def filled(seed: int, backups: int = 3) -> BackedUp:
    """A node with so many backups; each backup has more segments than the one before."""
    made = BackedUp(seed)
    made.start()
    run, node = made.world.run, made.world.node
    assert node is not None
    run(made.put_topics())
    for _ in range(backups):
        for name in ("a", "q"):
            run(made.append(name, 20))
            topic = node.registry.find(name)
            assert topic is not None
            run(node.sealer.tend(topic, force_seal=True))
        run(made.append("a", 3))
        run(made.back_up())
        assert made.backups.state.status == "done", made.backups.state
    return made


def names(made: BackedUp, prefix: str = "") -> set[str]:
    """Objects in the backup folder."""
    start = f"{FOLDER}/{prefix}"
    return {p.removeprefix(f"{FOLDER}/") for p in made.world.disk._files if p.startswith(start)}


def damage(made: BackedUp, name: str, *, cut: bool = False) -> bytes:
    """Change one byte in the middle of an object, or cut half of it off; returns the original."""
    path = f"{FOLDER}/{name}"
    whole = bytes(made.world.disk._files[path].data)
    changed = bytearray(whole[: len(whole) // 2] if cut else whole)
    changed[len(changed) // 2] ^= 0x10
    made.world.disk.put(path, bytes(changed))
    return whole


def prune(made: BackedUp, keep: set[int]) -> Pruned:
    store = FolderStore.open(made.world.disk, FOLDER, write=True)
    try:
        return Repository(store).prune(keep)
    finally:
        store.close()


def test_a_backup_that_lost_its_facts_is_told_and_stays() -> None:
    made = filled(1)
    with made.world.life(1):
        made.world.disk.lose(f"{FOLDER}/{FACTS.format(3)}")
        kept = names(made, "backups/0000000003/")
        assert "backups/0000000003/snapshot" in kept
        assert made.repository().numbers() == [1, 2, 3]
        (problem,) = made.repository().verify().problems
        assert problem == f"{FOLDER}/{FACTS.format(3)}: is missing"
        for number in (None, 1):
            with pytest.raises(Corrupt, match=r"0000000003/backup\.json: is missing"):
                made.restore("restored", number)
        assert not made.world.disk.exists("restored")
        made.world.run(made.back_up())
        assert made.backups.state.number == 4
        with pytest.raises(Corrupt, match=r"0000000003/backup\.json: is missing"):
            prune(made, {4})
        assert made.repository().numbers() == [1, 2, 3, 4]
        assert names(made, "backups/0000000003/") == kept
        made.world.abandon()


def test_a_damaged_backup_is_skipped_on_request_only() -> None:
    made = filled(2)
    with made.world.life(2):
        disk = made.world.disk
        for name in (FACTS.format(2), "backups/0000000002/known"):
            whole = damage(made, name)
            store = FolderStore.open(disk, FOLDER, write=False)
            with pytest.raises(Corrupt, match=r"Backup 2 may know seqs.* --skip 2 restores"):
                restore(disk, store, "restored", 3)
            assert not disk.exists("restored")
            disk.put(f"{FOLDER}/{name}", whole)
        damage(made, FACTS.format(3))
        store = FolderStore.open(disk, FOLDER, write=False)
        with pytest.raises(Corrupt, match="fails its check"):
            restore(disk, store, "restored")
        assert restore(disk, store, "restored", skipped={3}).backup == 2
        with pytest.raises(StartRefused, match="there is no backup 3, only 1, 2"):
            restore(disk, store, "other", 3, skipped={3})
        made.world.abandon()


def test_every_damaged_object_is_named_once() -> None:
    made = filled(3)
    with made.world.life(3):
        damaged = {
            *names(made, "segments/"),
            *(f"backups/{number:010d}/known" for number in (1, 2)),
            "backups/0000000003/snapshot",
            "STORE",
        }
        for name in damaged:
            damage(made, name)
        problems = made.repository().verify().problems
        assert sorted(problems) == [f"{FOLDER}/{name}: fails its check" for name in sorted(damaged)]
        made.world.abandon()


def test_every_damaged_piece_of_a_journal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics_server.archive.backup.PIECE_BYTES", 100)
    made = filled(4, backups=0)
    with made.world.life(4):
        node = made.world.node
        assert node is not None
        taken = node.checkpointer.take

        async def take_and_write() -> None:
            await taken()
            await made.append("a", 9)
            await made.append("q", 9)

        monkeypatch.setattr(node.checkpointer, "take", take_and_write)
        for name in ("a", "q"):
            made.world.run(made.append(name, 20))
            topic = node.registry.find(name)
            assert topic is not None
            made.world.run(node.sealer.tend(topic, force_seal=True))
        made.world.run(made.back_up())
        pieces = sorted(names(made, "backups/0000000001/journal-"))
        sealed = sorted(names(made, "backups/0000000001/sealed-"))
        assert min(len(pieces), len(sealed)) > 1
        for name in (*pieces, *sealed):
            damage(made, name)
        problems = made.repository().verify().problems
        assert sorted(problems) == [
            f"{FOLDER}/{name}: fails its check" for name in sorted((*pieces, *sealed))
        ]
        made.world.abandon()


def test_a_lost_owner_does_not_prevent_a_restore() -> None:
    made = filled(5)
    with made.world.life(5):
        made.world.disk.lose(f"{FOLDER}/STORE")
        (problem,) = made.repository().verify().problems
        assert problem.startswith(f"{FOLDER}/STORE: is missing")
        expected, heads = made.records(), made.heads()
        made.world.crash("kill")
        made.restore("restored")
        made.world.start()
        made.check_records(expected, heads)


def test_an_object_that_was_cut_off_is_stored_again() -> None:
    made = filled(6)
    with made.world.life(6):
        cut = [
            next(n for n in sorted(names(made, "segments/")) if n.endswith(s))
            for s in (".data", ".idx")
        ]
        whole = [damage(made, name, cut=True) for name in cut]
        assert len(made.repository().verify().problems) == 2
        made.world.run(made.back_up())
        assert made.backups.state.status == "done", made.backups.state
        assert made.repository().verify().problems == []
        assert [bytes(made.world.disk._files[f"{FOLDER}/{name}"].data) for name in cut] == whole
        made.world.abandon()


def test_a_prune_removes_half_copies_and_leaves_foreign_files() -> None:
    """Half copies hold payloads of deleted records too."""
    made = filled(7)
    with made.world.life(7):
        disk = made.world.disk
        segment = next(name for name in sorted(names(made, "segments/")) if name.endswith(".data"))
        topic = segment.rpartition("/")[0]
        half = f"{topic}/{9:010d}-{9:016x}.data.tmp"
        foreign = {f"{topic}/notes", "segments/README", "segments/photos/1", "backups/notes"}
        for name in (half, *foreign):
            disk.put(f"{FOLDER}/{name}", b"1")
        assert prune(made, {3}).removed == [1, 2]
        assert half not in names(made)
        assert foreign <= names(made)
        assert made.repository().verify().problems == []
        made.world.abandon()


@pytest.mark.parametrize("calls", range(1, 8))
def test_a_prune_that_is_killed_loses_no_backup(calls: int) -> None:
    made = filled(8)
    with made.world.life(8):
        made.world.disk.fail("unlink", "eio", path=f"{FOLDER}/*", nth=calls)
        try:
            prune(made, {3})
        except StorageError:
            made.world.disk.heal()
        assert 3 in made.repository().numbers()
        assert made.repository().verify().problems == []
        prune(made, {3})
        assert made.repository().numbers() == [3]
        assert {name.split("/")[1] for name in names(made, "backups/")} == {"0000000003"}
        made.world.abandon()


@pytest.mark.parametrize("name", ["0000000000", "9999999999"])
def test_a_folder_with_an_impossible_number(name: str) -> None:
    made = filled(9, backups=1)
    with made.world.life(9):
        made.world.disk.put(f"{FOLDER}/backups/{name}/notes", b"1")
        made.world.run(made.back_up())
        state = made.backups.state
        if name == "0000000000":
            assert (state.status, state.number) == ("done", 2)
        else:
            assert (state.status, state.reason) == (
                "failed",
                f"{FOLDER}/backups: no number is left for a backup",
            )
        assert made.world.disk.exists(f"{FOLDER}/backups/{name}/notes")
        made.world.abandon()


def test_a_restore_writes_into_no_folder_of_a_store() -> None:
    made = filled(10, backups=1)
    with made.world.life(10):
        disk = made.world.disk
        store = FolderStore.open(disk, FOLDER, write=False)
        before = set(disk._files)
        for target in (
            f"{FOLDER}/restored",
            f"{FOLDER}/backups/0000000002",
            "data/restored",
            FOLDER,
            "data",
        ):
            with pytest.raises(StartRefused):
                restore(disk, store, target)
        disk.lose(f"{FOLDER}/STORE")
        with pytest.raises(StartRefused, match="lies in the backup folder"):
            restore(disk, store, f"{FOLDER}/restored")
        assert set(disk._files) == before - {f"{FOLDER}/STORE"}
        made.world.abandon()


def test_two_restores_do_not_mix_in_one_folder() -> None:
    made = filled(11, backups=1)
    with made.world.life(11):
        disk = made.world.disk
        store = FolderStore.open(disk, FOLDER, write=False)
        disk.make_dir("restored")
        locks = lock_folder(disk, "restored")
        with pytest.raises(StartRefused, match="in use by another"):
            restore(disk, store, "restored")
        for lock in locks:
            lock.release()
        assert restore(disk, store, "restored").backup == 1
        made.world.abandon()


def test_a_verify_beside_a_prune_finds_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    made = filled(12)
    with made.world.life(12):
        facts = Repository.facts

        def facts_and_prune(repository: Repository, number: int) -> BackupFacts:
            found = facts(repository, number)
            monkeypatch.setattr(Repository, "facts", facts)
            prune(made, {3})
            return found

        monkeypatch.setattr(Repository, "facts", facts_and_prune)
        found = made.repository().verify()
        assert (found.backups, found.problems) == (1, [])
        made.world.abandon()


def test_a_restore_beside_a_prune_asks_the_backups_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = filled(14)
    with made.world.life(14):
        facts = Repository.facts

        def prune_before_facts(repository: Repository, number: int) -> BackupFacts:
            if number == 1:
                monkeypatch.setattr(Repository, "facts", facts)
                prune(made, {3})
            return facts(repository, number)

        monkeypatch.setattr(Repository, "facts", prune_before_facts)
        store = FolderStore.open(made.world.disk, FOLDER, write=False)
        assert restore(made.world.disk, store, "restored").backup == 3
        assert made.repository().numbers() == [3]
        made.world.abandon()


def test_the_newest_backup_that_can_be_read_is_in_the_metrics() -> None:
    made = filled(13)
    with made.world.life(13):
        newest = made.repository().facts(2).ts_ms
        damage(made, FACTS.format(3))
        made.world.crash("kill")
        made.start()
        made.world.run(made.backups.find_newest())
        assert made.backups.metrics().newest_ts_ms == newest
