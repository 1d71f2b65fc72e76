"""The connection classes of HTTP and WebSocket over uvicorn's.

uvicorn reports the end of a connection only to its newest request: a stream with another request
sent behind it would wait for ever. It also leaves objects that refer to themselves, which the
garbage collector never examines once they are old (see `server`). Every reference cycle is broken
here, so that a closed connection takes no memory. Used by `server`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, InvalidHeader
from websockets.frames import Frame
from websockets.http11 import Request

from topics_server.api.application import Application
from topics_server.api.context import ServerState
from topics_server.api.direct import DirectHttp
from topics_server.api.websocket import frames as ws_frames
from topics_server.auth.authorize import authorized_socket
from topics_server.http.content_encoding import JSON_TYPE
from topics_server.http.error_responses import envelope, status_of
from topics_server.http.read_scheduler import FEW, ReadScheduler
from topics_server.http.request_ids import request_id
from topics_server.http.sockets import EXTENSION
from topics_server.http.upload_budget import Upload
from topics_server.http.upload_turns import LARGE_BYTES
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.errors import TopicsError, invalid
from topics_server.values.limits import KIB, LINGER_BYTES_MAX, LINGER_MS_MAX, UPLOAD_STEP_BYTES

# The close code for "try again later" (IANA's registry of RFC 6455).
TRY_AGAIN_LATER: Final = 1013


class HttpConnection(DirectHttp):
    """A connection until its end, or until it becomes a WebSocket."""

    _answered: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over; the parser refers to us."""
        super().handle_websocket_upgrade()
        self.parser = None  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered; forget those that never will be."""
        super().connection_lost(exc)
        cycle, self._answered = self._answered, None
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]


# So many bytes are read at a time, more in the middle of a long frame, until so much time is over.
_TAKEN_BYTES_MIN: Final = 512
_TAKEN_BYTES_MAX: Final = 4 * KIB
_TAKEN_MS: Final = 1.0


class SocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket.

    `_incoming` counts the bytes of the message being received, `_whole` those of large messages
    that wait in the queue or are in the application's hands.
    """

    _queued: deque[int]
    _incoming: Upload | None = None
    _whole: Upload | None = None
    _taken_bytes = 0
    # It is read in turn among large uploads; it waits for that now.
    _is_taking_turns = _waits_turn = False
    # Of what was received something is held for later turns; nothing is read meanwhile.
    _is_behind = False
    # See `read_scheduler.Reader`; a socket's is not looked at.
    url = b""
    # The connection was refused: what it sends is dropped, so that it reads why.
    _is_refused = False
    _swallowed_bytes = 0
    _swallowed_at = 0.0

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._queued = deque()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        state = self._state()
        if len(data) >= LARGE_BYTES and state is not None:
            self._wait_turn(state)
        read_scheduler = self._read_scheduler()
        if read_scheduler is not None and read_scheduler.holds(self):
            read_scheduler.add(self, data)
            self.transport.pause_reading()
        else:
            self.take(data)

    def take(self, data: bytes) -> None:
        """Read what was received, for about a millisecond; the rest in later turns.

        Each frame costs some microseconds, a ping its answer, however short it is.
        """
        state, read_scheduler = self._state(), self._read_scheduler()
        until_ms = monotonic_ms() + _TAKEN_MS
        at = 0
        while at < len(data):
            if self._is_refused:
                self._swallow(len(data) - at)
                break
            if at and read_scheduler is not None and monotonic_ms() > until_ms:
                read_scheduler.put_back(self, data[at:])
                break
            unread = len(self.conn.reader.buffer)
            end = at + max(_TAKEN_BYTES_MIN, min(unread, _TAKEN_BYTES_MAX))
            super().data_received(data[at:end])
            at = end
        if state is None:
            return
        if not self._is_refused:
            self._count(state)
        was_behind = self._is_behind
        self._is_behind = read_scheduler is not None and read_scheduler.holds(self)
        if self.transport.is_closing():
            return
        if self._is_behind:
            self.transport.pause_reading()
        elif was_behind and not (self.read_paused or self._waits_turn):
            self.transport.resume_reading()

    def eof_received(self) -> None:
        """The client sends no more: what is held of it is its last."""
        read_scheduler = self._read_scheduler()
        while read_scheduler is not None and read_scheduler.holds(self):
            read_scheduler.release(self)
        super().eof_received()

    def _read_scheduler(self) -> ReadScheduler | None:
        state = self._state()
        return None if state is None else state.read_scheduler

    def _state(self) -> ServerState | None:
        app: Any = self.app
        return app.door.state if isinstance(app, Application) else None

    def _begin_upload(self, state: ServerState) -> Upload:
        scope = self.scope
        try:
            caller = authorized_socket(state.keys, dict(scope["headers"]), scope["subprotocols"])
        except TopicsError:
            return state.uploads.begin(self, None)
        return state.uploads.begin(self, caller.key)

    def _count(self, state: ServerState) -> None:
        """Count what there is of a message that is not whole; that may have it refused."""
        size = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        if not size or not self.handshake_initiated or self.transport.is_closing():
            if self._incoming is not None:
                state.uploads.end(self._incoming)
                self._incoming = None
            self._leave_turns(state)
            return
        if self._incoming is None:
            self._incoming = self._begin_upload(state)
        state.uploads.set_bytes(self._incoming, size)

    def _wait_turn(self, state: ServerState) -> None:
        """Be read in turn among large uploads, where there are many connections."""
        if len(self.connections) > FEW and not self.transport.is_closing():
            self._is_taking_turns = True
            state.upload_turns.wait(self)

    @property
    def upload_key(self) -> object:
        """See `upload_turns.Reader`."""
        return None if self._incoming is None else self._incoming.key

    def begin_turn(self) -> None:
        """See `upload_turns.Reader`."""
        self._waits_turn = False
        if not (self.read_paused or self._is_behind or self.transport.is_closing()):
            self.transport.resume_reading()

    def end_turn(self) -> None:
        """See `upload_turns.Reader`."""
        self._waits_turn = True
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def _leave_turns(self, state: ServerState) -> None:
        if self._is_taking_turns:
            self._is_taking_turns = False
            state.upload_turns.leave(self)

    def handle_cont(self, event: Frame) -> None:
        """Add a fragment. Fragments share one buffer: empty ones take no memory."""
        whole: Any = self.frames[0]
        if not isinstance(whole, bytearray):
            whole = bytearray(whole)
        whole += event.data
        self.frames = [whole]
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Hand a message over that is whole."""
        size = len(self.frames[0])
        super().send_receive_event_to_app()
        state = self._state()
        if state is None:
            return
        if self._incoming is not None:
            state.uploads.end(self._incoming)
            self._incoming = None
        if self.close_sent:
            return
        self._queued.append(size)
        if size >= UPLOAD_STEP_BYTES:
            if self._whole is None:
                self._whole = self._begin_upload(state)
                state.uploads.finish(self._whole)
            state.uploads.set_bytes(self._whole, self._whole.bytes + size)

    async def run_asgi(self) -> None:
        """Serve the socket; its scope says that the connection is ours."""
        extensions: Any = self.scope["extensions"]
        extensions[EXTENSION] = self.transport
        await super().run_asgi()

    async def receive(self) -> Any:
        """Receive the next message; the application no longer holds the one before."""
        state = self._state()
        if self._taken_bytes >= UPLOAD_STEP_BYTES and self._whole is not None:
            assert state is not None
            state.uploads.set_bytes(self._whole, self._whole.bytes - self._taken_bytes)
        self._taken_bytes = 0
        message: Any = await super().receive()
        if message["type"] == "websocket.receive" and self._queued:
            self._taken_bytes = self._queued.popleft()
        return message

    def refuse_upload(self, error: TopicsError) -> None:
        """Answer with `error`, close, and go on receiving for a while so that the client reads it.

        What it was sending is forgotten.
        """
        self._is_refused = True
        self._incoming = None
        self.frames = []
        del self.conn.reader.buffer[:]
        if self.close_sent or not self.handshake_complete or self.transport.is_closing():
            self.transport.abort()
            return
        self.conn.send_text(ws_frames.error(None, error))
        self.conn.send_close(TRY_AGAIN_LATER, "try again later")
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.write_eof()
        self.close_sent = True
        closing = {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": ""}
        self.queue.put_nowait(closing)  # type: ignore[arg-type]
        self._swallowed_at = self.loop.time()
        self._linger(self.loop.time() + LINGER_MS_MAX / 1000)
        if self.read_paused:
            self.read_paused = False
            if not (self._waits_turn or self._is_behind):
                self.transport.resume_reading()

    def _linger(self, until: float) -> None:
        """Wait until the client sends no more, or for long enough; then close."""
        state = self._state()
        assert state is not None, "only a server with a budget refuses"
        idle_s = state.timeouts.limits.linger_s
        now = self.loop.time()
        if now >= until or (now - self._swallowed_at >= idle_s and not self._waits_turn):
            self.transport.abort()
        else:
            # Without such a timer uvicorn closes at once.
            self.close_timer = self.loop.call_later(idle_s, self._linger, until)

    def _swallow(self, count: int) -> None:
        self._swallowed_bytes += count
        self._swallowed_at = self.loop.time()
        if self._swallowed_bytes > LINGER_BYTES_MAX:
            self.transport.abort()

    def handle_connect(self, event: Request) -> None:
        """Refuse an invalid handshake with the envelope; the library would answer plain text."""
        try:
            self.conn.process_request(event)
        except InvalidHandshake as error:
            # Not what its text says: that repeats headers, of which one may hold a key.
            name = error.name if isinstance(error, InvalidHeader) else None
            self._refuse(invalid("this is not a WebSocket handshake (RFC 6455)", name))
        else:
            super().handle_connect(event)

    def _refuse(self, error: TopicsError) -> None:
        body = envelope(error)
        response = self.conn.reject(status_of(error), "")
        response.body = body
        response.headers = Headers(
            {
                "Connection": "close",
                "Content-Type": JSON_TYPE.decode(),
                "Content-Length": str(len(body)),
                "Date": response.headers["Date"],
                "X-Request-Id": request_id({}).decode("ascii"),
                # What it would take (RFC 6455, 4.4).
                "Sec-WebSocket-Version": "13",
            }
        )
        self.response = response
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        self.conn.send_response(response)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the parser, a generator that refers to what holds it."""
        read_scheduler = self._read_scheduler()
        if read_scheduler is not None:
            read_scheduler.forget(self)
        super().connection_lost(exc)
        self.conn.parser.close()
        state = self._state()
        if state is not None:
            self._leave_turns(state)
            for upload in (self._incoming, self._whole):
                if upload is not None:
                    state.uploads.end(upload)
        self._incoming = self._whole = None
