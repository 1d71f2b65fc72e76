"""The connection calls that a stream needs beyond ASGI `send`.

A stream writes the same bytes directly to the transports of a thousand sockets, reads the size of
the write buffer, sends a last frame although the buffer is full, and closes the connection.
`Socket` finds a connection of this server through its `send`, a bound method. Under another server,
or behind a host's middleware, which must not be bypassed, `send` is a `ForeignSend`: then every
call here has no effect, and a task awaits each send. Used by `api/watch/send_queue`,
`api/front_door`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

# The key in `scope["extensions"]` under which a connection of this server puts itself.
EXTENSION: Final = "topics"


def is_own_send(scope: MutableMapping[str, Any], send: Any) -> bool:
    """Whether `send` is the method of a connection of this server, without a middleware between."""
    transport = (scope.get("extensions") or {}).get(EXTENSION)
    owner = getattr(send, "__self__", None)
    return transport is not None and getattr(owner, "transport", None) is transport


class ForeignSend:
    """The `send` of another server. Only tasks await it.

    `end` makes `until_left` return, even if the server still reports the client as connected.
    """

    __slots__ = ("_ended", "_send")

    def __init__(self, send: Callable[[Any], Awaitable[None]]) -> None:
        self._send = send
        self._ended = asyncio.Event()

    async def __call__(self, message: Any) -> None:
        """Send an ASGI message."""
        await self._send(message)

    def end(self) -> None:
        """The stream sends no more messages."""
        self._ended.set()

    async def ended(self) -> None:
        """Return when `end` was called."""
        await self._ended.wait()


async def until_left(receive: Callable[[], Awaitable[Any]], send: Any) -> None:
    """Return when the client is gone or its stream is over; a body is ignored.

    Our own connection reports a stream's end as a disconnect, too.
    """
    if not isinstance(send, ForeignSend):
        await _disconnected(receive)
        return
    leaving = asyncio.ensure_future(_disconnected(receive))
    ending = asyncio.ensure_future(send.ended())
    try:
        await asyncio.wait((leaving, ending), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            leaving.result()
    finally:
        leaving.cancel()
        ending.cancel()
        # An error of `leaving` refers to this frame, so the frame must not refer to the task.
        del leaving


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Socket:
    """The connection of one response or WebSocket."""

    __slots__ = ("_flow", "_protocol", "_transport", "_writable", "_write", "is_foreign")

    def __init__(self, send: Any) -> None:
        # Each send is awaited by a task, which hides from this object whether the send waits.
        self.is_foreign = isinstance(send, ForeignSend)
        self._protocol: Any = getattr(send, "__self__", None)
        self._transport: Any = getattr(self._protocol, "transport", None)
        # `_flow` exists for an HTTP response, `_writable` for a WebSocket.
        self._flow: Any = getattr(self._protocol, "flow", None)
        self._writable: Any = getattr(self._protocol, "writable", None)
        # The writing function, once the response has begun and its head is sent.
        self._write: Callable[[bytes], object] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the next send would wait. False for a WebSocket, whose `send` waits by itself.

        True under another server, where the answer is unknown.
        """
        if self.is_foreign:
            return True
        return self._flow is not None and self._flow.write_paused

    def writer(self) -> Callable[[bytes], object] | None:
        """The function that writes raw bytes to the socket; None if the caller must use `send`.

        None while the socket is full, before the response has begun and after its end. Call the
        function at once.
        """
        protocol, flow = self._protocol, self._flow
        if flow is not None:
            if flow.write_paused or protocol.disconnected or protocol.response_complete:
                return None
        elif (
            self._writable is None
            or not self._writable.is_set()
            or protocol.close_sent
            or protocol.disconnected
        ):
            return None
        return self._write or self._first_writer()

    def _first_writer(self) -> Callable[[bytes], object] | None:
        """The function that writes; stored once the response has begun."""
        protocol, transport = self._protocol, self._transport
        if not (protocol.handshake_complete if self._flow is None else protocol.is_chunked):
            return None
        # `JoinedWrites` may hold a head back, which must be sent first.
        past = getattr(transport, "past", None)
        self._write = transport.write if past is None else past()
        return self._write or transport.write

    def claim(self, let_go: Callable[[], None]) -> Callable[[bytes], object] | None:
        """A function that writes raw bytes, valid until `let_go` is called.

        The connection calls `let_go` once, when the socket is full or gone, before anything else.
        None if nothing can be written now, or if the connection does not support `let_go`.
        """
        if self.writer() is None or self._write is None or not hasattr(self._flow, "let_go"):
            return None
        self._flow.let_go = let_go
        return self._write

    def release(self) -> None:
        """Stop calling `let_go`."""
        if hasattr(self._flow, "let_go"):
            self._flow.let_go = None

    def write(self, wire: bytes) -> bool:
        """Write bytes in their form on the wire. Returns False if the caller must use `send`."""
        writer = self.writer()
        if writer is None:
            return False
        writer(wire)
        return True

    def buffered_bytes(self) -> int:
        """Bytes handed over that the kernel has not taken yet."""
        transport = self._transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def let_through(self) -> None:
        """Accept all further bytes although the buffer is full; for the last bytes of a stream."""
        if self._flow is not None:
            self._flow.resume_writing()
        if self._writable is not None:
            self._writable.set()

    def close_within(self, seconds: float) -> None:
        """Close once everything is sent, after `seconds` at the latest."""
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    @property
    def is_kept(self) -> bool:
        """Whether the connection stays open after this response."""
        return bool(getattr(self._protocol, "keep_alive", True))

    def end_with_connection(self) -> None:
        """End the body of a response by closing its connection: HTTP/1.0 has no chunks.

        Call this before the response begins.
        """
        if hasattr(self._protocol, "end_with_connection"):
            self._protocol.end_with_connection()

    def abort(self) -> None:
        """Hang up at once."""
        if self._transport is not None:
            self._transport.abort()
