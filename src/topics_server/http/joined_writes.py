"""uvicorn's HTTP protocol with joined writes of head and body.

uvicorn writes head and body apart, and the event loop hands each to the kernel at once: two system
calls, two packets, and a client that wakes up for half an answer. `JoinedWrites` is a transport
that holds a head until the next write, or until the end of the loop's turn if none comes (a stream
that has nothing to say yet). `JoinedCycle` sends an answer whose length is known in one piece, and
hands a body that came in one piece over without a copy. While others are being answered too, that
piece leaves when all their work of this turn is done: clients that are woken one by one in between
take the processor, and send their next requests one by one. `JoinedHttp` puts both in place of
uvicorn's, for requests without anything unusual in their first line; uvicorn serves all others.
Used by `server`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from topics_server.http.sockets import EXTENSION

_HEAD: Final = b"HTTP/1.1 "
# Up to this size, joining two pieces is cheaper than passing both to the kernel.
_COPIED_BYTES_MAX: Final = 16_384
# Of a body that is not whole, so much is gathered before it is handed on.
_GATHERED_BYTES: Final = 32_768
# What differs from answer to answer; kept out of what is remembered of heads.
VARYING: Final = frozenset(
    b"content-length x-request-id "
    b"producer-epoch producer-seq topic-first-seq topic-last-seq "
    b"stream-next-offset stream-cursor etag location".split()
)
# A path that is its own escaped form, without a query: nothing in it has to be parsed.
_PLAIN_PATH: Final = re.compile(rb"(?:/[A-Za-z0-9._:-]+)+")


class JoinedWrites:
    """The transport of one connection, but for `write`, `finish`, `close` and `abort`."""

    __slots__ = ("_held", "_loop", "_past", "_transport", "answer_bytes", "is_closing")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        # While a large answer is handed over: all of it stays in memory until its last byte left.
        self.answer_bytes = 0
        self._loop = loop
        self._held: bytes | None = None
        self._past = transport.write
        self.is_closing: Callable[[], bool] = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_write_buffer_size(self) -> int:
        """Bytes handed over that the kernel has not taken."""
        size: int = self._transport.get_write_buffer_size()
        return size

    def write(self, data: bytes) -> None:
        """Send `data`, behind a head that was held back, or hold it back if it is a head."""
        held = self._held
        if held is not None:
            self._held = None
            self.write_joined(held, data)
        elif data[:9] == _HEAD:
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def past(self) -> Any:
        """What writes bytes that are no head past this object; None if something is held back."""
        return self._past if self._held is None else None

    def write_soon(self, head: bytes, body: bytes) -> None:
        """Send two pieces as one, behind all that the loop's turn has to do."""
        self._flush()
        self._held = head + body
        self._loop.call_soon(self._flush)

    def write_joined(self, head: bytes, body: bytes) -> None:
        """Send two pieces as one, behind what is held back."""
        self._flush()
        if len(body) <= _COPIED_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._write_large((head, body), len(body))

    def write_pieces(self, head: bytes, pieces: Sequence[bytes | memoryview], size: int) -> None:
        """Send a head and a body in pieces, of `size` bytes together, as one."""
        if self._held is not None:
            self._flush()
        if size <= _COPIED_BYTES_MAX:
            self._transport.write(b"".join((head, *pieces)))
        else:
            self._write_large((head, *pieces), size)

    def _write_large(self, pieces: Sequence[bytes | memoryview], size: int) -> None:
        self.answer_bytes = size
        self._transport.writelines(pieces)
        self.answer_bytes = 0

    def _flush(self) -> None:
        held = self._held
        if held is not None:
            self._held = None
            self._transport.write(held)

    def finish(self) -> None:
        """Send what is held back, then say that no more is coming."""
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Send what is held back, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is held back is dropped."""
        self._held = None
        self._transport.abort()


class Flow(FlowControl):
    """uvicorn's flow control, and the callback of a writer that bypasses its `send`.

    The callback is called when the buffer is full and when the connection is lost (uvicorn then
    wakes the tasks that wait for room).
    """

    let_go: Callable[[], None] | None = None
    # Nothing is read until the connection's turn among large uploads (`http/upload_turns`).
    waits_turn = False
    # Nothing is read until what was received is parsed (`api/framing`).
    is_behind = False

    def resume_reading(self) -> None:
        """Read, unless the connection waits for its turn, or is behind."""
        if self.read_paused:
            self.read_paused = False
            self._resume()

    def fall_behind(self) -> None:
        """Read nothing until `catch_up`."""
        self.is_behind = True
        self._transport.pause_reading()

    def catch_up(self) -> None:
        """Read, unless something else keeps the connection from it."""
        self.is_behind = False
        self._resume()

    def _resume(self) -> None:
        if not (self.read_paused or self.waits_turn or self.is_behind):
            self._transport.resume_reading()

    def end_turn(self) -> None:
        """Read nothing until `begin_turn`."""
        self.waits_turn = True
        self._transport.pause_reading()

    def begin_turn(self) -> None:
        """Read, unless something else keeps the connection from it."""
        self.waits_turn = False
        self._resume()

    def pause_writing(self) -> None:
        """The buffer is full."""
        super().pause_writing()
        self._let_go()

    def resume_writing(self) -> None:
        """There is room again, or never will be."""
        super().resume_writing()
        self._let_go()

    def _let_go(self) -> None:
        callback, self.let_go = self.let_go, None
        if callback is not None:
            callback()


class JoinedCycle(RequestResponseCycle):
    """One request and its answer."""

    transport: Any
    body: Any
    under_way: Any = ()
    _start: Any = None

    async def receive(self) -> Any:
        """The body, as ASGI has it; see uvicorn's."""
        is_whole = not (self.more_body or self.response_complete or self.disconnected)
        if is_whole and self.body and not self.waiting_for_100_continue:
            self.flow.resume_reading()
            self.message_event.clear()
            body, self.body = self.body, bytearray()
            return {"type": "http.request", "body": bytes(body), "more_body": False}
        return await super().receive()

    async def send(self, message: Any) -> None:
        """Hold back the start of an answer of known length, then send it whole."""
        start = self._start
        if start is not None:
            self._start = None
            if not message.get("more_body", False) and not self.disconnected:
                self._answer(start, message["body"])
                return
            await super().send(start)
        elif self._is_plain(message):
            self._start = message
            return
        await super().send(message)

    def _is_plain(self, message: Any) -> bool:
        """Whether this starts an answer that can be sent whole."""
        return (
            message["type"] == "http.response.start"
            and not self.response_started
            and self.keep_alive
            and not self.flow.write_paused
            # `api/application` puts it last; a stream has none.
            and _is_sized(message["headers"])
            and self.scope["method"] != "HEAD"
        )

    def _answer(self, start: Any, body: bytes) -> None:
        headers = [*self.default_headers, *start["headers"]]
        joined = head_of(start["status"], headers)
        assert int(headers[-1][1]) == len(body)
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        if len(self.under_way) > 1 and len(body) <= _COPIED_BYTES_MAX:
            self.transport.write_soon(joined, body)
        else:
            self.transport.write_joined(joined, body)
        self.message_event.set()
        self.on_response()


