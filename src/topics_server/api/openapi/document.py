"""Builds the OpenAPI 3.1 document. Pure.

Tests compare it with the code: its paths and methods are those of the route table, its
configuration fields and their defaults are those of the decoder, its error codes are those of
`http/error_responses`, real answers fit its schemas, and `docs/openapi.json` is this document.
Served as `/v0/openapi.json`; `api/operate/reference` shows it.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import msgspec

from topics_server.api.openapi.append_operation import append_operation
from topics_server.api.openapi.backup_operations import backup_paths, backup_schemas
from topics_server.api.openapi.condition_schemas import (
    CONDITION_CODES,
    IF_MATCH,
    TOPIC_ETAG,
    condition_schemas,
    conditional,
)
from topics_server.api.openapi.consumer_operations import consumer_paths, consumer_schemas
from topics_server.api.openapi.find_operations import find_paths, find_schemas
from topics_server.api.openapi.live_operations import live_paths, live_schemas
from topics_server.api.openapi.operations import (
    JSON,
    READS,
    STREAM,
    TAKES_BODY,
    WRITES,
    answer,
    components,
    in_path,
    operation,
    page_queries,
    query,
    switch,
)
from topics_server.api.openapi.router_schemas import router_schemas
from topics_server.api.openapi.schemas import Schema, all_schemas, object_of, ref, text, u64
from topics_server.api.openapi.stream_operations import stream_paths
from topics_server.api.openapi.view_operations import view_paths, view_schemas
from topics_server.values.errors import Code

_ABOUT: Final = (
    "A durable event log behind plain HTTP: append, read from any position, delete by tag, queues, "
    "routers, and streams of new records.\n\n"
    "Every path also answers `OPTIONS` (204 with `Allow`), and `HEAD` where it answers `GET`. A "
    "method that a path does not have is 405 `method_not_allowed` with `Allow`; a path that is not "
    "listed here is 404 `not_found`. Every refusal has the same envelope, `Error`; clients branch "
    "on `error.code`. Later versions may add fields to requests and answers: "
    "ignore unknown fields. A request with `Prefer: return=minimal` gets its answer without "
    "`performance`. `docs/FRAMES.md` describes the events of streams and the WebSocket's messages."
)

_TAGS: Final = {
    "topics": "Create, configure, list and remove topics.",
    "records": "Append, read and delete records.",
    "queues": "Topics of type `queue`: leases of jobs to workers.",
    "routers": "Rules that copy the records of one topic into another.",
    "views": "Tables that follow a topic, in SQL; a query with `after` reads its own writes.",
    "watch": "New records as they arrive: server-sent events and WebSocket.",
    "streams": "Topics through the Durable Streams protocol: `docs/STREAMS.md`.",
    "server": "Probes, metrics and this document.",
}


def document_bytes(prefix: bytes = b"") -> bytes:
    """The document as indented JSON with a final newline.

    `prefix`: where the routes are mounted, if that is not the server's root.
    """
    whole = document()
    if prefix:
        whole = {**whole, "servers": [{"url": prefix.decode("latin-1")}]}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


@cache
def document() -> Schema:
    """The whole document. Callers must not modify it."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "topics",
            "version": "v0",
            "description": _ABOUT,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "tags": [{"name": name, "description": about} for name, about in _TAGS.items()],
        "paths": (
            _topic_paths()
            | _record_paths()
            | _queue_paths()
            | _router_paths()
            | view_paths(_NAME)
            | _watch_paths()
            | live_paths(_NAME)
            | stream_paths()
            | _server_paths()
            | backup_paths()
        ),
        "components": {
            **components(),
            "schemas": all_schemas()
            | condition_schemas()
            | consumer_schemas()
            | router_schemas()
            | find_schemas()
            | view_schemas()
            | live_schemas()
            | backup_schemas(),
        },
    }


_NAME: Final = in_path(
    "topic", "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$", "A topic's name, case-sensitive."
)


# --- topics -----------------------------------------------------------------------------------


def _topic_paths() -> Schema:
    listing = operation(
        "listTopics",
        "Topics in name order, one page at a time; only those that the key may see.",
        {"200": answer("A page of topics.", ref("TopicList"))},
        tag="topics",
        scopes=("read",),
        codes=READS,
        parameters=(
            query("prefix", text(), "Only names that start with this text."),
            *page_queries(),
            switch("touch", False, "Raise the priority of the listed topics, like a read."),
        ),
    )
    one = {
        "put": _put_topic(),
        "patch": _patch_topic(),
        "get": _get_topic(),
        "delete": _drop_topic(),
        "post": append_operation(),
    }
    return {
        "/v0/topics": {"get": listing},
        "/v0/topics/{topic}": {"parameters": [_NAME], **one},
    }


