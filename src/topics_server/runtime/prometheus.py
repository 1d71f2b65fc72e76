"""Renders metrics as Prometheus text (format 0.0.4) or JSON values.

`metric_table` has every metric; the library renders it. Blocks of thousands of rows (topics,
routers, routes) are rendered by hand, because the library takes ten times as long. Labels need no
escaping: they are names of topics and routers, templates and methods. The library reads the
process's own metrics from `/proc`. Called by `api/operate/probes`, on a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from topics_server.runtime.metric_rows import Buckets, MetricRow
from topics_server.runtime.metric_table import (
    CONSUMER_ROWS,
    METRICS,
    QUEUE_ROWS,
    ROUTER_ROWS,
    TIME_STEPS,
    TOPIC_ROWS,
    VIEW_ROWS,
    step_buckets,
)
from topics_server.runtime.metrics import Facts, RouteFacts

_FAMILIES: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


def as_text(facts: Facts) -> bytes:
    """Prometheus text exposition, format 0.0.4. Safe on any thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FactsCollector(facts))
    registry.register(_process_collector())
    text = generate_latest(registry)
    text += _request_text(facts.requests)
    text += _block_text(facts)
    return text


def as_values(facts: Facts) -> dict[str, Any]:
    """The same metrics for JSON: a number, or a list of `{"labels", "value"}`."""
    values: dict[str, Any] = {}
    for family in (*_families(facts), *_process_collector().collect()):
        for sample in family.samples:
            value = int(sample.value) if float(sample.value).is_integer() else sample.value
            if sample.labels:
                values.setdefault(sample.name, []).append({"labels": sample.labels, "value": value})
            else:
                values[sample.name] = value
    values |= _request_values(facts.requests)
    values |= _block_values(facts)
    return values


@cache
def _process_collector() -> ProcessCollector:
    """Memory, open files, processor seconds, start time: `process_*`."""
    return ProcessCollector(registry=None)


class _FactsCollector(Collector):
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def collect(self) -> Iterable[Metric]:
        return _families(self._facts)


def _families(facts: Facts) -> Iterator[Metric]:
    """The metrics of the table that are present now."""
    for section in METRICS:
        part = section.part(facts)
        if part is None:
            continue
        for row in section.rows:
            value = row.get(part)
            if value is not None:
                yield _family(row, value)


def _family(row: MetricRow, value: float | dict[str, float] | Buckets) -> Metric:
    if isinstance(value, Buckets):
        return HistogramMetricFamily(row.name, row.help, value.rows, value.total)
    family: GaugeMetricFamily | CounterMetricFamily = _FAMILIES[row.kind](
        row.name, row.help, labels=[row.label] if row.label else []
    )
    if isinstance(value, dict):
        for label, number in value.items():
            family.add_metric([label], number)
    else:
        family.add_metric([], value)
    return family


# --- topics and routers -----------------------------------------------------------------------


def _blocks(facts: Facts) -> Iterator[tuple[str, Sequence[MetricRow], list[tuple[str, Any]]]]:
    """The blocks of many rows: label name, metrics, and (label value, object) for each row."""
    if facts.store is not None:
        topics = facts.store.topics
        yield "topic", TOPIC_ROWS, [(topic.name, topic) for topic in topics]
        queues = [(topic.name, topic) for topic in topics if topic.queue is not None]
        if queues:
            yield "topic", QUEUE_ROWS, queues
    if facts.store is not None and facts.store.consumers:
        yield "consumer", CONSUMER_ROWS, [(each.name, each) for each in facts.store.consumers]
    if facts.routers is not None and facts.routers.routers:
        yield "router", ROUTER_ROWS, [(router.name, router) for router in facts.routers.routers]
    if facts.views is not None and facts.views.views:
        yield "view", VIEW_ROWS, [(view.name, view) for view in facts.views.views]


def _block_text(facts: Facts) -> bytes:
    lines: list[str] = []
    for label, rows, shown in _blocks(facts):
        for row in rows:
            name, get = row.name, row.get
            lines += (f"# HELP {name} {row.help}\n", f"# TYPE {name} {row.kind}\n")
            lines += [f'{name}{{{label}="{text}"}} {get(part)}.0\n' for text, part in shown]
    return "".join(lines).encode("ascii")


def _block_values(facts: Facts) -> dict[str, Any]:
    return {
        row.name: [{"labels": {label: text}, "value": row.get(part)} for text, part in shown]
        for label, rows, shown in _blocks(facts)
        for row in rows
    }


# --- requests ---------------------------------------------------------------------------------

_REQUESTS: Final = "topics_http_requests_total"
_TIMES: Final = "topics_http_request_us"


def _request_rows(requests: Sequence[RouteFacts]) -> Iterator[tuple[str, dict[str, str], int]]:
    """Sample name, labels and value; routes without requests have no rows."""
    asked = [facts for facts in requests if any(facts.classes)]
    for facts in asked:
        for digit, count in enumerate(facts.classes):
            if count:
                labels = {"route": facts.route, "method": facts.method, "code": f"{digit}xx"}
                yield _REQUESTS, labels, count
    for facts in asked:
        labels = {"route": facts.route, "method": facts.method}
        for bound, count in step_buckets(facts.counts, TIME_STEPS):
            yield f"{_TIMES}_bucket", {**labels, "le": bound}, count
        yield f"{_TIMES}_count", labels, sum(facts.counts)
        yield f"{_TIMES}_sum", labels, facts.sum_us


def _request_text(requests: Sequence[RouteFacts]) -> bytes:
    lines: list[str] = []
    headings = {
        _REQUESTS: f"# HELP {_REQUESTS} Answers by route, method and class of status.\n"
        f"# TYPE {_REQUESTS} counter\n",
        f"{_TIMES}_bucket": f"# HELP {_TIMES} Microseconds from a request's head to its answer.\n"
        f"# TYPE {_TIMES} histogram\n",
    }
    for name, labels, value in _request_rows(requests):
        lines.append(headings.pop(name, ""))
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value}.0\n")
    return "".join(lines).encode("ascii")


def _request_values(requests: Sequence[RouteFacts]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, labels, value in _request_rows(requests):
        values.setdefault(name, []).append({"labels": labels, "value": value})
    return values
