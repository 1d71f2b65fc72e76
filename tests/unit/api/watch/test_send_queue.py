"""The send queue: order, one send at a time, and its state when the socket is full."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.garbage import nothing_for_the_collector
from topics_server.api.watch import send_queue
from topics_server.api.watch.send_queue import SendQueue, send_queue_of
from topics_server.api.watch.sse import SSE
from topics_server.http.sockets import EXTENSION, ForeignSend, is_own_send, until_left
from topics_server.http.websocket import DisconnectedError

pytestmark = pytest.mark.anyio


class Wire:
    """An ASGI `send` with a tap; `body` has the bytes that passed."""

    def __init__(self) -> None:
        self.tap = asyncio.Event()
        self.tap.set()
        self.messages: list[dict[str, Any]] = []
        self.room: list[float] = []
        self.is_gone = False
        self.refusal: Exception = RuntimeError("Unexpected ASGI message")

    async def send(self, message: dict[str, Any]) -> None:
        await self.tap.wait()
        if self.is_gone:
            raise self.refusal
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages)

    def send_queue(self) -> SendQueue:
        return SendQueue(self.send, SSE, self.room.append)

    def full_send_queue(self) -> SendQueue:
        """A send queue whose socket is full of the frame `a`."""
        self.tap.clear()
        send_queue = self.send_queue()
        send_queue.put((b"a",))
        send_queue.flush()
        return send_queue


async def test_frames_leave_at_once_in_one_message() -> None:
    wire = Wire()
    send_queue = wire.send_queue()
    send_queue.put((b"a", b"b"))
    send_queue.put((b"c",))
    send_queue.flush()
    assert [message["body"] for message in wire.messages] == [b"abc"]
    assert not send_queue.is_blocked


async def test_a_full_socket_parks_one_send_and_order_holds() -> None:
    wire = Wire()
    send_queue = wire.full_send_queue()
    assert send_queue.is_blocked
    assert not send_queue.has_room()
    for frame in (b"b", b"c"):
        send_queue.put((frame,))
        send_queue.flush()
    await asyncio.sleep(0.01)
    assert wire.messages == []
    wire.tap.set()
    await asyncio.wait_for(send_queue.flushed(), 1)
    assert wire.body == b"abc"
    assert len(wire.messages) == 2, "what waited left together"
    assert len(wire.room) == 1
    assert wire.room[0] >= 10


async def test_a_stall_is_counted_from_when_it_began() -> None:
    wire = Wire()
    send_queue = wire.full_send_queue()
    assert send_queue.stalled_ms(send_queue.sent_ms + 500) > 400
    send_queue.drop()


async def test_how_long_it_was_full_is_told_though_it_is_full_again() -> None:
    """The waiting frames fill the socket again in the same turn: that begins a new period of being
    full.
    """
    wire = Wire()
    send_queue = wire.full_send_queue()
    send_queue.put((b"b",))
    await asyncio.sleep(0.05)

    class Once(asyncio.Event):
        """Accepts one send, and no further sends."""

        async def wait(self) -> Any:
            if wire.messages:
                await asyncio.Event().wait()

    waiting, wire.tap = wire.tap, Once()
    waiting.set()
    for _ in range(100):
        await asyncio.sleep(0)
    assert send_queue.is_blocked
    assert wire.body == b"a"
    assert wire.room[0] >= 40
    send_queue.drop()


async def test_what_is_dropped_never_leaves() -> None:
    wire = Wire()
    send_queue = wire.full_send_queue()
    send_queue.put((b"b",))
    assert send_queue.drop()
    wire.tap.set()
    await asyncio.sleep(0.01)
    assert wire.messages == []
    send_queue.close(b"z", 1000)
    assert wire.body == b"z"
    assert wire.messages[-1]["more_body"] is False
    assert not send_queue.drop()


async def test_a_client_that_is_gone_is_no_error() -> None:
    wire = Wire()
    send_queue = wire.send_queue()
    wire.is_gone = True
    send_queue.put((b"a",))
    send_queue.flush()
    assert send_queue.has_room()
    assert wire.messages == []


async def test_a_websocket_whose_client_is_gone_may_be_ended() -> None:
    """A server that stops ends all streams, also those whose clients have just left."""
    wire = Wire()
    wire.is_gone, wire.refusal = True, DisconnectedError()
    send_queue = wire.send_queue()
    send_queue.close(b"last", 1001)
    assert not send_queue.is_blocked
    assert wire.messages == []


async def test_a_client_that_goes_while_its_socket_is_full_is_no_error() -> None:
    wire = Wire()
    send_queue = wire.send_queue()
    wire.is_gone = True
    wire.tap.clear()
    send_queue.put((b"b",))
    send_queue.flush()
    assert send_queue.is_blocked
    wire.tap.set()
    await asyncio.wait_for(send_queue.flushed(), 1)
    assert wire.messages == []


# -- a server that is not ours -----------------------------------------------------------------


class ForeignServer:
    """An ASGI `send` of another server: it needs a task, and is slow on request."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.sent: list[dict[str, Any]] = []
        self.most = self._under_way = 0
        self.is_gone = False

    async def __call__(self, message: dict[str, Any]) -> None:
        assert asyncio.current_task() is not None
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        await self.open.wait()
        await asyncio.sleep(0)
        self._under_way -= 1
        if self.is_gone:
            raise LookupError("a server's own way to say that its client is gone")
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent)


