"""Sealed files that are missing, older, damaged or doubled: served exactly, reported, or refused by
name.

A whole node on a disk in memory. Each test changes files between two runs, checks the next start,
and puts the right file back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.design7.bench import TOPIC, Bench
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.values.errors import StartRefused
from topics_server.values.model import LossReason
from topics_server.wal.format.manifest import decode_manifest
from topics_server.wal.tools.dump import verify

FOLDER = "data/segments/1"
MANIFEST = f"{FOLDER}/manifest"
DATA = f"{FOLDER}/0000000001.data"
IDX = f"{FOLDER}/0000000001.idx"
COUNT = 8


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Two sealed segments of eight records; no snapshot needs an entry of the journal."""
    made = Bench(segment_max_events=COUNT)
    made.put()
    for _ in range(2):
        made.append(COUNT, tag="a")
        made.tend()
    for _ in range(2):
        made.checkpoint()
    yield made
    made.world.abandon()


Saved = dict[str, bytes | None]


def save(bench: Bench, *paths: str) -> Saved:
    disk = bench.world.disk
    return {path: disk.content(path) if path in disk._files else None for path in paths}


def put_back(bench: Bench, saved: Saved) -> None:
    """Restore the files, also on the platter."""
    disk = bench.world.disk
    for path, content in saved.items():
        if content is None:
            disk.unlink(path, missing_ok=True)
            continue
        disk.make_dir(path.rpartition("/")[0])
        file = disk.open(path, create=True)
        file.pwrite(content, 0)
        file.sync()
        file.close()
        disk.sync_dir(path.rpartition("/")[0])


def remove(bench: Bench, *paths: str) -> Saved:
    saved = save(bench, *paths)
    for path in paths:
        bench.world.disk.unlink(path)
    return saved


def flip_byte(bench: Bench, path: str, offset: int, flip: int = 0x01) -> Saved:
    saved = save(bench, path)
    disk = bench.world.disk
    disk.corrupt(path, offset % disk.file_size(path), flip)
    return saved


def refused(bench: Bench) -> str:
    """The next start is refused, with this message, and changes no sealed file."""
    disk = bench.world.disk
    before = {path: disk.content(path) for path in disk._files if "segments" in path}
    with pytest.raises(StartRefused) as caught:
        bench.world.start()
    after = {path: disk.content(path) for path in disk._files if "segments" in path}
    assert after == before
    problems = verify(disk, "data").problems
    assert any(str(caught.value).split(" (and ")[0] in problem for problem in problems), problems
    bench.world.crash("kill")
    return str(caught.value)


def damaged(bench: Bench) -> list[tuple[int, int]]:
    """Ranges that readers get as damaged."""
    gaps = [gap for gap in bench.look().gaps if gap.reason is LossReason.DAMAGED]
    return [(gap.gap_from, gap.gap_to) for gap in gaps]


# -- manifests -----------------------------------------------------------------------------------


def test_a_missing_manifest_refuses_start_by_name_and_heals(bench: Bench) -> None:
    bench.world.crash("kill")
    saved = remove(bench, MANIFEST)
    assert f"{MANIFEST}: the manifest of topic {TOPIC} (id 1) is missing" in refused(bench)
    put_back(bench, saved)
    bench.world.start()
    assert bench.seqs() == list(range(1, 17))


def test_a_missing_folder_refuses_start_by_name(bench: Bench) -> None:
    bench.world.crash("kill")
    disk = bench.world.disk
    saved = remove(bench, *(f"{FOLDER}/{name}" for name in disk.list_dir(FOLDER)))
    disk.remove_dir(FOLDER)
    assert MANIFEST in refused(bench)
    put_back(bench, saved)
    bench.world.start()
    assert bench.seqs() == list(range(1, 17))


