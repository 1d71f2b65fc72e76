"""Reads sources from the routers' cursors and appends copies.

The pump runs after the write path. When a source changes, the notifier calls its listener, which
queues the source's routers. The pump takes one page of one router after the other, for a fraction
of a millisecond in each loop turn; then it flushes the destinations' shards. The first change of a
loop turn is routed at once, after the answers to its writers, so that a client's next read finds
the copies. A router has one page in flight: cursor and copies become visible in the same apply,
then the next page follows. If the destination refuses a page, its router waits and tries again,
longer each time; other routers do not wait for it. Routers at the same position with the same
definition share the read and the copies. Loop thread only; sealed records are read off the loop.
Called by `routers/service` and by the wiring.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

from topics_server.engine.answers import ReadRequest
from topics_server.engine.commit.gates import BY_CLASS, gate_of
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.router_pages import RouterPages
from topics_server.engine.commit.ticket_waits import resolved
from topics_server.engine.ports import Clock
from topics_server.engine.read.page import PagePlan, plan_page
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.routers.copy_dedupe import held_copies
from topics_server.routers.fetches import PageFetches
from topics_server.routers.forward import Copies, copy_page
from topics_server.routers.router_table import Router, RouterTable
from topics_server.routers.routes import (
    PAGE_RECORDS,
    RETRY_MS_MIN,
    Crowd,
    RouterWork,
    SourceRoutes,
)
from topics_server.values.entries import CursorMoved, RouterPage, RouterStamp
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.limits import MIB
from topics_server.values.model import Gate, Guarantee, RouterDefinition, TagMatch

log: Final = logging.getLogger(__name__)

_PAGE_BYTES: Final = MIB
# How long routers run in one loop turn.
_SLICE_MS: Final = 0.5
# Others write if they submitted entries twice within `_OTHERS_MS`. Then a turn ends after
# `_BUSY_PAGES` pages and the pump pauses for `_REST_S`; pages grow meanwhile.
_OTHERS_MS: Final = 50.0
_BUSY_PAGES: Final = 2
_REST_S: Final = 0.001
# The maximum of routers of one source that are queued at once.
_QUEUED_AT_ONCE: Final = 64
_RETRY_MS_MAX: Final = 1_000.0
# The maximum of pages in flight to one shard under one gate. Pages whose gate opens at the same
# time are applied together.
_IN_FLIGHT_MAX: Final = 16
# The maximum of pages kept for other routers that reach the same position.
_SHARED_MAX: Final = 32
# After this many seqs without a copy the cursor is journaled, so that a restart does not examine
# them again.
_UNNOTED_SEQS_MAX: Final = 16_384

_ShareKey = tuple[int, int, int, int, TagMatch | None, bool, bool, bool, RouterStamp | None]


class Pump:
    """All running routers of one server. Nothing runs until `start`."""

    def __init__(
        self,
        table: RouterTable,
        store: Store,
        commits: CommitPipeline,
        notifier: Notifier,
        pages: RouterPages,
        clock: Clock,
        moved: Callable[[int], None],
    ) -> None:
        """`moved` is called with each topic whose cursors moved without an entry."""
        self._table = table
        self._store = store
        self._commits = commits
        self._notifier = notifier
        self._pages = pages
        self._clock = clock
        self._moved = moved
        self._routes: dict[int, RouterWork] = {}
        self._sources: dict[int, SourceRoutes] = {}
        self._ready: deque[RouterWork | SourceRoutes] = deque()
        self._shared: dict[_ShareKey, Copies] = {}
        self._crowds: dict[tuple[int, Gate], Crowd] = {}
        self._is_scheduled = False
        self._is_closed = False
        # Whether a turn was scheduled in this loop turn and has not begun, and whether one runs.
        self._may_route_now = False
        self._is_routing = False
        # Destinations whose submitted pages are not flushed yet.
        self._unflushed: set[int] = set()
        # The next lsn at the last check, and the entries that the pump has submitted since: the
        # difference shows how many entries other callers have submitted.
        self._lsn_seen = 0
        self._submitted = 0
        self._others_wrote_ms = -_OTHERS_MS
        self._others_until_ms = 0.0
        # The number of pages of this turn, and whether the next turn is scheduled for later.
        self._pages_sent = 0
        self._is_resting = False
        self._fetches = PageFetches(store)
        self._loop = asyncio.get_running_loop()

    # -- start, put, delete ----------------------------------------------------------------

    def start(self) -> None:
        """Start the routers; called once everything is recovered and may be read and written."""
        self._table.on_put = self.put
        self._table.on_gone = self.gone
        for router in self._table:
            self.put(router)

    def put(self, router: Router) -> None:
        """Start a new or changed router from its cursor."""
        route = self._routes.get(router.router_id)
        if route is None:
            topic = self._store.topic_of(router.source_id)
            if topic is None:
                return
            route = self._routes[router.router_id] = RouterWork(router)
            source = self._sources.get(router.source_id)
            if source is None:
                source = self._sources[router.source_id] = SourceRoutes(
                    router.source_id, self.queue, self.queue_source, self.route_now
                )
                self._notifier.add(router.source_id, source.notify)
            source.routes[router.router_id] = route
            self._pages.add_source(topic.topic_id)
        route.is_held = False
        # Look up the destination's copies again: some may have been deleted by now.
        route.known = None
        self._unstall(route)
        self.queue(route)

    def gone(self, router: Router) -> None:
        """Stop a deleted router: no new page starts."""
        route = self._routes.pop(router.router_id, None)
        if route is None:
            return
        route.is_over = True
        if route.timer is not None:
            route.timer.cancel()
        if route.fetching is not None:
            route.fetching.cancel()
        self._fetches.take(route, None)
        source = self._sources[router.source_id]
        del source.routes[router.router_id]
        if not source.routes:
            del self._sources[router.source_id]
            self._notifier.remove(router.source_id, source.notify)
            self._pages.remove_source(router.source_id)
        if route.in_flight is None:
            self._forget_cursor(router)

    def forget_blocks(self, source_id: int) -> None:
        """Discard this source's blocks: a segment was mended, and they have blank rows."""
        for route in self._routes.values():
            if route.blocks is not None and route.blocks[0] == source_id:
                self._fetches.take(route, None)

    def _forget_cursor(self, router: Router) -> None:
        dest = self._store.topic_of(router.dest_id)
        if dest is not None:
            dest.cursors.pop(router.router_id, None)
            self._moved(dest.topic_id)

    async def hold(self, router: Router) -> None:
        """Start no new page until `put` or `release`; return once no page is in flight."""
        route = self._routes.get(router.router_id)
        if route is None:
            return
        route.is_held = True
        while route.in_flight is not None:
            await resolved(route.in_flight)

    def release(self, router: Router) -> None:
        """Let a held router continue unchanged."""
        route = self._routes.get(router.router_id)
        if route is not None:
            route.is_held = False
            self.queue(route)

    def cursor(self, router: Router) -> tuple[int, int]:
        """The last examined seq of its source, and the number of its copies."""
        dest = self._store.topic_of(router.dest_id)
        at = None if dest is None else dest.cursors.get(router.router_id)
        if at is None:
            return router.start_seq, 0
        return max(router.start_seq, at.seq), at.copy_count

    def stalled(self, router: Router) -> tuple[str, str] | None:
        """The reason why the router is stalled; None if it runs."""
        route = self._routes.get(router.router_id)
        return None if route is None else route.stalled

    async def close(self) -> None:
        """Start no new page from now on; return when no read is under way."""
        self._is_closed = True
        self._ready.clear()
        fetching = [route.fetching for route in self._routes.values() if route.fetching]
        for route in self._routes.values():
            if route.timer is not None:
                route.timer.cancel()
                route.timer = None
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)

    # -- scheduling ------------------------------------------------------------------------

    def queue(self, route: RouterWork) -> None:
        """Queue this router."""
        if not route.is_queued and not route.is_waiting and not self._is_closed:
            route.is_queued = True
            self._ready.append(route)
            self._schedule()

    def queue_source(self, source: SourceRoutes) -> None:
        """Queue all routers of this source, a few at a time."""
        if not source.is_queued and not self._is_closed:
            source.is_queued = True
            self._ready.append(source)
            self._schedule()

    def route_now(self) -> None:
        """Route a changed source at once if the pump had nothing else to do.

        Further changes in this loop turn, also those by the new copies, wait for the scheduled
        turn, so that turns never nest.
        """
        if self._may_route_now and not self._is_routing:
            self._may_route_now = False
            self._route_slice()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            if self._is_resting:
                self._loop.call_later(_REST_S, self._turn)
            else:
                self._may_route_now = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = self._is_resting = self._may_route_now = False
        self._route_slice()
        if self._ready:
            self._schedule()
        elif not any(crowd.waiting for crowd in self._crowds.values()):
            self._shared.clear()

    def _route_slice(self) -> None:
        """Route page after page for a slice of time, then flush the destinations."""
        self._is_routing = True
        try:
            self._route_pages()
            unflushed = self._unflushed
            while unflushed:
                self._commits.flush(unflushed.pop())
        finally:
            self._is_routing = False

    def _route_pages(self) -> None:
        ready = self._ready
        now_ms = self._clock.monotonic_ms()
        are_others = self._are_others_writing(now_ms)
        ends_ms = now_ms + _SLICE_MS
        self._pages_sent = 0
        while ready:
            turn = ready.popleft()
            turn.is_queued = False
            if isinstance(turn, RouterWork):
                self._advance(turn)
                if turn.in_flight is None:
                    self._admit()
            else:
                self._spread(turn)
            if are_others and self._pages_sent >= _BUSY_PAGES:
                self._is_resting = True
                break
            if self._clock.monotonic_ms() >= ends_ms:
                break

    def _are_others_writing(self, now_ms: float) -> bool:
        """Whether other writers have submitted entries repeatedly of late."""
        next_lsn = self._commits.next_lsn
        if next_lsn - self._lsn_seen > self._submitted:
            if now_ms - self._others_wrote_ms < _OTHERS_MS:
                self._others_until_ms = now_ms + _OTHERS_MS
            self._others_wrote_ms = now_ms
        self._lsn_seen, self._submitted = next_lsn, 0
        return now_ms < self._others_until_ms

    def _spread(self, source: SourceRoutes) -> None:
        waiting = source.waiting
        for _ in range(min(_QUEUED_AT_ONCE, len(waiting))):
            self.queue(waiting.pop())
        if waiting:
            self.queue_source(source)

    # -- one page --------------------------------------------------------------------------

    def _advance(self, route: RouterWork) -> None:
        """Copy the router's next page if there is one and it can be read at once."""
        if route.is_waiting:
            return
        router = route.router
        source = self._store.topic_of(router.source_id)
        dest = self._store.topic_of(router.dest_id)
        if source is None or dest is None:
            return
        cursor_seq, _ = self.cursor(router)
        if cursor_seq >= source.log.head_seq:
            self._fetches.take(route, source)
            return
        crowd = self._crowd_of(dest)
        if crowd.count >= _IN_FLIGHT_MAX:
            route.is_queued = True
            crowd.waiting.append(route)
            return
        if not self._knows_copies(route, dest, cursor_seq):
            return
        try:
            copies = self._copies(route, source, dest, cursor_seq)
            if copies is not None:
                self._send(route, source, dest, copies)
        except TopicsError as error:
            self._refused(route, error)

    def _crowd_of(self, dest: Topic) -> Crowd:
        key = (self._commits.shard_of(dest.topic_id), BY_CLASS[dest.config.durability])
        crowd = self._crowds.get(key)
        if crowd is None:
            crowd = self._crowds[key] = Crowd()
        return crowd

    def _leave(self, crowd: Crowd) -> None:
        """Make room for the next router: a page was applied or has failed."""
        crowd.count -= 1
        self._admit()

    def _admit(self) -> None:
        """Queue one router that waits for room, if there is room.

        Called when a page is finished, and when a router's turn produced no page, so that no router
        waits while nothing is in flight.
        """
        for crowd in self._crowds.values():
            while crowd.waiting and crowd.count < _IN_FLIGHT_MAX:
                route = crowd.waiting.popleft()
                route.is_queued = False
                self.queue(route)
                if route.is_queued:
                    break

    def _knows_copies(self, route: RouterWork, dest: Topic, cursor_seq: int) -> bool:
        """Whether it is known which copies of the next records the destination has."""
        router = route.router
        if cursor_seq >= router.known_seq:
            route.known = None
            return True
        stamp = self._stamp(router)
        if stamp is None or route.known is not None:
            return True

        async def look() -> None:
            assert stamp is not None
            route.known = await held_copies(self._store, self._clock, dest, stamp)

        self._read(route, look)
        return False

    def _stamp(self, router: Router) -> RouterStamp | None:
        definition = router.definition
        if definition.guarantee is not Guarantee.EXACTLY_ONCE:
            return None
        source = self._store.topic_of(router.source_id)
        assert source is not None
        return RouterStamp(router.name, source.name, source.epoch)

    def _copies(
        self, route: RouterWork, source: Topic, dest: Topic, cursor_seq: int
    ) -> Copies | None:
        """The copies of the next page; None while the page is being read."""
        router = route.router
        definition = router.definition
        stamp = self._stamp(router)
        known = () if stamp is None or route.known is None else route.known
        key = self._key(source, cursor_seq, route.limit, definition, stamp)
        copies = None if known else self._shared.get(key)
        if copies is not None:
            self._fetches.take(route, source)
        else:
            plan = self._plan(source, cursor_seq, route.limit)
            page = self._store.resident(source, plan, self._fetches.take(route, source))
            if page is None:
                self._read(
                    route,
                    partial(self._fetches.fetch, route, source, plan, lambda: key in self._shared),
                )
                return None
            copies = copy_page(page, definition, stamp, known)
            if len(self._shared) >= _SHARED_MAX:
                self._shared.clear()
            if not known:
                self._shared[key] = copies
        return copies

    @staticmethod
    def _key(
        source: Topic,
        cursor_seq: int,
        limit: int,
        definition: RouterDefinition,
        stamp: RouterStamp | None,
    ) -> _ShareKey:
        return (
            source.topic_id,
            source.revision,
            cursor_seq,
            limit,
            definition.filter,
            definition.preserve_node,
            definition.preserve_tag,
            definition.allow_cycle,
            stamp,
        )

    def _plan(self, source: Topic, cursor_seq: int, limit: int) -> PagePlan:
        request = ReadRequest(cursor_seq, limit, _PAGE_BYTES)
        return plan_page(source, request, self._clock.now_ms())

    def _read(self, route: RouterWork, reading: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run a read off the loop for this router, then queue it again."""

        async def read() -> None:
            failure: StorageError | TopicsError | None = None
            try:
                await reading()
            except (StorageError, TopicsError) as error:
                # Without its traceback, which refers to this frame.
                failure = error.with_traceback(None)
            finally:
                route.fetching = None
            if route.is_over:
                return
            if failure is None:
                self.queue(route)
            elif isinstance(failure, TopicsError):
                self._refused(route, failure)
            else:
                log.error("router %s cannot read: %s", route.router.name, failure)
                self._stall(route, Code.INTERNAL.value, "its source cannot be read")

        route.fetching = self._loop.create_task(read())

    def _send(self, route: RouterWork, source: Topic, dest: Topic, copies: Copies) -> None:
        """Submit the copies, or move the cursor if there are none."""
        router = route.router
        if copies.is_empty:
            dest.advance_cursor(router.router_id, copies.cursor_seq)
            self._moved(dest.topic_id)
            self._note(route, dest, copies.cursor_seq)
            self._unstall(route)
            self.queue(route)
            return
        page = RouterPage(
            router_id=router.router_id,
            source_id=router.source_id,
            cursor_seq=copies.cursor_seq,
            firsts=copies.firsts,
            lasts=copies.lasts,
            preserve_node=router.definition.preserve_node,
            preserve_tag=router.definition.preserve_tag,
            stamp=copies.stamp,
            lost=copies.lost,
            hops=copies.hops,
        )
        omits_payloads = bool(copies.firsts) and self._pages.may_omit_payloads(
            source, dest, copies.firsts[0]
        )
        body = copies.body if copies.firsts and not omits_payloads else bytes
        ticket = self._store.append_page(dest, page, copies.decoded, body)
        if ticket is None:
            # A create, configure or drop of the destination is in flight.
            self._wait(route)
            return
        self._submitted += 1
        self._pages_sent += 1
        if omits_payloads:
            self._pages.follow_page(ticket)
        route.noted_seq = copies.cursor_seq
        if ticket.is_done:
            self._resolved(route, ticket)
        else:
            route.in_flight = ticket
            self._unflushed.add(dest.topic_id)
            crowd = self._crowd_of(dest)
            crowd.count += 1
            ticket.waiters.append(partial(self._leave, crowd))
            ticket.waiters.append(partial(self._resolved, route, ticket))

    def _resolved(self, route: RouterWork, ticket: Ticket) -> None:
        route.in_flight = None
        if route.is_over:
            # A failed page has set the router's cursor back: forget the cursor again.
            self._forget_cursor(route.router)
            return
        if ticket.error is not None:
            self._refused(route, ticket.error)
            return
        self._unstall(route)
        if route.limit < PAGE_RECORDS:
            route.limit = min(PAGE_RECORDS, 2 * route.limit)
        self.queue(route)

    def _note(self, route: RouterWork, dest: Topic, cursor_seq: int) -> None:
        """Journal a cursor that moved far without a copy. If refused, try again later."""
        unnoted = cursor_seq - max(route.noted_seq, route.router.start_seq)
        if unnoted < _UNNOTED_SEQS_MAX or dest.is_ephemeral or dest.staging.has_control:
            return
        entry = CursorMoved(dest.topic_id, route.router.router_id, cursor_seq)
        try:
            self._commits.submit(entry, gate_of(entry, dest), dest)
        except TopicsError:
            return
        route.noted_seq = cursor_seq

    # -- waiting ---------------------------------------------------------------------------

    def _refused(self, route: RouterWork, error: TopicsError) -> None:
        """Retry a page that the destination refused: a smaller page, or later."""
        if error.code is Code.TOPIC_FULL and route.limit > 1:
            route.limit = max(1, route.limit // 8)
            self.queue(route)
            return
        self._stall(route, error.code.value, error.message)

    def _stall(self, route: RouterWork, code: str, message: str) -> None:
        if route.stalled is None:
            log.warning("router %s waits: %s", route.router.name, message)
        route.stalled = (code, message)
        self._wait(route)

    def _unstall(self, route: RouterWork) -> None:
        if route.stalled is not None:
            log.info("router %s goes on", route.router.name)
            route.stalled = None
        route.retry_ms = RETRY_MS_MIN
        if route.timer is not None:
            route.timer.cancel()
            route.timer = None

    def _wait(self, route: RouterWork) -> None:
        if self._is_closed or route.is_over or route.timer is not None:
            return
        route.timer = self._loop.call_later(route.retry_ms / 1000, self._again, route)
        route.retry_ms = min(_RETRY_MS_MAX, 2 * route.retry_ms)

    def _again(self, route: RouterWork) -> None:
        route.timer = None
        self.queue(route)
