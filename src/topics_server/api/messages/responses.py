"""Renders the responses of topics and routers as JSON bytes. Pure.

JSON need not escape any character of a topic name, so responses are formatted as bytes. Records
come from the JSON cache as slices that hold the payloads verbatim. `performance` holds measured
times in milliseconds, which the handler passes in. Called by `api/topics/handlers`,
`api/records/handlers`, `api/routers/handlers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import orjson

from topics_server.engine.answers import (
    Appended,
    BackwardPage,
    Deleted,
    Gap,
    JsonPage,
    Page,
    PutOutcome,
    TopicPage,
    TopicState,
)
from topics_server.values.json_cache import JsonCache
from topics_server.values.model import Durability, RouterDefinition, StreamFacts, TopicConfig
from topics_server.values.router_answers import RouterListPage, RouterOutcome, RouterState

_encode: Final = orjson.dumps
_WRITE_PERFORMANCE: Final = (
    b'"performance":{"server_total_ms":%.3f,"wal_append_ms":%.3f,"fsync_ms":%.3f,'
    b'"throttle_wait_ms":%.3f}}'
)
_encode_struct: Final = msgspec.json.Encoder().encode


def _performance(total_ms: float) -> bytes:
    return b'"performance":{"server_total_ms":%.3f}}' % total_ms


def _write_performance(
    total_ms: float, write_ms: float, sync_ms: float, throttle_wait_ms: float = 0.0
) -> bytes:
    return _WRITE_PERFORMANCE % (total_ms, write_ms, sync_ms, throttle_wait_ms)


def render_json(value: dict[str, Any], total_ms: float) -> bytes:
    """Render any object with `performance` added; for answers off the hot path."""
    assert "performance" not in value
    return _encode(value | {"performance": {"server_total_ms": round(total_ms, 3)}})


def render_appended(name: str, done: Appended, *, with_seqs: bool, total_ms: float) -> bytes:
    """The answer to an append (§2)."""
    first, last = done.first_seq, done.last_seq
    assert 0 < first <= last <= done.head_seq
    count = last - first + 1
    if done.seqs is not None:
        count = len(done.seqs)
    seqs = b""
    if with_seqs:
        seq_list = b"[%d]" % first
        if done.seqs is not None or first != last:
            seq_list = _encode(done.seqs or list(range(first, last + 1)))
        seqs = b'"seqs":%b,' % seq_list
    return (
        b'{"topic":"%b","first_seq":%d,"last_seq":%d,%b"head_seq":%d,"count":%d,"created":%b,'
        b'"deduped":%b,%b'
    ) % (
        name.encode("ascii"),
        first,
        last,
        seqs,
        done.head_seq,
        count,
        b"true" if done.created else b"false",
        b"true" if done.deduped else b"false",
        _WRITE_PERFORMANCE % (total_ms, done.write_ms, done.sync_ms, done.throttle_wait_ms),
    )


def with_condition_met(body: bytes) -> bytes:
    """Add `condition_met` to the answer to a write whose condition held.

    Servers that do not support `if` never send this member.
    """
    return b'{"condition":"met",%b' % body[1:]


def render_page(
    name: str, page: Page | JsonPage, shown: int, cache: JsonCache
) -> list[bytes | memoryview]:
    """The answer to a diff (§3) up to its `performance`, as parts to be joined."""
    parts: list[bytes | memoryview] = [b'{"topic":"%b","records":[' % name.encode("ascii")]
    for piece in page.pieces:
        for part in cache.slices(piece.block, piece.rows, shown, is_kept=piece.is_kept):
            parts.append(part)
            parts.append(b",")
    if len(parts) > 1:
        parts.pop()
    if isinstance(page, JsonPage):
        page = page.page
    assert page.next_from_seq <= page.head_seq
    parts.append(
        b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,'
        b'"lag":%d,"epoch":%d,'
        % (
            page.next_from_seq,
            page.head_seq,
            page.earliest_seq,
            b"true" if page.next_from_seq == page.head_seq else b"false",
            b"null" if page.gap is None else render_tombstone(page.gap, page),
            page.head_seq - page.next_from_seq,
            page.epoch,
        )
    )
    return parts


def page_performance(total_ms: float, scanned: int, throttle_wait_ms: float = 0.0) -> bytes:
    """The last part of a diff's answer."""
    return (
        b'"performance":{"server_total_ms":%.3f,"records_scanned":%d,"throttle_wait_ms":%.3f}}'
    ) % (total_ms, scanned, throttle_wait_ms)


