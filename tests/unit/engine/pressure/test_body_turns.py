"""A turn of the loop decodes a few bodies; after a turn that took long, decoding pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from topics_server.engine.pressure import body_turns as module
from topics_server.engine.pressure.body_turns import TURN_BYTES, BodyTurns
from topics_server.values.limits import KIB, MIB

pytestmark = pytest.mark.anyio


class Turns:
    """Numbers the turns of the loop; `seen` are those in which bodies began."""

    def __init__(self) -> None:
        self.number = 0
        self.seen: list[int] = []
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def end(self) -> None:
        self._handle.cancel()

    def most_in_one(self) -> int:
        return max(map(self.seen.count, self.seen))


async def begun(sizes: list[int]) -> tuple[BodyTurns, Turns]:
    """Decode all these bodies at once; returns the turn in which each began."""
    bodies, turns = BodyTurns(), Turns()

    async def body(size: int) -> None:
        await bodies.turn(size)
        turns.seen.append(turns.number)

    await asyncio.wait_for(asyncio.gather(*map(body, sizes)), 10)
    turns.end()
    return bodies, turns


async def test_bodies_of_one_turn_have_a_budget_in_bytes() -> None:
    bodies, turns = await begun([30 * KIB] * 40)
    assert turns.most_in_one() <= TURN_BYTES // (30 * KIB)
    assert turns.seen == sorted(turns.seen)
    assert bodies.waiting == 0


async def test_a_body_that_is_larger_than_the_budget_is_alone() -> None:
    _, turns = await begun([MIB] * 5)
    assert turns.most_in_one() == 1


async def test_the_smallest_bodies_count_too() -> None:
    _, turns = await begun([2] * 1000)
    assert turns.most_in_one() <= TURN_BYTES // (2 * KIB)


async def test_a_turn_that_took_long_is_followed_by_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, rests = [0.0], list[float]()
    monkeypatch.setattr(module, "monotonic_ms", lambda: now[0])
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(delay_s: float, call: object, *more: object) -> asyncio.TimerHandle:
        rests.append(delay_s)
        return call_later(0, call, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_later", noted)
    bodies = BodyTurns()
    for took_ms in (20.0, 1.0):
        await bodies.turn(MIB)
        now[0] += took_ms
        await bodies.turn(MIB)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert rests == [0.005]


async def test_small_bodies_do_not_wait_for_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, rests = [0.0], list[Callable[[], None]]()
    monkeypatch.setattr(module, "monotonic_ms", lambda: now[0])
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay_s, end_rest: rests.append(end_rest))
    bodies, began = BodyTurns(), list[int]()

    async def body(size: int) -> None:
        await bodies.turn(size)
        began.append(size)

    await bodies.turn(MIB)
    now[0] += 400.0
    await asyncio.sleep(0)
    # The pause ends when the test says so, after the small bodies.
    large = asyncio.ensure_future(body(MIB))
    for _ in range(3):
        await body(100)
        await asyncio.sleep(0)
    assert began == [100, 100, 100]
    (end_rest,) = rests
    end_rest()
    await large
    assert began[-1] == MIB


async def test_who_goes_away_takes_nothing() -> None:
    bodies = BodyTurns()
    assert bodies.takes(MIB)
    tasks = [asyncio.ensure_future(bodies.turn(MIB)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert [task.cancelled() for task in tasks] == [False, True, False]
    assert bodies.waiting == 0
    await asyncio.sleep(0.01)
    assert bodies.takes(MIB)
