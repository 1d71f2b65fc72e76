"""A topic is captured as a part of a snapshot, and restored on its segments."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.unit.engine.drive import Driver, FakeIndex, records_of, seqs_of
from topics_server.engine.background import seal_plan
from topics_server.engine.background.capture import capture, prepare, restore
from topics_server.engine.background.recovery import finish_topic
from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.writes.apply import apply_entry
from topics_server.engine.topic.writes.delete import decide_delete
from topics_server.values.entries import RecordsAppended, RecordsDeleted
from topics_server.values.model import Durability, Hole, LossReason, TagMatch, TopicConfig
from topics_server.values.storage_types import TOPIC_PARTS


def restored(driver: Driver, part: bytes | None = None) -> Driver:
    """The driver with its topic captured and restored on its segments."""
    sealed = sorted(driver.indexes.values(), key=lambda index: index.first_seq)
    driver.topic = restore(
        TOPIC_PARTS.decode(capture(driver.topic) if part is None else part), sealed
    )
    return driver


def test_everything_comes_back() -> None:
    driver = Driver(TopicConfig(cap_records=500, ttl_ms=10**6))
    driver.append(*range(300), key="k")
    driver.append(*range(300), tag="t", node="n")
    driver.delete(120)
    driver.topic.last_read_ts = 77
    before, page = capture(driver.topic), records_of(driver.read(0))
    driver = restored(driver)
    topic = driver.topic
    assert capture(topic) == before
    assert records_of(driver.read(0)) == page
    assert (topic.name, topic.epoch, topic.applied_lsn, topic.last_read_ts) == ("t", 1, 3, 77)
    assert (topic.log.evict_floor, topic.log.last_ts) == (101, 1_000)
    assert topic.dedupe.find("k", 10, 1_005) == Duplicate(1, 300)
    assert driver.read(0).gap is not None
    entry = driver.append("next")
    assert isinstance(entry, RecordsAppended)
    assert entry.first_seq == 601


def test_an_empty_topic_comes_back_with_its_head() -> None:
    driver = Driver()
    driver.append(1, 2, 3)
    driver.delete(4)
    driver = restored(driver)
    assert (driver.topic.log.head_seq, driver.topic.log.earliest_seq) == (3, 4)
    assert driver.read(0).next_from_seq == 3


def test_what_was_sealed_since_the_capture_is_not_taken_twice() -> None:
    driver = Driver()
    driver.append(*range(600))
    part = capture(driver.topic)
    driver.seal(300)
    driver = restored(driver, part)
    assert [run.count for run in driver.topic.log.runs] == [300, 212, 88]
    assert seqs_of(driver.read(0)) == list(range(1, 601))
    driver.seal()
    driver = restored(driver, part)
    assert driver.topic.log.tail_count == 0
    assert seqs_of(driver.read(0)) == list(range(1, 601))


@pytest.mark.parametrize("before_seq", [4, 257, 290, 301])
def test_what_died_while_its_segment_was_written_stays_dead(before_seq: int) -> None:
    """The order is plan, delete, capture, publish, kill: neither a flag nor replay would show the
    delete.
    """
    driver = Driver()
    for _ in range(3):
        driver.append(*range(100))
    driver.append(*range(100), tag="t")
    driver.delete(2)
    plan = driver.plan_seal(300)
    assert plan is not None
    driver.delete(before_seq)
    driver.delete(match=TagMatch("t"))
    driver.append("later")
    part = capture(driver.topic)
    driver.indexes[plan.segment_id] = index = FakeIndex(plan)
    assert index.disk_flags.count(1) == 1
    driver = restored(driver, part)
    assert seqs_of(driver.read(0)) == [*range(before_seq, 301), 401]
    sealed = index.last_seq - index.first_seq + 1
    assert driver.topic.log.live_count == len(range(before_seq, 301)) + 1
    pending = list(driver.topic.files.pending.get(plan.segment_id, ()))
    assert sorted(pending) == [
        row for row in range(1, sealed) if row + 1 < before_seq or row >= 300
    ]


def test_what_was_appended_after_the_capture_lives_in_its_segment() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.delete(3)
    part = capture(driver.topic)
    driver.append(*range(10))
    assert driver.seal()
    driver = restored(driver, part)
    assert seqs_of(driver.read(0)) == list(range(3, 21))
    assert not driver.topic.files.pending


def test_a_flip_that_is_not_on_disk_yet_comes_from_the_part() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.seal()
    driver.delete(4)
    assert not any(driver.indexes[1].disk_flags)
    driver = restored(driver)
    assert seqs_of(driver.read(0)) == [4, 5, 6, 7, 8, 9, 10]
    assert {key: list(rows) for key, rows in driver.topic.files.pending.items()} == {1: [0, 1, 2]}


def test_a_flip_on_disk_needs_no_part() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.seal()
    part = capture(driver.topic)
    driver.delete(4)
    driver.flip()
    driver = restored(driver, part)
    assert seqs_of(driver.read(0)) == [4, 5, 6, 7, 8, 9, 10]


def test_a_flip_of_a_segment_that_is_gone_is_forgotten() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.seal()
    driver.append(1)
    driver.delete(11)
    part = capture(driver.topic)
    driver.flip()
    driver.drop_segments()
    driver = restored(driver, part)
    assert not driver.topic.files.pending
    assert seqs_of(driver.read(0)) == [11]
    assert driver.topic.log.next_segment_id == 2


def test_replay_meets_a_captured_part_where_it_left_off() -> None:
    driver = Driver()
    driver.append(*range(5))
    part = capture(driver.topic)
    later = driver.append(6, 7, key="k")
    assert isinstance(later, RecordsAppended)
    delete = decide_delete(driver.topic, 3, None, {}, driver.now_ms)
    assert isinstance(delete, RecordsDeleted)
    driver.commit(delete)
    driver.seal()
    expected = seqs_of(driver.read(0))
    driver = restored(driver, part)
    for lsn, entry in ((1, later), (2, later), (3, delete)):
        apply_entry(driver.topic, lsn, entry)
    assert seqs_of(driver.read(0)) == expected
    assert driver.topic.log.head_seq == 7
    assert driver.topic.dedupe.find("k", 100, 1_000) == Duplicate(6, 2)


def test_an_ephemeral_topic_comes_back_as_a_hole() -> None:
    driver = Driver(TopicConfig(durability=Durability.EPHEMERAL))
    driver.append(1, 2, 3, key="k")
    part = capture(driver.topic)
    assert b'"data"' not in part
    driver = restored(driver, part)
    log = driver.topic.log
    assert (log.head_seq, log.live_count) == (3, 0)
    assert log.holes == [Hole(1, 3, LossReason.RESTART)]
    assert isinstance(driver.append(1, key="k"), Duplicate)
    assert not finish_topic(driver.topic, clean_stop=True, same_boot=True)


def test_an_ephemeral_topic_loses_the_segments_of_a_former_class() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.seal()
    driver.put(TopicConfig(durability=Durability.EPHEMERAL))
    driver = restored(driver)
    assert driver.topic.log.dead_segments() == [1]
    assert driver.read(0).gap is not None


def test_holes_losses_and_damage_come_back() -> None:
    driver = Driver(TopicConfig(cap_records=500))
    driver.append(*range(600))
    driver.seal()
    driver.topic.note_damage(1, 200, 210)
    driver.indexes[1].lost_rows = set(range(200, 211))
    driver.replay(RecordsAppended(1, 700, 1, 2_000, driver.body(1)))
    before = driver.topic.log
    driver = restored(driver)
    log = driver.topic.log
    assert log.holes == before.holes
    assert log.losses.ranges == before.losses.ranges == [Hole(1, 100, LossReason.CAP)]
    assert (log.live_count, log.live_bytes) == (before.live_count, before.live_bytes)
    assert log.damaged_records == 11
    assert log.earliest_seq == 101


def test_a_segment_that_healed_stays_while_a_kept_snapshot_reports_its_damage() -> None:
    """A start from that snapshot needs the segment to remove the hole."""
    driver = Driver()
    driver.append(*range(8))
    driver.seal()
    driver.topic.note_damage(1, 2, 2)
    driver = restored(driver)
    assert driver.topic.log.holes == [], "the file can be read again"
    driver.delete(9)
    driver.flip()
    assert driver.topic.log.dead_segments() == [1]
    assert seal_plan.plan_drops(driver.topic) == []
    driver.topic.files.healed = frozenset()
    assert seal_plan.plan_drops(driver.topic) == [1]


def test_blocks_with_dead_rows_keep_their_weight() -> None:
    driver = Driver()
    driver.append(*range(300), tag="a")
    driver.append(*range(300), tag="b")
    driver.delete(match=TagMatch("a"), before_seq=200)
    before = driver.topic.log.live_bytes
    driver = restored(driver)
    assert driver.topic.log.live_bytes == before
    assert driver.delete(match=TagMatch("a")) == 101


def test_dead_blocks_come_back_where_they_keep_a_run_unbroken() -> None:
    driver = Driver()
    driver.append(*range(900))
    driver.topic.log.delete(np.array([257]), np.array([512]))
    driver = restored(driver)
    assert [run.count for run in driver.topic.log.runs] == [256, 256, 256, 132]
    part = capture(driver.topic)
    driver.seal(256)
    driver = restored(driver, part)
    assert [run.count for run in driver.topic.log.runs] == [256, 256, 132]
    assert len(seqs_of(driver.read(0))) == 900 - 256


def test_a_prepared_capture_is_of_its_moment() -> None:
    driver = Driver()
    driver.append(*range(300))
    expected = capture(driver.topic)
    captured = prepare(driver.topic)
    driver.append(1)
    driver.delete(100)
    assert captured.encode() == expected


@pytest.mark.parametrize("bad", [b"", b"\x90", b"nonsense", msgspec.msgpack.encode([99])])
def test_what_is_no_part_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="part of a topic"):
        TOPIC_PARTS.decode(bad)


def test_another_version_is_refused() -> None:
    values = msgspec.msgpack.decode(capture(Driver().topic))
    values[0] = 2
    with pytest.raises(ValueError, match="version 2"):
        TOPIC_PARTS.decode(msgspec.msgpack.encode(values))


def test_segments_out_of_order_are_a_mistake_of_the_caller() -> None:
    driver = Driver()
    for _ in range(2):
        driver.append(*range(10))
        driver.seal()
    swapped: list[FakeIndex] = [driver.indexes[2], driver.indexes[1]]
    with pytest.raises(AssertionError):
        restore(TOPIC_PARTS.decode(capture(driver.topic)), swapped)
