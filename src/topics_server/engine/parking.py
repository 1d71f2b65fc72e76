"""Who waits for a turn while the server is under pressure: the most urgent first. Pure.

Places are served by priority, and in the order in which they came where that is the same. Each has
its time; one that is not served by then is refused, unless it insists. When all places together
hold more than their share, the least urgent are doomed: they let go of what they hold and wait out
their time only to be refused, so that a client that asks again at once is not answered at once.
Called by `engine/throttle`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

# Places that were served stay in the heaps until they come up; beyond so many they are swept.
_GONE_MAX: Final = 1024


class Place:
    """One that waits. `over` is called when its wait is: `is_refused` tells how.

    `size` is what it holds, in bytes; times are those of a monotonic clock, in ms; `cost_ms` is
    what the work is taken to cost beside `over`.
    """

    __slots__ = (
        "came_ms",
        "cost_ms",
        "insists",
        "is_doomed",
        "is_gone",
        "is_refused",
        "number",
        "over",
        "priority",
        "size",
        "waited_ms",
    )

    def __init__(self, priority: int, size: int, *, insists: bool) -> None:
        self.priority = priority
        self.size = size
        self.insists = insists
        self.number = 0
        self.came_ms = self.waited_ms = self.cost_ms = 0.0
        self.is_refused = self.is_doomed = self.is_gone = False
        self.over: Callable[[], object] | None = None


class Parking:
    """All that wait."""

    def __init__(self, *, max_bytes: int, max_places: int, patience_ms: float) -> None:
        self.max_bytes = max_bytes
        self.max_places = max_places
        self.patience_ms = patience_ms
        # What those hold that may still be served, and how many they are.
        self.held_bytes = 0
        self.waiting = 0
        self._number = 0
        self._urgent: list[tuple[int, int, Place]] = []
        self._least: list[tuple[int, int, Place]] = []
        # Those that do not insist.
        self._by_age: deque[Place] = deque()
        self._doomed = 0
        self._gone = 0

    def __len__(self) -> int:
        """How many wait, the doomed included."""
        return self.waiting + self._doomed

    def add(self, place: Place, now_ms: float) -> list[Place]:
        """Let one more wait; returns whom that dooms, which may be itself."""
        self._number += 1
        place.number = self._number
        place.came_ms = now_ms
        heapq.heappush(self._urgent, (-place.priority, place.number, place))
        self.held_bytes += place.size
        self.waiting += 1
        if not place.insists:
            self._by_age.append(place)
            heapq.heappush(self._least, (place.priority, -place.number, place))
        doomed: list[Place] = []
        while self._least and (self.held_bytes > self.max_bytes or self.waiting > self.max_places):
            least = heapq.heappop(self._least)[2]
            if not (least.is_gone or least.is_doomed):
                least.is_doomed = True
                self._doomed += 1
                self._let_go(least)
                doomed.append(least)
        return doomed

    def pop(self, now_ms: float) -> Place | None:
        """The most urgent that may be served, if any."""
        while self._urgent:
            place = heapq.heappop(self._urgent)[2]
            if not (place.is_gone or place.is_doomed):
                self._let_go(place)
                self._leave(place, now_ms)
                return place
        return None

    def pop_late(self, now_ms: float) -> Place | None:
        """The oldest whose time is over, if any; to be refused."""
        ages = self._by_age
        while ages and ages[0].is_gone:
            ages.popleft()
        if not ages or now_ms - ages[0].came_ms < self.patience_ms:
            return None
        place = ages[0]
        if place.is_doomed:
            self._doomed -= 1
        else:
            self._let_go(place)
        self._leave(place, now_ms)
        place.is_refused = True
        return place

    def oldest_ms(self, now_ms: float) -> float:
        """How long the oldest has waited."""
        oldest = next((place for place in self._by_age if not place.is_gone), None)
        return 0.0 if oldest is None else now_ms - oldest.came_ms

    @property
    def top_priority(self) -> int | None:
        """The priority of who is next; None if nobody is."""
        while self._urgent and (self._urgent[0][2].is_gone or self._urgent[0][2].is_doomed):
            heapq.heappop(self._urgent)
        return -self._urgent[0][0] if self._urgent else None

    def _let_go(self, place: Place) -> None:
        self.held_bytes -= place.size
        self.waiting -= 1
        assert self.held_bytes >= 0 <= self.waiting
        place.size = 0

    def _leave(self, place: Place, now_ms: float) -> None:
        place.is_gone = True
        place.waited_ms = now_ms - place.came_ms
        self._gone += 1
        if self._gone > _GONE_MAX:
            self._sweep()

    def _sweep(self) -> None:
        """Forget those that are gone."""
        self._by_age = deque(place for place in self._by_age if not place.is_gone)
        self._gone = 0
        self._urgent = [row for row in self._urgent if not (row[2].is_gone or row[2].is_doomed)]
        self._least = [row for row in self._least if not (row[2].is_gone or row[2].is_doomed)]
        heapq.heapify(self._urgent)
        heapq.heapify(self._least)
