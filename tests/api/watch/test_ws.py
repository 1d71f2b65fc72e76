"""`/v0/ws` over a real node on a disk in memory: every command, every refusal, and the order."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import httpx
import pytest

from tests.api.queues.jobs import until
from tests.api.watch.streams import Pipe
from tests.storage.fake_disk import FakeDisk
from tests.unit.test_node import append, started
from topics_server.api.application import Application, build_app
from topics_server.api.websocket import handlers as websocket_handlers
from topics_server.api.websocket.commands import Command, CommandLimits, decode_command
from topics_server.api.websocket.handlers import serve
from topics_server.engine.answers import Appended
from topics_server.engine.pressure.throttle import Throttle
from topics_server.engine.topic.writes.condition import ConditionCheck
from topics_server.http.sockets import EXTENSION
from topics_server.node.node import Node
from topics_server.values.appends import DecodedAppend
from topics_server.values.errors import Code, DiskFull, TopicsError
from topics_server.values.model import Durability, ProducerStamp, TopicConfig

pytestmark = pytest.mark.anyio

WITHIN_S = 10.0
Frame = dict[str, Any]
Message = MutableMapping[str, Any]


class Peer:
    """A client on the other side of ASGI: the messages that it sends are queued, those that it gets
    are kept.

    `is_full`: its socket accepts nothing until `read` is called.
    """

    def __init__(self, app: Application, *headers: tuple[bytes, bytes], path: str = "/v0/ws"):
        self.transport = Pipe()
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.incoming.put_nowait({"type": "websocket.connect"})
        self.sent: list[Message] = []
        self.room = asyncio.Event()
        self.room.set()
        self._arrived = asyncio.Event()
        self._taken = 0
        scope = {
            "type": "websocket",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"topics:4000"), *headers],
            "extensions": {"websocket.http.response": {}, EXTENSION: self.transport},
        }
        self.serving = asyncio.create_task(app(scope, self.incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        await self.room.wait()
        self.sent.append(message)
        self._arrived.set()
        if message["type"] == "websocket.close":
            self.incoming.put_nowait({"type": "websocket.disconnect", "code": message["code"]})

    async def message(self) -> Message:
        """The next message that was sent."""
        while self._taken == len(self.sent):
            self._arrived.clear()
            async with asyncio.timeout(WITHIN_S):
                await self._arrived.wait()
        self._taken += 1
        return self.sent[self._taken - 1]

    async def text(self) -> str:
        """The text of the next frame."""
        message = await self.message()
        assert message["type"] == "websocket.send", message
        return str(message["text"])

    async def frame(self) -> Frame:
        """The next frame."""
        decoded = json.loads(await self.text())
        assert isinstance(decoded, dict)
        return decoded

    async def frames(self, count: int) -> list[Frame]:
        return [await self.frame() for _ in range(count)]

    async def until(self, op: str) -> Frame:
        """The next frame of this kind; others are skipped."""
        while (frame := await self.frame())["op"] != op:
            pass
        return frame

    def say_text(self, text: str) -> None:
        self.incoming.put_nowait({"type": "websocket.receive", "text": text})

    def say(self, **command: Any) -> None:
        self.say_text(json.dumps(command))

    def publish(self, topic: str, *datas: object, **more: Any) -> None:
        self.say(op="publish", topic=topic, records=[{"data": data} for data in datas], **more)

    async def ask(self, **command: Any) -> Frame:
        """Send a command and return the next frame."""
        self.say(**command)
        return await self.frame()

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "websocket.disconnect", "code": 1001})

    async def left(self) -> None:
        """The connection's task has ended."""
        async with asyncio.timeout(WITHIN_S):
            await self.serving


