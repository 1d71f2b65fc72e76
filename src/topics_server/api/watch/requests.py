"""Decodes the body of `POST /v0/watch` (§7.2). Pure.

Unknown fields are ignored, wrong types are `invalid_request` with the field's path, which names the
topic: `topics.jobs.from_seq`. A value with a documented clamp is clamped, never refused. Does not
check whether a topic exists. Called by `api/watch/handlers`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from topics_server.api.messages.bounded_lists import check_items, node_names
from topics_server.api.messages.filters import decode_filter
from topics_server.api.messages.requests import consumer_of_stream, start_of
from topics_server.api.watch.cursor_ids import Positions, decode_id
from topics_server.engine.answers import ReadStart
from topics_server.engine.filters import Filter
from topics_server.values.appends import decode_json
from topics_server.values.entries import SessionOptions
from topics_server.values.errors import TopicsError, clipped, invalid
from topics_server.values.json_cache import DATA, META, TAGS
from topics_server.values.json_shape import exceeds_depth
from topics_server.values.limits import (
    DIFF_LIMIT_DEFAULT,
    JSON_DEPTH_MAX,
    KIB,
    LIVE_PREFIXES_MAX,
    NODE_FILTER_IDS_MAX,
    PAGE_BYTES_DEFAULT,
    PAGE_BYTES_MAX,
    SESSION_FILTER_BYTES_MAX,
    U64_MAX,
)
from topics_server.values.model import is_name_prefix, is_topic_name

FRAME_BYTES_DEFAULT: Final = 256 * KIB
HEARTBEAT_MS_DEFAULT: Final = 15_000
HEARTBEAT_MS_MIN: Final = 1_000
HEARTBEAT_MS_MAX: Final = 60_000

# msgspec cannot bound above int64; `_check_u64` adds the upper end.
_U64 = Annotated[int, Meta(ge=0)]


class _Start(msgspec.Struct, frozen=True, gc=False):
    from_seq: _U64 = 0
    tail: bool = False
    since: _U64 | str | None = None
    last: _U64 | None = None
    consumer: str | None = None
    ack: Literal["manual", "auto"] = "manual"


class Start(msgspec.Struct, frozen=True):
    """The start of reading a topic: behind `from_seq`, with `tail` at its head, or at `place`.

    With `consumer` the start is that consumer's position. `commits`: streams commit for the
    consumer.
    """

    from_seq: int = 0
    tail: bool = False
    place: ReadStart | None = None
    consumer: str | None = None
    commits: bool = False

    @property
    def is_looked_up(self) -> bool:
        """Whether the start must be looked up in the topic."""
        return self.place is not None or self.consumer is not None


class _Watch(msgspec.Struct, gc=False):
    topics: dict[str, msgspec.Raw] = {}
    prefixes: dict[str, msgspec.Raw] = {}
    node: str | list[str] | None = None
    limit: _U64 = 0
    max_batch_bytes: _U64 = FRAME_BYTES_DEFAULT
    heartbeat_ms: _U64 = HEARTBEAT_MS_DEFAULT
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True
    consistency: Literal["eventual", "strong"] = "eventual"
    cursor: str | None = None
    wait: bool = False
    filter: msgspec.Raw | UnsetType = UNSET


_ABSENT: Final = msgspec.Raw(b"")


class _WatchLists(msgspec.Struct, gc=False):
    topics: msgspec.Raw = _ABSENT
    prefixes: msgspec.Raw = _ABSENT
    node: msgspec.Raw = _ABSENT


_WATCH: Final = msgspec.json.Decoder(_Watch)
_LISTS: Final[msgspec.json.Decoder[msgspec.Struct]] = msgspec.json.Decoder(_WatchLists)
WATCH_MEMBERS: Final = _Watch.__struct_encode_fields__
_START: Final = msgspec.json.Decoder(_Start)
_FIRST: Final = _Start()
# Other starts, which a request with a consumer must not have.
_OTHER_STARTS: Final = ("from_seq", "tail", "since", "last")
_WATCH_U64: Final = ("limit", "max_batch_bytes", "heartbeat_ms")

assert FRAME_BYTES_DEFAULT <= PAGE_BYTES_DEFAULT <= PAGE_BYTES_MAX
assert HEARTBEAT_MS_MIN <= HEARTBEAT_MS_DEFAULT <= HEARTBEAT_MS_MAX


class WatchRequest(msgspec.Struct, frozen=True):
    """The topics to watch, in the order of the request.

    `prefixes`: topics whose names begin with them are watched, too; the value is the start of those
    that exist. `positions`: the positions in the sent `cursor`; None without one. `wait`: wait for
    topics that do not exist yet. `filter` is JSON; `wanted` is the decoded filter.
    """

    topics: dict[str, Start]
    options: SessionOptions
    positions: Positions | None
    wait: bool = False
    filter: str | None = None
    wanted: Filter | None = None
    prefixes: dict[str, Start] = {}


def decode_watch(
    body: bytes, *, max_topics: int, max_limit: int, max_node_bytes: int
) -> WatchRequest:
    """The body, checked and clamped; raises `invalid_request`."""
    most = {"topics": max_topics, "node": NODE_FILTER_IDS_MAX, "prefixes": LIVE_PREFIXES_MAX}
    check_items(body, _LISTS, most)
    sent = decode_json(_WATCH, body)
    if exceeds_depth(body):
        raise invalid(f"JSON is nested deeper than {JSON_DEPTH_MAX} levels")
    for field in _WATCH_U64:
        _check_u64(getattr(sent, field), field)
    if not sent.topics and not sent.prefixes:
        raise invalid("topics must name at least one topic", "topics")
    if len(sent.topics) > max_topics:
        raise invalid(
            f"topics names {len(sent.topics)} topics; the limit is {max_topics}", "topics"
        )
    options = SessionOptions(
        nodes=node_names(sent.node, max_node_bytes),
        limit=min(sent.limit or DIFF_LIMIT_DEFAULT, max_limit),
        max_batch_bytes=min(sent.max_batch_bytes or PAGE_BYTES_DEFAULT, PAGE_BYTES_MAX),
        heartbeat_ms=max(HEARTBEAT_MS_MIN, min(HEARTBEAT_MS_MAX, sent.heartbeat_ms)),
        # Without its data, a record has only `$` fields (the contract's README).
        shown=(TAGS if sent.include_tags else 0)
        | (META if sent.include_meta and sent.include_data else 0)
        | (DATA if sent.include_data else 0),
        strong=sent.consistency == "strong",
    )
    assert options.limit > 0
    assert options.max_batch_bytes > 0
    topics = {name: _start(name, raw, max_limit) for name, raw in sent.topics.items()}
    if len(sent.prefixes) > LIVE_PREFIXES_MAX:
        raise invalid(f"prefixes has at most {LIVE_PREFIXES_MAX} members", "prefixes")
    prefixes = {name: _prefix(name, raw, max_limit) for name, raw in sent.prefixes.items()}
    positions = None if sent.cursor is None else _positions(sent.cursor)
    for name, start in topics.items():
        if sent.cursor is not None and start.consumer is not None:
            message = "consumer and cursor are two starts; give one"
            raise invalid(message, f"topics.{name}.consumer")
    if sent.filter is UNSET or bytes(sent.filter) == b"null":
        return WatchRequest(topics, options, positions, sent.wait, prefixes=prefixes)
    if len(bytes(sent.filter)) > SESSION_FILTER_BYTES_MAX:
        raise invalid(f"filter of a session has over {SESSION_FILTER_BYTES_MAX} bytes", "filter")
    wanted = decode_filter(memoryview(sent.filter), max_node_bytes)
    text = bytes(sent.filter).decode()
    return WatchRequest(topics, options, positions, sent.wait, text, wanted, prefixes)


def _start(name: str, raw: msgspec.Raw, max_limit: int) -> Start:
    if not is_topic_name(name):
        shown = name if len(name) <= 256 else name[:256] + "..."
        raise invalid(
            f'"{shown}" is not a topic name: 1 to 255 characters of A-Z a-z 0-9 . _ : - that start '
            "with a letter or digit",
            f"topics.{shown}",
        )
    return _decode_start(f"topics.{name}", raw, max_limit)


def _prefix(prefix: str, raw: msgspec.Raw, max_limit: int) -> Start:
    """The start of the existing topics with a prefix."""
    if not is_name_prefix(prefix):
        raise invalid(f'no topic name begins with "{clipped(prefix)}"', "prefixes")
    start = _decode_start(f"prefixes.{prefix}", raw, max_limit)
    if start.from_seq or start.consumer is not None:
        field = "from_seq" if start.from_seq else "consumer"
        message = f"{field} applies to one topic only: give since, last or tail"
        raise invalid(message, f"prefixes.{prefix}.{field}")
    return start


def _decode_start(where: str, raw: msgspec.Raw, max_limit: int) -> Start:
    try:
        start = decode_json(_START, bytes(raw))
        _check_u64(start.from_seq, "from_seq")
        _check_u64(start.last or 0, "last")
        has_seq = bool(start.from_seq) or start.tail
        place = start_of(start.since, start.last, max_limit, has_seq=has_seq)
        given = (name for name in _OTHER_STARTS if getattr(start, name) != getattr(_FIRST, name))
        read_as = consumer_of_stream(start.consumer, start.ack, next(given, None))
    except TopicsError as error:
        field = error.detail.get("field")
        raise invalid(error.message, f"{where}.{field}" if field else where) from None
    if read_as is None:
        return Start(start.from_seq, start.tail, place)
    return Start(start.from_seq, start.tail, place, read_as.consumer, read_as.commits)


def _positions(cursor: str) -> Positions:
    try:
        return decode_id(cursor.encode("ascii"))
    except ValueError:
        raise invalid("the cursor is not an event id of this server", "cursor") from None


def _check_u64(value: int, field: str) -> None:
    if value > U64_MAX:
        raise invalid(f"{field} must be at most {U64_MAX}", field)
