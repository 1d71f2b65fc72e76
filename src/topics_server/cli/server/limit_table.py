"""The table of request limits, generated into `docs/LIMITS.md`.

`document()` returns `docs/LIMITS.md`. A row names a constant of `limits` or a setting, so the table
always shows the number that the server checks. `SHAPES` connects rows with the decoders' structs; a
test walks those structs, so that every field has a row. Called by tests only.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from topics_server.settings import Settings, variable
from topics_server.values import limits


class Limit(NamedTuple):
    """A bound. `name` is a constant of `limits` or a setting; `unit` is its unit."""

    name: str
    unit: str


class LimitRow(NamedTuple):
    """One value of a request; `beyond` is the error code of a value over its limit."""

    value: str
    limit: Limit
    beyond: str = "invalid_request"


class Section(NamedTuple):
    """A part of the table: rows, with the requests that they belong to."""

    title: str
    rows: tuple[LimitRow, ...]


_CONTROL: Final = Limit("CONTROL_BODY_BYTES_MAX", "bytes")
_NAME: Final = Limit("TOPIC_NAME_CHARS_MAX", "characters")
_NODE: Final = Limit("max_node_bytes", "bytes")
_NODES: Final = Limit("NODE_FILTER_IDS_MAX", "nodes")
_TAG: Final = Limit("max_tag_bytes", "bytes")
_MATCH: Final = Limit("MATCH_TAG_BYTES_MAX", "bytes of its tag")
_CLAIM: Final = Limit("max_claim", "items")
_URL: Final = Limit("max_url_bytes", "bytes, with all of the URL")
_HEAD: Final = Limit("max_header_bytes", "bytes, with all other fields")
_DEPTH: Final = Limit("JSON_DEPTH_MAX", "levels")

_NODE_FILTER: Final = (LimitRow("`node`, each", _NODE), LimitRow("`node`, a list", _NODES))
_HELD: Final = (
    LimitRow("`node`", _NODE),
    LimitRow("`seqs`", _CLAIM, "batch_too_large"),
    LimitRow("`lease_ids`, one for each seq", _CLAIM, "batch_too_large"),
)

ALL: Final = Section(
    "Every request",
    (
        LimitRow("URL: path and query, so every parameter", _URL, "uri_too_long"),
        LimitRow("header fields", Limit("max_headers", "fields"), "headers_too_large"),
        LimitRow("header fields together, so `Last-Event-ID`, too", _HEAD, "headers_too_large"),
        LimitRow(
            "body of an append, to a topic or a stream, as sent and as inflated",
            Limit("max_body_bytes", "bytes"),
            "payload_too_large",
        ),
        LimitRow("any other body, as sent and as inflated", _CONTROL, "payload_too_large"),
        LimitRow("members of a control-plane body", Limit("CONTROL_MEMBERS_MAX", "members")),
        LimitRow("members of a gzip body", Limit("GZIP_MEMBERS_MAX", "members")),
        LimitRow("nesting of a body, and of each `data` and `meta`", _DEPTH),
        LimitRow(
            "requests that wait on one connection",
            Limit("PIPELINED_MAX", "requests"),
            "throttled",
        ),
        LimitRow("what a refusal repeats of a request", Limit("ECHO_BYTES_MAX", "bytes"), "cut"),
    ),
)
HEADERS: Final = Section(
    "Headers",
    (
        LimitRow("`Idempotency-Key`", Limit("IDEMPOTENCY_KEY_CHARS_MAX", "characters")),
        LimitRow("`Producer-Id`", Limit("PRODUCER_ID_CHARS_MAX", "characters")),
        LimitRow("`Producer-Epoch`, `Producer-Seq`", Limit("PRODUCER_NUMBER_MAX", "as a number")),
        LimitRow("`X-Request-Id`", Limit("REQUEST_ID_BYTES_MAX", "bytes"), "replaced"),
        LimitRow("a stream's path, decoded", Limit("STREAM_PATH_BYTES_MAX", "bytes")),
        LimitRow("a stream's `Content-Type`", Limit("STREAM_TYPE_CHARS_MAX", "characters")),
        LimitRow("`Stream-Seq`", Limit("STREAM_SEQ_BYTES_MAX", "bytes")),
        LimitRow("`Stream-TTL`", Limit("STREAM_TTL_S_MAX", "seconds")),
        LimitRow("any other, with all fields", _HEAD, "headers_too_large"),
    ),
)
APPEND: Final = Section(
    "`POST /v0/topics/{topic}`, WebSocket `publish`, messages of a stream",
    (
        LimitRow(
            "`records`, or messages", Limit("max_batch_records", "records"), "batch_too_large"
        ),
        LimitRow(
            "`data` and `meta` of a record together",
            Limit("max_record_bytes", "bytes"),
            "record_too_large",
        ),
        LimitRow("`meta`", Limit("max_meta_bytes", "bytes")),
        LimitRow("`meta`, its members", Limit("META_KEYS_MAX", "keys")),
        LimitRow("`tag`", _TAG),
        LimitRow("`node`, of the batch and of a record", _NODE),
        LimitRow("`idempotency_key`", Limit("IDEMPOTENCY_KEY_CHARS_MAX", "characters")),
        LimitRow("`config`", Limit("INLINE_CONFIG_BYTES_MAX", "bytes")),
        LimitRow("`traceparent`", Limit("TRACEPARENT_BYTES", "bytes"), "ignored"),
    ),
)
CONDITION: Final = Section(
    "`if` of an append, a delete, `PUT` and `PATCH /v0/topics/{topic}`",
    (
        LimitRow("`if`", Limit("CONDITION_BYTES_MAX", "bytes")),
        LimitRow("`none_match` of `if`, its tags and nodes", Limit("FILTER_LEAVES_MAX", "leaves")),
        LimitRow("`none_match` of `if`, its depth", Limit("FILTER_DEPTH_MAX", "filters")),
    ),
)
CONFIG: Final = Section(
    "`PUT /v0/topics/{topic}`, `config` of an append",
    (LimitRow("`dead_letter`, `lease_log`", _NAME),),
)
_FILTER: Final = (
    LimitRow("`filter`", Limit("FILTER_BYTES_MAX", "bytes")),
    LimitRow("`filter`, its tags and nodes", Limit("FILTER_LEAVES_MAX", "leaves")),
    LimitRow("`filter`, its depth", Limit("FILTER_DEPTH_MAX", "filters")),
    LimitRow("`since`, a time as text", Limit("TIME_CHARS_MAX", "characters")),
)
DIFF: Final = Section(
    "`POST /v0/topics/{topic}/diff`, `GET /v0/topics/{topic}/records`",
    (*_NODE_FILTER, *_FILTER, LimitRow("`consumer`", _NAME)),
)
CONSUMER: Final = Section(
    "`/v0/topics/{topic}/consumers/{consumer}`",
    (
        LimitRow("the name of a consumer", _NAME),
        LimitRow(
            "consumers of a topic", Limit("CONSUMERS_PER_TOPIC_MAX", "consumers"), "throttled"
        ),
        LimitRow("consumers of the server", Limit("CONSUMERS_MAX", "consumers"), "throttled"),
        LimitRow(
            "consumers with a `hold`, of a topic",
            Limit("HOLDS_PER_TOPIC_MAX", "consumers"),
            "throttled",
        ),
    ),
)
DELETE: Final = Section(
    "`POST /v0/topics/{topic}/delete`",
    (LimitRow("`match`", _MATCH), LimitRow("`match`, a list", Limit("MATCH_PARTS", "parts"))),
)
QUEUE: Final = Section(
    "`POST /v0/topics/{topic}/claim`, `ack`, `nack`, `extend`, `redrive`",
    (
        *_HELD,
        LimitRow("`error`", Limit("NACK_ERROR_BYTES_MAX", "bytes"), "cut"),
        LimitRow("`from`", _NAME),
        LimitRow("`tag`, `match`", _MATCH),
        LimitRow("`match`, a list", Limit("MATCH_PARTS", "parts")),
    ),
)
ROUTER: Final = Section(
    "`PUT /v0/routers/{router}`",
    (
        LimitRow("`source`, `dest`", _NAME),
        LimitRow("`filter`", _MATCH),
        LimitRow("`filter`, a list", Limit("MATCH_PARTS", "parts")),
    ),
)
WATCH: Final = Section(
    "`POST /v0/watch`, WebSocket `subscribe` and `unsubscribe`",
    (
        LimitRow("`topics`", Limit("max_watch_topics", "topics")),
        LimitRow("`topic`, and each name in `topics`", _NAME),
        LimitRow("`prefixes` of a session or a socket", Limit("LIVE_PREFIXES_MAX", "prefixes")),
        *_NODE_FILTER,
        *_FILTER,
        LimitRow(
            "`filter` of a session, which is stored", Limit("SESSION_FILTER_BYTES_MAX", "bytes")
        ),
        LimitRow("`consumer` of a topic", _NAME),
        LimitRow("`cursor`, with all of the body", _CONTROL, "payload_too_large"),
    ),
)
LIVE: Final = Section(
    "`GET /v0/topics/{topic}/live`, `GET /v0/live`",
    (
        LimitRow("`topics`, and topics followed at once", Limit("max_watch_topics", "topics")),
        LimitRow("`prefix`", Limit("LIVE_PREFIXES_MAX", "prefixes")),
        *_FILTER,
        LimitRow("`consumer`", _NAME),
    ),
)
SEAL: Final = Section(
    "`POST /v0/admin/seal`",
    (
        LimitRow("`topics`", Limit("SEAL_TOPICS_MAX", "topics")),
        LimitRow("each name in `topics`", _NAME),
    ),
)
SOCKET: Final = Section(
    "WebSocket",
    (
        LimitRow("a message", Limit("max_ws_message_bytes", "bytes"), "closed with 1009"),
        LimitRow(
            "a command other than publish, any message of a key that may not write",
            _CONTROL,
            "payload_too_large",
        ),
        LimitRow("`request_id`", Limit("WS_REQUEST_ID_CHARS_MAX", "characters")),
        LimitRow("`producer_id`", Limit("PRODUCER_ID_CHARS_MAX", "characters")),
        LimitRow("commands not answered yet", Limit("max_ws_commands", "commands"), "not read"),
        LimitRow(
            "their bodies, when the next is read",
            Limit("WS_UNANSWERED_BYTES_MAX", "bytes"),
            "not read",
        ),
    ),
)
SECTIONS: Final = (
    *(ALL, HEADERS, APPEND, CONFIG, CONDITION, DIFF, DELETE, QUEUE),
    *(CONSUMER, ROUTER, WATCH, LIVE, SEAL, SOCKET),
)

# The structs that requests are decoded into, and the section of each field's row.
SHAPES: Final[dict[str, tuple[Section, ...]]] = {
    "values.appends._PlainBody": (APPEND, CONDITION),
    "values.appends._SmallBody": (APPEND, CONDITION),
    "values.appends._PlainRecord": (APPEND,),
    "values.appends._Body": (APPEND, CONDITION),
    "values.appends._Record": (APPEND,),
    "values.appends._DelayedBody": (APPEND, CONDITION),
    "values.appends._DelayedRecord": (APPEND,),
    "values.appends._Call": (APPEND, CONDITION),
    "api.messages.conditions._If": (CONDITION,),
    "api.messages.conditions._Conditional": (CONDITION,),
    "api.messages.requests._Config": (CONFIG,),
    "api.messages.requests._Diff": (DIFF,),
    "api.messages.requests._Delete": (DELETE, CONDITION),
    "api.queues.requests._Claim": (QUEUE,),
    "api.queues.requests._Wanted": (QUEUE,),
    "api.queues.requests._Completed": (QUEUE,),
    "api.queues.requests._Held": (QUEUE,),
    "api.queues.requests._Ack": (QUEUE,),
    "api.queues.requests._Nack": (QUEUE,),
    "api.queues.requests._Extend": (QUEUE,),
    "api.queues.requests._Redrive": (QUEUE,),
    "api.routers.requests._Put": (ROUTER,),
    "api.watch.requests._Watch": (WATCH,),
    "api.watch.requests._Start": (WATCH,),
    "api.operate.admin._Seal": (SEAL,),
    "api.websocket.commands._Subscribe": (SOCKET, WATCH),
    "api.websocket.commands._Unsubscribe": (SOCKET, WATCH),
    "api.websocket.commands._Publish": (SOCKET, APPEND, CONDITION, WATCH),
    "api.websocket.commands._Ping": (SOCKET,),
}


def value_of(limit: Limit) -> int:
    """The number: the constant, or the setting's default."""
    if limit.name.isupper():
        return int(getattr(limits, limit.name))
    return int(Settings.model_fields[limit.name].default)


