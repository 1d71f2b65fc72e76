"""The server's phase, and tasks that wait for it to change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from topics_server.api.context import ServerState

pytestmark = pytest.mark.anyio


def state() -> ServerState:
    settings: Any = object()
    return ServerState(settings=settings, progress=lambda: 0.5)


async def test_a_phase_that_moves_before_anybody_awaits_it_is_not_missed() -> None:
    server = state()
    moving = server.next_phase()
    server.enter("ready")
    await asyncio.wait_for(moving, 1)
    await asyncio.sleep(0)
    assert server.waiting == 0


async def test_a_cancelled_waiter_is_forgotten() -> None:
    server = state()
    moving = [server.next_phase() for _ in range(3)]
    moving[0].cancel()
    await asyncio.sleep(0)
    assert server.waiting == 2
    server.enter("ready")
    await asyncio.gather(*moving[1:])
    await asyncio.sleep(0)
    assert server.waiting == 0
