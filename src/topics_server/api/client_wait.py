"""Waits for a result while the client is connected and its key is valid.

Used by the long-polls of `api/records/handlers` and `api/streams/handlers`, and by claims
(`api/queues/handlers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from topics_server.api.application import Request
from topics_server.api.request_body import ClientGoneError
from topics_server.auth.authorize import unauthorized

T = TypeVar("T")


async def held_by(request: Request, waiting: Awaitable[T]) -> T:
    """What is waited for.

    Raises as `end` does, as soon as `released` returns: then nothing is told, though it may have
    come meanwhile.
    """
    coming = asyncio.ensure_future(waiting)
    leaving = asyncio.ensure_future(released(request))
    try:
        await asyncio.wait((coming, leaving), return_when=asyncio.FIRST_COMPLETED)
        if request.caller.is_stale or not coming.done():
            end(request)
        return coming.result()
    finally:
        coming.cancel()
        leaving.cancel()
        await asyncio.wait((leaving,))  # until its key knows nothing of it


async def released(request: Request) -> None:
    """Return when nothing is to be told any more: the client hung up, or its key is not good."""
    caller, revoked = request.caller, asyncio.Event()
    if not caller.until_revoked(revoked.set):
        return
    leaving = asyncio.ensure_future(request.gone())
    ending = asyncio.ensure_future(revoked.wait())
    try:
        await asyncio.wait((leaving, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        caller.forget(revoked.set)
        leaving.cancel()
        ending.cancel()


def end(request: Request) -> NoReturn:
    """Raise why a request was released: `unauthorized` for its key, else `ClientGoneError`."""
    if request.caller.is_stale:
        raise unauthorized("the key was revoked, or its grants have changed")
    raise ClientGoneError
