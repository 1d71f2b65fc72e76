"""Queues over a real node (§10): leases, fences, expiry, dead letters, windows; by a fake clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.queues.jobs import Jobs, code_of, turns, until
from tests.api.watch.streams import Reader
from tests.storage.fake_disk import FakeDisk
from topics_server.engine.pressure.throttle import Throttle
from topics_server.values.limits import U64_MAX

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live(disk: FakeDisk) -> AsyncIterator[Jobs]:
    server = await Jobs.start(disk)
    yield server
    await server.stop()


# -- claim -----------------------------------------------------------------------------------


async def test_under_pressure_a_claim_waits_for_its_turn_or_is_refused(
    live: Jobs,
) -> None:
    await live.queue()
    await live.put(1)
    backlog = [10**9]
    live.node.state.throttle = throttle = Throttle(backlog_bytes=lambda: backlog[0])
    throttle.is_active = True
    refused = await live.call("claim", node="w")
    assert code_of(refused)[:2] == (429, "throttled")
    assert refused.headers["retry-after"] in {"1", "2"}
    assert (await live.counts())[:2] == (1, 0)
    waiting = asyncio.ensure_future(live.call("claim", node="w"))
    await until(lambda: len(throttle.wait_queue) == 1)
    await asyncio.sleep(0.02)
    backlog[0] = 0
    told = (await waiting).json()
    assert [job["$seq"] for job in told["claimed"]] == [1]
    assert told["performance"]["throttle_wait_ms"] >= 15
    throttle.close()


async def test_a_claim_leases_jobs_and_shows_their_records_verbatim(live: Jobs) -> None:
    await live.queue()
    body = (
        b'{"records":[{"data":{ "url" : "s3://b/x.png","n":1e400},"tag":"t:1","meta":{"a": 1}},'
        b'{"data":null}]}'
    )
    headers = {"content-type": "application/json"}
    await live.http.post("/v0/topics/jobs", content=body, headers=headers)
    answer = await live.call("claim", node="worker-eu-1", max=16)
    assert b'"data":{ "url" : "s3://b/x.png","n":1e400},"meta":{"a": 1}}' in answer.content
    told = json.loads(answer.content)
    assert set(told.pop("performance")) == {"server_total_ms", "throttle_wait_ms"}
    first, second = told["claimed"]
    assert (told["topic"], told["count"], told["ready"]) == ("jobs", 2, 0)
    assert list(first) == [
        *("$seq", "lease_id", "deadline", "$ts", "$tag", "deliveries", "data", "meta")
    ]
    assert list(second) == ["$seq", "lease_id", "deadline", "$ts", "deliveries", "data"]
    assert (first["$seq"], second["$seq"]) == (1, 2)
    assert first["deadline"] == live.clock.now_ms() + 30_000
    assert first["deliveries"] == second["deliveries"] == 1
    assert first["lease_id"].startswith("lease_")
    int(first["lease_id"].removeprefix("lease_"), 16)
    assert first["lease_id"] != second["lease_id"]
    assert second["data"] is None


async def test_fewer_jobs_than_asked_is_no_error_and_max_is_one_by_default(live: Jobs) -> None:
    await live.queue()
    assert await live.do("claim", node="w") == {
        **{"topic": "jobs", "claimed": [], "count": 0, "ready": 0}
    }
    await live.put(*range(5))
    told = await live.do("claim", node="w")
    assert (told["count"], told["ready"]) == (1, 4)
    assert await live.seqs(max=1000) == [2, 3, 4, 5]


async def test_max_is_clamped_to_the_limit(disk: FakeDisk) -> None:
    live = await Jobs.start(disk, max_claim=3)
    await live.queue()
    await live.put(*range(9))
    assert await live.seqs(max=2**32 - 1) == [1, 2, 3]
    answer = await live.call("ack", node="w", seqs=[1, 2, 3, 4])
    assert code_of(answer) == (400, "batch_too_large", "seqs")
    await live.stop()


@pytest.mark.parametrize(
    ("asked", "lease_ms"), [(0, 100), (99, 100), (500, 500), (U64_MAX, 86_400_000), (None, 7_000)]
)
async def test_lease_ms_is_the_topic_s_unless_it_is_asked_for(
    live: Jobs, asked: int | None, lease_ms: int
) -> None:
    await live.queue(lease_ms=7_000)
    await live.put(1)
    (job,) = await live.claim(lease_ms=asked)
    assert job["deadline"] == live.clock.now_ms() + lease_ms


async def test_a_lease_is_over_after_its_deadline_and_the_job_jumps_the_queue(live: Jobs) -> None:
    await live.queue(lease_ms=1_000)
    await live.put("a", "b", "c")
    (first,) = await live.claim("one")
    live.pass_time(1_000)
    assert await live.seqs("two") == [2], "its deadline is not past yet"
    live.pass_time(1)
    (again,) = await live.claim("two")
    assert (again["$seq"], again["deliveries"]) == (1, 2)
    assert again["lease_id"] != first["lease_id"]
    assert await live.seqs("two") == [3]


async def test_counts_show_ready_in_flight_and_delayed_jobs(live: Jobs) -> None:
    await live.queue(lease_ms=1_000)
    await live.put(*range(4))
    await live.put("later", delay_ms=5_000)
    assert await live.counts() == (4, 0, 1, 0)
    await live.claim(max=3)
    assert await live.counts() == (1, 3, 1, 0)
    await live.do("nack", node="w", seqs=[2], delay_ms=60_000)
    assert await live.counts() == (1, 2, 2, 0)
    live.pass_time(1_001)
    assert await live.counts() == (3, 0, 2, 0), "expired leases are ready again"
    live.pass_time(5_000)
    assert await live.counts() == (4, 0, 1, 0)


async def test_a_delayed_job_is_claimable_from_its_time_on(live: Jobs) -> None:
    await live.queue()
    await live.put("later", delay_ms=5_000)
    await live.put("at", deliver_at_ms=live.clock.now_ms() + 2_000)
    await live.put("now")
    assert await live.seqs(max=9) == [3]
    live.pass_time(2_000)
    assert await live.seqs(max=9) == [2]
    live.pass_time(3_000)
    assert await live.seqs(max=9) == [1]


# -- ack, nack, extend ---------------------------------------------------------------------------


async def test_an_ack_deletes_for_good_and_again_is_harmless(live: Jobs) -> None:
    await live.queue()
    await live.put(*range(4))
    await live.claim(max=2)
    answer = await live.call("ack", node="w", seqs=[1, 2])
    told = answer.json()
    assert set(told.pop("performance")) == {"server_total_ms", "wal_append_ms", "fsync_ms"}
    assert told == {"topic": "jobs", "acked": 2, "skipped": [], "ready": 2, "in_flight": 0}
    assert (await live.do("ack", node="w", seqs=[1, 2])) == {
        **{"topic": "jobs", "acked": 0, "skipped": [1, 2], "ready": 2, "in_flight": 0},
        "reasons": {"1": "not_found", "2": "not_found"},
    }
    assert [record["$seq"] for record in await live.datas("jobs")] == [3, 4]
    live.pass_time(100_000)
    assert await live.seqs(max=9) == [3, 4]


async def test_an_ack_deletes_only_jobs_that_the_node_holds(live: Jobs) -> None:
    await live.queue()
    await live.put(*range(4))
    await live.claim("one", max=2)
    await live.claim("two")
    told = await live.do("ack", node="one", seqs=[4, 3, 2, 1, 1, 99, U64_MAX])
    assert told["acked"] == 2
    assert sorted(told["skipped"]) == [3, 4, 99, U64_MAX]


async def test_a_durable_queue_reports_its_sync_time(live: Jobs) -> None:
    await live.queue(durable=True)
    await live.put(1)
    await live.claim()
    topic = live.node.registry.find("jobs")
    assert topic is not None
    lsn = topic.applied_lsn
    await live.call("ack", node="w", seqs=[1])
    assert topic.applied_lsn > lsn
    assert live.node.commits.synced_lsn(topic.topic_id) >= topic.applied_lsn, "before its answer"


async def test_a_stale_token_is_fenced_and_the_right_one_is_not(live: Jobs) -> None:
    await live.queue(lease_ms=1_000)
    await live.put("a", "b")
    old = [job["lease_id"] for job in await live.claim(max=2)]
    live.pass_time(1_001)
    new = [job["lease_id"] for job in await live.claim(max=2)]
    verbs: list[tuple[str, dict[str, Any]]] = [("ack", {}), ("nack", {})]
    for verb, more in [*verbs, ("extend", {"lease_ms": 500})]:
        told = await live.do(verb, node="w", seqs=[1, 2], lease_ids=old, **more)
        assert told["skipped"] == [1, 2]
        garbage = ["", "lease_" + "f" * 99]
        told = await live.do(verb, node="w", seqs=[1, 2], lease_ids=garbage, **more)
        assert told["skipped"] == [1, 2]
    told = await live.do("ack", node="w", seqs=[2, 1], lease_ids=[old[1], new[0]])
    assert (told["acked"], told["skipped"]) == (1, [2])


async def test_a_nack_gives_back_at_once_or_after_its_delay(live: Jobs) -> None:
    await live.queue()
    await live.put("a", "b")
    await live.claim(max=2)
    told = await live.do("nack", node="w", seqs=[1, 5])
    assert told.pop("reasons") == {"5": "not_found"}
    assert told == {"topic": "jobs", "nacked": 1, "skipped": [5], "ready": 1, "in_flight": 1}
    assert (await live.do("nack", node="w", seqs=[2], delay_ms=U64_MAX))["ready"] == 1
    (again,) = await live.claim(max=9)
    assert (again["$seq"], again["deliveries"]) == (1, 2)
    live.pass_time(86_400_000)
    assert 2 in await live.seqs(max=9), "clamped to a day"


async def test_an_extend_sets_the_deadline_from_now(live: Jobs) -> None:
    await live.queue(lease_ms=10_000)
    await live.put("a", "b")
    await live.claim(max=2)
    live.pass_time(4_000)
    told = await live.do("extend", node="w", seqs=[1, 9], lease_ms=500)
    assert told == {
        "topic": "jobs",
        "extended": 1,
        "skipped": [9],
        "reasons": {"9": "not_found"},
        "deadlines": {"1": live.clock.now_ms() + 500},
    }
    live.pass_time(501)
    (again,) = await live.claim("other", max=9)
    assert (again["$seq"], again["deliveries"]) == (1, 2)
    assert (await live.do("extend", node="w", seqs=[1], lease_ms=500))["skipped"] == [1]


async def test_a_late_but_not_superseded_holder_still_counts(live: Jobs) -> None:
    await live.queue(lease_ms=1_000)
    await live.put("a")
    await live.claim()
    live.pass_time(5_000)
    assert (await live.do("ack", node="w", seqs=[1]))["acked"] == 1


# -- refusals ------------------------------------------------------------------------------------

VERBS: dict[str, dict[str, Any]] = {
    "claim": {"node": "w"},
    "ack": {"node": "w", "seqs": [1]},
    "nack": {"node": "w", "seqs": [1]},
    "extend": {"node": "w", "seqs": [1], "lease_ms": 1000},
    "redrive": {"all": True, "from": "dead"},
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_log_is_409_and_an_absent_topic_404(live: Jobs, verb: str) -> None:
    await live.append("log", 1)
    answer = await live.call(verb, "log", **VERBS[verb])
    assert code_of(answer)[:2] == (409, "not_a_queue")
    assert answer.json()["error"]["detail"] == {"topic": "log"}
    answer = await live.call(verb, "absent", **VERBS[verb])
    assert code_of(answer)[:2] == (404, "topic_not_found")
    assert live.node.registry.find("absent") is None, "nothing is created"


@pytest.mark.parametrize("path", ["leases", "work?node=w"])
async def test_so_do_the_reads(live: Jobs, path: str) -> None:
    await live.append("log", 1)
    assert code_of(await live.http.get(f"/v0/topics/log/{path}"))[:2] == (409, "not_a_queue")
    answer = await live.http.get(f"/v0/topics/absent/{path}")
    assert code_of(answer)[:2] == (404, "topic_not_found")


@pytest.mark.parametrize("verb", ["claim", "ack", "nack", "extend"])
@pytest.mark.parametrize("change", [{"node": 5}, {"node": None}, {"node": ""}, {"node": "x" * 129}])
async def test_a_node_is_required_everywhere(
    live: Jobs, verb: str, change: dict[str, object]
) -> None:
    await live.queue()
    answer = await live.call(verb, **{**VERBS[verb], **change})
    assert code_of(answer) == (400, "invalid_request", "node")
    body = {k: v for k, v in VERBS[verb].items() if k != "node"}
    assert code_of(await live.call(verb, **body)) == (400, "invalid_request", "node")


# -- waiting ---------------------------------------------------------------------------------------


async def test_a_claim_waits_for_the_first_job(live: Jobs) -> None:
    await live.queue()
    waiting = asyncio.create_task(live.claim("w", 5, wait_ms=30_000))
    await live.in_line(1)
    await live.put("a", "b")
    assert [job["data"] for job in await waiting] == ["a", "b"]
    assert live.waiting() == 0
    assert live.node.notifier.listener_count == 0


async def test_it_waits_no_longer_than_its_time(live: Jobs) -> None:
    await live.queue()
    waiting = asyncio.create_task(live.claim(wait_ms=99_999))
    await live.in_line(1)
    live.pass_time(29_999)
    await turns()
    assert not waiting.done()
    live.pass_time(1)
    assert await waiting == []


@pytest.mark.parametrize("how", ["expiry", "delay", "nack", "release"])
async def test_it_is_woken_by_whatever_makes_a_job_claimable(live: Jobs, how: str) -> None:
    await live.queue(lease_ms=1_000)
    delay: dict[str, Any] = {"delay_ms": 1_001} if how == "delay" else {}
    await live.put("a", **delay)
    worker = live.work() if how == "release" else None
    if worker is not None:
        await worker.jobs(1)
    elif how != "delay":
        await live.claim("other")
    waiting = asyncio.create_task(live.seqs(wait_ms=30_000))
    await live.in_line(2 if worker else 1)
    if worker is not None:
        await worker.left()
    elif how == "nack":
        await live.do("nack", node="other", seqs=[1])
    else:
        live.pass_time(1_000)
        await turns()
        assert not waiting.done()
        live.pass_time(1)
    assert await waiting == [1]


async def test_a_client_that_disconnects_while_waiting_gets_no_job(live: Jobs) -> None:
    await live.queue()
    body = json.dumps({"node": "gone", "wait_ms": 30_000}).encode()
    client = Claimer(live, body)
    await live.in_line(1)
    await client.left()
    assert live.waiting() == 0
    await live.put("a")
    assert await live.seqs() == [1]


async def test_a_client_that_disconnects_while_it_is_served_returns_its_jobs(live: Jobs) -> None:
    await live.queue()
    client = Claimer(live, json.dumps({"node": "gone", "wait_ms": 30_000}).encode())
    await live.in_line(1)
    client.leave()
    await live.put("a")
    await asyncio.wait_for(client.serving, 10)
    assert await live.counts() == (1, 0, 0, 0)
    assert client.head is None


class Claimer(Reader):
    """A claim whose client can disconnect."""

    def __init__(self, live: Jobs, body: bytes) -> None:
        headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
        super().__init__(live.app, "/v0/topics/jobs/claim", *headers, method="POST")
        self._incoming.get_nowait()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})


async def test_waiting_claims_have_their_turns(live: Jobs) -> None:
    await live.queue()
    waiting = []
    for index in range(4):
        waiting.append(asyncio.create_task(live.seqs(f"w{index}", wait_ms=30_000)))
        await live.in_line(index + 1)
    for index in range(4):
        await live.put(index)
        assert await waiting[index] == [index + 1]


async def test_a_dropped_queue_ends_waiting(live: Jobs) -> None:
    await live.queue()
    waiting = asyncio.create_task(live.call("claim", node="w", wait_ms=30_000))
    await live.in_line(1)
    await live.ok("DELETE", "/v0/topics/jobs")
    assert code_of(await waiting)[:2] == (404, "topic_not_found")


async def test_a_stop_answers_waiting_claims(live: Jobs) -> None:
    await live.queue()
    waiting = asyncio.create_task(live.seqs(wait_ms=30_000))
    await live.in_line(1)
    live.node.begin_drain()
    assert await waiting == []


# -- windows ---------------------------------------------------------------------------------------


async def test_a_window_shares_evenly_at_the_end_of_its_window(live: Jobs) -> None:
    await live.queue(claim_jitter_ms=50)
    await live.put(*range(32))
    claims = []
    for index in range(16):
        claims.append(asyncio.create_task(live.seqs(f"w{index}", 100)))
        await live.in_line(index + 1)
    live.pass_time(49)
    await turns()
    assert not any(claim.done() for claim in claims)
    live.pass_time(1)
    shares = await asyncio.gather(*claims)
    assert [len(share) for share in shares] == [2] * 16
    assert sorted(seq for share in shares for seq in share) == list(range(1, 33))
    assert shares[0] == [1, 17], "round-robin"


async def test_shares_are_in_proportion_to_max(live: Jobs) -> None:
    await live.queue(claim_jitter_ms=50)
    await live.put(*range(10))
    claims = [asyncio.create_task(live.seqs("small", 5)), asyncio.create_task(live.seqs("big", 15))]
    await live.in_line(2)
    live.pass_time(50)
    assert [len(share) for share in await asyncio.gather(*claims)] == [3, 7]


async def test_a_window_without_jobs_is_answered_empty_and_the_next_one_is_new(live: Jobs) -> None:
    await live.queue(claim_jitter_ms=50)
    claim = asyncio.create_task(live.seqs())
    await live.in_line(1)
    live.pass_time(50)
    assert await claim == []
    await live.put(1)
    claim = asyncio.create_task(live.seqs())
    await live.in_line(1)
    await turns()
    assert not claim.done()
    live.pass_time(50)
    assert await claim == [1]


async def test_waiting_claims_and_streams_share_the_window(live: Jobs) -> None:
    await live.queue(claim_jitter_ms=50)
    worker = live.work(node="stream", max=4)
    await worker.begun()
    waiting = asyncio.create_task(live.seqs("waits", 4, wait_ms=30_000))
    await live.in_line(2)
    await live.put(*range(4))
    poll = asyncio.create_task(live.seqs("polls", 4))
    await live.in_line(3)
    live.pass_time(50)
    await turns()
    live.pass_time(50)
    shares = [await waiting, await poll, await worker.seqs(1)]
    assert sorted(len(share) for share in shares) in ([1, 1, 2], [1, 1, 1])
    await worker.left()


async def test_the_window_is_looked_up_when_it_matters(live: Jobs) -> None:
    await live.queue(claim_jitter_ms=5_000)
    await live.queue()
    await live.put(1)
    assert await live.seqs() == [1], "PUT took the window away"


# -- dead letters ----------------------------------------------------------------------------------


async def buried(live: Jobs, count: int, queue: str = "jobs") -> None:
    """Return when this many jobs were dead-lettered."""

    def is_so() -> bool:
        topic = live.node.registry.find(queue)
        assert topic is not None
        return live.node.lease_table.counts(topic, live.clock.now_ms()).dead_lettered == count

    await until(is_so)


async def test_a_job_delivered_too_often_goes_to_the_dead_letters(live: Jobs) -> None:
    await live.queue(max_deliveries=2, dead_letter="dead", lease_ms=1_000)
    await live.put({"n": 1}, tag="t", meta={"trace": "z9"})
    for deliveries in (1, 2):
        (job,) = await live.claim()
        assert job["deliveries"] == deliveries
        await live.do("nack", node="w", seqs=[1])
    await live.put("fresh")
    assert await live.seqs(max=9) == [2], "the dead one stands before it and is passed"
    await buried(live, 1)
    (letter,) = await live.datas("dead")
    assert letter["data"] == {"n": 1}
    assert letter["meta"] == {
        "trace": "z9",
        "$dead_letter_from": "jobs",
        "$dead_letter_deliveries": 2,
        "$dead_letter_src_seq": 1,
    }
    assert [record["$seq"] for record in await live.datas("jobs")] == [2]
    assert await live.counts() == (0, 1, 0, 1)
    live.pass_time(50_000)
    assert await live.seqs(max=9) == [2]


@pytest.mark.parametrize(
    "config", [{"max_deliveries": 0, "dead_letter": "dead"}, {"max_deliveries": 1}]
)
async def test_without_a_limit_or_a_topic_jobs_come_again_and_again(
    live: Jobs, config: dict[str, Any]
) -> None:
    await live.queue(**config)
    await live.put("a")
    for deliveries in range(1, 20):
        (job,) = await live.claim()
        assert job["deliveries"] == deliveries
        await live.do("nack", node="w", seqs=[1])
    assert live.node.registry.find("dead") is None


async def test_a_claim_passes_as_many_dead_jobs_as_there_are(live: Jobs) -> None:
    await live.queue(max_deliveries=1, dead_letter="dead")
    await live.put(*range(500))
    await live.do("nack", node="w", seqs=await live.seqs(max=500))
    await live.put("alive")
    assert await live.seqs(max=9) == [501], "it wants more, so all are looked at"
    await buried(live, 500)
    letters = await live.datas("dead")
    assert sorted(letter["meta"]["$dead_letter_src_seq"] for letter in letters) == [*range(1, 501)]


async def test_a_dead_letter_topic_that_refuses_leaves_the_job_for_later(
    live: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    await live.ok("PUT", "/v0/topics/dead", {"cap_records": 1, "discard": "reject"})
    await live.queue(max_deliveries=1, dead_letter="dead")
    await live.put("a", "b")
    await live.do("nack", node="w", seqs=await live.seqs(max=2))
    assert await live.seqs(max=9) == []
    await buried(live, 1)
    await until(lambda: not live.queues.mover._tasks)
    assert (await live.counts())[3] == 1
    assert len(await live.datas("jobs")) == 1
    assert "not taken by dead" in caplog.text
    await live.http.post("/v0/topics/dead/delete", json={"before_seq": 9})
    assert await live.seqs(max=9) == []
    live.pass_time(1_000)
    assert await live.seqs(max=9) == []
    await buried(live, 2)


async def test_auto_create_off_makes_no_dead_letter_topic(live: Jobs) -> None:
    await live.queue(max_deliveries=1, dead_letter="dead", auto_create=False)
    await live.put("a")
    await live.do("nack", node="w", seqs=await live.seqs())
    assert await live.seqs() == []
    await until(lambda: not live.queues.mover._tasks)
    assert live.node.registry.find("dead") is None
    assert len(await live.datas("jobs")) == 1


# -- redrive ---------------------------------------------------------------------------------------


async def dead(live: Jobs, *datas: object, queue: str = "jobs", **fields: Any) -> None:
    """Let jobs become dead letters in the topic `dead`."""
    before = (await live.counts(queue))[3]
    await live.put(*datas, queue=queue, **fields)
    seqs = [job["$seq"] for job in (await live.do("claim", queue, node="w", max=99))["claimed"]]
    await live.do("nack", queue, node="w", seqs=seqs)
    assert (await live.do("claim", queue, node="w", max=99))["count"] == 0
    await buried(live, before + len(datas), queue)


MORTAL: dict[str, Any] = {"max_deliveries": 1, "dead_letter": "dead"}


async def test_a_redrive_makes_jobs_of_dead_letters_with_counts_reset(live: Jobs) -> None:
    await live.queue(**MORTAL)
    await dead(live, {"n": 1}, tag="t", meta={"trace": 1}, node="web")
    await dead(live, "plain")
    told = await live.do("redrive", all=True)
    assert told == {
        **{"topic": "jobs", "from": "dead", "redriven": 2, "skipped": [], "more": False},
        "next_after_seq": 2,
    }
    first, second = await live.claim(max=9)
    assert first["deliveries"] == second["deliveries"] == 1
    assert (first["data"], first["$tag"], first["meta"]) == ({"n": 1}, "t", {"trace": 1})
    assert "meta" not in second
    assert await live.datas("dead") == []
    assert (await live.counts())[3] == 2, "they died once"


@pytest.mark.parametrize(
    ("how", "gone"),
    [
        ({"seqs": [1, 3, 99, 3]}, {1, 3}),
        ({"tag": "x"}, {1, 2}),
        ({"match": ["tag", "Glob", "y*"]}, {3}),
        ({"match": "x"}, {1, 2}),
        ({"all": True, "max": 2}, {1, 2}),
        ({"all": True, "after_seq": 2}, {3, 4}),
        ({"seqs": [2, 4], "max": 1}, {2}),
    ],
)
async def test_dead_letters_are_chosen_by_seqs_tag_or_all(
    live: Jobs, how: dict[str, Any], gone: set[int]
) -> None:
    await live.queue(**MORTAL)
    for tag in ("x", "x", "y:1", "z"):
        await dead(live, tag, tag=tag)
    told = await live.do("redrive", **how)
    left = {letter["$seq"] for letter in await live.datas("dead")}
    assert left == {1, 2, 3, 4} - gone
    assert told["redriven"] == len(gone)
    assert told["skipped"] == ([99] if 99 in how.get("seqs", []) else [])
    assert told["more"] == ("max" in how)
    if told["more"]:
        more = await live.do("redrive", **{**how, "after_seq": told["next_after_seq"]})
        assert more["redriven"] > 0
        assert not (await live.do("redrive", all=True))["more"]


async def test_letters_of_other_queues_and_plain_records_stay(live: Jobs) -> None:
    await live.queue(**MORTAL)
    await live.queue("others", **MORTAL)
    await dead(live, "theirs", queue="others")
    await live.append("dead", "plain")
    await dead(live, "ours")
    told = await live.do("redrive", seqs=[1, 2, 3])
    assert (told["redriven"], told["skipped"]) == (1, [1, 2])
    assert (await live.do("redrive", all=True))["redriven"] == 0
    assert [letter["data"] for letter in await live.datas("dead")] == ["theirs", "plain"]


async def test_leased_dead_letters_of_a_queue_stay_their_holder_s(live: Jobs) -> None:
    await live.queue("dead")
    await live.queue(**MORTAL)
    await dead(live, "a")
    await dead(live, "b")
    claimed = (await live.do("claim", "dead", node="w"))["claimed"]
    told = await live.do("redrive", all=True)
    assert (told["redriven"], told["skipped"]) == (1, [claimed[0]["$seq"]])
    assert (await live.do("ack", "dead", node="w", seqs=[claimed[0]["$seq"]]))["acked"] == 1


async def test_two_redrives_at_once_move_a_letter_once(live: Jobs) -> None:
    await live.queue(**MORTAL)
    await dead(live, *range(20))
    answers = await asyncio.gather(*(live.do("redrive", all=True) for _ in range(3)))
    assert sum(answer["redriven"] for answer in answers) == 20
    assert sorted(record["data"] for record in await live.datas("jobs")) == [*range(20)]


async def test_a_full_queue_takes_no_letters_back(live: Jobs) -> None:
    await live.queue(**MORTAL)
    await dead(live, "a", "b")
    await live.queue(**MORTAL, cap_records=1, discard="reject")
    answer = await live.call("redrive", all=True)
    assert code_of(answer)[:2] == (422, "topic_full")
    assert len(await live.datas("dead")) == 2
    await live.queue(**MORTAL)
    assert (await live.do("redrive", all=True))["redriven"] == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, None),
        ({"all": False}, None),
        ({"all": True, "seqs": [1]}, "all"),
        ({"tag": "a", "match": "a"}, "match"),
        ({"seqs": []}, "seqs"),
        ({"seqs": [-1]}, "seqs[0]"),
        ({"tag": 5}, "tag"),
        ({"match": ["tag", "Glob", "a*b"]}, "match[2]"),
        ({"all": 1}, "all"),
        ({"all": True, "max": -1}, "max"),
        ({"all": True, "from": "a/b"}, "from"),
        ({"all": True, "from": "jobs"}, "from"),
        ({"all": True, "after_seq": U64_MAX + 1}, "after_seq"),
    ],
)
async def test_a_wrong_redrive_is_400(live: Jobs, body: dict[str, Any], field: str | None) -> None:
    await live.queue(**MORTAL)
    assert code_of(await live.call("redrive", **body)) == (400, "invalid_request", field)


async def test_a_redrive_needs_to_know_where_from(live: Jobs) -> None:
    await live.queue()
    assert code_of(await live.call("redrive", all=True)) == (400, "invalid_request", "from")
    absent: dict[str, Any] = {"all": True, "from": "absent"}
    answer = await live.call("redrive", **absent)
    assert code_of(answer)[:2] == (404, "topic_not_found")


# -- leases ----------------------------------------------------------------------------------------


async def test_leases_are_listed_by_seq_in_pages(live: Jobs) -> None:
    await live.queue(lease_ms=5_000)
    await live.put(*range(5))
    jobs = [*await live.claim("one", 2), *await live.claim("two", 2, lease_ms=60_000)]
    told = await live.ok("GET", "/v0/topics/jobs/leases?page_size=3")
    assert told["leases"][0] == {
        "seq": 1,
        "node": "one",
        "lease_id": jobs[0]["lease_id"],
        "deadline": live.clock.now_ms() + 5_000,
        "deliveries": 1,
        "claimed_ts": live.clock.now_ms(),
    }
    assert [lease["seq"] for lease in told["leases"]] == [1, 2, 3]
    path = f"/v0/topics/jobs/leases?page_size=3&cursor={told['next_cursor']}"
    rest = await live.ok("GET", path)
    assert [(lease["seq"], lease["node"]) for lease in rest["leases"]] == [(4, "two")]
    assert "next_cursor" not in rest
    live.pass_time(5_001)
    told = await live.ok("GET", "/v0/topics/jobs/leases")
    assert [lease["seq"] for lease in told["leases"]] == [3, 4], "expired ones are none"


@pytest.mark.parametrize("query", ["page_size=x", "cursor=%00", "cursor=e30", "page_size=-1"])
async def test_a_wrong_page_of_leases_is_400(live: Jobs, query: str) -> None:
    await live.queue()
    answer = await live.http.get(f"/v0/topics/jobs/leases?{query}")
    assert code_of(answer) == (400, "invalid_request", query.partition("=")[0])


# -- changes of the topic --------------------------------------------------------------------------


async def test_plain_deletes_take_jobs_and_their_leases(live: Jobs) -> None:
    await live.queue()
    await live.put(*range(3))
    await live.claim(max=2)
    await live.http.post("/v0/topics/jobs/delete", json={"before_seq": 2})
    assert await live.counts() == (1, 1, 0, 0)
    told = await live.do("ack", node="w", seqs=[1, 2])
    assert (told["acked"], told["skipped"]) == (1, [1])


async def test_a_cap_takes_jobs_and_their_leases(live: Jobs) -> None:
    await live.queue(cap_records=2)
    await live.put(*range(2))
    await live.claim(max=2)
    await live.put("new")
    assert await live.counts() == (1, 1, 0, 0)
    assert (await live.do("ack", node="w", seqs=[1, 2]))["skipped"] == [1]


async def test_a_ttl_takes_jobs_before_anybody_looks(live: Jobs) -> None:
    await live.queue(ttl_ms=1_000)
    await live.put(*range(2))
    await live.claim(lease_ms=60_000)
    live.pass_time(1_500)
    await live.put("new")
    assert await live.seqs(max=9) == [3]
    assert await live.counts() == (0, 1, 0, 0)


async def test_a_changed_configuration_applies_from_now_on(live: Jobs) -> None:
    await live.queue(lease_ms=60_000)
    await live.put("a", "b")
    await live.claim()
    await live.queue(lease_ms=1_000)
    (job,) = await live.claim()
    assert job["deadline"] == live.clock.now_ms() + 1_000
    live.pass_time(1_001)
    assert await live.seqs(max=9) == [2]


async def test_a_recreated_queue_starts_empty_and_knows_no_old_lease(live: Jobs) -> None:
    await live.queue(**MORTAL)
    await dead(live, "x")
    await live.put("old")
    old = (await live.claim())[0]
    await live.ok("DELETE", "/v0/topics/jobs")
    await live.queue()
    assert await live.counts() == (0, 0, 0, 0)
    await live.put("new", "new")
    assert await live.seqs("other", 2) == [1, 2]
    for verb in ("ack", "nack"):
        told = await live.do(verb, node="w", seqs=[old["$seq"]], lease_ids=[old["lease_id"]])
        assert told["skipped"] == [old["$seq"]]
    assert await live.counts() == (0, 2, 0, 0)


async def test_diff_watches_and_changes_nothing(live: Jobs) -> None:
    await live.queue()
    await live.put("a")
    await live.claim()
    assert [record["data"] for record in await live.datas("jobs")] == ["a"]
    assert await live.counts() == (0, 1, 0, 0)


# -- durable leases and restarts -------------------------------------------------------------------


@pytest.mark.parametrize("is_durable", [True, False])
async def test_a_clean_stop_keeps_leases_and_counts(disk: FakeDisk, is_durable: bool) -> None:
    live = await Jobs.start(disk)
    await live.queue(leases_durable=is_durable)
    await live.put("a", "b")
    await live.do("nack", node="w", seqs=await live.seqs())
    (job,) = await live.claim()
    await live.stop()
    live = await Jobs.start(disk)
    assert await live.counts() == (1, 1, 0, 0)
    told = await live.do("ack", node="w", seqs=[1], lease_ids=[job["lease_id"]])
    assert told["acked"] == 1
    assert job["deliveries"] == 2
    await live.stop()


async def test_durable_verbs_answer_once_they_are_safe(live: Jobs) -> None:
    await live.queue(leases_durable=True, lease_ms=1_000)
    await live.put(*range(4))
    assert await live.seqs(max=3) == [1, 2, 3]
    assert (await live.do("nack", node="w", seqs=[1]))["nacked"] == 1
    assert (await live.do("extend", node="w", seqs=[2], lease_ms=9_000))["extended"] == 1
    assert (await live.do("ack", node="w", seqs=[3]))["acked"] == 1
    live.pass_time(1_001)
    assert await live.counts() == (2, 1, 0, 0)
    assert await live.seqs(max=9) == [1, 4]


# -- the lease log ---------------------------------------------------------------------------------


async def told_of(live: Jobs, count: int) -> list[Any]:
    await until(lambda: not live.queues.mover._tasks)
    await live.queues.logs.flush()
    events = [record["data"] for record in await live.datas("log")]
    assert len(events) == count, events
    return events


async def test_the_lease_log_has_the_whole_life(live: Jobs) -> None:
    await live.queue(**{**MORTAL, "max_deliveries": 2}, lease_log="log", lease_ms=1_000)
    await live.put("a", "b")
    now = live.clock.now_ms()
    jobs = await live.claim(max=2)
    await live.do("extend", node="w", seqs=[1], lease_ms=5_000)
    await live.do("ack", node="w", seqs=[1])
    live.pass_time(1_001)
    await live.claim("other")
    await live.do("nack", node="other", seqs=[2], delay_ms=7, error="no such address")
    live.pass_time(7)
    assert await live.claim() == []
    await buried(live, 1)
    events = await told_of(live, 8)
    assert [(event["event"], event["seq"]) for event in events] == [
        ("claimed", 1),
        ("claimed", 2),
        ("extended", 1),
        ("acked", 1),
        ("expired", 2),
        ("claimed", 2),
        ("released", 2),
        ("dead_lettered", 2),
    ]
    assert events[0] == {
        **{"event": "claimed", "queue": "jobs", "epoch": 1, "seq": 1, "ts": now, "node": "w"},
        **{"lease_id": jobs[0]["lease_id"], "deliveries": 1, "deadline": now + 1_000},
    }
    assert events[2]["deadline"] == now + 5_000
    assert (events[4]["node"], events[4]["deadline"]) == ("w", now + 1_000)
    assert (events[5]["node"], events[5]["deliveries"]) == ("other", 2)
    assert events[6]["available"] == now + 1_008
    assert events[7]["deliveries"] == 2
    assert [event.get("error") for event in events[6:]] == ["no such address"] * 2
    assert all("error" not in event for event in events[:6])
    tags = [record["data"]["event"] for record in await live.datas("log")]
    assert tags == [event["event"] for event in events]


async def test_a_log_that_refuses_holds_nothing_up(
    live: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    await live.ok("PUT", "/v0/topics/log", {"cap_records": 1, "discard": "reject"})
    await live.queue(lease_log="log")
    await live.put(*range(3))
    assert await live.seqs() == [1]
    await told_of(live, 1)
    for seq in (2, 3):
        assert await live.seqs() == [seq]
        await live.queues.logs.flush()
    assert live.queues.logs.lost_count == 2
    assert caplog.text.count("loses events") == 1


# -- metrics ---------------------------------------------------------------------------------------


async def test_metrics_count_leases_and_show_each_queue(live: Jobs) -> None:
    await live.queue(**MORTAL)
    await live.queue("others")
    await dead(live, "x")
    await live.put(*range(3))
    await live.put("later", delay_ms=9_000)
    await live.claim(max=2)
    await live.put(1, queue="others")
    await live.do("claim", "others", node="w")
    text = (await live.http.get("/v0/metrics")).text
    for line in (
        "topics_queue_topics 2.0",
        "topics_queue_leases_in_flight 3.0",
        'topics_topic_queue_ready{topic="jobs"} 1.0',
        'topics_topic_queue_in_flight{topic="jobs"} 2.0',
        'topics_topic_queue_delayed{topic="jobs"} 1.0',
        'topics_topic_queue_dead_lettered{topic="jobs"} 1.0',
        'topics_topic_queue_in_flight{topic="others"} 1.0',
    ):
        assert f"\n{line}\n" in text
    assert 'topics_topic_queue_ready{topic="dead"}' not in text
    values = (await live.http.get("/v0/metrics", headers={"accept": "application/json"})).json()
    assert values["topics_queue_leases_in_flight"] == 3
    assert {"labels": {"topic": "jobs"}, "value": 2} in values["topics_topic_queue_in_flight"]


async def test_dead_letters_that_would_not_last_are_warned_of(
    live: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    await live.queue(**MORTAL)
    await live.ok("PUT", "/v0/topics/dead", {"durability": "disk"})
    await live.queue(**MORTAL)
    assert "ephemeral" not in caplog.text
    await live.ok("PUT", "/v0/topics/dead", {"durability": "ephemeral"})
    await live.queue(**MORTAL)
    assert "dead letters of jobs go to dead, which is ephemeral" in caplog.text
