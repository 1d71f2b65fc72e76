"""Router routes (§6): PUT, state, list, DELETE.

Plain functions of the server's state and one request. Called through the route table in
`api/routes`.
"""

from __future__ import annotations

from topics_server.api.context import Routers, ServerState
from topics_server.api.messages.requests import encode_cursor
from topics_server.api.messages.responses import (
    render_router,
    render_router_dropped,
    render_router_put,
    render_routers,
)
from topics_server.api.messages.visibility import check_router, shown_conflict
from topics_server.api.readiness import admit
from topics_server.api.request import Request, Response
from topics_server.api.routers.requests import ROUTER_MEMBERS, decode_router, query_routers
from topics_server.api.topics.config_requests import ignored_members
from topics_server.auth.authorize import check_name
from topics_server.values.errors import Code, TopicsError
from topics_server.values.texts.query_string import parse_query


def _admitted(state: ServerState) -> Routers:
    """The routers. Raises if the server takes no requests now."""
    admit(state)
    assert state.routers is not None, "ready means there are routers"
    return state.routers


async def put_router(state: ServerState, request: Request) -> Response:
    """`PUT /v0/routers/{router}`: create a router or replace its definition; no body is `{}`."""
    routers = _admitted(state)
    spec = decode_router(request.body or b"{}")
    check_name(request.caller, spec.definition.source, "source")
    check_name(request.caller, spec.definition.dest, "dest")
    _check_known(routers, request)
    try:
        outcome = await routers.put(request.name, spec)
    except TopicsError as error:
        raise shown_conflict(request.caller, error) from None
    ignored = ignored_members(request.body, ROUTER_MEMBERS)
    body = render_router_put(request.name, outcome, request.elapsed_ms(), ignored=ignored)
    return Response(201 if outcome.created else 200, body)


def get_router(state: ServerState, request: Request) -> Response:
    """`GET /v0/routers/{router}`: its definition and its progress."""
    found = _admitted(state).get(request.name)
    check_router(request.caller, found.name, found.definition)
    return Response(200, render_router(found, request.elapsed_ms()))


def list_routers(state: ServerState, request: Request) -> Response:
    """`GET /v0/routers`: a page of routers in name order."""
    routers = _admitted(state)
    asked = query_routers(parse_query(request.query))
    page = routers.page(
        prefix=asked.prefix,
        source=asked.source,
        dest=asked.dest,
        after=asked.after,
        page_size=asked.page_size,
        may_name=request.caller.may_name if request.caller.prefixes else None,
    )
    cursor = None if page.next_after is None else encode_cursor(page.next_after)
    return Response(200, render_routers(page, cursor, request.elapsed_ms()))


async def drop_router(state: ServerState, request: Request) -> Response:
    """`DELETE /v0/routers/{router}`: stops copying; its copies stay."""
    routers = _admitted(state)
    _check_known(routers, request)
    dropped = await routers.delete(request.name)
    return Response(200, render_router_dropped(request.name, dropped, request.elapsed_ms()))


def _check_known(routers: Routers, request: Request) -> None:
    """Raise `forbidden` if the existing router uses a name that the caller may not use."""
    if not request.caller.prefixes:
        return
    try:
        found = routers.get(request.name)
    except TopicsError as error:
        if error.code is not Code.ROUTER_NOT_FOUND:
            raise
    else:
        check_router(request.caller, found.name, found.definition)