def test_an_older_manifest_refuses_start_by_name_and_heals(bench: Bench) -> None:
    older = save(bench, MANIFEST)
    bench.append(COUNT)
    bench.tend()
    bench.restart()
    bench.world.crash("kill")
    newest = save(bench, MANIFEST)
    put_back(bench, older)
    assert "is older than the one last published" in refused(bench)
    put_back(bench, newest)
    bench.world.start()
    assert bench.seqs() == list(range(1, 25))


@pytest.mark.parametrize("offset", [0, 9, 40, -1])
def test_a_damaged_manifest_refuses_start_by_name_and_heals(bench: Bench, offset: int) -> None:
    bench.world.crash("kill")
    saved = flip_byte(bench, MANIFEST, offset, 0x10)
    assert MANIFEST in refused(bench)
    put_back(bench, saved)
    bench.world.start()
    assert bench.seqs() == list(range(1, 17))


def test_a_manifest_of_another_store_refuses_start(bench: Bench) -> None:
    other = Bench(2, segment_max_events=COUNT)
    try:
        other.put()
        for _ in range(3):
            other.append(COUNT)
            other.tend()
        foreign = save(other, MANIFEST)
    finally:
        other.world.abandon()
    bench.world.crash("kill")
    put_back(bench, foreign)
    assert "is the manifest of another store" in refused(bench)


@pytest.mark.parametrize("path", [DATA, IDX])
def test_a_missing_segment_file_refuses_start_and_heals(bench: Bench, path: str) -> None:
    bench.world.crash("kill")
    saved = remove(bench, path)
    assert f"{path}: a listed segment file is missing" in refused(bench)
    put_back(bench, saved)
    bench.world.start()
    assert bench.seqs() == list(range(1, 17))


def test_files_of_a_topic_that_was_dropped_since_need_not_be_there(bench: Bench) -> None:
    bench.world.run(bench.store.drop_topic(TOPIC, if_empty=False))
    bench.wait(2)
    assert bench.world.disk.list_dir(FOLDER) == []
    bench.crash("kill")
    assert bench.node.registry.find(TOPIC) is None


def test_an_older_manifest_that_no_snapshot_is_ahead_of_costs_nothing(bench: Bench) -> None:
    """The journal has the records that the older manifest does not list; an unknown file stays
    until a manifest passes its id.
    """
    older = save(bench, MANIFEST)
    bench.append(COUNT - 1, tag="b")
    bench.tend(force_seal=True)
    bench.world.crash("kill")
    newest = save(bench, MANIFEST)
    put_back(bench, older)
    bench.world.start()
    assert bench.seqs() == list(range(1, 24))
    assert f"{FOLDER}/0000000003.data" in bench.world.disk._files
    # Nothing was sealed meanwhile, so the newer manifest still matches.
    assert bench.delete(tag="b") == 7
    bench.checkpoint()
    bench.world.crash("kill")
    put_back(bench, newest)
    bench.world.start()
    assert bench.seqs() == list(range(1, 17))


def test_a_stray_file_goes_when_a_manifest_passes_over_its_id(bench: Bench) -> None:
    older = save(bench, MANIFEST)
    bench.append(COUNT)
    bench.tend()
    bench.world.crash("kill")
    put_back(bench, older)
    bench.world.start()
    bench.tend()
    names = bench.world.disk.list_dir(FOLDER)
    assert "0000000004.data" in names
    assert "0000000003.data" not in names
    bench.crash("power")
    assert bench.seqs() == list(range(1, 25))


def test_generations_of_a_later_run_are_above_all_of_an_earlier_one(bench: Bench) -> None:
    """The server accepted an older manifest and the store continued: the abandoned past must not
    return.
    """
    older = save(bench, MANIFEST)
    for _ in range(3):
        bench.append(COUNT)
        bench.tend()
    newest = save(bench, MANIFEST)
    bench.world.crash("kill")
    put_back(bench, older)
    bench.world.start()
    bench.append(1)
    bench.tend(force_seal=True)
    bench.checkpoint()
    bench.world.crash("kill")
    put_back(bench, newest)
    assert "is older than the one last published" in refused(bench)


