"""§8: health, readiness, metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, eventually, good

SAMPLE = re.compile(
    r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? (-?[0-9.eE+-]+|\+Inf|-Inf|NaN)( [0-9]+)?$"
)


@pytest.mark.parametrize("path", ["/v0/health", "/healthz"])
def test_health_has_version_and_uptime(api: Api, path: str) -> None:
    """Contract §8.1 [8-01, 8.1-01, 9-05]"""
    first = good(api.http.get(path))
    assert first["status"] == "ok"
    assert isinstance(first["version"], str)
    assert re.match(r"\d+\.\d+", first["version"])
    assert type(first["uptime_ms"]) is int
    eventually(
        lambda: bool(good(api.http.get(path))["uptime_ms"] > first["uptime_ms"]), "uptime grows"
    )


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
def test_ready_counts_the_topics(api: Api, topic: str, path: str) -> None:
    """Contract §8.2 [8-01, 8.2-01, 9-05]"""
    before = good(api.http.get(path))
    assert before["status"] == "ready"
    assert before["wal_replay_complete"] is True
    api.put(topic)
    assert good(api.http.get(path))["topics"] == before["topics"] + 1
    api.drop(topic)
    assert good(api.http.get(path))["topics"] == before["topics"]


def test_the_authorization_header_is_ignored_without_keys(api: Api) -> None:
    """Contract §8 [8-01]"""
    for path in ("/v0/health", "/v0/ready", "/v0/metrics", "/v0/topics"):
        answer = api.http.get(path, headers={"Authorization": "Bearer whatever"})
        assert answer.status_code == 200


def _metrics(api: Api) -> tuple[dict[str, float], dict[str, str], set[str]]:
    answer = api.http.get("/v0/metrics")
    assert answer.status_code == 200
    samples: dict[str, float] = {}
    types: dict[str, str] = {}
    helped: set[str] = set()
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            types[name] = kind
        elif line.startswith("# HELP "):
            helped.add(line.split(" ", 3)[2])
        elif line and not line.startswith("#"):
            match = SAMPLE.match(line)
            assert match, f"not a sample: {line!r}"
            samples[match[1] + (match[2] or "")] = float(match[3])
    return samples, types, helped


def test_metrics_are_prometheus_text_by_default(api: Api) -> None:
    """Contract §8.3 [8.3-01, 8.3-12]"""
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "text/plain"}):
        answer = api.http.get("/v0/metrics", headers=headers)
        media = answer.headers["content-type"].replace(" ", "")
        assert media.startswith("text/plain;")
        assert "version=0.0.4" in media
    assert _metrics(api)[0]


def test_every_metric_is_described(api: Api, topic: str) -> None:
    """Contract §8.3 [8.3-11]"""
    api.add(topic, 1)
    samples, types, helped = _metrics(api)
    for sample in samples:
        name = sample.partition("{")[0]
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in types or family in types, f"{name} has no TYPE"
        assert name in helped or family in helped, f"{name} has no HELP"


def test_metrics_are_json_on_request(api: Api) -> None:
    """Contract §8.3 [8.3-02]"""
    answer = api.http.get("/v0/metrics", headers={"Accept": "application/json"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == "application/json"
    assert isinstance(answer.json(), dict)
    assert "topics_topics" in answer.text


def test_process_figures(api: Api, topic: str) -> None:
    """Contract §8.3 [8.3-03]"""
    before = _metrics(api)[0]
    api.put(topic, {"durability": "fsync"})
    api.add(topic, "x" * 1000, "y" * 1000)
    samples = _metrics(api)[0]
    assert samples["topics_topics"] == before["topics_topics"] + 1
    by_class = 'topics_topics_by_class{class="fsync"}'
    assert samples[by_class] == before.get(by_class, 0) + 1
    assert samples["topics_records_live"] >= before["topics_records_live"] + 2
    assert samples["topics_bytes_live"] >= before["topics_bytes_live"] + 2000
    assert samples["topics_ready"] == 1
    assert samples["topics_recovery_progress"] == 1
    assert samples["topics_uptime_ms"] > 0


def test_topic_figures(api: Api, topic: str) -> None:
    """Contract §8.3 [8.3-07]"""
    api.add(topic, *range(10))
    api.delete(topic, before_seq=4)
    state = api.get_state(topic)
    samples = _metrics(api)[0]
    label = f'{{topic="{topic}"}}'
    assert samples["topics_topic_head_seq" + label] == 10
    assert samples["topics_topic_earliest_seq" + label] == 4
    assert samples["topics_topic_records_live" + label] == 7
    assert samples["topics_topic_bytes_live" + label] == state["bytes"]


def test_the_topic_figures_are_bounded(own: NewServer) -> None:
    """Contract §8.3 [8.3-08]"""
    api = own().start()
    api.put("few")
    assert _metrics(api)[0].get("topics_topic_metrics_truncated", 0) == 0
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: good(api.put(f"t{n}", {"durability": "ephemeral"})), range(3000)))
    samples = _metrics(api)[0]
    shown = sum(name.startswith("topics_topic_head_seq{") for name in samples)
    assert shown == 3001 or samples["topics_topic_metrics_truncated"] > 0
    assert len(api.http.get("/v0/metrics").content) < 4 * 1024 * 1024


def test_journal_figures(api: Api, topic: str) -> None:
    """Contract §8.3 [8.3-09]"""
    api.put(topic, {"durability": "fsync"})
    before = _metrics(api)[0]
    for number in range(5):
        api.add(topic, number)
    after = _metrics(api)[0]

    def total(samples: dict[str, float], name: str) -> float:
        found = [v for k, v in samples.items() if k.partition("{")[0] == f"topics_wal_{name}"]
        assert found, f"no topics_wal_{name}"
        return sum(found)

    for name, least in (("frames_total", 5), ("batches_total", 5), ("fsyncs_total", 1)):
        assert total(after, name) >= total(before, name) + least
    assert total(after, "bytes_written_total") > total(before, "bytes_written_total")
    for name in ("rotations_total", "queue_depth", "queue_depth_peak", "submit_full_total"):
        assert total(after, name) >= 0
    assert total(after, "read_only") == 0


def test_sync_times_are_a_histogram(api: Api, topic: str) -> None:
    """Contract §8.3 [8.3-10]"""
    api.put(topic, {"durability": "fsync"})
    api.add(topic, 1)
    samples, types, _ = _metrics(api)
    assert types["topics_wal_fsync_latency_us"] == "histogram"
    buckets = {k: v for k, v in samples.items() if k.startswith("topics_wal_fsync_latency_us_b")}
    assert any('le="+Inf"' in name for name in buckets)
    counts = [v for k, v in samples.items() if k.startswith("topics_wal_fsync_latency_us_count")]
    sums = [v for k, v in samples.items() if k.startswith("topics_wal_fsync_latency_us_sum")]
    assert sum(counts) >= 1
    assert sum(sums) > 0
    assert sum(v for k, v in buckets.items() if 'le="+Inf"' in k) == sum(counts)


def test_answers_are_counted_whichever_way_they_went(api: Api, topic: str) -> None:
    """A callback answers small appends at once, a task answers large ones and lists; both count."""

    def count(method: str, route: str, code: str) -> float:
        labels = f'{{route="{route}",method="{method}",code="{code}"}}'
        return _metrics(api)[0].get(f"topics_http_requests_total{labels}", 0)

    rows = (
        ("POST", "/v0/topics/:topic", "2xx"),
        ("POST", "/v0/topics/:topic", "4xx"),
        ("GET", "/v0/topics", "2xx"),
        ("POST", "/v0/topics/:topic/diff", "2xx"),
        ("GET", "other", "4xx"),
    )
    api.put(topic)
    before = [count(*row) for row in rows[:4]] + [count("other", "other", "4xx")]
    for size in (1, 10, 100_000, 1_000_000 - 1000):
        api.add(topic, "x" * size)
    assert api.append(topic, []).status_code == 400
    api.topics()
    api.diff(topic)
    api.http.get("/v0/nowhere")
    after = [count(*row) for row in rows[:4]] + [count("other", "other", "4xx")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 1, 1, 1, 1]
    samples = _metrics(api)[0]
    labels = '{route="/v0/topics/:topic",method="POST"}'
    answered = sum(
        value
        for name, value in samples.items()
        if name.startswith("topics_http_requests_total") and labels[1:-1] in name
    )
    assert samples[f"topics_http_request_us_count{labels}"] == answered


@pytest.mark.connection(reason="some figures are of our connections")
def test_figures_for_an_operator(api: Api, topic: str) -> None:
    api.add(topic, 1)
    samples = _metrics(api)[0]
    for name in (
        "topics_http_connections",
        "topics_watch_lag_max",
        "topics_disk_free_bytes",
        "topics_recovery_duration_ms",
        "topics_router_lag_max",
        "topics_wal_write_us_count",
        "topics_wal_group_frames_count",
        "process_resident_memory_bytes",
        "process_open_fds",
        'topics_segments{tier="hot"}',
        "topics_log_lines_dropped_total",
    ):
        assert name in samples, name
    assert samples["topics_http_connections"] >= 1
    assert samples["topics_wal_group_frames_sum"] == samples["topics_wal_frames_total"]
    assert any(name.startswith("topics_build_info{") for name in samples)


# Every name of §8.3, in its order.
NAMES = """
    topics_topics topics_topics_by_class topics_routers topics_records_live topics_bytes_live
    topics_queue_topics topics_queue_leases_in_flight topics_sse_connections topics_watch_sessions
    topics_ready topics_recovery_progress topics_uptime_ms topics_topic_head_seq
    topics_topic_earliest_seq topics_topic_records_live topics_topic_bytes_live
    topics_topic_queue_ready topics_topic_queue_in_flight topics_topic_metrics_truncated
    topics_wal_frames_total topics_wal_batches_total topics_wal_fsyncs_total
    topics_wal_bytes_written_total topics_wal_rotations_total topics_wal_queue_depth
    topics_wal_queue_depth_peak topics_wal_submit_full_total topics_wal_read_only
    topics_wal_fsync_latency_us_bucket topics_wal_fsync_latency_us_sum
    topics_wal_fsync_latency_us_count
""".split()


def test_text_and_json_have_every_name_of_the_contract_and_the_same_others(
    api: Api, names: Callable[[str], str]
) -> None:
    queue = names("q")
    good(api.put(queue, {"type": "queue"}))
    api.add(queue, 1)
    text = {name.partition("{")[0] for name in _metrics(api)[0]}
    assert set(NAMES) <= text
    values = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    assert values.keys() - {"performance"} == text
    labelled = values["topics_topic_queue_ready"]
    assert {"labels": {"topic": queue}, "value": 1} in labelled
