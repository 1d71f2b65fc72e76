"""Watchers at the same position: served together, and one by one as soon as necessary."""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.api.watch.test_broadcast import Watcher, World, settle
from tests.unit.engine.rig import HandClock
from topics_server.api.watch import broadcast as fanout_module
from topics_server.api.watch.broadcast import BroadcastStream
from topics_server.api.watch.sse import SSE
from topics_server.engine.subscribe import dispatcher as dispatcher_module
from topics_server.engine.subscribe.subscription import BroadcastGroup
from topics_server.http.exchange.asgi_exchange import Exchange
from topics_server.http.exchange.flow_control import Flow
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.appends import decode_append
from topics_server.values.errors import TopicsError
from topics_server.values.model import TopicConfig

pytestmark = pytest.mark.anyio


class Pipe(asyncio.Transport):
    """A transport whose buffer has room for this many writes until its client reads."""

    def __init__(self) -> None:
        super().__init__()
        self.flow: Any = Flow(self)
        self.room = 1 << 30
        self.chunks: list[bytes] = []
        self.is_gone = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_gone
        self.chunks.append(bytes(data))
        self.room -= 1
        if self.room == 0:
            self.flow.pause_writing()

    def read(self, room: int = 1 << 30) -> None:
        """The client reads everything; there is room for this many more."""
        is_full, self.room = self.room <= 0, room
        if is_full:
            self.flow.resume_writing()

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Owner:
    """The connection of an exchange over this pipe."""

    default_headers: ClassVar[list[tuple[bytes, bytes]]] = []

    def __init__(self, pipe: Any) -> None:
        self.transport: Any = pipe
        self.flow: Any = pipe.flow
        self.tasks: set[asyncio.Task[None]] = set()

    def on_response_complete(self) -> None: ...

    def error_bytes(self, error: TopicsError | None) -> bytes:
        raise AssertionError("never asked for")


class Wired(Watcher):
    """A watcher on one of our responses, as in the server."""

    def __init__(self, world: World, heartbeat_ms: int = 60_000, *, with_ids: bool = True) -> None:
        self.world = world
        self.pipe = Pipe()
        self.cycle = Exchange(
            Owner(self.pipe),
            {"type": "http", "method": "GET"},
            keep_alive=True,
            waits_for_continue=False,
        )
        self.cycle.response_started = self.cycle.is_chunked = True
        self.stream = world.fanout.open(
            self.cycle.send,
            SSE,
            heartbeat_ms=heartbeat_ms,
            id_of=self.id if with_ids else None,
        )

    @property
    def body(self) -> bytes:
        text, body = b"".join(self.pipe.chunks), b""
        while text:
            size, _, text = text.partition(b"\r\n")
            length = int(size, 16)
            body, text = body + text[:length], text[length + 2 :]
        return body

    def group(self) -> BroadcastGroup | None:
        shared_cursor = self.stream.cursors["t"].shared_cursor
        return shared_cursor if isinstance(shared_cursor, BroadcastGroup) else None

    def lose(self) -> None:
        """The connection is lost, as `http/connection` reports it."""
        self.cycle.disconnected = True
        self.pipe.is_gone = True
        self.pipe.flow.resume_writing()


async def live(world: World, count: int, **more: Any) -> list[Wired]:
    """Return so many watchers of `t` that got a record while they were live."""
    await world.append("t", 0)
    view = world.dispatcher.resolve("t")
    assert view is not None
    watchers = [Wired(world, **more).follow("t", from_seq=view.head_seq) for _ in range(count)]
    await settle()
    await world.append("t", "first")
    await settle()
    return [watcher for watcher in watchers if isinstance(watcher, Wired)]


async def test_watchers_at_one_position_are_served_as_a_group() -> None:
    world = World()
    watchers = await live(world, 3)
    group = watchers[0].group()
    assert group is not None
    assert all(watcher.group() is group for watcher in watchers)
    await world.append("t", "second", "third")
    await settle()
    assert group.seq == 4
    for watcher in watchers:
        assert watcher.seqs() == [2, 3, 4]
        assert [position for _, _, position in watcher.events()][-1] == {"t": 4}
        assert watcher.stream.cursors["t"].seq == 4
        assert watcher.body == watchers[0].body


async def test_only_equals_stand_together() -> None:
    world = World()
    watchers = await live(world, 2)
    bare = Wired(world, with_ids=False).follow("t", from_seq=2)
    other = Wired(world).follow("t", from_seq=2, limit=7)
    strong = Wired(world).follow("t", from_seq=2, strong=True)
    await settle()
    await world.append("t", "second")
    world.rig.journal.sync_everything()
    await settle()
    groups = [w.group() for w in (watchers[0], bare, other) if isinstance(w, Wired)]
    assert None not in groups
    assert len(set(map(id, groups))) == 3
    assert isinstance(strong, Wired)
    assert strong.group() is None
    assert bare.seqs() == other.seqs() == strong.seqs() == [3]
    assert b"id:" not in bare.body


