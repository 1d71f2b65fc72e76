"""The operations of materialized views in the OpenAPI document, and their schemas. Pure.

Used by `api/openapi/document`.
"""

from __future__ import annotations

from typing import Final

from topics_server.api.openapi.operations import (
    READS,
    STREAM,
    TAKES_BODY,
    WRITES,
    answer,
    in_path,
    operation,
    query,
)
from topics_server.api.openapi.schemas import Schema, boolean, list_of, object_of, ref, text, u64
from topics_server.values.errors import Code

_PATTERN: Final = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_NO_VIEW: Final = (Code.TOPIC_NOT_FOUND, Code.VIEW_NOT_FOUND)
_AFTER: Final = "A seq: the answer reflects that record, and every record before it."
_PARAMS: Final = "Values of the query's parameters: `p.name=value`, each a string."


def view_paths(topic: Schema) -> Schema:
    """The paths of views; `topic` is the parameter of the topic's name."""
    view = in_path("view", _PATTERN, "A view's name.")
    named = in_path("query", _PATTERN, "A name of the view's `queries`.")
    base = "/v0/topics/{topic}/views"
    both: Schema = {"parameters": [topic, view]}
    return {
        base: {"parameters": [topic], "get": _list()},
        f"{base}/{{view}}": both | {"delete": _drop(), "put": _put(), "get": _get()},
        f"{base}/{{view}}/stats": both | {"get": _stats()},
        f"{base}/{{view}}/query": both | {"post": _query()},
        f"{base}/{{view}}/query/{{query}}": {
            "parameters": [topic, view, named],
            "get": _named_query(),
        },
        f"{base}/{{view}}/live": both | {"get": _live()},
        f"{base}/{{view}}/rebuild": both | {"post": _rebuild()},
    }


def _list() -> Schema:
    return operation(
        "listViews",
        "The views of a topic, with the progress of each.",
        {"200": answer("The views.", ref("ViewList"))},
        tag="views",
        scopes=("read",),
        codes=(*READS, Code.TOPIC_NOT_FOUND),
    )


def _put() -> Schema:
    return operation(
        "putView",
        "Define or redefine a view; the old one answers until the new one has caught up.",
        {
            "200": answer("The view existed already.", ref("ViewPutResult")),
            "201": answer("The view was created.", ref("ViewPutResult")),
        },
        tag="views",
        scopes=("admin",),
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND, Code.QUERY_FAILED),
        body=ref("ViewRequest"),
    )


def _get() -> Schema:
    return operation(
        "getView",
        "A view's definition, with shortcuts as SQL, and its progress.",
        {"200": answer("The view.", ref("ViewResult"))},
        tag="views",
        scopes=("read",),
        codes=(*READS, *_NO_VIEW),
    )


def _drop() -> Schema:
    return operation(
        "dropView",
        "Delete a view and its tables. Its topic stays.",
        {"200": answer("The view was deleted.", ref("ViewDropResult"))},
        tag="views",
        scopes=("admin",),
        codes=WRITES,
    )


def _stats() -> Schema:
    return operation(
        "viewStats",
        "The progress of a view.",
        {"200": answer("The progress.", ref("ViewStatsResult"))},
        tag="views",
        scopes=("read",),
        codes=(*READS, *_NO_VIEW),
    )


def _rebuild() -> Schema:
    return operation(
        "rebuildView",
        "Rebuild a view beside the old one, or `skip` the record at which it stopped.",
        {"200": answer("The build has begun.", ref("ViewStatsResult"))},
        tag="views",
        scopes=("admin",),
        codes=(*READS, *TAKES_BODY, *_NO_VIEW),
        body=ref("ViewRebuildRequest"),
        is_body_required=False,
    )


def _query() -> Schema:
    return operation(
        "queryView",
        "The rows of a SELECT statement, or of a named query.",
        {"200": answer("The rows.", ref("ViewRows"))},
        tag="views",
        scopes=("read",),
        codes=(*READS, *TAKES_BODY, *_NO_VIEW, Code.QUERY_FAILED, Code.VIEW_TIMEOUT),
        body=ref("ViewQueryRequest"),
        parameters=(query("after", u64(), _AFTER),),
    )


def _named_query() -> Schema:
    rows = answer("The rows.", ref("ViewRows")) | {
        "headers": {
            "ETag": {
                "description": "Changes when the view has processed records.",
                "schema": text(),
            }
        }
    }
    return operation(
        "namedQuery",
        "The rows of a named query. " + _PARAMS,
        {
            "200": rows,
            "304": {
                "description": "The view has processed nothing since the `ETag` in `If-None-Match`."
            },
        },
        tag="views",
        scopes=("read",),
        codes=(*READS, *_NO_VIEW, Code.QUERY_FAILED, Code.VIEW_TIMEOUT),
        parameters=(query("after", u64(), _AFTER),),
    )


