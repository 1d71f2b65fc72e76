"""Metrics: one scrape, as text and as JSON."""

from __future__ import annotations

import re

import msgspec
import pytest

from topics_server.runtime.metric_table import (
    METRICS,
    QUEUE_ROWS,
    ROUTER_ROWS,
    TOPIC_ROWS,
    VIEW_ROWS,
)
from topics_server.runtime.metrics import (
    LATENCY_BOUNDS_US,
    ArchiveMetrics,
    BackupMetrics,
    ConnectionFacts,
    ConsumerMetrics,
    DiskFacts,
    Facts,
    LatencyHistogram,
    MendingMetrics,
    PressureFacts,
    RecoveryFacts,
    RouteFacts,
    RouterFacts,
    RoutersFacts,
    ScrubMetrics,
    ShardFacts,
    StepHistogram,
    StoreFacts,
    TopicMetrics,
    ViewMetrics,
    ViewsFacts,
    WatchFacts,
)
from topics_server.runtime.prometheus import as_text, as_values


def facts() -> Facts:
    fast, slow = LatencyHistogram(), LatencyHistogram()
    fast.observe(50)
    slow.observe(51)
    slow.observe(1e12)
    groups, writes = StepHistogram(), StepHistogram()
    groups.observe(1)
    groups.observe(3)
    writes.observe(70)
    return Facts(
        ready=True,
        progress=1.0,
        uptime_ms=84012,
        shards=[
            ShardFacts(1, 2, 3, 4, 5, 6, 7, 8, False, fast, groups, writes),
            ShardFacts(10, 20, 30, 40, 50, 60, 70, 80, True, slow),
        ],
        store=StoreFacts(
            topics_by_class={"disk": 2, "fsync": 1},
            queue_topics=1,
            records_live=12,
            bytes_live=345,
            damaged_records=0,
            conditions={"met": 7, "failed": 2},
            consumers=[ConsumerMetrics("jobs:a/billing", 12, 5)],
            consumers_truncated=True,
            topics=[TopicMetrics("jobs:a", 480231, 468188, 12043, 99)],
            topics_truncated=True,
        ),
        routers=RoutersFacts(
            3, [RouterFacts("a->b", 480231, 7, 0), RouterFacts("a->c", 0, 9, 1)], True
        ),
        views=ViewsFacts(
            3, [ViewMetrics("t/v", 12, 40, 2, 1, 8192)], False, 7, 1, LatencyHistogram()
        ),
        connections=4,
        watch_sessions=5,
        leases_in_flight=6,
        version="1.2.3",
        requests=[
            RouteFacts("/v0/topics", "GET", (0, 0, 5, 0, 2, 0), writes.counts, 70),
            RouteFacts("/v0/watch", "POST", (0,) * 6, StepHistogram().counts, 0),
        ],
        http=ConnectionFacts(17, 90, {"header": 3, "idle": 4}, 5, 6, 7, 800, 900, 10),
        watchers=WatchFacts(behind=2, lag_max=30, lag_sum=40, slow=1),
        disk=DiskFacts(1, 100, 2, 200, 5000, 9000, 90),
        recovery=RecoveryFacts(duration_ms=12, entries=34, records=56, torn_files=1),
        pressure=PressureFacts(
            loop_lag_ms=1.5,
            backlog_bytes=9,
            pressure=0.25,
            waiting=4,
            waiting_bytes=400,
            queued=12,
            throttled={"late": 8, "full": 2},
            fair=5,
            threshold=-3,
        ),
        log_lines_dropped=3,
        backups=BackupMetrics(1, 2, 3, 4),
        scrub=ScrubMetrics(1, 2, 3, 4, 5),
        mending=MendingMetrics(1, 2, 3, 4),
        archive=ArchiveMetrics(
            lag_s=1.5,
            lag_bytes=2,
            kept_bytes=3,
            parts=4,
            bytes=5,
            bases=6,
            base_ts_ms=7,
            gaps=8,
            errors=9,
            stopped=1,
        ),
    )


