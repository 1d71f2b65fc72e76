"""`client.blocking`: the calls without an event loop, to a server that fails on command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.contract.driver import ROOT
from tests.unit.client.conftest import Chance
from tests.unit.client.fake import Broken, FakeQueue, Refusal
from topics_server.client import (
    NewJob,
    NotAQueue,
    NotFound,
    Queue,
    QueueFull,
    Throttled,
    Unavailable,
    Unreachable,
)


@pytest.fixture
def queue(url: str) -> Iterator[Queue]:
    """A client of the fake queue with the shortest possible pauses."""
    with Queue("q", url=url, token="secret", effects=Chance(0.0)) as found:
        yield found


def test_a_job_from_enqueue_to_ack(queue: Queue, fake: FakeQueue) -> None:
    first = queue.enqueue({"n": 1}, tag="t", meta={"m": 1})
    assert first.seq == 1
    many = queue.enqueue_many([NewJob(data=2), NewJob(data=3)])
    assert (many.first_seq, many.last_seq) == (2, 3)
    with pytest.raises(AssertionError):
        _ = many.seq
    claimed = queue.claim("n", max_jobs=2).jobs
    assert [(job.seq, job.data, job.tag, job.meta) for job in claimed] == [
        (1, {"n": 1}, "t", {"m": 1}),
        (2, 2, None, {}),
    ]
    assert queue.extend("n", claimed, lease_ms=1000).deadlines.keys() == {1, 2}
    assert queue.nack("n", claimed[1:], delay_ms=60_000).nacked == 1
    acked = queue.ack("n", claimed)
    assert (acked.acked, acked.skipped) == (1, [2])
    state = queue.state()
    assert (state.count, state.queue.in_flight, state.lease_ms) == (2, 0, 30_000)
    assert fake.tokens == {"Bearer secret"}


def test_a_key_makes_calls_one(queue: Queue) -> None:
    assert queue.enqueue(1, key="k").seq == 1
    again = queue.enqueue(1, key="k")
    assert (again.seq, again.deduped) == (1, True)
    assert queue.enqueue(1).seq == 2  # a key of its own


def test_enqueue_outlives_a_server_that_fails(queue: Queue, fake: FakeQueue) -> None:
    fake.faults["append"].extend(
        [Broken(), Broken(done=True), Broken(), Refusal(503), Refusal(429), Broken(done=True)]
    )
    assert queue.enqueue("once").deduped
    assert len({body["idempotency_key"] for body in fake.calls("append")}) == 1
    assert len(fake.jobs) == 1


def test_enqueue_waits_as_the_server_asks_or_gives_up(url: str, fake: FakeQueue) -> None:
    fake.faults["append"].append(Refusal(429, detail={"retry_after_ms": 20}))
    with Queue("q", url=url, patience_ms=30, effects=Chance(0.0)) as queue:
        assert queue.enqueue(1).seq == 1
        fake.faults["append"].append(Refusal(429, headers={"Retry-After": "1"}))
        with pytest.raises(Throttled) as caught:
            queue.enqueue(2)
    assert caught.value.retry_after_ms == 1000
    assert len(fake.jobs) == 1


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (Refusal(404, "topic_not_found"), NotFound),
        (Refusal(409, "not_a_queue"), NotAQueue),
        (Refusal(422, "topic_full"), QueueFull),
        (Refusal(503, "not_ready"), Unavailable),
        (Refusal(429, "throttled"), Throttled),
    ],
)
def test_thin_calls_raise_at_once(
    queue: Queue, fake: FakeQueue, refusal: Refusal, kind: type[Exception]
) -> None:
    fake.faults["claim"].append(refusal)
    with pytest.raises(kind):
        queue.claim("n")
    assert len(fake.calls("claim")) == 1


def test_a_claim_whose_answer_is_lost_is_not_sent_again(queue: Queue, fake: FakeQueue) -> None:
    fake.add(1)
    fake.faults["claim"].append(Broken(done=True))
    with pytest.raises(Unreachable) as caught:
        queue.claim("n")
    assert caught.value.sent
    assert len(fake.calls("claim")) == 1


def test_an_ack_whose_answer_is_lost_is_sent_again(queue: Queue, fake: FakeQueue) -> None:
    fake.add(1)
    jobs = queue.claim("n").jobs
    fake.faults["ack"].append(Broken(done=True))
    acked = queue.ack("n", jobs)
    assert (acked.acked, acked.skipped) == (0, [1])  # the first request was executed
    assert len(fake.calls("ack")) == 2


def test_an_unreachable_server(fake: FakeQueue) -> None:
    with Queue("q", url="http://127.0.0.1:1", patience_ms=0) as queue:
        with pytest.raises(Unreachable) as caught:
            queue.enqueue(1)
        assert not caught.value.sent
        with pytest.raises(Unreachable):
            queue.state()


def test_the_client_brings_nothing_else_of_the_server() -> None:
    code = (
        "import sys, topics_server.client\n"
        "names = [n for n in sys.modules if n.startswith('topics_server.')]\n"
        "assert all(n.startswith('topics_server.client') for n in names), names\n"
        "tops = {n.partition('.')[0] for n in sys.modules}\n"
        "found = tops & {'numpy', 'orjson', 'pydantic', 'starlette', 'uvicorn'}\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT / "src")
