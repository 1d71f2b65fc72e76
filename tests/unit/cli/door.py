"""A server that sends the next answer of a list to any request, and keeps the requests."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Said(NamedTuple):
    """An answer; `is_cut`: the connection ends before the body is complete."""

    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes = b""
    is_cut: bool = False


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Door:
    """The remaining answers, and the requests so far."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[Said | None] = []  # None: no answer at all
        self.asked: list[Asked] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    door: Door

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.door.asked.append(Asked(self.command, self.path, headers, body))
        said = self.door.answers.pop(0)
        if said is None:
            return
        self.send_response(said.status)
        for name, value in said.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(said.body) + said.is_cut))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said.body)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _serve


@contextlib.contextmanager
def opened() -> Iterator[Door]:
    """The server while it runs."""
    door = Door()
    handler = type("Handler", (_Handler,), {"door": door})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        door.url = f"http://127.0.0.1:{server.server_port}"
        yield door
        server.shutdown()
        thread.join()
