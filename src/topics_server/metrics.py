"""Figures of the server: plain counters that drivers keep, shown as Prometheus text or JSON.

Drivers count (a shard its frames, a histogram its syncs) in plain integers and hand them over as
facts; nothing here is touched on the way of a request. Only parts that exist report: a figure of an
absent part is absent, not zero. Pure code does not report. `log` is the server's one logger.
Called by `wal/shard` (histogram), `server.py` (wiring) and `api/probes`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

log: Final = logging.getLogger("topics_server")

# Topics that the per-topic block shows at most; beyond it says that it was cut.
TOPICS_SHOWN_MAX: Final = 2000
# Routers that the per-router block shows, likewise.
ROUTERS_SHOWN_MAX: Final = 2000
TEXT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

# Upper bounds of the sync histogram in microseconds, inclusive; beyond the last is +Inf.
LATENCY_BOUNDS_US: Final = (
    *(50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 7_500, 10_000),
    *(20_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 10_000_000),
)


class LatencyHistogram:
    """Latencies in microseconds; written by one thread, read by any."""

    __slots__ = ("counts", "sum_us")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_US) + 1)
        self.sum_us = 0.0

    def observe(self, microseconds: float) -> None:
        """Count one latency; negative ones (a stepped clock) count as 0."""
        taken = max(0.0, microseconds)
        self.counts[bisect_left(LATENCY_BOUNDS_US, taken)] += 1
        self.sum_us += taken

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(self.counts)


class ShardFacts(msgspec.Struct, frozen=True):
    """What one journal shard did since the process started, and how it is now."""

    frames: int = 0
    groups: int = 0
    syncs: int = 0
    bytes: int = 0
    rotations: int = 0
    queue_depth: int = 0
    queue_depth_peak: int = 0
    submit_full: int = 0
    read_only: bool = False
    sync_latency: LatencyHistogram | None = None


class QueueFacts(msgspec.Struct, frozen=True):
    """What the per-topic block shows of a queue beside that."""

    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int


class TopicFacts(msgspec.Struct, frozen=True):
    """What the per-topic block shows of one topic."""

    name: str
    head_seq: int
    earliest_seq: int
    records: int
    bytes: int
    queue: QueueFacts | None = None


class StoreFacts(msgspec.Struct, frozen=True):
    """The store's totals; absent while it is being recovered."""

    topics_by_class: dict[str, int]
    queue_topics: int
    records_live: int
    bytes_live: int
    damaged_records: int
    topics: Sequence[TopicFacts]
    topics_truncated: bool


class RouterFacts(msgspec.Struct, frozen=True):
    """What the per-router block shows of one router; `stalled` is 0 or 1."""

    name: str
    forwarded: int
    lag: int
    stalled: int


class RoutersFacts(msgspec.Struct, frozen=True):
    """All routers; absent while they are being recovered."""

    count: int
    routers: Sequence[RouterFacts]
    truncated: bool


class Facts(msgspec.Struct, frozen=True):
    """Everything one scrape shows, taken on the event loop in one go; cheap to take."""

    ready: bool
    progress: float
    uptime_ms: int
    shards: Sequence[ShardFacts]
    store: StoreFacts | None = None
    connections: int = 0
    watch_sessions: int | None = None
    leases_in_flight: int | None = None
    routers: RoutersFacts | None = None


