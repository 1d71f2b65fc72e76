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
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

from topics_server.engine.pressure.fair_share import FairShare

# One in this many served requests belongs to the topic that was served longest ago.
FAIR_EVERY: Final = 10
# Requests of a topic that holds more than 1/`_LARGE_PART` of the bytes or requests are shed before
# others.
_LARGE_PART: Final = 16
# Served requests stay in the heaps until they reach the top; beyond this number they are removed.
_GONE_MAX: Final = 1024
# Smaller requests of the same priority go before a large one if they arrive within this time after
# it: ms for each byte, and the maximum. At worst, decoding and writing a MiB takes that long.
_LATER_BYTE_MS: Final = 2e-5
_LATER_MAX_MS: Final = 25.0


class WaitingRequest:
    """One waiting request. `over` is called when its wait ends; `is_refused` is set before.

    `size` is in bytes; times are of a monotonic clock, in ms; `cost_ms` is the estimated cost of
    the work that `over` starts.
    """

    __slots__ = (
        "came_ms",
        "cost_ms",
        "must_run",
        "is_shed",
        "is_gone",
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
        self.came_ms = self.waited_ms = self.cost_ms = 0.0
        self.is_refused = self.is_shed = self.is_gone = False
        self.over: Callable[[], object] | None = None


class _TopicQueue:
    """The requests of one topic that may still be served; `bytes` and `count` are their sums.

    `refusable` holds the requests that need not run. Both may contain finished requests in the
    middle.
    """

    __slots__ = ("bytes", "count", "requests", "refusable")

    def __init__(self) -> None:
        self.bytes = self.count = 0
        self.requests: deque[WaitingRequest] = deque()
        self.refusable: deque[WaitingRequest] = deque()

    def trim(self) -> None:
        """Remove finished requests at either end."""
        for requests in (self.requests, self.refusable):
            while requests and _is_over(requests[0]):
                requests.popleft()
            while requests and _is_over(requests[-1]):
                requests.pop()

    def sweep(self) -> None:
        """Remove all finished requests."""
        self.requests = deque(request for request in self.requests if not _is_over(request))
        self.refusable = deque(request for request in self.refusable if not _is_over(request))


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
        self._urgent: list[tuple[int, float, int, WaitingRequest]] = []
        self._least: list[tuple[int, int, WaitingRequest]] = []
        # The requests that need not run.
        self._by_age: deque[WaitingRequest] = deque()
        self._topic_queues: dict[str, _TopicQueue] = {}
        # Topics that hold a large part of the budget: few, because each holds at least
        # 1/`_LARGE_PART`.
        self._large: dict[str, _TopicQueue] = {}
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
        due_ms = now_ms + min(_LATER_MAX_MS, request.size * _LATER_BYTE_MS)
        heapq.heappush(self._urgent, (-request.priority, due_ms, request.number, request))
        self._enter(request, now_ms)
        shed: list[WaitingRequest] = []
        while self.held_bytes > self.max_bytes or self.waiting > self.max_waiting:
            least = self._least_of_large() or self._least_of_all()
            if least is None:
                break
            least.is_shed = True
            self._shed += 1
            self._let_go(least)
            # The topic keeps its ticket, because the request will be refused.
            self._fair.refuse(least.topic, now_ms)
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
            self._fair.refuse(request.topic, now_ms)
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
        request = self._most_urgent()
        return None if request is None else request.priority

    def _most_urgent(self) -> WaitingRequest | None:
        urgent = self._urgent
        while urgent and _is_over(urgent[0][3]):
            heapq.heappop(urgent)
        return urgent[0][3] if urgent else None

    def _longest_unserved(self) -> WaitingRequest:
        """The oldest request of the topic that was served longest ago; at least one topic waits."""
        topic = self._fair.first()
        assert topic is not None
        queue = self._topic_queues[topic]
        queue.trim()
        return queue.requests[0]

    def _least_of_large(self) -> WaitingRequest | None:
        """The newest request of the least urgent topic that holds a large part of the budget."""
        newest: list[WaitingRequest] = []
        for queue in self._large.values():
            queue.trim()
            if queue.refusable:
                newest.append(queue.refusable[-1])
        return min(newest, key=lambda request: (request.priority, -request.number), default=None)

    def _least_of_all(self) -> WaitingRequest | None:
        least = self._least
        while least and _is_over(least[0][2]):
            heapq.heappop(least)
        return least[0][2] if least else None

    def _enter(self, request: WaitingRequest, now_ms: float) -> None:
        self._fair.join(request.topic, now_ms)
        queue = self._topic_queues.get(request.topic)
        if queue is None:
            queue = self._topic_queues[request.topic] = _TopicQueue()
        queue.requests.append(request)
        self.held_bytes += request.size
        self.waiting += 1
        queue.bytes += request.size
        queue.count += 1
        if self._is_large(queue):
            self._large[request.topic] = queue
        if not request.must_run:
            queue.refusable.append(request)
            self._by_age.append(request)
            heapq.heappush(self._least, (request.priority, -request.number, request))

    def _is_large(self, queue: _TopicQueue) -> bool:
        return (
            _LARGE_PART * queue.bytes > self.max_bytes
            or _LARGE_PART * queue.count > self.max_waiting
        )

    def _let_go(self, request: WaitingRequest) -> None:
        """Free the bytes of a request that can no longer be served."""
        self.held_bytes -= request.size
        self.waiting -= 1
        assert self.held_bytes >= 0 <= self.waiting
        queue = self._topic_queues[request.topic]
        queue.bytes -= request.size
        queue.count -= 1
        if not queue.count:
            del self._topic_queues[request.topic]
        if request.topic in self._large and not (queue.count and self._is_large(queue)):
            del self._large[request.topic]
        request.size = 0

    def _leave(self, request: WaitingRequest, now_ms: float) -> None:
        request.is_gone = True
        request.waited_ms = now_ms - request.came_ms
        if (queue := self._topic_queues.get(request.topic)) is not None:
            queue.trim()
        self._gone += 1
        if self._gone > _GONE_MAX:
            self._sweep()

    def _sweep(self) -> None:
        """Remove requests that are finished."""
        self._by_age = deque(request for request in self._by_age if not request.is_gone)
        self._gone = 0
        self._urgent = [row for row in self._urgent if not _is_over(row[3])]
        self._least = [row for row in self._least if not _is_over(row[2])]
        heapq.heapify(self._urgent)
        heapq.heapify(self._least)
        for queue in self._topic_queues.values():
            queue.sweep()


def _is_over(request: WaitingRequest) -> bool:
    return request.is_gone or request.is_shed
