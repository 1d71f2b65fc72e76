"""The operations of live streams, and the schema of their tickets. Pure.

Used by `api/openapi/document`.
"""

from __future__ import annotations

from topics_server.api.openapi.operations import (
    READS,
    STREAM,
    answer,
    operation,
    query,
    switch,
)
from topics_server.api.openapi.schemas import FILTER_ABOUT, Schema, object_of, ref, text, u64
from topics_server.api.watch.requests import (
    FRAME_BYTES_DEFAULT,
    HEARTBEAT_MS_DEFAULT,
    HEARTBEAT_MS_MAX,
    HEARTBEAT_MS_MIN,
)
from topics_server.values.errors import Code
from topics_server.values.limits import DIFF_LIMIT_DEFAULT, LIVE_PREFIXES_MAX, PAGE_BYTES_MAX


def live_paths(name: Schema) -> Schema:
    """The paths of live streams; `name` is the topic's parameter."""
    whole: Schema = {"type": "integer", "minimum": 0}
    of_one = (
        query("from_seq", whole, "Begin after this seq. Default: the first record."),
        query(
            "consumer",
            text(),
            "Begin where this consumer is. A `Last-Event-ID` counts more; no other start may be "
            "given.",
        ),
        query(
            "ack",
            text(enum=["manual", "auto"], default="manual"),
            "`auto`: the stream commits for the consumer what its socket took; needs `write`.",
        ),
    )
    of_many = (
        query("topics", text(), "Names, separated by commas; they need not exist."),
        query(
            "prefix",
            text(),
            "Also follow the topics whose names begin with this text; later ones are read from "
            f"their first record. At most {LIVE_PREFIXES_MAX}, separated by commas.",
        ),
    )
    shared = (
        query("last", {"type": "integer", "minimum": 1}, "Begin with the last N records."),
        query(
            "since",
            text(),
            "Begin with records committed at this time or later: ms since 1970, RFC 3339, or a "
            "duration before now such as `10m`.",
        ),
        switch("tail", False, "Begin with the next record."),
        query("tag", text(), "Only records with this tag."),
        query("tag_prefix", text(), "Only records whose tag begins with this text."),
        query("node", text(), "Only records of this node."),
        query("filter", text(), f"JSON. {FILTER_ABOUT}"),
        query("limit", whole | {"default": DIFF_LIMIT_DEFAULT}, "Records of one event; clamped."),
        query(
            "max_batch_bytes",
            whole | {"default": FRAME_BYTES_DEFAULT},
            f"Clamped to {PAGE_BYTES_MAX}.",
        ),
        query(
            "heartbeat_ms",
            whole | {"default": HEARTBEAT_MS_DEFAULT},
            f"Clamped to {HEARTBEAT_MS_MIN}..{HEARTBEAT_MS_MAX}.",
        ),
        query(
            "consistency",
            text(enum=["eventual", "strong"], default="eventual"),
            "`strong`: only synced records.",
        ),
        switch("include_tags", True, "Whether records have `$tag`."),
        switch("include_meta", True, "Whether records have `meta`."),
        switch("include_data", True, "Whether records have `data`; without it no `meta` either."),
        query("cursor", text(), "An `id` of an earlier event: continue after it."),
    )
    return {
        "/v0/topics/{topic}/live": {
            "parameters": [name],
            "get": _stream(
                "liveTopic",
                "Follow a topic, which need not exist yet.",
                (*of_one, *shared),
                Code.TOPIC_NOT_FOUND,
                Code.CONSUMER_NOT_FOUND,
            ),
            "post": _ticket("issueTopicTicket", (*of_one, *shared)),
        },
        "/v0/live": {
            "get": _stream(
                "live",
                "Follow topics by name and by prefix, including topics that are created later.",
                (*of_many, *shared),
            ),
            "post": _ticket("issueTicket", (*of_many, *shared)),
        },
    }


def _stream(
    operation_id: str, summary: str, parameters: tuple[Schema, ...], *codes: Code
) -> Schema:
    last_id = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": text(),
        "description": "The last received `id`; the stream continues after it.",
    }
    about = (
        "Server-sent events: `record`, `tombstone`, `caught-up`, `topic-deleted`, `error`; with a "
        "prefix `topic-created`."
    )
    return operation(
        operation_id,
        summary,
        {"200": answer(about, text(), STREAM)},
        tag="watch",
        scopes=("read",),
        codes=(*READS, Code.NOT_ACCEPTABLE, *codes),
        parameters=(*parameters, last_id),
        in_url=("token", "ticket"),
    )


def _ticket(operation_id: str, parameters: tuple[Schema, ...]) -> Schema:
    return operation(
        operation_id,
        "A ticket for the stream of the same URL, for clients that cannot send a key.",
        {"200": answer("The stream's URL with the ticket.", ref("LiveTicket"))},
        tag="watch",
        scopes=("read",),
        codes=READS,
        parameters=parameters,
    )


def live_schemas() -> Schema:
    """The schema of the answer that carries a ticket."""
    ticket = {
        "stream_url": text(),
        "ticket": text("Absent on a server without keys."),
        "ticket_ttl_ms": u64("The ticket opens this stream, as often as needed, for this long."),
        "performance": ref("Performance"),
    }
    return {"LiveTicket": object_of("stream_url performance", **ticket)}
