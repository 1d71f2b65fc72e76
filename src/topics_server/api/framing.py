"""A connection that refuses ambiguous HTTP framing.

The parser refuses most of what could be read in two ways; `http/request_head` has the rest.
Whatever is refused gets the envelope, behind the answers of the requests before it, and is the last
that the connection hears; what was sent behind it, or behind a request that ends the connection, is
never looked at. A request that is answered before it was whole (its body refused, say) may send a
little more, then the connection ends too.

Here is also what a connection knows of its own slowness. Nothing is timed on the way of a request
that comes whole: `overdue` is asked now and then by `http/timeouts`, and what it needs is noted
only where bytes end in the middle of a request. What is received while others are served may be
read later: `http/read_scheduler` says when. Base of `api/upload_connection`.
"""

from __future__ import annotations

from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from topics_server.api.application import Application
from topics_server.api.front_door import response_of
from topics_server.http.error_responses import internal
from topics_server.http.joined_writes import Flow, JoinedHttp, head_of
from topics_server.http.read_scheduler import FEW, ReadScheduler
from topics_server.http.request_head import (
    Bounds,
    check_fields,
    check_opening,
    check_size,
    check_target,
    is_host,
    size_of,
    too_large_fields,
)
from topics_server.http.request_ids import request_id
from topics_server.http.responses import tell_of_body
from topics_server.http.timeouts import ConnectionTimeouts, TimeoutSettings
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import log
from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import KIB, PIPELINED_MAX

# What may come behind the answer of a request that was refused before it was whole.
_SWALLOWED_BYTES_MAX: Final = 256 * KIB
# What chunks may take beside the bytes that are in them: so much, and so many times those.
_FRAMING_BYTES_MAX: Final = 64 * KIB
_FRAMING_SHARE_MAX: Final = 8
# A reception that is longer and may have chunks is parsed so much at a time, for so long.
_WHOLE_BYTES_MAX: Final = 16 * KIB
_FED_BYTES: Final = 4 * KIB
_FED_MS: Final = 1.0
_DEFAULT: Final = ConnectionTimeouts()


class RefusedError(Exception):
    """Ends the parser; `StrictHttp` knows the refusal."""


