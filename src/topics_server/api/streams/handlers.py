"""Durable Streams routes: PUT, POST, GET, HEAD, DELETE under `/v1/stream`.

Plain functions of the server's state and one request. `request_headers` decodes a request, `pages`
renders a page, and the stream service holds the rules. A started write continues when its client
disconnects; a long-poll ends. A key needs `write` to create, append and close, `read` to read and
also to fork, `delete` to delete. Called through the route table in `api/routes`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any, Final

import msgspec

from topics_server.api.context import ServerState
from topics_server.api.messages.path_names import stream_url_path
from topics_server.api.messages.producer_headers import accepted_lines, stamp_of
from topics_server.api.readiness import ConnectionSlot, admit
from topics_server.api.request import (
    Answer,
    EventStream,
    Pending,
    Receive,
    Request,
    Response,
    Send,
    held_by,
)
from topics_server.api.streams.frames import headers_of
from topics_server.api.streams.live_reader import Follower
from topics_server.api.streams.pages import (
    body_of,
    closed_header,
    cursor_after,
    is_known,
    keeping,
    life_headers,
    offset_header,
    page_headers,
    tag_of,
    tag_of_range,
)
from topics_server.api.streams.request_headers import (
    NEXT_OFFSET,
    ReadAsked,
    append_asked,
    check_unconditional,
    closes,
    create_asked,
    read_asked,
    resumed_at,
)
from topics_server.api.streams.whole_reader import WholeReader
from topics_server.api.waiting_turn import WaitingTurn
from topics_server.auth.authorize import check_name, check_scopes
from topics_server.http.error_responses import Headers
from topics_server.http.responses import lines_of, wants_gzip
from topics_server.runtime.clock import now_ms, random_u64
from topics_server.streams.offsets import text_of
from topics_server.streams.paths import topic_of
from topics_server.streams.service import Streams
from topics_server.streams.values import (
    AppendAsked,
    Position,
    StreamAppended,
    StreamPage,
    StreamView,
)
from topics_server.values.errors import invalid
from topics_server.values.limits import LARGE_APPEND_BYTES_MIN
from topics_server.values.texts.key_list import READ

_OFFSET_LINE: Final = NEXT_OFFSET + b": %b\r\n"
_NO_STORE: Final = (b"cache-control", b"no-store")


def _admitted(state: ServerState) -> Streams:
    """The stream service. Raises if the server takes no requests now."""
    admit(state)
    assert state.streams is not None, "ready means there are streams"
    return state.streams


async def _turn(state: ServerState, request: Request) -> None:
    """Wait for a turn under pressure, like an append to the stream's topic."""
    if state.throttle.is_active:
        name = topic_of(request.name)
        if request.method == "POST" or not state.throttle.passes(name):
            await state.throttle.turn(name, len(request.body))
            if request.body:
                await state.body_turns.turn(len(request.body))


# --- writing ----------------------------------------------------------------------------------


async def create(state: ServerState, request: Request) -> Response:
    """`PUT {mount}/{path}`: create a stream, or accept an existing one that is equal."""
    streams = _admitted(state)
    mount = request.prefix.decode("latin-1") + state.settings.streams_path
    asked = create_asked(request.headers, request.body, mount)
    if asked.fork is not None:
        # A fork also needs the right to read, because it shows the records of its source.
        check_scopes(request.caller, READ)
        check_name(request.caller, asked.fork.source_path, "Stream-Forked-From")
    await _turn(state, request)
    done = await streams.create(request.name, asked)
    view = done.view
    varying = lines_of(offset_header(view.tail))
    if done.is_new:
        varying += lines_of((b"location", _url(request, mount)))
    return Response(
        201 if done.is_new else 200,
        b"",
        closed_header(view.is_closed),
        content_type=view.content_type.encode("latin-1"),
        varying=varying,
    )


def _url(request: Request, mount: str) -> bytes:
    """The stream's URL from the client's view. A proxy in front may report TLS."""
    path = stream_url_path(mount, request.name).encode("ascii")
    host = request.headers.get(b"host")
    if host is None:
        return path
    is_https = request.headers.get(b"x-forwarded-proto", b"").strip().lower() == b"https"
    return (b"https://" if is_https else b"http://") + host + path


def append(state: ServerState, request: Request) -> Pending | Coroutine[Any, Any, Response]:
    """`POST {mount}/{path}`: append to a stream, close it, or both."""
    admit(state)
    if not 0 < len(request.body) <= LARGE_APPEND_BYTES_MIN:
        return _append_slowly(state, request)
    # A request with wrong headers is refused at once, also under pressure.
    asked = append_asked(request.headers)
    is_in_turn = state.throttle.is_active
    if is_in_turn:
        topic = topic_of(request.name)
        if not state.throttle.passes(topic):
            waiting = WaitingTurn(state, request, topic, partial(_begin_append, state, asked))
            return Pending(waiting.when_resolved, waiting.answer)
    # A request that the throttle lets through at once must not wait for this turn's group either.
    return _begin_append(state, asked, request, flush_now=is_in_turn)


