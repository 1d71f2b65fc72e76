"""The parts that idle topics share: a change of one topic is never seen in another."""

from __future__ import annotations

import pytest

from topics_server.engine.topic.consumers.positions import NO_CONSUMERS
from topics_server.engine.topic.dedupe import NO_KEYS, KeyMemory
from topics_server.engine.topic.producers import NO_PRODUCERS, Producers
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.staging import IDLE, Staged
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.apply import apply_entry
from topics_server.values.appends import decode_append
from topics_server.values.entries import ConsumerMoved, Entry, ProducerMoved, RecordsAppended
from topics_server.values.model import ProducerStamp, TopicConfig

STAMP = ProducerStamp("p", 0, 0)


def topic(number: int, config: TopicConfig | None = None) -> Topic:
    return Topic(number, f"t{number}", 1, config or TopicConfig(), 5)


def keyed(seq: int, body: bytes, stamp: ProducerStamp | None = None) -> RecordsAppended:
    decoded = decode_append(body)
    return RecordsAppended(
        topic_id=1,
        first_seq=seq,
        count=decoded.count,
        ts=10,
        body=body,
        decoded=decoded,
        producer=stamp,
    )


def assert_shared_parts_are_empty() -> None:
    idle = topic(2)
    assert (idle.keys, idle.producers, idle.consumers) == (NO_KEYS, NO_PRODUCERS, NO_CONSUMERS)
    assert idle.staging is IDLE
    assert not NO_KEYS.remembered
    assert not NO_KEYS.in_flight
    assert not NO_PRODUCERS.known
    assert not NO_CONSUMERS.known
    assert not NO_CONSUMERS.holding
    assert NO_CONSUMERS.count == len(IDLE) == IDLE.records == IDLE.last_seq == 0
    assert idle.keys.find("k", 1_000_000, 10) is None
    assert idle.producers.check(STAMP, 10) is None
    assert idle.consumers.newest("c") is None


@pytest.mark.parametrize("is_staged", [True, False], ids=["live", "replayed"])
def test_a_write_changes_the_parts_of_its_topic_alone(is_staged: bool) -> None:
    busy = topic(1)
    entries: tuple[Entry, ...] = (
        keyed(1, b'{"records":[{"data":1}],"idempotency_key":"k"}', STAMP),
        ProducerMoved(1, 11, ProducerStamp("q", 0, 0), 1, 0),
        ConsumerMoved(1, 12, "c", 1),
    )
    for lsn, entry in enumerate(entries, 1):
        if is_staged:
            busy.stage(lsn, entry)
            assert_shared_parts_are_empty()
            busy.commit_staged(lsn)
        apply_entry(busy, lsn, entry)
    assert list(busy.keys.remembered) == ["k"]
    assert list(busy.producers.known) == ["p", "q"]
    assert list(busy.consumers.known) == ["c"]
    assert_shared_parts_are_empty()


def test_an_undone_write_changes_no_shared_part() -> None:
    busy = topic(1)
    busy.stage(1, keyed(1, b'{"records":[{"data":1}],"idempotency_key":"k"}', STAMP))
    busy.stage(2, ConsumerMoved(1, 12, "c", 1))
    busy.undo_from(1)
    assert busy.consumers.count == 0
    assert busy.keys.find("k", 1_000_000, 10) is None
    assert_shared_parts_are_empty()


def test_a_shared_part_refuses_changes() -> None:
    entry = keyed(1, b'{"records":[{"data":1}]}')
    with pytest.raises(AssertionError, match="share"):
        IDLE.push(Staged(1, entry))
    with pytest.raises(AssertionError, match="share"):
        NO_KEYS.remember("k", 1, 1, 10, 1_000)
    with pytest.raises(AssertionError, match="share"):
        NO_KEYS.stage_each(["k"], 1, 1)
    with pytest.raises(AssertionError, match="share"):
        NO_PRODUCERS.accept(STAMP, 1, 1, 10)
    with pytest.raises(AssertionError, match="share"):
        NO_PRODUCERS.stage(1, STAMP, 1, 1, 10)
    with pytest.raises(AssertionError, match="share"):
        NO_CONSUMERS.stage(1, ConsumerMoved(1, 12, "c", 1))
    assert_shared_parts_are_empty()
    assert isinstance(topic(1).own_keys(), KeyMemory)
    assert isinstance(topic(1).own_producers(), Producers)


def test_topics_with_equal_configurations_share_one_until_it_changes() -> None:
    registry = Registry()
    one, two = topic(1, TopicConfig(ttl_ms=7)), topic(2, TopicConfig(ttl_ms=7))
    other = topic(3, TopicConfig(ttl_ms=8))
    for each in (one, two, other):
        registry.adopt(each)
    assert one.config is two.config
    assert other.config.ttl_ms == 8
    two.config = TopicConfig(ttl_ms=9)
    assert one.config.ttl_ms == 7
