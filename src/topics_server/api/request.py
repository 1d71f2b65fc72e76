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
    """One request, in the form for handlers.

    `name` is the path's topic or router (valid, and inside the caller's prefixes), else empty;
    `headers` have lower-case names; `body` is inflated; `started_ms` is of the monotonic clock.
    `gone` returns when the client hung up. `caller` has the scopes that the route requires.
    `throttle_wait_ms`: how long the request waited under pressure; None if it never had to.
    `prefix` is the path at which the application is mounted, escaped as in the URL: empty, or
    without a slash at its end. `below`: the names behind the topic in a path, such as a view and
    its query.
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
    also without `run` (`HEAD`), and releases what the stream holds.
    """

    headers: Headers
    run: Callable[[Receive, Send], Awaitable[None]]
    free: Callable[[], None]


class Pending(msgspec.Struct, frozen=True, gc=False):
    """A response that is ready once a write is decided. `when_resolved` calls its callback once.

    After that call `answer` returns the response, or raises the errors that a handler may raise.
    """

    when_resolved: Callable[[Callable[[], object]], None]
    answer: Callable[[], Response]


Answer = Response | EventStream
# A handler returns its answer or a `Pending`. If it has to wait for anything else, it returns a
# coroutine, and changes nothing before the coroutine runs.
Handler = Callable[[ServerState, Request], "Answer | Pending | Coroutine[Any, Any, Answer]"]
SocketHandler = Callable[[ServerState, Scope, Receive, Send], Awaitable[None]]


async def finished(answer: Answer | Pending | Coroutine[Any, Any, Answer]) -> Answer:
    """The answer of a handler, once it is ready."""
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

    Raises like `end` when `released` returns first. A revoked key raises even if the result is
    ready.
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
        # An error of `waiting` refers to this frame, so the frame must not refer to the task.
        del coming
        await asyncio.wait((leaving,))  # `released` must remove its callback from the key


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
    """Raise why `released` returned: `unauthorized` for the key, else `ClientGoneError`."""
    if request.caller.is_stale:
        raise unauthorized("the key was revoked, or its grants have changed")
    raise ClientGoneError
