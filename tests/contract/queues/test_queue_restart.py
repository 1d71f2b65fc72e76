"""Contract §10.1, §10.3: what a queue keeps over a clean stop and over `kill -9`.

A clean stop keeps everything; a kill loses soft leases and keeps durable ones. Each test has a
server of its own.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import closing

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Json, Server, eventually, good
from tests.contract.queues.queues import (
    LONG_MS,
    SHORT_MS,
    Queue,
    datas_of,
    now_ms,
    seqs_of,
    tokens_of,
)
from tests.contract.streams.streams import SseStream

HOWS = ["clean stop", "kill -9"]
# The cases that keep leases: all but a kill with soft leases.
KEPT = [("clean stop", False), ("clean stop", True), ("kill -9", True)]


def _again(server: Server, queue: Queue, how: str) -> None:
    queue.api = server.restart() if how == "clean stop" else server.crash()


def _facts(queue: Queue) -> Json:
    state = queue.state()
    return {"count": state["count"], "queue": state["queue"], "leases": queue.held()}


@pytest.mark.parametrize(("how", "durable"), KEPT)
def test_leases_and_counts_are_kept(own: NewServer, topic: str, how: str, durable: bool) -> None:
    """Contract §10.1, settled rules [S-68, 10.3-04]"""
    server = own()
    queue = Queue.made(server.start(), topic, leases_durable=durable, lease_ms=LONG_MS)
    queue.add(*range(1, 11))
    first, second = queue.take("a", 3), queue.take("b", 2)
    queue.nack("b", [4])
    queue.nack("b", [5], delay_ms=LONG_MS)
    queue.extend("a", [2], LONG_MS * 2)
    queue.ack("a", [1])
    before = _facts(queue)
    assert queue.counts() == (6, 2, 0)
    for _ in range(2 if how == "kill -9" else 1):
        _again(server, queue, how)
        assert _facts(queue) == before
    # The old fences hold, the old holder can continue, and no other worker gets the jobs.
    answer = queue.ack("b", [2, 4], lease_ids=[first[1]["lease_id"], second[0]["lease_id"]])
    assert answer["acked"] == 0
    assert queue.ack("a", [2], lease_ids=[first[1]["lease_id"]])["acked"] == 1
    jobs = queue.take("c", 9)
    assert {job["$seq"]: job["deliveries"] for job in jobs} == {
        4: 2,
        **dict.fromkeys(range(6, 11), 1),
    }
    assert not set(tokens_of(jobs)) & set(tokens_of([*first, *second]))


def test_after_a_kill_soft_leases_are_gone(own: NewServer, topic: str) -> None:
    """Contract §10.3, settled rules [S-68, 10.3-03]"""
    server = own()
    queue = Queue.made(server.start(), topic, leases_durable=False, lease_ms=LONG_MS)
    queue.add(*range(1, 6))
    old = queue.take("a", 3)
    queue.ack("a", [2])
    queue.nack("a", [3], delay_ms=LONG_MS)
    _again(server, queue, "kill -9")
    assert queue.counts() == (4, 0, 0)
    assert queue.held() == []
    for more in ({}, {"lease_ids": tokens_of(old)}):
        answer = queue.ack("a", [1, 2, 3], **more)
        assert (answer["acked"], sorted(answer["skipped"])) == (0, [1, 2, 3])
    new = queue.take("b", 9)
    assert seqs_of(new) == [1, 3, 4, 5]
    assert not set(tokens_of(new)) & set(tokens_of(old))
    assert queue.ack("a", seqs_of(old), lease_ids=tokens_of(old))["acked"] == 0
    assert queue.ack("b", seqs_of(new), lease_ids=tokens_of(new))["acked"] == 4


def test_counts_after_a_kill_are_those_of_the_last_checkpoint(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-68]: here a clean stop made the last checkpoint."""
    server = own()
    queue = Queue.made(server.start(), topic, lease_ms=LONG_MS)
    queue.add("job")
    for _ in range(3):
        queue.take("a")
        queue.nack("a", [1])
    _again(server, queue, "clean stop")
    assert queue.take("a")[0]["deliveries"] == 4
    _again(server, queue, "kill -9")
    # The fourth delivery was forgotten, unless a later checkpoint had it.
    assert queue.take("b")[0]["deliveries"] in (4, 5)


