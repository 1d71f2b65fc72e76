"""The application over a fake store, called in-process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.fake_routers import FakeRouters
from tests.api.fake_store import FakeStore
from tests.storage.fake_disk import FakeDisk
from topics_server.api.application import Application, build_app
from topics_server.api.context import ServerState
from topics_server.runtime.metrics import ShardFacts


@dataclasses.dataclass
class FakeSettings:
    max_body_bytes: int = 100_000
    max_limit: int = 1000
    ready_degraded: int = 200
    allowed_origins: frozenset[bytes] = frozenset()
    probe_auth: bool = False
    host_names: tuple[str, ...] | None = None
    max_watch_topics: int = 256
    max_sse_connections: int = 100
    max_sse_connections_per_key: int = 100
    max_inflight_per_key: int = 100
    max_ws_commands: int = 8
    max_claim: int = 1000
    max_node_bytes: int = 128
    max_batch_records: int = 100_000
    max_record_bytes: int = 1 << 20
    streams_path: str = "/v1/stream"
    streams_page_bytes: int = 1000
    streams_long_poll_ms: int = 50
    streams_sse_ms: int = 100


@dataclasses.dataclass
class Api:
    """One application: its state, its store, and a client of it."""

    http: httpx.AsyncClient
    app: Application
    state: ServerState
    store: FakeStore
    routers: FakeRouters
    settings: FakeSettings

    async def append(self, topic: str, *datas: object, **more: object) -> httpx.Response:
        records = [{"data": data} for data in datas]
        return await self.http.post(f"/v0/topics/{topic}", json={"records": records, **more})

    async def diff(self, topic: str, **asked: object) -> httpx.Response:
        return await self.http.post(f"/v0/topics/{topic}/diff", json=asked)


@pytest.fixture
def disk() -> FakeDisk:
    """The disk under a real node."""
    return FakeDisk(1)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serving() as made:
        yield made


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Api]:
    """An application that is ready."""
    store, settings = FakeStore(), FakeSettings()
    routers = FakeRouters(store)
    state = ServerState(
        settings=settings,
        progress=lambda: 0.5,
        store=store,
        routers=routers,
        phase="ready",
        shards=lambda: [ShardFacts(frames=3)],
    )
    app = build_app(state)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    # httpx accepts gzip by default; these tests request it only on purpose.
    headers = {"accept-encoding": "identity"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://topics", headers=headers
    ) as client:
        try:
            yield Api(client, app, state, store, routers, settings)
        finally:
            state.large_appends.close()
