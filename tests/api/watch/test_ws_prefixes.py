"""Prefixes over `/v0/ws`: topics made later, deleted ones, other subscriptions, the limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import pytest

from tests.api.watch.test_ws import Frame, Peer, settle
from tests.storage.fake_disk import FakeDisk
from tests.unit.test_node import append, started
from topics_server.api.application import build_app
from topics_server.node.node import Node
from topics_server.values.model import TopicConfig

pytestmark = pytest.mark.anyio

MOST = 4
ORDERS: dict[str, Any] = {"orders.": {}}


class Sockets:
    """A node and the sockets of its clients."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.app = build_app(node.state)
        self.peers: list[Peer] = []
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app), base_url="http://topics:4000"
        )

    async def peer(self) -> Peer:
        peer = Peer(self.app)
        self.peers.append(peer)
        assert (await peer.message())["type"] == "websocket.accept"
        return peer

    async def append(self, topic: str, *datas: object) -> int:
        return await append(self.node, topic, *datas, config=TopicConfig())

    async def drop(self, topic: str) -> None:
        assert (await self.http.delete(f"/v0/topics/{topic}")).status_code == 200

    @property
    def creations(self) -> Any:
        fanout, _ = self.node.state.watching()
        return fanout.dispatcher.creations


@pytest.fixture
async def live() -> AsyncIterator[Sockets]:
    node = await started(FakeDisk(1), max_watch_topics=MOST)
    live = Sockets(node)
    yield live
    for peer in live.peers:
        peer.room.set()
        peer.leave()
    async with asyncio.timeout(10):
        await asyncio.gather(*(peer.serving for peer in live.peers))
    # No subscription waits for a topic any more.
    assert not live.creations._prefixes
    assert not live.creations._awaited
    await live.http.aclose()
    await node.close()


def datas(frames: Iterable[Frame], topic: str | None = None) -> list[Any]:
    return [
        record["data"]
        for frame in frames
        if frame["op"] == "record" and topic in (None, frame["topic"])
        for record in frame["records"]
    ]


async def until_data(peer: Peer, count: int) -> list[Frame]:
    """The frames up to the one that completes so many records."""
    frames: list[Frame] = []
    while len(datas(frames)) < count:
        frames.append(await peer.frame())
    assert len(datas(frames)) == count
    return frames


def made(frames: Iterable[Frame]) -> list[tuple[str, int]]:
    return [(each["topic"], each["epoch"]) for each in frames if each["op"] == "topic_created"]


async def until_pong(peer: Peer) -> list[Frame]:
    """All frames that come before the answer to a ping."""
    await settle()
    peer.say(op="ping")
    frames: list[Frame] = []
    while (frame := await peer.frame())["op"] != "pong":
        frames.append(frame)
    return frames


async def test_a_prefix_brings_the_topics_that_exist_and_those_made_later(live: Sockets) -> None:
    await live.append("orders.eu", 1, 2)
    await live.append("audit", 3)
    await live.append("other", 4)
    peer = await live.peer()
    peer.say(
        op="subscribe", request_id="s", topics={"audit": {}}, prefixes={"orders.": {"last": 1}}
    )
    assert await peer.frame() == {
        "op": "subscribed",
        "request_id": "s",
        "topics": {
            "audit": {"from_seq": 0, "head_seq": 1, "earliest_seq": 1},
            "orders.eu": {"from_seq": 1, "head_seq": 2, "earliest_seq": 1},
        },
    }
    assert sorted(datas(await until_data(peer, 2))) == [2, 3]
    await live.append("other", 5)
    await live.append("orders.us", 6, 7)
    frames = await until_data(peer, 2)
    assert made(frames) == [("orders.us", 1)]
    assert datas(frames, "orders.us") == [6, 7]
    # A command with prefixes only, and its options.
    peer = await live.peer()
    start = {"orders.e": {"tail": True}, "orders.": {}}
    answer = await peer.ask(op="subscribe", prefixes=start, include_tags=True, filter="t")
    assert {name: each["from_seq"] for name, each in answer["topics"].items()} == {
        "orders.eu": 2,
        "orders.us": 0,
    }
    records = b'{"records": [{"data": 8}, {"data": 9, "tag": "t"}]}'
    head = {"content-type": "application/json"}
    await live.http.post("/v0/topics/orders.ever", content=records, headers=head)
    frames = await until_data(peer, 1)
    assert made(frames) == [("orders.ever", 1)]
    (told,) = (frame for frame in frames if frame["op"] == "record")
    assert (told["records"][0]["data"], told["records"][0]["$tag"]) == (9, "t")