class StrictHttp(JoinedHttp):
    """A connection as it should be."""

    timeouts: ConnectionTimeouts = _DEFAULT
    bounds: Bounds = _DEFAULT.bounds
    read_scheduler: ReadScheduler | None = None
    flow: Flow
    url: bytes = b""
    # The header fields of the newest head by their names.
    fields: dict[bytes, bytes]
    # A request is there that is not whole.
    is_partial = False
    # A head is there, and its request is not begun.
    _is_held = False
    # Nothing more is looked at: the parser has ended, or the last request was read.
    _is_over = False
    # The request being read is the last.
    _is_last = False
    # The next of the pipeline is begun once the client reads.
    _is_put_off = False
    _refusal: bytes | None = None
    _raised: TopicsError | None = None
    _has_head = False
    _small_bytes = _DEFAULT.bounds.small_bytes
    # The newest request when this one came.
    _before: Any = None
    _is_large = False
    # Since when a request is partial; 0: what there was came whole. On the loop's clock, seconds.
    _partial_since = 0.0
    _made_at = 0.0
    _head_bytes = 0
    _body_bytes = 0
    _measured_bytes = 0
    _framing_bytes = 0
    _swallowed_bytes = 0
    _swallowed_max = _SWALLOWED_BYTES_MAX
    # Bytes of the body at the beginning of the time in which some more must have come.
    _marked_bytes = 0
    _unsent_bytes = 0
    _unsent_since = 0.0
    _lingers_since = 0.0
    # When something came last that was dropped, and until when the client may go on sending.
    _swallowed_at = 0.0
    _lingers_until = 0.0

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._made_at = self._idle_since = self.loop.time()
        app: Any = self.app
        if isinstance(app, Application):
            self.timeouts = app.door.state.timeouts
            self.bounds = self.timeouts.bounds
            self.read_scheduler = app.door.state.read_scheduler
            self._small_bytes = self.bounds.small_bytes
            refusal = self.timeouts.crowded(self.connections, self)
            if refusal is not None:
                # Close at once, without waiting for the client to read the error: the place is
                # needed.
                self._is_over = True
                self.transport.write(self._error_bytes(refusal))
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self.timeouts.flows(self)
        if self.read_scheduler is not None:
            self.read_scheduler.forget(self)
        self._before = None

    def eof_received(self) -> None:
        """The client sends no more: what is held of it is its last."""
        while self.read_scheduler is not None and self.read_scheduler.holds(self):
            self.read_scheduler.release(self)
        super().eof_received()

    def pause_writing(self) -> None:
        """The client does not read: nothing more is begun for it."""
        super().pause_writing()
        transport: Any = self.transport
        cycle: Any = self.cycle
        is_answer = not getattr(cycle, "response_started", False) or cycle.response_complete
        # A stream holds little, and has its own timeout.
        if is_answer or transport.answer_bytes:
            unread = max(transport.get_write_buffer_size(), transport.answer_bytes)
            self.timeouts.stuck(self, unread)

    def resume_writing(self) -> None:
        """It does again: go on with what it asked for."""
        super().resume_writing()
        self.timeouts.flows(self)
        if self._is_put_off:
            self._is_put_off = False
            self._start_asgi_task(*self.pipeline.pop())

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.flow.write_paused:
            self._is_put_off = True
            self.pipeline.append((cycle, app))
            self.flow.pause_reading()
        else:
            super()._start_asgi_task(cycle, app)

    # --- bytes in ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        read_scheduler = self.read_scheduler
        if (
            read_scheduler is None
            or self._is_over
            or (len(self.connections) <= FEW and not read_scheduler.held_bytes)
            or read_scheduler.takes(self, data, self._partial_since)
        ):
            self.take(data)

    def take(self, data: bytes) -> None:
        """Read what was received."""
        if self._is_over:
            if self.flow.is_behind:
                self._catch_up()
            self._swallow(data)
            return
        if self._partial_since or len(data) > self._small_bytes:
            self._is_large = True
        try:
            if len(data) > _WHOLE_BYTES_MAX and self._may_be_chunked(data):
                data = self._feed_for_a_while(data)
            else:
                self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
                return
            self._is_over = True
        except httptools.HttpParserError as error:
            self.refuse(self._cause_of(error))
            return
        finally:
            if self.flow.is_behind:
                self._catch_up()
        if self._is_held:
            self.release_held()
        if self.is_partial:
            self._measure(data)

    def _may_be_chunked(self, data: bytes) -> bool:
        """Whether there may be chunks in `data`: each costs a callback, however small it is."""
        begins = 0
        if self._has_head and self.is_partial:
            if b"transfer-encoding" in self.fields:
                return True
            begins = int(self.fields.get(b"content-length", b"0")) - self._body_bytes
        elif self._partial_since:
            # In the middle of a head.
            return True
        else:
            begins = data.find(b"\r\n\r\n")
            if begins < 0 or b"transfer-encoding" in data[:begins].lower():
                return True
        # Another head behind this body.
        return data.find(b"HTTP/1.", begins) >= 0

    def _feed_for_a_while(self, data: bytes) -> bytes:
        """Parse for about a millisecond; what was parsed. The rest is held for later turns."""
        until_ms = monotonic_ms() + _FED_MS
        view = memoryview(data)
        for at in range(0, len(data), _FED_BYTES):
            if at and self.read_scheduler is not None and monotonic_ms() > until_ms:
                if not self.flow.is_behind and not self.transport.is_closing():
                    self.flow.fall_behind()
                self.read_scheduler.put_back(self, data[at:])
                return data[:at]
            self.parser.feed_data(view[at : at + _FED_BYTES])
        return data

    def _catch_up(self) -> None:
        """Read on, if nothing is held any more."""
        if self.read_scheduler is not None and not self.read_scheduler.holds(self):
            if self.transport.is_closing():
                self.flow.is_behind = False
            else:
                self.flow.catch_up()

    def release_held(self) -> None:
        """Start what was held back while `data` was parsed; nothing here."""

    def on_message_begin(self) -> None:
        """A request begins, unless the one before it was the last."""
        self.begin_message()
        super().on_message_begin()

    def begin_message(self) -> None:
        """Note that a request begins. Raises where none may."""
        if self._is_last:
            self._is_over = True
            raise RefusedError
        self.is_partial = True
        self._has_head = False

    def on_message_complete(self) -> None:
        """The request is whole."""
        self.end_message()
        super().on_message_complete()

    def end_message(self) -> None:
        """Note that the request is whole."""
        self.is_partial = False
        if self._partial_since:
            self._partial_since = 0.0
            self._head_bytes = self._swallowed_bytes = self._framing_bytes = 0
            self._is_large = False

    def check_head(self) -> bool:
        """Refuse an ambiguous head; returns whether it is plain (`is_plain_head`).

        Raises an exception that stops the parser.
        """
        headers = self.headers
        fields = self.fields = dict(headers)
        self._has_head = True
        is_plain = self.is_plain_head()
        if (
            is_plain
            and not self._is_large
            and len(headers) == len(fields) <= self.bounds.header_count
            and b"transfer-encoding" not in fields
            and is_host(fields.get(b"host", b""))
        ):
            return True
        try:
            self._check_unusual_head()
        except TopicsError as error:
            self._raised = error
            raise RefusedError from None
        return is_plain

    def _check_unusual_head(self) -> None:
        parser, fields = self.parser, self.fields
        check_size(self.url, self.headers, self.bounds)
        version = parser.get_http_version()
        check_fields(self.headers, fields, version)
        self.url = check_target(self.url, version, fields.get(b"host"))
        self._before = self.cycle
        if len(self.pipeline) >= PIPELINED_MAX:
            raise TopicsError(
                Code.THROTTLED,
                f"more than {PIPELINED_MAX} requests wait on this connection",
                {"limit": "pipelined", "max": PIPELINED_MAX},
            )
        if parser.should_upgrade():
            if self._should_upgrade():
                self._check_socket()
            self._is_last = True
        elif version != "1.1" or not parser.should_keep_alive():
            self._is_last = True

    def _check_socket(self) -> None:
        """Refuse the opening of a WebSocket that is none, or is not alone."""
        check_opening(self.parser.get_method(), self.parser.get_http_version(), self.fields)
        if not self._is_idle():
            raise invalid("a WebSocket needs a connection of its own")

    def on_headers_complete(self) -> None:
        """Check the head, then go on as with any."""
        self.check_head()
        super().on_headers_complete()
        self.end_head()

    def end_head(self) -> None:
        """Behind the start of a request that is served by a task."""
        self._body_bytes = self._marked_bytes = self._measured_bytes = 0
        if self.parser.should_upgrade() and not self._should_upgrade():
            self.cycle.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head; one behind a body is dropped."""
        if self._has_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def _measure(self, data: bytes) -> None:
        """Note where a request stands that is not whole; refuse it where it is out of bounds."""
        is_first = not self._partial_since
        if is_first:
            self._partial_since = self.loop.time()
        if not self._has_head:
            # Of the first piece only what is parsed: the rest may belong to requests before it.
            known = len(self.url) + size_of(self.headers)
            self._head_bytes = known if is_first else self._head_bytes + len(data)
            bounds = self.bounds
            if self._head_bytes > bounds.header_bytes + bounds.url_bytes:
                self.refuse(too_large_fields("max_header_bytes", bounds.header_bytes))
            return
        came = self._body_bytes - self._measured_bytes
        self._measured_bytes = self._body_bytes
        if not is_first:
            self._framing_bytes += max(0, len(data) - came)
        cycle: Any = self.cycle
        if cycle is not None and cycle.response_complete:
            self._swallow(data)
        elif self._framing_bytes > _FRAMING_BYTES_MAX + _FRAMING_SHARE_MAX * self._body_bytes:
            self.refuse(invalid("the body's chunks are too small", "Transfer-Encoding"))

    # --- refusals ---------------------------------------------------------------------------

    def _cause_of(self, error: httptools.HttpParserError) -> TopicsError | None:
        """The error for bytes that the parser, or one of our callbacks, refuses."""
        raised, self._raised = self._raised, None
        if raised is not None:
            return raised
        cause = error.__context__
        if isinstance(cause, RefusedError):
            return None
        unclear = (UnicodeDecodeError, httptools.HttpParserInvalidURLError)
        if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(cause, unclear):
            log.error("defect while reading a request", exc_info=cause)
            return internal()
        return invalid("this is not an HTTP/1.1 request")

    def refuse(self, error: TopicsError | None) -> None:
        """Look at nothing more; answer with `error`, behind what is being answered, and end.

        None: what came is not even refused, as the connection ends by itself.
        """
        self._is_over = True
        self.is_partial = False
        if error is None or self.transport.is_closing():
            return
        self._refusal = self._error_bytes(error)
        self._drop_unclear()
        if self._is_idle():
            self._send_refusal()

    def _error_bytes(self, error: TopicsError) -> bytes:
        response = response_of(error)
        app: Any = self.app
        headers = list(response.headers)
        if isinstance(app, Application):
            headers = app.door.response_headers(response, "GET", {}, b"")
        headers.append((b"connection", b"close"))
        # Its head is not one to take an id from.
        tell_of_body(headers, response, len(response.body), request_id({}), is_packed=False)
        head = head_of(response.status, [*self.server_state.default_headers, *headers])
        return head + response.body

    def _drop_unclear(self) -> None:
        """Forget the request whose body turned out to be unclear: the refusal is its answer."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or not cycle.more_body:
            return
        waiting = [entry for entry in self.pipeline if entry[0] is not cycle]
        if len(waiting) < len(self.pipeline):
            self.pipeline.clear()
            self.pipeline.extend(waiting)
            self.cycle = self._before
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle.response_started:
            # As uvicorn does for a flow-controlled request: this one is a stream.
            self.flow.resume_writing()
            self._refusal = None
            self.transport.close()
        else:
            cycle.response_complete = True

    def _is_idle(self) -> bool:
        """Whether no request is being answered or waits to be."""
        cycle: Any = self.cycle
        return not self.pipeline and (cycle is None or cycle.response_complete)

    def _send_refusal(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None and not self.transport.is_closing():
            self.transport.write(refusal)
            self._linger()

    def _linger(self) -> None:
        """Close the write side, and wait a little for the client to see it and to end.

        Otherwise late bytes would be answered with a reset, which may overtake the error.
        """
        self._is_over = True
        if not self._lingers_since and not self.transport.is_closing():
            self._lingers_since = self.loop.time()
            transport: Any = self.transport
            transport.finish()

    def _swallow(self, data: bytes) -> None:
        """Read and drop bytes without a use, up to a bound."""
        self._swallowed_bytes += len(data)
        self._swallowed_at = self.loop.time()
        if self._swallowed_bytes > self._swallowed_max:
            if self._lingers_since:
                self.transport.abort()
            elif self._refusal is None and self._is_idle():
                self._linger()
                self._swallowed_bytes = 0

    def on_response_complete(self) -> None:
        """The answer is out: see whether it is the last, or came before its request was whole."""
        super().on_response_complete()
        if self.is_partial:
            self._answered_early()
        if self._refusal is not None and self._is_idle():
            self._send_refusal()

    def _answered_early(self) -> None:
        cycle: Any = self.cycle
        if not (cycle.response_complete and cycle.more_body):
            return
        length = self.fields.get(b"content-length", b"")
        is_short = length.isdigit() and len(length) < 10 and int(length) <= _SWALLOWED_BYTES_MAX
        if not is_short or b"expect" in self.fields:
            # Only the body shows where the next request begins, and a client that waits for 100
            # Continue never got it.
            self._linger()

    # --- patience ---------------------------------------------------------------------------

    def overdue(self, now: float, limits: TimeoutSettings) -> str | None:
        """What the client has kept us waiting for too long, at `now` of the loop's clock, or None.

        Asked for again and again: what it answers depends on what it saw before.
        """
        transport: Any = self.transport
        unsent = transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent_bytes or not self._unsent_bytes:
            self._unsent_since = now
        self._unsent_bytes = unsent
        cycle: Any = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if unsent and now - self._unsent_since > limits.write_s:
            # A stream has its own timeout for its client.
            is_streaming = not is_answered and getattr(cycle, "response_started", False)
            if not is_streaming or transport.is_closing():
                return "write"
        if self._lingers_since:
            if unsent:
                self._lingers_since = now
            since = self._lingers_since
            if now < self._lingers_until:
                # Of an upload that was refused some more may come.
                since = now if self.flow.waits_turn else max(since, self._swallowed_at)
            return "linger" if now - since > limits.linger_s else None
        if transport.is_closing():
            return None
        if self.is_partial:
            return self._overdue_request(now, limits, is_answered=is_answered)
        if not is_answered or self._is_over:
            return None
        if cycle is None and now - self._made_at > limits.header_s:
            return "header"
        return "idle" if now - self._idle_since > limits.keep_alive_s else None

    def _overdue_request(
        self, now: float, limits: TimeoutSettings, *, is_answered: bool
    ) -> str | None:
        """Of a request that is not whole."""
        is_unread = self.flow.read_paused or self.flow.waits_turn
        is_ours = is_unread or (not self._has_head and not is_answered)
        if is_ours:
            # It may be whole already, if only we would read it.
            self._partial_since = now
        elif not self._has_head:
            return "header" if now - self._partial_since > limits.header_s else None
        elif now - self._partial_since > limits.body_s:
            if self._body_bytes - self._marked_bytes < limits.body_bytes_min:
                return "body"
            self._partial_since = now
            self._marked_bytes = self._body_bytes
        return None

    def time_out(self, kind: str) -> None:
        """End the connection, with an error if the client may still read it."""
        if kind in ("header", "body") and self.is_partial:
            what = "head" if kind == "header" else "body"
            self.refuse(
                TopicsError(Code.REQUEST_TIMEOUT, f"the request's {what} arrived too slowly")
            )
        elif kind in ("header", "idle"):
            self.transport.close()
        else:
            self.transport.abort()

    @property
    def idle_rank(self) -> tuple[bool, float] | None:
        """Whether it was ever used, and since when it waits for a request; None if it does not.

        On the loop's clock, seconds.
        """
        is_idle = self._is_idle() and not self.is_partial and not self._is_over
        return (self.cycle is not None, self._idle_since) if is_idle else None