def document() -> str:
    """Return the text of `docs/LIMITS.md`."""
    return _HEAD_TEXT + "\n".join(_section(section) for section in SECTIONS)


def _section(section: Section) -> str:
    rows = (
        f"| {row.value} | {value_of(row.limit):,} {row.limit.unit} | {_shown(row.limit)} "
        f"| {_beyond_text(row.beyond)} |"
        for row in section.rows
    )
    table = "| value | at most | name | beyond |\n|---|---|---|---|"
    return "\n".join((f"## {section.title}\n", table, *rows, ""))


def _shown(limit: Limit) -> str:
    return f"`{limit.name}`" if limit.name.isupper() else f"`{variable(limit.name)}`"


def _beyond_text(beyond: str) -> str:
    return f"`{beyond}`" if "_" in beyond or beyond == "throttled" else beyond


_HEAD_TEXT: Final = """# Limits

Every string, list and map that a request may carry, and how long it may be. Names in capitals are
constants of `src/topics_server/values/limits.py`; those that begin with `TOPICS_` are settings,
shown with their defaults. The server checks the size of a body first: before it reads a byte if the
length is declared, else while the body arrives. It counts the items of a list before it builds the
list. It skips unknown members, which the size of the body bounds. This page is generated
(`limit_table.document`).

"""
