"""Follows a Durable Stream to its end across disconnects.

It reads live data by Server-Sent Events or long-polling. Data of an SSE connection counts only when
the `control` event after it has named the next offset. If the connection breaks before that event,
the server sends the data again. So every byte is yielded once. Following ends when the stream is
closed and all its data was yielded.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import httpx_sse
import msgspec

from topics_server.cli.connection import CallRefused, Failure, ServerUnreachable
from topics_server.cli.durable_streams.stream_calls import StreamClient, StreamReadPage
from topics_server.cli.output import note

Live: TypeAlias = Literal["auto", "sse", "long-poll"]
# The wait between tries while no server answers; it doubles up to a second.
PAUSE_S: Final = 0.25
PAUSE_MAX_S: Final = 5.0


class _Control(msgspec.Struct, rename="camel"):
    """`event: control`: the offset where the next connection continues."""

    stream_next_offset: str
    stream_cursor: str = ""
    up_to_date: bool = False
    stream_closed: bool = False


_read_control: Final = msgspec.json.Decoder(_Control)


class StreamFollower:
    """Follows one stream from `offset` on.

    With `live` "auto" it uses events for JSON, and long-polling for bytes, because text events do
    not preserve every byte.
    """

    def __init__(self, stream: StreamClient, offset: str, live: Live) -> None:
        self.offset = offset
        self._stream = stream
        self._live = live
        self._cursor = ""
        self._is_json = False
        self._is_live = False
        self._failures = 0

    def pages(self) -> Iterator[StreamReadPage]:
        """Yield pages in order.

        An error of the first request is raised; later temporary errors are retried.

        Later permanent errors, for example when the stream was removed, raise `CallRefused`.
        """
        has_begun = False
        while True:
            try:
                for page in self._some():
                    has_begun = True
                    self._failures = 0
                    self.offset = page.next_offset
                    self._cursor = page.cursor or self._cursor
                    self._is_live = page.is_up_to_date
                    yield page
                    if page.is_closed and page.is_up_to_date:
                        return
            except ServerUnreachable as error:
                if not has_begun:
                    raise
                self._pause(error, None)
            except CallRefused as error:
                if not has_begun or (error.status != 429 and error.status < 500):
                    raise
                self._pause(error, error.retry_after_s)

    def _some(self) -> Iterator[StreamReadPage]:
        """Yield the data of one request."""
        query = {"offset": self.offset}
        if not self._is_live:
            page = self._stream.read(query)
            self._is_json = page.is_json
            yield page
            return
        if self._cursor:
            query["cursor"] = self._cursor
        if self._live == "sse" or (self._live == "auto" and self._is_json):
            yield from self._events({**query, "live": "sse"})
        else:
            yield self._stream.read({**query, "live": "long-poll"})

    def _events(self, query: dict[str, str]) -> Iterator[StreamReadPage]:
        parts: list[bytes] = []
        with self._stream.events(query) as response:
            is_base64 = response.headers.get("Stream-SSE-Data-Encoding", "").lower() == "base64"
            try:
                for event in httpx_sse.EventSource(response).iter_sse():
                    if event.event == "data":
                        parts.append(_decoded(event.data) if is_base64 else event.data.encode())
                    elif event.event == "control":
                        yield from self._pages(parts, _read_control.decode(event.data))
                        parts = []
            except (httpx_sse.SSEError, msgspec.DecodeError, binascii.Error) as error:
                raise Failure(f"bad_answer: the answer is not an event stream: {error}") from None

    def _pages(self, parts: list[bytes], control: _Control) -> Iterator[StreamReadPage]:
        """Yield a page for each control event.

        Each data event of a JSON stream is an array of its own.
        """
        if not self._is_json:
            parts = [b"".join(parts)]
        for part in parts[:-1]:
            # The offset moves only after the last page.
            yield StreamReadPage(part, self._is_json, self.offset, "", True, False)
        yield StreamReadPage(
            parts[-1] if parts else b"",
            self._is_json,
            control.stream_next_offset,
            control.stream_cursor,
            True,
            control.stream_closed,
        )

    def _pause(self, error: Failure, wait_s: float | None) -> None:
        self._failures += 1
        if self._failures == 1:
            note(f"{error.message}; reconnecting")
        longer = min(PAUSE_S * 2 ** min(self._failures - 1, 10), PAUSE_MAX_S)
        threading.Event().wait(max(wait_s or 0, longer))


def _decoded(text: str) -> bytes:
    # The data may contain line ends at any position.
    return base64.b64decode("".join(text.split()), validate=True)
