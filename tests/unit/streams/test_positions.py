"""Positions after seqs, and content types."""

from __future__ import annotations

import msgspec
import pytest

from topics_server.engine.topic.stream_facts import StreamState, plain_facts
from topics_server.engine.topic.topic import Topic
from topics_server.streams.positions import (
    is_json,
    media_type,
    position_after,
    same_type,
    view_of,
)
from topics_server.streams.values import BEGINNING, Position
from topics_server.values.model import Ancestor, StreamFacts, TopicConfig


def topic(facts: StreamFacts | None = None) -> Topic:
    made = Topic(9, "t", 1, TopicConfig(), 0)
    made.log.head_seq = 20
    if facts is not None:
        made.stream = StreamState(facts)
    return made


def test_a_position_is_of_its_stream() -> None:
    assert position_after(topic(), 0) == BEGINNING
    assert position_after(topic(), 1) == Position(1, 9)


def test_a_position_of_a_fork_is_that_of_whoever_had_it_first() -> None:
    above = (Ancestor("a", 3, 5), Ancestor("b", 5, 5), Ancestor("c", 7, 12))
    fork = topic(StreamFacts("f", "text/plain", ancestors=above))
    assert position_after(fork, 0) == BEGINNING
    owners = {seq: position_after(fork, seq).topic_id for seq in (1, 5, 6, 12, 13, 20)}
    assert owners == {1: 3, 5: 3, 6: 7, 12: 7, 13: 9, 20: 9}


def test_a_view_tells_what_stays_and_not_what_is_under_way() -> None:
    facts = StreamFacts("p/q", "text/plain", ttl_s=5, expires_at="then")
    stream = topic(facts)
    assert stream.stream is not None
    stream.stream.stage(1, msgspec.structs.replace(facts, is_closed=True))
    view = view_of(stream)
    assert (view.path, view.topic, view.topic_id) == ("p/q", "t", 9)
    assert (view.content_type, view.is_json, view.tail) == ("text/plain", False, Position(20, 9))
    assert (view.is_closed, view.ttl_s, view.expires_at) == (False, 5, "then")


def test_a_topic_that_was_never_a_stream_is_one_of_json() -> None:
    view = view_of(topic())
    assert (view.path, view.content_type, view.is_json) == ("t", "application/json", True)
    assert topic().stream_facts == plain_facts("t")


@pytest.mark.parametrize(
    ("content_type", "media"),
    [
        ("application/json", "application/json"),
        ("Application/JSON; charset=utf-8", "application/json"),
        ("application/json ;a=b", "application/json"),
        (" text/plain", "text/plain"),
        ("application/json+x", "application/json+x"),
        ("application/ndjson", "application/ndjson"),
        ("", ""),
    ],
)
def test_parameters_and_case_do_not_count(content_type: str, media: str) -> None:
    assert media_type(content_type) == media
    assert is_json(content_type) == (media == "application/json")
    assert same_type(content_type, media.upper() + ";q=1")
    assert not same_type(content_type, media + "x")
