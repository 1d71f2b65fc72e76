"""The effective priority: set by hand, or falling with the time since the last read."""

from __future__ import annotations

import pytest

from topics_server.engine.pressure.priority import effective_priority
from topics_server.values.model import TopicConfig


@pytest.mark.parametrize(
    ("age_ms", "expected"),
    [(0, 500), (30_000, 250), (60_000, 125), (15_000, 353), (300_000, 0), (-5_000, 500)],
)
def test_it_halves_every_thirty_seconds_since_the_last_read(age_ms: int, expected: int) -> None:
    assert effective_priority(TopicConfig(), 1_000_000, 1_000_000 + age_ms) == expected


def test_a_topic_that_was_never_read_has_none() -> None:
    assert effective_priority(TopicConfig(), None, 10) == 0


@pytest.mark.parametrize("manual", [-1000, 0, 7, 1000])
def test_a_manual_priority_wins(manual: int) -> None:
    assert effective_priority(TopicConfig(priority=manual), 10, 10) == manual


def test_without_auto_priority_there_is_none() -> None:
    assert effective_priority(TopicConfig(auto_priority=False), 10, 10) == 0
