"""The direct path: hot routes answered from the parser's callback, without a task.

A request whose head asks for nothing unusual waits, for as long as the bytes just received are
parsed, for its body. If that is whole then, and its route is hot, the answer is made on
the spot, or, where it depends on the disk, in the turn of the loop that commits it. Everything else
begins as any ASGI server would have begun it: behind what was received, with the body so far.

One rule keeps both ways alike: what they do is done by the same functions, those of
`api/front_door`, and the same handlers; a handler that has to wait has done nothing and leaves the
request to the general way
(`docs/decisions/0024-direct-way.md`). Base of `connections`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from topics_server.api.application import Application
from topics_server.api.framing import StrictHttp
from topics_server.api.front_door import FrontDoor, deflated, response_to
from topics_server.api.request import Pending, Response
from topics_server.api.request_body import OFF_LOOP_BYTES
from topics_server.api.routing import Route
from topics_server.api.upload_connection import UploadHttp
from topics_server.auth.api_keys import Recalled
from topics_server.http.content_encoding import deflate
from topics_server.http.request_ids import request_id
from topics_server.http.responses import as_preferred, last_lines, wants_gzip
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.errors import TopicsError

_METHODS: Final = {b"POST": "POST", b"GET": "GET"}


class _Nobody:
    """Stands for the task that uvicorn would wake, for a request without a task."""

    def set(self) -> None:
        """No task waits."""


class DirectRequest:
    """A request that is being answered, as uvicorn's protocol looks at it."""

    __slots__ = (
        "body",
        "disconnected",
        "headers",
        "keep_alive",
        "method",
        "more_body",
        "path",
        "request_id",
        "response_complete",
        "route",
        "started_ms",
    )

    message_event: Final = _Nobody()

    def __init__(self, method: str, path: bytes, headers: Mapping[bytes, bytes]) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.request_id = request_id(headers)
        # Of the door, once it is known.
        self.route: Route | None = None
        self.body = b""
        self.more_body = self.disconnected = self.response_complete = False
        # uvicorn's way to say that the server is going down.
        self.keep_alive = True
        self.started_ms = monotonic_ms()


class DirectHttp(UploadHttp):
    """A connection that serves whole requests of the data plane by itself."""

    # Whether the application's routes may be called past its middleware: it has none.
    _is_direct = False
    # What there is of the body of a request that is held.
    _held_body = b""
    # Whether a request was answered within the call that brought it. Those sent behind it in one
    # go have a task each: what one client sends must not keep the loop from all others.
    _had_turn = False

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        # The last token: every request of a connection sends it again.
        self._recalled = Recalled()
        self._is_direct = isinstance(self.app, Application) and self.app.has_no_middleware

    def take(self, data: bytes) -> None:
        """Read what was received."""
        self._had_turn = False
        super().take(data)

    def release_held(self) -> None:
        """Start the application on a request that is not whole."""
        self._release()

    def on_message_begin(self) -> None:
        """A request begins: what ASGI calls its scope is made when it is asked for."""
        self.begin_message()
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def _make_scope(self) -> None:
        url, headers, is_expecting = self.url, self.headers, self.expect_100_continue
        super(StrictHttp, self).on_message_begin()
        self.url, self.expect_100_continue = url, is_expecting
        self.headers += headers

    def on_headers_complete(self) -> None:
        """Hold a request back that may be whole in a moment; start any other."""
        if not self.check_head():
            self._make_scope()
            # Not `StrictHttp`'s, which would check the head again.
            super(StrictHttp, self).on_headers_complete()
            self.end_head()
        elif (
            not self._had_turn
            and self.parser.get_method() in _METHODS
            and not self.expect_100_continue
            and not self.flow.write_paused
            and self.parser.should_keep_alive()
            and self._is_direct
        ):
            self._is_held = True
        else:
            self._make_scope()
            self.begin()
            self.end_head()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if self._is_held:
            if not self._held_body:
                self._held_body = body
                return
            self._release()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole: serve it."""
        self.end_message()
        if self._is_held:
            if self._serve():
                return
            self._release()
        super(StrictHttp, self).on_message_complete()

    def _release(self) -> None:
        """Start the application on what was held back."""
        body, self._held_body = self._held_body, b""
        self._is_held = False
        self._make_scope()
        self.begin()
        self.end_head()
        if body:
            super().on_body(body)

    def refuse(self, error: TopicsError | None) -> None:
        """Forget what was held back; the rest is as with any."""
        self._is_held = False
        self._held_body = b""
        super().refuse(error)

    def _serve(self) -> bool:
        """Answer the request that was held back, or begin to; False if that cannot be."""
        method = _METHODS[self.parser.get_method()]
        request: Any = DirectRequest(method, self.url, self.fields)
        app: Any = self.app
        answer = partial(app.door.answer_whole, request, self._held_body, self._recalled)
        before, self.cycle = self.cycle, request
        if not self._answer(request, answer):
            self.cycle = before
            return False
        self._is_held = False
        self._had_turn = True
        self._held_body = b""
        return True

    def _answer(
        self, request: DirectRequest, answer: Callable[[], Response | Pending | None]
    ) -> bool:
        """Send an answer if the client is still connected, now or once it is ready.

        Returns False, without any effect, if the handler has no quick answer. Does not raise: its
        callers are the parser and the commit, which has other tickets to resolve.
        """
        try:
            response = answer()
            if response is None:
                return False
            if isinstance(response, Pending):
                response.when_resolved(partial(self._answer, request, response.answer))
            else:
                self._respond(request, response)
        except Exception as error:
            path = request.path.decode("latin-1")
            response = response_to(
                error, request.method, path, request.request_id, request.started_ms
            )
            if request.response_complete:
                self.transport.abort()
            else:
                self._respond(request, response)
        return True

    def _respond(self, request: DirectRequest, response: Response) -> None:
        if self.transport.is_closing():
            return
        if b"prefer" in request.headers:
            response = as_preferred(response, request.headers, request.path)
        pieces = response.pieces or (response.body,)
        size = sum(map(len, pieces))
        if not wants_gzip(size, request.headers):
            self._send(request, response, pieces, size, is_packed=False)
        elif size <= OFF_LOOP_BYTES:
            packed = deflate(b"".join(pieces))
            self._send(request, response, (packed,), len(packed), is_packed=True)
        else:
            task = self.loop.create_task(self._respond_packed(request, response, b"".join(pieces)))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    async def _respond_packed(
        self, request: DirectRequest, response: Response, body: bytes
    ) -> None:
        packed = await deflated(body)
        if not self.transport.is_closing():
            self._send(request, response, (packed,), len(packed), is_packed=True)

    def _send(
        self,
        request: DirectRequest,
        response: Response,
        pieces: Sequence[bytes | memoryview],
        size: int,
        *,
        is_packed: bool,
    ) -> None:
        app: Any = self.app
        door: FrontDoor = app.door
        door.observer.answered(
            request.route,
            request.method,
            request.path.partition(b"?")[0],
            response.status,
            size,
            request.started_ms,
            request.request_id,
        )
        head = b"%b%b\r\n%b" % (
            door.first_lines(
                self.server_state.default_headers, request, response, is_packed=is_packed
            ),
            last_lines(response, size, request.request_id),
            b"\r\n" if request.keep_alive else b"connection: close\r\n\r\n",
        )
        transport: Any = self.transport
        transport.write_pieces(head, pieces, size)
        request.response_complete = True
        if not request.keep_alive:
            transport.close()
        self.on_response_complete()