def as_text(facts: Facts) -> bytes:
    """Prometheus text exposition, format 0.0.4. Safe on any thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FactsCollector(facts))
    text = generate_latest(registry)
    if facts.store is not None:
        text += _topic_text(facts.store.topics)
    if facts.routers is not None:
        text += _router_text(facts.routers.routers)
    return text


def as_values(facts: Facts) -> dict[str, Any]:
    """The same figures for JSON: a number, or a list of `{"labels", "value"}` where labelled."""
    values: dict[str, Any] = {}
    for family in _families(facts):
        for sample in family.samples:
            value = int(sample.value) if float(sample.value).is_integer() else sample.value
            if sample.labels:
                values.setdefault(sample.name, []).append({"labels": sample.labels, "value": value})
            else:
                values[sample.name] = value
    if facts.store is not None:
        values |= _topic_values(facts.store.topics)
    if facts.routers is not None:
        values |= _router_values(facts.routers.routers)
    return values


class _FactsCollector(Collector):
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def collect(self) -> Iterable[Metric]:
        return _families(self._facts)


def _families(facts: Facts) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "topics_ready", "1 when the server takes requests, 0 while it recovers or drains.",
        value=int(facts.ready),
    )  # fmt: skip
    yield GaugeMetricFamily(
        "topics_recovery_progress", "How far recovery is, 0 to 1.", value=facts.progress
    )
    yield GaugeMetricFamily(
        "topics_uptime_ms", "Milliseconds since the process started.", value=facts.uptime_ms
    )
    yield GaugeMetricFamily(
        "topics_sse_connections", "Streams and WebSockets that are open.", value=facts.connections
    )
    if facts.watch_sessions is not None:
        yield GaugeMetricFamily(
            "topics_watch_sessions", "Watch sessions that exist.", value=facts.watch_sessions
        )
    if facts.leases_in_flight is not None:
        yield GaugeMetricFamily(
            "topics_queue_leases_in_flight",
            "Leases of all queues that have not expired.",
            value=facts.leases_in_flight,
        )
    if facts.store is not None:
        yield from _store_families(facts.store)
    if facts.routers is not None:
        yield GaugeMetricFamily("topics_routers", "Routers that exist.", value=facts.routers.count)
        yield GaugeMetricFamily(
            "topics_router_metrics_truncated",
            "1 when there are more routers than the per-router figures show.",
            value=int(facts.routers.truncated),
        )
    if facts.shards:
        yield from _journal_families(facts.shards)


def _store_families(store: StoreFacts) -> Iterator[Metric]:
    by_class = GaugeMetricFamily(
        "topics_topics_by_class", "Topics of each durability class.", labels=["class"]
    )
    for name, count in sorted(store.topics_by_class.items()):
        by_class.add_metric([name], count)
    total = sum(store.topics_by_class.values())
    yield GaugeMetricFamily("topics_topics", "Topics that exist.", value=total)
    yield by_class
    for name, help_text, value in (
        ("topics_records_live", "Records that can be read.", store.records_live),
        ("topics_bytes_live", "Bytes of the records that can be read.", store.bytes_live),
        ("topics_queue_topics", "Topics of type queue.", store.queue_topics),
        (
            "topics_records_damaged",
            "Sealed records whose bytes are damaged.",
            store.damaged_records,
        ),
        (
            "topics_topic_metrics_truncated",
            "1 when there are more topics than the per-topic figures show.",
            int(store.topics_truncated),
        ),
    ):
        yield GaugeMetricFamily(name, help_text, value=value)


_TOPIC_FIGURES: Final = (
    ("topics_topic_head_seq", "Highest assigned seq.", "head_seq"),
    ("topics_topic_earliest_seq", "Seq of the first record that can be read.", "earliest_seq"),
    ("topics_topic_records_live", "Records that can be read.", "records"),
    ("topics_topic_bytes_live", "Bytes of those records.", "bytes"),
)
# Only queues have these.
_QUEUE_FIGURES: Final = (
    ("topics_topic_queue_ready", "Jobs that can be claimed.", "ready"),
    ("topics_topic_queue_in_flight", "Jobs that are leased.", "in_flight"),
    ("topics_topic_queue_delayed", "Jobs whose time has not come.", "delayed"),
    ("topics_topic_queue_dead_lettered", "Jobs moved to the dead-letter topic.", "dead_lettered"),
)


def _topic_text(topics: Sequence[TopicFacts]) -> bytes:
    """The per-topic block; by hand, as the library takes ten times as long for thousands of it.

    Topic names have nothing to escape.
    """
    lines: list[str] = []
    for name, help_text, field in _TOPIC_FIGURES:
        lines += (f"# HELP {name} {help_text}\n", f"# TYPE {name} gauge\n")
        lines += [f'{name}{{topic="{t.name}"}} {getattr(t, field)}.0\n' for t in topics]
    queues = [(t.name, t.queue) for t in topics if t.queue is not None]
    for name, help_text, field in _QUEUE_FIGURES if queues else ():
        lines += (f"# HELP {name} {help_text}\n", f"# TYPE {name} gauge\n")
        lines += [f'{name}{{topic="{topic}"}} {getattr(q, field)}.0\n' for topic, q in queues]
    return "".join(lines).encode("ascii")


def _topic_values(topics: Sequence[TopicFacts]) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: [{"labels": {"topic": t.name}, "value": getattr(t, field)} for t in topics]
        for name, _, field in _TOPIC_FIGURES
    }
    queues = [(t.name, t.queue) for t in topics if t.queue is not None]
    if queues:
        values |= {
            name: [{"labels": {"topic": topic}, "value": getattr(q, field)} for topic, q in queues]
            for name, _, field in _QUEUE_FIGURES
        }
    return values


# Name, type, help and field.
_ROUTER_FIGURES: Final = (
    ("topics_router_forwarded_total", "counter", "Copies made since it was created.", "forwarded"),
    ("topics_router_lag", "gauge", "Seqs of its source that it has not examined.", "lag"),
    ("topics_router_stalled", "gauge", "1 when its destination takes nothing.", "stalled"),
)


def _router_text(routers: Sequence[RouterFacts]) -> bytes:
    """The per-router block, as the per-topic one; router names have nothing to escape either."""
    lines: list[str] = []
    for name, kind, help_text, field in _ROUTER_FIGURES if routers else ():
        lines += (f"# HELP {name} {help_text}\n", f"# TYPE {name} {kind}\n")
        lines += [f'{name}{{router="{r.name}"}} {getattr(r, field)}.0\n' for r in routers]
    return "".join(lines).encode("ascii")


def _router_values(routers: Sequence[RouterFacts]) -> dict[str, Any]:
    return {
        name: [{"labels": {"router": r.name}, "value": getattr(r, field)} for r in routers]
        for name, _, _, field in (_ROUTER_FIGURES if routers else ())
    }


def _journal_families(shards: Sequence[ShardFacts]) -> Iterator[Metric]:
    for name, help_text, total in (
        ("frames", "Frames handed to the journal.", sum(s.frames for s in shards)),
        ("batches", "Groups of frames written by one write.", sum(s.groups for s in shards)),
        ("fsyncs", "Syncs of journal files.", sum(s.syncs for s in shards)),
        ("bytes_written", "Bytes of groups written.", sum(s.bytes for s in shards)),
        ("rotations", "Journal files that were full.", sum(s.rotations for s in shards)),
        ("submit_full", "Frames refused by a full queue.", sum(s.submit_full for s in shards)),
    ):
        yield CounterMetricFamily(f"topics_wal_{name}", help_text, value=total)
    for name, help_text, value in (
        ("queue_depth", "Frames waiting to be written.", sum(s.queue_depth for s in shards)),
        ("queue_depth_peak", "Most that waited.", max(s.queue_depth_peak for s in shards)),
        ("read_only", "Shards that take no writes.", sum(s.read_only for s in shards)),
    ):
        yield GaugeMetricFamily(f"topics_wal_{name}", help_text, value=value)
    yield _sync_family([s.sync_latency for s in shards if s.sync_latency is not None])


def _sync_family(histograms: Sequence[LatencyHistogram]) -> Metric:
    merged = [sum(column) for column in zip(*(h.counts for h in histograms), strict=True)]
    merged = merged or [0] * (len(LATENCY_BOUNDS_US) + 1)
    buckets: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip((*map(str, LATENCY_BOUNDS_US), "+Inf"), merged, strict=True):
        running += count
        buckets.append((bound, running))
    family = HistogramMetricFamily(
        "topics_wal_fsync_latency_us", "Microseconds that a sync of a journal file took."
    )
    family.add_metric([], buckets, sum_value=sum(h.sum_us for h in histograms))
    return family