async def test_a_group_has_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "_GROUP_MAX", 2)
    world = World()
    watchers = await live(world, 5)
    groups = {id(watcher.group()): watcher.group() for watcher in watchers}
    assert sorted(len(group.members) for group in groups.values() if group) == [1, 2, 2]


async def test_a_full_watcher_leaves_with_its_delivered_records() -> None:
    world = World()
    full, other = await live(world, 2)
    full.pipe.room = 1
    await world.append("t", "second")
    await settle()
    assert full.group() is None
    assert full.stream.cursors["t"].seq == 3
    await world.append("t", "third")
    await world.append("t", "fourth")
    await settle()
    assert full.stream.cursors["t"].seq == 3, "nothing is read for a full socket"
    assert other.seqs() == [2, 3, 4, 5]
    full.pipe.read()
    await settle()
    assert full.seqs() == [2, 3, 4, 5]
    await world.append("t", "fifth")
    await settle()
    assert full.seqs() == other.seqs() == [2, 3, 4, 5, 6]
    assert full.group() is other.group() is not None


async def test_a_reader_that_leaves_before_its_group_was_sent_a_batch_stays_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher_module, "_GROUP_MAX", 1)
    world = World()
    gone, full, last = await live(world, 3)
    seen: list[int] = []

    def write(data: bytes) -> None:
        """The write to the first one removes the others."""
        last.stream.end()
        full.pipe.flow.pause_writing()
        full.pipe.room = 0
        seen.append(last.stream.cursors["t"].seq)

    monkeypatch.setattr(gone.pipe, "write", write)
    group = gone.group()
    assert group is not None
    ((subscription, member),) = group.members.items()
    group.members[subscription] = member._replace(writer=write)
    group._writers = None
    await world.append("t", "second")
    await settle()
    assert seen == [2]
    assert last.stream.cursors["t"].seq == 2
    assert last.seqs() == [2]
    assert full.seqs() == [2]
    full.pipe.read()
    await settle()
    assert full.seqs() == [2, 3]


async def test_a_disconnected_watcher_is_not_written_to() -> None:
    world = World()
    gone, other = await live(world, 2)
    gone.lose()
    await world.append("t", "second")
    await settle()
    assert gone.group() is None
    assert gone.seqs() == [2]
    assert other.seqs() == [2, 3]
    gone.stream.close()
    other.stream.close()
    assert world.rig.notifier.listener_count == 0
    assert other.pipe.flow.let_go is None


async def test_a_failed_write_does_not_affect_the_others() -> None:
    world = World()
    watchers = await live(world, 3)
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    watchers[1].pipe.is_gone = True
    await world.append("t", "second")
    await settle()
    assert len(told) == 1
    assert watchers[0].seqs() == watchers[2].seqs() == [2, 3]


async def test_a_batch_that_cannot_be_sent_in_one_step_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    watchers = await live(world, 2)
    await world.append("t", *range(300))
    await settle()
    for watcher in watchers:
        assert watcher.seqs() == list(range(2, 303)), "more than a frame has"
        assert watcher.group() is None
    await world.append("t", "next")
    await settle()
    assert watchers[0].group() is watchers[1].group() is not None
    monkeypatch.setattr(dispatcher_module, "_GROUP_BYTES_MAX", 4_000)
    before = watchers[0].group()
    await world.append("t", "x" * 2_000)
    await settle()
    assert watchers[0].seqs() == watchers[1].seqs() == list(range(2, 305))
    assert watchers[0].group() is not before
    await world.rig.store.drop_topic("t", if_empty=False)
    await settle()
    for watcher in watchers:
        assert watcher.names()[-1] == "topic-deleted"
        assert not watcher.stream.follows("t")


async def test_own_records_move_a_group_in_silence() -> None:
    world = World()
    await world.append("t", 0, config=TopicConfig(dedupe_node=True))
    watchers = [Wired(world).follow("t", from_seq=1, nodes=frozenset({"me"})) for _ in range(2)]
    await settle()
    await world.append("t", "first")
    await settle()
    group = watchers[0].stream.cursors["t"].shared_cursor
    assert group is not None
    assert group.seq == 2
    bodies = [watcher.body for watcher in watchers]
    body = b'{"records":[{"data":1,"node":"me"}]}'
    await world.rig.store.append("t", body, decode_append(body), header_key=None, config=None)
    await settle()
    assert group.seq == 3
    assert [watcher.body for watcher in watchers] == bodies
    assert all(watcher.stream.cursors["t"].shared_cursor is group for watcher in watchers)


async def test_a_topic_beside_it_takes_a_stream_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.append("u", 0)
    watchers = await live(world, 2)
    watchers[0].follow("u", from_seq=1)
    assert watchers[0].group() is None
    await settle()
    await world.append("t", "second")
    await world.append("u", "second")
    await settle()
    assert watchers[0].seqs() == watchers[1].seqs() == [2, 3]
    assert watchers[0].seqs("u") == [2]
    assert watchers[0].group() is None
    watchers[0].stream.unfollow("u")
    watchers[1].stream.unfollow("t")
    await world.append("t", "third")
    await settle()
    assert watchers[0].seqs() == [2, 3, 4]
    assert watchers[1].seqs() == [2, 3]


