"""The deadlines of a connection: head, body, and unread answer.

A request that arrives whole costs no timer: `http/timeouts` calls `overdue` from time to time, and
times are noted only if received bytes end in the middle of a request. All times are seconds of the
loop's clock. `http/connection` makes one instance for each connection.
"""

from __future__ import annotations

from typing import Protocol

from topics_server.http.exchange.flow_control import Flow
from topics_server.http.exchange.joined_writes import JoinedWrites
from topics_server.http.exchange.request_reader import RequestReader
from topics_server.http.timeouts import TimeoutSettings
from topics_server.values.errors import Code, TopicsError


class Waited(Protocol):
    """The parts of a connection that its deadlines depend on."""

    transport: JoinedWrites
    flow: Flow
    reader: RequestReader
    # Whether all further bytes of the client are dropped.
    is_over: bool

    def refuse(self, error: TopicsError | None) -> None:
        """Answer with `error` and end the connection."""
        ...

    @property
    def is_answered(self) -> bool:
        """Whether no request is being answered."""
        ...

    @property
    def is_streaming(self) -> bool:
        """Whether an answer has begun and is not complete."""
        ...


class Deadlines:
    """The times of one connection, which was made at `made_at`."""

    __slots__ = (
        "_asked_at",
        "_made_at",
        "_marked_bytes",
        "_turns",
        "_unsent_bytes",
        "_unsent_since",
        "idle_since",
        "is_used",
        "lingers_since",
        "lingers_until",
        "swallowed_at",
    )

    def __init__(self, made_at: float) -> None:
        self._made_at = self.idle_since = made_at
        # Whether a request was answered.
        self.is_used = False
        # The size of the body when the current period of `body_s` began, in which more must arrive.
        self._marked_bytes = 0
        # The time of the last check of an incomplete request, and the number of ended turns then.
        self._asked_at = 0.0
        self._turns = 0
        self._unsent_bytes = 0
        self._unsent_since = 0.0
        # Since when the write side is closed; when bytes were last dropped; until when the client
        # may keep sending.
        self.lingers_since = self.swallowed_at = self.lingers_until = 0.0

    def begin_body(self) -> None:
        """The head of a request has arrived: its body has no bytes yet."""
        self._marked_bytes = 0

    def overdue(self, connection: Waited, now: float, limits: TimeoutSettings) -> str | None:
        """The deadline that the client has missed at `now`, or None.

        `http/timeouts` calls it repeatedly: the result depends on the state at earlier calls.
        """
        unsent = connection.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent_bytes or not self._unsent_bytes:
            self._unsent_since = now
        self._unsent_bytes = unsent
        is_closing = connection.transport.is_closing()
        # A stream has its own timeout for a client that does not read.
        is_late = unsent and now - self._unsent_since > limits.write_s
        if is_late and (is_closing or not connection.is_streaming):
            return "write"
        if self.lingers_since:
            if unsent:
                self.lingers_since = now
            since = self.lingers_since
            if now < self.lingers_until:
                # More bytes of a refused upload may arrive.
                since = now if connection.flow.is_kept_waiting else max(since, self.swallowed_at)
            return "linger" if now - since > limits.linger_s else None
        if is_closing:
            return None
        if connection.reader.is_partial:
            return self._overdue_request(connection, now, limits)
        if not connection.is_answered or connection.is_over:
            return None
        if not self.is_used and now - self._made_at > limits.header_s:
            return "header"
        return "idle" if now - self.idle_since > limits.keep_alive_s else None

    def _overdue_request(
        self, connection: Waited, now: float, limits: TimeoutSettings
    ) -> str | None:
        """The deadline that an incomplete request has missed, or None."""
        reader, flow = connection.reader, connection.flow
        read_until = now
        if flow.is_kept_waiting:
            # Bytes may be unread since the connection's last turn. If a turn has ended since the
            # last check, all bytes that had arrived by that check are read.
            read_until = self._asked_at if flow.turns != self._turns else 0.0
        self._asked_at, self._turns = now, flow.turns
        is_unread = flow.read_paused or (flow.is_kept_waiting and not reader.has_head)
        if is_unread or not (reader.has_head or connection.is_answered):
            # The missing bytes may be in the socket, unread: the client is not late.
            reader.partial_since = now
        elif not reader.has_head:
            return "header" if now - reader.partial_since > limits.header_s else None
        elif read_until - reader.partial_since > limits.body_s:
            if reader.body_bytes - self._marked_bytes < limits.body_bytes_min:
                return "body"
            reader.partial_since = read_until
            self._marked_bytes = reader.body_bytes
        return None


def time_out(connection: Waited, kind: str) -> None:
    """End an overdue connection, with an error if the client may still read it."""
    if kind in ("header", "body") and connection.reader.is_partial:
        what = "head" if kind == "header" else "body"
        connection.refuse(
            TopicsError(Code.REQUEST_TIMEOUT, f"the request's {what} arrived too slowly")
        )
    elif kind in ("header", "idle"):
        connection.transport.close()
    else:
        connection.transport.abort()
