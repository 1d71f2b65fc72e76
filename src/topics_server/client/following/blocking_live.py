"""`live`: the events of topics as an iterator, without an event loop.

The blocking twin of `async_live.live_async`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import httpx

from topics_server.client.effects import Effects
from topics_server.client.event_frames import frames, reopened
from topics_server.client.exchange import (
    LIVE_RETRY_MS,
    SILENCE_MS,
    TIMEOUT_MS,
    headers,
    verified,
)
from topics_server.client.following.live_events import LiveEvent, LivePosition, Option

_TIMEOUT = httpx.Timeout(TIMEOUT_MS / 1000, read=SILENCE_MS / 1000)


def live(
    topics: str | Sequence[str] = (),
    *,
    prefix: str | Sequence[str] | None = None,
    cursor: str | None = None,
    url: str | None = None,
    token: str | None = None,
    patience_ms: int = LIVE_RETRY_MS,
    effects: Effects | None = None,
    **options: Option,
) -> Generator[LiveEvent, None, None]:
    """The events of topics as they happen; see `live_async`."""
    place = LivePosition(topics, prefix, url, cursor, options)
    with httpx.Client(
        base_url=place.url,
        headers=headers(token),
        trust_env=False,
        verify=verified(place.url),
    ) as client:
        found = reopened(lambda: _stream(client, place), patience_ms, effects or Effects())
        with contextlib.closing(found) as events:
            for event in events:
                if event is not None:
                    yield event


def _stream(client: httpx.Client, place: LivePosition) -> Generator[LiveEvent | None, None, None]:
    """The events of one connection; None for a frame without an event. Ends only with an error."""
    found = frames(client, place.url, place.path, _TIMEOUT, place.headers())
    with contextlib.closing(found) as opened:
        for frame in opened:
            yield place.take(frame.event, frame.data, frame.id)
