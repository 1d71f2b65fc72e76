"""`topics bench` against a real server."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

from tests.cli.conftest import WITHIN_S, MakeServer, Topics
from tests.contract.driver import Api, eventually

ROWS = [
    ("append-1", 1),
    ("append-1", 2),
    ("append-100", 1),
    ("append-100", 2),
    ("diff-1000", 1),
    ("diff-1000", 2),
    ("follow", 1),
    ("enqueue-1", 2),
    ("claim-1", 2),
    ("ack-1", 2),
    ("enqueue-64", 2),
    ("claim-64", 2),
    ("ack-64", 2),
]
RECORDS = {"append-100": 100, "diff-1000": 1000, "follow": 1, "append-1": 1, "enqueue-64": 64}


def left(api: Api, prefix: str = "bench.") -> list[str]:
    """The topics below this prefix."""
    return [found["topic"] for found in api.topics(prefix=prefix).json()["topics"]]


def test_every_row_is_measured_and_nothing_stays(topics: Topics, api: Api) -> None:
    ran = topics.good("bench", "--seconds", "0.1", "--connections", "2")
    rows: list[dict[str, Any]] = ran.lines
    assert [(row["row"], row["connections"]) for row in rows] == ROWS
    for row in rows:
        assert row["errors"] == 0
        assert row["requests"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["seconds"] > 0
        each = RECORDS.get(row["row"])
        if each is not None:
            assert row["records_per_s"] == pytest.approx(each * row["requests_per_s"], rel=0.01)
    assert "the client used 0." in ran.err or "the client used 1." in ran.err
    assert left(api) == []


def test_a_table_has_a_line_for_each_row(topics: Topics, api: Api) -> None:
    words = ("--seconds", "0.05", "--connections", "1", "--only", "follow,append", "--table")
    head, *lines = topics.good("bench", *words).out.decode().splitlines()
    assert head.split()[:3] == ["row", "connections", "requests/s"]
    assert [line.split()[:2] for line in lines] == [["append-1", "1"], ["follow", "1"]]
    assert left(api) == []


def test_a_key_with_a_prefix_measures_below_it(own: MakeServer, topics: Topics) -> None:
    server = own({"TOPICS_API_KEYS": "full, limited::mine:, reading:read:mine:"})
    server.start()
    topics.env = {"TOPICS_URL": server.api.url, "TOPICS_TOKEN": "limited"}
    words = ("bench", "--seconds", "0.05", "--only", "append", "--connections", "1")
    assert topics.good(*words, "--prefix", "mine:").value["errors"] == 0
    ran = topics(*words)
    assert (ran.code, ran.out) == (1, b"")
    assert ran.message.startswith("forbidden: ")
    assert "--prefix" in ran.message
    topics.env["TOPICS_TOKEN"] = "reading"
    ran = topics(*words, "--prefix", "mine:")
    assert (ran.code, ran.out) == (1, b"")
    assert "read, write, delete and admin" in ran.message
    topics.env["TOPICS_TOKEN"] = "wrong"
    ran = topics(*words)
    assert (ran.code, ran.message.partition(":")[0]) == (1, "unauthorized")
    topics.env["TOPICS_TOKEN"] = "full"
    assert topics.good("ls").out == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_its_topics_are_removed(
    topics: Topics, api: Api, number: signal.Signals
) -> None:
    prefix = f"ended-{number}."
    words = ("bench", "--seconds", "50", "--only", "append", "--prefix", prefix)
    with topics.spawn(*words, stderr=subprocess.PIPE) as verb:
        try:
            eventually(lambda: left(api, prefix) != [], "a topic of the run", WITHIN_S)
            (topic,) = left(api, prefix)
            eventually(lambda: api.get_state(topic)["count"] > 0, "a record", WITHIN_S)
            verb.send_signal(number)
            _, err = verb.communicate(timeout=WITHIN_S)
        finally:
            verb.kill()
    assert verb.returncode == 1
    assert err.decode().startswith("stopped: ")
    assert "Traceback" not in err.decode()
    assert left(api, prefix) == []


def test_a_reader_that_leaves_ends_it_and_its_topics_are_removed(topics: Topics, api: Api) -> None:
    words = ("bench", "--seconds", "0.05", "--prefix", "piped.", "--connections", "1")
    with topics.spawn(*words, stderr=subprocess.PIPE) as verb:
        try:
            assert verb.stdout is not None
            assert verb.stdout.readline().startswith(b'{"row"')
            verb.stdout.close()
            assert verb.stderr is not None
            assert verb.stderr.read() == b""
            assert verb.wait(WITHIN_S) == 0
        finally:
            verb.kill()
    assert left(api, "piped.") == []


def test_a_server_that_is_gone_ends_it_with_the_names_of_its_topics(
    own: MakeServer, topics: Topics
) -> None:
    server = own({})
    api = server.start()
    topics.env = {"TOPICS_URL": api.url}
    words = ("bench", "--seconds", "50", "--only", "append", "--connections", "2")
    with topics.spawn(*words, stderr=subprocess.PIPE) as verb:
        try:
            eventually(lambda: left(api) != [], "a topic of the run", WITHIN_S)
            (topic,) = left(api)
            eventually(lambda: api.get_state(topic)["count"] > 0, "a record", WITHIN_S)
            server.signal(signal.SIGKILL)
            out, err = verb.communicate(timeout=WITHIN_S)
        finally:
            verb.kill()
    assert verb.returncode == 2
    assert b'"errors":' in out
    text = err.decode()
    assert f"these topics remain; topics rm removes them (cannot connect to {api.url}" in text
    assert topic in text
    assert "broke" in text
