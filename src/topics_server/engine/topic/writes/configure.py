"""The life of one topic: configure, drop, reserve seqs, stream facts. Pure.

The registry decides creations (`registry.decide_create`). Called by `engine/topic_admin`,
`engine/appends` and `apply`.
"""

from __future__ import annotations

from topics_server.engine.topic import retention
from topics_server.engine.topic.applied import NOTHING, NOTIFY, Applied
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.delete import apply_floor
from topics_server.values.entries import Floor, HeadReserved, StreamChanged, TopicDropped, TopicPut
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import HEAD_RESERVE_SEQS
from topics_server.values.model import Durability, LossReason, TopicConfig


def decide_put(topic: Topic, config: TopicConfig, now_ms: int) -> TopicPut | None:
    """A new configuration; None if it is unchanged.

    The entry of a changed cap or TTL includes the floor of the old one, so that no lost record
    comes back. Raises `topic_exists_incompatible` for another type.
    """
    old = topic.config
    if config.type is not old.type:
        raise TopicsError(
            Code.TOPIC_EXISTS_INCOMPATIBLE,
            f"the topic is a {old.type.value}; its type cannot change",
            {"topic": topic.name, "field": "type"},
        )
    if config == old:
        return None
    holds = topic.consumers.holds()
    floor = retention.standing_floor(topic.log, topic.staging, old, now_ms, holds)
    if floor is None and topic.is_ephemeral and topic.log.evict_floor > 1:
        # The appends that moved the floor have no frames, so this entry must hold the floor.
        floor = Floor(topic.log.evict_floor, topic.log.losses.ranges[-1].reason)
    return TopicPut(
        topic_id=topic.topic_id,
        name=topic.name,
        epoch=topic.epoch,
        config=config,
        ts=now_ms,
        head_seq=topic.log.head_seq,
        created=False,
        floor=floor,
    )


def decide_drop(topic: Topic, now_ms: int, *, if_empty: bool = False) -> TopicDropped:
    """The drop of the topic. Raises `topic_not_empty` if it must be empty and is not."""
    if if_empty:
        count = topic.live(now_ms)[0] + topic.staged_seq - topic.log.head_seq
        if count:
            raise TopicsError(
                Code.TOPIC_NOT_EMPTY,
                f'topic "{topic.name}" is not empty',
                {"topic": topic.name, "count": count},
            )
    return TopicDropped(topic.topic_id, topic.name, now_ms)


def decide_reservation(topic: Topic, count: int) -> HeadReserved | None:
    """A higher ceiling, if `count` more records come near the last ceiling or pass it.

    Submit it before their append, which then waits for it in the FIFO if necessary. Class fsync
    needs no ceiling, because every head is synced.
    """
    if topic.config.durability is Durability.FSYNC:
        return None
    wanted = topic.staged_seq + count
    if wanted + HEAD_RESERVE_SEQS // 2 <= topic.staged_ceiling_seq:
        return None
    return HeadReserved(topic.topic_id, wanted + topic.reserve_seqs)


def apply_put(topic: Topic, entry: TopicPut) -> Applied:
    """Set a configuration, with the head and the floor that are in the entry."""
    assert entry.topic_id == topic.topic_id
    log = topic.log
    reason = LossReason.RESTART if topic.is_ephemeral else LossReason.DAMAGED
    log.jump_head(entry.head_seq, reason)
    if not topic.is_ephemeral or entry.config.durability is not Durability.EPHEMERAL:
        # Unless the old or the new class is ephemeral, captures and segments have the records.
        topic.journaled_seq = log.head_seq
    topic.config = entry.config
    return NOTIFY if entry.floor is None else apply_floor(topic, entry.floor)


def apply_stream(topic: Topic, lsn: int, entry: StreamChanged) -> Applied:
    """Set the facts of a stream; notify readers if it was closed or its copy is complete."""
    if entry.producer is not None:
        topic.own_producers().accept(entry.producer, entry.first_seq, 0, entry.ts)
    stream = topic.as_stream()
    was = stream.facts
    stream.apply(lsn, entry.facts)
    is_visible = (was.is_closed, was.is_copying) != (
        entry.facts.is_closed,
        entry.facts.is_copying,
    )
    return NOTIFY if is_visible else NOTHING
