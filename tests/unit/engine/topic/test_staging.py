"""The FIFO of decided entries that are not applied yet."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from topics_server.engine.topic.staging import Staged, Staging
from topics_server.values.appends import of_columns
from topics_server.values.blocks import record_bytes
from topics_server.values.entries import (
    Entry,
    Floor,
    FloorMoved,
    HeadReserved,
    RecordsAppended,
    RecordsDeleted,
    TopicDropped,
    TopicPut,
)
from topics_server.values.model import LossReason, TopicConfig

DECODED = of_columns([b"1", b"22"], [b"", b"{}"], ["t", None], [None, "n"])
CREATION = TopicPut(1, "t", 1, TopicConfig(), 5)


def append(first_seq: int, ts: int, floor: int = 0, creation: TopicPut | None = None) -> Entry:
    lost = Floor(floor, LossReason.CAP) if floor else None
    return RecordsAppended(1, first_seq, 2, ts, b"", floor=lost, creation=creation, decoded=DECODED)


def staging_of(*entries: Entry) -> Staging:
    staging = Staging()
    for number, entry in enumerate(entries, 1):
        staging.push(Staged(number * 10, entry, None))
    return staging


def test_an_empty_fifo_changes_nothing() -> None:
    staging = Staging()
    assert len(staging) == 0
    assert (staging.last_seq, staging.last_ts, staging.floor_seq, staging.ceiling_seq) == (0,) * 4
    assert not staging.has_control


def test_topics_share_no_entry_although_they_share_the_empty_fifo() -> None:
    busy, idle = staging_of(append(1, 1)), Staging()
    assert (len(busy), len(idle)) == (1, 0)
    assert busy.pop(10).first_seq == 1
    busy.push(Staged(20, append(3, 1), None))
    assert (len(busy), len(idle), idle.appends()) == (1, 0, [])
    with pytest.raises(IndexError):
        idle.pop(10)


def test_the_newest_append_says_seq_and_time() -> None:
    floor = FloorMoved(1, 9, Floor(7, LossReason.TTL))
    staging = staging_of(append(5, 100, floor=3), append(7, 120), floor, HeadReserved(1, 99))
    assert (staging.last_seq, staging.last_ts) == (8, 120)
    assert (staging.floor_seq, staging.ceiling_seq) == (7, 99)
    assert [staged.first_seq for staged in staging.appends()] == [5, 7]


def test_entries_leave_in_order_only() -> None:
    staging = staging_of(append(1, 1), append(3, 1))
    with pytest.raises(AssertionError):
        staging.pop(20)
    staging = staging_of(append(1, 1), append(3, 1))
    assert staging.pop(10).first_seq == 1
    assert staging.pop(20).first_seq == 3


def test_a_suffix_is_undone_oldest_first() -> None:
    staging = staging_of(append(1, 1), append(3, 2), append(5, 3))
    assert [staged.first_seq for staged in staging.pop_from(15)] == [3, 5]
    assert (staging.last_seq, staging.last_ts, len(staging)) == (2, 1, 1)
    assert staging.pop_from(11) == []


def test_lsns_ascend() -> None:
    staging = staging_of(append(1, 1))
    with pytest.raises(AssertionError):
        staging.push(Staged(10, append(3, 1), None))


@pytest.mark.parametrize(
    ("entry", "is_control"),
    [
        (CREATION, True),
        (TopicDropped(1, "t", 5), True),
        (append(1, 1, creation=CREATION), True),
        (append(1, 1), False),
        (HeadReserved(1, 5), False),
    ],
)
def test_creating_configuring_and_dropping_are_control(entry: Entry, is_control: bool) -> None:
    assert staging_of(entry).has_control is is_control


def test_an_append_weighs_its_records_and_everything_else_nothing() -> None:
    expected = record_bytes(b"1", b"", "t", None) + record_bytes(b"22", b"{}", None, "n")
    assert Staged(1, append(1, 1), None).weight == expected
    assert Staged(1, HeadReserved(1, 5), None).weight == 0


def deleted(*runs: tuple[int, int]) -> RecordsDeleted:
    firsts = b"".join(first.to_bytes(8, "little") for first, _ in runs)
    lasts = b"".join(last.to_bytes(8, "little") for _, last in runs)
    return RecordsDeleted(1, 9, firsts, lasts)


@pytest.mark.parametrize("width", [1, 5_000])
def test_seqs_of_deletes_under_way_are_dying_until_the_last_of_them_is_gone(width: int) -> None:
    wide = (10, 9 + width)
    staging = staging_of(deleted((3, 3), wide), append(1, 1), deleted(wide, (9_000, 9_000)))
    dying = {seq for seq in (2, 3, 4, 9, 10, 9 + width, 10 + width, 9_000) if staging.is_dying(seq)}
    assert dying == {3, 10, 9 + width, 9_000}
    staging.pop(10)
    assert [staging.is_dying(seq) for seq in (3, 10, 9_000)] == [False, True, True]
    staging.pop_from(20)
    assert not any(staging.is_dying(seq) for seq in (3, 10, 9_000))


def test_a_seq_dies_until_the_last_of_its_deletes_is_gone_in_any_order() -> None:
    listed = [[1, 2, 3], [2, 3], [3, 4], [3]]
    for order in permutations(range(4), 2):
        staging = staging_of(*(RecordsDeleted(1, 9, b"", b"", seqs) for seqs in listed))
        for gone in range(4):
            left = [seq for seqs in listed[gone:] for seq in seqs]
            assert [seq for seq in range(6) if staging.is_dying(seq)] == sorted(set(left))
            assert staging.without_dying([0, *order, 4, 5]) == [
                seq for seq in (0, *order, 4, 5) if seq not in left
            ]
            staging.pop(10 * (gone + 1))
        assert staging.without_dying([1, 2, 3, 4]) == [1, 2, 3, 4]
    staging = staging_of(*(RecordsDeleted(1, 9, b"", b"", seqs) for seqs in listed))
    staging.pop_from(20)
    assert [seq for seq in range(6) if staging.is_dying(seq)] == [1, 2, 3]
    assert not Staging().is_dying(1), "topics without a staged delete share one empty set"


def test_a_drop_under_way_is_told_from_other_control() -> None:
    assert staging_of(append(1, 1), TopicDropped(1, "t", 5)).has_drop
    assert not staging_of(append(1, 1), CREATION).has_drop


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_what_would_be_counted(seed: int) -> None:
    """The kept totals are right for any order in which entries are added, applied and undone."""
    rng = random.Random(seed)
    staging, live = Staging(), list[Staged]()
    lsn, head, applied_floor, floor = 0, 0, 0, 0
    for _ in range(300):
        step = rng.random()
        if step < 0.5 or not live:
            lsn += rng.randint(1, 3)
            kind = rng.random()
            entry: Entry
            if kind < 0.6:
                floor = rng.choice((0, floor + 1))
                entry = append(head + 1, lsn, max(floor, applied_floor) if floor else 0)
                head += 2
            elif kind < 0.7:
                entry = HeadReserved(1, head + 100)
            elif kind < 0.8:
                entry = rng.choice((CREATION, TopicDropped(1, "t", 5)))
            else:
                entry = append(head + 1, lsn, creation=CREATION)
                head += 2
            staged = Staged(lsn, entry, None)
            staging.push(staged)
            live.append(staged)
        elif step < 0.9:
            gone = live.pop(0)
            assert staging.pop(gone.lsn) is gone
            if gone.floor:
                applied_floor = max(applied_floor, gone.floor.seq)
        else:
            since = rng.choice(live).lsn
            undone = [staged for staged in live if staged.lsn >= since]
            assert staging.pop_from(since) == undone
            live = [staged for staged in live if staged.lsn < since]
        appends = [staged for staged in live if staged.count]
        assert staging.appends() == appends
        assert staging.records == sum(staged.count for staged in appends)
        assert staging.weight == sum(staged.weight for staged in appends)
        assert staging.first_seq == (appends[0].first_seq if appends else 0)
        assert staging.last_seq == (appends[-1].last_seq if appends else 0)
        newest = [
            staged.entry.ts for staged in appends if isinstance(staged.entry, RecordsAppended)
        ]
        assert staging.last_ts == (newest[-1] if newest else 0)
        floors = [staged.floor.seq for staged in live if staged.floor]
        assert max(applied_floor, staging.floor_seq) == max([applied_floor, *floors])
        entries = [staged.entry for staged in live]
        ceilings = [e.ceiling_seq for e in entries if isinstance(e, HeadReserved)]
        assert staging.ceiling_seq == max(ceilings, default=0)
        assert staging.has_drop == any(isinstance(e, TopicDropped) for e in entries)
        assert staging.has_control == any(staged.is_control for staged in live)
