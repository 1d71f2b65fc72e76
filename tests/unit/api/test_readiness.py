"""`readiness`: which requests accept an event stream, and the slots of open connections."""

from __future__ import annotations

import pytest

from topics_server.api.context import ServerState
from topics_server.api.readiness import ConnectionSlot, check_accepts_stream
from topics_server.settings import Settings
from topics_server.values.errors import Code, TopicsError


@pytest.mark.parametrize(
    "accept",
    [
        *(None, b"", b"  ", b"*/*", b"text/*", b"text/event-stream", b"TEXT/Event-Stream"),
        *(b"text/event-stream;q=0.001", b"text/event-stream; Q=1", b"text/event-stream;q=0.0001"),
        *(b"application/json, text/event-stream", b"application/json,*/*;q=0.1"),
        *(b"text/event-stream;charset=utf-8", b"*/*;q=0, text/*", b"text/*;q=0,text/event-stream"),
        *(b"text/event-stream;q=", b"text/event-stream;q=x", b"text/event-stream;charset=0;q=1"),
    ],
)
def test_a_client_that_accepts_a_stream_gets_one(accept: bytes | None) -> None:
    check_accepts_stream(accept)


@pytest.mark.parametrize(
    "accept",
    [
        *(b"application/json", b"text/html", b"text", b"*", b",", b"text/event-streams"),
        *(b"text/event-stream;q=0", b"text/event-stream; q=0.000", b"*/*;q=0"),
        *(b"text/event-stream;q=0,*/*", b"text/*;q=0.0, */*;q=1", b"text/event-stream;Q=0;x=1"),
    ],
)
def test_a_client_that_accepts_no_stream_gets_406(accept: bytes) -> None:
    with pytest.raises(TopicsError) as caught:
        check_accepts_stream(accept)
    assert caught.value.code is Code.NOT_ACCEPTABLE


def state_with(max_connections: int) -> ServerState:
    settings = Settings(max_sse_connections=max_connections)
    return ServerState(settings=settings, progress=lambda: 1.0)


def test_places_are_counted_and_freed_once() -> None:
    state = state_with(2)
    first, second = ConnectionSlot(state), ConnectionSlot(state)
    assert state.connections == 2
    with pytest.raises(TopicsError) as caught:
        ConnectionSlot(state)
    assert caught.value.code is Code.THROTTLED
    assert caught.value.detail == {"limit": "max_sse_connections", "max": 2}
    assert state.connections == 2
    first.free()
    first.free()
    assert state.connections == 1
    third = ConnectionSlot(state)
    second.free()
    third.free()
    assert state.connections == 0


def test_0_is_no_bound() -> None:
    state = state_with(0)
    slots = [ConnectionSlot(state) for _ in range(100)]
    assert state.connections == len(slots)
