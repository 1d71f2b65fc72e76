"""Paths of streams as names of topics."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.streams.paths import topic_of
from topics_server.values.limits import TOPIC_NAME_CHARS_MAX
from topics_server.values.model import HASHED_PREFIX, is_hashed_name, is_topic_name


@pytest.mark.parametrize("path", ["a", "orders", "a.b:c-d_e", "0", "x" * TOPIC_NAME_CHARS_MAX])
def test_a_path_that_is_a_topics_name_is_that_topic(path: str) -> None:
    assert topic_of(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "a/b",
        "a b",
        "/a",
        "-a",
        ".a",
        "é",
        "a\n",
        "a%2Fb",
        "x" * (TOPIC_NAME_CHARS_MAX + 1),
        "水/1",
    ],
)
def test_any_other_path_is_a_hash_of_it(path: str) -> None:
    name = topic_of(path)
    assert name == HASHED_PREFIX + hashlib.sha256(path.encode()).hexdigest()[:40]
    assert is_topic_name(name)
    assert is_hashed_name(name)


def test_names_do_not_change_from_one_version_to_the_next() -> None:
    assert topic_of("logs/2024") == "ds:" + "eb28739560d4e8bc490c6b7db32263e676eb0304"


@given(st.text(max_size=60), st.text(max_size=60))
def test_different_paths_are_different_topics(one: str, other: str) -> None:
    assert is_topic_name(topic_of(one))
    assert (topic_of(one) == topic_of(other)) == (one == other)


def test_the_name_of_a_hash_is_its_own_topic() -> None:
    """No stream is at that path: the service compares the path that the topic stores."""
    name = topic_of("a/b")
    assert topic_of(name) == name
