"""Server-sent events of a stream: `data`, then `control`. Pure.

JSON streams send arrays, text streams text, all others base64. The messages of one page are one
event: a byte stream has no message boundaries, and a JSON array keeps them. Invalid UTF-8 in a text
stream becomes U+FFFD, even where two appends share a character and their pages are read one by one.
Called by `api/streams/live_reader`.
"""

from __future__ import annotations

import base64
import re
from typing import Final

import msgspec

from topics_server.api.streams.pages import body_of
from topics_server.http.error_responses import Headers
from topics_server.streams.offsets import text_of
from topics_server.streams.values import StreamPage, StreamView

_HEADERS: Final[Headers] = (
    # Clients of this protocol compare the whole content type, so it has no parameters.
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"connection", b"keep-alive"),
    # Tells nginx and other proxies not to buffer frames.
    (b"x-accel-buffering", b"no"),
)
_ENCODED: Final = (b"stream-sse-data-encoding", b"base64")
_LINE_BREAKS: Final = re.compile(rb"\r\n|\r|\n")
_encode: Final = msgspec.json.Encoder().encode


def is_encoded(view: StreamView) -> bool:
    """Whether data are sent as base64."""
    return not view.is_json and not view.content_type.lower().startswith("text/")


def headers_of(view: StreamView) -> Headers:
    """The headers of a stream's events."""
    return (*_HEADERS, _ENCODED) if is_encoded(view) else _HEADERS


def data_frame(page: StreamPage) -> bytes:
    """The event with a page's messages; nothing if there are none.

    Its `id` is the offset behind them: a browser that reconnects sends it as `Last-Event-ID`. The
    id comes last, since some clients look for `data` right behind `event`.
    """
    if not page.datas:
        return b""
    body, at = body_of(page), text_of(page.next).encode()
    if is_encoded(page.view):
        return b"event: data\ndata:%b\nid:%b\n\n" % (base64.b64encode(body), at)
    if not page.view.is_json:
        body = body.decode("utf-8", "replace").encode()
    lines = b"".join(map(_data_line, _LINE_BREAKS.split(body)))
    return b"event: data\n%bid:%b\n\n" % (lines, at)


def _data_line(line: bytes) -> bytes:
    # A reader removes one blank at the start of a line, so a line that begins with a blank gets one
    # more.
    return b"data:%b%b\n" % (b" " if line[:1] == b" " else b"", line)


def control_frame(page: StreamPage, cursor: int) -> bytes:
    """The event with the next offset, and whether the reader is up to date or the stream closed."""
    at = text_of(page.next)
    control: dict[str, object] = {"streamNextOffset": at}
    if page.is_closed:
        control["streamClosed"] = True
    else:
        control["streamCursor"] = str(cursor)
        if page.is_up_to_date:
            control["upToDate"] = True
    return b"event: control\ndata:%b\nid:%b\n\n" % (_encode(control), at.encode())
