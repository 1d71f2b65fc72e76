"""uvicorn's connections, made to end whole: whoever is answered hears of it, and nothing stays.

uvicorn tells the end of a connection to its newest request only: a stream with another request sent
behind it would wait for ever. And it leaves objects that refer to themselves, which the collector
never looks at again once they are old (see `server`): each reference cycle is broken here, so that
a connection that is gone takes no memory. Used by `server`.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from topics_server.api.direct import DirectHttp


class HttpConnection(DirectHttp):
    """A connection until its end, or until it becomes a WebSocket."""

    _answered: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over; the parser refers to us."""
        super().handle_websocket_upgrade()
        self.parser = None  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered; forget those that never will be."""
        super().connection_lost(exc)
        cycle, self._answered = self._answered, None
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]


class SocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End the parser, a generator that refers to what holds it."""
        super().connection_lost(exc)
        self.conn.parser.close()
