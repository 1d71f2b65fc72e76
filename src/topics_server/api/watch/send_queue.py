"""The outgoing frames of one connection: in order, one send at a time.

On a connection of this server, the queue steps through the ASGI `send` without a task. The send
ends at once, unless the socket's buffer is full; only then a task waits for room. A `ForeignSend`
is always awaited by a task (`ForeignSendQueue`). This module does not depend on topics. Used by
`broadcast`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Final, Protocol

from topics_server.engine.subscribe.subscription import Event
from topics_server.http.sockets import ForeignSend, Socket
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import log
from topics_server.values.json_cache import JsonCache

Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]

# Errors of a send on a closed connection.
_GONE: Final = (OSError, RuntimeError)
# If a send through another server takes longer than this, its client does not read.
_STUCK_MS: Final = 1000.0


class Dialect(Protocol):
    """Turns events into bytes and ASGI messages for one kind of connection."""

    @property
    def is_joined(self) -> bool:
        """Whether one message may hold several frames."""
        ...

    def render(self, event: Event, cache: JsonCache) -> bytes:
        """The frame of an event, the same for all connections of the kind."""
        ...

    def message(self, payload: bytes) -> dict[str, Any]:
        """The ASGI message that carries `payload`. An empty payload is sent only if `is_joined`."""
        ...

    def wire(self, payload: bytes) -> bytes:
        """The bytes on the wire for that message, the same on every connection of this kind."""
        ...

    def last(self, code: int) -> dict[str, Any]:
        """The ASGI message that ends the connection; `code` is a WebSocket's close code."""
        ...

    def position(self, topic: str, seq: int, head_seq: int) -> bytes:
        """The frame that reports to a filtered reader up to which seq its topic was examined."""
        ...

    def heartbeat(self, now_ms: int) -> bytes | None:
        """The frame to send after a time without other frames; None if this kind has no
        heartbeat.
        """
        ...

    def too_slow(self) -> bytes:
        """The last frame of a consumer that did not read."""
        ...

    def failed(self, code: int, message: str) -> bytes:
        """The last frame of a stream that cannot continue; `code` is like HTTP's."""
        ...


class SendQueue:
    """The outgoing frames of one connection.

    `on_room(full_ms)` is called when a send that had to wait is done; `full_ms` is how long it
    waited.
    """

    __slots__ = (
        "_buffered_bytes",
        "_dialect",
        "_frames",
        "_on_room",
        "_blocked",
        "_blocked_ms",
        "_progress_ms",
        "_send",
        "_socket",
        "sent_ms",
    )

    def __init__(self, send: Send, dialect: Dialect, on_room: Callable[[float], None]) -> None:
        self._send = send
        self._dialect = dialect
        self._on_room = on_room
        self._socket = Socket(send)
        self._frames: deque[bytes] = deque()
        self._blocked: asyncio.Task[None] | None = None
        self._blocked_ms = self._progress_ms = 0.0
        self._buffered_bytes = 0
        # The time of the last send, by the monotonic clock.
        self.sent_ms = monotonic_ms()

    @property
    def is_blocked(self) -> bool:
        """Whether a send waits for room."""
        return self._blocked is not None

    def writer(self, now: float) -> Callable[[bytes], object] | None:
        """The function that sends shared bytes on this connection; None if it cannot send now.

        `now`: the monotonic clock, ms. Call the function at once: `sent_ms` is set to `now`
        already.
        """
        if self._frames or self._blocked is not None:
            return None
        writer = self._socket.writer()
        if writer is not None:
            self.sent_ms = now
        return writer

    def write(self, wire: bytes, now: float) -> bool:
        """Send shared bytes. Returns False if the connection cannot send now."""
        writer = self.writer(now)
        if writer is None:
            return False
        writer(wire)
        return True

    def claim(self, let_go: Callable[[], None]) -> Callable[[bytes], object] | None:
        """A function that sends shared bytes. It needs no further checks until `let_go` is called.

        None if the connection has no such function, or cannot send now.
        """
        if self._frames or self._blocked is not None:
            return None
        return self._socket.claim(let_go)

    def put(self, frames: Iterable[bytes]) -> None:
        """Queue frames for the next flush."""
        self._frames.extend(frames)

    def flush(self) -> None:
        """Send the queued frames until one has to wait."""
        frames = self._frames
        while frames and self._blocked is None:
            if self._dialect.is_joined:
                payload = frames[0] if len(frames) == 1 else b"".join(frames)
                frames.clear()
            else:
                payload = frames.popleft()
            self.drive(self._dialect.message(payload))

    def has_room(self) -> bool:
        """Whether the socket takes more.

        If it does not, start an empty send, which waits for room.
        """
        if self._blocked is None and self._socket.is_full and self._dialect.is_joined:
            self.drive(self._dialect.message(b""))
        return self._blocked is None

    async def flushed(self) -> None:
        """Return when nothing waits for the socket."""
        while self._blocked is not None:
            await asyncio.wait((self._blocked,))

    def stalled_ms(self, now: float) -> float:
        """How long the socket has taken no bytes, measured at each call."""
        assert self._blocked is not None
        buffered = self._socket.buffered_bytes()
        if buffered < self._buffered_bytes:
            self._progress_ms = now
        self._buffered_bytes = buffered
        return now - self._progress_ms

    def drive(self, message: dict[str, Any]) -> None:
        """Send a message. If the send has to wait, a task finishes it."""
        sending = self._send(message)
        try:
            awaited = sending.send(None)
        except StopIteration:
            self.sent_ms = monotonic_ms()
        except _GONE as error:
            # The client is gone. The owner of the connection is notified of that as well.
            log.debug("a stream's socket is gone: %r", error)
            self._frames.clear()
        else:
            self._blocked_ms = self._progress_ms = monotonic_ms()
            self._buffered_bytes = self._socket.buffered_bytes()
            rest = self._finish(sending, awaited)
            self._blocked = asyncio.get_running_loop().create_task(rest)

    @property
    def is_stuck(self) -> bool:
        """Whether a last frame would have to wait for room."""
        return self._blocked is not None

    async def _finish(self, sending: Coroutine[Any, Any, None], awaited: object) -> None:
        """Finish a blocked send, then send the queued frames."""
        try:
            await _Resumed(sending, awaited)
        except _GONE as error:
            log.debug("a stream's socket went away while it was full: %r", error)
            self._frames.clear()
        self._blocked = None
        self.sent_ms = monotonic_ms()
        full_ms = self.sent_ms - self._blocked_ms
        # The flush may find the socket full again, and start a new wait.
        self.flush()
        self._on_room(full_ms)

    # --- the end ------------------------------------------------------------------------------

    def drop(self) -> bool:
        """Drop unsent frames and the callback; returns whether a send was under way."""
        self._frames.clear()
        # Break the reference cycle: the garbage collector never examines old objects (see
        # `server`).
        self._on_room = _nobody
        self._socket.release()
        blocked, self._blocked = self._blocked, None
        if blocked is not None:
            blocked.cancel()
        return blocked is not None

    def close(self, last: bytes, code: int) -> None:
        """Send a last frame, if any, and the end of the response, even if the socket is full."""
        self._socket.let_through()
        if last:
            self.drive(self._dialect.message(last))
        self.drive(self._dialect.last(code))

    def close_within(self, seconds: float) -> None:
        """Close the connection once everything is sent, and after `seconds` at the latest."""
        self._socket.close_within(seconds)

    def abort(self) -> None:
        """Hang up at once."""
        self._socket.abort()