def render_tombstone(gap: Gap, page: Page | BackwardPage) -> bytes:
    """A tombstone as JSON (§3.3)."""
    # For a recreated topic that is read from its first record, the missed range is empty: 1 to 0.
    assert gap.gap_from <= gap.gap_to + 1
    return (
        b'{"gap_from":%d,"gap_to":%d,"reason":"%b","missed_estimate":%d,"earliest_seq":%d,'
        b'"head_seq":%d}'
    ) % (
        gap.gap_from,
        gap.gap_to,
        gap.reason.value.encode("ascii"),
        gap.missed_estimate,
        page.earliest_seq,
        page.head_seq,
    )


def render_deleted(name: str, done: Deleted, total_ms: float) -> bytes:
    """The answer to a delete (§5)."""
    return (
        b'{"topic":"%b","deleted":%d,"earliest_seq":%d,"head_seq":%d,"count":%d,"bytes":%d,%b'
    ) % (
        name.encode("ascii"),
        done.deleted,
        done.earliest_seq,
        done.head_seq,
        done.count,
        done.bytes,
        _write_performance(total_ms, done.write_ms, done.sync_ms),
    )


def render_put(
    name: str, outcome: PutOutcome, total_ms: float, *, ignored: Sequence[str] = ()
) -> bytes:
    """The answer to a PUT (§1.1) or PATCH; `ignored`: unknown members of the body."""
    fields = b"" if outcome.before is None else b'"changed":%b,' % _changed(outcome)
    if ignored:
        fields += b'"ignored":%b,' % _encode(list(ignored))
    return b'{"topic":"%b","created":%b,"config":%b,%b%b' % (
        name.encode("ascii"),
        b"true" if outcome.created else b"false",
        render_config(outcome.config),
        fields,
        _write_performance(total_ms, outcome.write_ms, outcome.sync_ms),
    )


def _changed(outcome: PutOutcome) -> bytes:
    """`{field: [old, new]}` of the fields that the request has changed."""
    assert outcome.before is not None
    old: dict[str, Any] = msgspec.json.decode(render_config(outcome.before))
    new: dict[str, Any] = msgspec.json.decode(render_config(outcome.config))
    names = [*new, *(name for name in old if name not in new)]
    return _encode(
        {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}
    )


@lru_cache(maxsize=1024)
def render_config(config: TopicConfig) -> bytes:
    """The full configuration in the contract's order (§0.10)."""
    durability = config.durability
    return _encode(
        {
            "type": config.type.value,
            "ttl_ms": config.ttl_ms,
            "cap_records": config.cap_records,
            "cap_bytes": config.cap_bytes,
            "discard": config.discard.value,
            "durable": durability is Durability.FSYNC,
            "durability": durability.value,
            "priority": config.priority,
            "auto_priority": config.auto_priority,
            "auto_create": config.auto_create,
            "idempotency_window_ms": config.idempotency_window_ms,
            "dedupe_node": config.dedupe_node,
            "lease_ms": config.lease_ms,
            "claim_jitter_ms": config.claim_jitter_ms,
            "max_deliveries": config.max_deliveries,
            "dead_letter": config.dead_letter,
            "leases_durable": config.leases_durable,
        }
        # This field is not in the contract: it is shown only if it is set.
        | ({"lease_log": config.lease_log} if isinstance(config.lease_log, str) else {})
    )


def render_state(state: TopicState, total_ms: float) -> bytes:
    """The answer to a state read (§1.2)."""
    return (
        b'{"topic":"%b","epoch":%d,"type":"%b","head_seq":%d,"earliest_seq":%d,"next_seq":%d,"count":%d,'
        b'"bytes":%d,"disk_bytes":%d,"damaged_records":%d,"config":%b,%b%b"effective_priority":%d,'
        b'"last_write_ts":%b,"last_read_ts":%b,%b'
    ) % (
        state.name.encode("ascii"),
        state.epoch,
        state.config.type.value.encode("ascii"),
        state.head_seq,
        state.earliest_seq,
        state.head_seq + 1,
        state.count,
        state.bytes,
        state.disk_bytes,
        state.damaged_records,
        render_config(state.config),
        b"" if state.queue is None else b'"queue":%b,' % _encode_struct(state.queue),
        b"" if state.stream is None else b'"stream":%b,' % _encode(_shown_stream(state.stream)),
        state.effective_priority,
        _or_null(state.last_write_ts),
        _or_null(state.last_read_ts),
        _performance(total_ms),
    )


