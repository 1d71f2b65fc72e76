"""`live_async`: the events of topics, for coroutines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

import httpx

from topics_server.client.effects import Effects
from topics_server.client.event_frames import frames_async, reopened_async
from topics_server.client.exchange import (
    LIVE_RETRY_MS,
    SILENCE_MS,
    TIMEOUT_MS,
    headers,
    verified,
)
from topics_server.client.following.live_events import LiveEvent, LivePosition, Option

_TIMEOUT = httpx.Timeout(TIMEOUT_MS / 1000, read=SILENCE_MS / 1000)


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
    """The events of topics as they happen: records, gaps, topics that are created or deleted.

    `topics` need not exist. `prefix`: also follow the topics whose names begin with it, and those
    created later. `options` are the query of `GET …/live`: `last=10`, `since="10m"`, `tag="paid"`,
    `filter=["Not", "paid"]`. After a broken connection the stream continues behind the last event,
    so that no record is missed or repeated. `cursor`: the cursor of an event of an earlier call, to
    continue behind it. Ends with an error: a refusal, or `Unreachable` once the server is away for
    `patience_ms`.
    """
    place = LivePosition(topics, prefix, url, cursor, options)
    async with httpx.AsyncClient(
        base_url=place.url,
        headers=headers(token),
        trust_env=False,
        verify=verified(place.url),
    ) as client:
        found = reopened_async(lambda: _stream(client, place), patience_ms, effects or Effects())
        async with contextlib.aclosing(found) as events:
            async for event in events:
                if event is not None:
                    yield event


async def _stream(
    client: httpx.AsyncClient, place: LivePosition
) -> AsyncGenerator[LiveEvent | None, None]:
    """The events of one connection; None for a frame without an event. Ends only with an error."""
    found = frames_async(client, place.url, place.path, _TIMEOUT, place.headers())
    async with contextlib.aclosing(found) as opened:
        async for frame in opened:
            yield place.take(frame.event, frame.data, frame.id)
