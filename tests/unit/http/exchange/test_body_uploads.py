"""Bodies in a budget: their bytes are counted, and a refused client gets the reason and is
drained.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.unit.api.test_direct import JSON, Side, request
from tests.unit.http.exchange.test_joined_writes import turns
from tests.unit.http.test_connection_bounds import WAITS, Clock
from topics_server.auth.api_keys import KeyRing
from topics_server.http import connection
from topics_server.http.connection import HttpConnection
from topics_server.http.read_scheduler import ReadScheduler
from topics_server.http.timeouts import ConnectionTimeouts
from topics_server.http.upload_budget import UploadBudget
from topics_server.http.upload_turns import REST_S, SHARE_BYTES, VAIN_REST_S, UploadTurns
from topics_server.values.limits import KIB, LINGER_BYTES_MAX, LINGER_MS_MAX, MIB
from topics_server.values.texts.key_list import parse_keys

pytestmark = pytest.mark.anyio

HEAD = b"POST /v0/topics/t HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
PIECE = b" " * (100 * KIB)


async def side_of(budget: int, **settings: Any) -> Side:
    """A server with a topic and a budget for uploads."""
    side = Side(HttpConnection, max_body_bytes=64 * MIB, **settings)
    side.state.uploads = UploadBudget(budget)
    await side.create()
    return side


def told(wire: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of the only answer."""
    head, _, body = b"".join(wire.pieces).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def test_a_body_in_pieces_counts_until_its_request_is_answered() -> None:
    side = await side_of(MIB)
    uploads = side.state.uploads
    protocol, wire = side.connect()
    body = b'{"records":[%b{"data":1}]}' % PIECE
    protocol.data_received(request(body)[:1000])
    assert 0 < uploads.held_bytes < 1000
    protocol.data_received(request(body)[1000:-1])
    assert uploads.held_bytes == len(body) - 1
    await turns(5)
    assert uploads.held_bytes == len(body) - 1, "the handler's task has it now"
    protocol.data_received(request(body)[-1:])
    assert uploads.held_bytes == len(body) - 1
    await turns(20)
    assert b"200 OK" in b"".join(wire.pieces)
    assert uploads.held_bytes == 0
    protocol.connection_lost(None)


async def test_a_body_that_comes_whole_is_not_counted() -> None:
    side = await side_of(10)
    protocol, wire = side.connect()
    protocol.data_received(request(b'{"records":[%b{"data":1}]}' % PIECE))
    await turns(12)
    assert b"200 OK" in b"".join(wire.pieces)
    assert side.state.uploads.refused == 0
    protocol.connection_lost(None)


async def test_a_connection_that_is_gone_holds_nothing() -> None:
    side = await side_of(MIB)
    protocol, _ = side.connect()
    protocol.data_received(HEAD % (JSON, MIB) + PIECE)
    assert side.state.uploads.held_bytes == len(PIECE)
    protocol.connection_lost(None)
    assert side.state.uploads.held_bytes == 0
    await turns(5)


