"""The streams' use of our connections: the bytes of ASGI messages, and when they may be written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from topics_server.api.watch.sse import SSE
from topics_server.api.websocket.frames import WS
from topics_server.http.connection import HttpConnection
from topics_server.http.exchange.asgi_exchange import Exchange
from topics_server.http.exchange.joined_writes import JoinedWrites
from topics_server.http.sockets import Socket
from topics_server.http.websocket import WebSocketConnection

pytestmark = pytest.mark.anyio


class Pipe(asyncio.Transport):
    """A transport that notes the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 7

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("never called")


def http_cycle(pipe: Pipe) -> Exchange:
    """A response as the connection makes it when it has read its request."""
    config = Config(_app, log_config=None)
    protocol = HttpConnection(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(pipe)
    scope: Any = {"type": "http", "method": "GET"}
    exchange = Exchange(protocol, scope, keep_alive=True, waits_for_continue=False)
    exchange.transport = pipe  # type: ignore[assignment]
    return exchange


async def test_a_chunk_is_what_send_makes_of_the_message() -> None:
    ours, theirs = Pipe(), Pipe()
    payload = b"event: record\ndata: {}\n\n"
    cycles = http_cycle(ours), http_cycle(theirs)
    for cycle in cycles:
        await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
    assert Socket(cycles[0].send).write(SSE.wire(payload))
    message: Any = SSE.message(payload)
    await cycles[1].send(message)
    assert ours.written == theirs.written


async def test_nothing_is_written_past_a_response_that_cannot_take_it() -> None:
    pipe = Pipe()
    cycle = http_cycle(pipe)
    socket = Socket(cycle.send)
    assert not socket.write(b"x"), "before it has begun"
    await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
    head = pipe.written
    cycle.flow.pause_writing()
    assert not socket.write(b"x"), "while its socket is full"
    socket.let_through()
    last: Any = SSE.last(1000)
    await cycle.send(last)
    assert not socket.write(b"x"), "after its end"
    assert pipe.written == head + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 200_000])
def test_a_message_is_the_frame_that_websockets_makes(size: int) -> None:
    payload = b"{" + b" " * size
    assert WS.wire(payload) == Frame(Opcode.TEXT, payload).serialize(mask=False)


async def test_a_websocket_is_written_to_only_while_it_is_open() -> None:
    pipe = Pipe()
    config = Config(_app, ws=WebSocketConnection, log_config=None)
    config.load()
    protocol = WebSocketConnection(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(pipe)
    socket = Socket(protocol.send)
    assert not socket.write(b"x"), "before the handshake"
    protocol.handshake_complete = True
    assert socket.write(b"x")
    protocol.pause_writing()
    assert not socket.write(b"x"), "while it is full"
    socket.let_through()
    assert socket.write(b"y")
    protocol.close_sent = True
    assert not socket.write(b"x"), "after its close frame"
    assert pipe.written == b"xy"
    assert socket.buffered_bytes() == 7
    socket.abort()
    assert pipe.is_aborted


async def test_under_another_server_everything_is_a_harmless_no() -> None:
    async def send(_message: dict[str, Any]) -> None: ...

    socket = Socket(send)
    assert not socket.write(b"x")
    assert not socket.is_full
    assert socket.buffered_bytes() == 0
    socket.let_through()
    socket.close_within(0.0)
    socket.abort()


async def test_bytes_go_past_our_transport_unless_it_holds_something_back() -> None:
    pipe = Pipe()
    writes = JoinedWrites(pipe, asyncio.get_running_loop())
    cycle = http_cycle(pipe)
    cycle.transport = writes
    await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
    socket = Socket(cycle.send)
    assert pipe.written == b"", "the head waits for what follows it"
    first = socket.writer()
    assert first == writes.write
    assert first is not None
    first(b"1\r\na\r\n")
    assert pipe.written.startswith(b"HTTP/1.1 200 OK")
    assert pipe.written.endswith(b"\r\n\r\n1\r\na\r\n")
    assert socket.writer() == pipe.write
    cycle.disconnected = True
    assert socket.writer() is None
