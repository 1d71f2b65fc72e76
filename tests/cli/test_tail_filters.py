"""`tail` and `watch` with filters, and from a consumer, over restarts of the server."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MakeServer, Topics
from tests.cli.test_streams import Verb, on_a_port
from tests.contract.driver import Api, good


@pytest.fixture
def filled(api: Api, topic: str) -> str:
    """Six records, tagged `odd` and `even.N`."""
    for number in range(1, 7):
        tag = "odd" if number % 2 else f"even.{number}"
        good(api.append(topic, [{"data": number, "tag": tag}]))
    return topic


def datas(lines: list[Any]) -> list[int]:
    return [line["data"] for line in lines]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--tag", "odd"], [1, 3, 5]),
        (["--tag", "odd", "--tag", "even.4"], [1, 3, 4, 5]),
        (["--tag-prefix", "even."], [2, 4, 6]),
        (["--filter", '["Not", "odd"]'], [2, 4, 6]),
        (["--tag-prefix", "even.", "--filter", '["Not", "even.2"]'], [4, 6]),
        (["--filter", '"even.6"'], [6]),
    ],
)
def test_tail_and_watch_print_the_records_that_pass(
    topics: Topics, filled: str, words: list[str], found: list[int]
) -> None:
    count = str(len(found))
    ran = topics.good("tail", filled, "--from-start", "--limit", count, *words)
    assert datas(ran.lines) == found
    last = topics.good("tail", filled, "-n", "2", "--limit", str(len(found[-2:])), *words)
    assert datas(last.lines) == found[-2:]
    frames = topics.good("watch", filled, "--until-caught-up", *words).lines
    told = [frame["data"]["records"] for frame in frames if frame["event"] == "record"]
    assert [record["data"] for records in told for record in records] == found


def test_a_filtered_tail_outlives_kills_and_restarts(own: MakeServer, tmp_path: Path) -> None:
    server = on_a_port(own)
    topics = Topics(server.api.url, tmp_path)
    good(server.api.append("a", [{"data": 0, "tag": "x"}, {"data": -1, "tag": "y"}]))
    errors = tmp_path / "errors"
    with errors.open("wb") as file:
        started = topics.spawn("tail", "a", "--from-start", "--tag", "x", stderr=file)
    verb = Verb(started, errors)
    try:
        verb.wait_for(1)
        for number, stop in enumerate((server.crash, server.restart, server.crash), 1):
            good(server.api.append("a", [{"data": number, "tag": "x"}, {"data": -1, "tag": "y"}]))
            stop()
            good(server.api.append("a", [{"data": -1}, {"data": number + 10, "tag": "x"}]))
            verb.wait_for(2 * number + 1)
        assert verb.interrupt() == 0
        assert datas([json.loads(line) for line in verb.out]) == [0, 1, 11, 2, 12, 3, 13]
    finally:
        if verb.process.poll() is None:
            verb.process.kill()
            verb.end()


def test_tail_begins_at_a_consumer_and_commits_nothing(
    topics: Topics, api: Api, filled: str
) -> None:
    url = f"/v0/topics/{filled}/consumers/mine"
    good(api.http.put(url, json={"from": 4}))
    for _ in range(2):
        ran = topics.good("tail", filled, "--consumer", "mine", "--limit", "2")
        assert datas(ran.lines) == [5, 6]
    odd = topics.good("tail", filled, "--consumer", "mine", "--tag", "odd", "--limit", "1")
    assert datas(odd.lines) == [5]
    assert good(api.http.get(url))["seq"] == 4


class _Old(http.server.BaseHTTPRequestHandler):
    """An older server, which ignores the filter of a session."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answer: dict[str, Any] = {"wid": "wid_x", "stream_url": "/v0/watch/wid_x", "topics": {}}
        body = json.dumps(answer | {"ignored": ["filter"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_that_ignores_the_filter_is_not_followed(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Old) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            topics = Topics(f"http://127.0.0.1:{server.server_address[1]}", tmp_path)
            for verb in ("tail", "watch"):
                ran = topics(verb, "t", "--tag", "x")
                assert ran.code == 1
                assert "too old for a filter" in ran.err
        finally:
            server.shutdown()
            thread.join()
