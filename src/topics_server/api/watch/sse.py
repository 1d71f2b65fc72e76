"""The bytes of server-sent events, comments and errors (§7.5). Pure.

Frames have no `id:` line: each connection puts its own in front, so that every watcher of a batch
gets the same rendered bytes. Payloads are copied into `data:` verbatim. Only a line break between
JSON tokens is changed: it starts a new `data:` line. Used by `watch` and by the event streams of
`live`, `queues`, `streams` and `views`.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from topics_server.engine.subscribe.subscription import (
    CaughtUp,
    Event,
    Records,
    Tombstone,
    TopicDeleted,
)
from topics_server.values.errors import TopicsError
from topics_server.values.json_cache import JsonCache

MEDIA_TYPE: Final = b"text/event-stream; charset=utf-8"
# Headers in addition to those of CORS (§7.3).
STREAM_HEADERS: Final = (
    (b"content-type", MEDIA_TYPE),
    (b"cache-control", b"no-store"),
    (b"connection", b"keep-alive"),
    # Tells nginx and other proxies not to buffer frames.
    (b"x-accel-buffering", b"no"),
)
# How long an EventSource waits before it reconnects (§7.5), ms.
RETRY: Final = b"retry: 2000\n\n"

_LINE_BREAKS: Final = re.compile(rb"\r\n|\r|\n")
_encode: Final = msgspec.json.Encoder().encode


def frame(event: bytes, data: bytes) -> bytes:
    """One event; an `id:` line may be put in front."""
    if b"\n" in data or b"\r" in data:
        data = _LINE_BREAKS.sub(b"\ndata: ", data)
    return b"event: %b\ndata: %b\n\n" % (event, data)


def error_frame(code: int, message: str, **more: object) -> bytes:
    """An `error` event (§7.5): a code like HTTP's, and a message."""
    return frame(b"error", _encode({"code": code, "error": message, **more}))


def consumer_lost(error: TopicsError) -> bytes:
    """The frame that reports that a consumer no longer exists.

    The stream continues without commits for it.
    """
    return error_frame(404, error.message, **error.detail)


# The last event of a stream whose key was revoked or changed.
REVOKED: Final = error_frame(401, "the key of this stream was revoked or changed")


def records_json(event: Records, cache: JsonCache) -> bytes:
    """The members of a record frame, without the braces around them. WebSockets use them, too."""
    parts: list[bytes | memoryview] = [
        b'"topic":"%b","records":[' % event.topic.encode("ascii"),
    ]
    for piece in event.page.pieces:
        for part in cache.slices(piece.block, piece.rows, event.shown):
            parts.append(part)
            parts.append(b",")
    parts[-1] = b'],"from_seq":%d,"to_seq":%d,"head_seq":%d' % (
        event.from_seq,
        event.to_seq,
        event.head_seq,
    )
    return b"".join(parts)


def topic_created(name: str, epoch: int) -> bytes:
    """The frame that reports a new topic of a followed prefix."""
    return frame(b"topic-created", _encode({"topic": name, "epoch": epoch}))


def render(event: Event, cache: JsonCache) -> bytes:
    """The frame of one event, without its `id:` line."""
    match event:
        case Records():
            return frame(b"record", b"{%b}" % records_json(event, cache))
        case Tombstone():
            return frame(b"tombstone", _encode(event))
        case CaughtUp():
            return frame(b"caught-up", _encode(event))
        case TopicDeleted():
            return frame(b"topic-deleted", _encode(event))


class SseDialect:
    """The dialect of server-sent events; see `send_queue.Dialect`."""

    # One message may hold several frames.
    is_joined: Final = True

    def render(self, event: Event, cache: JsonCache) -> bytes:
        """The frame of an event: see the function `render`."""
        return render(event, cache)

    def message(self, payload: bytes) -> dict[str, Any]:
        """The ASGI message that carries `payload`."""
        return {"type": "http.response.body", "body": payload, "more_body": True}

    def wire(self, payload: bytes) -> bytes:
        """One chunk of the response's body."""
        return b"%x\r\n%b\r\n" % (len(payload), payload)

    def last(self, code: int) -> dict[str, Any]:
        """The ASGI message that ends the response."""
        return {"type": "http.response.body", "body": b"", "more_body": False}

    def position(self, topic: str, seq: int, head_seq: int) -> bytes:
        """An empty frame: the `id:` line in front holds the position."""
        return b"\n"

    def heartbeat(self, now_ms: int) -> bytes:
        """A comment: no event, no id (§7.5)."""
        return b": hb %d\n\n" % now_ms

    def too_slow(self) -> bytes:
        """The last frame of a consumer that did not read."""
        message = "the client did not read in time: reconnect with the last id"
        return error_frame(408, message, retry_after_ms=0)

    def failed(self, code: int, message: str) -> bytes:
        """The last frame of a stream that cannot continue."""
        return error_frame(code, message)


SSE: Final = SseDialect()
