"""Health, readiness and metrics routes (§8).

Called through the route table in `api/routes`, by load balancers and scrapers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from topics_server.api.context import ServerState
from topics_server.api.messages.responses import render_json
from topics_server.api.operate.metrics_snapshot import facts_of
from topics_server.api.operate.version import server_version
from topics_server.api.readiness import refusal
from topics_server.api.request import Request, Response
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import TEXT_TYPE, Facts
from topics_server.values.errors import Code, TopicsError


def health(state: ServerState, request: Request) -> Response:
    """`GET /v0/health`: the process is running."""
    fields = {"status": "ok", "version": server_version(), "uptime_ms": _uptime_ms(state)}
    return Response(200, render_json(fields, request.elapsed_ms()))


def ready(state: ServerState, request: Request) -> Response:
    """`GET /v0/ready`: whether the server takes requests, and the reasons of a degraded state."""
    if state.phase != "ready":
        raise refusal(state)
    store = state.store
    assert store is not None
    fields = {"status": "ready", "wal_replay_complete": True, "topics": store.topic_count}
    read_only = list(store.read_only_shards())
    reasons = list(state.reasons())
    if read_only:
        reasons.insert(0, "a sync failed: shards are read-only until a restart")
        fields["read_only_shards"] = read_only
    if reasons:
        fields |= {"status": "degraded", "reasons": reasons}
    if read_only and state.settings.ready_degraded != 200:
        raise TopicsError(
            Code.STORAGE_READ_ONLY,
            "a part of the storage takes no writes until a restart",
            fields,
        )
    return Response(200, render_json(fields, request.elapsed_ms()))


async def metrics(state: ServerState, request: Request) -> Response:
    """`GET /v0/metrics`: Prometheus text, or JSON for `Accept: application/json`."""
    facts = await facts_of(state, server_version(), request.caller)
    if wants_json(request.headers.get(b"accept")):
        values = await asyncio.to_thread(_as_values, facts)
        return Response(200, render_json(values, request.elapsed_ms()))
    # A thousand topics take milliseconds to render, so a thread does it, not the loop.
    return Response(200, await asyncio.to_thread(_as_text, facts), content_type=TEXT_TYPE)


# Only a scrape needs the metrics library, which contains an HTTP server. This server imports the
# library once it is ready; under other ASGI servers the rendering thread imports it at the first
# scrape (decision 0260).


def _as_text(facts: Facts) -> bytes:
    """*Blocking.*"""
    from topics_server.runtime.prometheus import as_text

    return as_text(facts)


def _as_values(facts: Facts) -> dict[str, Any]:
    """*Blocking.*"""
    from topics_server.runtime.prometheus import as_values

    return as_values(facts)


def wants_json(accept: bytes | None) -> bool:
    """Whether the client accepts JSON, and prefers it to plain text."""
    if accept is None:
        return False
    named = [offer.partition(b";")[0].strip().lower() for offer in accept.split(b",")]
    if b"application/json" not in named:
        return False
    text = [named.index(kind) for kind in (b"text/plain", b"text/*") if kind in named]
    return not text or named.index(b"application/json") < min(text)


def _uptime_ms(state: ServerState) -> int:
    return int(monotonic_ms() - state.started_ms)
