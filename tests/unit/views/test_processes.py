"""`processes`: what the death of a helper process leaves."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.garbage import nothing_for_the_collector
from topics_server.views.messages import Nothing
from topics_server.views.processes import ProcessDied, ViewProcess

pytestmark = pytest.mark.anyio


async def test_a_request_that_fails_leaves_nothing_for_the_collector() -> None:
    process = ViewProcess("query_worker")
    await process.close()

    async def refused() -> None:
        with contextlib.suppress(ProcessDied):
            await process.ask(Nothing(), seconds=1)
            raise AssertionError("a closed process answers nothing")

    with nothing_for_the_collector():
        await refused()
        await asyncio.sleep(0)
