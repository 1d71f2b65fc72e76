"""Health, readiness and metrics in every phase."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.conftest import Api
from tests.api.fake_store import FakeTopic
from topics_server.api.operate.metrics_snapshot import facts_of
from topics_server.runtime.metrics import ROUTERS_SHOWN_MAX, TOPICS_SHOWN_MAX
from topics_server.values.model import TopicConfig

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v0/health", "/healthz"])
@pytest.mark.parametrize("phase", ["replaying", "ready", "draining"])
async def test_health_is_200_in_every_phase(api: Api, path: str, phase: str) -> None:
    api.state.phase = phase  # type: ignore[assignment]
    answer = await api.http.get(path)
    assert answer.status_code == 200
    told = answer.json()
    assert told["status"] == "ok"
    assert told["version"]
    assert told["uptime_ms"] >= 0


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
async def test_ready_has_the_number_of_topics(api: Api, path: str) -> None:
    await api.append("jobs", 1)
    answer = await api.http.get(path)
    told = answer.json()
    told.pop("performance")
    assert answer.status_code == 200
    assert told == {"status": "ready", "wal_replay_complete": True, "topics": 1}


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
async def test_ready_is_503_before_and_after(api: Api, path: str) -> None:
    api.state.phase = "replaying"
    answer = await api.http.get(path)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "not_ready"
    assert answer.json()["error"]["detail"] == {"replay_progress": 0.5}
    assert "retry-after" in answer.headers
    api.state.phase = "draining"
    answer = await api.http.get(path)
    assert answer.json()["error"]["code"] == "shutting_down"


async def test_a_read_only_shard_is_named_and_degrades_readiness(api: Api) -> None:
    api.store.read_only = [1, 3]
    answer = await api.http.get("/v0/ready")
    assert answer.status_code == 200
    assert answer.json()["status"] == "degraded"
    assert answer.json()["read_only_shards"] == [1, 3]


async def test_a_background_failure_degrades_readiness_with_the_reason(api: Api) -> None:
    # for read-only shards; with a full disk the server must still accept deletes
    api.settings.ready_degraded = 503
    api.state.reasons = lambda: ["checkpoints fail: the disk takes no more"]
    answer = await api.http.get("/v0/ready")
    assert answer.status_code == 200
    assert answer.json()["status"] == "degraded"
    assert answer.json()["reasons"] == ["checkpoints fail: the disk takes no more"]


async def test_a_degraded_server_is_not_ready_where_configured_so(api: Api) -> None:
    api.settings.ready_degraded = 503
    assert (await api.http.get("/v0/ready")).status_code == 200
    api.store.read_only = [1]
    answer = await api.http.get("/v0/ready")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "storage_read_only"
    assert answer.json()["error"]["detail"]["read_only_shards"] == [1]
    assert answer.json()["error"]["detail"]["status"] == "degraded"


async def test_metrics_are_prometheus_text(api: Api) -> None:
    await api.append("jobs:a", 1, 2)
    answer = await api.http.get("/v0/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in (
        "topics_ready 1.0",
        "topics_topics 1.0",
        "topics_records_live 2.0",
        'topics_topic_head_seq{topic="jobs:a"} 2.0',
        "topics_wal_frames_total 3.0",
        "topics_topic_metrics_truncated 0.0",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("accept", "is_json"),
    [
        ("application/json", True),
        ("Application/JSON;q=0.9", True),
        ("application/json, text/plain", True),
        ("text/plain, application/json", False),
        ("*/*", False),
        ("text/plain", False),
    ],
)
async def test_metrics_are_json_on_request(api: Api, accept: str, is_json: bool) -> None:
    answer = await api.http.get("/v0/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/json") is is_json
    if is_json:
        assert answer.json()["topics_ready"] == 1
        assert "performance" in answer.json()


async def test_metrics_describe_a_server_that_replays(api: Api) -> None:
    api.state.phase = "replaying"
    api.state.store = None
    answer = await api.http.get("/v0/metrics", headers={"accept": "application/json"})
    assert answer.status_code == 200
    assert answer.json()["topics_ready"] == 0
    assert answer.json()["topics_recovery_progress"] == 0.5
    assert "topics_topics" not in answer.json()


async def test_the_per_topic_block_is_bounded(api: Api) -> None:
    for number in range(TOPICS_SHOWN_MAX + 1):
        await api.append(f"t{number}", 1)
    answer = await api.http.get("/v0/metrics", headers={"accept": "application/json"})
    assert answer.json()["topics_topic_metrics_truncated"] == 1
    assert len(answer.json()["topics_topic_head_seq"]) == TOPICS_SHOWN_MAX
    assert answer.json()["topics_consumer_metrics_truncated"] == 0


@pytest.mark.parametrize("more", [0, 1])
async def test_the_per_consumer_block_is_bounded_and_says_so(api: Api, more: int) -> None:
    await api.append("t", 1, 2)
    lags = [("t", f"c{number}", 2, 0) for number in range(ROUTERS_SHOWN_MAX + more)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api.state.store, "consumer_lags", lambda: lags)
        answer = await api.http.get("/v0/metrics", headers={"accept": "application/json"})
    assert answer.json()["topics_consumer_metrics_truncated"] == more
    assert len(answer.json()["topics_consumer_lag"]) == ROUTERS_SHOWN_MAX


async def test_others_have_their_turn_while_a_scrape_looks_through_topics(api: Api) -> None:
    for number in range(TOPICS_SHOWN_MAX):
        api.store.topics[f"t{number:05}"] = FakeTopic(TopicConfig())
    turns = 0
    is_over = False

    async def another() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            await asyncio.sleep(0)

    busy = asyncio.create_task(another())
    facts = await facts_of(api.state, "1")
    is_over = True
    await busy
    assert facts.store is not None
    assert len(facts.store.topics) == TOPICS_SHOWN_MAX
    assert turns >= TOPICS_SHOWN_MAX // 100
