"""Requests that wait for a turn under pressure. Pure.

Of ten places served, nine are the most urgent ones, in the order in which they came where the
priority is the same. One is the oldest place of the topic that was served longest ago
(`engine/pressure/fair_share`), whatever its priority: so a topic of low priority is served beside
any flood of more urgent ones. A place that is not served within `patience_ms` is refused, unless it
insists.

When all places together hold more than their share, some are doomed: they let go of what they hold
and wait out their time only to be refused, so that a client that asks again at once is not answered
at once. Doomed are the newest places of the least urgent topic of those that hold a large part
(more than one in `_LARGE_PART`) of the room; if no topic does, the least urgent places of all.
Called by `engine/pressure/throttle`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

from topics_server.engine.pressure.fair_share import FairShare

# Of so many places served one is of the topic that was served longest ago.
FAIR_EVERY: Final = 10
# A topic that holds more than one in so many of the bytes or places is doomed before others.
_LARGE_PART: Final = 16
# Places that were served stay in the heaps until they come up; beyond so many they are swept.
_GONE_MAX: Final = 1024


class WaitingRequest:
    """One request that waits. `over` is called when its wait is: `is_refused` tells how.

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
        "topic",
        "waited_ms",
    )

    def __init__(self, priority: int, size: int, *, insists: bool, topic: str = "") -> None:
        self.priority = priority
        self.size = size
        self.insists = insists
        self.topic = topic
        self.number = 0
        self.came_ms = self.waited_ms = self.cost_ms = 0.0
        self.is_refused = self.is_doomed = self.is_gone = False
        self.over: Callable[[], object] | None = None


class _Line:
    """The places of one topic that may still be served; `bytes` and `count` are of all of them.

    `refusable` has those that do not insist. Both may hold places that are over, in the middle.
    """

    __slots__ = ("bytes", "count", "places", "refusable")

    def __init__(self) -> None:
        self.bytes = self.count = 0
        self.places: deque[WaitingRequest] = deque()
        self.refusable: deque[WaitingRequest] = deque()

    def trim(self) -> None:
        """Forget places at either end that are over."""
        for places in (self.places, self.refusable):
            while places and _is_over(places[0]):
                places.popleft()
            while places and _is_over(places[-1]):
                places.pop()

    def sweep(self) -> None:
        """Forget all places that are over."""
        self.places = deque(place for place in self.places if not _is_over(place))
        self.refusable = deque(place for place in self.refusable if not _is_over(place))


