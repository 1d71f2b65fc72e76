"""`queue.dispatch.consumer_queue` and `queue.dispatch.alarm`: turns, windows, and times by the
node's clock.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.engine.rig import HandClock
from tests.unit.queue.rig import turns
from topics_server.queue.dispatch.alarm import Alarm
from topics_server.queue.dispatch.consumer_queue import ConsumerQueue, Poll

pytestmark = pytest.mark.anyio


class Counted:
    """A consumer queue that counts its passes and their causes."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.served = 0
        self.stirred: list[int] = []
        self.line = ConsumerQueue(7, "jobs", self._serve, self.stirred.append, self.clock)

    def _serve(self, line: ConsumerQueue) -> None:
        assert line is self.line
        self.served += 1


def poll(name: str = "w", most: int = 1) -> Poll:
    return Poll(name, most, None)


async def test_turns_go_round() -> None:
    line = Counted().line
    polls = [poll(name) for name in "abc"]
    for one in polls:
        line.join(one)

    def order() -> str:
        return "".join(claimer.node for claimer, _ in line.hungry(0, 9))

    assert order() == "abc"
    line.served(polls[0])
    assert order() == "bca"
    line.leave(polls[2])
    assert order() == "ba"
    assert [wanted for _, wanted in line.hungry(0, 1)] == [1]
    polls[1].passed()
    assert order() == "a", "who is answered wants nothing"


async def test_a_pass_is_planned_once() -> None:
    counted = Counted()
    for _ in range(3):
        counted.line.serve_soon()
    await turns()
    assert counted.served == 1
    counted.line.serve_soon()
    counted.line.serve()
    await turns()
    assert counted.served == 2


async def test_a_window_takes_the_place_of_a_pass() -> None:
    counted = Counted()
    counted.line.open_window(50)
    assert counted.line.has_window
    counted.line.open_window(9_000)
    counted.line.serve_soon()
    await turns()
    assert counted.served == 0
    counted.clock.move(50)
    counted.line.tick()
    assert counted.served == 1
    assert not counted.line.has_window


async def test_the_impatient_hear_of_a_pass_once() -> None:
    counted = Counted()
    first, second = poll(), poll()
    for one in (first, second):
        counted.line.join(one)
    counted.line.tell_passed(first)
    counted.line.serve()
    assert first.outcome.done()
    assert first.outcome.result() is None
    assert not second.outcome.done()


async def test_it_is_stirred_when_something_is_due() -> None:
    counted = Counted()
    line = counted.line
    line.join(poll())
    line.look_at(1_005_000, counted.clock.now_ms())
    counted.clock.move(4_999)
    line.tick()
    assert counted.stirred == []
    counted.clock.move(1)
    line.tick()
    assert counted.stirred == [7]
    line.look_at(2_000_000, counted.clock.now_ms())
    line.close()
    counted.clock.move(10_000_000)
    line.tick()
    assert counted.stirred == [7]


@pytest.mark.parametrize("due_ms", [None, 90_000_000])
async def test_a_waiting_claim_is_checked_at_least_once_a_minute(due_ms: int | None) -> None:
    counted = Counted()
    counted.line.join(poll())
    counted.line.look_at(due_ms, counted.clock.now_ms())
    counted.clock.move(59_999)
    counted.line.tick()
    assert counted.stirred == []
    counted.clock.move(1)
    counted.line.tick()
    assert counted.stirred == [7]
    counted.line.close()


async def test_an_empty_queue_of_claims_is_not_checked() -> None:
    counted = Counted()
    counted.line.look_at(1_000_001, counted.clock.now_ms())
    counted.clock.move(10)
    counted.line.tick()
    assert counted.stirred == []


async def test_an_alarm_rings_by_the_clock_and_once() -> None:
    clock = HandClock()
    rung: list[int] = []
    alarm = Alarm(clock, 100, lambda: rung.append(1))
    clock.move(99)
    assert not alarm.tick()
    clock.move(1)
    assert alarm.tick()
    assert not alarm.tick()
    assert rung == [1]


async def test_a_timer_that_is_early_is_set_again() -> None:
    clock = HandClock()
    rung = asyncio.Event()
    alarm = Alarm(clock, 1, rung.set)
    timer = alarm._timer
    assert timer is not None
    alarm._fire()
    assert alarm._timer is not timer, "the clock stands still"
    assert not rung.is_set()
    clock.move(1)
    async with asyncio.timeout(5):
        await rung.wait()


async def test_a_cancelled_alarm_never_rings() -> None:
    clock = HandClock()
    rung: list[int] = []
    alarm = Alarm(clock, 0, lambda: rung.append(1))
    alarm.cancel()
    alarm.cancel()
    clock.move(1_000)
    assert not alarm.tick()
    await turns()
    assert rung == []
