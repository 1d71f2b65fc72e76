"""Counters and histograms, and the snapshot a scrape reads.

The parts of the server count in plain integers (a shard counts its frames, a route its answers);
nothing here waits or locks. Only existing parts report: the metrics of an absent part are absent,
not zero. Pure code does not report. `log` is the server's one logger. Called by
`wal/journal/wal_writer`, `api/access_log`, `node`; `api/operate/metrics_snapshot` gathers the facts
of a scrape, `runtime/prometheus` renders them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec

log: Final = logging.getLogger("topics_server")

# The maximum of topics in the per-topic block; a metric reports whether topics were left out.
TOPICS_SHOWN_MAX: Final = 2000
# The maximum of routers in the per-router block, and of views in the per-view block.
ROUTERS_SHOWN_MAX: Final = 2000
TEXT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

# Upper bounds of the sync histogram in microseconds, inclusive; beyond the last is +Inf.
LATENCY_BOUNDS_US: Final = (
    *(50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 7_500, 10_000),
    *(20_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 10_000_000),
)
_STEPS: Final = 64


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


class StepHistogram:
    """A histogram of whole numbers of at least 0 by powers of two; cheap enough for every request.

    `counts[n]` is the number of values with n binary digits: those below 2**n and not below
    2**(n-1). Written by one thread, read by any.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (_STEPS + 1)
        self.total = 0

    def observe(self, number: int) -> None:
        """Count a number; a negative one (the clock stepped) by its absolute value."""
        self.counts[number.bit_length()] += 1
        self.total += number


class RequestMetrics:
    """The results of one route and method: answers by class, and microseconds."""

    __slots__ = ("classes", "times_us")

    def __init__(self) -> None:
        # Indexed by the first digit of the status; index 0 is not used.
        self.classes = [0] * 6
        self.times_us = StepHistogram()


class RouteFacts(msgspec.Struct, frozen=True):
    """The answers of one method of one path template at the time of the snapshot."""

    route: str
    method: str
    classes: Sequence[int]
    counts: Sequence[int]
    sum_us: int


class ShardFacts(msgspec.Struct, frozen=True):
    """The counters of one journal shard since the process started, and its current state."""

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
    group_frames: StepHistogram | None = None
    write_us: StepHistogram | None = None


class QueueFacts(msgspec.Struct, frozen=True):
    """The queue counts of the per-topic block."""

    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int


class TopicMetrics(msgspec.Struct, frozen=True):
    """One topic's row in the per-topic block."""

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
    conditions: dict[str, int]
    consumers: Sequence[ConsumerMetrics]
    consumers_truncated: bool
    topics: Sequence[TopicMetrics]
    topics_truncated: bool


class RouterFacts(msgspec.Struct, frozen=True):
    """One router's row in the per-router block; `stalled` is 0 or 1."""

    name: str
    forwarded: int
    lag: int
    stalled: int


class RoutersFacts(msgspec.Struct, frozen=True):
    """All routers; absent while they are being recovered."""

    count: int
    routers: Sequence[RouterFacts]
    truncated: bool


class ConsumerMetrics(msgspec.Struct, frozen=True):
    """One consumer's row in the per-consumer block; `name` is TOPIC/CONSUMER."""

    name: str
    lag: int
    held: int


class ViewMetrics(msgspec.Struct, frozen=True):
    """One view's row in the per-view block; `name` is TOPIC/VIEW, `failed` is 0 or 1."""

    name: str
    applied: int
    processed_seq: int
    lag: int
    failed: int
    bytes: int


class ViewsFacts(msgspec.Struct, frozen=True):
    """All views and their queries; absent while they are being recovered."""

    count: int
    views: Sequence[ViewMetrics]
    truncated: bool
    queries: int
    timeouts: int
    query_latency: LatencyHistogram


class WatchFacts(msgspec.Struct, frozen=True):
    """Readers of streams and WebSockets: their lag, in seqs."""

    behind: int = 0
    lag_max: int = 0
    lag_sum: int = 0
    slow: int = 0


class DiskFacts(msgspec.Struct, frozen=True):
    """Sealed segments by tier, and the file system of the data directory."""

    hot_files: int = 0
    hot_bytes: int = 0
    cold_files: int = 0
    cold_bytes: int = 0
    free_bytes: int | None = None
    total_bytes: int | None = None
    min_free_bytes: int | None = None


class RecoveryFacts(msgspec.Struct, frozen=True):
    """The counts of the last start, before it was ready."""

    duration_ms: int = 0
    entries: int = 0
    records: int = 0
    torn_files: int = 0


class ConnectionFacts(msgspec.Struct, frozen=True):
    """Connections, and how many exceeded a limit. `most`: the limit, 0 if there is none.

    `put_off`: how often received bytes were read in a later loop turn. `receiving_bytes`: bytes of
    bodies and messages being received, at most `receiving_most` (0: no cap); `receiving_refused`:
    how many were refused because the total was reached.
    """

    open: int
    most: int
    timeouts: dict[str, int]
    evicted: int = 0
    refused: int = 0
    put_off: int = 0
    receiving_bytes: int = 0
    receiving_most: int = 0
    receiving_refused: int = 0


class PressureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The load of the loop and the journal, and how many requests waited or were refused."""

    loop_lag_ms: float
    backlog_bytes: int
    # 0: nothing waits; 1: some requests are refused.
    pressure: float
    waiting: int
    waiting_bytes: int
    queued: int
    # Refused requests by reason: `late`, not served in time; `full`, too much waited at arrival.
    throttled: dict[str, int]
    # Requests that were served before more urgent ones because their topic was served longest ago.
    fair: int = 0
    # Work of this effective priority or a higher one begins at once; None: nothing waits.
    threshold: int | None = None


class BackupMetrics(msgspec.Struct, frozen=True):
    """Backups since the start, and the time of the newest one in the folder, 0 if there is none."""

    running: int
    made: int
    failed: int
    newest_ts_ms: int


class ArchiveMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """How far the continuous archive is, and what it did since the start."""

    lag_s: float
    lag_bytes: int
    kept_bytes: int
    parts: int
    bytes: int
    bases: int
    base_ts_ms: int
    gaps: int
    errors: int
    stopped: int


class ScrubMetrics(msgspec.Struct, frozen=True):
    """Counts of the scrub of sealed segments since the start.

    `last_pass_ts_ms`: when the last complete pass ended; 0 if none has.
    """

    bytes: int
    passes: int
    last_pass_ts_ms: int
    damaged_records: int
    failures: int


class MendingMetrics(msgspec.Struct, frozen=True):
    """Damaged segments: mended from the archive since the start, and not yet mended."""

    segments: int
    records: int
    failures: int
    waiting: int


class Facts(msgspec.Struct, frozen=True):
    """Everything one scrape shows."""

    ready: bool
    progress: float
    uptime_ms: int
    shards: Sequence[ShardFacts]
    store: StoreFacts | None = None
    connections: int = 0
    watch_sessions: int | None = None
    leases_in_flight: int | None = None
    routers: RoutersFacts | None = None
    views: ViewsFacts | None = None
    version: str = ""
    requests: Sequence[RouteFacts] = ()
    http: ConnectionFacts | None = None
    watchers: WatchFacts | None = None
    disk: DiskFacts | None = None
    recovery: RecoveryFacts | None = None
    pressure: PressureFacts | None = None
    log_lines_dropped: int | None = None
    backups: BackupMetrics | None = None
    archive: ArchiveMetrics | None = None
    scrub: ScrubMetrics | None = None
    mending: MendingMetrics | None = None
