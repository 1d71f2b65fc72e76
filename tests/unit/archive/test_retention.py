"""`--keep`: which backups stay."""

from __future__ import annotations

import datetime

import pytest

from topics_server.archive.retention import KeepRule, kept, parse_rules


def at(text: str) -> int:
    """A time of UTC in ms."""
    moment = datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC)
    return int(moment.timestamp() * 1000)


def test_rules_are_numbers_with_or_without_a_period() -> None:
    assert parse_rules("7d, 4w,12m,3") == [
        KeepRule(7, "d"),
        KeepRule(4, "w"),
        KeepRule(12, "m"),
        KeepRule(3, ""),
    ]


@pytest.mark.parametrize("text", ["", "0d", "d", "7x", "7d,", "-1", "1.5d", "7 d", "٣d", "100000"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse_rules(text)


def test_the_newest_of_each_period_stays() -> None:
    backups = [
        (1, at("2026-01-31T23:59")),
        (2, at("2026-02-01T00:01")),
        (3, at("2026-02-01T12:00")),
        (4, at("2026-02-02T01:00")),
        (5, at("2026-02-09T01:00")),
        (6, at("2026-02-09T02:00")),
    ]
    assert kept(backups, parse_rules("1")) == {6}
    assert kept(backups, parse_rules("3")) == {4, 5, 6}
    assert kept(backups, parse_rules("3d")) == {3, 4, 6}
    # Weeks begin on Monday: the first of February is a Sunday.
    assert kept(backups, parse_rules("9w")) == {3, 4, 6}
    assert kept(backups, parse_rules("2m")) == {1, 6}
    assert kept(backups, parse_rules("2d,2m")) == {1, 4, 6}
    assert kept(backups, parse_rules("99")) == {1, 2, 3, 4, 5, 6}


def test_the_newest_stays_whatever_the_clock_said() -> None:
    assert kept([(1, at("2026-05-01T00:00")), (2, at("2020-01-01T00:00"))], parse_rules("1m")) == {
        2
    }
    assert kept([], parse_rules("1")) == set()
