"""Clients of the server's streams that keep every byte; every wait is bounded.

`SseParser` follows the event stream rules of the WHATWG HTML standard (three line endings, one
space after the colon, comments, `retry`, an event only with data). `SseStream` reads one over a
plain socket. `WsClient` is a WebSocket through the `websockets` library, `RawWs` one with hand-made
frames, for frames that no library would send. Called by `subscriptions` and the tests of §7. Times
are seconds, as the operating system's.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from tests.contract.driver import Api, Json, RawResponse
from tests.contract.watch import frames

DEADLINE_S: Final = 15.0
_END_OF_HEAD: Final = b"\r\n\r\n"
# A CR at the very end may be half of a CRLF: wait for the next byte.
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!\Z)")


class StreamEnded(Exception):
    """The server ended the stream; no further event will come."""


class NothingCame(Exception):
    """No event came within the deadline."""


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event; `id` is None when it had no id line, `raw` are its bytes."""

    name: str
    data: str
    id: str | None
    raw: bytes


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment line without its colon, and when it was read (monotonic seconds)."""

    text: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Retry:
    """A reconnection time."""

    ms: int


class SseParser:
    """Bytes of an event stream in, events, comments and retries out."""

    def __init__(self) -> None:
        self._rest = b""
        self._looked_at = 0
        self._at_start = True
        self._block = b""
        self._name = ""
        self._data: list[str] = []
        self._id: str | None = None

    def feed(self, piece: bytes) -> list[Event | Comment | Retry]:
        """The items that these bytes complete."""
        self._rest += piece
        if self._at_start and len(self._rest) >= 3:
            self._rest = self._rest.removeprefix(b"\xef\xbb\xbf")
            self._looked_at = 0
            self._at_start = False
        found: list[Event | Comment | Retry] = []
        done = 0
        for match in _LINE_END.finditer(self._rest, self._looked_at):
            self._block += self._rest[done : match.end()]
            self._line(self._rest[done : match.start()].decode("utf-8"), found)
            done = match.end()
        self._rest = self._rest[done:]
        self._looked_at = len(self._rest) - self._rest.endswith(b"\r")
        return found

    def _line(self, line: str, found: list[Event | Comment | Retry]) -> None:
        if not line:
            self._dispatch(found)
        elif line.startswith(":"):
            found.append(Comment(line[1:], time.monotonic()))
        else:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._name = value
            elif name == "data":
                self._data.append(value)
            elif name == "id" and "\0" not in value:
                self._id = value
            elif name == "retry" and value.isascii() and value.isdigit():
                found.append(Retry(int(value)))

    def _dispatch(self, found: list[Event | Comment | Retry]) -> None:
        if self._data:
            data = "\n".join(self._data)
            found.append(Event(self._name or "message", data, self._id, self._block))
        self._name, self._data, self._id, self._block = "", [], None, b""


def connected(url: str, receive_buffer_bytes: int = 0) -> socket.socket:
    """A TCP connection to the server; with a small receive buffer the server notices a slow
    reader.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if receive_buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.settimeout(DEADLINE_S)
        sock.connect((parts.hostname, parts.port))
    except BaseException:
        sock.close()
        raise
    return sock


