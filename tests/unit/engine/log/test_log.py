"""Slots: runs, head, floor, holes, deleted records and released ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.drive import Driver, FakeIndex, seqs_of
from topics_server.engine.log.log import Log
from topics_server.engine.log.runs import OpenBlock, SealedRun, TailBlock
from topics_server.engine.topic.deletion import columns_of, seq_runs
from topics_server.values.entries import Floor
from topics_server.values.limits import BLOCK_BYTES_MAX, BLOCK_RECORDS_MAX
from topics_server.values.model import Hole, LossReason

CAP, DAMAGED = LossReason.CAP, LossReason.DAMAGED


def kinds(log: Log) -> list[tuple[str, int]]:
    return [(type(run).__name__, run.count) for run in log.runs]


def test_full_blocks_are_frozen_and_the_rest_stays_open() -> None:
    driver = Driver()
    driver.append(*range(40))
    driver.append(*range(60))
    assert kinds(driver.topic.log) == [("OpenBlock", 100)]
    driver.append(*range(500))
    log = driver.topic.log
    assert kinds(log) == [("TailBlock", 100), ("TailBlock", 256), ("OpenBlock", 244)]
    driver.append(*range(12))
    assert kinds(log) == [("TailBlock", 100), ("TailBlock", 256), ("TailBlock", 256)]
    assert log.open is None
    assert seqs_of(driver.read(0, 1000)) == list(range(1, 613))


def test_a_call_that_fits_a_block_is_not_torn_in_two() -> None:
    driver = Driver()
    driver.append(*range(100), tag="t")
    driver.append(*range(100), node="nn")
    driver.append(*range(100))
    log = driver.topic.log
    assert kinds(log) == [("TailBlock", 200), ("OpenBlock", 100)]
    driver.append(*range(156))
    assert kinds(log) == [("TailBlock", 200), ("TailBlock", 256)]
    driver.append(*range(300))
    assert kinds(log)[2:] == [("TailBlock", 256), ("OpenBlock", 44)]
    log.freeze_open()
    assert seqs_of(driver.read(0, 1000)) == list(range(1, 757))
    for run in log.tail():
        rows = range(run.count)
        assert run.live_bytes == sum(map(run.row_bytes, rows))
        tags, nodes = run.block.tags, run.block.nodes
        assert run.text_bytes == sum(len(tags[row] or "") + len(nodes[row] or "") for row in rows)


def test_a_block_is_frozen_by_bytes_too() -> None:
    driver = Driver()
    driver.limits = type(driver.limits)(max_record_bytes=1 << 30)
    big = "x" * (BLOCK_BYTES_MAX // 3)
    driver.append(*[big] * 7)
    sizes = [count for _, count in kinds(driver.topic.log)]
    assert sum(sizes) == 7
    for run in driver.topic.log.tail():
        assert len(run.block.body) <= BLOCK_BYTES_MAX
    driver.append(big * 4)
    assert driver.topic.log.runs[-1].count == 1
    assert len(driver.read(0, 1000, 1 << 30).pieces) == len(driver.topic.log.runs)


def test_nothing_lives_in_a_fresh_log() -> None:
    log = Log()
    assert (log.base_seq, log.sealed_seq, log.next_live(1), log.last_live_below(9)) == (1, 0, 1, 0)
    assert log.first_seq_since(0) == 1
    assert log.segment_ids() == ()
    log.freeze_open()
    log.jump_head(0, DAMAGED)
    assert not log.holes


def test_looking_up_live_seqs_over_all_kinds_of_runs() -> None:
    driver = Driver()
    driver.append(*range(300))
    driver.seal()
    driver.append(*range(300))
    log = driver.topic.log
    assert kinds(log) == [("SealedRun", 300), ("TailBlock", 256), ("OpenBlock", 44)]
    assert (log.base_seq, log.sealed_seq) == (1, 300)
    driver.delete(10)
    log.delete(np.array([295, 590]), np.array([310, 700]))
    assert (log.earliest_seq, log.next_live(1), log.next_live(295)) == (10, 10, 311)
    assert log.next_live(590) == log.next_live(601) == 601
    assert (log.last_live_below(311), log.last_live_below(10_000)) == (294, 589)
    assert (log.last_live_below(11), log.last_live_below(10)) == (10, 0)
    assert log.live_between(290, 315)[0] == 10
    assert log.live_between(1, 10_000) == (log.live_count, log.live_bytes)
    assert log.live_between(601, 700) == (0, 0)


def test_dead_runs_are_stepped_over() -> None:
    driver = Driver()
    for _ in range(3):
        driver.append(*range(256))
        driver.seal()
    log = driver.topic.log
    log.delete(np.array([257]), np.array([512]))
    assert log.live_between(1, 768) == (512, log.live_bytes)
    assert log.delete(np.array([200]), np.array([600]))[0] == 57 + 88
    assert log.next_live(200) == 601
    assert log.last_live_below(601) == 199


def test_walking_over_live_records_by_count_and_bytes() -> None:
    driver = Driver()
    driver.append(*[0] * 300)
    driver.seal()
    driver.append(*[0] * 300)
    log = driver.topic.log
    size = log.live_bytes // 600
    assert log.advance_live(1, 5, 0)[:2] == (6, 5)
    assert log.advance_live(1, 0, 5 * size) == (6, 5, 5 * size)
    assert log.advance_live(1, 0, 5 * size + 1) == (7, 6, 6 * size)
    assert log.advance_live(1, 300, 0)[:2] == (301, 300)
    assert log.advance_live(50, 300, 0)[:2] == (350, 300)
    assert log.advance_live(1, 1_000, 0)[:2] == (601, 600)
    driver.delete(301)
    assert log.advance_live(1, 5, 0)[:2] == (306, 5)
    log.delete(np.array([304]), np.array([320]))
    assert log.advance_live(1, 3, 0)[:2] == (304, 3)
    assert log.advance_live(1, 4, 0)[:2] == (322, 4)
    log.delete(np.array([590]), np.array([600]))
    assert log.advance_live(1, 1_000, 0)[0] == 590


def naive_walk(log: Log, seq: int, count: int, weight: int) -> tuple[int, int, int]:
    """The same as `advance_live`, but one record at a time."""
    walked = walked_bytes = 0
    behind = seq
    for run in log.runs:
        for row in range(run.count):
            if run.first_seq + row < seq or run.dead[row]:
                continue
            if walked >= count and walked_bytes >= weight:
                return behind, walked, walked_bytes
            walked += 1
            walked_bytes += run.row_bytes(row)
            behind = run.first_seq + row + 1
    return behind, walked, walked_bytes


@given(st.data())
def test_walking_far_ends_where_walking_a_record_at_a_time_ends(data: st.DataObject) -> None:
    driver = Driver()
    driver.append(*["x" * (number % 7) for number in range(300)])
    driver.seal()
    driver.append(*["y" * (number % 5) for number in range(300)])
    log = driver.topic.log
    for _ in range(data.draw(st.integers(0, 6))):
        first = data.draw(st.integers(1, 600))
        log.delete(np.array([first]), np.array([first + data.draw(st.integers(0, 90))]))
    seq = data.draw(st.integers(log.earliest_seq, 600)) if log.live_count else 600
    count, weight = data.draw(st.integers(0, 650)), data.draw(st.integers(0, log.live_bytes + 9))
    expected = naive_walk(log, seq, count, weight)
    assert log.advance_live(seq, count, weight)[:2] == expected[:2]
    if weight:
        assert log.advance_live(seq, count, weight) == expected


def test_walking_far_into_a_run_takes_few_rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.append(*[0] * 5_000)
    driver.seal()
    log = driver.topic.log
    size = log.live_bytes // 5_000
    taken: list[int] = []
    row_bytes = SealedRun.row_bytes

    def counted(run: SealedRun, row: int) -> int:
        taken.append(row)
        return row_bytes(run, row)

    monkeypatch.setattr(SealedRun, "row_bytes", counted)
    assert log.advance_live(1, 0, 4_000 * size) == (4_001, 4_000, 4_000 * size)
    assert len(taken) < 50


@given(st.data())
def test_a_delete_of_many_runs_hits_exactly_their_seqs(data: st.DataObject) -> None:
    driver = Driver()
    driver.append(*[0] * 300)
    driver.seal()
    driver.append(*[0] * 700)
    log = driver.topic.log
    log.delete(np.array([40, 350, 990]), np.array([60, 380, 1_000]))
    wanted = sorted(data.draw(st.sets(st.integers(1, 1_000), min_size=1, max_size=300)))
    if data.draw(st.booleans()):
        wanted = sorted({*wanted, *range(257, 820)})
    before = {seq for seq in range(1, 1_001) if log.live_between(seq, seq)[0]}
    firsts, lasts = columns_of(*seq_runs(np.array(wanted)))
    deleted, flips = log.delete(firsts, lasts)
    assert deleted == len(before & set(wanted))
    after = {seq for seq in range(1, 1_001) if log.live_between(seq, seq)[0]}
    assert after == before - set(wanted)
    assert {seq for seq in wanted if seq <= 300 and seq in before} == {
        row + 1 for rows in flips.values() for row in rows
    }
    assert log.live_count == sum(run.live_count for run in log.runs) == len(after)
    assert log.tail_bytes == sum(run.live_bytes for run in log.runs[log.sealed_count :])


def test_a_floor_loses_everything_below_and_only_rises() -> None:
    driver = Driver()
    driver.append(*range(600))
    log = driver.topic.log
    log.raise_floor(Floor(300, CAP))
    assert (log.evict_floor, log.earliest_seq, log.live_count) == (300, 300, 301)
    assert kinds(log) == [("TailBlock", 256), ("OpenBlock", 88)]
    log.raise_floor(Floor(200, LossReason.TTL))
    assert log.evict_floor == 300
    assert log.losses.ranges == [Hole(1, 299, CAP)]
    log.raise_floor(Floor(601, CAP))
    assert (log.runs, log.earliest_seq, log.live_bytes, log.tail_bytes) == ([], 601, 0, 0)
    driver.append(1)
    assert driver.topic.log.head_seq == 601


def test_a_delete_marks_live_slots_and_counts_them() -> None:
    driver = Driver()
    driver.append(*range(600))
    log = driver.topic.log
    firsts, lasts = np.array([2, 200, 400, 598]), np.array([3, 300, 400, 700])
    deleted, flips = log.delete(firsts, lasts)
    assert (deleted, flips) == (2 + 101 + 1 + 3, {})
    assert log.delete(firsts, lasts) == (0, {})
    assert log.delete(np.array([], np.int64), np.array([], np.int64)) == (0, {})
    gone = {2, 3, *range(200, 301), 400, *range(598, 601)}
    assert seqs_of(driver.read(0)) == [seq for seq in range(1, 601) if seq not in gone]


def test_the_dead_front_of_the_tail_is_popped_and_a_dead_middle_is_a_husk() -> None:
    driver = Driver()
    driver.append(*range(800))
    log = driver.topic.log
    log.delete(np.array([257]), np.array([512]))
    drop_payload = log.runs[1]
    assert isinstance(drop_payload, TailBlock)
    assert drop_payload.block.body == b""
    assert drop_payload.count == 256
    log.delete(np.array([1]), np.array([256]))
    assert kinds(log) == [("TailBlock", 256), ("OpenBlock", 32)]
    assert log.tail_count == 288
    assert seqs_of(driver.read(0)) == list(range(513, 801))


def test_an_open_block_without_a_live_record_is_let_go() -> None:
    driver = Driver()
    driver.append(1, 2)
    driver.delete(3)
    assert driver.topic.log.open is None
    driver.append(3)
    assert seqs_of(driver.read(0)) == [3]


def test_a_dead_open_block_becomes_a_husk_when_frozen() -> None:
    driver = Driver()
    driver.append(*range(250))
    driver.append(*range(100))
    log = driver.topic.log
    log.delete(np.array([251]), np.array([350]))
    driver.append(*range(200))
    middle = log.runs[1]
    assert isinstance(middle, TailBlock)
    assert (middle.count, middle.live_count, middle.block.body) == (100, 0, b"")
    assert len(seqs_of(driver.read(0))) == 450


def test_an_open_block_with_dead_rows_is_frozen_with_them() -> None:
    driver = Driver()
    driver.append(*range(100), tag="t")
    driver.append(*range(100), tag="u")
    log = driver.topic.log
    log.delete(np.array([20]), np.array([110]))
    driver.append(*range(100))
    first = log.runs[0]
    assert isinstance(first, TailBlock)
    assert (first.count, first.live_count) == (200, 109)
    rows = [row for row in range(200) if not first.dead[row]]
    assert first.live_bytes == sum(map(first.row_bytes, rows))
    assert len(seqs_of(driver.read(0))) == 209


# -- sealing ----------------------------------------------------------------------------------


def test_what_died_while_a_segment_was_written_is_flipped() -> None:
    driver = Driver()
    driver.append(*range(600))
    driver.delete(3)
    plan = driver.plan_seal()
    assert plan is not None
    log = driver.topic.log
    log.delete(np.array([10, 300]), np.array([11, 300]))
    flips = driver.topic.mark_sealed(plan, FakeIndex(plan))
    assert {key: list(rows) for key, rows in flips.items()} == {1: [9, 10, 299]}
    assert flips == driver.topic.files.pending
    assert (log.live_count, log.tail_count, log.tail_bytes) == (595, 0, 0)


def test_what_sank_below_the_floor_meanwhile_needs_no_flip() -> None:
    driver = Driver()
    driver.append(*range(600))
    plan = driver.plan_seal()
    assert plan is not None
    driver.topic.log.raise_floor(Floor(300, CAP))
    assert driver.topic.mark_sealed(plan, FakeIndex(plan)) == {}
    assert driver.topic.log.live_count == 301
    assert driver.topic.log.runs[0].count == 600


def test_a_run_that_died_as_a_whole_while_it_was_written_is_a_dead_segment() -> None:
    driver = Driver()
    driver.append(*range(600))
    plan = driver.plan_seal()
    assert plan is not None
    driver.delete(601)
    driver.append("next")
    index = FakeIndex(plan)
    driver.indexes[1] = index
    driver.topic.mark_sealed(plan, index)
    log = driver.topic.log
    assert [type(run) for run in log.runs] == [SealedRun, OpenBlock]
    assert log.dead_segments() == [1]
    assert seqs_of(driver.read(0)) == [601]


def test_a_forgotten_segment_leaves_a_silent_gap() -> None:
    driver = Driver()
    for _ in range(3):
        driver.append(*range(256))
        driver.seal()
    log = driver.topic.log
    log.delete(np.array([257]), np.array([512]))
    with pytest.raises(AssertionError):
        log.forget_segments([1])
    log.forget_segments([2])
    assert log.segment_ids() == (1, 3)
    assert (log.sealed_count, log.next_live(257), log.last_live_below(513)) == (2, 513, 256)
    page = driver.read(256)
    assert page.gap is None
    assert seqs_of(page)[0] == 513


def test_segment_ids_are_never_used_again() -> None:
    driver = Driver()
    for expected in (1, 2, 3):
        driver.append(1)
        plan = driver.plan_seal()
        assert plan is not None
        assert plan.segment_id == expected
        driver.finish_seal(plan)
        driver.delete(100)
        driver.flip()
        assert driver.drop_segments() == [expected]
    assert driver.topic.log.next_segment_id == 4


# -- holes ------------------------------------------------------------------------------------


def test_a_jumped_head_ends_the_open_block_and_leaves_a_hole() -> None:
    driver = Driver()
    driver.append(1, 2)
    log = driver.topic.log
    log.jump_head(10, DAMAGED)
    driver.append(3)
    assert kinds(log) == [("TailBlock", 2), ("OpenBlock", 1)]
    assert log.holes == [Hole(3, 10, DAMAGED)]
    hole = log.hole_at_or_after(5)
    assert hole == Hole(3, 10, DAMAGED)
    assert log.hole_at_or_after(11) is None
    log.jump_head(5, DAMAGED)
    assert log.head_seq == 11


def test_an_empty_log_whose_head_jumps_begins_behind_the_hole() -> None:
    log = Log()
    log.jump_head(10, DAMAGED)
    assert (log.earliest_seq, log.next_live(1), log.base_seq) == (11, 11, 11)


def test_losing_all_leaves_one_hole_over_every_seq() -> None:
    driver = Driver()
    driver.append(*range(300))
    driver.seal()
    driver.append(*range(300))
    log = driver.topic.log
    log.lose_all(LossReason.RESTART)
    assert (log.live_count, log.live_bytes, log.earliest_seq) == (0, 0, 601)
    assert log.holes == [Hole(1, 600, LossReason.RESTART)]
    assert kinds(log) == [("SealedRun", 300)]
    empty = Log()
    empty.lose_all(LossReason.RESTART)
    assert not empty.holes


def test_the_block_size_is_what_the_tests_assume() -> None:
    assert BLOCK_RECORDS_MAX == 256


def test_damage_is_told_of_what_was_neither_evicted_nor_deleted() -> None:
    """Otherwise the hole remains after its segment is dropped, and no file can ever close it."""
    driver = Driver()
    driver.append(*range(30))
    driver.seal()
    log = driver.topic.log
    log.raise_floor(Floor(6, CAP))
    driver.delete(before_seq=9)
    assert log.note_damage(1, 0, 4) == 0
    assert log.note_damage(1, 0, 7) == 0
    assert log.holes == []
    assert log.note_damage(1, 0, 9) == 2
    assert log.holes == [Hole(9, 10, DAMAGED)]
    driver = Driver()
    driver.append(*range(30))
    driver.seal()
    log = driver.topic.log
    log.raise_floor(Floor(31, CAP))
    assert log.note_damage(1, 0, 29) == 0
    assert log.holes == []
    assert log.dead_segments() == [1]


def mixed_log() -> Log:
    """A log with a sealed run, a frozen block and an open one, with tags and nodes."""
    driver = Driver()
    driver.append(*range(30), tag="tag")
    driver.seal()
    driver.append(*range(20), node="node")
    driver.topic.log.freeze_open()
    driver.append("a", "bb", "ccc", tag="t")
    driver.append(*range(7))
    return driver.topic.log


@pytest.mark.parametrize(
    "seqs",
    [[1], [51], [50, 51], [3, 4, 31, 49, 53, 60], list(range(1, 61)), list(range(31, 51))],
)
def test_seqs_as_a_list_die_like_seqs_as_arrays(seqs: list[int]) -> None:
    by_list, by_array = mixed_log(), mixed_log()
    for done in (seqs[:2], seqs):  # in the second round some records are already dead
        column = np.array(done, np.int64)
        assert by_list.delete_seqs(done) == by_array.delete(column, column)
        assert kinds(by_list) == kinds(by_array)
        for one, other in zip(by_list.runs, by_array.runs, strict=True):
            assert (one.dead, one.live_count, one.live_bytes) == (
                other.dead,
                other.live_count,
                other.live_bytes,
            )
        for name in ("earliest_seq", "live_count", "live_bytes", "tail_count", "tail_bytes"):
            assert getattr(by_list, name) == getattr(by_array, name), name


@given(st.sets(st.integers(1, 60)), st.integers(1, 61), st.integers(1, 70))
def test_live_seqs_are_those_that_a_search_finds_one_by_one(
    dead: set[int], seq: int, limit: int
) -> None:
    log = mixed_log()
    if dead:
        log.delete_seqs(sorted(dead))
    live = [each for each in range(seq, 61) if log.next_live(each) == each]
    assert live == [each for each in range(seq, 61) if each not in dead]
    assert log.live_from(seq, limit) == live[:limit]


def test_live_seqs_are_listed_from_a_seq_on_up_to_a_number() -> None:
    log = mixed_log()
    log.delete_seqs([2, 30, 31, 51])
    assert log.live_from(1, 3) == [1, 3, 4]
    assert log.live_from(29, 3) == [29, 32, 33]
    assert log.live_from(49, 9) == [49, 50, *range(52, 59)]
    assert log.live_from(60, 9) == [60]
    assert log.live_from(61, 9) == []
