"""The running state of each router and each source.

Used by `routers/pump` only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.read.page import Fetch
from topics_server.routers.router_table import Router
from topics_server.values.blocks import Block

PAGE_RECORDS: Final = 1_000
RETRY_MS_MIN: Final = 10.0


class RouterWork:
    """One router at work."""

    __slots__ = (
        "blocks",
        "fetching",
        "in_flight",
        "is_held",
        "is_over",
        "is_queued",
        "known",
        "limit",
        "noted_seq",
        "retry_ms",
        "router",
        "stalled",
        "timer",
    )

    def __init__(self, router: Router) -> None:
        self.router = router
        self.is_queued = False
        # Whether the router is being changed or deleted: no new page starts.
        self.is_held = False
        self.is_over = False
        self.in_flight: Ticket | None = None
        self.fetching: asyncio.Task[None] | None = None
        # The sealed blocks that were read for the next page, and the topic id of their source.
        self.blocks: tuple[int, dict[Fetch, Block]] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.stalled: tuple[str, str] | None = None
        self.retry_ms = RETRY_MS_MIN
        # The maximum of records in a page; lower while the destination has little room.
        self.limit = PAGE_RECORDS
        # Seqs up to `router.known_seq` whose copies the destination holds; None: not looked up yet.
        self.known: set[int] | None = None
        self.noted_seq = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the next page must wait: a read, a ticket or a timer of the router is pending."""
        return (
            self.is_held
            or self.is_over
            or self.in_flight is not None
            or self.fetching is not None
            or self.timer is not None
        )


class SourceRoutes:
    """The routers of one topic; `notify` is the topic's listener."""

    __slots__ = ("is_queued", "queue", "queue_all", "route_now", "routes", "topic_id", "waiting")

    def __init__(
        self,
        topic_id: int,
        queue: Callable[[RouterWork], None],
        queue_all: Callable[[SourceRoutes], None],
        route_now: Callable[[], None],
    ) -> None:
        self.topic_id = topic_id
        self.queue = queue
        self.queue_all = queue_all
        self.route_now = route_now
        self.routes: dict[int, RouterWork] = {}
        self.is_queued = False
        # Routes of this source that are still to be queued.
        self.waiting: list[RouterWork] = []

    def notify(self) -> None:
        """Queue the routers of this source: the topic has changed."""
        if len(self.routes) == 1:
            for route in self.routes.values():
                self.queue(route)
        else:
            self.waiting = list(self.routes.values())
            self.waiting.reverse()
            self.queue_all(self)
        self.route_now()


class Crowd:
    """The pages in flight to one shard under one gate, and the routers that wait for room."""

    __slots__ = ("count", "waiting")

    def __init__(self) -> None:
        self.count = 0
        self.waiting: deque[RouterWork] = deque()
