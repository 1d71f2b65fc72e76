"""The ASGI application: requests as values, one response each.

It routes by the path's segments as they were sent, reads the body with its limit, calls the handler
(a plain function of `ServerState` and `Request`), and sends one start and one body message; an
`EventStream` gets its head and then the connection. Errors that handlers raise become the envelope
here, in the one place; an unforeseen one is logged and becomes `internal`. A client that hangs up
changes nothing: no handler is ever cancelled by it. Web pages of the listed origins, and of no
other, are told that they may read what is answered. A WebSocket goes to its path's own handler.
`answer_now` is for `api/direct`: the same, where nothing has to be waited for. Used by
`api/routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from topics_server.api.access_log import Observer
from topics_server.api.context import ServerState
from topics_server.api.messages.path_names import name_of, router_name_of, stream_path_of
from topics_server.api.readiness import admit
from topics_server.api.request_body import (
    OFF_LOOP_BYTES,
    ClientGoneError,
    is_bodiless,
    is_plain,
    whole_body,
)
from topics_server.api.request_body import Receive as Receive
from topics_server.auth.api_keys import EVERYBODY, WRITE, Caller, Recalled
from topics_server.auth.authorize import authorized, authorized_stream, check_name
from topics_server.auth.concurrency_limit import Counted, RequestPlace, check_inflight
from topics_server.auth.origin import check_origin, is_concerned
from topics_server.http.content_encoding import deflate, is_merge_patch
from topics_server.http.cors import cors_headers, stream_headers
from topics_server.http.error_responses import (
    Headers,
    envelope,
    from_storage,
    headers_of,
    internal,
    method_not_allowed,
    not_found,
    status_of,
)
from topics_server.http.request_ids import NAME as REQUEST_ID
from topics_server.http.request_ids import request_id as request_id_of
from topics_server.http.responses import Response as Response
from topics_server.http.responses import as_preferred, tell_of_body, wants_gzip
from topics_server.http.sockets import Socket
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import RequestFigures, log
from topics_server.values.errors import StorageError, TopicsError
from topics_server.values.limits import CONTROL_BODY_BYTES_MAX

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Of every answer: it is what it says it is, and is for who asked. A handler may say otherwise.
_GUARDS: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
# Paths whose name is known to be one; beyond, all are forgotten and checked again.
_NAMES_MAX: Final = 8192


class HangUpError(Exception):
    """The connection is closed without an answer: what makes an `EventSource` try again."""


class Request(msgspec.Struct, gc=False):
    """One request as handlers see it.

    `name` is the path's topic or router (valid, and inside the caller's prefixes), else empty;
    `headers` have lower-case names; `body` is inflated; `started_ms` is of the monotonic clock.
    `gone` returns when the client hung up. `caller` may do what the route asks for. `parked_ms` is
    how long it waited for its turn under pressure; None if it was not asked to.
    """

    method: str
    name: str
    headers: Mapping[bytes, bytes]
    query: bytes
    body: bytes
    started_ms: float
    gone: Callable[[], Awaitable[None]]
    caller: Caller = EVERYBODY
    parked_ms: float | None = None

    def elapsed_ms(self) -> float:
        """Milliseconds since the request arrived."""
        return monotonic_ms() - self.started_ms


class EventStream(msgspec.Struct, frozen=True, gc=False):
    """A 200 without an end of its own: after its head the connection is `run`'s.

    `run` sends body messages until it or the client ends the response. `free` is called in any
    case, also where `run` is not (`HEAD`), and lets go of what was taken for the stream.
    """

    headers: Headers
    run: Callable[[Receive, Send], Awaitable[None]]
    free: Callable[[], None]


class Underway(msgspec.Struct, frozen=True, gc=False):
    """A response there will be: `when_settled` calls back, once, from when on `answer` gives it.

    `answer` may raise what a handler may.
    """

    when_settled: Callable[[Callable[[], object]], None]
    answer: Callable[[], Response]


Answer = Response | EventStream
Handler = Callable[[ServerState, Request], "Answer | Awaitable[Answer]"]
# A handler's form for requests that have nothing to wait for before their outcome is on its way;
# None, and nothing done, for those that have. It never waits for `Request.gone`.
QuickHandler = Callable[[ServerState, Request], "Response | Underway | None"]
SocketHandler = Callable[[ServerState, Scope, Receive, Send], Awaitable[None]]


class Route:
    """The methods of one path template; GET brings HEAD, and OPTIONS is always there.

    `needs`: of each method what a key must grant: scopes, or `keys.ANY_KEY`, or `keys.PROBE`.
    `is_stream`: a browser's `EventSource` may call, which has nothing but a URL for its key;
    `claims`: its GET leases jobs.
    `quick`: of some methods the quick form beside the handler; both give the same answers.
    `appends`: methods whose body brings records; all other bodies have the control plane's limit.
    A template that ends in `/{path}` is the mount of streams: any further segments are their path,
    and bodies are what the handler takes them for.
    """

    __slots__ = (
        "allow",
        "appends",
        "claims",
        "figures",
        "handlers",
        "is_named",
        "is_mount",
        "is_of_router",
        "is_of_topic",
        "is_stream",
        "names",
        "needs",
        "quick",
        "template",
    )

    def __init__(
        self,
        template: str,
        handlers: Mapping[str, Handler],
        quick: Mapping[str, QuickHandler] = MappingProxyType({}),
        *,
        needs: Mapping[str, int],
        appends: Iterable[str] = (),
        is_stream: bool = False,
    ) -> None:
        assert quick.keys() <= handlers.keys() == needs.keys(), template
        self.appends = frozenset(appends)
        # A key that may not write sends no large body.
        assert all(needs[method] & WRITE for method in self.appends), template
        self.template = template
        self.quick = dict(quick)
        self.needs = dict(needs)
        self.is_stream = is_stream
        self.is_named = "{" in template
        self.is_of_topic = "/{topic}" in template
        self.is_of_router = "/{router}" in template
        self.is_mount = template.endswith("/{path}")
        self.claims = is_stream and self.is_of_topic
        # What is held against a key's prefixes.
        kinds = {"topic": self.is_of_topic, "router": self.is_of_router, "path": self.is_mount}
        self.names = next((kind for kind, is_of_it in kinds.items() if is_of_it), "")
        self.handlers = dict(handlers)
        if "GET" in self.handlers:
            self.handlers["HEAD"] = self.handlers["GET"]
            self.needs["HEAD"] = self.needs["GET"]
        self.allow = ", ".join(sorted({*self.handlers, "OPTIONS"}))
        self.figures = {method: RequestFigures() for method in (*self.handlers, "OPTIONS")}

    def max_body_bytes(self, method: str, max_append_bytes: int) -> int:
        """Bytes of a request's body, as sent and as inflated."""
        if method in self.appends:
            return max_append_bytes
        return min(CONTROL_BODY_BYTES_MAX, max_append_bytes)


