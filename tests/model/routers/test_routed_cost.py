"""The journal bytes of a forwarded page, and when they must be more."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from tests.model.world import World
from topics_server.engine.answers import ReadRequest
from topics_server.node.node import Node
from topics_server.values.appends import decode_append
from topics_server.values.model import RouterDefinition, TopicConfig
from topics_server.values.router_answers import RouterSpec
from topics_server.wal.journal.wal_file import Sizes

RECORDS: Final = 10
SMALL: Final = 1024
LARGE: Final = 100 * 1024
_ROOMY: Final = Sizes(file_bytes=16 << 20, fill_step_bytes=1 << 20, reserve_bytes=1024)


class Bench:
    """One node with a source and its destinations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shards: int = 2) -> None:
        monkeypatch.setattr("tests.model.world.SMALL", _ROOMY)
        self.world = World(1, wal_shards=shards, segment_max_events=100_000)
        self.node: Node = self.world.start()

    def journaled(self) -> int:
        """Bytes of all groups written so far, of every shard."""
        return sum(shard.counters.bytes for shard in self.node.journal.shards)

    def route(self, source: str, dest: str) -> None:
        """Create a router with its missing topics."""
        spec = RouterSpec(RouterDefinition(source, dest))
        self.world.run(self.node.routers.put(dest, spec))

    async def _append(self, size: int) -> None:
        record = b'{"data":"' + b"x" * size + b'"}'
        body = b'{"records":[' + b",".join([record] * RECORDS) + b"]}"
        await self.node.store.append("a", body, decode_append(body), header_key=None, config=None)
        for router in self.node.router_table:
            for _ in range(1000):
                if self.lag(router.name):
                    await asyncio.sleep(0.001)
            assert self.lag(router.name) == 0

    def lag(self, name: str) -> int:
        """The lag of a router."""
        return self.node.routers.get(name).lag

    def cost(self, size: int) -> int:
        """Bytes journaled for an append of records of this size and all its copies."""
        before = self.journaled()
        self.world.run(self._append(size))
        return self.journaled() - before

    def sizes(self, name: str) -> list[int]:
        """Lengths of a topic's records."""
        page = self.world.run(self.node.store.read(name, ReadRequest(0, 1000, 1 << 30)))
        return [len(piece.block.data(row)) for piece in page.pieces for row in piece.rows]


def _forwarding_costs(
    monkeypatch: pytest.MonkeyPatch, chain: list[tuple[str, str]], size: int
) -> int:
    """The journal bytes of forwarding, without the append itself."""
    bench = Bench(monkeypatch)
    try:
        bench.world.run(bench.node.store.put_topic("a", TopicConfig(), keep_type=False))
        bench.cost(size)
        plain = bench.cost(size)
        for edge in chain:
            bench.route(*edge)
        bench.cost(size)
        whole = bench.cost(size)
        for _, dest in chain:
            assert bench.sizes(dest) == [size + 2] * (2 * RECORDS)
        return whole - plain
    finally:
        bench.world.abandon()


@pytest.mark.parametrize(
    "edges",
    [
        [("a", "b")],
        [("a", f"b{number}") for number in range(20)],
        [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "f")],
    ],
    ids=["pair", "fan", "chain"],
)
def test_a_forwarded_page_costs_the_same_whatever_it_carries(
    monkeypatch: pytest.MonkeyPatch, edges: list[tuple[str, str]]
) -> None:
    """The router made the destination; the records have 1 KiB and 100 KiB."""
    small, large = (_forwarding_costs(monkeypatch, edges, size) for size in (SMALL, LARGE))
    # Groups are aligned to 8 bytes, and a larger seq may take one more.
    assert abs(large - small) <= 64 * len(edges)
    assert large < 300 * len(edges)


def test_a_page_into_another_shard_carries_its_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: `Pages.may_omit_payloads` asks for the same shard."""
    bench = Bench(monkeypatch)
    try:
        store = bench.node.store
        for name in ("a", "b"):
            bench.world.run(store.put_topic(name, TopicConfig(), keep_type=False))
        assert not bench.node.commits.same_shard(1, 2)
        bench.route("a", "b")
        assert bench.cost(LARGE) > 2 * RECORDS * LARGE
    finally:
        bench.world.abandon()
