"""The direct routes answer whole requests without a task, with the same bytes as Starlette's
routes.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import re
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState as UvicornState

from tests.api.conftest import FakeSettings
from tests.garbage import nothing_for_the_collector
from tests.unit.engine.rig import Rig, throttled
from tests.unit.http.exchange.test_joined_writes import Wire, turns, uvicorns
from topics_server.api.application import Application, build_app
from topics_server.api.context import ServerState
from topics_server.api.front_door import FrontDoor
from topics_server.engine.pressure.throttle import Throttle
from topics_server.http.connection import HttpConnection
from topics_server.http.timeouts import TimeoutSettings
from topics_server.values.errors import DiskFull, TopicsError, topic_not_found
from topics_server.values.limits import KIB

pytestmark = pytest.mark.anyio

APPEND = b'{"records":[{"data":{"a":1},"tag":"x"},{"data":"two"}]}'
DIFF = b'{"from_seq":0}'
JSON = b"content-type: application/json\r\n"
# Fields that differ between two equal requests: measured times, and times of the clock.
MEASURED = re.compile(rb'("[a-z_]+_ms":|"last_(?:read|write)_ts":)[0-9.]+')


# As in `server`: a middleware in between would switch the direct routes off.
FLAGS: Any = {
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "proxy_headers": False,
    "date_header": False,
    "server_header": False,
}


def request(
    body: bytes | None,
    path: bytes = b"/v0/topics/t",
    headers: bytes = JSON,
    method: bytes = b"POST",
) -> bytes:
    """The bytes of one request."""
    length = b"" if body is None else b"content-length: %d\r\n" % len(body)
    return b"%b %b HTTP/1.1\r\nhost: x\r\n%b%b\r\n%b" % (
        method,
        path,
        headers,
        length,
        body or b"",
    )


class Side:
    """A server over an engine of lists, and one connection to it."""

    def __init__(self, kind: Any, *, is_prompt: bool = True, **settings: Any) -> None:
        self.rig = Rig(is_prompt=is_prompt)
        self.state = ServerState(
            settings=FakeSettings(**settings),
            progress=lambda: 0.5,
            store=self.rig.store,
            phase="ready",
        )
        app = build_app(self.state)
        self.config = uvicorn.Config(app, http=kind, **FLAGS)
        self.config.load()
        self.uvicorn = UvicornState()
        self.kind = kind
        self.protocol, self.wire = self.connect()

    def connect(self) -> tuple[Any, Wire]:
        """Open one more connection."""
        protocol: Any = self.kind(config=self.config, server_state=self.uvicorn, app_state={})
        wire = Wire()
        protocol.connection_made(wire)
        return protocol, wire

    @property
    def sent(self) -> bytes:
        """All answers, without measured values."""
        joined = b"".join(self.wire.pieces)
        for packed in re.findall(rb"\r\n\r\n(\x1f\x8b.*)", joined, re.DOTALL):
            joined = joined.replace(packed, gzip.decompress(packed))
            joined = re.sub(rb"content-length: \d+", b"content-length: packed", joined)
        joined = re.sub(rb"x-request-id: r\S+", b"x-request-id: made", joined)
        return re.sub(rb"content-length: \d+", b"content-length: n", MEASURED.sub(rb"\1n", joined))

    async def create(self, name: str = "t") -> None:
        """Create a topic with one record."""
        await self.rig.append(name, {"first": "of them"})


# The parts of each request, and whether it is answered without a task.
CASES: dict[str, tuple[list[bytes], bool]] = {
    "an append": ([request(APPEND)], True),
    "an append with a key": ([request(APPEND, headers=JSON + b"idempotency-key: k\r\n")], True),
    "a key of no characters": ([request(APPEND, headers=JSON + b"idempotency-key:\r\n")], True),
    "a diff": ([request(DIFF, b"/v0/topics/t/diff")], True),
    "a diff that may wait": (
        [request(b'{"from_seq":0,"wait_ms":60000}', b"/v0/topics/t/diff")],
        True,
    ),
    "a state": ([request(None, headers=b"", method=b"GET")], True),
    "wrong JSON": ([request(b'{"records":[')], True),
    "no records": ([request(b'{"records":[]}')], True),
    "wrong types": ([request(b'{"from_seq":"x"}', b"/v0/topics/t/diff")], True),
    "deep JSON": ([request(b'{"records":[{"data":' + b"[" * 5000 + b"]" * 5000 + b"}]}")], True),
    "a diff of no topic": ([request(DIFF, b"/v0/topics/none/diff")], True),
    "a state of no topic": (
        [request(None, b"/v0/topics/none", headers=b"", method=b"GET")],
        True,
    ),
    "no name of a topic": ([request(APPEND, b"/v0/topics/-x")], True),
    "an empty body": ([request(b"")], True),
    "a small answer, gzip": ([request(APPEND, headers=JSON + b"accept-encoding: gzip\r\n")], True),
    "an answer, gzip": (
        [request(DIFF, b"/v0/topics/t/diff", JSON + b"accept-encoding: gzip\r\n")],
        True,
    ),
    "another origin": (
        [request(DIFF, b"/v0/topics/t/diff", JSON + b"origin: http://a.example\r\n")],
        True,
    ),
    "an origin that is not listed": (
        [request(DIFF, b"/v0/topics/t/diff", JSON + b"origin: http://b.example\r\n")],
        True,
    ),
    "two at once": ([request(DIFF, b"/v0/topics/t/diff") * 2], False),
    "an append that creates": ([request(APPEND, b"/v0/topics/new")], False),
    "one that may not": (
        [request(b'{"create":false,"records":[{"data":1}]}', b"/v0/topics/new")],
        False,
    ),
    "a configuration": (
        [request(b'{"config":{"cap_records":1},"records":[{"data":1}]}')],
        False,
    ),
    "a query": ([request(APPEND, b"/v0/topics/t?return_seqs=false")], False),
    "an escaped name": ([request(APPEND, b"/v0/topics/%74")], False),
    "HTTP 1.0": ([request(APPEND).replace(b"1.1", b"1.0")], False),
    "close": ([request(APPEND, headers=JSON + b"connection: close\r\n")], False),
    "a body in pieces": ([request(APPEND)[:-20], APPEND[-20:-10], APPEND[-10:]], False),
    "a head in pieces": ([request(APPEND)[:30], request(APPEND)[30:]], True),
    "a body behind its head": ([request(APPEND)[: -len(APPEND)], APPEND], False),
    "expect": (
        [request(APPEND, headers=JSON + b"expect: 100-continue\r\n")[: -len(APPEND)], APPEND],
        False,
    ),
    "chunked": (
        [
            b"POST /v0/topics/t HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: chunked\r\n\r\n" % JSON
            + b"%x\r\n%b\r\n" % (20, APPEND[:20])
            + b"%x\r\n%b\r\n0\r\n\r\n" % (len(APPEND) - 20, APPEND[20:])
        ],
        False,
    ),
    "no content type": ([request(APPEND, headers=b"")], False),
    "a charset": (
        [request(APPEND, headers=b"content-type: application/json; charset=utf-8\r\n")],
        False,
    ),
    "packed": (
        [request(gzip.compress(APPEND, mtime=0), headers=JSON + b"content-encoding: gzip\r\n")],
        False,
    ),
    "packed with what is unknown": (
        [request(APPEND, headers=JSON + b"content-encoding: br\r\n")],
        False,
    ),
    "too large": ([request(b"x" * 150_000)], False),
    "a delete": ([request(b'{"before_seq":2}', b"/v0/topics/t/delete")], False),
    "no such path": ([request(APPEND, b"/v0/nothing")], False),
    "no such method": ([request(APPEND, b"/v0/topics/t/diff", method=b"PUT")], False),
    "a GET with a body": ([request(APPEND, headers=JSON, method=b"GET")], False),
    "HEAD": ([request(None, headers=b"", method=b"HEAD")], False),
    "OPTIONS": ([request(None, headers=b"", method=b"OPTIONS")], False),
    "a probe": ([request(None, b"/v0/health", headers=b"", method=b"GET")], False),
}
SETTINGS: dict[str, Any] = {"allowed_origins": frozenset({b"http://a.example"})}


@pytest.mark.parametrize("name", CASES)
async def test_both_ways_answer_with_the_same_bytes(name: str) -> None:
    pieces, is_direct = CASES[name]
    seen = []
    for kind in (uvicorns(), HttpConnection):
        side = Side(kind, **SETTINGS)
        await side.create()
        for piece in pieces:
            if side.wire.is_closing():
                break
            side.protocol.data_received(piece)
            has_task = bool(side.protocol.tasks)
            assert not (has_task and is_direct and kind is HttpConnection)
            await turns(12)
        read = await side.rig.read("t")
        records = [(row.block.data(r), row.block.tags[r]) for row in read.pieces for r in row.rows]
        seen.append((side.sent, side.wire.is_closing(), records, side.uvicorn.total_requests))
        if kind is HttpConnection:
            assert (side.protocol.exchange is None) == is_direct
        side.protocol.connection_lost(None)
    assert seen[0][0]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("phase", ["replaying", "draining"])
async def test_the_gate_is_the_same(phase: Any) -> None:
    seen = []
    for kind in (uvicorns(), HttpConnection):
        side = Side(kind)
        await side.create()
        side.state.phase = phase
        for one in (
            request(APPEND),
            request(DIFF, b"/v0/topics/t/diff"),
            request(None, headers=b"", method=b"GET"),
        ):
            side.protocol.data_received(one)
            await turns()
        seen.append(side.sent)
        side.protocol.connection_lost(None)
    assert seen[0] == seen[1]
    assert seen[0].count(b" 503 ") == 3


@pytest.mark.parametrize("trouble", [throttled(), DiskFull("full", "/d"), ValueError("a defect")])
async def test_errors_of_the_engine_give_the_same_answer(
    trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fail(*_given: object, **_named: object) -> None:
        raise trouble

    for kind in (uvicorns(), HttpConnection):
        side = Side(kind)
        await side.create()
        monkeypatch.setattr(side.rig.store.appends, "_begin", fail)
        side.protocol.data_received(request(APPEND))
        await turns()
        seen.append(side.sent)
        side.protocol.connection_lost(None)
    # The exception's frames keep the connection alive as long as pytest keeps the parameter.
    trouble.with_traceback(None)
    assert seen[0] == seen[1]
    assert b'"error"' in seen[0]


async def appending(**settings: Any) -> tuple[Side, int]:
    """A connection with an append that waits for the disk; its shard."""
    side = Side(HttpConnection, is_prompt=False, **settings)
    creating = asyncio.ensure_future(side.create())
    await turns()
    shard = side.rig.journal.submitted[0].shard
    side.rig.journal.sync(shard)
    await creating
    side.protocol.data_received(request(APPEND))
    await turns()
    assert not side.wire.pieces
    return side, shard


async def test_an_append_is_answered_in_the_turn_that_commits_it_and_before_its_readers() -> None:
    side, shard = await appending()
    assert not side.protocol.tasks
    told: list[int] = []
    topic = side.rig.registry.find("t")
    assert topic is not None
    side.rig.notifier.add(topic.topic_id, lambda: told.append(len(side.wire.pieces)))
    side.rig.journal.write(shard)
    assert b'"first_seq":2,"last_seq":3' in side.sent
    assert told == [1]
    side.protocol.connection_lost(None)


@pytest.mark.parametrize("error", ["disk_full", "read_only"])
async def test_an_append_whose_group_failed_is_refused_as_with_a_task(error: str) -> None:
    seen = []
    for kind in (uvicorns(), HttpConnection):
        side = Side(kind, is_prompt=False)
        creating = asyncio.ensure_future(side.create())
        await turns()
        shard = side.rig.journal.submitted[0].shard
        side.rig.journal.sync(shard)
        await creating
        side.protocol.data_received(request(APPEND))
        await turns()
        side.rig.journal.fail(shard, side.rig.journal.last_lsn(shard), error)
        await turns()
        seen.append(side.sent)
        assert side.rig.store.state("t", touch=False).head_seq == 1
        side.protocol.connection_lost(None)
    assert seen[0] == seen[1]
    assert b'"error"' in seen[0]


async def test_a_disconnected_client_gets_no_answer_and_its_append_continues() -> None:
    side, shard = await appending()
    other, wire = side.connect()
    other.data_received(request(APPEND))
    side.wire.close()
    side.protocol.connection_lost(None)
    side.rig.journal.write(shard)
    assert not side.wire.pieces
    assert len(wire.pieces) == 1
    assert side.rig.store.state("t", touch=False).head_seq == 5
    other.connection_lost(None)


async def test_requests_behind_an_append_under_way_keep_their_order() -> None:
    side, shard = await appending()
    behind = request(DIFF, b"/v0/topics/t/diff") + request(None, headers=b"", method=b"GET")
    side.protocol.data_received(behind)
    await turns()
    assert not side.wire.pieces
    side.rig.journal.write(shard)
    await turns(20)
    starts = [side.sent.find(part) for part in (b'"first_seq"', b'"records"', b'"config"')]
    assert -1 < starts[0] < starts[1] < starts[2]
    assert side.sent.count(b"HTTP/1.1 200 OK") == 3
    assert side.uvicorn.total_requests == 3
    side.protocol.connection_lost(None)


async def test_one_request_is_served_in_the_call_that_brings_many() -> None:
    side = Side(HttpConnection)
    await side.create()
    one = request(DIFF, b"/v0/topics/t/diff")
    side.protocol.data_received(one * 5)
    assert side.sent.count(b"HTTP/1.1 200 OK") == 1
    await turns(40)
    assert side.sent.count(b"HTTP/1.1 200 OK") == 5
    side.protocol.data_received(one)
    assert side.sent.count(b"HTTP/1.1 200 OK") == 6
    side.protocol.connection_lost(None)


def under_pressure(side: Side) -> list[int]:
    """Let requests wait for their turn until the returned list holds a 0."""
    backlog = [10**9]
    side.state.throttle = Throttle(backlog_bytes=lambda: backlog[0])
    side.state.throttle.is_active = True
    side.state.throttle._passed = 10**9
    return backlog


async def test_under_pressure_an_append_waits_for_its_turn_without_a_task() -> None:
    side = Side(HttpConnection)
    await side.create()
    backlog = under_pressure(side)
    side.protocol.data_received(request(APPEND))
    await turns()
    assert not side.wire.pieces
    assert not side.protocol.tasks
    backlog[0] = 0
    await answered(side)
    assert b'"first_seq":2' in side.sent
    waited = re.search(rb'"throttle_wait_ms":([0-9.]+)', b"".join(side.wire.pieces))
    assert waited is not None
    assert float(waited[1]) > 0
    side.protocol.connection_lost(None)


async def test_an_append_that_overtakes_waiting_ones_is_written_at_once() -> None:
    side = Side(HttpConnection)
    await side.create()
    side.protocol.data_received(request(APPEND))
    await answered(side)
    assert not [event for event in side.rig.journal.events if event.startswith("flush")]
    side.wire.pieces.clear()
    side.state.throttle.is_active = True
    side.protocol.data_received(request(APPEND))
    assert [event for event in side.rig.journal.events if event.startswith("flush")]
    await answered(side)
    assert b'"first_seq":4' in side.sent
    side.protocol.connection_lost(None)


async def test_under_pressure_an_append_is_refused_in_the_end() -> None:
    side = Side(HttpConnection)
    await side.create()
    under_pressure(side)
    side.protocol.data_received(request(APPEND))
    await answered(side)
    assert side.sent.startswith(b"HTTP/1.1 429 ")
    assert re.search(rb"\r\nretry-after: [12]\r\n", side.sent)
    assert b'"retry_after_ms":' in b"".join(side.wire.pieces)
    assert side.state.throttle.throttled_total == {"late": 1, "full": 0}
    side.protocol.connection_lost(None)


@pytest.mark.parametrize("body", [APPEND, b'{"records":[]}'], ids=["refused", "wrong"])
async def test_a_refusal_under_pressure_leaves_nothing_for_the_collector(body: bytes) -> None:
    """Under pressure the garbage collector runs rarely, so each refusal in a cycle would keep its
    request in memory.
    """
    side = Side(HttpConnection)
    await side.create()
    backlog = under_pressure(side)
    backlog[0] = 10**9 if body is APPEND else 0

    def errors() -> int:
        return sum(type(found) is TopicsError for found in gc.get_objects())

    gc.collect()
    gc.disable()
    before = errors()
    try:
        side.protocol.data_received(request(body))
        await answered(side)
        assert errors() == before
    finally:
        gc.enable()
    assert b'"error"' in b"".join(side.wire.pieces)
    side.protocol.connection_lost(None)


async def test_a_repeated_append_under_pressure_goes_the_general_way() -> None:
    side = Side(HttpConnection)
    await side.create()
    one = request(APPEND, headers=JSON + b"idempotency-key: k\r\n")
    side.protocol.data_received(one)
    await answered(side)
    side.wire.pieces.clear()
    under_pressure(side)[0] = 0
    side.protocol.data_received(one)
    await answered(side)
    assert b'"deduped":true' in side.sent
    side.protocol.connection_lost(None)


async def test_a_wrong_append_under_pressure_gets_its_error() -> None:
    side = Side(HttpConnection)
    await side.create()
    under_pressure(side)[0] = 0
    side.protocol.data_received(request(b'{"records":['))
    await answered(side)
    assert side.sent.startswith(b"HTTP/1.1 400 ")
    side.protocol.connection_lost(None)


async def answered(side: Side, count: int = 1) -> None:
    for _ in range(10_000):
        if len(side.wire.pieces) >= count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no answer")


async def test_a_server_that_goes_down_answers_first_and_closes_then() -> None:
    side, shard = await appending()
    side.protocol.shutdown()
    assert not side.wire.is_closing()
    side.rig.journal.write(shard)
    assert b"connection: close\r\n\r\n" in side.sent
    assert side.wire.is_closing()
    side.protocol.connection_lost(None)


async def test_a_connection_that_waits_for_the_disk_is_never_timed_out() -> None:
    side, shard = await appending()
    now = asyncio.get_running_loop().time() + 1e6
    assert side.protocol.overdue(now, TimeoutSettings()) is None
    side.rig.journal.write(shard)
    assert side.protocol.overdue(now, TimeoutSettings()) == "idle"
    side.protocol.connection_lost(None)


async def test_a_socket_that_is_full_is_waited_for_in_the_general_way() -> None:
    side = Side(HttpConnection)
    await side.create()
    side.protocol.pause_writing()
    side.protocol.data_received(request(DIFF, b"/v0/topics/t/diff"))
    await turns()
    assert not side.wire.pieces
    side.protocol.resume_writing()
    await turns()
    assert side.sent.startswith(b"HTTP/1.1 200 OK")
    side.protocol.connection_lost(None)


async def test_a_diff_that_has_to_read_the_disk_or_to_wait_has_a_task() -> None:
    side = Side(HttpConnection)
    for number in range(20):
        await side.rig.append("t", {"n": number})
    topic = side.rig.registry.find("t")
    assert topic is not None
    await side.rig.sealer.tend(topic, force_seal=True)
    side.protocol.data_received(request(DIFF, b"/v0/topics/t/diff"))
    assert side.protocol.tasks
    await turns(20)
    assert side.sent.count(b'"n":') == 20
    side.protocol.data_received(request(b'{"from_seq":20,"wait_ms":60000}', b"/v0/topics/t/diff"))
    await turns()
    assert side.protocol.tasks
    await side.rig.append("t", {"n": 20})
    await turns(20)
    assert side.sent.count(b'"n":') == 21
    side.protocol.connection_lost(None)


async def test_a_large_answer_is_packed_off_the_loop() -> None:
    side = Side(HttpConnection)
    for number in range(100):
        await side.rig.append("t", {"n": number, "pad": "x" * KIB})
    asks = JSON + b"accept-encoding: gzip\r\n"
    side.protocol.data_received(request(DIFF, b"/v0/topics/t/diff", asks))
    assert side.protocol.tasks
    await asyncio.gather(*side.protocol.tasks)
    await turns()
    assert side.sent.count(b'"n":') == 100
    await turns()
    assert not side.protocol.tasks
    side.protocol.data_received(request(DIFF, b"/v0/topics/t/diff", asks))
    packing = list(side.protocol.tasks)
    side.wire.close()
    side.protocol.connection_lost(None)
    await asyncio.gather(*packing)
    assert len(side.wire.pieces) == 1


async def test_a_defect_in_an_answer_is_its_own_connections_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, shard = await appending()
    other, wire = side.connect()
    other.data_received(request(APPEND))
    errors = iter([ValueError("a defect")])

    first_lines = FrontDoor.first_lines

    def broken(door: FrontDoor, *args: Any, **named: Any) -> bytes:
        for error in errors:
            raise error
        return first_lines(door, *args, **named)

    monkeypatch.setattr(FrontDoor, "first_lines", broken)
    side.rig.journal.write(shard)
    assert side.sent.startswith(b"HTTP/1.1 500 ")
    assert b"".join(wire.pieces).startswith(b"HTTP/1.1 200 ")
    for protocol in (side.protocol, other):
        protocol.connection_lost(None)


async def test_a_defect_behind_an_answer_breaks_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, shard = await appending()
    aborted: list[bool] = []
    monkeypatch.setattr(side.wire, "abort", lambda: aborted.append(True), raising=False)

    def broken() -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(side.protocol, "on_response_complete", broken)
    side.rig.journal.write(shard)
    assert aborted == [True]
    assert len(side.wire.pieces) == 1
    side.protocol.connection_lost(None)


async def test_answers_held_back_leave_before_a_direct_one() -> None:
    side = Side(HttpConnection)
    await side.create()
    side.protocol.transport.write_soon(b"HTTP/1.1 200 OK\r\n\r\n", b"before")
    side.protocol.data_received(request(None, headers=b"", method=b"GET"))
    assert side.wire.pieces[0].endswith(b"before")
    await turns()
    assert len(side.wire.pieces) == 2
    side.protocol.connection_lost(None)


async def test_only_our_application_is_called_directly() -> None:
    called: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=HttpConnection, **FLAGS)
    config.load()
    protocol: Any = HttpConnection(config=config, server_state=UvicornState(), app_state={})
    wire = Wire()
    protocol.connection_made(wire)
    protocol.data_received(request(APPEND))
    await turns()
    assert called == ["/v0/topics/t"]
    protocol.connection_lost(None)


def test_hot_routes_are_served_from_the_parser_and_no_others() -> None:
    state = ServerState(settings=FakeSettings(), progress=lambda: 1.0)
    app = build_app(state)
    assert isinstance(app, Application)
    hot = [(route.template, method) for route in app.door.routes.table for method in route.hot]
    assert sorted(hot) == [
        ("/v0/topics/{topic}", "GET"),
        ("/v0/topics/{topic}", "POST"),
        ("/v0/topics/{topic}/ack", "POST"),
        ("/v0/topics/{topic}/claim", "POST"),
        ("/v0/topics/{topic}/diff", "POST"),
        ("/v1/stream/{path}", "GET"),
        ("/v1/stream/{path}", "POST"),
    ]
    door = app.topics_door
    assert door.direct_call(b"POST", b"/v0/topics/t", {b"content-type": b"text/plain"}) is None
    fields = {b"content-type": b"application/json", b"content-length": b"2"}
    assert door.direct_call(b"POST", b"/v0/topics/t", fields) is not None
    assert door.direct_call(b"POST", b"/v0/topics/t/delete", fields) is None
    app.add_middleware(object)
    assert door.direct_call(b"POST", b"/v0/topics/t", fields) is None, "past no middleware"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (lambda: topic_not_found("new"), b"404"),
        (lambda: DiskFull("no room"), b"429"),
        (lambda: RuntimeError("a defect"), b"500"),
    ],
    ids=["refusal", "disk", "defect"],
)
async def test_an_error_of_a_task_under_pressure_leaves_nothing_for_the_collector(
    error: Callable[[], Exception], status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task keeps its error, and the error refers to all frames up to the answer."""
    side = Side(HttpConnection)
    await side.create()
    under_pressure(side)[0] = 0

    async def fail(*_: object, **more: object) -> None:
        raise error()

    monkeypatch.setattr(side.rig.store, "begin_append", lambda *_, **more: None)
    monkeypatch.setattr(side.rig.store, "append", fail)
    wrong = request(APPEND)
    side.protocol.data_received(wrong)
    await answered(side)
    side.wire.pieces.clear()
    under_pressure(side)[0] = 0
    with nothing_for_the_collector():
        side.protocol.data_received(wrong)
        await answered(side)
    assert side.sent.startswith(b"HTTP/1.1 %b " % status)
    side.protocol.connection_lost(None)
