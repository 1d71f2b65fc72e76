"""The application: Starlette over the table of routes.

Any ASGI server may run it, at its root or below a path of another application. Starlette finds the
route; `front_door` serves it. Routes match the path as it was sent, so that `%2F` stays part of a
name: `own_scope` gives them that path, without the part above the mount. A connection of this
server puts itself into `scope["extensions"]`. The application uses it only if no middleware stands
between, because a middleware must see what is sent. Used by `app`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

from starlette.applications import Starlette
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.routing import Route as StarletteRoute

from topics_server.api.context import ServerState
from topics_server.api.direct import ConnectionDoor
from topics_server.api.front_door import FrontDoor, refuse_socket
from topics_server.api.request import Receive, Scope, Send, SocketHandler
from topics_server.api.routes import build_routes
from topics_server.api.routing import Route
from topics_server.api.websocket import handlers as ws
from topics_server.http.error_responses import not_found
from topics_server.http.sockets import ForeignSend, is_own_send

# Characters that a path may hold unescaped; a server without `raw_path` has unescaped the path.
_PATH_CHARS: Final = "/:@!$&'()*+,;=-._~"


class Application(Starlette):
    """The routes of one store. `door` serves them; `door.state` is the state of the store."""

    def __init__(self, door: FrontDoor, lifespan: Any = None) -> None:
        super().__init__(
            routes=[
                *(_endpoint(door, route) for route in door.routes.table),
                WebSocketRoute("/v0/ws", SocketEndpoint(door, ws.serve)),
                StarletteRoute("/{path:path}", Unrouted(door)),
                WebSocketRoute("/{path:path}", SocketEndpoint(door, _no_socket)),
            ],
            lifespan=lifespan,
        )
        self.router.redirect_slashes = False
        self.door = door
        # Connections of this server take their door from here (`http/connection`).
        self.topics_door = ConnectionDoor(door)

    def add_middleware(self, *arguments: Any, **options: Any) -> None:
        """Add a middleware. From now on every request goes through it."""
        self.topics_door.is_direct = False
        super().add_middleware(*arguments, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "lifespan":
            scope = own_scope(scope, send)
            if scope["type"] == "http" and scope["topics.send"] and self.topics_door.is_direct:
                # No middleware stands between our connection and the routes. Starlette's router
                # would find the same route, in some 30 more calls.
                route, segment = self.door.routes.find(scope["raw_path"])
                await self.door.serve(route, segment, scope, receive, send)
                return
        await super().__call__(scope, receive, send)


class Unrouted:
    """Serves paths without a route in Starlette: unknown paths, and paths with an empty name."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as our own connection does."""
        route, segment = self._door.routes.find(scope["raw_path"])
        await self._door.serve(route, segment, scope, receive, send)


class Endpoint:
    """The endpoint that Starlette calls for one route."""

    def __init__(self, door: FrontDoor, route: Route) -> None:
        self._door = door
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request whose path is the route's."""
        route = self._route
        segment = b""
        if route.is_named:
            segment = scope["path_params"][route.parameter].encode("latin-1")
            if not route.is_mount:
                segment = unquote_to_bytes(segment)
        await self._door.serve(route, segment, scope, receive, send)


class SocketEndpoint:
    """The endpoint that Starlette calls for a WebSocket's path."""

    def __init__(self, door: FrontDoor, handler: SocketHandler) -> None:
        self._door = door
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a socket from its opening to its end."""
        sending = scope["topics.send"] or ForeignSend(send)
        await self._handler(self._door.state, scope, receive, sending)


def _endpoint(door: FrontDoor, route: Route) -> BaseRoute:
    path = route.template
    if route.is_mount:
        path = path.replace("{path}", "{path:path}")
    # Starlette calls an endpoint that is not a function for every method; `front_door` checks the
    # method.
    return StarletteRoute(path, Endpoint(door, route), name=route.template)


async def _no_socket(_state: ServerState, scope: Scope, _receive: Receive, send: Send) -> None:
    await refuse_socket(scope, send, not_found(scope["path"]))


def own_scope(scope: Scope, send: Send) -> MutableMapping[str, Any]:
    """A scope for the routes, with the path that was sent, without the mount's part.

    `topics.prefix` is the mount's part. `topics.send` is the `send` of a connection of this server;
    None under another server.
    """
    raw_path: bytes = (scope.get("raw_path") or b"").partition(b"?")[0]
    if not raw_path:
        raw_path = quote(scope["path"], safe=_PATH_CHARS).encode("ascii")
    end = mounted_length(raw_path, scope.get("root_path", ""))
    route_path = raw_path[end:]
    return {
        **scope,
        "path": route_path.decode("latin-1"),
        "raw_path": route_path,
        "root_path": "",
        "path_params": {},
        "topics.prefix": raw_path[:end],
        "topics.send": send if is_own_send(scope, send) else None,
    }


def mounted_length(raw_path: bytes, root_path: str) -> int:
    """The length of the `root_path` in the path that was sent. The `root_path` is unescaped.

    Returns 0 if the path does not begin with it: some servers leave it out.
    """
    at = 0
    for wanted in root_path.rstrip("/").encode():
        piece = raw_path[at : at + 3] if raw_path[at : at + 1] == b"%" else raw_path[at : at + 1]
        if unquote_to_bytes(piece) != bytes((wanted,)):
            return 0
        at += len(piece)
    return at if raw_path[at : at + 1] in (b"", b"/") else 0


def build_app(state: ServerState) -> Application:
    """The application of one open store."""
    return Application(FrontDoor(state, build_routes(state.settings.streams_path)))
