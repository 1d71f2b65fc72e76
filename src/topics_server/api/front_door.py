"""The checks and limits that every request passes, under any ASGI server.

Hosts, keys, origins, limits, ids, metrics and the envelope are decided here: for the routes of
`api/application`, which any ASGI server may call, and for `api/direct`, which answers whole
requests from the parser. `FrontDoor` reads a request's body within its limit, calls its handler (a
plain function of `ServerState` and `Request`), and sends one start and one body message. For an
`EventStream` it sends the head and then hands over the connection. Errors that handlers raise
become the envelope here; an unforeseen error is logged and becomes `internal`. A disconnect never
cancels a handler. Only web pages of the listed origins may read the answers (CORS).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final

from topics_server.api.access_log import Observer
from topics_server.api.context import ServerState
from topics_server.api.messages.path_names import names_below
from topics_server.api.readiness import HangUpError, admit
from topics_server.api.request import (
    Answer,
    EventStream,
    Receive,
    Request,
    Scope,
    Send,
    finished,
)
from topics_server.api.request_body import (
    OFF_LOOP_BYTES,
    ClientGoneError,
    whole_body,
)
from topics_server.api.routing import Route, Routes
from topics_server.auth.api_keys import Caller, Recalled
from topics_server.auth.authorize import (
    authorized,
    authorized_live,
    authorized_stream,
    check_name,
)
from topics_server.auth.concurrency_limit import RequestPlace
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
from topics_server.http.exchange.response_head import lines_of_head
from topics_server.http.request_head import check_once, is_host, no_host
from topics_server.http.request_ids import NAME as REQUEST_ID
from topics_server.http.request_ids import request_id as request_id_of
from topics_server.http.responses import (
    Response,
    as_preferred,
    tell_of_body,
    tell_of_kind,
    wants_gzip,
)
from topics_server.http.sockets import ForeignSend, Socket
from topics_server.runtime.clock import monotonic_ms, now_ms
from topics_server.runtime.metrics import log
from topics_server.values.errors import StorageError, TopicsError, forget_frames

# Headers of every answer: browsers must use its content type, and no cache may store it. A handler
# may replace each of them. A stored content type may be HTML or SVG: `sandbox` gives such content
# no origin and no script.
_GUARDS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"sandbox; default-src 'none'"),
    (b"cache-control", b"no-store"),
)
# The most kinds of answers whose first lines are cached; a new list of the server's own headers
# clears the cache.
_HEADS_MAX: Final = 256
# Tells an `EventSource` to reconnect soon.
_COME_BACK: Final = b"retry: 2000\n\n"


def response_of(
    error: TopicsError, extra: Headers = (), started_ms: float | None = None
) -> Response:
    """An error as a response; `started_ms` is that of its request, if there was one."""
    total_ms = None if started_ms is None else monotonic_ms() - started_ms
    return Response(status_of(error), envelope(error, total_ms), headers_of(error) + extra)


def response_to(
    error: Exception, method: str, path: str, request_id: bytes, started_ms: float
) -> Response:
    """The response for an error of a handler.

    An unforeseen error is logged and becomes `internal`.
    """
    if isinstance(error, TopicsError):
        forget_frames(error)
        return response_of(error, started_ms=started_ms)
    if isinstance(error, StorageError):
        forget_frames(error)
        log.error("storage refused %s %s (%s): %s", method, path, request_id.decode("ascii"), error)
        return response_of(from_storage(error), started_ms=started_ms)
    shown = request_id.decode("ascii")
    log.error("defect while serving %s %s (%s)", method, path, shown, exc_info=error)
    forget_frames(error)
    return response_of(internal(), started_ms=started_ms)


class FrontDoor:
    """The checks, limits and metrics for all requests of one application.

    `state` is that of the store that is served now. `open_for` changes it, because an application
    may be made before its store is opened.
    """

    def __init__(self, state: ServerState, routes: Routes) -> None:
        self.routes = routes
        self.observer = Observer(routes.table)
        self.state = state
        # First lines of heads by kind, and the list of the server's own headers in them.
        self._heads: dict[tuple[int, bytes, Headers, bool, bool], bytes] = {}
        self._defaults: list[tuple[bytes, bytes]] = []
        self.open_for(state)

    def open_for(self, state: ServerState) -> None:
        """Serve this store from now on."""
        self.state = state
        state.requests = self.observer.facts
        self._origins = state.settings.allowed_origins
        self._heads.clear()

    async def serve(
        self, route: Route | None, segment: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve one HTTP request.

        `route` is None for an unknown path; `segment` is the name in the path.

        `scope` is `application.own_scope`'s: its path begins where the application is mounted.
        """
        place = RequestPlace()
        try:
            await self._serve_counted(route, segment, scope, receive, send, place)
        finally:
            place.free()

    async def _serve_counted(
        self,
        route: Route | None,
        segment: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
        place: RequestPlace,
    ) -> None:
        started_ms = monotonic_ms()
        headers = dict(scope["headers"])
        request_id = request_id_of(headers)
        method: str = scope["method"]
        raw_path: bytes = scope["raw_path"]
        response: Answer
        try:
            if len(headers) < len(scope["headers"]):
                check_once(scope["headers"], headers)
            if scope["topics.send"] is None:
                # A connection of this server has checked the host already.
                host = headers.get(b"host")
                if host is not None and not is_host(host):
                    raise no_host()
            response = await self._answer(
                route, segment, scope, headers, receive, started_ms, place
            )
        except ClientGoneError:
            return
        except HangUpError:
            await _hang_up(scope, receive, send)
            return
        except Exception as error:
            response = response_to(error, method, scope["path"], request_id, started_ms)
        if b"prefer" in headers and isinstance(response, Response):
            response = as_preferred(response, headers, raw_path)
        fields = self.response_headers(response, method, headers, raw_path)
        if isinstance(response, EventStream):
            place.free()
            self.observer.answered(route, method, raw_path, 200, 0, started_ms, request_id)
            fields.append((REQUEST_ID, request_id))
            await _stream(response, fields, scope, receive, send)
            return
        body = b"".join(response.pieces) if response.pieces else response.body
        is_packed = wants_gzip(len(body), headers)
        if is_packed:
            body = await deflated(body)
        tell_of_body(fields, response, len(body), request_id, is_packed=is_packed)
        self.observer.answered(
            route, method, raw_path, response.status, len(body), started_ms, request_id
        )
        send = scope["topics.send"] or send
        await send({"type": "http.response.start", "status": response.status, "headers": fields})
        if method == "HEAD":
            body = b""
        await send({"type": "http.response.body", "body": body})

    def response_headers(
        self, response: Answer, method: str, headers: Mapping[bytes, bytes], raw_path: bytes
    ) -> list[tuple[bytes, bytes]]:
        """The headers of an answer, except those that describe its body."""
        fields = _guarded(response.headers) if response.headers else list(_GUARDS)
        is_allowed = bool(self._origins) and headers.get(b"origin") in self._origins
        if is_allowed:
            fields += cors_headers(method, headers, response.headers)
        if self.routes.is_mounted(raw_path):
            fields += stream_headers(method, is_allowed=is_allowed)
        return fields

    def first_lines(
        self,
        defaults: list[tuple[bytes, bytes]],
        route: Route,
        request: Request,
        path: bytes,
        response: Response,
        *,
        is_packed: bool,
    ) -> bytes:
        """The header lines that all answers of this kind share.

        `defaults` are the server's own headers; it makes a new list when they change.
        """
        if defaults is not self._defaults:
            self._defaults = defaults
            self._heads.clear()
        is_of_page = bool(self._origins) and b"origin" in request.headers
        status = response.status
        kind = (status, response.content_type, response.headers, is_packed, route.is_mount)
        found = None if is_of_page else self._heads.get(kind)
        if found is None:
            fields = self.response_headers(response, request.method, request.headers, path)
            tell_of_kind(fields, response, is_packed=is_packed)
            found = lines_of_head(status, (*defaults, *fields))
            if not is_of_page and len(self._heads) < _HEADS_MAX:
                self._heads[kind] = found
        return found

    async def _answer(
        self,
        route: Route | None,
        segment: bytes,
        scope: Scope,
        headers: dict[bytes, bytes],
        receive: Receive,
        started_ms: float,
        place: RequestPlace,
    ) -> Answer:
        method: str = scope["method"]
        if route is None:
            self.state.hosts.check(headers.get(b"host"))
            raise not_found(scope["path"])
        handler = route.handlers.get(method)
        if handler is None:
            self.state.hosts.check(headers.get(b"host"))
            allow = ((b"allow", route.allow.encode("ascii")),)
            if method == "OPTIONS":
                return Response(204, b"", allow)
            error = method_not_allowed(method[:32], route.allow)
            return response_of(error, allow, started_ms)
        caller = self.admitted(route, method, headers, scope["query_string"], segment)
        place.take(caller.key, self.state.settings.max_inflight_per_key)
        name = self.name_of(route, scope["raw_path"], segment, caller)
        body = b""
        if method in ("POST", "PUT", "PATCH"):
            # Refuse before the body is read: it may have 64 MiB.
            admit(self.state)
            take_slot = partial(place.hold, self.state.inflated)
            body = await whole_body(
                headers,
                receive,
                route.max_body_bytes(method, self.state.settings.max_body_bytes),
                is_json=not route.is_mount and not is_merge_patch(method, headers),
                take_slot=take_slot if method in route.appends else None,
            )
            await self.state.body_turns.turn(len(body))
        request = Request(
            method,
            name,
            headers,
            scope["query_string"],
            body,
            started_ms,
            partial(_gone, receive),
            caller,
            prefix=scope["topics.prefix"],
            below=names_below(scope["raw_path"]) if route.is_below else (),
        )
        return await finished(handler(self.state, request))

    def admitted(
        self,
        route: Route,
        method: str,
        headers: Mapping[bytes, bytes],
        query: bytes,
        segment: bytes,
        recalled: Recalled | None = None,
    ) -> Caller:
        """The caller, if the host, the key and the origin are allowed to use the route.

        Raises `unauthorized`, `forbidden`.
        """
        state, need = self.state, route.needs[method]
        state.hosts.check(headers.get(b"host"))
        if route.is_live and method != "POST":
            topic = segment.decode("latin-1")
            caller = authorized_live(state.keys, headers, query, topic, need, now_ms())
        elif route.is_stream and not route.is_live:
            wid = "" if route.is_of_topic else segment.decode("latin-1")
            now = monotonic_ms()
            caller = authorized_stream(state.keys, state.tickets, headers, query, wid, need, now)
        else:
            caller = authorized(state.keys, headers.get(b"authorization"), need, recalled)
        if (b"origin" in headers or b"sec-fetch-site" in headers) and is_concerned(
            method, query, claims=route.claims
        ):
            # A key in the URL proves nothing about the page: only a page that CORS allows can send
            # the header.
            is_authorized = caller.key is not None and b"authorization" in headers
            check_origin(headers, self._origins, is_authorized=is_authorized)
        return caller

    def name_of(self, route: Route, raw_path: bytes, segment: bytes, caller: Caller) -> str:
        """The name in the path. Raises `forbidden` if the caller may not use that name."""
        name = self.routes.name_at(route, raw_path, segment) if route.is_named else ""
        if caller.prefixes and route.names:
            check_name(caller, name, route.names)
        return name