def foreign_queue(server: ForeignServer) -> tuple[SendQueue, ForeignSend, list[float]]:
    send = ForeignSend(server)
    room: list[float] = []
    return send_queue_of(send, SSE, room.append), send, room


async def test_another_server_is_sent_to_by_tasks_one_at_a_time() -> None:
    server = ForeignServer()
    queue, _, room = foreign_queue(server)
    assert queue.has_room()
    for frame in (b"a", b"b", b"c"):
        queue.put((frame,))
        queue.flush()
    assert server.sent == [], "nothing is sent by whoever puts it"
    assert queue.writer(0.0) is None, "nor past its middleware"
    while queue.is_blocked:
        await queue.flushed()
    assert (server.body, server.most, len(server.sent)) == (b"abc", 1, 2)
    assert room, "readers hear of room"


async def test_the_end_comes_behind_what_is_under_way_and_what_waits() -> None:
    server = ForeignServer()
    queue, send, _ = foreign_queue(server)
    server.open.clear()
    queue.put((b"a",))
    queue.flush()
    queue.put((b"b",))
    await asyncio.sleep(0)
    assert not queue.drop(), "it is not stuck yet"
    queue.close(b"last", 1000)
    server.open.set()
    await asyncio.wait_for(send.ended(), 5)
    assert server.body == b"ablast"
    assert server.sent[-1] == SSE.last(1000)
    assert server.most == 1


async def test_a_send_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "_STUCK_MS", -1.0)
    server = ForeignServer()
    queue, send, _ = foreign_queue(server)
    server.open.clear()
    queue.put((b"a",))
    queue.flush()
    await asyncio.sleep(0)
    assert queue.drop()
    queue.abort()
    await asyncio.wait_for(send.ended(), 5)
    server.open.set()
    await asyncio.sleep(0.01)
    assert server.sent == []


async def test_whatever_a_server_raises_ends_the_stream() -> None:
    server = ForeignServer()
    queue, send, _ = foreign_queue(server)
    server.is_gone = True
    queue.put((b"a",))
    queue.flush()
    await asyncio.wait_for(send.ended(), 5)
    assert not queue.is_blocked


@pytest.mark.parametrize("is_client", [True, False])
async def test_a_stream_waits_for_its_client_or_its_own_end(is_client: bool) -> None:
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request"})
    send = ForeignSend(ForeignServer())
    waiting = asyncio.create_task(until_left(incoming.get, send))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    if is_client:
        incoming.put_nowait({"type": "http.disconnect"})
    else:
        send.end()
    await asyncio.wait_for(waiting, 5)


def test_only_an_unwrapped_send_of_ours_is_our_own() -> None:
    class Ours:
        transport = object()

        async def send(self, _message: Any) -> None: ...

    class Middleware:
        async def send(self, _message: Any) -> None: ...

    ours = Ours()
    scope = {"extensions": {EXTENSION: ours.transport}}
    assert is_own_send(scope, ours.send)
    assert not is_own_send(scope, Middleware().send)
    assert not is_own_send({"extensions": {EXTENSION: object()}}, ours.send)
    assert not is_own_send({}, ours.send)
    assert not is_own_send({"extensions": None}, ours.send)


async def test_a_receive_that_fails_leaves_nothing_for_the_collector() -> None:
    async def receive() -> dict[str, Any]:
        raise ConnectionError

    async def send(_: dict[str, Any]) -> None:
        raise AssertionError

    with nothing_for_the_collector(), contextlib.suppress(ConnectionError):
        await until_left(receive, ForeignSend(send))
        raise AssertionError("it fails")
