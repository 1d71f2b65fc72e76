"""The position in a stream that follows a seq, and comparisons of content types. Pure."""

from __future__ import annotations

from functools import lru_cache

from topics_server.engine.topic.topic import Topic
from topics_server.streams.values import Position, StreamView, position_of_seq


def position_after(topic: Topic, seq: int) -> Position:
    """The position after a seq; before a fork's origin it is a position of the source."""
    return position_of_seq(topic.topic_id, topic.stream_facts.ancestors, seq)


def view_of(topic: Topic) -> StreamView:
    """The stream's state for answers."""
    facts = topic.stream_facts if topic.stream is None else topic.stream.facts
    return StreamView(
        path=facts.path,
        topic=topic.name,
        topic_id=topic.topic_id,
        content_type=facts.content_type,
        is_json=is_json(facts.content_type),
        tail=position_after(topic, topic.log.head_seq),
        is_closed=facts.is_closed,
        ttl_s=facts.ttl_s,
        expires_at=facts.expires_at,
        ancestors=facts.ancestors,
    )


@lru_cache(maxsize=256)
def is_json(content_type: str) -> bool:
    """Whether streams of this type hold JSON messages."""
    return media_type(content_type) == "application/json"


def same_type(one: str, other: str) -> bool:
    """Whether two content types have the same media type; parameters do not count."""
    return media_type(one) == media_type(other)


# Cached, because every append compares its type with that of its stream.
@lru_cache(maxsize=256)
def media_type(content_type: str) -> str:
    """The media type of a content type."""
    return content_type.partition(";")[0].strip().lower()