def test_durable_counts_never_go_down(own: NewServer, topic: str) -> None:
    """Contract §10.1, settled rules [10.3-04, 10.6-05]: a job that kills its server therefore
    becomes a dead letter in the end.
    """
    server = own()
    queue = Queue.made(
        server.start(),
        topic,
        leases_durable=True,
        max_deliveries=2,
        dead_letter=f"{topic}.dlq",
        lease_ms=LONG_MS,
    )
    queue.add("poison")
    for deliveries in (1, 2):
        [job] = queue.take("w")
        assert job["deliveries"] == deliveries
        _again(server, queue, "kill -9")
        assert [lease["deliveries"] for lease in queue.held()] == [deliveries]
        assert queue.nack("w", [1], lease_ids=tokens_of([job]))["nacked"] == 1
    assert queue.take("w") == []
    eventually(lambda: queue.counts() == (0, 0, 1), "it is dead-lettered")


@pytest.mark.parametrize("durable", [True, False])
def test_a_kill_of_the_server_takes_no_job_from_a_live_stream_holder(
    own: NewServer, topic: str, durable: bool
) -> None:
    """Contract §10.8, §10.3, settled rules [10.8-13]: the kill proves nothing about the worker,
    whose durable leases continue.
    """
    server = own()
    queue = Queue.made(server.start(), topic, leases_durable=durable, lease_ms=LONG_MS)
    queue.add(*range(1, 4))
    with closing(queue.work("w", max=2)) as stream:
        jobs = [json.loads(stream.event().data) for _ in range(2)]
        _again(server, queue, "kill -9")
    assert queue.counts() == ((1, 2, 0) if durable else (3, 0, 0))
    # The stream does not get the jobs of the closed connection; a new one gets other jobs.
    with closing(queue.work("w", max=1)) as stream:
        other = json.loads(stream.event().data)
        assert (other["$seq"], other["deliveries"]) == ((3, 1) if durable else (1, 1))
    answer = queue.ack("w", seqs_of(jobs), lease_ids=tokens_of(jobs))
    assert (answer["acked"], len(answer["skipped"])) == ((2, 0) if durable else (0, 2))


def test_a_work_stream_requested_during_replay_is_never_refused(own: NewServer, topic: str) -> None:
    """§10.8, §8.2: the request waits, because a browser gives up for ever after a 503. [10.8-12]"""
    server = own()
    queue = Queue.made(server.start(), topic)
    for _ in range(6):
        queue.api.append(topic, [{"data": "x" * 100}] * 5000)
    server.signal(signal.SIGKILL)
    process = server.process = server.spawn()
    port_file = server.directory / "port"
    deadline = time.monotonic() + 30
    stream: SseStream | None = None
    while stream is None:
        assert time.monotonic() < deadline
        assert process.poll() is None
        try:
            port = int(port_file.read_text()) if port_file.exists() else 0
            if port:
                stream = SseStream(f"http://127.0.0.1:{port}", f"{queue.path}/work?node=w")
        except (ConnectionRefusedError, ValueError):
            continue
    with closing(stream):
        assert stream.status == 200
        assert json.loads(stream.event(20).data)["$seq"] == 1


def test_acked_jobs_stay_gone_and_others_stay(own: NewServer, topic: str) -> None:
    """Contract §10.4, §10.1 [10.4-05]"""
    server = own()
    api = server.start()
    queues = [
        Queue.made(api, f"{topic}.{name}", durability=name, lease_ms=LONG_MS)
        for name in ("disk", "fsync")
    ]
    left = list(range(1, 41))
    for step, how in enumerate(["kill -9", "clean stop"]):
        for queue in queues:
            if step == 0:
                queue.add(*left)
            jobs = queue.take("w", 20)
            assert queue.ack("w", seqs_of(jobs)[::2])["acked"] == 10
            queue.nack("w", seqs_of(jobs)[1::2])
        gone = set(seqs_of(jobs)[::2])
        left = [seq for seq in left if seq not in gone]
        _again(server, queues[0], how)
        for queue in queues:
            queue.api = queues[0].api
            assert [record["data"] for record in queue.api.read_all(queue.name)] == left
            assert queue.api.read(queue.name)["tombstone"] is None
    assert [sorted(datas_of(queue.take("x", 100))) for queue in queues] == [left, left]


