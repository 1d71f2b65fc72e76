"""Record routes: append (§2), diff with long-polling (§3), delete (§5).

Plain functions of the server's state and one request; each returns one response or raises
`TopicsError`. A started append or delete continues when its client disconnects; a long-poll ends.
`append` and `diff` answer at once or once a write is decided; for a request that has to wait for
more, they return a coroutine. Called through the route table in `api/routes`.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from topics_server.api.context import ServerState, StorePort
from topics_server.api.messages.conditions import IF_MATCH, condition_of
from topics_server.api.messages.producer_headers import FIELDS as PRODUCER_FIELDS
from topics_server.api.messages.producer_headers import receipt_lines, stamp_of
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
    with_condition_met,
)
from topics_server.api.messages.trace_headers import TRACEPARENT, trace_of
from topics_server.api.messages.visibility import check_config
from topics_server.api.readiness import admit, refusal
from topics_server.api.request import Pending, Request, Response, held_by
from topics_server.api.waiting_turn import WaitingTurn
from topics_server.auth.authorize import check_scopes
from topics_server.engine.answers import Appended, JsonPage, Page, ReadAs, ReadRequest
from topics_server.engine.topic.writes.condition import ConditionCheck, UndecidedError
from topics_server.runtime.clock import monotonic_s
from topics_server.values.appends import DecodedAppend, decode_append
from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import LARGE_APPEND_BYTES_MIN
from topics_server.values.model import ProducerStamp, SentCondition
from topics_server.values.record_codecs import with_trace
from topics_server.values.texts.key_list import READ, WRITE
from topics_server.values.texts.query_string import parse_query


class _Append(msgspec.Struct, frozen=True, gc=False):
    """A decoded append request."""

    decoded: DecodedAppend
    key: str | None
    producer: ProducerStamp | None
    with_seqs: bool
    check: ConditionCheck | None = None


def _asked_append(
    state: ServerState, request: Request, decoded: DecodedAppend | None = None
) -> _Append:
    """Decode an append request. `decoded`: the body with its trace, if it was decoded already."""
    query, headers = request.query, request.headers
    with_seqs = query_bool(parse_query(query), "return_seqs", True) if query else True
    producer = None if PRODUCER_FIELDS.isdisjoint(headers) else stamp_of(headers)
    if decoded is None:
        decoded = decode_append(request.body, max_records=state.settings.max_batch_records)
        if TRACEPARENT in headers:
            decoded = with_trace(decoded, trace_of(headers))
    key = None
    if decoded.idempotency_key is None and b"idempotency-key" in headers:
        # The body's key wins over the header's (§0.8).
        key = header_key(headers[b"idempotency-key"])
    check = None
    sent = decoded.condition
    if sent is not None or IF_MATCH in headers:
        check = _check_of(state, request, sent)
    return _Append(decoded, key, producer, with_seqs, check)


def _check_of(
    state: ServerState, request: Request, sent: SentCondition | bytes | None
) -> ConditionCheck | None:
    """The check of the request's condition; None without a condition."""
    most = state.settings.max_node_bytes
    condition = condition_of(sent, request.headers, request.caller, most)
    if condition is None:
        return None
    return ConditionCheck(condition, admit(state).condition_counts)


def _appended(request: Request, asked: _Append, done: Appended) -> Response:
    lines = b"" if asked.producer is None else receipt_lines(asked.producer, done)
    if done.repeat is not None:
        return Response(204, b"", varying=lines)
    # `Request.elapsed_ms` written out here.
    total_ms = monotonic_s() * 1000 - request.started_ms
    body = render_appended(request.name, done, with_seqs=asked.with_seqs, total_ms=total_ms)
    if asked.check is not None:
        body = with_condition_met(body)
    return Response(201 if done.created else 200, body, varying=lines)


