"""Submitted appends and deletes: when they resolve, and with what. Pure.

The result is the same whether a task or a callback waits for the ticket. Made by `engine/store`;
used by the store and by handlers that begin appends without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from topics_server.engine.answers import Appended
from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import RecordsAppended
from topics_server.values.errors import TopicsError


class PendingAppend(msgspec.Struct, eq=False):
    """A submitted append; it continues even if nothing waits for it."""

    topic: Topic
    entry: RecordsAppended
    ticket: Ticket

    def when_resolved(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the append is applied or has failed; now if it already is.

        The call happens in the loop turn that commits the append, before readers are notified.
        `callback` must not raise.
        """
        ticket = self.ticket
        if ticket.applied is None is ticket.error:
            ticket.waiters.append(callback)
        else:
            callback()

    def outcome(self, *, created: bool = False, throttle_wait_ms: float = 0.0) -> Appended:
        """The answer, once the append is applied or has failed.

        Raises the append's `TopicsError`.
        """
        entry, ticket = self.entry, self.ticket
        if ticket.error is not None:
            raise TopicsError(ticket.error.code, ticket.error.message, ticket.error.detail)
        assert ticket.applied is not None
        last_seq = entry.first_seq + entry.count - 1
        head_seq = self.topic.log.head_seq
        return Appended(
            entry.first_seq,
            last_seq,
            head_seq if head_seq > last_seq else last_seq,
            created,
            False,
            ticket.write_ms,
            ticket.sync_ms,
            throttle_wait_ms,
        )


class SeqsDelete(msgspec.Struct, frozen=True):
    """A submitted delete of exact seqs: the live ones; no ticket if there are none."""

    seqs: list[int]
    ticket: Ticket | None
