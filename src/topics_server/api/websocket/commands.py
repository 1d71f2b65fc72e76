"""Decodes a client's WebSocket message into a command. Pure.

A message is one JSON object whose `op` names the command. A publish is rebuilt as the append body
that HTTP would send, a subscribe as the body of a watch; their parts are copied byte for byte. So
HTTP and WebSocket share their decoders, and the journal holds the bytes that the client sent.
Unknown fields are ignored, wrong types are `invalid_request` with the field's path. An error
carries the message's `request_id` if it could be decoded. Called by `api/websocket/handlers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from topics_server.api.messages.bounded_lists import check_items
from topics_server.api.messages.conditions import decode_condition
from topics_server.api.messages.filters import decode_filter
from topics_server.api.messages.producer_headers import stamp_of_fields
from topics_server.api.messages.requests import decode_inline_config
from topics_server.api.messages.trace_headers import checked_trace
from topics_server.api.watch.requests import Start, decode_watch
from topics_server.engine.filters import Matcher
from topics_server.engine.subscribe.subscription import SubscriptionOptions
from topics_server.engine.topic.writes.condition import Condition
from topics_server.http.error_responses import too_large
from topics_server.values.appends import DecodedAppend, decode_append, decode_json
from topics_server.values.errors import TopicsError, clipped, invalid
from topics_server.values.json_shape import exceeds_depth
from topics_server.values.limits import (
    CONTROL_BODY_BYTES_MAX,
    JSON_DEPTH_MAX,
    LIVE_PREFIXES_MAX,
    WS_REQUEST_ID_CHARS_MAX,
)
from topics_server.values.model import ProducerStamp, TopicConfig, is_name_prefix, is_topic_name
from topics_server.values.record_codecs import with_trace

OPS: Final = ("subscribe", "unsubscribe", "publish", "ping")

_RequestId = Annotated[str, Meta(max_length=WS_REQUEST_ID_CHARS_MAX)] | None
_ABSENT: Final = msgspec.Raw(b"")
_NULL: Final = b"null"


class _Subscribe(msgspec.Struct, tag_field="op", tag="subscribe", gc=False):
    request_id: _RequestId = None
    topic: str | None = None
    from_seq: msgspec.Raw = _ABSENT
    tail: msgspec.Raw = _ABSENT
    since: msgspec.Raw = _ABSENT
    last: msgspec.Raw = _ABSENT
    consumer: msgspec.Raw = _ABSENT
    ack: msgspec.Raw = _ABSENT
    topics: msgspec.Raw = _ABSENT
    prefixes: msgspec.Raw = _ABSENT
    node: msgspec.Raw = _ABSENT
    limit: msgspec.Raw = _ABSENT
    max_batch_bytes: msgspec.Raw = _ABSENT
    include_meta: msgspec.Raw = _ABSENT
    include_tags: msgspec.Raw = _ABSENT
    include_data: msgspec.Raw = _ABSENT
    consistency: msgspec.Raw = _ABSENT
    wait: msgspec.Raw = _ABSENT
    filter: msgspec.Raw = _ABSENT


class _Unsubscribe(msgspec.Struct, tag_field="op", tag="unsubscribe", gc=False):
    request_id: _RequestId = None
    topic: str | None = None
    topics: list[str] | None = None
    prefixes: list[str] | None = None


class _Publish(msgspec.Struct, tag_field="op", tag="publish", gc=False):
    topic: str
    records: msgspec.Raw
    request_id: _RequestId = None
    return_seqs: bool = True
    node: msgspec.Raw = _ABSENT
    idempotency_key: msgspec.Raw = _ABSENT
    idempotency: msgspec.Raw = _ABSENT
    create: msgspec.Raw = _ABSENT
    config: msgspec.Raw = _ABSENT
    disable_backpressure: msgspec.Raw = _ABSENT
    if_: msgspec.Raw = msgspec.field(default=_ABSENT, name="if")
    producer_id: str | None = None
    producer_epoch: int | None = None
    producer_seq: int | None = None
    traceparent: str | None = None


class _Ping(msgspec.Struct, tag_field="op", tag="ping", gc=False):
    request_id: _RequestId = None


class _Head(msgspec.Struct, gc=False):
    """The fields that name the command of a message, and its topic."""

    op: msgspec.Raw = _ABSENT
    request_id: msgspec.Raw = _ABSENT
    topic: msgspec.Raw = _ABSENT


class _Lists(msgspec.Struct, gc=False):
    """The lists of topics and prefixes, undecoded."""

    topics: msgspec.Raw = _ABSENT
    prefixes: msgspec.Raw = _ABSENT


class CommandLimits(msgspec.Struct, frozen=True):
    """The configured bounds of commands.

    `max_limit` clamps the records of a frame; `max_topics` bounds the topics of one command.
    """

    max_limit: int
    max_topics: int
    max_node_bytes: int
    max_batch_records: int


class Subscribe(msgspec.Struct, frozen=True):
    """Follow at least one topic or prefix, each from its start, all with the same options.

    `wait`: wait for topics that do not exist yet.
    """

    request_id: str | None
    starts: dict[str, Start]
    options: SubscriptionOptions
    wait: bool
    prefixes: dict[str, Start] = {}


class Unsubscribe(msgspec.Struct, frozen=True):
    """Stop following these topics and prefixes; `is_list`: the topics came as a list."""

    request_id: str | None
    names: list[str]
    is_list: bool
    prefixes: list[str] = []


class Publish(msgspec.Struct, frozen=True):
    """Append records. `body` is the same as the body of an append over HTTP."""

    request_id: str | None
    topic: str
    body: bytes
    decoded: DecodedAppend
    config: TopicConfig | None
    return_seqs: bool
    producer: ProducerStamp | None = None
    condition: Condition | None = None


class Ping(msgspec.Struct, frozen=True):
    """Request a `pong`."""

    request_id: str | None


Command = Subscribe | Unsubscribe | Publish | Ping


class RefusedCommandError(Exception):
    """An invalid message. `op` and `request_id` are set if they could be decoded."""

    def __init__(self, refusal: TopicsError, op: str | None, request_id: str | None) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.op = op
        self.request_id = request_id


_Message = _Subscribe | _Unsubscribe | _Publish | _Ping
_MESSAGE: Final[msgspec.json.Decoder[_Message]] = msgspec.json.Decoder(_Message)
_HEAD: Final = msgspec.json.Decoder(_Head)
_STRING: Final = msgspec.json.Decoder(str)
_LISTS: Final[msgspec.json.Decoder[msgspec.Struct]] = msgspec.json.Decoder(_Lists)


def decode_command(text: str, limits: CommandLimits) -> Command:
    """The command of a text message; raises `RefusedCommandError`."""
    # The decoder refuses text that UTF-8 cannot encode (a lone surrogate).
    body = text.encode("utf-8", "surrogatepass")
    try:
        most = {"topics": limits.max_topics, "prefixes": LIVE_PREFIXES_MAX}
        check_items(body, _LISTS, most)
        sent = decode_json(_MESSAGE, body)
        match sent:
            case _Publish():
                return _publish(sent, limits)
            case _ if len(body) > CONTROL_BODY_BYTES_MAX:
                raise too_large(CONTROL_BODY_BYTES_MAX)
            case _Subscribe():
                _check_depth(body)
                return _subscribe(sent, limits)
            case _Unsubscribe():
                _check_depth(body)
                return _unsubscribe(sent)
            case _Ping():
                _check_depth(body)
                return Ping(sent.request_id)
    except TopicsError as error:
        op, request_id, _ = _read_head(body)
        if error.detail.get("field") == "op" and op is not None:
            error = invalid(f"op is {op[:64]!r}; it must be one of {', '.join(OPS)}", "op")
        raise RefusedCommandError(error, op, request_id) from None


def check_head(text: str, check: Callable[[str, str | None], None]) -> None:
    """Call `check` with a message's `op` and `topic`, before the rest of the message is decoded.

    The topic is None if it is missing or no valid name. An error of `check` becomes a
    `RefusedCommandError`. A message whose `op` cannot be read is left to `decode_command`.
    """
    op, request_id, topic = _read_head(text.encode("utf-8", "surrogatepass"))
    if op is None:
        return
    try:
        check(op, topic if topic is not None and is_topic_name(topic) else None)
    except TopicsError as error:
        raise RefusedCommandError(error, op, request_id) from None


def _read_head(body: bytes) -> tuple[str | None, str | None, str | None]:
    try:
        head = _HEAD.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None, None, None
    request_id = _string(head.request_id)
    if request_id is not None and len(request_id) > WS_REQUEST_ID_CHARS_MAX:
        request_id = None
    return _string(head.op), request_id, _string(head.topic)


def _string(raw: msgspec.Raw) -> str | None:
    try:
        return _STRING.decode(raw)
    except msgspec.DecodeError:
        return None


# --- subscribe, unsubscribe ---------------------------------------------------------------


def _subscribe(sent: _Subscribe, limits: CommandLimits) -> Subscribe:
    topics, prefixes = _value(sent.topics), _value(sent.prefixes)
    is_map = topics != b""
    if sent.topic is None and not is_map and not prefixes:
        raise invalid("one of topic, topics and prefixes is required", "topic")
    if sent.topic is not None:
        if is_map:
            raise invalid("give topic or topics, not both", "topics")
        start = joined(
            (
                ("from_seq", sent.from_seq),
                ("tail", sent.tail),
                ("since", sent.since),
                ("last", sent.last),
                ("consumer", sent.consumer),
                ("ack", sent.ack),
            )
        )
        topics = b'{"%b":%b}' % (_name(sent.topic, "topic").encode("ascii"), start)
    body = joined(
        (
            ("topics", topics),
            ("prefixes", prefixes),
            ("node", sent.node),
            ("limit", sent.limit),
            ("max_batch_bytes", sent.max_batch_bytes),
            ("include_meta", sent.include_meta),
            ("include_tags", sent.include_tags),
            ("include_data", sent.include_data),
            ("consistency", sent.consistency),
            ("wait", sent.wait),
        )
    )
    try:
        asked = decode_watch(
            body,
            max_topics=limits.max_topics,
            max_limit=limits.max_limit,
            max_node_bytes=limits.max_node_bytes,
        )
    except TopicsError as error:
        # This command has a single topic and no map, so the error names the field without the
        # topic.
        field = str(error.detail.get("field", "")).removeprefix(f"topics.{sent.topic}.")
        raise invalid(error.message, field or None) from None
    matcher = None
    if _value(sent.filter):
        matcher = Matcher(decode_filter(memoryview(sent.filter), limits.max_node_bytes))
    how = asked.options
    options = SubscriptionOptions(
        limit=how.limit,
        max_bytes=how.max_batch_bytes,
        nodes=frozenset(how.nodes),
        shown=how.shown,
        strong=how.strong,
        matcher=matcher,
    )
    return Subscribe(sent.request_id, asked.topics, options, asked.wait, asked.prefixes)


def _unsubscribe(sent: _Unsubscribe) -> Unsubscribe:
    prefixes = list(dict.fromkeys(sent.prefixes or ()))
    for index, prefix in enumerate(prefixes):
        if not is_name_prefix(prefix):
            raise invalid(f'no topic name begins with "{clipped(prefix)}"', f"prefixes[{index}]")
    if sent.topics is None:
        if sent.topic is None and not prefixes:
            raise invalid("one of topic, topics and prefixes is required", "topic")
        names = [] if sent.topic is None else [_name(sent.topic, "topic")]
        return Unsubscribe(sent.request_id, names, is_list=False, prefixes=prefixes)
    if sent.topic is not None:
        raise invalid("give topic or topics, not both", "topics")
    if not sent.topics and not prefixes:
        raise invalid("topics must name at least one topic", "topics")
    names = [_name(name, f"topics[{index}]") for index, name in enumerate(sent.topics)]
    return Unsubscribe(sent.request_id, list(dict.fromkeys(names)), is_list=True, prefixes=prefixes)


def _value(raw: msgspec.Raw) -> bytes:
    """The undecoded member; empty if it is absent or null."""
    sent = bytes(raw)
    return b"" if sent == _NULL else sent


def _name(name: str, field: str) -> str:
    if not is_topic_name(name):
        raise invalid(
            "a topic name has 1 to 255 characters of A-Z a-z 0-9 . _ : - and starts with a letter "
            "or digit",
            field,
        )
    return name


def _check_depth(body: bytes) -> None:
    if exceeds_depth(body):
        raise invalid(f"JSON is nested deeper than {JSON_DEPTH_MAX} levels")


# --- publish ------------------------------------------------------------------------------


def _publish(sent: _Publish, limits: CommandLimits) -> Publish:
    topic = _name(sent.topic, "topic")
    body = joined(
        (
            ("records", sent.records),
            ("node", sent.node),
            ("idempotency_key", sent.idempotency_key),
            ("idempotency", sent.idempotency),
            ("create", sent.create),
            ("config", sent.config),
            ("disable_backpressure", sent.disable_backpressure),
            ("if", sent.if_),
        )
    )
    decoded = decode_append(body, max_records=limits.max_batch_records)
    if sent.traceparent:
        # A character that headers cannot hold makes the value invalid, like any other wrong
        # character.
        trace = checked_trace(sent.traceparent.encode("ascii", "replace"))
        decoded = with_trace(decoded, trace)
    config = None if decoded.config is None else decode_inline_config(decoded.config, topic)
    producer = stamp_of_fields(sent.producer_id, sent.producer_epoch, sent.producer_seq)
    condition = None
    if decoded.condition is not None:
        condition = decode_condition(decoded.condition, limits.max_node_bytes)
    return Publish(
        sent.request_id, topic, body, decoded, config, sent.return_seqs, producer, condition
    )


def joined(members: Iterable[tuple[str, bytes | msgspec.Raw]]) -> bytes:
    """A JSON object of the members that are present; their values are copied."""
    parts: list[bytes | msgspec.Raw] = []
    for key, value in members:
        if value:
            parts += (b'%b"%b":' % (b"," if parts else b"{", key.encode("ascii")), value)
    parts.append(b"}" if parts else b"{}")
    return b"".join(parts)
