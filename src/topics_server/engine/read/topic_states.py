"""Builds a topic's state as clients see it (§1.2, §1.3). Pure."""

from __future__ import annotations

from topics_server.engine.answers import QueueCounts, TopicState
from topics_server.engine.pressure.priority import effective_priority
from topics_server.engine.topic.topic import Topic


def state_of(
    topic: Topic, now_ms: int, *, disk_bytes: int, queue: QueueCounts | None
) -> TopicState:
    """The state at `now_ms`; `queue` is None for a log."""
    count, live_bytes = topic.live(now_ms)
    return TopicState(
        name=topic.name,
        topic_id=topic.topic_id,
        epoch=topic.epoch,
        config=topic.config,
        head_seq=topic.log.head_seq,
        earliest_seq=topic.earliest_seq(now_ms),
        evict_floor=topic.log.evict_floor,
        count=count,
        bytes=live_bytes,
        disk_bytes=disk_bytes,
        effective_priority=effective_priority(topic.config, topic.last_read_ts, now_ms),
        last_write_ts=topic.last_write_ts,
        last_read_ts=topic.last_read_ts,
        damaged_records=topic.log.damaged_records,
        queue=queue,
        stream=None if topic.stream is None else topic.stream.facts,
    )
