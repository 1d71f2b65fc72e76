"""Streams that clients open before the server is ready or while it drains.

An `EventSource` that gets any status but 200 never comes back; one whose connection ends does. So
such a GET waits while the journal is replayed, and is hung up on by a server that goes down.
Everything else asks `guard`, and is refused. Called by `api/watch/handlers`, `api/queues/handlers`.
"""

from __future__ import annotations

import asyncio

from topics_server.api.application import HangUpError, Request
from topics_server.api.context import ServerState
from topics_server.api.request_body import ClientGoneError


async def until_ready(state: ServerState, request: Request) -> None:
    """Return when the server is ready; raises for whoever hears nothing any more."""
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
