"""The thin ASGI adapter: requests as plain values in, one response out, and nothing in between.

It routes by the path's segments as they were sent, reads the body with its limit, calls the handler
(a plain function of `ServerState` and `Request`), and sends one start and one body message. Errors
that handlers raise become the envelope here, in the one place; an unforeseen one is logged and
becomes `internal`. A client that hangs up changes nothing: no handler is ever cancelled by it.
A faster front door may call `Routes.find` and the handlers itself. Used by `api/app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from topics_server.api.coding import JSON_TYPE, accepts_gzip, deflate, inflate, is_json_type
from topics_server.api.guard import admit, check_declared_length
from topics_server.api.problems import (
    Headers,
    envelope,
    from_storage,
    headers_of,
    internal,
    method_not_allowed,
    no_json,
    not_found,
    status_of,
    too_large,
    unknown_encoding,
)
from topics_server.api.state import ServerState
from topics_server.clock import monotonic_ms
from topics_server.errors import StorageError, TopicsError, invalid
from topics_server.limits import KIB
from topics_server.metrics import log
from topics_server.model import is_topic_name

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Bodies larger than this are inflated and deflated off the event loop.
_OFF_LOOP_BYTES: Final = 64 * KIB
# Paths whose name is known to be one; beyond, all are forgotten and checked again.
_NAMES_MAX: Final = 8192
# A plain declared length has no more digits than this.
_LENGTH_DIGITS_MAX: Final = 15
# Below this gzip saves nothing worth its time.
_DEFLATED_BYTES_MIN: Final = 256


class ClientGoneError(Exception):
    """The client hung up while a handler waited for it alone; nothing is answered."""


class Request(msgspec.Struct, gc=False):
    """One request as handlers see it.

    `name` is the path's topic name (valid), else empty; `headers` have lower-case names; `body` is
    inflated; `started_ms` is of the monotonic clock. `gone` returns when the client hung up.
    """

    method: str
    name: str
    headers: Mapping[bytes, bytes]
    query: bytes
    body: bytes
    started_ms: float
    gone: Callable[[], Awaitable[None]]

    def elapsed_ms(self) -> float:
        """Milliseconds since the request arrived."""
        return monotonic_ms() - self.started_ms


class Response(msgspec.Struct, frozen=True, gc=False):
    """One response; `headers` beside content type, length and encoding."""

    status: int
    body: bytes
    headers: Headers = ()
    content_type: bytes = JSON_TYPE


Handler = Callable[[ServerState, Request], "Response | Awaitable[Response]"]


class Route:
    """The methods of one path template; GET brings HEAD, and OPTIONS is always there."""

    __slots__ = ("allow", "handlers", "is_named", "template")

    def __init__(self, template: str, handlers: Mapping[str, Handler]) -> None:
        self.template = template
        self.is_named = "{" in template
        self.handlers = dict(handlers)
        if "GET" in self.handlers:
            self.handlers["HEAD"] = self.handlers["GET"]
        self.allow = ", ".join(sorted({*self.handlers, "OPTIONS"}))


class Routes:
    """Paths to routes. A template has at most one parameter, the topic's name in third place."""

    def __init__(self, table: Iterable[Route]) -> None:
        self.table = tuple(table)
        self._fixed: dict[bytes, Route] = {}
        self._named: dict[tuple[bytes, ...], Route] = {}
        self._names: dict[bytes, str] = {}
        for route in self.table:
            path = route.template.encode("ascii")
            if not route.is_named:
                self._fixed[path] = route
                continue
            segments = path.split(b"/")
            assert segments[3] == b"{topic}", route.template
            self._named[(*segments[1:3], *segments[4:])] = route

    def name_at(self, raw_path: bytes, segment: bytes) -> str:
        """The topic name of a named route's path, checked once; raises `invalid_request`."""
        name = self._names.get(raw_path)
        if name is None:
            if len(self._names) >= _NAMES_MAX:
                self._names.clear()
            name = self._names[raw_path] = name_of(segment)
        return name

    def find(self, raw_path: bytes) -> tuple[Route | None, bytes]:
        """The route of a path as it was sent, and its name segment, unescaped."""
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
            return None, b""
        name = segments[3]
        return route, unquote_to_bytes(name) if b"%" in name else name


def name_of(segment: bytes) -> str:
    """A topic name from its decoded path segment; raises `invalid_request`."""
    name = segment.decode("latin-1")
    if not is_topic_name(name):
        raise invalid(
            "a topic name has 1 to 255 characters of A-Z a-z 0-9 . _ : - and starts with a letter "
            "or digit",
            "topic",
        )
    return name


