"""The push stream of a queue (§10.8) over a real node: depth, room, its end, its refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.queues.jobs import Jobs, code_of, turns, until
from tests.api.watch.streams import Reader
from tests.storage.fake_disk import FakeDisk
from topics_server.values.errors import Code, TopicsError

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live(disk: FakeDisk) -> AsyncIterator[Jobs]:
    server = await Jobs.start(disk)
    yield server
    await server.stop()


async def test_a_stream_opens_like_a_watch_and_beats_at_once(live: Jobs) -> None:
    await live.queue()
    worker = live.work()
    await worker.begun()
    await turns()
    assert worker.status == 200
    assert worker.headers[b"content-type"].startswith(b"text/event-stream")
    assert worker.headers[b"cache-control"] == b"no-store"
    assert worker.headers[b"x-accel-buffering"] == b"no"
    assert worker.received.startswith(b"retry: 2000\n\n: hb ")
    assert worker.received.endswith(b"\n\n")
    await worker.left()


async def test_a_job_frame_has_the_fields_of_a_claimed_job_and_its_topic(live: Jobs) -> None:
    await live.queue()
    await live.put({"a": 1}, tag="t", meta={"m": 1})
    worker = live.work(node="eu", lease_ms=7_000)
    (frame,) = await worker.jobs(1)
    assert list(frame.data) == [
        *("topic", "$seq", "lease_id", "deadline", "$ts", "$tag", "deliveries", "data", "meta")
    ]
    assert (frame.id, frame.data["topic"], frame.data["deliveries"]) == ("1", "jobs", 1)
    assert frame.data["deadline"] == live.clock.now_ms() + 7_000
    leases = (await live.ok("GET", "/v0/topics/jobs/leases"))["leases"]
    assert [(lease["node"], lease["lease_id"]) for lease in leases] == [
        ("eu", frame.data["lease_id"])
    ]
    await worker.left()


async def test_payloads_are_verbatim_but_for_line_breaks(live: Jobs) -> None:
    await live.queue()
    body = b'{"records":[{"data":{ "a" :\n 1e400}}]}'
    headers = {"content-type": "application/json"}
    await live.http.post("/v0/topics/jobs", content=body, headers=headers)
    worker = live.work()
    await worker.jobs(1)
    assert b'"data":{ "a" :\ndata:  1e400}}' in worker.received
    await worker.left()


async def test_at_most_max_are_in_flight_and_an_ack_makes_room(live: Jobs) -> None:
    await live.queue()
    await live.put(*range(6))
    worker = live.work(max=2)
    assert await worker.seqs(2) == [1, 2]
    await turns()
    assert await live.counts() == (4, 2, 0, 0)
    await live.do("ack", node="w", seqs=[1])
    assert await worker.seqs(1) == [3]
    await live.do("ack", node="w", seqs=[2, 3])
    assert await worker.seqs(2) == [4, 5]
    await turns()
    assert await live.counts() == (1, 2, 0, 0)
    await worker.left()


async def test_a_stream_after_no_more_keeps_its_jobs(live: Jobs) -> None:
    await live.queue()
    await live.put(*range(6))
    worker = live.work(max=2)
    assert await worker.seqs(2) == [1, 2]
    other = live.work(max=1)
    assert await other.seqs(1) == [3]
    told = await live.do("extend", node="w", seqs=[2], lease_ms=60_000, no_more=True)
    assert told["extended"] == 1
    await live.do("ack", node="w", seqs=[1])
    await turns()
    assert await live.counts() == (3, 2, 0, 0)
    await live.do("ack", node="w", seqs=[3])
    assert await other.seqs(1) == [4], "the other stream of this node goes on"
    await worker.left()
    await turns()
    assert await live.counts() == (3, 1, 0, 0)
    jobs = await live.claim(max=9)
    assert {job["$seq"]: job["deliveries"] for job in jobs} == {2: 2, 5: 1, 6: 1}
    await other.left()


@pytest.mark.parametrize(
    "asked",
    [{"node": "thief"}, {"lease_ids": ["lease_1"]}, {"seqs": [3]}, {"no_more": False}],
)
async def test_only_a_holder_can_hold_a_stream_back(live: Jobs, asked: dict[str, Any]) -> None:
    await live.queue()
    await live.put(*range(4))
    worker = live.work(max=2)
    assert await worker.seqs(2) == [1, 2]
    body = {"node": "w", "seqs": [1], "lease_ms": 60_000, "no_more": True, **asked}
    if asked == {"seqs": [3]}:
        # The same node claimed this job by a call, so it did not come over a stream.
        assert await live.seqs("w") == [3]
    await live.do("extend", **body)
    await live.do("ack", node="w", seqs=[1])
    assert await worker.seqs(1) == [4 if asked == {"seqs": [3]} else 3]
    await worker.left()


async def test_one_is_in_flight_by_default(live: Jobs) -> None:
    await live.queue()
    await live.put(*range(3))
    worker = live.work()
    assert await worker.seqs(1) == [1]
    await turns()
    assert await live.counts() == (2, 1, 0, 0)
    await worker.left()


async def test_a_nack_and_an_expiry_make_room_too(live: Jobs) -> None:
    await live.queue(lease_ms=1_000)
    await live.put(*range(3))
    worker = live.work()
    assert await worker.seqs(1) == [1]
    await live.do("nack", node="w", seqs=[1], delay_ms=60_000)
    assert await worker.seqs(1) == [2]
    live.pass_time(1_001)
    (again,) = await worker.jobs(1)
    assert (again.data["$seq"], again.data["deliveries"]) == (2, 2)
    await live.http.post("/v0/topics/jobs/delete", json={"before_seq": 3})
    assert await worker.seqs(1) == [3]
    await worker.left()


async def test_an_extend_keeps_a_pushed_job(live: Jobs) -> None:
    await live.queue(lease_ms=1_000)
    await live.put("a", "b")
    worker = live.work()
    assert await worker.seqs(1) == [1]
    await live.do("extend", node="w", seqs=[1], lease_ms=5_000)
    live.pass_time(1_001)
    await turns()
    assert await live.counts() == (1, 1, 0, 0)
    await worker.left()


async def test_jobs_come_as_they_are_appended(live: Jobs) -> None:
    await live.queue()
    worker = live.work(max=9)
    await live.in_line(1)
    for seq in (1, 2, 3):
        await live.put("a")
        assert await worker.seqs(1) == [seq]
    await worker.left()


async def test_a_disconnect_releases_exactly_the_jobs_of_the_stream(live: Jobs) -> None:
    await live.queue()
    await live.put(*range(5))
    assert await live.seqs("w", 1) == [1]
    first = live.work(max=2)
    assert await first.seqs(2) == [2, 3]
    second = live.work(max=1)
    assert await second.seqs(1) == [4]
    await live.do("ack", node="w", seqs=[2])
    await until(lambda: b"id: 5\n" in first.received)
    await first.left()
    assert await live.counts() == (2, 2, 0, 0)
    (third, fifth) = await live.claim("other", 9)
    assert (third["$seq"], third["deliveries"]) == (3, 2)
    assert (fifth["$seq"], fifth["deliveries"]) == (5, 2)
    await second.left()
    assert (await live.do("ack", node="w", seqs=[1]))["acked"] == 1
    assert live.waiting() == 0
    assert live.node.notifier.listener_count == 0
    assert live.node.state.connections == 0


async def test_another_stream_gets_them_at_once(live: Jobs) -> None:
    await live.queue()
    await live.put("a")
    first = live.work()
    await first.jobs(1)
    second = live.work(node="v")
    await live.in_line(2)
    await first.left()
    (job,) = await second.jobs(1)
    assert job.data["deliveries"] == 2
    await second.left()


@pytest.mark.parametrize("is_durable", [True, False])
async def test_streams_share_new_jobs_in_turn(live: Jobs, is_durable: bool) -> None:
    await live.queue(leases_durable=is_durable)
    workers = [live.work(node=f"w{index}", max=100) for index in range(4)]
    await live.in_line(4)
    for _ in range(12):
        await live.put("one")
        await turns()
    for worker in workers:
        assert len(await worker.seqs(3)) == 3
    for worker in workers:
        await worker.left()
    await until(lambda: live.node.commits.is_idle(2**64 - 2))
    assert (await live.counts())[:2] == (12, 0)


async def test_a_burst_is_divided_evenly(live: Jobs) -> None:
    await live.queue()
    workers = [live.work(node=f"w{index}", max=100) for index in range(4)]
    await live.in_line(4)
    await live.put(*range(42))
    counts = []
    for worker in workers:
        await worker.seqs(10)
        counts.append(len(worker._events()))
    assert sum(counts) == 42
    assert max(counts) - min(counts) <= 1
    for worker in workers:
        await worker.left()


async def test_a_socket_that_takes_nothing_is_given_no_more(live: Jobs) -> None:
    await live.queue()
    worker = live.work(max=100)
    await live.in_line(1)
    worker.room.clear()
    await live.put(*range(10))
    await turns()
    await live.put(*range(10))
    await turns()
    assert (await live.counts())[0] == 10, "it has been handed the first lot only"
    worker.room.set()
    assert await worker.seqs(20) == [*range(1, 21)]
    await worker.left()


async def test_leased_jobs_that_were_never_sent_are_released_too(live: Jobs) -> None:
    await live.queue()
    await live.put(*range(40))
    worker = live.work(max=40, room=False)
    await turns()
    worker.room.set()
    await worker.seqs(1)
    worker.room.clear()
    await worker.left()
    assert await live.counts() == (40, 0, 0, 0)


# -- the end of a stream ---------------------------------------------------------------------------


@pytest.mark.parametrize("becomes", ["nothing", "log", "queue"])
async def test_a_lost_queue_is_reported_and_ends_the_stream(live: Jobs, becomes: str) -> None:
    await live.queue()
    await live.put("a")
    worker = live.work()
    await worker.jobs(1)
    await live.ok("DELETE", "/v0/topics/jobs")
    if becomes != "nothing":
        await live.ok("PUT", "/v0/topics/jobs", {"type": becomes})
    (frame,) = await worker.take(1)
    assert (frame.event, frame.data["code"]) == ("error", 409)
    await worker.ended()
    assert live.node.state.connections == 0


async def test_a_stop_ends_streams_at_once_and_releases(disk: FakeDisk) -> None:
    live = await Jobs.start(disk)
    await live.queue(leases_durable=True)
    await live.put("a", "b")
    worker = live.work()
    await worker.jobs(1)
    assert await live.seqs("poll") == [2]
    live.node.begin_drain()
    await worker.ended()
    await live.node.close()
    live = await Jobs.start(disk)
    assert await live.counts() == (1, 1, 0, 0), "what a poll holds stays"
    (job,) = await live.claim("other", 9)
    assert (job["$seq"], job["deliveries"]) == (1, 2)
    await live.stop()


async def test_a_refusal_is_reported_and_retried(
    live: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live.queue(leases_durable=True)
    worker = live.work()
    await live.in_line(1)
    submit = live.node.commits.submit
    refusals = [TopicsError(Code.THROTTLED, "the journal is full", {"limit": "journal_queue"})]

    def refuse(entry: Any, *args: Any, **more: Any) -> Any:
        if type(entry).__name__ == "LeasesGranted" and refusals:
            raise refusals.pop()
        return submit(entry, *args, **more)

    monkeypatch.setattr(live.node.commits, "submit", refuse)
    await live.put("a")
    (frame,) = await worker.take(1)
    assert (frame.event, frame.data["code"]) == ("error", 429)
    live.pass_time(999)
    await turns()
    assert await live.counts() == (1, 0, 0, 0)
    live.pass_time(1)
    assert await worker.seqs(1) == [1]
    await worker.left()


async def test_a_read_only_journal_ends_the_stream(
    live: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live.queue(leases_durable=True)
    worker = live.work()
    await live.in_line(1)
    submit = live.node.commits.submit

    def refuse(entry: Any, *args: Any, **more: Any) -> Any:
        if type(entry).__name__ == "LeasesGranted":
            raise TopicsError(Code.STORAGE_READ_ONLY, "a sync failed", {"shard": 0})
        return submit(entry, *args, **more)

    monkeypatch.setattr(live.node.commits, "submit", refuse)
    await live.put("a")
    (frame,) = await worker.take(1)
    assert (frame.event, frame.data["code"]) == ("error", 503)
    await worker.ended()
    answer = await live.call("claim", node="w")
    assert code_of(answer)[:2] == (503, "storage_read_only")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "node"),
        ("node=", "node"),
        ("node=" + "x" * 129, "node"),
        ("node=w&max=x", "max"),
        ("node=w&max=-1", "max"),
        ("node=w&max=1.0", "max"),
        ("node=w&max=4294967296", "max"),
        ("node=w&lease_ms=", "lease_ms"),
        ("node=w&lease_ms=18446744073709551616", "lease_ms"),
    ],
)
async def test_a_wrong_query_is_400(live: Jobs, query: str, field: str) -> None:
    await live.queue()
    answer = await live.http.get(f"/v0/topics/jobs/work?{query}")
    assert code_of(answer) == (400, "invalid_request", field)
    assert live.node.state.connections == 0


async def test_accept_without_an_event_stream_is_406(live: Jobs) -> None:
    await live.queue()
    headers = {"accept": "application/json"}
    answer = await live.http.get("/v0/topics/jobs/work?node=w", headers=headers)
    assert code_of(answer)[:2] == (406, "not_acceptable")


async def test_streams_are_capped_together(disk: FakeDisk) -> None:
    live = await Jobs.start(disk, max_sse_connections=1)
    await live.queue()
    worker = live.work()
    await live.in_line(1)
    answer = await live.http.get("/v0/topics/jobs/work?node=w")
    assert code_of(answer)[:2] == (429, "throttled")
    assert answer.json()["error"]["detail"] == {"limit": "max_sse_connections", "max": 1}
    await worker.left()
    again = live.work()
    await live.in_line(1)
    await again.left()
    await live.stop()


async def test_head_opens_nothing(live: Jobs) -> None:
    await live.queue()
    reader = Reader(live.app, "/v0/topics/jobs/work", method="HEAD", query=b"node=w")
    await asyncio.wait_for(reader.serving, 10)
    assert (reader.status, reader.received) == (200, b"")
    assert live.node.state.connections == 0
    assert live.waiting() == 0


# -- before it starts and after it ends ------------------------------------------------------------


async def test_a_get_waits_while_the_journal_is_replayed(live: Jobs) -> None:
    await live.queue()
    await live.put("a")
    live.node.state.phase = "replaying"
    worker = live.work()
    await asyncio.sleep(0.01)
    assert (worker.head, live.node.state.waiting) == (None, 1)
    live.node.state.enter("ready")
    assert await worker.seqs(1) == [1]
    assert live.node.state.waiting == 0
    await worker.left()


async def test_a_client_that_disconnects_during_replay_leaves_nothing_behind(live: Jobs) -> None:
    live.node.state.phase = "replaying"
    before = len(asyncio.all_tasks())
    worker = live.work()
    await asyncio.sleep(0.01)
    await worker.left()
    await asyncio.sleep(0.01)
    assert (worker.head, live.node.state.waiting) == (None, 0)
    assert (len(asyncio.all_tasks()), live.node.state.connections) == (before, 0)
    live.node.state.enter("ready")


@pytest.mark.parametrize("phase", ["replaying", "draining"])
async def test_a_server_that_stops_hangs_up_without_an_answer(live: Jobs, phase: Any) -> None:
    await live.queue()
    live.node.state.phase = phase
    worker = live.work()
    await asyncio.sleep(0.01)
    if phase == "replaying":
        live.node.state.enter("draining")
        await asyncio.sleep(0.01)
    assert not worker.serving.done(), "it waits for the connection to be closed"
    await worker.left()
    assert (worker.head, worker.received, live.node.state.connections) == (None, b"", 0)


@pytest.mark.parametrize("query", ["", "node=w&max=x"])
async def test_a_wrong_query_does_not_wait(live: Jobs, query: str) -> None:
    live.node.state.phase = "replaying"
    answer = await live.http.get(f"/v0/topics/jobs/work?{query}")
    assert code_of(answer)[:2] == (400, "invalid_request")
    live.node.state.enter("ready")
