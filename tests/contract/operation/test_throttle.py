"""§0.6 and §0.10: which requests wait or are refused under pressure, and which are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.api.conftest import Api, serving
from tests.contract.driver import good
from topics_server.engine.pressure.throttle import Throttle

pytestmark = pytest.mark.anyio


@pytest.fixture
async def inside() -> AsyncIterator[Api]:
    """An application in this process, because a test cannot time the pressure on a real server."""
    async with serving() as made:
        yield made


@pytest.fixture
def backlog(inside: Api) -> Iterator[list[int]]:
    """Pressure as long as the number is above 0: no request begins."""
    waiting = [10**9]
    made = Throttle(lambda name: 900 if name == "urgent" else 0, lambda: waiting[0])
    made.is_active = True
    made._passed = 10**9
    inside.state.throttle = made
    yield waiting
    made.close()


def throttled(answer: httpx.Response) -> None:
    assert answer.status_code == 429
    assert answer.headers["retry-after"] in {"1", "2"}
    error = answer.json()["error"]
    assert error["code"] == "throttled"
    assert 500 <= error["detail"]["retry_after_ms"] <= 1500
    assert "limit" not in error["detail"]


async def test_an_append_that_has_no_turn_is_429_with_when_to_come_again(
    inside: Api, backlog: list[int]
) -> None:
    """Contract §0.6 [0.6-10, 2-26]"""
    throttled(await inside.append("jobs", 1))
    assert inside.store.topics == {}


async def test_an_append_without_backpressure_is_admitted_late(
    inside: Api, backlog: list[int]
) -> None:
    """§0.6: only the member of the body decides, not a payload with the same text. [0.6-15]"""
    waiting = asyncio.ensure_future(inside.append("jobs", 1, disable_backpressure=True))
    throttled(await inside.append("jobs", {"disable_backpressure": True}))
    throttled(await inside.append("jobs", 1, disable_backpressure=False))
    assert not waiting.done()
    backlog[0] = 0
    answer = good(await waiting)
    assert answer["first_seq"] == 1
    assert answer["performance"]["throttle_wait_ms"] >= 250


async def test_a_wrong_opt_out_is_400_at_once(inside: Api, backlog: list[int]) -> None:
    answer = await inside.append("jobs", 1, disable_backpressure="yes")
    assert answer.status_code == 400


async def test_an_answer_has_its_waiting_time(inside: Api, backlog: list[int]) -> None:
    """Contract §0.9 [0.9-06]"""
    waiting = asyncio.ensure_future(inside.append("jobs", 1))
    await asyncio.sleep(0.02)
    backlog[0] = 0
    performance = good(await waiting)["performance"]
    # On a busy machine the append begins to wait late, but it waits.
    assert 1 <= performance["throttle_wait_ms"] <= performance["server_total_ms"]


async def test_the_urgent_are_served_first(inside: Api, backlog: list[int]) -> None:
    """Contract §0.6, §0.10: topics with a higher priority go before earlier requests."""
    order: list[str] = []

    async def append(topic: str) -> None:
        good(await inside.append(topic, 1))
        order.append(topic)

    tasks = [asyncio.ensure_future(append(topic)) for topic in ("a", "b", "urgent")]
    for _ in range(10_000):
        if len(inside.state.throttle.wait_queue) == 3:
            break
        await asyncio.sleep(0)
    backlog[0] = 0
    await asyncio.gather(*tasks)
    assert order[0] == "urgent"


async def test_a_diff_waits_for_its_turn_too(inside: Api, backlog: list[int]) -> None:
    """Contract §3 [3-20]"""
    good(await inside.http.put("/v0/topics/jobs", json={}))
    throttled(await inside.diff("jobs"))
    inside.state.throttle._passed = 10**9
    waiting = asyncio.ensure_future(inside.diff("jobs"))
    for _ in range(10_000):
        if len(inside.state.throttle.wait_queue) == 1:
            break
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    backlog[0] = 0
    page = good(await waiting)
    assert page["caught_up"]
    assert page["performance"]["throttle_wait_ms"] >= 15


async def test_states_and_probes_are_never_parked(inside: Api, backlog: list[int]) -> None:
    good(await inside.http.put("/v0/topics/jobs", json={}))
    good(await inside.http.get("/v0/topics/jobs"))
    good(await inside.http.get("/v0/health"))
