"""Tests of the judge of damaged stores: it must detect every kind of fault."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from tests.design7.bench import Bench
from tests.model.world import World
from tests.storage.damage import (
    ENDS,
    Case,
    End,
    Finding,
    Kind,
    StoreCopy,
    Truth,
    cases_of,
    copied,
    is_behind_every_anchor,
    judge,
    make_store,
    undamaged,
)
from tests.storage.fake_disk import FakeDisk, Mode
from topics_server.engine.answers import Gap
from topics_server.engine.topic import retention
from topics_server.values.model import Durability, LossReason
from topics_server.wal.format.end_marks import SLOT_BYTES, SLOT_DISTANCE, decode, encode_slot
from topics_server.wal.tools.dump import verify

_HARMLESS = Case("killed", "data/LOCK", "removed")


@pytest.fixture(scope="module")
def store() -> StoreCopy:
    return make_store("killed")


def _with(store: StoreCopy, name: str, truth: Truth | None) -> StoreCopy:
    topics = {**store.topics}
    if truth is None:
        del topics[name]
    else:
        topics[name] = truth
    return dataclasses.replace(store, topics=topics)


def _seen(store: StoreCopy, **changes: object) -> StoreCopy:
    truth = store.topics["disk"]
    seen = dataclasses.replace(truth.seen, **changes)  # type: ignore[arg-type]
    return _with(store, "disk", dataclasses.replace(truth, seen=seen))


@pytest.mark.parametrize("end", ENDS)
def test_an_undamaged_store_is_shown_exactly(end: End) -> None:
    whole = make_store(end)
    assert undamaged(whole) == "exact"
    assert verify(FakeDisk.of(whole.image), "data", "cold").problems == []
    assert any(path.startswith("cold/") for path in whole.image.files)
    assert whole.epochs, "a name was dropped"
    assert len(list(cases_of(whole))) > 5_000


def test_a_record_that_is_missing_without_a_word_is_found(store: StoreCopy) -> None:
    seen = store.topics["disk"].seen
    dead = next(seq for seq in range(1, seen.head) if seq not in seen.records)
    more = {**seen.records, dead: seen.records[seen.head]}
    found = judge(_seen(store, records=more), _HARMLESS)
    assert isinstance(found, Finding)
    assert found.what.startswith(f"disk: seq {dead} is missing in silence")


def test_a_record_that_is_back_or_another_one_is_found(store: StoreCopy) -> None:
    records = dict(store.topics["disk"].seen.records)
    first, second = sorted(records)[:2]
    changed = {**records, first: records[second]}
    del records[first]
    for truth in (records, changed):
        found = judge(_seen(store, records=truth), _HARMLESS)
        assert isinstance(found, Finding)
        assert found.what.startswith(f"disk: seq {first} is Rec(")


def test_seqs_and_epochs_that_are_used_again_are_found(store: StoreCopy) -> None:
    head = store.topics["disk"].seen.head
    found = judge(_seen(store, head=head + 1), _HARMLESS)
    assert isinstance(found, Finding)
    assert "seqs are used again" in found.what
    found = judge(dataclasses.replace(store, epochs={"gone": 2}), _HARMLESS)
    assert isinstance(found, Finding)
    assert found.what == "gone: epoch 2 is used again"


def test_topics_that_are_gone_back_or_others_are_found(store: StoreCopy) -> None:
    truth = store.topics["disk"]
    for other, words in (
        (_with(store, "disk", None), "topics are back: ['disk']"),
        (_with(store, "more", truth), "topic more is gone in silence"),
        (_with(store, "disk", dataclasses.replace(truth, epoch=9)), "topic disk is another one"),
    ):
        found = judge(other, _HARMLESS)
        assert isinstance(found, Finding)
        assert found.what.startswith(words)


def test_a_start_that_is_refused_for_another_file_is_found(store: StoreCopy) -> None:
    """The damage is in another file than the case says."""
    files = dict(store.image.files)
    del files[next(path for path in files if path.endswith(".idx"))]
    elsewhere = dataclasses.replace(store, image=dataclasses.replace(store.image, files=files))
    found = judge(elsewhere, _HARMLESS)
    assert isinstance(found, Finding)
    assert found.what.startswith("refused, but not by name")


def test_a_gap_that_is_told_no_more_is_found(store: StoreCopy) -> None:
    seen = store.topics["disk"].seen
    gap = Gap(seen.head - 3, seen.head, LossReason.DAMAGED, 4)
    found = judge(_seen(store, gaps=[*seen.gaps, gap]), _HARMLESS)
    assert isinstance(found, Finding)
    assert "is not told any more" in found.what


def test_a_head_above_all_reported_seqs_may_fall_back(store: StoreCopy) -> None:
    """An interrupted append: no client saw its seq, and it is assigned again."""
    head = store.topics["disk"].seen.head
    higher = _seen(store, head=head + 1)
    assert judge(dataclasses.replace(higher, told_heads={"disk": head}), _HARMLESS) == "exact"
    found = judge(dataclasses.replace(higher, told_heads={"disk": head + 1}), _HARMLESS)
    assert isinstance(found, Finding)
    assert "seqs are used again" in found.what


def test_a_store_mark_without_a_boot_is_refused_and_no_defect(store: StoreCopy) -> None:
    """One bit in the name of a field: the mark is still JSON, and the field is missing."""
    place = store.image.files["data/FORMAT"].index(b"boot_id")
    assert judge(store, Case("killed", "data/FORMAT", "flipped", place, 0)) == "refused"


@pytest.mark.parametrize("kind", ["removed", "emptied", "flipped", "swapped"])
def test_heads_that_moved_are_not_forgotten_with_their_snapshot(kind: Kind) -> None:
    """After a power cut a start skips seqs that may have been assigned, and is killed."""
    before = make_store("power")
    world = World(1, **before.settings)
    world.disk = FakeDisk.of(before.image)
    world.clock.base_ms = before.now_ms
    with world.life(0):
        world.start()
        world.crash("kill")
        image = world.disk.image()
    after = copied("killed", image, before.older, world.clock.base_ms, before.settings)
    assert after.topics["disk"].seen.head > 1_000, "it has moved"
    newest = max(path for path in image.files if path.endswith(".snap"))
    assert judge(after, Case("killed", newest, kind, 0)) in ("exact", "skipped")


def _store_of(bench: Bench, mode: Mode) -> StoreCopy:
    """The bench's store after its end, and readers' view after a start on it."""
    world = bench.world
    if world.is_up:
        world.crash(mode)
    image = world.disk.image()
    end: End = "killed" if mode == "kill" else "power"
    found = copied(end, image, image, world.clock.base_ms, world.changes)
    return dataclasses.replace(found, is_quiet=False)


def test_what_a_tightened_cap_has_not_evicted_yet_may_stay_beside_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the damaged records count as lost, there is nothing to evict."""
    bench = Bench(segment_max_events=4)
    try:
        bench.put(cap_records=20)
        for _ in range(14):
            bench.append()
        bench.wait(3)
        with monkeypatch.context() as patch:
            # Killed before the new cap evicts anything.
            patch.setattr(retention, "standing_floor", lambda *args: None)
            bench.put(cap_records=5)
            bench.world.crash("kill")
        whole = _store_of(bench, "kill")
        truth = whole.topics["t"]
        assert list(truth.seen.records) == [10, 11, 12, 13, 14]
        assert set(truth.evictable) == set(range(1, 10))
        emptied = Case("killed", "data/segments/1/0000000003.data", "emptied")
        assert judge(whole, emptied) == "told"
        changed = {**truth.evictable, 8: truth.evictable[7]}
        other = dataclasses.replace(truth, evictable=changed)
        found = judge(dataclasses.replace(whole, topics={"t": other}), emptied)
        assert isinstance(found, Finding)
        assert found.what.startswith("t: seq 8 is Rec(")
    finally:
        bench.world.abandon()


