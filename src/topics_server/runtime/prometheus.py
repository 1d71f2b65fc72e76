"""Renders metrics as Prometheus text (format 0.0.4) or JSON values.

Blocks of thousands of rows (topics, routers, routes) are printed by hand, as the library takes ten
times as long for them. Nothing in a label needs to be escaped: names of topics and routers,
templates and methods. Figures of the process itself come from the library, which reads `/proc`.
Called by `api/operate/probes`, on a thread.
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

from topics_server.runtime.metrics import (
    LATENCY_BOUNDS_US,
    ConnectionFacts,
    DiskFacts,
    Facts,
    LatencyHistogram,
    PressureFacts,
    RecoveryFacts,
    RouteFacts,
    RouterFacts,
    RoutersFacts,
    ShardFacts,
    StepHistogram,
    StoreFacts,
    TopicMetrics,
    WatchFacts,
)

# Powers of two that bound the buckets of a `StepHistogram`, first and last.
_TIME_STEPS: Final = (6, 25)  # 64 us to 34 s
_SIZE_STEPS: Final = (1, 14)


def as_text(facts: Facts) -> bytes:
    """Prometheus text exposition, format 0.0.4. Safe on any thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FactsCollector(facts))
    registry.register(_process_collector())
    text = generate_latest(registry)
    text += _request_text(facts.requests)
    if facts.store is not None:
        text += _topic_text(facts.store.topics)
    if facts.routers is not None:
        text += _router_text(facts.routers.routers)
    return text


def as_values(facts: Facts) -> dict[str, Any]:
    """The same figures for JSON: a number, or a list of `{"labels", "value"}` where labelled."""
    values: dict[str, Any] = {}
    for family in (*_families(facts), *_process_collector().collect()):
        for sample in family.samples:
            value = int(sample.value) if float(sample.value).is_integer() else sample.value
            if sample.labels:
                values.setdefault(sample.name, []).append({"labels": sample.labels, "value": value})
            else:
                values[sample.name] = value
    values |= _request_values(facts.requests)
    if facts.store is not None:
        values |= _topic_values(facts.store.topics)
    if facts.routers is not None:
        values |= _router_values(facts.routers.routers)
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
    if facts.version:
        build = GaugeMetricFamily(
            "topics_build_info", "1; which version it is.", labels=["version"]
        )
        build.add_metric([facts.version], 1)
        yield build
    if facts.http is not None:
        yield from _connection_families(facts.http)
    if facts.log_lines_dropped is not None:
        yield CounterMetricFamily(
            "topics_log_lines_dropped",
            "Lines of the log that nobody took from standard error in time.",
            value=facts.log_lines_dropped,
        )
    if facts.store is not None:
        yield from _store_families(facts.store)
    if facts.routers is not None:
        yield from _routers_families(facts.routers)
    if facts.shards:
        yield from _journal_families(facts.shards)
    if facts.watchers is not None:
        yield from _watch_families(facts.watchers)
    if facts.disk is not None:
        yield from _disk_families(facts.disk)
    if facts.recovery is not None:
        yield from _recovery_families(facts.recovery)
    if facts.pressure is not None:
        yield from _pressure_families(facts.pressure)


def _gauges(rows: Iterable[tuple[str, str, float | None]]) -> Iterator[Metric]:
    """Gauges of name, help and value; those without a value are absent."""
    for name, about, value in rows:
        if value is not None:
            yield GaugeMetricFamily(name, about, value=value)


def _counters(rows: Iterable[tuple[str, str, float | None]]) -> Iterator[Metric]:
    for name, about, value in rows:
        if value is not None:
            yield CounterMetricFamily(name, about, value=value)


