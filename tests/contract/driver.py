"""A server under test and the two ways to call it: parsed (httpx) and as bytes (sockets).

Owns starting, killing and restarting our own server as a separate process; the contract tests use
it only through the fixtures of `tests/contract/conftest.py`. Every wait is bounded. Times are
seconds here, as the operating system's, and milliseconds in what the server gets.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import httpx

from tests import forks
from tests.contract import described

ROOT: Final = Path(__file__).resolve().parents[2]
# The limit detects a start that hangs; a busy machine has taken more than 30 seconds.
START_WITHIN_S: Final = 90.0
STOP_WITHIN_S: Final = 30.0

COMMAND: Final = (sys.executable, "-m", "topics_server", "serve")

Json = dict[str, Any]
CONFIG_DEFAULTS: Final[Json] = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durable": False,
    "durability": "disk",
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120000,
    "dedupe_node": True,
    "lease_ms": 30000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
}


@dataclass(slots=True)
class RawResponse:
    """An HTTP/1.1 response as received: `status`, lower-cased `headers`, undecoded `body`."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Api:
    """The endpoints of a server by name; each call returns the httpx response unchecked.

    If `is_described`, each response must match the description.
    """

    def __init__(self, url: str, *, is_described: bool = False) -> None:
        self.url = url
        self.is_described = is_described
        self.http = httpx.Client(
            base_url=url,
            timeout=60,
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
            event_hooks={"response": [described.check]} if is_described else {},
        )

    def close(self) -> None:
        """Close the pooled connections."""
        self.http.close()

    def put(self, topic: str, config: object | None = None) -> httpx.Response:
        """PUT the topic with this configuration (default `{}`)."""
        return self.http.put(f"/v0/topics/{topic}", json={} if config is None else config)

    def state(self, topic: str, *, touch: bool = False) -> httpx.Response:
        """GET the topic's state."""
        return self.http.get(f"/v0/topics/{topic}", params={"touch": str(touch).lower()})

    def topics(self, **query: object) -> httpx.Response:
        """GET the list of topics."""
        return self.http.get("/v0/topics", params={k: str(v) for k, v in query.items()})

    def drop(self, topic: str, **query: object) -> httpx.Response:
        """DELETE the topic."""
        params = {k: str(v).lower() for k, v in query.items()}
        return self.http.delete(f"/v0/topics/{topic}", params=params)

    def append(self, topic: str, records: Sequence[object], **fields: object) -> httpx.Response:
        """POST these records, with further fields of the body by name."""
        return self.http.post(f"/v0/topics/{topic}", json={"records": list(records), **fields})

    def add(self, topic: str, *datas: object, **record: object) -> Json:
        """Append one record for each datum, all with the same other fields; must succeed."""
        return good(self.append(topic, [{"data": data, **record} for data in datas]))

    def diff(self, topic: str, **fields: object) -> httpx.Response:
        """POST a diff with these body fields."""
        return self.http.post(f"/v0/topics/{topic}/diff", json=fields)

    def delete(self, topic: str, **fields: object) -> httpx.Response:
        """POST a delete with these body fields."""
        return self.http.post(f"/v0/topics/{topic}/delete", json=fields)

    def get_state(self, topic: str) -> Json:
        """The state without touching recency; must succeed."""
        return good(self.state(topic))

    def read(self, topic: str, **fields: object) -> Json:
        """One diff; must succeed."""
        return good(self.diff(topic, **fields))

    def read_all(self, topic: str, from_seq: int = 0, **fields: object) -> list[Json]:
        """Every record above `from_seq`, following the cursor until caught up."""
        records: list[Json] = []
        for _ in range(10_000):
            page = self.read(topic, from_seq=from_seq, **fields)
            records += page["records"]
            if page["caught_up"]:
                return records
            assert page["next_from_seq"] > from_seq, "a page moves its cursor"
            from_seq = page["next_from_seq"]
        raise AssertionError("10,000 pages did not reach the head")

    def raw(
        self, method: str, target: str, body: bytes = b"", headers: Sequence[str] = ()
    ) -> RawResponse:
        """Send exactly these bytes over a new connection and read the whole answer."""
        lines = [f"{method} {target} HTTP/1.1", "Connection: close", *headers]
        if not any(line.lower().startswith("host:") for line in headers):
            lines.insert(1, "Host: localhost")
        framed = ("content-length:", "transfer-encoding:")
        if body and not any(h.lower().startswith(framed) for h in headers):
            lines.append(f"Content-Length: {len(body)}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        answer = exchange(self.url, head + body)
        if self.is_described and target.startswith("/"):
            described.check_raw(method, target, answer.status, answer.headers, answer.body)
        return answer


def exchange(url: str, request: bytes, timeout_s: float = 20.0) -> RawResponse:
    """Write `request` to a new socket and read until the server closes it."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    received = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=timeout_s) as sock:
        sock.sendall(request)
        for _ in range(1_000_000):
            try:
                piece = sock.recv(65536)
            except ConnectionResetError:
                break
            if not piece:
                break
            received += piece
            if _is_whole(received):
                break
    return _parsed(received)


def _is_whole(received: bytes) -> bool:
    head, found, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return bool(found) and length is not None and len(body) >= int(length.group(1))


def _parsed(received: bytes) -> RawResponse:
    head, found, body = received.partition(b"\r\n\r\n")
    assert found, f"no whole HTTP head in {received[:200]!r}"
    status, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = _unchunked(body)
    return RawResponse(int(status.split()[1]), headers, body)


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        whole += rest[:length]
        body = rest[length + 2 :] if length else b""
    return whole


def good(response: httpx.Response) -> Json:
    """The decoded body of a 200 or 201 answer; any other answer fails the test."""
    assert response.status_code in (200, 201), f"{response.status_code} {response.text[:500]}"
    body: Json = response.json()
    assert "error" not in body
    return body


def refused(response: httpx.Response | RawResponse, status: int, code: str) -> Json:
    """Check that the answer is exactly the error envelope with this status and code.

    Returns `detail`, empty if there is none.
    """
    got = response.status if isinstance(response, RawResponse) else response.status_code
    text = response.body if isinstance(response, RawResponse) else response.content
    assert got == status, f"{got} instead of {status}: {text[:500]!r}"
    assert response.headers["content-type"].partition(";")[0] == "application/json"
    body = response.json()
    assert set(body) <= {"error", "performance"}, f"more than an envelope: {text[:500]!r}"
    error = body["error"]
    assert set(error) <= {"code", "message", "detail"}
    assert error["code"] == code, f"{error}"
    assert re.fullmatch(r"[a-z][a-z0-9_]*", error["code"])
    assert isinstance(error["message"], str)
    assert error["message"]
    detail = error.get("detail", {})
    assert isinstance(detail, dict)
    return detail


def seqs_of(page: Json) -> list[int]:
    """The `$seq`s of a page's records."""
    return [record["$seq"] for record in page["records"]]


def eventually(check: Callable[[], bool], what: str, within_s: float = 10.0) -> None:
    """Wait until `check` is true; fail with `what` after the time limit."""
    deadline = time.monotonic() + within_s
    for _ in range(100_000):
        if check():
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s} s: {what}")


