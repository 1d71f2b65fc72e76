"""The data plane: append (§2), diff with long-polling (§3), delete (§5).

Plain functions of the server's state and one request; each returns one response or raises
`TopicsError`. An append or delete that was begun goes on whether or not its client stays; a
long-poll whose client hangs up ends. Called through the route table in `api/app`.
"""

from __future__ import annotations

import asyncio

from topics_server.api.bodies import (
    decode_delete,
    decode_diff,
    decode_inline_config,
    header_key,
    parse_query,
    query_bool,
)
from topics_server.api.guard import admit
from topics_server.api.http import ClientGoneError, Request, Response
from topics_server.api.rendering import (
    page_performance,
    render_appended,
    render_deleted,
    render_page,
)
from topics_server.api.state import ServerState, Store
from topics_server.appends import decode_append
from topics_server.engine.answers import Page, ReadRequest


async def append(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}`: append one or many records."""
    store = admit(state)
    query = request.query
    with_seqs = query_bool(parse_query(query), "return_seqs", True) if query else True
    key = header_key(request.headers.get(b"idempotency-key"))
    decoded = decode_append(request.body)
    config = None
    if decoded.config is not None:
        config = decode_inline_config(decoded.config, request.name)
    done = await store.append(request.name, request.body, decoded, header_key=key, config=config)
    body = render_appended(request.name, done, with_seqs=with_seqs, total_ms=request.elapsed_ms())
    return Response(201 if done.created else 200, body)


async def diff(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/diff`: the records after a cursor."""
    store = admit(state)
    asked, shown = decode_diff(request.body, state.settings.max_limit)
    if asked.wait_ms:
        page = await _wait(store, request, asked)
    else:
        page = await store.read(request.name, asked)
    parts = render_page(request.name, page, shown, state.rendered)
    parts.append(page_performance(request.elapsed_ms(), page.scanned))
    return Response(200, b"".join(parts))


async def _wait(store: Store, request: Request, asked: ReadRequest) -> Page:
    """A long-poll's page; raises `ClientGoneError` as soon as nobody waits for it."""
    reading = asyncio.ensure_future(store.read(request.name, asked))
    leaving = asyncio.ensure_future(request.gone())
    try:
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ClientGoneError
        return reading.result()
    finally:
        reading.cancel()
        leaving.cancel()


async def delete(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/delete`: remove records by seq, by tag, or both."""
    store = admit(state)
    asked = decode_delete(request.body)
    done = await store.delete(request.name, before_seq=asked.before_seq, match=asked.match)
    return Response(200, render_deleted(request.name, done, request.elapsed_ms()))
