"""`cli.queues.queue`: snapshots, rates, and the board."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from tests.unit.client.fake import FakeQueue, Refusal, serving
from topics_server.cli.connection import ServerConnection
from topics_server.cli.queues import queue, queue_board
from topics_server.cli.queues.queue_board import Board, Snapshot

Served = tuple[str, FakeQueue]


@pytest.fixture
def served() -> Iterator[Served]:
    """A queue server."""
    with serving() as found:
        yield found


class Time:
    """The clock of the rates."""

    def __init__(self) -> None:
        self.ms = 1000.0

    def __call__(self) -> float:
        return self.ms


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """A clock that stands still."""
    found = Time()
    monkeypatch.setattr(queue_board, "monotonic_ms", found)
    return found


def run(url: str, *words: str) -> Result:
    """Run the verb in this process."""
    return CliRunner().invoke(queue.command, ["--url", url, *words])


def test_a_line_a_queue(served: Served) -> None:
    url, fake = served
    fake.add(1, 2, 3)
    with fake.changed:
        fake.lease("n", 1, 60_000)
    line = {"queue": "q", "ready": 2, "delayed": 0, "in_flight": 1, "dead": 0}
    line |= {"head_seq": 3, "count": 3}
    for words in (("q",), (), ("q", "q"), ("--json",)):
        ran = run(url, *words)
        assert [json.loads(text) for text in ran.stdout.splitlines()] == [line]
    assert {body["touch"] for body in fake.calls("state")} == {"false"}
    table = run(url, "--table").stdout.splitlines()
    assert table[0].split() == [
        "queue",
        "ready",
        "delayed",
        "in",
        "flight",
        "dead",
        "in/s",
        "out/s",
    ]
    assert table[1].split() == ["q", "2", "0", "1", "0", "-", "-"]


def test_plain_logs_are_left_out_or_refused(served: Served) -> None:
    url, fake = served
    fake.config = {"type": "log"}
    assert run(url).stdout == ""
    assert "no queues" in run(url, "--table").stdout
    ran = run(url, "q")
    assert (ran.exit_code, ran.stderr) == (1, "not_a_queue: 'q' is a plain log\n")
    fake.faults["state"].append(Refusal(404, "topic_not_found"))
    ran = run(url, "q")
    assert (ran.exit_code, ran.stderr) == (1, "topic_not_found: m\n")


def test_rates(served: Served, time: Time) -> None:
    url, fake = served
    fake.add(*range(10))
    client = ServerConnection(url)
    board = Board(client, ["q"])
    assert board.look() == [Snapshot("q", 10, 0, 0, 0, 10, 10)]
    fake.add(*range(5))
    del fake.jobs[1], fake.jobs[2]
    time.ms += 500
    assert board.look() == [Snapshot("q", 13, 0, 0, 0, 15, 13, in_rate=10.0, out_rate=4.0)]
    time.ms += 500
    assert board.look() == [Snapshot("q", 13, 0, 0, 0, 15, 13, in_rate=0.0, out_rate=0.0)]
    fake.faults["state"].append(Refusal(404, "topic_not_found"))
    assert board.look() == []
    fake.jobs.clear()
    fake.head = 0
    assert board.look() == [Snapshot("q", 0, 0, 0, 0, 0, 0)]  # recreated: no rate
    client.close()


def test_a_queue_of_the_same_name_begins_anew(served: Served, time: Time) -> None:
    url, fake = served
    fake.add(1, 2)
    client = ServerConnection(url)
    board = Board(client, [])
    board.look()
    fake.jobs.clear()
    fake.head = 0
    assert board.look() == [Snapshot("q", 0, 0, 0, 0, 0, 0)]
    client.close()


def test_watching_goes_on_until_it_is_interrupted(served: Served) -> None:
    url, fake = served

    def interrupt() -> None:
        fake.wait_for(lambda: len(fake.calls("state")) >= 3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    ran = run(url, "q", "--watch", "--interval", "0.05")
    thread.join()
    assert ran.exit_code == 0
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(lines) >= 2
    assert "in_rate" not in lines[0]
    assert lines[1]["in_rate"] == lines[1]["out_rate"] == 0.0
