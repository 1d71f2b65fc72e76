"""`client.calls`: the bytes of each request, and a queue's URL."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from topics_server.client import calls
from topics_server.client.errors import BadAnswer, NotAQueue
from topics_server.client.values import Job, NewJob

PLACE = calls.place("q", "http://h:1")


def job(seq: int) -> Job:
    """A delivery."""
    lease_id = f"lease_{seq}"
    return Job(
        queue="q", seq=seq, lease_id=lease_id, deadline_ms=0, ts_ms=0, deliveries=1, raw=b"1"
    )


def body(call: calls.Call[Any]) -> Any:
    """The body of a request."""
    assert call.body is not None
    return json.loads(call.body)


@pytest.mark.parametrize(
    ("queue", "url", "base", "name"),
    [
        ("jobs", None, "http://127.0.0.1:4000", "jobs"),
        ("jobs", "https://h/", "https://h", "jobs"),
        ("http://h:1/v0/topics/a:b", None, "http://h:1", "a:b"),
        ("http://h/under/v0/topics/jobs", None, "http://h/under", "jobs"),
    ],
)
def test_places(queue: str, url: str | None, base: str, name: str) -> None:
    assert calls.place(queue, url) == calls.QueueAddress(base, name)


@pytest.mark.parametrize(
    ("queue", "url"),
    [
        ("", None),
        ("jobs", "h:4000"),
        ("jobs", "ftp://h"),
        ("jobs", "http://"),
        ("http://h/jobs", None),
        ("http://h/v0/topics/", None),
        ("http://h/v0/topics/a/claim", None),
        ("http://h/v0/topics/a", "http://h"),
    ],
)
def test_what_is_no_place(queue: str, url: str | None) -> None:
    with pytest.raises(ValueError):
        calls.place(queue, url)


def test_a_name_stays_inside_its_segment() -> None:
    assert calls.place("a/b?c", "http://h").path("/ack") == "/v0/topics/a%2Fb%3Fc/ack"


def test_enqueue() -> None:
    jobs = [
        NewJob(data=msgspec.Raw(b'{"n" : 1e400}'), tag="t", meta={"m": 1}, delay_ms=5),
        NewJob(data=None, deliver_at_ms=7),
    ]
    call = calls.enqueue(PLACE, jobs, key="k", create=True, config={"lease_ms": 9})
    assert call.body is not None
    assert b'{"n" : 1e400}' in call.body
    assert body(call) == {
        "records": [
            {"data": {"n": float("inf")}, "tag": "t", "meta": {"m": 1}, "delay_ms": 5},
            {"data": None, "deliver_at_ms": 7},
        ],
        "idempotency_key": "k",
        "create": True,
        "config": {"type": "queue", "lease_ms": 9},
    }
    assert call.repeatable
    plain = calls.enqueue(PLACE, [NewJob(data=1)], key="k", create=None, config={})
    assert "create" not in body(plain)


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_trace_is_a_header() -> None:
    call = calls.enqueue(
        PLACE, [NewJob(data=1)], key="k", create=None, config={}, traceparent=TRACE
    )
    assert call.headers == {"Content-Type": "application/json", "traceparent": TRACE}


@pytest.mark.parametrize("trace", [None, "", "a\r\nb: c", "\x00", "é"])
def test_what_no_header_can_have_is_left_out(trace: str | None) -> None:
    jobs = [NewJob(data=1)]
    call = calls.enqueue(PLACE, jobs, key="k", create=None, config={}, traceparent=trace)
    assert call.headers is None


def test_a_job_has_the_trace_of_its_append() -> None:
    row = {
        **{"$seq": 1, "$ts": 2, "lease_id": "lease_1", "deadline": 3, "deliveries": 1, "data": 5},
        "$trace": TRACE,
    }
    assert calls.pushed(PLACE, json.dumps(row).encode()).trace == TRACE
    del row["$trace"]
    assert calls.pushed(PLACE, json.dumps(row).encode()).trace is None


@pytest.mark.parametrize("jobs", [[], [NewJob(data=1, delay_ms=1, deliver_at_ms=1)]])
def test_what_cannot_be_enqueued(jobs: list[NewJob]) -> None:
    with pytest.raises(ValueError):
        calls.enqueue(PLACE, jobs, key="k", create=None, config={})


def test_claim() -> None:
    plain = calls.claim(PLACE, "n", max_jobs=5000, lease_ms=None, wait_ms=0)
    assert body(plain) == {"node": "n", "max": 1000}
    assert not plain.repeatable  # its answer contains leases
    waits = calls.claim(PLACE, "n", max_jobs=1, lease_ms=100, wait_ms=50)
    assert body(waits) == {"node": "n", "max": 1, "lease_ms": 100, "wait_ms": 50}
    assert waits.wait_ms == 50
    row = b'{"$seq":7,"lease_id":"lease_a","deadline":9,"$ts":3,"deliveries":1,"data":1}'
    answer = b'{"claimed":[%b],"ready":1,"ack":{"acked":0,"skipped":[7],"reasons":{"7":"acking"}}}'
    (job,) = waits.read(answer % row).jobs
    again = calls.claim(PLACE, "n", max_jobs=1, lease_ms=None, wait_ms=0, finished=[job])
    acked = {"seqs": [7], "lease_ids": ["lease_a"]}
    assert body(again) == {"node": "n", "max": 1, "ack": acked}
    told = again.read(answer % row).ack
    assert told is not None
    assert (told.acked, told.skipped, told.reasons) == (0, [7], {7: "acking"})
    with pytest.raises(ValueError):
        calls.claim(PLACE, "n", max_jobs=0, lease_ms=None, wait_ms=0)


def test_a_claimed_job() -> None:
    row = b'{"$seq":7,"lease_id":"lease_a","deadline":9,"$ts":3,"$tag":"t","deliveries":2,'
    row += b'"data": {"a" :1} ,"meta":{"k":"v"},"later":0}'
    claimed = calls.claim(PLACE, "n", max_jobs=1, lease_ms=None, wait_ms=0).read(
        b'{"topic":"q","claimed":[' + row + b'],"count":1,"ready":840}'
    )
    (found,) = claimed.jobs
    assert claimed.ready == 840
    assert (found.queue, found.seq, found.lease_id, found.tag) == ("q", 7, "lease_a", "t")
    assert (found.deadline_ms, found.ts_ms, found.deliveries) == (9, 3, 2)
    assert (found.raw, found.meta) == (b'{"a" :1}', {"k": "v"})
    assert calls.pushed(PLACE, b'{"topic":"q",' + row[1:]).raw == found.raw


def test_every_end_of_a_delivery_has_its_fence() -> None:
    fence = {"node": "n", "seqs": [1, 2], "lease_ids": ["lease_1", "lease_2"]}
    jobs = [job(1), job(2)]
    ends: list[tuple[calls.Call[Any], dict[str, Any]]] = [
        (calls.ack(PLACE, "n", jobs), {}),
        (calls.nack(PLACE, "n", jobs, delay_ms=5), {"delay_ms": 5}),
        (calls.extend(PLACE, "n", jobs, lease_ms=100), {"lease_ms": 100}),
    ]
    for call, more in ends:
        assert body(call) == {**fence, **more}
        assert call.repeatable
    for wrong in ([], [job(1)] * 1001):
        with pytest.raises(ValueError):
            calls.ack(PLACE, "n", wrong)


def test_a_log_has_no_queue_state() -> None:
    with pytest.raises(NotAQueue):
        calls.state(PLACE).read(b'{"topic":"q","head_seq":1,"count":1,"config":{}}')


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"acked":"x"}', b"\xff"])
def test_an_answer_that_is_not_ours(answer: bytes) -> None:
    with pytest.raises(BadAnswer):
        calls.ack(PLACE, "n", [job(1)]).read(answer)
