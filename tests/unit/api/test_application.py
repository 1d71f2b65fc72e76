"""Under any ASGI server a request gets the same answer as from our own connection."""

from __future__ import annotations

import httpx
import pytest

from tests.api.conftest import FakeSettings
from tests.unit.engine.rig import Rig
from topics_server.api.application import build_app
from topics_server.api.context import ServerState

pytestmark = pytest.mark.anyio


def client() -> httpx.AsyncClient:
    """A client of the application, without a connection."""
    state = ServerState(
        settings=FakeSettings(), progress=lambda: 1.0, store=Rig().store, phase="ready"
    )
    transport = httpx.ASGITransport(app=build_app(state))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_an_empty_name_is_no_name() -> None:
    async with client() as http:
        answer = await http.post("/v0/topics//diff", json={"from_seq": 0})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        answer = await http.post("/v0/nowhere//diff", json={"from_seq": 0})
        assert answer.status_code == 404


async def test_a_host_that_is_no_name_is_refused_and_not_repeated() -> None:
    async with client() as http:
        answer = await http.get("/v0/health", headers={"host": 'x"><script>'})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert "script" not in answer.text
        assert (await http.get("/v0/health")).status_code == 200
