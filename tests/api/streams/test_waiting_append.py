"""Appends to streams under pressure: they wait for their turn like appends of `/v0`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine

import pytest
import uvicorn
from uvicorn.server import ServerState as UvicornState

from tests.api.watch.streams import Live
from tests.storage.fake_disk import FakeDisk
from tests.unit.api.test_direct import FLAGS, JSON, request
from tests.unit.http.exchange.test_joined_writes import Wire
from topics_server.api.request import Request
from topics_server.api.streams.handlers import append
from topics_server.engine.pressure.throttle import Throttle
from topics_server.http.connection import HttpConnection
from topics_server.values.limits import LARGE_APPEND_BYTES_MIN

pytestmark = pytest.mark.anyio

PATH = b"/v1/stream/s"
ANSWERS_WITHIN = 10_000


class Pressed:
    """A node under pressure, with the stream `s` and one connection of our own."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.backlog = [10**9]
        self.throttle = Throttle(backlog_bytes=lambda: self.backlog[0])
        self.throttle.is_active = True
        # No request passes the queue.
        self.throttle._passed = 10**9
        live.node.state.throttle = self.throttle
        config = uvicorn.Config(live.app, http=HttpConnection, **FLAGS)
        config.load()
        self.protocol = HttpConnection(config=config, server_state=UvicornState(), app_state={})
        self.wire = Wire()
        self.protocol.connection_made(self.wire)

    @property
    def sent(self) -> bytes:
        """The answers."""
        return b"".join(self.wire.pieces)

    def post(self, body: bytes, headers: bytes = JSON) -> None:
        """Send an append."""
        self.protocol.data_received(request(body, PATH, headers))

    async def answered(self) -> bytes:
        """Wait for an answer."""
        for _ in range(ANSWERS_WITHIN):
            if self.wire.pieces:
                return self.sent
            await asyncio.sleep(0.001)
        raise AssertionError("no answer")

    async def messages(self) -> list[object]:
        """What the stream holds, without pressure."""
        self.throttle.is_active = False
        answer = await self.live.http.get(PATH.decode())
        found: list[object] = answer.json()
        return found


@pytest.fixture
async def pressed(disk: FakeDisk) -> AsyncIterator[Pressed]:
    live = await Live.start(disk)
    made = await live.http.put(PATH.decode(), headers={"content-type": "application/json"})
    assert made.status_code == 201
    pressed = Pressed(live)
    yield pressed
    pressed.protocol.connection_lost(None)
    pressed.throttle.close()
    await live.stop()


async def test_an_append_waits_for_its_turn_without_a_task(pressed: Pressed) -> None:
    pressed.post(b'{"n":1}')
    assert len(pressed.throttle.wait_queue) == 1
    assert not pressed.protocol.tasks
    assert not pressed.wire.pieces
    pressed.backlog[0] = 0
    assert (await pressed.answered()).startswith(b"HTTP/1.1 204 ")
    assert b"stream-next-offset: " in pressed.sent
    assert await pressed.messages() == [{"n": 1}]


async def test_it_waits_with_the_priority_of_its_topic(pressed: Pressed) -> None:
    pressed.throttle.priority_of = {"s": 700}.__getitem__
    pressed.post(b"1")
    assert pressed.throttle.wait_queue.top_priority == 700


async def test_it_is_refused_in_the_end_and_stores_nothing(pressed: Pressed) -> None:
    pressed.post(b'{"n":1}')
    sent = await pressed.answered()
    assert sent.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: " in sent
    assert pressed.throttle.throttled_total == {"late": 1, "full": 0}
    assert await pressed.messages() == []


@pytest.mark.parametrize("headers", [b"", b"content-type: text/plain\r\nstream-seq:\r\n"])
async def test_wrong_headers_are_refused_at_once(pressed: Pressed, headers: bytes) -> None:
    pressed.post(b'{"n":1}', headers)
    assert (await pressed.answered()).startswith(b"HTTP/1.1 400 ")
    assert len(pressed.throttle.wait_queue) == 0


async def test_wrong_json_is_refused_in_its_turn(pressed: Pressed) -> None:
    pressed.post(b'{"n":')
    assert len(pressed.throttle.wait_queue) == 1
    pressed.backlog[0] = 0
    assert (await pressed.answered()).startswith(b"HTTP/1.1 400 ")
    assert await pressed.messages() == []


async def test_a_stream_deleted_meanwhile_is_not_found(pressed: Pressed) -> None:
    pressed.post(b'{"n":1}')
    assert (await pressed.live.http.delete(PATH.decode())).status_code == 204
    pressed.backlog[0] = 0
    assert (await pressed.answered()).startswith(b"HTTP/1.1 404 ")


async def test_a_producer_s_append_and_its_retry_wait_for_one_turn_each(pressed: Pressed) -> None:
    """The retry is decided by the general way, which must not wait for a second turn."""
    stamp = JSON + b"producer-id: p\r\nproducer-epoch: 0\r\nproducer-seq: 0\r\n"
    pressed.backlog[0] = 0
    pressed.post(b'{"n":1}', stamp)
    assert (await pressed.answered()).startswith(b"HTTP/1.1 200 ")
    pressed.wire.pieces.clear()
    pressed.post(b'{"n":1}', stamp)
    assert (await pressed.answered()).startswith(b"HTTP/1.1 204 ")
    assert pressed.throttle.queued_total == 2
    assert await pressed.messages() == [{"n": 1}]


async def test_a_large_body_is_decoded_off_the_loop(pressed: Pressed) -> None:
    """It takes no place in a slice of the throttle; a task waits with it."""
    body = b'"%b"' % (b"x" * LARGE_APPEND_BYTES_MIN)
    asked = Request("POST", "s", {b"content-type": b"application/json"}, b"", body, 0.0, never)
    waiting = append(pressed.live.node.state, asked)
    assert isinstance(waiting, Coroutine)
    assert len(pressed.throttle.wait_queue) == 0
    waiting.close()


async def never() -> None:
    """A client that stays."""
    raise AssertionError("nothing waits for the client to leave")
