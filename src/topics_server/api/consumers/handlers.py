"""Routes of consumers: PUT, state, list, commit, DELETE.

Plain functions of the server's state and one request. A started change continues when its client
disconnects. Called through the route table in `api/routes`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from topics_server.api.consumers.requests import (
    COMMIT_MEMBERS,
    PUT_MEMBERS,
    consumer_of,
    decode_commit,
    decode_put,
)
from topics_server.api.context import ServerState
from topics_server.api.messages.requests import encode_cursor, query_cursor, query_page_size
from topics_server.api.messages.responses import render_json
from topics_server.api.readiness import admit
from topics_server.api.request import Request, Response
from topics_server.api.topics.config_requests import ignored_members
from topics_server.auth.authorize import check_scopes
from topics_server.engine.answers import ConsumerState
from topics_server.values.texts.key_list import ADMIN, READ, WRITE
from topics_server.values.texts.query_string import parse_query


def _shown(state: ConsumerState) -> dict[str, Any]:
    shown = msgspec.structs.asdict(state)
    shown["last_seen_ts"] = shown.pop("seen_ts")
    if state.hold is not None:
        shown["hold"] = msgspec.structs.asdict(state.hold)
    return shown


def _body_of(request: Request, shown: dict[str, Any], members: tuple[str, ...]) -> bytes:
    ignored = ignored_members(request.body, members)
    more = {"ignored": ignored} if ignored else {}
    return render_json(shown | more, request.elapsed_ms())


async def put(state: ServerState, request: Request) -> Response:
    """`PUT /v0/topics/{topic}/consumers/{consumer}`: make a consumer, unless it exists.

    `hold`, which lets the topic grow beyond its caps, needs `admin`.
    """
    store, consumer = admit(state), consumer_of(request.below)
    asked = decode_put(request.body)
    if asked.hold is not UNSET:
        check_scopes(request.caller, READ | WRITE | ADMIN)
    found, created = await store.put_consumer(request.name, consumer, asked.start, asked.hold)
    body = _body_of(request, _shown(found) | {"created": created}, PUT_MEMBERS)
    return Response(201 if created else 200, body)


def get(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/consumers/{consumer}`: the position of a consumer."""
    found = admit(state).consumer(request.name, consumer_of(request.below))
    return Response(200, render_json(_shown(found), request.elapsed_ms()))


def list_consumers(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/consumers`: a page of the topic's consumers in name order."""
    query = parse_query(request.query)
    found, after = admit(state).list_consumers(
        request.name, query_cursor(query), query_page_size(query)
    )
    shown: dict[str, Any] = {"topic": request.name, "consumers": [_shown(each) for each in found]}
    if after is not None:
        shown["next_cursor"] = encode_cursor(after)
    return Response(200, render_json(shown, request.elapsed_ms()))


async def commit(state: ServerState, request: Request) -> Response:
    """`POST …/consumers/{consumer}/commit`: store that a reader has handled all records up to a
    seq.
    """
    store, consumer = admit(state), consumer_of(request.below)
    asked = decode_commit(request.body)
    found, moved = await store.commit_consumer(
        request.name, consumer, asked.seq, rewind=asked.rewind, if_seq=asked.if_seq
    )
    return Response(200, _body_of(request, _shown(found) | {"moved": moved}, COMMIT_MEMBERS))


async def delete(state: ServerState, request: Request) -> Response:
    """`DELETE /v0/topics/{topic}/consumers/{consumer}`: forget a consumer."""
    store, consumer = admit(state), consumer_of(request.below)
    deleted = await store.delete_consumer(request.name, consumer)
    shown = {"topic": request.name, "consumer": consumer, "deleted": deleted}
    return Response(200, render_json(shown, request.elapsed_ms()))