def command_of(door: str) -> tuple[str, ...]:
    """The command that starts a server behind a door: see `tests/contract/doors.py`."""
    if door == "connection":
        return COMMAND
    return (sys.executable, "-m", "tests.contract.doors", door)


@dataclass(slots=True)
class Server:
    """Our own server in a separate process, over one data directory.

    All tests call the server through this `door`.
    """

    directory: Path
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    clients: list[Api] = field(default_factory=list)
    starts: int = 0
    command: tuple[str, ...] = field(default_factory=lambda: command_of(Server.door))
    door: ClassVar[str] = "connection"

    @property
    def data_dir(self) -> Path:
        """The server's data directory."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """Standard error and output of the latest start."""
        return self.directory / f"log-{self.starts}.txt"

    @property
    def api(self) -> Api:
        """A client of the running server."""
        return self.clients[-1]

    def environment(self) -> dict[str, str]:
        """The whole environment of the process: ours without any TOPICS_ name, then `env`.

        An empty value in `env` removes the name, so that the server's default holds.
        """
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")}
        # The caller's own folder comes first, so that its modules shadow others.
        paths = [self.env.get("PYTHONPATH", ""), str(ROOT / "src"), kept.get("PYTHONPATH", "")]
        if Server.door != "connection":
            paths.insert(1, str(ROOT))
        joined = os.pathsep.join(path for path in paths if path)
        ours = {
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(self.directory / "port"),
            "TOPICS_DATA_DIR": str(self.data_dir),
        }
        return (
            kept | {k: v for k, v in (ours | dict(self.env)).items() if v} | {"PYTHONPATH": joined}
        )

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process without waiting for it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "port").unlink(missing_ok=True)
        self.starts += 1
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        env, cwd = self.environment(), self.directory
        with self.log.open("wb") as log:
            if self.command == COMMAND:
                return forks.start(["serve"], env, cwd, stdout=log, **streams)
            return subprocess.Popen(self.command, env=env, cwd=cwd, stdout=log, **streams)

    def start(self) -> Api:
        """Start the process and wait until `/v0/ready` is 200."""
        assert self.process is None
        self.process = self.spawn()
        deadline = time.monotonic() + START_WITHIN_S
        port = self._bound_port(deadline)
        self.clients.append(Api(f"http://127.0.0.1:{port}", is_described=True))
        for _ in range(100_000):
            try:
                if self.api.http.get("/v0/ready").status_code == 200:
                    return self.api
            except httpx.TransportError:
                assert self.process.poll() is None, self._story("ended before it was ready")
            assert time.monotonic() < deadline, self._story("not ready in time")
            time.sleep(0.02)
        raise AssertionError("unreachable")

    def _bound_port(self, deadline: float) -> int:
        assert self.process is not None
        for _ in range(100_000):
            text = (
                (self.directory / "port").read_text() if (self.directory / "port").exists() else ""
            )
            if text.strip().isdigit():
                return int(text)
            assert self.process.poll() is None, self._story("ended before it was bound")
            assert time.monotonic() < deadline, self._story("no port in time")
            time.sleep(0.02)
        raise AssertionError("unreachable")

    def _story(self, what: str) -> str:
        tail = self.log.read_text(errors="replace")[-3000:]
        return f"server {what}; its output:\n{tail}"

    def signal(self, number: signal.Signals) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        assert self.process is not None
        for client in self.clients:
            client.close()
        self.process.send_signal(number)
        try:
            code = self.process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(self._story(f"did not end on {number.name}")) from None
        self.process = None
        return code

    def stop(self) -> None:
        """A clean stop: SIGTERM, exit code 0."""
        code = self.signal(signal.SIGTERM)
        assert code == 0, self._story(f"exit code {code} on SIGTERM")

    def restart(self) -> Api:
        """A clean stop and a start on the same directory."""
        self.stop()
        return self.start()

    def crash(self) -> Api:
        """`kill -9` and a start on the same directory."""
        self.signal(signal.SIGKILL)
        return self.start()

    def refusal(self, within_s: float = 20.0) -> str:
        """Start a server that must refuse; return its output; the exit code is not 0."""
        process = self.spawn()
        try:
            code = process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(self._story("started although it must refuse")) from None
        assert code != 0
        return self.log.read_text(errors="replace")
