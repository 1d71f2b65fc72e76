"""Names, tag matches and the shared values."""

from __future__ import annotations

import msgspec
import pytest

from topics_server.values.model import (
    Gate,
    TagMatch,
    TopicConfig,
    is_topic_name,
)


@pytest.mark.parametrize(
    "name", ["a", "A", "0", "a.b_c:d-e", "render-queue:tenantA", "x" * 255, "9:::"]
)
def test_a_name_starts_alphanumeric_and_keeps_to_the_charset(name: str) -> None:
    assert is_topic_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 256,
        "-a",
        ".a",
        "_a",
        ":a",
        "a b",
        "a/b",
        "a%2Fb",
        "ä",
        "aä",
        "a\n",
        "a\x00",
        "a>b",
    ],
)
def test_anything_else_is_no_name(name: str) -> None:
    assert not is_topic_name(name)


@pytest.mark.parametrize(
    ("match", "tag", "hit"),
    [
        (TagMatch("a"), "a", True),
        (TagMatch("a"), "ab", False),
        (TagMatch("a*"), "a*", True),
        (TagMatch("a*"), "ab", False),
        (TagMatch("a", is_prefix=True), "ab", True),
        (TagMatch("a", is_prefix=True), "a", True),
        (TagMatch("a", is_prefix=True), "ba", False),
        (TagMatch("", is_prefix=True), "", True),
        (TagMatch(""), "", True),
        (TagMatch("", is_prefix=True), None, False),
        (TagMatch(""), None, False),
    ],
)
def test_a_match_is_exact_or_a_literal_prefix(match: TagMatch, tag: str | None, hit: bool) -> None:
    assert match.matches(tag) is hit


def test_gates_are_ordered_by_strictness() -> None:
    assert Gate.NONE < Gate.WRITTEN < Gate.SYNCED


def test_a_topic_without_a_lease_log_is_encoded_as_before_there_was_one() -> None:
    """The golden frames hold the bytes; this test gives the reason."""
    plain = msgspec.msgpack.encode(TopicConfig())
    assert b"lease_log" not in plain
    assert msgspec.msgpack.decode(plain, type=TopicConfig).lease_log is msgspec.UNSET
    logged = TopicConfig(lease_log="leases")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(logged), type=TopicConfig) == logged
