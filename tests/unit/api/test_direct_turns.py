"""Direct answers and turns: few clients are answered at once, many at the end of the turn.

Under pressure a diff has its turn without a task.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.unit.api.test_direct import APPEND, DIFF, Side, answered, request, under_pressure
from tests.unit.http.exchange.test_joined_writes import Wire, turns
from topics_server.http.connection import HttpConnection

pytestmark = pytest.mark.anyio

READ = request(DIFF, b"/v0/topics/t/diff")
CROWD = 8


class Crowd:
    """A server with one topic and some clients, which send requests in turns."""

    def __init__(self, clients: int, *, is_prompt: bool = True) -> None:
        self.side = Side(HttpConnection, is_prompt=is_prompt)
        self.clients: list[tuple[Any, Wire]] = [self.side.connect() for _ in range(clients)]

    def send(self, data: bytes) -> list[int]:
        """Every client sends the request; returns how many answers each one got at once."""
        before = [len(wire.pieces) for _, wire in self.clients]
        for protocol, _ in self.clients:
            protocol.data_received(data)
        return self.since(before)

    def since(self, before: list[int]) -> list[int]:
        return [
            len(wire.pieces) - count for (_, wire), count in zip(self.clients, before, strict=True)
        ]

    def end(self) -> None:
        for protocol, _ in (*self.clients, (self.side.protocol, None)):
            protocol.connection_lost(None)


async def crowd(clients: int) -> Crowd:
    made = Crowd(clients)
    await made.side.create()
    made.send(READ)
    await turns()
    return made


async def test_few_clients_are_answered_at_once() -> None:
    few = await crowd(CROWD - 1)
    assert few.send(READ) == [1] * (CROWD - 1)
    few.end()


async def test_answers_to_many_clients_leave_once_at_the_end_of_the_turn() -> None:
    many = await crowd(CROWD)
    before = [len(wire.pieces) for _, wire in many.clients]
    assert many.send(READ) == [0] * CROWD
    await turns(1)
    assert many.since(before) == [1] * CROWD
    await turns()
    assert many.since(before) == [1] * CROWD
    records = {wire.pieces[-1].partition(b'"records":')[2][:60] for _, wire in many.clients}
    assert len(records) == 1
    many.end()


async def test_a_busy_client_among_idle_ones_is_answered_at_once() -> None:
    many = await crowd(CROWD)
    protocol, wire = many.clients[0]
    for _ in range(3):
        await turns()
        wire.pieces.clear()
        protocol.data_received(READ)
    assert len(wire.pieces) == 1
    many.end()


async def test_an_answer_that_waits_for_the_end_of_the_turn_survives_a_stop() -> None:
    many = await crowd(CROWD)
    before = [len(wire.pieces) for _, wire in many.clients]
    many.send(READ)
    for protocol, _ in many.clients:
        protocol.shutdown()
    assert many.since(before) == [1] * CROWD
    assert all(wire.is_closing() for _, wire in many.clients)
    await turns()
    assert many.since(before) == [1] * CROWD
    many.end()


async def test_a_client_that_sends_no_more_gets_the_answer_that_waits() -> None:
    """The transport is closed behind its last bytes, and takes no more."""
    many = await crowd(CROWD)
    before = [len(wire.pieces) for _, wire in many.clients]
    many.send(READ)
    for protocol, wire in many.clients:
        protocol.eof_received()
        wire.close()
    await turns()
    assert many.since(before) == [1] * CROWD
    many.end()


async def test_an_append_of_a_crowd_is_answered_in_the_turn_that_commits_it() -> None:
    """Its client works while the answers of the other appends are made."""
    many = Crowd(CROWD, is_prompt=False)
    side = many.side
    creating = asyncio.ensure_future(side.create())
    await turns()
    shard = side.rig.journal.submitted[0].shard
    side.rig.journal.sync(shard)
    await creating
    many.send(READ)
    await turns()
    assert many.send(request(APPEND)) == [0] * CROWD
    await turns()
    before = [len(wire.pieces) for _, wire in many.clients]
    side.rig.journal.write(shard)
    assert many.since(before) == [1] * CROWD
    many.end()


async def test_only_the_client_of_the_last_answer_is_polled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = await crowd(2)
    noted: list[float] = []
    polling = two.side.state.busy_polling
    monkeypatch.setattr(polling, "answered_again", lambda _, started_ms: noted.append(started_ms))
    two.send(READ)
    two.send(READ)
    assert noted == []
    for _ in range(3):
        two.clients[0][0].data_received(READ)
    assert len(noted) == 2
    assert noted == sorted(noted)
    polling.streak = 7
    two.clients[0][0].data_received(READ)
    assert polling.streak == 7
    two.clients[1][0].data_received(READ)
    assert polling.streak == 0
    two.end()


async def test_under_pressure_a_diff_waits_for_its_turn_without_a_task() -> None:
    side = Side(HttpConnection)
    await side.create()
    backlog = under_pressure(side)
    side.protocol.data_received(READ)
    await turns()
    assert not side.wire.pieces
    assert not side.protocol.tasks
    backlog[0] = 0
    await answered(side)
    assert b'"records":[{"$seq":1' in side.sent
    waited = re.search(rb'"throttle_wait_ms":([0-9.]+)', b"".join(side.wire.pieces))
    assert waited is not None
    assert float(waited[1]) > 0
    side.protocol.connection_lost(None)


async def test_under_pressure_a_diff_is_refused_in_the_end() -> None:
    side = Side(HttpConnection)
    await side.create()
    under_pressure(side)
    side.protocol.data_received(READ)
    await answered(side)
    assert side.sent.startswith(b"HTTP/1.1 429 ")
    assert side.state.throttle.throttled_total == {"late": 1, "full": 0}
    side.protocol.connection_lost(None)


async def test_under_pressure_a_wrong_diff_gets_its_error_at_once() -> None:
    side = Side(HttpConnection)
    await side.create()
    under_pressure(side)
    side.protocol.data_received(request(b'{"from_seq":-1}', b"/v0/topics/t/diff"))
    assert side.sent.startswith(b"HTTP/1.1 400 ")
    side.protocol.connection_lost(None)


async def test_under_pressure_a_diff_reads_the_disk_after_its_turn() -> None:
    side = Side(HttpConnection)
    await side.create()
    topic = side.rig.registry.find("t")
    assert topic is not None
    await side.rig.sealer.tend(topic, force_seal=True)
    backlog = under_pressure(side)
    side.protocol.data_received(READ)
    side.protocol.data_received(request(None, headers=b"", method=b"GET"))
    await turns()
    assert not side.protocol.tasks
    backlog[0] = 0
    await answered(side, 2)
    assert 0 < side.sent.find(b'"first": "of them"') < side.sent.find(b'"config"')
    side.protocol.connection_lost(None)


@pytest.mark.parametrize("name", [b"wait_ms", rb"\u0077ait_ms"])
async def test_under_pressure_a_diff_waits_for_records_after_its_turn(name: bytes) -> None:
    """It waits until its client is gone, too, and only a task can do that."""
    side = Side(HttpConnection)
    await side.create()
    backlog = under_pressure(side)
    body = b'{"from_seq":1,"%b":60000}' % name
    side.protocol.data_received(request(body, b"/v0/topics/t/diff"))
    await turns()
    assert side.protocol.tasks
    backlog[0] = 0
    await asyncio.sleep(0.02)
    assert not side.wire.pieces
    await side.rig.append("t", {"n": 20})
    await answered(side)
    assert b'"n": 20' in side.sent or b'"n":20' in side.sent
    side.protocol.connection_lost(None)