class Routes:
    """Paths to routes. A template has at most one parameter, in third place: `{topic}` or another.

    A topic's, router's or stream's name is checked here; what else stands there is its handler's
    to judge. One route may be a mount, under which no other has its place.
    """

    def __init__(self, table: Iterable[Route]) -> None:
        self.table = tuple(table)
        self._fixed: dict[bytes, Route] = {}
        self._named: dict[tuple[bytes, ...], Route] = {}
        # Paths that were asked for: their route and the topic's name.
        self._known: dict[bytes, tuple[Route, str]] = {}
        self._mount: Route | None = None
        # What no path begins with, for a start.
        self._mounted = b"\0"
        for route in self.table:
            path = route.template.encode("ascii")
            if route.is_mount:
                self._mount, self._mounted = route, path.removesuffix(b"{path}")
                continue
            if not route.is_named:
                self._fixed[path] = route
                continue
            segments = path.split(b"/")
            assert segments[3][:1] + segments[3][-1:] == b"{}", route.template
            self._named[(*segments[1:3], *segments[4:])] = route

    def name_at(self, route: Route, raw_path: bytes, segment: bytes) -> str:
        """What stands in the path of a named route; a topic's name is checked, once.

        Raises `invalid_request`.
        """
        if route.is_of_router:
            return router_name_of(segment)
        if not (route.is_of_topic or route.is_mount):
            return segment.decode("latin-1")
        known = self._known.get(raw_path)
        if known is None:
            if len(self._known) >= _NAMES_MAX:
                self._known.clear()
            name = stream_path_of(segment) if route.is_mount else name_of(segment)
            known = self._known[raw_path] = (route, name)
        return known[1]

    def known(self, raw_path: bytes) -> tuple[Route, str] | None:
        """The route of a topic's path and its name, if they were asked for before."""
        return self._known.get(raw_path)

    def split(self, url: bytes) -> tuple[bytes, bytes]:
        """Path and query of a URL below the mount; of another all of it, which is no path."""
        path, _, query = url.partition(b"?")
        return (path, query) if self.is_mounted(path) else (url, b"")

    def is_mounted(self, raw_path: bytes) -> bool:
        """Whether this is a path below the mount."""
        return raw_path.startswith(self._mounted)

    def find(self, raw_path: bytes) -> tuple[Route | None, bytes]:
        """The route of a path as it was sent, and its named segment, unescaped.

        Of the mount all that is behind it, as it was sent.
        """
        route = self._fixed.get(raw_path)
        if route is not None:
            return route, b""
        # Split first: an escaped slash is part of a segment, never a separator.
        segments = raw_path.split(b"/")
        count = len(segments)
        if count == 4:
            route = self._named.get((segments[1], segments[2])) if segments[3] else None
        elif count == 5:
            route = self._named.get((segments[1], segments[2], segments[4]))
        if route is None:
            if self.is_mounted(raw_path):
                return self._mount, raw_path[len(self._mounted) :]
            return None, b""
        name = segments[3]
        return route, unquote_to_bytes(name) if b"%" in name else name


