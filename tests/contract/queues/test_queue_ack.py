"""§10.4-§10.6: ack, nack, extend, and the fences of each; calls in hostile order.

After a foreign node, a stale token or an ack before any claim, nothing changes and the seqs are in
`skipped`. A topic that is no queue gets 404 or 409 and stays unchanged too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.driver import Api, Json, good, refused
from tests.contract.queues.queues import (
    ACTIONS,
    LONG_MS,
    SHORT_MS,
    Queue,
    now_ms,
    seqs_of,
    tokens_of,
    within,
)

Names = Callable[[str], str]
# The calls that end or move a lease, and the field that counts their jobs.
COUNTED = {"ack": "acked", "nack": "nacked", "extend": "extended"}


@pytest.fixture
def queue(api: Api, topic: str) -> Queue:
    """A queue of five jobs with long leases."""
    queue = Queue.made(api, topic, lease_ms=LONG_MS)
    queue.add(*range(5), tag="t")
    return queue


def _body(action: str, node: str, seqs: list[int], **fields: object) -> Json:
    more = {"lease_ms": LONG_MS} if action == "extend" else {}
    return {"node": node, "seqs": seqs, **more, **fields}


def _facts(queue: Queue) -> Json:
    """All facts that a refused or skipped call must not change."""
    state = queue.state()
    kept = ("head_seq", "earliest_seq", "count", "bytes", "config", "queue")
    leases = [{k: v for k, v in lease.items() if k != "performance"} for lease in queue.held()]
    return {key: state[key] for key in kept} | {"leases": leases}


# --- ack ------------------------------------------------------------------------------------------
def test_an_ack_deletes_for_good(queue: Queue) -> None:
    """Contract §10.4 [10.4-01, 10.4-04]"""
    queue.take("w", 3)
    answer = queue.ack("w", [1, 3])
    assert set(answer) == {"topic", "acked", "skipped", "ready", "in_flight", "performance"}
    assert (answer["topic"], answer["acked"], answer["skipped"]) == (queue.name, 2, [])
    assert (answer["ready"], answer["in_flight"]) == (2, 1)
    assert answer["performance"]["server_total_ms"] >= 0
    assert answer["performance"]["fsync_ms"] == 0
    assert queue.counts() == (2, 1, 0)
    page = queue.api.read(queue.name)
    assert [record["$seq"] for record in page["records"]] == [2, 4, 5]
    assert page["tombstone"] is None


def test_an_ack_of_a_durable_queue_waits_for_its_sync(api: Api, topic: str) -> None:
    """Contract §10.4 [10.4-04, 10.4-05]"""
    queue = Queue.made(api, topic, durable=True)
    queue.add(1)
    queue.take("w")
    assert queue.ack("w", [1])["performance"]["fsync_ms"] > 0


def test_a_repeated_ack_is_harmless(queue: Queue) -> None:
    """Contract §10.4 [10.4-02]"""
    queue.take("w", 2)
    assert queue.ack("w", [1])["acked"] == 1
    before = _facts(queue)
    again = queue.ack("w", [1])
    assert (again["acked"], again["skipped"]) == (0, [1])
    assert _facts(queue) == before


def test_a_partial_ack_names_what_it_skipped(queue: Queue) -> None:
    """Contract §10.4 [10.4-02]"""
    queue.take("a", 2)
    queue.take("b", 1)
    answer = queue.ack("a", [1, 3, 4, 99, 2])
    assert (answer["acked"], sorted(answer["skipped"])) == (2, [3, 4, 99])
    assert queue.counts() == (2, 1, 0)


def test_a_seq_named_twice_counts_once(queue: Queue) -> None:
    """Contract §10.4 [10.4-01]"""
    queue.take("w", 2)
    assert queue.ack("w", [1, 1, 1])["acked"] == 1
    assert queue.counts() == (3, 1, 0)


def test_two_acks_at_once_complete_a_job_once(api: Api, topic: str) -> None:
    """Contract §10.4 [10.4-01, 10.4-02]: one of the two acks counts; the job is gone for both and
    never returns.
    """
    queue = Queue.made(api, topic, durable=True, lease_ms=LONG_MS)
    seqs = queue.add(*range(40))
    queue.take("w", 40)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: queue.ack("w", seqs), range(8)))
    assert all(a["acked"] + len(a["skipped"]) == 40 for a in answers)
    assert sum(a["acked"] for a in answers) >= 40
    assert queue.counts() == (0, 0, 0)
    assert queue.take("x", 40) == []


def test_a_late_ack_counts_until_another_worker_has_the_job(api: Api, topic: str) -> None:
    """Contract §10.4 [10.4-02, 10.1-01]"""
    queue = Queue.made(api, topic)
    queue.add("late", "taken")
    first = queue.take("a", 2, lease_ms=SHORT_MS)
    queue.is_expired()
    [taken] = queue.take("b", 1, lease_ms=LONG_MS)
    other = ({1, 2} - {taken["$seq"]}).pop()
    answer = queue.ack("a", seqs_of(first), lease_ids=tokens_of(first))
    assert (answer["acked"], answer["skipped"]) == (1, [taken["$seq"]])
    assert [record["$seq"] for record in queue.api.read_all(queue.name)] == [taken["$seq"]]
    assert other not in seqs_of(queue.take("c", 2))
    assert queue.ack("b", [taken["$seq"]])["acked"] == 1


# --- nack -----------------------------------------------------------------------------------------
def test_a_nack_releases_at_once(queue: Queue) -> None:
    """Contract §10.5 [10.5-01, 10.5-02, 10.5-04]"""
    queue.take("w", 2)
    answer = queue.nack("w", [2])
    assert set(answer) == {"topic", "nacked", "skipped", "ready", "in_flight", "performance"}
    assert (answer["topic"], answer["nacked"], answer["skipped"]) == (queue.name, 1, [])
    assert (answer["ready"], answer["in_flight"]) == (4, 1)
    [job] = queue.take("x")
    assert (job["$seq"], job["deliveries"]) == (2, 2)


def test_a_nacked_job_waits_out_its_delay(queue: Queue) -> None:
    """Contract §10.5, §10.7 [10.5-01, 10.5-03, 10.7-02]"""
    queue.take("w", 5)
    answer, before, _ = within(lambda: queue.nack("w", [2], delay_ms=400))
    assert (answer["nacked"], answer["ready"], answer["in_flight"]) == (1, 0, 4)
    if now_ms() < before + 400:
        early = queue.take("x", 5)
        assert early == [] or now_ms() >= before + 400
        if early:
            return
    [job] = queue.take("x", 5, wait_ms=10_000)
    assert now_ms() >= before + 400
    assert (job["$seq"], job["deliveries"]) == (2, 2)


def test_a_long_delay_is_counted_in_neither(queue: Queue) -> None:
    """Contract §10.5, §10.7 [10.5-02, 10.5-03, 10.7-02]"""
    queue.take("w", 5)
    assert queue.nack("w", [1, 2], delay_ms=99_999_999_999)["nacked"] == 2
    assert queue.counts() == (0, 3, 0)
    assert queue.state()["count"] == 5
    assert queue.delayed() == 2
    assert queue.take("x", 5) == []


def test_a_repeated_nack_is_skipped(queue: Queue) -> None:
    """Contract §10.5 [10.5-01]"""
    queue.take("w", 2)
    assert queue.nack("w", [1])["nacked"] == 1
    before = _facts(queue)
    again = queue.nack("w", [1], delay_ms=5000)
    assert (again["nacked"], again["skipped"]) == (0, [1])
    assert _facts(queue) == before


# --- extend ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "effective"), [(700_000, 700_000), (300_000, 300_000), (99_999_999_999, 86_400_000)]
)
def test_extend_sets_the_deadline_from_now(queue: Queue, asked: int, effective: int) -> None:
    """Contract §10.6 [10.6-01, 10.6-03, 10.6-04]"""
    jobs = queue.take("w", 2)
    answer, before, after = within(lambda: queue.extend("w", [1, 2], asked))
    assert set(answer) == {"topic", "extended", "skipped", "deadlines", "performance"}
    assert (answer["topic"], answer["extended"], answer["skipped"]) == (queue.name, 2, [])
    assert set(answer["deadlines"]) == {"1", "2"}
    for deadline in answer["deadlines"].values():
        assert before + effective <= deadline <= after + effective
    held = queue.held()
    assert [lease["deadline"] for lease in held] == list(answer["deadlines"].values())
    assert [lease["deliveries"] for lease in held] == [1, 1]
    assert [lease["lease_id"] for lease in held] == tokens_of(jobs)


def test_a_lease_may_be_cut_short_and_kept_alive(queue: Queue) -> None:
    """Contract §10.6 [10.6-01, 10.6-04, 10.3-02]: extend sets a new deadline; it does not add to
    the old one.
    """
    queue.take("w", 2)
    answer, before, after = within(lambda: queue.extend("w", [1], 0))
    assert before + 100 <= answer["deadlines"]["1"] <= after + 100
    [job] = [job for job in queue.take("x", 9, wait_ms=5000) if job["$seq"] == 1] or queue.soon("x")
    assert (job["$seq"], job["deliveries"]) == (1, 2)


def test_a_lease_that_is_extended_in_time_does_not_run_out(api: Api, topic: str) -> None:
    """Contract §10.6 [10.6-01, 10.3-01]"""
    queue = Queue.made(api, topic)
    queue.add("long")
    [job] = queue.take("w", lease_ms=1500)
    while now_ms() < job["deadline"] + 200:
        assert queue.extend("w", [1], 1500, lease_ids=tokens_of([job]))["extended"] == 1
        assert queue.take("x") == []
    assert queue.ack("w", [1], lease_ids=tokens_of([job]))["acked"] == 1


def test_a_lease_that_was_lost_cannot_be_extended(api: Api, topic: str) -> None:
    """Contract §10.6 [10.6-02]"""
    queue = Queue.made(api, topic)
    queue.add(1)
    [old] = queue.take("a", lease_ms=SHORT_MS)
    [new] = queue.soon("b", lease_ms=LONG_MS)
    answer = queue.extend("a", [1], LONG_MS)
    assert (answer["extended"], answer["skipped"], answer["deadlines"]) == (0, [1], {})
    assert [lease["deadline"] for lease in queue.held()] == [new["deadline"]]
    assert old["lease_id"] != new["lease_id"]


# --- fences ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("action", COUNTED)
def test_the_right_token_passes_and_any_other_is_skipped(queue: Queue, action: str) -> None:
    """Contract §10.4-§10.6 [10.4-03, 10.5-05, 10.6-02]"""
    jobs = queue.take("w", 3)
    right = tokens_of(jobs)
    wrong = [right[0], right[2], "lease_ffffffffffffffff"]
    answer = good(queue.post(action, _body(action, "w", [1, 2, 3], lease_ids=wrong)))
    assert (answer[COUNTED[action]], sorted(answer["skipped"])) == (1, [2, 3])
    answer = good(queue.post(action, _body(action, "w", [2, 3], lease_ids=right[1:])))
    assert (answer[COUNTED[action]], answer["skipped"]) == (2, [])


@pytest.mark.parametrize("action", COUNTED)
@pytest.mark.parametrize(
    "token", ["", "lease_", "lease_xyz", "7f3a9c", "LEASE_1", "lease_-1", "lease_" + "f" * 500, "ü"]
)
def test_a_token_that_is_none_is_skipped(queue: Queue, action: str, token: str) -> None:
    """Contract §10.4-§10.6 [10.4-03, 10.5-05]"""
    queue.take("w")
    before = _facts(queue)
    answer = good(queue.post(action, _body(action, "w", [1], lease_ids=[token])))
    assert (answer[COUNTED[action]], answer["skipped"]) == (0, [1])
    assert _facts(queue) == before


@pytest.mark.parametrize("action", COUNTED)
def test_a_stale_worker_of_the_same_name_is_fenced(queue: Queue, action: str) -> None:
    """Contract §10.4-§10.6 [10.4-03, 10.5-05, 10.6-02]: node and seq match, the lease does not."""
    [old] = queue.take("w")
    queue.nack("w", [1])
    [new] = queue.take("w")
    assert old["$seq"] == new["$seq"]
    before = _facts(queue)
    stale = good(queue.post(action, _body(action, "w", [1], lease_ids=tokens_of([old]))))
    assert (stale[COUNTED[action]], stale["skipped"]) == (0, [1])
    assert _facts(queue) == before
    fresh = good(queue.post(action, _body(action, "w", [1], lease_ids=tokens_of([new]))))
    assert (fresh[COUNTED[action]], fresh["skipped"]) == (1, [])


@pytest.mark.parametrize("action", COUNTED)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_is_one_token_a_seq(queue: Queue, action: str, count: int) -> None:
    """Contract §10.4-§10.6 [10.4-03, 10.5-05, 10.6-02]"""
    jobs = queue.take("w", 2)
    before = _facts(queue)
    tokens = (tokens_of(jobs) * 2)[:count]
    answer = queue.post(action, _body(action, "w", [1, 2], lease_ids=tokens))
    assert refused(answer, 400, "invalid_request")["field"] == "lease_ids"
    assert _facts(queue) == before


# --- hostile order --------------------------------------------------------------------------------
@pytest.mark.parametrize("action", COUNTED)
def test_before_any_claim_there_is_nothing_to_hold(queue: Queue, action: str) -> None:
    """Contract §10.4-§10.6 [10.4-02, 10.5-01, 10.6-02]"""
    before = _facts(queue)
    answer = good(queue.post(action, _body(action, "w", [1, 5, 0, 6, 2**64 - 1])))
    assert answer[COUNTED[action]] == 0
    assert sorted(answer["skipped"]) == [0, 1, 5, 6, 2**64 - 1]
    assert _facts(queue) == before
    assert [job["deliveries"] for job in queue.take("w", 5)] == [1] * 5


@pytest.mark.parametrize("action", COUNTED)
def test_a_foreign_node_changes_nothing(queue: Queue, action: str) -> None:
    """Contract §10.4-§10.6 [10.4-02, 10.5-01, 10.6-02]: a foreign node is skipped even with the
    right token.
    """
    jobs = queue.take("owner", 3)
    before = _facts(queue)
    for node in ("thief", "Owner", "owner ", "owne"):
        for more in ({}, {"lease_ids": tokens_of(jobs)}):
            answer = good(queue.post(action, _body(action, node, [1, 2, 3], **more)))
            assert (answer[COUNTED[action]], sorted(answer["skipped"])) == (0, [1, 2, 3])
    assert _facts(queue) == before
    assert queue.ack("owner", [1, 2, 3])["acked"] == 3


@pytest.mark.parametrize("action", COUNTED)
def test_acked_and_deleted_jobs_are_gone(queue: Queue, action: str) -> None:
    """Contract §10.4-§10.6 [10.4-02]"""
    queue.take("w", 4)
    queue.ack("w", [1, 2])
    good(queue.api.delete(queue.name, before_seq=4))
    before = _facts(queue)
    answer = good(queue.post(action, _body(action, "w", [1, 2, 3])))
    assert (answer[COUNTED[action]], sorted(answer["skipped"])) == (0, [1, 2, 3])
    assert _facts(queue) == before
    assert queue.counts() == (1, 1, 0)


@pytest.mark.parametrize("action", COUNTED)
def test_a_recreated_queue_knows_no_old_lease(queue: Queue, action: str) -> None:
    """Contract §10, §1.4 [10.4-02, 10.7-03]: name and seqs are the same, but the queue is another
    one.
    """
    old = queue.take("w", 3)
    good(queue.api.drop(queue.name))
    refused(queue.post(action, _body(action, "w", [1, 2, 3])), 404, "topic_not_found")
    refused(queue.api.state(queue.name), 404, "topic_not_found")
    queue.put(lease_ms=LONG_MS)
    queue.add(*range(3))
    before = _facts(queue)
    assert (before["queue"]["ready"], before["leases"]) == (3, [])
    for more in ({}, {"lease_ids": tokens_of(old)}):
        answer = good(queue.post(action, _body(action, "w", [1, 2, 3], **more)))
        assert (answer[COUNTED[action]], sorted(answer["skipped"])) == (0, [1, 2, 3])
    assert _facts(queue) == before
    new = queue.take("w", 3)
    assert [job["deliveries"] for job in new] == [1, 1, 1]
    assert not set(tokens_of(new)) & set(tokens_of(old))
    # The same node holds them again: only the fence distinguishes the leases.
    stale = good(queue.post(action, _body(action, "w", [1, 2, 3], lease_ids=tokens_of(old))))
    assert (stale[COUNTED[action]], sorted(stale["skipped"])) == (0, [1, 2, 3])


@pytest.mark.parametrize("action", ACTIONS)
def test_a_queue_recreated_as_a_log_is_no_queue(queue: Queue, action: str) -> None:
    """Contract §10 [10-02]"""
    queue.take("w", 3)
    good(queue.api.drop(queue.name))
    queue.api.add(queue.name, 1, 2, 3)
    body = {"node": "w"} if action == "claim" else _body(action, "w", [1, 2, 3])
    refused(queue.post(action, body), 409, "not_a_queue")
    assert queue.state()["count"] == 3
    assert "queue" not in queue.state()


@pytest.mark.parametrize("action", [*ACTIONS, "redrive"])
def test_a_log_is_no_queue(api: Api, topic: str, action: str) -> None:
    """Contract §10, §9 [10-02, 9-04]"""
    api.add(topic, 1)
    before = api.get_state(topic)
    log = Queue(api, topic)
    body = {"node": "w"} if action == "claim" else _body(action, "w", [1])
    if action == "redrive":
        body = {"all": True}
    answer = log.post(action, body)
    refused(answer, 409, "not_a_queue")
    assert topic in answer.text
    after = api.get_state(topic)
    for key in ("head_seq", "count", "config"):
        assert after[key] == before[key]
    refused(api.http.get(f"/v0/topics/{topic}/leases"), 409, "not_a_queue")


@pytest.mark.parametrize("action", [*ACTIONS, "redrive"])
def test_an_absent_topic_is_not_created(api: Api, topic: str, action: str) -> None:
    """Contract §10, §9 [10-03, 9-04]"""
    absent = Queue(api, topic)
    body = {"node": "w"} if action == "claim" else _body(action, "w", [1])
    if action == "redrive":
        body = {"all": True}
    refused(absent.post(action, body), 404, "topic_not_found")
    refused(api.http.get(f"/v0/topics/{topic}/leases"), 404, "topic_not_found")
    refused(api.state(topic), 404, "topic_not_found")


def test_an_ack_of_one_queue_leaves_another_alone(queue: Queue, names: Names) -> None:
    """Contract §10.4 [10.4-02]: the same node holds the same seqs elsewhere."""
    other = Queue.made(queue.api, names("q"), lease_ms=LONG_MS)
    other.add(*range(5))
    here, there = queue.take("w", 5), other.take("w", 5)
    assert queue.ack("w", [1, 2], lease_ids=tokens_of(there)[:2])["skipped"] == [1, 2]
    assert queue.ack("w", [1, 2], lease_ids=tokens_of(here)[:2])["acked"] == 2
    assert other.counts() == (0, 5, 0)
