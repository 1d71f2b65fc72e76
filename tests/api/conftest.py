"""The application over a fake store, spoken to in-process."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.fake_store import FakeStore
from topics_server.api.app import build_app
from topics_server.api.http import Application
from topics_server.api.state import ServerState
from topics_server.metrics import ShardFacts


@dataclasses.dataclass
class FakeSettings:
    max_body_bytes: int = 100_000
    max_limit: int = 1000
    ready_degraded: int = 200


@dataclasses.dataclass
class Api:
    """One application: its state, its store, and a client that speaks to it."""

    http: httpx.AsyncClient
    app: Application
    state: ServerState
    store: FakeStore
    settings: FakeSettings

    async def append(self, topic: str, *datas: object, **more: object) -> httpx.Response:
        records = [{"data": data} for data in datas]
        return await self.http.post(f"/v0/topics/{topic}", json={"records": records, **more})

    async def diff(self, topic: str, **asked: object) -> httpx.Response:
        return await self.http.post(f"/v0/topics/{topic}/diff", json=asked)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    store, settings = FakeStore(), FakeSettings()
    state = ServerState(
        settings=settings,
        progress=lambda: 0.5,
        store=store,
        phase="ready",
        shards=lambda: [ShardFacts(frames=3)],
    )
    app = build_app(state)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    # httpx asks for gzip by itself; these tests ask when they mean it.
    headers = {"accept-encoding": "identity"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://topics", headers=headers
    ) as client:
        yield Api(client, app, state, store, settings)
