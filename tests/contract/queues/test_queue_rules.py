"""§10.7, §0.10, §1, §5 on queues: state, deletes, caps, TTL, PUT, recreation; delays, lease log.

Removing leased jobs also removes their leases; reading a queue moves no job. Beyond the contract:
`delay_ms`, `deliver_at_ms`, `GET leases`, `lease_log`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.driver import seqs_of as page_seqs
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
from tests.contract.streams.streams import SseStream

Names = Callable[[str], str]


@pytest.fixture
def queue(api: Api, topic: str) -> Queue:
    """A queue of five jobs with long leases; those with even seqs are tagged even."""
    queue = Queue.made(api, topic, lease_ms=LONG_MS)
    for number in range(1, 6):
        queue.add(number, tag=("even", "odd")[number % 2])
    return queue


# --- state ----------------------------------------------------------------------------------------
def test_the_state_of_a_queue_has_its_counters(queue: Queue) -> None:
    """Contract §1.2, §10.7 [1.2-10, 10.7-01, 10.7-02]"""
    state = queue.state()
    assert state["type"] == "queue"
    assert {"ready", "in_flight", "dead_lettered"} <= set(state["queue"])
    assert queue.counts() == (5, 0, 0)
    jobs = queue.take("w", 3)
    assert queue.counts() == (2, 3, 0)
    queue.ack("w", [1])
    assert queue.counts() == (2, 2, 0)
    queue.nack("w", [2])
    assert queue.counts() == (3, 1, 0)
    queue.extend("w", [3], 1000)
    assert queue.counts() == (3, 1, 0)
    assert queue.state()["count"] == 4
    assert len(jobs) == 3


def test_metrics_count_queues_and_leases(own: NewServer, topic: str) -> None:
    """Contract §8.3 [8.3-05]"""
    queue = Queue.made(own().start(), topic)
    other = Queue.made(queue.api, f"{topic}.2")
    queue.add(*range(5))
    other.add(1)
    queue.take("w", 3, lease_ms=LONG_MS)
    other.take("w", 3, lease_ms=LONG_MS)
    queue.api.add("log", 1)

    def sample(name: str) -> int:
        text = queue.api.http.get("/v0/metrics").text
        found = re.search(rf"^{re.escape(name)} (\d+)", text, re.M)
        assert found, name
        return int(found.group(1))

    label = f'{{topic="{topic}"}}'
    assert (sample("topics_queue_topics"), sample("topics_queue_leases_in_flight")) == (2, 4)
    assert sample(f"topics_topic_queue_ready{label}") == 2
    assert sample(f"topics_topic_queue_in_flight{label}") == 3
    queue.ack("w", [1, 2])
    queue.nack("w", [3])
    assert sample("topics_queue_leases_in_flight") == 1
    assert sample(f"topics_topic_queue_ready{label}") == 3
    assert sample(f"topics_topic_queue_in_flight{label}") == 0
    assert 'topics_topic_queue_ready{topic="log"}' not in queue.api.http.get("/v0/metrics").text


# --- readers --------------------------------------------------------------------------------------
def test_diff_reads_a_queue_and_moves_nothing(queue: Queue) -> None:
    """Contract §10, §3 [10-01]"""
    queue.take("w", 2)
    before = (queue.counts(), queue.held())
    for _ in range(3):
        assert page_seqs(queue.api.read(queue.name)) == [1, 2, 3, 4, 5]
        assert page_seqs(queue.api.read(queue.name, from_seq=2, node="w")) == [3, 4, 5]
    assert (queue.counts(), queue.held()) == before


def test_watch_reads_a_queue_and_moves_nothing(queue: Queue) -> None:
    """Contract §10, §7 [10-01]"""
    queue.take("w", 2)
    before = (queue.counts(), queue.held())
    body = {"topics": {queue.name: {"from_seq": 0}}}
    session = good(queue.api.http.post("/v0/watch", json=body))
    stream = SseStream(queue.api.url, f"/v0/watch/{session['wid']}")
    try:
        text = ""
        while '"$seq":5' not in text.replace(" ", ""):
            text += stream.event().data
    finally:
        stream.close()
    assert (queue.counts(), queue.held()) == before


# --- removal of jobs ------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [{"before_seq": 4}, {"match": "odd", "before_seq": 4}])
def test_a_delete_takes_leased_jobs_with_their_leases(queue: Queue, how: Json) -> None:
    """Contract §5, §10.4 [10.7-04, 10.4-02]"""
    jobs = queue.take("w", 3)
    gone = good(queue.api.delete(queue.name, **how))["deleted"]
    assert queue.counts() == (2, 3 - gone, 0)
    left = [lease["seq"] for lease in queue.held()]
    answer = queue.ack("w", [1, 2, 3], lease_ids=tokens_of(jobs))
    assert (answer["acked"], sorted({1, 2, 3} - set(answer["skipped"]))) == (3 - gone, left)
    assert seqs_of(queue.take("x", 9)) == [4, 5]
    assert queue.state()["count"] == 2


def test_a_delete_takes_jobs_that_wait(queue: Queue) -> None:
    """Contract §5 [10.7-04]: a delete also removes unclaimed, released and delayed jobs."""
    queue.take("w", 3)
    queue.nack("w", [1])
    queue.nack("w", [2], delay_ms=LONG_MS)
    good(queue.api.delete(queue.name, match="odd"))
    assert queue.counts() == (1, 0, 0)
    assert queue.delayed() == 1
    assert seqs_of(queue.take("x", 9)) == [4]
    good(queue.api.delete(queue.name, before_seq=100))
    assert queue.counts() == (0, 0, 0)
    assert (queue.delayed(), queue.held(), queue.take("x", 9)) == (0, [], [])


def test_a_cap_evicts_leased_jobs(api: Api, topic: str) -> None:
    """Contract §0.10 [10.7-04]"""
    queue = Queue.made(api, topic, cap_records=3, discard="old", lease_ms=LONG_MS)
    queue.add(1, 2, 3)
    jobs = queue.take("w", 3)
    queue.add(4, 5)
    state = queue.state()
    assert state["count"] == 3
    assert queue.counts() == (2, 1, 0)
    answer = queue.ack("w", [1, 2, 3], lease_ids=tokens_of(jobs))
    assert (answer["acked"], sorted(answer["skipped"])) == (1, [1, 2])
    assert datas_of(queue.take("x", 9)) == [4, 5]


def test_a_reject_queue_is_full_until_an_ack(api: Api, topic: str) -> None:
    """Contract §0.10, settled rules [10.7-04]: a lease does not make room, but an ack does."""
    queue = Queue.made(api, topic, cap_records=2, discard="reject", lease_ms=LONG_MS)
    queue.add(1, 2)
    queue.take("w", 2)
    refused(api.append(topic, [{"data": 3}]), 422, "topic_full")
    queue.nack("w", [2])
    refused(api.append(topic, [{"data": 3}]), 422, "topic_full")
    queue.ack("w", [1])
    assert queue.add(3) == [3]
    assert datas_of(queue.take("w", 9)) == [2, 3]


def test_a_job_past_its_ttl_is_no_job_any_more(api: Api, topic: str) -> None:
    """Contract §0.10 [10.7-04]"""
    queue = Queue.made(api, topic, ttl_ms=600, lease_ms=LONG_MS)
    queue.add(1, 2, 3)
    queue.take("w", 1)
    eventually(lambda: queue.counts() == (0, 0, 0), "all have expired")
    assert queue.state()["count"] == 0
    assert queue.take("x", 9) == []
    queue.add("new")
    assert datas_of(queue.take("x", 9)) == ["new"]


# --- PUT ------------------------------------------------------------------------------------------
def test_a_put_goes_forward_and_leaves_leases_alone(queue: Queue) -> None:
    """Contract §1.1, §10 [10.7-05]"""
    queue.take("w", 2)
    before = (queue.counts(), queue.held())
    queue.put(lease_ms=123_000)
    queue.put(lease_ms=123_000)
    assert (queue.counts(), queue.held()) == before
    answer, start, end = within(lambda: queue.claim("x"))
    assert start + 123_000 <= answer["claimed"][0]["deadline"] <= end + 123_000
    refused(queue.api.put(queue.name, {"type": "log"}), 409, "topic_exists_incompatible")
    # Without the field the type stays, and the other fields take their defaults.
    config = good(queue.api.put(queue.name, {}))["config"]
    assert (config["type"], config["lease_ms"]) == ("queue", 30_000)
    assert queue.counts() == (2, 3, 0)
    assert queue.ack("w", [1, 2])["acked"] == 2


@pytest.mark.parametrize("first", [False, True])
def test_leases_may_become_durable_and_soft_again(api: Api, topic: str, first: bool) -> None:
    """Contract §0.10 [10.7-05]"""
    queue = Queue.made(api, topic, leases_durable=first, lease_ms=LONG_MS)
    queue.add(*range(6))
    jobs = queue.take("w", 2)
    for durable in (not first, first, not first):
        queue.put(leases_durable=durable, lease_ms=LONG_MS)
        jobs += queue.take("w", 1)
    assert queue.counts() == (1, 5, 0)
    assert [lease["lease_id"] for lease in queue.held()] == tokens_of(jobs)
    assert queue.extend("w", [1, 5], LONG_MS, lease_ids=tokens_of([jobs[0], jobs[4]]))["extended"]
    assert queue.ack("w", seqs_of(jobs), lease_ids=tokens_of(jobs))["acked"] == 5


def test_a_queue_with_jobs_is_not_empty(queue: Queue) -> None:
    """Contract §1.4 [10.7-06]: leased or not."""
    queue.take("w", 5)
    refused(queue.api.drop(queue.name, if_empty=True), 409, "topic_not_empty")
    queue.ack("w", [1, 2, 3, 4, 5])
    good(queue.api.drop(queue.name, if_empty=True))
    refused(queue.post("claim", {"node": "w"}), 404, "topic_not_found")


def test_deleting_a_queue_takes_its_leases(queue: Queue) -> None:
    """Contract §1.4, §10 [10.7-06, 10.7-03]"""
    queue.take("w", 3)
    queue.nack("w", [1], delay_ms=LONG_MS)
    good(queue.api.drop(queue.name))
    queue.put()
    assert queue.counts() == (0, 0, 0)
    assert (queue.held(), queue.delayed(), queue.take("w", 9)) == ([], 0, [])
    queue.add("new")
    assert [job["deliveries"] for job in queue.take("w", 9)] == [1]


# --- delays of records ----------------------------------------------------------------------------
def test_a_delayed_job_is_claimable_from_its_time_on(api: Api, topic: str) -> None:
    """docs/EXTENSIONS.md, delay_ms, deliver_at_ms [10.1-03]"""
    queue = Queue.made(api, topic, lease_ms=LONG_MS)
    before = now_ms()
    at_ms = before + 500
    records = [{"data": "by delay", "delay_ms": 500}, {"data": "by time", "deliver_at_ms": at_ms}]
    good(api.append(topic, [*records, {"data": "now"}]))
    assert datas_of(queue.take("w", 9))[-1] == "now"
    assert page_seqs(api.read(topic)) == [1, 2, 3], "readers see them"
    jobs: list[Json] = []
    while len(jobs) < 2:
        jobs += queue.take("w", 9, wait_ms=5000)
        assert not jobs or now_ms() >= at_ms
    assert sorted(datas_of(jobs)) == ["by delay", "by time"]
    assert {job["deliveries"] for job in jobs} == {1}
    assert queue.counts() == (0, 3, 0)


def test_delayed_jobs_are_counted_apart(api: Api, topic: str) -> None:
    """docs/EXTENSIONS.md, delay_ms, state [10.1-03, 10.7-02]"""
    queue = Queue.made(api, topic)
    good(api.append(topic, [{"data": n, "delay_ms": LONG_MS} for n in range(4)]))
    queue.add("a", "b", "past", deliver_at_ms=1)
    assert queue.counts() == (3, 0, 0)
    assert (queue.delayed(), queue.state()["count"]) == (4, 7)
    assert datas_of(queue.take("w", 9)) == ["a", "b", "past"]
    assert queue.counts() == (0, 3, 0)
    good(api.delete(topic, before_seq=3))
    assert queue.delayed() == 2


def test_a_log_has_no_delays(api: Api, topic: str) -> None:
    """docs/EXTENSIONS.md, delay_ms [10.1-03]"""
    api.add(topic, "x", delay_ms=LONG_MS)
    assert [record["data"] for record in api.read_all(topic)] == ["x"]


@pytest.mark.parametrize(
    "record",
    [
        {"delay_ms": -1},
        {"delay_ms": 1.5},
        {"delay_ms": "1"},
        {"delay_ms": True},
        {"delay_ms": 2**64},
        {"delay_ms": [1]},
        {"deliver_at_ms": -1},
        {"deliver_at_ms": "2026-01-01"},
        {"deliver_at_ms": 2**64},
        {"delay_ms": 1, "deliver_at_ms": 1},
    ],
)
def test_a_malformed_delay_is_refused_and_stores_nothing(queue: Queue, record: Json) -> None:
    """docs/EXTENSIONS.md, delay_ms [10.1-03]"""
    answer = queue.api.append(queue.name, [{"data": 0}, {"data": 1, **record}])
    field = refused(answer, 400, "invalid_request")["field"]
    assert field in {f"records[1].{name}" for name in record}
    assert queue.counts() == (5, 0, 0)


# --- the list of leases ---------------------------------------------------------------------------
def test_leases_are_listed_with_holder_and_deadline(queue: Queue) -> None:
    """docs/EXTENSIONS.md, GET leases [10.7-07]"""
    empty = queue.leases()
    assert (set(empty), empty["leases"]) == ({"topic", "leases", "performance"}, [])
    (one, two), start, end = _timed_claims(queue)
    held = queue.held()
    assert [(lease["seq"], lease["node"]) for lease in held] == [(1, "a"), (2, "b")]
    for lease, job in zip(held, (one, two), strict=True):
        assert (lease["lease_id"], lease["deadline"]) == (job["lease_id"], job["deadline"])
        assert lease["deliveries"] == 1
        assert start <= lease["claimed_ts"] <= end
    queue.ack("a", [1])
    assert [lease["seq"] for lease in queue.held()] == [2]


def _timed_claims(queue: Queue) -> tuple[tuple[Json, Json], int, int]:
    start = now_ms()
    [one], [two] = queue.take("a"), queue.take("b", lease_ms=LONG_MS * 2)
    return (one, two), start, now_ms()


def test_leases_come_in_pages(api: Api, topic: str) -> None:
    """docs/EXTENSIONS.md, GET leases [10.7-07]"""
    queue = Queue.made(api, topic, lease_ms=LONG_MS)
    queue.add(*range(25))
    queue.take("w", 25)
    seqs: list[int] = []
    page = queue.leases(page_size=10)
    sizes = [len(page["leases"])]
    while True:
        seqs += [lease["seq"] for lease in page["leases"]]
        if "next_cursor" not in page:
            break
        page = queue.leases(page_size=10, cursor=page["next_cursor"])
        sizes.append(len(page["leases"]))
    assert (seqs, sizes) == (list(range(1, 26)), [10, 10, 5])


def test_an_expired_lease_is_not_listed(api: Api, topic: str) -> None:
    """docs/EXTENSIONS.md, GET leases [10.7-07]"""
    queue = Queue.made(api, topic)
    queue.add(1)
    queue.take("w", lease_ms=SHORT_MS)
    eventually(lambda: queue.held() == [], "the lease runs out")


# --- the lease log --------------------------------------------------------------------------------
def _events(api: Api, log: str, count: int) -> list[Json]:
    """The first `count` events of a lease log, once they exist."""
    eventually(
        lambda: api.state(log).status_code == 200 and api.get_state(log)["count"] >= count,
        f"{count} events in {log}",
    )
    records = api.read_all(log, include_tags=True)
    assert all(record["$tag"] == record["data"]["event"] for record in records)
    return [record["data"] for record in records]


def test_the_lease_log_has_the_life_of_jobs(api: Api, topic: str, names: Names) -> None:
    """docs/EXTENSIONS.md, lease_log [10.7-08]"""
    log = names("lease-log")
    config: Json = {"lease_log": log, "max_deliveries": 2, "dead_letter": f"{topic}.dlq"}
    queue = Queue.made(api, topic, **config)
    assert queue.state()["config"]["lease_log"] == log
    queue.add("acked", "expires", "dies")
    start = now_ms()
    [first] = queue.take("a", lease_ms=LONG_MS)
    deadline = queue.extend("a", [1], LONG_MS)["deadlines"]["1"]
    queue.ack("a", [1])
    queue.take("b", lease_ms=SHORT_MS)
    queue.is_expired()
    queue.take("c", lease_ms=LONG_MS)
    queue.take("d", lease_ms=LONG_MS)
    queue.nack("d", [3], delay_ms=0)
    queue.take("d")
    queue.nack("d", [3])
    assert queue.take("d") == []
    eventually(lambda: queue.counts()[2] == 1, "the third job is dead-lettered")
    events = _events(api, log, 11)
    told = [(e["event"], e["seq"], e.get("node", ""), e.get("deliveries", 0)) for e in events]
    assert told == [
        ("claimed", 1, "a", 1),
        ("extended", 1, "a", 1),
        ("acked", 1, "a", 1),
        ("claimed", 2, "b", 1),
        ("expired", 2, "b", 1),
        ("claimed", 2, "c", 2),
        ("claimed", 3, "d", 1),
        ("released", 3, "d", 1),
        ("claimed", 3, "d", 2),
        ("released", 3, "d", 2),
        ("dead_lettered", 3, "", 2),
    ]
    assert {event["queue"] for event in events} == {topic}
    assert (events[0]["lease_id"], events[0]["deadline"]) == (first["lease_id"], first["deadline"])
    assert events[1]["deadline"] == deadline
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert start <= times[0] <= times[-1] <= now_ms()


def test_a_queue_without_a_lease_log_writes_none(queue: Queue, names: Names) -> None:
    """docs/EXTENSIONS.md, lease_log [10.7-08]: a PUT without `lease_log` turns the log off."""
    log = names("lease-log")
    queue.put(lease_log=log)
    queue.take("w")
    assert [event["event"] for event in _events(queue.api, log, 1)] == ["claimed"]
    queue.put()
    assert queue.state()["config"].get("lease_log") is None
    queue.ack("w", [1])
    queue.put(lease_log=log)
    queue.take("w")
    assert [e["event"] for e in _events(queue.api, log, 2)] == ["claimed", "claimed"]


def test_a_lease_log_that_takes_nothing_holds_up_no_claim(queue: Queue, names: Names) -> None:
    """docs/EXTENSIONS.md, lease_log [10.7-08]"""
    log = names("lease-log")
    good(queue.api.put(log, {"cap_records": 1, "discard": "reject"}))
    queue.api.add(log, "in the way")
    queue.put(lease_log=log)
    jobs = queue.take("w", 5)
    assert queue.ack("w", seqs_of(jobs))["acked"] == 5
    assert [record["data"] for record in queue.api.read_all(log)] == ["in the way"]


@pytest.mark.parametrize("name", ["", "a b", 1, [], True, "{t}"])
def test_a_malformed_lease_log_is_refused(queue: Queue, name: object) -> None:
    """docs/EXTENSIONS.md, lease_log [10.7-08]"""
    before = queue.state()["config"]
    sent = queue.name if name == "{t}" else name
    answer = queue.api.put(queue.name, {"type": "queue", "lease_log": sent})
    assert refused(answer, 400, "invalid_request")["field"] == "lease_log"
    assert queue.state()["config"] == before


# --- durability classes ---------------------------------------------------------------------------
@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
@pytest.mark.parametrize("leases_durable", [False, True])
def test_queues_work_alike_in_every_class(
    api: Api, topic: str, durability: str, leases_durable: bool
) -> None:
    """Contract §0.10, §10.1 [10-01, 10.4-01]"""
    queue = Queue.made(
        api,
        topic,
        durability=durability,
        leases_durable=leases_durable,
        max_deliveries=1,
        dead_letter=f"{topic}.dlq",
        lease_ms=LONG_MS,
    )
    queue.add(1, 2, 3)
    jobs = queue.take("w", 2)
    assert queue.extend("w", [1], LONG_MS)["extended"] == 1
    assert queue.ack("w", [1], lease_ids=tokens_of(jobs)[:1])["acked"] == 1
    assert queue.nack("w", [2])["nacked"] == 1
    assert datas_of(queue.take("w", 9)) == [3]
    eventually(lambda: queue.counts() == (0, 1, 1), "the second job is dead-lettered")
    assert queue.ack("w", [3])["acked"] == 1
    assert (queue.counts(), queue.state()["count"]) == ((0, 0, 1), 0)


def test_the_clock_of_a_lease_is_the_servers(own: NewServer, topic: str) -> None:
    """Contract §10.2, §10.3 [10.2-07, 10.3-01]: a lease ends at its deadline even without any
    request.
    """
    queue = Queue.made(own().start(), topic)
    queue.add(1)
    [job] = queue.take("w", lease_ms=SHORT_MS)
    eventually(lambda: now_ms() > job["deadline"], "time goes on")
    assert queue.counts() == (1, 0, 0)
    assert (queue.held(), queue.take("x")[0]["deliveries"]) == ([], 2)