def test_a_lease_may_run_out_while_the_server_is_down(own: NewServer, topic: str) -> None:
    """Contract §10.3, settled rules [10.3-01, S-68]"""
    server = own()
    api = server.start()
    queues = [Queue.made(api, f"{topic}.{d}", leases_durable=d) for d in (False, True)]
    for queue in queues:
        # The short lease comes last: while it runs, no other worker claims a job.
        queue.add(1)
        queue.take("a", lease_ms=LONG_MS)
        queue.add(2)
        [short] = queue.take("a", lease_ms=SHORT_MS)
    server.stop()
    eventually(lambda: now_ms() > short["deadline"], "time goes on")
    api = server.start()
    for queue in queues:
        queue.api = api
        assert queue.counts() == (1, 1, 0)
        [job] = queue.take("b", 9)
        assert (job["$seq"], job["deliveries"]) == (2, 2)


def test_delays_are_kept(own: NewServer, topic: str) -> None:
    """docs/EXTENSIONS.md, delay_ms [10.1-03]"""
    server = own()
    queue = Queue.made(server.start(), topic, lease_ms=LONG_MS)
    at_ms = now_ms() + 1500
    records = [
        {"data": "soon", "deliver_at_ms": at_ms},
        {"data": "late", "delay_ms": LONG_MS},
        {"data": "now"},
    ]
    good(queue.api.append(topic, records))
    for how in HOWS:
        _again(server, queue, how)
        assert queue.delayed() >= 1
    jobs = datas_of(queue.take("w", 9))
    assert now_ms() >= at_ms or jobs == ["now"]
    while "soon" not in jobs:
        jobs += datas_of(queue.take("w", 9, wait_ms=10_000))
    assert now_ms() >= at_ms
    assert sorted(jobs) == ["now", "soon"]
    assert (queue.delayed(), queue.state()["count"]) == (1, 3)


def test_dead_letters_are_kept_once(own: NewServer, topic: str) -> None:
    """Contract §10.6, §10.7 [10.6-12, 10.7-01]: each letter is kept once even if the two topics
    are on different shards.
    """
    server = own(TOPICS_WAL_SHARDS="3")
    dlq = f"{topic}.dlq"
    queue = Queue.made(server.start(), topic, max_deliveries=1, dead_letter=dlq, lease_ms=LONG_MS)
    queue.add(*range(30))
    queue.nack("w", seqs_of(queue.take("w", 20)))
    assert datas_of(queue.take("w", 30)) == list(range(20, 30))
    eventually(lambda: queue.counts()[2] == 20, "they are dead-lettered")
    for how in HOWS:
        _again(server, queue, how)
        assert sorted(r["data"] for r in queue.api.read_all(dlq)) == list(range(20))
        assert queue.state()["queue"]["dead_lettered"] == 20
        assert queue.state()["count"] == 10
    assert queue.redrive(all=True)["redriven"] == 20
    _again(server, queue, "kill -9")
    assert queue.api.read_all(dlq) == []
    assert sorted(record["data"] for record in queue.api.read_all(topic)) == list(range(30))


@pytest.mark.parametrize("seed", range(2))
def test_a_kill_amid_moves_loses_and_doubles_nothing(own: NewServer, topic: str, seed: int) -> None:
    """§10.6 [10.6-12]: every job is still a job or one letter."""
    server = own(TOPICS_WAL_SHARDS="3")
    dlq = f"{topic}.dlq"
    queue = Queue.made(server.start(), topic, max_deliveries=1, dead_letter=dlq, lease_ms=LONG_MS)
    count = 1000
    queue.add(*range(count))
    queue.nack("w", seqs_of(queue.take("w", count)))
    assert server.process is not None
    # No wait here: the moves are in progress when the server is killed.
    assert queue.take("w", 1 + seed) == []
    os.kill(server.process.pid, signal.SIGKILL)
    _again(server, queue, "kill -9")
    jobs = [record["data"] for record in queue.api.read_all(topic, limit=1000)]
    letters = []
    if queue.api.state(dlq).status_code == 200:
        letters = [record["data"] for record in queue.api.read_all(dlq, limit=1000)]
    assert sorted(jobs + letters) == list(range(count))
    assert queue.state()["queue"]["dead_lettered"] == len(letters)
    assert queue.state()["count"] == len(jobs)


