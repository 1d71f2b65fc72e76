"""Request shapes shared by routes: configuration, diff, delete, list cursors.

Pure. Each request is decoded once, resolved and clamped, into the value that the store takes.
Unknown fields are ignored, wrong types are `invalid_request` with the field's path. A value with a
documented clamp is clamped, never refused. An optional field without a default may be null; null
for any other field is a wrong type. Called by `api/topics/handlers` and `api/records/handlers`;
other request shapes use its parts.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from topics_server.api.messages.bounded_lists import (
    SHORT_BODY_BYTES_MAX,
    check_items,
    check_tag,
    node_names,
)
from topics_server.api.messages.filters import decode_filter
from topics_server.api.messages.times import point_in_time
from topics_server.engine.answers import ReadAs, ReadRequest, ReadStart
from topics_server.values.appends import decode_json
from topics_server.values.errors import TopicsError, invalid
from topics_server.values.json_cache import DATA, META, TAGS
from topics_server.values.json_shape import exceeds_depth
from topics_server.values.limits import (
    CLAIM_JITTER_MS_MAX,
    DIFF_LIMIT_DEFAULT,
    DIFF_WAIT_MS_MAX,
    IDEMPOTENCY_KEY_CHARS_MAX,
    JSON_DEPTH_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    MATCH_PARTS,
    NODE_FILTER_IDS_MAX,
    PAGE_BYTES_DEFAULT,
    PAGE_BYTES_MAX,
    PAGE_SIZE_DEFAULT,
    PAGE_SIZE_MAX,
    PRIORITY_MAX,
    U64_MAX,
)
from topics_server.values.model import (
    Discard,
    Durability,
    TagMatch,
    TopicConfig,
    TopicType,
    is_topic_name,
)

T = TypeVar("T")

# msgspec cannot bound above int64; `_check_u64` adds the upper end.
U64 = Annotated[int, Meta(ge=0)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

_DEFAULTS: Final = TopicConfig()
_NO_NODES: Final[frozenset[str]] = frozenset()


class _Config(msgspec.Struct, gc=False):
    type: TopicType | UnsetType = UNSET
    ttl_ms: U64 = _DEFAULTS.ttl_ms
    cap_records: U64 = _DEFAULTS.cap_records
    cap_bytes: U64 = _DEFAULTS.cap_bytes
    discard: Discard = _DEFAULTS.discard
    durable: bool = False
    durability: Durability | UnsetType = UNSET
    priority: I32 | None = None
    auto_priority: bool = _DEFAULTS.auto_priority
    auto_create: bool = _DEFAULTS.auto_create
    idempotency_window_ms: U64 = _DEFAULTS.idempotency_window_ms
    dedupe_node: bool = _DEFAULTS.dedupe_node
    lease_ms: U64 = _DEFAULTS.lease_ms
    claim_jitter_ms: U64 = _DEFAULTS.claim_jitter_ms
    max_deliveries: U64 = _DEFAULTS.max_deliveries
    dead_letter: str | None = None
    leases_durable: bool = _DEFAULTS.leases_durable
    lease_log: str | None = None


class _Diff(msgspec.Struct, gc=False):
    from_seq: U64 = 0
    limit: U64 = 0
    node: str | list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: U64 = 0
    max_batch_bytes: U64 = 0
    filter: msgspec.Raw | UnsetType = UNSET
    since: U64 | str | None = None
    last: U64 | None = None
    consumer: str | None = None
    ack: Literal["manual", "auto"] = "manual"


class _Delete(msgspec.Struct, gc=False):
    before_seq: U64 | None = None
    match: str | list[msgspec.Raw] | None = None
    if_: msgspec.Raw | UnsetType = msgspec.field(default=UNSET, name="if")


_ABSENT: Final = msgspec.Raw(b"")


class _DiffLists(msgspec.Struct, gc=False):
    node: msgspec.Raw = _ABSENT


class _DeleteLists(msgspec.Struct, gc=False):
    match: msgspec.Raw = _ABSENT


class _Cursor(msgspec.Struct):
    after: str


_CONFIG: Final = msgspec.json.Decoder(_Config)
_DIFF: Final = msgspec.json.Decoder(_Diff)
_DELETE: Final = msgspec.json.Decoder(_Delete)
_CURSOR: Final = msgspec.json.Decoder(_Cursor)
_DIFF_LISTS: Final[msgspec.json.Decoder[msgspec.Struct]] = msgspec.json.Decoder(_DiffLists)
_DELETE_LISTS: Final[msgspec.json.Decoder[msgspec.Struct]] = msgspec.json.Decoder(_DeleteLists)
_TEXT: Final = msgspec.json.Decoder(str)
_CONFIG_U64: Final = (
    *("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms"),
    *("lease_ms", "claim_jitter_ms", "max_deliveries"),
)
_DIFF_U64: Final = ("from_seq", "limit", "wait_ms", "max_batch_bytes")


class ConfigRequest(msgspec.Struct, frozen=True):
    """A configuration, resolved; `keep_type`: the request left `type` out."""

    config: TopicConfig
    keep_type: bool


class DeleteRequest(msgspec.Struct, frozen=True):
    """The records to delete: at least one of the first two fields is given.

    `condition` is the undecoded JSON.
    """

    before_seq: int | None
    match: TagMatch | None
    condition: bytes | None = None


def decode_config(body: bytes, topic: str) -> ConfigRequest:
    """Decode a `PUT` body or an inline `config` (§0.10) of the topic `topic`.

    A priority beyond its bounds becomes the nearest bound.
    """
    sent = decode_body(_CONFIG, body)
    _check_u64(sent, _CONFIG_U64)
    for field in ("dead_letter", "lease_log"):
        _check_other_topic(getattr(sent, field), field, topic)
    priority = sent.priority
    if priority is not None:
        priority = max(-PRIORITY_MAX, min(PRIORITY_MAX, priority))
    durability = sent.durability
    if durability is UNSET:
        durability = Durability.FSYNC if sent.durable else Durability.DISK
    config = TopicConfig(
        type=TopicType.LOG if sent.type is UNSET else sent.type,
        ttl_ms=sent.ttl_ms,
        cap_records=sent.cap_records,
        cap_bytes=sent.cap_bytes,
        discard=sent.discard,
        durability=durability,
        priority=priority,
        auto_priority=sent.auto_priority,
        auto_create=sent.auto_create,
        idempotency_window_ms=sent.idempotency_window_ms,
        dedupe_node=sent.dedupe_node,
        lease_ms=max(LEASE_MS_MIN, min(LEASE_MS_MAX, sent.lease_ms)),
        claim_jitter_ms=min(CLAIM_JITTER_MS_MAX, sent.claim_jitter_ms),
        max_deliveries=sent.max_deliveries,
        dead_letter=sent.dead_letter,
        leases_durable=sent.leases_durable,
        lease_log=UNSET if sent.lease_log is None else sent.lease_log,
    )
    assert LEASE_MS_MIN <= config.lease_ms <= LEASE_MS_MAX
    return ConfigRequest(config, keep_type=sent.type is UNSET)


def decode_inline_config(config: bytes, topic: str) -> TopicConfig:
    """The `config` of an append body; errors name its fields `config.<field>`."""
    try:
        return decode_config(config, topic).config
    except TopicsError as error:
        field = error.detail.get("field")
        raise invalid(error.message, f"config.{field}" if field else "config") from None


def _check_other_topic(name: str | None, field: str, topic: str) -> None:
    if name is None:
        return
    if not is_topic_name(name):
        raise invalid(f"{field} must be a topic name", field)
    if name == topic:
        raise invalid(f"{field} must be another topic", field)


def decode_diff(body: bytes, max_limit: int, max_node_bytes: int) -> tuple[ReadRequest, int]:
    """A diff body (§3), clamped, and the members of records to show (`TAGS`, `META`, `DATA`)."""
    if len(body) > SHORT_BODY_BYTES_MAX:
        check_items(body, _DIFF_LISTS, {"node": NODE_FILTER_IDS_MAX})
    sent = decode_body(_DIFF, body)
    _check_u64(sent, _DIFF_U64)
    nodes = _NO_NODES if sent.node is None else frozenset(node_names(sent.node, max_node_bytes))
    request = ReadRequest(
        from_seq=sent.from_seq,
        limit=min(sent.limit or DIFF_LIMIT_DEFAULT, max_limit),
        max_bytes=min(sent.max_batch_bytes or PAGE_BYTES_DEFAULT, PAGE_BYTES_MAX),
        nodes=nodes,
        wait_ms=min(sent.wait_ms, DIFF_WAIT_MS_MAX),
    )
    if sent.filter is not UNSET or sent.since is not None or sent.last is not None:
        request = _found(sent, request, max_limit, max_node_bytes)
    if sent.ack == "auto" and sent.consumer is None:
        raise invalid("ack: auto needs a consumer", "ack")
    if sent.consumer is not None:
        request = _read_as(sent.consumer, sent, request)
    assert request.limit > 0
    assert request.max_bytes > 0
    shown = (TAGS if sent.include_tags else 0) | (META if sent.include_meta else 0)
    return request, shown | DATA


def _found(sent: _Diff, request: ReadRequest, max_limit: int, max_node_bytes: int) -> ReadRequest:
    """The request with the additive fields of a diff: a filter, and another start."""
    wanted = None
    if sent.filter is not UNSET and bytes(sent.filter) != b"null":
        wanted = decode_filter(memoryview(sent.filter), max_node_bytes)
    start = start_of(sent.since, sent.last, max_limit, has_seq=bool(sent.from_seq))
    return msgspec.structs.replace(request, filter=wanted, start=start)


def start_of(
    since: int | str | None, last: int | None, max_limit: int, *, has_seq: bool
) -> ReadStart | None:
    """The start that `since` or `last` gives. `has_seq`: the request also has a start as a seq."""
    if since is not None and last is not None:
        raise invalid("since and last are two starts; give one", "last")
    if since is None and last is None:
        return None
    if has_seq:
        field = "since" if last is None else "last"
        raise invalid(f"from_seq and {field} are two starts; give one", field)
    if since is not None:
        return ReadStart(since=point_in_time(str(since), "since"))
    if not last:
        raise invalid("last must be at least 1", "last")
    return ReadStart(last=min(last, max_limit))


def _read_as(consumer: str, sent: _Diff, request: ReadRequest) -> ReadRequest:
    """The read of a consumer that this request describes."""
    if request.start is not None:
        field = "since" if sent.last is None else "last"
        raise invalid(f"consumer and {field} are two starts; give one", field)
    read_as = ReadAs(consumer_name(consumer), sent.ack == "auto")
    return msgspec.structs.replace(request, read_as=read_as)


def consumer_of_stream(name: str | None, ack: str, other: str | None) -> ReadAs | None:
    """The consumer at whose seq a stream begins. `other` names another start in the same request.

    Raises `invalid_request` that names both starts, and for an `ack` that streams do not support.
    """
    if ack not in ("manual", "auto"):
        raise invalid("ack must be manual or auto", "ack")
    if name is None:
        if ack == "auto":
            raise invalid("ack: auto needs a consumer", "ack")
        return None
    if other is not None:
        raise invalid(f"consumer and {other} are two starts; give one", other)
    return ReadAs(consumer_name(name), ack == "auto")


def consumer_name(name: str) -> str:
    """A consumer's name, of the characters that a topic's name may have.

    Raises `invalid_request`.
    """
    if not is_topic_name(name):
        raise invalid(
            "a consumer name has 1 to 255 characters of A-Z a-z 0-9 . _ : - and starts with a "
            "letter or digit",
            "consumer",
        )
    return name


def decode_delete(body: bytes) -> DeleteRequest:
    """A delete body (§5)."""
    check_items(body, _DELETE_LISTS, {"match": MATCH_PARTS}, _not_three)
    sent = decode_body(_DELETE, body)
    if sent.before_seq is None and sent.match is None:
        raise invalid("one of before_seq and match is required")
    _check_u64(sent, ("before_seq",))
    condition = None if sent.if_ is UNSET else bytes(sent.if_)
    return DeleteRequest(sent.before_seq, tag_match(sent.match), condition)


def tag_match(sent: str | list[msgspec.Raw] | None, where: str = "match") -> TagMatch | None:
    """A `match` on tags: an exact tag, or `["tag", "Eq"|"Glob", value]`."""
    match sent:
        case None:
            return None
        case str(tag):
            check_tag(tag, where)
            return TagMatch(tag)
        case parts:
            return tag_tuple(parts, where)


def _not_three(where: str, _most: int) -> TopicsError:
    return invalid(f'{where} has three parts: ["tag", "Eq"|"Glob", value]', where)


def tag_tuple(parts: list[msgspec.Raw], where: str) -> TagMatch:
    """`["tag", "Eq"|"Glob", value]` of the field `where`, with each part undecoded."""
    if len(parts) != MATCH_PARTS:
        raise _not_three(where, MATCH_PARTS)
    field, operator, value = map(_text, parts)
    if field != "tag":
        raise invalid(f'{where}[0] must be "tag"', f"{where}[0]")
    if operator not in ("Eq", "Glob"):
        raise invalid(f'{where}[1] must be "Eq" or "Glob"', f"{where}[1]")
    if value is None:
        raise invalid(f"{where}[2] must be a string", f"{where}[2]")
    check_tag(value, f"{where}[2]")
    if operator == "Eq":
        return TagMatch(value)
    if not value.endswith("*"):
        raise invalid("a Glob ends with *", f"{where}[2]")
    if "*" in value[:-1]:
        raise invalid("a Glob pattern must have exactly one *, at its end", f"{where}[2]")
    return TagMatch(value[:-1], is_prefix=True)


def _text(part: msgspec.Raw) -> str | None:
    """A string; None for any other type."""
    try:
        return _TEXT.decode(part)
    except msgspec.ValidationError:
        return None


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A whole body of one shape; raises `invalid_request` with the field's path."""
    value = decode_json(decoder, body)
    # A body of depth n has at least 2n bytes, so a short body needs no check.
    if len(body) > 2 * JSON_DEPTH_MAX and exceeds_depth(body):
        raise invalid(f"JSON is nested deeper than {JSON_DEPTH_MAX} levels")
    return value