@pytest.mark.parametrize(
    "line",
    [
        "topics_ready 1.0",
        "topics_recovery_progress 1.0",
        "topics_uptime_ms 84012.0",
        "topics_topics 3.0",
        'topics_topics_by_class{class="disk"} 2.0',
        'topics_topics_by_class{class="fsync"} 1.0',
        "topics_records_live 12.0",
        "topics_bytes_live 345.0",
        "topics_queue_topics 1.0",
        "topics_records_damaged 0.0",
        "topics_topic_metrics_truncated 1.0",
        "topics_consumer_metrics_truncated 1.0",
        'topics_topic_head_seq{topic="jobs:a"} 480231.0',
        'topics_topic_earliest_seq{topic="jobs:a"} 468188.0',
        'topics_topic_records_live{topic="jobs:a"} 12043.0',
        'topics_topic_bytes_live{topic="jobs:a"} 99.0',
        "topics_routers 3.0",
        "topics_router_metrics_truncated 1.0",
        'topics_router_forwarded_total{router="a->b"} 480231.0',
        'topics_router_lag{router="a->b"} 7.0',
        'topics_router_stalled{router="a->b"} 0.0',
        'topics_router_stalled{router="a->c"} 1.0',
        "# TYPE topics_router_forwarded_total counter",
        "# TYPE topics_router_lag gauge",
        "topics_wal_frames_total 11.0",
        "topics_wal_batches_total 22.0",
        "topics_wal_fsyncs_total 33.0",
        "topics_wal_bytes_written_total 44.0",
        "topics_wal_rotations_total 55.0",
        "topics_wal_queue_depth 66.0",
        "topics_wal_queue_depth_peak 70.0",
        "topics_wal_submit_full_total 88.0",
        "topics_wal_read_only 1.0",
        "topics_sse_connections 4.0",
        "topics_watch_sessions 5.0",
        "topics_queue_leases_in_flight 6.0",
        'topics_build_info{version="1.2.3"} 1.0',
        'topics_http_requests_total{route="/v0/topics",method="GET",code="2xx"} 5.0',
        'topics_http_requests_total{route="/v0/topics",method="GET",code="4xx"} 2.0',
        'topics_http_request_us_bucket{route="/v0/topics",method="GET",le="63"} 0.0',
        'topics_http_request_us_bucket{route="/v0/topics",method="GET",le="127"} 1.0',
        'topics_http_request_us_bucket{route="/v0/topics",method="GET",le="+Inf"} 1.0',
        'topics_http_request_us_count{route="/v0/topics",method="GET"} 1.0',
        'topics_http_request_us_sum{route="/v0/topics",method="GET"} 70.0',
        "topics_http_connections 17.0",
        "topics_http_connections_max 90.0",
        'topics_http_timeouts_total{kind="header"} 3.0',
        "topics_http_evicted_total 5.0",
        "topics_http_refused_total 6.0",
        "topics_http_put_off_total 7.0",
        "topics_watch_behind 2.0",
        "topics_watch_lag_max 30.0",
        "topics_watch_lag_sum 40.0",
        "topics_watch_slow 1.0",
        'topics_segments{tier="cold"} 2.0',
        'topics_segment_bytes{tier="hot"} 100.0',
        "topics_disk_free_bytes 5000.0",
        "topics_disk_total_bytes 9000.0",
        "topics_disk_min_free_bytes 90.0",
        "topics_recovery_duration_ms 12.0",
        "topics_recovery_entries 34.0",
        "topics_recovery_records 56.0",
        "topics_recovery_torn_files 1.0",
        "topics_loop_lag_ms 1.5",
        "topics_pressure 0.25",
        "topics_throttle_waiting 4.0",
        "topics_throttle_waiting_bytes 400.0",
        "topics_receiving_bytes 800.0",
        "topics_receiving_bytes_max 900.0",
        "topics_receiving_refused_total 10.0",
        "topics_parked_total 12.0",
        "topics_throttle_fair_total 5.0",
        "topics_backlog_bytes 9.0",
        "topics_throttle_threshold -3.0",
        'topics_throttled_total{reason="late"} 8.0',
        'topics_throttled_total{reason="full"} 2.0',
        "topics_log_lines_dropped_total 3.0",
        "topics_routers_stalled 1.0",
        "topics_router_lag_max 9.0",
        'topics_wal_group_frames_bucket{le="1"} 1.0',
        'topics_wal_group_frames_bucket{le="3"} 2.0',
        "topics_wal_group_frames_sum 4.0",
        'topics_wal_write_us_bucket{le="127"} 1.0',
        'topics_wal_fsync_latency_us_bucket{le="50"} 1.0',
        'topics_wal_fsync_latency_us_bucket{le="100"} 2.0',
        'topics_wal_fsync_latency_us_bucket{le="+Inf"} 3.0',
        "topics_wal_fsync_latency_us_count 3.0",
    ],
)
def test_the_text_shows_every_figure_of_the_contract(line: str) -> None:
    assert line in as_text(facts()).decode().splitlines()