def _put_topic() -> Schema:
    return operation(
        "putTopic",
        "Create a topic, or replace its configuration.",
        {
            "200": answer("The topic existed already.", ref("PutResult")),
            "201": answer("The topic was created.", ref("PutResult")),
        },
        tag="topics",
        scopes=("admin",),
        codes=(
            *(*WRITES, *TAKES_BODY),
            *(Code.TOPIC_EXISTS_INCOMPATIBLE, Code.STREAM_CONFLICT, *CONDITION_CODES),
        ),
        body=conditional(ref("TopicConfig")),
        is_body_required=False,
        parameters=(IF_MATCH,),
    )


def _patch_topic() -> Schema:
    return operation(
        "patchTopic",
        "Change single fields of a topic's configuration; null gives a field its default.",
        {"200": answer("The new configuration, and the changed fields.", ref("PutResult"))},
        tag="topics",
        scopes=("admin",),
        codes=(
            *(*WRITES, *TAKES_BODY, *CONDITION_CODES),
            *(Code.TOPIC_NOT_FOUND, Code.TOPIC_EXISTS_INCOMPATIBLE),
        ),
        body=conditional(ref("TopicConfigPatch")),
        parameters=(IF_MATCH,),
    )


def _get_topic() -> Schema:
    return operation(
        "getTopic",
        "The topic's state.",
        {
            "200": answer("The topic's state.", ref("TopicState"))
            | {"headers": {"ETag": TOPIC_ETAG}}
        },
        tag="topics",
        scopes=("read",),
        codes=(*READS, Code.TOPIC_NOT_FOUND),
        parameters=(switch("touch", True, "Raise the priority of the topic, like a read."),),
    )


def _drop_topic() -> Schema:
    return operation(
        "dropTopic",
        "Remove the topic with all its records, and its routers.",
        {"200": answer("The topic was removed.", ref("DropResult"))},
        tag="topics",
        scopes=("delete",),
        codes=(*WRITES, Code.TOPIC_NOT_EMPTY, *CONDITION_CODES),
        parameters=(switch("if_empty", False, "Only if the topic has no record."), IF_MATCH),
    )


# --- records ----------------------------------------------------------------------------------


def _record_paths() -> Schema:
    read = operation(
        "readRecords",
        "The records after a cursor; with `wait_ms` the request waits for new ones.",
        {"200": answer("A page of records.", ref("Page"))},
        tag="records",
        scopes=("read",),
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND, Code.CONSUMER_NOT_FOUND),
        body=ref("DiffRequest"),
        is_body_required=False,
    )
    delete = operation(
        "deleteRecords",
        "Remove records by seq, by tag, or by both.",
        {"200": answer("The records are deleted.", ref("DeleteResult"))},
        tag="records",
        scopes=("delete",),
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND, *CONDITION_CODES),
        body=ref("DeleteRequest"),
        parameters=(IF_MATCH,),
    )
    return {
        "/v0/topics/{topic}/diff": {"parameters": [_NAME], "post": read},
        "/v0/topics/{topic}/delete": {"parameters": [_NAME], "post": delete},
        **find_paths(_NAME),
        **consumer_paths(_NAME),
    }


# --- queues -----------------------------------------------------------------------------------

_NO_QUEUE: Final = (Code.TOPIC_NOT_FOUND, Code.NOT_A_QUEUE)
_WORKS: Final = ("read", "write")
# For each queue operation: verb, operation id, summary, scopes, and its own error codes.
_VERBS: Final = (
    (
        "claim",
        "claimJobs",
        "Lease jobs to a node; with `wait_ms` the request waits for the first one.",
        _WORKS,
        (Code.BATCH_TOO_LARGE,),
    ),
    (
        *("ack", "ackJobs", "Complete leased jobs, which deletes them."),
        *(("write",), (Code.BATCH_TOO_LARGE,)),
    ),
    ("nack", "nackJobs", "Give leased jobs back.", ("write",), (Code.BATCH_TOO_LARGE,)),
    ("extend", "extendJobs", "Extend the leases of jobs.", ("write",), (Code.BATCH_TOO_LARGE,)),
    (
        *("redrive", "redriveJobs", "Move dead letters back into this queue."),
        *(("write",), (Code.BATCH_TOO_LARGE, Code.TOPIC_FULL)),
    ),
)