def _guarded(headers: Headers) -> list[tuple[bytes, bytes]]:
    """These headers, and each guard header that is not among them."""
    names = {name for name, _ in headers}
    return [*(guard for guard in _GUARDS if guard[0] not in names), *headers]


async def refuse_socket(scope: Scope, send: Send, error: TopicsError) -> None:
    """Refuse the opening of a WebSocket, with the envelope if the ASGI server can send it."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1000})
        return
    response = response_of(error)
    fields = _guarded(response.headers)
    request_id = request_id_of(dict(scope["headers"]))
    tell_of_body(fields, response, len(response.body), request_id, is_packed=False)
    start = {"type": "websocket.http.response.start", "status": response.status, "headers": fields}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": response.body})


async def _stream(
    stream: EventStream,
    fields: list[tuple[bytes, bytes]],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    own: Send | None = scope["topics.send"]
    version = scope.get("http_version", "1.1")
    if own is not None and version == "1.0":
        Socket(own).end_with_connection()
    if version != "1.1" or (own is not None and not Socket(own).is_kept):
        # The server adds its own `connection` header; do not send it twice.
        fields = [header for header in fields if header[0] != b"connection"]
    try:
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
        else:
            await stream.run(receive, own or ForeignSend(send))
    finally:
        stream.free()


async def _hang_up(scope: Scope, receive: Receive, send: Send) -> None:
    """Close the connection and return when it is closed.

    ASGI has no call for that, so this calls our connection directly. For another server, answer
    with an event stream that ends at once: its reader reconnects, too.
    """
    own: Send | None = scope["topics.send"]
    if own is not None:
        Socket(own).abort()
        await _gone(receive)
        return
    fields = _guarded(((b"content-type", b"text/event-stream"),))
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": _COME_BACK})


async def deflated(body: bytes) -> bytes:
    """The body as gzip; packed off the event loop if it is large."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(deflate, body)
    return deflate(body)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
