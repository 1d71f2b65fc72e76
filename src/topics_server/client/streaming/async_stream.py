"""`AsyncDurableStream`: one stream of one server, for coroutines.

The twin of `durable_stream.DurableStream`: the same calls, errors and retries.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from topics_server.client.coroutine_client import CoroutineClient
from topics_server.client.effects import Effects, new_key
from topics_server.client.errors import Refused
from topics_server.client.exchange import LIVE_RETRY_MS, PATIENCE_MS, TIMEOUT_MS
from topics_server.client.streaming import stream_requests
from topics_server.client.streaming.stream_requests import (
    JSON,
    StreamChunk,
    StreamEnd,
    StreamGap,
    StreamReader,
)


class AsyncDurableStream(CoroutineClient):
    """A stream by its path below `/v1/stream/`.

    A stream of `application/json` holds messages, which are JSON values; any other stream holds
    bytes. Appends are safe to repeat: each has an idempotency key.
    """

    def __init__(
        self,
        path: str,
        *,
        content_type: str = JSON,
        url: str | None = None,
        token: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
        patience_ms: int = PATIENCE_MS,
        effects: Effects | None = None,
        shared: CoroutineClient | None = None,
    ) -> None:
        self.place = stream_requests.stream_address(path, content_type, url)
        super().__init__(self.place.url, token, timeout_ms, patience_ms, effects, shared)

    async def create(
        self, *messages: Any, ttl_s: int | None = None, closed: bool = False
    ) -> StreamEnd:
        """Make the stream with these first messages; an equal existing stream stays."""
        return await self._patiently(
            stream_requests.create(self.place, messages, ttl_s, closed=closed)
        )

    async def append(
        self, *messages: Any, key: str | None = None, close: bool = False
    ) -> StreamEnd:
        """Append messages, all or none; with `close`, close the stream.

        Raises `NotFound` if the stream does not exist, and `Refused` with the code `stream_closed`
        if it is closed.
        """
        return await self._patiently(
            stream_requests.append(self.place, messages, key or new_key(), close=close)
        )

    async def end(self) -> StreamEnd:
        """Where the stream ends."""
        return await self._patiently(stream_requests.end(self.place))

    def read(self, cursor: str | None = None) -> AsyncGenerator[StreamChunk | StreamGap, None]:
        """The pages from a cursor, or from the beginning, up to the stream's end at the start of
        the read.
        """
        return self._read(cursor, is_live=False)

    def live(self, cursor: str | None = None) -> AsyncGenerator[StreamChunk | StreamGap, None]:
        """The pages from a cursor, or from the beginning, then new ones, until the stream is
        closed.

        The server may be away for an hour.
        """
        return self._read(cursor, is_live=True)

    async def delete(self) -> None:
        """Delete the stream."""
        await self._patiently(stream_requests.delete(self.place))

    async def _read(
        self, cursor: str | None, *, is_live: bool
    ) -> AsyncGenerator[StreamChunk | StreamGap, None]:
        patience_ms = LIVE_RETRY_MS if is_live else None
        reader = StreamReader(self.place, cursor, is_live=is_live)
        reader.starts_at(await self.end())
        while (call := reader.call()) is not None:
            try:
                pages = reader.take(await self._patiently(call, patience_ms))
            except Refused as error:
                pages = reader.lost(error)
            for page in pages:
                yield page
