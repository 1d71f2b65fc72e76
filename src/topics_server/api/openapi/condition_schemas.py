"""Conditions of writes for the OpenAPI document: the member `if`, and the header `If-Match`. Pure.

Used by `api/openapi/document`.
"""

from __future__ import annotations

from typing import Final

from topics_server.api.openapi.schemas import (
    CONDITION,
    FILTER_ABOUT,
    Schema,
    object_of,
    text,
    u64,
)
from topics_server.values.errors import Code

# The error of a write whose condition does not hold.
CONDITION_CODES: Final = (Code.CONDITION_FAILED, Code.PRECONDITION_FAILED)
IF_MATCH: Final[Schema] = {
    "name": "If-Match",
    "in": "header",
    "schema": text(pattern=r'^(\*|"[0-9]{1,19}-[0-9]{1,19}")$'),
    "description": "`*`, or the `ETag` of the topic: the request counts only if that is current. "
    "Otherwise the answer is 412.",
}
# The ETag of a topic, in the answer to a GET.
TOPIC_ETAG: Final[Schema] = {
    "schema": text(),
    "description": '`"<epoch>-<head_seq>"`: what `If-Match` takes.',
}


def condition_schemas() -> Schema:
    """The condition of a write."""
    some = {"anyOf": [u64(), {"type": "null"}]}
    condition = object_of(
        "",
        head_seq=some | {"description": "The topic's head is this seq."},
        none_match={
            "anyOf": [text("An exact tag."), {"type": "array"}, {"type": "null"}],
            "description": f"No live record after `after` passes. {FILTER_ABOUT} Without `Not`.",
        },
        after=some | {"description": "Exclusive; 0 is all records. Only with `none_match`."},
        exists={
            "type": ["boolean", "null"],
            "description": "Whether the topic exists. With `false` no other member is given.",
        },
        epoch=some | {"description": "The incarnation of the topic's name."},
    )
    return {"Condition": condition | {"additionalProperties": False}}


def conditional(body: Schema) -> Schema:
    """A body that takes a condition too."""
    return {"allOf": [body, object_of("", **CONDITION)]}