def _routers_families(routers: RoutersFacts) -> Iterator[Metric]:
    shown = routers.routers
    yield from _gauges(
        (
            ("topics_routers", "Routers that exist.", routers.count),
            (
                "topics_router_metrics_truncated",
                "1 when there are more routers than the per-router figures show.",
                int(routers.truncated),
            ),
            (
                "topics_routers_stalled",
                "Routers shown whose destination takes nothing.",
                sum(router.stalled for router in shown),
            ),
            (
                "topics_router_lag_max",
                "Most seqs that a router shown has not examined.",
                max((router.lag for router in shown), default=0),
            ),
        )
    )


def _connection_families(http: ConnectionFacts) -> Iterator[Metric]:
    yield from _gauges(
        (
            (
                "topics_http_connections",
                "Connections that are open, idle ones and streams counted.",
                http.open,
            ),
            ("topics_http_connections_max", "So many may be; 0: no cap.", http.most),
            (
                "topics_receiving_bytes",
                "Bytes of bodies and messages being received.",
                http.receiving_bytes,
            ),
            ("topics_receiving_bytes_max", "So many may be; 0: no cap.", http.receiving_most),
        )
    )
    timeouts = CounterMetricFamily(
        "topics_http_timeouts",
        "Connections ended as their client was slow, by what.",
        labels=["kind"],
    )
    for kind, count in sorted(http.timeouts.items()):
        timeouts.add_metric([kind], count)
    yield timeouts
    yield from _counters(
        (
            ("topics_http_evicted", "Idle connections closed to make room.", http.evicted),
            ("topics_http_refused", "Connections refused as there was none.", http.refused),
            (
                "topics_receiving_refused",
                "Bodies and messages refused as too much was being received.",
                http.receiving_refused,
            ),
            ("topics_http_put_off", "Receptions read in a later turn of the loop.", http.put_off),
        )
    )


def _watch_families(watch: WatchFacts) -> Iterator[Metric]:
    yield from _gauges(
        (
            ("topics_watch_behind", "Cursors of open streams below the head.", watch.behind),
            ("topics_watch_lag_max", "Most seqs that such a cursor is behind.", watch.lag_max),
            ("topics_watch_lag_sum", "Seqs that they are behind together.", watch.lag_sum),
            ("topics_watch_slow", "Streams whose client does not take what is sent.", watch.slow),
        )
    )


def _disk_families(disk: DiskFacts) -> Iterator[Metric]:
    tiers = (("hot", disk.hot_files, disk.hot_bytes), ("cold", disk.cold_files, disk.cold_bytes))
    segments = GaugeMetricFamily("topics_segments", "Sealed segments of a tier.", labels=["tier"])
    sizes = GaugeMetricFamily(
        "topics_segment_bytes", "Bytes of the files of these segments.", labels=["tier"]
    )
    for tier, files, size in tiers:
        segments.add_metric([tier], files)
        sizes.add_metric([tier], size)
    yield segments
    yield sizes
    yield from _gauges(
        (
            ("topics_disk_free_bytes", "Bytes free for the data directory.", disk.free_bytes),
            ("topics_disk_total_bytes", "Bytes of its file system.", disk.total_bytes),
            (
                "topics_disk_min_free_bytes",
                "Below so many free bytes appends are refused.",
                disk.min_free_bytes,
            ),
        )
    )


def _recovery_families(recovery: RecoveryFacts) -> Iterator[Metric]:
    yield from _gauges(
        (
            (
                "topics_recovery_duration_ms",
                "Milliseconds from the start of recovery to ready.",
                recovery.duration_ms,
            ),
            ("topics_recovery_entries", "Journal entries replayed then.", recovery.entries),
            ("topics_recovery_records", "Records that could be read then.", recovery.records),
            ("topics_recovery_torn_files", "Torn writes cut off then.", recovery.torn_files),
        )
    )


