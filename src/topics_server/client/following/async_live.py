"""`live_async`: the events of topics, for coroutines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

import httpx
import httpx_sse

from topics_server.client.effects import Effects
from topics_server.client.errors import BadAnswer, ClientError, Unreachable, refusal
from topics_server.client.exchange import (
    LIVE_RETRY_MS,
    SILENCE_MS,
    TIMEOUT_MS,
    headers,
    stream_error,
    unreachable,
    verified,
)
from topics_server.client.following.live_events import LiveEvent, LivePosition, Option
from topics_server.client.retries import RetryPolicy


async def live_async(
    topics: str | Sequence[str] = (),
    *,
    prefix: str | Sequence[str] | None = None,
    cursor: str | None = None,
    url: str | None = None,
    token: str | None = None,
    patience_ms: int = LIVE_RETRY_MS,
    effects: Effects | None = None,
    **options: Option,
) -> AsyncGenerator[LiveEvent, None]:
    """The events of topics as they come: records, gaps, topics that are created or deleted.

    `topics` need not exist. `prefix`: also follow the topics whose names begin so, and those
    created later. `options` are the query of `GET …/live`: `last=10`, `since="10m"`, `tag="paid"`,
    `filter=["Not", "paid"]`. A broken connection is made again behind the last event, so that no
    record is missed and none comes twice. `cursor`: of an event of an earlier call, to go on behind
    it. Ends with an error: a refusal, or `Unreachable` once the server is away for `patience_ms`.
    """
    place = LivePosition(topics, prefix, url, cursor, options)
    effects = effects or Effects()
    timeout = httpx.Timeout(TIMEOUT_MS / 1000, read=SILENCE_MS / 1000)
    retries = RetryPolicy(patience_ms)
    async with httpx.AsyncClient(
        base_url=place.url,
        headers=headers(token),
        timeout=timeout,
        trust_env=False,
        verify=verified(place.url),
    ) as client:
        while True:
            try:
                async with contextlib.aclosing(_stream(client, place)) as events:
                    async for event in events:
                        # The server is there, even if it has nothing to tell.
                        retries = RetryPolicy(patience_ms)
                        if event is not None:
                            yield event
            except ClientError as error:
                pause_ms = retries.pause_ms(error, effects.chance())
                if pause_ms is None:
                    raise
                await effects.sleep_ms(pause_ms)


async def _stream(
    client: httpx.AsyncClient, place: LivePosition
) -> AsyncGenerator[LiveEvent | None, None]:
    """The events of one connection, None for a frame without one; ends only with an error."""
    last: ClientError = Unreachable("the server ended the stream", sent=True)
    try:
        async with httpx_sse.aconnect_sse(
            client, "GET", place.path, headers=place.headers()
        ) as source:
            if source.response.status_code != 200:
                retry_after = source.response.headers.get("Retry-After")
                answer = await source.response.aread()
                raise refusal(source.response.status_code, retry_after, answer)
            async for frame in source.aiter_sse():
                if frame.event == "error":
                    last = stream_error(frame.data.encode(), last)
                yield place.take(frame.event, frame.data, frame.id)
    except httpx_sse.SSEError as error:
        raise BadAnswer(str(error)) from None
    except httpx.TransportError as error:
        raise unreachable(error, place.url) from None
    raise last
