"""Decides which backups `--keep 7d,4w,12m` keeps. Pure.

A rule with a letter keeps the newest backup of each day, week or month (UTC) that has one, for as
many of these as it says. A rule without a letter keeps that many of the newest backups. The newest
backup is always kept.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

_RULE: Final = re.compile(r"([1-9][0-9]{0,4})([dwm]?)", re.ASCII)


class KeepRule(NamedTuple):
    """Keep `most` backups, one of each `unit`: "d", "w" or "m"; "" keeps the newest ones."""

    most: int
    unit: str


def parse_rules(text: str) -> list[KeepRule]:
    """The rules of a comma-separated list. Raises `ValueError`."""
    rules: list[KeepRule] = []
    for part in text.split(","):
        found = _RULE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part!r} is not a number from 1 on, or one with d, w or m")
        rules.append(KeepRule(int(found[1]), found[2]))
    return rules


def kept(backups: Iterable[tuple[int, int]], rules: Sequence[KeepRule]) -> set[int]:
    """Numbers of the backups to keep; each input pair is a number and a time in ms."""
    newest_first = sorted(backups, reverse=True)
    result = {number for number, _ in newest_first[:1]}
    for rule in rules:
        seen: set[object] = set()
        for number, ts_ms in newest_first:
            period = _PERIODS[rule.unit](number, ts_ms)
            if period in seen:
                continue
            if len(seen) == rule.most:
                break
            seen.add(period)
            result.add(number)
    return result


def _day(ts_ms: int) -> datetime.date:
    return datetime.datetime.fromtimestamp(ts_ms / 1000, datetime.UTC).date()


_PERIODS: Final[dict[str, Callable[[int, int], object]]] = {
    "": lambda number, ts_ms: number,
    "d": lambda number, ts_ms: _day(ts_ms),
    "w": lambda number, ts_ms: _day(ts_ms).isocalendar()[:2],
    "m": lambda number, ts_ms: (_day(ts_ms).year, _day(ts_ms).month),
}
