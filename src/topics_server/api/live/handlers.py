"""The live routes: `GET …/live` opens a stream, `POST …/live` gives a ticket for it.

A browser's `EventSource` cannot send a key in a header. So a client with a key requests a ticket by
a POST to the stream's URL; the answer holds the URL with the ticket. Called through the route table
in `api/routes`; loop thread only.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote_plus

from topics_server.api.context import ServerState
from topics_server.api.live.requests import LiveRequest, decode_live
from topics_server.api.live.stream import LiveStream
from topics_server.api.messages.responses import render_json
from topics_server.api.readiness import ConnectionSlot, admit, check_accepts_stream, until_ready
from topics_server.api.request import Answer, EventStream, Receive, Request, Response, Send
from topics_server.api.watch.sse import STREAM_HEADERS
from topics_server.auth.authorize import check_name, check_scopes
from topics_server.auth.live_tickets import LIVE_TICKET_TTL_MS, issue, subscription_of
from topics_server.runtime.clock import now_ms
from topics_server.values.texts.key_list import READ, WRITE

_PROOFS: Final = ("ticket", "token")


async def stream(state: ServerState, request: Request) -> Answer:
    """`GET /v0/topics/{topic}/live`, `GET /v0/live`: the events of topics as they happen."""
    check_accepts_stream(request.headers.get(b"accept"))
    sent = _decoded(state, request, request.headers.get(b"last-event-id"))
    await until_ready(state, request)
    if request.method == "HEAD":
        if sent.read_as is not None and sent.positions is None:
            admit(state).consumer(request.name, sent.read_as.consumer)
        return EventStream(STREAM_HEADERS, _nothing, ConnectionSlot(state, request.caller.key).free)
    live = LiveStream(state, sent, request.caller)
    try:
        await live.begin()
    except BaseException:
        live.free()
        raise
    return EventStream(STREAM_HEADERS, live.run, live.free)


def issue_ticket(state: ServerState, request: Request) -> Response:
    """`POST` of the same URL: the URL with a ticket, for clients that cannot send a key."""
    admit(state)
    _decoded(state, request, None)
    path = f"/v0/topics/{request.name}/live" if request.name else "/v0/live"
    query = request.query.decode("ascii")
    fields: dict[str, object] = {}
    key = request.caller.key
    if key is not None:
        subscription = subscription_of(request.name, request.query)
        ticket = issue(key, subscription, now_ms())
        query = "&".join((*_without_proof(query), f"ticket={ticket}"))
        fields = {"ticket": ticket, "ticket_ttl_ms": LIVE_TICKET_TTL_MS}
    url = f"{path}?{query}" if query else path
    return Response(200, render_json({"stream_url": url, **fields}, request.elapsed_ms()))


def _decoded(state: ServerState, request: Request, last_id: bytes | None) -> LiveRequest:
    """The decoded request. Raises `forbidden` if the caller may not read all its topics."""
    sent = decode_live(request.query, request.name, last_id, state.settings)
    if sent.read_as is not None and sent.read_as.commits:
        check_scopes(request.caller, READ | WRITE)
    for name in sent.topics:
        check_name(request.caller, name, "topics")
    for prefix in sent.prefixes:
        check_name(request.caller, prefix, "prefix")
    return sent


def _without_proof(query: str) -> list[str]:
    """A query without `ticket` and `token`: of two tickets the server would read the first."""
    parts = query.split("&") if query else []
    return [part for part in parts if unquote_plus(part.partition("=")[0]) not in _PROOFS]


async def _nothing(_receive: Receive, _send: Send) -> None:
    """The empty body of a HEAD."""
