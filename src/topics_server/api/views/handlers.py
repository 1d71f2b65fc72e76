"""Routes of views: PUT, state, list, DELETE, rebuild, stats, queries and live queries.

Plain functions of the server's state and one request. Called through the route table in
`api/routes`.
"""

from __future__ import annotations

from topics_server.api.context import ServerState
from topics_server.api.readiness import ConnectionSlot, admit, check_accepts_stream, until_ready
from topics_server.api.request import Answer, EventStream, Request, Response
from topics_server.api.topics.config_requests import ignored_members
from topics_server.api.views.live import LiveQuery
from topics_server.api.views.requests import (
    VIEW_MEMBERS,
    after_of,
    decode_query,
    decode_rebuild,
    decode_view,
    params_of,
    view_name,
)
from topics_server.api.views.responses import (
    render_dropped,
    render_put,
    render_rows,
    render_stats,
    render_view,
    render_views,
)
from topics_server.api.watch.sse import STREAM_HEADERS
from topics_server.values.errors import invalid
from topics_server.values.texts.query_string import parse_query
from topics_server.views.service import Views


def _admitted(state: ServerState) -> Views:
    """The views. Raises if the server takes no requests now."""
    admit(state)
    assert state.views is not None, "ready means there are views"
    return state.views


def _named(request: Request) -> str:
    return view_name(request.below[0], "view")


async def put_view(state: ServerState, request: Request) -> Response:
    """`PUT /v0/topics/{topic}/views/{view}`: define a view, or replace its definition."""
    views, name = _admitted(state), _named(request)
    definition = decode_view(request.body or b"{}")
    outcome = await views.put(request.name, name, definition)
    ignored = ignored_members(request.body, VIEW_MEMBERS)
    body = render_put(request.name, name, outcome, request.elapsed_ms(), ignored=ignored)
    return Response(201 if outcome.created else 200, body)


def get_view(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/views/{view}`: the definition and the progress of a view."""
    found = _admitted(state).get(request.name, _named(request))
    return Response(200, render_view(found, request.elapsed_ms()))


def list_views(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/views`: the views of a topic."""
    found = _admitted(state).of_topic(request.name)
    return Response(200, render_views(request.name, found, request.elapsed_ms()))


async def drop_view(state: ServerState, request: Request) -> Response:
    """`DELETE /v0/topics/{topic}/views/{view}`: delete the view; its topic stays."""
    name = _named(request)
    dropped = await _admitted(state).delete(request.name, name)
    return Response(200, render_dropped(request.name, name, dropped, request.elapsed_ms()))


def view_stats(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/views/{view}/stats`: the progress of a view."""
    found = _admitted(state).get(request.name, _named(request))
    return Response(200, render_stats(found, request.elapsed_ms()))


async def rebuild_view(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/views/{view}/rebuild`: build the view anew, or skip the failing
    record.
    """
    views, name = _admitted(state), _named(request)
    found = await views.rebuild(request.name, name, skip_seq=decode_rebuild(request.body))
    return Response(200, render_stats(found, request.elapsed_ms()))


async def query_view(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/views/{view}/query`: rows of an SQL statement or of a named
    query.
    """
    views, name = _admitted(state), _named(request)
    asked = decode_query(request.body)
    after = after_of(parse_query(request.query))
    sql = asked.sql
    if sql is None:
        assert asked.query is not None
        sql = views.named_query(request.name, name, asked.query)
    rows = await views.query(request.name, name, sql, asked.params, after=after)
    return Response(200, render_rows(name, rows, request.elapsed_ms()))


async def named_query(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/views/{view}/query/{query}`: rows of a named query, with an ETag."""
    views, name = _admitted(state), _named(request)
    asked = parse_query(request.query)
    query = view_name(request.below[1], "query")
    sql = views.named_query(request.name, name, query)
    after = after_of(asked)
    view = views.view(request.name, name)
    sent = request.headers.get(b"if-none-match", b"")
    # The tag identifies the build of the view that answered, and its progress.
    if sent and view.etag(sql).encode() in sent and (after is None or view.processed_seq >= after):
        return Response(304, b"", _cache_headers(view.etag(sql)))
    rows = await views.query(request.name, name, sql, params_of(asked), after=after)
    body = render_rows(name, rows, request.elapsed_ms())
    return Response(200, body, _cache_headers(view.etag(sql, rows.processed_seq)))


def _cache_headers(etag: str) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"etag", etag.encode("ascii")), (b"cache-control", b"private, no-cache"))


async def live(state: ServerState, request: Request) -> Answer:
    """`GET /v0/topics/{topic}/views/{view}/live?query=name`: the rows, sent again when they
    change.
    """
    check_accepts_stream(request.headers.get(b"accept"))
    asked = parse_query(request.query)
    await until_ready(state, request)
    views, name = _admitted(state), _named(request)
    query = asked.get("query")
    if query is None:
        raise invalid("query is missing: the name of a query of the view", "query")
    views.named_query(request.name, name, query)
    stream = LiveQuery(state, views, request.name, name, query, params_of(asked), request.caller)
    slot = ConnectionSlot(state, request.caller.key)
    return EventStream(STREAM_HEADERS, stream.run, slot.free)
