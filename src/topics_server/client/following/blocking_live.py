"""`live`: the events of topics as an iterator, without an event loop.

The blocking twin of `async_live.live_async`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence

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
    """The events of topics as they come; as `live_async`."""
    place = LivePosition(topics, prefix, url, cursor, options)
    chance = (effects or Effects()).chance
    timeout = httpx.Timeout(TIMEOUT_MS / 1000, read=SILENCE_MS / 1000)
    retries = RetryPolicy(patience_ms)
    with httpx.Client(
        base_url=place.url,
        headers=headers(token),
        timeout=timeout,
        trust_env=False,
        verify=verified(place.url),
    ) as client:
        while True:
            try:
                with contextlib.closing(_stream(client, place)) as events:
                    for event in events:
                        # The server is there, even if it has nothing to tell.
                        retries = RetryPolicy(patience_ms)
                        if event is not None:
                            yield event
            except ClientError as error:
                pause_ms = retries.pause_ms(error, chance())
                if pause_ms is None:
                    raise
                threading.Event().wait(pause_ms / 1000)


def _stream(client: httpx.Client, place: LivePosition) -> Generator[LiveEvent | None, None, None]:
    """The events of one connection, None for a frame without one; ends only with an error."""
    last: ClientError = Unreachable("the server ended the stream", sent=True)
    try:
        with httpx_sse.connect_sse(client, "GET", place.path, headers=place.headers()) as source:
            if source.response.status_code != 200:
                retry_after = source.response.headers.get("Retry-After")
                raise refusal(source.response.status_code, retry_after, source.response.read())
            for frame in source.iter_sse():
                if frame.event == "error":
                    last = stream_error(frame.data.encode(), last)
                yield place.take(frame.event, frame.data, frame.id)
    except httpx_sse.SSEError as error:
        raise BadAnswer(str(error)) from None
    except httpx.TransportError as error:
        raise unreachable(error, place.url) from None
    raise last
