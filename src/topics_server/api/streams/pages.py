"""Pages of a stream as HTTP responses: body, ETag, caching, cursor. Pure.

A page's tag stands for the records in it (those of a range only ever become fewer, so their number
is part of it) and for what its headers say of the end. What reaches the end of a closed stream may
be kept for a minute; of an open one it has to be asked for again. Called by `api/streams/handlers`,
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
# Beginning of the count of cursors, 2024-10-09T00:00:00Z, and how long each is the current one.
_CURSOR_EPOCH_MS: Final = 1_728_432_000_000
_CURSOR_MS: Final = 20_000
# Who has the current cursor already is given one from the next hour.
_CURSORS_AHEAD: Final = 3_600_000 // _CURSOR_MS


def body_of(page: StreamPage) -> bytes:
    """The messages: a JSON array of them, or their bytes."""
    if page.view.is_json:
        return b"[%b]" % b",".join(page.datas)
    return b"".join(page.datas)


def offset_header(position: Position) -> tuple[bytes, bytes]:
    """Where a stream ends, or where the next read goes on."""
    return (NEXT_OFFSET, text_of(position).encode("ascii"))


def closed_header(is_closed: bool) -> Headers:
    """That there will never be more."""
    return ((CLOSED, _TRUE),) if is_closed else ()


def page_headers(page: StreamPage) -> Headers:
    """What a page tells of the stream's end."""
    told: Headers = ((b"stream-up-to-date", _TRUE),) if page.is_up_to_date else ()
    return told + closed_header(page.is_closed)


def life_headers(view: StreamView) -> Headers:
    """When a stream ends by itself."""
    told: Headers = ()
    if view.ttl_s is not None:
        told += ((b"stream-ttl", b"%d" % view.ttl_s),)
    if view.expires_at is not None:
        told += ((b"stream-expires-at", view.expires_at.encode("latin-1")),)
    return told


def tag_of(page: StreamPage, start: Position | None) -> bytes:
    """The entity tag of a page after `start`; None is the beginning.

    It is a weak one: packed or not, the page is the same.
    """
    return tag_of_range(page, start, len(page.datas))


def tag_of_range(page: StreamPage, start: Position | None, count: int) -> bytes:
    """The entity tag of what begins with a page and goes on to its `next`: so many messages."""
    state = b"c" if page.is_closed else b"u" if page.is_up_to_date else b"p"
    first_seq = page.seqs[0] if page.seqs else 0
    start_seq = b"-1" if start is None else b"%d" % start.seq
    shown = (page.view.topic_id, start_seq, first_seq, page.next.seq, count, state)
    return b'W/"%d:%b:%d:%d:%d:%b"' % shown


def is_known(headers: Mapping[bytes, bytes], tag: bytes) -> bool:
    """Whether who sent these headers has what has this tag (`If-None-Match`)."""
    sent = headers.get(b"if-none-match")
    if sent is None:
        return False
    known = {part.strip().removeprefix(b"W/") for part in sent.split(b",")}
    return b"*" in known or tag.removeprefix(b"W/") in known


def keeping(*, is_final: bool, is_private: bool) -> tuple[bytes, bytes]:
    """How long what reaches a stream's end may be kept, and by whom.

    Where there are keys, by its reader only. `is_final`: there will never be more.
    """
    whose = b"private" if is_private else b"public"
    if is_final:
        return (b"cache-control", whose + b", max-age=60, stale-while-revalidate=300")
    return (b"cache-control", whose + b", no-cache")


def cursor_after(sent: int | None, now_ms: int, chance: int) -> int:
    """The cursor of a live answer: never lower than the one sent, nor the same.

    `chance`: any number; it spreads who would go round in a cache.
    """
    current = max(0, now_ms - _CURSOR_EPOCH_MS) // _CURSOR_MS
    if sent is None or sent < current:
        return current
    return sent + 1 + chance % _CURSORS_AHEAD