def test_letters_honour_the_class_of_their_topic(own: NewServer, topic: str) -> None:
    """Contract §0.10, settled rules [0.10-24]: letters in an ephemeral topic are gone, letters in
    another topic are kept.
    """
    server = own()
    api = server.start()
    good(api.put("gone", {"durability": "ephemeral"}))
    good(api.put("kept", {"durability": "fsync"}))
    queues = [
        Queue.made(api, f"{topic}.{dlq}", max_deliveries=1, dead_letter=dlq)
        for dlq in ("gone", "kept")
    ]
    for queue in queues:
        queue.add("letter")
        queue.nack("w", seqs_of(queue.take("w")))
        assert queue.take("w") == []
    eventually(lambda: all(q.counts()[2] == 1 for q in queues), "they are dead-lettered")
    assert [record["data"] for record in api.read_all("gone")] == ["letter"]
    api = server.restart()
    assert api.get_state("gone")["count"] == 0
    assert [record["data"] for record in api.read_all("kept")] == ["letter"]
    assert [api.get_state(queue.name)["count"] for queue in queues] == [0, 0]


def test_lease_ids_never_come_again(own: NewServer, topic: str) -> None:
    """Contract §10.2 [10.2-06, 10.4-03]: no lease id comes again over restarts of every kind,
    deletion and recreation.
    """
    server = own()
    queue = Queue.made(server.start(), topic, lease_ms=LONG_MS)
    seen: list[str] = []
    for step in ("kill -9", "clean stop", "recreated"):
        queue.add(1, 2, 3)
        seen += tokens_of(queue.take("w", 10))
        if step == "recreated":
            good(queue.api.drop(topic))
            queue.put(lease_ms=LONG_MS)
        else:
            _again(server, queue, step)
    seen += tokens_of(queue.take("w", 10))
    assert len(seen) >= 9
    assert len(set(seen)) == len(seen)


def test_a_deleted_queue_leaves_no_lease_behind(own: NewServer, topic: str) -> None:
    """Contract §1.4, settled rules [10.7-06]: durable leases of a queue that is gone are not found
    again.
    """
    server = own()
    queue = Queue.made(server.start(), topic, leases_durable=True, lease_ms=LONG_MS)
    queue.add(1, 2, 3)
    old = queue.take("w", 3)
    good(queue.api.drop(topic))
    queue.put(leases_durable=True, lease_ms=LONG_MS)
    queue.add(1, 2, 3)
    for how in HOWS:
        _again(server, queue, how)
        assert (queue.counts(), queue.held()) == ((3, 0, 0), [])
        assert queue.ack("w", [1, 2, 3], lease_ids=tokens_of(old))["acked"] == 0
    assert [job["deliveries"] for job in queue.take("w", 9)] == [1, 1, 1]


def test_sealed_jobs_are_claimed_like_any(own: NewServer, topic: str) -> None:
    """Contract §10.2 [10.2-01]: workers can claim jobs whose records are no longer in memory, also
    after restarts.
    """
    server = own(
        TOPICS_SEGMENT_MAX_EVENTS="50",
        TOPICS_SEGMENT_MAX_AGE_MS="200",
        TOPICS_HOT_RETAIN_SEGMENTS="1",
    )
    queue = Queue.made(server.start(), topic, lease_ms=LONG_MS, leases_durable=True)
    for start in range(0, 600, 100):
        queue.add(*(f"job {n}" for n in range(start, start + 100)))
    eventually(lambda: queue.state()["disk_bytes"] > 0, "records are sealed")
    done: list[str] = []
    for how in [*HOWS, ""]:
        jobs = queue.take("w", 200)
        assert len(jobs) == 200
        if how:
            _again(server, queue, how)
        assert queue.ack("w", seqs_of(jobs), lease_ids=tokens_of(jobs))["acked"] == 200
        done += datas_of(jobs)
    assert sorted(done) == sorted(f"job {n}" for n in range(600))
    assert (queue.counts(), queue.state()["count"]) == ((0, 0, 0), 0)
