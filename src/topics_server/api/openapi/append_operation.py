"""The append of records, with its producer headers, for the OpenAPI document. Pure.

Used by `api/openapi/document`.
"""

from __future__ import annotations

from typing import Final

from topics_server.api.messages.trace_headers import TRACE_PATTERN
from topics_server.api.openapi.condition_schemas import CONDITION_CODES, IF_MATCH
from topics_server.api.openapi.operations import TAKES_BODY, WRITES, answer, operation, switch
from topics_server.api.openapi.schemas import Schema, ref, text
from topics_server.values.errors import Code
from topics_server.values.limits import PRODUCER_ID_CHARS_MAX, PRODUCER_NUMBER_MAX

_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": PRODUCER_NUMBER_MAX}
# A request has all three headers or none.
_PRODUCER: Final = (
    {
        "name": "Producer-Id",
        "in": "header",
        "schema": text(minLength=1, maxLength=PRODUCER_ID_CHARS_MAX),
        "description": "The producer; requires `Producer-Epoch` and `Producer-Seq`.",
    },
    {
        "name": "Producer-Epoch",
        "in": "header",
        "schema": _NUMBER,
        "description": "The producer's epoch; a higher one starts at seq 0 and fences lower ones.",
    },
    {
        "name": "Producer-Seq",
        "in": "header",
        "schema": _NUMBER,
        "description": "One higher with each request; a repeated request stores nothing.",
    },
)

TRACEPARENT: Final[Schema] = {
    "name": "traceparent",
    "in": "header",
    "schema": text(pattern=TRACE_PATTERN),
    "description": "The trace of the request (W3C Trace Context). Readers and workers get it as "
    "`$trace`. The server ignores one that is not valid.",
}


def _number_header(about: str) -> Schema:
    return {"schema": _NUMBER, "description": about}


_REPEATED: Final[Schema] = {
    "description": "The server accepted this request of the producer before and stores nothing.",
    "headers": {
        "Producer-Epoch": _number_header("The producer's epoch; also in 200 and 201."),
        "Producer-Seq": _number_header(
            "The highest accepted seq of that epoch; also in 200 and 201."
        ),
        "Topic-First-Seq": _number_header(
            "The first record seq of the last accepted request, if this is a repeat of it."
        ),
        "Topic-Last-Seq": _number_header("The last record seq of that request."),
    },
}


def append_operation() -> Schema:
    """The append, with its producer headers."""
    return operation(
        "appendRecords",
        "Append one or many records, all or none.",
        {
            "200": answer("The records are appended.", ref("AppendResult")),
            "201": answer(
                "The records are appended, and the topic was created.", ref("AppendResult")
            ),
            "204": _REPEATED,
        },
        tag="records",
        scopes=("write",),
        codes=(
            *(Code.BATCH_TOO_LARGE, Code.RECORD_TOO_LARGE, Code.TOPIC_NOT_FOUND, Code.TOPIC_FULL),
            *(Code.PRODUCER_FENCED, Code.PRODUCER_SEQ_CONFLICT, Code.STREAM_GONE),
            *(*WRITES, *TAKES_BODY, *CONDITION_CODES),
        ),
        body=ref("AppendRequest"),
        parameters=(
            switch("return_seqs", True, "Whether the answer lists `seqs`."),
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": text(minLength=1, maxLength=256),
                "description": "Like `idempotency_key` of the body, which has precedence.",
            },
            *(*_PRODUCER, IF_MATCH, TRACEPARENT),
        ),
    )