class WaitQueue:
    """All places. `fair_total` counts those that were served before more urgent ones."""

    def __init__(self, *, max_bytes: int, max_places: int, patience_ms: float) -> None:
        self.max_bytes = max_bytes
        self.max_places = max_places
        self.patience_ms = patience_ms
        # What those hold that may still be served, and how many they are.
        self.held_bytes = 0
        self.waiting = 0
        self.fair_total = 0
        self._number = 0
        self._served = 0
        self._urgent: list[tuple[int, int, WaitingRequest]] = []
        self._least: list[tuple[int, int, WaitingRequest]] = []
        # Those that do not insist.
        self._by_age: deque[WaitingRequest] = deque()
        self._lines: dict[str, _Line] = {}
        # The lines that hold a large part of the room: few, as each has one in `_LARGE_PART`.
        self._large: dict[str, _Line] = {}
        self._fair = FairShare()
        self._doomed = 0
        self._gone = 0

    def __len__(self) -> int:
        """How many wait, the doomed included."""
        return self.waiting + self._doomed

    def add(self, place: WaitingRequest, now_ms: float) -> list[WaitingRequest]:
        """Let one more wait; returns whom that dooms, which may be itself."""
        self._number += 1
        place.number = self._number
        place.came_ms = now_ms
        heapq.heappush(self._urgent, (-place.priority, place.number, place))
        self._enter(place, now_ms)
        doomed: list[WaitingRequest] = []
        while self.held_bytes > self.max_bytes or self.waiting > self.max_places:
            least = self._least_of_large() or self._least_of_all()
            if least is None:
                break
            least.is_doomed = True
            self._doomed += 1
            self._let_go(least)
            # Its ticket stays with the topic: it is going to be refused.
            self._fair.refuse(least.topic, now_ms)
            doomed.append(least)
        return doomed

    def pop(self, now_ms: float) -> WaitingRequest | None:
        """The next place that may be served, if any."""
        place = self._most_urgent()
        if place is None:
            return None
        self._served += 1
        if self._served % FAIR_EVERY == 0:
            fair = self._longest_unserved()
            self.fair_total += fair is not place and fair.priority < place.priority
            place = fair
        self._let_go(place)
        self._fair.serve(place.topic)
        self._leave(place, now_ms)
        return place

    def pop_late(self, now_ms: float) -> WaitingRequest | None:
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
            self._fair.refuse(place.topic, now_ms)
        self._leave(place, now_ms)
        place.is_refused = True
        return place

    def oldest_ms(self, now_ms: float) -> float:
        """How long the oldest has waited."""
        oldest = next((place for place in self._by_age if not place.is_gone), None)
        return 0.0 if oldest is None else now_ms - oldest.came_ms

    @property
    def top_priority(self) -> int | None:
        """The highest priority of a place that may be served; None if there is none."""
        place = self._most_urgent()
        return None if place is None else place.priority

    def _most_urgent(self) -> WaitingRequest | None:
        urgent = self._urgent
        while urgent and _is_over(urgent[0][2]):
            heapq.heappop(urgent)
        return urgent[0][2] if urgent else None

    def _longest_unserved(self) -> WaitingRequest:
        """The oldest place of the topic that was served longest ago; at least one waits."""
        topic = self._fair.first()
        assert topic is not None
        line = self._lines[topic]
        line.trim()
        return line.places[0]

    def _least_of_large(self) -> WaitingRequest | None:
        """The newest place of the least urgent topic that holds a large part of the room."""
        newest: list[WaitingRequest] = []
        for line in self._large.values():
            line.trim()
            if line.refusable:
                newest.append(line.refusable[-1])
        return min(newest, key=lambda place: (place.priority, -place.number), default=None)

    def _least_of_all(self) -> WaitingRequest | None:
        least = self._least
        while least and _is_over(least[0][2]):
            heapq.heappop(least)
        return least[0][2] if least else None

    def _enter(self, place: WaitingRequest, now_ms: float) -> None:
        self._fair.join(place.topic, now_ms)
        line = self._lines.get(place.topic)
        if line is None:
            line = self._lines[place.topic] = _Line()
        line.places.append(place)
        self.held_bytes += place.size
        self.waiting += 1
        line.bytes += place.size
        line.count += 1
        if self._is_large(line):
            self._large[place.topic] = line
        if not place.insists:
            line.refusable.append(place)
            self._by_age.append(place)
            heapq.heappush(self._least, (place.priority, -place.number, place))

    def _is_large(self, line: _Line) -> bool:
        return (
            _LARGE_PART * line.bytes > self.max_bytes or _LARGE_PART * line.count > self.max_places
        )

    def _let_go(self, place: WaitingRequest) -> None:
        """The place holds nothing and is no longer among those that may be served."""
        self.held_bytes -= place.size
        self.waiting -= 1
        assert self.held_bytes >= 0 <= self.waiting
        line = self._lines[place.topic]
        line.bytes -= place.size
        line.count -= 1
        if not line.count:
            del self._lines[place.topic]
        if place.topic in self._large and not (line.count and self._is_large(line)):
            del self._large[place.topic]
        place.size = 0

    def _leave(self, place: WaitingRequest, now_ms: float) -> None:
        place.is_gone = True
        place.waited_ms = now_ms - place.came_ms
        if (line := self._lines.get(place.topic)) is not None:
            line.trim()
        self._gone += 1
        if self._gone > _GONE_MAX:
            self._sweep()

    def _sweep(self) -> None:
        """Forget those that are gone."""
        self._by_age = deque(place for place in self._by_age if not place.is_gone)
        self._gone = 0
        self._urgent = [row for row in self._urgent if not _is_over(row[2])]
        self._least = [row for row in self._least if not _is_over(row[2])]
        heapq.heapify(self._urgent)
        heapq.heapify(self._least)
        for line in self._lines.values():
            line.sweep()


def _is_over(place: WaitingRequest) -> bool:
    return place.is_gone or place.is_doomed
