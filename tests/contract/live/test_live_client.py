"""`client.live` and `client.live_async` against a server that stops, is killed and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Server
from tests.ports import lasting_port
from topics_server.client import (
    InvalidRequest,
    LiveEvent,
    LiveRecord,
    Unauthorized,
    Unreachable,
    live,
    live_async,
)


def restarted(server: Server, steps: list[Callable[[], object]]) -> threading.Thread:
    """Run these actions while the reader reads."""

    def run() -> None:
        for step in steps:
            step()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def steps_of(server: Server, connected: threading.Event) -> list[Callable[[], object]]:
    """Appends between stops and kills, once the reader is connected; a topic is created late."""
    return [
        lambda: connected.wait(30),
        lambda: server.api.add("orders.a", 3, tag="x"),
        server.restart,
        lambda: server.api.add("orders.a", 4, 5),
        server.crash,
        lambda: server.api.add("orders.b", 6, tag="x"),
    ]


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_reader_goes_on_over_restarts(own: NewServer, kind: str) -> None:
    server = own(TOPICS_PORT=str(lasting_port()))
    url = server.start().url
    server.api.add("orders.a", 1, 2, tag="x")
    found: list[LiveEvent] = []
    records: list[LiveRecord] = []
    connected = threading.Event()

    def took(event: LiveEvent) -> bool:
        connected.set()
        found.append(event)
        records.extend(event.records)
        return len(records) == 6

    def read() -> None:
        with contextlib.closing(live(prefix="orders.", url=url)) as events:
            for event in events:
                if took(event):
                    return

    async def read_async() -> None:
        async with contextlib.aclosing(live_async(prefix="orders.", url=url)) as events:
            async for event in events:
                if took(event):
                    return

    thread = restarted(server, steps_of(server, connected))
    if kind == "blocking":
        read()
    else:
        asyncio.run(read_async())
    thread.join()
    assert [record.data for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.seq for record in records] == [1, 2, 3, 4, 5, 1]
    assert [record.tag for record in records] == ["x", "x", "x", None, None, "x"]
    assert "topic-created" in [event.kind for event in found]
    assert all(event.cursor for event in found)
    # Another reader can continue from the cursor of an event.
    server.api.add("orders.a", 7)
    with contextlib.closing(live(prefix="orders.", url=url, cursor=found[-1].cursor)) as events:
        more = next(event for event in events if event.records)
    assert [record.data for record in more.records] == [7]


def test_filters_and_starts_are_those_of_the_query(api: Api, topic: str) -> None:
    for number in range(6):
        api.add(topic, number, tag="ab"[number % 2], node=f"n{number % 3}")
    wanted = ["And", "b", ["Not", ["node", "Eq", "n0"]]]
    with contextlib.closing(live([topic], url=api.url, filter=wanted, last=1)) as events:
        event = next(events)
    assert [(record.data, record.node) for record in event.records] == [(5, "n2")]
    assert event.topic == topic
    assert event.gap is None


def test_a_gap_is_an_event(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 2})
    for number in range(5):
        api.add(topic, number)
    with contextlib.closing(live(topic, url=api.url)) as events:
        gap = next(events).gap
        assert gap is not None
        assert gap[:2] == (1, 3)
        assert [record.data for record in next(events).records] == [3, 4]


def test_refusals_are_raised(own: NewServer, api: Api) -> None:
    with pytest.raises(InvalidRequest):
        next(live("t", url=api.url, last=0))
    with pytest.raises(ValueError, match="a topic or a prefix"):
        next(live(url=api.url))
    server = own(TOPICS_API_KEYS="secret")
    url = server.start().url
    with pytest.raises(Unauthorized):
        next(live("t", url=url, token="other"))
    server.stop()
    with pytest.raises(Unreachable):
        next(live("t", url=url, token="secret", patience_ms=300))