def _pressure_families(pressure: PressureFacts) -> Iterator[Metric]:
    yield from _gauges(
        (
            ("topics_loop_lag_ms", "How late the event loop is, lately.", pressure.loop_lag_ms),
            ("topics_backlog_bytes", "Bytes waiting for the journal.", pressure.backlog_bytes),
            ("topics_pressure", "0: nobody waits; 1: some are refused.", pressure.pressure),
            ("topics_throttle_waiting", "Requests that wait for a turn.", pressure.waiting),
            ("topics_throttle_waiting_bytes", "Bytes they hold.", pressure.waiting_bytes),
            (
                "topics_throttle_threshold",
                "Effective priority above which nobody waits; absent while nobody does.",
                pressure.threshold,
            ),
        )
    )
    yield CounterMetricFamily(
        "topics_parked", "Requests that waited for a turn.", value=pressure.parked
    )
    yield CounterMetricFamily(
        "topics_throttle_fair",
        "Requests served before more urgent ones, so that their topic does not starve.",
        value=pressure.fair,
    )
    throttled = CounterMetricFamily(
        "topics_throttled",
        "Requests answered 429 under pressure; late: not served in time, full: too much waited.",
        labels=["reason"],
    )
    for reason, count in sorted(pressure.throttled.items()):
        throttled.add_metric([reason], count)
    yield throttled


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


def _topic_text(topics: Sequence[TopicMetrics]) -> bytes:
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


def _topic_values(topics: Sequence[TopicMetrics]) -> dict[str, Any]:
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
    yield _latency_family(
        "topics_wal_fsync_latency_us",
        "Microseconds that a sync of a journal file took.",
        [s.sync_latency for s in shards if s.sync_latency is not None],
    )
    if writes := [s.write_us for s in shards if s.write_us is not None]:
        about = "Microseconds that a write of a group of frames took."
        yield _step_family("topics_wal_write_us", about, writes, _TIME_STEPS)
    if groups := [s.group_frames for s in shards if s.group_frames is not None]:
        about = "Frames of a group that is written, and synced, together."
        yield _step_family("topics_wal_group_frames", about, groups, _SIZE_STEPS)


def _latency_family(name: str, about: str, histograms: Sequence[LatencyHistogram]) -> Metric:
    merged = [sum(column) for column in zip(*(h.counts for h in histograms), strict=True)]
    merged = merged or [0] * (len(LATENCY_BOUNDS_US) + 1)
    buckets: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip((*map(str, LATENCY_BOUNDS_US), "+Inf"), merged, strict=True):
        running += count
        buckets.append((bound, running))
    family = HistogramMetricFamily(name, about)
    family.add_metric([], buckets, sum_value=sum(h.sum_us for h in histograms))
    return family


def _step_family(
    name: str, about: str, histograms: Sequence[StepHistogram], steps: tuple[int, int]
) -> Metric:
    merged = [sum(column) for column in zip(*(h.counts for h in histograms), strict=True)]
    family = HistogramMetricFamily(name, about)
    total = sum(h.total for h in histograms)
    family.add_metric([], list(_step_buckets(merged, steps)), sum_value=total)
    return family


def _step_buckets(counts: Sequence[int], steps: tuple[int, int]) -> Iterator[tuple[str, int]]:
    """Bounds, inclusive, and how many are not above them."""
    first, last = steps
    for digits in range(first, last + 1):
        # A number of so many binary digits is at most this.
        yield str((1 << digits) - 1), sum(counts[: digits + 1])
    yield "+Inf", sum(counts)


# --- requests ---------------------------------------------------------------------------------

_REQUESTS: Final = "topics_http_requests_total"
_TIMES: Final = "topics_http_request_us"


def _request_rows(requests: Sequence[RouteFacts]) -> Iterator[tuple[str, dict[str, str], int]]:
    """Sample name, labels and value; of what was never asked for there is none."""
    asked = [facts for facts in requests if any(facts.classes)]
    for facts in asked:
        for digit, count in enumerate(facts.classes):
            if count:
                labels = {"route": facts.route, "method": facts.method, "code": f"{digit}xx"}
                yield _REQUESTS, labels, count
    for facts in asked:
        labels = {"route": facts.route, "method": facts.method}
        for bound, count in _step_buckets(facts.counts, _TIME_STEPS):
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
