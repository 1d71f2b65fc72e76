"""Reads the query of `GET …/records`: a range, an order, filters."""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.api.api_settings import ApiSettings
from topics_server.api.messages.read_queries import filter_of, whole_number
from topics_server.api.messages.requests import query_bool
from topics_server.api.messages.times import point_in_time
from topics_server.engine.answers import BackwardRequest, ReadRequest, ReadStart
from topics_server.values.errors import clipped, invalid
from topics_server.values.json_cache import DATA, META, TAGS
from topics_server.values.limits import (
    DIFF_LIMIT_DEFAULT,
    DIFF_WAIT_MS_MAX,
    PAGE_BYTES_DEFAULT,
    PAGE_BYTES_MAX,
    SEQ_MAX,
)
from topics_server.values.texts.query_string import parse_query

_STARTS: Final = ("from_seq", "since", "last")


class RecordsRequest(msgspec.Struct, frozen=True):
    """A plain read, clamped. `shown`: the members of records (`TAGS`, `META`, `DATA`)."""

    forward: ReadRequest
    backward: BackwardRequest
    is_descending: bool
    shown: int


def decode_records(query: bytes, settings: ApiSettings) -> RecordsRequest:
    """The request of a query string. Raises `invalid_request` that names the parameter."""
    sent = parse_query(query)
    order = sent.get("order", "asc")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", "order")
    starts = [name for name in _STARTS if name in sent]
    if len(starts) > 1 and (order == "asc" or "last" in starts):
        raise invalid(f"{starts[0]} and {starts[1]} are two starts; give one", starts[1])
    last = whole_number(sent, "last", 0)
    if "last" in sent and (order == "desc" or last == 0):
        more = "limit gives the number of records in descending order" if order == "desc" else ""
        raise invalid(more or "last must be at least 1", "last")
    limit = min(whole_number(sent, "limit", 0) or last or DIFF_LIMIT_DEFAULT, settings.max_limit)
    max_bytes = min(whole_number(sent, "max_batch_bytes", 0) or PAGE_BYTES_DEFAULT, PAGE_BYTES_MAX)
    from_seq = whole_number(sent, "from_seq", 0)
    before_seq = min(whole_number(sent, "before_seq", SEQ_MAX + 1), SEQ_MAX + 1)
    since = point_in_time(sent["since"], "since") if "since" in sent else None
    until = point_in_time(sent["until"], "until") if "until" in sent else None
    start = None
    if since is not None or last:
        start = ReadStart(since, min(last, settings.max_limit) or None)
    wanted = filter_of(sent, settings.max_node_bytes)
    tags = TAGS if query_bool(sent, "include_tags", True) else 0
    metas = META if query_bool(sent, "include_meta", True) else 0
    return RecordsRequest(
        forward=ReadRequest(
            from_seq=from_seq,
            limit=limit,
            max_bytes=max_bytes,
            wait_ms=min(whole_number(sent, "wait_ms", 0), DIFF_WAIT_MS_MAX),
            filter=wanted,
            start=start,
            before_seq=before_seq,
            until=until,
        ),
        backward=BackwardRequest(
            before_seq=before_seq,
            after_seq=min(from_seq, SEQ_MAX),
            limit=limit,
            max_bytes=max_bytes,
            since=since,
            until=until,
        ),
        is_descending=order == "desc",
        shown=tags | metas | DATA,
    )


def seq_of(segment: str) -> int:
    """The seq in a record's path. Raises `invalid_request`."""
    if not (segment.isascii() and segment.isdigit()) or len(segment) > 20 or not int(segment):
        raise invalid(f'seq must be a whole number from 1, not "{clipped(segment)}"', "seq")
    return int(segment)
