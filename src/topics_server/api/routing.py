"""Routes: the methods of a route, and the search for the route of a path.

A `Route` holds for each method its handler, the rights that a key needs, and the longest body.
`Routes` finds the route of a path as it was sent, and checks the names in paths once. Used by
`api/front_door`; `api/application` makes Starlette's routes from the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

from topics_server.api.messages.path_names import name_of, router_name_of, stream_path_of
from topics_server.api.request import Handler
from topics_server.runtime.metrics import RequestMetrics
from topics_server.values.limits import CONTROL_BODY_BYTES_MAX
from topics_server.values.texts.key_list import WRITE

# The most paths whose checked name is cached; at the limit the cache is cleared.
_NAMES_MAX: Final = 8192


class Route:
    """The methods of one path template; GET brings HEAD, and OPTIONS is always there.

    `needs`: what a key must grant, by method: scopes, `keys.ANY_KEY` or `keys.PROBE`. `is_stream`:
    a browser's `EventSource` may call this route, and can send its key only in the URL. `claims`: a
    GET leases jobs. `hot`: methods that the connection answers directly from the parser if it can.
    `appends`: methods whose body holds records; all other bodies have the control plane's limit. A
    template that ends in `/{path}` is the mount of streams: all further segments are the path of a
    stream, and its handlers accept bodies of any type.
    """

    __slots__ = (
        "allow",
        "appends",
        "claims",
        "request_metrics",
        "handlers",
        "hot",
        "is_below",
        "is_live",
        "is_named",
        "is_mount",
        "is_of_router",
        "is_of_topic",
        "is_stream",
        "names",
        "needs",
        "parameter",
        "template",
    )

    def __init__(
        self,
        template: str,
        handlers: Mapping[str, Handler],
        *,
        needs: Mapping[str, int],
        appends: Iterable[str] = (),
        hot: Iterable[str] = (),
        is_stream: bool = False,
    ) -> None:
        assert handlers.keys() == needs.keys(), template
        self.appends = frozenset(appends)
        # Only a key that may write may send a large body.
        assert all(needs[method] & WRITE for method in self.appends), template
        self.template = template
        self.hot = frozenset(hot)
        assert self.hot <= handlers.keys(), template
        self.needs = dict(needs)
        self.is_stream = is_stream
        self.is_named = "{" in template
        self.is_of_topic = "/{topic}" in template
        self.is_below = any(name in template for name in ("/{view}", "/{seq}", "/{consumer}"))
        self.is_of_router = "/{router}" in template
        self.is_mount = template.endswith("/{path}")
        # The name of the template's first parameter.
        self.parameter = template.partition("{")[2].partition("}")[0]
        # Whether the tickets of `auth/live_tickets` open this route.
        self.is_live = is_stream and template in ("/v0/live", "/v0/topics/{topic}/live")
        self.claims = is_stream and template.endswith("/work")
        # The kind of the name that is compared with a key's prefixes.
        kinds = {"topic": self.is_of_topic, "router": self.is_of_router, "path": self.is_mount}
        self.names = next((kind for kind, is_of_it in kinds.items() if is_of_it), "")
        self.handlers = dict(handlers)
        if "GET" in self.handlers:
            self.handlers["HEAD"] = self.handlers["GET"]
            self.needs["HEAD"] = self.needs["GET"]
        self.allow = ", ".join(sorted({*self.handlers, "OPTIONS"}))
        self.request_metrics = {method: RequestMetrics() for method in (*self.handlers, "OPTIONS")}

    def max_body_bytes(self, method: str, max_append_bytes: int) -> int:
        """The most bytes of a request's body, both sent and inflated."""
        if method in self.appends:
            return max_append_bytes
        return min(CONTROL_BODY_BYTES_MAX, max_append_bytes)


class Routes:
    """Finds the route of a path.

    A template has no parameter, or one as its third segment; templates of views and records have
    more. The names of topics, routers and streams are checked here; handlers check all other
    parameters. One route may be a mount, with no other route below it.
    """

    def __init__(self, table: Iterable[Route]) -> None:
        self.table = tuple(table)
        self._fixed: dict[bytes, Route] = {}
        self._named: dict[tuple[bytes, ...], Route] = {}
        # Routes below a view or a record, by the kind and the segments behind the name.
        self._below: dict[tuple[bytes, ...], Route] = {}
        # Requested paths, with their route and the topic's name.
        self._known: dict[bytes, tuple[Route, str]] = {}
        self._mount: Route | None = None
        # Before a mount is added, bytes that no path begins with.
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
            if route.is_below:
                rest = tuple(b"" if part[:1] == b"{" else part for part in segments[6:])
                self._below[segments[4], *rest] = route
                continue
            assert segments[3][:1] + segments[3][-1:] == b"{}", route.template
            self._named[(*segments[1:3], *segments[4:])] = route

    def name_at(self, route: Route, raw_path: bytes, segment: bytes) -> str:
        """The name in the path of a named route; a topic's name is checked once.

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
        """The cached route and topic's name of a path; None if the path is not cached."""
        return self._known.get(raw_path)

    def split(self, url: bytes) -> tuple[bytes, bytes]:
        """Path and query of a URL below the mount.

        Any other URL is returned whole, with an empty query.
        """
        path, _, query = url.partition(b"?")
        return (path, query) if self.is_mounted(path) else (url, b"")

    def is_mounted(self, raw_path: bytes) -> bool:
        """Whether this is a path below the mount."""
        return raw_path.startswith(self._mounted)

    def find(self, raw_path: bytes) -> tuple[Route | None, bytes]:
        """The route of a path as it was sent, and its named segment, unescaped.

        For the mount the segment is the whole rest of the path, still escaped.
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
        elif 5 < count < 9 and segments[1:3] == [b"v0", b"topics"]:
            # In the path of a named query, its name follows the verb.
            below = (segments[4], *segments[6:7])
            route = self._below.get(below if count < 8 else (*below, b""))
        if route is None:
            if self.is_mounted(raw_path):
                return self._mount, raw_path[len(self._mounted) :]
            return None, b""
        name = segments[3]
        return route, unquote_to_bytes(name) if b"%" in name else name
