"""The outgoing frames of one connection: in order, one send at a time.

The ASGI `send` is run by hand as far as it goes: to its end, unless the socket's buffer is full.
Only then there is a task, which waits for room. Nothing here knows of topics. Used by `fanout`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Final, Protocol

from topics_server.engine.subscribe.subscription import Event
from topics_server.http.sockets import Socket
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import log
from topics_server.values.json_cache import JsonCache

Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]

# What a send raises when its connection is closed.
_GONE: Final = (OSError, RuntimeError)


class Dialect(Protocol):
    """How events become bytes and ASGI messages on one kind of connection."""

    @property
    def is_joined(self) -> bool:
        """Whether several frames may leave in one message."""
        ...

    def render(self, event: Event, cache: JsonCache) -> bytes:
        """The frame of an event, the same for all connections of the kind."""
        ...

    def message(self, payload: bytes) -> dict[str, Any]:
        """The ASGI message that carries `payload`; an empty one is only sent if `is_joined`."""
        ...

    def wire(self, payload: bytes) -> bytes:
        """What goes over the wire for that message, the same on every connection of the kind."""
        ...

    def last(self, code: int) -> dict[str, Any]:
        """The ASGI message that ends the connection; `code` is a WebSocket's close code."""
        ...

    def heartbeat(self, now_ms: int) -> bytes | None:
        """What is sent when nothing else was for a while, if anything."""
        ...

    def too_slow(self) -> bytes:
        """The last frame of a consumer that did not read."""
        ...

    def failed(self, code: int, message: str) -> bytes:
        """The last frame of a stream that cannot go on; `code` is like HTTP's."""
        ...


class SendQueue:
    """Frames of one connection on their way out.

    `on_room(full_ms)` is called when a send that had to wait is through, and how long it waited.
    """

    __slots__ = (
        "_buffered_bytes",
        "_dialect",
        "_frames",
        "_on_room",
        "_parked",
        "_parked_ms",
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
        self._parked: asyncio.Task[None] | None = None
        self._parked_ms = self._progress_ms = 0.0
        self._buffered_bytes = 0
        # When something was sent last, of the monotonic clock.
        self.sent_ms = monotonic_ms()

    @property
    def is_parked(self) -> bool:
        """Whether a send waits for room."""
        return self._parked is not None

    def writer(self, now: float) -> Callable[[bytes], object] | None:
        """What sends bytes that many are sent, as they are; None if that cannot be now.

        `now`: of the monotonic clock, ms. It is taken for sent: to be used at once.
        """
        if self._frames or self._parked is not None:
            return None
        writer = self._socket.writer()
        if writer is not None:
            self.sent_ms = now
        return writer

    def write(self, wire: bytes, now: float) -> bool:
        """Send such bytes; False if that cannot be now."""
        writer = self.writer(now)
        if writer is None:
            return False
        writer(wire)
        return True

    def claim(self, let_go: Callable[[], None]) -> Callable[[bytes], object] | None:
        """What sends such bytes without being asked each time, until `let_go` is called.

        None if there is no such thing, or nothing could be sent now.
        """
        if self._frames or self._parked is not None:
            return None
        return self._socket.claim(let_go)

    def put(self, frames: Iterable[bytes]) -> None:
        """Have frames leave with the next flush."""
        self._frames.extend(frames)

    def flush(self) -> None:
        """Send what there is, as far as it goes without waiting."""
        frames = self._frames
        while frames and self._parked is None:
            if self._dialect.is_joined:
                payload = frames[0] if len(frames) == 1 else b"".join(frames)
                frames.clear()
            else:
                payload = frames.popleft()
            self.drive(self._dialect.message(payload))

    def has_room(self) -> bool:
        """Whether the socket takes more; if not, an empty send waits for that."""
        if self._parked is None and self._socket.is_full and self._dialect.is_joined:
            self.drive(self._dialect.message(b""))
        return self._parked is None

    async def flushed(self) -> None:
        """Return when nothing waits for the socket."""
        while self._parked is not None:
            await asyncio.wait((self._parked,))

    def stalled_ms(self, now: float) -> float:
        """How long the socket has taken nothing at all, as seen from look to look."""
        assert self._parked is not None
        buffered = self._socket.buffered_bytes()
        if buffered < self._buffered_bytes:
            self._progress_ms = now
        self._buffered_bytes = buffered
        return now - self._progress_ms

    def drive(self, message: dict[str, Any]) -> None:
        """Send a message as far as it goes without waiting; a task does the rest, if any."""
        sending = self._send(message)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            self.sent_ms = monotonic_ms()
        except _GONE as error:
            # Nobody is there any more; whoever owns the connection hears of it, too.
            log.debug("a stream's socket is gone: %r", error)
            self._frames.clear()
        else:
            self._parked_ms = self._progress_ms = monotonic_ms()
            self._buffered_bytes = self._socket.buffered_bytes()
            rest = self._finish(sending, waits_for)
            self._parked = asyncio.get_running_loop().create_task(rest)

    async def _finish(self, sending: Coroutine[Any, Any, None], waits_for: object) -> None:
        """The rest of a parked send; then go on."""
        try:
            await _Resumed(sending, waits_for)
        except _GONE as error:
            log.debug("a stream's socket went away while it was full: %r", error)
            self._frames.clear()
        self._parked = None
        self.sent_ms = monotonic_ms()
        full_ms = self.sent_ms - self._parked_ms
        # Which may find it full again, and count anew.
        self.flush()
        self._on_room(full_ms)

    # --- the end ------------------------------------------------------------------------------

    def drop(self) -> bool:
        """Forget what was not handed over, and who was told; whether a send was under way."""
        self._frames.clear()
        # It refers to who refers to us; the collector never looks at what is old (see `server`).
        self._on_room = _nobody
        self._socket.release()
        parked, self._parked = self._parked, None
        if parked is not None:
            parked.cancel()
        return parked is not None

    def close(self, last: bytes, code: int) -> None:
        """Send a last frame, if any, and the end, whether or not the socket is full."""
        self._socket.let_through()
        if last:
            self.drive(self._dialect.message(last))
        self.drive(self._dialect.last(code))

    def close_within(self, seconds: float) -> None:
        """Close the connection once all is sent, in `seconds` in any case."""
        self._socket.close_within(seconds)

    def abort(self) -> None:
        """Hang up at once."""
        self._socket.abort()


def _nobody(_full_ms: float) -> None:
    """Whom an outbox tells that was dropped."""


class _Resumed:
    """A coroutine that was run by hand up to where it waits, awaited from there."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        try:
            while True:
                yield waits_for
                waits_for = self._coroutine.send(None)
        except StopIteration:
            return
        finally:
            self._coroutine.close()
