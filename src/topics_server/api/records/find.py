"""Plain reads: the records of a topic by `GET`, forwards or backwards, and one record by its seq.

A client can revalidate a closed range by its ETag; it must not store an open range. Called through
the route table in `api/routes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import orjson
import xxhash

from topics_server.api.context import ServerState, StorePort
from topics_server.api.messages.accept import accept_weights
from topics_server.api.messages.responses import page_performance, render_tombstone
from topics_server.api.readiness import admit
from topics_server.api.records.find_requests import RecordsRequest, decode_records, seq_of
from topics_server.api.request import Request, Response, held_by
from topics_server.engine.answers import (
    BackwardPage,
    Page,
    Piece,
    RangeMark,
    ReadRequest,
)
from topics_server.http.error_responses import Headers
from topics_server.values.errors import Code, TopicsError
from topics_server.values.json_cache import DATA, META, TAGS, JsonCache
from topics_server.values.limits import PAGE_BYTES_MAX, SEQ_MAX

NDJSON: Final = b"application/x-ndjson"
_LINE_TYPES: Final = (NDJSON, b"application/ndjson", b"application/jsonl")
_VARY: Final = (b"vary", b"accept")
_OPEN: Final[Headers] = ((b"cache-control", b"no-store"), _VARY)
_Parts = list[bytes | memoryview]


async def list_records(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/records`: the records of a range, as JSON or as lines of JSON."""
    store = admit(state)
    if state.throttle.is_active and not state.throttle.passes(request.name):
        request.throttle_wait_ms = await state.throttle.turn(request.name, len(request.query))
    asked = decode_records(request.query, state.settings)
    as_lines = _prefers_lines(request)
    if asked.is_descending:
        return await _backward(state, store, request, asked, as_lines=as_lines)
    before = store.dead_slots(request.name)
    reading = store.read(request.name, asked.forward)
    page = await (held_by(request, reading) if asked.forward.wait_ms else reading)
    bound = store.upto_seq(request.name, asked.forward)
    is_complete = page.next_from_seq >= min(bound, page.head_seq)
    first = page.gap.gap_from if page.gap is not None else asked.forward.from_seq + 1
    headers = _OPEN
    if page.next_from_seq < page.head_seq:
        # The examined range can lose records, but gets no new ones.
        mark = store.range_mark(request.name, min(first, page.next_from_seq), page.next_from_seq)
        shape = (first, page.next_from_seq, is_complete, *_ends(page.pieces), as_lines)
        tag = _etag(request, mark, shape)
        if _is_current(store, request.name, before, page, mark):
            headers = (*_closed(tag), _VARY)
            if _has(request, tag):
                return Response(304, b"", headers)
    facts: dict[str, object] = {
        "next_from_seq": page.next_from_seq,
        "head_seq": page.head_seq,
        "earliest_seq": page.earliest_seq,
        "caught_up": page.caught_up,
        "complete": is_complete,
    }
    return _answer(
        state,
        request,
        page,
        list(_each(page.pieces, asked.shown, state.json_cache)),
        facts,
        headers,
        as_lines=as_lines,
    )


async def _backward(
    state: ServerState,
    store: StorePort,
    request: Request,
    asked: RecordsRequest,
    *,
    as_lines: bool,
) -> Response:
    before = store.dead_slots(request.name)
    page = await store.read_backward(request.name, asked.backward, asked.forward.filter)
    headers = _OPEN
    if page.before_seq <= page.head_seq:
        mark = store.range_mark(request.name, page.next_before_seq, page.before_seq - 1)
        reach = (page.next_before_seq, page.before_seq, page.is_complete)
        tag = _etag(request, mark, (*reach, *_ends(page.pieces), as_lines))
        if _is_current(store, request.name, before, page, mark):
            headers = (*_closed(tag), _VARY)
            if _has(request, tag):
                return Response(304, b"", headers)
    facts: dict[str, object] = {
        "next_before_seq": page.next_before_seq,
        "head_seq": page.head_seq,
        "earliest_seq": page.earliest_seq,
        "complete": page.is_complete,
    }
    records = list(_each(page.pieces, asked.shown, state.json_cache))[::-1]
    return _answer(state, request, page, records, facts, headers, as_lines=as_lines)


def _is_current(
    store: StorePort, name: str, before: tuple[int, int], page: Page | BackwardPage, mark: RangeMark
) -> bool:
    """Whether the page shows the state that the mark describes.

    Reading blocks from disk takes time, in which records may be deleted. If the page got the tag of
    that later state, a client's copy with the deleted records would stay valid for ever.
    """
    return store.dead_slots(name) == before and page.earliest_seq == mark.earliest_seq


