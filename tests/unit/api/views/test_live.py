"""One stream of a view's query: what its failure leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest

from tests.api.conftest import FakeSettings
from tests.garbage import nothing_for_the_collector
from topics_server.api.context import ServerState
from topics_server.api.views.live import LiveQuery
from topics_server.auth.api_keys import EVERYBODY
from topics_server.values.errors import StorageError

pytestmark = pytest.mark.anyio


class BrokenViews:
    """Views whose files cannot be read."""

    def listen(self, topic: str, view: str, moved: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def named_query(self, topic: str, view: str, query: str) -> str:
        return "SELECT 1"

    async def query(self, *_: object) -> None:
        raise StorageError("no disk")


async def test_a_query_that_fails_leaves_nothing_for_the_collector() -> None:
    settings: Any = FakeSettings()
    state = ServerState(settings=settings, progress=lambda: 0.5, phase="ready")
    views: Any = BrokenViews()

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_: MutableMapping[str, Any]) -> None:
        """Take everything."""

    async def failed() -> None:
        with contextlib.suppress(StorageError):
            await LiveQuery(state, views, "t", "v", "all", {}, EVERYBODY).run(receive, send)
            raise AssertionError("it fails")

    with nothing_for_the_collector():
        await asyncio.create_task(failed())
        await asyncio.sleep(0)
