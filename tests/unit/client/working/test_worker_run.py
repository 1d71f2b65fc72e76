"""`client.working.worker_run`: the result of each delivery, with faults planted on its way.

Times are real and short: leases of a few hundred milliseconds, pauses of ten.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.unit.client.conftest import Chance, Start
from tests.unit.client.fake import Broken, FakeQueue, Fault, Held, Refusal, now_ms
from topics_server.client import Backoff, Dead, Drop, Job, NotFound, Retry, Stats, Unauthorized
from topics_server.client.working.worker_run import CLOSING_MS

WAYS = pytest.mark.parametrize("push", ["always", "never"])


class Gate:
    """A handler that reports its begin and ends on command."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.jobs: list[Job] = []
        self.most = self.running = 0
        self._lock = threading.Lock()

    def __call__(self, job: Job) -> None:
        with self._lock:
            self.jobs.append(job)
            self.running += 1
            self.most = max(self.most, self.running)
        self.begun.release()
        self.go_on.wait(20)
        with self._lock:
            self.running -= 1

    def wait(self, count: int = 1) -> None:
        """Wait until this many further calls of the handler have begun."""
        for _ in range(count):
            assert self.begun.acquire(timeout=20), "it did not begin"


@WAYS
def test_every_job_is_handled_once_and_deleted(push: str, fake: FakeQueue, start: Start) -> None:
    seen: list[Any] = []
    fake.add(*range(60))
    run = start(lambda job: seen.append(job.data), push=push)
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=60)
    assert sorted(seen) == list(range(60))
    assert len(fake.calls("ack")) < 60  # the jobs gather


@WAYS
def test_as_many_run_as_asked_and_no_more(push: str, fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(*range(9))
    run = start(gate, push=push, concurrency=3)
    gate.wait(3)
    assert len(fake.leased) == 3
    gate.go_on.set()
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop().done == 9
    assert gate.most == 3


@WAYS
def test_a_failure_is_tried_again_later_each_time(push: str, fake: FakeQueue, start: Start) -> None:
    seen: list[int] = []

    def handle(job: Job) -> None:
        seen.append(job.deliveries)
        if job.deliveries < 4:
            raise ValueError("not yet")

    fake.add(1)
    backoff = Backoff(base_ms=8, cap_ms=16)
    run = start(handle, push=push, backoff=backoff, effects=Chance(1.0))
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1, failed=3)
    assert seen == [1, 2, 3, 4]
    assert [body["delay_ms"] for body in fake.calls("nack")] == [8, 16, 16]


def test_the_back_off_is_jittered(fake: FakeQueue, start: Start) -> None:
    def handle(job: Job) -> None:
        raise ValueError

    fake.add(1)
    run = start(handle, backoff=Backoff(base_ms=100_000), effects=Chance(0.5))
    fake.wait_for(lambda: fake.calls("nack"))
    run.stop()
    (body,) = fake.calls("nack")
    assert body["delay_ms"] == 50_000 // 4096 * 4096


@pytest.mark.parametrize("is_async", [True, False])
def test_what_a_handler_may_raise(is_async: bool, fake: FakeQueue, start: Start) -> None:
    raised: dict[str, BaseException] = {
        "retry": Retry(after_ms=70_000),
        "default": Retry(),
        "drop": Drop("not needed"),
        "dead": Dead("cannot"),
        "exit": SystemExit(1),
        "cancel": asyncio.CancelledError(),
    }

    def handle(job: Job) -> None:
        raise raised[job.data]

    async def handle_async(job: Job) -> None:
        raise raised[job.data]

    fake.add(*raised)
    backoff = Backoff(base_ms=60_000, cap_ms=60_000)
    run = start(handle_async if is_async else handle, backoff=backoff)
    fake.wait_for(lambda: len(fake.jobs) == 4 and not fake.leased)
    assert run.stop() == Stats(failed=4, dropped=2)
    delays = {s: b["delay_ms"] for b in fake.calls("nack") for s in b["seqs"]}
    assert delays == {1: 65_536, 2: 57_344, 5: 57_344, 6: 57_344}


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError("no such \udc80 address"), "ValueError: no such ? address"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 5000), "ValueError: " + "x" * 1012),
        (SystemExit(3), "the handler raised SystemExit(3)"),
        (asyncio.CancelledError(), "the handler raised CancelledError()"),
        (Retry(), None),
    ],
)
def test_a_nack_says_what_the_handler_raised(
    raised: BaseException, told: str | None, fake: FakeQueue, start: Start
) -> None:
    def handle(job: Job) -> None:
        raise raised

    fake.add(1)
    run = start(handle, backoff=Backoff(base_ms=60_000, cap_ms=60_000))
    fake.wait_for(lambda: fake.calls("nack"))
    run.stop()
    assert fake.calls("nack")[0].get("error") == told


