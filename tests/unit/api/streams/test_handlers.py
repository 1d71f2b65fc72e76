"""Appends to a stream on the direct way: with a producer's headers, and under pressure."""

from __future__ import annotations

import re

import pytest

from tests.unit.api.test_direct import JSON, Side, answered, request, under_pressure
from tests.unit.http.exchange.test_joined_writes import turns
from tests.unit.http.exchange.test_known_heads import parsed_by, statuses
from topics_server.engine.stream_writes import StreamWrites
from topics_server.http.connection import HttpConnection
from topics_server.streams.service import Streams

pytestmark = pytest.mark.anyio

PATH = b"/v1/stream/t"


def side_of() -> Side:
    side = Side(HttpConnection)
    rig = side.rig
    writes = StreamWrites(rig.store, rig.registry, rig.commits, rig.clock)
    side.state.streams = Streams(
        rig.store, rig.registry, writes, rig.notifier, rig.clock, side.state.large_appends
    )
    return side


def append(body: bytes = b'{"n":1}', headers: bytes = b"") -> bytes:
    return request(body, PATH, JSON + headers)


def produced(seq: int) -> bytes:
    return append(headers=b"Producer-Id: p\r\nProducer-Epoch: 0\r\nProducer-Seq: %d\r\n" % seq)


async def test_a_producers_head_is_parsed_once_for_all_its_numbers() -> None:
    side = side_of()
    await side.create()
    parsed = parsed_by(side.protocol)
    # A repeat of the last request, and a number that is not the next one.
    for seq in (0, 1, 9, 10, 1, 3, 2):
        side.protocol.data_received(produced(seq))
        await turns()
    assert parsed == [produced(0), produced(1)], "a repeat goes the general way"
    assert statuses(side.wire) == [200, 200, 409, 409, 204, 409, 200]
    accepted = re.findall(rb"producer-seq: (\d+)\r\n", b"".join(side.wire.pieces))
    assert accepted == [b"0", b"1", b"1", b"2"]
    offsets = re.findall(rb"stream-next-offset: (\d+)_", b"".join(side.wire.pieces))
    assert list(map(int, offsets)) == [2, 3, 3, 4]
    side.protocol.connection_lost(None)


async def test_under_pressure_an_append_waits_for_its_turn_without_a_task() -> None:
    side = side_of()
    await side.create()
    backlog = under_pressure(side)
    side.protocol.data_received(append())
    await turns()
    assert not side.wire.pieces
    assert not side.protocol.tasks
    backlog[0] = 0
    await answered(side)
    assert statuses(side.wire) == [204]
    assert side.state.throttle.queued_total == 1
    assert side.rig.store.state("t", touch=False).head_seq == 2
    side.protocol.connection_lost(None)


async def test_an_append_that_overtakes_waiting_ones_is_written_at_once() -> None:
    side = side_of()
    await side.create()
    side.state.throttle.is_active = True
    side.protocol.data_received(append())
    assert [event for event in side.rig.journal.events if event.startswith("flush")]
    await answered(side)
    assert statuses(side.wire) == [204]
    side.protocol.connection_lost(None)


async def test_under_pressure_an_append_is_refused_in_the_end() -> None:
    side = side_of()
    await side.create()
    under_pressure(side)
    side.protocol.data_received(append())
    await answered(side)
    assert statuses(side.wire) == [429]
    assert side.rig.store.state("t", touch=False).head_seq == 1
    side.protocol.connection_lost(None)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [(b"[", b"", 400), (b"{}", b"stream-closed: true\r\n", 204), (b"", b"", 400)],
)
async def test_under_pressure_any_other_append_gets_its_answer(
    body: bytes, headers: bytes, status: int
) -> None:
    side = side_of()
    await side.create()
    under_pressure(side)[0] = 0
    side.protocol.data_received(append(body, headers))
    await answered(side)
    assert statuses(side.wire) == [status]
    side.protocol.connection_lost(None)
