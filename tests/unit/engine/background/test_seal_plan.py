"""Which run to seal, which segments to move and to drop."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.engine.drive import Driver
from topics_server.engine.background import seal_plan
from topics_server.values.entries import RecordsAppended
from topics_server.values.limits import SEAL_BY_AGE_BYTES_MIN
from topics_server.values.model import Durability, TopicConfig
from topics_server.values.storage_types import SegmentPlan

AGE = 600_000


def plan(
    driver: Driver,
    max_records: int = 1_000,
    max_bytes: int = 1 << 30,
    synced_lsn: int | None = None,
    *,
    force: bool = False,
) -> SegmentPlan | None:
    synced = driver.lsn if synced_lsn is None else synced_lsn
    return seal_plan.plan_seal(
        driver.topic, synced, driver.now_ms, max_records, max_bytes, AGE, force
    )


def sizes(planned: SegmentPlan | None) -> list[int]:
    assert planned is not None
    assert sum(block.count for block in planned.blocks) == len(planned.dead)
    return [block.count for block in planned.blocks]


def test_a_small_young_tail_is_not_sealed() -> None:
    driver = Driver()
    assert plan(driver) is None
    driver.append(*range(999))
    assert plan(driver) is None


def test_a_run_is_sealed_by_count_and_cut_exactly() -> None:
    driver = Driver()
    driver.append(*range(1_300))
    assert sizes(plan(driver)) == [256, 256, 256, 232]
    planned = plan(driver)
    assert planned is not None
    driver.finish_seal(planned)
    assert driver.topic.log.sealed_seq == 1_000
    assert plan(driver) is None


@pytest.mark.parametrize("max_records", [1, 3, 256, 300])
def test_segments_have_at_most_the_wanted_count(max_records: int) -> None:
    driver = Driver()
    driver.append(*range(700))
    counts = []
    while (planned := plan(driver, max_records)) is not None:
        counts.append(len(planned.dead))
        driver.finish_seal(planned)
    assert counts == [max_records] * (700 // max_records)


def test_a_run_is_sealed_by_bytes() -> None:
    driver = Driver()
    driver.append(*["x" * 100] * 600)
    half = driver.topic.log.tail_bytes // 2
    assert plan(driver, max_bytes=driver.topic.log.tail_bytes + 1) is None
    assert sizes(plan(driver, max_bytes=half)) == [256]


def test_a_run_is_sealed_by_age_only_when_it_is_worth_a_file() -> None:
    driver = Driver()
    driver.append("small")
    driver.now_ms += AGE + 1
    assert not seal_plan.is_old(driver.topic, driver.now_ms, AGE)
    assert plan(driver) is None
    driver.append("x" * SEAL_BY_AGE_BYTES_MIN)
    assert seal_plan.is_old(driver.topic, driver.now_ms, AGE)
    assert sizes(plan(driver)) == [2]
    driver.now_ms -= 2
    assert not seal_plan.is_old(driver.topic, driver.now_ms, AGE)


def test_forced_sealing_takes_whatever_is_synced() -> None:
    driver = Driver()
    driver.append(1)
    assert sizes(plan(driver, force=True)) == [1]


def test_only_synced_frames_are_sealed() -> None:
    driver = Driver()
    for _ in range(5):
        driver.append(*range(256))
    assert plan(driver, 256, synced_lsn=0) is None
    assert sizes(plan(driver, 512, synced_lsn=2)) == [256, 256]
    assert plan(driver, 1_280, synced_lsn=4) is None
    assert sizes(plan(driver, 1_280, synced_lsn=4, force=True)) == [256] * 4
    assert sizes(plan(driver, 1_280)) == [256] * 5


def test_an_open_block_whose_last_frame_is_not_synced_stays_open() -> None:
    driver = Driver()
    driver.append(1)
    driver.append(2)
    assert plan(driver, 1, synced_lsn=1, force=True) is None
    assert driver.topic.log.open is not None


def test_ephemeral_topics_are_never_sealed() -> None:
    driver = Driver(TopicConfig(durability=Durability.EPHEMERAL))
    driver.append(*["x" * 500] * 700)
    driver.now_ms += 2 * AGE
    assert plan(driver, 10, force=True) is None
    assert not seal_plan.is_old(driver.topic, driver.now_ms, AGE)


def test_a_hole_ends_a_run() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.replay(RecordsAppended(1, 100, 5, 2_000, driver.body(*range(5))))
    assert plan(driver) is None
    first = plan(driver, 12)
    assert sizes(first) == [10]
    assert first is not None
    driver.finish_seal(first)
    assert plan(driver, 12) is None
    assert sizes(plan(driver, 12, force=True)) == [5]


def test_dead_slots_within_a_run_are_sealed_as_dead() -> None:
    driver = Driver()
    driver.append(*range(800))
    driver.topic.log.delete(np.array([257, 600]), np.array([512, 600]))
    planned = plan(driver, 800)
    assert planned is not None
    assert [n for n, flag in enumerate(planned.dead) if flag] == [*range(256, 512), 599]
    driver.finish_seal(planned)
    assert driver.topic.log.live_count == 800 - 257


def test_planning_changes_nothing_visible() -> None:
    driver = Driver()
    driver.append(*range(700))
    before = driver.read(0)
    assert plan(driver, 300, force=True) is not None
    after = driver.read(0)
    assert (after.next_from_seq, after.earliest_seq) == (before.next_from_seq, 1)
    assert [b for p in after.pieces for b in [p.block.data(r) for r in p.rows]] == [
        b for p in before.pieces for b in [p.block.data(r) for r in p.rows]
    ]


# -- relocation and drops ---------------------------------------------------------------------


def segmented(count: int = 5) -> Driver:
    driver = Driver()
    for _ in range(count):
        driver.append(*["x" * 10] * 10)
        driver.seal()
    return driver


def moving(driver: Driver, segments: int, size: int, cold: tuple[int, ...] = ()) -> list[int]:
    return seal_plan.plan_relocation(driver.topic, lambda _, number: number in cold, segments, size)


def test_segments_beyond_the_newest_move_oldest_first() -> None:
    driver = segmented()
    assert moving(driver, 2, 0) == [1, 2, 3]
    assert moving(driver, 2, 0, (1, 3)) == [2]
    assert moving(driver, 9, 0) == []


def test_what_is_within_the_newest_bytes_stays_too() -> None:
    driver = segmented()
    size = driver.topic.log.live_bytes // 5
    assert moving(driver, 1, 3 * size) == [1, 2]
    assert moving(driver, 4, size) == [1]
    assert moving(driver, 0, 0) == [1, 2, 3, 4, 5]


def test_a_dead_record_still_takes_its_room() -> None:
    driver = segmented()
    size = driver.topic.log.live_bytes // 5
    driver.topic.log.delete(np.array([42]), np.array([49]))
    assert moving(driver, 0, 2 * size) == [1, 2, 3]


def test_a_segment_that_goes_anyway_is_not_moved() -> None:
    driver = segmented()
    driver.delete(11)
    assert moving(driver, 2, 0) == [2, 3]


def test_a_dead_segment_is_dropped_once_its_flips_are_made() -> None:
    driver = segmented(3)
    driver.delete(15)
    assert seal_plan.plan_drops(driver.topic) == []
    driver.flip()
    assert seal_plan.plan_drops(driver.topic) == [1]
    assert driver.drop_segments() == [1]
    assert driver.topic.log.segment_ids() == (2, 3)


def test_an_evicted_segment_needs_no_flip_to_be_dropped() -> None:
    driver = segmented(3)
    driver.put(TopicConfig(cap_records=12))
    driver.expire()
    assert not driver.topic.files.pending
    assert seal_plan.plan_drops(driver.topic) == [1]
