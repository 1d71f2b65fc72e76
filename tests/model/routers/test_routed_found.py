"""Protections of routers that random runs exercise too seldom, as small tests of their own."""

from __future__ import annotations

import asyncio

import pytest

from tests.model.world import World
from tests.storage.fake_disk import Mode
from topics_server.engine.answers import ReadRequest
from topics_server.node.node import Node
from topics_server.values.appends import decode_append
from topics_server.values.model import Durability, RouterDefinition, TagMatch, TopicConfig
from topics_server.values.router_answers import RouterSpec

_SEEDS = range(12)


class Bench:
    """A sequence of nodes, with the topics `a` and `b`."""

    def __init__(self, seed: int, **changes: object) -> None:
        self.world = World(seed, wal_fsync_interval_ms=600_000, **changes)
        self.world.start()

    @property
    def node(self) -> Node:
        """The running node."""
        assert self.world.node is not None
        return self.world.node

    def put(self, name: str, durability: Durability) -> None:
        """Create or configure a topic."""
        config = TopicConfig(durability=durability)
        self.world.run(self.node.store.put_topic(name, config, keep_type=False))

    def route(self, match: TagMatch | None = None) -> None:
        """Put the router `r` from `a` to `b`."""
        spec = RouterSpec(RouterDefinition("a", "b", filter=match))
        self.world.run(self.node.routers.put("r", spec))

    def append(self, *numbers: int) -> None:
        """Append to `a`, and wait until it is forwarded."""
        records = ",".join(f'{{"data":{number},"tag":"t"}}' for number in numbers)
        self.world.run(self._append(f'{{"records":[{records}]}}'.encode()))
        self.settle()

    async def _append(self, body: bytes) -> None:
        await self.node.store.append("a", body, decode_append(body), header_key=None, config=None)

    def settle(self) -> None:
        """Wait until everything is forwarded."""
        self.world.run(asyncio.sleep(2))
        assert self.node.routers.get("r").lag == 0

    def numbers(self, name: str) -> list[int]:
        """The records of a topic."""
        store, found, from_seq = self.node.store, [], 0
        while True:
            page = self.world.run(store.read(name, ReadRequest(from_seq, 1000, 1 << 20)))
            for piece in page.pieces:
                found += [int(piece.block.data(row)) for row in piece.rows]
            if page.caught_up:
                return found
            from_seq = page.next_from_seq

    def crash(self, mode: Mode) -> None:
        """Die, and start again."""
        self.world.crash(mode)
        self.world.start()


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_changed_router_does_not_start_behind_copies_that_power_takes(seed: int) -> None:
    """Guard: `RouterService._quiesce` has the destination synced before the definition is."""
    bench = Bench(seed, wal_shards=2)
    try:
        bench.put("a", Durability.FSYNC)
        bench.put("b", Durability.DISK)
        bench.put("b2", Durability.DISK)
        bench.world.run(bench.node.store.drop_topic("b", if_empty=False))
        # The router creates the topic on its source's shard, which is not the shard of the
        # definitions.
        bench.route()
        assert bench.node.journal.shard_of(bench.node.store.topic("b").topic_id) == 1
        bench.append(1, 2, 3)
        # Other syncs up to this point do not count.
        bench.put("b", Durability.DISK)
        bench.world.run(bench.node.journal.sync_all())
        bench.world.run(bench.node.store.put_topic("x", TopicConfig(), keep_type=False))
        bench.append(4)
        bench.route(TagMatch("t"))
        bench.crash("power")
        bench.settle()
        assert bench.numbers("b") == [1, 2, 3, 4]
    finally:
        bench.world.abandon()


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_router_whose_source_is_dropped_first_is_not_created(seed: int) -> None:
    """Guard: `RouterTable.exists`."""
    bench = Bench(seed, wal_shards=2)
    try:
        bench.put("a", Durability.FSYNC)
        bench.put("b", Durability.FSYNC)
        node = bench.node
        assert node.journal.shard_of(node.store.topic("a").topic_id) == 1

        async def both() -> None:
            spec = RouterSpec(RouterDefinition("a", "b", filter=TagMatch("t")))
            putting = asyncio.ensure_future(node.routers.put("r", spec))
            await asyncio.sleep(0)
            await node.store.drop_topic("a", if_empty=False)
            await putting

        bench.world.run(both())
        for router in node.router_table:
            assert node.registry.get(router.source_id) is not None
            assert node.registry.get(router.dest_id) is not None
    finally:
        bench.world.abandon()


def test_copies_of_what_was_never_journaled_carry_their_payloads() -> None:
    """Guard: `Pages.may_omit_payloads` asks whether the source is ephemeral."""
    bench = Bench(1, wal_shards=1)
    try:
        bench.put("a", Durability.EPHEMERAL)
        bench.put("b", Durability.DISK)
        bench.route()
        bench.append(1, 2)
        bench.crash("kill")
        assert bench.numbers("b") == [1, 2]
        assert bench.numbers("a") == []
    finally:
        bench.world.abandon()


def test_copies_sealed_under_a_durable_class_stay_and_the_others_come_again() -> None:
    """Guard: `capture._adopt_newer`. Copies into an ephemeral topic may come twice."""
    bench = Bench(1, wal_shards=1)
    try:
        bench.put("a", Durability.DISK)
        bench.put("b", Durability.EPHEMERAL)
        bench.route()
        bench.world.run(bench.node.checkpointer.take())
        bench.append(*range(20))
        bench.settle()
        bench.put("b", Durability.DISK)
        bench.world.run(bench.node.journal.sync_all())
        bench.world.run(bench.node.sealer.seal_tails(0))
        assert bench.numbers("b") == list(range(20))
        bench.crash("kill")
        sealed = bench.numbers("b")
        assert sealed[:16] == list(range(16))
        bench.settle()
        assert set(bench.numbers("b")) == set(range(20))
    finally:
        bench.world.abandon()
