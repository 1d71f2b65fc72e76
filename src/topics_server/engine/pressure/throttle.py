"""The throttle (§0.6): under pressure requests wait by priority or get 429.

Pressure is measured: how late a timer comes (the loop is busy) and what waits to be written. While
there is none, `is_active` is False and nobody asks for more than that. While there is, whoever
would begin work takes a place (`engine/pressure/wait_queue`), and each turn of the loop begins as
much of it as fits a slice, the most urgent first: so the loop's turns stay short, and what is
urgent waits for one slice whatever else is asked for. One place in ten goes to the topic that was
served longest ago, so that no topic starves (`docs/decisions/0064-fair-share.md`). The work that is
done is as much as ever: places are refused only when the work before them takes longer than their
time. Measured, and why it is no fixed limit: `docs/decisions/0030-throttle.md`. Made by `node`;
asked by `api/records/handlers`, `api/queues/handlers`, `api/websocket/handlers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from topics_server.engine.pressure.wait_queue import WaitingRequest, WaitQueue
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import LOOP_WRITE_BYTES_MAX, MIB

TICK_S: Final = 0.02
# With nothing late for a while the next tick comes later and later, up to so many times that: an
# idle server need not wake up fifty times a second. The first late one brings the short tick back.
_TICK_STRETCH_MAX: Final = 8
# The mean lateness of the tick, in ms, from which there is pressure, and below which there is none.
LAG_MS: Final = 4.0
_EASY_MS: Final = 1.0
# Who waits no longer than so does so for the places' sake: a dozen clients that ask again at once
# leave some of them taken for ever.
_EASY_PARKED_MS: Final = 10.0
# How much of the mean a new measurement is.
_SHARE: Final = 0.25
# So many ticks without pressure, and places are no longer asked for.
_EASY_TICKS: Final = 50
# Requests that need not wait in one turn of the loop, being the most urgent.
_PASSING_MAX: Final = 4
# Work begun in one turn of the loop, and refusals told in one, in ms.
_SLICE_MS: Final = 0.15
_REFUSING_MS: Final = 0.2
# What work is taken to cost that is begun by waking a task: for itself, and a byte.
_TASK_MS: Final = 0.15
_BYTE_MS: Final = 2e-5
# Bytes on their way to the disk from which there is pressure, and above which nothing is begun.
BACKLOG_BYTES: Final = 4 * MIB
_BACKLOG_FULL_BYTES: Final = LOOP_WRITE_BYTES_MAX // 2
_LOOK_AGAIN_S: Final = 0.002
# What those that wait may hold, how many they may be, and how long each waits at most.
PARKED_BYTES_MAX: Final = 64 * MIB
PARKED_MAX: Final = 4096
PATIENCE_MS: Final = 250.0
# When to come again, ms: spread, so that not all come at once.
_RETRY_MS: Final = 500
_RETRY_SPREAD_MS: Final = 1000
_GOLDEN: Final = 0.618033988749895


def _no_priority(name: str) -> int:
    return 0


def _no_backlog() -> int:
    return 0


class Throttle:
    """The pressure on one server, and who waits for it to ease.

    Facts: `lag_ms` is the mean lateness of the loop, `parked_total` and `throttled_total` count
    places taken and those that were refused (`late`: their time was over; `full`: too much waited),
    `pressure` is 0 to 1, `threshold` the priority from which work is begun at once.
    """

    def __init__(
        self,
        priority_of: Callable[[str], int] = _no_priority,
        backlog_bytes: Callable[[], int] = _no_backlog,
    ) -> None:
        self.priority_of = priority_of
        self.is_active = False
        self.lag_ms = 0.0
        self.parked_total = 0
        self.throttled_total = {"late": 0, "full": 0}
        self.parking = WaitQueue(
            max_bytes=PARKED_BYTES_MAX, max_places=PARKED_MAX, patience_ms=PATIENCE_MS
        )
        # Told when pressure begins, and when it is over.
        self.on_change: Final[list[Callable[[bool], None]]] = []
        self._backlog_bytes = backlog_bytes
        self._easy_ticks = 0
        self._passed = 0
        self._refusals = 0
        self._is_closed = False
        self._serving: asyncio.Handle | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._due_ms = 0.0
        self._stretch = 1

    # --- measuring --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to measure, on the running loop."""
        tick_s = self._stretch * TICK_S
        self._due_ms = monotonic_ms() + 1000 * tick_s
        self._ticking = asyncio.get_running_loop().call_later(tick_s, self._tick)

    def close(self) -> None:
        """Measure no more, and let all begin that wait."""
        self._is_closed = True
        self._turn_to(is_active=False)
        if self._ticking is not None:
            self._ticking.cancel()
        if self._serving is not None:
            self._serving.cancel()
        while (place := self.parking.pop(monotonic_ms())) is not None:
            _call(place)
        self.parking.patience_ms = 0.0
        while (place := self.parking.pop_late(monotonic_ms())) is not None:
            _call(place)

    def _tick(self) -> None:
        late_ms = max(0.0, monotonic_ms() - self._due_ms)
        self.note(late_ms)
        is_easy = late_ms < _EASY_MS and self.lag_ms < _EASY_MS and not self.is_active
        self._stretch = min(2 * self._stretch, _TICK_STRETCH_MAX) if is_easy else 1
        self.start()

    def note(self, lag_ms: float) -> None:
        """Take a measurement of how late the loop is, once a tick."""
        self.lag_ms += _SHARE * (lag_ms - self.lag_ms)
        if self.lag_ms > LAG_MS or self._backlog_bytes() > BACKLOG_BYTES:
            self.press()
        elif self.is_active:
            oldest_ms = self.parking.oldest_ms(monotonic_ms()) if len(self.parking) else 0.0
            is_easy = self.lag_ms < _EASY_MS and oldest_ms < _EASY_PARKED_MS
            self._easy_ticks = self._easy_ticks + 1 if is_easy else 0
            if self._easy_ticks >= _EASY_TICKS:
                self._turn_to(is_active=False)

    def press(self) -> None:
        """There is pressure, whatever was measured: one turn brought more than is written in one.

        Those that come behind it in that turn wait already.
        """
        self._easy_ticks = 0
        self._turn_to(is_active=not self._is_closed)

    def _turn_to(self, *, is_active: bool) -> None:
        if is_active is not self.is_active:
            self.is_active = is_active
            for told in self.on_change:
                told(is_active)

    @property
    def backlog_bytes(self) -> int:
        """Bytes on their way to the disk, of the shard that has most."""
        return self._backlog_bytes()

    @property
    def pressure(self) -> float:
        """How near those that wait are to being refused: 0 nobody waits, 1 some are."""
        if not len(self.parking):
            return 0.0
        parking = self.parking
        return min(
            1.0,
            max(
                parking.oldest_ms(monotonic_ms()) / PATIENCE_MS,
                parking.held_bytes / parking.max_bytes,
                parking.waiting / parking.max_places,
            ),
        )

    @property
    def threshold(self) -> int | None:
        """The priority above which nobody waits longer than a slice; None: nobody waits."""
        return self.parking.top_priority

    # --- waiting ----------------------------------------------------------------------------

    def passes(self, name: str) -> bool:
        """Whether work on a topic may begin without waiting: nobody who waits is as urgent.

        A few in one turn of the loop may; the others take a place.
        """
        top = self.parking.top_priority
        if self._passed >= _PASSING_MAX or (top is not None and self.priority_of(name) <= top):
            return False
        self._passed += 1
        self._serve_soon()
        return True

    def _serve_soon(self) -> None:
        if self._serving is None:
            self._serving = asyncio.get_running_loop().call_soon(self._serve)

    def park(self, name: str, size: int, *, insists: bool = False) -> WaitingRequest:
        """A place for work on a topic that holds `size` bytes; set its `over` at once.

        `insists`: it is never refused. May refuse at `over`, see `refusal`.
        """
        place = WaitingRequest(self.priority_of(name), size, insists=insists, topic=name)
        self.parked_total += 1
        self.parking.add(place, monotonic_ms())
        self._serve_soon()
        return place

    async def turn(self, name: str, size: int, *, insists: bool = False) -> float:
        """Wait for one's turn; how long that took, ms. Raises `throttled`."""
        place = self.park(name, size, insists=insists)
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place.cost_ms = _TASK_MS + size * _BYTE_MS
        place.over = partial(_wake, waiting)
        await waiting
        if place.is_refused:
            raise self.refusal(place)
        return place.waited_ms

    def refusal(self, place: WaitingRequest) -> TopicsError:
        """429 for a place that was refused."""
        self.throttled_total["full" if place.is_doomed else "late"] += 1
        self._refusals += 1
        retry_ms = _RETRY_MS + int(_RETRY_SPREAD_MS * (self._refusals * _GOLDEN % 1.0))
        return TopicsError(
            Code.THROTTLED,
            "the server has more to do than it can, and this topic is not urgent enough",
            {"retry_after_ms": retry_ms, "priority": place.priority},
        )

    def _serve(self) -> None:
        """Begin a slice of what waits; the rest in later turns."""
        began_ms = now_ms = monotonic_ms()
        parking = self.parking
        while now_ms - began_ms < _REFUSING_MS:
            place = parking.pop_late(now_ms)
            if place is None:
                break
            _call(place)
            now_ms = monotonic_ms()
        is_full = self._backlog_bytes() > _BACKLOG_FULL_BYTES
        while not is_full:
            place = parking.pop(now_ms)
            if place is None:
                break
            _call(place)
            now_ms = monotonic_ms()
            began_ms -= place.cost_ms
            is_full = now_ms - began_ms >= _SLICE_MS
        self._serving = None
        self._passed = 0
        if not len(parking):
            return
        loop = asyncio.get_running_loop()
        if parking.waiting and self._backlog_bytes() <= _BACKLOG_FULL_BYTES:
            self._serving = loop.call_soon(self._serve)
        else:
            self._serving = loop.call_later(_LOOK_AGAIN_S, self._serve)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _call(place: WaitingRequest) -> None:
    over, place.over = place.over, None
    assert over is not None, "who takes a place says what then"
    over()
