"""The Durable Streams operations of the OpenAPI document. Pure.

The path is described at the default mount, with one parameter that may hold slashes, which OpenAPI
cannot express. Used by `api/openapi/document`.
"""

from __future__ import annotations

from typing import Final

from topics_server.api.openapi.append_operation import TRACEPARENT
from topics_server.api.openapi.examples import BODIES
from topics_server.api.openapi.operations import (
    JSON,
    READS,
    STREAM,
    WRITES,
    in_path,
    operation,
    query,
)
from topics_server.api.openapi.schemas import Schema, text
from topics_server.values.errors import Code
from topics_server.values.limits import (
    IDEMPOTENCY_KEY_CHARS_MAX,
    PRODUCER_ID_CHARS_MAX,
    PRODUCER_NUMBER_MAX,
    STREAM_PATH_BYTES_MAX,
    STREAM_SEQ_BYTES_MAX,
    STREAM_TTL_S_MAX,
    STREAMS_PATH,
)

_ANY: Final = "*/*"
_MISSING: Final = (Code.STREAM_NOT_FOUND, Code.STREAM_GONE)
_PACKED: Final = (Code.PAYLOAD_TOO_LARGE, Code.UNSUPPORTED_MEDIA_TYPE)
_OFFSET: Final = text(pattern="^[0-9]{1,20}_[0-9]{1,20}$")
_CLOSED: Final[Schema] = {"type": "string", "const": "true"}
_NUMBER: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": PRODUCER_NUMBER_MAX}


def _sent(name: str, schema: Schema, about: str) -> Schema:
    return {"name": name, "in": "header", "schema": schema, "description": about}


def _header(about: str, schema: Schema, *, required: bool = False) -> Schema:
    header: Schema = {"description": about, "schema": schema}
    return header | {"required": True} if required else header


_NEXT: Final = {
    "Stream-Next-Offset": _header("The offset at which a read continues.", _OFFSET, required=True)
}
_IS_CLOSED: Final = {
    "Stream-Closed": _header("The stream is closed: no more data follows.", _CLOSED)
}
_END: Final = {
    **_NEXT,
    **_IS_CLOSED,
    "Stream-Up-To-Date": _header("This answer reaches the stream's end.", _CLOSED),
}
_CURSOR: Final = {
    "Stream-Cursor": _header("Send it as `cursor` with the next request.", text(pattern="^[0-9]+$"))
}
_TAG: Final = {
    "ETag": _header("The weak entity tag of this page.", text()),
    "Cache-Control": _header("Whether a cache may keep the answer.", text(), required=True),
}
_ANSWERED: Final = {
    "Producer-Epoch": _header("The producer's epoch.", _NUMBER),
    "Producer-Seq": _header("The highest accepted seq of that epoch.", _NUMBER),
}
_CLOSES: Final = _sent("Stream-Closed", text(), "`true`: close the stream after this request.")


def stream_paths() -> Schema:
    """The path and its methods."""
    about = (
        "The stream's path: UTF-8, percent-encoded, with any number of segments, none of them "
        f"empty, `.` or `..`; at most {STREAM_PATH_BYTES_MAX} bytes decoded."
    )
    one = {"put": _create(), "post": _append(), "get": _read(), "delete": _delete()}
    return {f"{STREAMS_PATH}/{{path}}": {"parameters": [in_path("path", "^.+$", about)], **one}}


def _with_body(described: Schema) -> Schema:
    example = BODIES[described["operationId"]]
    content: Schema = {JSON: {"example": example}, _ANY: {}}
    return described | {"requestBody": {"required": False, "content": content}}


def _create() -> Schema:
    headers = {**_NEXT, **_IS_CLOSED}
    location = {"Location": _header("The stream's URL.", text(), required=True)}
    described = operation(
        "createStream",
        "Create a stream with the body as its first data, or confirm an equal existing one.",
        {
            "200": {
                "description": "The stream exists with the requested properties.",
                "headers": headers,
            },
            "201": {"description": "The stream was created.", "headers": headers | location},
        },
        tag="streams",
        scopes=("write",),
        codes=(*WRITES, *_PACKED, *_MISSING, Code.STREAM_CONFLICT, Code.RECORD_TOO_LARGE),
        parameters=(
            _sent(
                "Stream-TTL",
                {"type": "integer", "minimum": 0, "maximum": STREAM_TTL_S_MAX},
                "Seconds without use after which the stream expires.",
            ),
            _sent(
                "Stream-Expires-At",
                text(),
                "When the stream expires (RFC 3339); not together with a TTL.",
            ),
            _CLOSES,
            _sent("Stream-Forked-From", text(), "The URL path of the stream to fork."),
            _sent(
                "Stream-Fork-Offset",
                _OFFSET,
                "The offset at which the fork begins; default: the source's end.",
            ),
            _sent(
                "Stream-Fork-Sub-Offset",
                {"type": "integer", "minimum": 0},
                "Begin this many messages, or bytes of one, after that offset.",
            ),
            TRACEPARENT,
        ),
    )
    return _with_body(described)


