"""One HTTP/1.1 connection: bytes in, requests to the application, answers out.

uvicorn makes a connection for each accepted socket (its public parameter `http=`). A reader finds
the requests and refuses ambiguous framing (`exchange/request_reader`). A refused request gets the
envelope, after the answers to the requests before it, and ends the connection
(`exchange/connection_end`). Bytes that arrive while other connections are served may be read later
(`http/read_scheduler`). Large bodies count in a budget and are read in turns
(`exchange/body_uploads`). Slow clients time out (`exchange/deadlines`).

A request goes one of two ways. The application's `Door` answers a whole request of a hot route
directly from the parser, without a task. A head that was parsed before is not parsed again: the
door keeps its call by the bytes of the head. If the body has not arrived, the head is held back for
a moment. Every other request is an `exchange/asgi_exchange`. These start in order: while one
request is answered, the requests behind it wait.

Invariants: at most one request is being answered; `exchange` is the newest request that is not
answered directly; a closed connection is in no reference cycle, because the garbage collector does
not examine old objects. Used by `server`. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import httptools

from topics_server.http.exchange.asgi_exchange import Exchange
from topics_server.http.exchange.body_uploads import BodyUploads
from topics_server.http.exchange.connection_end import SWALLOWED_BYTES_MAX, ConnectionEnd
from topics_server.http.exchange.deadlines import Deadlines, time_out
from topics_server.http.exchange.door import Door
from topics_server.http.exchange.flow_control import Flow
from topics_server.http.exchange.joined_writes import JoinedWrites
from topics_server.http.exchange.known_heads import EarlyHead
from topics_server.http.exchange.request_reader import RequestReader
from topics_server.http.exchange.response_head import Header, head_of
from topics_server.http.exchange.scopes import ConnectionScope
from topics_server.http.read_scheduler import FEW, ReadScheduler
from topics_server.http.request_head import Bounds
from topics_server.http.timeouts import ConnectionTimeouts, TimeoutSettings
from topics_server.http.upload_turns import LARGE_BYTES
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import KIB, PIPELINED_MAX

# A longer reception that may have chunks is parsed in pieces of `_FED_BYTES`, for `_FED_MS` a turn.
_WHOLE_BYTES_MAX: Final = 16 * KIB
_FED_BYTES: Final = 4 * KIB
_FED_MS: Final = 1.0
# Bytes of an incomplete body at which the application is woken, and at which reading stops.
_GATHERED_BYTES: Final = 32 * KIB
_UNTAKEN_BYTES_MAX: Final = 64 * KIB
_HOT_METHODS: Final = frozenset((b"GET", b"POST"))


class HttpConnection(asyncio.Protocol):
    """A connection until its end, or until it becomes a WebSocket."""

    # Defaults that most connections never change; as class attributes they exist once.
    door: Door | None = None
    timeouts: ConnectionTimeouts = ConnectionTimeouts()
    bounds: Bounds = timeouts.bounds
    read_scheduler: ReadScheduler | None = None
    transport: JoinedWrites
    flow: Flow
    deadlines: Deadlines
    # Created when first needed.
    uploads: BodyUploads | None = None
    end: ConnectionEnd | None = None
    # The newest exchange, the one being answered, and the newest one when this request began.
    exchange: Exchange | None = None
    _answering: Exchange | None = None
    _before: Exchange | None = None
    # Whether a direct call has taken the request and will answer it.
    is_answering_directly = False
    # Whether the connection ends after the current answer.
    is_going_down = False
    # See `door.AnsweringConnection`.
    recalled: object = None
    last_request = 0
    is_late = False
    # Whether all further received bytes are dropped.
    is_over = False
    # Whether a request with a whole head is held back, and the received part of its body.
    _is_held = False
    _held_body = b""
    # The received bytes that are being parsed, if they begin with a request.
    _fed = b""
    # A known head that waits for its body, if any.
    _early: EarlyHead | None = None
    # Whether the current bytes already had a direct answer. Further requests in them get an
    # exchange each, so that one client cannot keep the loop busy.
    _had_turn = False
    # Whether the next request of the pipeline starts only when the client reads again.
    _is_put_off = False

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.config = config
        self.app = config.loaded_app
        self.server_state = server_state
        self.app_state = app_state
        self.loop: Any = _loop or asyncio.get_running_loop()
        self.connections: set[Any] = server_state.connections
        self.tasks: set[asyncio.Task[None]] = server_state.tasks
        self.pipeline: deque[Exchange] = deque()
        self.has_websockets = config.ws_protocol_class is not None
        self.reader = RequestReader(self)

    # --- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self.connections.add(self)
        self.transport = JoinedWrites(transport, self.loop)
        self.flow = Flow(self.transport)
        self.deadlines = Deadlines(self.loop.time())
        self._scope = ConnectionScope(self.config, self.app_state, self.transport)
        door: Door | None = getattr(self.app, "topics_door", None)
        if door is not None:
            self.door = door
            self.timeouts = door.timeouts
            self.bounds = self.timeouts.bounds
            self.read_scheduler = door.read_scheduler
            refusal = self.timeouts.crowded(self.connections, self)
            if refusal is not None:
                # Close at once: another connection needs the place.
                self.is_over = True
                self.transport.write(self.error_bytes(refusal))
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the request that is being answered; drop the requests behind it."""
        self.connections.discard(self)
        if self._early is not None:
            self._early.take()
        for exchange in (self._answering, self.exchange):
            if exchange is not None and not exchange.response_complete:
                exchange.disconnect()
        self.flow.resume_writing()
        self.timeouts.flows(self)
        if self.read_scheduler is not None:
            self.read_scheduler.forget(self)
        if self.uploads is not None:
            self.uploads.lose()
            self.uploads = None
        self.pipeline.clear()
        self.reader.close()
        self.exchange = self._answering = self._before = None
        if exc is None:
            self.transport.close()

    def shutdown(self) -> None:
        """Close now, or after the answer if a request is being answered."""
        self.is_going_down = True
        if self._early is not None:
            self._parse_early()
        if self.is_answered:
            self.transport.close()
        elif self.exchange is not None:
            self.exchange.keep_alive = False

    def eof_received(self) -> None:
        """The client sends no more bytes: parse those that are held, and send held answers."""
        while self.read_scheduler is not None and self.read_scheduler.holds(self):
            self.read_scheduler.release(self)
        self.transport.flush()

    def pause_writing(self) -> None:
        """The client does not read: start no further request."""
        self.flow.pause_writing()
        transport = self.transport
        # A stream buffers few bytes, and has its own timeout.
        if not self.is_streaming or transport.answer_bytes:
            unread = max(transport.get_write_buffer_size(), transport.answer_bytes)
            self.timeouts.stuck(self, unread)

    def resume_writing(self) -> None:
        """The socket takes bytes again: continue the exchange."""
        self.flow.resume_writing()
        self.timeouts.flows(self)
        if self._is_put_off:
            self._is_put_off = False
            if self.pipeline:
                self._start(self.pipeline.pop())

    @property
    def default_headers(self) -> list[Header]:
        """The server's own headers."""
        headers: list[Header] = self.server_state.default_headers
        return headers

    @property
    def url(self) -> bytes:
        """See `read_scheduler.DeferredReader`."""
        return self.reader.url

    @property
    def is_answered(self) -> bool:
        """Whether no request is being answered."""
        exchange = self.exchange
        return not self.is_answering_directly and (exchange is None or exchange.response_complete)

    @property
    def is_streaming(self) -> bool:
        """Whether an answer has begun and is not complete."""
        exchange = self.exchange
        return exchange is not None and exchange.response_started and not exchange.response_complete

    # --- bytes in ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if len(data) >= LARGE_BYTES and len(self.connections) > FEW:
            large = self._uploading()
            if large is not None:
                large.wait_turn()
        read_scheduler, uploads = self.read_scheduler, self.uploads
        if (
            read_scheduler is None
            or self.is_over
            or (len(self.connections) <= FEW and not read_scheduler.held_bytes)
            or (uploads is not None and uploads.takes_turns and not read_scheduler.holds(self))
            or read_scheduler.takes(self, data, self.reader.partial_since)
        ):
            self.take(data)

    def take(self, data: bytes) -> None:
        """Parse the received bytes."""
        if self._early is not None:
            data = self._take_early() + data
        if self.is_over:
            if self.flow.is_behind:
                self._catch_up()
            self._swallow(len(data))
            return
        if not self.reader.is_partial:
            door, exchange = self.door, self.exchange
            if (
                door is not None
                and not self.is_answering_directly
                and (exchange is None or exchange.response_complete)
                and not (self.reader.is_last or self.flow.write_paused or self.pipeline)
                and door.known_heads.serve(self, data)
            ):
                return
            self._fed = data
        self._parse(data)

    def await_body(self, head: bytes) -> None:
        """See `door.AnsweringConnection`."""
        self._early = EarlyHead(head, self.loop, self._parse_early)

    def _take_early(self) -> bytes:
        early, self._early = self._early, None
        assert early is not None
        return early.take()

    def _parse_early(self) -> None:
        """Parse a head whose body has not arrived in time."""
        self._fed = head = self._take_early()
        self._parse(head)

    def _parse(self, data: bytes) -> None:
        self._had_turn = False
        if self.reader.partial_since or len(data) > self.bounds.small_bytes:
            self.reader.is_large = True
        try:
            if len(data) > _WHOLE_BYTES_MAX and self.reader.may_be_chunked(data):
                data = self._feed_for_a_while(data)
            else:
                self.reader.feed(data)
        except httptools.HttpParserUpgrade:
            if self.reader.is_websocket:
                self._become_websocket()
                return
            self.is_over = True
        except httptools.HttpParserError as error:
            self.refuse(self.reader.cause_of(error))
            return
        finally:
            self._fed = b""
            if self.flow.is_behind:
                self._catch_up()
        if self._is_held:
            self._begin_held()
        if self.reader.is_partial:
            self._measure(len(data))
        if self.reader.is_partial:
            uploads = self._uploading()
            if uploads is not None and self.reader.has_head:
                uploads.count(self.reader, self.exchange, is_crowded=len(self.connections) > FEW)

    def _feed_for_a_while(self, data: bytes) -> bytes:
        """Parse for about a millisecond; return the parsed bytes. Hold the rest for later turns."""
        until_ms = monotonic_ms() + _FED_MS
        view = memoryview(data)
        for at in range(0, len(data), _FED_BYTES):
            if at and self.read_scheduler is not None and monotonic_ms() > until_ms:
                if not self.flow.is_behind and not self.transport.is_closing():
                    self.flow.fall_behind()
                self.read_scheduler.put_back(self, data[at:])
                return data[:at]
            self.reader.feed(view[at : at + _FED_BYTES])
        return data

    def _catch_up(self) -> None:
        """Resume reading, unless received bytes are still held."""
        if self.read_scheduler is not None and not self.read_scheduler.holds(self):
            if self.transport.is_closing():
                self.flow.is_behind = False
            else:
                self.flow.catch_up()

    def _measure(self, count: int) -> None:
        """Measure an incomplete request, and refuse it if it exceeds a bound."""
        reader = self.reader
        error = reader.measure(count, self.loop.time())
        if reader.has_head and self.exchange is not None and self.exchange.response_complete:
            self._swallow(count)
        elif error is not None:
            self.refuse(error)

    # --- calls by the reader --------------------------------------------------------------

    def check_pipeline(self) -> None:
        """See `request_reader.ReaderOwner`."""
        self._before = self.exchange
        if len(self.pipeline) >= PIPELINED_MAX:
            raise TopicsError(
                Code.THROTTLED,
                f"more than {PIPELINED_MAX} requests wait on this connection",
                {"limit": "pipelined", "max": PIPELINED_MAX},
            )

    def on_head(self, *, is_plain: bool) -> None:
        """Hold back a request that the door may answer directly; begin any other."""
        reader = self.reader
        if (
            is_plain
            and not (self._had_turn or reader.is_expecting or self.flow.write_paused)
            and reader.is_kept
            and reader.method in _HOT_METHODS
            and self.door is not None
        ):
            self._is_held = True
        else:
            self._begin()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if self._is_held:
            if not self._held_body:
                self._held_body = body
                return
            self._begin_held()
        exchange = self.exchange
        if exchange is None or exchange.response_complete or not exchange.more_body:
            return
        if not exchange.body:
            # Pass the first piece on without a copy.
            exchange.body = body
        else:
            if isinstance(exchange.body, bytes):
                exchange.body = bytearray(exchange.body)
            exchange.body += body
        # The waiting task needs the whole body: wake it when the body is complete or large.
        if len(exchange.body) >= _GATHERED_BYTES:
            if len(exchange.body) > _UNTAKEN_BYTES_MAX:
                self.flow.pause_reading()
            exchange.wake()

    def on_message(self, *, was_partial: bool) -> None:
        """The request is complete: serve it."""
        if was_partial and self.end is not None:
            self.end.begin_request()
        if self.uploads is not None:
            self.uploads.end_message()
        if self._is_held:
            if self._serve_held():
                return
            self._begin_held()
        exchange = self.exchange
        if exchange is not None and not exchange.response_complete:
            exchange.more_body = False
            exchange.wake()

    # --- requests ---------------------------------------------------------------------------

    def _serve_held(self) -> bool:
        """Let the door answer the request that was held back. Returns whether it does."""
        assert self.door is not None
        reader = self.reader
        call = self.door.direct_call(reader.method, reader.url, dict(reader.fields))
        body = self._held_body
        if call is None or not call.serve(self, body):
            return False
        self._is_held = False
        self._had_turn = True
        self._held_body = b""
        if call.is_lasting:
            self.door.known_heads.keep(self._fed, len(body), call)
        return True

    def answer(self, head: bytes, pieces: Sequence[bytes | memoryview], size: int) -> None:
        """Send the answer of a direct call. `head` lacks its last, empty line."""
        transport = self.transport
        if self.is_going_down and not self.pipeline:
            transport.write_pieces(head + b"connection: close\r\n\r\n", pieces, size)
            transport.close()
        else:
            transport.write_pieces(head + b"\r\n", pieces, size)
        self.is_answering_directly = False
        self.on_response_complete()

    def _begin_held(self) -> None:
        """Begin an exchange for the request that was held back."""
        body, self._held_body = self._held_body, b""
        self._is_held = False
        self._begin()
        if body:
            self.on_body(body)

    def _begin(self) -> None:
        """Create an exchange. Start it, or queue it behind the unanswered requests."""
        self.deadlines.begin_body()
        reader = self.reader
        if reader.is_websocket:
            return
        is_free = self.is_answered
        exchange = Exchange(
            self,
            self._scope.http(
                reader.method.decode("ascii"), reader.version, reader.url, reader.headers
            ),
            keep_alive=reader.is_kept,
            waits_for_continue=reader.is_expecting,
        )
        self.exchange = exchange
        if is_free:
            self._start(exchange)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft(exchange)

    def _start(self, exchange: Exchange) -> None:
        if self.flow.write_paused:
            self._is_put_off = True
            self.pipeline.append(exchange)
            self.flow.pause_reading()
            return
        self._answering = exchange
        task = self.loop.create_task(exchange.run(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_response_complete(self) -> None:
        """The answer is sent: start the next request of the pipeline, or wait for one."""
        self.deadlines.idle_since = self.loop.time()
        self.deadlines.is_used = True
        self.server_state.total_requests += 1
        if self.uploads is not None and self.uploads.end_answered():
            self.uploads = None
        if not self.transport.is_closing():
            if self.flow.read_paused:
                self.flow.resume_reading()
            if self.pipeline:
                self._start(self.pipeline.pop())
        if self.reader.is_partial:
            self._answered_early()
        if self.end is not None and self._is_idle:
            self.end.send_refusal(self.loop.time())

    def _answered_early(self) -> None:
        exchange = self.exchange
        if exchange is None or not (exchange.response_complete and exchange.more_body):
            return
        length = self.reader.fields.get(b"content-length", b"")
        is_short = length.isdigit() and len(length) < 10 and int(length) <= SWALLOWED_BYTES_MAX
        if not is_short or b"expect" in self.reader.fields:
            # Close: the rest of the body is too long to skip, or the client never sends it, because
            # it got no 100 Continue.
            self.is_over = True
            self._ending().linger(self.loop.time())

    def _become_websocket(self) -> None:
        """Hand the connection and its opening over; break the cycle with the parser."""
        self.connections.discard(self)
        protocol = self.config.ws_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.app_state
        )
        opening = self.reader.opening()
        self.reader.close()
        protocol.connection_made(self.transport)
        protocol.data_received(opening)
        self.transport.set_protocol(protocol)

    # --- uploads ----------------------------------------------------------------------------

    def _uploading(self) -> BodyUploads | None:
        if self.uploads is None and self.door is not None:
            receive = self.data_received
            self.uploads = BodyUploads(self.door, self.flow, self._refuse_upload, receive)
        return self.uploads

    def _refuse_upload(self, error: TopicsError) -> None:
        """Answer with `error`, and keep receiving for a while so that the client reads it."""
        self._ending().receive_for_a_while(self.loop.time())
        self.refuse(error)
        self.flow.resume_reading()

    # --- refusals ---------------------------------------------------------------------------

    def refuse(self, error: TopicsError | None) -> None:
        """Drop all further bytes, send `error` after the current answer, and end the connection.

        With None, no error is sent: the connection ends without it.
        """
        self._is_held = False
        self._held_body = b""
        self.is_over = True
        self.reader.is_partial = False
        if error is not None and not self.transport.is_closing():
            self._ending().refusal = self.error_bytes(error)
            self._drop_unclear()
            if self._is_idle:
                self._ending().send_refusal(self.loop.time())
        if self.uploads is not None:
            self.uploads.refused()

    def error_bytes(self, error: TopicsError | None) -> bytes:
        """The error that ends the connection, as bytes. None: the application failed."""
        status, headers, body = (
            (500, [(b"content-length", b"0")], b"")
            if self.door is None
            else self.door.refusal(error)
        )
        fields = [*self.default_headers, (b"connection", b"close"), *headers]
        return head_of(status, fields) + body

    def _ending(self) -> ConnectionEnd:
        if self.end is None:
            self.end = ConnectionEnd(self.transport, self.deadlines)
        return self.end

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered or waits for it."""
        return not self.pipeline and self.is_answered

    def _drop_unclear(self) -> None:
        """Drop the request whose body is malformed: the refusal is its answer."""
        exchange = self.exchange
        if exchange is None or exchange.response_complete or not exchange.more_body:
            return
        if exchange in self.pipeline:
            self.pipeline.remove(exchange)
            self.exchange = self._before
            return
        exchange.disconnect()
        if exchange.response_started:
            # The answer is a stream that has begun, so no error can be sent.
            self.flow.resume_writing()
            self._ending().refusal = None
            self.transport.close()
        else:
            exchange.response_complete = True

    def _swallow(self, count: int) -> None:
        """Drop received bytes unread, up to a bound."""
        if self._ending().swallow(count, self.loop.time(), is_idle=self._is_idle):
            self.is_over = True

    # --- deadlines --------------------------------------------------------------------------

    def overdue(self, now: float, limits: TimeoutSettings) -> str | None:
        """See `timeouts.TimedConnection`."""
        return None if self._early is not None else self.deadlines.overdue(self, now, limits)

    def time_out(self, kind: str) -> None:
        """End the connection, with an error if the client may still read it."""
        time_out(self, kind)

    @property
    def idle_rank(self) -> tuple[bool, float] | None:
        """See `timeouts.TimedConnection`."""
        is_begun = self.reader.is_partial or self._early is not None
        if self._is_idle and not is_begun and not self.is_over:
            return (self.deadlines.is_used, self.deadlines.idle_since)
        return None
