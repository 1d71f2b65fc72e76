"""`topics bench` and a server that refuses: messages, exit codes, and topics left behind."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.unit.cli.benching.pretender import Pretender, Refusal, opened
from topics_server.cli import main
from topics_server.cli.benching import following, loads, own_topics


@pytest.fixture
def server() -> Iterator[Pretender]:
    """The server of a case."""
    with opened() as found:
        yield found


def bench(server: Pretender, *words: str) -> Result:
    """Run the verb in this process, shortly and with few connections."""
    env = {name: None for name in os.environ if name.startswith("TOPICS_")}
    base = ["bench", "--url", server.url, "--seconds", "0.1", "--connections", "2", "--json"]
    ran = CliRunner().invoke(main, [*base, *words], env=env)
    assert ran.exception is None or isinstance(ran.exception, SystemExit), repr(ran.exception)
    return ran


def rows_of(ran: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "unauthorized"), (429, "throttled"), (503, "starting"), (507, "storage_full")],
)
def test_a_refused_topic_is_a_sentence(server: Pretender, status: int, code: str) -> None:
    server.judge = lambda method, _call, _n: Refusal(status, code) if method == "PUT" else None
    ran = bench(server)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (1, "", f"{code}: m\n")
    assert ("DELETE", "") not in server.asked  # it was never made


@pytest.mark.parametrize(("status", "code"), [(503, "stopping"), (507, "storage_full")])
def test_a_refused_append_ends_the_run_and_its_topics_are_removed(
    server: Pretender, status: int, code: str
) -> None:
    server.judge = lambda method, _call, n: (
        Refusal(status, code) if method == "POST" and n > 5 else None
    )
    ran = bench(server, "--seconds", "50")
    assert (ran.exit_code, ran.stderr) == (1, f"{code}: m\n")
    (row,) = rows_of(ran)
    assert row["row"] == "append-1"
    assert row["requests"] == 5
    assert (row["errors"], row["first_error"]) == (1, f"{code}: m")
    assert server.topics == set()


def test_a_busy_server_is_given_the_pause_it_asks_for(server: Pretender) -> None:
    busy = Refusal(429, "throttled", {"retry_after_ms": 60})
    server.judge = lambda method, call, n: busy if (method, call, n) == ("POST", "", 1) else None
    ran = bench(server, "--only", "append,read", "--connections", "1", "--seconds", "1")
    assert ran.exit_code == 1
    first, second = rows_of(ran)
    assert (first["errors"], second["errors"]) == (1, 0)
    assert first["requests"] > 0
    assert "refused requests: 1; the first: throttled: m" in ran.stderr
    assert server.topics == set()


def test_a_pause_beyond_the_end_of_the_row_is_not_waited_for(server: Pretender) -> None:
    busy = Refusal(429, "throttled", {"retry_after_ms": 3_600_000})
    server.judge = lambda method, _call, _n: busy if method == "POST" else None
    began_s = time.monotonic()
    ran = bench(server, "--only", "append", "--connections", "1")
    assert time.monotonic() - began_s < 30
    assert (ran.exit_code, [row["errors"] for row in rows_of(ran)]) == (1, [1])
    assert server.topics == set()


def test_topics_that_cannot_be_removed_are_named(server: Pretender) -> None:
    server.judge = lambda method, _call, _n: (
        Refusal(503, "stopping") if method == "DELETE" else None
    )
    ran = bench(server, "--only", "append")
    assert ran.exit_code == 1
    (topic,) = server.topics
    remain = f"these topics remain; topics rm removes them (stopping: m): {topic}"
    assert ran.stderr.splitlines() == [remain, "stopping: m"]


def test_an_older_server_is_told_apart(server: Pretender) -> None:
    server.judge = lambda _method, call, _n: Refusal(404, "not_found") if call == "live" else None
    ran = bench(server, "--only", "follow")
    assert ran.exit_code == 1
    assert ran.stderr == (
        "not_found: m (the server has no such call; it may be older than this command)\n"
    )
    assert server.topics == set()


def test_a_missing_key_for_the_prefix_is_explained(server: Pretender) -> None:
    server.judge = lambda _method, _call, _n: Refusal(403, "forbidden")
    ran = bench(server)
    assert (ran.exit_code, ran.stderr.count("\n")) == (1, 1)
    assert "--prefix" in ran.stderr


@pytest.mark.parametrize("group", ["read", "queue"])
def test_an_answer_of_another_kind_is_recognised(server: Pretender, group: str) -> None:
    server.answers_body = b"[]"
    ran = bench(server, "--only", group)
    assert ran.exit_code == 1
    assert "this answer is not from a topics server" in ran.stderr
    assert server.topics == set()


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_a_proxy_may_frame_answers_anew_and_end_connections(
    server: Pretender, is_chunked: bool, closes: bool
) -> None:
    server.is_chunked, server.closes = is_chunked, closes
    ran = bench(server, "--only", "append,read,queue", "--connections", "1")
    assert ran.exit_code == 0, ran.stderr
    rows = rows_of(ran)
    assert len(rows) == 8
    assert all(row["requests"] > 0 and row["errors"] == 0 for row in rows)
    assert (server.connections > sum(row["requests"] for row in rows)) is closes
    assert server.topics == set()


def test_a_server_that_does_not_answer_is_given_up(
    server: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "STALL_S", 0.2)

    def slow(method: str, _call: str, n: int) -> Refusal | None:
        if method == "POST" and n == 1:
            time.sleep(3)
        return None

    server.judge = slow
    ran = bench(server, "--only", "append", "--connections", "1")
    assert ran.exit_code == 2
    assert ran.stderr == f"{server.url} did not answer within 0.2 s\n"
    assert rows_of(ran)[0]["requests"] == 0
    assert server.topics == set()


def test_a_stream_that_does_not_begin_is_given_up(
    server: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "READY_S", 0.2)

    def slow(_method: str, call: str, _n: int) -> Refusal | None:
        if call == "live":
            time.sleep(3)
        return None

    server.judge = slow
    ran = bench(server, "--only", "follow")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr == f"{server.url} did not begin a live stream within 0.2 s\n"
    assert server.topics == set()


def test_a_name_that_is_taken_is_left_alone(
    server: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_topics, "random_hex", lambda _size: "0" * 32)
    server.judge = lambda method, _call, _n: Refusal(409, "taken") if method == "PUT" else None
    ran = bench(server, "--only", "append")
    assert (ran.exit_code, ran.stderr) == (1, "taken: m\n")
    assert ("DELETE", "") not in server.asked


def test_a_topic_that_is_gone_does_not_remain(server: Pretender) -> None:
    """It was removed by somebody else, or by a request whose answer was lost."""

    def judge(method: str, _call: str, _n: int) -> Refusal | None:
        server.topics.clear()
        return Refusal(404, "topic_not_found") if method == "DELETE" else None

    server.judge = judge
    ran = bench(server, "--only", "append")
    assert (ran.exit_code, ran.stderr.count("remain")) == (0, 0), ran.stderr


def test_a_path_without_the_call_does_not_mean_that_a_topic_is_gone(server: Pretender) -> None:
    server.judge = lambda method, _call, _n: (
        Refusal(404, "not_found") if method == "DELETE" else None
    )
    ran = bench(server, "--only", "append")
    assert ran.exit_code == 1
    assert "these topics remain" in ran.stderr


@pytest.mark.parametrize(("status", "code"), [(500, "internal"), (502, "bad"), (504, "late")])
def test_a_topic_that_an_error_may_have_made_is_removed(
    server: Pretender, status: int, code: str
) -> None:
    """A proxy gave up, or the server failed, after the topic was made."""
    server.judge = lambda method, _call, _n: Refusal(status, code) if method == "PUT" else None
    server.makes_refused_topics = True
    ran = bench(server, "--only", "append")
    assert (ran.exit_code, ran.stderr) == (1, f"{code}: m\n")
    assert server.topics == set()


def test_a_writer_whose_connections_end_is_followed_too(server: Pretender) -> None:
    server.closes = True
    ran = bench(server, "--only", "follow", "--seconds", "0.5")
    assert ran.exit_code == 0, ran.stderr
    (row,) = rows_of(ran)
    assert row["requests"] > 1
