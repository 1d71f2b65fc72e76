"""`client.working.threads`: values, exceptions, and functions whose result no caller waits for any
more.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from topics_server.client.working.threads import HandlerExited, Threads


def raising(error: BaseException) -> object:
    raise error


def test_values_and_exceptions_come_back() -> None:
    async def run() -> None:
        threads = Threads(2, "t")
        assert await threads.run(str, 7) == "7"
        for error in (KeyError("k"), TimeoutError()):
            with pytest.raises(type(error)) as caught:
                await threads.run(raising, error)
            assert caught.value is error
        for ending in (SystemExit(3), KeyboardInterrupt(), StopIteration()):
            with pytest.raises(HandlerExited):
                await threads.run(raising, ending)
        threads.close()

    asyncio.run(run())


def test_no_more_threads_than_allowed_and_none_too_many() -> None:
    together = threading.Barrier(2, timeout=10)

    def meet(_: object) -> str:
        together.wait()
        return threading.current_thread().name

    async def run() -> None:
        threads = Threads(2, "t")
        assert {await threads.run(lambda _: threading.current_thread().name, 0)} == {"t-1"}
        assert {await threads.run(lambda _: threading.current_thread().name, 0)} == {"t-1"}
        names = await asyncio.gather(*(threads.run(meet, n) for n in range(6)))
        assert set(names) == {"t-1", "t-2"}
        threads.close()

    asyncio.run(run())


def test_a_caller_may_leave_and_the_loop_may_end() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(_: object) -> None:
        begun.set()
        go_on.wait(10)
        ended.set()

    async def run() -> None:
        threads = Threads(1, "t")
        task = asyncio.create_task(threads.run(hang, 0))
        assert await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        threads.close()

    asyncio.run(run())
    go_on.set()
    assert ended.wait(10)
