"""Waits for a pending create, configure or drop of a name."""

from __future__ import annotations

from typing import Final

from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.commit.ticket_waits import applied, resolved


class PendingNames:
    """Names with a create, configure or drop in flight; commands on them wait for it."""

    __slots__ = ("tickets",)

    def __init__(self) -> None:
        # The newest ticket of each pending name.
        self.tickets: Final[dict[str, Ticket]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tickets

    def hold(self, name: str, ticket: Ticket) -> None:
        """Hold the name until the ticket is applied or has failed, whether or not a task waits."""
        if not ticket.is_done:
            self.tickets[name] = ticket
            ticket.waiters.append(lambda: self._release(name, ticket))

    async def hold_until_resolved(self, name: str, ticket: Ticket) -> Ticket:
        """Hold the name, and return when the ticket is applied; raise its error if it failed."""
        self.hold(name, ticket)
        await applied(ticket)
        return ticket

    def _release(self, name: str, ticket: Ticket) -> None:
        if self.tickets.get(name) is ticket:
            del self.tickets[name]

    async def over(self, name: str) -> None:
        """Return when no create, configure or drop of the name is in flight."""
        while (ticket := self.tickets.get(name)) is not None:
            await resolved(ticket)
