"""The throttle: when pressure begins and ends; under pressure, the slices of work, the refusals and
the requests that need not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from topics_server.engine.pressure import throttle as module
from topics_server.engine.pressure.throttle import BACKLOG_BYTES, LAG_MS, Throttle
from topics_server.values.errors import Code, TopicsError

pytestmark = pytest.mark.anyio

PRIORITIES = {"urgent": 900, "bulk": -5}


@pytest.fixture
async def throttle() -> AsyncIterator[Throttle]:
    made = Throttle(lambda name: PRIORITIES.get(name, 0))
    made.is_active = True
    yield made
    made.close()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_pressure_comes_with_lag_and_goes_when_it_is_easy() -> None:
    made = Throttle()
    seen = []
    # One late tick is no pressure; and pressure does not end at once.
    for count, lag_ms in ((1, 3 * LAG_MS), (10, 3 * LAG_MS), (20, 0.0), (60, 0.0)):
        for _ in range(count):
            made.note(lag_ms)
        seen.append(made.is_active)
    assert seen == [False, True, True, False]


async def test_pressure_is_over_though_some_have_just_taken_a_place(
    throttle: Throttle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen clients that retry at once occupy some places at every check."""
    now = [0.0]
    monkeypatch.setattr(module, "monotonic_ms", lambda: now[0])
    seen = []
    for waits_ms in (50.0, 5.0):
        place = throttle.enqueue("bulk", 100)
        place.over = lambda: None
        now[0] += waits_ms
        for _ in range(60):
            throttle.note(0.0)
        seen.append(throttle.is_active)
        await turns()
    assert seen == [True, False]


def test_listeners_learn_when_pressure_begins_and_ends() -> None:
    made, told = Throttle(), list[bool]()
    made.on_change.append(told.append)
    for lag_ms in (9 * LAG_MS, 9 * LAG_MS, 0.0):
        for _ in range(100):
            made.note(lag_ms)
    assert told == [True, False]
    made.press()
    made.close()
    assert told == [True, False, True, False]


def test_a_backlog_for_the_disk_is_pressure() -> None:
    waiting = [0]
    made = Throttle(backlog_bytes=lambda: waiting[0])
    made.note(0.0)
    seen = [made.is_active]
    waiting[0] = BACKLOG_BYTES + 1
    made.note(0.0)
    assert [*seen, made.is_active] == [False, True]


def test_pressure_comes_at_once_with_a_turn_that_brings_too_much() -> None:
    made = Throttle()
    made.press()
    assert made.is_active
    made.close()
    made.press()
    assert not made.is_active, "who goes down throttles nobody"


def test_an_idle_server_looks_less_often_until_something_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, now, waits = Throttle(), [0.0], []

    class Loop:
        """Notes the delay of each call."""

        def call_later(self, delay_s: float, call: object) -> None:
            waits.append(round(delay_s / module.TICK_S))

    monkeypatch.setattr(module, "monotonic_ms", lambda: now[0])
    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    made.start()
    for late_ms in (0, 0, 0, 0, 30, 0, 0):
        now[0] += 1000 * waits[-1] * module.TICK_S + late_ms
        made._tick()
    # One tick this late is pressure, and under pressure the ticks are short.
    assert waits == [1, 2, 4, 8, 8, 1, 1, 1]
    assert made.is_active


async def test_the_urgent_are_served_first(throttle: Throttle) -> None:
    served: list[str] = []

    async def work(name: str) -> None:
        await throttle.turn(name, 10)
        served.append(name)

    await asyncio.gather(*(work(name) for name in ("bulk", "other", "urgent", "bulk")))
    assert served == ["urgent", "other", "bulk", "bulk"]
    assert throttle.queued_total == 4
    assert throttle.pressure == 0.0
    assert throttle.threshold is None