def test_a_manifest_says_which_store_wrote_it_and_is_counted(bench: Bench) -> None:
    found = decode_manifest(bench.world.disk.content(MANIFEST))
    assert found.store_id == bench.node.ground.directory.store_id != ""
    assert found.generation == bench.node.segments.generation_of(1) > 1


def test_a_changed_configuration_is_published(bench: Bench) -> None:
    bench.put(ttl_ms=77_000)
    bench.wait(0.5)
    assert decode_manifest(bench.world.disk.content(MANIFEST)).config["ttl_ms"] == 77_000


# -- delete flags --------------------------------------------------------------------------------


def test_deletes_do_not_come_back_with_an_older_file(bench: Bench) -> None:
    older = save(bench, DATA)
    bench.delete(before_seq=4)
    bench.tend()
    bench.restart()
    bench.world.crash("kill")
    newest = save(bench, DATA)
    assert newest != older
    put_back(bench, older)
    assert any(
        "other delete flags" in problem for problem in verify(bench.world.disk, "data").problems
    )
    bench.world.start()
    assert bench.seqs() == list(range(9, 17))
    assert damaged(bench) == [(1, 8)] or damaged(bench) == [(4, 8)]
    # The file stays unchanged, and later deletes and snapshots do not take it as correct.
    bench.delete(before_seq=6)
    bench.tend()
    bench.restart()
    assert bench.seqs() == list(range(9, 17))
    bench.world.crash("kill")
    put_back(bench, newest)
    bench.world.start()
    assert bench.seqs() == list(range(6, 17))
    assert damaged(bench) == []


def test_a_delete_that_replay_knows_holds_on_an_older_file(bench: Bench) -> None:
    older = save(bench, DATA)
    bench.delete(before_seq=4)
    bench.tend()
    bench.world.crash("kill")
    put_back(bench, older)
    bench.world.start()
    assert bench.seqs() == list(range(4, 17))
    assert verify(bench.world.disk, "data").problems == []


@pytest.mark.parametrize(("flip", "expected"), [(0x10, list(range(4, 17))), (0xFF, None)])
def test_a_flipped_flag_is_repaired_or_reported(
    bench: Bench, flip: int, expected: list[int] | None
) -> None:
    bench.delete(before_seq=4)
    bench.tend()
    bench.restart()
    bench.world.crash("kill")
    saved = flip_byte(bench, DATA, -3, flip)
    bench.world.start()
    assert bench.seqs() == (expected or list(range(9, 17)))
    assert bool(damaged(bench)) == (expected is None)
    bench.world.crash("kill")
    put_back(bench, saved)
    bench.world.start()
    assert bench.seqs() == list(range(4, 17))
    assert damaged(bench) == []


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_a_crash_at_any_step_of_a_delete_and_its_flip_is_no_damage(mode: Mode) -> None:
    for nth in range(1, 60):
        bench = Bench(nth, segment_max_events=COUNT)
        try:
            bench.put()
            bench.append(COUNT)
            bench.append(COUNT)
            bench.tend()
            bench.checkpoint()
            bench.world.disk.crash_at(nth)
            try:
                bench.delete(before_seq=4)
                bench.tend()
                bench.checkpoint()
                bench.delete(tag="none")
                bench.delete(before_seq=6)
                bench.tend()
            except SimulatedCrash:
                pass
            bench.crash(mode)
            assert damaged(bench) == []
            first = bench.seqs()[0]
            assert bench.seqs() == list(range(first, 17))
            assert first in (1, 4, 6)
        finally:
            bench.world.abandon()


# -- damaged files -------------------------------------------------------------------------------


def record_offset(bench: Bench, row: int) -> int:
    topic = bench.node.registry.find(TOPIC)
    assert topic is not None
    run = next(iter(topic.log.sealed()))
    index = run.index
    offset: int = int(index.columns().rows["offset"][row])  # type: ignore[attr-defined]
    return offset


