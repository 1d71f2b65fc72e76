"""Readiness and slots for streams, checked before a handler runs.

Readiness applies to the data plane and the control plane alike, not to probes. The cap on open
streams and WebSockets applies as widely: each holds a `ConnectionSlot` from before its first byte
until its end. An `EventSource` never reconnects after a status other than 200, but it does after
its connection ends. So a GET of a stream waits during replay (`until_ready`), and its connection is
closed if the server shuts down. Called by handlers and by `api/front_door`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from topics_server.api.context import ServerState, StorePort
from topics_server.api.messages.accept import accept_weights
from topics_server.api.request import Request
from topics_server.api.request_body import ClientGoneError
from topics_server.auth.api_keys import Key
from topics_server.values.errors import Code, TopicsError

# Media types that accept an event stream, the most specific first.
_STREAM_TYPES: Final = (b"text/event-stream", b"text/*", b"*/*")


class HangUpError(Exception):
    """The connection is closed without an answer, which makes an `EventSource` try again."""


class ConnectionSlot:
    """The slot of one open stream or WebSocket. `free` may be called more than once."""

    __slots__ = ("_key", "_state")

    def __init__(self, state: ServerState, key: Key | None = None) -> None:
        """Take a slot of the server and one of the key.

        Raises `throttled` if either has none left.
        """
        most = state.settings.max_sse_connections
        if most and state.connections >= most:
            raise TopicsError(
                Code.THROTTLED,
                f"the server has reached its limit of {most} open streams and WebSockets",
                {"limit": "max_sse_connections", "max": most},
            )
        most = state.settings.max_sse_connections_per_key
        if key is not None and most and key.streams >= most:
            raise TopicsError(
                Code.THROTTLED,
                f"this key has reached its limit of {most} open streams and WebSockets",
                {"limit": "max_sse_connections_per_key", "max": most},
            )
        self._state: ServerState | None = state
        self._key = key
        state.connections += 1
        if key is not None:
            key.streams += 1

    def free(self) -> None:
        """Give the slot back."""
        state, self._state = self._state, None
        if state is not None:
            state.connections -= 1
            assert state.connections >= 0
            if self._key is not None:
                self._key.streams -= 1
                assert self._key.streams >= 0


def check_accepts_stream(accept: bytes | None) -> None:
    """Refuse a client that does not accept an event stream.

    An absent or empty `Accept` accepts all.
    """
    if accept is None or not accept.strip():
        return
    weights = accept_weights(accept)
    if not next((weights[kind] for kind in _STREAM_TYPES if kind in weights), 0.0):
        raise TopicsError(
            Code.NOT_ACCEPTABLE, "the answer is an event stream; send Accept: text/event-stream"
        )


def admit(state: ServerState) -> StorePort:
    """The store, if requests are taken now; raises `not_ready` or `shutting_down`."""
    if state.phase == "ready":
        assert state.store is not None, "ready means there is a store"
        return state.store
    raise refusal(state)


def refusal(state: ServerState) -> TopicsError:
    """Why no requests are taken now."""
    assert state.phase != "ready"
    if state.phase == "draining":
        return TopicsError(Code.SHUTTING_DOWN, "the server is shutting down")
    if state.phase == "closed":
        return TopicsError(
            Code.NOT_READY,
            "the store is not open: run `topics_server.app.lifespan` within your application's",
        )
    if state.phase == "failed":
        return TopicsError(Code.NOT_READY, "the store cannot be served; the log has the reason")
    progress = min(1.0, max(0.0, state.progress()))
    return TopicsError(
        Code.NOT_READY,
        "the server is replaying its journal",
        {"replay_progress": round(progress, 4)},
    )


async def until_ready(state: ServerState, request: Request) -> None:
    """Return when the server is ready. Raises if it cannot answer the client any more."""
    if state.phase == "replaying":
        moving = state.next_phase()
        leaving = asyncio.ensure_future(request.gone())
        try:
            await asyncio.wait((moving, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not moving.done():
                raise ClientGoneError
        finally:
            moving.cancel()
            leaving.cancel()
    if state.phase != "ready":
        raise HangUpError
