"""Pages of a stream as HTTP responses: body, ETag, caching, cursor. Pure.

A page's tag identifies its records and its headers about the end of the stream. A range can only
lose records, so their number is part of the tag. A page at the end of a closed stream may be cached
for a minute; at the end of an open stream it must be revalidated. Called by `api/streams/handlers`,
`api/streams/frames`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from topics_server.api.streams.request_headers import CLOSED, NEXT_OFFSET
from topics_server.http.error_responses import Headers
from topics_server.streams.offsets import text_of
from topics_server.streams.values import Position, StreamPage, StreamView

_TRUE: Final = b"true"
# Cursors count intervals since 2024-10-09T00:00:00Z; the second value is the length of an interval.
_CURSOR_EPOCH_MS: Final = 1_728_432_000_000
_CURSOR_MS: Final = 20_000
# A client that already has the current cursor gets a random cursor of the next hour.
_CURSORS_AHEAD: Final = 3_600_000 // _CURSOR_MS


def body_of(page: StreamPage) -> bytes:
    """The messages as a JSON array, or their joined bytes."""
    if page.view.is_json:
        return b"[%b]" % b",".join(page.datas)
    return b"".join(page.datas)


def offset_header(position: Position) -> tuple[bytes, bytes]:
    """The end of a stream, or the next offset to read."""
    return (NEXT_OFFSET, text_of(position).encode("ascii"))


def closed_header(is_closed: bool) -> Headers:
    """The header of a closed stream."""
    return ((CLOSED, _TRUE),) if is_closed else ()


def page_headers(page: StreamPage) -> Headers:
    """The headers of a page about the stream's end."""
    headers: Headers = ((b"stream-up-to-date", _TRUE),) if page.is_up_to_date else ()
    return headers + closed_header(page.is_closed)


def life_headers(view: StreamView) -> Headers:
    """The headers of a stream's lifetime."""
    headers: Headers = ()
    if view.ttl_s is not None:
        headers += ((b"stream-ttl", b"%d" % view.ttl_s),)
    if view.expires_at is not None:
        headers += ((b"stream-expires-at", view.expires_at.encode("latin-1")),)
    return headers


def tag_of(page: StreamPage, start: Position | None) -> bytes:
    """The entity tag of a page after `start`; None is the beginning.

    The tag is weak, because the page has the same tag compressed and not compressed.
    """
    return tag_of_range(page, start, len(page.datas))


def tag_of_range(page: StreamPage, start: Position | None, count: int) -> bytes:
    """The entity tag of a range of `count` messages, from a page's start to its `next`."""
    state = b"c" if page.is_closed else b"u" if page.is_up_to_date else b"p"
    first_seq = page.seqs[0] if page.seqs else 0
    start_seq = b"-1" if start is None else b"%d" % start.seq
    shown = (page.view.topic_id, start_seq, first_seq, page.next.seq, count, state)
    return b'W/"%d:%b:%d:%d:%d:%b"' % shown


def is_known(headers: Mapping[bytes, bytes], tag: bytes) -> bool:
    """Whether the client already has the content of this tag (`If-None-Match`)."""
    sent = headers.get(b"if-none-match")
    if sent is None:
        return False
    known = {part.strip().removeprefix(b"W/") for part in sent.split(b",")}
    return b"*" in known or tag.removeprefix(b"W/") in known


def keeping(*, is_final: bool, is_private: bool) -> tuple[bytes, bytes]:
    """How long a response at a stream's end may be cached, and by whom.

    If the server requires keys, only the client may cache it. `is_final`: the stream never gets
    more.
    """
    whose = b"private" if is_private else b"public"
    if is_final:
        return (b"cache-control", whose + b", max-age=60, stale-while-revalidate=300")
    return (b"cache-control", whose + b", no-cache")


def cursor_after(sent: int | None, now_ms: int, chance: int) -> int:
    """The cursor of a live answer, which is always higher than the sent cursor.

    `chance`: any number; it separates clients that would loop in a cache.
    """
    current = max(0, now_ms - _CURSOR_EPOCH_MS) // _CURSOR_MS
    if sent is None or sent < current:
        return current
    return sent + 1 + chance % _CURSORS_AHEAD