def _check_u64(sent: msgspec.Struct, fields: tuple[str, ...]) -> None:
    for field in fields:
        value = getattr(sent, field)
        if value is not None and value > U64_MAX:
            raise invalid(f"{field} must be at most {U64_MAX}", field)


# --- headers and queries ------------------------------------------------------------------


def header_key(value: bytes | None) -> str | None:
    """The `Idempotency-Key` header (§0.8); an empty one is refused."""
    if value is None:
        return None
    try:
        key = value.decode()
    except UnicodeDecodeError:
        raise invalid("Idempotency-Key must be UTF-8", "Idempotency-Key") from None
    if not key:
        raise invalid("Idempotency-Key must not be empty", "Idempotency-Key")
    if len(key) > IDEMPOTENCY_KEY_CHARS_MAX:
        most = IDEMPOTENCY_KEY_CHARS_MAX
        raise invalid(f"Idempotency-Key has at most {most} characters", "Idempotency-Key")
    return key


def query_bool(query: Mapping[str, str], name: str, default: bool) -> bool:
    """A query parameter that is `true` or `false`."""
    match query.get(name):
        case None:
            return default
        case "true":
            return True
        case "false":
            return False
        case _:
            raise invalid(f"{name} must be true or false", name)


def query_page_size(query: Mapping[str, str]) -> int:
    """`page_size` of a list: 100 when absent or 0, at most 1000."""
    sent = query.get("page_size")
    if sent is None:
        return PAGE_SIZE_DEFAULT
    if not (sent.isascii() and sent.isdigit()) or len(sent) > 20:
        raise invalid("page_size must be a non-negative integer", "page_size")
    return min(int(sent) or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)


def encode_cursor(after: str) -> str:
    """The opaque cursor of the page that follows the name `after`."""
    return base64.urlsafe_b64encode(msgspec.json.encode(_Cursor(after))).decode("ascii")


def query_cursor(
    query: Mapping[str, str], is_name: Callable[[str], bool] = is_topic_name
) -> str | None:
    """The name after which a page starts; raises `invalid_request` for an invalid cursor."""
    sent = query.get("cursor")
    if sent is None:
        return None
    try:
        standard = sent.replace("-", "+").replace("_", "/")
        after = _CURSOR.decode(base64.b64decode(standard, validate=True)).after
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise invalid("the cursor was not issued by this server", "cursor") from None
    if not is_name(after):
        raise invalid("the cursor was not issued by this server", "cursor")
    return after
