"""Submitted appends and deletes: when they resolve, and with what. Pure.

What its caller has to say is the same whether a task waits for the ticket or a callback does.
Made by `engine/store`; asked by it and by whoever begins appends without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from topics_server.engine.answers import Appended
from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import RecordsAppended
from topics_server.values.errors import TopicsError


class PendingAppend:
    """One append on its way; it goes on whether or not anybody waits for it."""

    __slots__ = ("_entry", "_topic", "ticket")

    def __init__(self, topic: Topic, entry: RecordsAppended, ticket: Ticket) -> None:
        self.ticket = ticket
        self._topic = topic
        self._entry = entry

    def when_settled(self, told: Callable[[], object]) -> None:
        """Call `told`, which must not raise, as soon as there is an outcome: at once if there is.

        Otherwise within the turn of the loop that commits the append, before anybody reads it.
        """
        if self.ticket.is_done:
            told()
        else:
            self.ticket.waiters.append(told)

    def outcome(self, *, created: bool = False, parked_ms: float = 0.0) -> Appended:
        """What to answer, once it is settled. Raises the `TopicsError` it failed with."""
        entry, ticket = self._entry, self.ticket
        assert ticket.is_done
        if ticket.error is not None:
            raise TopicsError(ticket.error.code, ticket.error.message, ticket.error.detail)
        last_seq = entry.first_seq + entry.count - 1
        head_seq = self._topic.log.head_seq
        return Appended(
            entry.first_seq,
            last_seq,
            head_seq if head_seq > last_seq else last_seq,
            created,
            False,
            ticket.write_ms,
            ticket.sync_ms,
            parked_ms,
        )


class SeqsDelete(msgspec.Struct, frozen=True):
    """A delete of exact seqs on its way: those that lived; no ticket if there are none."""

    seqs: list[int]
    ticket: Ticket | None
