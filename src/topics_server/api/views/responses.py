"""Answers of the routes of views, as JSON bytes. Pure.

The query process returns rows as JSON, which is copied into the answer unchanged. Called by
`api/views/handlers` and `api/views/live`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from topics_server.api.messages.responses import render_json
from topics_server.values.model import ViewDefinition
from topics_server.views.answers import ViewOutcome, ViewRows, ViewState

_encode: Final = msgspec.json.Encoder().encode


def _defined(topic: str, name: str, definition: ViewDefinition) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "topic": topic,
        "view": name,
        "schema": definition.schema,
        "apply": definition.apply,
        "queries": definition.queries,
        "on_delete": definition.on_delete.value,
    }
    if definition.shortcut is not None:
        fields["shortcut"] = definition.shortcut
    return fields


def _stats(state: ViewState) -> dict[str, Any]:
    failure = state.failure
    fields: dict[str, Any] = {
        "view_name": state.name,
        "processed_sequence": state.processed_seq,
        # The contract's member for the state: null while no process runs the view.
        "leader_status": "ready" if state.status == "ready" else None,
        "status": state.status,
        "head_seq": state.head_seq,
        "lag": state.lag,
        "known_from_seq": state.known_from_seq,
        "building_sequence": state.building_seq,
        "bytes": state.bytes,
        "applied_total": state.applied_total,
        "rebuilds_total": state.rebuilds_total,
        "last_error": None,
    }
    if failure is not None:
        fields["last_error"] = {
            "seq": failure.seq,
            "statement": failure.statement[:256],
            "message": failure.message[:1000],
        }
    return fields


def render_put(
    topic: str, name: str, outcome: ViewOutcome, total_ms: float, *, ignored: Sequence[str]
) -> bytes:
    """The answer to a PUT; `ignored`: unknown members of the body."""
    fields = _defined(topic, name, outcome.definition)
    fields |= {"created": outcome.created, "changed": outcome.changed}
    if ignored:
        fields["ignored"] = list(ignored)
    return render_json(fields, total_ms)


def render_view(state: ViewState, total_ms: float) -> bytes:
    """A view's definition and its progress."""
    fields = _defined(state.topic, state.name, state.definition)
    return render_json(fields | {"stats": _stats(state)}, total_ms)


def render_views(topic: str, states: Sequence[ViewState], total_ms: float) -> bytes:
    """The views of a topic."""
    views = [{"view": state.name, "stats": _stats(state)} for state in states]
    return render_json({"topic": topic, "views": views}, total_ms)


def render_stats(state: ViewState, total_ms: float) -> bytes:
    """A view's progress and its costs."""
    return render_json(_stats(state), total_ms)


def render_dropped(topic: str, name: str, dropped: bool, total_ms: float) -> bytes:
    """The answer to a DELETE."""
    return render_json({"topic": topic, "view": name, "deleted": dropped}, total_ms)


def rows_json(name: str, rows: ViewRows) -> bytes:
    """The members of an answer with rows, without the closing brace."""
    return (
        b'{"view_name":"%b","processed_sequence":%d,"columns":%b,"rows":%b,"row_count":%d,'
        b'"truncated":%b'
    ) % (
        name.encode("ascii"),
        rows.processed_seq,
        _encode(rows.columns),
        rows.rows,
        rows.row_count,
        b"true" if rows.is_cut else b"false",
    )


def render_rows(name: str, rows: ViewRows, total_ms: float) -> bytes:
    """The answer to a query."""
    return rows_json(name, rows) + b',"performance":{"server_total_ms":%.3f}}' % total_ms