def test_one_byte_in_the_index_and_one_in_a_record_cost_that_record_and_heal(bench: Bench) -> None:
    at = record_offset(bench, 2) + 20
    bench.world.crash("kill")
    saved = {**flip_byte(bench, IDX, 200), **flip_byte(bench, DATA, at)}
    bench.world.start()
    others = [seq for seq in range(1, 17) if seq != 3]
    assert bench.seqs() == others
    assert damaged(bench) == [(3, 3)]
    for _ in range(2):
        bench.tend()
        bench.checkpoint()
        bench.restart()
    assert bench.seqs() == others
    assert damaged(bench) == [(3, 3)]
    (kept,) = bench.world.disk.list_dir("data/quarantine/1")
    assert bench.world.disk.content(f"data/quarantine/1/{kept}") != saved[IDX]
    bench.world.crash("kill")
    put_back(bench, {DATA: saved[DATA]})
    bench.world.start()
    assert bench.seqs() == list(range(1, 17))
    assert damaged(bench) == []
    bench.world.crash("kill")
    assert bench.world.disk.content(IDX) == saved[IDX]


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_a_truncated_file_is_reported_and_never_removed(bench: Bench, cut: int) -> None:
    bench.world.crash("kill")
    saved = save(bench, DATA)
    file = bench.world.disk.open(DATA, write=True)
    file.truncate(cut % file.size())
    file.sync()
    bench.world.start()
    assert bench.seqs() == list(range(9, 17))
    assert damaged(bench) == [(1, 8)]
    bench.tend()
    bench.restart()
    assert DATA in bench.world.disk._files
    bench.world.crash("kill")
    put_back(bench, saved)
    bench.world.start()
    assert bench.seqs() == list(range(1, 17))


def test_a_record_deleted_while_damaged_stays_deleted_with_an_older_good_file(
    bench: Bench,
) -> None:
    good = save(bench, DATA)
    at = record_offset(bench, 1) + 20
    bench.world.crash("kill")
    flip_byte(bench, DATA, at)
    bench.world.start()
    assert damaged(bench) == [(2, 2)]
    bench.delete(before_seq=5)
    bench.tend()
    bench.restart()
    bench.world.crash("kill")
    put_back(bench, good)
    bench.world.start()
    assert bench.seqs() == list(range(5, 17))
    bench.restart()
    assert bench.seqs() == list(range(5, 17))
    assert damaged(bench) == []


def test_a_damaged_record_that_is_deleted_by_its_tag_does_not_come_back(bench: Bench) -> None:
    good = save(bench, DATA)
    at = record_offset(bench, 1) + 20
    bench.world.crash("kill")
    flip_byte(bench, DATA, at)
    bench.world.start()
    bench.look()
    assert bench.delete(tag="a") == 15
    bench.append(1)
    bench.checkpoint()
    bench.world.crash("kill")
    put_back(bench, good)
    bench.world.start()
    assert bench.seqs() == [17]


def test_a_damaged_segment_goes_when_the_floor_passes_it_and_its_quarantine_too(
    bench: Bench,
) -> None:
    at = record_offset(bench, 2) + 20
    bench.world.crash("kill")
    flip_byte(bench, IDX, 200)
    flip_byte(bench, DATA, at)
    bench.world.start()
    bench.look()
    disk = bench.world.disk
    names = disk.list_dir("data/quarantine/1")
    held = sum(disk.file_size(f"data/quarantine/1/{name}") for name in names)
    files = sum(disk.file_size(f"{FOLDER}/{name}") for name in disk.list_dir(FOLDER))
    assert held > 0
    hot, _ = bench.node.segments.bytes_of(1)
    assert hot == files + held - disk.file_size(MANIFEST)
    bench.put(cap_records=8)
    bench.append(1)
    bench.wait(3)
    assert DATA not in disk._files
    assert disk.list_dir("data/quarantine/1") == []
    bench.world.run(bench.store.drop_topic(TOPIC, if_empty=False))
    bench.wait(2)
    assert disk.list_dir("data/quarantine") == []


