"""The event loop of the tests refuses calls that could corrupt state."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from tests.loops import StrictLoop

pytestmark = pytest.mark.anyio


async def test_the_loop_of_tests_is_the_strict_one() -> None:
    assert type(asyncio.get_running_loop()) is StrictLoop


async def test_a_call_from_another_thread_is_refused() -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    future.add_done_callback(lambda _: None)
    for call in (
        lambda: loop.call_soon(print),
        lambda: loop.call_later(1, print),
        lambda: loop.call_at(1, print),
        lambda: future.set_result(None),
    ):
        with pytest.raises(RuntimeError, match="Non-thread-safe operation"):
            await asyncio.to_thread(call)
    await asyncio.to_thread(loop.call_soon_threadsafe, lambda: None)


async def test_what_is_no_callback_and_a_socket_that_blocks_are_refused() -> None:
    loop = asyncio.get_running_loop()

    async def no_callback() -> None: ...

    with pytest.raises(TypeError, match="coroutines cannot be used"):
        loop.call_soon(no_callback)
    with socket.socket() as one, pytest.raises(ValueError, match="must be non-blocking"):
        await loop.sock_recv(one, 1)


async def test_no_stacks_are_kept() -> None:
    loop = asyncio.get_running_loop()
    handle = loop.call_later(1, print)
    handle.cancel()
    assert getattr(handle, "_source_traceback", None) is None
    assert getattr(loop.create_future(), "_source_traceback", None) is None
    assert sys.get_coroutine_origin_tracking_depth() == 0