def head_of(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The head of an answer. What differs from answer to answer stands last in `headers`."""
    end = len(headers)
    rest = b"\r\n"
    while headers[end - 1][0] in VARYING:
        end -= 1
        rest = b"%b: %b\r\n%b" % (*headers[end], rest)
    assert end < len(headers), "every answer has an id"
    return lines_of_head(status, tuple(headers[:end])) + rest


@lru_cache(maxsize=256)
def lines_of_head(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """The first lines of a head, which most answers have in common."""
    head = [STATUS_LINE[status]]
    for name, value in headers:
        head += (name, b": ", value, b"\r\n")
    joined = b"".join(head)
    assert joined.count(b"\n") == len(headers) + 1, "no header holds a line break"
    return joined


def _is_sized(headers: Any) -> bool:
    """Whether id and length come last, where `api/application` puts them; a stream has no
    length.
    """
    return (
        len(headers) > 1
        and headers[-1][0] == b"content-length"
        and headers[-2][0] == b"x-request-id"
    )


class JoinedHttp(HttpToolsProtocol):
    """uvicorn's protocol over `JoinedWrites`.

    It has no timers: starting and stopping one would cost more than everything else between two
    requests. `http/timeouts` enforces the timeouts.
    """

    _idle_since = 0.0

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        joined: Any = JoinedWrites(transport, self.loop)
        super().connection_made(joined)
        self.flow = Flow(joined)

    def on_message_begin(self) -> None:
        """A request begins; its scope says that the connection is ours."""
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {EXTENSION: self.transport}

    def on_headers_complete(self) -> None:
        """Start to serve the request whose head is there."""
        if self.is_plain_head():
            self.begin()
        else:
            super().on_headers_complete()

    def is_plain_head(self) -> bool:
        """Whether the head asks for nothing unusual, and no other request is being answered."""
        parser = self.parser
        before: Any = self.cycle
        return (
            _PLAIN_PATH.fullmatch(self.url) is not None
            and not self.root_path
            and self.limit_concurrency is None
            and (before is None or before.response_complete)
            and not parser.should_upgrade()
            and parser.get_http_version() == "1.1"
        )

    def begin(self) -> None:
        """Start the application on a request with a plain head."""
        parser, url, scope = self.parser, self.url, self.scope
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"] = url.decode("ascii")
        scope["raw_path"] = url
        scope["query_string"] = b""
        self.cycle = JoinedCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle.under_way = self.tasks
        self._start_asgi_task(self.cycle, self.app)

    def on_response_complete(self) -> None:
        """The answer is out: start the next request of a pipeline, or wait for one."""
        self._idle_since = self.loop.time()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; the first one without a copy.

        The waiting task needs the whole body: it is woken once the body is complete, or large.
        """
        cycle: Any = self.cycle
        if not isinstance(cycle, JoinedCycle) or cycle.response_complete:
            super().on_body(body)
            return
        if not cycle.body:
            cycle.body = body
        else:
            if isinstance(cycle.body, bytes):
                cycle.body = bytearray(cycle.body)
            cycle.body += body
        if len(cycle.body) >= _GATHERED_BYTES:
            super().on_body(b"")
