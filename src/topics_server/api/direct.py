"""The direct way: hot routes answered from the parser's callback, without a task.

`ConnectionDoor` is the application's interface for connections of this server
(`http/exchange/door`). It makes a `HotCall` from the head of a request. The call has everything
that does not depend on the body: route, handler, name, rights. If the handler need not wait, it
answers at once; if the answer depends on the disk, it is made in the loop turn that commits the
write. Every other request goes the general way, as under any ASGI server.

Both ways call the same functions of `api/front_door` and the same handlers, so that they behave
alike. A handler that would have to wait changes nothing and leaves the request to the general way
(`docs/decisions/0024-direct-way.md`). Requests with the same head may share one call (`is_lasting`)
until the keys change; the call stores no key.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from topics_server.api.front_door import FrontDoor, deflated, response_of, response_to
from topics_server.api.messages.producer_headers import FIELDS as OF_PRODUCERS
from topics_server.api.messages.producer_headers import SEQ as PRODUCER_SEQ
from topics_server.api.request import Pending, Request, Response
from topics_server.api.request_body import OFF_LOOP_BYTES, is_bodiless, is_plain
from topics_server.api.routing import Route
from topics_server.api.websocket import frames as ws_frames
from topics_server.auth.api_keys import EVERYBODY, Recalled, bearer_token
from topics_server.auth.authorize import authorized_socket
from topics_server.auth.concurrency_limit import check_inflight
from topics_server.http.content_encoding import accepts_gzip, deflate
from topics_server.http.error_responses import internal
from topics_server.http.exchange.door import AnsweringConnection, DirectCall
from topics_server.http.exchange.known_heads import KnownHeads
from topics_server.http.read_scheduler import ReadScheduler
from topics_server.http.request_ids import NAME as REQUEST_ID
from topics_server.http.request_ids import NEW_ID, next_number, request_id
from topics_server.http.responses import (
    BODILESS,
    DEFLATED_BYTES_MIN,
    ID_AND_LENGTH,
    as_preferred,
    last_lines,
    tell_of_body,
)
from topics_server.http.timeouts import ConnectionTimeouts
from topics_server.http.upload_budget import UploadBudget
from topics_server.http.upload_turns import UploadTurns
from topics_server.runtime.clock import monotonic_s
from topics_server.values.errors import TopicsError

_METHODS: Final = {b"POST": "POST", b"GET": "GET"}
# If so many other requests were answered since a connection's last one, its small answers leave at
# the end of the turn.
_CROWD: Final = 7
# Header fields that differ between requests, or whose effect depends on more than the head.
_PASSING: Final = frozenset(
    b"x-request-id idempotency-key last-event-id origin sec-fetch-site if-none-match range "
    b"if-match producer-id producer-epoch producer-seq stream-seq stream-closed stream-ttl "
    b"stream-expires-at stream-forked-from stream-fork-offset stream-fork-sub-offset "
    b"traceparent".split()
)


class ConnectionDoor:
    """The application's door: its services for connections of our own beyond ASGI.

    `is_direct`: its routes may be called past its middleware, because it has none.
    """

    def __init__(self, door: FrontDoor) -> None:
        self.front = door
        self.is_direct = True
        self.known_heads = KnownHeads()

    @property
    def timeouts(self) -> ConnectionTimeouts:
        """See `door.Door`."""
        return self.front.state.timeouts

    @property
    def read_scheduler(self) -> ReadScheduler | None:
        """See `door.Door`."""
        return self.front.state.read_scheduler

    @property
    def uploads(self) -> UploadBudget:
        """See `door.Door`."""
        return self.front.state.uploads

    @property
    def upload_turns(self) -> UploadTurns:
        """See `door.Door`."""
        return self.front.state.upload_turns

    def upload_key(self, fields: Mapping[bytes, bytes]) -> object:
        """See `door.Door`."""
        token = bearer_token(fields.get(b"authorization"))
        caller = None if token is None else self.front.state.keys.find(token)
        return None if caller is None else caller.key

    def refusal(self, error: TopicsError | None) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """See `door.Door`."""
        response = response_of(error or internal())
        headers = self.front.response_headers(response, "GET", {}, b"")
        # The parser refused this head, so no request id is read from it.
        tell_of_body(headers, response, len(response.body), request_id({}), is_packed=False)
        return response.status, headers, response.body

    def socket_key(self, headers: Iterable[tuple[bytes, bytes]], offered: list[str]) -> object:
        """See `door.Door`."""
        try:
            return authorized_socket(self.front.state.keys, dict(headers), offered).key
        except TopicsError:
            return None

    def socket_error(self, error: TopicsError) -> bytes:
        """See `door.Door`."""
        return ws_frames.error(None, error)

    def direct_call(
        self, method: bytes, url: bytes, fields: dict[bytes, bytes]
    ) -> DirectCall | None:
        """See `door.Door`."""
        known_method = _METHODS.get(method)
        if known_method is None or not self.is_direct:
            return None
        routes = self.front.routes
        path, query = routes.split(url) if b"?" in url else (url, b"")
        known = routes.known(path)
        route, segment = routes.find(path) if known is None else (known[0], b"")
        if route is None or known_method not in route.hot:
            return None
        if known_method == "GET":
            is_simple = is_bodiless(fields)
        else:
            most = route.max_body_bytes(known_method, self.front.state.settings.max_body_bytes)
            is_simple = is_plain(fields, most, is_json=not route.is_mount)
        if not is_simple:
            return None
        name = known[1] if known is not None else ""
        return HotCall(self, route, known_method, path, query, segment, name, fields)


class HotCall:
    """Answers all requests with the same head; see `door.DirectCall`."""

    __slots__ = (
        "_caller",
        "_defaults",
        "_door",
        "_fields",
        "_first",
        "_generation",
        "_handler",
        "_is_checked",
        "_kind",
        "_method",
        "_name",
        "_path",
        "_prefers",
        "_query",
        "_request_id",
        "_route",
        "_segment",
        "_state",
        "_takes_gzip",
        "counter",
        "is_lasting",
        "kept_bytes",
        "length",
    )

    def __init__(
        self,
        door: ConnectionDoor,
        route: Route,
        method: str,
        path: bytes,
        query: bytes,
        segment: bytes,
        name: str,
        fields: dict[bytes, bytes],
    ) -> None:
        self._door = door
        self._state = door.front.state
        self._route = route
        self._handler = route.handlers[method]
        self._method = method
        self._path = path
        self._query = query
        self._segment = segment
        self._name = name
        self._fields = fields
        self._caller = EVERYBODY
        self._generation = self._state.keys.generation
        self._is_checked = False
        self._prefers = b"prefer" in fields
        self._takes_gzip = accepts_gzip(fields.get(b"accept-encoding"))
        # The lines that the last plain answer to this head shares with all of its kind (status and
        # type), made with these defaults.
        self._first = b""
        self._kind = (0, b"")
        self._defaults: list[tuple[bytes, bytes]] = []
        self.length = int(fields.get(b"content-length", b"0"))
        self.kept_bytes = 0
        passing = _PASSING.intersection(fields)
        self.counter = b""
        if passing == OF_PRODUCERS:
            # The requests of a producer have the same head, except for their number.
            self.counter, passing = PRODUCER_SEQ, frozenset()
        self.is_lasting = not (query or passing)
        self._request_id = request_id(fields) if REQUEST_ID in fields else b""

    def _check(self, connection: AnsweringConnection) -> None:
        """Check that the caller may make this request. Raises the errors of the general way."""
        front, fields = self._door.front, self._fields
        recalled = connection.recalled
        if not isinstance(recalled, Recalled):
            # Caches the last token, because every request of a connection repeats it.
            recalled = Recalled()
            if self._state.keys.is_on:
                connection.recalled = recalled
        caller = self._caller = front.admitted(
            self._route, self._method, fields, self._query, self._segment, recalled
        )
        if not self._name or caller.prefixes:
            self._name = front.name_of(self._route, self._path, self._segment, caller)
        if self.is_lasting:
            fields.pop(b"authorization", None)
        self._is_checked = True

    def serve(self, connection: AnsweringConnection, body: bytes, number: bytes = b"") -> bool:
        """See `door.DirectCall`."""
        state = self._state
        if self._is_checked and (
            state.keys.generation != self._generation or state is not self._door.front.state
        ):
            self._door.known_heads.clear()
            return False
        connection.is_answering_directly = True
        request = Request(
            self._method,
            self._name,
            {**self._fields, self.counter: number} if number else self._fields,
            self._query,
            body,
            monotonic_s() * 1000,
            _gone_never,
            self._caller,
        )
        return self._answer(connection, request, None)

    def _answer(
        self,
        connection: AnsweringConnection,
        request: Request,
        resolved: Callable[[], Response] | None,
    ) -> bool:
        """Send an answer, now or once it is ready, if the client is still connected.

        Returns False, without any effect, if the handler has to wait. Does not raise: its callers
        are the parser and the commit, which has other tickets to resolve.
        """
        try:
            key = request.caller.key
            answer: Response | Pending | object
            if resolved is None:
                if not self._is_checked:
                    self._check(connection)
                    request.name, request.caller = self._name, self._caller
                    key = self._caller.key
                if key is not None:
                    check_inflight(key, self._state.settings.max_inflight_per_key)
                answer = self._handler(self._state, request)
            else:
                if key is not None:
                    key.in_flight -= 1
                answer = resolved()
            if isinstance(answer, Response):
                self._respond(connection, request, answer)
                return True
            if isinstance(answer, Pending):
                if key is not None:
                    key.in_flight += 1
                connection.is_late = True
                answer.when_resolved(partial(self._answer, connection, request, answer.answer))
                return True
            if isinstance(answer, Coroutine):
                # The coroutine has not begun, so closing it undoes nothing.
                answer.close()
            connection.is_answering_directly = False
            return False
        except Exception as error:
            made_id = self._request_id or NEW_ID % next_number()
            path = self._path.decode("latin-1")
            response = response_to(error, self._method, path, made_id, request.started_ms)
            if connection.is_answering_directly:
                self._respond(connection, request, response, made_id)
            else:
                connection.transport.abort()
            return True

    def _respond(
        self,
        connection: AnsweringConnection,
        request: Request,
        response: Response,
        made_id: bytes = b"",
    ) -> None:
        """Send an answer, as gzip if the client accepts gzip."""
        if connection.transport.is_closing():
            return
        if self._prefers:
            response = as_preferred(response, self._fields, self._path)
        pieces: Sequence[bytes | memoryview] = response.pieces
        if pieces:
            size = sum(map(len, pieces))
        else:
            pieces = (response.body,)
            size = len(response.body)
        made_id = made_id or self._request_id or NEW_ID % next_number()
        if size < DEFLATED_BYTES_MIN or not self._takes_gzip:
            self._send(connection, request, response, pieces, size, made_id)
        elif size <= OFF_LOOP_BYTES:
            packed = deflate(b"".join(pieces))
            self._send(
                connection, request, response, (packed,), len(packed), made_id, is_packed=True
            )
        else:
            body = b"".join(pieces)
            packing = self._respond_packed(connection, request, response, body, made_id)
            task = connection.loop.create_task(packing)
            task.add_done_callback(connection.tasks.discard)
            connection.tasks.add(task)

    async def _respond_packed(
        self,
        connection: AnsweringConnection,
        request: Request,
        response: Response,
        body: bytes,
        made_id: bytes,
    ) -> None:
        packed = await deflated(body)
        if not connection.transport.is_closing():
            self._send(
                connection, request, response, (packed,), len(packed), made_id, is_packed=True
            )

    def _send(
        self,
        connection: AnsweringConnection,
        request: Request,
        response: Response,
        pieces: Sequence[bytes | memoryview],
        size: int,
        made_id: bytes,
        *,
        is_packed: bool = False,
    ) -> None:
        front, status, route = self._door.front, response.status, self._route
        defaults = connection.server_state.default_headers
        kind = None if is_packed or response.headers else (status, response.content_type)
        if kind == self._kind and defaults is self._defaults:
            first = self._first
        else:
            first = front.first_lines(
                defaults, route, request, self._path, response, is_packed=is_packed
            )
            if kind is not None:
                self._first, self._kind, self._defaults = first, kind, defaults
        if status in BODILESS:
            last = last_lines(response, size, made_id)
        else:
            last = ID_AND_LENGTH % (response.varying, made_id, size)
        number = connection.server_state.total_requests + 1
        others = number - 1 - connection.last_request
        connection.last_request = number
        connection.transport.is_put_off = others >= _CROWD and not connection.is_late
        connection.is_late = False
        connection.answer(b"%b%b\r\n" % (first, last), pieces, size)
        # The client does not wait for the rest.
        polling = self._state.busy_polling
        if others:
            polling.streak = 0
        else:
            polling.answered_again(connection.loop, request.started_ms)
        front.observer.answered(
            route, self._method, self._path, status, size, request.started_ms, made_id
        )


async def _gone_never() -> None:
    raise AssertionError("a whole request waits for nobody")
