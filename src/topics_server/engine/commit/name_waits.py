"""Waits for a topic's change, or for a pending create, configure or drop."""

from __future__ import annotations

import asyncio

from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.commit.transfers import settled


class NameWaits:
    """Names with a create, configure or drop in flight: commands on them wait before decide."""

    __slots__ = ("_tickets",)

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tickets

    def hold(self, name: str, ticket: Ticket) -> None:
        """Hold the name until the ticket is settled, whether or not anybody waits."""
        if not ticket.is_done:
            self._tickets[name] = ticket
            ticket.waiters.append(lambda: self._release(name, ticket))

    def _release(self, name: str, ticket: Ticket) -> None:
        if self._tickets.get(name) is ticket:
            del self._tickets[name]

    async def over(self, name: str) -> None:
        """Return when nothing of the kind is in flight."""
        while (settling := self._tickets.get(name)) is not None:
            await settled(settling)


async def ring_or_timeout(hub: Notifier, topic_id: int, timeout_ms: float) -> None:
    """Return when the topic moves, or when the time is over."""
    loop = asyncio.get_running_loop()
    rung: asyncio.Future[None] = loop.create_future()

    def ring() -> None:
        if not rung.done():
            rung.set_result(None)

    timer = loop.call_later(timeout_ms / 1000, ring)
    hub.add(topic_id, ring)
    try:
        await rung
    finally:
        timer.cancel()
        hub.remove(topic_id, ring)
