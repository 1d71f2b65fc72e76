"""Reads the query of a live stream: topics, prefixes, a start, filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from topics_server.api.api_settings import ApiSettings
from topics_server.api.messages.read_queries import filter_of, whole_number
from topics_server.api.messages.requests import consumer_of_stream, query_bool
from topics_server.api.messages.times import point_in_time
from topics_server.api.watch.cursor_ids import Positions, decode_id
from topics_server.api.watch.requests import (
    FRAME_BYTES_DEFAULT,
    HEARTBEAT_MS_DEFAULT,
    HEARTBEAT_MS_MAX,
    HEARTBEAT_MS_MIN,
)
from topics_server.engine.answers import ReadAs, ReadStart
from topics_server.engine.filters import Matcher
from topics_server.engine.subscribe.subscription import SubscriptionOptions
from topics_server.values.errors import clipped, invalid
from topics_server.values.json_cache import DATA, META, TAGS
from topics_server.values.limits import (
    DIFF_LIMIT_DEFAULT,
    LIVE_PREFIXES_MAX,
    PAGE_BYTES_DEFAULT,
    PAGE_BYTES_MAX,
)
from topics_server.values.model import is_name_prefix, is_topic_name
from topics_server.values.texts.query_string import parse_query

_STARTS: Final = ("from_seq", "since", "last", "tail")


class LiveRequest(msgspec.Struct, frozen=True):
    """A live stream: its topics, in the order of the request, and the prefixes of others.

    `from_seq`, `start`, `tail` and `read_as` say where it begins; with an event id `positions` do.
    """

    topics: tuple[str, ...]
    prefixes: tuple[str, ...]
    options: SubscriptionOptions
    heartbeat_ms: int
    from_seq: int
    start: ReadStart | None
    tail: bool
    read_as: ReadAs | None
    positions: Positions | None


def decode_live(
    query: bytes, topic: str, last_id: bytes | None, settings: ApiSettings
) -> LiveRequest:
    """The request in a query; `topic` is the topic in the path, if any.

    `last_id`: the `Last-Event-ID` header, which wins over `cursor`. Raises `invalid_request` that
    names the parameter.
    """
    sent = parse_query(query)
    topics = (topic,) if topic else _topics(sent, settings.max_watch_topics)
    prefixes = () if topic else _prefixes(sent)
    if not topics and not prefixes:
        raise invalid("give topics=a,b or prefix=p, or both", "topics")
    starts = [name for name in _STARTS if name in sent]
    if len(starts) > 1:
        raise invalid(f"{starts[0]} and {starts[1]} are two starts; give one", starts[1])
    if not topic and "from_seq" in sent:
        raise invalid("from_seq applies to one topic only: give since, last or tail", "from_seq")
    if not topic and "consumer" in sent:
        raise invalid("consumer applies to one topic only: use …/TOPIC/live", "consumer")
    others = (name for name in (*_STARTS, "cursor") if name in sent)
    ack = sent.get("ack", "manual")
    read_as = consumer_of_stream(sent.get("consumer"), ack, next(others, None))
    last = whole_number(sent, "last", 0)
    if "last" in sent and last == 0:
        raise invalid("last must be at least 1", "last")
    since = point_in_time(sent["since"], "since") if "since" in sent else None
    start = None
    if since is not None or last:
        start = ReadStart(since, min(last, settings.max_limit) or None)
    heartbeat_ms = whole_number(sent, "heartbeat_ms", HEARTBEAT_MS_DEFAULT)
    return LiveRequest(
        topics=topics,
        prefixes=prefixes,
        options=_options(sent, settings),
        heartbeat_ms=max(HEARTBEAT_MS_MIN, min(HEARTBEAT_MS_MAX, heartbeat_ms)),
        from_seq=whole_number(sent, "from_seq", 0),
        start=start,
        tail=query_bool(sent, "tail", False),
        read_as=read_as,
        positions=_positions(sent, last_id),
    )


def _options(sent: Mapping[str, str], settings: ApiSettings) -> SubscriptionOptions:
    consistency = sent.get("consistency", "eventual")
    if consistency not in ("eventual", "strong"):
        raise invalid("consistency must be eventual or strong", "consistency")
    wanted = filter_of(sent, settings.max_node_bytes)
    with_data = query_bool(sent, "include_data", True)
    shown = TAGS if query_bool(sent, "include_tags", True) else 0
    if query_bool(sent, "include_meta", True) and with_data:
        shown |= META
    max_bytes = whole_number(sent, "max_batch_bytes", FRAME_BYTES_DEFAULT)
    return SubscriptionOptions(
        limit=min(whole_number(sent, "limit", 0) or DIFF_LIMIT_DEFAULT, settings.max_limit),
        max_bytes=min(max_bytes or PAGE_BYTES_DEFAULT, PAGE_BYTES_MAX),
        shown=shown | DATA if with_data else shown,
        strong=consistency == "strong",
        matcher=None if wanted is None else Matcher(wanted),
    )


def _topics(sent: Mapping[str, str], most: int) -> tuple[str, ...]:
    if "topics" not in sent:
        return ()
    names = tuple(dict.fromkeys(sent["topics"].split(",")))
    for name in names:
        if not is_topic_name(name):
            raise invalid(
                f'"{clipped(name)}" is not a topic name: 1 to 255 characters of A-Z a-z 0-9 . _ : '
                "- that start with a letter or digit",
                "topics",
            )
    if len(names) > most:
        raise invalid(f"topics names {len(names)} topics; the limit is {most}", "topics")
    return names


def _prefixes(sent: Mapping[str, str]) -> tuple[str, ...]:
    if "prefix" not in sent:
        return ()
    prefixes = tuple(dict.fromkeys(sent["prefix"].split(",")))
    for prefix in prefixes:
        if not is_name_prefix(prefix):
            raise invalid(f'no topic name begins with "{clipped(prefix)}"', "prefix")
    if len(prefixes) > LIVE_PREFIXES_MAX:
        raise invalid(f"prefix takes at most {LIVE_PREFIXES_MAX} prefixes", "prefix")
    return prefixes


def _positions(sent: Mapping[str, str], last_id: bytes | None) -> Positions | None:
    """The positions of an id that the client has seen; None without one.

    An invalid id is refused: otherwise the stream would begin anew, and repeat records.
    """
    last_id = (last_id or b"").strip()
    field = "Last-Event-ID" if last_id else "cursor"
    if not last_id:
        last_id = sent.get("cursor", "").encode("utf-8", "surrogatepass")
    if not last_id:
        return None
    try:
        return decode_id(last_id)
    except ValueError:
        raise invalid(f"{field} is not an event id of this server", field) from None