def _begin_append(
    state: ServerState, asked: AppendAsked, request: Request, *, flush_now: bool = False
) -> Pending | Coroutine[Any, Any, Response]:
    streams = _admitted(state)
    appending = streams.begin_append(request.name, request.body, asked, flush_now=flush_now)
    if appending is None:
        return _append_slowly(state, request)
    status = 204 if asked.producer is None else 200
    return Pending(appending.when_resolved, lambda: _appended(appending.outcome(), status))


async def _append_slowly(state: ServerState, request: Request) -> Response:
    """A close, or an append that waits not only for its write."""
    streams = _admitted(state)
    if request.body:
        asked = append_asked(request.headers)
        if request.throttle_wait_ms is None:
            await _turn(state, request)
        done = await streams.append(request.name, request.body, asked)
        is_counted = asked.producer is not None and not done.is_repeat
        return _appended(done, 200 if is_counted else 204)
    if not closes(request.headers):
        raise invalid("an append needs a body; Stream-Closed: true alone closes the stream")
    check_unconditional(request.headers)
    producer = stamp_of(request.headers)
    await _turn(state, request)
    return _appended(await streams.close(request.name, producer), 204)


def _appended(done: StreamAppended, status: int) -> Response:
    varying = _OFFSET_LINE % text_of(done.tail).encode("ascii")
    if done.epoch is not None and done.seq is not None:
        varying += accepted_lines(done.epoch, done.seq)
    headers = closed_header(done.is_closed)
    return Response(status, b"", headers, content_type=b"", varying=varying)


async def delete(state: ServerState, request: Request) -> Response:
    """`DELETE {mount}/{path}`: drop a stream with all its messages."""
    streams = _admitted(state)
    check_unconditional(request.headers)
    await streams.delete(request.name)
    return Response(204, b"")


# --- reading ----------------------------------------------------------------------------------


def read(state: ServerState, request: Request) -> Answer | Coroutine[Any, Any, Answer]:
    """`GET {mount}/{path}`: a page of a stream, at once or by long-poll, or its events."""
    streams = _admitted(state)
    if request.method == "HEAD":
        return _head(streams.head(request.name))
    if state.throttle.is_active:
        return _read_slowly(state, request)
    asked = read_asked(request.query)
    if asked.live or asked.at is None:
        return _read_slowly(state, request)
    most = state.settings.streams_page_bytes
    page = streams.read_resident(request.name, asked.at, most, explicit=asked.explicit)
    if page is None or not page.is_up_to_date:
        return _read_slowly(state, request)
    return _caught_up(state, request, asked, page)


async def _read_slowly(state: ServerState, request: Request) -> Answer:
    """A read that waits, that needs the disk, or that has no end (events)."""
    streams = _admitted(state)
    asked = read_asked(request.query)
    await _turn(state, request)
    if asked.live == "sse":
        resumed = resumed_at(asked, request.headers.get(b"last-event-id"))
        return await _follow(state, request, streams, resumed or asked, is_resumed=bool(resumed))
    if asked.live == "long-poll":
        return await _wait(state, request, streams, asked)
    if asked.at is None:
        end = _end((await _read(state, request, streams, asked)).view)
        return _page(state, request, end, (_NO_STORE,), lines_of(offset_header(end.next)))
    page = await _read(state, request, streams, asked)
    if not page.is_up_to_date:
        until = streams.reach(request.name, page)
        if until > page.next:
            return _whole(state, request, streams, asked, page, until)
    return _caught_up(state, request, asked, page)


def _caught_up(
    state: ServerState, request: Request, asked: ReadAsked, page: StreamPage
) -> Response:
    """A page, without waiting for records."""
    start = asked.at if asked.explicit else None
    tag = tag_of(page, start)
    headers = (keeping(is_final=page.is_closed, is_private=state.keys.is_on),)
    varying = lines_of(offset_header(page.next), (b"etag", tag))
    if is_known(request.headers, tag):
        return Response(304, b"", headers + page_headers(page), varying=varying)
    return _page(state, request, page, headers, varying)


