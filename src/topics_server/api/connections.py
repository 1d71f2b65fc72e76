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
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, InvalidHeader
from websockets.http11 import Request

from topics_server.api.coding import JSON_TYPE
from topics_server.api.direct import DirectHttp
from topics_server.api.problems import envelope, status_of
from topics_server.api.request_ids import request_id
from topics_server.errors import TopicsError, invalid


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

    def handle_connect(self, event: Request) -> None:
        """Refuse what is no handshake in the envelope; the library would do so in plain text."""
        try:
            self.conn.process_request(event)
        except InvalidHandshake as error:
            # Not what its text says: that repeats headers, of which one may hold a key.
            name = error.name if isinstance(error, InvalidHeader) else None
            self._refuse(invalid("this is no WebSocket handshake (RFC 6455)", name))
        else:
            super().handle_connect(event)

    def _refuse(self, error: TopicsError) -> None:
        body = envelope(error)
        response = self.conn.reject(status_of(error), "")
        response.body = body
        response.headers = Headers(
            {
                "Connection": "close",
                "Content-Type": JSON_TYPE.decode(),
                "Content-Length": str(len(body)),
                "X-Request-Id": request_id({}).decode("ascii"),
                # What it would take (RFC 6455, 4.4).
                "Sec-WebSocket-Version": "13",
            }
        )
        self.response = response
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        self.conn.send_response(response)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the parser, a generator that refers to what holds it."""
        super().connection_lost(exc)
        self.conn.parser.close()