def _queue_paths() -> Schema:
    posts = {
        f"/v0/topics/{{topic}}/{verb}": {
            "parameters": [_NAME],
            "post": operation(
                operation_id,
                summary,
                {"200": answer("The operation succeeded.", ref(f"{verb.capitalize()}Result"))},
                tag="queues",
                scopes=scopes,
                codes=(*WRITES, *TAKES_BODY, *_NO_QUEUE, *more),
                body=ref(f"{verb.capitalize()}Request"),
            ),
        }
        for verb, operation_id, summary, scopes, more in _VERBS
    }
    leases = operation(
        "listLeases",
        "Leases in order of seq, one page at a time.",
        {"200": answer("A page of leases, by seq.", ref("LeaseList"))},
        tag="queues",
        scopes=("read",),
        codes=(*READS, *_NO_QUEUE),
        parameters=page_queries(),
    )
    # The last operation, because a redrive needs jobs that became dead letters.
    redrive = {path: posts.pop(path) for path in tuple(posts) if path.endswith("/redrive")}
    return {
        **posts,
        "/v0/topics/{topic}/leases": {"parameters": [_NAME], "get": leases},
        "/v0/topics/{topic}/work": {"parameters": [_NAME], "get": _work()},
        **redrive,
    }


def _work() -> Schema:
    node = query("node", text(minLength=1), "The worker that gets the leases.")
    depth: Schema = {"type": "integer", "minimum": 1, "default": 1}
    return operation(
        "work",
        "Jobs as they arrive, at most `max` in flight; the end of the stream releases them.",
        {"200": answer("Server-sent events: `job`, `error`.", text(), STREAM)},
        tag="queues",
        scopes=_WORKS,
        codes=(*READS, *_NO_QUEUE, Code.NOT_ACCEPTABLE),
        parameters=(
            node | {"required": True},
            query("max", depth, "The most jobs in flight."),
            query("lease_ms", u64(), "Default: the lease of the queue; clamped."),
        ),
        in_url=("token",),
    )


# --- routers ----------------------------------------------------------------------------------


def _router_paths() -> Schema:
    name = in_path("router", "^[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}$", "A router's name.")
    listing = operation(
        "listRouters",
        "Routers in name order, one page at a time; only those that the key may see.",
        {"200": answer("A page of routers.", ref("RouterList"))},
        tag="routers",
        scopes=("read",),
        codes=READS,
        parameters=(
            query("prefix", text(), "Only names that start with this text."),
            query("source", text(), "Only routers with this source."),
            query("dest", text(), "Only routers with this destination."),
            *page_queries(),
        ),
    )
    one = {"put": _put_router(), "get": _get_router(), "delete": _drop_router()}
    return {
        "/v0/routers": {"get": listing},
        "/v0/routers/{router}": {"parameters": [name], **one},
    }


def _put_router() -> Schema:
    return operation(
        "putRouter",
        "Create a router, or replace its definition.",
        {
            "200": answer("The router existed already.", ref("RouterPutResult")),
            "201": answer("The router was created.", ref("RouterPutResult")),
        },
        tag="routers",
        scopes=("admin",),
        codes=(
            *(*WRITES, *TAKES_BODY),
            *(Code.TOPIC_NOT_FOUND, Code.ROUTER_CYCLE, Code.TOPIC_EXISTS_INCOMPATIBLE),
            Code.STREAM_CONFLICT,
        ),
        body=ref("RouterRequest"),
    )


def _get_router() -> Schema:
    return operation(
        "getRouter",
        "A router's definition and progress.",
        {"200": answer("The router's state.", ref("RouterState"))},
        tag="routers",
        scopes=("read",),
        codes=(*READS, Code.ROUTER_NOT_FOUND),
    )


def _drop_router() -> Schema:
    return operation(
        "dropRouter",
        "Delete a router; its copies stay.",
        {"200": answer("The router was deleted.", ref("RouterDropResult"))},
        tag="routers",
        scopes=("delete",),
        codes=WRITES,
    )


# --- watching ---------------------------------------------------------------------------------


def _watch_paths() -> Schema:
    wid = in_path("wid", "^wid_", "The `wid` from `POST /v0/watch`.")
    return {
        "/v0/watch": {"post": _open_watch()},
        "/v0/watch/{wid}": {"parameters": [wid], "get": _watch()},
        "/v0/ws": {"get": _open_socket()},
    }


def _open_watch() -> Schema:
    return operation(
        "openWatch",
        "Create a watch session over several topics.",
        {"200": answer("The session, and the URL of its stream.", ref("WatchSession"))},
        tag="watch",
        scopes=("read",),
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND, Code.CONSUMER_NOT_FOUND),
        body=ref("WatchRequest"),
        parameters=(
            switch("lenient", False, "Leave out unknown topics instead of refusing the request."),
            switch(
                "ticket", False, "Also return a ticket that opens the stream once without a key."
            ),
        ),
    )


