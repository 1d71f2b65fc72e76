"""Requests of a Durable Stream as values, and the values of their answers. No I/O.

`durable_stream` and `async_stream` perform a `Call`. `StreamReader` is the state between two
requests of a reader. A reader sends long-polls: each answer is one page, also for byte streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from topics_server.client.addresses import checked_header, checked_path, checked_url
from topics_server.client.calls import DEFAULT_URL, Call
from topics_server.client.errors import BadAnswer, Refused
from topics_server.client.values import plain

STREAM_ROOT: Final = "/v1/stream/"
JSON: Final = "application/json"
START: Final = "-1"
# The longest time that a server holds a long-poll, ms.
LONG_POLL_MS_MAX: Final = 60_000


class StreamAddress(msgspec.Struct, frozen=True):
    """A stream and its server."""

    url: str
    path: str
    content_type: str

    @property
    def takes_json(self) -> bool:
        """Whether the stream holds JSON messages; if not, it holds bytes."""
        return self.content_type.partition(";")[0].strip().lower() == JSON


class StreamEnd(msgspec.Struct, frozen=True):
    """The end of a stream. Nothing more can be appended to a closed stream."""

    offset: str
    content_type: str
    is_closed: bool

    @property
    def is_empty(self) -> bool:
        """Whether no message was ever appended."""
        return self.offset.partition("_")[0].strip("0") == ""


class StreamChunk(msgspec.Struct, frozen=True):
    """A page of a stream; `cursor` is the offset behind it."""

    data: bytes
    content_type: str
    cursor: str
    server_cursor: str
    is_up_to_date: bool
    is_closed: bool

    @property
    def messages(self) -> list[Any]:
        """The messages of a JSON stream. Raises `BadAnswer` for a stream of bytes."""
        try:
            found = plain(self.data) if self.data else []
        except ValueError as error:
            raise BadAnswer(f"a page of a {self.content_type} stream: {error}") from None
        if not isinstance(found, list):
            raise BadAnswer(f"a page of a {self.content_type} stream is no list of messages")
        return found


class StreamGap(msgspec.Struct, frozen=True):
    """The data between two offsets is lost; the reader continues at `cursor`."""

    from_offset: str
    cursor: str


def stream_address(path: str, content_type: str, url: str | None) -> StreamAddress:
    """The address of a stream by its path below `/v1/stream/`. Raises `ValueError`."""
    base = url or DEFAULT_URL
    checked_url(base, DEFAULT_URL)
    name = path.removeprefix(STREAM_ROOT).lstrip("/")
    if not name:
        raise ValueError("the path of a stream must not be empty")
    return StreamAddress(
        base.rstrip("/"),
        checked_path(STREAM_ROOT + quote(name, safe="/")),
        checked_header(content_type, "a content type"),
    )


def create(
    where: StreamAddress, messages: Sequence[Any], ttl_s: int | None, *, closed: bool
) -> Call[StreamEnd]:
    """Make a stream with its first messages; an equal existing stream stays."""
    headers = {"content-type": where.content_type}
    if ttl_s is not None:
        headers["stream-ttl"] = str(ttl_s)
    if closed:
        headers["stream-closed"] = "true"
    return _call("PUT", where, headers, _encode(where, messages) if messages else None)


def append(
    where: StreamAddress, messages: Sequence[Any], key: str, *, close: bool
) -> Call[StreamEnd]:
    """Append messages, or bytes; with `close`, close the stream."""
    if not messages and not close:
        raise ValueError("there is nothing to append")
    headers = {
        "content-type": where.content_type,
        "idempotency-key": checked_header(key, "an idempotency key"),
    }
    if close:
        headers["stream-closed"] = "true"
    return _call("POST", where, headers, _encode(where, messages) if messages else None)


def end(where: StreamAddress) -> Call[StreamEnd]:
    """Where the stream ends."""
    return _call("HEAD", where, None, None)


def delete(where: StreamAddress) -> Call[None]:
    """Delete the stream."""

    def read(_answer: bytes) -> None:
        return None

    return Call(
        method="DELETE", path=where.path, body=None, read=read, repeatable=True, is_removal=True
    )


class StreamReader:
    """A reader of one stream.

    `is_live`: the reader follows the stream until the stream is closed.
    """

    def __init__(self, where: StreamAddress, cursor: str | None, *, is_live: bool) -> None:
        self._where = where
        self._offset = cursor or START
        self._server_cursor = ""
        self._end: str | None = None
        self._is_live = is_live
        self._is_done = False

    def starts_at(self, end_of_stream: StreamEnd) -> None:
        """Set the end up to which a read goes. The read may then have nothing to read."""
        self._end = end_of_stream.offset
        is_at_end = end_of_stream.is_empty or end_of_stream.offset == self._offset
        self._is_done = is_at_end and (end_of_stream.is_closed or not self._is_live)

    def call(self) -> Call[StreamChunk] | None:
        """The request of the next page; None at the end."""
        if self._is_done:
            return None
        query = {"offset": self._offset, "live": "long-poll"}
        if self._server_cursor:
            query["cursor"] = self._server_cursor
        return Call(
            method="GET",
            path=f"{self._where.path}?{urlencode(query)}",
            body=None,
            read=_no_headers,
            read_headers=_chunk,
            repeatable=True,
            wait_ms=LONG_POLL_MS_MAX,
        )

    def take(self, chunk: StreamChunk) -> list[StreamChunk | StreamGap]:
        """Handle a page. Returns the page if it has data."""
        self._offset = chunk.cursor
        self._server_cursor = chunk.server_cursor or self._server_cursor
        if self._is_live:
            self._is_done = chunk.is_closed and chunk.is_up_to_date
        else:
            # Offsets of a stream sort like their texts.
            is_past_end = self._end is not None and self._offset >= self._end
            self._is_done = chunk.is_up_to_date or is_past_end
        return [chunk] if chunk.data else []

    def lost(self, error: Refused) -> list[StreamChunk | StreamGap]:
        """The gap that the refusal of an offset reports; raises the error if it reports none."""
        following = error.detail.get("next_offset") if error.status == 410 else None
        if not isinstance(following, str) or following == self._offset:
            raise error
        gap = StreamGap(self._offset, following)
        self._offset, self._server_cursor = following, ""
        self._end = None  # the old end is lost, too
        return [gap]


def _call(
    method: str, where: StreamAddress, headers: Mapping[str, str] | None, body: bytes | None
) -> Call[StreamEnd]:
    return Call(
        method=method,
        path=where.path,
        body=body,
        headers=headers,
        read=_no_headers,
        read_headers=_end,
        repeatable=True,
    )


def _encode(where: StreamAddress, messages: Sequence[Any]) -> bytes:
    if where.takes_json:
        return b"[" + b",".join(msgspec.json.encode(message) for message in messages) + b"]"
    parts = [part.encode() if isinstance(part, str) else part for part in messages]
    if not all(isinstance(part, bytes | bytearray | memoryview) for part in parts):
        raise TypeError(f"a {where.content_type} stream takes bytes or str")
    return b"".join(parts)


def _no_headers(_answer: bytes) -> Any:
    raise AssertionError("the headers of the answer are read, too")


def _is_true(headers: Mapping[str, str], name: str) -> bool:
    return headers.get(name, "").lower() == "true"


def _offset(headers: Mapping[str, str]) -> str:
    found = headers.get("stream-next-offset")
    if found is None:
        raise BadAnswer("the answer is not from a Durable Stream")
    return found


def _end(headers: Mapping[str, str], _answer: bytes) -> StreamEnd:
    kind = headers.get("content-type", "")
    return StreamEnd(_offset(headers), kind, _is_true(headers, "stream-closed"))


def _chunk(headers: Mapping[str, str], answer: bytes) -> StreamChunk:
    is_closed = _is_true(headers, "stream-closed")
    return StreamChunk(
        data=answer,
        content_type=headers.get("content-type", ""),
        cursor=_offset(headers),
        server_cursor=headers.get("stream-cursor", ""),
        # The answer to a long-poll without new data has no body.
        is_up_to_date=_is_true(headers, "stream-up-to-date") or is_closed or not answer,
        is_closed=is_closed,
    )