class ForeignSendQueue(SendQueue):
    """The frames of a connection of another ASGI server.

    A task awaits each send; the next frame waits for it.
    """

    __slots__ = ("_closing", "_foreign", "_rest")

    def __init__(
        self, send: ForeignSend, dialect: Dialect, on_room: Callable[[float], None]
    ) -> None:
        super().__init__(send, dialect, on_room)
        self._foreign = send
        # The send that was under way when the queue was dropped.
        self._rest: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def has_room(self) -> bool:
        """Whether no send is under way."""
        return self._blocked is None

    @property
    def is_stuck(self) -> bool:
        """Whether a send has taken so long that a last frame could not be sent."""
        return self._blocked is not None and monotonic_ms() - self._blocked_ms > _STUCK_MS

    def drive(self, message: dict[str, Any]) -> None:
        """Start a task that sends a message."""
        self._blocked_ms = self._progress_ms = monotonic_ms()
        self._blocked = asyncio.get_running_loop().create_task(self._deliver(message))

    async def _deliver(self, message: dict[str, Any]) -> None:
        is_sent = await self._sent(message)
        if not is_sent:
            self._frames.clear()
        self._blocked = None
        self.sent_ms = monotonic_ms()
        full_ms = self.sent_ms - self._blocked_ms
        self.flush()
        self._on_room(full_ms)

    async def _sent(self, message: dict[str, Any]) -> bool:
        """Send a message. Returns whether the client is still connected."""
        try:
            await self._send(message)
        except Exception as error:
            # A server or a middleware may raise any error when its client is gone.
            log.debug("a stream's connection is gone: %r", error)
            self._foreign.end()
            return False
        return True

    def drop(self) -> bool:
        """Drop the callback; a send under way continues, unless it is stuck."""
        is_stuck = self.is_stuck
        self._on_room = _nobody
        sending, self._blocked = self._blocked, None
        if sending is not None and is_stuck:
            sending.cancel()
            self._frames.clear()
        else:
            self._rest = sending
        return is_stuck

    def close(self, last: bytes, code: int) -> None:
        """Send the queued frames, a last frame, if any, and the end of the response, in this
        order.
        """
        messages = [self._dialect.message(frame) for frame in self._frames]
        self._frames.clear()
        if last:
            messages.append(self._dialect.message(last))
        messages.append(self._dialect.last(code))
        self._closing = asyncio.get_running_loop().create_task(self._close(messages))

    async def _close(self, messages: Iterable[dict[str, Any]]) -> None:
        if self._rest is not None:
            await asyncio.wait((self._rest,))
        for message in messages:
            if not await self._sent(message):
                return
        self._foreign.end()

    def close_within(self, seconds: float) -> None:
        """Close the connection after `seconds`, even if frames are unsent."""
        asyncio.get_running_loop().call_later(seconds, self._foreign.end)

    def abort(self) -> None:
        """Close the connection. Its server gets a response without an end."""
        self._foreign.end()


def send_queue_of(send: Send, dialect: Dialect, on_room: Callable[[float], None]) -> SendQueue:
    """The queue for a connection of this server or of another."""
    if isinstance(send, ForeignSend):
        return ForeignSendQueue(send, dialect, on_room)
    return SendQueue(send, dialect, on_room)


def _nobody(_full_ms: float) -> None:
    """The callback of a dropped send queue."""


class _Resumed:
    """Awaits the rest of a coroutine that was stepped to its first wait."""

    __slots__ = ("_coroutine", "_awaited")

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: object) -> None:
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        awaited = self._awaited
        try:
            while True:
                yield awaited
                awaited = self._coroutine.send(None)
        except StopIteration:
            return
        finally:
            self._coroutine.close()
