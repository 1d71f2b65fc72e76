"""Record routes: append (§2), diff with long-polling (§3), delete (§5).

Plain functions of the server's state and one request; each returns one response or raises
`TopicsError`. An append or delete that was begun goes on whether or not its client stays; a
long-poll whose client hangs up ends. `append` and `diff` have a quick form each, which does the
same by the same functions where nothing has to be waited for. Called through the route table in
`api/routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from topics_server.api.application import Request, Response, Underway
from topics_server.api.client_wait import held_by
from topics_server.api.context import ServerState
from topics_server.api.messages.producer_headers import stamp_of, told_of
from topics_server.api.messages.requests import (
    decode_delete,
    decode_diff,
    decode_inline_config,
    header_key,
    query_bool,
)
from topics_server.api.messages.responses import (
    page_performance,
    render_appended,
    render_deleted,
    render_page,
)
from topics_server.api.readiness import admit
from topics_server.api.visibility import check_config
from topics_server.engine.answers import Appended, Page, ReadRequest
from topics_server.values.appends import DecodedAppend, decode_append
from topics_server.values.errors import StorageError, TopicsError
from topics_server.values.limits import LARGE_APPEND_BYTES_MIN
from topics_server.values.model import ProducerStamp
from topics_server.values.query_string import parse_query


class _Append(msgspec.Struct, frozen=True, gc=False):
    """An append as asked for."""

    decoded: DecodedAppend
    key: str | None
    producer: ProducerStamp | None
    with_seqs: bool


def _asked_append(
    state: ServerState, request: Request, decoded: DecodedAppend | None = None
) -> _Append:
    """What an append asks for; `decoded` is its body, if that was decoded already."""
    query = request.query
    with_seqs = query_bool(parse_query(query), "return_seqs", True) if query else True
    producer = stamp_of(request.headers)
    if decoded is None:
        decoded = decode_append(request.body, max_records=state.settings.max_batch_records)
    key = None
    if decoded.idempotency_key is None:
        # The body's wins, whatever the header's is (§0.8).
        key = header_key(request.headers.get(b"idempotency-key"))
    return _Append(decoded, key, producer, with_seqs)


def _appended(request: Request, asked: _Append, done: Appended) -> Response:
    told = b"" if asked.producer is None else told_of(asked.producer, done)
    if done.repeat is not None:
        return Response(204, b"", varying=told)
    total_ms = request.elapsed_ms()
    body = render_appended(request.name, done, with_seqs=asked.with_seqs, total_ms=total_ms)
    return Response(201 if done.created else 200, body, varying=told)


async def append(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}`: append one or many records."""
    store = admit(state)
    body = request.body
    decoded = None
    if state.large_appends.takes(body):
        decoded = await state.large_appends.decode(body)
    if state.throttle.is_active and request.parked_ms is None:
        insists = _insists(state, body) if decoded is None else decoded.disable_backpressure
        request.parked_ms = await state.throttle.turn(request.name, len(body), insists=insists)
    asked = _asked_append(state, request, decoded)
    decoded = asked.decoded
    config = None
    if decoded.config is not None:
        config = decode_inline_config(decoded.config, request.name)
        check_config(request.caller, config, "config.")
    done = await store.append(
        request.name,
        request.body,
        decoded,
        header_key=asked.key,
        config=config,
        producer=asked.producer,
    )
    if request.parked_ms:
        done = msgspec.structs.replace(done, parked_ms=done.parked_ms + request.parked_ms)
    return _appended(request, asked, done)


def append_now(state: ServerState, request: Request) -> Underway | None:
    """The quick form of `append`: to a topic that is there, without a configuration."""
    if len(request.body) > LARGE_APPEND_BYTES_MIN:
        return None
    throttle = state.throttle
    is_in_turn = throttle.is_active and request.parked_ms is None
    if is_in_turn and not throttle.passes(request.name):
        admit(state)
        parked = _ParkedAppend(state, request)
        return Underway(parked.when_settled, parked.answer)
    # Whoever passes by all that wait does not wait for what they brought in this turn.
    return _append_now(state, request, hurries=is_in_turn)


