"""Every metric, once: name, kind, help and getter.

A section belongs to one part of the facts of a scrape; if the part is absent, so are its metrics. A
getter returns a number, a dict from a label's value to a number, or the buckets of a histogram;
None: the metric is absent now. `TOPIC_ROWS`, `QUEUE_ROWS`, `ROUTER_ROWS` and `VIEW_ROWS` describe
one topic, queue, router or view each. A new metric is one row here and one field of
`runtime/metrics`. Called by `prometheus`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from topics_server.runtime.backup_metrics import KEEPING
from topics_server.runtime.metric_rows import Buckets, MetricRow, MetricSection
from topics_server.runtime.metrics import (
    LATENCY_BOUNDS_US,
    LatencyHistogram,
    ShardFacts,
    StepHistogram,
)

# Powers of two that bound the buckets of a `StepHistogram`, first and last.
TIME_STEPS: Final = (6, 25)  # 64 us to 34 s
SIZE_STEPS: Final = (1, 14)


def step_buckets(counts: Sequence[int], steps: tuple[int, int]) -> Iterator[tuple[str, int]]:
    """Inclusive bounds, and the number of values up to each."""
    first, last = steps
    for digits in range(first, last + 1):
        # The highest number with this many binary digits.
        yield str((1 << digits) - 1), sum(counts[: digits + 1])
    yield "+Inf", sum(counts)


def _latencies(histograms: Sequence[LatencyHistogram]) -> Buckets:
    merged = [sum(column) for column in zip(*(h.counts for h in histograms), strict=True)]
    merged = merged or [0] * (len(LATENCY_BOUNDS_US) + 1)
    buckets: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip((*map(str, LATENCY_BOUNDS_US), "+Inf"), merged, strict=True):
        running += count
        buckets.append((bound, running))
    return Buckets(buckets, sum(h.sum_us for h in histograms))


def _steps(histograms: Sequence[StepHistogram], steps: tuple[int, int]) -> Buckets | None:
    if not histograms:
        return None
    merged = [sum(column) for column in zip(*(h.counts for h in histograms), strict=True)]
    return Buckets(list(step_buckets(merged, steps)), sum(h.total for h in histograms))


def _sum(field: str) -> Callable[[Sequence[ShardFacts]], float]:
    return lambda shards: sum(getattr(shard, field) for shard in shards)


# --- the table --------------------------------------------------------------------------------

_PROCESS: Final = (
    MetricRow(
        "gauge",
        "topics_ready",
        "1 when the server takes requests, 0 while it recovers or drains.",
        lambda facts: int(facts.ready),
    ),
    MetricRow(
        "gauge",
        "topics_recovery_progress",
        "How far recovery is, 0 to 1.",
        lambda facts: facts.progress,
    ),
    MetricRow(
        "gauge",
        "topics_uptime_ms",
        "Milliseconds since the process started.",
        lambda facts: facts.uptime_ms,
    ),
    MetricRow(
        "gauge",
        "topics_sse_connections",
        "Streams and WebSockets that are open.",
        lambda facts: facts.connections,
    ),
    MetricRow(
        "gauge",
        "topics_watch_sessions",
        "Watch sessions that exist.",
        lambda facts: facts.watch_sessions,
    ),
    MetricRow(
        "gauge",
        "topics_queue_leases_in_flight",
        "Leases of all queues that have not expired.",
        lambda facts: facts.leases_in_flight,
    ),
    MetricRow(
        "gauge",
        "topics_build_info",
        "1; which version it is.",
        lambda facts: {facts.version: 1} if facts.version else None,
        "version",
    ),
)
_HTTP: Final = (
    MetricRow(
        "gauge",
        "topics_http_connections",
        "Connections that are open, idle ones and streams counted.",
        lambda http: http.open,
    ),
    MetricRow(
        "gauge",
        "topics_http_connections_max",
        "So many may be; 0: no cap.",
        lambda http: http.most,
    ),
    MetricRow(
        "gauge",
        "topics_receiving_bytes",
        "Bytes of bodies and messages being received.",
        lambda http: http.receiving_bytes,
    ),
    MetricRow(
        "gauge",
        "topics_receiving_bytes_max",
        "So many may be; 0: no cap.",
        lambda http: http.receiving_most,
    ),
    MetricRow(
        "counter",
        "topics_http_timeouts",
        "Connections ended as their client was slow, by what.",
        lambda http: dict(sorted(http.timeouts.items())),
        "kind",
    ),
    MetricRow(
        "counter",
        "topics_http_evicted",
        "Idle connections closed to make room.",
        lambda http: http.evicted,
    ),
    MetricRow(
        "counter",
        "topics_http_refused",
        "Connections refused as there was none.",
        lambda http: http.refused,
    ),
    MetricRow(
        "counter",
        "topics_receiving_refused",
        "Bodies and messages refused as too much was being received.",
        lambda http: http.receiving_refused,
    ),
    MetricRow(
        "counter",
        "topics_http_put_off",
        "Receptions read in a later turn of the loop.",
        lambda http: http.put_off,
    ),
)
_LOG: Final = (
    MetricRow(
        "counter",
        "topics_log_lines_dropped",
        "Lines of the log that nobody took from standard error in time.",
        lambda dropped: dropped,
    ),
)
_STORE: Final = (
    MetricRow(
        "gauge",
        "topics_topics",
        "Topics that exist.",
        lambda store: sum(store.topics_by_class.values()),
    ),
    MetricRow(
        "gauge",
        "topics_topics_by_class",
        "Topics of each durability class.",
        lambda store: dict(sorted(store.topics_by_class.items())),
        "class",
    ),
    MetricRow(
        "gauge",
        "topics_records_live",
        "Records that can be read.",
        lambda store: store.records_live,
    ),
    MetricRow(
        "gauge",
        "topics_bytes_live",
        "Bytes of the records that can be read.",
        lambda store: store.bytes_live,
    ),
    MetricRow(
        "gauge",
        "topics_queue_topics",
        "Topics of type queue.",
        lambda store: store.queue_topics,
    ),
    MetricRow(
        "gauge",
        "topics_records_damaged",
        "Sealed records whose bytes are damaged.",
        lambda store: store.damaged_records,
    ),
    MetricRow(
        "counter", "topics_conditions", "Decided conditions.", lambda it: it.conditions, "outcome"
    ),
    MetricRow(
        "gauge",
        "topics_topic_metrics_truncated",
        "1 when there are more topics than the per-topic figures show.",
        lambda store: int(store.topics_truncated),
    ),
    MetricRow(
        "gauge",
        "topics_consumer_metrics_truncated",
        "1 when there are more consumers than the per-consumer figures show.",
        lambda store: int(store.consumers_truncated),
    ),
)
_ROUTERS: Final = (
    MetricRow("gauge", "topics_routers", "Routers that exist.", lambda routers: routers.count),
    MetricRow(
        "gauge",
        "topics_router_metrics_truncated",
        "1 when there are more routers than the per-router figures show.",
        lambda routers: int(routers.truncated),
    ),
    MetricRow(
        "gauge",
        "topics_routers_stalled",
        "Routers shown whose destination takes nothing.",
        lambda routers: sum(router.stalled for router in routers.routers),
    ),
    MetricRow(
        "gauge",
        "topics_router_lag_max",
        "Most seqs that a router shown has not examined.",
        lambda routers: max((router.lag for router in routers.routers), default=0),
    ),
)
_VIEWS: Final = (
    MetricRow("gauge", "topics_views", "Views that exist.", lambda views: views.count),
    MetricRow(
        "gauge",
        "topics_view_metrics_truncated",
        "1 when there are more views than the per-view figures show.",
        lambda views: int(views.truncated),
    ),
    MetricRow(
        "gauge",
        "topics_views_failed",
        "Views shown that stand still at a record or for want of disk space.",
        lambda views: sum(view.failed for view in views.views),
    ),
    MetricRow(
        "gauge",
        "topics_view_lag_max",
        "Most seqs that a view shown has not processed.",
        lambda views: max((view.lag for view in views.views), default=0),
    ),
    MetricRow(
        "counter", "topics_view_queries", "Queries answered with rows.", lambda views: views.queries
    ),
    MetricRow(
        "counter",
        "topics_view_timeouts",
        "Queries whose view did not process the wanted record in time.",
        lambda views: views.timeouts,
    ),
    MetricRow(
        "histogram",
        "topics_view_query_us",
        "Time of a query without its wait for a record, in microseconds.",
        lambda views: _latencies([views.query_latency]),
    ),
)
_JOURNAL: Final = (
    MetricRow("counter", "topics_wal_frames", "Frames handed to the journal.", _sum("frames")),
    MetricRow(
        "counter",
        "topics_wal_batches",
        "Groups of frames written by one write.",
        _sum("groups"),
    ),
    MetricRow("counter", "topics_wal_fsyncs", "Syncs of journal files.", _sum("syncs")),
    MetricRow("counter", "topics_wal_bytes_written", "Bytes of groups written.", _sum("bytes")),
    MetricRow(
        "counter", "topics_wal_rotations", "Journal files that were full.", _sum("rotations")
    ),
    MetricRow(
        "counter",
        "topics_wal_submit_full",
        "Frames refused by a full queue.",
        _sum("submit_full"),
    ),
    MetricRow(
        "gauge", "topics_wal_queue_depth", "Frames waiting to be written.", _sum("queue_depth")
    ),
    MetricRow(
        "gauge",
        "topics_wal_queue_depth_peak",
        "Most that waited.",
        lambda shards: max(shard.queue_depth_peak for shard in shards),
    ),
    MetricRow("gauge", "topics_wal_read_only", "Shards that take no writes.", _sum("read_only")),
    MetricRow(
        "histogram",
        "topics_wal_fsync_latency_us",
        "Microseconds that a sync of a journal file took.",
        lambda shards: _latencies([s.sync_latency for s in shards if s.sync_latency is not None]),
    ),
    MetricRow(
        "histogram",
        "topics_wal_write_us",
        "Microseconds that a write of a group of frames took.",
        lambda shards: _steps([s.write_us for s in shards if s.write_us is not None], TIME_STEPS),
    ),
    MetricRow(
        "histogram",
        "topics_wal_group_frames",
        "Frames of a group that is written, and synced, together.",
        lambda shards: _steps(
            [s.group_frames for s in shards if s.group_frames is not None], SIZE_STEPS
        ),
    ),
)
_WATCH: Final = (
    MetricRow(
        "gauge",
        "topics_watch_behind",
        "Cursors of open streams below the head.",
        lambda watch: watch.behind,
    ),
    MetricRow(
        "gauge",
        "topics_watch_lag_max",
        "Most seqs that such a cursor is behind.",
        lambda watch: watch.lag_max,
    ),
    MetricRow(
        "gauge",
        "topics_watch_lag_sum",
        "Seqs that they are behind together.",
        lambda watch: watch.lag_sum,
    ),
    MetricRow(
        "gauge",
        "topics_watch_slow",
        "Streams whose client does not take what is sent.",
        lambda watch: watch.slow,
    ),
)
_DISK: Final = (
    MetricRow(
        "gauge",
        "topics_segments",
        "Sealed segments of a tier.",
        lambda disk: {"hot": disk.hot_files, "cold": disk.cold_files},
        "tier",
    ),
    MetricRow(
        "gauge",
        "topics_segment_bytes",
        "Bytes of the files of these segments.",
        lambda disk: {"hot": disk.hot_bytes, "cold": disk.cold_bytes},
        "tier",
    ),
    MetricRow(
        "gauge",
        "topics_disk_free_bytes",
        "Bytes free for the data directory.",
        lambda disk: disk.free_bytes,
    ),
    MetricRow(
        "gauge",
        "topics_disk_total_bytes",
        "Bytes of its file system.",
        lambda disk: disk.total_bytes,
    ),
    MetricRow(
        "gauge",
        "topics_disk_min_free_bytes",
        "Below so many free bytes appends are refused.",
        lambda disk: disk.min_free_bytes,
    ),
)
_RECOVERY: Final = (
    MetricRow(
        "gauge",
        "topics_recovery_duration_ms",
        "Milliseconds from the start of recovery to ready.",
        lambda recovery: recovery.duration_ms,
    ),
    MetricRow(
        "gauge",
        "topics_recovery_entries",
        "Journal entries replayed then.",
        lambda recovery: recovery.entries,
    ),
    MetricRow(
        "gauge",
        "topics_recovery_records",
        "Records that could be read then.",
        lambda recovery: recovery.records,
    ),
    MetricRow(
        "gauge",
        "topics_recovery_torn_files",
        "Torn writes cut off then.",
        lambda recovery: recovery.torn_files,
    ),
)
_PRESSURE: Final = (
    MetricRow(
        "gauge",
        "topics_loop_lag_ms",
        "How late the event loop is, lately.",
        lambda pressure: pressure.loop_lag_ms,
    ),
    MetricRow(
        "gauge",
        "topics_backlog_bytes",
        "Bytes waiting for the journal.",
        lambda pressure: pressure.backlog_bytes,
    ),
    MetricRow(
        "gauge",
        "topics_pressure",
        "0: nobody waits; 1: some are refused.",
        lambda pressure: pressure.pressure,
    ),
    MetricRow(
        "gauge",
        "topics_throttle_waiting",
        "Requests that wait for a turn.",
        lambda pressure: pressure.waiting,
    ),
    MetricRow(
        "gauge",
        "topics_throttle_waiting_bytes",
        "Bytes they hold.",
        lambda pressure: pressure.waiting_bytes,
    ),
    MetricRow(
        "gauge",
        "topics_throttle_threshold",
        "Effective priority above which nobody waits; absent while nobody does.",
        lambda pressure: pressure.threshold,
    ),
    MetricRow(
        "counter",
        "topics_parked",
        "Requests that waited for a turn.",
        lambda pressure: pressure.queued,
    ),
    MetricRow(
        "counter",
        "topics_throttle_fair",
        "Requests served before more urgent ones, so that their topic does not starve.",
        lambda pressure: pressure.fair,
    ),
    MetricRow(
        "counter",
        "topics_throttled",
        "Requests answered 429 under pressure; late: not served in time, full: too much waited.",
        lambda pressure: dict(sorted(pressure.throttled.items())),
        "reason",
    ),
)
METRICS: Final = (
    MetricSection(lambda facts: facts, _PROCESS),
    MetricSection(lambda facts: facts.http, _HTTP),
    MetricSection(lambda facts: facts.log_lines_dropped, _LOG),
    MetricSection(lambda facts: facts.store, _STORE),
    MetricSection(lambda facts: facts.routers, _ROUTERS),
    MetricSection(lambda facts: facts.views, _VIEWS),
    MetricSection(lambda facts: facts.shards or None, _JOURNAL),
    MetricSection(lambda facts: facts.watchers, _WATCH),
    MetricSection(lambda facts: facts.disk, _DISK),
    MetricSection(lambda facts: facts.recovery, _RECOVERY),
    MetricSection(lambda facts: facts.pressure, _PRESSURE),
    *KEEPING,
)

# --- rows of single topics, routers and views -------------------------------------------------

TOPIC_ROWS: Final = (
    MetricRow(
        "gauge", "topics_topic_head_seq", "Highest assigned seq.", lambda topic: topic.head_seq
    ),
    MetricRow(
        "gauge",
        "topics_topic_earliest_seq",
        "Seq of the first record that can be read.",
        lambda topic: topic.earliest_seq,
    ),
    MetricRow(
        "gauge",
        "topics_topic_records_live",
        "Records that can be read.",
        lambda topic: topic.records,
    ),
    MetricRow(
        "gauge", "topics_topic_bytes_live", "Bytes of those records.", lambda topic: topic.bytes
    ),
)
# Only topics of type `queue` have these metrics.
QUEUE_ROWS: Final = (
    MetricRow(
        "gauge",
        "topics_topic_queue_ready",
        "Jobs that can be claimed.",
        lambda topic: topic.queue.ready,
    ),
    MetricRow(
        "gauge",
        "topics_topic_queue_in_flight",
        "Jobs that are leased.",
        lambda topic: topic.queue.in_flight,
    ),
    MetricRow(
        "gauge",
        "topics_topic_queue_delayed",
        "Jobs whose time has not come.",
        lambda topic: topic.queue.delayed,
    ),
    MetricRow(
        "gauge",
        "topics_topic_queue_dead_lettered",
        "Jobs moved to the dead-letter topic.",
        lambda topic: topic.queue.dead_lettered,
    ),
)
ROUTER_ROWS: Final = (
    MetricRow(
        "counter",
        "topics_router_forwarded_total",
        "Copies made since it was created.",
        lambda router: router.forwarded,
    ),
    MetricRow(
        "gauge",
        "topics_router_lag",
        "Seqs of its source that it has not examined.",
        lambda router: router.lag,
    ),
    MetricRow(
        "gauge",
        "topics_router_stalled",
        "1 when its destination takes nothing.",
        lambda router: router.stalled,
    ),
)
VIEW_ROWS: Final = (
    MetricRow(
        "counter",
        "topics_view_applied_total",
        "Records applied by the build that answers, since the server started.",
        lambda view: view.applied,
    ),
    MetricRow(
        "gauge",
        "topics_view_processed_seq",
        "Every record up to this seq is in its rows.",
        lambda view: view.processed_seq,
    ),
    MetricRow("gauge", "topics_view_lag", "Seqs that it has not processed.", lambda view: view.lag),
    MetricRow(
        "gauge",
        "topics_view_failed",
        "1 when it stands still at a record or for want of disk space.",
        lambda view: view.failed,
    ),
    MetricRow("gauge", "topics_view_bytes", "Bytes of its files.", lambda view: view.bytes),
)
CONSUMER_ROWS: Final = (
    MetricRow(
        "gauge",
        "topics_consumer_lag",
        "Seqs of its topic that it has not committed.",
        lambda consumer: consumer.lag,
    ),
    MetricRow(
        "gauge",
        "topics_consumer_held_records",
        "Records that the caps of its topic leave to it.",
        lambda consumer: consumer.held,
    ),
)
