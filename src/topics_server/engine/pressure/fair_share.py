"""Picks the waiting topic that was served longest ago. Pure.

Owns the order in which waiting topics get the share of service that ignores priority. A ticket
number gives a topic its place in this order: the topic gets a new, highest number when it begins to
wait and whenever one of its requests is served. So the lowest ticket belongs to the topic that was
served longest ago. A topic whose last waiting request is refused keeps its ticket for `KEPT_MS`: a
client that returns after `Retry-After` continues from its old place, and each further try is nearer
to the front. Called by `engine/pressure/wait_queue`.
"""

from __future__ import annotations

import heapq
from typing import Final

# How long a refused topic keeps its ticket, ms. `Retry-After` is at most two seconds.
KEPT_MS: Final = 5000.0
# How many refused topics keep a ticket; beyond that, the oldest kept ticket is dropped.
KEPT_MAX: Final = 4096


class _Topic:
    """One topic that waits: its ticket, and how many of its requests wait."""

    __slots__ = ("name", "ticket", "waiting")

    def __init__(self, name: str, ticket: int) -> None:
        self.name = name
        self.ticket = ticket
        self.waiting = 0


class FairShare:
    """Topics with waiting requests, ordered by when each was served last.

    Invariant: `_order` has exactly one row per topic in `_topics`, with a ticket that is at most
    the topic's own, and possibly rows of topics that no longer wait.
    """

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}
        self._order: list[tuple[int, int, _Topic]] = []
        self._kept: dict[str, tuple[int, float]] = {}
        self._tickets = 0
        self._rows = 0

    def __len__(self) -> int:
        """The number of waiting topics."""
        return len(self._topics)

    def join(self, name: str, now_ms: float) -> None:
        """Add a request of a topic that begins to wait."""
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = _Topic(name, self._ticket_of(name, now_ms))
            self._push(topic)
        topic.waiting += 1

    def serve(self, name: str) -> None:
        """Remove a served request of a topic, and give the topic the highest ticket."""
        self.renew(name)
        self._drop_one(self._topics[name])

    def renew(self, name: str) -> None:
        """Give a topic that still waits the highest ticket, because it was served."""
        self._tickets += 1
        self._topics[name].ticket = self._tickets

    def refuse(self, name: str, now_ms: float) -> None:
        """Remove a refused request of a topic; the last one leaves the ticket kept."""
        topic = self._topics[name]
        if topic.waiting == 1:
            self._kept.pop(name, None)
            if len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = (topic.ticket, now_ms + KEPT_MS)
        self._drop_one(topic)

    def first(self) -> str | None:
        """The waiting topic that was served longest ago; None if no topic waits."""
        order = self._order
        while order:
            ticket, _, topic = order[0]
            if not topic.waiting:
                heapq.heappop(order)
            elif ticket != topic.ticket:
                heapq.heapreplace(order, self._row(topic))
            else:
                return topic.name
        return None

    def _ticket_of(self, name: str, now_ms: float) -> int:
        kept = self._kept.pop(name, None)
        if kept is not None and now_ms < kept[1]:
            return kept[0]
        self._tickets += 1
        return self._tickets

    def _drop_one(self, topic: _Topic) -> None:
        topic.waiting -= 1
        assert topic.waiting >= 0
        if not topic.waiting:
            del self._topics[topic.name]
            if len(self._order) > 2 * len(self._topics) + KEPT_MAX:
                self._order = [row for row in self._order if row[2].waiting]
                heapq.heapify(self._order)

    def _push(self, topic: _Topic) -> None:
        heapq.heappush(self._order, self._row(topic))

    def _row(self, topic: _Topic) -> tuple[int, int, _Topic]:
        # Topics cannot be compared: the second number orders two rows with the same ticket.
        self._rows += 1
        return (topic.ticket, self._rows, topic)