def reset(sock: socket.socket) -> None:
    """Disconnect with a RST instead of a FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class SseStream:
    """A GET and its answer: `head`, `status`, `headers`; then its events one by one.

    `body` is the received content without the chunk framing. After the end of the stream,
    `is_whole` tells whether its last chunk came; otherwise the connection broke.
    """

    def __init__(
        self,
        url: str,
        target: str,
        headers: Sequence[str] = ("Accept: text/event-stream",),
        *,
        receive_buffer_bytes: int = 0,
    ) -> None:
        self.body = bytearray()
        self.comments: list[Comment] = []
        self.retries: list[Retry] = []
        self.is_whole = False
        self._parser = SseParser()
        self._events: list[Event] = []
        self._framed = b""
        self._chunk_left = 0
        self._is_over = False
        self._sock = connected(url, receive_buffer_bytes)
        try:
            lines = [f"GET {target} HTTP/1.1", "Host: localhost", *headers]
            self._sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            self._read_head()
        except BaseException:
            self._sock.close()
            raise

    def _read_head(self) -> None:
        received = b""
        deadline = time.monotonic() + DEADLINE_S
        while _END_OF_HEAD not in received:
            piece = self._recv(deadline)
            assert piece, f"no whole head: {received[:300]!r}"
            received += piece
        self.head, _, rest = received.partition(_END_OF_HEAD)
        first, *lines = self.head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        self.header_lines = lines
        pairs = (line.split(":", 1) for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, value in pairs}
        self._is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        self._take(rest)

    def _recv(self, deadline: float) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NothingCame
        self._sock.settimeout(left)
        try:
            return self._sock.recv(262_144)
        except TimeoutError:
            raise NothingCame from None
        except ConnectionResetError:
            return b""

    def _take(self, piece: bytes) -> None:
        content = self._unchunked(piece) if self._is_chunked else piece
        self.body += content
        if self.status != 200:
            return
        for item in self._parser.feed(content):
            if isinstance(item, Event):
                self.check_event(item.name, item.data)
                self._events.append(item)
            elif isinstance(item, Comment):
                self.comments.append(item)
            else:
                self.retries.append(item)

    @staticmethod
    def check_event(name: str, data: str) -> None:
        """Fail for an event that is not described."""
        frames.check_event(name, data)

    def _unchunked(self, piece: bytes) -> bytes:
        self._framed += piece
        content: list[bytes] = []
        at = 0
        while not self.is_whole:
            if self._chunk_left:
                # Two more bytes than the content: the line end after it.
                part = self._framed[at : at + self._chunk_left]
                if not part:
                    break
                at += len(part)
                content.append(part[: max(0, self._chunk_left - 2)])
                self._chunk_left -= len(part)
                continue
            end = self._framed.find(b"\r\n", at)
            if end < 0:
                break
            size = int(self._framed[at:end].split(b";")[0], 16)
            at = end + 2
            if size == 0:
                self.is_whole = True
            else:
                self._chunk_left = size + 2
        self._framed = self._framed[at:]
        return b"".join(content)

    def _read(self, deadline: float) -> None:
        # The body may have come completely with the head.
        if self._is_over or self.is_whole:
            raise StreamEnded
        piece = self._recv(deadline)
        if piece:
            self._take(piece)
        self._is_over = not piece or self.is_whole

    def event(self, within_s: float = DEADLINE_S) -> Event:
        """The next event; comments and retries are stored."""
        deadline = time.monotonic() + within_s
        while not self._events:
            self._read(deadline)
        return self._events.pop(0)

    def comment(self, number: int, within_s: float = DEADLINE_S) -> Comment:
        """The comment of this number, from 0; events are stored for later."""
        deadline = time.monotonic() + within_s
        while len(self.comments) <= number:
            self._read(deadline)
        return self.comments[number]

    def wait(self, for_s: float) -> None:
        """Read for this time."""
        deadline = time.monotonic() + for_s
        try:
            while True:
                self._read(deadline)
        except (NothingCame, StreamEnded):
            pass

    def rest(self, within_s: float = DEADLINE_S) -> list[Event]:
        """Every event until the server ends the stream, which it must do in time."""
        deadline = time.monotonic() + within_s
        try:
            while True:
                self._read(deadline)
        except StreamEnded:
            left, self._events = self._events, []
            return left

    def refusal(self) -> RawResponse:
        """The whole answer, if the server refused the stream."""
        length = int(self.headers["content-length"])
        deadline = time.monotonic() + DEADLINE_S
        while len(self.body) < length:
            self._read(deadline)
        return RawResponse(self.status, self.headers, bytes(self.body))

    def close(self) -> None:
        """Disconnect."""
        self._sock.close()

    def vanish(self) -> None:
        """Disconnect with a RST."""
        reset(self._sock)


def ws_url(url: str) -> str:
    """The WebSocket address of the server at this URL."""
    return "ws" + url.removeprefix("http") + "/v0/ws"


class WsClient:
    """One WebSocket that speaks JSON: commands go out, frames come in with their exact text."""

    def __init__(
        self,
        url: str,
        *,
        origin: str | None = None,
        headers: Iterable[tuple[str, str]] = (),
        receive_buffer_bytes: int = 0,
    ) -> None:
        self._entered = contextlib.ExitStack()
        sock = connected(url, receive_buffer_bytes)
        try:
            opening = connect(
                ws_url(url),
                sock=sock,
                origin=None if origin is None else Origin(origin),
                additional_headers=list(headers),
                compression=None,
                proxy=None,
                open_timeout=DEADLINE_S,
                close_timeout=DEADLINE_S,
                ping_interval=None,
                max_size=None,
                max_queue=4 if receive_buffer_bytes else 64,
            )
            self.connection: ClientConnection = self._entered.enter_context(opening)
        except BaseException:
            sock.close()
            raise

    def send(self, **command: Any) -> None:
        """Send one command."""
        self.connection.send(json.dumps(command))

    def send_text(self, text: str) -> None:
        """Send this text unchanged."""
        self.connection.send(text)

    def text(self, within_s: float = DEADLINE_S) -> bytes:
        """The next frame's bytes."""
        try:
            message = self.connection.recv(timeout=max(0.0, within_s), decode=False)
        except TimeoutError:
            raise NothingCame from None
        except ConnectionClosed:
            raise StreamEnded from None
        assert isinstance(message, bytes)
        frames.check_message(message)
        return message

    def frame(self, within_s: float = DEADLINE_S) -> Json:
        """The next frame, decoded; it must be an object that names its kind."""
        decoded = json.loads(self.text(within_s))
        assert isinstance(decoded, dict), decoded
        assert isinstance(decoded["op"], str), decoded
        return decoded

    def frame_of(self, *ops: str, within_s: float = DEADLINE_S) -> Json:
        """The next frame of one of these kinds; others before it are dropped."""
        deadline = time.monotonic() + within_s
        while True:
            frame = self.frame(deadline - time.monotonic())
            if frame["op"] in ops:
                return frame

    def ask(self, **command: Any) -> Json:
        """Send a command with a `request_id` and return the frame that echoes it."""
        command.setdefault("request_id", base64.b32encode(os.urandom(5)).decode())
        self.send(**command)
        return self.answer(command["request_id"])

    def answer(self, request_id: str, within_s: float = DEADLINE_S) -> Json:
        """The frame that echoes `request_id`; others before it are dropped."""
        deadline = time.monotonic() + within_s
        while True:
            frame = self.frame(deadline - time.monotonic())
            if frame.get("request_id") == request_id:
                return frame

    def closed_with(self, within_s: float = DEADLINE_S) -> int | None:
        """Read until the server closes; the code of its close frame, None if there was none."""
        deadline = time.monotonic() + within_s
        try:
            while True:
                self.text(deadline - time.monotonic())
        except StreamEnded:
            return self.connection.close_code if self.connection.close_code != 1006 else None

    def close(self) -> None:
        """Close by the protocol."""
        self._entered.close()


TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


@dataclass(slots=True)
class RawWs:
    """A WebSocket by hand: any opcode, any bits, any bytes."""

    sock: socket.socket
    received: bytes = field(default=b"")

    @staticmethod
    def open(url: str, headers: Sequence[str] = ()) -> RawWs:
        """Connect and shake hands; the server must agree."""
        raw = RawWs(connected(url))
        try:
            head = raw.shake_hands(headers)
            assert head.startswith(b"HTTP/1.1 101 "), head
        except BaseException:
            raw.sock.close()
            raise
        return raw

    def shake_hands(self, headers: Sequence[str] = ()) -> bytes:
        """Send the upgrade request; return the head of the answer."""
        lines = [
            "GET /v0/ws HTTP/1.1",
            "Host: localhost",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: " + base64.b64encode(os.urandom(16)).decode(),
            *headers,
        ]
        self.sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        while _END_OF_HEAD not in self.received:
            piece = self.sock.recv(65536)
            assert piece, self.received
            self.received += piece
        head, _, self.received = self.received.partition(_END_OF_HEAD)
        return head

    def send(
        self, opcode: int, payload: bytes, *, first_bits: int = 0x80, is_masked: bool = True
    ) -> None:
        """Send one frame; `first_bits` are FIN and the reserved bits."""
        size = len(payload)
        mask_bit = 0x80 if is_masked else 0
        head = bytes([first_bits | opcode])
        if size < 126:
            head += bytes([mask_bit | size])
        elif size < 65536:
            head += bytes([mask_bit | 126]) + struct.pack("!H", size)
        else:
            head += bytes([mask_bit | 127]) + struct.pack("!Q", size)
        # A mask of zeros is allowed: the payload stays unchanged.
        self.sock.sendall(head + (b"\0\0\0\0" if is_masked else b"") + payload)

    def _exactly(self, count: int) -> bytes:
        while len(self.received) < count:
            piece = self.sock.recv(65536)
            if not piece:
                raise StreamEnded
            self.received += piece
        taken, self.received = self.received[:count], self.received[count:]
        return taken

    def frame(self, within_s: float = DEADLINE_S) -> tuple[int, bytes]:
        """The opcode and payload of the next frame."""
        self.sock.settimeout(within_s)
        try:
            first, second = self._exactly(2)
            size = second & 0x7F
            if size == 126:
                size = struct.unpack("!H", self._exactly(2))[0]
            elif size == 127:
                size = struct.unpack("!Q", self._exactly(8))[0]
            return first & 0x0F, self._exactly(size)
        except TimeoutError:
            raise NothingCame from None
        except ConnectionResetError:
            raise StreamEnded from None

    def closed_with(self, within_s: float = DEADLINE_S) -> int | None:
        """Read until the server closes; the code of its close frame, None if there was none."""
        deadline = time.monotonic() + within_s
        try:
            while True:
                opcode, payload = self.frame(max(0.01, deadline - time.monotonic()))
                if opcode == CLOSE:
                    return int(struct.unpack("!H", payload[:2])[0]) if payload else 1005
        except StreamEnded:
            return None

    def close(self) -> None:
        """Disconnect without a close frame."""
        self.sock.close()


def gauges(api: Api) -> tuple[int, int]:
    """Open streams and watch sessions, by the server's metrics."""
    text = api.http.get("/v0/metrics").text
    found = dict(re.findall(r"^(topics_sse_connections|topics_watch_sessions) (\d+)", text, re.M))
    return int(found["topics_sse_connections"]), int(found["topics_watch_sessions"])


def more_than(api: Api, before: tuple[int, int], *, streams: int = 0, sessions: int = 0) -> bool:
    """Whether there are this many more streams than `before`, and at most this many more sessions:
    sessions of earlier tests may have expired meanwhile.
    """
    now = gauges(api)
    return now[0] == before[0] + streams and now[1] <= before[1] + sessions


def nothing_left(api: Api, before: tuple[int, int]) -> None:
    """Check that there are as many streams as before, and no more sessions."""
    assert more_than(api, before), (gauges(api), before)
