"""Our connection behind any ASGI application: the bytes of plain uvicorn, in fewer pieces."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from topics_server.http.connection import HttpConnection
from topics_server.http.exchange.joined_writes import COPIED_BYTES_MAX, JoinedWrites

pytestmark = pytest.mark.anyio

POST = b"POST /v0/topics/t HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"


class Wire:
    """A transport that keeps the written bytes, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closing = self.aborted = self.ended = False
        self.unsent = 0

    def write(self, data: bytes) -> None:
        self.pieces.append(bytes(data))

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        self.pieces.append(b"".join(pieces))

    def get_extra_info(self, name: str) -> object:
        return None

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Echo:
    """Answers with the received body; `more`: in two pieces, without a length."""

    def __init__(self, *, more: bool = False) -> None:
        self.more = more
        self.bodies: list[bytes] = []
        self.scopes: list[MutableMapping[str, Any]] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            assert isinstance(message["body"], bytes)
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        self.scopes.append(scope)
        headers = [(b"x-a", b"1")]
        if not self.more:
            headers += [(b"x-request-id", b"r"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.more:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
        elif scope["method"] == "HEAD":
            body = b""
        await send({"type": "http.response.body", "body": body})


async def nothing(scope: Any, receive: Any, send: Any) -> None: ...


def uvicorns() -> Any:
    """The connection class of plain uvicorn."""
    config = uvicorn.Config(nothing, http="httptools", log_config=None)
    config.load()
    return config.http_protocol_class


def connect(app: Any, kind: Any = HttpConnection, **settings: Any) -> Any:
    """A connection to `app`, and its wire."""
    config = uvicorn.Config(app, http=kind, ws="none", lifespan="off", log_config=None, **settings)
    config.load()
    state = ServerState()
    protocol = kind(config=config, server_state=state, app_state={})
    wire = Wire()
    protocol.connection_made(wire)
    return protocol, wire


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


REQUESTS = {
    "a body with its head": [POST % (3, b"abc")],
    "a body behind its head": [POST % (6, b""), b"abc", b"def"],
    "a large body in pieces": [POST % (200_000, b"x" * 90_000), b"y" * 70_000, b"z" * 40_000],
    "no body": [POST % (0, b"")],
    "two requests at once": [POST % (1, b"1") + POST % (1, b"2")],
    "a query": [(POST % (1, b"1")).replace(b"/t ", b"/t?a=%20b ")],
    "an escaped path": [(POST % (1, b"1")).replace(b"/t ", b"/%74 ")],
    "an odd path": [(POST % (1, b"1")).replace(b"/t ", b"//t/ ")],
    "a whole URL": [(POST % (1, b"1")).replace(b"/v0", b"http://x/v0")],
    "HTTP 1.0": [(POST % (1, b"1")).replace(b"1.1", b"1.0")],
    "close": [(POST % (1, b"1")).replace(b"host: x", b"host: x\r\nconnection: close")],
    "HEAD": [b"HEAD /v0/ready HTTP/1.1\r\nhost: x\r\n\r\n"],
    "GET": [b"GET /v0/ready HTTP/1.1\r\nhost: x\r\n\r\n"],
    "chunked": [
        b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"2\r\nde\r\n0\r\n\r\n",
    ],
    "expect": [(POST % (1, b"")).replace(b"host: x", b"host: x\r\nexpect: 100-continue"), b"1"],
}


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
async def test_answers_and_scopes_are_those_of_uvicorn(name: str, more: bool) -> None:
    seen = []
    for kind in (uvicorns(), HttpConnection):
        app = Echo(more=more)
        protocol, wire = connect(app, kind)
        for piece in REQUESTS[name]:
            protocol.data_received(piece)
            await turns()
        await turns()
        scopes = [{**scope, "state": None, "extensions": None} for scope in app.scopes]
        seen.append((b"".join(wire.pieces), wire.closing, app.bodies, scopes))
        protocol.connection_lost(None)
    assert seen[0] == seen[1]
    assert seen[0][2]


async def test_an_answer_of_known_length_is_one_piece() -> None:
    protocol, wire = connect(Echo())
    for count, body in ((1, b"abc"), (2, b"x" * 60_000)):
        protocol.data_received(POST % (len(body), body))
        await turns()
        assert len(wire.pieces) == count
        assert wire.pieces[-1].endswith(b"\r\n\r\n" + body)
    protocol.connection_lost(None)


async def test_a_body_in_one_piece_is_not_copied() -> None:
    seen = []

    async def app(scope: object, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])

    protocol, _ = connect(app)
    body = b"abc" * 1000
    protocol.reader.on_message_begin()
    protocol.reader.on_url(b"/a")
    protocol.reader.on_header(b"host", b"x")
    protocol.reader._parser = type(
        "Parser",
        (),
        {
            "get_method": lambda self: b"POST",
            "get_http_version": lambda self: "1.1",
            "should_keep_alive": lambda self: True,
            "should_upgrade": lambda self: False,
        },
    )()
    protocol.reader.on_headers_complete()
    protocol.reader.on_body(body)
    protocol.reader.on_message_complete()
    protocol.exchange.disconnected = False
    await turns()
    assert seen[0] is body
    protocol.connection_lost(None)


async def test_whoever_waits_for_a_body_is_woken_for_much_of_it_or_all() -> None:
    seen: list[int] = []

    async def app(scope: object, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            seen.append(len(message["body"]))
            more = message["more_body"]

    protocol, _ = connect(app)
    protocol.data_received(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
    for _ in range(30):
        protocol.data_received(b"x" * 1000)
        await turns()
    assert seen == []
    protocol.data_received(b"x" * 10_000)
    await turns()
    assert seen == [40_000]
    protocol.data_received(b"x" * 30_000)
    await turns()
    protocol.data_received(b"x" * 30_000)
    await turns()
    assert sum(seen) == 100_000
    protocol.connection_lost(None)


async def test_a_header_with_a_line_break_is_never_sent() -> None:
    async def app(scope: object, receive: Any, send: Any) -> None:
        headers = [(b"x-a", b"1\r\nx-b: 2"), (b"x-request-id", b"r"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    protocol, wire = connect(app)
    protocol.data_received(POST % (0, b""))
    await turns()
    assert b"x-b" not in b"".join(wire.pieces)
    protocol.connection_lost(None)


async def several(count: int) -> tuple[list[Any], list[Wire], Echo]:
    """Connections of one server, each with a request in progress."""
    app = Echo()
    protocols: list[Any] = []
    wires: list[Wire] = []
    for _ in range(count):
        protocol, wire = connect(app)
        protocol.tasks = protocols[0].tasks if protocols else protocol.tasks
        protocols.append(protocol)
        wires.append(wire)
    for number, protocol in enumerate(protocols):
        protocol.data_received(POST % (1, b"%d" % number))
    return protocols, wires, app


async def test_answers_of_one_turn_leave_behind_all_its_work() -> None:
    protocols, wires, app = await several(3)
    await turns(1)
    assert len(app.bodies) == 3
    assert not any(wire.pieces for wire in wires)
    await turns(1)
    assert [wire.pieces[0][-1:] for wire in wires] == [b"0", b"1", b"2"]
    assert all(len(wire.pieces) == 1 for wire in wires)
    for protocol in protocols:
        protocol.connection_lost(None)


async def test_an_answer_that_waits_for_its_turn_survives_a_close() -> None:
    protocols, wires, _ = await several(2)
    await turns(1)
    for protocol in protocols:
        protocol.shutdown()
    assert [len(wire.pieces) for wire in wires] == [1, 1]
    assert all(wire.is_closing() for wire in wires)
    await turns()
    assert [len(wire.pieces) for wire in wires] == [1, 1], "nothing is sent twice"
    for protocol in protocols:
        protocol.connection_lost(None)


async def test_pieces_that_wait_leave_in_order_and_once() -> None:
    wire = Wire()
    writes = JoinedWrites(wire, asyncio.get_running_loop())
    writes.write_soon(b"HTTP/1.1 1", b"a")
    writes.write_soon(b"HTTP/1.1 2", b"b")
    writes.write(b"HTTP/1.1 3")
    assert wire.pieces == [b"HTTP/1.1 1a", b"HTTP/1.1 2bHTTP/1.1 3"]
    writes.write_soon(b"HTTP/1.1 4", b"d")
    await turns()
    assert wire.pieces[2:] == [b"HTTP/1.1 4d"]


async def test_a_small_answer_that_is_put_off_leaves_at_the_end_of_the_turn() -> None:
    wire = Wire()
    writes = JoinedWrites(wire, asyncio.get_running_loop())
    writes.is_put_off = True
    writes.write_pieces(b"HTTP/1.1 1", (b"a",), 1)
    assert wire.pieces == []
    await turns(1)
    assert wire.pieces == [b"HTTP/1.1 1a"]
    writes.write_pieces(b"HTTP/1.1 2", (b"b",), 1)
    assert wire.pieces[1:] == [b"HTTP/1.1 2b"], "the next one is not"
    writes.is_put_off = True
    large = bytes(COPIED_BYTES_MAX + 1)
    writes.write_pieces(b"HTTP/1.1 3", (large,), len(large))
    assert wire.pieces[2:] == [b"HTTP/1.1 3" + large]
    writes.write_pieces(b"HTTP/1.1 4", (b"d",), 1)
    assert wire.pieces[3:] == [b"HTTP/1.1 4d"]


async def test_pipelined_answers_of_a_busy_server_keep_their_order() -> None:
    protocols, wires, _ = await several(2)
    protocols[0].data_received(POST % (1, b"a") + POST % (1, b"b"))
    await turns(20)
    assert [piece[-1:] for piece in b"".join(wires[0].pieces).split(b"HTTP/1.1 200")[1:]] == [
        b"0",
        b"a",
        b"b",
    ]
    for protocol in protocols:
        protocol.connection_lost(None)


async def test_an_answer_that_waits_is_dropped_with_its_connection() -> None:
    """A closed transport raises for a write, and the loop would log a defect."""
    wire = Wire()
    writes = JoinedWrites(wire, asyncio.get_running_loop())
    writes.write_soon(b"HTTP/1.1 1", b"a")
    wire.closing = True
    await turns()
    assert wire.pieces == []
    writes.write_soon(b"HTTP/1.1 2", b"b")
    writes.close()
    assert wire.pieces == []
