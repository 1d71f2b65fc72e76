"""Event streams over HTTP: the frames of one connection, and reconnecting.

`frames` and `reopened` are for programs without a loop, `frames_async` and `reopened_async` for
coroutines. Used by the readers of topics, views and jobs, which turn the frames into values.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import TypeVar

import httpx
import httpx_sse

from topics_server.client.effects import Effects
from topics_server.client.errors import BadAnswer, ClientError, Unreachable, refusal
from topics_server.client.exchange import failure, stream_error
from topics_server.client.retries import RetryPolicy

T = TypeVar("T")


def frames(
    http: httpx.Client,
    url: str,
    path: str,
    timeouts: httpx.Timeout,
    headers: Mapping[str, str] | None = None,
) -> Generator[httpx_sse.ServerSentEvent, None, None]:
    """The frames of one connection.

    Ends only with an error: `Unreachable` when the connection breaks.
    """
    last: ClientError = Unreachable("the server ended the stream", sent=True)
    try:
        with httpx_sse.connect_sse(
            http, "GET", path, headers=dict(headers or {}), timeout=timeouts
        ) as source:
            if source.response.status_code != 200:
                raise _refused(source.response, source.response.read())
            for frame in source.iter_sse():
                if frame.event == "error":
                    last = stream_error(frame.data.encode(), last)
                yield frame
    except httpx_sse.SSEError as error:
        raise BadAnswer(str(error)) from None
    except httpx.RequestError as error:
        raise failure(error, url) from None
    raise last


async def frames_async(
    http: httpx.AsyncClient,
    url: str,
    path: str,
    timeouts: httpx.Timeout,
    headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[httpx_sse.ServerSentEvent, None]:
    """The twin of `frames` for coroutines."""
    last: ClientError = Unreachable("the server ended the stream", sent=True)
    try:
        async with httpx_sse.aconnect_sse(
            http, "GET", path, headers=dict(headers or {}), timeout=timeouts
        ) as source:
            if source.response.status_code != 200:
                raise _refused(source.response, await source.response.aread())
            async for frame in source.aiter_sse():
                if frame.event == "error":
                    last = stream_error(frame.data.encode(), last)
                yield frame
    except httpx_sse.SSEError as error:
        raise BadAnswer(str(error)) from None
    except httpx.RequestError as error:
        raise failure(error, url) from None
    raise last


def reopened(
    opened: Callable[[], Generator[T, None, None]], patience_ms: int, effects: Effects
) -> Generator[T, None, None]:
    """The values of a stream, which is opened again after its connection breaks.

    Ends only with an error: a refusal, or the failure of a server that is away for `patience_ms`.
    """
    retries = RetryPolicy(patience_ms)
    while True:
        try:
            with contextlib.closing(opened()) as values:
                for value in values:
                    # A frame shows that the server is up, even if it holds no event.
                    retries = RetryPolicy(patience_ms)
                    yield value
        except ClientError as error:
            pause_ms = retries.pause_ms(error, effects.chance())
            if pause_ms is None:
                raise
            threading.Event().wait(pause_ms / 1000)


async def reopened_async(
    opened: Callable[[], AsyncGenerator[T, None]], patience_ms: int, effects: Effects
) -> AsyncGenerator[T, None]:
    """The twin of `reopened` for coroutines."""
    retries = RetryPolicy(patience_ms)
    while True:
        try:
            async with contextlib.aclosing(opened()) as values:
                async for value in values:
                    # A frame shows that the server is up, even if it holds no event.
                    retries = RetryPolicy(patience_ms)
                    yield value
        except ClientError as error:
            pause_ms = retries.pause_ms(error, effects.chance())
            if pause_ms is None:
                raise
            await effects.sleep_ms(pause_ms)


def _refused(response: httpx.Response, answer: bytes) -> ClientError:
    return refusal(response.status_code, response.headers.get("Retry-After"), answer)
