"""The ASGI scopes of requests and WebSockets.

The extensions of a scope mark a connection of this server: see `http/sockets`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import httptools

from topics_server.http.exchange.response_head import Header
from topics_server.http.request_head import is_plain_target
from topics_server.http.sockets import EXTENSION


class ConnectionScope:
    """The part that all scopes of one connection share."""

    __slots__ = ("_app_state", "_config", "_ends", "_is_secure", "_transport")

    def __init__(self, config: Any, app_state: dict[str, Any], transport: Any) -> None:
        self._config = config
        self._app_state = app_state
        self._transport = transport
        self._ends = _address_of(transport, "sockname"), _address_of(transport, "peername")
        self._is_secure = bool(transport.get_extra_info("sslcontext"))

    def http(self, method: str, version: str, url: bytes, headers: list[Header]) -> dict[str, Any]:
        """The scope of a request. Raises the error of httptools for an invalid target."""
        path, query = url.decode("ascii"), b""
        if not is_plain_target(url):
            parsed = httptools.parse_url(url)
            url, query = parsed.path, parsed.query or b""
            path = unquote(url.decode("ascii"))
        scheme = "https" if self._is_secure else "http"
        asgi = {"version": self._config.asgi_version, "spec_version": "2.3"}
        return {
            "type": "http",
            "asgi": asgi,
            "method": method,
            **self._common(scheme, version, path, url, query, headers),
        }

    def websocket(
        self, target: str, headers: list[Header], subprotocols: list[str]
    ) -> dict[str, Any]:
        """The scope of a WebSocket."""
        raw_path, _, query = target.partition("?")
        scheme = "wss" if self._is_secure else "ws"
        path, url = unquote(raw_path), raw_path.encode("ascii")
        scope = {
            "type": "websocket",
            "asgi": {"version": self._config.asgi_version, "spec_version": "2.4"},
            "subprotocols": subprotocols,
            **self._common(scheme, "1.1", path, url, query.encode("ascii"), headers),
        }
        scope["extensions"]["websocket.http.response"] = {}
        return scope

    def _common(
        self,
        scheme: str,
        version: str,
        path: str,
        raw_path: bytes,
        query: bytes,
        headers: list[Header],
    ) -> dict[str, Any]:
        root_path: str = self._config.root_path
        server, client = self._ends
        return {
            "http_version": version,
            "server": server,
            "client": client,
            "scheme": scheme,
            "root_path": root_path,
            "path": root_path + path,
            "raw_path": root_path.encode("ascii") + raw_path,
            "query_string": query,
            "headers": headers,
            "state": self._app_state.copy(),
            "extensions": {EXTENSION: self._transport},
        }


def _address_of(transport: Any, name: str) -> tuple[str, int] | None:
    """An address of a connection in ASGI's form; None if it has no port."""
    address = transport.get_extra_info(name)
    if isinstance(address, (tuple, list)) and len(address) > 1:
        return (str(address[0]), int(address[1]))
    return None
