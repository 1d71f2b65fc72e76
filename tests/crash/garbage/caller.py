"""A client of `child`: requests, requests in the background, hang-ups, WebSockets, and garbage."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

_WITHIN_S: Final = 20
# The server begins a wait within this time.
_BEGUN_S: Final = 0.02
_RESET: Final = struct.pack("ii", 1, 0)


class Caller:
    """Calls one server."""

    def __init__(self, port: int, garbage_port: int) -> None:
        self.port = port
        self._garbage_port = garbage_port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WITHIN_S)
        self._pool = ThreadPoolExecutor(8)

    def close(self) -> None:
        """End all connections."""
        self._connection.close()
        self._pool.shutdown()

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status and the decoded body of an answer."""
        return _answer_of(self._connection, method, path, body, headers or {})

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """A `POST`; `_` in the name of a header is `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.call("POST", path, body, named)

    @contextlib.contextmanager
    def waiting(self, method: str, path: str, body: Any = None) -> Iterator[Future[Any]]:
        """Meanwhile a request waits for its answer."""
        yielded = self._pool.submit(self._alone, method, path, body)
        time.sleep(_BEGUN_S)
        yield yielded
        yielded.result()

    def _alone(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_WITHIN_S)
        with contextlib.closing(connection):
            return _answer_of(connection, method, path, body, {})

    def hang_up(self, method: str, path: str, body: Any = None, *, is_reset: bool = False) -> None:
        """Send a request, and close the connection while it waits or streams."""
        sent = b"" if body is None else json.dumps(body).encode()
        kind = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(sent)
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n".encode()
        self.send_raw(head + (b"" if body is None else kind) + b"\r\n" + sent, is_reset=is_reset)

    def send_raw(self, sent: bytes, *, is_reset: bool = False) -> None:
        """Send bytes and close the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_WITHIN_S) as connection:
            connection.sendall(sent)
            time.sleep(_BEGUN_S)
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def follow(self, path: str, meanwhile: Any) -> None:
        """Read an event stream, call `meanwhile`, and hang up."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_WITHIN_S) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            connection.recv(4096)
            meanwhile()
            time.sleep(_BEGUN_S)

    def say(self, *messages: Any, is_reset: bool = False) -> None:
        """Send messages on a WebSocket, read one answer, and hang up."""
        with connect(f"ws://127.0.0.1:{self.port}/v0/ws", proxy=None) as peer:
            with contextlib.suppress(TimeoutError, ConnectionClosed):
                for message in messages:
                    is_bare = isinstance(message, (str, bytes))
                    peer.send(message if is_bare else json.dumps(message))
                if messages:
                    peer.recv(1)
            if is_reset:
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                peer.socket.close()

    def garbage(self) -> dict[str, int]:
        """What only a collection of the server frees since the last call, by kind."""
        found = b""
        with socket.create_connection(("127.0.0.1", self._garbage_port)) as connection:
            while part := connection.recv(1 << 16):
                found += part
        counts: dict[str, int] = json.loads(found)
        return counts


def _answer_of(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any,
    headers: Mapping[str, str],
) -> tuple[int, Any]:
    kind = {} if body is None else {"content-type": "application/json"}
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body)
    connection.request(method, path, sent, kind | dict(headers))
    answer = connection.getresponse()
    content = answer.read()
    with contextlib.suppress(ValueError):
        return answer.status, json.loads(content)
    return answer.status, content
