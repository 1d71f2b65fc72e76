"""The Durable Streams operations of the OpenAPI document. Pure.

The path is described where the mount is unless it is configured elsewhere, with one parameter that
may hold slashes, which OpenAPI has no word for. Used by `api/openapi/document`.
"""

from __future__ import annotations

from typing import Final

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


def _told(about: str, schema: Schema, *, required: bool = False) -> Schema:
    told: Schema = {"description": about, "schema": schema}
    return told | {"required": True} if required else told


_NEXT: Final = {"Stream-Next-Offset": _told("Where a read goes on.", _OFFSET, required=True)}
_IS_CLOSED: Final = {"Stream-Closed": _told("There will never be more.", _CLOSED)}
_END: Final = {
    **_NEXT,
    **_IS_CLOSED,
    "Stream-Up-To-Date": _told("This reaches the stream's end.", _CLOSED),
}
_CURSOR: Final = {
    "Stream-Cursor": _told("To be sent as `cursor` next time.", text(pattern="^[0-9]+$"))
}
_TAG: Final = {
    "ETag": _told("Of this page; weak.", text()),
    "Cache-Control": _told("Whether it may be kept.", text(), required=True),
}
_ANSWERED: Final = {
    "Producer-Epoch": _told("The producer's epoch.", _NUMBER),
    "Producer-Seq": _told("The highest seq accepted in it.", _NUMBER),
}
_CLOSES: Final = _sent("Stream-Closed", text(), "`true`: nothing is appended behind this.")


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
    location = {"Location": _told("The stream's URL.", text(), required=True)}
    described = operation(
        "createStream",
        "Create a stream, with the body as its first data, or find it as it is asked for.",
        {
            "200": {"description": "It was there, as it is asked for.", "headers": headers},
            "201": {"description": "It was created.", "headers": headers | location},
        },
        tag="streams",
        scopes=("write",),
        codes=(*WRITES, *_PACKED, *_MISSING, Code.STREAM_CONFLICT, Code.RECORD_TOO_LARGE),
        parameters=(
            _sent(
                "Stream-TTL",
                {"type": "integer", "minimum": 0, "maximum": STREAM_TTL_S_MAX},
                "Seconds without use after which it ends.",
            ),
            _sent("Stream-Expires-At", text(), "When it ends (RFC 3339); not with a TTL."),
            _CLOSES,
            _sent("Stream-Forked-From", text(), "The path of the URL of a stream to begin as."),
            _sent("Stream-Fork-Offset", _OFFSET, "Up to where; its end by default."),
            _sent(
                "Stream-Fork-Sub-Offset",
                {"type": "integer", "minimum": 0},
                "So many messages, or bytes of one, beyond that offset.",
            ),
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
                "Higher, byte by byte, than that of every append before.",
            ),
            _sent(
                "Idempotency-Key",
                text(minLength=1, maxLength=IDEMPOTENCY_KEY_CHARS_MAX),
                "What was appended under it within the topic's window is not appended again.",
            ),
            _sent(
                "Producer-Id",
                text(minLength=1, maxLength=PRODUCER_ID_CHARS_MAX),
                "The producer; requires `Producer-Epoch` and `Producer-Seq`.",
            ),
            _sent("Producer-Epoch", _NUMBER, "The producer's life."),
            _sent("Producer-Seq", _NUMBER, "One more with each request, from 0."),
        ),
    )
    return _with_body(described)


def _read() -> Schema:
    events = "with `live=sse` events: `data`, and `control` behind each"
    about = f"A page: an array of a JSON stream's messages, or bytes; {events}."
    return operation(
        "readStream",
        "A page of a stream, at once or once there is one, or what comes as events.",
        {
            "200": {
                "description": about,
                "headers": {
                    name: told | {"required": False}
                    for name, told in {**_END, **_CURSOR, **_TAG}.items()
                },
                "content": {_ANY: {}, STREAM: {"schema": text()}},
            },
            "204": {
                "description": "A long-poll's time is up, or the stream is closed: nothing came.",
                "headers": {**_END, **_CURSOR},
            },
            "304": {
                "description": "The page is still the one that `If-None-Match` names.",
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
                "Read behind it: what an answer said, `-1` (the beginning, as none), `now`.",
            ),
            query(
                "live",
                {"type": "string", "enum": ["long-poll", "sse"]},
                "Wait for more, or stream it; takes an `offset`.",
            ),
            query("cursor", text(), "The last `Stream-Cursor`, or `streamCursor` of events."),
            _sent("If-None-Match", text(), "The `ETag` of a page that is there already."),
        ),
    )


def _delete() -> Schema:
    return operation(
        "deleteStream",
        "Remove a stream with everything it holds.",
        {"204": {"description": "It is gone."}},
        tag="streams",
        scopes=("delete",),
        codes=(*WRITES, *_MISSING),
    )