async def test_a_batch_to_a_group_holds_heartbeats_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    (watcher,) = await live(world, 1, heartbeat_ms=1000)
    # A time later than all times of the real clock, however long this machine has been up.
    now = monotonic_ms() + 3_600_000
    monkeypatch.setattr(fanout_module, "monotonic_ms", lambda: now)
    world.rig.clock.steady_ms = now - 100
    await world.append("t", "second")
    await settle()
    assert watcher.group() is not None
    watcher.stream.look(now)
    assert b": hb " not in watcher.body
    watcher.pipe.room = 1
    world.rig.clock.steady_ms = now
    await world.append("t", "third")
    await settle()
    assert watcher.group() is None
    watcher.pipe.read()
    await settle()
    watcher.stream.look(now + 990)
    assert b": hb " not in watcher.body
    watcher.stream.look(now + 1000)
    assert watcher.body.count(b": hb ") == 1


@given(st.integers(0, 2**32))
def test_every_watcher_gets_everything_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)

    async def run() -> None:
        world = World()
        await world.append("t", 0)
        watchers: list[Wired] = []
        ended: list[Wired] = []
        for number in range(30):
            step = chance.choice(("append",) * 4 + ("open",) * 3 + ("stall", "read", "end", "big"))
            if step == "append":
                await world.append("t", *range(chance.randint(1, 3)))
            elif step == "big":
                await world.append("t", *range(chance.choice((5, 300))))
            elif step == "open":
                watcher = Wired(world).follow("t", from_seq=0)
                assert isinstance(watcher, Wired)
                watchers.append(watcher)
            elif watchers:
                watcher = chance.choice(watchers)
                if step == "stall":
                    watcher.pipe.room = min(watcher.pipe.room, chance.randint(1, 3))
                elif step == "read":
                    watcher.pipe.read(chance.choice((2, 1 << 30)))
                elif number > 15:
                    watcher.stream.end()
                    watchers.remove(watcher)
                    ended.append(watcher)
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
        for _ in range(6):
            for watcher in watchers:
                watcher.pipe.read()
            await settle()
        topic = world.rig.registry.find("t")
        assert topic is not None
        head_seq = topic.log.head_seq
        for watcher in (*watchers, *ended):
            seqs = watcher.seqs()
            assert seqs == list(range(1, len(seqs) + 1))
            for _, data, position in watcher.events():
                assert position["t"] == data.get("to_seq", data["head_seq"])
            where = watcher.stream.cursors["t"].seq
            assert where == (len(seqs) if watcher in ended else head_seq)
        assert all(len(watcher.seqs()) == head_seq for watcher in watchers)
        for watcher in watchers:
            watcher.stream.close()
        assert world.rig.notifier.listener_count == 0

    patches = pytest.MonkeyPatch()
    with patches.context() as patch:
        patch.setattr(dispatcher_module, "_GROUP_MAX", chance.choice((1, 2, 32)))
        step_ms = chance.choice((0.0, 1.0))

        def monotonic_ms(clock: HandClock) -> float:
            """Each reading moves the clock, so a pass over the watchers takes several slices."""
            clock.steady_ms += step_ms
            return clock.steady_ms

        patch.setattr(HandClock, "monotonic_ms", monotonic_ms)
        asyncio.run(run())


async def test_a_full_socket_is_not_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    full, other = await live(world, 2)
    full.pipe.room = 1
    for number in range(3):
        await world.append("t", number)
        await settle()
    pumped: list[BroadcastStream] = []
    pump = BroadcastStream.pump

    def noted(stream: BroadcastStream) -> None:
        pumped.append(stream)
        pump(stream)

    monkeypatch.setattr(BroadcastStream, "pump", noted)
    for number in range(5):
        await world.append("t", number)
        await settle()
    assert pumped == []
    assert other.seqs() == list(range(2, 11))
    full.pipe.read()
    await settle()
    assert full.seqs() == other.seqs()
    assert len(pumped) == 1
    await world.append("t", "next")
    await settle()
    assert full.seqs() == other.seqs()


async def test_changes_of_a_topic_reach_a_full_stream_when_it_has_room() -> None:
    world = World()
    gone, left = await live(world, 2)
    for watcher in (gone, left):
        watcher.pipe.room = 1
    await world.append("t", "second")
    await settle()
    await world.append("t", "third")
    await settle()
    left.stream.unfollow("t")
    await world.rig.store.drop_topic("t", if_empty=False)
    await settle()
    for watcher in (gone, left):
        watcher.pipe.read()
    await settle()
    assert gone.names()[-1] == "topic-deleted"
    assert left.seqs() == [2, 3]
    assert world.rig.notifier.listener_count == 0