def _whole(
    state: ServerState,
    request: Request,
    streams: Streams,
    asked: ReadAsked,
    page: StreamPage,
    end: Position,
) -> Answer:
    """All pages up to the stream's current end, or up to a loss."""
    whole = msgspec.structs.replace(
        page,
        next=end,
        is_up_to_date=end == page.view.tail,
        is_closed=page.view.is_closed and end == page.view.tail,
    )
    start = asked.at if asked.explicit else None
    tag = tag_of_range(whole, start, streams.count(request.name, start, end))
    headers: Headers = (
        keeping(is_final=whole.is_closed, is_private=state.keys.is_on),
        *page_headers(whole),
        offset_header(end),
        (b"etag", tag),
    )
    if is_known(request.headers, tag):
        return Response(304, b"", headers)
    slot = ConnectionSlot(state, request.caller.key)
    reader = WholeReader(state, streams, request.name, page, None, request.caller)
    reader.upto_seq = end.seq
    sent_headers = ((b"content-type", page.view.content_type.encode("latin-1")), *headers)
    return EventStream(sent_headers, reader.run, slot.free)


def _head(view: StreamView) -> EventStream:
    """The headers of a stream. The answer to a HEAD has no Content-Length."""
    sent_headers: Headers = (
        (b"content-type", view.content_type.encode("latin-1")),
        _NO_STORE,
        *life_headers(view),
        *closed_header(view.is_closed),
        offset_header(view.tail),
    )
    return EventStream(sent_headers, _nothing, _free_nothing)


async def _nothing(_receive: Receive, _send: Send) -> None:
    """The empty body of a HEAD."""


def _free_nothing() -> None:
    """A HEAD holds nothing, so there is nothing to free."""


def _end(view: StreamView) -> StreamPage:
    """The page behind a stream's last message."""
    return StreamPage(view, (), (), view.tail, is_up_to_date=True, is_closed=view.is_closed)


def _read(
    state: ServerState, request: Request, streams: Streams, asked: ReadAsked
) -> Awaitable[StreamPage]:
    """The page after the requested offset.

    Reading at the end counts as a use of the stream, too.
    """
    most = state.settings.streams_page_bytes
    if asked.at is None:
        return streams.read(request.name, streams.head(request.name).tail, most, explicit=True)
    return streams.read(request.name, asked.at, most, explicit=asked.explicit)


def _page(
    state: ServerState, request: Request, page: StreamPage, headers: Headers, varying: bytes
) -> Response:
    body = body_of(page)
    # A compressed response adds `accept-encoding` itself, and a response to a listed origin adds
    # `origin`.
    vary = [] if wants_gzip(len(body), request.headers) else [b"accept-encoding"]
    origins = state.settings.allowed_origins
    if origins and request.headers.get(b"origin") not in origins:
        vary.append(b"origin")
    if vary:
        headers += ((b"vary", b", ".join(vary)),)
    return Response(
        200,
        body,
        headers + page_headers(page),
        content_type=page.view.content_type.encode("latin-1"),
        varying=varying,
    )


async def _wait(
    state: ServerState, request: Request, streams: Streams, asked: ReadAsked
) -> Response:
    """A long-poll: the records that exist, or those that arrive in time; 204 if there are none."""
    page = None
    at = asked.at
    if at is None:
        at = streams.head(request.name).tail
    elif not asked.explicit:
        page = await _read(state, request, streams, asked)
        at = page.next
    if page is None or not (page.datas or page.is_closed):
        settings = state.settings
        page = await held_by(
            request,
            streams.wait(
                request.name, at, settings.streams_page_bytes, settings.streams_long_poll_ms
            ),
        )
    cursor = cursor_after(asked.cursor, now_ms(), random_u64())
    varying = lines_of(offset_header(page.next), (b"stream-cursor", b"%d" % cursor))
    if page.datas:
        start = asked.at if asked.explicit else None
        varying += lines_of((b"etag", tag_of(page, start)))
        return _page(state, request, page, (_NO_STORE,), varying)
    return Response(204, b"", page_headers(page), varying=varying)


async def _follow(
    state: ServerState,
    request: Request,
    streams: Streams,
    asked: ReadAsked,
    *,
    is_resumed: bool,
) -> Answer:
    """The events of a stream; errors are reported before the events begin.

    A browser that has read a closed stream to its end gets 204; otherwise it would reconnect for
    ever.
    """
    page = await _read(state, request, streams, asked)
    if is_resumed and page.is_closed and not page.datas:
        return Response(204, b"", (_NO_STORE, *page_headers(page), offset_header(page.next)))
    # Check again: reading the page may have waited.
    admit(state)
    slot = ConnectionSlot(state, request.caller.key)
    follower = Follower(state, streams, request.name, page, asked.cursor, request.caller)
    return EventStream(headers_of(page.view), follower.run, slot.free)
