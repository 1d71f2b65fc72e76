"""Health, readiness and metrics (§8): answered in every phase, without admission.

Called through the route table in `api/app`, by load balancers and scrapers.
"""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from topics_server.api.guard import refusal
from topics_server.api.http import Request, Response
from topics_server.api.rendering import render_json
from topics_server.api.state import Routers, ServerState, Store
from topics_server.clock import monotonic_ms
from topics_server.engine.answers import TopicState
from topics_server.errors import Code, TopicsError
from topics_server.metrics import (
    ROUTERS_SHOWN_MAX,
    TEXT_TYPE,
    TOPICS_SHOWN_MAX,
    Facts,
    QueueFacts,
    RouterFacts,
    RoutersFacts,
    StoreFacts,
    TopicFacts,
    as_text,
    as_values,
)


@cache
def server_version() -> str:
    """The installed version; a tree that was never installed says so."""
    try:
        return version("topics-server")
    except PackageNotFoundError:
        return "0+unknown"


def health(state: ServerState, request: Request) -> Response:
    """`GET /v0/health`: the process serves."""
    told = {"status": "ok", "version": server_version(), "uptime_ms": _uptime_ms(state)}
    return Response(200, render_json(told, request.elapsed_ms()))


def ready(state: ServerState, request: Request) -> Response:
    """`GET /v0/ready`: whether requests are taken, and whether a shard is read-only."""
    if state.phase != "ready":
        raise refusal(state)
    store = state.store
    assert store is not None
    told = {"status": "ready", "wal_replay_complete": True, "topics": store.topic_count}
    read_only = list(store.read_only_shards())
    if read_only:
        told |= {"status": "degraded", "read_only_shards": read_only}
        if state.settings.ready_degraded != 200:
            raise TopicsError(
                Code.STORAGE_READ_ONLY,
                "a part of the storage takes no writes until a restart",
                told,
            )
    return Response(200, render_json(told, request.elapsed_ms()))


async def metrics(state: ServerState, request: Request) -> Response:
    """`GET /v0/metrics`: Prometheus text, or JSON for `Accept: application/json`."""
    facts = facts_of(state)
    if wants_json(request.headers.get(b"accept")):
        values = await asyncio.to_thread(as_values, facts)
        return Response(200, render_json(values, request.elapsed_ms()))
    # A thousand topics take milliseconds to print: not on the loop.
    return Response(200, await asyncio.to_thread(as_text, facts), content_type=TEXT_TYPE)


def wants_json(accept: bytes | None) -> bool:
    """Whether JSON is named, and before plain text where both are."""
    if accept is None:
        return False
    named = [offer.partition(b";")[0].strip().lower() for offer in accept.split(b",")]
    if b"application/json" not in named:
        return False
    text = [named.index(kind) for kind in (b"text/plain", b"text/*") if kind in named]
    return not text or named.index(b"application/json") < min(text)


def facts_of(state: ServerState) -> Facts:
    """Everything a scrape shows, as of now."""
    store = state.store if state.phase != "replaying" else None
    progress = 1.0 if store is not None else min(1.0, max(0.0, state.progress()))
    sessions, queues, routers = state.sessions, state.queues, state.routers
    return Facts(
        ready=state.phase == "ready",
        progress=progress,
        uptime_ms=_uptime_ms(state),
        shards=state.shards(),
        store=None if store is None else _store_facts(store),
        connections=state.connections,
        watch_sessions=None if sessions is None else len(sessions),
        leases_in_flight=None if queues is None else queues.in_flight(),
        routers=None if routers is None else _routers_facts(routers),
    )


def _store_facts(store: Store) -> StoreFacts:
    shown, truncated = store.topic_states(TOPICS_SHOWN_MAX)
    assert len(shown) <= TOPICS_SHOWN_MAX
    return StoreFacts(
        topics_by_class={kind.value: count for kind, count in store.counts_by_class().items()},
        queue_topics=store.queue_topics,
        records_live=store.records_live,
        bytes_live=store.bytes_live,
        damaged_records=store.damaged_records,
        topics=[
            TopicFacts(
                topic.name,
                topic.head_seq,
                topic.earliest_seq,
                topic.count,
                topic.bytes,
                _queue_facts(topic),
            )
            for topic in shown
        ],
        topics_truncated=truncated,
    )


def _queue_facts(topic: TopicState) -> QueueFacts | None:
    queue = topic.queue
    if queue is None:
        return None
    return QueueFacts(queue.ready, queue.in_flight, queue.delayed, queue.dead_lettered)


def _routers_facts(routers: Routers) -> RoutersFacts:
    shown, truncated = routers.states(ROUTERS_SHOWN_MAX)
    assert len(shown) <= ROUTERS_SHOWN_MAX
    return RoutersFacts(
        len(routers),
        [
            RouterFacts(
                router.name, router.forwarded_total, router.lag, int(router.stalled is not None)
            )
            for router in shown
        ],
        truncated,
    )


def _uptime_ms(state: ServerState) -> int:
    return int(monotonic_ms() - state.started_ms)