class HeldStore:
    """The node's store; appends to some topics wait before they begin.

    `begun` are the topics of requested appends, in order; `trouble` is raised once. `placed`:
    topics whose appends get their seqs before they wait.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.gates: dict[str, asyncio.Event] = {}
        self.begun: list[str] = []
        self.placed: set[str] = set()
        self.bodies: list[bytes] = []
        self.trouble: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def hold(self, topic: str) -> asyncio.Event:
        return self.gates.setdefault(topic, asyncio.Event())

    async def append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        config: TopicConfig | None,
        producer: ProducerStamp | None = None,
        submitted: Callable[[], None] | None = None,
        check: ConditionCheck | None = None,
    ) -> Appended:
        self.begun.append(name)
        self.bodies.append(body)
        if name in self.placed and submitted is not None:
            submitted()
        if (gate := self.gates.get(name)) is not None:
            await gate.wait()
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble
        done: Appended = await self.store.append(
            name,
            body,
            decoded,
            header_key=header_key,
            config=config,
            submitted=submitted,
            check=check,
        )
        return done


@dataclasses.dataclass
class Live:
    """A node, the application over it, and the connected clients."""

    node: Node
    app: Application
    store: HeldStore
    peers: list[Peer] = dataclasses.field(default_factory=list)

    def connect(self, *headers: tuple[bytes, bytes], path: str = "/v0/ws") -> Peer:
        peer = Peer(self.app, *headers, path=path)
        self.peers.append(peer)
        return peer

    async def peer(self) -> Peer:
        """A client whose socket is open."""
        peer = self.connect()
        assert (await peer.message())["type"] == "websocket.accept"
        return peer

    async def append(self, topic: str, *datas: object, **config: Any) -> int:
        return await append(self.node, topic, *datas, config=TopicConfig(**config))

    @property
    def fanout(self) -> Any:
        return self.node.state.fanout


@pytest.fixture
def limits() -> dict[str, Any]:
    return {}


@pytest.fixture
async def live(limits: dict[str, Any]) -> AsyncIterator[Live]:
    node = await started(FakeDisk(1), max_ws_commands=8, max_watch_topics=4, **limits)
    store = HeldStore(node.store)
    node.state.store = store
    live = Live(node, build_app(node.state), store)
    yield live
    for gate in store.gates.values():
        gate.set()
    for peer in live.peers:
        peer.room.set()
        peer.leave()
    await asyncio.wait_for(asyncio.gather(*(peer.serving for peer in live.peers)), WITHIN_S)
    # No connection leaves tasks or subscriptions behind, however it ended.
    assert node.state.connections == 0
    assert live.fanout.stream_count == 0
    assert node.notifier.listener_count == 0
    assert [task for task in asyncio.all_tasks() if "Connection" in repr(task)] == []
    node.state.store = node.store
    await node.close()


async def settle(turns: int = 50) -> None:
    """Run all callbacks that are ready."""
    for _ in range(turns):
        await asyncio.sleep(0)


# --- opening ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin",
    [b"http://topics:4000", b"https://TOPICS:4000", b"https://app.example"],
)
@pytest.mark.parametrize("limits", [{"cors_origins": "https://app.example"}])
async def test_pages_of_this_or_a_listed_origin_may_open_a_socket(
    live: Live, origin: bytes
) -> None:
    peer = live.connect((b"origin", origin))
    assert (await peer.message())["type"] == "websocket.accept"


@pytest.mark.parametrize(
    "origin",
    [
        *(b"null", b"", b"https://evil.example", b"http://topics", b"http://topics:4001"),
        *(b"http://topics:4000.evil.example", b"ftp://topics:4000", b"topics:4000", b"http://"),
        *(b"http://app.example", b"https://app.example:8443", b"https://app.example/"),
    ],
)
@pytest.mark.parametrize("limits", [{"cors_origins": "https://app.example"}])
async def test_pages_of_other_origins_are_refused_before_the_upgrade(
    live: Live, origin: bytes
) -> None:
    peer = live.connect((b"origin", origin))
    assert await refusal_of(peer) == (403, "forbidden")


async def refusal_of(peer: Peer) -> tuple[int, str]:
    start, body = await peer.message(), await peer.message()
    assert start["type"] == "websocket.http.response.start"
    assert body["type"] == "websocket.http.response.body"
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    await peer.left()
    return start["status"], json.loads(body["body"])["error"]["code"]


@pytest.mark.parametrize(
    ("phase", "code"), [("replaying", "not_ready"), ("draining", "shutting_down")]
)
async def test_a_server_that_is_not_ready_says_so_before_the_upgrade(
    live: Live, phase: Any, code: str
) -> None:
    live.node.state.phase = phase
    assert await refusal_of(live.connect()) == (503, code)


@pytest.mark.parametrize("limits", [{"max_sse_connections": 2}])
async def test_sockets_count_against_the_cap_of_streams(live: Live) -> None:
    first, _second = await live.peer(), await live.peer()
    third = live.connect()
    assert await refusal_of(third) == (429, "throttled")
    first.leave()
    await first.left()
    await live.peer()


async def test_a_client_that_leaves_before_the_upgrade_leaves_nothing(live: Live) -> None:
    async def receive() -> Message:
        return {"type": "websocket.disconnect", "code": 1006}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    await serve(live.node.state, {"headers": []}, receive, send)
    assert live.node.state.connections == 0


async def test_another_path_has_no_socket(live: Live) -> None:
    assert await refusal_of(live.connect(path="/v0/wss")) == (404, "not_found")


# --- subscribe, unsubscribe ---------------------------------------------------------------


async def test_a_subscription_begins_with_its_answer_then_records_then_caught_up(
    live: Live,
) -> None:
    await live.append("jobs", 1, 2, 3)
    peer = await live.peer()
    peer.say(op="subscribe", request_id="s1", topic="jobs", from_seq=1)
    answer, record, caught_up = await peer.frames(3)
    start = {"from_seq": 1, "head_seq": 3, "earliest_seq": 1}
    assert answer == {"op": "subscribed", "request_id": "s1", "topics": {"jobs": start}}
    assert list(record) == ["op", "topic", "from_seq", "to_seq", "head_seq", "records"]
    assert (record["from_seq"], record["to_seq"], record["head_seq"]) == (1, 3, 3)
    assert [told["$seq"] for told in record["records"]] == [2, 3]
    assert caught_up == {"op": "caught_up", "topic": "jobs", "head_seq": 3}
    await live.append("jobs", 4)
    record = await peer.frame()
    assert [told["data"] for told in record["records"]] == [4]
    assert (record["from_seq"], record["to_seq"]) == (3, 4)


async def test_tail_starts_at_the_head(live: Live) -> None:
    await live.append("jobs", 1, 2)
    peer = await live.peer()
    answer = await peer.ask(op="subscribe", topic="jobs", tail=True, from_seq=1)
    assert answer["topics"]["jobs"] == {"from_seq": 2, "head_seq": 2, "earliest_seq": 1}
    assert (await peer.frame())["op"] == "caught_up"
    await live.append("jobs", 3)
    assert [told["data"] for told in (await peer.frame())["records"]] == [3]


async def test_topics_of_a_map_start_each_where_it_says(live: Live) -> None:
    await live.append("a", 1, 2)
    await live.append("b", 1, 2)
    peer = await live.peer()
    answer = await peer.ask(op="subscribe", topics={"a": {"from_seq": 1}, "b": {"tail": True}})
    assert [told["from_seq"] for told in answer["topics"].values()] == [1, 2]
    told = await peer.frames(3)
    assert [(frame["op"], frame["topic"]) for frame in told if frame["topic"] == "a"] == [
        ("record", "a"),
        ("caught_up", "a"),
    ]
    assert [frame["op"] for frame in told if frame["topic"] == "b"] == ["caught_up"]


async def test_the_answer_has_the_requested_fields(live: Live) -> None:
    peer = await live.peer()
    record = {"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": 1}}
    await peer.ask(op="publish", topic="jobs", records=[record, {"data": 2, "node": "me"}])
    await peer.ask(
        op="subscribe",
        topic="jobs",
        node="me",
        include_tags=True,
        include_meta=False,
        include_data=False,
    )
    (told,) = (await peer.frame())["records"]
    assert list(told) == ["$seq", "$ts", "$node", "$tag"]


async def test_an_unknown_topic_subscribes_to_nothing_of_the_command(live: Live) -> None:
    await live.append("jobs", 1)
    peer = await live.peer()
    answer = await peer.ask(op="subscribe", request_id="s", topics={"jobs": {}, "none": {}})
    assert answer["code"] == "topic_not_found"
    assert (answer["request_id"], answer["detail"]) == ("s", {"topic": "none"})
    await live.append("jobs", 2)
    assert await peer.ask(op="ping") == {"op": "pong"}
    assert (await peer.ask(op="unsubscribe", topic="jobs"))["code"] == "invalid_request"


async def test_subscribing_again_replaces(live: Live) -> None:
    await live.append("jobs", 1, 2, 3)
    peer = await live.peer()
    peer.say(op="subscribe", topic="jobs")
    await peer.until("caught_up")
    peer.say(op="subscribe", topic="jobs", from_seq=2, include_data=False)
    assert (await peer.frame())["op"] == "subscribed"
    record = await peer.frame()
    assert [list(told) for told in record["records"]] == [["$seq", "$ts"]]
    assert (await peer.frame())["op"] == "caught_up"
    await live.append("jobs", 4)
    assert [told["$seq"] for told in (await peer.frame())["records"]] == [4]
    assert (await peer.ask(op="ping"))["op"] == "pong"


async def test_a_socket_follows_at_most_so_many_topics(live: Live) -> None:
    for name in "abcde":
        await live.append(name, 1)
    peer = await live.peer()
    for name in "abcd":
        peer.say(op="subscribe", topic=name)
        await peer.until("caught_up")
    answer = await peer.ask(op="subscribe", topic="e")
    assert (answer["code"], answer["detail"]) == ("invalid_request", {"field": "topics"})
    peer.say(op="subscribe", topic="a")
    await peer.until("caught_up")
    await peer.ask(op="unsubscribe", topic="b")
    assert (await peer.ask(op="subscribe", topic="e"))["op"] == "subscribed"
    await peer.until("caught_up")
    await live.node.store.drop_topic("c", if_empty=False)
    await peer.until("topic_deleted")
    assert (await peer.ask(op="subscribe", topic="b"))["op"] == "subscribed"


async def test_unsubscribing_ends_the_frames_of_a_topic(live: Live) -> None:
    await live.append("a", 1)
    await live.append("b", 1)
    peer = await live.peer()
    peer.say(op="subscribe", topics={"a": {"tail": True}, "b": {"tail": True}})
    await peer.frames(3)
    answer = await peer.ask(op="unsubscribe", request_id="u1", topic="a")
    assert answer == {"op": "unsubscribed", "request_id": "u1", "topic": "a"}
    await live.append("a", 2)
    await live.append("b", 2)
    record = await peer.frame()
    assert (record["op"], record["topic"]) == ("record", "b")
    answer = await peer.ask(op="unsubscribe", topics=["b", "a"])
    assert answer["code"] == "invalid_request"
    assert await peer.ask(op="unsubscribe", topics=["b"]) == {"op": "unsubscribed", "topics": ["b"]}


async def test_a_deleted_topic_is_reported_once_and_followed_no_more(live: Live) -> None:
    await live.append("jobs", 1, 2)
    peer = await live.peer()
    peer.say(op="subscribe", topic="jobs")
    await peer.until("caught_up")
    await live.node.store.drop_topic("jobs", if_empty=False)
    told = {"op": "topic_deleted", "topic": "jobs", "head_seq": 2, "reason": "deleted"}
    assert await peer.frame() == told
    await live.append("jobs", 1)
    answer = await peer.ask(op="unsubscribe", topic="jobs")
    assert answer["code"] == "invalid_request"
    assert (await peer.ask(op="subscribe", topic="jobs"))["op"] == "subscribed"


async def test_losses_are_reported_when_the_reader_reaches_them(live: Live) -> None:
    for number in range(20):
        await live.append("jobs", number, cap_records=4)
    peer = await live.peer()
    answer = await peer.ask(op="subscribe", topic="jobs", from_seq=2)
    earliest = answer["topics"]["jobs"]["earliest_seq"]
    tombstone = await peer.frame()
    assert tombstone == {
        "op": "tombstone",
        "topic": "jobs",
        "reason": "from_seq_too_old",
        "gap_from": 3,
        "gap_to": earliest - 1,
        "earliest_seq": earliest,
        "head_seq": 20,
    }
    assert (await peer.frame())["from_seq"] == earliest - 1


async def test_a_cursor_beyond_the_head_is_of_another_log(live: Live) -> None:
    await live.append("jobs", 1, 2)
    peer = await live.peer()
    await peer.ask(op="subscribe", topic="jobs", from_seq=2**64 - 1)
    tombstone, record = await peer.frames(2)
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("recreated", 1, 0)
    assert [told["$seq"] for told in record["records"]] == [1, 2]


# --- publish ------------------------------------------------------------------------------


async def test_a_publish_is_acknowledged(live: Live) -> None:
    peer = await live.peer()
    peer.publish("jobs", 1, 2, request_id="p1")
    ack = await peer.frame()
    performance = ack.pop("performance")
    assert ack == {
        **{"op": "ack", "request_id": "p1", "topic": "jobs", "first_seq": 1, "last_seq": 2},
        **{"seqs": [1, 2], "head_seq": 2, "count": 2, "created": True},
    }
    names = ["server_total_ms", "wal_append_ms", "fsync_ms", "throttle_wait_ms"]
    assert list(performance) == names
    assert 0 < performance["server_total_ms"] < 10_000
    peer.publish("jobs", 3, return_seqs=False)
    ack = await peer.frame()
    assert list(ack) == [
        *("op", "topic", "first_seq", "last_seq", "head_seq", "count", "performance"),
    ]


async def test_under_pressure_a_publish_waits_for_its_turn_or_is_refused(live: Live) -> None:
    backlog = [10**9]
    live.node.state.throttle = throttle = Throttle(backlog_bytes=lambda: backlog[0])
    throttle.is_active = True
    peer = await live.peer()
    peer.publish("jobs", 1, request_id="late")
    refused = await peer.frame()
    assert (refused["op"], refused["request_id"], refused["code"]) == ("error", "late", "throttled")
    assert 500 <= refused["detail"]["retry_after_ms"] <= 1500
    assert live.node.registry.find("jobs") is None
    peer.publish("jobs", 2, request_id="p")
    await until(lambda: len(throttle.wait_queue) == 1)
    await asyncio.sleep(0.02)
    backlog[0] = 0
    ack = await peer.frame()
    assert (ack["op"], ack["request_id"], ack["first_seq"]) == ("ack", "p", 1)
    assert ack["performance"]["throttle_wait_ms"] >= 15
    throttle.close()


async def test_every_field_of_a_publish_counts(live: Live) -> None:
    peer = await live.peer()
    peer.publish("none", 1, create=False, request_id="p")
    answer = await peer.frame()
    assert (answer["op"], answer["request_id"]) == ("error", "p")
    assert (answer["code"], answer["detail"]) == ("topic_not_found", {"topic": "none"})
    peer.publish("jobs", 1, config={"durable": True}, idempotency_key="k", node="n")
    assert (await peer.frame())["created"] is True
    topic = live.node.registry.find("jobs")
    assert topic is not None
    assert topic.config.durability is Durability.FSYNC
    peer.publish("jobs", "other", idempotency_key="k", disable_backpressure=True)
    answer = await peer.frame()
    assert (answer["deduped"], answer["seqs"]) == (True, [1])
    peer.say(op="subscribe", topic="jobs", node="n")
    await peer.frame()
    assert (await peer.frame())["op"] == "caught_up"


async def test_data_and_meta_come_back_byte_for_byte(live: Live) -> None:
    datas = ["1e400", '{ "a" : 1,\t"a":2 }', '"\\u00e9 é \\ud83d\\ude00"', "[ ]", "-0.0", "2e-0"]
    metas = ['{"k" :  [1, 2]}', '{"k":1,"k":1e999}', "{ }", '{"\\u0041":null}', "{}", '{"é":0}']
    records = ",\n".join(
        f'{{"meta":{meta},"data": {data}}}' for data, meta in zip(datas, metas, strict=True)
    )
    peer = await live.peer()
    peer.say_text(f'{{"op":"publish","records":[ {records} ],"topic":"jobs"}}')
    assert (await peer.frame())["count"] == len(datas)
    assert live.store.bodies == [f'{{"records":[ {records} ]}}'.encode()]
    peer.say(op="subscribe", topic="jobs")
    await peer.frame()
    text = await peer.text()
    for data, meta in zip(datas, metas, strict=True):
        assert f'"data":{data},"meta":{meta}}}' in text


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        (TopicsError(Code.THROTTLED, "no", {"limit": "disk", "retry_after_ms": 5}), "throttled"),
        (DiskFull("no"), "throttled"),
    ],
)
async def test_a_refused_publish_is_an_error_and_the_socket_stays(
    live: Live, trouble: Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    live.store.trouble = trouble
    peer = await live.peer()
    peer.publish("jobs", 1, request_id="p")
    answer = await peer.frame()
    assert (answer["op"], answer["request_id"], answer["code"]) == ("error", "p", code)
    peer.publish("jobs", 1)
    assert (await peer.frame())["op"] == "ack"


async def test_a_defect_while_publishing_is_an_answer_and_blocks_nothing(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    live.store.trouble = ZeroDivisionError("a defect")
    gate = live.store.hold("jobs")
    peer = await live.peer()
    peer.publish("jobs", 1, request_id="p1")
    peer.publish("jobs", 2, request_id="p2")
    await settle()
    gate.set()
    answer, ack = await peer.frames(2)
    assert (answer["code"], answer["request_id"]) == ("internal", "p1")
    assert (ack["op"], ack["request_id"]) == ("ack", "p2")


async def test_limits_of_a_record_hold_here_too(live: Live) -> None:
    peer = await live.peer()
    peer.say(op="publish", topic="jobs", records=[])
    assert (await peer.frame())["code"] == "invalid_request"
    peer.say(op="publish", topic="jobs", records=[{"data": 1, "tag": "t" * 257}])
    assert (await peer.frame())["code"] == "invalid_request"
    peer.publish("jobs", "x" * 1_048_577)
    assert (await peer.frame())["code"] == "record_too_large"
    peer.publish("jobs", *range(10_001))
    assert (await peer.frame())["code"] == "batch_too_large"
    assert live.node.registry.find("jobs") is None


# --- keys ---------------------------------------------------------------------------------

# The message is valid up to `op` and `topic`; the rest is neither a publish nor a subscribe.
_REST = '"records":{},"topics":5,"request_id":"r"'


@pytest.mark.parametrize("limits", [{"api_keys": "reads:read,writes:write,own:read+write:own."}])
@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("reads", '{"op":"publish","topic":"t",%s}', "forbidden"),
        ("reads", '{%s,"op":"publish"}', "forbidden"),
        ("writes", '{"op":"subscribe","topic":"t",%s}', "forbidden"),
        ("own", '{"op":"publish","topic":"t",%s}', "forbidden"),
        ("own", '{"op":"subscribe","topic":"t",%s}', "forbidden"),
        # The server decodes messages that the key allows, and messages whose scope it cannot tell
        # yet.
        ("own", '{"op":"publish","topic":"own.t",%s}', "invalid_request"),
        ("own", '{"op":"publish","topic":"-",%s}', "invalid_request"),
        ("writes", '{"op":"publish","topic":"t",%s}', "invalid_request"),
        ("reads", '{"op":"brew",%s}', "invalid_request"),
        ("reads", "{%s}", "invalid_request"),
    ],
)
async def test_what_a_key_may_do_is_checked_before_a_message_is_decoded(
    live: Live, monkeypatch: pytest.MonkeyPatch, key: str, text: str, told: str
) -> None:
    decoded: list[str] = []

    def counted(text: str, limits: CommandLimits) -> Command:
        decoded.append(text)
        return decode_command(text, limits)

    monkeypatch.setattr(websocket_handlers, "decode_command", counted)
    peer = live.connect((b"authorization", b"Bearer " + key.encode()))
    assert (await peer.message())["type"] == "websocket.accept"
    peer.say_text(text % _REST)
    answer = await peer.frame()
    assert (answer["op"], answer["code"], answer["request_id"]) == ("error", told, "r")
    assert len(decoded) == (told != "forbidden")


# --- order --------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", list(Durability))
async def test_an_ack_comes_before_the_records_it_acknowledges(
    live: Live, durability: Durability
) -> None:
    await live.append("jobs", 0, durability=durability)
    peer = await live.peer()
    peer.say(op="subscribe", topic="jobs", tail=True)
    await peer.until("caught_up")
    for number in range(2, 40):
        peer.publish("jobs", number)
        ack, record = await peer.frames(2)
        assert (ack["op"], ack["last_seq"]) == ("ack", number)
        assert (record["op"], record["to_seq"]) == ("record", number)


async def test_publishes_to_one_topic_keep_their_order(live: Live) -> None:
    """That also holds while other clients create, drop and configure the topic."""
    peer = await live.peer()
    sent = 0
    acks: list[Frame] = []
    for turn in range(20):
        for _ in range(6):
            peer.publish("jobs", sent, request_id=str(sent))
            sent += 1
        await settle(turn % 5)
        if turn % 3 == 0:
            config = TopicConfig(durability=list(Durability)[turn % 4])
            await live.node.store.put_topic("jobs", config, keep_type=True)
        acks += await peer.frames(6)
    assert [ack["request_id"] for ack in acks] == [str(number) for number in range(sent)]
    assert [ack["last_seq"] for ack in acks] == list(range(1, sent + 1))
    peer.say(op="subscribe", topic="jobs", limit=1000)
    await peer.frame()
    told: list[int] = []
    while (frame := await peer.frame())["op"] == "record":
        told += [record["data"] for record in frame["records"]]
    assert told == list(range(sent))


async def test_an_ack_comes_before_its_records_whatever_others_write(live: Live) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    await live.append("jobs", 0)
    peers = [await live.peer() for _ in range(6)]
    for peer in peers:
        peer.say(op="subscribe", topic="jobs", tail=True)
        await peer.until("caught_up")
    for number in range(300):
        chance.choice(peers).publish("jobs", number)
        await settle(chance.randrange(4))
    for peer in peers:
        peer.say(op="unsubscribe", topic="jobs")
        seen: set[int] = set()
        while (frame := await peer.frame())["op"] != "unsubscribed":
            if frame["op"] == "record":
                seen.update(record["$seq"] for record in frame["records"])
            elif frame["op"] != "caught_up":  # a reader that fell behind catches up again
                assert frame["last_seq"] not in seen, frame


async def test_publishes_to_a_topic_wait_for_the_place_of_the_one_before(live: Live) -> None:
    held, placed = live.store.hold("held"), live.store.hold("placed")
    live.store.placed.add("placed")
    peer = await live.peer()
    for number in range(3):
        peer.publish("held", number, request_id=f"h{number}")
        peer.publish("placed", number, request_id=f"p{number}")
    await settle()
    assert live.store.begun == ["held", "placed", "placed", "placed"]
    placed.set()
    await settle()
    held.set()
    frames = await peer.frames(6)
    assert [frame["request_id"] for frame in frames] == ["h0", "p0", "h1", "p1", "h2", "p2"]
    assert [frame["last_seq"] for frame in frames] == [1, 1, 2, 2, 3, 3]


async def test_an_answer_to_an_earlier_publish_lets_no_later_one_pass(live: Live) -> None:
    first, second = live.store.hold("jobs"), asyncio.Event()
    live.store.placed.add("jobs")
    peer = await live.peer()
    peer.publish("jobs", 1)
    await settle()
    live.store.gates["jobs"] = second
    live.store.placed.clear()
    peer.publish("jobs", 2)
    peer.publish("jobs", 3)
    await settle()
    first.set()
    assert (await peer.frame())["last_seq"] == 1
    await settle()
    assert len(live.store.begun) == 2, "the second has no place yet, so the third waits"
    second.set()
    assert [frame["last_seq"] for frame in await peer.frames(2)] == [2, 3]


async def test_acks_come_in_the_order_of_their_commands(live: Live) -> None:
    gate = live.store.hold("slow")
    peer = await live.peer()
    peer.publish("slow", 1, request_id="p1")
    peer.publish("fast", 1, request_id="p2")
    peer.say(op="publish", topic="bad name", records=[], request_id="p3")
    peer.publish("fast", 2, request_id="p4")
    await settle()
    assert live.store.begun == ["slow", "fast", "fast"]
    assert len(peer.sent) == 1, "nothing but the opening was sent"
    assert live.node.registry.find("fast") is not None
    gate.set()
    assert [frame["request_id"] for frame in await peer.frames(4)] == ["p1", "p2", "p3", "p4"]


async def test_other_commands_do_not_wait_for_publishes(live: Live) -> None:
    await live.append("other", 1)
    gate = live.store.hold("slow")
    peer = await live.peer()
    peer.publish("slow", 1, request_id="p1")
    assert await peer.ask(op="ping", request_id="r") == {"op": "pong", "request_id": "r"}
    assert (await peer.ask(op="subscribe", topic="other"))["op"] == "subscribed"
    await peer.until("caught_up")
    assert (await peer.ask(op="unsubscribe", topic="other"))["op"] == "unsubscribed"
    assert (await peer.ask(op="nonsense"))["op"] == "error"
    gate.set()
    assert (await peer.frame())["request_id"] == "p1"


async def test_a_subscribe_waits_for_the_publishes_to_its_topics_before_it(live: Live) -> None:
    gate = live.store.hold("jobs")
    peer = await live.peer()
    peer.publish("jobs", 1, request_id="p1")
    peer.publish("jobs", 2, request_id="p2")
    peer.say(op="subscribe", topics={"jobs": {"tail": True}}, request_id="s")
    await settle()
    gate.set()
    frames = await peer.frames(4)
    assert [frame["op"] for frame in frames] == ["ack", "ack", "subscribed", "caught_up"]
    assert frames[2]["topics"]["jobs"]["from_seq"] == 2


async def test_nothing_is_read_while_as_many_publishes_wait_as_may(live: Live) -> None:
    gate = live.store.hold("slow")
    peer = await live.peer()
    for number in range(20):
        peer.publish("slow", number, request_id=str(number))
    await settle()
    # Eight publishes wait for an answer; the server did not even receive the others.
    assert peer.incoming.qsize() == 12
    gate.set()
    frames = await peer.frames(20)
    assert [frame["request_id"] for frame in frames] == [str(number) for number in range(20)]
    assert [frame["last_seq"] for frame in frames] == list(range(1, 21))


async def test_large_publishes_are_read_one_after_the_other(live: Live) -> None:
    """However many publishes may wait, the bytes of one socket are bounded."""
    gate = live.store.hold("slow")
    peer = await live.peer()
    text = "x" * 600_000
    for number in range(6):
        peer.publish("slow", text, request_id=str(number))
    await settle()
    assert peer.incoming.qsize() == 4
    gate.set()
    frames = await peer.frames(6)
    assert [frame["request_id"] for frame in frames] == [str(number) for number in range(6)]


async def test_long_commands_leave_turns_to_others(live: Live) -> None:
    """Each command takes time, so the server does not handle many received ones in one turn."""
    peer = await live.peer()
    other = await live.peer()
    for _ in range(10):
        peer.say(op="unsubscribe", topic="t", more="x" * 70_000)
    other.say(op="ping", request_id="o")
    assert (await other.frame())["request_id"] == "o"
    assert peer.incoming.qsize() >= 7


async def test_nothing_is_read_while_the_socket_is_full(live: Live) -> None:
    peer = await live.peer()
    peer.room.clear()
    for number in range(20):
        peer.say(op="ping", request_id=str(number))
    await settle()
    assert peer.incoming.qsize() == 19
    peer.room.set()
    assert [frame["request_id"] for frame in await peer.frames(20)] == list(map(str, range(20)))


async def test_a_flood_of_commands_leaves_turns_to_others(live: Live) -> None:
    peer = await live.peer()
    other = await live.peer()
    for _ in range(5_000):
        peer.say(op="ping")
    answer = await other.ask(op="ping", request_id="o")
    assert answer["request_id"] == "o"
    assert peer.incoming.qsize() > 4_000


# --- messages that are no commands --------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", "hello", "[]", "null", '{"op":"brew"}', "{}", '{"op":5}', '{"op":"publish"}'),
        '{"op":"ping","x":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"op":"subscribe","topic":"a b"}',
        '{"op":"subscribe","topic":5}',
    ],
)
async def test_a_message_that_is_no_command_is_an_error_and_the_socket_stays(
    live: Live, text: str
) -> None:
    peer = await live.peer()
    peer.say_text(text)
    answer = await peer.frame()
    assert (answer["op"], answer["code"]) == ("error", "invalid_request")
    assert "request_id" not in answer
    assert await peer.ask(op="ping", request_id="r") == {"op": "pong", "request_id": "r"}


async def test_a_binary_message_is_an_error_and_the_socket_stays(live: Live) -> None:
    peer = await live.peer()
    peer.incoming.put_nowait({"type": "websocket.receive", "bytes": b'{"op":"ping"}'})
    answer = await peer.frame()
    assert (answer["op"], answer["code"]) == ("error", "invalid_request")
    assert "binary" in answer["message"]
    assert (await peer.ask(op="ping"))["op"] == "pong"


async def test_an_error_repeats_the_request_id_whenever_that_can_be_read(live: Live) -> None:
    peer = await live.peer()
    assert (await peer.ask(op="brew", request_id="r1"))["request_id"] == "r1"
    assert (await peer.ask(request_id="r2"))["request_id"] == "r2"
    assert (await peer.ask(op="subscribe", topic=5, request_id="r3"))["request_id"] == "r3"
    answer = await peer.ask(op="publish", topic="a", records=[5], request_id="r4")
    assert (answer["request_id"], answer["detail"]) == ("r4", {"field": "records[0]"})
    assert "request_id" not in await peer.ask(op="ping", request_id=5)


async def test_two_thousand_messages_of_garbage_leave_the_socket_usable(live: Live) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    await live.append("a", 1)
    sound = [
        '{"op":"subscribe","topic":"a","from_seq":0,"node":["x"]}',
        '{"op":"subscribe","topics":{"a":{"tail":true},"b":{}}}',
        '{"op":"unsubscribe","request_id":"u","topics":["a"]}',
        '{"op":"publish","request_id":"p","topic":"b","records":[{"data":[1,{"z":2}]}]}',
        '{"op":"ping","request_id":"g"}',
    ]
    letters = '{}[]":,\\0123456789.eE-+ntf \n\x00é\U0001f600ud8abpx'
    peer = await live.peer()
    for _ in range(2_000):
        text = list(chance.choice(sound))
        for _ in range(chance.randrange(4)):
            place = chance.randrange(len(text))
            letters_in = chance.choices(letters, k=chance.randrange(3))
            text[place : place + chance.randrange(3)] = letters_in
        if chance.random() < 0.02:
            peer.incoming.put_nowait({"type": "websocket.receive", "bytes": "".join(text).encode()})
        else:
            peer.say_text("".join(text))
    peer.say(op="ping", request_id="the last")
    ops = {"ack", "error", "pong", "subscribed", "unsubscribed", "record", "caught_up", "tombstone"}
    seen: set[str] = set()
    while (frame := await peer.frame()).get("request_id") != "the last" or frame["op"] != "pong":
        seen.add(frame["op"])
    assert seen <= ops
    assert {"ack", "error", "pong", "subscribed", "record", "caught_up"} <= seen


# --- the end ------------------------------------------------------------------------------


async def test_a_client_that_leaves_changes_nothing_for_its_publishes(live: Live) -> None:
    gate = live.store.hold("jobs")
    peer = await live.peer()
    for number in range(3):
        peer.publish("jobs", number)
    await settle()
    peer.leave()
    await settle()
    assert live.fanout.stream_count == 0
    gate.set()
    await peer.left()
    topic = live.node.registry.find("jobs")
    assert topic is not None
    assert topic.log.head_seq == 3
    assert [message["type"] for message in peer.sent] == ["websocket.accept"]


async def test_a_server_that_drains_closes_with_1001(live: Live) -> None:
    await live.append("jobs", 1)
    peer = await live.peer()
    peer.say(op="subscribe", topic="jobs")
    await peer.until("caught_up")
    live.node.begin_drain()
    assert await peer.message() == {"type": "websocket.close", "code": 1001}
    await peer.left()
    assert live.node.notifier.listener_count == 0


async def test_a_draining_server_answers_publishes_in_flight_first(live: Live) -> None:
    gate = live.store.hold("jobs")
    peer = await live.peer()
    peer.publish("jobs", 1, request_id="p1")
    peer.publish("jobs", 2, request_id="p2")
    await settle()
    live.node.begin_drain()
    peer.publish("jobs", 3, request_id="p3")
    await settle()
    assert len(peer.sent) == 1, "nothing but the opening was sent"
    gate.set()
    frames = await peer.frames(3)
    assert [frame["op"] for frame in frames] == ["ack", "ack", "error"]
    assert [frame["request_id"] for frame in frames] == ["p1", "p2", "p3"]
    assert await peer.message() == {"type": "websocket.close", "code": 1001}
    await peer.left()


async def test_commands_are_refused_while_the_server_drains(live: Live) -> None:
    peer = await live.peer()
    gate = live.store.hold("slow")
    peer.publish("slow", 1, request_id="p0")
    await settle()
    live.node.state.phase = "draining"
    peer.publish("jobs", 1, request_id="p1")
    await settle()
    gate.set()
    assert [frame["request_id"] for frame in await peer.frames(2)] == ["p0", "p1"]
    peer.publish("jobs", 1, request_id="p")
    answer = await peer.frame()
    assert (answer["code"], answer["request_id"]) == ("shutting_down", "p")
    answer = await peer.ask(op="subscribe", topic="jobs", request_id="s")
    assert (answer["code"], answer["request_id"]) == ("shutting_down", "s")
    assert (await peer.ask(op="ping"))["op"] == "pong"


async def test_a_defect_closes_the_socket_and_leaves_nothing(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    await live.append("jobs", 1)
    peer = await live.peer()
    peer.say(op="subscribe", topic="jobs")
    await peer.until("caught_up")

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(live.fanout.dispatcher, "resolve", broken)
    answer = await peer.ask(op="subscribe", topic="jobs")
    assert (answer["op"], answer["code"]) == ("error", "internal")
    assert await peer.message() == {"type": "websocket.close", "code": 1011}
    with pytest.raises(ZeroDivisionError):
        await peer.left()
    live.peers.remove(peer)


async def test_a_plain_get_gets_upgrade_required(live: Live) -> None:
    transport = httpx.ASGITransport(app=live.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://topics") as http:
        answer = await http.get("/v0/ws")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"
    assert "Upgrade: websocket" in answer.json()["error"]["message"]