def test_a_cap_that_is_enforced_sooner_or_later_is_no_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader may look before or after the background evicts records over a new cap."""
    bench = Bench(segment_max_events=4)
    try:
        bench.put(cap_records=20)
        for _ in range(14):
            bench.append()
        bench.delete(before_seq=2)
        bench.wait(3)
        case = Case("killed", "data/ballast", "removed")
        with monkeypatch.context() as patch:
            patch.setattr(retention, "standing_floor", lambda *args: None)
            bench.put(cap_records=5)
            bench.world.crash("kill")
            late = _store_of(bench, "kill")
            assert list(late.topics["t"].seen.records) == list(range(2, 15))
        assert judge(late, case) == "exact"
        early = _store_of(bench, "kill")
        assert list(early.topics["t"].seen.records) == [10, 11, 12, 13, 14]
        with monkeypatch.context() as patch:
            patch.setattr(retention, "standing_floor", lambda *args: None)
            assert judge(early, case) == "exact"
            truth = dataclasses.replace(
                early.topics["t"], told_before=[Gap(1, 1, LossReason.CAP, 1)]
            )
            found = judge(dataclasses.replace(early, topics={"t": truth}), case)
        assert isinstance(found, Finding)
        assert "is not told any more" in found.what
    finally:
        bench.world.abandon()


def test_a_copy_older_than_deletes_that_a_start_completed_is_not_the_right_one() -> None:
    """The start after a power cut sets the missing flags, and publishes moved heads."""
    bench = Bench(segment_max_events=4)
    try:
        bench.put()
        for number in range(8):
            bench.append(tag="a" if number % 2 else "b")
        bench.append(name="other")
        bench.wait(3)
        bench.checkpoint()
        bench.delete(tag="a")
        whole = _store_of(bench, "power")
        path = "data/segments/1/0000000001.data"
        assert path in whole.flipped
        assert whole.flipped[path] != whole.image.files[path]
        case = Case("power", path, "flipped", 80)
        assert judge(whole, case) == "told"
        found = judge(dataclasses.replace(whole, flipped={}), case)
        assert isinstance(found, Finding)
        assert "the original is back, and still told as damaged" in found.what
    finally:
        bench.world.abandon()


def test_after_a_kill_in_the_middle_of_a_sync_its_result_is_unknown() -> None:
    """Nothing proves that the bytes written before that sync exist; without a sync all of them are
    proven.
    """
    bench = Bench()
    try:
        bench.put(Durability.MEMORY)
        bench.append(3)
        world = bench.world
        world.crash("kill")
        image = world.disk.image()
        path = next(path for path in image.files if path.endswith("-00-0000000001.wal"))
        mark_path = "data/wal/000001-00.end"
        marks = decode(image.files[mark_path], 1, 0)
        slot, (counter, mark) = max(marks.items(), key=lambda each: each[1][0])
        size = mark.written_end
        for is_syncing in (False, True):
            noted = msgspec.structs.replace(
                mark, synced_end=64, synced_lsn=0, is_syncing=is_syncing
            )
            content = bytearray(image.files[mark_path])
            at = slot * SLOT_DISTANCE
            content[at : at + SLOT_BYTES] = encode_slot(1, 0, slot, counter, noted)
            files = {**image.files, mark_path: bytes(content)}
            marked = dataclasses.replace(image, files=files)
            whole = copied("killed", marked, marked, world.clock.base_ms, world.changes)
            case = Case("killed", path, "cut", size - 1)
            assert is_behind_every_anchor(whole, case) is is_syncing
            assert (judge(whole, case) == "refused") is not is_syncing
    finally:
        bench.world.abandon()


def test_what_a_failed_sync_lost_may_be_in_one_snapshot_alone() -> None:
    """A delete that only that snapshot holds is undone if the snapshot is lost, as by a power
    cut.
    """
    bench = Bench(3, wal_shards=1)
    disk = bench.world.disk
    disk.evicts = True
    bench.put(Durability.DISK)
    bench.append(3)
    bench.wait(1)
    bench.delete(before_seq=3)
    disk.fail("sync", "eio", path="data/wal/*.wal", times=None)
    bench.wait(1)
    assert bench.store.read_only_shards()
    bench.checkpoint()
    disk.heal()
    try:
        whole = _store_of(bench, "kill")
        newest = max(path for path in whole.image.files if path.endswith(".snap"))
        assert list(whole.topics["t"].seen.records) == [3]
        case = Case("killed", newest, "removed")
        assert is_behind_every_anchor(whole, case)
        healthy = Bench()
        healthy.put()
        healthy.checkpoint()
        other = _store_of(healthy, "kill")
        assert not is_behind_every_anchor(other, dataclasses.replace(case, path=newest))
        healthy.world.abandon()
    finally:
        bench.world.abandon()


def test_an_old_snapshot_in_the_place_of_the_newest_is_told_and_passed_over() -> None:
    """Somebody put a copy in the wrong place; the snapshot below it is newer."""
    bench = Bench()
    try:
        bench.put()
        contents = []
        for _ in range(3):
            bench.append()
            bench.checkpoint()
            files = bench.world.disk.image().files
            contents.append(files[max(path for path in files if path.endswith(".snap"))])
        whole = _store_of(bench, "kill")
        newest = max(path for path in whole.image.files if path.endswith(".snap"))
        assert whole.image.files[newest] == contents[2]
        older = dataclasses.replace(whole.image, files={**whole.image.files, newest: contents[0]})
        report = verify(FakeDisk.of(older), "data", None)
        assert report.problems == [f"{newest}: is older than a snapshot of a lower number"]
        case = Case("killed", newest, "older")
        assert judge(dataclasses.replace(whole, older=older), case) == "exact"
    finally:
        bench.world.abandon()


@pytest.mark.parametrize("kind", ["removed", "emptied", "swapped"])
def test_after_a_clean_stop_heads_are_not_taken_from_an_older_snapshot(kind: Kind) -> None:
    """Only the final snapshot has the seqs that an ephemeral topic assigned."""
    bench = Bench()
    try:
        bench.put(Durability.EPHEMERAL)
        bench.append(3)
        bench.checkpoint()
        bench.append(3)
        bench.world.stop()
        image = bench.world.disk.image()
        whole = copied("clean", image, image, bench.world.clock.base_ms, bench.world.changes)
        assert whole.topics["t"].seen.head == 6
        newest = max(path for path in image.files if path.endswith(".snap"))
        assert judge(whole, Case("clean", newest, kind)) in ("exact", "skipped")
    finally:
        bench.world.abandon()
