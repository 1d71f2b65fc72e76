"""§10.8: the work stream: jobs are pushed to a connection, at most `max` in flight, released at its
end.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, RawResponse, eventually, good, refused
from tests.contract.queues.queues import LONG_MS, Queue, now_ms
from tests.contract.streams.streams import Event, NothingCame, SseStream

# How long the test waits to see that nothing comes. A later frame fails the test.
QUIET_S = 0.15


@pytest.fixture
def queue(api: Api, topic: str) -> Queue:
    """A queue with long leases."""
    return Queue.made(api, topic, lease_ms=LONG_MS)


@pytest.fixture
def opened() -> Iterator[Callable[..., SseStream]]:
    """`opened(queue, node, **query)` is a work stream that is closed after the test."""
    with ExitStack() as stack:

        def open_one(queue: Queue, node: str = "w", **query: object) -> SseStream:
            stream = queue.work(node, **query)
            stack.callback(stream.close)
            return stream

        yield open_one


Opened = Callable[..., SseStream]


def _job(event: Event) -> Json:
    assert event.name == "job", event
    job: Json = json.loads(event.data)
    assert event.id == str(job["$seq"])
    return job


def _jobs(stream: SseStream, count: int) -> list[Json]:
    return [_job(stream.event()) for _ in range(count)]


def _is_quiet(stream: SseStream) -> None:
    with pytest.raises(NothingCame):
        stream.event(QUIET_S)


def _refusal(queue: Queue, path: str, accept: str = "text/event-stream") -> RawResponse:
    """The answer to a stream that must not open."""
    stream = SseStream(queue.api.url, path, [f"Accept: {accept}"])
    try:
        return stream.refusal()
    finally:
        stream.close()


def test_the_stream_opens_like_a_watch(queue: Queue, opened: Opened) -> None:
    """Contract §10.8, §7.3, §7.5 [10.8-05]"""
    before = now_ms()
    stream = opened(queue)
    assert stream.status == 200
    assert stream.headers["content-type"].partition(";")[0] == "text/event-stream"
    assert stream.headers["cache-control"] == "no-store"
    assert stream.headers["x-accel-buffering"] == "no"
    beat = re.fullmatch(r" hb (\d+)", stream.comment(0).text)
    assert beat is not None
    assert before <= int(beat.group(1)) <= now_ms()
    assert [retry.ms for retry in stream.retries] == [2000]


def test_jobs_are_pushed_as_claimed_entries(queue: Queue, opened: Opened) -> None:
    """Contract §10.8 [10.8-01, 10.8-04, 10.8-03]"""
    record = {"data": {"n": [1]}, "tag": "t", "meta": {"k": 1}}
    good(queue.api.append(queue.name, [record, {"data": "bare"}]))
    before = now_ms()
    stream = opened(queue, "eu-1", max=5)
    full, bare = _jobs(stream, 2)
    stored = queue.api.read_all(queue.name)
    assert full["topic"] == queue.name
    assert (full["$seq"], full["$tag"], full["data"], full["meta"]) == (
        1,
        "t",
        {"n": [1]},
        {"k": 1},
    )
    assert (full["$ts"], full["deliveries"]) == (stored[0]["$ts"], 1)
    assert not {"$tag", "meta"} & set(bare)
    assert before + LONG_MS <= full["deadline"] <= now_ms() + LONG_MS
    held = queue.held()
    assert [(lease["seq"], lease["node"]) for lease in held] == [(1, "eu-1"), (2, "eu-1")]
    assert [lease["lease_id"] for lease in held] == [full["lease_id"], bare["lease_id"]]
    # Jobs that are appended later arrive by themselves.
    queue.add("later")
    assert _jobs(stream, 1)[0]["data"] == "later"


@pytest.mark.parametrize("data", ["1e400", '{"a" : 1 ,  "a":2}', '"\\u0061\\/"'])
def test_payloads_are_pushed_byte_for_byte(queue: Queue, opened: Opened, data: str) -> None:
    """Contract §10.8, settled rules [10.8-04]"""
    body = b'{"records":[{"data":%b}]}' % data.encode()
    media = {"Content-Type": "application/json"}
    good(queue.api.http.post(queue.path, content=body, headers=media))
    assert b'"data":%b' % data.encode() in opened(queue).event().raw


def test_one_job_at_a_time_is_the_default(queue: Queue, opened: Opened) -> None:
    """Contract §10.8 [10.8-03, 10.8-01]"""
    queue.add(1, 2)
    stream = opened(queue)
    assert _jobs(stream, 1)[0]["data"] == 1
    _is_quiet(stream)
    assert queue.counts() == (1, 1, 0)


def test_no_more_than_max_are_in_flight_and_acks_make_room(queue: Queue, opened: Opened) -> None:
    """Contract §10.8 [10.8-01, 10.8-02]"""
    queue.add(*range(1, 8))
    stream = opened(queue, max=3)
    assert [job["$seq"] for job in _jobs(stream, 3)] == [1, 2, 3]
    _is_quiet(stream)
    assert queue.counts() == (4, 3, 0)
    queue.ack("w", [2])
    assert _jobs(stream, 1)[0]["$seq"] == 4
    _is_quiet(stream)
    queue.ack("w", [1, 3, 4])
    assert [job["$seq"] for job in _jobs(stream, 3)] == [5, 6, 7]
    assert queue.counts() == (0, 3, 0)
    assert queue.extend("w", [5], LONG_MS)["extended"] == 1
    assert queue.ack("w", [5, 6, 7])["acked"] == 3
    _is_quiet(stream)


def test_a_nack_makes_room(queue: Queue, opened: Opened) -> None:
    """Contract §10.8 [10.8-02]"""
    queue.add(1, 2)
    stream = opened(queue, max=1)
    [first] = _jobs(stream, 1)
    queue.nack("w", [first["$seq"]], delay_ms=LONG_MS)
    [second] = _jobs(stream, 1)
    assert (first["$seq"], second["$seq"]) == (1, 2)
    queue.nack("w", [2])
    [again] = _jobs(stream, 1)
    assert (again["$seq"], again["deliveries"]) == (2, 2)


def test_an_expiry_makes_room(queue: Queue, opened: Opened) -> None:
    """Contract §10.8, §10.3 [10.8-02, 10.8-03]"""
    queue.add(1)
    before = now_ms()
    stream = opened(queue, lease_ms=1)
    jobs = _jobs(stream, 12)
    assert before + 100 <= jobs[0]["deadline"]
    deadlines = [job["deadline"] for job in jobs]
    assert all(a + 100 < b for a, b in itertools.pairwise(deadlines))
    assert [job["deliveries"] for job in jobs] == list(range(1, 13))
    assert len({job["lease_id"] for job in jobs}) == 12


def test_max_of_a_stream_is_clamped(own: NewServer, topic: str, opened: Opened) -> None:
    """Contract §10.8 [10.8-03]"""
    queue = Queue.made(own(TOPICS_MAX_CLAIM="4").start(), topic)
    queue.add(*range(10))
    stream = opened(queue, max=4_000_000_000)
    _jobs(stream, 4)
    _is_quiet(stream)
    assert queue.counts() == (6, 4, 0)


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_jobs_of_a_stream_are_released_at_its_end(queue: Queue, opened: Opened, how: str) -> None:
    """Contract §10.8 [10.8-07]: the node keeps its leases from a claim and those of its other
    stream.
    """
    queue.add(*range(1, 7))
    polled = queue.take("w", 2)
    one, other = opened(queue, max=2), opened(queue, max=2)
    pushed, kept = _jobs(one, 2), _jobs(other, 2)
    assert queue.counts() == (0, 6, 0)
    getattr(one, how)()
    # The other stream is full: only a claim can have them, and at once, not after the lease.
    back = queue.take("x", 9, wait_ms=10_000)
    while len(back) < 2:
        back += queue.take("x", 9, wait_ms=10_000)
    assert sorted(job["$seq"] for job in back) == sorted(job["$seq"] for job in pushed)
    assert {job["deliveries"] for job in back} == {2}
    held = {lease["seq"] for lease in queue.held() if lease["node"] == "w"}
    assert held == {job["$seq"] for job in polled + kept}
    seqs = [job["$seq"] for job in pushed]
    tokens = [job["lease_id"] for job in pushed]
    assert queue.ack("w", seqs, lease_ids=tokens)["skipped"] == seqs
    assert queue.ack("w", sorted(held))["acked"] == 4


def test_the_end_of_a_stream_feeds_another(queue: Queue, opened: Opened) -> None:
    """Contract §10.8 [10.8-07]: instant failover."""
    queue.add("job")
    one = opened(queue, "a")
    [job] = _jobs(one, 1)
    other = opened(queue, "b")
    one.close()
    [again] = _jobs(other, 1)
    assert (again["$seq"], again["deliveries"]) == (job["$seq"], 2)
    assert [lease["node"] for lease in queue.held()] == ["b"]


def test_streams_and_claims_share_a_window(api: Api, topic: str, opened: Opened) -> None:
    """Contract §10.8, §10.2 [10.8-10]"""
    queue = Queue.made(api, topic, claim_jitter_ms=300, lease_ms=LONG_MS)
    streams = [opened(queue, f"w{n}", max=100) for n in range(4)]
    for stream in streams:
        stream.comment(0)
    queue.add(*range(40))
    shares = [[job["$seq"] for job in _jobs(stream, 10)] for stream in streams]
    assert sorted(seq for seqs in shares for seq in seqs) == list(range(1, 41))
    for stream in streams:
        _is_quiet(stream)


def test_a_stream_hears_that_its_queue_is_gone(queue: Queue, opened: Opened) -> None:
    """Contract §10.8 [10.8-06]: the stream sends a last error and ends by itself."""
    queue.add(1)
    stream = opened(queue)
    _jobs(stream, 1)
    good(queue.api.drop(queue.name))
    queue.api.add(queue.name, "now a log")
    *before, last = stream.rest()
    assert (before, last.name) == ([], "error")
    frame = json.loads(last.data)
    assert frame["code"] == 409
    assert frame["error"]
    refused(_refusal(queue, f"{queue.path}/work?node=w"), 409, "not_a_queue")


def test_a_stream_of_a_queue_does_not_outlive_it(queue: Queue, opened: Opened) -> None:
    """Contract §10.8 [10.8-06]: a queue recreated under the name is another queue."""
    stream = opened(queue)
    stream.comment(0)
    good(queue.api.drop(queue.name))
    queue.put()
    queue.add("new")
    assert [event.name for event in stream.rest()] == ["error"]
    assert [job["data"] for job in _jobs(opened(queue), 1)] == ["new"]


def test_streams_count_as_connections(own: NewServer, topic: str, opened: Opened) -> None:
    """Contract §11 [10.8-11]: open streams count, and free their slot at their end."""
    queue = Queue.made(own(TOPICS_MAX_SSE_CONNECTIONS="2").start(), topic)
    one, _ = opened(queue), opened(queue)
    answer = opened(queue).refusal()
    detail = refused(answer, 429, "throttled")
    assert (detail["limit"], detail["max"]) == ("max_sse_connections", 2)
    assert answer.headers["retry-after"]
    one.close()
    eventually(lambda: opened(queue).status == 200, "the place is free again")


@pytest.mark.parametrize(
    "headers",
    [[], ["Accept: */*"], ["Accept: text/*"], ["Accept: application/json, text/event-stream"]],
)
def test_accept_values_that_allow_an_event_stream(queue: Queue, headers: list[str]) -> None:
    """Contract §10.8, settled rules [10.8-08]"""
    stream = SseStream(queue.api.url, f"{queue.path}/work?node=w", headers)
    stream.close()
    assert stream.status == 200


def test_requests_for_no_stream_are_refused(queue: Queue, topic: str) -> None:
    """Contract §10.8, §9 [10.8-08, 9-04]"""
    log = f"{topic}.log"
    queue.api.add(log, 1)
    for accept in ("application/json", "text/html", "text/event-stream;q=0"):
        refused(_refusal(queue, f"{queue.path}/work?node=w", accept), 406, "not_acceptable")
    refused(_refusal(queue, f"/v0/topics/{log}/work?node=w"), 409, "not_a_queue")
    absent = f"/v0/topics/{topic}.none/work?node=w"
    refused(_refusal(queue, absent), 404, "topic_not_found")
    refused(queue.api.state(f"{topic}.none"), 404, "topic_not_found")
    refused(queue.post("work", {"node": "w"}), 405, "method_not_allowed")


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?node=",
        "?max=1",
        "?node=w&max=x",
        "?node=w&max=-1",
        "?node=w&max=1.0",
        "?node=w&max=",
        "?node=w&max=4294967296",
        "?node=w&max=%2B1",
        "?node=w&max=1e3",
        "?node=w&lease_ms=x",
        "?node=w&lease_ms=-1",
        "?node=w&lease_ms=1.5",
        "?node=w&lease_ms=18446744073709551616",
        "?node=" + "n" * 129,
        "?node=%C3%A4" + "%C3%A4" * 64,
        "?node=%FF",
    ],
)
def test_a_malformed_work_query_is_refused(queue: Queue, query: str) -> None:
    """Contract §10.8 [10.8-08, 10.8-03, 10-04]"""
    queue.add(1)
    refused(_refusal(queue, f"{queue.path}/work{query}"), 400, "invalid_request")
    assert queue.counts() == (1, 0, 0)


def test_a_stopping_server_ends_streams_and_releases_their_jobs(
    own: NewServer, topic: str, opened: Opened
) -> None:
    """Contract §10.8, settled rules [10.8-07, S-68]: jobs claimed by the same node stay leased."""
    server = own()
    queue = Queue.made(server.start(), topic, lease_ms=LONG_MS)
    queue.add(1, 2)
    [polled] = queue.take("w")
    stream = opened(queue)
    assert _jobs(stream, 1)[0]["$seq"] == 2
    queue.api = server.restart()
    stream.rest()
    assert [lease["seq"] for lease in queue.held()] == [polled["$seq"]]
    [job] = queue.take("x")
    assert (job["$seq"], job["deliveries"]) == (2, 2)
