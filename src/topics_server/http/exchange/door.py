"""The door: the services that the application offers its own connections beyond ASGI.

`http/connection` and `http/websocket` find the door as `topics_door` of the application they serve;
`api/direct` implements it. An application without a door gets every request through ASGI, without
the limits of this package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from topics_server.http.exchange.joined_writes import JoinedWrites
from topics_server.http.exchange.response_head import Header
from topics_server.http.read_scheduler import ReadScheduler
from topics_server.http.timeouts import ConnectionTimeouts
from topics_server.http.upload_budget import UploadBudget
from topics_server.http.upload_turns import UploadTurns
from topics_server.values.errors import TopicsError


class AnsweringConnection(Protocol):
    """The part of a connection that a direct call uses."""

    loop: Any
    server_state: Any
    transport: JoinedWrites
    tasks: set[asyncio.Task[None]]
    # What the door keeps for this connection.
    recalled: object
    # The number of the last request among all requests of the server.
    last_request: int
    # Whether a direct call has taken the request and will answer it, and whether that will be in a
    # later turn of the loop than the request's.
    is_answering_directly: bool
    is_late: bool

    def answer(self, head: bytes, pieces: Sequence[bytes | memoryview], size: int) -> None:
        """Send the answer. `head` lacks its last, empty line."""
        ...

    def await_body(self, head: bytes) -> None:
        """Hold back a known head whose body has not begun to arrive."""
        ...


class DirectCall(Protocol):
    """The handler call for a request's head. `length`: bytes of the body.

    `is_lasting`: the call is valid for every request with the same head. `counter`: the name of the
    field in which the heads of these requests may differ, because it counts them; empty for none.
    `kept_bytes`: the estimated memory of a kept call; set by `known_heads`.
    """

    length: int
    is_lasting: bool
    counter: bytes
    kept_bytes: int

    def serve(self, connection: AnsweringConnection, body: bytes, number: bytes = b"") -> bool:
        """Answer through `connection.answer`, now or later.

        `number`: the value of `counter` in this request, unless it is the first one. Returns False,
        without any effect, if the handler has to wait. Does not raise.
        """
        ...


class HeadTable(Protocol):
    """Heads that were parsed before: `known_heads`."""

    def serve(self, connection: AnsweringConnection, data: bytes) -> bool:
        """Serve a known head with its whole body.

        Hold back a known head whose body has not arrived.
        """
        ...

    def keep(self, data: bytes, length: int, call: DirectCall) -> None:
        """Keep the call of the request at the start of `data`. `length`: bytes of its body."""
        ...


class Door(Protocol):
    """The application's services for its own connections."""

    @property
    def known_heads(self) -> HeadTable:
        """The direct calls of heads that were parsed before."""
        ...

    @property
    def timeouts(self) -> ConnectionTimeouts:
        """The connection timeouts, and the bounds of a head."""
        ...

    @property
    def read_scheduler(self) -> ReadScheduler | None:
        """Decides when a connection is read."""
        ...

    @property
    def uploads(self) -> UploadBudget:
        """Counts bodies and messages that arrive in pieces."""
        ...

    @property
    def upload_turns(self) -> UploadTurns:
        """Decides when connections with large uploads are read."""
        ...

    def direct_call(
        self, method: bytes, url: bytes, fields: dict[bytes, bytes]
    ) -> DirectCall | None:
        """The direct call for this head, if its route is hot and the head is plain."""
        ...

    def upload_key(self, fields: Mapping[bytes, bytes]) -> object:
        """The key of the request with these header fields; None without a key."""
        ...

    def socket_key(self, headers: Iterable[Header], offered: list[str]) -> object:
        """The key of a WebSocket, from its header fields and subprotocols; None without a key."""
        ...

    def refusal(self, error: TopicsError | None) -> tuple[int, list[Header], bytes]:
        """Status, headers and body of an error that ends its connection.

        None: an internal error.
        """
        ...

    def socket_error(self, error: TopicsError) -> bytes:
        """The text of the message that reports an error on a WebSocket."""
        ...
