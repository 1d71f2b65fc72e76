"""Commits decided lease changes and runs what follows from them.

If the queue's leases are durable, a change is journaled and waits for its sync; otherwise it is
applied at once, and only snapshots keep it. Waiting claimers are notified, and the queue's lease
log gets the events. This module makes no decision. Called by `queue/service`,
`queue/dispatch/dispatcher`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from topics_server.engine.commit.gates import gate_of_service
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.ports import Clock
from topics_server.engine.topic.topic import Topic
from topics_server.queue.dispatch.consumer_queue import ClaimGrant
from topics_server.queue.leases.jobs import Claim, LostLease, seqs_of
from topics_server.queue.leases.lease_book import LeaseBook
from topics_server.queue.leases.lease_log import Event, LeaseEvent, LeaseLogs, lease_event
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.values.entries import LeaseEntry, LeasesExtended, LeasesReleased
from topics_server.values.errors import TopicsError

log: Final = logging.getLogger(__name__)


class Leasing:
    """Commits decided changes. `stir` is called when jobs of a queue may be claimable.

    `on_moved` is called for a change without an entry in the journal.
    """

    def __init__(
        self,
        lease_table: LeaseTable,
        commits: CommitPipeline,
        clock: Clock,
        logs: LeaseLogs,
        *,
        stir: Callable[[int], None],
        on_moved: Callable[[], None],
    ) -> None:
        self._lease_table = lease_table
        self._commits = commits
        self._clock = clock
        self._logs = logs
        self._stir = stir
        self._on_moved = on_moved

    def grant(self, topic: Topic, claim: Claim) -> Ticket | None:
        """Lease the jobs of a claim. Raises `TopicsError` if the journal refuses the entry."""
        ticket = self._commit(topic, claim.entry)
        if isinstance(topic.config.lease_log, str):
            self._note_claimed(topic, claim, ticket)
        if ticket is not None and not ticket.is_done:
            # Only after this ticket it is known when the leases end, or that the jobs are free
            # again.
            ticket.waiters.append(lambda: self._stir(topic.topic_id))
        return ticket

    def change(
        self, topic: Topic, book: LeaseBook, entry: LeasesReleased | LeasesExtended
    ) -> Ticket | None:
        """Release or extend leases; returns the ticket to wait for, or None.

        Raises `TopicsError`.
        """
        kind: Event = "released" if isinstance(entry, LeasesReleased) else "extended"
        events = self.events(topic, book, kind, seqs_of(entry), entry)
        ticket = self._commit(topic, entry)

        def finish() -> None:
            if ticket is None or ticket.error is None:
                self.note(topic, events)
            self._stir(topic.topic_id)

        if ticket is None or ticket.is_done:
            finish()
        else:
            ticket.waiters.append(finish)
        return ticket

    def release(self, topic: Topic, book: LeaseBook, entry: LeasesReleased | None) -> None:
        """Release leases without waiting; if the journal refuses, they expire by themselves."""
        if entry is None:
            return
        try:
            self.change(topic, book, entry)
        except TopicsError as error:
            log.debug("leases of %s run out by themselves: %s", topic.name, error.message)

    def _commit(self, topic: Topic, entry: LeaseEntry) -> Ticket | None:
        """Journal the entry, or apply it now if the queue's leases are not durable."""
        if topic.config.leases_durable:
            return self._commits.submit(entry, gate_of_service(entry), self._lease_table)
        self._lease_table.apply_soft(entry)
        self._on_moved()
        return None

    def give_back(self, grant: ClaimGrant, from_seq: int = 0) -> None:
        """Release granted jobs from this seq on, because no client got them."""
        if grant.ticket is not None and not grant.ticket.is_done:
            grant.ticket.waiters.append(lambda: self.give_back(grant, from_seq))
            return
        book = self._lease_table.find(grant.topic.topic_id)
        if book is None:
            return
        leases = [(job.seq, job.lease_id) for job in grant.claim.jobs if job.seq >= from_seq]
        self.release(grant.topic, book, book.decide_give_back(self._clock.now_ms(), leases))

    # -- the lease log ---------------------------------------------------------------------

    def events(
        self,
        topic: Topic,
        book: LeaseBook,
        event: Event,
        seqs: Iterable[int],
        entry: LeasesReleased | LeasesExtended | None = None,
    ) -> list[LeaseEvent]:
        """The lease log's events for these leases; call it before the change."""
        if not isinstance(topic.config.lease_log, str):
            return []
        available = dict(entry.jobs) if isinstance(entry, LeasesReleased) else {}
        error = entry.error if isinstance(entry, LeasesReleased) else ""
        extended_ms = entry.deadline_ms if isinstance(entry, LeasesExtended) else 0
        now_ms = self._clock.now_ms()
        return [
            lease_event(
                event,
                topic.name,
                topic.epoch,
                seq,
                now_ms,
                node=job.node,
                lease_id=job.lease_id,
                deliveries=job.deliveries,
                deadline_ms=extended_ms or job.at_ms - 1,
                available_ms=available.get(seq, 0),
                error=error,
            )
            for seq in seqs
            if (job := book.jobs.look(seq)) is not None
        ]

    def _note_claimed(self, topic: Topic, claim: Claim, ticket: Ticket | None) -> None:
        entry = claim.entry
        events = [
            lease_event(
                "claimed",
                topic.name,
                topic.epoch,
                job.seq,
                entry.ts,
                node=entry.node,
                lease_id=job.lease_id,
                deliveries=job.deliveries,
                deadline_ms=entry.deadline_ms,
            )
            for job in claim.jobs
        ]
        if ticket is None or ticket.is_done:
            self.note(topic, events)
        else:
            ticket.waiters.append(
                lambda: self.note(topic, events) if ticket.error is None else None
            )

    def note_lost(self, topic: Topic, now_ms: int, lost: Iterable[LostLease]) -> None:
        """Log leases that were expired when their jobs were claimed again."""
        if isinstance(topic.config.lease_log, str):
            self.note(
                topic,
                [
                    lease_event(
                        "expired",
                        topic.name,
                        topic.epoch,
                        lease.seq,
                        now_ms,
                        node=lease.node,
                        lease_id=lease.lease_id,
                        deliveries=lease.deliveries,
                        deadline_ms=lease.deadline_ms,
                    )
                    for lease in lost
                ],
            )

    def note(self, topic: Topic, events: Sequence[LeaseEvent]) -> None:
        """Append these events to the queue's lease log, if it has one."""
        name = topic.config.lease_log
        if events and isinstance(name, str):
            self._logs.note(name, events)