def test_a_negative_retry_is_a_mistake() -> None:
    with pytest.raises(ValueError):
        Retry(-1)


# -- leases --------------------------------------------------------------------------------------


@WAYS
def test_leases_are_extended_while_handlers_run(push: str, fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(1, 2)
    run = start(gate, push=push, lease_ms=900)
    gate.wait(2)
    fake.wait_for(lambda: len(fake.calls("extend")) >= 8)  # at least twice the lease
    gate.go_on.set()
    assert run.stop() == Stats(done=2)
    assert [job.deliveries for job in gate.jobs] == [1, 1]
    assert {body["lease_ms"] for body in fake.calls("extend")} == {900}


@WAYS
def test_a_lost_lease_is_reported_and_its_result_discarded(
    push: str, fake: FakeQueue, start: Start
) -> None:
    gate = Gate()
    fake.add(1)
    # Long enough that the lease does not end by itself on a busy machine.
    run = start(gate, push=push, lease_ms=1500)
    gate.wait()
    fake.steal(1)
    assert gate.jobs[0].lost.wait(10)
    gate.go_on.set()
    assert run.stop() == Stats(lost=1)
    assert fake.calls("ack") == fake.calls("nack") == []
    assert fake.jobs[1].node == "thief"


def test_a_stale_ack_is_refused_by_its_fence(fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(1)
    run = start(gate)
    gate.wait()
    fake.steal(1)
    gate.go_on.set()
    fake.wait_for(lambda: fake.calls("ack"))
    assert run.stop() == Stats(lost=1)
    assert list(fake.jobs) == [1]


def test_extends_survive_a_server_that_fails_for_a_while(fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(1)
    fake.faults["extend"].extend([Refusal(503), Refusal(429)])
    # The repeated tries come at once; a busy machine has two seconds for them.
    run = start(gate, push="never", lease_ms=3000)
    gate.wait()
    fake.wait_for(lambda: len(fake.calls("extend")) >= 3)
    assert not gate.jobs[0].lost.is_set()
    gate.go_on.set()
    assert run.stop() == Stats(done=1)


def test_an_expired_lease_is_reported_without_an_answer(fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(1)
    fake.faults["extend"].extend([Refusal(503)] * 1000)
    run = start(gate, push="never", lease_ms=100)
    gate.wait()
    assert gate.jobs[0].lost.wait(10)
    gate.go_on.set()
    fake.wait_for(lambda: fake.calls("ack"))  # the lease token decides
    run.worker.stop()


# -- faults on the way ---------------------------------------------------------------------------


@WAYS
def test_a_server_that_is_not_there_yet_is_waited_for(
    push: str, fake: FakeQueue, start: Start
) -> None:
    fake.faults["state"].extend([Refusal(503, "not_ready"), Broken(), Broken(), Refusal(429)])
    fake.add(1)
    run = start(lambda job: None, push=push)
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1)


def test_a_claim_that_breaks_is_come_back_from(fake: FakeQueue, start: Start) -> None:
    faults: list[Fault] = [
        Broken(),
        Refusal(503),
        Refusal(429, headers={"Retry-After": "0"}),
        Broken(done=True),
    ]
    fake.faults["claim"].extend(faults)
    fake.add(1)
    # Long enough for an ack from a busy machine.
    run = start(lambda job: None, push="never", lease_ms=1000)
    fake.wait_for(lambda: not fake.jobs)
    # The claim whose answer was lost had leased the job: another claim got the job when the lease
    # ended.
    assert run.stop() == Stats(done=1)
    assert len(fake.calls("claim")) >= 5


def test_retry_after_is_heeded(fake: FakeQueue, start: Start) -> None:
    fake.faults["claim"].append(Refusal(429, detail={"retry_after_ms": 80}))
    fake.add(1)
    began_ms = now_ms()
    run = start(lambda job: None, push="never")
    fake.wait_for(lambda: not fake.jobs)
    assert now_ms() - began_ms >= 80
    run.stop()


@WAYS
def test_acks_are_repeated_until_they_arrive(push: str, fake: FakeQueue, start: Start) -> None:
    fake.faults["ack"].extend([Broken(), Broken(), Refusal(503), Refusal(429)])
    fake.add(1)
    run = start(lambda job: None, push=push)
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1)


def test_an_ack_that_is_refused_for_good_does_not_stop_the_worker(
    fake: FakeQueue, start: Start
) -> None:
    fake.faults["ack"].append(Refusal(400))
    fake.add(1)
    run = start(lambda job: None, concurrency=1)
    fake.wait_for(lambda: len(fake.calls("ack")) == 1)
    fake.cut_streams()  # frees the job
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1, lost=1)


def test_a_stream_that_breaks_frees_its_jobs_and_they_are_handled(
    fake: FakeQueue, start: Start
) -> None:
    gate = Gate()
    fake.add(1)
    run = start(gate, concurrency=2, push="auto")
    gate.wait()
    fake.cut_streams()
    assert gate.jobs[0].lost.wait(10)  # sent at once, not after a third of five seconds
    gate.wait()
    gate.go_on.set()
    assert run.stop() == Stats(done=1, lost=1)
    assert [job.deliveries for job in gate.jobs] == [1, 2]


def test_a_broken_stream_asks_about_its_leases_at_once(fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(1)
    run = start(gate, push="auto", lease_ms=600_000)
    gate.wait()
    fake.steal(1)
    fake.cut_streams()
    assert gate.jobs[0].lost.wait(20)  # the lease would have been extended after 200 s
    gate.go_on.set()
    assert run.stop() == Stats(lost=1)


def test_streams_that_fail_are_come_back_to(fake: FakeQueue, start: Start) -> None:
    fake.faults["work"].extend([Broken(), Refusal(503), Refusal(429), Broken()])
    fake.add(1)
    run = start(lambda job: None)
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1)
    assert fake.calls("claim") == []


@pytest.mark.parametrize("refusal", [Refusal(404, "not_found"), Refusal(405), Refusal(406)])
def test_without_a_stream_jobs_are_asked_for(
    refusal: Refusal, fake: FakeQueue, start: Start
) -> None:
    fake.faults["work"].append(refusal)
    fake.add(1)
    run = start(lambda job: None)
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1)
    assert len(fake.calls("work")) == 1


