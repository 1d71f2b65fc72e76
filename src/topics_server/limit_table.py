"""The table of limits: every string, list and map that a request may carry, and its bound.

`docs/LIMITS.md` is `document()`. A row names a constant of `limits` or a setting, so that the table
cannot say another number than the one that is checked. `SHAPES` ties rows to the decoders' structs;
a test walks those structs, so that no field is without a row. Called by tests only. Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from topics_server import limits
from topics_server.settings import Settings, variable


class Limit(NamedTuple):
    """A bound: `name` is of `limits`, or of a setting; `unit` says what is counted."""

    name: str
    unit: str


class Row(NamedTuple):
    """One value of a request; `beyond` is the code of what is over its limit."""

    value: str
    limit: Limit
    beyond: str = "invalid_request"


class Section(NamedTuple):
    """Rows that belong together, under the requests they are of."""

    title: str
    rows: tuple[Row, ...]


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

_NODE_FILTER: Final = (Row("`node`, each", _NODE), Row("`node`, a list", _NODES))
_HELD: Final = (
    Row("`node`", _NODE),
    Row("`seqs`", _CLAIM, "batch_too_large"),
    Row("`lease_ids`, one for each seq", _CLAIM, "batch_too_large"),
)

ALL: Final = Section(
    "Every request",
    (
        Row("URL: path and query, so every parameter", _URL, "uri_too_long"),
        Row("header fields", Limit("max_headers", "fields"), "headers_too_large"),
        Row("header fields together, so `Last-Event-ID`, too", _HEAD, "headers_too_large"),
        Row(
            "body of an append, to a topic or a stream, as sent and as inflated",
            Limit("max_body_bytes", "bytes"),
            "payload_too_large",
        ),
        Row("any other body, as sent and as inflated", _CONTROL, "payload_too_large"),
        Row("members of a control-plane body", Limit("CONTROL_MEMBERS_MAX", "members")),
        Row("members of a gzip body", Limit("GZIP_MEMBERS_MAX", "members")),
        Row("nesting of a body, and of each `data` and `meta`", _DEPTH),
        Row(
            "requests that wait on one connection",
            Limit("PIPELINED_MAX", "requests"),
            "throttled",
        ),
        Row("what a refusal repeats of a request", Limit("ECHO_BYTES_MAX", "bytes"), "cut"),
    ),
)
HEADERS: Final = Section(
    "Headers",
    (
        Row("`Idempotency-Key`", Limit("IDEMPOTENCY_KEY_CHARS_MAX", "characters")),
        Row("`Producer-Id`", Limit("PRODUCER_ID_CHARS_MAX", "characters")),
        Row("`Producer-Epoch`, `Producer-Seq`", Limit("PRODUCER_NUMBER_MAX", "as a number")),
        Row("`X-Request-Id`", Limit("REQUEST_ID_BYTES_MAX", "bytes"), "replaced"),
        Row("a stream's path, decoded", Limit("STREAM_PATH_BYTES_MAX", "bytes")),
        Row("a stream's `Content-Type`", Limit("STREAM_TYPE_CHARS_MAX", "characters")),
        Row("`Stream-Seq`", Limit("STREAM_SEQ_BYTES_MAX", "bytes")),
        Row("`Stream-TTL`", Limit("STREAM_TTL_S_MAX", "seconds")),
        Row("any other, with all fields", _HEAD, "headers_too_large"),
    ),
)
APPEND: Final = Section(
    "`POST /v0/topics/{topic}`, WebSocket `publish`, messages of a stream",
    (
        Row("`records`, or messages", Limit("max_batch_records", "records"), "batch_too_large"),
        Row(
            "`data` and `meta` of a record together",
            Limit("max_record_bytes", "bytes"),
            "record_too_large",
        ),
        Row("`meta`", Limit("max_meta_bytes", "bytes")),
        Row("`meta`, its members", Limit("META_KEYS_MAX", "keys")),
        Row("`tag`", _TAG),
        Row("`node`, of the batch and of a record", _NODE),
        Row("`idempotency_key`", Limit("IDEMPOTENCY_KEY_CHARS_MAX", "characters")),
        Row("`config`", Limit("INLINE_CONFIG_BYTES_MAX", "bytes")),
    ),
)
CONFIG: Final = Section(
    "`PUT /v0/topics/{topic}`, `config` of an append",
    (Row("`dead_letter`, `lease_log`", _NAME),),
)
DIFF: Final = Section("`POST /v0/topics/{topic}/diff`", _NODE_FILTER)
DELETE: Final = Section(
    "`POST /v0/topics/{topic}/delete`",
    (Row("`match`", _MATCH), Row("`match`, a list", Limit("MATCH_PARTS", "parts"))),
)
QUEUE: Final = Section(
    "`POST /v0/topics/{topic}/claim`, `ack`, `nack`, `extend`, `redrive`",
    (
        *_HELD,
        Row("`error`", Limit("NACK_ERROR_BYTES_MAX", "bytes"), "cut"),
        Row("`from`", _NAME),
        Row("`tag`, `match`", _MATCH),
        Row("`match`, a list", Limit("MATCH_PARTS", "parts")),
    ),
)
ROUTER: Final = Section(
    "`PUT /v0/routers/{router}`",
    (
        Row("`source`, `dest`", _NAME),
        Row("`filter`", _MATCH),
        Row("`filter`, a list", Limit("MATCH_PARTS", "parts")),
    ),
)
WATCH: Final = Section(
    "`POST /v0/watch`, WebSocket `subscribe` and `unsubscribe`",
    (
        Row("`topics`", Limit("max_watch_topics", "topics")),
        Row("`topic`, and each name in `topics`", _NAME),
        *_NODE_FILTER,
        Row("`cursor`, with all of the body", _CONTROL, "payload_too_large"),
    ),
)
SEAL: Final = Section(
    "`POST /v0/admin/seal`",
    (Row("`topics`", Limit("SEAL_TOPICS_MAX", "topics")), Row("each name in `topics`", _NAME)),
)
SOCKET: Final = Section(
    "WebSocket",
    (
        Row("a message", Limit("max_ws_message_bytes", "bytes"), "closed with 1009"),
        Row(
            "a command that is no publish, any message of a key that may not write",
            _CONTROL,
            "payload_too_large",
        ),
        Row("`request_id`", Limit("WS_REQUEST_ID_CHARS_MAX", "characters")),
        Row("`producer_id`", Limit("PRODUCER_ID_CHARS_MAX", "characters")),
        Row("commands not answered yet", Limit("max_ws_commands", "commands"), "not read"),
        Row(
            "their bodies, when the next is read",
            Limit("WS_UNANSWERED_BYTES_MAX", "bytes"),
            "not read",
        ),
    ),
)
SECTIONS: Final = (
    *(ALL, HEADERS, APPEND, CONFIG, DIFF, DELETE, QUEUE, ROUTER, WATCH, SEAL, SOCKET),
)

# The structs that requests are decoded to, and where the rows of their fields are.
SHAPES: Final[dict[str, tuple[Section, ...]]] = {
    "appends._PlainBody": (APPEND,),
    "appends._PlainRecord": (APPEND,),
    "appends._Body": (APPEND,),
    "appends._Record": (APPEND,),
    "appends._DelayedBody": (APPEND,),
    "appends._DelayedRecord": (APPEND,),
    "appends._Call": (APPEND,),
    "api.bodies._Config": (CONFIG,),
    "api.bodies._Diff": (DIFF,),
    "api.bodies._Delete": (DELETE,),
    "api.queue_bodies._Claim": (QUEUE,),
    "api.queue_bodies._Held": (QUEUE,),
    "api.queue_bodies._Nack": (QUEUE,),
    "api.queue_bodies._Extend": (QUEUE,),
    "api.queue_bodies._Redrive": (QUEUE,),
    "api.router_bodies._Put": (ROUTER,),
    "api.watch_bodies._Watch": (WATCH,),
    "api.admin._Seal": (SEAL,),
    "api.ws_commands._Subscribe": (SOCKET, WATCH),
    "api.ws_commands._Unsubscribe": (SOCKET, WATCH),
    "api.ws_commands._Publish": (SOCKET, APPEND, WATCH),
    "api.ws_commands._Ping": (SOCKET,),
}


def value_of(limit: Limit) -> int:
    """The number: a constant, or a setting's default."""
    if limit.name.isupper():
        return int(getattr(limits, limit.name))
    return int(Settings.model_fields[limit.name].default)


def document() -> str:
    """`docs/LIMITS.md`."""
    return _HEAD_TEXT + "\n".join(_section(section) for section in SECTIONS)


def _section(section: Section) -> str:
    rows = (
        f"| {row.value} | {value_of(row.limit):,} {row.limit.unit} | {_shown(row.limit)} "
        f"| {_told(row.beyond)} |"
        for row in section.rows
    )
    table = "| value | at most | name | beyond |\n|---|---|---|---|"
    return "\n".join((f"## {section.title}\n", table, *rows, ""))


def _shown(limit: Limit) -> str:
    return f"`{limit.name}`" if limit.name.isupper() else f"`{variable(limit.name)}`"


def _told(beyond: str) -> str:
    return f"`{beyond}`" if "_" in beyond or beyond == "throttled" else beyond


_HEAD_TEXT: Final = """# Limits

Every string, list and map that a request may carry, and how long it may be. Names in capitals are
constants of `src/topics_server/limits.py`; those that begin with `TOPICS_` are settings, shown with
their defaults. The size of a body comes before everything: before a byte is read if its length is
declared, while it comes otherwise. Lists are counted before they are built. Members that are not
known are skipped; the size of the body bounds them. This page is generated
(`limit_table.document`).

"""
