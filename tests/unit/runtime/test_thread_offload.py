"""`thread_offload`: results and errors of calls on other threads, and what an error leaves."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from topics_server.runtime.thread_offload import ThreadOffload

pytestmark = pytest.mark.anyio


@pytest.fixture
def offload() -> Iterator[ThreadOffload]:
    made = ThreadOffload()
    yield made
    made.close()


class Held:
    """Something large that a caller of the offload refers to."""


async def test_a_result_and_an_error_reach_the_caller(offload: ThreadOffload) -> None:
    assert await offload.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await offload.run(lambda: 1 // 0)


async def test_after_an_error_the_callers_objects_need_no_collection(
    offload: ThreadOffload,
) -> None:
    """The server never examines old objects: garbage that refers to itself would stay for ever."""
    found: list[weakref.ref[Held]] = []

    async def caller() -> None:
        held = Held()
        found.append(weakref.ref(held))
        await offload.run(lambda: 1 // 0)
        raise AssertionError(held)

    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await asyncio.create_task(caller())
        for _ in range(1000):
            # The thread forgets the last error some time after the caller has it.
            if not any(each() for each in found):
                break
            await asyncio.sleep(0.001)
        assert [each() for each in found] == [None] * 3
    finally:
        gc.enable()
