"""Topic routes: PUT, PATCH, state, list, DELETE (§1).

Plain functions of the server's state and one request. Called through the route table in
`api/routes`.
"""

from __future__ import annotations

from functools import partial

import msgspec

from topics_server.api.context import Routers, ServerState
from topics_server.api.messages.conditions import condition_of_body, topic_tag
from topics_server.api.messages.requests import (
    decode_config,
    encode_cursor,
    query_bool,
    query_cursor,
    query_page_size,
)
from topics_server.api.messages.responses import (
    render_dropped,
    render_put,
    render_state,
    render_topics,
    with_condition_met,
)
from topics_server.api.messages.visibility import check_config, sees_router, shown_state
from topics_server.api.messages.visibility import list_topics as visible_topics
from topics_server.api.readiness import admit
from topics_server.api.request import Request, Response
from topics_server.api.topics.config_requests import (
    CONFIG_MEMBERS,
    decode_config_patch,
    ignored_members,
)
from topics_server.engine.answers import PutOutcome
from topics_server.engine.topic.writes.condition import ConditionCheck
from topics_server.http.responses import lines_of
from topics_server.values.errors import topic_not_found
from topics_server.values.model import TopicConfig
from topics_server.values.texts.query_string import parse_query


async def put_topic(state: ServerState, request: Request) -> Response:
    """`PUT /v0/topics/{topic}`: create a topic or replace its configuration; no body is `{}`."""
    store = admit(state)
    asked = decode_config(request.body or b"{}", request.name)
    check_config(request.caller, asked.config)
    check = _check_of(state, request)
    attempt = partial(
        store.put_topic, request.name, asked.config, keep_type=asked.keep_type, check=check
    )
    outcome = await store.decided(check, attempt)
    return _configured(state, request, outcome, check)


async def patch_topic(state: ServerState, request: Request) -> Response:
    """`PATCH /v0/topics/{topic}`: change single fields of a topic's configuration."""
    store = admit(state)
    merged = decode_config_patch(request.body, request.name)
    check = _check_of(state, request)

    def change(config: TopicConfig | None) -> TopicConfig:
        if config is None:
            raise topic_not_found(request.name)
        changed = merged(config)
        check_config(request.caller, changed)
        return changed

    attempt = partial(store.configure, request.name, change, check=check)
    outcome = await store.decided(check, attempt)
    return _configured(state, request, outcome, check)


def _configured(
    state: ServerState, request: Request, outcome: PutOutcome, check: ConditionCheck | None
) -> Response:
    if state.queues is not None:
        state.queues.configured(request.name, outcome.config)
    ignored = ignored_members(request.body, (*CONFIG_MEMBERS, "if"))
    body = render_put(request.name, outcome, request.elapsed_ms(), ignored=ignored)
    if check is not None:
        body = with_condition_met(body)
    return Response(201 if outcome.created else 200, body)


def _check_of(state: ServerState, request: Request) -> ConditionCheck | None:
    """The check of the request's condition; None without a condition."""
    most = state.settings.max_node_bytes
    condition = condition_of_body(request.body, request.headers, request.caller, most)
    return None if condition is None else admit(state).check_of(condition)


def get_topic(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}`: the topic's state."""
    store = admit(state)
    touch = query_bool(parse_query(request.query), "touch", True)
    found = store.state(request.name, touch=touch)
    shown = shown_state(request.caller, found)
    etag = lines_of((b"etag", topic_tag(found.epoch, found.head_seq)))
    return Response(200, render_state(shown, request.elapsed_ms()), varying=etag)


def list_topics(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics`: a page of topics in name order."""
    store = admit(state)
    query = parse_query(request.query)
    page = visible_topics(
        store,
        request.caller,
        prefix=query.get("prefix", ""),
        after=query_cursor(query),
        page_size=query_page_size(query),
        touch=query_bool(query, "touch", False),
    )
    cursor = None if page.next_after is None else encode_cursor(page.next_after)
    return Response(200, render_topics(page, cursor, request.elapsed_ms()))


async def drop_topic(state: ServerState, request: Request) -> Response:
    """`DELETE /v0/topics/{topic}`: drop the topic with all its records."""
    store = admit(state)
    if_empty = query_bool(parse_query(request.query), "if_empty", False)
    # The routers are deleted with the topic, so list them first.
    routers = [] if state.routers is None else _routers_of(state.routers, request)
    # This request has no body, so only the header can hold a condition.
    check = _check_of(state, msgspec.structs.replace(request, body=b""))
    attempt = partial(store.drop_topic, request.name, if_empty=if_empty, check=check)
    dropped = await store.decided(check, attempt)
    removed = routers if dropped else []
    body = render_dropped(request.name, dropped, removed, request.elapsed_ms())
    return Response(200, body if check is None else with_condition_met(body))


def _routers_of(routers: Routers, request: Request) -> list[str]:
    """Names of the topic's routers that the caller may see."""
    names, caller = routers.routers_of(request.name), request.caller
    if not caller.prefixes:
        return names
    return [name for name in names if sees_router(caller, name, routers.get(name).definition)]