async def test_a_deleted_topic_of_a_prefix_may_come_again(live: Sockets) -> None:
    await live.append("orders.a", 1)
    peer = await live.peer()
    await peer.ask(op="subscribe", prefixes=ORDERS)
    await until_data(peer, 1)
    await live.drop("orders.a")
    assert (await peer.until("topic_deleted"))["topic"] == "orders.a"
    await live.append("orders.a", 2)
    frames = await until_data(peer, 1)
    assert made(frames) == [("orders.a", 2)]
    assert datas(frames) == [2]
    # A topic that was subscribed by name does so too; without a prefix it does not.
    await live.append("x", 1)
    await peer.ask(op="subscribe", topics={"orders.a": {"tail": True}, "x": {"tail": True}})
    for name in ("orders.a", "x"):
        await live.drop(name)
    assert {(await peer.until("topic_deleted"))["topic"] for _ in range(2)} == {"orders.a", "x"}
    await live.append("x", 3)
    await live.append("orders.a", 4)
    frames = await until_data(peer, 1)
    assert (made(frames), datas(frames)) == ([("orders.a", 3)], [4])


async def test_a_topic_made_again_while_the_socket_is_full_comes_again(live: Sockets) -> None:
    await live.append("orders.a", 1)
    peer = await live.peer()
    await peer.ask(op="subscribe", prefixes=ORDERS)
    await until_data(peer, 1)
    await peer.until("caught_up")
    peer.room.clear()
    await live.append("orders.b", 2)
    await settle()
    for name in ("orders.a", "orders.b"):
        await live.drop(name)
        await live.append(name, 3)
    await settle()
    peer.room.set()
    frames: list[Frame] = []
    while datas(frames).count(3) < 2:
        frames.append(await peer.frame())
    # A topic deleted meanwhile is reported as deleted or created again, and read from its start.
    assert datas(frames, "orders.a") == [3]
    assert datas(frames, "orders.b") in ([3], [2, 3])
    assert not datas(await until_pong(peer))


async def test_topics_that_are_followed_already_go_on_as_they_are(live: Sockets) -> None:
    await live.append("orders.a", 1, 2)
    peer = await live.peer()
    await peer.ask(op="subscribe", topic="orders.a", from_seq=1)
    assert datas(await until_data(peer, 1)) == [2]
    answer = await peer.ask(op="subscribe", prefixes=ORDERS)
    while answer["op"] != "subscribed":
        answer = await peer.frame()
    assert answer["topics"] == {}
    await live.append("orders.a", 3)
    assert datas(await until_data(peer, 1)) == [3]
    # Subscribed by name, the topic begins anew, and it still belongs to the prefix.
    await peer.ask(op="subscribe", topic="orders.a", last=1)
    assert datas(await until_data(peer, 1)) == [3]
    answer = await peer.ask(op="unsubscribe", topic="orders.a")
    while answer["op"] != "error":
        answer = await peer.frame()
    assert answer["code"] == "invalid_request"
    assert "orders." in answer["message"]


async def test_unsubscribing_a_prefix(live: Sockets) -> None:
    await live.append("orders.a", 1)
    await live.append("orders.b", 2)
    peer = await live.peer()
    peer.say(op="subscribe", topic="orders.b")
    peer.say(op="subscribe", prefixes={"orders.": {}, "orders.a": {}})
    assert sorted(datas(await until_data(peer, 2))) == [1, 2]
    # The other prefix still covers this topic.
    peer.say(op="unsubscribe", request_id="u", prefixes=["orders.", "orders."])
    answer = await peer.until("unsubscribed")
    assert answer == {"op": "unsubscribed", "request_id": "u", "prefixes": ["orders."]}
    await live.append("orders.c", 3)
    await live.append("orders.a", 4)
    await live.append("orders.b", 5)
    assert sorted(datas(await until_data(peer, 2))) == [4, 5]
    peer.say(op="unsubscribe", topics=["orders.b"], prefixes=["orders.a"])
    answer = await peer.until("unsubscribed")
    assert answer == {"op": "unsubscribed", "topics": ["orders.b"], "prefixes": ["orders.a"]}
    assert not live.creations._prefixes
    for name in ("orders.a", "orders.b", "orders.a2"):
        await live.append(name, 6)
    assert await until_pong(peer) == []
    # The command is accepted as a whole or refused as a whole.
    await peer.ask(op="subscribe", topic="orders.b", tail=True)
    for wrong in ({"topic": "orders.b", "prefixes": ["x"]}, {"topics": ["no"], "prefixes": []}):
        peer.say(op="unsubscribe", **wrong)
        assert (await peer.until("error"))["code"] == "invalid_request"
    await live.append("orders.b", 7)
    assert datas(await until_data(peer, 1)) == [7]


async def test_topics_beyond_the_limit_are_left_out(live: Sockets) -> None:
    await live.append("x", 0)
    for number in range(5):
        await live.append(f"orders.{number}", number)
    peer = await live.peer()
    peer.say(op="subscribe", topics={"x": {"tail": True}}, prefixes=ORDERS)
    answer = await peer.until("subscribed")
    assert list(answer["topics"]) == ["x", "orders.0", "orders.1", "orders.2"]
    assert answer["left_out"] == ["orders.3", "orders.4"]
    await until_data(peer, 3)
    await live.append("orders.5", 5)
    error = await peer.until("error")
    assert (error["code"], "request_id" in error) == ("throttled", False)
    assert error["detail"] == {"limit": "max_watch_topics", "topics": ["orders.5"]}
    # A further name would now exceed the limit.
    assert (await peer.ask(op="subscribe", topic="orders.3"))["code"] == "invalid_request"
    await live.drop("orders.1")
    frames = await until_data(peer, 1)
    assert (made(frames), datas(frames)) == ([("orders.3", 1)], [3])
    peer.say(op="unsubscribe", topic="x")
    frames = await until_data(peer, 1)
    assert (made(frames), datas(frames)) == ([("orders.4", 1)], [4])


