"""Streams over a real engine on lists: the frames of watchers that share a position, are suspended,
or are taken over.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.garbage import nothing_for_the_collector
from tests.unit.engine.rig import Rig
from topics_server.api.watch import broadcast as fanout_module
from topics_server.api.watch.broadcast import BroadcastStream, Fanout
from topics_server.api.watch.sse import SSE
from topics_server.engine.subscribe import dispatcher as dispatcher_module
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher
from topics_server.engine.subscribe.subscription import SubscriptionOptions
from topics_server.values.errors import Corrupt, StorageError
from topics_server.values.json_cache import JsonCache
from topics_server.values.model import Discard, Durability, TopicConfig

pytestmark = pytest.mark.anyio


class Watcher:
    """One connection, its `send` with a tap, and the received events."""

    def __init__(self, world: World, heartbeat_ms: int = 60_000) -> None:
        self.world = world
        self.tap = asyncio.Event()
        self.tap.set()
        self.messages: list[dict[str, Any]] = []
        self.stream: BroadcastStream = world.fanout.open(
            self.send, SSE, heartbeat_ms=heartbeat_ms, id_of=self.id
        )

    async def send(self, message: dict[str, Any]) -> None:
        await self.tap.wait()
        self.messages.append(message)

    def id(self) -> bytes:
        return json.dumps({name: c.seq for name, c in self.stream.cursors.items()}).encode()

    def follow(self, *names: str, from_seq: int = 0, **options: Any) -> Watcher:
        for name in names:
            view = self.world.dispatcher.resolve(name)
            # The topic existed once; with epoch 0 the stream would wait for it.
            topic_id, epoch = (view.topic_id, view.epoch) if view else (0, 1)
            self.stream.follow(
                Cursor(name, topic_id, epoch, from_seq), SubscriptionOptions(**options)
            )
        return self

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages)

    @property
    def is_ended(self) -> bool:
        return any(not message["more_body"] for message in self.messages)

    def events(self) -> Iterator[tuple[str, dict[str, Any], dict[str, int]]]:
        """(name, data, id) of everything sent so far."""
        for chunk in self.body.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in chunk.splitlines() if line[:1] != ":")
            if "event" in fields:
                yield (
                    fields["event"],
                    json.loads(fields["data"]),
                    json.loads(fields.get("id", "{}")),
                )

    def seqs(self, topic: str = "t") -> list[int]:
        return [
            record["$seq"]
            for name, data, _ in self.events()
            if name == "record" and data["topic"] == topic
            for record in data["records"]
        ]

    def names(self) -> list[str]:
        return [name for name, _, _ in self.events()]


class World:
    """An engine on lists with its streams."""

    def __init__(self, *, grace_ms: int = 5_000, timeout_ms: int = 30_000) -> None:
        self.rig = Rig()
        self.dispatcher = SubscriptionDispatcher(
            self.rig.registry, self.rig.commits, self.rig.notifier, self.rig.fetcher, self.rig.clock
        )
        self.fanout = Fanout(
            self.dispatcher,
            JsonCache(),
            buffer_grace_ms=grace_ms,
            slow_consumer_timeout_ms=timeout_ms,
        )

    async def append(self, name: str, *datas: object, config: TopicConfig | None = None) -> None:
        await self.rig.append(name, *datas, config=config)


async def settle() -> None:
    """Let the loop come to rest: everything here takes a few turns."""
    for _ in range(30):
        await asyncio.sleep(0)


async def test_a_watcher_is_told_what_is_there_then_that_it_is_caught_up() -> None:
    world = World()
    await world.append("t", "a", "b")
    watcher = Watcher(world).follow("t")
    await settle()
    assert watcher.names() == ["record", "caught-up"]
    (_, data, position), _ = watcher.events()
    assert (data["from_seq"], data["to_seq"], data["head_seq"]) == (0, 2, 2)
    assert position == {"t": 2}
    await world.append("t", "c")
    await settle()
    assert watcher.names() == ["record", "caught-up", "record"], "live stays live"


async def test_appends_of_one_turn_are_one_frame_and_one_send() -> None:
    world = World()
    await world.append("t", 0)
    watcher = Watcher(world).follow("t")
    await settle()
    watcher.messages.clear()
    await asyncio.gather(*(world.append("t", n) for n in range(5)))
    await settle()
    assert len(watcher.messages) == 1
    assert watcher.seqs() == [2, 3, 4, 5, 6]


async def test_the_writer_is_answered_before_the_watchers_are_told() -> None:
    world = World()
    await world.append("t", 0)
    watcher = Watcher(world).follow("t")
    await settle()
    watcher.messages.clear()
    await world.append("t", 1)
    assert watcher.messages == []
    await settle()
    assert watcher.seqs() == [2]


async def test_watchers_at_one_place_share_what_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.append("t", 0)
    watchers = [Watcher(world).follow("t") for _ in range(50)]
    other = Watcher(world).follow("t", nodes=frozenset(("x",)))
    await settle()
    render_count = 0
    render = type(SSE).render

    def counting(self: Any, event: Any, cache: JsonCache) -> bytes:
        nonlocal render_count
        render_count += 1
        return render(self, event, cache)

    monkeypatch.setattr(type(SSE), "render", counting)
    await world.append("t", 1)
    await settle()
    assert render_count == 2, "once for each set of options"
    assert all(watcher.seqs() == [1, 2] for watcher in [*watchers, other])
    assert all(list(w.events())[-1][2] == {"t": 2} for w in watchers)


async def test_the_id_holds_all_positions_after_each_frame() -> None:
    world = World()
    await world.append("a", 1, 2)
    await world.append("b", 1)
    watcher = Watcher(world).follow("a", "b")
    await settle()
    seen = {"a": 0, "b": 0}
    for name, data, position in watcher.events():
        if name == "record":
            seen[data["topic"]] = data["to_seq"]
        assert position == seen


async def test_a_long_backlog_does_not_starve_a_live_topic() -> None:
    world = World()
    for start in range(0, 4_000, 1000):
        await world.append("long", *range(start, start + 1000))
    await world.append("live", 1)
    watcher = Watcher(world).follow("long", limit=10).follow("live", limit=10)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await settle()
    names = [data["topic"] for name, data, _ in watcher.events() if name == "record"]
    assert names.index("live") <= 1
    assert watcher.seqs("long") == list(range(1, 4_001))


async def test_filtered_records_move_the_cursor_in_silence() -> None:
    world = World()
    await world.append("t", 0, config=TopicConfig(dedupe_node=True))
    watcher = Watcher(world).follow("t", nodes=frozenset(("me",)))
    await settle()
    watcher.messages.clear()
    body = b'{"records":[{"data":1,"node":"me"}]}'
    from topics_server.values.appends import decode_append

    await world.rig.store.append("t", body, decode_append(body), header_key=None, config=None)
    await settle()
    assert watcher.messages == []
    assert watcher.stream.cursors["t"].seq == 2


async def test_a_loss_has_another_name_for_who_was_away() -> None:
    world = World()
    config = TopicConfig(cap_records=3, discard=Discard.OLD)
    for n in range(10):
        await world.append("t", n, config=config)
    watcher = Watcher(world).follow("t", from_seq=2)
    await settle()
    name, data, position = next(watcher.events())
    assert (name, data["reason"]) == ("tombstone", "from_seq_too_old")
    assert (data["gap_from"], data["gap_to"], position) == (3, 7, {"t": 7})
    assert watcher.seqs() == [8, 9, 10]


async def test_a_topic_that_goes_is_told_at_once_and_the_others_go_on() -> None:
    world = World()
    await world.append("t", 1)
    await world.append("u", 1)
    watcher = Watcher(world).follow("t", "u")
    await settle()
    watcher.messages.clear()
    await world.rig.store.drop_topic("t", if_empty=False)
    await settle()
    assert [(n, d.get("topic"), d.get("head_seq")) for n, d, _ in watcher.events()] == [
        ("topic-deleted", "t", 1)
    ]
    await world.append("t", "another")
    await world.append("u", 2)
    await settle()
    assert watcher.seqs("t") == []
    assert watcher.seqs("u") == [2]
    assert not watcher.stream.follows("t")


async def test_a_topic_that_never_was_is_told_as_deleted() -> None:
    world = World()
    watcher = Watcher(world).follow("nowhere", from_seq=7)
    await settle()
    assert [(n, d["head_seq"]) for n, d, _ in watcher.events()] == [("topic-deleted", 7)]


async def test_a_topic_recreated_between_streams_is_a_tombstone_then_its_records() -> None:
    world = World()
    await world.append("t", 1)
    view = world.dispatcher.resolve("t")
    assert view is not None
    await world.rig.store.drop_topic("t", if_empty=False)
    for n in range(4):
        await world.append("t", n)
    watcher = Watcher(world)
    watcher.stream.follow(Cursor("t", view.topic_id, view.epoch, 1), SubscriptionOptions())
    await settle()
    (name, data, _), *_ = watcher.events()
    assert (name, data["reason"], data["gap_from"], data["gap_to"]) == (
        "tombstone",
        "recreated",
        1,
        0,
    )
    assert watcher.seqs() == [1, 2, 3, 4]
    assert watcher.stream.cursors["t"].topic_id != view.topic_id


async def test_sealed_records_are_fetched_once_and_told_in_order() -> None:
    world = World()
    for n in range(40):
        await world.append("t", n)
    await world.rig.sealer.seal_tails(0)
    await world.append("t", 40)
    world.rig.segments.reads = 0
    watchers = [Watcher(world).follow("t") for _ in range(20)]
    await settle()
    assert all(watcher.seqs() == list(range(1, 42)) for watcher in watchers)
    assert world.rig.segments.reads <= len(world.rig.segments.kept[1])


@pytest.mark.parametrize("turns", range(8))
async def test_a_record_that_comes_while_sealed_ones_are_read_is_told(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    world = World()
    for n in range(10):
        await world.append("t", n)
    await world.rig.sealer.seal_tails(0)
    whole, is_read, may_end = world.rig.fetcher.complete, asyncio.Event(), asyncio.Event()

    async def complete(*args: Any) -> Any:
        page = await whole(*args)
        is_read.set()
        await may_end.wait()
        return page

    monkeypatch.setattr(world.rig.fetcher, "complete", complete)
    watcher = Watcher(world).follow("t")
    await is_read.wait()
    late = asyncio.ensure_future(world.append("t", "late"))
    for _ in range(turns):
        await asyncio.sleep(0)
    may_end.set()
    await late
    await settle()
    assert watcher.seqs() == list(range(1, 12))
    assert watcher.names().count("caught-up") == 1, "told when the head was reached"


async def test_what_cannot_be_read_ends_the_stream_with_an_error() -> None:
    world = World()
    for n in range(10):
        await world.append("t", n)
    await world.rig.sealer.seal_tails(0)
    world.rig.segments.fault = StorageError("no disk")
    watcher = Watcher(world).follow("t")
    await settle()
    assert list(watcher.events())[-1][1]["code"] == 500
    assert watcher.is_ended
    assert world.rig.notifier.listener_count == 0


async def test_strong_waits_for_the_sync_and_eventual_does_not() -> None:
    world = World()
    world.rig = Rig(is_prompt=False)
    world.dispatcher = SubscriptionDispatcher(
        world.rig.registry,
        world.rig.commits,
        world.rig.notifier,
        world.rig.fetcher,
        world.rig.clock,
    )
    world.fanout.__init__(  # type: ignore[misc]
        world.dispatcher, JsonCache(), buffer_grace_ms=1, slow_consumer_timeout_ms=1000
    )
    config = TopicConfig(durability=Durability.DISK)

    async def written(data: int) -> None:
        asked = asyncio.ensure_future(world.append("t", data, config=config))
        await settle()
        for shard in range(2):
            world.rig.journal.write(shard)
        await asked

    asked = asyncio.ensure_future(world.append("t", 1, config=config))
    await settle()
    world.rig.journal.sync_everything()
    await asked
    strong = Watcher(world).follow("t", strong=True)
    eventual = Watcher(world).follow("t")
    await settle()
    await written(2)
    await settle()
    assert (strong.seqs(), eventual.seqs()) == ([1], [1, 2])
    world.rig.journal.sync_everything()
    await settle()
    assert strong.seqs() == [1, 2]
    strong.stream.close()
    assert world.rig.commits.on_synced == []


# -- slow sockets -----------------------------------------------------------------------------


async def test_a_full_socket_lags_and_then_gets_fewer_and_larger_frames() -> None:
    world = World()
    await world.append("t", 0)
    watcher = Watcher(world).follow("t")
    await settle()
    watcher.messages.clear()
    watcher.tap.clear()
    for n in range(20):
        await world.append("t", n)
        await settle()
    assert watcher.messages == []
    watcher.tap.set()
    await settle()
    assert watcher.seqs() == list(range(2, 22))
    assert len(watcher.messages) == 2


async def test_a_loss_while_the_socket_was_full_too_long_is_too_old() -> None:
    world = World(grace_ms=20)
    config = TopicConfig(cap_records=2, discard=Discard.OLD)
    await world.append("t", 0, config=config)
    watcher = Watcher(world).follow("t")
    await settle()
    watcher.tap.clear()
    for n in range(10):
        await world.append("t", n)
        await settle()
    await asyncio.sleep(0.05)
    watcher.tap.set()
    await settle()
    reasons = [data["reason"] for name, data, _ in watcher.events() if name == "tombstone"]
    assert reasons == ["from_seq_too_old"]


async def test_who_never_reads_is_told_and_closed_and_loses_nothing() -> None:
    world = World(grace_ms=5, timeout_ms=80)
    await world.append("t", 0)
    watcher = Watcher(world).follow("t")
    await settle()
    cursor = watcher.stream.cursors["t"]
    watcher.messages.clear()
    watcher.tap.clear()
    await world.append("t", 1)
    await settle()
    assert cursor.seq == 2, "handed to a send that waits"
    await asyncio.sleep(0.3)
    assert watcher.stream.is_over
    assert cursor.seq == 1, "and taken back, since it never left"
    assert world.fanout.slow_count == 1
    assert world.fanout.stream_count == 0
    assert world.rig.notifier.listener_count == 0


async def test_heartbeats_come_only_when_nothing_else_did() -> None:
    world = World()
    await world.append("t", 0)
    watcher = Watcher(world, heartbeat_ms=400).follow("t")
    for n in range(8):
        await asyncio.sleep(0.02)
        await world.append("t", n)
    assert b": hb" not in watcher.body
    await asyncio.sleep(1.2)
    beats = watcher.body.count(b": hb ")
    assert 1 <= beats <= 4


# -- ends -------------------------------------------------------------------------------------


async def test_a_drain_ends_every_stream_and_leaves_nothing() -> None:
    world = World()
    await world.append("t", 0)
    watchers = [Watcher(world).follow("t") for _ in range(10)]
    await settle()
    world.fanout.drain()
    assert all(watcher.is_ended for watcher in watchers)
    assert world.rig.notifier.listener_count == 0
    assert world.fanout.stream_count == 0
    await world.append("t", 1)
    await settle()
    assert all(watcher.seqs() == [1] for watcher in watchers)


async def test_a_thousand_streams_come_and_go_and_leave_nothing() -> None:
    world = World()
    await world.append("t", 0)
    before = len(asyncio.all_tasks())
    for _ in range(1000):
        Watcher(world).follow("t").stream.close()
    await settle()
    assert world.rig.notifier.listener_count == 0
    assert world.fanout.streams == set()
    assert len(asyncio.all_tasks()) == before


async def test_pumping_is_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout_module, "_PUMP_BYTES", 200)
    world = World()
    for _ in range(30):
        await world.append("t", "x" * 50)
    watcher = Watcher(world).follow("t", limit=1)
    await settle()
    assert watcher.seqs() == list(range(1, 31))
    assert len(watcher.messages) > 5, "a budget's worth a send"


# -- random histories -------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "delete", "cap", "seal", "drop", "stall", "read"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(STEPS, st.integers(0, 1000))
def test_every_seq_is_told_once_or_explained(steps: list[tuple[str, int]], seed: int) -> None:
    """Over any mix of events each seq comes once and in order, or was deleted, or is inside a
    tombstone.
    """

    async def run() -> None:
        world = World()
        chance = random.Random(seed)
        await world.append("t", 0)
        watcher = Watcher(world).follow("t", limit=1 + seed % 4)
        deleted: set[int] = set()
        for step, number in steps:
            if step == "drop":
                continue
            if step == "append":
                await world.append("t", *range(number + 1))
            elif step == "delete":
                topic = world.rig.registry.find("t")
                assert topic is not None
                head = topic.log.head_seq
                deleted |= set(range(1, head // 2 + 1))
                await world.rig.delete("t", before_seq=head // 2 + 1)
            elif step == "cap":
                config = TopicConfig(cap_records=number + 1, discard=Discard.OLD)
                await world.rig.store.put_topic("t", config, keep_type=True)
            elif step == "seal":
                await world.rig.sealer.seal_tails(0)
            elif step == "stall":
                watcher.tap.clear()
            else:
                watcher.tap.set()
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
        watcher.tap.set()
        await asyncio.sleep(0)
        for _ in range(300):
            await asyncio.sleep(0)
        topic = world.rig.registry.find("t")
        assert topic is not None
        expected = 1
        for name, data, position in watcher.events():
            if name == "record":
                for record in data["records"]:
                    while expected < record["$seq"]:
                        assert expected in deleted
                        expected += 1
                    assert record["$seq"] == expected
                    expected += 1
            elif name == "tombstone":
                assert data["gap_from"] <= data["gap_to"] + 1
                while expected < data["gap_from"]:
                    assert expected in deleted
                    expected += 1
                expected = max(expected, data["gap_to"] + 1)
            assert position["t"] >= expected - 1
        assert set(range(expected, topic.log.head_seq + 1)) <= deleted
        assert watcher.stream.cursors["t"].seq == topic.log.head_seq
        watcher.stream.close()
        assert world.rig.notifier.listener_count == 0

    asyncio.run(run())


async def send_nowhere(message: dict[str, Any]) -> None:
    """The `send` of a connection that takes everything."""


class Owner:
    """Opens a stream as a WebSocket does: the two refer to each other."""

    def __init__(self, world: World) -> None:
        self.stream = world.fanout.open(send_nowhere, SSE, heartbeat_ms=60_000, owner=self)

    def before_frames(self) -> None:
        """See `StreamOwner`."""

    def drain(self) -> None:
        """See `StreamOwner`."""


async def test_a_closed_stream_and_its_owner_leave_nothing_for_the_collector() -> None:
    world = World()
    with nothing_for_the_collector():
        owner = Owner(world)
        owner.stream.close()
        del owner
        await settle()


async def test_a_read_that_fails_leaves_nothing_for_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.append("t", *range(10))
    await world.rig.sealer.seal_tails(0)

    calls = []

    async def fail(*_: object) -> None:
        calls.append(1)
        raise StorageError("no disk")

    monkeypatch.setattr(world.rig.fetcher, "complete", fail)
    with nothing_for_the_collector():
        stream = world.fanout.open(send_nowhere, SSE, heartbeat_ms=60_000)
        view = world.dispatcher.resolve("t")
        assert view is not None
        stream.follow(Cursor("t", view.topic_id, view.epoch, 0), SubscriptionOptions())
        await settle()
        stream.close()
        del stream
        await settle()
    assert calls


async def test_a_page_that_cannot_be_planned_ends_the_stream_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.append("t", *range(10))

    def refuse(*_: object) -> NoReturn:
        raise Corrupt("the index of segment 1 is damaged")

    monkeypatch.setattr(dispatcher_module, "plan", refuse)
    sent = bytearray()

    async def send(message: dict[str, Any]) -> None:
        sent.extend(message.get("body", b""))

    stream = world.fanout.open(send, SSE, heartbeat_ms=60_000)
    view = world.dispatcher.resolve("t")
    assert view is not None
    stream.follow(Cursor("t", view.topic_id, view.epoch, 0), SubscriptionOptions())
    await settle()
    assert b"cannot be read" in sent
    stream.close()