def append(state: ServerState, request: Request) -> Pending | Coroutine[Any, Any, Response]:
    """`POST /v0/topics/{topic}`: append one or many records."""
    if len(request.body) > LARGE_APPEND_BYTES_MIN:
        return _append_slowly(state, request)
    throttle = state.throttle
    is_in_turn = throttle.is_active and request.throttle_wait_ms is None
    if is_in_turn and not throttle.passes(request.name):
        admit(state)
        begin = partial(_begin_append, state)
        must_run = _must_run(state, request.body)
        waiting = WaitingTurn(state, request, request.name, begin, must_run=must_run)
        return Pending(waiting.when_resolved, waiting.answer)
    # A request that the throttle lets through at once must not wait for this turn's group either.
    return _begin_append(state, request, flush_now=is_in_turn)


def _begin_append(
    state: ServerState, request: Request, *, flush_now: bool = False
) -> Pending | Coroutine[Any, Any, Response]:
    store = state.store if state.phase == "ready" else admit(state)
    assert store is not None, "ready means there is a store"
    asked = _asked_append(state, request)
    appending = None
    if asked.decoded.config is None:
        try:
            appending = store.begin_append(
                request.name,
                request.body,
                asked.decoded,
                header_key=asked.key,
                producer=asked.producer,
                flush_now=flush_now,
                check=asked.check,
            )
        except UndecidedError:
            # The attempt changed nothing. The slow way waits until the condition can be decided.
            pass
    if appending is None:
        return _append_slowly(state, request, asked)
    return Pending(
        appending.when_resolved,
        lambda: _appended(
            request, asked, appending.outcome(throttle_wait_ms=request.throttle_wait_ms or 0.0)
        ),
    )


async def _append_slowly(
    state: ServerState, request: Request, asked: _Append | None = None
) -> Response:
    """An append that waits for its decoding, its topic or its turn, and then for its write."""
    store = admit(state)
    body = request.body
    decoded = None if asked is None else asked.decoded
    if decoded is None and state.large_appends.takes(body):
        decoded = await state.large_appends.decode(body, trace_of(request.headers))
    if state.throttle.is_active and request.throttle_wait_ms is None:
        must_run = _must_run(state, body) if decoded is None else decoded.disable_backpressure
        request.throttle_wait_ms = await state.throttle.turn(
            request.name, len(body), must_run=must_run
        )
    asked = asked or _asked_append(state, request, decoded)
    decoded = asked.decoded
    config = None
    if decoded.config is not None:
        config = decode_inline_config(decoded.config, request.name)
        check_config(request.caller, config, "config.")
    attempt = partial(
        store.append,
        request.name,
        request.body,
        decoded,
        header_key=asked.key,
        config=config,
        producer=asked.producer,
        check=asked.check,
    )
    done = await store.decided(asked.check, attempt)
    if request.throttle_wait_ms:
        done = msgspec.structs.replace(
            done, throttle_wait_ms=done.throttle_wait_ms + request.throttle_wait_ms
        )
    return _appended(request, asked, done)


def _must_run(state: ServerState, body: bytes) -> bool:
    """Whether the throttle must not refuse this append. Raises the errors of decoding it."""
    # Look for the name anywhere in the body. Few bodies contain it, and only those are decoded
    # before their turn.
    if b'"disable_backpressure"' not in body:
        return False
    return decode_append(body, max_records=state.settings.max_batch_records).disable_backpressure


def diff(
    state: ServerState, request: Request
) -> Response | Pending | Coroutine[Any, Any, Response]:
    """`POST /v0/topics/{topic}/diff`: the records after a cursor."""
    if state.phase != "ready":
        raise refusal(state)
    asked, shown = _asked_diff(state, request)
    throttle = state.throttle
    if throttle.is_active and not throttle.passes(request.name):
        if asked.wait_ms:
            return _diff_in_turn(state, request, asked, shown)
        begin = partial(_begin_diff, state, asked=asked, shown=shown)
        waiting = WaitingTurn(state, request, request.name, begin)
        return Pending(waiting.when_resolved, waiting.answer)
    return _begin_diff(state, request, asked, shown)


