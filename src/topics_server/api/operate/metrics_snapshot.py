"""Gathers the metrics snapshot of a scrape.

Counters are copied. Facts that need a scan (topics, routers, leases, readers) are gathered in
slices. Other tasks run between the slices, so the facts of one scrape are a few milliseconds apart.
A thread adds up the sizes of the files on disk. Called by `api/operate/probes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, TypeVar

from topics_server.api.context import Routers, ServerState, StorePort
from topics_server.api.messages.visibility import list_topics
from topics_server.api.watch.broadcast import BroadcastStream, Fanout
from topics_server.auth.api_keys import EVERYBODY, Caller
from topics_server.engine.answers import TopicState
from topics_server.engine.pressure.throttle import Throttle
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import (
    ROUTERS_SHOWN_MAX,
    TOPICS_SHOWN_MAX,
    ConnectionFacts,
    ConsumerMetrics,
    Facts,
    PressureFacts,
    QueueFacts,
    RouterFacts,
    RoutersFacts,
    StoreFacts,
    TopicMetrics,
    ViewMetrics,
    ViewsFacts,
    WatchFacts,
)
from topics_server.views.service import Views

# Rows that are scanned in one loop turn: well below a millisecond.
_SLICE: Final = 50

T = TypeVar("T")


async def facts_of(state: ServerState, version: str, caller: Caller = EVERYBODY) -> Facts:
    """All facts of a scrape, in any phase.

    Includes only the topics, routers and views that the caller may see.
    """
    store = state.store if state.phase != "replaying" else None
    progress = 1.0 if store is not None else min(1.0, max(0.0, state.progress()))
    sessions, queues, routers, fanout = state.sessions, state.queues, state.routers, state.fanout
    return Facts(
        ready=state.phase == "ready",
        progress=progress,
        uptime_ms=int(monotonic_ms() - state.started_ms),
        shards=state.shards(),
        store=None if store is None else await _store_facts(store, caller),
        connections=state.connections,
        watch_sessions=None if sessions is None else len(sessions),
        leases_in_flight=None if queues is None else await _last(queues.count_in_flight(_SLICE)),
        routers=None if routers is None else await _routers_facts(routers, caller),
        views=None if state.views is None else await _views_facts(state.views, caller),
        version=version,
        requests=state.requests(),
        http=_connection_facts(state),
        watchers=None if fanout is None else await _watch_facts(fanout),
        disk=None if state.disk is None or store is None else await asyncio.to_thread(state.disk),
        recovery=state.recovery,
        pressure=None if store is None else _pressure_facts(state.throttle),
        log_lines_dropped=_asked(state.log_lines_dropped),
        backups=None if state.backups is None else state.backups.metrics(),
        archive=None if state.archiver is None else state.archiver.metrics(),
        scrub=_asked(state.scrub),
        mending=_asked(state.mending),
    )


def _connection_facts(state: ServerState) -> ConnectionFacts:
    timeouts = state.timeouts
    return ConnectionFacts(
        timeouts.open,
        timeouts.most,
        dict(timeouts.timeouts),
        timeouts.evicted,
        timeouts.refused,
        0 if state.read_scheduler is None else state.read_scheduler.put_off,
        state.uploads.held_bytes,
        state.uploads.max_bytes,
        state.uploads.refused,
    )


def _pressure_facts(throttle: Throttle) -> PressureFacts:
    wait_queue = throttle.wait_queue
    return PressureFacts(
        loop_lag_ms=throttle.lag_ms,
        backlog_bytes=throttle.backlog_bytes,
        pressure=throttle.pressure,
        waiting=wait_queue.waiting,
        waiting_bytes=wait_queue.held_bytes,
        queued=throttle.queued_total,
        throttled=dict(throttle.throttled_total),
        fair=wait_queue.fair_total,
        threshold=throttle.threshold,
    )


def _asked(source: Callable[[], T] | None) -> T | None:
    return None if source is None else source()


async def _last(steps: Iterator[int]) -> int:
    """The last value of `steps`. Other tasks run between the steps."""
    total = 0
    for so_far in steps:
        total = so_far
        await asyncio.sleep(0)
    return total


async def _store_facts(store: StorePort, caller: Caller) -> StoreFacts:
    shown: list[TopicMetrics] = []
    after: str | None = None
    is_more = True
    while is_more and len(shown) < TOPICS_SHOWN_MAX:
        size = min(_SLICE, TOPICS_SHOWN_MAX - len(shown))
        page = list_topics(store, caller, prefix="", after=after, page_size=size, touch=False)
        shown += map(_topic_facts, page.topics)
        after = page.next_after
        is_more = after is not None
        await asyncio.sleep(0)
    assert len(shown) <= TOPICS_SHOWN_MAX
    consumers, are_more_consumers = await _consumer_metrics(store, caller)
    return StoreFacts(
        topics_by_class={kind.value: count for kind, count in store.counts_by_class().items()},
        queue_topics=store.queue_topics,
        records_live=store.records_live,
        bytes_live=store.bytes_live,
        damaged_records=store.damaged_records,
        consumers=consumers,
        consumers_truncated=are_more_consumers,
        conditions={
            "met": store.condition_counts.met,
            "failed": store.condition_counts.failed,
        },
        topics=shown,
        topics_truncated=is_more,
    )


def _topic_facts(topic: TopicState) -> TopicMetrics:
    queue = topic.queue
    facts = None
    if queue is not None:
        facts = QueueFacts(queue.ready, queue.in_flight, queue.delayed, queue.dead_lettered)
    return TopicMetrics(
        topic.name, topic.head_seq, topic.earliest_seq, topic.count, topic.bytes, facts
    )


async def _consumer_metrics(store: StorePort, caller: Caller) -> tuple[list[ConsumerMetrics], bool]:
    """The lags and holds of the consumers that the caller may see, up to the bound of a block.

    Also returns whether there are more.
    """
    shown: list[ConsumerMetrics] = []
    for number, (topic, consumer, lag, held) in enumerate(store.consumer_lags(), 1):
        if number % _SLICE == 0:
            await asyncio.sleep(0)
        if not caller.prefixes or caller.may_name(topic):
            if len(shown) == ROUTERS_SHOWN_MAX:
                return shown, True
            shown.append(ConsumerMetrics(f"{topic}/{consumer}", lag, held))
    return shown, False


async def _views_facts(views: Views, caller: Caller) -> ViewsFacts:
    shown: list[ViewMetrics] = []
    for number, view in enumerate(views.states(), 1):
        if number % _SLICE == 0:
            await asyncio.sleep(0)
        if len(shown) < ROUTERS_SHOWN_MAX and (not caller.prefixes or caller.may_name(view.topic)):
            failed = int(view.status == "failed")
            name = f"{view.topic}/{view.name}"
            shown.append(
                ViewMetrics(
                    name, view.applied_total, view.processed_seq, view.lag, failed, view.bytes
                )
            )
    return ViewsFacts(
        len(views),
        shown,
        len(views) > ROUTERS_SHOWN_MAX,
        views.queries_total,
        views.timeouts_total,
        views.query_latency,
    )


async def _routers_facts(routers: Routers, caller: Caller) -> RoutersFacts:
    shown: list[RouterFacts] = []
    after: str | None = None
    is_more = True
    while is_more and len(shown) < ROUTERS_SHOWN_MAX:
        page = routers.page(
            prefix="",
            source=None,
            dest=None,
            after=after,
            page_size=min(_SLICE, ROUTERS_SHOWN_MAX - len(shown)),
            may_name=caller.may_name if caller.prefixes else None,
        )
        shown += [
            RouterFacts(
                router.name, router.forwarded_total, router.lag, int(router.stalled is not None)
            )
            for router in page.routers
        ]
        after = page.next_after
        is_more = after is not None
        await asyncio.sleep(0)
    assert len(shown) <= ROUTERS_SHOWN_MAX
    return RoutersFacts(len(routers), shown, is_more)


async def _watch_facts(fanout: Fanout) -> WatchFacts:
    """The lag of the readers of open streams."""
    behind = lag_max = lag_sum = 0
    lags = _lags(fanout, tuple(fanout.streams))
    while chunk := list(islice(lags, _SLICE)):
        for lag in chunk:
            behind += lag > 0
            lag_sum += lag
            lag_max = max(lag_max, lag)
        await asyncio.sleep(0)
    return WatchFacts(behind, lag_max, lag_sum, fanout.slow_count)


def _lags(fanout: Fanout, streams: tuple[BroadcastStream, ...]) -> Iterator[int]:
    for stream in streams:
        for cursor in tuple(stream.cursors.values()):
            yield fanout.dispatcher.lag_of(cursor)
