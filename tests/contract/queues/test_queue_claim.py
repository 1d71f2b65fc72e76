"""§10.1-§10.3: claims: which worker gets which job, when it returns, and how jobs are shared.

Times are the shortest that the contract allows; tests sleep only to wait for a deadline.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.queues.queues import (
    LONG_MS,
    SHORT_MS,
    Queue,
    datas_of,
    now_ms,
    seqs_of,
    tokens_of,
    within,
)
from tests.contract.streams.streams import connected, reset

WORKERS = 16


@pytest.fixture
def queue(api: Api, topic: str) -> Queue:
    """A queue with all defaults."""
    return Queue.made(api, topic)


def test_a_claim_leases_jobs_in_order_and_counts_the_rest(queue: Queue) -> None:
    """Contract §10.2 [10.2-01, 10.2-05, 10.2-09, 10.2-11, 10.7-01]"""
    queue.add(*range(5))
    answer = queue.claim("w", 3)
    assert set(answer) == {"topic", "claimed", "count", "ready", "performance"}
    assert (answer["topic"], answer["count"], answer["ready"]) == (queue.name, 3, 2)
    assert answer["performance"]["server_total_ms"] >= 0
    assert answer["performance"]["throttle_wait_ms"] >= 0
    assert seqs_of(answer["claimed"]) == [1, 2, 3]
    assert queue.counts() == (2, 3, 0)
    # Fewer jobs than requested is no error, and no job is leased twice.
    rest = queue.claim("x", 10)
    assert (seqs_of(rest["claimed"]), rest["count"], rest["ready"]) == ([4, 5], 2, 0)
    empty = queue.claim("y", 10)
    assert (empty["claimed"], empty["count"], empty["ready"]) == ([], 0, 0)
    assert queue.counts() == (0, 5, 0)


def test_an_empty_queue_answers_at_once(queue: Queue) -> None:
    """Contract §10.2 [10.2-09, 10.2-11]"""
    began = time.monotonic()
    assert queue.claim()["count"] == 0
    assert time.monotonic() - began < 2


def test_max_is_one_by_default(queue: Queue) -> None:
    """Contract §10.2 [10.2-03]"""
    queue.add(1, 2)
    assert good(queue.post("claim", {"node": "w"}))["count"] == 1


def test_max_is_clamped(queue: Queue) -> None:
    """Contract §10.2 [10.2-03]"""
    queue.add(*range(1001))
    answer = queue.claim("w", 4_294_967_295)
    assert (answer["count"], answer["ready"]) == (1000, 1)


def test_the_clamp_is_a_setting(own: NewServer, topic: str) -> None:
    """Contract §10.2 [10.2-03, 10.4-06]"""
    queue = Queue.made(own(TOPICS_MAX_CLAIM="7").start(), topic)
    queue.add(*range(20))
    jobs = queue.claim("w", 100)["claimed"]
    assert len(jobs) == 7
    refused(queue.post("ack", {"node": "w", "seqs": list(range(1, 9))}), 400, "batch_too_large")
    assert queue.ack("w", seqs_of(jobs))["acked"] == 7


def test_a_job_carries_its_record_and_its_lease(queue: Queue) -> None:
    """Contract §10.2 [10.2-06, 10.2-08, 10.1-02]"""
    record = {"data": {"n": [1, None]}, "tag": "tenant42:job", "meta": {"trace": "z9"}}
    good(queue.api.append(queue.name, [record, {"data": "bare"}]))
    stored = queue.api.read_all(queue.name, include_tags=True)
    full, bare = queue.take("w", 2)
    assert (full["$seq"], full["$tag"], full["data"], full["meta"]) == (
        1,
        "tenant42:job",
        {"n": [1, None]},
        {"trace": "z9"},
    )
    assert full["$ts"] == stored[0]["$ts"]
    assert (full["deliveries"], bare["deliveries"]) == (1, 1)
    assert not {"$tag", "meta"} & set(bare)
    assert {"$seq", "lease_id", "deadline", "$ts", "deliveries", "data"} <= set(bare)
    for job in (full, bare):
        assert re.fullmatch(r"lease_[0-9a-f]+", job["lease_id"])
    assert full["lease_id"] != bare["lease_id"]


@pytest.mark.parametrize(
    "data", ["1e400", '{"a" : 1 ,  "a":2}', '"\\u0061\\/"', "[1.50, -0]", str(2**70), "null"]
)
def test_a_job_is_delivered_byte_for_byte(queue: Queue, data: str) -> None:
    """§10.2 and settled rules: verbatim means bytes [10.2-06]"""
    body = b'{"records":[{"data":%b,"meta":{"k": %b}}]}' % (data.encode(), data.encode())
    media = {"Content-Type": "application/json"}
    good(queue.api.http.post(queue.path, content=body, headers=media))
    answer = queue.post("claim", {"node": "w"})
    assert b'"data":%b' % data.encode() in answer.content
    assert b'"meta":{"k": %b}' % data.encode() in answer.content


def test_an_append_may_create_the_queue(api: Api, topic: str) -> None:
    """Contract §10.1, §2 [10.1-02]"""
    good(api.append(topic, [{"data": "first"}], config={"type": "queue", "lease_ms": LONG_MS}))
    assert datas_of(Queue(api, topic).take("w", 9)) == ["first"]


def test_produced_jobs_are_ordinary_appends(queue: Queue) -> None:
    """Contract §10.1 [10.1-02]: idempotency, order and deletes hold as on a log."""
    for _ in range(2):
        again = queue.api.append(queue.name, [{"data": "once"}], idempotency_key="k")
        assert good(again)["seqs"] == [1]
    assert queue.counts() == (1, 0, 0)
    seqs = queue.add("x", "y", tag="t", node="producer")
    assert seqs == [2, 3]
    good(queue.api.delete(queue.name, match="t"))
    assert seqs_of(queue.take("w", 10)) == [1]


@pytest.mark.parametrize(
    ("asked", "effective"), [(5000, 5000), (1, 100), (0, 100), (99_999_999_999, 86_400_000)]
)
def test_lease_ms_of_a_claim_overrides_the_topics_and_is_clamped(
    queue: Queue, asked: int, effective: int
) -> None:
    """Contract §10.2 [10.2-04, 10.2-07]"""
    queue.add(1)
    answer, before, after = within(lambda: queue.claim("w", 1, lease_ms=asked))
    deadline = answer["claimed"][0]["deadline"]
    assert before + effective <= deadline <= after + effective


def test_the_topics_lease_is_the_default(api: Api, topic: str) -> None:
    """Contract §10.2, §0.10 [10.2-04, 10.2-07]"""
    queue = Queue.made(api, topic, lease_ms=777_000)
    queue.add(1, 2)
    answer, before, after = within(lambda: queue.claim("w", 2))
    deadlines = {job["deadline"] for job in answer["claimed"]}
    assert len(deadlines) == 1
    assert before + 777_000 <= deadlines.pop() <= after + 777_000


def test_an_expired_lease_makes_the_job_claimable_again(queue: Queue) -> None:
    """Contract §10.3, §10.1 [10.3-01, 10.3-02, 10.1-01, 10.2-05]"""
    queue.add("job")
    [first] = queue.take("a", lease_ms=SHORT_MS)
    assert queue.take("b") == []
    [second] = queue.soon("b", lease_ms=SHORT_MS)
    assert now_ms() > first["deadline"]
    assert (second["$seq"], second["deliveries"], second["data"]) == (1, 2, "job")
    assert second["lease_id"] != first["lease_id"]
    [third] = queue.take("c", wait_ms=5000)
    assert third["deliveries"] == 3
    assert len(set(tokens_of([first, second, third]))) == 3


def test_counters_follow_an_expiry_by_themselves(queue: Queue) -> None:
    """Contract §10.3, §10.7 [10.3-01, 10.7-01]"""
    queue.add(*range(4))
    queue.take("a", 3, lease_ms=SHORT_MS)
    assert queue.counts()[1] in (0, 3)
    queue.is_expired()
    assert queue.counts() == (4, 0, 0)


def test_expired_jobs_come_before_fresh_ones(queue: Queue) -> None:
    """Contract §10.3 [10.2-12]"""
    queue.add(*range(6), tag="x")
    queue.take("a", 4, lease_ms=SHORT_MS)
    queue.is_expired()
    assert sorted(seqs_of([*queue.take("b", 2), *queue.take("b", 2)])) == [1, 2, 3, 4]
    assert seqs_of(queue.take("b", 9)) == [5, 6]


def test_a_nacked_job_comes_before_fresh_ones(queue: Queue) -> None:
    """Contract §10.2, §10.5 [10.2-12]"""
    queue.add(*range(6))
    queue.take("a", 4)
    queue.nack("a", [3])
    [job] = queue.take("b")
    assert (job["$seq"], job["deliveries"]) == (3, 2)
    assert seqs_of(queue.take("b", 9)) == [5, 6]


def test_no_job_is_leased_twice_under_racing_claims(queue: Queue) -> None:
    """Contract §10.2 [10.2-05]"""
    queue.add(*range(300))
    with ThreadPoolExecutor(WORKERS) as pool:
        pages = list(pool.map(lambda n: queue.take(f"w{n}", 20, lease_ms=LONG_MS), range(20)))
    seqs = [job["$seq"] for page in pages for job in page]
    assert sorted(seqs) == list(range(1, 301))
    assert len({job["lease_id"] for page in pages for job in page}) == 300


# --- wait_ms --------------------------------------------------------------------------------------
def test_a_waiting_claim_is_answered_by_the_first_job(queue: Queue) -> None:
    """docs/EXTENSIONS.md, wait_ms [10.2-14]"""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.take, "w", 8, wait_ms=20_000)
        began = time.monotonic()
        queue.add("first")
        [job] = waiting.result(15)
        assert job["data"] == "first"
        assert time.monotonic() - began < 10
    assert queue.counts() == (0, 1, 0)


def test_a_waiting_claim_answers_empty_when_its_time_is_over(queue: Queue) -> None:
    """docs/EXTENSIONS.md, wait_ms [10.2-14]"""
    began = time.monotonic()
    answer = queue.claim("w", 1, wait_ms=150)
    assert 0.14 < time.monotonic() - began < 10
    assert (answer["claimed"], answer["count"], answer["ready"]) == ([], 0, 0)


def test_a_waiting_claim_that_disconnected_leaves_no_lease(queue: Queue) -> None:
    """docs/EXTENSIONS.md, wait_ms [10.2-14]: no worker could ack a job of an answer that was never
    sent.
    """
    body = json.dumps({"node": "ghost", "wait_ms": 30_000, "lease_ms": LONG_MS}).encode()
    head = (
        f"POST {queue.path}/claim HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    ghosts = [connected(queue.api.url) for _ in range(3)]
    for ghost in ghosts:
        ghost.sendall(head.encode() + body)
    # Later claims have their answers, so the server has read these claims and they wait. If a
    # client disconnected before its claim was read, the server could not know, and would serve the
    # claim at once.
    for _ in range(3):
        assert queue.api.raw("GET", "/v0/health").status == 200
    for ghost in ghosts:
        reset(ghost)
    # This answer comes after the resets, so the server has seen them before the job comes.
    for _ in range(3):
        assert queue.api.raw("GET", "/v0/health").status == 200
    queue.add("job")
    [job] = queue.soon("alive")
    assert job["data"] == "job"
    assert [lease["node"] for lease in queue.held()] == ["alive"]


def test_a_waiting_claim_gets_released_and_expired_jobs(queue: Queue) -> None:
    """docs/EXTENSIONS.md, wait_ms [10.2-14, 10.3-01]"""
    queue.add("job")
    queue.take("a", lease_ms=LONG_MS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.take, "b", wait_ms=20_000, lease_ms=SHORT_MS)
        eventually(lambda: not waiting.done(), "the claim is on its way")
        queue.nack("a", [1])
        assert waiting.result(15)[0]["deliveries"] == 2
    [job] = queue.take("c", wait_ms=20_000)
    assert job["deliveries"] == 3


@pytest.mark.parametrize("durable", [False, True])
def test_a_waiting_claim_learns_of_leases_granted_meanwhile(
    api: Api, topic: str, durable: bool
) -> None:
    """docs/EXTENSIONS.md, wait_ms [10.2-14, 10.3-01]: one of two claims gets the job; the other
    gets it when the lease expires.
    """
    queue = Queue.made(api, topic, leases_durable=durable, lease_ms=SHORT_MS)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(queue.take, f"w{n}", wait_ms=8000) for n in range(2)]
        # A few round trips give both time to arrive; the answers are the same either way.
        for _ in range(20):
            queue.state()
        began = time.monotonic()
        queue.add("job")
        answers = [future.result(15) for future in waiting]
        assert time.monotonic() - began < 5
    assert sorted(job["deliveries"] for jobs in answers for job in jobs) == [1, 2]


def test_a_waiting_claim_gets_404_when_its_queue_is_dropped(queue: Queue) -> None:
    """EXTENSIONS: wait_ms; §10 [10-03]"""
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(queue.post, "claim", {"node": "w", "wait_ms": 20_000})
        # A few round trips give the claim time to arrive; the answer is the same either way.
        for _ in range(20):
            queue.state()
        good(queue.api.drop(queue.name))
        refused(waiting.result(15), 404, "topic_not_found")
        assert time.monotonic() - began < 10


# --- shares ---------------------------------------------------------------------------------------
def _at_once(queue: Queue, asks: list[tuple[str, int]]) -> dict[str, list[Json]]:
    """The jobs of each worker when all claim together."""
    barrier = threading.Barrier(len(asks))

    def ask(node: str, most: int) -> list[Json]:
        barrier.wait()
        return queue.take(node, most, lease_ms=LONG_MS)

    with ThreadPoolExecutor(len(asks)) as pool:
        running = {node: pool.submit(ask, node, most) for node, most in asks}
        return {node: future.result(30) for node, future in running.items()}


def test_the_claimers_of_one_window_share_round_robin(api: Api, topic: str) -> None:
    """Contract §10.2 [10.2-10]"""
    queue = Queue.made(api, topic, claim_jitter_ms=400)
    queue.add(*range(40))
    got = _at_once(queue, [(f"w{n}", 100) for n in range(4)])
    assert sorted(seq for jobs in got.values() for seq in seqs_of(jobs)) == list(range(1, 41))
    for jobs in got.values():
        steps = {b - a for a, b in zip(seqs_of(jobs), seqs_of(jobs)[1:], strict=False)}
        assert (len(jobs), steps) == (10, {4})


def test_the_shares_of_a_window_are_in_proportion_to_max(api: Api, topic: str) -> None:
    """Contract §10.2 [10.2-10]"""
    queue = Queue.made(api, topic, claim_jitter_ms=400)
    queue.add(*range(20))
    got = _at_once(queue, [("big", 30), ("small", 10)])
    assert {node: len(jobs) for node, jobs in got.items()} == {"big": 15, "small": 5}


def test_a_window_with_enough_jobs_serves_every_claim_fully(api: Api, topic: str) -> None:
    """Contract §10.2 [10.2-10]"""
    queue = Queue.made(api, topic, claim_jitter_ms=300)
    queue.add(*range(50))
    got = _at_once(queue, [("a", 10), ("b", 20), ("c", 3)])
    assert {node: len(jobs) for node, jobs in got.items()} == {"a": 10, "b": 20, "c": 3}
    assert queue.counts() == (17, 33, 0)


def test_a_window_is_no_longer_than_it_says(api: Api, topic: str) -> None:
    """Contract §10.2 [10.2-10]"""
    queue = Queue.made(api, topic, claim_jitter_ms=200)
    queue.add(1)
    began = time.monotonic()
    assert len(queue.take("w")) == 1
    assert 0.15 < time.monotonic() - began < 5
    # No job: the window passes, and the answer is empty.
    assert queue.take("w") == []


def _workers(queue: Queue, most: int, is_over: threading.Event) -> Callable[[int], list[int]]:
    """A worker's loop: claim, note, ack, until the time is over and no job comes."""

    def work(number: int) -> list[int]:
        done: list[int] = []
        while True:
            jobs = queue.take(f"w{number}", most, wait_ms=1000, lease_ms=LONG_MS)
            if jobs:
                seqs = seqs_of(jobs)
                assert queue.ack(f"w{number}", seqs)["acked"] == len(seqs)
                done += seqs
            elif is_over.is_set():
                return done

    return work


