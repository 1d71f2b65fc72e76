"""The operations of plain reads: records by `GET`, and one record. Pure.

Used by `api/openapi/document`.
"""

from __future__ import annotations

from typing import Final

from topics_server.api.messages.trace_headers import TRACE_ABOUT, TRACE_PATTERN
from topics_server.api.openapi.operations import (
    READS,
    answer,
    in_path,
    operation,
    query,
    switch,
)
from topics_server.api.openapi.schemas import (
    FILTER_ABOUT,
    Schema,
    list_of,
    object_of,
    ref,
    text,
    u64,
    values_of,
)
from topics_server.values.errors import Code
from topics_server.values.limits import (
    DIFF_LIMIT_DEFAULT,
    DIFF_WAIT_MS_MAX,
    PAGE_BYTES_DEFAULT,
    PAGE_BYTES_MAX,
)
from topics_server.values.model import LossReason

_MOMENT: Final = "ms since 1970, RFC 3339, or a duration before now such as `10m`"
_ETAG: Final[Schema] = {
    "ETag": {
        "schema": text(),
        "description": "The state of what is told. A page that reaches the head has none.",
    }
}
_NOT_MODIFIED: Final[Schema] = {
    "description": "Nothing has changed since the `ETag` in `If-None-Match`.",
    "headers": _ETAG,
}
_FACTS: Final[Schema] = {
    "topics-page": {
        "schema": text(),
        "description": "Lines only: the other members of the page, as JSON.",
    },
    "topics-tombstone": {
        "schema": text(),
        "description": "Lines only: the tombstone, as JSON, or `null`.",
    },
}
_IF_NONE_MATCH: Final[Schema] = {
    "name": "If-None-Match",
    "in": "header",
    "schema": text(),
    "description": "The `ETag` of a page, or record, that the client has.",
}


def find_schemas() -> Schema:
    """Records, and the answers of plain reads."""
    shared: Schema = {
        "topic": text(),
        "records": list_of(ref("Record")),
        "head_seq": u64(),
        "earliest_seq": u64(),
        "complete": {
            "type": "boolean",
            "description": "Whether the page reached the end of the range.",
        },
        "tombstone": {"anyOf": [ref("Tombstone"), {"type": "null"}]},
        "lag": u64(),
        "epoch": u64(),
        "next_from_seq": u64("Ascending: `from_seq` of the next page."),
        "caught_up": {"type": "boolean"},
        "next_before_seq": u64("Descending: `before_seq` of the next page."),
        "performance": {"type": "object"},
    }
    needed = "topic records head_seq earliest_seq complete tombstone epoch"
    one = {
        "topic": text(),
        "record": ref("Record"),
        "epoch": u64(),
        "head_seq": u64(),
        "performance": {"type": "object"},
    }
    return {
        **_record_schemas(),
        "RecordPage": object_of(needed, **shared),
        "OneRecord": object_of("topic record epoch head_seq", **one),
    }


def _record_schemas() -> Schema:
    lost = {"description": "Lost by eviction, expiry or damage; both ends inclusive."}
    return {
        "Record": object_of(
            "$seq $ts data",
            **{"$seq": u64(), "$ts": u64("Milliseconds."), "$node": text(), "$tag": text()},
            **{"$trace": text(TRACE_ABOUT, pattern=TRACE_PATTERN)},
            data={},
            meta={"type": "object"},
            **{
                "$encoding": text("Record of bytes: the encoding of `data`.", enum=["base64"]),
                "$content_type": text("Record of bytes: its content type."),
            },
        ),
        "Tombstone": object_of(
            "gap_from gap_to reason missed_estimate earliest_seq head_seq",
            gap_from=u64(),
            gap_to=u64(),
            reason=text(enum=values_of(LossReason)),
            missed_estimate=u64(),
            earliest_seq=u64(),
            head_seq=u64(),
        )
        | lost,
    }


def find_paths(name: Schema) -> Schema:
    """The paths of plain reads; `name` is the topic's parameter."""
    whole: Schema = {"type": "integer", "minimum": 0}
    page = operation(
        "listRecords",
        "The records of a range, oldest or newest first.",
        {
            "200": {
                "description": "A page of records; with `Accept: application/x-ndjson` one record "
                "a line, and the other facts in the headers `topics-page` and `topics-tombstone`.",
                "headers": {**_ETAG, **_FACTS},
                "content": {
                    "application/json": {"schema": ref("RecordPage")},
                    "application/x-ndjson": {"schema": text()},
                },
            },
            "304": _NOT_MODIFIED,
        },
        tag="records",
        scopes=("read",),
        codes=(*READS, Code.TOPIC_NOT_FOUND),
        parameters=(
            query("from_seq", whole, "Exclusive; only later records."),
            query("before_seq", whole, "Exclusive; only earlier records."),
            query("since", text(), f"Only records committed at this time or later: {_MOMENT}."),
            query("until", text(), f"Only records committed before this time: {_MOMENT}."),
            query(
                "last",
                {"type": "integer", "minimum": 1},
                "Only the last N records that pass the filter.",
            ),
            query("limit", whole | {"default": DIFF_LIMIT_DEFAULT}, "Clamped; 0 is the default."),
            query("order", text(enum=["asc", "desc"], default="asc"), "`desc`: newest first."),
            query("tag", text(), "Only records with this tag."),
            query("tag_prefix", text(), "Only records whose tag begins with this text."),
            query("node", text(), "Only records of this node."),
            query("filter", text(), f"JSON. {FILTER_ABOUT}"),
            query(
                "wait_ms", whole, f"How long to wait for records; clamped to {DIFF_WAIT_MS_MAX}."
            ),
            query(
                "max_batch_bytes",
                whole | {"default": PAGE_BYTES_DEFAULT},
                f"Clamped to {PAGE_BYTES_MAX}.",
            ),
            switch("include_tags", True, "Whether records have `$tag`."),
            switch("include_meta", True, "Whether records have `meta`."),
            _IF_NONE_MATCH,
        ),
    )
    one = operation(
        "getRecord",
        "One record by its seq.",
        {
            "200": answer("The record.", ref("OneRecord")) | {"headers": _ETAG},
            "304": _NOT_MODIFIED,
        },
        tag="records",
        scopes=("read",),
        codes=(*READS, Code.TOPIC_NOT_FOUND, Code.RECORD_NOT_FOUND),
        parameters=(_IF_NONE_MATCH,),
    )
    seq = in_path("seq", "^[1-9][0-9]*$", "The record's seq.")
    return {
        "/v0/topics/{topic}/records": {"parameters": [name], "get": page},
        "/v0/topics/{topic}/records/{seq}": {"parameters": [name, seq], "get": one},
    }