async def test_the_slowest_is_refused_in_the_envelope_and_drained() -> None:
    side = await side_of(3 * len(PIECE))
    stalled, wire = side.connect()
    other, other_wire = side.connect()
    stalled.data_received(HEAD % (JSON, 50 * MIB) + PIECE)
    for _ in range(3):
        await turns(3)
        other.data_received(PIECE if other.reader.body_bytes else HEAD % (JSON, 50 * MIB) + PIECE)
    status, error = told(wire)
    assert status == 429
    assert error["code"] == "throttled"
    assert error["detail"] == {"limit": "max_receiving_bytes", "max": 3 * len(PIECE)}
    assert b"retry-after: " in wire.pieces[0]
    assert b"connection: close" in wire.pieces[0]
    assert (wire.ended, wire.closing) == (True, False), "nothing more is sent, much is received"
    assert side.state.uploads.held_bytes == 3 * len(PIECE)
    assert not other_wire.pieces
    pieces = len(wire.pieces)
    for _ in range(100):
        stalled.data_received(PIECE)
    await turns(5)
    assert len(wire.pieces) == pieces
    assert not wire.closing
    assert side.state.uploads.held_bytes == 3 * len(PIECE)
    for _ in range(LINGER_BYTES_MAX // len(PIECE)):
        stalled.data_received(PIECE)
    assert wire.aborted, "but not without an end"
    for protocol in (stalled, other):
        protocol.connection_lost(None)


async def test_a_refused_upload_may_go_on_for_a_while_and_no_longer() -> None:
    side = await side_of(1)
    side.state.timeouts = ConnectionTimeouts(limits=WAITS)
    clock = Clock()
    protocol: Any = HttpConnection(config=side.config, server_state=side.uvicorn, app_state={})
    protocol.loop = clock
    wire = type(side.wire)()
    protocol.connection_made(wire)
    protocol.data_received(HEAD % (JSON, 50 * MIB) + PIECE)
    assert told(wire)[0] == 429
    lasted = 0
    while protocol.overdue(clock.now, WAITS) is None:
        clock.now += 1
        lasted += 1
        protocol.data_received(b"x")
    # The connection stays open as long as bytes arrive, and then as long as any connection that the
    # server is closing.
    assert LINGER_MS_MAX / 1000 <= lasted <= LINGER_MS_MAX / 1000 + WAITS.linger_s + 1
    protocol.connection_lost(None)
    again: Any = HttpConnection(config=side.config, server_state=side.uvicorn, app_state={})
    again.loop = clock
    again.connection_made(type(side.wire)())
    again.data_received(HEAD % (JSON, 50 * MIB) + PIECE)
    clock.now += WAITS.linger_s + 0.1
    assert again.overdue(clock.now, WAITS) == "linger"
    again.connection_lost(None)
    await turns(3)


async def test_a_key_that_holds_less_loses_nothing() -> None:
    side = await side_of(5 * len(PIECE))
    side.state.keys = KeyRing(parse_keys("one,two"))
    wires = {}
    for number, key in enumerate((b"two", b"one", b"one", b"one", b"one", b"one")):
        protocol, wire = side.connect()
        authorization = b"authorization: Bearer %b\r\n" % key
        protocol.data_received(HEAD % (JSON + authorization, 50 * MIB) + PIECE)
        wires[number] = wire
    assert [bool(wire.pieces) for wire in wires.values()] == [False, True] + [False] * 4
    assert told(wires[1])[0] == 429


async def test_many_connections_that_send_much_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FEW", 0)
    side = await side_of(0)
    several = [side.connect()[0] for _ in range(6)]
    for protocol in several:
        protocol.data_received(HEAD % (JSON, 50 * MIB))
    assert all(protocol.flow.waits_turn for protocol in several)
    await asyncio.sleep(0)
    reading = [not protocol.flow.waits_turn for protocol in several]
    assert reading == [True, True, False, False, False, False]
    several[0].data_received(PIECE)
    assert several[0].flow.waits_turn
    await asyncio.sleep(0)
    assert not several[2].flow.waits_turn
    # A complete body leaves the queue of uploads.
    body = b'{"records":[%b{"data":1}]}' % PIECE
    protocol, wire = side.connect()
    protocol.data_received(request(body)[:200])
    assert protocol.flow.waits_turn
    protocol.data_received(request(body)[200:])
    assert not protocol.flow.waits_turn
    await turns(20)
    assert b"200 OK" in b"".join(wire.pieces)
    for one in (*several, protocol):
        one.connection_lost(None)
    assert len(side.state.upload_turns) == 0


async def test_uploads_over_their_share_of_the_budget_are_read_in_small_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much the clients have sent, a turn of the loop reads one share in total."""
    monkeypatch.setattr(connection, "FEW", 0)
    side = await side_of(4 * MIB)
    door = side.state.upload_turns = UploadTurns(side.state.uploads)
    loop_s = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: loop_s)
    several, ours = [], []
    for _ in range(12):
        protocol, wire = side.connect()
        own, client = socket.socketpair()
        own.setblocking(False)
        client.setblocking(False)
        monkeypatch.setattr(wire, "get_extra_info", lambda name, own=own: own)
        protocol.data_received(HEAD % (JSON, 50 * MIB) + PIECE)
        protocol.data_received(PIECE)
        several.append(protocol)
        ours.append((own, client))
    uploads = side.state.uploads
    held = uploads.held_bytes
    assert held == 24 * len(PIECE) > 2 * MIB
    sent = sum(client.send(PIECE) for _, client in ours)
    assert sent > 2 * SHARE_BYTES
    grown = []
    for _ in range(60):
        loop_s += REST_S
        await asyncio.sleep(0)
        grown.append(uploads.held_bytes - held)
        held = uploads.held_bytes
    assert max(grown) <= SHARE_BYTES, "a turn reads one share"
    assert sum(grown) >= 2 * SHARE_BYTES, "and they go on"
    assert all(protocol.flow.waits_turn for protocol in several)
    # The client sends nothing more: the timeout for the rest of the body runs, as if the connection
    # were being read.
    for _ in range(60):
        loop_s += VAIN_REST_S
        await asyncio.sleep(0)
    stalled = [protocol for protocol in several if not protocol.flow.is_kept_waiting]
    assert len(stalled) == len(several)
    for protocol in several:
        protocol.connection_lost(None)
    assert len(door) == 0
    for pair in ours:
        for sock in pair:
            sock.close()
    await turns(5)


async def test_a_long_body_out_of_the_read_scheduler_on_a_used_connection_is_answered() -> None:
    """In an earlier build more than 256 KiB of it counted as bytes after the previous request."""
    side = await side_of(0)
    read_scheduler = side.state.read_scheduler = ReadScheduler(turn_ms=0.0)
    protocol, wire = side.connect()
    protocol.data_received(request(b'{"records":[{"data":1}]}'))
    await turns(12)
    assert b"200 OK" in b"".join(wire.pieces)
    wire.pieces.clear()
    body = b'{"records":[%b{"data":1}]}' % (b" " * (400 * KIB))
    whole = request(body)
    read_scheduler._hold(protocol, whole[:-10])
    read_scheduler.release(protocol)
    assert not wire.ended
    protocol.data_received(whole[-10:])
    await turns(30)
    assert b"200 OK" in b"".join(wire.pieces)
    protocol.connection_lost(None)