async def test_no_turn_of_the_loop_begins_more_than_a_slice(
    throttle: Throttle, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic_ms", lambda: now[0])
    began: list[int] = []
    turn = [0]

    def work() -> None:
        now[0] += 0.4 * module._SLICE_MS
        began.append(turn[0])

    for _ in range(10):
        throttle.enqueue("bulk", 1).over = work
    for _ in range(20):
        await asyncio.sleep(0)
        turn[0] += 1
    assert len(began) == 10
    assert max(began.count(number) for number in began) == 3
    assert len(set(began)) >= 4


def is_short(throttle: Throttle) -> bool:
    """Whether the turns are short; evaluated anew each time."""
    return throttle.has_urgent


async def slice_of(throttle: Throttle, now: list[float]) -> int:
    """The number of appends that one turn begins, of many that wait and take an eighth of a ms
    each.
    """
    began: list[int] = []
    turn = [0]

    def work() -> None:
        now[0] += 0.125
        began.append(turn[0])

    for _ in range(30):
        throttle.enqueue("bulk", 1).over = work
    for _ in range(40):
        await asyncio.sleep(0)
        turn[0] += 1
    assert len(began) == 30
    return max(map(began.count, began))


async def test_turns_are_longer_while_nothing_urgent_comes(
    throttle: Throttle, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic_ms", lambda: now[0])

    def ticks(count: int, urgent_at: int | None = None) -> None:
        for number in range(count):
            for _ in range(20):
                throttle.enqueue("bulk", 1).over = lambda: None
            if number == urgent_at:
                throttle.enqueue("urgent", 1).over = lambda: None
            throttle.note(10 * LAG_MS)
            while throttle.wait_queue.pop(now[0]) is not None:
                pass

    # The throttle cannot know yet which requests will come.
    assert await slice_of(throttle, now) == 2
    ticks(module._URGENT_TICKS + 1)
    assert not is_short(throttle)
    assert await slice_of(throttle, now) == 8
    # After one urgent request the turns are short again for a while.
    throttle.enqueue("urgent", 1).over = lambda: None
    assert is_short(throttle)
    await turns()
    assert await slice_of(throttle, now) == 2
    ticks(10, urgent_at=5)
    assert is_short(throttle)
    ticks(module._URGENT_TICKS)
    assert await slice_of(throttle, now) == 8


async def test_what_passes_those_who_wait_is_urgent_if_it_is_more_so_than_most(
    throttle: Throttle,
) -> None:
    for _ in range(20):
        throttle.enqueue("other", 1).over = lambda: None
    throttle.note(0.0)
    throttle._urgent_ticks = 0
    await turns(30)
    throttle.enqueue("bulk", 1).over = lambda: None
    # A request as urgent as most, beside a less urgent one.
    assert throttle.passes("other")
    assert not is_short(throttle)
    assert throttle.passes("urgent")
    assert is_short(throttle)


async def test_a_request_that_waits_too_long_gets_retry_after(
    throttle: Throttle, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic_ms", lambda: now[0])
    waiting = [asyncio.ensure_future(throttle.turn("bulk", 1)) for _ in range(30)]
    for task in waiting:
        task.add_done_callback(lambda _: None)
    throttle._backlog_bytes = lambda: 10**9
    await turns()
    assert throttle.pressure < 0.1
    now[0] = 125.0
    assert throttle.pressure == 0.5
    now[0] = 250.0
    assert throttle.pressure == 1.0
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    told = []
    for error in results:
        assert isinstance(error, TopicsError)
        assert error.code is Code.THROTTLED
        assert error.detail["priority"] == -5
        told.append(error.detail["retry_after_ms"])
    assert len(set(told)) > 25
    assert min(told) >= 500
    assert max(told) <= 1500
    assert throttle.throttled_total == {"late": 30, "full": 0}


async def test_a_full_disk_queue_begins_nothing(throttle: Throttle) -> None:
    waiting = [10**9]
    throttle._backlog_bytes = lambda: waiting[0]
    task = asyncio.ensure_future(throttle.turn("urgent", 1))
    await turns()
    assert not task.done()
    waiting[0] = 0
    await asyncio.wait_for(task, 10)


async def test_a_few_of_the_most_urgent_need_not_wait(throttle: Throttle) -> None:
    places = [throttle.enqueue("other", 1)]
    places[0].over = lambda: None
    assert not throttle.passes("other")
    assert not throttle.passes("bulk")
    assert [throttle.passes("urgent") for _ in range(6)] == [True] * 4 + [False] * 2
    await turns()
    assert throttle.passes("bulk"), "nobody waits any more"


async def test_the_end_lets_all_begin(throttle: Throttle) -> None:
    throttle._backlog_bytes = lambda: 10**9
    tasks = [asyncio.ensure_future(throttle.turn("bulk", 1)) for _ in range(3)]
    await turns()
    throttle.close()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    throttle.note(10**6)
    assert not throttle.is_active


async def test_a_cancelled_request_is_skipped(throttle: Throttle) -> None:
    task = asyncio.ensure_future(throttle.turn("bulk", 1))
    await asyncio.sleep(0)
    task.cancel()
    await turns()
    assert throttle.wait_queue.waiting == 0


async def test_a_priority_is_the_same_until_the_next_tick() -> None:
    priorities = {"t": 5}
    asked: list[str] = []

    def priority_of(name: str) -> int:
        asked.append(name)
        return priorities[name]

    made = Throttle(priority_of)
    made.is_active = True
    assert [made.enqueue("t", 1).priority for _ in range(3)] == [5, 5, 5]
    priorities["t"] = 7
    made.note(0.0)
    assert made.enqueue("t", 1).priority == 7
    assert asked == ["t", "t"]
    for place in range(4):
        request = made.wait_queue.pop(0.0)
        assert request is not None, place
    made.close()