def _watch() -> Schema:
    last_id = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": text(),
        "description": "The last `id`; the stream continues after it. A bad one is ignored.",
    }
    about = (
        "Server-sent events: `record`, `tombstone`, `caught-up`, `topic-deleted`, `error`, and "
        "with prefixes `topic-created`."
    )
    return operation(
        "watch",
        "Open the stream of a session; this ends its older stream.",
        {"200": answer(about, text(), STREAM)},
        tag="watch",
        scopes=("read",),
        codes=(*READS, Code.NOT_FOUND, Code.NOT_ACCEPTABLE),
        parameters=(last_id,),
        in_url=("token", "ticket"),
    )


def _open_socket() -> Schema:
    return operation(
        "openWebSocket",
        "Open a WebSocket to publish and to follow; a page's origin must be allowed.",
        {"101": {"description": "JSON text messages in both directions."}},
        tag="watch",
        codes=READS,
    )


# --- the server itself ------------------------------------------------------------------------


def _server_paths() -> Schema:
    gated = (Code.NOT_READY, Code.SHUTTING_DOWN, Code.STORAGE_READ_ONLY)
    metrics = {"text/plain": {"schema": text()}, JSON: {"schema": ref("Metrics")}}
    metrics = operation(
        "metrics",
        "Metrics as Prometheus text, or as JSON for `Accept: application/json`.",
        {"200": {"description": "The metrics.", "content": metrics}},
        tag="server",
        scopes=("read",),
    )
    seal = operation(
        "seal",
        "Seal the present records of topics: their files then show the same as a read.",
        {"200": answer("The records are sealed; ephemeral records never are.", ref("SealResult"))},
        tag="server",
        scopes=("admin",),
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND),
        body=ref("SealRequest"),
        is_body_required=False,
    )
    described = _shown("openapi", "This document.", object_of(""), JSON)
    page = _shown("reference", "This document as a page to read.", text(), "text/html")
    welcome = {"text/html": {"schema": text()}, "text/plain": {"schema": text()}}
    front = operation(
        "frontPage",
        "A short introduction with commands to try; HTML if `Accept` names it, else text.",
        {"200": {"description": "The page.", "content": welcome}},
        tag="server",
        scopes=None,
    )
    return {
        "/": {"get": front},
        "/v0/health": _probe("health", "Liveness: the process is running.", "Health"),
        "/healthz": _probe("healthAlias", "The same as `/v0/health`.", "Health"),
        "/v0/ready": _probe(
            "ready", "Readiness: whether the server accepts requests.", "Ready", *gated
        ),
        "/readyz": _probe("readyAlias", "The same as `/v0/ready`.", "Ready", *gated),
        "/v0/metrics": {"get": metrics},
        "/v0/admin/seal": {"post": seal},
        "/console": {
            "get": _shown(
                "console", "A page to look at topics and act on them.", text(), "text/html"
            )
        },
        "/console/static/{file}": {
            "parameters": [in_path("file", "^[a-z-]+[.](css|js|svg)$", "A file of the console.")],
            "get": _page_file("consoleFile", "A script, a style sheet or an icon of the console."),
        },
        "/v0/openapi.json": {"get": described},
        "/v0/docs": {"get": page},
        "/v0/docs/{file}": {
            "parameters": [in_path("file", "^[a-z-]+[.](css|js|png)$", "A file of the page.")],
            "get": _page_file(
                "referenceFile", "A script, a style sheet or a picture of that page."
            ),
        },
    }


def _probe(operation_id: str, summary: str, schema: str, *codes: Code) -> Schema:
    responses = {"200": answer("The state of the server.", ref(schema))}
    # Probes need no key, unless TOPICS_PROBE_AUTH requires one.
    return {
        "get": operation(operation_id, summary, responses, tag="server", scopes=None, codes=codes)
    }


def _shown(operation_id: str, summary: str, schema: Schema, media: str) -> Schema:
    responses = {"200": answer("The document.", schema, media)}
    return operation(operation_id, summary, responses, tag="server", scopes=None)


def _page_file(operation_id: str, summary: str) -> Schema:
    media = ("text/css", "text/javascript", "image/png", "image/svg+xml")
    kinds = {kind: {"schema": text()} for kind in media}
    return operation(
        operation_id,
        summary,
        {"200": {"description": "The file.", "content": kinds}},
        tag="server",
        scopes=None,
        codes=(Code.NOT_FOUND,),
    )
