"""A server with just enough of the API for `topics bench`, which refuses what a case says.

`opened` runs it in a thread. It knows the topics that were made and not removed.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

PATH = re.compile(r"/v0/topics/([^/?]+)/?([a-z]*)")


class Refusal(NamedTuple):
    """An answer without success."""

    status: int
    code: str
    detail: Mapping[str, Any] = {}


# The refusal of a request by method, call ("" for the topic itself) and its number from 1 on.
Judge = Callable[[str, str, int], Refusal | None]


def nothing_refused(_method: str, _call: str, _number: int) -> Refusal | None:
    return None


class Pretender(http.server.ThreadingHTTPServer):
    """The server: its topics, and how it answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.judge: Judge = nothing_refused
        self.is_chunked = False
        self.closes = False  # every connection, after each answer
        self.answers_body: bytes | None = None  # to every request but PUT and DELETE
        self.topics: set[str] = set()
        self.makes_refused_topics = False  # a refused PUT makes its topic all the same
        self.appended = threading.Semaphore(0)  # records that no live stream has sent yet
        self.asked: dict[tuple[str, str], int] = {}
        self.connections = 0
        self.lock = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: in two, the client's kernel delays its confirmation
    disable_nagle_algorithm = True
    server: Pretender

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        found = PATH.match(self.path)
        assert found is not None, self.path
        topic, call = found.groups()
        with self.server.lock:
            number = self.server.asked[self.command, call] = (
                self.server.asked.get((self.command, call), 0) + 1
            )
        refusal = self.server.judge(self.command, call, number)
        if refusal is not None:
            if self.command == "PUT" and self.server.makes_refused_topics:
                self.server.topics.add(topic)
            error = {"code": refusal.code, "message": "m", "detail": refusal.detail}
            self._say(refusal.status, json.dumps({"error": error}).encode())
        elif self.command == "PUT":
            self.server.topics.add(topic)
            self._say(201, json.dumps({"topic": topic, "created": True}).encode())
        elif self.command == "DELETE":
            self.server.topics.discard(topic)
            self._say(200, b'{"deleted":true}')
        elif call == "live":
            self._follow()
        else:
            self.server.appended.release()
            self._say(
                200, self.server.answers_body or self._answer(call, json.loads(body or b"{}"))
            )

    def _follow(self) -> None:
        """A live stream, until its reader has gone."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"event: caught-up\ndata: {}\n\n")
        self.close_connection = True
        with contextlib.suppress(OSError):
            while True:
                self.wfile.flush()
                self.server.appended.acquire()
                self.wfile.write(b"event: record\ndata: {}\n\n")

    def _answer(self, call: str, asked: dict[str, Any]) -> bytes:
        if call == "diff":
            return json.dumps({"records": [{"$seq": n} for n in range(asked["limit"])]}).encode()
        if call == "claim":
            leases = [{"$seq": n, "lease_id": f"l{n}"} for n in range(asked["max"])]
            return json.dumps({"claimed": leases}).encode()
        if call == "ack":
            return json.dumps({"acked": len(asked["seqs"])}).encode()
        return b'{"first_seq":1,"last_seq":1}'

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if self.server.closes:
            self.send_header("Connection", "close")
        if self.server.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
            half = len(body) // 2
            pieces = [body[:half], body[half:]]
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)
            body += b"0\r\n\r\n"
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _serve


@contextlib.contextmanager
def opened() -> Iterator[Pretender]:
    """The server while it runs."""
    with Pretender() as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