def _begin_diff(
    state: ServerState, request: Request, asked: ReadRequest, shown: int
) -> Response | Coroutine[Any, Any, Response]:
    store = state.store if state.phase == "ready" else admit(state)
    assert store is not None, "ready means there is a store"
    page: Page | JsonPage | None = None
    if asked.read_as is None:
        page = store.read_json(request.name, asked, shown)
        if page is not None and not (asked.wait_ms and page.is_empty):
            return Response(200, b"", pieces=_page(state, request, page, shown))
    return _diff_slowly(state, request, asked, shown, page)


async def _diff_in_turn(
    state: ServerState, request: Request, asked: ReadRequest, shown: int
) -> Response:
    """A diff that waits for its turn under pressure, and may wait for records after that."""
    request.throttle_wait_ms = await state.throttle.turn(request.name, len(request.body))
    answer = _begin_diff(state, request, asked, shown)
    return answer if isinstance(answer, Response) else await answer


async def _diff_slowly(
    state: ServerState,
    request: Request,
    asked: ReadRequest,
    shown: int,
    page: Page | JsonPage | None,
) -> Response:
    """A diff that waits: for a consumer's position, for the disk, or for records to come.

    `page`: what `read_json` returned.
    """
    store = admit(state)
    if asked.read_as is not None:
        asked = await _for_consumer(state, request, asked, asked.read_as)
        page = store.read_json(request.name, asked, shown)
    if page is None:
        page = await store.read_json_from_disk(request.name, asked, shown)
    if page is None or (asked.wait_ms and page.is_empty):
        reading = store.read(request.name, asked)
        page = await (held_by(request, reading) if asked.wait_ms else reading)
    return Response(200, b"", pieces=_page(state, request, page, shown))


async def _for_consumer(
    state: ServerState, request: Request, asked: ReadRequest, read_as: ReadAs
) -> ReadRequest:
    """A consumer's read: from the seq that the client presents, else from the consumer's position.

    With `ack: auto` the seq that the client presents is committed first.
    """
    store = admit(state)
    if read_as.commits:
        check_scopes(request.caller, READ | WRITE)
        if asked.from_seq:
            await _commit(store, request.name, read_as.consumer, asked.from_seq)
    start = store.read_start(request.name, read_as.consumer)
    return msgspec.structs.replace(asked, from_seq=asked.from_seq or start)


async def _commit(store: StorePort, name: str, consumer: str, from_seq: int) -> None:
    """Commit the seq that a client presents. Raises `invalid_request` that names its member."""
    try:
        await store.commit_consumer(name, consumer, from_seq)
    except TopicsError as error:
        if error.code is not Code.INVALID_REQUEST:
            raise
        raise invalid("from_seq is above the topic's head: nothing to commit", "from_seq") from None


def _asked_diff(state: ServerState, request: Request) -> tuple[ReadRequest, int]:
    settings = state.settings
    return decode_diff(request.body, settings.max_limit, settings.max_node_bytes)


def _page(
    state: ServerState, request: Request, page: Page | JsonPage, shown: int
) -> list[bytes | memoryview]:
    parts = render_page(request.name, page, shown, state.json_cache)
    # `Request.elapsed_ms` written out here.
    total_ms = monotonic_s() * 1000 - request.started_ms
    parts.append(page_performance(total_ms, page.scanned, request.throttle_wait_ms or 0.0))
    return parts


async def delete(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/delete`: remove records by seq, by tag, or both."""
    store = admit(state)
    asked = decode_delete(request.body)
    check = _check_of(state, request, asked.condition)
    attempt = partial(
        store.delete, request.name, before_seq=asked.before_seq, match=asked.match, check=check
    )
    body = render_deleted(request.name, await store.decided(check, attempt), request.elapsed_ms())
    return Response(200, body if check is None else with_condition_met(body))