def _shown_stream(facts: StreamFacts) -> dict[str, object]:
    """The facts of a topic as a stream; absent facts are left out."""
    shown: dict[str, object] = {
        "path": facts.path,
        "content_type": facts.content_type,
        "closed": facts.is_closed,
    }
    if facts.ttl_s is not None:
        shown["ttl_s"] = facts.ttl_s
    if facts.expires_at is not None:
        shown["expires_at"] = facts.expires_at
    if facts.ancestors:
        source = facts.ancestors[-1]
        shown["forked_from"] = {"path": source.path, "upto_seq": source.upto_seq}
    return shown


def _or_null(value: int | None) -> bytes:
    return b"null" if value is None else b"%d" % value


def render_topics(page: TopicPage, next_cursor: str | None, total_ms: float) -> bytes:
    """The answer to a list (§1.3)."""
    value: dict[str, Any] = {
        "topics": [
            {
                "topic": state.name,
                "epoch": state.epoch,
                "head_seq": state.head_seq,
                "earliest_seq": state.earliest_seq,
                "count": state.count,
                "bytes": state.bytes,
                "durable": state.config.durability is Durability.FSYNC,
                "effective_priority": state.effective_priority,
            }
            for state in page.topics
        ]
    }
    if next_cursor is not None:
        value["next_cursor"] = next_cursor
    return render_json(value, total_ms)


def render_dropped(name: str, dropped: bool, routers: Sequence[str], total_ms: float) -> bytes:
    """The answer to a topic's DELETE (§1.4); `routers` were deleted with it."""
    fields = {"topic": name, "deleted": dropped, "routers_removed": list(routers)}
    return render_json(fields, total_ms)


# --- routers ----------------------------------------------------------------------------------


def _definition(name: str, definition: RouterDefinition, **more: Any) -> dict[str, Any]:
    """A router's definition in the contract's order; `more` after its name."""
    match = definition.filter
    if match is None:
        shown = None
    elif match.is_prefix:
        shown = ("tag", "Glob", f"{match.text}*")
    else:
        shown = ("tag", "Eq", match.text)
    return {
        "router": name,
        **more,
        "source": definition.source,
        "dest": definition.dest,
        "preserve_node": definition.preserve_node,
        "preserve_tag": definition.preserve_tag,
        "filter": shown,
        "allow_cycle": definition.allow_cycle,
        "guarantee": definition.guarantee.value,
    }


def render_router_put(
    name: str, outcome: RouterOutcome, total_ms: float, *, ignored: Sequence[str] = ()
) -> bytes:
    """The answer to a router's PUT (§6); `ignored`: unknown members of the body."""
    fields = _definition(name, outcome.definition, created=outcome.created)
    encoded = _encode(fields | {"ignored": list(ignored)} if ignored else fields)
    measured = _write_performance(total_ms, outcome.write_ms, outcome.sync_ms)
    return encoded[:-1] + b"," + measured


def render_router(state: RouterState, total_ms: float) -> bytes:
    """A router's definition, and (beyond the contract) its progress and why it is stalled."""
    fields = _definition(state.name, state.definition)
    fields |= {
        "forwarded_total": state.forwarded_total,
        "cursor_seq": state.cursor_seq,
        "lag": state.lag,
        "state": "running" if state.stalled is None else "stalled",
    }
    if state.stalled is not None:
        code, message = state.stalled
        fields["reason"] = {"code": code, "message": message}
    return render_json(fields, total_ms)


def render_routers(page: RouterListPage, next_cursor: str | None, total_ms: float) -> bytes:
    """A page of routers."""
    fields: dict[str, Any] = {
        "routers": [
            {
                "router": state.name,
                "source": state.definition.source,
                "dest": state.definition.dest,
                "guarantee": state.definition.guarantee.value,
                "forwarded_total": state.forwarded_total,
            }
            for state in page.routers
        ]
    }
    if next_cursor is not None:
        fields["next_cursor"] = next_cursor
    return render_json(fields, total_ms)


def render_router_dropped(name: str, dropped: bool, total_ms: float) -> bytes:
    """The answer to a router's DELETE."""
    return render_json({"router": name, "deleted": dropped}, total_ms)
