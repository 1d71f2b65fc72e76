"""The queue service: claim, ack, nack, extend and waiting claims (§10).

A claim is decided and applied in one loop turn, unless the queue's leases are durable: then it
waits for its entry like a write. A waiting claim (`wait_ms`), a push stream, and every claim while
a coalescing window is open wait in the consumer queue (`dispatcher`). Payloads are read after the
decision; unreadable jobs are released. Most claims need none of this (`claims`). An ack deletes the
records, with the durability of the topic's class (`acks`). The lease book makes all decisions; the
disconnect of a client changes no decision. Called by `api/queues/handlers`, `api/operate/probes`,
`queue/push`; loop thread only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from topics_server.engine.answers import QueueCounts
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.ticket_waits import applied
from topics_server.engine.ports import Clock
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.queue.acks import Acks, PendingAck, why
from topics_server.queue.answers import (
    AckResult,
    ClaimResult,
    ExtendResult,
    FirstLeases,
    LeasedJob,
    LeasePage,
    NackResult,
    Redriven,
)
from topics_server.queue.claims import ImmediateClaims
from topics_server.queue.dispatch.alarm import Alarm
from topics_server.queue.dispatch.consumer_queue import Claimer, ClaimGrant, ConsumerQueue, Poll
from topics_server.queue.dispatch.dead_letter_moves import Mover
from topics_server.queue.dispatch.dispatcher import ClaimDispatcher
from topics_server.queue.dispatch.lease_changes import Leasing
from topics_server.queue.leases.lease_book import LeaseBook
from topics_server.queue.leases.lease_log import LeaseLogs
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.queue.step_clock import StepClock
from topics_server.values.entries import LeasesExtended, LeasesReleased
from topics_server.values.errors import Code, StorageError, TopicsError, invalid
from topics_server.values.model import TagMatch, TopicConfig, TopicType

log: Final = logging.getLogger(__name__)

# Access to an enum member costs a lookup, and every claim and ack needs it.
_QUEUE: Final = TopicType.QUEUE
# The number of loop turns until a waiting claim sees a disconnect. A disconnect before the jobs
# arrived is then seen, so that the jobs are released and not leased to a disconnected client.
_NOTICE_TURNS: Final = 4


class QueueService:
    """The queues of a server that has recovered.

    `on_moved` is called for a change without an entry in the journal.
    """

    def __init__(
        self,
        store: Store,
        lease_table: LeaseTable,
        commits: CommitPipeline,
        notifier: Notifier,
        clock: Clock,
        *,
        on_moved: Callable[[], None],
    ) -> None:
        self._store = store
        self._lease_table = lease_table
        self._on_moved = on_moved
        # Every call of a book uses this clock, so that the book is adjusted to a step before the
        # call.
        self._clock = clock = step_clock = StepClock(clock)
        # Leases may survive a kill, so connections of different starts never have the same number.
        self._connections = itertools.count((clock.now_ms() << 20) + 1)
        self.dispatcher = ClaimDispatcher(store, lease_table, notifier, clock)
        self.logs = LeaseLogs(store)
        self.mover = Mover(store, lease_table, clock, self.dispatcher.stir, self.logs)
        self.leasing = Leasing(
            lease_table, commits, clock, self.logs, stir=self.dispatcher.stir, on_moved=on_moved
        )
        self.dispatcher.leasing = self.leasing
        self.dispatcher.mover = self.mover
        self.acks = Acks(store, lease_table, clock, self.dispatcher, self.leasing)
        self._immediate = ImmediateClaims(
            store, lease_table, clock, self.dispatcher, on_moved=on_moved
        )
        step_clock.on_step = self._stepped
        lease_table.free_soon(lambda free: asyncio.get_running_loop().call_soon(free))

    def _stepped(self, by_ms: int) -> None:
        self._lease_table.shift(by_ms)
        self.dispatcher.shift(by_ms)

    def readmit(self, topic_id: int, first_seq: int, last_seq: int) -> None:
        """Make mended jobs of these seqs claimable again."""
        book = self._lease_table.find(topic_id)
        if book is not None:
            book.unclaimed.readmit(first_seq, last_seq)
            self._on_moved()
            self.dispatcher.stir(topic_id)

    # -- claim -----------------------------------------------------------------------------

    async def claim(
        self,
        name: str,
        node: str,
        max_jobs: int,
        lease_ms: int | None,
        *,
        wait_ms: int,
        gone: Callable[[], Awaitable[None]],
    ) -> ClaimResult | None:
        """Lease jobs to a node (§10.2); waits up to `wait_ms` for the first job.

        `gone` returns when the client has disconnected; then the result is None, and the leased
        jobs are released.
        """
        topic, _ = await self.queue(name)
        topic.last_read_ts = self._clock.now_ms()
        poll = Poll(node, max_jobs, lease_ms)
        consumers = self.dispatcher.consumers(topic)
        consumers.join(poll)
        try:
            jitter_ms = topic.config.claim_jitter_ms
            if not wait_ms or self.dispatcher.is_draining:
                consumers.tell_passed(poll)
            if jitter_ms and not self.dispatcher.is_draining:
                consumers.open_window(jitter_ms)
            else:
                consumers.serve()
            if not poll.outcome.done() and not await self._waited(consumers, poll, wait_ms, gone):
                self._give_up(poll)
                return None
            grant = poll.outcome.result()
        finally:
            self.dispatcher.leave(consumers, poll)
            # An error of the outcome refers to this frame, so the frame must not refer to it.
            del poll
        jobs = [] if grant is None else await self.read(grant, grant.claim.jobs[0].seq)
        return ClaimResult(jobs, self.counts(topic).ready)

    def claim_at_once(
        self, name: str, node: str, max_jobs: int, lease_ms: int | None, *, waits: bool
    ) -> FirstLeases | None:
        """The short path of `claim`, for most claims; None: nothing was done, call `claim`.

        `waits`: whether the claim may wait for a job.
        """
        found = self._stable_queue(name)
        if found is None:
            return None
        leased = self._immediate.claim(*found, node, max_jobs, lease_ms)
        return None if waits and leased is not None and not leased.seqs else leased

    def claim_and_begin_ack(
        self,
        name: str,
        node: str,
        max_jobs: int,
        lease_ms: int | None,
        *,
        seqs: Sequence[int],
        lease_ids: Sequence[int] | None,
        waits: bool,
    ) -> tuple[PendingAck, FirstLeases] | None:
        """`claim_at_once` and `begin_ack` in one step; None: nothing was done.

        If the ack fails later, give the leases back (`give_back_first`).
        """
        found = self._stable_queue(name)
        if found is None:
            return None
        topic, book = found
        in_flight = self.acks.in_flight.get(topic.topic_id)
        if in_flight and not in_flight.keys().isdisjoint(seqs):
            return None
        leased = self._immediate.claim(topic, book, node, max_jobs, lease_ms)
        if leased is None or (waits and not leased.seqs):
            return None
        try:
            return self.acks.begin(topic, book, node, seqs, lease_ids), leased
        except TopicsError:
            self.give_back_first(topic, leased)
            raise

    def give_back_first(self, topic: Topic, leased: FirstLeases) -> None:
        """Release leases whose jobs do not reach a client."""
        book = self._lease_table.find(topic.topic_id)
        if book is not None:
            leases = zip(leased.seqs, itertools.count(leased.first_id), strict=False)
            entry = book.decide_give_back(self._clock.now_ms(), leases)
            self.leasing.release(topic, book, entry)

    def coalesces(self, name: str) -> bool:
        """Whether a claim on this queue may need to wait for a coalescing window."""
        topic = self._store.topic(name)
        return topic.config.claim_jitter_ms > 0

    async def _waited(
        self,
        consumers: ConsumerQueue,
        poll: Poll,
        wait_ms: int,
        gone: Callable[[], Awaitable[None]],
    ) -> bool:
        """Wait for the outcome; returns False if the client disconnected first."""
        self.dispatcher.listen(consumers)
        if wait_ms:

            def late() -> None:
                # The window that the claim joined still serves it.
                if consumers.has_window:
                    consumers.tell_passed(poll)
                else:
                    poll.passed()

            poll.limit = Alarm(self._clock, wait_ms, late)
        leaving = asyncio.ensure_future(gone())
        try:
            await asyncio.wait((poll.outcome, leaving), return_when=asyncio.FIRST_COMPLETED)
            for _ in range(_NOTICE_TURNS):
                if leaving.done():
                    break
                await asyncio.sleep(0)
            return not leaving.done()
        finally:
            leaving.cancel()
            if poll.limit is not None:
                poll.limit.cancel()

    def _give_up(self, poll: Poll) -> None:
        """End the claim of a disconnected client."""
        if not poll.outcome.done():
            poll.outcome.cancel()
        elif poll.outcome.exception() is None:
            grant = poll.outcome.result()
            if grant is not None:
                self.leasing.give_back(grant)

    async def read(
        self, grant: ClaimGrant, from_seq: int, limit: int | None = None
    ) -> list[LeasedJob]:
        """The granted jobs from this seq on with their records, once the leases are durable.

        Deleted jobs are omitted. If reading fails, the jobs are released and the error is raised.
        """
        if grant.ticket is not None:
            await applied(grant.ticket)
        claim = grant.claim
        jobs = {job.seq: job for job in claim.jobs if job.seq >= from_seq}
        seqs = list(jobs)[:limit]
        try:
            rows = await self._store.read_rows(grant.topic, seqs)
        except (StorageError, TopicsError):
            self.leasing.give_back(grant, from_seq)
            raise
        found: list[LeasedJob] = []
        for block, row in rows:
            job = jobs[block.first_seq + row]
            found.append(
                LeasedJob(job.seq, job.lease_id, claim.deadline_ms, job.deliveries, block, row)
            )
        return found

    # -- ack -------------------------------------------------------------------------------

    async def ack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[int] | None
    ) -> AckResult:
        """Complete jobs (§10.4): delete those that this node holds."""
        topic, book = await self.queue(name)
        ack = self.acks.begin(topic, book, node, seqs, lease_ids)
        for ticket in tuple(ack.tickets):
            await applied(ticket)
        return ack.outcome()

    def begin_ack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[int] | None
    ) -> PendingAck | None:
        """Begin an ack that waits only for its own delete; None: nothing was done."""
        found = self._stable_queue(name)
        if found is None:
            return None
        in_flight = self.acks.in_flight.get(found[0].topic_id)
        if in_flight and not in_flight.keys().isdisjoint(seqs):
            return None
        return self.acks.begin(*found, node, seqs, lease_ids)

    # -- nack, extend, leases --------------------------------------------------------------

    async def nack(
        self,
        name: str,
        node: str,
        seqs: Sequence[int],
        lease_ids: Sequence[int] | None,
        *,
        delay_ms: int,
        error: str = "",
    ) -> NackResult:
        """Release jobs (§10.5); after `delay_ms` they are claimable again.

        `error` is the reason, which a dead letter shows.
        """
        topic, book = await self.queue(name)
        now_ms = self._clock.now_ms()
        entry, skipped = book.decide_nack(now_ms, node, seqs, lease_ids, delay_ms, error)
        reasons = why(topic, book, node, seqs, lease_ids, skipped)
        if entry is not None:
            await self._change(topic, book, entry)
        nacked = 0 if entry is None else len(entry.jobs)
        return NackResult(nacked, skipped, self.counts(topic), reasons)

    async def extend(
        self,
        name: str,
        node: str,
        seqs: Sequence[int],
        lease_ids: Sequence[int] | None,
        *,
        lease_ms: int,
        no_more: bool = False,
    ) -> ExtendResult:
        """Extend leases to `lease_ms` from now (§10.6).

        `no_more`: the push streams that delivered these jobs claim no more.
        """
        topic, book = await self.queue(name)
        now_ms = self._clock.now_ms()
        entry, skipped = book.decide_extend(now_ms, node, seqs, lease_ids, lease_ms)
        reasons = why(topic, book, node, seqs, lease_ids, skipped)
        if entry is None:
            return ExtendResult([], now_ms + lease_ms, skipped, reasons)
        if no_more:
            self.dispatcher.hold_back(topic.topic_id, book.connections_of(entry.seqs))
        await self._change(topic, book, entry)
        return ExtendResult(entry.seqs, entry.deadline_ms, skipped, reasons)

    async def leases(self, name: str, *, after_seq: int, page_size: int) -> LeasePage:
        """The leases of a queue by seq: holder and deadline."""
        _, book = await self.queue(name)
        found = book.leases_after(self._clock.now_ms(), after_seq, page_size + 1)
        if len(found) <= page_size:
            return LeasePage(found)
        return LeasePage(found[:page_size], found[page_size - 1].seq)

    async def _change(
        self, topic: Topic, book: LeaseBook, entry: LeasesReleased | LeasesExtended
    ) -> None:
        """Commit a change of leases and wait for it if the queue's leases are durable."""
        ticket = self.leasing.change(topic, book, entry)
        if ticket is not None:
            await applied(ticket)

    # -- redrive ---------------------------------------------------------------------------

    async def redrive(
        self,
        name: str,
        source: str | None,
        *,
        seqs: Sequence[int] | None,
        match: TagMatch | None,
        after_seq: int,
        max_jobs: int,
    ) -> Redriven:
        """Turn dead letters of this queue into jobs again: the given, the matching or all ones.

        `source`: the topic that holds them; None for the queue's dead-letter topic.
        """
        queue, _ = await self.queue(name)
        if source is None:
            source = queue.config.dead_letter
            if source is None:
                raise invalid(
                    'the queue has no dead_letter topic; name the source in "from"', "from"
                )
        return await self.mover.redrive(
            queue,
            await self._store.stable_topic(source),
            seqs=seqs,
            match=match,
            after_seq=after_seq,
            max_jobs=max_jobs,
        )

    # -- waiting ---------------------------------------------------------------------------

    async def queue(self, name: str) -> tuple[Topic, LeaseBook]:
        """The queue of this name. Raises `topic_not_found`, `not_a_queue`."""
        await self._store.stable_topic(name)
        found = self._stable_queue(name)
        assert found is not None, "nothing ran since the topic was stable"
        return found

    def _stable_queue(self, name: str) -> tuple[Topic, LeaseBook] | None:
        """The result of `queue`; None while the topic is being created, changed or dropped."""
        if name in self._store.pending_names:
            return None
        topic = self._store.topic(name)
        if topic.config.type is not _QUEUE:
            raise not_a_queue(name)
        book = self._lease_table.find(topic.topic_id)
        assert book is not None, "a queue has a book"
        return topic, book

    def configured(self, name: str, config: TopicConfig) -> None:
        """Log a warning if a configured dead-letter topic would lose dead letters in a restart."""
        if config.type is not TopicType.QUEUE or config.dead_letter is None:
            return
        try:
            target = self._store.topic(config.dead_letter)
        except TopicsError:
            return  # the topic will be created, with class disk
        if target.is_ephemeral:
            log.warning(
                "dead letters of %s go to %s, which is ephemeral: a restart loses them",
                name,
                target.name,
            )

    # -- for push streams ------------------------------------------------------------------

    def next_connection(self) -> int:
        """The number of a new push stream."""
        return next(self._connections)

    def room(self, topic: Topic, connection: int, max_jobs: int, now_ms: int) -> int:
        """How many more jobs a push stream may hold."""
        book = self._lease_table.find(topic.topic_id)
        held = max_jobs if book is None else book.connection_count(now_ms, connection)
        return max(0, max_jobs - held)

    def attend(self, topic: Topic, claimer: Claimer) -> ConsumerQueue:
        """Add a claimer to the end of its queue's line."""
        return self.dispatcher.attend(topic, claimer)

    def leave(self, consumers: ConsumerQueue, claimer: Claimer) -> None:
        """Remove a claimer."""
        self.dispatcher.leave(consumers, claimer)

    def stir(self, topic: Topic) -> None:
        """Serve the waiting claimers."""
        self.dispatcher.stir(topic.topic_id)

    def give_back(self, grant: ClaimGrant, from_seq: int) -> None:
        """Release granted jobs from this seq on, because no client got them."""
        self.leasing.give_back(grant, from_seq)

    def release_connection(self, topic: Topic, connection: int) -> None:
        """Release the jobs of an ended push stream: they are claimable at once (§10.8)."""
        book = self._lease_table.find(topic.topic_id)
        if book is not None:
            entry = book.decide_release(self._clock.now_ms(), connection)
            self.leasing.release(topic, book, entry)

    def alarm(self, after_ms: float, callback: Callable[[], None]) -> Alarm:
        """Call a function later."""
        return Alarm(self._clock, after_ms, callback)

    # -- counts and the end ----------------------------------------------------------------

    def counts(self, topic: Topic) -> QueueCounts:
        """The gauges of a queue as of now (§10.7)."""
        return self._lease_table.counts(topic, self._clock.now_ms())

    def count_in_flight(self, slice_queues: int) -> Iterator[int]:
        """Unexpired leases of all queues: a running sum, after every `slice_queues` queues."""
        return self._lease_table.count_in_flight(self._clock.now_ms(), slice_queues)

    def tick(self) -> None:
        """Run the due timers; for clocks that tests move."""
        self.dispatcher.tick()

    def drain(self) -> None:
        """Shut down: answer every waiting claimer and release the jobs of push streams."""
        self.dispatcher.drain()

    async def close(self) -> None:
        """Return when no lease entry of this service is in flight."""
        await self.mover.finish()
        await self.logs.flush()


def not_a_queue(name: str) -> TopicsError:
    """The contract's 409."""
    return TopicsError(Code.NOT_A_QUEUE, f'topic "{name}" is not a queue', {"topic": name})
