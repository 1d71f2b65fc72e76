"""Gives jobs to waiting claimers of all queues.

A queue is served when a claim arrives and, while claimers wait, when the queue or its leases change
and when a job becomes claimable by time; with `claim_jitter_ms` only at the end of a window in
which claims gather (§10.2). The lease book divides the jobs; this module decides when, and among
which claimers. Called by `queue/service`, `queue/push`; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.ports import Clock
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.queue.dispatch.consumer_queue import Claimer, ClaimGrant, ConsumerQueue
from topics_server.queue.dispatch.dead_letter_moves import Mover
from topics_server.queue.dispatch.lease_changes import Leasing
from topics_server.queue.leases.jobs import Ask, Claim
from topics_server.queue.leases.lease_book import DEAD_JOBS_PER_CLAIM, LeaseBook
from topics_server.queue.leases.lease_table import LeaseTable, live_jobs
from topics_server.values.errors import TopicsError, topic_not_found

# Limits of one turn while dead jobs precede claimable jobs: the number of passes, and the time
# after which no further pass begins.
_PASSES_MAX: Final = 16
_PASSES_MS: Final = 4.0
# The maximum of waiting claims of a dropped queue that end in one turn: each wakes a task that
# answers.
_LOST_MAX: Final = 32


class ClaimDispatcher:
    """The consumer queues that have waiting claimers: `queues`, by topic id."""

    def __init__(
        self, store: Store, lease_table: LeaseTable, notifier: Notifier, clock: Clock
    ) -> None:
        self._store = store
        self._lease_table = lease_table
        self._notifier = notifier
        self._clock = clock
        self.queues: dict[int, ConsumerQueue] = {}
        self.is_draining = False
        # The handlers of a pass's results; set by the service.
        self.leasing: Leasing
        self.mover: Mover

    def attend(self, topic: Topic, claimer: Claimer) -> ConsumerQueue:
        """Add a claimer to the end of its queue's line."""
        consumers = self.consumers(topic)
        consumers.join(claimer)
        self.listen(consumers)
        return consumers

    def leave(self, consumers: ConsumerQueue, claimer: Claimer) -> None:
        """Remove a claimer."""
        consumers.leave(claimer)
        if consumers.claimers or self.queues.get(consumers.topic_id) is not consumers:
            return
        consumers.close()
        del self.queues[consumers.topic_id]
        if consumers.is_listening:
            self._notifier.remove(consumers.topic_id, consumers.notify)

    def consumers(self, topic: Topic) -> ConsumerQueue:
        """The consumer queue of a topic; call `leave` afterwards."""
        consumers = self.queues.get(topic.topic_id)
        if consumers is None:
            consumers = self.queues[topic.topic_id] = ConsumerQueue(
                topic.topic_id, topic.name, self._serve, self.stir, self._clock
            )
        return consumers

    def listen(self, consumers: ConsumerQueue) -> None:
        """Watch for changes of the queue, and for jobs that become claimable by time."""
        self.stir(consumers.topic_id)
        if not consumers.is_listening:
            consumers.is_listening = True
            self._notifier.add(consumers.topic_id, consumers.notify)

    def stir(self, topic_id: int) -> None:
        """Jobs may be claimable: serve waiting claimers, soon or at the window's end."""
        consumers = self.queues.get(topic_id)
        if consumers is None or self.is_draining:
            return
        topic = self._store.topic_of(topic_id)
        if topic is not None and topic.config.claim_jitter_ms:
            consumers.open_window(topic.config.claim_jitter_ms)
        else:
            consumers.serve_soon()

    def hold_back(self, topic_id: int, connections: set[int]) -> None:
        """Give these push streams no more jobs; they keep those that they have."""
        consumers = self.queues.get(topic_id)
        if consumers is not None and connections:
            for claimer in consumers.claimers:
                if claimer.connection in connections:
                    claimer.hold_back()

    def shift(self, by_ms: int) -> None:
        """Adjust timers: the wall clock was set by `by_ms`."""
        for consumers in self.queues.values():
            consumers.shift(by_ms)

    def tick(self) -> None:
        """Run the due timers; for clocks that tests move."""
        for consumers in tuple(self.queues.values()):
            consumers.tick()

    # -- serving ---------------------------------------------------------------------------

    def _serve(self, consumers: ConsumerQueue) -> None:
        """Give the claimers the jobs that can be claimed now."""
        if self.is_draining:
            return
        topic = self._store.topic_of(consumers.topic_id)
        book = self._lease_table.find(consumers.topic_id)
        if topic is None or book is None:
            if not consumers.is_gone:
                consumers.is_gone = True
                self._lose(consumers, deque(consumers.claimers))
            return
        # Use one time for the whole pass: a job that becomes due during the pass waits for the next
        # pass.
        now_ms = self._clock.now_ms()
        ends_ms = self._clock.monotonic_ms() + _PASSES_MS
        for left in reversed(range(_PASSES_MAX)):
            is_last = left == 0 or self._clock.monotonic_ms() >= ends_ms
            if not self._pass(now_ms, topic, book, consumers, is_last=is_last):
                break
            if is_last:
                self.stir(consumers.topic_id)
                break
        if consumers.is_listening:
            consumers.look_at(book.next_due_ms(now_ms), now_ms)

    def _lose(self, consumers: ConsumerQueue, claimers: deque[Claimer]) -> None:
        """End claims of a dropped queue: some now, the others in later turns of the loop."""
        for _ in range(min(_LOST_MAX, len(claimers))):
            claimer = claimers.popleft()
            if claimer in consumers.claimers:
                claimer.lost(topic_not_found(consumers.name))
        if claimers:
            asyncio.get_running_loop().call_soon(self._lose, consumers, claimers)

    def _pass(
        self, now_ms: int, topic: Topic, book: LeaseBook, consumers: ConsumerQueue, *, is_last: bool
    ) -> bool:
        """Divide the available jobs once; returns whether another pass may find more.

        While dead jobs may precede claimable ones, no job is given out, except in the last pass.
        """
        live = live_jobs(topic, now_ms)
        ready = book.counts(now_ms, live).ready
        # With this many jobs no further claimer can get a job.
        hungry = consumers.hungry(now_ms, max(1, ready))
        if not hungry:
            return False
        config = topic.config
        asks = [
            Ask(
                claimer.node,
                wanted,
                config.lease_ms if claimer.lease_ms is None else claimer.lease_ms,
                claimer.connection,
            )
            for claimer, wanted in hungry
        ]
        max_deliveries = 0 if config.dead_letter is None else config.max_deliveries
        found = book.decide_claim(now_ms, live, asks, max_deliveries)
        if found.to_dead_letter:
            self.mover.bury(topic, book, found.to_dead_letter)
        has_more = len(found.to_dead_letter) >= DEAD_JOBS_PER_CLAIM
        if has_more and not is_last:
            dead = {job.seq for job in found.to_dead_letter}
            lost = [lease for lease in found.lost if lease.seq in dead]
            self.leasing.note_lost(topic, now_ms, lost)
            return True
        self.leasing.note_lost(topic, now_ms, found.lost)
        for (claimer, _), claim in zip(hungry, found.claims, strict=True):
            if claim is not None:
                self._grant(topic, consumers, claimer, claim)
        return has_more

    def _grant(
        self, topic: Topic, consumers: ConsumerQueue, claimer: Claimer, claim: Claim
    ) -> None:
        try:
            ticket = self.leasing.grant(topic, claim)
        except TopicsError as error:
            claimer.fail(error)
            return
        consumers.served(claimer)
        claimer.take(ClaimGrant(topic, claim, ticket))

    def drain(self) -> None:
        """Shut down: answer every waiting claimer and release the jobs of push streams."""
        self.is_draining = True
        for consumers in tuple(self.queues.values()):
            for claimer in tuple(consumers.claimers):
                claimer.drain()