# --- bodies in --------------------------------------------------------------------------------


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    """The whole body, inflated; `max_bytes` bounds it as sent and as inflated.

    What the headers alone tell is refused before a byte is read.
    """
    declared = headers.get(b"content-length")
    if declared is not None:
        check_declared_length(declared, max_bytes)
    is_packed = False
    is_announced = declared != b"0" if declared is not None else b"transfer-encoding" in headers
    if is_announced:
        is_packed = _check_types(headers)
    body = await _receive_all(receive, max_bytes)
    if not body:
        return body
    if not is_announced:
        is_packed = _check_types(headers)
    if not is_packed:
        return body
    if len(body) > _OFF_LOOP_BYTES:
        return await asyncio.to_thread(inflate, body, max_bytes)
    return inflate(body, max_bytes)


def _check_types(headers: Mapping[bytes, bytes]) -> bool:
    """Refuse what is not JSON or not known encoding; tells whether the body is gzip."""
    if not is_json_type(headers.get(b"content-type")):
        raise no_json()
    encoding = headers.get(b"content-encoding")
    if encoding is None:
        return False
    encoding = encoding.strip().lower()
    if encoding in (b"", b"identity"):
        return False
    if encoding not in (b"gzip", b"x-gzip"):
        raise unknown_encoding(encoding.decode("latin-1"))
    return True


def _is_plain(headers: Mapping[bytes, bytes], max_bytes: int) -> bool:
    """Whether the head of a request with a body raises no question about that body."""
    declared = headers.get(b"content-length", b"")
    return (
        headers.get(b"content-type") == JSON_TYPE
        and b"content-encoding" not in headers
        and len(declared) <= _LENGTH_DIGITS_MAX
        and declared.isdigit()
        and int(declared) <= max_bytes
    )


async def _receive_all(
    receive: Receive, max_bytes: int, message: MutableMapping[str, Any] | None = None
) -> bytes:
    """Every chunk of a body, from the message that was received already, if any."""
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        if message is None:
            message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        more = message.get("more_body", False)
        message = None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def response_of(error: TopicsError, extra: Headers = ()) -> Response:
    """A refusal as a response."""
    return Response(status_of(error), envelope(error), headers_of(error) + extra)


class Application:
    """The ASGI application over a route table; holds nothing but references."""

    def __init__(self, state: ServerState, routes: Routes) -> None:
        self.state = state
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope, as ASGI has it."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ms = monotonic_ms()
        headers = dict(scope["headers"])
        try:
            response = await self._answer(scope, headers, receive, started_ms)
        except ClientGoneError:
            return
        except TopicsError as error:
            response = response_of(error)
        except StorageError as error:
            log.error("storage refused %s %s: %s", scope["method"], scope["path"], error)
            response = response_of(from_storage(error))
        except Exception:
            log.exception("defect while serving %s %s", scope["method"], scope["path"])
            response = response_of(internal())
        told = list(response.headers)
        body = response.body
        if response.status != 204:
            told.append((b"content-type", response.content_type))
            if len(body) >= _DEFLATED_BYTES_MIN and accepts_gzip(headers.get(b"accept-encoding")):
                body = await _deflated(body)
                told += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
            told.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": response.status, "headers": told})
        if scope["method"] == "HEAD":
            body = b""
        await send({"type": "http.response.body", "body": body})

    async def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, started_ms: float
    ) -> Response:
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
            return response_of(method_not_allowed(method[:32], route.allow), allow)
        name = self.routes.name_at(raw_path, segment) if route.is_named else ""
        body = b""
        if method in ("POST", "PUT"):
            # Nobody should send 64 MiB to hear that the server is not ready.
            admit(self.state)
            max_bytes = self.state.settings.max_body_bytes
            if _is_plain(headers, max_bytes):
                # The common case, in one step: a JSON body that came with its head.
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body", False):
                    body = message["body"]
                else:
                    body = await _receive_all(receive, max_bytes, message)
            else:
                body = await read_body(headers, receive, max_bytes)
        request = Request(
            method, name, headers, scope["query_string"], body, started_ms, partial(_gone, receive)
        )
        answer = handler(self.state, request)
        return answer if isinstance(answer, Response) else await answer


async def _deflated(body: bytes) -> bytes:
    if len(body) > _OFF_LOOP_BYTES:
        return await asyncio.to_thread(deflate, body)
    return deflate(body)


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