@pytest.mark.parametrize(
    ("op", "refusal"),
    [
        ("work", Refusal(404, "topic_not_found")),
        ("claim", Refusal(404, "topic_not_found")),
        ("claim", Refusal(401, "unauthorized")),
    ],
)
def test_a_refusal_for_good_ends_the_worker_when_handlers_are_through(
    op: str, refusal: Refusal, fake: FakeQueue, start: Start
) -> None:
    gate = Gate()
    fake.add(1)
    run = start(gate, concurrency=2, push="always" if op == "work" else "never")
    gate.wait()
    fake.faults[op].append(refusal)
    fake.cut_streams()
    if op == "claim":
        gate.go_on.set()
    else:
        assert gate.jobs[0].lost.wait(10)
        gate.go_on.set()
    assert isinstance(run.end(), NotFound if refusal.status == 404 else Unauthorized)


# -- stopping ------------------------------------------------------------------------------------


@WAYS
def test_a_stop_finishes_what_runs_and_begins_nothing(
    push: str, fake: FakeQueue, start: Start
) -> None:
    gate = Gate()
    fake.add(*range(4))
    run = start(gate, push=push, concurrency=2)
    gate.wait(2)
    run.worker.stop()
    gate.go_on.set()
    assert isinstance(stats := run.end(), Stats)
    assert (stats.done, stats.lost) == (2, 0)
    assert len(gate.jobs) == 2
    fake.wait_for(lambda: not fake.leased)
    assert sorted(fake.jobs) == [3, 4]