def _live() -> Schema:
    return operation(
        "liveQuery",
        "The rows of a named query, sent again when they change, at most ten times a second.",
        {"200": answer("Server-sent events: `rows`, `error`.", text(), STREAM)},
        tag="views",
        scopes=("read",),
        codes=(*READS, *_NO_VIEW, Code.NOT_ACCEPTABLE),
        parameters=(
            query("query", text(), "A name of the view's `queries`.") | {"required": True},
        ),
        in_url=("token",),
    )


def view_schemas() -> Schema:
    """The schemas that only views use."""
    performance = {"performance": ref("Performance")}
    statements = list_of(text())
    sql: Schema = {"anyOf": [text(), statements]}
    queries: Schema = {"type": "object", "additionalProperties": text()}
    deletes = text(
        "What happens when records of the topic are deleted: nothing, or a rebuild.",
        enum=["keep", "rebuild"],
        default="keep",
    )
    shortcut = object_of(
        "",
        latest_by_tag={"const": True},
        count_by_tag={"const": True},
        latest_by_key=text("A JSON pointer to the key, such as `/user/id`."),
        timeseries=object_of(
            "bucket",
            bucket={"anyOf": [{"type": "integer", "minimum": 1}, text("Such as `1m`.")]},
            sum=list_of(text("A JSON pointer to a number.")),
            by_tag=boolean(False),
        ),
    ) | {"description": "One of these instead of `schema` and `apply`.", "maxProperties": 1}
    defined = {
        "topic": text(),
        "view": text(),
        "schema": statements,
        "apply": statements,
        "queries": queries,
        "on_delete": deletes,
        "shortcut": shortcut,
    }
    most = " ".join(name for name in defined if name != "shortcut")
    failure = object_of("seq statement message", seq=u64(), statement=text(), message=text())
    stats = {
        "view_name": text(),
        "processed_sequence": u64("Every record up to it is in the view."),
        "leader_status": {"enum": ["ready", None]},
        "status": text(enum=["ready", "building", "failed", "waiting"]),
        "head_seq": u64(),
        "lag": u64("Records that are not in the view yet."),
        "known_from_seq": u64("Records below it were evicted before the view saw them."),
        "building_sequence": {"anyOf": [u64(), {"type": "null"}]},
        "bytes": u64("The size of the view's files."),
        "applied_total": u64(),
        "rebuilds_total": u64(),
        "last_error": {"anyOf": [failure, {"type": "null"}]},
    }
    stats_schema = object_of(" ".join(stats), **stats)
    params: Schema = {"anyOf": [object_of(""), {"type": "array"}]}
    created = {"created": boolean(), "changed": boolean(), "ignored": list_of(text())}
    return {
        "ViewRequest": object_of(
            "",
            schema=sql | {"description": "Statements that make the view's tables."},
            apply=sql
            | {
                "description": "Statements that run for each record, with `:seq`, `:ts`, `:node`, "
                "`:tag`, `:data` and `:meta`."
            },
            queries=queries,
            shortcut=shortcut,
            on_delete=deletes,
        ),
        "ViewPutResult": object_of(
            f"{most} created changed performance", **defined, **created, **performance
        ),
        "ViewResult": object_of(
            f"{most} stats performance", **defined, stats=stats_schema, **performance
        ),
        "ViewStatsResult": object_of(f"{' '.join(stats)} performance", **stats, **performance),
        "ViewList": object_of(
            "topic views performance",
            topic=text(),
            views=list_of(object_of("view stats", view=text(), stats=stats_schema)),
            **performance,
        ),
        "ViewDropResult": object_of(
            "topic view deleted performance",
            topic=text(),
            view=text(),
            deleted=boolean(),
            **performance,
        ),
        "ViewQueryRequest": object_of("", sql=text(), query=text(), params=params),
        "ViewRebuildRequest": object_of("", skip=u64("The seq at which the view stopped.")),
        "ViewRows": object_of(
            "view_name processed_sequence columns rows row_count truncated performance",
            view_name=text(),
            processed_sequence=u64("The rows reflect every record up to it."),
            columns=statements,
            rows=list_of({"type": "array"}),
            row_count=u64(),
            truncated=boolean(),
            **performance,
        ),
    }