def _insists(state: ServerState, body: bytes) -> bool:
    """Whether an append is not to be refused for pressure; raises what decoding it raises."""
    # Anywhere in what it carries; few have it, and only those are decoded before their turn.
    if b'"disable_backpressure"' not in body:
        return False
    return decode_append(body, max_records=state.settings.max_batch_records).disable_backpressure


class _ParkedAppend:
    """A quick append that waits for its turn, and is begun then.

    It refers to who is told, who refers to it: what is over is forgotten at once, for the collector
    does not look.
    """

    def __init__(self, state: ServerState, request: Request) -> None:
        self._state = state
        self._request: Request | None = request
        self._told: Callable[[], object] | None = None
        self._answer: Callable[[], Response] | None = None
        body = request.body
        self._place = state.throttle.park(request.name, len(body), insists=_insists(state, body))
        self._place.over = self._begin

    def when_settled(self, told: Callable[[], object]) -> None:
        """Call `told` once there is an outcome."""
        self._told = told

    def _begin(self) -> None:
        place, state = self._place, self._state
        request, self._request = self._request, None
        told, self._told = self._told, None
        assert request is not None
        assert told is not None
        if place.is_refused:
            self._answer = partial(_refuse, state.throttle.refusal(place))
            told()
            return
        request.parked_ms = place.waited_ms
        try:
            inner = _append_now(state, request)
        except (TopicsError, StorageError) as error:
            self._answer = partial(_refuse, error.with_traceback(None))
            told()
            return
        if inner is not None:
            self._answer = inner.answer
            inner.when_settled(told)
        else:
            general = asyncio.ensure_future(append(state, request))
            self._answer = general.result
            general.add_done_callback(lambda _: told())

    def answer(self) -> Response:
        """What came of it. Raises what it failed with."""
        answer, self._answer = self._answer, None
        assert answer is not None
        try:
            return answer()
        finally:
            # An error refers to the frames it came through, and they would refer to it.
            del answer


def _refuse(error: TopicsError | StorageError) -> Response:
    try:
        raise error
    finally:
        del error


def _append_now(state: ServerState, request: Request, *, hurries: bool = False) -> Underway | None:
    store = admit(state)
    asked = _asked_append(state, request)
    decoded = asked.decoded
    if decoded.config is not None:
        return None
    appending = store.append_now(
        request.name,
        request.body,
        decoded,
        header_key=asked.key,
        producer=asked.producer,
        hurries=hurries,
    )
    if appending is None:
        return None
    return Underway(
        appending.when_settled,
        lambda: _appended(request, asked, appending.outcome(parked_ms=request.parked_ms or 0.0)),
    )


async def diff(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/diff`: the records after a cursor."""
    store = admit(state)
    if state.throttle.is_active and not state.throttle.passes(request.name):
        request.parked_ms = await state.throttle.turn(request.name, len(request.body))
    asked, shown = _asked_diff(state, request)
    if asked.wait_ms:
        page = await held_by(request, store.read(request.name, asked))
    else:
        page = await store.read(request.name, asked)
    return Response(200, b"".join(_page(state, request, page, shown)))


def diff_now(state: ServerState, request: Request) -> Response | None:
    """The quick form of `diff`: of what is in memory, without waiting for more."""
    store = admit(state)
    if state.throttle.is_active:
        return None
    asked, shown = _asked_diff(state, request)
    page = None if asked.wait_ms else store.read_now(request.name, asked)
    if page is None:
        return None
    return Response(200, b"", pieces=_page(state, request, page, shown))


def _asked_diff(state: ServerState, request: Request) -> tuple[ReadRequest, int]:
    settings = state.settings
    return decode_diff(request.body, settings.max_limit, settings.max_node_bytes)


def _page(state: ServerState, request: Request, page: Page, shown: int) -> list[bytes | memoryview]:
    parts = render_page(request.name, page, shown, state.rendered)
    parts.append(page_performance(request.elapsed_ms(), page.scanned, request.parked_ms or 0.0))
    return parts


async def delete(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/delete`: remove records by seq, by tag, or both."""
    store = admit(state)
    asked = decode_delete(request.body)
    done = await store.delete(request.name, before_seq=asked.before_seq, match=asked.match)
    return Response(200, render_deleted(request.name, done, request.elapsed_ms()))
