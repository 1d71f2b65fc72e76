"""One WebSocket connection over websockets' Sans-I/O protocol.

`http/connection` hands a connection over with its opening; uvicorn gets the class by its public
parameter `ws=`. The application uses ASGI: `receive` returns whole messages, one at a time, and the
connection stops reading while a message waits; `send` accepts, sends, closes or refuses. Received
bytes count in the upload budget and are read in turns among large uploads, like request bodies. An
invalid opening, and a message that the budget refuses, get the envelope as the answer.

A closed connection is in no reference cycle, because the garbage collector does not examine old
objects. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any, Final

from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, InvalidHeader, InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from topics_server.http.content_encoding import JSON_TYPE
from topics_server.http.error_responses import envelope, status_of
from topics_server.http.exchange.door import Door
from topics_server.http.exchange.flow_control import read_past
from topics_server.http.exchange.pings import PeerPings
from topics_server.http.exchange.scopes import ConnectionScope
from topics_server.http.read_scheduler import FEW
from topics_server.http.request_ids import request_id
from topics_server.http.upload_budget import Upload
from topics_server.http.upload_turns import LARGE_BYTES
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import log
from topics_server.values.errors import TopicsError, invalid
from topics_server.values.limits import KIB, LINGER_BYTES_MAX, LINGER_MS_MAX, UPLOAD_STEP_BYTES

# Close codes of RFC 6455 and of IANA's registry.
_GOING_AWAY: Final = 1012
_NOT_UTF8: Final = 1007
_FAILED: Final = 1011
TRY_AGAIN_LATER: Final = 1013
# How long the peer has to answer a close frame, seconds.
_CLOSE_S: Final = 10.0
# The least and the most bytes parsed in one step, and the time after which parsing pauses. A long
# frame is parsed in larger steps.
_TAKEN_BYTES_MIN: Final = 512
_TAKEN_BYTES_MAX: Final = 4 * KIB
_TAKEN_MS: Final = 1.0


class DisconnectedError(OSError):
    """The application sends to a client that is gone. ASGI requires an `OSError` here."""


class WebSocketConnection(asyncio.Protocol):
    """A WebSocket from its opening to its end.

    `_incoming` counts the bytes of the message being received. `_whole` counts those of large
    messages in the queue or with the application.
    """

    transport: Any
    scope: MutableMapping[str, Any]
    # See `read_scheduler.DeferredReader`; for a WebSocket it stays empty.
    url = b""
    handshake_complete = close_sent = disconnected = False
    _is_opened = False
    _incoming: Upload | None = None
    _whole: Upload | None = None
    _taken_bytes = 0
    # Whether reading is paused until the application takes a message.
    read_paused = False
    # Whether the connection is read in turns among large uploads; whether it waits for its turn.
    _takes_turns = _waits_turn = False
    # Whether received bytes are held for later turns; reading is paused meanwhile.
    _is_behind = False
    # Whether an upload was refused: received bytes are dropped, so that the client can read the
    # error.
    _is_refused = False
    _swallowed_bytes = 0
    _swallowed_at = 0.0
    # The answer that refuses the opening: its status, its header fields and its body so far.
    _refusal: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
    _close_timer: asyncio.TimerHandle | None = None
    _pings: PeerPings | None = None

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.config = config
        self.app = config.loaded_app
        self.app_state = app_state
        self.server_state = server_state
        self.loop = _loop or asyncio.get_running_loop()
        self.connections: set[Any] = server_state.connections
        self.tasks: set[asyncio.Task[None]] = server_state.tasks
        self.door: Door | None = getattr(self.app, "topics_door", None)
        self.conn = ServerProtocol(max_size=config.ws_max_size)
        self.writable = asyncio.Event()
        self.writable.set()
        self.queue: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        # Sizes of the messages in the queue.
        self._queued: deque[int] = deque()
        # The received part of an incomplete message.
        self.message: bytes | bytearray | None = None
        self._is_text = True

    # --- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self.connections.add(self)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up: end the parser, a generator that is part of a reference cycle."""
        self._stop_pings()
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None
        code = 1005 if self.handshake_complete else 1006
        self._tell({"type": "websocket.disconnect", "code": code})
        self.connections.discard(self)
        self.handshake_complete = self.disconnected = True
        self.writable.set()
        self.conn.parser.close()
        # An error of the parser refers to its frames, and they refer to `conn`.
        self.conn.parser_exc = None
        door = self.door
        if door is not None:
            if door.read_scheduler is not None:
                door.read_scheduler.forget(self)
            self._leave_turns(door)
            for upload in (self._incoming, self._whole):
                if upload is not None:
                    door.uploads.end(upload)
        self._incoming = self._whole = None
        if exc is None:
            self.transport.close()

    def shutdown(self) -> None:
        """The server is shutting down: close with 1012."""
        self._stop_pings()
        if not self.close_sent and self.handshake_complete:
            self._tell({"type": "websocket.disconnect", "code": _GOING_AWAY})
            self.conn.send_close(_GOING_AWAY)
            self._flush()
        elif not self.handshake_complete:
            self._fail_opening()
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """The socket takes bytes again."""
        self.writable.set()

    def _flush(self) -> None:
        """Send the bytes that the protocol has ready."""
        self.transport.write(b"".join(self.conn.data_to_send()))

    def _tell(self, message: MutableMapping[str, Any]) -> None:
        self.queue.put_nowait(message)

    # --- bytes in ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        door = self.door
        if door is not None and len(data) >= LARGE_BYTES and len(self.connections) > FEW:
            self._wait_turn(door)
        read_scheduler = None if door is None else door.read_scheduler
        if read_scheduler is not None and read_scheduler.holds(self):
            read_scheduler.add(self, data)
            self.transport.pause_reading()
        else:
            self.take(data)

    def take(self, data: bytes) -> None:
        """Parse the received bytes for about a millisecond, and hold the rest for later turns.

        Even the shortest frame costs some microseconds, and a ping also costs its answer.
        """
        door = self.door
        read_scheduler = None if door is None else door.read_scheduler
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
            self._parse(data[at:end])
            at = end
        if door is None:
            return
        if not self._is_refused:
            self._count(door)
        was_behind = self._is_behind
        self._is_behind = read_scheduler is not None and read_scheduler.holds(self)
        if self.transport.is_closing():
            return
        if self._is_behind:
            self.transport.pause_reading()
        elif was_behind:
            self._resume_reading()

    def eof_received(self) -> None:
        """The client sends no more bytes: parse the bytes that are held."""
        read_scheduler = None if self.door is None else self.door.read_scheduler
        while read_scheduler is not None and read_scheduler.holds(self):
            read_scheduler.release(self)

    def _resume_reading(self) -> None:
        """Resume reading, unless reading is paused for another reason."""
        if not (self.read_paused or self._waits_turn or self._is_behind):
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        self.conn.receive_data(data)
        if self.conn.parser_exc is not None:
            self._end_unreadable()
            return
        for event in self.conn.events_received():
            if isinstance(event, Request):
                self._open(event)
            elif isinstance(event, Frame):
                self._take_frame(event)

    def _take_frame(self, frame: Frame) -> None:
        opcode = frame.opcode
        if opcode is Opcode.TEXT or opcode is Opcode.BINARY:
            self._is_text = opcode is Opcode.TEXT
            self.message = bytes(frame.data)
        elif opcode is Opcode.CONT:
            # Fragments share one buffer, so that empty fragments take no memory.
            if not isinstance(self.message, bytearray):
                self.message = bytearray(self.message or b"")
            self.message += frame.data
        elif opcode is Opcode.PING:
            self._flush()
        elif opcode is Opcode.PONG:
            if self._pings is not None:
                self._pings.take_pong(bytes(frame.data))
        elif opcode is Opcode.CLOSE:
            self._take_close()
        if opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT) and frame.fin:
            self._take_message()

    def _take_message(self) -> None:
        """Queue a complete message for the application."""
        assert self.message is not None
        data, self.message = bytes(self.message), None
        size, door = len(data), self.door
        if not self.close_sent:
            message: MutableMapping[str, Any] = {"type": "websocket.receive", "bytes": data}
            if self._is_text:
                try:
                    message = {"type": "websocket.receive", "text": data.decode()}
                except UnicodeDecodeError:
                    self.conn.send_close(_NOT_UTF8)
                    self._end_unreadable()
                    return
            self._queued.append(size)
            self._tell(message)
            if not self.read_paused:
                self.read_paused = True
                self.transport.pause_reading()
        if door is None:
            return
        if self._incoming is not None:
            door.uploads.end(self._incoming)
            self._incoming = None
        if size >= UPLOAD_STEP_BYTES and not self.close_sent:
            if self._whole is None:
                self._whole = self._begin_upload(door)
                door.uploads.finish(self._whole)
            door.uploads.set_bytes(self._whole, self._whole.bytes + size)

    def _take_close(self) -> None:
        if self.close_sent:
            # This is the peer's answer to our close frame.
            if self._close_timer is not None:
                self._close_timer.cancel()
                self._close_timer = None
                self.transport.close()
        elif not self.transport.is_closing():
            closed = self.conn.close_rcvd
            assert closed is not None
            self._tell(
                {"type": "websocket.disconnect", "code": closed.code, "reason": closed.reason}
            )
            self._flush()
            self.transport.close()

    def _end_unreadable(self) -> None:
        """Close: the received bytes are no frame, or a frame that the protocol forbids."""
        closed = self.conn.close_sent
        assert closed is not None
        self._tell({"type": "websocket.disconnect", "code": closed.code, "reason": closed.reason})
        self._flush()
        self.close_sent = True
        self.transport.close()

    # --- the opening ------------------------------------------------------------------------

    def _open(self, opening: Request) -> None:
        """Pass the opening to the application, or refuse a request that is no handshake."""
        try:
            self.conn.process_request(opening)
        except InvalidHandshake as error:
            # Do not use the text of the error: it repeats headers, which may hold a key.
            name = error.name if isinstance(error, InvalidHeader) else None
            self._refuse_opening(invalid("this is not a WebSocket handshake (RFC 6455)", name))
            return
        self.response = self.conn.accept(opening)
        self._is_opened = True
        offered = ",".join(opening.headers.get_all("Sec-WebSocket-Protocol"))
        headers = [
            # websockets before 17 keeps bytes beyond ASCII as surrogates.
            (name.lower().encode("ascii"), value.encode("latin-1", "surrogateescape"))
            for name, value in opening.headers.raw_items()
        ]
        subprotocols = [token.strip() for token in offered.split(",") if token.strip()]
        scope = ConnectionScope(self.config, self.app_state, self.transport)
        self.scope = scope.websocket(opening.path, headers, subprotocols)
        self._tell({"type": "websocket.connect"})
        task = self.loop.create_task(self._run())
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _refuse_opening(self, error: TopicsError) -> None:
        body = envelope(error)
        headers = {
            "Connection": "close",
            "Content-Type": JSON_TYPE.decode(),
            "Content-Length": str(len(body)),
            "X-Request-Id": request_id({}).decode("ascii"),
            # The version that the server accepts (RFC 6455, 4.4).
            "Sec-WebSocket-Version": "13",
        }
        self._answer_opening(status_of(error), headers, body)

    def _fail_opening(self) -> None:
        if self._refusal is None and not self.handshake_complete and self._is_opened:
            self._answer_opening(500, {"Connection": "close", "Content-Length": "0"}, b"")

    def _answer_opening(
        self, status: int, headers: dict[str, str] | list[tuple[str, str]], body: bytes
    ) -> None:
        """Answer an opening with an HTTP response, and close."""
        fields = Headers(headers)
        fields.setdefault("Date", self.conn.reject(HTTPStatus.OK, "").headers["Date"])
        fields.setdefault("Connection", "close")
        fields.setdefault("Content-Length", str(len(body)))
        self.handshake_complete = self.close_sent = True
        self.conn.send_response(Response(status, HTTPStatus(status).phrase, fields, body))
        self._flush()
        self.transport.close()

    # --- the application --------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self.app(self.scope, self.receive, self.send)
        except DisconnectedError:
            pass
        except Exception as error:
            log.error("defect in the application of a WebSocket", exc_info=error)
        finally:
            self._fail_opening()
            if self._close_timer is None:
                self.transport.close()

    async def receive(self) -> MutableMapping[str, Any]:
        """Receive the next message. The bytes of the previous message no longer count."""
        if self._taken_bytes >= UPLOAD_STEP_BYTES and self._whole is not None:
            assert self.door is not None
            self.door.uploads.set_bytes(self._whole, self._whole.bytes - self._taken_bytes)
        self._taken_bytes = 0
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._resume_reading()
        if message["type"] == "websocket.receive" and self._queued:
            self._taken_bytes = self._queued.popleft()
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Accept, send, close or refuse, by the ASGI message. Waits until the buffer has room."""
        await self.writable.wait()
        if self.disconnected:
            raise DisconnectedError
        kind = message["type"]
        if self._refusal is not None and kind == "websocket.http.response.body":
            status, headers, body = self._refusal
            self._refusal = status, headers, body + message.get("body", b"")
            if not message.get("more_body", False):
                self._tell({"type": "websocket.disconnect", "code": 1006})
                fields = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers]
                self._answer_opening(status, fields, self._refusal[2])
        elif self._refusal is not None or self.close_sent:
            raise RuntimeError(f"{kind!r} was sent behind the end of a WebSocket")
        elif not self.handshake_complete and kind == "websocket.accept":
            self._accept(message)
        elif not self.handshake_complete and kind == "websocket.http.response.start":
            self._refusal = message["status"], list(message.get("headers", ())), b""
        elif not self.handshake_complete and kind == "websocket.close":
            self._tell({"type": "websocket.disconnect", "code": 1006})
            self._answer_opening(403, {}, b"")
        elif self.handshake_complete and kind in ("websocket.send", "websocket.close"):
            try:
                self._send_open(message)
            except InvalidState:
                raise DisconnectedError from None
        else:
            raise RuntimeError(f"{kind!r} must not be sent now")

    def _accept(self, message: MutableMapping[str, Any]) -> None:
        headers = [*self.server_state.default_headers, *message.get("headers", ())]
        if message.get("subprotocol"):
            headers.append((b"Sec-WebSocket-Protocol", message["subprotocol"].encode("ascii")))
        del self.response.headers["Date"]
        for name, value in headers:
            self.response.headers[name.decode("latin-1")] = value.decode("latin-1")
        if not self.transport.is_closing():
            self.handshake_complete = True
            self.conn.send_response(self.response)
            self._flush()
            every_s, answer_s = self.config.ws_ping_interval, self.config.ws_ping_timeout
            self._pings = PeerPings(self.loop, every_s, answer_s, self._ping, self._give_up)

    def _send_open(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "websocket.send":
            data, text = message.get("bytes"), message.get("text")
            if data is not None:
                self.conn.send_binary(data)
            elif text is not None:
                self.conn.send_text(text.encode())
            self._flush()
        elif not self.transport.is_closing():
            code, reason = message.get("code", 1000), message.get("reason") or ""
            self._tell({"type": "websocket.disconnect", "code": code, "reason": reason})
            self.conn.send_close(code, reason)
            self._flush()
            self.close_sent = True
            if self.read_paused:
                self.read_paused = False
                self._resume_reading()
            self._close_timer = self.loop.call_later(_CLOSE_S, self.transport.close)

    # --- pings ------------------------------------------------------------------------------

    def _ping(self, payload: bytes) -> None:
        if not (self.close_sent or self.transport.is_closing()):
            self.conn.send_ping(payload)
            self._flush()

    def _give_up(self) -> None:
        if not (self.close_sent or self.transport.is_closing()):
            self.conn.fail(_FAILED, "keepalive ping timeout")
            self._flush()
            self.close_sent = True
            self.transport.close()

    def _stop_pings(self) -> None:
        pings, self._pings = self._pings, None
        if pings is not None:
            pings.stop()

    # --- uploads ----------------------------------------------------------------------------

    def _begin_upload(self, door: Door) -> Upload:
        key = door.socket_key(self.scope["headers"], self.scope["subprotocols"])
        return door.uploads.begin(self, key)

    def _count(self, door: Door) -> None:
        """Count the received part of an incomplete message. The budget may then refuse it."""
        size = len(self.conn.reader.buffer) + len(self.message or b"")
        if not size or not self._is_opened or self.transport.is_closing():
            if self._incoming is not None:
                door.uploads.end(self._incoming)
                self._incoming = None
            self._leave_turns(door)
            return
        if self._incoming is None:
            self._incoming = self._begin_upload(door)
        door.uploads.set_bytes(self._incoming, size)

    def _wait_turn(self, door: Door) -> None:
        """Read this connection in turns among large uploads from now on."""
        if not self.transport.is_closing():
            self._takes_turns = True
            door.upload_turns.wait(self)

    def _leave_turns(self, door: Door) -> None:
        if self._takes_turns:
            self._takes_turns = False
            door.upload_turns.leave(self)

    @property
    def upload_key(self) -> object:
        """See `upload_turns.UploadReader`."""
        return None if self._incoming is None else self._incoming.key

    def begin_turn(self) -> None:
        """See `upload_turns.UploadReader`."""
        self._waits_turn = False
        if not self.transport.is_closing():
            self._resume_reading()

    def end_turn(self) -> None:
        """See `upload_turns.UploadReader`."""
        self._waits_turn = True
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def read_share(self, count: int) -> bool | None:
        """See `upload_turns.UploadReader`."""
        if self.transport.is_closing():
            return None
        if self.read_paused or self._is_behind:
            return False
        return read_past(self.transport, count, self.data_received)

    def refuse_upload(self, error: TopicsError) -> None:
        """Answer with `error`, close, and keep receiving for a while so that the client reads it.

        The unfinished message is dropped.
        """
        self._is_refused = True
        self._incoming = self.message = None
        del self.conn.reader.buffer[:]
        if self.close_sent or not self.handshake_complete or self.transport.is_closing():
            self.transport.abort()
            return
        assert self.door is not None
        self.conn.send_text(self.door.socket_error(error))
        self.conn.send_close(TRY_AGAIN_LATER, "try again later")
        self._flush()
        self.transport.write_eof()
        self.close_sent = True
        self._tell({"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": ""})
        self._swallowed_at = self.loop.time()
        self._linger(self.loop.time() + LINGER_MS_MAX / 1000)
        if self.read_paused:
            self.read_paused = False
            self._resume_reading()

    def _linger(self, until: float) -> None:
        """Close once the client has sent nothing for a while, or at `until`."""
        assert self.door is not None, "only a server with a budget refuses"
        idle_s = self.door.timeouts.limits.linger_s
        now = self.loop.time()
        if now >= until or (now - self._swallowed_at >= idle_s and not self._waits_turn):
            self.transport.abort()
        else:
            # While this timer is set, the end of the application does not close the connection.
            self._close_timer = self.loop.call_later(idle_s, self._linger, until)

    def _swallow(self, count: int) -> None:
        self._swallowed_bytes += count
        self._swallowed_at = self.loop.time()
        if self._swallowed_bytes > LINGER_BYTES_MAX:
            self.transport.abort()
