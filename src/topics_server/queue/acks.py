"""Acks: deletes the jobs that a node completes (§10.4).

An ack deletes the records of its jobs by one entry, with the gate of the topic's class. Until that
entry is applied or has failed, the jobs are busy, and a repeated ack waits for the first one. The
lease book decides; an ack continues if its client disconnects. Made by `queue/service`; loop thread
only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.commit.ticket_waits import check_applied
from topics_server.engine.deletes import SeqsDelete
from topics_server.engine.ports import Clock
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.queue.answers import AckResult
from topics_server.queue.dispatch.dispatcher import ClaimDispatcher
from topics_server.queue.dispatch.lease_changes import Leasing
from topics_server.queue.leases.jobs import SkipReason, why_skipped
from topics_server.queue.leases.lease_book import LeaseBook
from topics_server.queue.leases.lease_log import LeaseEvent
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.values.errors import TopicsError


class Acks:
    """The acks of all queues. `in_flight`: their deletes, by queue and seq."""

    def __init__(
        self,
        store: Store,
        lease_table: LeaseTable,
        clock: Clock,
        dispatcher: ClaimDispatcher,
        leasing: Leasing,
    ) -> None:
        self.lease_table = lease_table
        self.clock = clock
        self.dispatcher = dispatcher
        self.leasing = leasing
        self.in_flight: dict[int, dict[int, SeqsDelete]] = {}
        self._store = store

    def begin(
        self,
        topic: Topic,
        book: LeaseBook,
        node: str,
        seqs: Sequence[int],
        lease_ids: Sequence[int] | None,
    ) -> PendingAck:
        """Delete those of these jobs that the node holds. The topic must not be changing.

        Raises `TopicsError` if the delete is refused; then nothing has changed.
        """
        matched = book.decide_ack(node, seqs, lease_ids)
        held, skipped = matched.seqs, matched.skipped
        if len(held) > 1:
            held.sort()
        events = self.leasing.events(topic, book, "acked", held) if topic.config.lease_log else []
        book.begin_ack(held)
        try:
            delete = self._store.start_delete(topic, held)
        except TopicsError:
            book.cancel_ack(held)
            raise
        if len(delete.seqs) < len(held):
            # Another request is already deleting these jobs; this node has not acked them.
            deleted = set(delete.seqs)
            lost = [seq for seq in matched.seqs if seq not in deleted]
            book.cancel_ack(lost)
            events = [event for event in events if event.seq in deleted]
            skipped = skipped + lost
        reasons = why(topic, book, node, seqs, lease_ids, skipped) if skipped else []
        ack = PendingAck(self, topic, book, delete, events, skipped, reasons)
        if matched.joining:
            ack.join(matched.joining, self.in_flight.get(topic.topic_id, {}))
        ticket = delete.ticket
        if ticket is not None:
            flying = self.in_flight.setdefault(topic.topic_id, {})
            flying.update(dict.fromkeys(delete.seqs, delete))
            if ticket.applied is not None or ticket.error is not None:
                ack.finish()
            else:
                ticket.waiters.append(ack.finish)
        return ack


class PendingAck:
    """A submitted ack. `tickets`: those that the answer needs. It continues if nothing waits.

    `joined`: how many of its jobs earlier acks delete; `tickets` includes their tickets.
    """

    __slots__ = (
        "_acks",
        "_book",
        "_delete",
        "_events",
        "joined",
        "reasons",
        "skipped",
        "tickets",
        "topic",
    )

    def __init__(
        self,
        acks: Acks,
        topic: Topic,
        book: LeaseBook,
        delete: SeqsDelete,
        events: list[LeaseEvent],
        skipped: list[int],
        reasons: list[SkipReason],
    ) -> None:
        self._acks = acks
        self.topic = topic
        self._book = book
        self._delete = delete
        self._events = events
        self.skipped = skipped
        self.reasons = reasons
        self.tickets: list[Ticket] = [] if delete.ticket is None else [delete.ticket]
        self.joined = 0

    def join(self, seqs: Sequence[int], flying: dict[int, SeqsDelete]) -> None:
        """Add jobs that earlier acks of the node are deleting: a retry waits for these acks."""
        for seq in seqs:
            delete = flying.get(seq)
            if delete is None or delete.ticket is None:
                continue
            self.joined += 1
            if delete.ticket not in self.tickets:
                self.tickets.append(delete.ticket)

    def finish(self) -> None:
        """End the leases if the delete is applied; restore them if it has failed."""
        acks, delete, topic_id = self._acks, self._delete, self.topic.topic_id
        ticket = delete.ticket
        assert ticket is not None
        flying = acks.in_flight[topic_id]
        if len(flying) == len(delete.seqs):
            del acks.in_flight[topic_id]
        else:
            for seq in delete.seqs:
                del flying[seq]
        if ticket.error is not None:
            self._book.cancel_ack(delete.seqs)
        elif self._events:
            acks.leasing.note(self.topic, self._events)
        acks.dispatcher.stir(topic_id)

    def when_resolved(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the ack has an outcome; now if it has. It must not raise.

        Only for an ack that joins no other ack.
        """
        assert not self.joined
        for ticket in self.tickets:
            if ticket.applied is None and ticket.error is None:
                ticket.waiters.append(callback)
                return
        callback()

    def outcome(self) -> AckResult:
        """The result, once every ticket is applied or has failed. Raises the ack's error."""
        write_ms = sync_ms = 0.0
        topic, acks, delete = self.topic, self._acks, self._delete
        for ticket in self.tickets:
            if ticket.error is not None:
                check_applied(ticket)
            if ticket is delete.ticket:
                write_ms, sync_ms = ticket.write_ms, ticket.sync_ms
        acked = len(delete.seqs) + self.joined
        counts = acks.lease_table.counts(topic, acks.clock.now_ms())
        return AckResult(acked, self.skipped, counts, self.reasons, write_ms, sync_ms)


def why(
    topic: Topic,
    book: LeaseBook,
    node: str,
    seqs: Sequence[int],
    lease_ids: Sequence[int] | None,
    skipped: Sequence[int],
) -> list[SkipReason]:
    """The reasons why these seqs were skipped; call it in the loop turn that skipped them."""
    if not skipped:
        return []
    next_live = topic.log.next_live
    fences = {} if lease_ids is None else dict(zip(seqs, lease_ids, strict=True))
    return [
        why_skipped(book.jobs.look(seq), node, fences.get(seq))
        if next_live(seq) == seq
        else SkipReason.NOT_FOUND
        for seq in skipped
    ]
