"""One page: cursor, tombstones, filters, budgets, holes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.engine.drive import Driver, records_of, seqs_of
from topics_server.engine.answers import Gap, Page, ReadRequest
from topics_server.engine.background.recovery import finish_topic
from topics_server.engine.log.runs import SealedRun
from topics_server.engine.read import page as reading
from topics_server.engine.read.page import SealedSpan
from topics_server.values.entries import RecordsAppended
from topics_server.values.limits import BLOCK_RECORDS_MAX, HEAD_RESERVE_SEQS, PAGE_SCAN_SLOTS_MAX
from topics_server.values.model import Durability, LossReason, TagMatch, TopicConfig

ME = frozenset({"me"})
NO_NODES: frozenset[str] = frozenset()


def filled(count: int, config: TopicConfig | None = None, **columns: str) -> Driver:
    driver = Driver(config)
    driver.limits = type(driver.limits)(max_batch_records=10**6)
    driver.append(*range(count), **columns)
    return driver


def pages_of(driver: Driver, from_seq: int = 0, limit: int = 1000) -> list[Page]:
    pages = [driver.read(from_seq, limit)]
    while not pages[-1].caught_up:
        pages.append(driver.read(pages[-1].next_from_seq, limit))
        assert len(pages) < 10_000
    return pages


# -- cursor and budgets -----------------------------------------------------------------------


def test_an_empty_topic_is_caught_up_at_zero() -> None:
    page = Driver().read()
    assert page.is_empty
    assert page.caught_up
    assert (page.next_from_seq, page.head_seq, page.earliest_seq) == (0, 0, 1)


def test_a_page_has_at_most_limit_records_and_goes_on_where_it_ended() -> None:
    driver = filled(1_000)
    pages = pages_of(driver, limit=300)
    assert [len(seqs_of(page)) for page in pages] == [300, 300, 300, 100]
    assert [seq for page in pages for seq in seqs_of(page)] == list(range(1, 1_001))


def test_a_dense_page_is_slices_of_blocks() -> None:
    driver = filled(4 * BLOCK_RECORDS_MAX)
    page = driver.read(10, 1_000)
    assert all(isinstance(piece.rows, range) for piece in page.pieces)
    assert len(page.pieces) == 4


def test_the_byte_budget_ends_a_page_but_never_before_one_record() -> None:
    driver = filled(10)
    size = driver.topic.log.live_bytes // 10
    assert seqs_of(driver.read(0, 1000, 3 * size)) == [1, 2, 3]
    assert seqs_of(driver.read(0, 1000, 3 * size - 1)) == [1, 2]
    assert seqs_of(driver.read(4, 1000, 1)) == [5]
    driver.delete(2)
    driver.delete(match=None, before_seq=2)
    driver.append(11, node="me")
    assert seqs_of(driver.read(0, 1000, 2 * size, ME)) == [2, 3]
    assert seqs_of(driver.read(0, 1000, 1, ME)) == [2]


def test_the_byte_budget_counts_over_blocks() -> None:
    driver = filled(600)
    sizes = [driver.topic.log.live_between(seq, seq)[1] for seq in range(1, 601)]
    page = driver.read(0, 1000, sum(sizes[:256]))
    assert seqs_of(page) == list(range(1, 257))
    page = driver.read(0, 1000, sum(sizes[:300]))
    assert seqs_of(page) == list(range(1, 301))
    # From the middle of a block whose rows all fit.
    page = driver.read(100, 1000, sum(sizes[100:400]))
    assert seqs_of(page) == list(range(101, 401))
    page = driver.read(100, 156, sum(sizes[:256]))
    assert seqs_of(page) == list(range(101, 257))


def test_a_page_examines_a_bounded_number_of_slots() -> None:
    driver = filled(PAGE_SCAN_SLOTS_MAX + 500, node="me")
    driver.append("mine", node="you")
    page = driver.read(0, 1000, nodes=ME)
    assert (page.is_empty, page.caught_up) == (True, False)
    assert page.scanned == page.next_from_seq == PAGE_SCAN_SLOTS_MAX
    page = driver.read(page.next_from_seq, 1000, nodes=ME)
    assert seqs_of(page) == [PAGE_SCAN_SLOTS_MAX + 501]


# -- filters and deletes ----------------------------------------------------------------------


def test_own_records_are_left_out_and_advance_the_cursor() -> None:
    driver = Driver()
    for number in range(6):
        driver.append(number, node="me" if number % 2 else "you")
    page = driver.read(nodes=ME)
    assert (seqs_of(page), page.next_from_seq, page.caught_up) == ([1, 3, 5], 6, True)
    page = driver.read(nodes=frozenset({"me", "you"}))
    assert (seqs_of(page), page.next_from_seq) == ([], 6)
    page = driver.read(nodes=ME, limit=1)
    assert (seqs_of(page), page.next_from_seq) == ([1], 1)


def test_a_record_without_a_node_is_nobodys() -> None:
    driver = Driver()
    driver.append(1)
    assert seqs_of(driver.read(nodes=ME)) == [1]


def test_a_topic_may_opt_out_of_the_node_filter() -> None:
    driver = Driver(TopicConfig(dedupe_node=False))
    driver.append(1, node="me")
    assert seqs_of(driver.read(nodes=ME)) == [1]


def test_sealed_own_records_are_left_out_too() -> None:
    driver = Driver()
    for number in range(600):
        driver.append(number, node="me" if number % 3 else None)
    driver.seal()
    expected = [seq for seq in range(1, 601) if (seq - 1) % 3 == 0]
    assert [s for page in [driver.read(nodes=ME)] for s in seqs_of(page)] == expected


def test_deletes_are_silent_and_the_cursor_ends_behind_them() -> None:
    driver = filled(10)
    driver.append(11, tag="t")
    driver.delete(4)
    driver.delete(match=TagMatch("t"))
    page = driver.read()
    assert page.gap is None
    assert (seqs_of(page), page.next_from_seq, page.caught_up) == ([4, 5, 6, 7, 8, 9, 10], 11, True)
    page = driver.read(limit=7)
    assert page.caught_up, "only dead slots follow the last record"
    assert seqs_of(driver.read(limit=2)) == [4, 5]


# -- tombstones -------------------------------------------------------------------------------


def test_a_cursor_below_the_floor_is_told_up_to_the_first_live_record() -> None:
    driver = Driver(TopicConfig(cap_records=5))
    for number in range(20):
        driver.append(number)
    for cursor in range(15):
        page = driver.read(cursor)
        assert page.gap == Gap(cursor + 1, 15, LossReason.CAP, 15 - cursor)
        assert seqs_of(page) == [16, 17, 18, 19, 20]
    assert driver.read(15).gap is None
    driver.delete(19)
    assert driver.read(3).gap == Gap(4, 18, LossReason.CAP, 15)
    assert driver.read(16).gap is None
    driver.delete(21)
    page = driver.read(0)
    assert page.gap == Gap(1, 20, LossReason.CAP, 20)
    assert (page.next_from_seq, page.caught_up) == (20, True)


def test_expiry_is_told_before_anybody_collected_it() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    driver.append(1, 2)
    driver.now_ms += 60
    driver.append(3)
    driver.now_ms += 41
    page = driver.read()
    assert page.gap == Gap(1, 2, LossReason.TTL, 2)
    assert (seqs_of(page), page.earliest_seq) == ([3], 3)
    assert driver.read(1).gap == Gap(2, 2, LossReason.TTL, 1)
    assert driver.read(2).gap is None
    assert driver.expire()
    assert driver.read() == page or seqs_of(driver.read()) == [3]
    assert driver.read().gap == Gap(1, 2, LossReason.TTL, 2)
    driver.now_ms += 1000
    assert driver.read(2).gap == Gap(3, 3, LossReason.TTL, 1)


def test_a_record_lives_for_its_whole_ttl() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    driver.append(1)
    driver.now_ms += 100
    assert seqs_of(driver.read()) == [1]
    driver.now_ms += 1
    assert seqs_of(driver.read()) == []


def test_records_deleted_before_they_expired_stay_silent() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    driver.append(1, 2, 3)
    driver.delete(4)
    driver.now_ms += 200
    page = driver.read()
    assert page.gap is None
    assert (page.next_from_seq, page.earliest_seq) == (3, 4)
    driver.append(4, 5)
    driver.delete(5)
    driver.now_ms += 200
    assert driver.read().gap == Gap(1, 5, LossReason.TTL, 5)
    assert driver.read(5).gap is None


def test_both_causes_are_mixed_where_both_are_in_the_range() -> None:
    driver = Driver(TopicConfig(ttl_ms=100, cap_records=5))
    driver.append(*range(5))
    driver.append(*range(5))
    driver.now_ms += 200
    assert driver.read().gap == Gap(1, 10, LossReason.MIXED, 10)
    assert driver.read(7).gap == Gap(8, 10, LossReason.TTL, 3)
    driver.expire()
    assert driver.read().gap == Gap(1, 10, LossReason.MIXED, 10)
    assert driver.read(5).gap == Gap(6, 10, LossReason.TTL, 5)


@pytest.mark.parametrize("cursor", [3, 10, 2**63, 2**64 - 1])
def test_a_cursor_above_the_head_says_recreated_and_starts_anew(cursor: int) -> None:
    driver = Driver()
    driver.append(1, 2)
    page = driver.read(cursor)
    assert page.gap == Gap(1, 0, LossReason.RECREATED, 0)
    assert (seqs_of(page), page.next_from_seq) == ([1, 2], 2)
    assert driver.read(2).gap is None


def test_recreated_and_empty_is_told_too() -> None:
    page = Driver().read(5)
    assert page.gap is not None
    assert page.gap.reason is LossReason.RECREATED
    assert (page.next_from_seq, page.caught_up) == (0, True)


def test_recreated_above_an_evicted_floor_reaches_the_first_live_record() -> None:
    driver = Driver(TopicConfig(cap_records=2))
    driver.append(1)
    driver.append(2, 3)
    page = driver.read(9)
    assert page.gap == Gap(1, 1, LossReason.RECREATED, 1)
    assert seqs_of(page) == [2, 3]


# -- holes ------------------------------------------------------------------------------------


def holed() -> Driver:
    """Records 1..3, a hole 4..9, records 10..11."""
    driver = filled(3)
    driver.replay(RecordsAppended(1, 10, 2, 2_000, driver.body("a", "b")))
    return driver


def test_a_page_never_spans_a_hole() -> None:
    driver = holed()
    page = driver.read()
    assert (seqs_of(page), page.next_from_seq, page.gap, page.caught_up) == (
        [1, 2, 3],
        3,
        None,
        False,
    )
    page = driver.read(3)
    assert page.gap == Gap(4, 9, LossReason.DAMAGED, 6)
    assert seqs_of(page) == [10, 11]
    assert driver.read(6).gap == Gap(7, 9, LossReason.DAMAGED, 3)
    assert driver.read(9).gap is None


def test_a_floor_below_a_hole_and_the_hole_are_two_tombstones() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    for number in range(5):
        driver.append(number)
    driver.replay(RecordsAppended(1, 10, 1, 2_000, driver.body("a")))
    driver.delete(6)
    pages = pages_of(driver)
    gaps = [page.gap for page in pages if page.gap]
    assert gaps == [Gap(1, 5, LossReason.CAP, 5), Gap(6, 9, LossReason.DAMAGED, 4)]
    assert [seq for page in pages for seq in seqs_of(page)] == [10]


def test_a_hole_that_sinks_below_the_floor_is_part_of_that_loss() -> None:
    driver = holed()
    driver.put(TopicConfig(cap_records=1))
    driver.expire()
    page = driver.read()
    assert page.gap == Gap(1, 10, LossReason.CAP, 10)
    assert not driver.topic.log.holes


def test_lost_ephemeral_records_are_told_as_their_own_range() -> None:
    driver = filled(3, TopicConfig(durability=Durability.EPHEMERAL))
    finish_topic(driver.topic, clean_stop=False, same_boot=True)
    driver.append("new")
    page = driver.read()
    assert page.gap == Gap(1, HEAD_RESERVE_SEQS, LossReason.RESTART, HEAD_RESERVE_SEQS)
    assert seqs_of(page) == [HEAD_RESERVE_SEQS + 1]


@pytest.mark.parametrize(("first_row", "last_row"), [(0, 0), (100, 100), (250, 300), (599, 599)])
def test_damage_takes_out_its_range_only(first_row: int, last_row: int) -> None:
    driver = filled(600)
    driver.seal()
    driver.append("more")
    assert driver.topic.note_damage(1, first_row, last_row) == last_row - first_row + 1
    pages = pages_of(driver)
    gaps = [page.gap for page in pages if page.gap]
    missed = last_row - first_row + 1
    assert gaps == [Gap(first_row + 1, last_row + 1, LossReason.DAMAGED, missed)]
    found = [seq for page in pages for seq in seqs_of(page)]
    assert found == [seq for seq in range(1, 602) if not first_row < seq <= last_row + 1]
    for page in [driver.plan(ReadRequest(seq, 50, 1 << 20)) for seq in range(0, 600, 25)]:
        for fetch in page.fetches():
            assert fetch.end_row <= first_row or fetch.first_row > last_row
    assert driver.topic.log.damaged_records == missed
    assert driver.topic.note_damage(1, first_row, last_row) == 0


# -- sealed rows ------------------------------------------------------------------------------


def test_sealed_rows_are_fetched_in_aligned_groups() -> None:
    driver = filled(700)
    driver.seal()
    plan = driver.plan(ReadRequest(300, 300, 1 << 20))
    assert [(f.first_row, f.end_row) for f in plan.fetches()] == [(256, 512), (512, 700)]
    assert seqs_of(driver.read(300, 300)) == list(range(301, 601))


def test_a_page_goes_from_sealed_to_resident_rows() -> None:
    driver = filled(300)
    driver.seal()
    driver.append(*range(10))
    page = driver.read(290, 1000)
    assert seqs_of(page) == list(range(291, 311))
    assert [record[0] for _, record in records_of(page)][-1] == b"9"


def test_dead_groups_are_not_fetched() -> None:
    driver = filled(1_024)
    driver.seal()
    driver.delete(600)
    driver.append("x")
    plan = driver.plan(ReadRequest(0, 1000, 1 << 20))
    assert [fetch.first_row for fetch in plan.fetches()] == [512, 768]
    assert seqs_of(driver.read(0)) == list(range(600, 1_026))


def test_a_page_of_a_sealed_log_ends_at_the_limit_within_a_group() -> None:
    driver = filled(600)
    driver.seal()
    pages = pages_of(driver, limit=37)
    assert [seq for page in pages for seq in seqs_of(page)] == list(range(1, 601))


@pytest.mark.parametrize("limit", [1, 37, 256, 300])
def test_the_byte_budget_counts_sealed_rows_of_any_size(limit: int) -> None:
    driver = Driver()
    for seq in range(1, 601):
        driver.append("x" * (seq * 7919 % 311))
    driver.seal()
    sizes = [driver.topic.log.live_between(seq, seq)[1] for seq in range(1, 601)]
    rows = sizes[100 : 100 + limit]
    for budget in (1, sum(rows) - 1, sum(rows), limit * max(sizes) - 1, limit * max(sizes)):
        fitting = [each for each in range(1, len(rows) + 1) if sum(rows[:each]) <= budget]
        expected = list(range(101, 101 + max(fitting, default=1)))
        assert seqs_of(driver.read(100, limit, budget)) == expected


def test_the_byte_budget_counts_over_dead_rows_of_the_last_segment() -> None:
    driver = filled(700)
    driver.seal()
    sizes = [driver.topic.log.live_between(seq, seq)[1] for seq in range(1, 701)]
    driver.topic.log.delete(np.array([300]), np.array([300]))
    page = driver.read(0, 1000, sum(sizes[:400]))
    assert seqs_of(page) == [seq for seq in range(1, 402) if seq != 300]


def test_sealed_rows_that_surely_fit_are_not_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = filled(700)
    driver.seal()
    run = driver.topic.log.runs[0]
    budget = 100 * max(map(run.row_bytes, range(700)))
    assert budget < run.live_bytes
    weighed: list[int] = []

    def weigh(run: SealedRun, first_row: int, end_row: int) -> int:
        weighed.append(first_row)
        return 0

    monkeypatch.setattr(SealedRun, "live_bytes_between", weigh)
    assert seqs_of(driver.read(300, 100, budget)) == list(range(301, 401))
    assert not weighed
    driver.read(300, 100, budget - 1)
    assert weighed


def span_of(
    driver: Driver,
    from_seq: int,
    limit: int,
    max_bytes: int,
    nodes: frozenset[str] = NO_NODES,
) -> SealedSpan | None:
    """The span of a page; its plan is the same as a plan of groups."""
    asked = ReadRequest(from_seq, limit, max_bytes, nodes=nodes)
    plan = reading.plan_page(driver.topic, asked, driver.now_ms, may_span=True)
    assert plan.grouped() == driver.plan(asked)
    assert bool(plan.pieces) != (plan.span is not None)
    return plan.span


def test_a_page_within_a_segment_is_a_span() -> None:
    driver = filled(700, TopicConfig(dedupe_node=True))
    driver.seal()
    driver.append(*range(600))
    driver.seal()
    everything = 1 << 20
    assert span_of(driver, 0, 300, everything) == SealedSpan(1, 0, 300, 0, 700)
    assert span_of(driver, 700, 512, everything) == SealedSpan(2, 0, 512, 0, 600)
    size = driver.topic.log.live_between(1, 1)[1]
    for from_seq in (0, 1, 255, 256, 399, 700, 1_000):
        for limit in (1, 256, 257, 300):
            span = span_of(driver, from_seq, limit, everything)
            assert span is not None
            row = from_seq % 700
            first = row - row % 256
            assert span.groups == range(first, min(-(-(row + limit) // 256) * 256, span.high))
    # The budget ends a page too; the end of a segment does not.
    assert span_of(driver, 0, 300, 10 * size) is not None
    assert span_of(driver, 600, 300, everything) is None
    assert span_of(driver, 1_200, 300, everything) is None
    assert span_of(driver, 0, 300, everything, nodes=ME) is None
    driver.topic.log.delete(np.array([200]), np.array([200]))
    assert span_of(driver, 0, 300, everything) is None
    assert span_of(driver, 200, 300, everything) is not None


def test_the_page_of_an_open_block_is_made_once() -> None:
    driver = filled(10)
    first, second = driver.read(5), driver.read(5)
    assert first.pieces[0].block is second.pieces[0].block
    driver.append("x")
    assert seqs_of(driver.read(5)) == [6, 7, 8, 9, 10, 11]


def test_complete_wants_every_fetch() -> None:
    driver = filled(10)
    driver.seal()
    plan = driver.plan(ReadRequest(0, 10, 1 << 20))
    with pytest.raises(KeyError):
        reading.complete(plan, {})


def test_a_floor_that_reaches_a_hole_leaves_the_hole_its_reason() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    driver.append(*range(3))
    driver.replay(RecordsAppended(1, 10, 1, 2_000, driver.body("a")))
    driver.append(11)
    driver.append(12)
    gaps = [page.gap for page in pages_of(driver) if page.gap]
    assert gaps == [Gap(1, 3, LossReason.CAP, 3), Gap(4, 9, LossReason.DAMAGED, 6)]


def test_expiry_above_a_hole_is_told_to_a_cursor_behind_the_hole() -> None:
    driver = holed()
    driver.put(TopicConfig(ttl_ms=100))
    driver.now_ms += 10_000
    assert driver.read(9).gap == Gap(10, 11, LossReason.TTL, 2)


def test_the_dead_end_of_a_segment_is_stepped_over() -> None:
    driver = filled(600)
    driver.seal()
    driver.append("x")
    driver.topic.log.delete(np.array([580]), np.array([600]))
    assert seqs_of(driver.read(500)) == [*range(501, 580), 601]
    assert seqs_of(driver.read(590)) == [601]
