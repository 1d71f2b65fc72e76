"""Caps that wait for a consumer: up to the bounds of its hold, and no longer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from tests.unit.engine.drive import Driver, seqs_of
from topics_server.engine.background.capture import capture, restore
from topics_server.engine.topic.consumers.changes import (
    decide_commit,
    decide_consumer,
    decide_consumer_delete,
)
from topics_server.engine.topic.retention import held_by
from topics_server.engine.topic.writes.delete import decide_expiry
from topics_server.values.blocks import record_bytes
from topics_server.values.entries import ConsumerMoved, Floor, RecordsAppended
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import HOLDS_PER_TOPIC_MAX
from topics_server.values.model import ConsumerHold, Discard, LossReason, TagMatch, TopicConfig
from topics_server.values.storage_types import TOPIC_PARTS

SIZE = record_bytes(b"0", b"", None, None)
WIDE = ConsumerHold(10, 1 << 40)


def put(
    driver: Driver, name: str, seq: int = 0, hold: ConsumerHold | UnsetType | None = WIDE
) -> ConsumerMoved | None:
    entry = decide_consumer(driver.topic, name, seq, driver.now_ms, hold)
    if entry is not None:
        driver.commit(entry)
    return entry


def commit(driver: Driver, name: str, seq: int, *, rewind: bool = False) -> None:
    entry = decide_commit(driver.topic, name, seq, driver.now_ms, rewind=rewind, if_seq=None)
    if entry is not None:
        driver.commit(entry)


def forget(driver: Driver, name: str) -> None:
    entry = decide_consumer_delete(driver.topic, name, driver.now_ms)
    assert entry is not None
    driver.commit(entry)


def floor_of(driver: Driver, *records: object) -> Floor | None:
    entry = driver.decide(driver.body(*records))
    assert isinstance(entry, RecordsAppended)
    return entry.floor


def held(driver: Driver, seq: int) -> int:
    topic = driver.topic
    return held_by(topic.log, topic.staging, topic.config, driver.now_ms, seq)


def test_caps_wait_for_a_consumer_up_to_its_records() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    driver.append(0, 0, 0)
    put(driver, "c")
    driver.append(*[0] * 7)
    assert seqs_of(driver.read()) == list(range(1, 11))
    assert held(driver, 0) == 7
    # Then the oldest records are evicted, as with a cap of ten.
    assert floor_of(driver, 0, 0) == Floor(3, LossReason.CAP)


def test_caps_wait_for_a_consumer_up_to_its_bytes() -> None:
    driver = Driver(TopicConfig(cap_records=1))
    driver.append(0)
    put(driver, "c", 0, ConsumerHold(1 << 40, 4 * SIZE))
    driver.append(0, 0, 0)
    assert driver.topic.log.live_count == 4
    assert floor_of(driver, 0) == Floor(2, LossReason.CAP)


def test_a_cap_of_bytes_waits_as_well() -> None:
    driver = Driver(TopicConfig(cap_bytes=2 * SIZE))
    driver.append(0, 0)
    put(driver, "c")
    driver.append(*[0] * 6)
    assert driver.topic.log.live_count == 8
    commit(driver, "c", 5)
    assert driver.expire()
    assert seqs_of(driver.read(5)) == [6, 7, 8]


def test_what_is_committed_is_evicted() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    driver.append(0, 0, 0)
    put(driver, "c")
    driver.append(*[0] * 4)
    commit(driver, "c", 2)
    assert floor_of(driver, 0) == Floor(3, LossReason.CAP)
    commit(driver, "c", 7)
    assert driver.expire()
    assert seqs_of(driver.read(4)) == [5, 6, 7]
    assert not driver.expire()


def test_a_deleted_consumer_and_one_without_a_hold_keep_nothing() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    driver.append(0, 0, 0)
    put(driver, "c")
    put(driver, "d")
    driver.append(*[0] * 4)
    put(driver, "d", hold=None)
    assert not driver.expire()
    forget(driver, "c")
    assert not driver.topic.consumers.holding
    assert driver.expire()
    assert seqs_of(driver.read(4)) == [5, 6, 7]


def test_neither_age_nor_deletes_wait() -> None:
    driver = Driver(TopicConfig(cap_records=3, ttl_ms=100))
    driver.append(0, 0, 0)
    put(driver, "c")
    driver.append(0, 0)
    assert driver.delete(3) == 2
    driver.now_ms += 101
    assert floor_of(driver, 0) == Floor(6, LossReason.TTL)


def test_a_hold_below_the_caps_changes_nothing() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    driver.append(0, 0, 0)
    put(driver, "c", 0, ConsumerHold(2, 1 << 40))
    assert floor_of(driver, 0) == Floor(2, LossReason.CAP)
    put(driver, "c", 0, ConsumerHold(1 << 40, 1))
    assert floor_of(driver, 0) == Floor(2, LossReason.CAP)


def test_a_topic_that_refuses_waits_for_nobody() -> None:
    driver = Driver(TopicConfig(cap_records=3, discard=Discard.REJECT))
    driver.append(0, 0, 0)
    put(driver, "c")
    with pytest.raises(TopicsError) as refusal:
        driver.decide(driver.body(0))
    assert refusal.value.code is Code.TOPIC_FULL
    assert held(driver, 0) == 0


def test_the_caps_wait_for_the_consumer_that_keeps_the_most() -> None:
    driver = Driver(TopicConfig(cap_records=2))
    driver.append(*[0] * 2)
    put(driver, "few", 0, ConsumerHold(4, 1 << 40))
    put(driver, "many", 0, ConsumerHold(6, 1 << 40))
    driver.append(*[0] * 4)
    assert driver.topic.log.live_count == 6
    commit(driver, "many", 5)
    assert floor_of(driver, 0) == Floor(4, LossReason.CAP)


def test_records_deleted_before_what_is_held_are_not_lost() -> None:
    driver = Driver(TopicConfig(cap_records=2))
    driver.append(0, 0)
    put(driver, "c")
    driver.append(0, tag="x")
    driver.append(0, 0)
    driver.delete(match=TagMatch("x"))
    commit(driver, "c", 3)
    assert floor_of(driver, 0) == Floor(3, LossReason.CAP)


def test_a_commit_in_flight_counts_and_may_fail() -> None:
    driver = Driver(TopicConfig(cap_records=2))
    driver.append(*[0] * 2)
    put(driver, "c")
    driver.append(*[0] * 3)
    moved = decide_commit(driver.topic, "c", 4, driver.now_ms, rewind=False, if_seq=None)
    assert moved is not None
    lsn = driver.hold(moved)
    assert floor_of(driver, 0) == Floor(5, LossReason.CAP)
    driver.undo(lsn)
    assert floor_of(driver, 0) is None
    # A hold in flight counts as well.
    ended = decide_consumer(driver.topic, "c", 0, driver.now_ms, None)
    assert ended is not None
    driver.hold(ended)
    assert floor_of(driver, 0) == Floor(5, LossReason.CAP)
    driver.release()
    assert driver.topic.consumers.known["c"].hold is None
    assert not driver.topic.consumers.holding


def test_a_hold_in_flight_is_undone() -> None:
    driver = Driver(TopicConfig(cap_records=2))
    driver.append(0, 0)
    made = decide_consumer(driver.topic, "c", 0, driver.now_ms, WIDE)
    assert made is not None
    lsn = driver.hold(made)
    assert floor_of(driver, 0) is None
    driver.undo(lsn)
    assert floor_of(driver, 0) == Floor(2, LossReason.CAP)
    assert not driver.topic.consumers.holding


def test_a_new_hold_moves_no_position_and_is_no_commit() -> None:
    driver = Driver()
    driver.append(*[0] * 5)
    put(driver, "c", 2, hold=UNSET)
    driver.now_ms += 1_000
    entry = put(driver, "c", 4)
    assert entry is not None
    known = driver.topic.consumers.known["c"]
    assert (known.seq, known.hold, known.committed_ts) == (2, WIDE, 1_000)
    assert put(driver, "c", 4) is None, "it has that hold"
    assert put(driver, "c", 4, hold=UNSET) is None, "nothing was asked"
    commit(driver, "c", 3)
    assert (known.seq, known.hold, known.committed_ts) == (3, WIDE, 2_000)


def test_a_topic_waits_for_a_bounded_number_of_consumers() -> None:
    driver = Driver()
    driver.append(0)
    for number in range(HOLDS_PER_TOPIC_MAX):
        put(driver, f"c{number}")
    put(driver, "plain", hold=UNSET)
    for name in ("plain", "new"):
        with pytest.raises(TopicsError) as refusal:
            put(driver, name)
        assert refusal.value.code is Code.THROTTLED
        assert refusal.value.detail["limit"] == "max_holds_per_topic"
    put(driver, "c0", hold=ConsumerHold(1, 1))
    forget(driver, "c1")
    put(driver, "plain")
    assert len(driver.topic.consumers.holds()) == HOLDS_PER_TOPIC_MAX


def test_a_snapshot_keeps_holds_and_older_ones_have_none() -> None:
    driver = Driver(TopicConfig(cap_records=2))
    driver.append(0, 0)
    put(driver, "c", 1)
    put(driver, "plain", 1, hold=UNSET)
    part = TOPIC_PARTS.decode(capture(driver.topic))
    again = restore(part, [])
    assert again.consumers.holds() == [(1, WIDE)]
    assert again.consumers.known["plain"].hold is None


@given(st.data())
def test_a_topic_is_what_a_plain_list_says(data: st.DataObject) -> None:
    """A topic keeps what a plain list predicts, in any order of caps, holds and deletes."""
    config = TopicConfig(
        cap_records=data.draw(st.sampled_from([0, 1, 3, 6])),
        cap_bytes=data.draw(st.sampled_from([0, SIZE, 200])),
    )
    driver = Driver(config)
    live: list[tuple[int, int]] = []
    places: dict[str, tuple[int, ConsumerHold | None]] = {}
    tags: dict[int, str] = {}
    head = floor = 0

    def is_over(left: list[tuple[int, int]]) -> bool:
        count, weight = len(left), sum(size for _, size in left)
        over_count = bool(config.cap_records) and count > config.cap_records
        return len(left) > 1 and (over_count or 0 < config.cap_bytes < weight)

    def is_held() -> bool:
        count, weight = len(live), sum(size for _, size in live)
        return any(
            live[0][0] > seq and count <= hold.max_records and weight <= hold.max_bytes
            for seq, hold in places.values()
            if hold is not None
        )

    def evict() -> None:
        nonlocal floor
        while is_over(live) and not is_held():
            floor = live.pop(0)[0]

    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(
            st.sampled_from(["append", "append", "put", "commit", "delete", "forget", "seal"])
        )
        name = data.draw(st.sampled_from("abc"))
        if step == "append":
            tag = data.draw(st.sampled_from("xy"))
            texts = data.draw(st.lists(st.text("z", max_size=30), min_size=1, max_size=5))
            driver.append(*texts, tag=tag)
            for text in texts:
                head += 1
                tags[head] = tag
                live.append((head, record_bytes(json.dumps(text).encode(), b"", tag, None)))
            evict()
        elif step == "put":
            hold = data.draw(
                st.none() | st.builds(ConsumerHold, st.integers(1, 9), st.integers(1, 400))
            )
            put(driver, name, head // 2, hold)
            places[name] = (places[name][0] if name in places else head // 2, hold)
        elif step == "commit" and name in places:
            seq = data.draw(st.integers(0, head))
            commit(driver, name, seq, rewind=True)
            places[name] = (seq, places[name][1])
        elif step == "delete":
            tag = data.draw(st.sampled_from("xy"))
            driver.delete(match=TagMatch(tag))
            live = [each for each in live if tags[each[0]] != tag]
        elif step == "forget" and name in places:
            forget(driver, name)
            del places[name]
        elif step == "seal":
            driver.seal(4)
        if step in ("put", "commit", "forget"):
            driver.expire()
            evict()
        assert decide_expiry(driver.topic, driver.now_ms) is None
        assert seqs_of(driver.read(floor)) == [seq for seq, _ in live]
        assert driver.topic.log.evict_floor == floor + 1
        left = list(live)
        while is_over(left):
            left.pop(0)
        beyond = {seq for seq, _ in live} - {seq for seq, _ in left}
        for place, _ in places.values():
            assert held(driver, place) == sum(seq > place for seq in beyond)
