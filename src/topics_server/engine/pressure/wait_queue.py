"""Requests that wait for a turn under pressure. Pure.

Nine of ten served requests are the most urgent ones; requests of equal priority are served in order
of arrival, but small ones that arrive up to 25 ms after a large one go before it: otherwise a
client that sends a MiB at a time keeps the disk busy for two or three of these requests before
another client is served. The tenth is the oldest request of the topic that was served longest ago
(`engine/pressure/fair_share`), whatever its priority, so that a topic of low priority is served
even under a flood of urgent requests. A request that is not served within `max_wait_ms` is refused,
unless it must run.

Over budget, some requests are shed: their bytes are freed now, and the 429 is sent at their
deadline, so that a client that retries at once is not answered at once. Among the topics that hold
more than 1/`_LARGE_PART` of the budget, the newest requests of the least urgent one are shed first;
if there is no such topic, the least urgent requests of all are shed. Called by
`engine/pressure/throttle`.

With hundreds of clients every append waits here, so adding and serving a request take few steps.
Requests of one priority mostly arrive in the order in which they are due: they stand in a deque,
and only the others in a heap (`_Level`). The heap for shedding exists only while requests are shed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from topics_server.engine.pressure.fair_share import FairShare

# One in this many served requests belongs to the topic that was served longest ago.
FAIR_EVERY: Final = 10
# Requests of a topic that holds more than 1/`_LARGE_PART` of the bytes or requests are shed before
# others.
_LARGE_PART: Final = 16
# Finished requests stay in the queues until they reach an end. After this many, the queues in which
# most requests are finished are swept.
_GONE_MAX: Final = 1024
# Smaller requests of the same priority go before a large one if they arrive within this time after
# it: ms for each byte, and the maximum. At worst, decoding and writing a MiB takes that long.
_LATER_BYTE_MS: Final = 2e-5
_LATER_MAX_MS: Final = 25.0


class WaitingRequest:
    """One waiting request. `over` is called when its wait ends; `is_refused` is set before.

    `size` is in bytes; times are of a monotonic clock, in ms; `cost_ms` is the estimated cost of
    the work that `over` starts. `is_over`: it can no longer be served; `is_gone`: its wait has
    ended.
    """

    __slots__ = (
        "came_ms",
        "cost_ms",
        "due_ms",
        "must_run",
        "is_shed",
        "is_gone",
        "is_over",
        "is_refused",
        "number",
        "over",
        "priority",
        "size",
        "topic",
        "waited_ms",
    )

    def __init__(self, priority: int, size: int, *, must_run: bool, topic: str = "") -> None:
        self.priority = priority
        self.size = size
        self.must_run = must_run
        self.topic = topic
        self.number = 0
        self.came_ms = self.due_ms = self.waited_ms = self.cost_ms = 0.0
        self.is_refused = self.is_shed = self.is_gone = self.is_over = False
        self.over: Callable[[], object] | None = None


class _Level:
    """The requests of one priority; `count` of them may still be served.

    `in_order` holds those that arrived in the order of `due_ms`, `early` those that are due before
    one that arrived earlier. Both may contain finished requests in the middle.
    """

    __slots__ = ("count", "early", "in_order")

    def __init__(self) -> None:
        self.count = 0
        self.in_order: deque[WaitingRequest] = deque()
        self.early: list[tuple[float, int, WaitingRequest]] = []

    def add(self, request: WaitingRequest) -> None:
        """Add a request that is newer than all others."""
        self.count += 1
        in_order = self.in_order
        if in_order and request.due_ms < in_order[-1].due_ms:
            heapq.heappush(self.early, (request.due_ms, request.number, request))
        else:
            in_order.append(request)

    def first(self) -> WaitingRequest:
        """The request that is due first; of equals the oldest. There is one."""
        in_order, early = self.in_order, self.early
        while in_order and in_order[0].is_over:
            in_order.popleft()
        if early:
            while early and early[0][2].is_over:
                heapq.heappop(early)
            if early and (not in_order or early[0][:2] < (in_order[0].due_ms, in_order[0].number)):
                return early[0][2]
        return in_order[0]

    def sweep(self) -> None:
        """Remove all finished requests if they are more than half."""
        if len(self.in_order) + len(self.early) > 2 * self.count:
            self.in_order = _unfinished(self.in_order)
            self.early = [row for row in self.early if not row[2].is_over]
            heapq.heapify(self.early)


class _TopicQueue:
    """The requests of one topic that may still be served; `bytes` and `count` are their sums.

    `refusable` holds the requests that need not run, if any must run; if none must, it is None, and
    all need not. Both may contain finished requests in the middle.
    """

    __slots__ = ("bytes", "count", "requests", "refusable")

    def __init__(self) -> None:
        self.bytes = self.count = 0
        self.requests: deque[WaitingRequest] = deque()
        self.refusable: deque[WaitingRequest] | None = None

    def add(self, request: WaitingRequest) -> None:
        """Add a request that is newer than all others."""
        self.bytes += request.size
        self.count += 1
        if request.must_run and self.refusable is None:
            self.refusable = self.requests.copy()
        self.requests.append(request)
        if self.refusable is not None and not request.must_run:
            self.refusable.append(request)

    def oldest(self) -> WaitingRequest:
        """The oldest request; there is one."""
        requests = self.requests
        while requests[0].is_over:
            requests.popleft()
        return requests[0]

    def newest_refusable(self) -> WaitingRequest | None:
        """The newest request that need not run, if any."""
        refusable = self.requests if self.refusable is None else self.refusable
        while refusable and refusable[-1].is_over:
            refusable.pop()
        return refusable[-1] if refusable else None

    def sweep(self) -> None:
        """Remove all finished requests if they are more than half."""
        refusable = self.refusable
        if len(self.requests) > 2 * self.count:
            self.requests = _unfinished(self.requests)
        if refusable is not None and len(refusable) > 2 * self.count:
            self.refusable = _unfinished(refusable)


class WaitQueue:
    """All waiting requests. `fair_total` counts those that were served before more urgent ones."""

    def __init__(self, *, max_bytes: int, max_waiting: int, max_wait_ms: float) -> None:
        self.max_bytes = max_bytes
        self.max_waiting = max_waiting
        self.max_wait_ms = max_wait_ms
        # The bytes and the number of the requests that may still be served.
        self.held_bytes = 0
        self.waiting = 0
        self.fair_total = 0
        self._number = 0
        self._served = 0
        # The levels with requests that may be served, and their priorities in ascending order.
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        # The requests that need not run: by age, and, while requests are shed, a heap of them with
        # the next one to be shed on top.
        self._by_age: deque[WaitingRequest] = deque()
        self._least: list[tuple[int, int, WaitingRequest]] | None = None
        # The topics with requests that may be served; each is in `_fair` once.
        self._topic_queues: dict[str, _TopicQueue] = {}
        # Topics that hold a large part of the budget: few, because each holds at least
        # 1/`_LARGE_PART`.
        self._large: dict[str, _TopicQueue] = {}
        self._large_bytes = max_bytes / _LARGE_PART
        self._large_count = max_waiting / _LARGE_PART
        self._fair = FairShare()
        self._shed = 0
        self._gone = 0

    def __len__(self) -> int:
        """The number of waiting requests, shed ones included."""
        return self.waiting + self._shed

    def add(self, request: WaitingRequest, now_ms: float) -> list[WaitingRequest]:
        """Add a request; returns the requests that are shed for it, which may include itself."""
        self._number += 1
        request.number = self._number
        request.came_ms = now_ms
        later_ms = request.size * _LATER_BYTE_MS
        request.due_ms = now_ms + (later_ms if later_ms < _LATER_MAX_MS else _LATER_MAX_MS)
        self._enter(request, now_ms)
        shed: list[WaitingRequest] = []
        while self.held_bytes > self.max_bytes or self.waiting > self.max_waiting:
            least = self._least_of_large() or self._least_of_all()
            if least is None:
                break
            least.is_shed = True
            self._shed += 1
            self._let_go(least)
            self._refuse(least.topic, now_ms)
            shed.append(least)
        return shed

    def pop(self, now_ms: float) -> WaitingRequest | None:
        """Remove and return the next request that may be served, if any."""
        request = self._most_urgent()
        if request is None:
            return None
        self._served += 1
        if self._served % FAIR_EVERY == 0:
            fair = self._longest_unserved()
            self.fair_total += fair is not request and fair.priority < request.priority
            request = fair
        self._let_go(request)
        if request.topic in self._topic_queues:
            self._fair.renew(request.topic)
        else:
            self._fair.serve(request.topic)
        self._leave(request, now_ms)
        return request

    def pop_late(self, now_ms: float) -> WaitingRequest | None:
        """Remove and return the oldest request whose time is over; the caller refuses it."""
        ages = self._by_age
        while ages and ages[0].is_gone:
            ages.popleft()
        if not ages or now_ms - ages[0].came_ms < self.max_wait_ms:
            return None
        request = ages[0]
        if request.is_shed:
            self._shed -= 1
        else:
            self._let_go(request)
            self._refuse(request.topic, now_ms)
        self._leave(request, now_ms)
        request.is_refused = True
        return request

    def oldest_ms(self, now_ms: float) -> float:
        """The time for which the oldest request has waited, in ms."""
        oldest = next((request for request in self._by_age if not request.is_gone), None)
        return 0.0 if oldest is None else now_ms - oldest.came_ms

    @property
    def top_priority(self) -> int | None:
        """The highest priority of a request that may be served; None if there is none."""
        return self._priorities[-1] if self._priorities else None

    def _most_urgent(self) -> WaitingRequest | None:
        priorities = self._priorities
        return self._levels[priorities[-1]].first() if priorities else None

    def _longest_unserved(self) -> WaitingRequest:
        """The oldest request of the topic that was served longest ago; at least one topic waits."""
        topic = self._fair.first()
        assert topic is not None
        return self._topic_queues[topic].oldest()

    def _least_of_large(self) -> WaitingRequest | None:
        """The newest request of the least urgent topic that holds a large part of the budget."""
        newest = [queue.newest_refusable() for queue in self._large.values()]
        refusable = [request for request in newest if request is not None]
        return min(refusable, key=lambda request: (request.priority, -request.number), default=None)

    def _least_of_all(self) -> WaitingRequest | None:
        least = self._least
        if least is None:
            least = self._least = [
                (request.priority, -request.number, request)
                for request in self._by_age
                if not request.is_over
            ]
            heapq.heapify(least)
        while least and least[0][2].is_over:
            heapq.heappop(least)
        return least[0][2] if least else None

    def _enter(self, request: WaitingRequest, now_ms: float) -> None:
        topic = request.topic
        queue = self._topic_queues.get(topic)
        if queue is None:
            queue = self._topic_queues[topic] = _TopicQueue()
            self._fair.join(topic, now_ms)
        queue.add(request)
        self.held_bytes += request.size
        self.waiting += 1
        if self._is_large(queue):
            self._large[topic] = queue
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level()
            at = bisect_left(self._priorities, request.priority)
            self._priorities.insert(at, request.priority)
        level.add(request)
        if not request.must_run:
            self._by_age.append(request)
            if self._least is not None:
                heapq.heappush(self._least, (request.priority, -request.number, request))

    def _is_large(self, queue: _TopicQueue) -> bool:
        return queue.bytes > self._large_bytes or queue.count > self._large_count

    def _let_go(self, request: WaitingRequest) -> None:
        """Free the bytes of a request that can no longer be served."""
        request.is_over = True
        self.held_bytes -= request.size
        self.waiting -= 1
        assert self.held_bytes >= 0 <= self.waiting
        topic = request.topic
        queue = self._topic_queues[topic]
        queue.bytes -= request.size
        queue.count -= 1
        if not queue.count:
            del self._topic_queues[topic]
        elif queue.requests[0].is_over:
            queue.requests.popleft()
        if self._large and topic in self._large and not (queue.count and self._is_large(queue)):
            del self._large[topic]
        level = self._levels[request.priority]
        level.count -= 1
        if not level.count:
            del self._levels[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]
        request.size = 0

    def _refuse(self, topic: str, now_ms: float) -> None:
        """A topic whose last request was let go keeps its ticket, because it will be refused."""
        if topic not in self._topic_queues:
            self._fair.refuse(topic, now_ms)

    def _leave(self, request: WaitingRequest, now_ms: float) -> None:
        request.is_gone = True
        request.waited_ms = now_ms - request.came_ms
        self._gone += 1
        if self._gone > _GONE_MAX:
            self._sweep()

    def _sweep(self) -> None:
        """Remove requests that are finished from the queues that consist of them."""
        self._gone = 0
        if len(self._by_age) > 2 * len(self):
            self._by_age = deque(request for request in self._by_age if not request.is_gone)
        # The heap is made anew when the next request is shed.
        self._least = None
        for level in self._levels.values():
            level.sweep()
        for queue in self._topic_queues.values():
            queue.sweep()


def _unfinished(requests: Iterable[WaitingRequest]) -> deque[WaitingRequest]:
    return deque(request for request in requests if not request.is_over)
