"""Headers and query parameters of Durable Streams requests. Pure.

A request ignores the headers that it does not use. A malformed header that it does use is refused
before anything changes. `Stream-Closed` closes the stream if its value is `true`, in upper or lower
case; other values are ignored. Called by `api/streams/handlers`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal

import msgspec

from topics_server.api.messages.conditions import IF_MATCH
from topics_server.api.messages.path_names import stream_source_of
from topics_server.api.messages.producer_headers import stamp_of
from topics_server.api.messages.requests import header_key
from topics_server.api.messages.trace_headers import TRACEPARENT, trace_of
from topics_server.streams.offsets import position_of
from topics_server.streams.values import (
    BEGINNING,
    AppendAsked,
    CreateAsked,
    ForkAsked,
    Position,
)
from topics_server.values.errors import TopicsError, invalid
from topics_server.values.limits import (
    STREAM_SEQ_BYTES_MAX,
    STREAM_TTL_S_MAX,
    STREAM_TYPE_CHARS_MAX,
    U64_MAX,
)
from topics_server.values.texts.query_string import query_pairs

Headers = Mapping[bytes, bytes]
Live = Literal["", "long-poll", "sse"]

CLOSED: Final = b"stream-closed"
NEXT_OFFSET: Final = b"stream-next-offset"
_TTL: Final = "Stream-TTL"
_EXPIRES_AT: Final = "Stream-Expires-At"
_FORKED_FROM: Final = "Stream-Forked-From"
_FORK_OFFSET: Final = "Stream-Fork-Offset"
_FORK_SUB_OFFSET: Final = "Stream-Fork-Sub-Offset"
_SEQ: Final = "Stream-Seq"

_TOKEN: Final = rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_TYPE: Final = re.compile(_TOKEN + rb"/" + _TOKEN + rb"[ \t]*(?:;[\t\x20-\x7e]*)?")
_WHOLE: Final = re.compile(rb"0|[1-9][0-9]{0,19}")
_INSTANT: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt](\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?([Zz]|[+-]\d{2}:\d{2})", re.ASCII
)
_CURSOR: Final = re.compile(r"[0-9]{1,18}", re.ASCII)
_LIVE: Final[dict[str | None, Live]] = {None: "", "long-poll": "long-poll", "sse": "sse"}


class ReadAsked(msgspec.Struct, frozen=True):
    """A decoded GET: read after `at`, or at the end if None.

    `explicit`: the request named the offset.
    """

    at: Position | None
    explicit: bool
    live: Live
    cursor: int | None


def check_unconditional(headers: Headers) -> None:
    """Refuse a write with `If-Match`.

    Streams do not support conditions, and an ignored condition would count as met.

    Raises `invalid_request`.
    """
    if IF_MATCH in headers:
        raise invalid("streams take no If-Match; writes of the topic under /v0 do", "If-Match")


def create_asked(headers: Headers, body: bytes, mount: str) -> CreateAsked:
    """Decode a PUT. Raises `invalid_request`."""
    check_unconditional(headers)
    ttl = headers.get(b"stream-ttl")
    expires_at = headers.get(b"stream-expires-at")
    if ttl is not None and expires_at is not None:
        raise invalid(f"give {_TTL} or {_EXPIRES_AT}, not both", _EXPIRES_AT)
    shown, expires_at_ms = (None, None) if expires_at is None else _instant(expires_at)
    return CreateAsked(
        content_type=_type_of(headers),
        ttl_s=None if ttl is None else _whole(ttl, _TTL, STREAM_TTL_S_MAX),
        expires_at=shown,
        expires_at_ms=expires_at_ms,
        closes=closes(headers),
        body=body,
        fork=_fork(headers, mount),
        trace=trace_of(headers) if TRACEPARENT in headers else b"",
    )


def append_asked(headers: Headers) -> AppendAsked:
    """Decode a POST with a body. Raises `invalid_request`."""
    check_unconditional(headers)
    content_type = _type_of(headers)
    if content_type is None:
        if not headers.get(b"content-type", b"").strip():
            raise invalid("an append must have the stream's Content-Type", "Content-Type")
        raise invalid("Content-Type must be a media type", "Content-Type")
    seq = headers.get(b"stream-seq")
    if seq is not None and not 0 < len(seq) <= STREAM_SEQ_BYTES_MAX:
        raise invalid(f"{_SEQ} must have 1 to {STREAM_SEQ_BYTES_MAX} bytes", _SEQ)
    return AppendAsked(
        content_type,
        # The value is compared as text, which gives the same order as its bytes.
        seq=None if seq is None else seq.decode("latin-1"),
        producer=stamp_of(headers),
        closes=closes(headers),
        key=header_key(headers.get(b"idempotency-key")),
        trace=trace_of(headers) if TRACEPARENT in headers else b"",
    )


def closes(headers: Headers) -> bool:
    """Whether the stream is to be closed."""
    return CLOSED in headers and headers[CLOSED].strip().lower() == b"true"


def read_asked(query: bytes) -> ReadAsked:
    """Decode a GET. Raises `invalid_request`; ignores unknown parameters."""
    found = _parameters(query)
    offset = found.get("offset")
    live = found.get("live")
    if live not in _LIVE:
        raise invalid("live must be long-poll or sse", "live")
    if live is not None and offset is None:
        raise invalid(f"live={live} needs an offset", "offset")
    cursor = found.get("cursor", "")
    at: Position | None = BEGINNING
    explicit = False
    if offset == "now":
        at = None
    elif offset not in (None, "-1"):
        assert offset is not None
        at, explicit = position_of(offset, "offset"), True
    # An id that another server made is ignored.
    known = int(cursor) if _CURSOR.fullmatch(cursor) is not None else None
    return ReadAsked(at, explicit, _LIVE[live], known)


def resumed_at(asked: ReadAsked, last_event_id: bytes | None) -> ReadAsked | None:
    """The offset of a browser that reconnects to events; None without an `id` of this server.

    The browser repeats its first URL, so the id of its last event wins over the offset in that URL.
    """
    if not last_event_id:
        return None
    try:
        at = position_of(last_event_id.decode("latin-1"), "Last-Event-ID")
    except TopicsError:
        return None
    return msgspec.structs.replace(asked, at=at, explicit=True)


def _parameters(query: bytes) -> dict[str, str]:
    """The known parameters, each at most once."""
    found: dict[str, str] = {}
    for name, value in query_pairs(query):
        if name in found and name in ("offset", "live", "cursor"):
            raise invalid(f"{name} is given twice", name)
        found[name] = value
    return found


def _type_of(headers: Headers) -> str | None:
    """The content type; None if it is missing or malformed."""
    return _checked_type(headers.get(b"content-type", b"").strip())


# Cached, because a client sends one type with all its appends. Errors are not cached, so no key is
# longer than the bound.
@lru_cache(maxsize=256)
def _checked_type(sent: bytes) -> str | None:
    if len(sent) > STREAM_TYPE_CHARS_MAX:
        raise invalid(f"Content-Type must have at most {STREAM_TYPE_CHARS_MAX} characters")
    return sent.decode("ascii") if _TYPE.fullmatch(sent) is not None else None


def _whole(sent: bytes, field: str, most: int) -> int:
    if _WHOLE.fullmatch(sent) is None or int(sent) > most:
        raise invalid(f"{field} must be a whole number from 0 to {most}, in decimal digits", field)
    return int(sent)


def _instant(sent: bytes) -> tuple[str, int]:
    """A time of RFC 3339, as the sent text and in ms since the epoch."""
    text = sent.decode("latin-1")
    found = _INSTANT.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        zone = "+00:00" if found[4] in "Zz" else found[4]
        whole = datetime.datetime.fromisoformat(f"{found[1]}T{found[2]}{zone}")
        ms = int((found[3] or "").ljust(3, "0")[:3])
        return text, int(whole.timestamp()) * 1000 + ms
    except (ValueError, OverflowError):
        raise invalid(f"{_EXPIRES_AT} must be a time in RFC 3339 form", _EXPIRES_AT) from None


def _fork(headers: Headers, mount: str) -> ForkAsked | None:
    source = headers.get(b"stream-forked-from")
    offset = headers.get(b"stream-fork-offset")
    sub_offset = headers.get(b"stream-fork-sub-offset")
    for sent, field in ((offset, _FORK_OFFSET), (sub_offset, _FORK_SUB_OFFSET)):
        if sent is not None and source is None:
            raise invalid(f"{field} needs {_FORKED_FROM}", field)
    if source is None:
        return None
    path = stream_source_of(source, mount, _FORKED_FROM)
    at = None if offset is None else position_of(offset.decode("latin-1"), _FORK_OFFSET)
    sub = 0 if sub_offset is None else _whole(sub_offset, _FORK_SUB_OFFSET, U64_MAX >> 1)
    if sub > 0 and at is None:
        raise invalid(f"{_FORK_SUB_OFFSET} above 0 needs {_FORK_OFFSET}", _FORK_SUB_OFFSET)
    return ForkAsked(path, at, sub)
