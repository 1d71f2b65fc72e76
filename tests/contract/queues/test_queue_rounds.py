"""One request a round: an ack inside a claim, and a claim inside an ack."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, good, refused
from tests.contract.queues.queues import LONG_MS, Queue, seqs_of


@pytest.fixture
def queue(api: Api, topic: str) -> Queue:
    return Queue.made(api, topic, lease_ms=LONG_MS)


def test_a_claim_completes_jobs_and_takes_others(queue: Queue) -> None:
    queue.add(*"abcd")
    first = queue.take("w", 2)
    told = queue.claim("w", 2, ack={"seqs": seqs_of(first)})
    assert told["ack"] == {"acked": 2, "skipped": []}
    assert seqs_of(told["claimed"]) == [3, 4]
    assert (told["count"], told["ready"]) == (2, 0)
    assert queue.counts() == (0, 2, 0)
    assert queue.state()["count"] == 2
    assert "ack" not in queue.claim("w"), "nothing was to be completed"
    assert "ack" not in queue.claim("w", ack=None)


def test_an_ack_takes_the_next_jobs(queue: Queue) -> None:
    queue.add(*"abc")
    first = queue.take("w")
    told = queue.ack("w", seqs_of(first), claim_next={"max": 5, "lease_ms": 60_000})
    assert (told["acked"], told["skipped"]) == (1, [])
    assert (told["ready"], told["in_flight"]) == (0, 2)
    assert seqs_of(told["next"]["claimed"]) == [2, 3]
    assert (told["next"]["count"], told["next"]["ready"]) == (2, 0)
    last = queue.ack("w", [2, 3], claim_next={})
    assert (last["acked"], last["next"]["claimed"]) == (2, [])
    assert queue.state()["count"] == 0
    assert "next" not in queue.ack("w", [9])


def test_both_skip_what_the_node_does_not_hold_and_say_why(queue: Queue) -> None:
    queue.add(*"abcd")
    [mine] = queue.take("w")
    queue.take("other")
    stale = {"seqs": [mine["$seq"], 2, 99], "lease_ids": ["lease_1", "lease_2", "lease_3"]}
    reasons = {"1": "lease_superseded", "2": "held_by_another_node", "99": "not_found"}
    told = queue.claim("w", ack=stale)
    assert told["ack"] == {"acked": 0, "skipped": [1, 2, 99], "reasons": reasons}
    assert seqs_of(told["claimed"]) == [3]
    told = queue.ack("w", **stale, claim_next={})
    assert (told["acked"], told["skipped"], told["reasons"]) == (0, [1, 2, 99], reasons)
    assert seqs_of(told["next"]["claimed"]) == [4]
    fresh = {"seqs": [1], "lease_ids": [mine["lease_id"]]}
    assert queue.claim("w", ack=fresh)["ack"]["acked"] == 1


@pytest.mark.parametrize(
    "config",
    [{}, {"leases_durable": True}, {"claim_jitter_ms": 5}, {"durability": "fsync"}],
    ids=["plain", "durable leases", "a window", "fsync"],
)
def test_a_worker_that_loops_needs_one_request_a_round(
    api: Api, topic: str, config: dict[str, object]
) -> None:
    queue = Queue.made(api, topic, lease_ms=LONG_MS, **config)
    queue.add(*range(20))
    held = queue.take("w", 3)
    done: list[int] = []
    for by_claim in [True, False] * 20:
        if not held:
            break
        part = {"seqs": seqs_of(held), "lease_ids": [job["lease_id"] for job in held]}
        done += part["seqs"]
        if by_claim:
            told = queue.claim("w", 3, ack=part)
            assert told["ack"]["acked"] == len(held)
            held = told["claimed"]
        else:
            told = queue.ack("w", **part, claim_next={"max": 3})
            assert told["acked"] == len(held)
            held = told["next"]["claimed"]
    assert done == list(range(1, 21))
    assert queue.state()["count"] == 0


def test_jobs_that_came_back_are_taken_in_such_a_round_too(queue: Queue) -> None:
    queue.add(*"abc")
    queue.take("w", 2)
    queue.nack("w", [1])
    told = queue.claim("w", 2, ack={"seqs": [2]})
    assert told["ack"]["acked"] == 1
    assert [(job["$seq"], job["deliveries"]) for job in told["claimed"]] == [(1, 2), (3, 1)]


@pytest.mark.parametrize("by_claim", [True, False])
def test_the_ack_is_done_while_the_claim_still_waits(queue: Queue, by_claim: bool) -> None:
    queue.add("a")
    queue.take("w")
    answers: list[Json] = []

    def work() -> None:
        if by_claim:
            answers.append(queue.claim("w", wait_ms=20_000, ack={"seqs": [1]}))
        else:
            answers.append(queue.ack("w", [1], claim_next={"wait_ms": 20_000}))

    working = threading.Thread(target=work)
    working.start()
    end = time.monotonic() + 10
    while queue.state()["count"]:
        assert time.monotonic() < end, "the ack waits for jobs"
        time.sleep(0.01)
    assert not answers
    queue.add("b")
    working.join(10)
    [told] = answers
    assert seqs_of((told if by_claim else told["next"])["claimed"]) == [2]


def test_a_refused_request_changes_nothing(queue: Queue) -> None:
    queue.add(*"ab")
    queue.take("w")
    before = queue.counts()
    for action, body in (
        ("claim", {"node": "w", "ack": {"seqs": []}}),
        ("claim", {"node": "w", "max": 0, "ack": {"seqs": [1]}}),
        ("ack", {"node": "w", "seqs": [1], "claim_next": {"max": 0}}),
    ):
        assert queue.post(action, body).status_code == 400
    assert queue.counts() == before


def test_claim_next_needs_the_right_to_claim(own: NewServer) -> None:
    url = own(TOPICS_API_KEYS="all,writer:write").start().url
    with closing(keyed(url, "all")) as api, closing(keyed(url, "writer")) as limited:
        queue, writer = Queue.made(api, "jobs", lease_ms=LONG_MS), Queue(limited, "jobs")
        queue.add(*"ab")
        queue.take("w")
        body = {"node": "w", "seqs": [1]}
        refused(writer.post("ack", {**body, "claim_next": {}}), 403, "forbidden")
        assert queue.counts() == (1, 1, 0)
        assert good(writer.post("ack", body))["acked"] == 1


def keyed(url: str, key: str) -> Api:
    """The endpoints, with this key."""
    api = Api(url)
    api.http.headers["Authorization"] = f"Bearer {key}"
    return api