def test_a_stop_has_the_stream_bring_nothing_more(fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(*range(4))
    run = start(gate, push="always", concurrency=2)
    gate.wait(2)
    run.worker.stop()
    fake.wait_for(lambda: fake.held_back)
    gate.go_on.set()
    assert run.end() == Stats(done=2)
    assert {seq: entry.deliveries for seq, entry in fake.jobs.items()} == {3: 0, 4: 0}


def test_a_server_that_cannot_be_told_so_costs_no_job(fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(*range(4))
    fake.faults["extend"].append(Refusal(503))
    run = start(gate, push="always", concurrency=2)
    gate.wait(2)
    run.worker.stop()
    fake.wait_for(lambda: fake.calls("extend"))
    gate.go_on.set()
    assert isinstance(stats := run.end(), Stats)
    assert (stats.done, stats.lost) == (2, 0)
    fake.wait_for(lambda: not fake.leased)
    assert sorted(fake.jobs) == [3, 4]


@WAYS
@pytest.mark.parametrize("is_async", [True, False])
def test_after_the_grace_jobs_are_free_at_once(
    push: str, is_async: bool, fake: FakeQueue, start: Start
) -> None:
    gate = Gate()
    cancelled = threading.Event()

    async def handle_async(job: Job) -> None:
        gate.begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    fake.add(1)
    run = start(handle_async if is_async else gate, push=push, grace_ms=20)
    gate.wait()
    run.worker.stop()
    assert run.end() == Stats(released=1)
    fake.wait_for(lambda: not fake.leased)
    assert list(fake.jobs) == [1]
    assert fake.jobs[1].ready_ms <= now_ms() + (CLOSING_MS if push == "always" else 0)
    if is_async:
        assert cancelled.is_set()
    else:
        assert gate.jobs[0].lost.is_set()
        gate.go_on.set()


def test_a_second_stop_does_not_wait(fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(1)
    run = start(gate, push="never", grace_ms=60_000)
    gate.wait()
    run.worker.stop()
    run.worker.stop()
    assert run.end() == Stats(released=1)
    assert fake.calls("nack")[0]["delay_ms"] == 0
    gate.go_on.set()


def test_jobs_of_a_claim_that_was_under_way_are_given_back(fake: FakeQueue, start: Start) -> None:
    let = threading.Event()
    fake.add(1)
    fake.faults["claim"].append(Held(let))
    run = start(lambda job: None, push="never")
    fake.wait_for(lambda: fake.calls("claim"))
    run.worker.stop()
    let.set()
    assert run.end() == Stats(released=1)
    assert not fake.leased


def test_acks_of_the_last_moment_are_told(fake: FakeQueue, start: Start) -> None:
    gate = Gate()
    fake.add(1)
    fake.faults["ack"].extend([Refusal(503), Refusal(503)])
    run = start(gate)
    gate.wait()
    run.worker.stop()
    gate.go_on.set()
    assert run.end() == Stats(done=1)
    assert fake.jobs == {}


@pytest.mark.parametrize("op", ["extend", "ack"])
def test_a_server_that_takes_smaller_batches_gets_them(
    op: str, fake: FakeQueue, start: Start
) -> None:
    gate = Gate()
    fake.add(*range(8))
    fake.batch_max = 3
    run = start(gate, concurrency=8, lease_ms=9_000 if op == "extend" else 60_000)
    gate.wait(8)
    if op == "extend":
        fake.wait_for(lambda: len(fake.calls("extend")) >= 4, 30)
        assert {len(body["seqs"]) for body in fake.calls("extend")[1:4]} == {3, 2}
    gate.go_on.set()
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=8)
    # The number of jobs that end together depends on timing; each batch that was too long was
    # refused once.
    lengths = [len(body["seqs"]) for body in fake.calls(op)]
    refused = [length for length in lengths if length > 3]
    assert len(refused) <= 1
    assert sum(lengths) >= 8 + sum(refused)
