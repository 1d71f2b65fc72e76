"""The router service: put, get, list, delete (§6).

One change at a time: each is checked against the current routers and made durable before the next
starts. A refused router leaves nothing behind. A router has no page in flight while it changes; the
records that its source had before the change follow the old definition. Called by
`api/routers/handlers` and `api/topics/handlers`; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from topics_server.engine.commit.gates import LAST_CURSOR, gate_of_service
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.ticket_waits import applied
from topics_server.engine.ports import Clock
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.routers.pump import Pump
from topics_server.routers.router_table import Router, RouterTable
from topics_server.values.entries import CursorMoved, RouterDeleted, RouterEntry, RouterPut
from topics_server.values.errors import Code, TopicsError, topic_not_found
from topics_server.values.model import RouterDefinition
from topics_server.values.router_answers import (
    RouterListPage,
    RouterOutcome,
    RouterSpec,
    RouterState,
)

# Give up when the topic is dropped this many times while the router is being created.
_TRIES_MAX: Final = 8


class RouterService:
    """The routers of a server that has recovered. `max_routers`: 0 is unlimited."""

    def __init__(
        self,
        table: RouterTable,
        pump: Pump,
        store: Store,
        commits: CommitPipeline,
        clock: Clock,
        *,
        max_routers: int,
    ) -> None:
        self._table = table
        self._pump = pump
        self._store = store
        self._commits = commits
        self._clock = clock
        self._max_routers = max_routers
        self._changing = asyncio.Lock()
        table.exists = self._exists

    def __len__(self) -> int:
        return len(self._table)

    def _exists(self, topic_id: int) -> bool:
        return self._store.topic_of(topic_id) is not None

    # -- looking ---------------------------------------------------------------------------

    def get(self, name: str) -> RouterState:
        """A router's current state. Raises `router_not_found`."""
        router = self._table.find(name)
        if router is None:
            raise TopicsError(
                Code.ROUTER_NOT_FOUND, f'router "{name}" does not exist', {"router": name}
            )
        return self._state(router)

    def page(
        self,
        *,
        prefix: str,
        source: str | None,
        dest: str | None,
        after: str | None,
        page_size: int,
        may_name: Callable[[str], bool] | None = None,
    ) -> RouterListPage:
        """The routers whose names follow `after`, in order.

        With `may_name`, only the routers that `may_name` accepts.
        """
        found, next_after = self._table.page(
            prefix=prefix,
            source=source,
            dest=dest,
            after=after,
            size=page_size,
            may_name=may_name,
        )
        return RouterListPage([self._state(router) for router in found], next_after)

    def routers_of(self, topic_name: str) -> list[str]:
        """Names of the routers that are deleted if this topic is dropped, in order."""
        try:
            topic = self._store.topic(topic_name)
        except TopicsError:
            return []
        return self._table.of_topic(topic.topic_id)

    def _state(self, router: Router) -> RouterState:
        cursor_seq, copy_count = self._pump.cursor(router)
        source = self._store.topic_of(router.source_id)
        head_seq = cursor_seq if source is None else source.log.head_seq
        return RouterState(
            name=router.name,
            definition=router.definition,
            forwarded_total=copy_count,
            cursor_seq=cursor_seq,
            lag=max(0, head_seq - cursor_seq),
            stalled=self._pump.stalled(router),
        )

    # -- changing --------------------------------------------------------------------------

    async def put(self, name: str, spec: RouterSpec) -> RouterOutcome:
        """Create a router, or change it to this definition; durable before it returns.

        Raises `TopicsError`, after which nothing has changed: `topic_not_found` (no destination,
        and none is to be created), `router_cycle`, `topic_exists_incompatible`, `throttled`.
        """
        async with self._changing:
            for _ in range(_TRIES_MAX):
                outcome = await self._put(name, spec)
                if outcome is not None:
                    return outcome
        raise TopicsError(
            Code.THROTTLED, "a topic of the router is being dropped", {"limit": "topics_dropped"}
        )

    async def _put(self, name: str, spec: RouterSpec) -> RouterOutcome | None:
        """Create or change the router; None if a topic was dropped meanwhile."""
        definition = spec.definition
        router = self._table.find(name)
        if router is not None and router.definition == definition:
            return RouterOutcome(created=False, definition=definition)
        self._table.check(name, definition)
        created = router is None
        if created and self._max_routers and len(self._table) >= self._max_routers:
            raise TopicsError(
                Code.THROTTLED,
                "the server has reached its limit of routers",
                {"limit": "max_routers", "max": self._max_routers},
            )
        source, dest = await self._topics(definition, create_dest=spec.create_dest)
        try:
            if router is not None:
                await self._quiesce(router)
            gone = self._table.find(name) is not router
            if gone or self._is_going(source) or self._is_going(dest):
                return None
            if router is None or (router.source_id, router.dest_id) != (
                source.topic_id,
                dest.topic_id,
            ):
                entry = self._decide_new(name, spec, source, dest)
            else:
                entry = self._decide_change(router, definition)
            ticket = await self._commit(entry)
        finally:
            if router is not None:
                self._pump.release(router)
        if self._table.find(name) is None:
            return None
        return RouterOutcome(created, definition, ticket.write_ms, ticket.sync_ms)

    async def _quiesce(self, router: Router) -> None:
        """Stop a router and make its copies as durable as the following change.

        The changed router starts where this one ends, so a copy that a power loss removed from the
        destination would never be made again. A new router of the same name must find the copies of
        this one.
        """
        await self._pump.hold(router)
        dest = self._store.topic_of(router.dest_id)
        if dest is None or dest.is_ephemeral or dest.staging.has_drop:
            return
        cursor_seq, _ = self._pump.cursor(router)
        moved = CursorMoved(dest.topic_id, router.router_id, cursor_seq)
        gate = LAST_CURSOR[dest.config.durability]
        await self._resolved(self._commits.submit(moved, gate, dest, urgent=True))

    async def _topics(
        self, definition: RouterDefinition, *, create_dest: bool
    ) -> tuple[Topic, Topic]:
        """Find source and destination; create both if missing, or none if one has no room."""
        missing = [n for n in (definition.source, definition.dest) if self._find(n) is None]
        if definition.dest in missing and not create_dest:
            raise topic_not_found(definition.dest)
        self._store.check_room(*missing)
        source = await self._store.create_topic(definition.source)
        dest = await self._store.create_topic(definition.dest, beside=source)
        return source, dest

    def _find(self, name: str) -> Topic | None:
        try:
            return self._store.topic(name)
        except TopicsError:
            return None

    def _is_going(self, topic: Topic) -> bool:
        return topic.staging.has_drop or self._store.topic_of(topic.topic_id) is not topic

    def _decide_new(self, name: str, spec: RouterSpec, source: Topic, dest: Topic) -> RouterPut:
        head_seq = source.log.head_seq
        start_seq = source.log.evict_floor - 1 if spec.from_earliest else head_seq
        return RouterPut(
            router_id=self._table.next_router_id,
            name=name,
            ts=self._clock.now_ms(),
            definition=spec.definition,
            source_id=source.topic_id,
            dest_id=dest.topic_id,
            start_seq=start_seq,
            # An earlier router of this name may have copied the first records of this one.
            known_seq=head_seq if spec.from_earliest and dest.log.live_count else 0,
        )

    def _decide_change(self, router: Router, definition: RouterDefinition) -> RouterPut:
        cursor_seq, _ = self._pump.cursor(router)
        return RouterPut(
            router_id=router.router_id,
            name=router.name,
            ts=self._clock.now_ms(),
            definition=definition,
            source_id=router.source_id,
            dest_id=router.dest_id,
            start_seq=cursor_seq,
            known_seq=router.known_seq,
        )

    async def delete(self, name: str) -> bool:
        """Delete a router; its copies stay. Durable before it returns. False: no such router."""
        async with self._changing:
            router = self._table.find(name)
            if router is None:
                return False
            await self._pump.hold(router)
            if self._table.find(name) is not router:
                return False  # a dropped topic took the router along
            try:
                await self._commit(RouterDeleted(router.router_id, name, self._clock.now_ms()))
            except TopicsError:
                self._pump.release(router)
                raise
            return True

    async def _commit(self, entry: RouterEntry) -> Ticket:
        return await self._resolved(
            self._commits.submit(entry, gate_of_service(entry), self._table, urgent=True)
        )

    async def _resolved(self, ticket: Ticket) -> Ticket:
        await applied(ticket)
        return ticket
