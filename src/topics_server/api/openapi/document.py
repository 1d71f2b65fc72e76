"""Builds the OpenAPI 3.1 document. Pure.

Held true by tests: its paths and methods are the route table's, its configuration fields and their
defaults the decoder's, its error codes the table's of `problems`, real answers fit its schemas, and
`docs/openapi.json` is this document. Served as `/v0/openapi.json`; `api/operate/reference` shows
it.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import msgspec

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
from topics_server.api.openapi.schemas import Schema, all_schemas, object_of, ref, text, u64
from topics_server.api.openapi.stream_operations import stream_paths
from topics_server.values.errors import Code
from topics_server.values.limits import PRODUCER_ID_CHARS_MAX, PRODUCER_NUMBER_MAX

_ABOUT: Final = (
    "A durable event log behind plain HTTP: append, read from any position, delete by tag, queues, "
    "routers, and streams of what is new.\n\n"
    "Every path also answers `OPTIONS` (204 with `Allow`), and `HEAD` where it answers `GET`. A "
    "method that a path does not have is 405 `method_not_allowed` with `Allow`; a path that is not "
    "listed here is 404 `not_found`. Every refusal has the same envelope, `Error`; clients branch "
    "on `error.code`. Fields may be added to requests and answers: ignore those that you do not "
    "know. A request with `Prefer: return=minimal` gets its answer without `performance`. "
    "The events of the streams and the messages of the WebSocket are described in `docs/FRAMES.md`."
)

_TAGS: Final = {
    "topics": "Make, configure, list and remove topics.",
    "records": "Append, read and delete records.",
    "queues": "Topics of type `queue`: leases of jobs to workers.",
    "routers": "Rules that copy what is appended to one topic into another.",
    "watch": "What is new, as it comes: server-sent events and WebSocket.",
    "streams": "Topics by the HTTP side of the Durable Streams protocol: `docs/STREAMS.md`.",
    "server": "Probes, figures and this description.",
}


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
            "description": _ABOUT,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "tags": [{"name": name, "description": about} for name, about in _TAGS.items()],
        "paths": (
            _topic_paths()
            | _record_paths()
            | _queue_paths()
            | _router_paths()
            | _watch_paths()
            | stream_paths()
            | _server_paths()
        ),
        "components": {**components(), "schemas": all_schemas()},
    }


_NAME: Final = in_path(
    "topic", "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$", "A topic's name; case counts."
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
            query("prefix", text(), "Only names that start with it."),
            *page_queries(),
            switch("touch", False, "Count as interest in the listed topics."),
        ),
    )
    one = {
        "put": _put_topic(),
        "patch": _patch_topic(),
        "get": _get_topic(),
        "delete": _drop_topic(),
        "post": _append(),
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
            "200": answer("It was there.", ref("PutResult")),
            "201": answer("It was created.", ref("PutResult")),
        },
        tag="topics",
        scopes=("admin",),
        codes=(
            *(*WRITES, *TAKES_BODY),
            *(Code.TOPIC_EXISTS_INCOMPATIBLE, Code.STREAM_CONFLICT),
        ),
        body=ref("TopicConfig"),
        is_body_required=False,
    )


def _patch_topic() -> Schema:
    return operation(
        "patchTopic",
        "Change single fields of a topic's configuration; null gives a field its default.",
        {"200": answer("The configuration now, and what has changed.", ref("PutResult"))},
        tag="topics",
        scopes=("admin",),
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND, Code.TOPIC_EXISTS_INCOMPATIBLE),
        body=ref("TopicConfigPatch"),
    )


def _get_topic() -> Schema:
    return operation(
        "getTopic",
        "The topic's state.",
        {"200": answer("The state.", ref("TopicState"))},
        tag="topics",
        scopes=("read",),
        codes=(*READS, Code.TOPIC_NOT_FOUND),
        parameters=(switch("touch", True, "Count as interest in the topic."),),
    )


def _drop_topic() -> Schema:
    return operation(
        "dropTopic",
        "Remove the topic with everything it holds, and its routers.",
        {"200": answer("It is gone.", ref("DropResult"))},
        tag="topics",
        scopes=("delete",),
        codes=(*WRITES, Code.TOPIC_NOT_EMPTY),
        parameters=(switch("if_empty", False, "Only if it holds no record."),),
    )


# --- records ----------------------------------------------------------------------------------


_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": PRODUCER_NUMBER_MAX}
# All three or none.
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
        "description": "One higher with each request; one that was accepted before stores nothing.",
    },
)


def _number_header(about: str) -> Schema:
    return {"schema": _NUMBER, "description": about}


_REPEATED: Final[Schema] = {
    "description": "A producer's request that was accepted before: nothing is stored.",
    "headers": {
        "Producer-Epoch": _number_header("The producer's epoch; of 200 and 201 too."),
        "Producer-Seq": _number_header("The highest seq accepted in it; of 200 and 201 too."),
        "Topic-First-Seq": _number_header("Where the last request accepted begins, if it is this."),
        "Topic-Last-Seq": _number_header("Where it ends."),
    },
}


def _append() -> Schema:
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
            *(*WRITES, *TAKES_BODY),
        ),
        body=ref("AppendRequest"),
        parameters=(
            switch("return_seqs", True, "Whether the answer lists `seqs`."),
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": text(minLength=1, maxLength=256),
                "description": "As `idempotency_key` of the body, which wins.",
            },
            *_PRODUCER,
        ),
    )


def _record_paths() -> Schema:
    read = operation(
        "readRecords",
        "The records after a cursor, waiting for new ones if asked to.",
        {"200": answer("A page of records.", ref("Page"))},
        tag="records",
        scopes=("read",),
        codes=(*READS, *TAKES_BODY, Code.TOPIC_NOT_FOUND),
        body=ref("DiffRequest"),
        is_body_required=False,
    )
    delete = operation(
        "deleteRecords",
        "Remove records by seq, by tag, or by both.",
        {"200": answer("The records are deleted.", ref("DeleteResult"))},
        tag="records",
        scopes=("delete",),
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND),
        body=ref("DeleteRequest"),
    )
    return {
        "/v0/topics/{topic}/diff": {"parameters": [_NAME], "post": read},
        "/v0/topics/{topic}/delete": {"parameters": [_NAME], "post": delete},
    }


# --- queues -----------------------------------------------------------------------------------

_NO_QUEUE: Final = (Code.TOPIC_NOT_FOUND, Code.NOT_A_QUEUE)
_WORKS: Final = ("read", "write")
# Verb, operation, summary, scopes and refusals of its own.
_VERBS: Final = (
    ("claim", "claimJobs", "Lease jobs to a node, waiting for the first if asked to.", _WORKS, ()),
    (
        *("ack", "ackJobs", "Complete leased jobs, which deletes them."),
        *(("write",), (Code.BATCH_TOO_LARGE,)),
    ),
    ("nack", "nackJobs", "Give leased jobs back.", ("write",), (Code.BATCH_TOO_LARGE,)),
    ("extend", "extendJobs", "Hold leased jobs for longer.", ("write",), (Code.BATCH_TOO_LARGE,)),
    (
        *("redrive", "redriveJobs", "Make dead letters of this queue jobs again."),
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
    # Last, as jobs come back only once some died.
    redrive = {path: posts.pop(path) for path in tuple(posts) if path.endswith("/redrive")}
    return {
        **posts,
        "/v0/topics/{topic}/leases": {"parameters": [_NAME], "get": leases},
        "/v0/topics/{topic}/work": {"parameters": [_NAME], "get": _work()},
        **redrive,
    }


def _work() -> Schema:
    node = query("node", text(minLength=1), "The worker that the jobs are leased to.")
    depth: Schema = {"type": "integer", "minimum": 1, "default": 1}
    return operation(
        "work",
        "Jobs as they arrive, at most `max` in flight; released when the stream ends.",
        {"200": answer("Server-sent events: `job`, `error`.", text(), STREAM)},
        tag="queues",
        scopes=_WORKS,
        codes=(*READS, *_NO_QUEUE, Code.NOT_ACCEPTABLE),
        parameters=(
            node | {"required": True},
            query("max", depth, "Jobs in flight."),
            query("lease_ms", u64(), "The topic's own by default; clamped."),
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
            query("prefix", text(), "Only names that start with it."),
            query("source", text(), "Only those of this source."),
            query("dest", text(), "Only those into this destination."),
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
            "200": answer("It was there.", ref("RouterPutResult")),
            "201": answer("It was created.", ref("RouterPutResult")),
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
        {"200": answer("Its state.", ref("RouterState"))},
        tag="routers",
        scopes=("read",),
        codes=(*READS, Code.ROUTER_NOT_FOUND),
    )


def _drop_router() -> Schema:
    return operation(
        "dropRouter",
        "Delete a router. The copies that it made stay.",
        {"200": answer("It is gone.", ref("RouterDropResult"))},
        tag="routers",
        scopes=("delete",),
        codes=WRITES,
    )


# --- watching ---------------------------------------------------------------------------------


def _watch_paths() -> Schema:
    wid = in_path("wid", "^wid_", "What `POST /v0/watch` answered.")
    return {
        "/v0/watch": {"post": _open_watch()},
        "/v0/watch/{wid}": {"parameters": [wid], "get": _watch()},
        "/v0/ws": {"get": _open_socket()},
    }


def _open_watch() -> Schema:
    return operation(
        "openWatch",
        "Make a watch session over several topics.",
        {"200": answer("The session, and where its stream is.", ref("WatchSession"))},
        tag="watch",
        scopes=("read",),
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND),
        body=ref("WatchRequest"),
        parameters=(
            switch("lenient", False, "Leave unknown topics out."),
            switch("ticket", False, "Give a ticket that opens the stream, once, without a key."),
        ),
    )


def _watch() -> Schema:
    last_id = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": text(),
        "description": "The last `id` received: go on after it. A malformed one is ignored.",
    }
    about = "Server-sent events: `record`, `tombstone`, `caught-up`, `topic-deleted`, `error`."
    return operation(
        "watch",
        "Open the stream of a session; its older stream is ended.",
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
        "One WebSocket to publish and to follow topics; a page's origin must be allowed.",
        {"101": {"description": "JSON text messages, either way."}},
        tag="watch",
        codes=READS,
    )


# --- the server itself ------------------------------------------------------------------------


def _server_paths() -> Schema:
    gated = (Code.NOT_READY, Code.SHUTTING_DOWN, Code.STORAGE_READ_ONLY)
    figures = {"text/plain": {"schema": text()}, JSON: {"schema": ref("Metrics")}}
    metrics = operation(
        "metrics",
        "Figures as Prometheus text, or as JSON for `Accept: application/json`.",
        {"200": {"description": "The figures.", "content": figures}},
        tag="server",
        scopes=("read",),
    )
    seal = operation(
        "seal",
        "Seal what topics hold now, so that their files show what a reader is shown.",
        {"200": answer("It is sealed; ephemeral records never are.", ref("SealResult"))},
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
        "What this server is, and lines to try; as HTML where `Accept` names it, else as text.",
        {"200": {"description": "The page.", "content": welcome}},
        tag="server",
        scopes=None,
    )
    return {
        "/": {"get": front},
        "/v0/health": _probe("health", "Liveness: the process is running.", "Health"),
        "/healthz": _probe("healthAlias", "As `/v0/health`.", "Health"),
        "/v0/ready": _probe(
            "ready", "Readiness: whether the server accepts requests.", "Ready", *gated
        ),
        "/readyz": _probe("readyAlias", "As `/v0/ready`.", "Ready", *gated),
        "/v0/metrics": {"get": metrics},
        "/v0/admin/seal": {"post": seal},
        "/v0/openapi.json": {"get": described},
        "/v0/docs": {"get": page},
        "/v0/docs/{file}": {
            "parameters": [in_path("file", "^[a-z-]+[.](css|js|png)$", "A file of the page.")],
            "get": _page_file(),
        },
    }


def _probe(operation_id: str, summary: str, schema: str, *codes: Code) -> Schema:
    told = {"200": answer("The figures.", ref(schema))}
    # Without a key, unless TOPICS_PROBE_AUTH asks for one.
    return {"get": operation(operation_id, summary, told, tag="server", scopes=None, codes=codes)}


def _shown(operation_id: str, summary: str, schema: Schema, media: str) -> Schema:
    told = {"200": answer("The document.", schema, media)}
    return operation(operation_id, summary, told, tag="server", scopes=None)


def _page_file() -> Schema:
    kinds = {media: {"schema": text()} for media in ("text/css", "text/javascript", "image/png")}
    return operation(
        "referenceFile",
        "A script, a style sheet or a picture of that page.",
        {"200": {"description": "The file.", "content": kinds}},
        tag="server",
        scopes=None,
        codes=(Code.NOT_FOUND,),
    )
