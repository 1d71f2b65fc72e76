"""One request that an ASGI application answers.

`receive` passes the body to the application, `send` takes the answer. An answer of known length is
sent in one piece, and a body that arrived in one piece is passed on without a copy.
`http/connection` makes an exchange for each request that it does not answer directly;
`http/sockets` finds the exchange through its bound method `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from topics_server.http.exchange.flow_control import Flow
from topics_server.http.exchange.joined_writes import COPIED_BYTES_MAX, JoinedWrites
from topics_server.http.exchange.response_head import Header, head_of, whole_lines
from topics_server.runtime.metrics import log
from topics_server.values.errors import TopicsError

Message = MutableMapping[str, Any]
Application = Callable[[Any, Any, Any], Awaitable[None]]


class ExchangeOwner(Protocol):
    """The connection of an exchange."""

    transport: JoinedWrites
    flow: Flow
    tasks: set[asyncio.Task[None]]

    @property
    def default_headers(self) -> list[Header]:
        """The server's own headers."""
        ...

    def on_response_complete(self) -> None:
        """The answer is sent."""
        ...

    def error_bytes(self, error: TopicsError | None) -> bytes:
        """The bytes of the error that ends the connection. None: the application failed."""
        ...


class Exchange:
    """One request and its answer, in ASGI's form."""

    __slots__ = (
        "_connection",
        "_head",
        "_is_woken",
        "_left",
        "_waking",
        "body",
        "disconnected",
        "flow",
        "is_chunked",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
        "transport",
        "waits_for_continue",
    )

    def __init__(
        self,
        connection: ExchangeOwner,
        scope: MutableMapping[str, Any],
        *,
        keep_alive: bool,
        waits_for_continue: bool,
    ) -> None:
        self._connection = connection
        self.transport = connection.transport
        self.flow = connection.flow
        self.scope = scope
        self.keep_alive = keep_alive
        self.waits_for_continue = waits_for_continue
        self.body: bytes | bytearray = b""
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False
        self.is_chunked = False
        # Bytes of the answer's body that are still to come; None: the body ends with the
        # connection.
        self._left: int | None = 0
        # The head of an answer of known length, until its body is sent.
        self._head: bytes | None = None
        # Whether `receive` has something new to return, and the event that wakes it.
        self._is_woken = False
        self._waking: asyncio.Event | None = None

    async def run(self, app: Application) -> None:
        """Run the application. An error of it is logged, and answered if no answer has begun."""
        try:
            await app(self.scope, self.receive, self.send)
            if not (self.response_complete or self.disconnected):
                log.error("the application returned without the end of its answer")
        except Exception as error:
            log.error("defect in the application", exc_info=error)
        finally:
            if not (self.response_complete or self.disconnected):
                self._give_up()

    def _give_up(self) -> None:
        is_whole = not self.response_started or self._head is not None
        self._head = None
        self.response_started = True
        if is_whole and not self.transport.is_closing():
            self.transport.write(self._connection.error_bytes(None))
            self.response_complete = True
            self.wake()
        self.transport.close()
        if is_whole:
            self._connection.on_response_complete()

    def wake(self) -> None:
        """Wake a waiting `receive`."""
        self._is_woken = True
        if self._waking is not None:
            self._waking.set()

    def disconnect(self) -> None:
        """The client is gone, or its further bytes are ignored."""
        self.disconnected = True
        self.wake()

    # --- the request ------------------------------------------------------------------------

    async def receive(self) -> Message:
        """The next part of the body, then the client's disconnect."""
        if self.waits_for_continue and not self.transport.is_closing():
            self.waits_for_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not (self.disconnected or self.response_complete):
            self.flow.resume_reading()
            if not self._is_woken:
                self._waking = asyncio.Event()
                await self._waking.wait()
            self._is_woken = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = self.body, b""
        return {"type": "http.request", "body": bytes(body), "more_body": self.more_body}

    # --- the answer -------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Send a part of the answer. Returns once the buffer has room."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if self.response_complete:
            raise RuntimeError(f"{kind!r} was sent behind the end of an answer")
        wanted = "http.response.body" if self.response_started else "http.response.start"
        if kind != wanted:
            raise RuntimeError(f"{kind!r} was sent, where {wanted!r} has to be sent")
        if self.response_started:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            self._start(message["status"], list(message.get("headers", ())))

    def _start(self, status: int, headers: list[Header]) -> None:
        length: int | None = None
        is_chunked = is_closed = False
        for name, value in headers:
            name = name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                is_chunked = value.lower() == b"chunked"
            elif name == b"connection" and b"close" in value.lower():
                is_closed = True
        if is_closed:
            self.keep_alive = False
        fields = [*self._connection.default_headers, *headers]
        # `api/front_door` puts the length last, so that the lines before it can be cached.
        is_sized = length is not None and headers[-1][0] == b"content-length"
        if not (self.keep_alive or is_closed):
            fields.append((b"connection", b"close"))
        is_bodiless = self.scope["method"] == "HEAD" or status in (204, 304)
        if length is None and not is_chunked and not is_bodiless and self._left is not None:
            is_chunked = True
            fields.append((b"transfer-encoding", b"chunked"))
        if is_sized and self.keep_alive:
            head = head_of(status, fields)
        else:
            head = whole_lines(status, fields) + b"\r\n"
        self.response_started = True
        self.waits_for_continue = False
        self.is_chunked = is_chunked
        if self._left is not None:
            self._left = length or 0
        if is_sized and not is_bodiless:
            self._head = head
        else:
            self.transport.write(head)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        head, self._head = self._head, None
        if self.scope["method"] == "HEAD":
            body = b""
            self._left = 0
        elif not self.is_chunked and self._left is not None:
            if len(body) > self._left:
                raise RuntimeError("the answer's body is longer than its content-length")
            self._left -= len(body)
        if not more and self._left:
            raise RuntimeError("the answer's body is shorter than its content-length")
        if self.is_chunked:
            end = b"" if more else b"0\r\n\r\n"
            body = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        if head is None:
            if body:
                self.transport.write(body)
        elif more or len(self._connection.tasks) < 2 or len(body) > COPIED_BYTES_MAX:
            self.transport.write_joined(head, body)
        else:
            self.transport.write_soon(head, body)
        if not more:
            self.response_complete = True
            self.wake()
            if not self.keep_alive:
                self.transport.close()
            self._connection.on_response_complete()

    def end_with_connection(self) -> None:
        """End the body by closing the connection: HTTP/1.0 has no chunks.

        Call this before the answer begins.
        """
        self.keep_alive = False
        self._left = None
