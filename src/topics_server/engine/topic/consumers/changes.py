"""Decides and applies changes of a topic's consumers. Pure.

A position never moves back unless the request says so, so a late or repeated commit changes
nothing. Called by `engine/consumers` (decide) and `writes/apply`.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from topics_server.engine.topic.applied import NOTHING, Applied
from topics_server.engine.topic.consumers.positions import ConsumerAt
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import ConsumerDeleted, ConsumerMoved
from topics_server.values.errors import Code, TopicsError, clipped, invalid
from topics_server.values.limits import CONSUMERS_PER_TOPIC_MAX, HOLDS_PER_TOPIC_MAX
from topics_server.values.model import ConsumerHold


def consumer_not_found(topic: str, consumer: str) -> TopicsError:
    """404: the topic has no such consumer."""
    detail = {"topic": topic, "consumer": consumer}
    message = f'topic "{topic}" has no consumer "{clipped(consumer)}"'
    return TopicsError(Code.CONSUMER_NOT_FOUND, message, detail)


def too_many_consumers(limit: str, most: int) -> TopicsError:
    """429: the topic or the server has reached its maximum of consumers."""
    message = f"there are {most} consumers already"
    return TopicsError(Code.THROTTLED, message, {"limit": limit, "max": most})


def decide_consumer(
    topic: Topic,
    name: str,
    seq: int,
    now_ms: int,
    hold: ConsumerHold | UnsetType | None = UNSET,
) -> ConsumerMoved | None:
    """The entry that creates a consumer at a seq, or changes the hold of an existing one.

    None if nothing changes; an unset `hold` changes nothing. Raises `throttled` beyond the limits
    of a topic.
    """
    consumers = topic.consumers
    newest = consumers.newest(name)
    if newest is None:
        if consumers.count >= CONSUMERS_PER_TOPIC_MAX:
            raise too_many_consumers("max_consumers_per_topic", CONSUMERS_PER_TOPIC_MAX)
        seq, before = min(seq, topic.log.head_seq), None
    elif hold is UNSET or hold == newest.hold:
        return None
    else:
        seq, before = newest
    if hold is not UNSET and hold is not None and before is None:
        if len(consumers.holds()) >= HOLDS_PER_TOPIC_MAX:
            message = f"the caps of the topic wait for {HOLDS_PER_TOPIC_MAX} consumers already"
            detail = {"limit": "max_holds_per_topic", "max": HOLDS_PER_TOPIC_MAX}
            raise TopicsError(Code.THROTTLED, message, detail)
    elif newest is None:
        hold = UNSET
    return ConsumerMoved(topic.topic_id, now_ms, name, seq, hold)


def decide_commit(
    topic: Topic, name: str, seq: int, now_ms: int, *, rewind: bool, if_seq: int | None
) -> ConsumerMoved | None:
    """The commit of a seq; None if the consumer is at that seq, or after it and may not go back.

    `if_seq`: the required current seq of the consumer. Raises `consumer_not_found`,
    `condition_failed`, and `invalid_request` for a seq above the head.
    """
    place = topic.consumers.newest(name)
    if place is None:
        raise consumer_not_found(topic.name, name)
    newest = place.seq
    if if_seq is not None and if_seq != newest:
        message = f'consumer "{name}" is at {newest}, not {if_seq}'
        detail = {"topic": topic.name, "consumer": name, "reason": "seq", "seq": newest}
        raise TopicsError(Code.CONDITION_FAILED, message, detail)
    if seq > topic.log.head_seq:
        raise invalid(f"seq is above the topic's head, {topic.log.head_seq}", "seq")
    if seq == newest or (seq < newest and not rewind):
        return None
    return ConsumerMoved(topic.topic_id, now_ms, name, seq)


def decide_consumer_delete(topic: Topic, name: str, now_ms: int) -> ConsumerDeleted | None:
    """The entry that deletes a consumer; None if there is none."""
    if topic.consumers.newest(name) is None:
        return None
    return ConsumerDeleted(topic.topic_id, now_ms, name)


def apply_consumer(topic: Topic, lsn: int, entry: ConsumerMoved | ConsumerDeleted) -> Applied:
    """Create, move or delete a consumer, or change its hold."""
    consumers = topic.own_consumers()
    consumers.unstage(lsn, entry.consumer)
    if isinstance(entry, ConsumerDeleted):
        consumers.known.pop(entry.consumer, None)
        consumers.note_hold(entry.consumer)
        return NOTHING
    known = consumers.known.get(entry.consumer)
    if known is None:
        known = consumers.known[entry.consumer] = ConsumerAt(entry.seq, entry.ts, entry.ts)
    elif known.seq != entry.seq:
        known.seq = entry.seq
        known.committed_ts = entry.ts
    if entry.hold is not UNSET:
        known.hold = entry.hold
        consumers.note_hold(entry.consumer)
    return NOTHING
