"""`client.working.worker`: options, signals, and the two kinds of handlers."""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import Any

import pytest

from tests.unit.client.conftest import FAST, Chance, Start
from tests.unit.client.fake import FakeQueue, Refusal
from topics_server.client import Job, NotAQueue, NotFound, Stats, Worker, worker

JOB = Job(queue="q", seq=1, lease_id="l", deadline_ms=0, ts_ms=0, deliveries=1, raw=b"7")


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": 1001},
        {"lease_ms": 99},
        {"lease_ms": 86_400_001},
        {"node": ""},
        {"node": "n" * 129},
        {"push": "sometimes"},
        {"grace_ms": -1},
        {"url": "nowhere"},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Worker(print, "q", **options)


def test_a_worker_is_still_its_function() -> None:
    @worker("q")
    def double(job: Job) -> int:
        return int(job.data) * 2

    assert double(JOB) == 14
    assert double.stats == Stats()
    other = worker("q")(print)
    assert double.plan.node != other.plan.node
    assert 0 < len(double.plan.node.encode()) <= 128


class Handler:
    def __init__(self) -> None:
        self.threads: list[bool] = []

    async def __call__(self, job: Job) -> None:
        await self.handle(job)

    async def handle(self, job: Job) -> None:
        self.note(job)

    def note(self, job: Job) -> None:
        self.threads.append(threading.current_thread().name.startswith("worker-"))


@pytest.mark.parametrize("kind", ["object", "method", "partial", "plain"])
def test_coroutines_run_on_the_loop_and_functions_in_threads(
    kind: str, fake: FakeQueue, start: Start
) -> None:
    handler = Handler()
    kinds: dict[str, Any] = {
        "object": handler,
        "method": handler.handle,
        "partial": functools.partial(Handler.handle, handler),
        "plain": handler.note,
    }
    fake.add(1)
    run = start(kinds[kind])
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1)
    assert handler.threads == [kind == "plain"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_running_handler_finish(
    number: signal.Signals, url: str, fake: FakeQueue
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    @worker("q", url=url, concurrency=1)
    def handle(job: Job) -> None:
        begun.set()
        assert go_on.wait(10)

    def interrupt() -> None:
        assert begun.wait(10)
        os.kill(os.getpid(), number)
        fake.add("not begun")
        go_on.set()

    fake.add("begun")
    thread = threading.Thread(target=interrupt)
    thread.start()
    stats = handle.run()
    thread.join()
    assert stats.done == 1
    fake.wait_for(lambda: not fake.leased)
    assert [entry.record["data"] for entry in fake.jobs.values()] == ["not begun"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_the_server_refuses_for_good_is_raised(url: str, fake: FakeQueue) -> None:
    fake.faults["state"].append(Refusal(404, "topic_not_found"))
    handle = worker("q", url=url)(print)
    with pytest.raises(NotFound):
        handle.run()
    fake.config = {"type": "log"}
    with pytest.raises(NotAQueue):
        handle.run()


def test_a_stop_before_the_run_ends_it_at_once(fake: FakeQueue, start: Start) -> None:
    handle = Worker(print, "q", url="http://127.0.0.1:1", pauses=FAST, effects=Chance(1.0))
    handle.stop()
    assert handle.run() == Stats()


def test_the_queue_says_how_long_a_lease_is(fake: FakeQueue, start: Start) -> None:
    fake.config["lease_ms"] = 4321
    fake.add(1)
    run = start(lambda job: None, lease_ms=None)
    fake.wait_for(lambda: not fake.jobs)
    run.stop()
    assert fake.calls("work")[0]["lease_ms"] == "4321"


def test_it_runs_once_at_a_time(fake: FakeQueue, start: Start) -> None:
    run = start(lambda job: None)
    fake.wait_for(lambda: fake.streams == 1)
    with pytest.raises(RuntimeError, match="running"):
        run.worker.run()
    run.stop()
