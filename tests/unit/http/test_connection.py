"""`connection`: the application learns of a closed connection, and closed connections leave no
object.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.asyncio.client import connect
from websockets.server import ServerProtocol

from topics_server.http.connection import HttpConnection
from topics_server.http.exchange.asgi_exchange import Exchange
from topics_server.http.exchange.joined_writes import JoinedWrites
from topics_server.http.websocket import WebSocketConnection

pytestmark = pytest.mark.anyio

WITHIN_S = 10.0
OURS = (HttpConnection, WebSocketConnection, Exchange, JoinedWrites, ServerProtocol)


class Streaming:
    """An application whose every answer continues until its client disconnects."""

    def __init__(self) -> None:
        self.open = 0
        self.paths: list[str] = []
        self._moved = asyncio.Event()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        else:
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": "first"})
        self.open += 1
        try:
            while not (await receive())["type"].endswith(".disconnect"):
                pass
        finally:
            self.open -= 1
            self._moved.set()

    async def closed(self) -> None:
        """Return when no request is being answered any more."""
        async with asyncio.timeout(WITHIN_S):
            while self.open:
                self._moved.clear()
                await self._moved.wait()


@contextlib.asynccontextmanager
async def serving(app: Streaming) -> AsyncIterator[int]:
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws=WebSocketConnection,
        lifespan="off",
        access_log=False,
        log_config=None,
        ws_max_size=1_000,
        ws_per_message_deflate=False,
    )
    config.load()
    state = ServerState()
    listening = await loop.create_server(
        lambda: HttpConnection(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    yield listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()


async def ask(port: int, *paths: str) -> asyncio.StreamWriter:
    """Send these requests one after the other; return when the first is being answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % p.encode() for p in paths))
    await asyncio.wait_for(reader.readuntil(b"first"), WITHIN_S)
    return writer


@pytest.mark.parametrize("hang_up", ["close", "abort"])
async def test_a_stream_with_a_request_behind_it_hears_of_its_end(hang_up: str) -> None:
    app = Streaming()
    async with serving(app) as port:
        writer = await ask(port, "/stream", "/behind")
        if hang_up == "abort":
            writer.transport.abort()
        else:
            writer.write_eof()
            writer.close()
        await app.closed()
    assert app.paths == ["/stream"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> collections.Counter[str]:
    kinds = map(type, gc.get_objects())
    return collections.Counter(kind.__name__ for kind in kinds if issubclass(kind, OURS))


async def test_connections_that_are_gone_leave_no_object_behind(no_collector: None) -> None:
    app = Streaming()
    async with serving(app) as port:
        for attempt in range(2):
            for number in range(12):
                paths = ["/stream", "/behind"][: 1 + number % 2]
                writer = await ask(port, *paths)
                if number % 3:
                    writer.transport.abort()
                else:
                    writer.close()
            for number in range(6):
                async with connect(f"ws://127.0.0.1:{port}/", proxy=None) as peer:
                    assert await peer.recv() == "first"
                    if number % 3 == 0:
                        await peer.send("x" * 1_001)
                        await peer.wait_closed()
                    elif number % 2:
                        peer.transport.abort()
            await app.closed()
            for _ in range(20):
                await asyncio.sleep(0)  # connections end over several turns of the loop
            if attempt == 0:
                before = alive()
    assert alive() - before == collections.Counter()
    assert before == collections.Counter()