def response_of(
    error: TopicsError, extra: Headers = (), started_ms: float | None = None
) -> Response:
    """A refusal as a response; `started_ms`: of its request, where there was one."""
    total_ms = None if started_ms is None else monotonic_ms() - started_ms
    return Response(status_of(error), envelope(error, total_ms), headers_of(error) + extra)


def response_to(
    error: Exception, method: str, path: str, request_id: bytes, started_ms: float
) -> Response:
    """What a client is told of what a handler raised; what it is not told is logged."""
    if isinstance(error, TopicsError):
        return response_of(error, started_ms=started_ms)
    if isinstance(error, StorageError):
        log.error("storage refused %s %s (%s): %s", method, path, request_id.decode("ascii"), error)
        return response_of(from_storage(error), started_ms=started_ms)
    shown = request_id.decode("ascii")
    log.error("defect while serving %s %s (%s)", method, path, shown, exc_info=error)
    return response_of(internal(), started_ms=started_ms)


class Application:
    """The ASGI application over a route table; holds nothing but references."""

    def __init__(
        self,
        state: ServerState,
        routes: Routes,
        sockets: Mapping[bytes, SocketHandler] = MappingProxyType({}),
    ) -> None:
        self.state = state
        self.routes = routes
        self.sockets = sockets
        self.observer = Observer(routes.table, routes.known, routes.find)
        state.requests = self.observer.facts
        self._origins = state.settings.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope, as ASGI has it."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        else:
            await self._serve_socket(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = RequestPlace()
        try:
            await self._serve_counted(scope, receive, send, place)
        finally:
            place.free()

    async def _serve_counted(
        self, scope: Scope, receive: Receive, send: Send, place: RequestPlace
    ) -> None:
        started_ms = monotonic_ms()
        headers = dict(scope["headers"])
        request_id = request_id_of(headers)
        try:
            response = await self._answer(scope, headers, receive, started_ms, place)
        except ClientGoneError:
            return
        except HangUpError:
            await _hang_up(receive, send)
            return
        except Exception as error:
            response = response_to(error, scope["method"], scope["path"], request_id, started_ms)
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode("utf-8")
        if b"prefer" in headers and isinstance(response, Response):
            response = as_preferred(response, headers, raw_path)
        told = self.told(response, scope["method"], headers, raw_path)
        if isinstance(response, EventStream):
            place.free()
            self.observer.answered(scope["method"], raw_path, 200, 0, started_ms, request_id)
            if scope.get("http_version") == "1.0":
                Socket(send).end_with_connection()
            if not Socket(send).is_kept:
                # Whoever serves says that the connection ends; it is said once.
                told = [header for header in told if header[0] != b"connection"]
            told.append((REQUEST_ID, request_id))
            await _stream(response, told, scope["method"], receive, send)
            return
        body = response.body
        is_packed = wants_gzip(len(body), headers)
        if is_packed:
            body = await deflated(body)
        tell_of_body(told, response, len(body), request_id, is_packed=is_packed)
        self.observer.answered(
            scope["method"], raw_path, response.status, len(body), started_ms, request_id
        )
        await send({"type": "http.response.start", "status": response.status, "headers": told})
        if scope["method"] == "HEAD":
            body = b""
        await send({"type": "http.response.body", "body": body})

    def told(
        self, response: Answer, method: str, headers: Mapping[bytes, bytes], raw_path: bytes
    ) -> list[tuple[bytes, bytes]]:
        """The headers of an answer, but for those that tell of its body."""
        told = _guarded(response.headers) if response.headers else list(_GUARDS)
        is_listed = bool(self._origins) and headers.get(b"origin") in self._origins
        if is_listed:
            told += cors_headers(method, headers, response.headers)
        if self.routes.is_mounted(raw_path):
            told += stream_headers(method, is_listed=is_listed)
        return told

    def answer_now(
        self,
        method: str,
        raw_path: bytes,
        headers: Mapping[bytes, bytes],
        body: bytes,
        recalled: Recalled,
    ) -> Response | Underway | None:
        """Serve a whole request by the quick form of its handler; None if that cannot be.

        Then nothing was done: whatever is unusual about it is for `__call__` to tell. `recalled` is
        the connection's. Raises what handlers raise.
        """
        started_ms = monotonic_ms()
        self.state.hosts.check(headers.get(b"host"))
        route: Route | None
        query = b""
        if b"?" in raw_path:
            raw_path, query = self.routes.split(raw_path)
        known = self.routes.known(raw_path)
        if known is not None:
            route, name = known
        else:
            route, segment = self.routes.find(raw_path)
            name = ""
        quick = None if route is None else route.quick.get(method)
        if quick is None or not (
            is_plain(
                headers,
                route.max_body_bytes(method, self.state.settings.max_body_bytes),
                is_json=not route.is_mount,
            )
            if route is not None and method == "POST"
            else is_bodiless(headers)
        ):
            return None
        assert route is not None
        caller = authorized(
            self.state.keys, headers.get(b"authorization"), route.needs[method], recalled
        )
        if b"origin" in headers or b"sec-fetch-site" in headers:
            self._check_page(route, method, query, headers, caller)
        if not name:
            name = self.routes.name_at(route, raw_path, segment)
        if caller.prefixes:
            check_name(caller, name, route.names)
        request = Request(method, name, headers, query, body, started_ms, _gone_never, caller)
        key = caller.key
        if key is None:
            return quick(self.state, request)
        check_inflight(key, self.state.settings.max_inflight_per_key)
        answer = quick(self.state, request)
        if not isinstance(answer, Underway):
            return answer
        place = RequestPlace()
        place.take(key, 0)
        return Underway(answer.when_settled, Counted(place, answer.answer))

    async def _answer(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        receive: Receive,
        started_ms: float,
        place: RequestPlace,
    ) -> Answer:
        self.state.hosts.check(headers.get(b"host"))
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode("utf-8")
        route, segment = self.routes.find(raw_path)
        method: str = scope["method"]
        if route is None:
            raise not_found(raw_path.decode("latin-1"))
        handler = route.handlers.get(method)
        if handler is None:
            allow = ((b"allow", route.allow.encode("ascii")),)
            if method == "OPTIONS":
                return Response(204, b"", allow)
            error = method_not_allowed(method[:32], route.allow)
            return response_of(error, allow, started_ms)
        caller = self._caller(route, method, headers, scope["query_string"], segment)
        if b"origin" in headers or b"sec-fetch-site" in headers:
            self._check_page(route, method, scope["query_string"], headers, caller)
        place.take(caller.key, self.state.settings.max_inflight_per_key)
        name = self.routes.name_at(route, raw_path, segment) if route.is_named else ""
        if caller.prefixes and route.names:
            check_name(caller, name, route.names)
        body = b""
        if method in ("POST", "PUT", "PATCH"):
            # Nobody should send 64 MiB to hear that the server is not ready.
            admit(self.state)
            take_slot = partial(place.hold, self.state.inflated)
            body = await whole_body(
                headers,
                receive,
                route.max_body_bytes(method, self.state.settings.max_body_bytes),
                is_json=not route.is_mount and not is_merge_patch(method, headers),
                take_slot=take_slot if method in route.appends else None,
            )
        request = Request(
            method,
            name,
            headers,
            scope["query_string"],
            body,
            started_ms,
            partial(_gone, receive),
            caller,
        )
        answer = handler(self.state, request)
        return answer if isinstance(answer, (Response, EventStream)) else await answer

    def _caller(
        self,
        route: Route,
        method: str,
        headers: Mapping[bytes, bytes],
        query: bytes,
        segment: bytes,
    ) -> Caller:
        """Who makes a request, if they may; raises `unauthorized`, `forbidden`."""
        state, need = self.state, route.needs[method]
        if not route.is_stream:
            return authorized(state.keys, headers.get(b"authorization"), need)
        wid = "" if route.is_of_topic else segment.decode("latin-1")
        return authorized_stream(
            state.keys, state.tickets, headers, query, wid, need, monotonic_ms()
        )

    def _check_page(
        self,
        route: Route,
        method: str,
        query: bytes,
        headers: Mapping[bytes, bytes],
        caller: Caller,
    ) -> None:
        """Raises `forbidden` for a web page that may not have its browser ask for this."""
        if is_concerned(method, query, claims=route.claims):
            # A key in the URL is no proof: only a header tells that its page was let in.
            is_authorized = caller.key is not None and b"authorization" in headers
            check_origin(headers, self._origins, is_authorized=is_authorized)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode("utf-8")
        handler = self.sockets.get(raw_path)
        if handler is not None:
            await handler(self.state, scope, receive, send)
        else:
            await refuse_socket(scope, send, not_found(raw_path.decode("latin-1")))


def _guarded(headers: Headers) -> list[tuple[bytes, bytes]]:
    """These headers and the guards, unless they speak of the same."""
    names = {name for name, _ in headers}
    return [*(guard for guard in _GUARDS if guard[0] not in names), *headers]


async def refuse_socket(scope: Scope, send: Send, error: TopicsError) -> None:
    """Answer a WebSocket's opening with a refusal: the envelope, where the server can send one."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1000})
        return
    response = response_of(error)
    told = _guarded(response.headers)
    request_id = request_id_of(dict(scope["headers"]))
    tell_of_body(told, response, len(response.body), request_id, is_packed=False)
    start = {"type": "websocket.http.response.start", "status": response.status, "headers": told}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": response.body})


async def _stream(
    stream: EventStream, told: list[tuple[bytes, bytes]], method: str, receive: Receive, send: Send
) -> None:
    try:
        await send({"type": "http.response.start", "status": 200, "headers": told})
        if method == "HEAD":
            await send({"type": "http.response.body", "body": b""})
        else:
            await stream.run(receive, send)
    finally:
        stream.free()


async def _hang_up(receive: Receive, send: Send) -> None:
    """Close the connection below ASGI, which knows no such thing; returns when it is closed."""
    Socket(send).abort()
    await _gone(receive)


async def deflated(body: bytes) -> bytes:
    """The body as gzip; packed off the event loop if it is large."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(deflate, body)
    return deflate(body)


async def _gone_never() -> None:
    raise AssertionError("a quick handler waits for nobody")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    """The server's life is `server.py`'s business; here it is only acknowledged."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
