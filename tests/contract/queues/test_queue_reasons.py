"""Why a job died, as its worker reported it; and why a seq was skipped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, Server, eventually, refused
from tests.contract.queues.queues import LONG_MS, SHORT_MS, Queue, seqs_of

STAMP = "$dead_letter_error"


def made(api: Api, name: str, **config: object) -> Queue:
    """A queue whose jobs die at their third delivery."""
    given = {"max_deliveries": 2, "dead_letter": f"{name}.dlq", "lease_ms": LONG_MS}
    return Queue.made(api, name, **(given | config))


def letters(queue: Queue, count: int = 1) -> list[Json]:
    """The dead letters, once there are this many."""

    def bury() -> bool:
        queue.take("w", 100)
        return queue.counts()[2] == count

    eventually(bury, f"{count} jobs are dead-lettered")
    return queue.api.read_all(f"{queue.name}.dlq")


def test_a_letter_carries_the_reason_of_the_last_nack(api: Api, topic: str) -> None:
    queue = made(api, topic)
    queue.add({"n": 1}, meta={"trace": "z9"})
    for error in ("timeout", 'no "such" file\n\té \\'):
        queue.nack("w", seqs_of(queue.take("w")), error=error)
    [letter] = letters(queue)
    assert letter["meta"] == {
        "trace": "z9",
        "$dead_letter_from": topic,
        "$dead_letter_deliveries": 2,
        "$dead_letter_src_seq": 1,
        STAMP: 'no "such" file\n\té \\',
    }
    # The redriven job is as before and has no reason any more.
    assert queue.redrive(all=True)["redriven"] == 1
    [job] = queue.take("w")
    assert job["meta"] == {"trace": "z9"}


@pytest.mark.parametrize("later", [{}, {"error": None}, {"error": ""}])
def test_a_nack_that_gives_no_reason_leaves_the_one_there_is(
    api: Api, topic: str, later: Json
) -> None:
    queue = made(api, topic)
    queue.add(1)
    queue.nack("w", seqs_of(queue.take("w")), error="first")
    queue.nack("w", seqs_of(queue.take("w")), **later)
    [letter] = letters(queue)
    assert letter["meta"][STAMP] == "first"


def test_without_a_reason_there_is_no_such_stamp(api: Api, topic: str) -> None:
    queue = made(api, topic)
    queue.add(1)
    for _ in range(2):
        queue.nack("w", seqs_of(queue.take("w")))
    [letter] = letters(queue)
    assert STAMP not in letter["meta"]


@pytest.mark.parametrize(
    ("error", "kept"),
    [("x" * 1024, "x" * 1024), ("x" * 1025, "x" * 1024), ("é" * 600 + "x", "é" * 512)],
)
def test_a_long_reason_is_cut_behind_a_whole_character(
    api: Api, topic: str, error: str, kept: str
) -> None:
    queue = made(api, topic, max_deliveries=1)
    queue.add(1)
    assert queue.nack("w", seqs_of(queue.take("w")), error=error)["nacked"] == 1
    [letter] = letters(queue)
    assert letter["meta"][STAMP] == kept


def test_a_three_byte_character_at_the_cut_goes(api: Api, topic: str) -> None:
    queue = made(api, topic, max_deliveries=1)
    queue.add(1)
    queue.nack("w", seqs_of(queue.take("w")), error="x" * 1023 + "\u20ac")
    [letter] = letters(queue)
    assert letter["meta"][STAMP] == "x" * 1023


@pytest.mark.parametrize("error", [1, True, {}, ["x"]])
def test_a_reason_is_text(api: Api, topic: str, error: object) -> None:
    queue = made(api, topic)
    queue.add(1)
    queue.take("w")
    answer = queue.post("nack", {"node": "w", "seqs": [1], "error": error})
    assert refused(answer, 400, "invalid_request")["field"] == "error"
    assert queue.counts() == (0, 1, 0)


@pytest.mark.parametrize(
    ("is_durable", "again"),
    [
        (True, Server.crash),  # the journal has it
        (True, Server.restart),
        (False, Server.restart),  # the last snapshot has it
    ],
)
def test_a_reason_outlives_a_restart(own: NewServer, is_durable: bool, again: Any) -> None:
    """That holds for a waiting job, and for a job that was claimed since."""
    server = own()
    queue = made(server.start(), "jobs", leases_durable=is_durable, durability="fsync")
    queue.add(1, 2)
    for job in queue.take("w", 2):
        queue.nack("w", [job["$seq"]], error=f"reason {job['$seq']}")
    queue.take("v", 1)
    queue.api = again(server)
    assert [lease["seq"] for lease in queue.held()] == [1]
    queue.nack("v", [1])
    queue.nack("w", seqs_of(queue.soon("w", 1)))
    found = letters(queue, 2)
    assert {each["data"]: each["meta"][STAMP] for each in found} == {1: "reason 1", 2: "reason 2"}
    # A dead letter keeps its reason too, as long as it exists.
    queue.api = server.crash()
    assert {each["meta"][STAMP] for each in queue.api.read_all("jobs.dlq")} == {
        "reason 1",
        "reason 2",
    }
    server.stop()


# -- skipped -----------------------------------------------------------------------------------


def reasons(queue: Queue, action: str, node: str, seqs: list[int], **fields: object) -> Json:
    """Why each seq was skipped."""
    more = {"lease_ms": LONG_MS} if action == "extend" else {}
    answer = queue.post(action, {"node": node, "seqs": seqs, **more, **fields}).json()
    told: Json = answer.get("reasons", {})
    assert {*told} == {*map(str, answer["skipped"])}
    assert ("reasons" in answer) == bool(answer["skipped"])
    return told


@pytest.mark.parametrize("action", ["nack", "extend", "ack"])
def test_each_skipped_seq_says_why(api: Api, topic: str, action: str) -> None:
    """§10.4: `reasons` is an addition; the seqs are still in `skipped`."""
    queue = Queue.made(api, topic, lease_ms=LONG_MS)
    queue.add(1, 2, 3, 4, 5)
    [first] = queue.take("mine")
    queue.nack("mine", [1])
    queue.take("mine")  # the same job by another lease
    queue.take("other")
    queue.take("mine")
    queue.ack("mine", [3])
    queue.take("mine")
    queue.nack("mine", [4])
    assert reasons(queue, action, "mine", [2, 3, 4, 5, 0, 99]) == {
        "2": "held_by_another_node",
        "3": "not_found",  # completed
        "4": "not_leased",  # released
        "5": "not_leased",  # never delivered
        "0": "not_found",
        "99": "not_found",
    }
    assert reasons(queue, action, "mine", [1], lease_ids=[first["lease_id"]]) == {
        "1": "lease_superseded"
    }
    assert reasons(queue, action, "mine", [1]) == {}


def test_a_late_ack_says_that_another_worker_holds_the_job(api: Api, topic: str) -> None:
    queue = Queue.made(api, topic, lease_ms=SHORT_MS)
    queue.add("slow")
    queue.take("slow one")
    queue.is_expired()
    queue.take("quick one", lease_ms=LONG_MS)
    assert reasons(queue, "ack", "slow one", [1]) == {"1": "held_by_another_node"}
    assert reasons(queue, "ack", "quick one", [1]) == {}
