"""Gives jobs to waiting claimers of all queues.

A line is served when a claim comes, and, while somebody waits, when its queue or its leases moved
and when something becomes claimable by itself; with `claim_jitter_ms` only at the end of a window
in which a cohort gathers (§10.2). What is divided how is the book's; here is when, and among whom.
Called by `queue/service`, `queue/push`; loop thread only.
"""

from __future__ import annotations

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

# Passes in one turn while dead letters stand before jobs that can be claimed.
_PASSES_MAX: Final = 16


class ClaimDispatcher:
    """The lines of all queues that somebody waits for."""

    def __init__(self, store: Store, books: LeaseTable, hub: Notifier, clock: Clock) -> None:
        self._store = store
        self._books = books
        self._hub = hub
        self._clock = clock
        self._lines: dict[int, ConsumerQueue] = {}
        self.is_draining = False
        # Set by the service: what a pass leads to.
        self.leasing: Leasing
        self.mover: Mover

    def attend(self, topic: Topic, claimer: Claimer) -> ConsumerQueue:
        """Have a claimer wait in line from now on."""
        line = self.line(topic)
        line.join(claimer)
        self.listen(line)
        return line

    def leave(self, line: ConsumerQueue, claimer: Claimer) -> None:
        """A claimer waits no more."""
        line.leave(claimer)
        if line.claimers or self._lines.get(line.topic_id) is not line:
            return
        line.close()
        del self._lines[line.topic_id]
        if line.has_bell:
            self._hub.remove(line.topic_id, line.ring)

    def line(self, topic: Topic) -> ConsumerQueue:
        """The line of a queue, to be left again."""
        line = self._lines.get(topic.topic_id)
        if line is None:
            line = self._lines[topic.topic_id] = ConsumerQueue(
                topic.topic_id, topic.name, self._serve, self.stir, self._clock
            )
        return line

    def listen(self, line: ConsumerQueue) -> None:
        """Hear of what moves in the queue, and of what becomes claimable by itself."""
        self.stir(line.topic_id)
        if not line.has_bell:
            line.has_bell = True
            self._hub.add(line.topic_id, line.ring)

    def stir(self, topic_id: int) -> None:
        """Something may be claimable: whoever waits is served, soon or at a window's end."""
        line = self._lines.get(topic_id)
        if line is None or self.is_draining:
            return
        topic = self._store.topic_of(topic_id)
        if topic is not None and topic.config.claim_jitter_ms:
            line.open_window(topic.config.claim_jitter_ms)
        else:
            line.serve_soon()

    def hold_back(self, topic_id: int, connections: set[int]) -> None:
        """These push streams keep what they hold and are given nothing more."""
        line = self._lines.get(topic_id)
        if line is not None and connections:
            for claimer in line.claimers:
                if claimer.connection in connections:
                    claimer.hold_back()

    def shift(self, by_ms: int) -> None:
        """The wall clock was set by so much."""
        for line in self._lines.values():
            line.shift(by_ms)

    def tick(self) -> None:
        """Do what timers would do by now: for clocks that are moved by hand."""
        for line in tuple(self._lines.values()):
            line.tick()

    # -- serving ---------------------------------------------------------------------------

    def _serve(self, line: ConsumerQueue) -> None:
        """Give the line what can be claimed now."""
        if self.is_draining:
            return
        topic = self._store.topic_of(line.topic_id)
        book = self._books.find(line.topic_id)
        if topic is None or book is None:
            for claimer in tuple(line.claimers):
                claimer.lost(topic_not_found(line.name))
            return
        # One moment for all of it: what is due a tick after the pass is due, not passed over.
        now_ms = self._clock.now_ms()
        for left in reversed(range(_PASSES_MAX)):
            if not self._pass(now_ms, topic, book, line, is_last=left == 0):
                break
        else:
            self.stir(line.topic_id)
        if line.has_bell:
            line.look_at(book.next_due_ms(now_ms), now_ms)

    def _pass(
        self, now_ms: int, topic: Topic, book: LeaseBook, line: ConsumerQueue, *, is_last: bool
    ) -> bool:
        """One division of what there is; whether another one may find more.

        As long as dead jobs may hide others behind them nothing is given, unless it is the last.
        """
        live = live_jobs(topic, now_ms)
        ready = book.counts(now_ms, live).ready
        # With so many jobs no more of them can get one.
        hungry = line.hungry(now_ms, max(1, ready))
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
                self._grant(topic, line, claimer, claim)
        return has_more

    def _grant(self, topic: Topic, line: ConsumerQueue, claimer: Claimer, claim: Claim) -> None:
        try:
            ticket = self.leasing.grant(topic, claim)
        except TopicsError as error:
            claimer.fail(error)
            return
        line.served(claimer)
        claimer.take(ClaimGrant(topic, claim, ticket))

    def drain(self) -> None:
        """The server is going down: whoever waits is answered, push streams let go of all."""
        self.is_draining = True
        for line in tuple(self._lines.values()):
            for claimer in tuple(line.claimers):
                claimer.drain()
