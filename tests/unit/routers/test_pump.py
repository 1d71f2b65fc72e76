"""`routers.pump`: when a changed source is routed, and when the copies are written."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.garbage import nothing_for_the_collector
from tests.unit.engine.rig import Rig, body_of
from tests.unit.queue.rig import turns
from topics_server.engine.appends import PendingAppend
from topics_server.engine.commit.router_pages import RouterPages
from topics_server.engine.read.block_cache import BlockCache
from topics_server.routers.pump import Pump
from topics_server.routers.router_table import RouterTable
from topics_server.values.entries import RouterPut
from topics_server.values.errors import StorageError
from topics_server.values.model import RouterDefinition

pytestmark = pytest.mark.anyio


class RouterRig(Rig):
    """A rig with a pump; a flush of the journal writes what is queued, within the call."""

    def __init__(self) -> None:
        super().__init__(is_prompt=False)
        journal: Any = self.journal
        journal.flush = journal.write
        self.table = RouterTable()
        pages = RouterPages(self.registry, self.commits, self.table.sources)
        self.pump = Pump(
            self.table,
            self.store,
            self.commits,
            self.notifier,
            pages,
            self.clock,
            lambda topic_id: None,
        )
        self.pump.start()

    async def route(self, *names: str) -> None:
        """Create these topics, and a router from each to the next."""
        for name in names:
            creating = asyncio.ensure_future(self.append(name, "first"))
            await turns()
            self.journal.sync_everything()
            await creating
        for number, (source, dest) in enumerate(pairwise(names), 1):
            source_id = self.store.topic(source).topic_id
            dest_id = self.store.topic(dest).topic_id
            definition = RouterDefinition(source, dest)
            entry = RouterPut(number, f"r{number}", 1, definition, source_id, dest_id, 1)
            self.table.apply(number, entry)
        await turns()

    def begin(self, name: str) -> PendingAppend:
        body, decoded = body_of("x")
        appending = self.store.begin_append(name, body, decoded, header_key=None)
        assert appending is not None
        return appending

    def commit(self, name: str) -> None:
        """Report all entries submitted to the shard of this topic as written."""
        self.journal.write(self.journal.shard_of(self.store.topic(name).topic_id))

    def head(self, name: str) -> int:
        return self.store.topic(name).log.head_seq


async def test_a_change_is_routed_in_the_turn_that_commits_it_behind_its_answer() -> None:
    rig = RouterRig()
    await rig.route("a", "b")
    heads: list[int] = []
    rig.begin("a").when_resolved(lambda: heads.append(rig.head("b")))
    rig.commit("a")
    assert heads == [1], "the writer is answered first"
    assert rig.head("b") == 2, "no turn of the loop later"


async def test_what_else_changes_in_the_same_turn_is_routed_in_the_next() -> None:
    rig = RouterRig()
    await rig.route("a", "b")
    for head in (2, 2):
        rig.begin("a")
        rig.commit("a")
        assert rig.head("b") == head
    await turns()
    assert rig.head("b") == 3
    rig.begin("a")
    rig.commit("a")
    assert rig.head("b") == 4


async def test_a_chain_of_routers_does_not_nest_their_turns() -> None:
    rig = RouterRig()
    await rig.route("a", "b", "c")
    rig.begin("a")
    rig.commit("a")
    assert (rig.head("b"), rig.head("c")) == (2, 1)
    await turns()
    assert rig.head("c") == 2


async def test_a_closed_pump_routes_nothing() -> None:
    rig = RouterRig()
    await rig.route("a", "b")
    await rig.pump.close()
    rig.begin("a")
    rig.commit("a")
    await turns()
    assert rig.head("b") == 1


async def _sparse(rig: RouterRig, *dests: str) -> None:
    """A source `a` of three sealed segments, a cache that keeps no block, and a router to each
    destination.
    """
    for name in ("a", *dests):
        for _ in range(24 if name == "a" else 1):
            appending = asyncio.ensure_future(rig.append(name, "first"))
            await turns()
            rig.journal.sync_everything()
            await appending
    sealing = asyncio.ensure_future(rig.sealer.seal_topics(["a"]))
    for _ in range(20):
        await turns()
        rig.journal.sync_everything()
    await sealing
    fetcher: Any = rig.fetcher
    fetcher._cache = BlockCache(1)
    source_id = rig.store.topic("a").topic_id
    for number, dest in enumerate(dests, 1):
        dest_id = rig.store.topic(dest).topic_id
        definition = RouterDefinition("a", dest)
        entry = RouterPut(number, f"r{number}", 1, definition, source_id, dest_id, 0)
        rig.table.apply(number, entry)


async def _routed(rig: RouterRig) -> None:
    for _ in range(10):
        await turns()
        for shard in range(2):
            rig.journal.write(shard)


async def test_a_page_with_more_blocks_than_the_cache_holds_is_copied() -> None:
    rig = RouterRig()
    await _sparse(rig, "b")
    await _routed(rig)
    assert rig.head("b") == 1 + 24
    assert rig.segments.reads <= 24


async def test_routers_of_a_page_share_its_blocks() -> None:
    """Two routers read at the same time; the others find the page copied."""
    rig = RouterRig()
    await _sparse(rig, "b", "c", "d", "e", "f")
    await _routed(rig)
    assert [rig.head(name) for name in "bcdef"] == [25] * 5
    assert rig.segments.reads <= 2 * 24


async def test_a_router_that_is_gone_frees_its_blocks() -> None:
    rig = RouterRig()
    await _sparse(rig, "b", "c", "d", "e", "f")
    await asyncio.sleep(0)
    for router in tuple(rig.table)[:4]:
        rig.pump.gone(router)
    await _routed(rig)
    assert rig.head("f") == 25


async def test_a_source_that_cannot_be_read_leaves_nothing_for_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = RouterRig()

    async def fail(*_: object, **more: object) -> None:
        raise StorageError("no disk")

    monkeypatch.setattr(rig.fetcher, "complete", fail)
    with nothing_for_the_collector():
        await _sparse(rig, "b")
        await _routed(rig)
        assert rig.head("b") == 1
        (router,) = rig.table
        assert rig.pump.stalled(router) is not None
        del router