def test_every_metric_has_help_and_type() -> None:
    text = as_text(facts()).decode()
    shown = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    histograms = "|".join(name for name, kind in kinds.items() if kind == "histogram")
    shown = {re.sub(rf"^({histograms})_\w+$", r"\1", name) for name in shown}
    assert shown == set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    assert shown == set(
        re.findall(r"^# TYPE (\S+) (?:gauge|counter|histogram)$", text, re.MULTILINE)
    )


def test_the_figures_of_absent_parts_are_absent() -> None:
    text = as_text(Facts(ready=False, progress=0.5, uptime_ms=1, shards=[])).decode()
    assert "topics_recovery_progress 0.5" in text
    assert "topics_wal" not in text
    assert "topics_topics" not in text
    assert "topics_router" not in text


def test_without_routers_there_is_their_number_and_no_block() -> None:
    empty = msgspec.structs.replace(facts(), routers=RoutersFacts(0, [], False))
    text = as_text(empty).decode()
    assert "\ntopics_routers 0.0\n" in text
    assert "topics_router_lag{" not in text
    assert "topics_router_lag" not in as_values(empty)


def test_the_json_snapshot_has_the_same_figures() -> None:
    values = as_values(facts())
    assert values["topics_topics"] == 3
    assert values["topics_wal_frames_total"] == 11
    assert values["topics_routers"] == 3
    assert values["topics_router_lag"][1] == {"labels": {"router": "a->c"}, "value": 9}
    assert values["topics_topic_head_seq"] == [{"labels": {"topic": "jobs:a"}, "value": 480231}]
    names = {
        re.split(r"[{ ]", line)[0]
        for line in as_text(facts()).decode().splitlines()
        if not line.startswith("#")
    }
    assert set(values) == names


def test_a_latency_falls_into_the_bucket_whose_bound_it_does_not_pass() -> None:
    histogram = LatencyHistogram()
    for bound in LATENCY_BOUNDS_US:
        histogram.observe(bound)
    assert histogram.counts == [1] * len(LATENCY_BOUNDS_US) + [0]
    histogram.observe(LATENCY_BOUNDS_US[-1] + 1)
    histogram.observe(-5)
    assert histogram.counts[0] == 2
    assert histogram.counts[-1] == 1
    assert histogram.count == len(LATENCY_BOUNDS_US) + 2
    assert histogram.sum_us == sum(LATENCY_BOUNDS_US) + LATENCY_BOUNDS_US[-1] + 1


def test_a_number_falls_into_the_step_of_its_binary_digits() -> None:
    histogram = StepHistogram()
    for number in (0, 1, 2, 3, 4, 63, 64, 2**40):
        histogram.observe(number)
    assert histogram.counts[:4] == [1, 1, 2, 1]
    assert histogram.counts[6] == histogram.counts[7] == histogram.counts[41] == 1
    assert histogram.total == 0 + 1 + 2 + 3 + 4 + 63 + 64 + 2**40


def test_routes_without_requests_have_no_rows() -> None:
    assert "/v0/watch" not in as_text(facts()).decode()
    rows = as_values(facts())["topics_http_requests_total"]
    assert all(row["labels"]["route"] != "/v0/watch" for row in rows)


def test_figures_of_the_process_come_along() -> None:
    text = as_text(facts()).decode()
    for name in ("resident_memory_bytes", "open_fds", "cpu_seconds_total", "start_time_seconds"):
        assert re.search(rf"^process_{name} [0-9.e+]+$", text, re.MULTILINE), name


# -- the table -------------------------------------------------------------------------------------


def test_a_metric_stands_in_the_table_once() -> None:
    rows = [row for section in METRICS for row in section.rows]
    names = [row.name for row in (*rows, *TOPIC_ROWS, *QUEUE_ROWS, *ROUTER_ROWS, *VIEW_ROWS)]
    assert len(names) == len(set(names))
    assert all(name.startswith("topics_") for name in names)


def test_every_metric_of_the_table_is_shown_and_an_absent_part_is_absent() -> None:
    shown = as_values(facts())
    for row in (row for section in METRICS for row in section.rows):
        samples = {row.name, f"{row.name}_total", f"{row.name}_sum"}
        assert samples & set(shown), row.name
    bare = as_values(Facts(ready=False, progress=0.5, uptime_ms=1, shards=()))
    assert not [name for name in bare if name.startswith(("topics_wal_", "topics_http_"))]
