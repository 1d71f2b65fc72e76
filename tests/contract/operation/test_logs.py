"""The log of a real server: settings of the access log, no secrets, and a stuck reader."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Server, eventually, good

# Only `topics serve` writes this access log; a host application has its own.
process = pytest.mark.connection(reason="the log is that of `topics serve`")

SECRET = "sEcretOfOurs"


def requests_told(server: Server) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    return [line for line in lines if line["event"] == "request"]


def test_the_access_log_is_off_by_default(own: NewServer) -> None:
    server = own(TOPICS_LOG_FORMAT="json")
    api = server.start()
    good(api.put("jobs"))
    server.stop()
    assert requests_told(server) == []


@process
def test_full_logs_each_request_and_never_a_query_a_key_or_a_payload(
    own: NewServer,
) -> None:
    server = own(TOPICS_LOG_FORMAT="json", TOPICS_ACCESS_LOG="full")
    api = server.start()
    secret = {"Authorization": f"Bearer {SECRET}"}
    good(api.put("jobs"))
    body = {"records": [{"data": SECRET}]}
    good(api.http.post("/v0/topics/jobs", json=body, headers={"X-Request-Id": "mine-1"}))
    api.http.get(f"/v0/topics/jobs?token={SECRET}", headers=secret)
    api.http.get(f"/v0/watch/wid_none?ticket={SECRET}", headers=secret)
    api.http.get(f"/v0/nowhere?token={SECRET}")
    api.http.get(f"/v0/topics/%21?token={SECRET}")
    server.stop()
    told = [(line["method"], line["path"], line["status"]) for line in requests_told(server)]
    assert told[-6:] == [
        ("PUT", "/v0/topics/jobs", 200 + 1),
        ("POST", "/v0/topics/jobs", 200),
        ("GET", "/v0/topics/jobs", 200),
        ("GET", "/v0/watch/wid_none", 404),
        ("GET", "/v0/nowhere", 404),
        ("GET", "/v0/topics/%21", 400),
    ]
    append = requests_told(server)[-5]
    assert append["route"] == "/v0/topics/{topic}"
    assert append["bytes"] > 50
    assert append["request_id"] == "mine-1"
    assert 0 < append["ms"] < 60_000
    assert SECRET not in server.log.read_text()


@process
def test_sampled_logs_one_request_in_so_many(own: NewServer) -> None:
    server = own(
        TOPICS_LOG_FORMAT="json", TOPICS_ACCESS_LOG="sampled", TOPICS_ACCESS_LOG_SAMPLE="10"
    )
    api = server.start()
    for _ in range(100):
        good(api.http.get("/v0/health"))
    server.stop()
    # The other requests waited until the server was ready.
    assert 10 <= len(requests_told(server)) <= 200


def test_an_unread_log_stops_no_request(tmp_path: Path) -> None:
    """Standard error is a full pipe: the server answers requests, and SIGTERM ends it with 0."""
    server = Server(tmp_path / "server", {"TOPICS_ACCESS_LOG": "full"})
    server.directory.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "topics_server", "serve"],
        env=server.environment(),
        cwd=server.directory,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        port = server.directory / "port"
        eventually(lambda: port.exists() and port.read_text().endswith("\n"), "bound", 60)
        url = f"http://127.0.0.1:{int(port.read_text())}"
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            eventually(lambda: client.get("/v0/ready").status_code == 200, "ready", 60)
            # A pipe holds 64 KiB; each line here is longer than 300 bytes.
            for _ in range(500):
                assert client.get(f"/v0/{'x' * 300}").status_code == 404
            assert client.get("/v0/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
