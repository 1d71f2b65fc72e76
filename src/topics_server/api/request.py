"""The input and the output of a handler: one `Request`, one answer.

An answer is a `Response`, an `EventStream`, or a `Pending`, which has its response once a write is
decided. A handler that waits for anything else is a coroutine that returns one of these. It waits
only while its client is connected and its key is valid (`held_by`). Used by every handler and by
`api/front_door`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, NoReturn, TypeVar

import msgspec

from topics_server.api.context import ServerState
from topics_server.api.request_body import ClientGoneError
from topics_server.api.request_body import Receive as Receive
from topics_server.auth.api_keys import EVERYBODY, Caller
from topics_server.auth.authorize import unauthorized
from topics_server.http.error_responses import Headers
from topics_server.http.responses import Response as Response
from topics_server.runtime.clock import monotonic_s

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Request(msgspec.Struct, gc=False):
    """One request as handlers see it.

    `name` is the path's topic or router (valid, and inside the caller's prefixes), else empty;
    `headers` have lower-case names; `body` is inflated; `started_ms` is of the monotonic clock.
    `gone` returns when the client hung up. `caller` may do what the route asks for.
    `throttle_wait_ms`: how long the request waited under pressure; None if it never had to.
    `prefix` is where the application is mounted, as the URL has it: empty, or a path without a
    slash at its end. `below`: of a view's path, the names of the view and of its query.
    """

    method: str
    name: str
    headers: Mapping[bytes, bytes]
    query: bytes
    body: bytes
    started_ms: float
    gone: Callable[[], Awaitable[None]]
    caller: Caller = EVERYBODY
    throttle_wait_ms: float | None = None
    prefix: bytes = b""
    below: tuple[str, ...] = ()

    def elapsed_ms(self) -> float:
        """Milliseconds since the request arrived."""
        return monotonic_s() * 1000 - self.started_ms


class EventStream(msgspec.Struct, frozen=True, gc=False):
    """A 200 without a length: after its head the connection belongs to `run`.

    `run` sends body messages until it or the client ends the response. `free` is always called,
    also without `run` (`HEAD`), and frees what was taken for the stream.
    """

    headers: Headers
    run: Callable[[Receive, Send], Awaitable[None]]
    free: Callable[[], None]


class Pending(msgspec.Struct, frozen=True, gc=False):
    """A response that is there once a write is decided.

    `when_resolved` calls back once; from then on `answer` gives the response.

    `answer` may raise what a handler may.
    """

    when_resolved: Callable[[Callable[[], object]], None]
    answer: Callable[[], Response]


Answer = Response | EventStream
# A handler gives its answer at once, or a `Pending`; one that has to wait for anything else gives a
# coroutine, and has done nothing before that runs.
Handler = Callable[[ServerState, Request], "Answer | Pending | Coroutine[Any, Any, Answer]"]
SocketHandler = Callable[[ServerState, Scope, Receive, Send], Awaitable[None]]


async def finished(answer: Answer | Pending | Coroutine[Any, Any, Answer]) -> Answer:
    """The answer that a handler gave, once it is there."""
    if isinstance(answer, (Response, EventStream)):
        return answer
    if not isinstance(answer, Pending):
        return await answer
    resolved = asyncio.Event()
    answer.when_resolved(resolved.set)
    await resolved.wait()
    return answer.answer()


async def held_by(request: Request, waiting: Awaitable[T]) -> T:
    """The result of `waiting`.

    Raises like `end` as soon as `released` returns, even if the result has come meanwhile.
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
        await asyncio.wait((leaving,))  # until it has left the set of its key


async def released(request: Request) -> None:
    """Return when no answer may be sent: the client disconnected, or its key was revoked."""
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