async def test_a_topic_that_comes_again_without_a_place_is_told_as_left_out(live: Sockets) -> None:
    for number in range(1, MOST + 1):
        await live.append(f"orders.{number}", number)
    peer = await live.peer()
    await peer.ask(op="subscribe", prefixes=ORDERS)
    await until_data(peer, MOST)
    await live.append("orders.0", 0)
    assert (await peer.until("error"))["detail"]["topics"] == ["orders.0"]
    # The client gets all these events at once. The first topic in name order takes the place of the
    # last.
    peer.room.clear()
    await live.append("orders.1", 1)
    last = f"orders.{MOST}"
    await live.drop(last)
    await live.append(last, MOST)
    await settle()
    peer.room.set()
    frames = await until_pong(peer)
    told = [frame["detail"]["topics"] for frame in frames if frame["op"] == "error"]
    assert (made(frames), told) == ([("orders.0", 1)], [[last]])


async def test_a_client_that_does_not_read_is_told_of_few_topics(live: Sockets) -> None:
    peer = await live.peer()
    for number in range(MOST):
        await live.append(f"orders.{number}", number)
    await peer.ask(op="subscribe", prefixes=ORDERS)
    for number in range(40):
        await live.append(f"orders.more{number}", number)
    frames = await until_pong(peer)
    assert len([frame for frame in frames if frame["op"] == "error"]) == 16


async def test_a_topic_made_while_a_start_is_looked_up_is_read_whole(
    live: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live.append("orders.a", 1, 2)
    await live.append("orders.b", 3, 4)
    store = live.node.state.store
    assert store is not None
    cursor_of, is_first = store.cursor_of, True

    async def slow(name: str, asked: Any) -> int:
        nonlocal is_first
        if is_first:
            is_first = False
            await live.append("orders.c", 5, 6)
            await live.drop("orders.b")
        return await cursor_of(name, asked)

    monkeypatch.setattr(live.node.state, "store", _Slow(store, slow))
    peer = await live.peer()
    answer = await peer.ask(op="subscribe", prefixes={"orders.": {"last": 1}})
    assert {name: each["from_seq"] for name, each in answer["topics"].items()} == {
        "orders.a": 1,
        "orders.c": 0,
    }
    frames = await until_data(peer, 3)
    assert (datas(frames, "orders.a"), datas(frames, "orders.c")) == ([2], [5, 6])
    assert made(frames) == []


class _Slow:
    """A store in which something happens while a start is looked up."""

    def __init__(self, store: Any, cursor_of: Any) -> None:
        self._store = store
        self.cursor_of = cursor_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_a_refused_command_follows_nothing(live: Sockets) -> None:
    await live.append("orders.a", 1)
    peer = await live.peer()
    refused = await peer.ask(op="subscribe", topic="absent", prefixes=ORDERS)
    assert refused["code"] == "topic_not_found"
    assert not live.creations._prefixes
    await live.append("orders.b", 1)
    assert await until_pong(peer) == []
    assert (await peer.ask(op="subscribe", prefixes={"orders.b": {}}))["op"] == "subscribed"
    again = await peer.ask(op="subscribe", prefixes={"orders.b": {}, "x": {}})
    while again["op"] != "error":
        again = await peer.frame()
    assert (again["code"], again["detail"]) == ("invalid_request", {"field": "prefixes.orders.b"})
    peer.say(op="subscribe", prefixes={f"p{number}": {} for number in range(15)})
    assert (await peer.until("subscribed"))["topics"] == {}
    refused = await peer.ask(op="subscribe", prefixes={"q": {}})
    assert (refused["code"], refused["detail"]) == ("invalid_request", {"field": "prefixes"})


async def test_a_subscribe_waits_for_publishes_to_topics_of_its_prefix(live: Sockets) -> None:
    peer = await live.peer()
    peer.publish("orders.a", 1, request_id="p")
    peer.say(op="subscribe", request_id="s", prefixes=ORDERS)
    ack, answer = await peer.frames(2)
    assert (ack["op"], ack["request_id"]) == ("ack", "p")
    assert answer["topics"] == {"orders.a": {"from_seq": 0, "head_seq": 1, "earliest_seq": 1}}
    assert datas(await until_data(peer, 1)) == [1]


async def test_nobody_listens_for_topics_after_the_socket(live: Sockets) -> None:
    peer = await live.peer()
    await peer.ask(op="subscribe", prefixes=ORDERS)
    peer.leave()
    await peer.left()
    assert not live.creations._prefixes
    await live.append("orders.a", 1)
    await settle()
