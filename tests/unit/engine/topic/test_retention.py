"""How far caps and TTL move the floor, also with entries in flight."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.drive import Driver, seqs_of
from topics_server.engine.log.log import Log
from topics_server.engine.topic import retention
from topics_server.engine.topic.writes.delete import decide_expiry
from topics_server.values.blocks import record_bytes
from topics_server.values.entries import Floor, FloorMoved, RecordsAppended
from topics_server.values.errors import Code, Corrupt, TopicsError
from topics_server.values.model import Discard, LossReason, TopicConfig

SIZE = record_bytes(b"0", b"", None, None)


def decided(driver: Driver, *records: object) -> RecordsAppended:
    entry = driver.decide(driver.body(*records))
    assert isinstance(entry, RecordsAppended)
    return entry


# -- caps -------------------------------------------------------------------------------------


def test_an_append_within_the_cap_loses_nothing() -> None:
    driver = Driver(TopicConfig(cap_records=3, cap_bytes=3 * SIZE))
    assert decided(driver, 0, 0, 0).floor is None


def test_an_append_evicts_exactly_what_is_over_the_cap() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    driver.append(0, 0, 0)
    assert decided(driver, 0).floor == Floor(2, LossReason.CAP)
    assert decided(driver, 0, 0, 0).floor == Floor(4, LossReason.CAP)


def test_a_batch_over_the_whole_cap_evicts_of_itself() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    driver.append(0)
    driver.append(*range(5))
    assert seqs_of(driver.read(3)) == [4, 5, 6]
    assert driver.topic.log.evict_floor == 4


def test_bytes_are_kept_within_the_cap_too() -> None:
    driver = Driver(TopicConfig(cap_bytes=3 * SIZE))
    driver.append(0, 0, 0)
    assert decided(driver, 0).floor == Floor(2, LossReason.CAP)
    assert decided(driver, 10).floor == Floor(3, LossReason.CAP)


def test_the_newest_record_stays_even_if_it_alone_is_over_the_cap() -> None:
    driver = Driver(TopicConfig(cap_bytes=10))
    driver.append(0)
    assert driver.topic.log.live_count == 1
    driver.append("x" * 100, "y" * 100)
    assert seqs_of(driver.read(2)) == [3]
    assert decide_expiry(driver.topic, driver.now_ms) is None
    driver.put(TopicConfig(cap_bytes=5))
    assert decide_expiry(driver.topic, driver.now_ms) is None


def test_room_made_by_deletes_evicts_nobody() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    driver.append(0, 0, 0)
    driver.delete(3)
    assert decided(driver, 0, 0).floor is None
    assert decided(driver, 0, 0, 0).floor == Floor(4, LossReason.CAP)


def test_deletes_under_way_are_no_room_yet() -> None:
    driver = Driver(TopicConfig(cap_records=3, discard=Discard.REJECT))
    driver.append(0, 0, 0)
    driver.delete(3, hold=True)
    with pytest.raises(TopicsError):
        driver.decide(driver.body(0))
    driver.release()
    assert decided(driver, 0, 0).floor is None


@pytest.mark.parametrize(("cap", "value"), [("cap_records", 3), ("cap_bytes", 3 * SIZE)])
def test_a_full_reject_topic_refuses_all_or_nothing(cap: str, value: int) -> None:
    config = TopicConfig(discard=Discard.REJECT)
    driver = Driver(msgspec.structs.replace(config, **{cap: value}))
    with pytest.raises(TopicsError) as refusal:
        driver.decide(driver.body(0, 0, 0, 0))
    assert refusal.value.code is Code.TOPIC_FULL
    driver.append(0, 0)
    with pytest.raises(TopicsError) as refusal:
        driver.decide(driver.body(0, 0))
    assert refusal.value.detail["topic"] == "t"
    assert refusal.value.detail[cap] == value
    assert refusal.value.detail["count"] == 2
    assert decided(driver, 0).floor is None


def test_expired_records_are_no_reason_to_refuse() -> None:
    driver = Driver(TopicConfig(cap_records=2, ttl_ms=10, discard=Discard.REJECT))
    driver.append(0, 0)
    driver.now_ms += 11
    entry = decided(driver, 0)
    assert entry.floor == Floor(3, LossReason.TTL)


def test_an_eviction_above_expired_records_is_mixed() -> None:
    driver = Driver(TopicConfig(cap_records=2, ttl_ms=10))
    driver.append(0, 0)
    driver.now_ms += 11
    assert decided(driver, 0, 0, 0).floor == Floor(4, LossReason.MIXED)
    assert decided(driver, 0, 0).floor == Floor(3, LossReason.TTL)


@pytest.mark.parametrize("method", ["time_of", "first_seq_since"])
def test_nothing_expires_while_the_times_are_damaged(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(TopicConfig(ttl_ms=10))
    driver.append(0, 0)
    driver.now_ms += 11

    def refuse(log: Log, value: int) -> int:
        raise Corrupt("the index of segment 1 is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(Log, method, refuse)
        assert decide_expiry(driver.topic, driver.now_ms) is None
        assert decided(driver, 0).floor is None
    found = decide_expiry(driver.topic, driver.now_ms)
    assert isinstance(found, FloorMoved)
    assert found.floor == Floor(3, LossReason.TTL)


# -- under way --------------------------------------------------------------------------------


def test_records_and_floors_under_way_count() -> None:
    driver = Driver(TopicConfig(cap_records=4))
    driver.append(0, 0)
    driver.hold(decided(driver, 0, 0))
    second = decided(driver, 0, 0, 0)
    assert second.floor == Floor(4, LossReason.CAP)
    driver.hold(second)
    third = decided(driver, 0, 0)
    assert third.floor == Floor(6, LossReason.CAP)
    driver.hold(third)
    for expected in (4, 4, 4):
        driver.release()
        assert driver.topic.log.live_count == expected


def test_a_tightened_cap_counts_what_is_under_way() -> None:
    driver = Driver(TopicConfig())
    driver.append(0, 0)
    driver.topic.config = TopicConfig(cap_records=2)
    driver.hold(decided(driver, 0))
    assert decide_expiry(driver.topic, driver.now_ms) is None, "the append's floor is under way"
    driver.topic.config = TopicConfig(cap_bytes=SIZE)
    expiry = decide_expiry(driver.topic, driver.now_ms)
    assert expiry == FloorMoved(1, driver.now_ms, Floor(3, LossReason.CAP))


@given(st.data())
def test_caps_hold_after_every_apply_however_entries_overlap(data: st.DataObject) -> None:
    config = TopicConfig(
        cap_records=data.draw(st.sampled_from([0, 1, 4, 9])),
        cap_bytes=data.draw(st.sampled_from([0, SIZE, 150, 400])),
        ttl_ms=data.draw(st.sampled_from([0, 30])),
    )
    driver = Driver(config)
    log = driver.topic.log
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["append", "append", "delete", "release", "undo", "wait"]))
        if step == "append":
            sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
            driver.hold(decided(driver, *("x" * size for size in sizes)))
        elif step == "delete":
            driver.delete(data.draw(st.integers(1, log.head_seq + 2)), hold=True)
        elif step == "wait":
            driver.now_ms += 10
        elif step == "undo" and driver.held:
            driver.undo(data.draw(st.sampled_from(driver.held))[0])
        elif step == "release" and driver.held:
            driver.release()
            if log.live_count > 1:
                assert not config.cap_records or log.live_count <= config.cap_records
                assert not config.cap_bytes or log.live_bytes <= config.cap_bytes
    while driver.held:
        driver.release()
    assert driver.topic.staged_seq == log.head_seq


# -- TTL --------------------------------------------------------------------------------------


def test_the_floor_of_expiry_is_behind_the_last_live_record_that_is_too_old() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    driver.append(1, 2, 3)
    driver.delete(2)
    driver.now_ms += 50
    driver.append(4)
    log = driver.topic.log
    assert retention.expired_floor(log, 100, driver.now_ms) == 1
    driver.now_ms += 51
    assert retention.expired_floor(log, 100, driver.now_ms) == 4
    assert retention.first_unexpired(log, 100, driver.now_ms) == 4
    assert retention.first_unexpired(log, 0, driver.now_ms) == 2
    driver.now_ms += 50
    assert retention.expired_floor(log, 100, driver.now_ms) == 5
    assert retention.first_unexpired(log, 100, driver.now_ms) == 5


def test_what_was_found_expired_stays_so_when_the_clock_is_set_back() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    driver.append(1, 2)
    log = driver.topic.log
    assert retention.first_unexpired(log, 100, driver.now_ms + 101) == 3
    assert retention.first_unexpired(log, 100, driver.now_ms) == 3
    assert retention.expired_floor(log, 100, driver.now_ms) == 3


def test_what_was_deleted_before_it_expired_moves_no_floor() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    driver.append(1, 2, 3)
    driver.delete(4)
    driver.now_ms += 500
    assert decide_expiry(driver.topic, driver.now_ms) is None
    driver.append(4)
    assert decide_expiry(driver.topic, driver.now_ms) is None


def test_expiry_says_ttl_and_happens_once() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    driver.append(1, 2)
    driver.now_ms += 101
    entry = decide_expiry(driver.topic, driver.now_ms)
    assert entry is not None
    assert entry.floor == Floor(3, LossReason.TTL)
    driver.hold(entry)
    assert decide_expiry(driver.topic, driver.now_ms) is None
    driver.release()
    assert driver.topic.log.losses.reasons(1, 2) == {LossReason.TTL}
    assert decide_expiry(driver.topic, driver.now_ms) is None


def test_expiry_of_sealed_records_uses_their_columns() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    driver.append(*range(300))
    driver.now_ms += 60
    driver.append(*range(10))
    driver.seal()
    driver.now_ms += 60
    assert driver.expire()
    assert driver.topic.log.evict_floor == 301
    assert driver.topic.log.live_count == 10


# -- PUT --------------------------------------------------------------------------------------


def test_a_tightened_cap_evicts_at_the_next_look() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.put(TopicConfig(cap_records=4))
    assert driver.expire()
    assert seqs_of(driver.read(6)) == [7, 8, 9, 10]
    assert driver.topic.log.losses.reasons(1, 6) == {LossReason.CAP}


def test_a_tightened_cap_of_a_reject_topic_evicts_nothing() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.put(TopicConfig(cap_records=4, discard=Discard.REJECT))
    assert not driver.expire()


def test_what_a_cap_or_ttl_took_stays_lost_when_it_is_lifted() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.put(TopicConfig(cap_records=4))
    driver.put(TopicConfig(ttl_ms=100))
    assert driver.topic.log.evict_floor == 7
    driver.now_ms += 101
    driver.put(TopicConfig(ttl_ms=200))
    assert driver.topic.log.evict_floor == 11
    driver.put(TopicConfig())
    assert driver.read().gap is not None
    assert seqs_of(driver.read()) == []
