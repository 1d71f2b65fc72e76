"""The OpenAPI 3.1 document of the endpoints that exist, built from data.

Held true by tests: its paths and methods are the route table's, its configuration fields and their
defaults the decoder's, its error codes the table's of `problems`, and `docs/openapi.json` is this
document. Served as `/v0/openapi.json`.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import msgspec

from topics_server.api.problems import STATUS_OF
from topics_server.api.schemas import Schema, all_schemas, boolean, object_of, ref, text, u64
from topics_server.errors import Code
from topics_server.limits import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX

_JSON: Final = "application/json"


def document_bytes() -> bytes:
    """The document as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=2) + b"\n"


@cache
def document() -> Schema:
    """The whole document; do not change it."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "topics",
            "version": "v0",
            "description": "A durable event log behind plain HTTP.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": (
            _topic_paths() | _queue_paths() | _router_paths() | _watch_paths() | _probe_paths()
        ),
        "components": {"schemas": all_schemas()},
    }


def _query(name: str, schema: Schema, about: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": about}


def _answer(about: str, schema: Schema, media: str = _JSON) -> Schema:
    return {"description": about, "content": {media: {"schema": schema}}}


def _operation(
    operation_id: str,
    summary: str,
    answers: dict[str, Schema],
    *,
    codes: tuple[Code, ...] = (),
    body: Schema | None = None,
    is_body_required: bool = True,
    parameters: tuple[Schema, ...] = (),
) -> Schema:
    """One operation; its refusals are grouped by status, with the codes named."""
    by_status: dict[int, list[str]] = {}
    for code in codes:
        by_status.setdefault(STATUS_OF[code], []).append(code.value)
    refusals = {
        str(status): _answer(", ".join(f"`{name}`" for name in names), ref("Error"))
        for status, names in sorted(by_status.items())
    }
    operation: Schema = {
        "operationId": operation_id,
        "summary": summary,
        "responses": answers | refusals,
    }
    if parameters:
        operation["parameters"] = list(parameters)
    if body is not None:
        operation["requestBody"] = {
            "required": is_body_required,
            "content": {_JSON: {"schema": body}},
        }
    return operation


_ALWAYS: Final = (Code.INTERNAL, Code.NOT_READY, Code.SHUTTING_DOWN)
_READS: Final = (Code.INVALID_REQUEST, *_ALWAYS)
_TAKES_BODY: Final = (Code.PAYLOAD_TOO_LARGE, Code.UNSUPPORTED_MEDIA_TYPE)
_WRITES: Final = (*_READS, Code.THROTTLED, Code.STORAGE_READ_ONLY)


def _name() -> Schema:
    return {
        "name": "topic",
        "in": "path",
        "required": True,
        "schema": text(pattern="^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$"),
    }


def _topic_paths() -> Schema:
    name = _name()
    return {
        "/v0/topics": {"get": _listing()},
        "/v0/topics/{topic}": {"parameters": [name], **_topic()},
        "/v0/topics/{topic}/diff": {
            "parameters": [name],
            "post": _operation(
                "readRecords",
                "The records after a cursor, waiting for new ones if asked to.",
                {"200": _answer("A page of records.", ref("Page"))},
                codes=(*_READS, *_TAKES_BODY, Code.TOPIC_NOT_FOUND),
                body=ref("DiffRequest"),
            ),
        },
        "/v0/topics/{topic}/delete": {
            "parameters": [name],
            "post": _operation(
                "deleteRecords",
                "Remove records by seq, by tag, or by both.",
                {"200": _answer("They are gone.", ref("DeleteResult"))},
                codes=(*_WRITES, *_TAKES_BODY, Code.TOPIC_NOT_FOUND),
                body=ref("DeleteRequest"),
            ),
        },
    }


def _listing() -> Schema:
    return _operation(
        "listTopics",
        "Topics in name order, one page at a time.",
        {"200": _answer("A page of topics.", ref("TopicList"))},
        codes=_READS,
        parameters=(
            _query("prefix", text(), "Only names that start with it."),
            _query(
                "page_size",
                {"type": "integer", "minimum": 0, "default": PAGE_SIZE_DEFAULT},
                f"At most {PAGE_SIZE_MAX}; 0 is the default.",
            ),
            _query("cursor", text(), "`next_cursor` of the page before."),
            _query("touch", boolean(False), "Count as interest in the listed topics."),
        ),
    )


def _topic() -> Schema:
    return {
        "put": _operation(
            "putTopic",
            "Create a topic, or replace its configuration.",
            {
                "200": _answer("It was there.", ref("PutResult")),
                "201": _answer("It was created.", ref("PutResult")),
            },
            codes=(*_WRITES, *_TAKES_BODY, Code.TOPIC_EXISTS_INCOMPATIBLE),
            body=ref("TopicConfig"),
            is_body_required=False,
        ),
        "get": _operation(
            "getTopic",
            "The topic's state.",
            {"200": _answer("The state.", ref("TopicState"))},
            codes=(*_READS, Code.TOPIC_NOT_FOUND),
            parameters=(_query("touch", boolean(True), "Count as interest in the topic."),),
        ),
        "delete": _operation(
            "dropTopic",
            "Remove the topic with everything it holds.",
            {"200": _answer("It is gone.", ref("DropResult"))},
            codes=(*_WRITES, Code.TOPIC_NOT_EMPTY),
            parameters=(_query("if_empty", boolean(False), "Only if it holds no record."),),
        ),
        "post": _append(),
    }


def _append() -> Schema:
    return _operation(
        "appendRecords",
        "Append one or many records, all or none.",
        {
            "200": _answer("The records are appended.", ref("AppendResult")),
            "201": _answer("So they are, and the topic was created.", ref("AppendResult")),
        },
        codes=(
            *(Code.BATCH_TOO_LARGE, Code.RECORD_TOO_LARGE, Code.TOPIC_NOT_FOUND, Code.TOPIC_FULL),
            *(*_WRITES, *_TAKES_BODY),
        ),
        body=ref("AppendRequest"),
        parameters=(
            _query("return_seqs", boolean(True), "Whether the answer lists `seqs`."),
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": text(minLength=1, maxLength=256),
                "description": "As `idempotency_key` of the body, which wins.",
            },
        ),
    )


def _queue_paths() -> Schema:
    gone = (Code.TOPIC_NOT_FOUND, Code.NOT_A_QUEUE)
    verbs = (
        ("claim", "claimJobs", "Lease jobs to a node, waiting for the first if asked to.", ()),
        ("ack", "ackJobs", "Complete leased jobs, which deletes them.", (Code.BATCH_TOO_LARGE,)),
        ("nack", "nackJobs", "Give leased jobs back.", (Code.BATCH_TOO_LARGE,)),
        ("extend", "extendJobs", "Hold leased jobs for longer.", (Code.BATCH_TOO_LARGE,)),
        (
            "redrive",
            "redriveJobs",
            "Make dead letters of this queue jobs again.",
            (Code.BATCH_TOO_LARGE, Code.TOPIC_FULL),
        ),
    )
    posts = {
        f"/v0/topics/{{topic}}/{verb}": {
            "parameters": [_name()],
            "post": _operation(
                operation_id,
                summary,
                {"200": _answer("It is done.", ref(f"{verb.capitalize()}Result"))},
                codes=(*_WRITES, *_TAKES_BODY, *gone, *more),
                body=ref(f"{verb.capitalize()}Request"),
            ),
        }
        for verb, operation_id, summary, more in verbs
    }
    return posts | {
        "/v0/topics/{topic}/leases": {"parameters": [_name()], "get": _leases(gone)},
        "/v0/topics/{topic}/work": {"parameters": [_name()], "get": _work(gone)},
    }


def _leases(gone: tuple[Code, ...]) -> Schema:
    return _operation(
        "listLeases",
        "Who holds which job until when, one page at a time.",
        {"200": _answer("A page of leases, by seq.", ref("LeaseList"))},
        codes=(*_READS, *gone),
        parameters=(
            _query(
                "page_size",
                {"type": "integer", "minimum": 0, "default": PAGE_SIZE_DEFAULT},
                f"At most {PAGE_SIZE_MAX}; 0 is the default.",
            ),
            _query("cursor", text(), "`next_cursor` of the page before."),
        ),
    )


def _work(gone: tuple[Code, ...]) -> Schema:
    node = _query("node", text(minLength=1), "Who the jobs are leased to.")
    return _operation(
        "work",
        "Jobs as they come, at most `max` in flight; all are released when the stream ends.",
        {"200": _answer("Server-sent events: `job`, `error`.", text(), "text/event-stream")},
        codes=(*_READS, *gone, Code.NOT_ACCEPTABLE, Code.THROTTLED),
        parameters=(
            node | {"required": True},
            _query("max", {"type": "integer", "minimum": 0, "default": 1}, "Jobs in flight."),
            _query("lease_ms", u64(), "The topic's own by default; clamped."),
        ),
    )


def _router_paths() -> Schema:
    name = {
        "name": "router",
        "in": "path",
        "required": True,
        "schema": text(pattern="^[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}$"),
    }
    refusals = (Code.TOPIC_NOT_FOUND, Code.ROUTER_CYCLE, Code.TOPIC_EXISTS_INCOMPATIBLE)
    listing = _operation(
        "listRouters",
        "Routers in name order, one page at a time.",
        {"200": _answer("A page of routers.", ref("RouterList"))},
        codes=_READS,
        parameters=(
            _query("prefix", text(), "Only names that start with it."),
            _query("source", text(), "Only those of this source."),
            _query("dest", text(), "Only those into this destination."),
            _query(
                "page_size",
                {"type": "integer", "minimum": 0, "default": PAGE_SIZE_DEFAULT},
                f"At most {PAGE_SIZE_MAX}; 0 is the default.",
            ),
            _query("cursor", text(), "`next_cursor` of the page before."),
        ),
    )
    one = {
        "put": _operation(
            "putRouter",
            "Create a router, or replace its definition.",
            {
                "200": _answer("It was there.", ref("RouterPutResult")),
                "201": _answer("It was created.", ref("RouterPutResult")),
            },
            codes=(*_WRITES, *_TAKES_BODY, *refusals),
            body=ref("RouterRequest"),
        ),
        "get": _operation(
            "getRouter",
            "What a router does, and how far it is.",
            {"200": _answer("Its state.", ref("RouterState"))},
            codes=(*_READS, Code.ROUTER_NOT_FOUND),
        ),
        "delete": _operation(
            "dropRouter",
            "Stop forwarding; what was copied stays.",
            {"200": _answer("It is gone.", ref("RouterDropResult"))},
            codes=_WRITES,
        ),
    }
    return {
        "/v0/routers": {"get": listing},
        "/v0/routers/{router}": {"parameters": [name], **one},
    }


def _watch_paths() -> Schema:
    wid = {"name": "wid", "in": "path", "required": True, "schema": text(pattern="^wid_")}
    last_id = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": text(),
        "description": "The last `id` seen: go on behind it. What is no id is ignored.",
    }
    stream = _answer(
        "Server-sent events: `record`, `tombstone`, `caught-up`, `topic-deleted`, `error`.",
        text(),
        "text/event-stream",
    )
    return {
        "/v0/watch": {
            "post": _operation(
                "openWatch",
                "Make a watch session over several topics.",
                {"200": _answer("The session, and where its stream is.", ref("WatchSession"))},
                codes=(*_READS, *_TAKES_BODY, Code.TOPIC_NOT_FOUND, Code.THROTTLED),
                body=ref("WatchRequest"),
                parameters=(_query("lenient", boolean(False), "Leave unknown topics out."),),
            )
        },
        "/v0/watch/{wid}": {
            "parameters": [wid],
            "get": _operation(
                "watch",
                "The stream of a session; another one that is open is ended.",
                {"200": stream},
                codes=(Code.NOT_FOUND, Code.NOT_ACCEPTABLE, Code.THROTTLED, Code.INTERNAL),
                parameters=(last_id,),
            ),
        },
        "/v0/ws": {
            "get": _operation(
                "openWebSocket",
                "One WebSocket to publish and to follow topics; a page's origin must be allowed.",
                {"101": {"description": "JSON text messages, either way."}},
                codes=(*_READS, Code.FORBIDDEN, Code.THROTTLED),
            )
        },
    }


def _probe_paths() -> Schema:
    def probe(operation_id: str, summary: str, schema: str, *codes: Code) -> Schema:
        answer = _answer("The figures.", ref(schema))
        return {"get": _operation(operation_id, summary, {"200": answer}, codes=codes)}

    metrics = _operation(
        "metrics",
        "Figures as Prometheus text, or as JSON for `Accept: application/json`.",
        {
            "200": {
                "description": "The figures.",
                "content": {"text/plain": {"schema": text()}, _JSON: {"schema": object_of("")}},
            }
        },
    )
    gated = (Code.NOT_READY, Code.SHUTTING_DOWN, Code.STORAGE_READ_ONLY)
    described = _operation(
        "openapi", "This document.", {"200": _answer("The document.", object_of(""))}
    )
    return {
        "/v0/health": probe("health", "The process serves.", "Health"),
        "/healthz": probe("healthAlias", "As `/v0/health`.", "Health"),
        "/v0/ready": probe("ready", "Whether requests are taken.", "Ready", *gated),
        "/readyz": probe("readyAlias", "As `/v0/ready`.", "Ready", *gated),
        "/v0/metrics": {"get": metrics},
        "/v0/openapi.json": {"get": described},
    }