def test_waiting_workers_with_jitter_share_bursts_evenly(api: Api, topic: str) -> None:
    """§10.2: the numbers of jobs differ by at most a tenth. [10.2-15]"""
    queue = Queue.made(api, topic, claim_jitter_ms=250)
    bursts, size = 6, 160
    is_over = threading.Event()
    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(_workers(queue, size, is_over), n) for n in range(WORKERS)]
        for _ in range(bursts):
            queue.add(*range(size))
            eventually(lambda: queue.state()["count"] == 0, "the burst is worked off")
        is_over.set()
        done = [future.result(30) for future in running]
    assert sorted(itertools.chain.from_iterable(done)) == list(range(1, bursts * size + 1))
    fair = bursts * size / WORKERS
    shares = [len(seqs) for seqs in done]
    assert all(0.9 * fair <= share <= 1.1 * fair for share in shares), shares


def test_without_jitter_no_waiting_worker_starves(api: Api, topic: str) -> None:
    """§10.2 [10.2-16]"""
    queue = Queue.made(api, topic)
    is_over = threading.Event()
    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(_workers(queue, 1, is_over), n) for n in range(WORKERS)]
        for number in range(160):
            queue.add(number)
        eventually(lambda: queue.state()["count"] == 0, "all is worked off")
        is_over.set()
        done = [future.result(30) for future in running]
    counted = Counter(seq for seqs in done for seq in seqs)
    assert counted == Counter(range(1, 161))
    assert all(done), [len(seqs) for seqs in done]


def test_payloads_are_read_only_by_the_claim(queue: Queue) -> None:
    """§10.2: jobs of different sizes in one answer are complete [10.2-01]"""
    queue.add("x" * 500_000, "y", "z" * 700_000)
    assert [len(data) for data in datas_of(queue.take("w", 3))] == [500_000, 1, 700_000]
