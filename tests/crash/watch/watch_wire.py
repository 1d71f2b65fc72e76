"""The bytes between a watcher and the server: HTTP, Server-Sent Events and WebSocket over asyncio.

It uses plain streams, because two hundred clients of a full library would themselves be the load.
Each stream yields the same `Frame`s with their SSE names. A slow reader gets a small receive
buffer, so that the server notices it. Used by the watch tests of this directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from tests.crash.kills.ledger import Json

_OPEN_S: Final = 20.0
_ANSWER_S: Final = 30.0
_OP_EVENTS: Final = {"caught_up": "caught-up", "topic_deleted": "topic-deleted"}


class Broken(Exception):
    """The connection ended, or was never made."""


class Unreached(Broken):
    """The connection was never made: nothing was sent."""


@dataclass(slots=True, frozen=True)
class Frame:
    """One frame of a stream. `id` is absent in control frames and on a WebSocket."""

    event: str
    data: Json
    id: str | None = None


class Frames(Protocol):
    """A stream as its watcher sees it."""

    async def read(self) -> list[Frame]:
        """The next frames, none for a heartbeat; raises `Broken` at the end."""
        ...

    def abort(self) -> None:
        """Disconnect without a close."""
        ...


async def open_socket(
    port: int, receive_bytes: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the server, optionally with a receive buffer of this size."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        async with asyncio.timeout(_OPEN_S):
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            return await asyncio.open_connection(
                sock=sock, limit=65_536 if receive_bytes is None else receive_bytes
            )
    except (OSError, TimeoutError) as error:
        sock.close()
        raise Unreached(str(error)) from None


def request_bytes(
    method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """An HTTP/1.1 request."""
    raw = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + raw


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and lower-cased headers of a response."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (OSError, EOFError, asyncio.LimitOverrunError) as error:
        raise Broken(f"no answer: {error!r}") from None
    status, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if line)
    return int(status.split()[1]), {name.lower(): value.strip() for name, value in pairs}


class Http:
    """One keep-alive connection that is opened on first use."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Json]:
        """Status and decoded body; `Broken` if the outcome is unknown."""
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the server closes idle connections
        if self._streams is None:
            self._streams = await open_socket(self._port)
        reader, writer = self._streams
        try:
            async with asyncio.timeout(_ANSWER_S):
                writer.write(request_bytes(method, path, body))
                status, headers = await read_head(reader)
                raw = await reader.readexactly(int(headers["content-length"]))
        except TimeoutError:
            raise AssertionError(f"{method} {path}: no answer in {_ANSWER_S} s") from None
        except (OSError, EOFError, Broken) as error:
            self.close()
            raise Broken(str(error)) from None
        if headers.get("connection", "").lower() == "close":
            self.close()
        answer: Json = msgspec.json.decode(raw)
        return status, answer

    def close(self) -> None:
        """Close it; the next `ask` opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Sse:
    """`GET /v0/watch/:wid`; `status` and `refusal` tell whether it is a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._chunked = b""
        self._text = b""
        self._is_over = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.refusal: Json = {}

    @classmethod
    async def dial(cls, port: int, receive_bytes: int | None = None) -> Sse:
        """Connect without a request, so a refused connection has changed nothing."""
        return cls(*await open_socket(port, receive_bytes))

    async def ask(self, path: str, last_id: str | None = None) -> None:
        """Request the stream and read the head of the answer."""
        headers = {"Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        try:
            async with asyncio.timeout(_ANSWER_S):
                self._writer.write(request_bytes("GET", path, headers=headers))
                self.status, self.headers = await read_head(self._reader)
                if self.status != 200:
                    length = int(self.headers["content-length"])
                    self.refusal = msgspec.json.decode(await self._reader.readexactly(length))
        except TimeoutError:
            raise AssertionError(f"GET {path}: no answer in {_ANSWER_S} s") from None
        except (OSError, EOFError) as error:
            raise Broken(str(error)) from None

    async def read(self) -> list[Frame]:
        """The frames of the received bytes, at least one piece of them; `Broken` at the end."""
        if self._is_over:
            raise Broken("ended")
        try:
            piece = await self._reader.read(65_536)
        except OSError as error:
            raise Broken(str(error)) from None
        if not piece:
            raise Broken("cut")
        self._chunked += piece
        self._unchunk()
        blocks = self._text.split(b"\n\n")
        self._text = blocks.pop()
        return [frame for block in blocks if (frame := _parse(block)) is not None]

    def _unchunk(self) -> None:
        start = 0
        parts: list[bytes] = []
        while (line := self._chunked.find(b"\r\n", start)) >= 0:
            size = int(self._chunked[start:line], 16)
            end = line + 2 + size + 2
            if end > len(self._chunked):
                break
            self._is_over = size == 0
            parts.append(self._chunked[line + 2 : end - 2])
            start = end
        self._text += b"".join(parts)
        self._chunked = self._chunked[start:]

    def abort(self) -> None:
        """Reset the connection."""
        self._writer.transport.abort()


def _parse(block: bytes) -> Frame | None:
    event, frame_id = "message", None
    data: list[bytes] = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            event = value.decode()
        elif name == b"id":
            frame_id = value.decode()
        elif name == b"data":
            data.append(value)
        elif name not in (b"", b"retry"):
            raise AssertionError(f"not an SSE line: {line[:200]!r}")
    if not data:
        return None
    return Frame(event, msgspec.json.decode(b"\n".join(data)), frame_id)


class Socket:
    """`GET /v0/ws`."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, port: int) -> Socket:
        """Open the socket; no topic is subscribed yet."""
        try:
            return cls(
                await connect(
                    f"ws://127.0.0.1:{port}/v0/ws",
                    compression=None,
                    max_size=None,
                    max_queue=4,
                    open_timeout=_OPEN_S,
                    ping_interval=None,
                    proxy=None,
                )
            )
        except (OSError, EOFError, TimeoutError, WebSocketException) as error:
            raise Broken(str(error)) from None

    async def send(self, command: Json) -> None:
        """Send one command."""
        try:
            await self._connection.send(json.dumps(command))
        except (ConnectionClosed, OSError) as error:
            raise Broken(str(error)) from None

    async def read(self) -> list[Frame]:
        """Read one frame, as a list."""
        try:
            data: Json = msgspec.json.decode(await self._connection.recv())
        except (ConnectionClosed, OSError) as error:
            raise Broken(str(error)) from None
        op: str = data.pop("op")
        return [Frame(_OP_EVENTS.get(op, op), data)]

    def abort(self) -> None:
        """Reset the connection."""
        with contextlib.suppress(OSError):
            self._connection.transport.abort()
