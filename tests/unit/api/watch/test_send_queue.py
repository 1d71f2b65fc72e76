"""The outbox: order, one send at a time, and what becomes of it when the socket is full."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from topics_server.api.watch.send_queue import SendQueue
from topics_server.api.watch.sse import SSE

pytestmark = pytest.mark.anyio


class Wire:
    """An ASGI `send` with a tap; `body` is what has come through."""

    def __init__(self) -> None:
        self.tap = asyncio.Event()
        self.tap.set()
        self.messages: list[dict[str, Any]] = []
        self.room: list[float] = []
        self.is_gone = False

    async def send(self, message: dict[str, Any]) -> None:
        await self.tap.wait()
        if self.is_gone:
            raise RuntimeError("Unexpected ASGI message")
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages)

    def outbox(self) -> SendQueue:
        return SendQueue(self.send, SSE, self.room.append)

    def full_outbox(self) -> SendQueue:
        """One whose socket is full of the frame `a`."""
        self.tap.clear()
        outbox = self.outbox()
        outbox.put((b"a",))
        outbox.flush()
        return outbox


async def test_frames_leave_at_once_in_one_message() -> None:
    wire = Wire()
    outbox = wire.outbox()
    outbox.put((b"a", b"b"))
    outbox.put((b"c",))
    outbox.flush()
    assert [message["body"] for message in wire.messages] == [b"abc"]
    assert not outbox.is_parked


async def test_a_full_socket_parks_one_send_and_order_holds() -> None:
    wire = Wire()
    outbox = wire.full_outbox()
    assert outbox.is_parked
    assert not outbox.has_room()
    for frame in (b"b", b"c"):
        outbox.put((frame,))
        outbox.flush()
    await asyncio.sleep(0.01)
    assert wire.messages == []
    wire.tap.set()
    await asyncio.wait_for(outbox.flushed(), 1)
    assert wire.body == b"abc"
    assert len(wire.messages) == 2, "what waited left together"
    assert len(wire.room) == 1
    assert wire.room[0] >= 10


async def test_a_stall_is_counted_from_when_it_began() -> None:
    wire = Wire()
    outbox = wire.full_outbox()
    assert outbox.stalled_ms(outbox.sent_ms + 500) > 400
    outbox.drop()


async def test_how_long_it_was_full_is_told_though_it_is_full_again() -> None:
    """What waits behind fills the socket in the same turn: that is the next time, not this one."""
    wire = Wire()
    outbox = wire.full_outbox()
    outbox.put((b"b",))
    await asyncio.sleep(0.05)

    class Once(asyncio.Event):
        """Lets one send through, then nobody."""

        async def wait(self) -> Any:
            if wire.messages:
                await asyncio.Event().wait()

    waiting, wire.tap = wire.tap, Once()
    waiting.set()
    for _ in range(100):
        await asyncio.sleep(0)
    assert outbox.is_parked
    assert wire.body == b"a"
    assert wire.room[0] >= 40
    outbox.drop()


async def test_what_is_dropped_never_leaves() -> None:
    wire = Wire()
    outbox = wire.full_outbox()
    outbox.put((b"b",))
    assert outbox.drop()
    wire.tap.set()
    await asyncio.sleep(0.01)
    assert wire.messages == []
    outbox.close(b"z", 1000)
    assert wire.body == b"z"
    assert wire.messages[-1]["more_body"] is False
    assert not outbox.drop()


async def test_a_client_that_is_gone_is_no_error() -> None:
    wire = Wire()
    outbox = wire.outbox()
    wire.is_gone = True
    outbox.put((b"a",))
    outbox.flush()
    assert outbox.has_room()
    assert wire.messages == []


async def test_a_client_that_goes_while_its_socket_is_full_is_no_error() -> None:
    wire = Wire()
    outbox = wire.outbox()
    wire.is_gone = True
    wire.tap.clear()
    outbox.put((b"b",))
    outbox.flush()
    assert outbox.is_parked
    wire.tap.set()
    await asyncio.wait_for(outbox.flushed(), 1)
    assert wire.messages == []
