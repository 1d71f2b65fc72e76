"""The types of the table of metrics.

Called by `metric_table` and `prometheus`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from topics_server.runtime.metrics import Facts


class Buckets(NamedTuple):
    """A histogram: the number of values up to each inclusive bound, and the sum of all values."""

    rows: list[tuple[str, float]]
    total: float


class MetricRow(NamedTuple):
    """One metric. `label`: the name of its one label, if it has one."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    get: Callable[[Any], float | dict[str, float] | Buckets | None]
    label: str = ""


class MetricSection(NamedTuple):
    """The metrics that read one part of the facts of a scrape."""

    part: Callable[[Facts], Any]
    rows: tuple[MetricRow, ...]
