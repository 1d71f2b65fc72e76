"""All topics: names, ids, epochs, totals, listing."""

from __future__ import annotations

import gc
import random

import pytest

from tests.unit.engine.drive import Driver
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.append import decide_append
from topics_server.engine.topic.writes.configure import decide_drop, decide_put
from topics_server.engine.topic.writes.delete import decide_delete
from topics_server.values.appends import AppendLimits, decode_append
from topics_server.values.entries import (
    Entry,
    Floor,
    FloorMoved,
    HeadReserved,
    RecordsAppended,
    TopicDropped,
    TopicPut,
)
from topics_server.values.model import Durability, LossReason, TopicConfig, TopicType

BODY = b'{"records":[{"data":1},{"data":22}]}'


class World:
    """A registry with an lsn counter."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.lsn = 0

    def apply(self, entry: Entry) -> None:
        self.lsn += 1
        self.registry.apply(self.lsn, entry)

    def create(self, name: str, config: TopicConfig | None = None) -> Topic:
        topic, creation = self.registry.decide_create(name, config or TopicConfig(), 5)
        self.apply(creation)
        found = self.registry.find(name)
        assert found is topic
        return topic

    def append(self, topic: Topic, body: bytes = BODY) -> None:
        entry = decide_append(topic, decode_append(body), body, None, 5, AppendLimits())
        assert isinstance(entry, RecordsAppended)
        self.apply(entry)

    def drop(self, topic: Topic) -> None:
        self.apply(decide_drop(topic, 5))


def test_a_topic_is_there_once_its_creation_is_applied() -> None:
    registry = Registry()
    topic, creation = registry.decide_create("a", TopicConfig(), 5)
    assert registry.find("a") is None
    assert registry.get(topic.topic_id) is None
    assert registry.pending == {topic.topic_id: topic}
    registry.apply(1, creation)
    assert registry.find("a") is registry.get(topic.topic_id) is topic
    assert not registry.pending


def test_an_append_may_carry_the_creation() -> None:
    registry = Registry()
    topic, creation = registry.decide_create("a", TopicConfig(), 5)
    decoded = decode_append(BODY)
    entry = decide_append(topic, decoded, BODY, None, 5, AppendLimits(), creation)
    assert isinstance(entry, RecordsAppended)
    topic.stage(1, entry)
    topic.commit_staged(1)
    assert registry.apply(1, entry).notify
    assert registry.find("a") is topic
    assert (topic.log.head_seq, registry.records_live) == (2, 2)


def test_an_abandoned_creation_leaves_no_name_and_uses_up_its_id() -> None:
    registry = Registry()
    first, _ = registry.decide_create("a", TopicConfig(), 5)
    registry.abandon(first.topic_id)
    second, creation = registry.decide_create("a", TopicConfig(), 5)
    registry.apply(1, creation)
    assert second.topic_id > first.topic_id
    assert second.epoch == 1
    assert not registry.pending


def test_a_recreated_topic_has_a_new_id_and_the_next_epoch() -> None:
    world = World()
    first = world.create("a")
    world.append(first)
    world.drop(first)
    assert world.registry.find("a") is None
    assert (world.registry.records_live, world.registry.bytes_live) == (0, 0)
    second = world.create("a")
    assert (second.epoch, second.topic_id > first.topic_id) == (2, True)
    assert second.log.head_seq == 0


def test_entries_of_a_dropped_topic_change_nothing() -> None:
    world = World()
    topic = world.create("a")
    world.append(topic)
    world.drop(topic)
    gone = topic.topic_id
    lost = Floor(2, LossReason.TTL)
    for entry in (
        RecordsAppended(gone, 3, 2, 5, BODY),
        FloorMoved(gone, 5, lost),
        HeadReserved(gone, 500),
        TopicDropped(gone, "a", 5),
    ):
        assert not world.registry.apply(world.lsn + 1, entry).notify
    assert len(world.registry) == 0


def test_replay_of_what_a_restored_topic_has_is_ignored() -> None:
    world = World()
    topic, creation = world.registry.decide_create("a", TopicConfig(), 5)
    world.apply(creation)
    world.append(topic)
    world.registry.apply(1, creation)
    world.registry.apply(1, TopicDropped(topic.topic_id, "a", 5))
    assert world.registry.find("a") is topic
    assert topic.log.head_seq == 2


def test_a_creation_in_replay_takes_over_the_name_of_a_topic_dropped_before() -> None:
    world = World()
    first = world.create("a")
    topic, creation = Registry().decide_create("a", TopicConfig(), 9)
    other = Topic(first.topic_id + 1, "a", 2, TopicConfig(), 9)
    assert topic.name == other.name
    world.apply(
        type(creation)(other.topic_id, "a", 2, TopicConfig(), 9),
    )
    found = world.registry.find("a")
    assert found is not None
    assert found.topic_id == other.topic_id
    assert world.registry.get(first.topic_id) is None


def test_replay_attaches_the_segments_of_a_topic_created_since_the_snapshot() -> None:
    driver = Driver()
    entry = driver.append(*range(10))
    assert isinstance(entry, RecordsAppended)
    driver.seal()
    registry = Registry()
    registry.sealed_of = lambda topic_id: [driver.indexes[1]] if topic_id == 1 else []
    _, creation = registry.decide_create("t", TopicConfig(), 5)
    registry.pending.clear()
    registry.apply(1, creation)
    registry.apply(2, entry)
    topic = registry.find("t")
    assert topic is not None
    assert (topic.log.head_seq, topic.log.live_count, topic.log.tail_count) == (10, 10, 0)
    assert registry.records_live == 10


def test_totals_follow_every_change() -> None:
    world = World()
    a, b = world.create("a"), world.create("b")
    world.append(a)
    world.append(b)
    deletion = decide_delete(a, 2, None, {}, 5)
    assert deletion is not None
    world.apply(deletion)
    registry = world.registry
    assert registry.records_live == 3
    assert registry.bytes_live == a.log.live_bytes + b.log.live_bytes
    world.drop(b)
    assert (registry.records_live, registry.bytes_live) == (1, a.log.live_bytes)


def test_damage_is_counted_when_it_is_told() -> None:
    driver = Driver()
    driver.append(*range(10))
    driver.seal()
    registry = Registry()
    registry.adopt(driver.topic)
    driver.topic.note_damage(1, 2, 4)
    registry.recount(driver.topic)
    assert (registry.records_live, registry.damaged_records) == (7, 3)


def test_classes_and_queues_are_counted_through_changes() -> None:
    world = World()
    topic = world.create("a")
    queue = world.create("q", TopicConfig(type=TopicType.QUEUE, durability=Durability.FSYNC))
    put = decide_put(topic, TopicConfig(durability=Durability.MEMORY), 5)
    assert put is not None
    world.apply(put)
    counts = world.registry.counts_by_class()
    assert (counts[Durability.MEMORY], counts[Durability.FSYNC]) == (1, 1)
    assert counts[Durability.DISK] == counts[Durability.EPHEMERAL] == 0
    assert world.registry.queue_topics == 1
    world.drop(queue)
    assert world.registry.queue_topics == 0
    assert world.registry.counts_by_class()[Durability.FSYNC] == 0


def test_listing_is_in_name_order_by_prefix_and_page() -> None:
    world = World()
    names = [f"{prefix}:{number:03}" for prefix in ("a", "b", "c") for number in range(40)]
    random.Random(1).shuffle(names)
    for name in names:
        world.create(name)
    registry = world.registry
    found: list[str] = []
    after: str | None = None
    while True:
        topics, after = registry.page(prefix="b:", after=after, page_size=7)
        found += [topic.name for topic in topics]
        if after is None:
            break
        assert len(topics) == 7
    assert found == sorted(name for name in names if name.startswith("b:"))
    world.drop(world.create("b:0005"))
    topics, after = registry.page(prefix="b:0", after="b:003", page_size=3)
    assert [topic.name for topic in topics] == ["b:004", "b:005", "b:006"]
    assert registry.page(prefix="zz", after=None, page_size=3) == ([], None)
    assert registry.page(prefix="", after="c:039", page_size=3) == ([], None)


def test_a_page_that_ends_with_the_list_has_no_next() -> None:
    world = World()
    for name in ("a", "b"):
        world.create(name)
    topics, after = world.registry.page(prefix="", after=None, page_size=2)
    assert (len(topics), after) == (2, None)
    assert world.registry.page(prefix="", after=None, page_size=1)[1] == "a"


def test_topics_and_ids_may_change_while_they_are_walked() -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.create(name)
    for topic in world.registry:
        world.drop(topic)
    assert (len(world.registry), list(world.registry.ids())) == (0, [])


@pytest.mark.parametrize("seed", range(20))
def test_the_ids_are_those_of_the_current_topics_ascending(seed: int) -> None:
    """Guard: engine/topic/registry.py, `_remove`. Replay may apply creations in any order, and a
    name may be created again before its drop is applied.
    """
    chance = random.Random(seed)
    world = World()
    creations = []
    for number in range(60):
        name = f"t{chance.randrange(40)}"
        creations.append(TopicPut(number + 1, name, number + 1, TopicConfig(), 1, 0, True, None))
    chance.shuffle(creations)
    for creation in creations:
        world.apply(creation)
        if chance.random() < 0.4 and len(world.registry):
            world.drop(chance.choice(list(world.registry)))
        taken = world.registry.ids()
        assert list(taken) == sorted(topic.topic_id for topic in world.registry)
        taken.append(0)
        assert 0 not in world.registry.ids()


def test_the_collector_examines_no_copied_id() -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.create(name)
    ids = world.registry.ids()
    assert list(ids) == [1, 2, 3]
    assert not any(isinstance(found, int) for found in gc.get_referents(ids))


def test_only_so_many_dropped_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics_server.values.limits.DROPPED_NAMES_MAX", 2)
    registry = Registry()
    for number, name in enumerate(("a", "b", "c", "b"), 1):
        registry.remember_epoch(name, number)
    assert registry.dropped_epochs == {"c": 3, "b": 4}
    assert registry.epoch_floor == 1
    assert registry.decide_create("a", TopicConfig(), 1)[0].epoch == 2


def _creation(topic_id: int, epoch: int) -> TopicPut:
    return TopicPut(topic_id, "t", epoch, TopicConfig(), 1, 0, True, None)


def test_a_creation_that_replay_meets_late_does_not_replace_its_successor() -> None:
    """Guard: engine/topic/registry.py, `_is_superseded`. Shards may be replayed from different
    places.
    """
    registry = Registry()
    registry.apply(9, _creation(4, 2))
    registry.apply(2, _creation(3, 1))
    topic = registry.find("t")
    assert topic is not None
    assert (topic.topic_id, topic.epoch, registry.get(3)) == (4, 2, None)
    # A creation of the same epoch, whose sync failed before another topic got the name.
    registry.apply(8, _creation(2, 2))
    assert registry.find("t") is topic


def test_a_creation_that_replay_meets_late_brings_no_dropped_epoch_back() -> None:
    registry = Registry()
    registry.remember_epoch("t", 2)
    registry.apply(2, _creation(3, 2))
    assert registry.find("t") is None
    registry.apply(3, _creation(5, 3))
    assert registry.find("t") is not None
