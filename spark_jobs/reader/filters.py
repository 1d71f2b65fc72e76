"""Turns filters that Spark pushes down into a narrower query; Spark keeps the others.

Uses class names and attributes only, so it does not depend on a Spark version. It accepts a filter
only if the query answers it exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from spark_jobs.reader.options import floor_ms
from spark_jobs.reader.query import TYPES, Names, Query

_NEVER_NULL: Final = frozenset({"topic", "epoch", "seq", "ts"})
_COMPARISONS: Final = frozenset(
    {"EqualTo", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual"}
)


def narrow(query: Query, filters: Iterable[Any]) -> tuple[Query, list[Any]]:
    """The query with the accepted filters, and the filters that Spark still has to apply."""
    left: list[Any] = []
    for each in filters:
        narrowed = _taken(query, each)
        if narrowed is None:
            left.append(each)
        else:
            query = narrowed
    return query, left


def _taken(query: Query, item: Any) -> Query | None:
    """The narrower query, or None for a filter that is not accepted."""
    path: tuple[str, ...] = getattr(item, "attribute", ())
    if len(path) != 1 or path[0] not in TYPES:
        return None
    column, kind = path[0], type(item).__name__
    if kind == "IsNotNull":
        return query if column in _NEVER_NULL else None
    value = getattr(item, "value", None)
    if value is None:
        return None
    if column in ("topic", "tag", "node"):
        return _names(query, column, kind, value)
    if column == "seq" and kind in _COMPARISONS and isinstance(value, int):
        return _numbers(query, kind, value)
    if column == "ts" and kind in _COMPARISONS:
        return _times(query, kind, value)
    return None


def _names(query: Query, column: str, kind: str, value: Any) -> Query | None:
    if kind == "EqualTo" and isinstance(value, str):
        names = Names(frozenset({value}))
    elif kind == "In" and all(each is None or isinstance(each, str) for each in value):
        names = Names(frozenset(each for each in value if each is not None))
    elif kind == "StringStartsWith" and isinstance(value, str):
        names = Names(None, (value,))
    else:
        return None
    if column == "topic":
        return replace(query, topics=(*query.topics, names))
    if column == "tag":
        return replace(query, tags=(*query.tags, names))
    return replace(query, nodes=(*query.nodes, names))


def _numbers(query: Query, kind: str, value: int) -> Query:
    if kind == "EqualTo":
        return query.narrow_seqs(value, value)
    if kind == "GreaterThan":
        return query.narrow_seqs(value + 1, None)
    if kind == "GreaterThanOrEqual":
        return query.narrow_seqs(value, None)
    return query.narrow_seqs(None, value - 1 if kind == "LessThan" else value)


def _times(query: Query, kind: str, value: Any) -> Query | None:
    """Narrow the query by a time.

    Records have whole milliseconds, so a bound between two of them moves to the next.
    """
    if isinstance(value, datetime) and value.tzinfo is not None:
        low = floor_ms(value)
        is_whole = value.microsecond % 1000 == 0
    elif isinstance(value, int) and not isinstance(value, bool):
        low, is_whole = value, True
    else:
        return None
    from_here = low if is_whole else low + 1  # the first ms at or after the bound
    if kind == "EqualTo":
        return query.narrow_times(low, low + 1 if is_whole else low)
    if kind == "GreaterThan":
        return query.narrow_times(low + 1, None)
    if kind == "GreaterThanOrEqual":
        return query.narrow_times(from_here, None)
    return query.narrow_times(None, from_here if kind == "LessThan" else low + 1)
