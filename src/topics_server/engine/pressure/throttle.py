"""The throttle (§0.6): under pressure requests wait by priority or get 429.

Two measurements show pressure: how late a timer fires (the loop is busy), and how many bytes wait
for the disk. Without pressure, `is_active` is False and requests start at once. Under pressure, a
request that would start work joins the wait queue (`engine/pressure/wait_queue`). Each loop turn
starts as many waiting requests as fit into a slice, the most urgent first: loop turns stay short,
and an urgent request waits at most one slice behind any load. One request in ten comes from the
topic that was served longest ago, so that no topic starves (`docs/decisions/0064-fair-share.md`).
The throughput does not drop: a request is refused only when the work before it takes longer than
its time limit. Measurements, and why there is no fixed limit: `docs/decisions/0030-throttle.md`.
Made by `node`; called by `api/records/handlers`, `api/queues/handlers`, `api/websocket/handlers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from topics_server.engine.pressure.wait_queue import WaitingRequest, WaitQueue
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import LOOP_WRITE_BYTES_MAX, MIB, PRIORITY_MAX

TICK_S: Final = 0.02
# While no tick is late the interval grows, up to this many times, because an idle server need not
# wake up fifty times a second. The first late tick restores the short interval.
_TICK_STRETCH_MAX: Final = 8
# Mean lateness of the tick, in ms: pressure begins above it and ends below it.
LAG_MS: Final = 4.0
_EASY_MS: Final = 1.0
# Shorter waits are caused by the wait queue itself: a dozen clients that retry at once always keep
# some requests waiting.
_EASY_WAIT_MS: Final = 10.0
# The weight of a new measurement in the mean.
_SHARE: Final = 0.25
# Ticks without pressure after which the wait queue is no longer used.
_EASY_TICKS: Final = 50
# The most urgent requests of one loop turn that start without waiting.
_PASSING_MAX: Final = 4
# Time for starting work in one loop turn, in ms. A short slice keeps the turns short for urgent
# requests, but costs throughput, because fewer appends share a group. The long slice is used after
# this many ticks without a request that was more urgent than most.
_SLICE_MS: Final = 0.15
_LONG_SLICE_MS: Final = 1.0
_URGENT_TICKS: Final = 25
# A request is urgent if its priority is this much above that of most requests; automatic priorities
# differ by less.
_URGENT_ABOVE: Final = 10
# Time for sending refusals in one loop turn, in ms.
_REFUSING_MS: Final = 0.2
# Estimated cost of work that is started by waking a task: fixed, and per byte.
_TASK_MS: Final = 0.15
_BYTE_MS: Final = 2e-5
# Bytes that wait for the disk: pressure begins at the first number; above the second number no work
# is started.
BACKLOG_BYTES: Final = 4 * MIB
_BACKLOG_FULL_BYTES: Final = LOOP_WRITE_BYTES_MAX // 2
_LOOK_AGAIN_S: Final = 0.002
# The wait queue's budget: bytes, requests, and the longest wait.
WAITING_BYTES_MAX: Final = 64 * MIB
WAITING_MAX: Final = 4096
MAX_WAIT_MS: Final = 250.0
# `Retry-After` in ms: the values are spread, so that clients do not return together.
_RETRY_MS: Final = 500
_RETRY_SPREAD_MS: Final = 1000
_GOLDEN: Final = 0.618033988749895


def _no_priority(name: str) -> int:
    return 0


def _no_backlog() -> int:
    return 0


class Throttle:
    """The pressure on one server, and the requests that wait.

    Metrics: `lag_ms` is the mean lateness of the loop; `queued_total` counts requests that had to
    wait, `throttled_total` refused ones (`late`: their time was over; `full`: too much waited);
    `pressure` is 0 to 1; `threshold` is the priority from which on work starts at once;
    `has_urgent` tells whether requests that are more urgent than most came lately.
    """

    def __init__(
        self,
        priority_of: Callable[[str], int] = _no_priority,
        backlog_bytes: Callable[[], int] = _no_backlog,
    ) -> None:
        self.priority_of = priority_of
        self.is_active = False
        self.lag_ms = 0.0
        self.queued_total = 0
        self.throttled_total = {"late": 0, "full": 0}
        self.wait_queue = WaitQueue(
            max_bytes=WAITING_BYTES_MAX, max_waiting=WAITING_MAX, max_wait_ms=MAX_WAIT_MS
        )
        # Called when pressure begins, and when it ends.
        self.on_change: Final[list[Callable[[bool], None]]] = []
        self._backlog_bytes = backlog_bytes
        self._easy_ticks = 0
        self._passed = 0
        # The requests since the last tick by priority, and the priority of most requests before it.
        self._asked: dict[int, int] = {}
        self._usual_priority = -PRIORITY_MAX
        # The priorities of the topics that were asked for since the last tick.
        self._known: dict[str, int] = {}
        self._urgent_ticks = _URGENT_TICKS
        self._refused_count = 0
        self._is_closed = False
        self._serving: asyncio.Handle | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._due_ms = 0.0
        self._stretch = 1

    # --- measuring --------------------------------------------------------------------------

    def start(self) -> None:
        """Start to measure, on the running loop."""
        tick_s = self._stretch * TICK_S
        self._due_ms = monotonic_ms() + 1000 * tick_s
        self._ticking = asyncio.get_running_loop().call_later(tick_s, self._tick)

    def watch_backlog(self, backlog_bytes: Callable[[], int]) -> None:
        """Include the bytes that wait for the journal in the measurement from now on."""
        self._backlog_bytes = backlog_bytes

    def close(self) -> None:
        """Stop measuring, and start all waiting requests."""
        self._is_closed = True
        self._turn_to(is_active=False)
        if self._ticking is not None:
            self._ticking.cancel()
        if self._serving is not None:
            self._serving.cancel()
        while (request := self.wait_queue.pop(monotonic_ms())) is not None:
            _call(request)
        self.wait_queue.max_wait_ms = 0.0
        while (request := self.wait_queue.pop_late(monotonic_ms())) is not None:
            _call(request)

    def _tick(self) -> None:
        late_ms = max(0.0, monotonic_ms() - self._due_ms)
        self.note(late_ms)
        is_easy = late_ms < _EASY_MS and self.lag_ms < _EASY_MS and not self.is_active
        self._stretch = min(2 * self._stretch, _TICK_STRETCH_MAX) if is_easy else 1
        self.start()

    def note(self, lag_ms: float) -> None:
        """Take a measurement of the loop's lateness, once a tick."""
        self.lag_ms += _SHARE * (lag_ms - self.lag_ms)
        self._judge_priorities()
        if self.lag_ms > LAG_MS or self._backlog_bytes() > BACKLOG_BYTES:
            self.press()
        elif self.is_active:
            oldest_ms = self.wait_queue.oldest_ms(monotonic_ms()) if len(self.wait_queue) else 0.0
            is_easy = self.lag_ms < _EASY_MS and oldest_ms < _EASY_WAIT_MS
            self._easy_ticks = self._easy_ticks + 1 if is_easy else 0
            if self._easy_ticks >= _EASY_TICKS:
                self._turn_to(is_active=False)

    def _judge_priorities(self) -> None:
        """Once a tick: find the priority of most requests, and whether any was more urgent."""
        self._known.clear()
        self._urgent_ticks = max(0, self._urgent_ticks - 1)
        asked = self._asked
        if asked:
            self._usual_priority = max(asked, key=asked.__getitem__)
            if max(asked) > self._usual_priority + _URGENT_ABOVE:
                self._urgent_ticks = _URGENT_TICKS
            asked.clear()

    def _note_priority(self, priority: int) -> None:
        self._asked[priority] = self._asked.get(priority, 0) + 1
        if priority > self._usual_priority + _URGENT_ABOVE:
            self._urgent_ticks = _URGENT_TICKS

    @property
    def has_urgent(self) -> bool:
        """Whether requests of high priority arrived lately: loop turns are then short."""
        return self._urgent_ticks > 0

    def press(self) -> None:
        """Begin pressure without a measurement: one turn received more bytes than a turn writes.

        Later requests of the same turn already wait.
        """
        self._easy_ticks = 0
        self._turn_to(is_active=not self._is_closed)

    def _turn_to(self, *, is_active: bool) -> None:
        if is_active is not self.is_active:
            self.is_active = is_active
            for callback in self.on_change:
                callback(is_active)

    @property
    def backlog_bytes(self) -> int:
        """The bytes that wait for the disk in the shard that has the most."""
        return self._backlog_bytes()

    @property
    def is_backed_up(self) -> bool:
        """Whether so many bytes wait for the disk that no waiting request is started."""
        return self._backlog_bytes() > _BACKLOG_FULL_BYTES

    @property
    def pressure(self) -> float:
        """How near the waiting requests are to a refusal: 0: none waits; 1: some are refused."""
        if not len(self.wait_queue):
            return 0.0
        wait_queue = self.wait_queue
        return min(
            1.0,
            max(
                wait_queue.oldest_ms(monotonic_ms()) / MAX_WAIT_MS,
                wait_queue.held_bytes / wait_queue.max_bytes,
                wait_queue.waiting / wait_queue.max_waiting,
            ),
        )

    @property
    def threshold(self) -> int | None:
        """The priority above which no request waits longer than a slice; None if none waits."""
        return self.wait_queue.top_priority

    # --- waiting ----------------------------------------------------------------------------

    def passes(self, name: str) -> bool:
        """Whether work on a topic may start without waiting: no waiting request is as urgent.

        Only a few requests of a loop turn may; the others join the wait queue.
        """
        if self._passed >= _PASSING_MAX:
            return False
        top = self.wait_queue.top_priority if self.wait_queue.waiting else None
        if top is not None:
            priority = self._priority(name)
            if priority <= top:
                return False
            self._note_priority(priority)
        self._passed += 1
        if self._serving is None:
            self._serve_soon()
        return True

    def _serve_soon(self) -> None:
        self._serving = asyncio.get_running_loop().call_soon(self._serve)

    def enqueue(self, name: str, size: int, *, must_run: bool = False) -> WaitingRequest:
        """Add a request of `size` bytes to the wait queue; set its `over` at once.

        `must_run`: the request is never refused. Otherwise it may be refused at `over`, see
        `refusal`.
        """
        priority = self._priority(name)
        request = WaitingRequest(priority, size, must_run=must_run, topic=name)
        self.queued_total += 1
        self._note_priority(priority)
        self.wait_queue.add(request, monotonic_ms())
        if self._serving is None:
            self._serve_soon()
        return request

    def _priority(self, name: str) -> int:
        """The priority of a topic; the same one until the next tick."""
        priority = self._known.get(name)
        if priority is None:
            priority = self._known[name] = self.priority_of(name)
        return priority

    async def turn(self, name: str, size: int, *, must_run: bool = False) -> float:
        """Wait for a turn; returns the wait in ms. Raises `throttled`."""
        request = self.enqueue(name, size, must_run=must_run)
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request.cost_ms = task_cost_ms(size)
        request.over = partial(_wake, waiting)
        await waiting
        if request.is_refused:
            raise self.refusal(request)
        return request.waited_ms

    def refusal(self, request: WaitingRequest) -> TopicsError:
        """429 for a refused request."""
        self.throttled_total["full" if request.is_shed else "late"] += 1
        self._refused_count += 1
        retry_ms = _RETRY_MS + int(_RETRY_SPREAD_MS * (self._refused_count * _GOLDEN % 1.0))
        return TopicsError(
            Code.THROTTLED,
            "the server is overloaded, and the priority of this topic is too low",
            {"retry_after_ms": retry_ms, "priority": request.priority},
        )

    def _serve(self) -> None:
        """Start a slice of the waiting requests; the rest in later turns."""
        if not len(self.wait_queue):
            # All requests that started without waiting in this turn; no request waits.
            self._serving = None
            self._passed = 0
            return
        began_ms = now_ms = monotonic_ms()
        wait_queue = self.wait_queue
        while now_ms - began_ms < _REFUSING_MS:
            request = wait_queue.pop_late(now_ms)
            if request is None:
                break
            _call(request)
            now_ms = monotonic_ms()
        is_full = self.is_backed_up
        slice_ms = _SLICE_MS if self.has_urgent else _LONG_SLICE_MS
        while not is_full:
            request = wait_queue.pop(now_ms)
            if request is None:
                break
            _call(request)
            now_ms = monotonic_ms()
            began_ms -= request.cost_ms
            is_full = now_ms - began_ms >= slice_ms
        self._serving = None
        self._passed = 0
        if not len(wait_queue):
            return
        loop = asyncio.get_running_loop()
        if wait_queue.waiting and not self.is_backed_up:
            self._serving = loop.call_soon(self._serve)
        else:
            self._serving = loop.call_later(_LOOK_AGAIN_S, self._serve)


def task_cost_ms(size: int) -> float:
    """The estimated cost in ms of a task with `size` bytes, which runs after the slice."""
    return _TASK_MS + size * _BYTE_MS


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _call(request: WaitingRequest) -> None:
    over, request.over = request.over, None
    assert over is not None, "who takes a place says what then"
    over()