def _append() -> Schema:
    headers = {**_NEXT, **_IS_CLOSED, **_ANSWERED}
    described = operation(
        "appendToStream",
        "Append the body to a stream, close it, or both; an empty body only closes.",
        {
            "200": {"description": "A producer's body is appended.", "headers": headers},
            "204": {
                "description": "The body is appended, the stream closed, or both; or a request of "
                "this producer or this idempotency key was accepted before.",
                "headers": headers,
            },
        },
        tag="streams",
        scopes=("write",),
        codes=(
            *(*WRITES, *_PACKED, *_MISSING),
            *(Code.STREAM_CONFLICT, Code.STREAM_CLOSED, Code.RECORD_TOO_LARGE),
            *(Code.BATCH_TOO_LARGE, Code.TOPIC_FULL),
            *(Code.PRODUCER_FENCED, Code.PRODUCER_SEQ_CONFLICT),
        ),
        parameters=(
            _CLOSES,
            _sent(
                "Stream-Seq",
                text(minLength=1, maxLength=STREAM_SEQ_BYTES_MAX),
                "Must be higher, compared byte by byte, than that of every earlier append.",
            ),
            _sent(
                "Idempotency-Key",
                text(minLength=1, maxLength=IDEMPOTENCY_KEY_CHARS_MAX),
                "The server does not append again under the same key within the topic's window.",
            ),
            _sent(
                "Producer-Id",
                text(minLength=1, maxLength=PRODUCER_ID_CHARS_MAX),
                "The producer; requires `Producer-Epoch` and `Producer-Seq`.",
            ),
            _sent(
                "Producer-Epoch", _NUMBER, "The producer's epoch; a higher one fences lower ones."
            ),
            _sent("Producer-Seq", _NUMBER, "One higher with each request, from 0."),
            TRACEPARENT,
        ),
    )
    return _with_body(described)


def _read() -> Schema:
    events = "with `live=sse` events: `data`, and `control` behind each"
    about = f"A page: an array of a JSON stream's messages, or bytes; {events}."
    return operation(
        "readStream",
        "A page of a stream, at once or by long-polling, or a stream of events.",
        {
            "200": {
                "description": about,
                "headers": {
                    name: header | {"required": False}
                    for name, header in {**_END, **_CURSOR, **_TAG}.items()
                },
                "content": {_ANY: {}, STREAM: {"schema": text()}},
            },
            "204": {
                "description": "No message arrived in time, or the stream is closed.",
                "headers": {**_END, **_CURSOR},
            },
            "304": {
                "description": "The page has not changed since the `ETag` in `If-None-Match`.",
                "headers": {**_END, **_TAG},
            },
        },
        tag="streams",
        scopes=("read",),
        codes=(*READS, *_MISSING),
        parameters=(
            query(
                "offset",
                text(pattern="^(-1|now|[0-9]{1,20}_[0-9]{1,20})$"),
                "Read after this offset: from an answer, `-1` (default: the beginning), or `now`.",
            ),
            query(
                "live",
                {"type": "string", "enum": ["long-poll", "sse"]},
                "Wait for messages, or stream them; needs an `offset`.",
            ),
            query("cursor", text(), "The last `Stream-Cursor`, or `streamCursor` of an event."),
            _sent("If-None-Match", text(), "The `ETag` of a page that the client has."),
        ),
    )


def _delete() -> Schema:
    return operation(
        "deleteStream",
        "Remove a stream with all its data.",
        {"204": {"description": "The stream was removed."}},
        tag="streams",
        scopes=("delete",),
        codes=(*WRITES, *_MISSING),
    )
