"""A server of streams that sends exactly what a case needs, and keeps the requests.

`Script` answers `POST /v0/watch` and the stream's GET from lists. Used by the tests of `streams`,
`tail` and `watch`, through the fixtures of `conftest`.
"""

from __future__ import annotations

import base64
import http.server
import json
import threading
from typing import Any

RETRY = b"retry: 5\n\n"


def id_of(**seqs: int) -> str:
    """A composite id in the contract's form."""
    text = json.dumps(seqs, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def frame(event: str, id: str, **body: object) -> bytes:
    """The bytes of one frame; no id line for an empty id."""
    head = f"id: {id}\n" if id else ""
    return f"{head}event: {event}\ndata: {json.dumps(body)}\n\n".encode()


def page(first: int, last: int, topic: str = "t", **ids: int) -> bytes:
    """A record frame with the seqs from first to last."""
    records = [{"$seq": seq, "$ts": 0, "data": seq} for seq in range(first, last + 1)]
    place = {"from_seq": first - 1, "to_seq": last, "head_seq": 99}
    ids = ids or {topic: last}
    return frame("record", id_of(**ids), topic=topic, records=records, **place)


def session(wid: str, **topics: int) -> tuple[int, Any]:
    """The answer that opens a session."""
    places = {name: {"from_seq": seq, "head_seq": 99} for name, seq in topics.items()}
    return 200, {"wid": wid, "stream_url": f"/v0/watch/{wid}", "topics": places}


def refusal(status: int, code: str = "c") -> tuple[int, Any]:
    """An error envelope."""
    return status, {"error": {"code": code, "message": "m"}}


class Script:
    """The server's answers in order, and the received requests."""

    def __init__(self) -> None:
        self.posts: list[tuple[int, Any]] = []
        self.streams: list[list[bytes] | tuple[int, Any]] = []
        self.asked: list[tuple[str, str, Any]] = []  # method, path, body or Last-Event-ID
        self.tokens: set[str | None] = set()
        self.held = threading.Event()  # until then a stream that ends with b"" stays open


class Handler(http.server.BaseHTTPRequestHandler):
    """Plays the script; a stream ends with its connection."""

    protocol_version = "HTTP/1.1"

    @property
    def script(self) -> Script:
        found: Script = self.server.script  # type: ignore[attr-defined]
        return found

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.script.asked.append(("POST", self.path, body))
        self.script.tokens.add(self.headers["Authorization"])
        self._answer(*self.script.posts.pop(0))

    def do_GET(self) -> None:
        self.script.asked.append(("GET", self.path, self.headers["Last-Event-ID"]))
        self.script.tokens.add(self.headers["Authorization"])
        stream = self.script.streams.pop(0)
        if isinstance(stream, tuple):
            self._answer(*stream)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        for chunk in stream:
            self.wfile.write(chunk)
            if not chunk:
                self.script.held.wait(20)
        self.close_connection = True

    def _answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
