"""What a request waits for, for as long as its client is there and its key is good.

Used by the long-polls of `api/records` and `api/streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from topics_server.api.access import unauthorized
from topics_server.api.http import Request
from topics_server.api.receiving import ClientGoneError

T = TypeVar("T")


async def held_by(request: Request, waiting: Awaitable[T]) -> T:
    """What is waited for.

    Raises `ClientGoneError` as soon as nobody waits for it, `unauthorized` as soon as the key was
    taken away or grants other things: then nothing is told, though it may have come meanwhile.
    """
    caller, revoked = request.caller, asyncio.Event()
    coming = asyncio.ensure_future(waiting)
    leaving = asyncio.ensure_future(request.gone())
    ending = asyncio.ensure_future(revoked.wait())
    try:
        if caller.until_revoked(revoked.set):
            await asyncio.wait((coming, leaving, ending), return_when=asyncio.FIRST_COMPLETED)
        if caller.is_stale:
            raise unauthorized("the key was taken away, or grants other things now")
        if not coming.done():
            raise ClientGoneError
        return coming.result()
    finally:
        caller.forget(revoked.set)
        for one in (coming, leaving, ending):
            one.cancel()
