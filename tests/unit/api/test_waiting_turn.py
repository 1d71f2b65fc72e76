"""A request that waits for its turn: what its work costs the slice, and what its errors reach."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.engine.pressure.test_throttle import turns
from topics_server.api.context import ServerState
from topics_server.api.request import Request, Response
from topics_server.api.waiting_turn import Begin, WaitingTurn
from topics_server.engine.pressure import throttle as module
from topics_server.engine.pressure.throttle import Throttle
from topics_server.values.errors import Code, TopicsError

pytestmark = pytest.mark.anyio


@pytest.fixture
async def throttle() -> AsyncIterator[Throttle]:
    made = Throttle(lambda name: 0)
    made.is_active = True
    yield made
    made.close()


def waiting(throttle: Throttle, begin: Begin) -> tuple[WaitingTurn, list[bool]]:
    """A waiting request, and a list that gets an item once there is an answer."""
    request = cast(Request, SimpleNamespace(body=bytes(100), throttle_wait_ms=0.0))
    turn = WaitingTurn(cast(ServerState, SimpleNamespace(throttle=throttle)), request, "t", begin)
    told: list[bool] = []
    turn.when_resolved(lambda: told.append(True))
    return turn, told


async def test_a_slice_starts_few_tasks(
    throttle: Throttle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks run after the slice: without their cost, one slice would start all of them."""
    # Starting a task takes no time.
    monkeypatch.setattr(module, "monotonic_ms", lambda: 1.0)
    begun = [0]

    async def slowly() -> Response:
        return Response(200, b"{}")

    def begin(request: Request) -> Any:
        begun[0] += 1
        return slowly()

    made = [waiting(throttle, begin) for _ in range(400)]
    await turns(1)
    assert 0 < begun[0] < 100
    while throttle.wait_queue.waiting:
        await turns(1)
    await turns()
    assert begun[0] == 400
    assert all(told for _, told in made)
    assert {turn.answer().status for turn, _ in made} == {200}


@pytest.mark.parametrize("error", [RuntimeError("a defect"), TopicsError(Code.NOT_READY, "no")])
async def test_an_error_is_the_answer_of_one_request(throttle: Throttle, error: Exception) -> None:
    def fail(request: Request) -> Any:
        raise error

    failed, told = waiting(throttle, fail)
    served, told_too = waiting(throttle, lambda request: Response(200, b"{}"))
    await turns()
    assert told == told_too == [True]
    with pytest.raises(type(error)) as raised:
        failed.answer()
    assert raised.value is error
    assert served.answer().status == 200