def test_a_read_that_fails_once_is_no_damage(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.storage import fake_disk

    plain, failures = fake_disk._FakeFile.pread, [1]

    def pread(file: fake_disk._FakeFile, length: int, offset: int) -> bytes:
        data = plain(file, length, offset)
        if file.path == DATA and length > COUNT and failures:
            failures.pop()
            return bytes(len(data))
        return data

    monkeypatch.setattr(fake_disk._FakeFile, "pread", pread)
    assert bench.seqs() == list(range(1, 17))
    assert not failures
    assert damaged(bench) == []


# -- two tiers -----------------------------------------------------------------------------------

COLD = "cold/1"


def tiered(nth: int) -> Bench:
    """Two sealed segments; the machine stops at the nth step of moving the first one."""
    made = Bench(nth, segment_max_events=COUNT, cold_dir="cold", hot_retain_segments=9)
    made.put()
    # Nothing is sealed before the ballast is written, which the seed may delay.
    made.wait(1)
    for _ in range(2):
        made.append(COUNT)
        made.tend()
    made.delete(before_seq=3)
    made.tend()
    for _ in range(2):
        made.checkpoint()
    topic = made.node.registry.find(TOPIC)
    assert topic is not None
    assert topic.log.segment_ids() == (1, 2)
    made.world.disk.crash_at(nth)
    try:
        made.node.segments.relocate(1, 1, topic.facts())
    except SimulatedCrash:
        made.world.crash("kill")
    else:
        made.world.crash("kill")
    return made


def test_an_interrupted_move_with_any_file_lost_is_reported_or_served() -> None:
    """At each step of the move the test removes each file of both tiers, or changes a flag of a
    live record in it.
    """
    wanted = list(range(3, 17))
    outcomes: dict[str, int] = {}
    for nth in range(1, 19):
        for index in range(4):
            bench = tiered(nth)
            try:
                paths = [
                    f"{folder}/0000000001.{s}" for folder in (FOLDER, COLD) for s in ("idx", "data")
                ]
                path = paths[index]
                if path not in bench.world.disk._files:
                    continue
                saved = remove(bench, path)
                both = save(bench, *paths)
                try:
                    bench.world.start()
                    outcome = "served" if bench.seqs() == wanted else "wrong"
                except StartRefused as error:
                    outcome = "refused" if path in str(error) else "unnamed"
                    assert save(bench, *paths) == both, "a refused start removes nothing"
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                if outcome == "refused":
                    bench.world.crash("kill")
                    put_back(bench, saved)
                    bench.world.start()
                    assert bench.seqs() == wanted
            finally:
                bench.world.abandon()
    assert set(outcomes) == {"served", "refused"}, outcomes


@pytest.mark.parametrize("flip", [0x10, 0xFF])
def test_one_flag_moved_in_either_copy_brings_nothing_back(flip: int) -> None:
    for nth in range(8, 19):
        for folder in (FOLDER, COLD):
            bench = tiered(nth)
            try:
                path = f"{folder}/0000000001.data"
                if path not in bench.world.disk._files:
                    continue
                flip_byte(bench, path, -COUNT, flip)
                bench.world.start()
                seen = bench.seqs()
                assert seen in (list(range(3, 17)), list(range(9, 17))), (nth, folder, seen)
                assert (seen[0] == 9) == bool(damaged(bench))
            finally:
                bench.world.abandon()


def test_an_older_copy_left_in_the_hot_folder_does_not_undo_deletes(bench: Bench) -> None:
    bench.world.abandon()
    bench = tiered(99)
    try:
        older = save(bench, f"{COLD}/0000000001.data", f"{COLD}/0000000001.idx")
        bench.world.start()
        bench.delete(before_seq=6)
        bench.tend()
        bench.restart()
        bench.world.crash("kill")
        put_back(bench, {path.replace(COLD, FOLDER): content for path, content in older.items()})
        bench.world.start()
        assert bench.seqs() == list(range(6, 17))
        assert damaged(bench) == []
        assert DATA not in bench.world.disk._files
    finally:
        bench.world.abandon()
