"""The judge of damaged stores: it must see what it is there to see."""

from __future__ import annotations

import dataclasses

import pytest

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
    judge,
    make_store,
    undamaged,
)
from tests.storage.fake_disk import FakeDisk
from topics_server.engine.answers import Gap
from topics_server.values.model import LossReason
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
    """The damage is where the case says it is not."""
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


def test_a_head_above_what_anybody_was_told_may_fall_back(store: StoreCopy) -> None:
    """An append that was cut short: its seq was told to nobody, and is given again."""
    head = store.topics["disk"].seen.head
    higher = _seen(store, head=head + 1)
    assert judge(dataclasses.replace(higher, told_heads={"disk": head}), _HARMLESS) == "exact"
    found = judge(dataclasses.replace(higher, told_heads={"disk": head + 1}), _HARMLESS)
    assert isinstance(found, Finding)
    assert "seqs are used again" in found.what


def test_a_store_mark_without_a_boot_is_refused_and_no_defect(store: StoreCopy) -> None:
    """One bit of the name of a field: the mark is JSON still, and the field is missing."""
    place = store.image.files["data/FORMAT"].index(b"boot_id")
    assert judge(store, Case("killed", "data/FORMAT", "flipped", place, 0)) == "refused"


@pytest.mark.parametrize("kind", ["removed", "emptied", "flipped", "swapped"])
def test_heads_that_moved_are_not_forgotten_with_their_snapshot(kind: Kind) -> None:
    """After a power cut a start skips seqs that may have been given out, and is killed."""
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
