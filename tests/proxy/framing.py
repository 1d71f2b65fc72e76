"""Raw bytes through nginx, and their results: the answers, and the requests that the server got."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from tests.api.framing import Case
from tests.contract.driver import Server
from tests.ports import lasting_port
from tests.proxy.nginx import Proxy, filled

WITHIN_S: Final = 30.0
# Seconds to wait: longer than nginx lingers after a refusal.
LINGERS_S: Final = 8.0
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_numbers: Final = itertools.count(1)


class Judged(NamedTuple):
    """`statuses`: those of all answers but the honest request's; `answered`: whether the honest
    request got its answer.
    """

    statuses: list[int]
    answered: bool
    is_clear: bool
    passed_on: int
    refused: int

    @property
    def verdict(self) -> str:
        """The result in one or two words, for the table."""
        if not self.statuses:
            return "closed"
        return ", ".join(map(str, self.statuses))


class Raw(Proxy):
    """An nginx that also accepts plain connections, at `raw_port`."""

    raw_port: int = 0

    def write_configuration(self, upstream_port: int) -> Path:
        """The shipped configuration with short timeouts for tests of incomplete requests."""
        path = super().write_configuration(upstream_port)
        there = self.directory / "topics.conf"
        listen = f"listen 127.0.0.1:{self.port} ssl http2 default_server;"
        replacements = {
            listen: f"{listen} listen 127.0.0.1:{self.raw_port} default_server;",
            "client_header_timeout 20s": "client_header_timeout 2s",
            "client_body_timeout 60s": "client_body_timeout 2s",
            "    keepalive_timeout 75s": "    keepalive_timeout 2s",
        }
        there.write_text(filled(there.read_text(), replacements))
        return path

    def exchange(self, sent: bytes) -> bytes:
        """All bytes that arrive until the connection is closed."""
        got = b""
        with socket.create_connection(("127.0.0.1", self.raw_port), timeout=WITHIN_S) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
            try:
                while piece := sock.recv(65536):
                    got += piece
            except ConnectionError:
                pass
            except TimeoutError:
                raise AssertionError(f"neither more nor the end after {got!r}") from None
        return got

    def ask(self, name: str) -> str:
        """The topic in the answer to a request about it."""
        answers = split(self.exchange(honest(name)))
        assert answers is not None
        ((status, body),) = answers
        assert status == 404
        topic: str = json.loads(body)["error"]["detail"]["topic"]
        return topic

    def logged_lines(self) -> list[dict[str, object]]:
        """The access log so far."""
        return [json.loads(line) for line in self.access_log.read_text().splitlines()]


def honest(name: str) -> bytes:
    """A unique request, which is also the last one of its connection."""
    return f"GET /v0/topics/{name} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode()


def split(answers: bytes) -> list[tuple[int, bytes]] | None:
    """Status and body of each answer; None if they are incomplete, or bytes are between them."""
    found: list[tuple[int, bytes]] = []
    while answers:
        match = _STATUS.match(answers)
        head, end, rest = answers.partition(b"\r\n\r\n")
        if match is None or not end:
            return None
        status = int(match[1])
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if re.search(rb"(?i)\r\ntransfer-encoding: chunked", head):
            body, rest = unchunked(rest)
        else:
            size = 0 if length is None else int(length[1])
            body, rest = rest[:size], rest[size:]
            if len(body) < size:
                return None
        found.append((status, body))
        answers = rest
    return found


def unchunked(rest: bytes) -> tuple[bytes, bytes]:
    """A body and the bytes after it."""
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
        if length == 0:
            return body, rest


def judge(raw: Raw, case: Case) -> Judged:
    """Send a case and an honest request after it."""
    name = f"honest-{next(_numbers)}"
    before = len(raw.logged_lines())
    answers = split(raw.exchange(case.raw + honest(name)))
    lines = settled_lines(raw, before, len(answers or ()))
    passed_on = sum(1 for line in lines if line["upstream"])
    refused = len(lines) - passed_on
    if answers is None:
        return Judged([], False, False, passed_on, refused)
    mine = [index for index, (_, body) in enumerate(answers) if name.encode() in body]
    answered = mine == [len(answers) - 1]
    statuses = [status for status, _ in answers]
    if answered:
        answered = statuses.pop() == 404
    is_clear = (answered or not mine) and all(
        b"honest-" not in body or name.encode() in body for _, body in answers
    )
    return Judged(statuses, answered, is_clear, passed_on, refused)


def settled_lines(raw: Raw, before: int, at_least: int) -> list[dict[str, object]]:
    """The lines that nginx logged since: one for each of this many answers, if they come.

    nginx logs when a request ends, which may be long after its answer, because it lingers after a
    refusal.
    """
    marker = f"mark-{next(_numbers)}"
    raw.ask(marker)
    deadline = time.monotonic() + WITHIN_S
    while True:
        lines = raw.logged_lines()[before:]
        others = [line for line in lines if line["path"] != f"/v0/topics/{marker}"]
        left_s = deadline - time.monotonic()
        if len(others) < len(lines) and (len(others) >= at_least or left_s < WITHIN_S - LINGERS_S):
            return others
        assert left_s > 0
        time.sleep(0.005)


@contextlib.contextmanager
def running(nginx_path: str, folder: Path) -> Iterator[tuple[Server, Raw]]:
    """A server with low limits, and the nginx before it."""
    server = Server(
        folder / "server",
        {"TOPICS_MAX_BODY_BYTES": "65536", "TOPICS_ALLOWED_HOSTS": "h,other,localhost"},
    )
    server.start()
    raw = Raw(folder / "nginx", lasting_port(), lasting_port())
    raw.raw_port = lasting_port()
    try:
        port = urlsplit(server.api.url).port
        assert port is not None
        raw.start(nginx_path, port)
        yield server, raw
        server.stop()
    finally:
        raw.stop()
        if server.process is not None:
            server.process.kill()
            server.process.wait()
