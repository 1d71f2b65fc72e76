"""Traces through the Python clients and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.contract.clients.conftest import new_client as new_client
from tests.contract.driver import Api, good
from tests.contract.traces.traced import OTHER, TRACE, add
from topics_server.client import NewRecord, Queue, TopicClient


@pytest.fixture
def client(new_client: Any, api: Api) -> Any:
    """A client of the shared server, of either kind."""
    return new_client(api.url)


def test_readers_get_the_trace_of_an_append(client: Any, topic: str) -> None:
    client.append(topic, 1, traceparent=TRACE)
    client.append_many(topic, [NewRecord(2), NewRecord(3)], traceparent=OTHER)
    client.append(topic, 4)
    client.append(topic, 5, traceparent="é\r\n")
    client.append(topic, 6, traceparent="not a trace")
    expected = [TRACE, OTHER, OTHER, None, None, None]
    assert [item.trace for item in client.read(topic)] == expected
    live = client.live(topic, from_seq=0)
    found = [item for item, _ in zip(live, range(6), strict=False)]
    live.close()
    assert [item.trace for item in found] == expected


def test_workers_get_the_trace_of_a_job(client: Any, api: Api, topic: str) -> None:
    with Queue(topic, url=api.url, create=True) as queue:
        queue.enqueue(1, traceparent=TRACE)
        queue.enqueue(2)
        jobs = queue.claim("w", max_jobs=2).jobs
        assert [job.trace for job in jobs] == [TRACE, None]
        queue.ack("w", jobs)
    same = client.queue(topic)
    same.enqueue(3, traceparent=OTHER)
    (job,) = same.claim("w").jobs
    assert job.trace == OTHER


def test_a_topic_client_takes_and_gives_it(api: Api, topic: str) -> None:
    with TopicClient(topic, url=api.url) as client:
        client.append(1, traceparent=TRACE)
        client.append_many([NewRecord(2)], per_record=True, key="k", traceparent=OTHER)
        assert [record.trace for record in client.read(0).records] == [TRACE, OTHER]


def test_the_command_line_prints_it(api: Api, topic: str) -> None:
    add(api, topic, [{"data": 1}, {"data": 2}])
    add(api, topic, [{"data": 3}], None)
    commands = (
        ("read", topic),
        ("read", topic, "--last", "3"),
        ("tail", topic, "--from", "0", "--limit", "3"),
    )
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "topics_server", command[0], "--url", api.url, *command[1:]],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        traces = [json.loads(line).get("$trace") for line in done.stdout.splitlines()]
        assert traces == [TRACE, TRACE, None], command
    good(api.state(topic))
