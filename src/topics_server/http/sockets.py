"""The connection calls that a stream needs beyond ASGI `send`.

It passes the same bytes directly to the transports of a thousand sockets, reads how much waits in
the write buffer, sends a last frame although the buffer is full, and closes the connection. Our own
connection is found through its `send`, a bound method. Under another server, or behind a host's
middleware, which must not be bypassed, there is a `ForeignSend`: then every call here has no
effect, and a task awaits each send. Used by `api/watch/send_queue`, `api/front_door`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

# Where a connection of ours says in a scope that it is one: `scope["extensions"]`.
EXTENSION: Final = "topics"


def is_own_send(scope: MutableMapping[str, Any], send: Any) -> bool:
    """Whether `send` is that of a connection of ours, and nothing stands in between."""
    transport = (scope.get("extensions") or {}).get(EXTENSION)
    owner = getattr(send, "__self__", None)
    return transport is not None and getattr(owner, "transport", None) is transport


class ForeignSend:
    """The `send` of another server. Only tasks await it.

    `end` makes `until_left` return: the stream is over, whatever its server says.
    """

    __slots__ = ("_ended", "_send")

    def __init__(self, send: Callable[[Any], Awaitable[None]]) -> None:
        self._send = send
        self._ended = asyncio.Event()

    async def __call__(self, message: Any) -> None:
        """Send a message, as ASGI has it."""
        await self._send(message)

    def end(self) -> None:
        """There will be no more."""
        self._ended.set()

    async def ended(self) -> None:
        """Return when there will be no more."""
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


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Socket:
    """The connection of one response or WebSocket."""

    __slots__ = ("_flow", "_protocol", "_transport", "_writable", "_write", "is_foreign")

    def __init__(self, send: Any) -> None:
        # Each send is a task's: whether it waits, only that task knows.
        self.is_foreign = isinstance(send, ForeignSend)
        self._protocol: Any = getattr(send, "__self__", None)
        self._transport: Any = getattr(self._protocol, "transport", None)
        # The one of an HTTP response, the other of a WebSocket.
        self._flow: Any = getattr(self._protocol, "flow", None)
        self._writable: Any = getattr(self._protocol, "writable", None)
        # The writing function, once the response has begun and its head is sent.
        self._write: Callable[[bytes], object] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the next send would wait; a WebSocket reports that itself.

        For another server's connection this is unknown.
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
        """The writing function; kept once the response has begun, as that is final."""
        protocol, transport = self._protocol, self._transport
        if not (protocol.handshake_complete if self._flow is None else protocol.is_chunked):
            return None
        # A transport of ours may hold a head back, which goes first.
        past = getattr(transport, "past", None)
        self._write = transport.write if past is None else past()
        return self._write or transport.write

    def claim(self, let_go: Callable[[], None]) -> Callable[[bytes], object] | None:
        """A writer of raw bytes, valid until `let_go` is called.

        `let_go` is called once, when the socket is full or gone, before any other reaction. None if
        nothing can be written now, or if the connection would not call it.
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
        """Hand over bytes as they go over the wire; False if they have to go through `send`."""
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
        """Accept all further bytes although the buffer is full: they are the last ones."""
        if self._flow is not None:
            self._flow.resume_writing()
        if self._writable is not None:
            self._writable.set()

    def close_within(self, seconds: float) -> None:
        """Close once everything is sent, in `seconds` in any case."""
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    @property
    def is_kept(self) -> bool:
        """Whether the connection is there for more behind this response."""
        return bool(getattr(self._protocol, "keep_alive", True))

    def end_with_connection(self) -> None:
        """End the body of a response by closing its connection: HTTP/1.0 has no chunks.

        To be asked for before the response begins.
        """
        if hasattr(self._protocol, "end_with_connection"):
            self._protocol.end_with_connection()

    def abort(self) -> None:
        """Hang up at once."""
        if self._transport is not None:
            self._transport.abort()