def _answer(
    state: ServerState,
    request: Request,
    page: Page | BackwardPage,
    records: Sequence[bytes | memoryview],
    facts: dict[str, object],
    headers: Headers,
    *,
    as_lines: bool,
) -> Response:
    tombstone = b"null" if page.gap is None else render_tombstone(page.gap, page)
    if as_lines:
        # Every line is a record, so headers carry all other facts.
        head = orjson.dumps({"epoch": page.epoch, **facts})
        lines = [line for record in records for line in (record, b"\n")]
        marks: Headers = ((b"topics-page", head), (b"topics-tombstone", tombstone))
        return Response(200, b"", (*headers, *marks), NDJSON, pieces=lines or [b""])
    parts: _Parts = [b'{"topic":"%b","records":[' % request.name.encode("ascii")]
    for record in records:
        parts += (record, b",")
    if records:
        parts.pop()
    parts.append(b'],%b,"tombstone":%b,' % (orjson.dumps(facts)[1:-1], tombstone))
    parts.append(b'"lag":%d,"epoch":%d,' % (_lag(page), page.epoch))
    wait_ms = request.throttle_wait_ms or 0.0
    parts.append(page_performance(request.elapsed_ms(), page.scanned, wait_ms))
    return Response(200, b"", headers, pieces=parts)


def _lag(page: Page | BackwardPage) -> int:
    return page.head_seq - page.next_from_seq if isinstance(page, Page) else 0


def _ends(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The seqs and the times of a page's first and last record.

    With a start or an end in time, the seqs of the range change. A store that was restored or begun
    anew may give the same seqs to other records, at other times.
    """
    if not pieces:
        return ()
    first, last = pieces[0], pieces[-1]
    row, last_row = first.rows[0], last.rows[-1]
    return (
        first.block.first_seq + row,
        first.block.times[row],
        last.block.first_seq + last_row,
        last.block.times[last_row],
    )


def _each(pieces: Iterable[Piece], shown: int, cache: JsonCache) -> Iterable[bytes | memoryview]:
    """Every record as JSON, one by one."""
    for piece in pieces:
        for row in piece.rows:
            yield b"".join(cache.slices(piece.block, (row,), shown))


async def get_record(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/records/{seq}`: one record."""
    store = admit(state)
    seq = seq_of(request.below[0])
    page = None
    if seq <= SEQ_MAX:
        page = await store.read(request.name, ReadRequest(seq - 1, 1, PAGE_BYTES_MAX))
    found = None if page is None else _record_of(page, seq)
    if page is None or found is None:
        raise _no_record(request.name, seq, page)
    block, row = found.block, found.rows[0]
    # The tag is weak, because the answer also has the topic's head. So it cannot serve `If-Match`.
    # The time in the tag tells apart records with the same seq, from before and after a restore of
    # the store.
    tag = b'W/"%d-%d-%d"' % (page.epoch, seq, block.times[row])
    if _has(request, tag):
        return Response(304, b"", _closed(tag))
    record = b"".join(state.json_cache.slices(block, (row,), TAGS | META | DATA))
    body = b'{"topic":"%b","record":%b,"epoch":%d,"head_seq":%d,"performance":%b}' % (
        request.name.encode("ascii"),
        record,
        page.epoch,
        page.head_seq,
        orjson.dumps({"server_total_ms": round(request.elapsed_ms(), 3)}),
    )
    return Response(200, body, _closed(tag))


def _record_of(page: Page, seq: int) -> Piece | None:
    for piece in page.pieces:
        if piece.block.first_seq + piece.rows[0] == seq:
            return piece
    return None


def _no_record(name: str, seq: int, page: Page | None) -> TopicsError:
    """Why there is no record with this seq."""
    if page is None or seq > page.head_seq:
        reason, why = "not_written", "it is not written yet"
    elif page.gap is not None and page.gap.gap_from <= seq <= page.gap.gap_to:
        reason, why = page.gap.reason.value, "the topic has lost it"
    else:
        reason, why = "deleted", "it was deleted"
    detail = {"topic": name, "seq": seq, "reason": reason}
    return TopicsError(Code.RECORD_NOT_FOUND, f'"{name}" has no record {seq}: {why}', detail)


def _prefers_lines(request: Request) -> bool:
    """Whether the client accepts lines of JSON, with at least the weight of a JSON page."""
    weights = accept_weights(request.headers.get(b"accept", b""))
    lines = max(weights.get(kind, 0.0) for kind in _LINE_TYPES)
    return lines > 0 and lines >= weights.get(b"application/json", 0.0)


def _closed(tag: bytes) -> Headers:
    return ((b"etag", tag), (b"cache-control", b"private, no-cache"))


def _etag(request: Request, mark: RangeMark, shape: tuple[object, ...]) -> bytes:
    """A weak ETag: the answer also has the topic's head, which may change."""
    state = repr((request.name, request.query, shape, mark)).encode()
    return b'W/"%b"' % xxhash.xxh3_128_hexdigest(state).encode("ascii")


def _has(request: Request, tag: bytes) -> bool:
    """Whether the client already has the resource in this state."""
    sent = request.headers.get(b"if-none-match")
    if sent is None:
        return False
    own = tag.removeprefix(b"W/")
    return sent.strip() == b"*" or any(
        each.strip().removeprefix(b"W/") == own for each in sent.split(b",")
    )
