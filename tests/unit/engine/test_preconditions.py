"""The table of preconditions, row by row: each write needs what its row lists and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tests.unit.engine.rig import NO_QUOTAS, Rig, body_of
from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.preconditions import NEEDS, Need, Write
from topics_server.engine.stream_writes import StreamWrites
from topics_server.values.entries import RouterPage, Source, TopicDropped
from topics_server.values.errors import TopicsError
from topics_server.values.model import Gate, StreamFacts, TopicConfig

pytestmark = pytest.mark.anyio

# The limit that each refusal names in `detail.limit`. For all other needs the write waits.
LIMITS = {
    Need.DISK_ROOM: "min_free_bytes",
    Need.TOTAL_BYTES: "max_total_bytes",
    Need.TOPICS: "max_topics",
}
# These writes make a topic, or may make one.
MAKES = {Write.CREATING_APPEND, Write.CREATE_STREAM, Write.CREATE}


class Desk:
    """A store with the topics `t` and `source` and the fork `fork`, and a call for each write."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.streams = StreamWrites(
            self.rig.store, self.rig.registry, self.rig.commits, self.rig.clock
        )

    async def set_up(self) -> None:
        for name in ("t", "source"):
            await self.rig.append(name, 1, 2)
        facts = StreamFacts("fork", "application/json", is_copying=True)
        assert await self.streams.create("fork", facts, TopicConfig(), None) is not None

    def violate(self, need: Need, name: str) -> None:
        store, registry = self.rig.store, self.rig.registry
        match need:
            case Need.STABLE_NAME:
                drop = TopicDropped(99, name, 1)
                owner = registry.existing("t")
                store.pending_names.hold(name, Ticket(10**6, drop, Gate.SYNCED, owner))
            case Need.DISK_ROOM:
                store.is_disk_low = True
            case Need.SEALED_TAIL:
                self._limit(max_tail_records=0)
            case Need.TOTAL_BYTES:
                self._limit(max_total_bytes=1)
            case Need.TOPICS:
                self._limit(max_topics=len(registry))

    def _limit(self, **changes: int) -> None:
        store = self.rig.store
        store.checks._quotas = msgspec.structs.replace(NO_QUOTAS, **changes)

    def call(self, write: Write, name: str) -> Awaitable[object]:
        rig, store = self.rig, self.rig.store
        calls: dict[Write, Callable[[], Awaitable[object]]] = {
            Write.APPEND: lambda: rig.append(name, 3),
            Write.CREATING_APPEND: lambda: rig.append(name, 3),
            Write.MOVE: lambda: store.append_derived(
                name, body_of(1)[0], Source(rig.registry.existing("source").topic_id, [1])
            ),
            Write.ROUTER_PAGE: lambda: self._router_page(name),
            Write.FORK_PAGE: lambda: self._fork_page(),
            Write.CREATE_STREAM: lambda: self.streams.create(
                name, StreamFacts(name, "application/json"), TopicConfig(), body_of(1)
            ),
            Write.CREATE: lambda: store.create_topic(name),
            Write.CONFIGURE: lambda: store.put_topic(
                name, TopicConfig(cap_records=9), keep_type=False
            ),
            Write.DELETE: lambda: rig.delete(name, before_seq=2),
            Write.DROP: lambda: store.drop_topic(name, if_empty=False),
        }
        return calls[write]()

    async def _router_page(self, name: str) -> None:
        body, decoded = body_of(1)
        page = RouterPage(7, self.rig.registry.existing("source").topic_id, 1, [1], [1])
        topic = self.rig.registry.existing(name)
        self.rig.store.append_page(topic, page, decoded, lambda: body)

    async def _fork_page(self) -> None:
        fork = self.rig.registry.find("fork")
        assert fork is not None
        self.streams.copy(fork, body_of(1)[1])

    async def outcome_of(self, write: Write, name: str) -> str:
        """`done` if something was submitted, `waits`, or the limit that the refusal names."""
        before = len(self.rig.journal.submitted)
        call = asyncio.ensure_future(self.call(write, name))
        for _ in range(5):
            await asyncio.sleep(0)
        if len(self.rig.journal.submitted) > before:
            await call
            return "done"
        if not call.done():
            call.cancel()
            return "waits"
        if isinstance(error := call.exception(), TopicsError):
            return str(error.detail["limit"])
        assert error is None
        return "waits"  # a router's page is offered again later


def test_every_write_has_a_row() -> None:
    assert set(NEEDS) == set(Write)


@pytest.mark.parametrize("need", list(Need), ids=lambda need: need.name)
@pytest.mark.parametrize("write", list(Write), ids=lambda write: write.name)
async def test_a_write_needs_what_its_row_lists_and_nothing_else(write: Write, need: Need) -> None:
    desk = Desk()
    await desk.set_up()
    # A move creates a missing destination: only then it needs room for a topic.
    makes = write in MAKES or (write is Write.MOVE and need is Need.TOPICS)
    name = "new" if makes else "t"
    desk.violate(need, name)
    outcome = await desk.outcome_of(write, name)
    if need not in NEEDS[write]:
        assert outcome == "done"
    elif need is Need.SEALED_TAIL and write is Write.ROUTER_PAGE:
        assert outcome == "unsealed", "a router waits by itself"
    else:
        assert outcome == LIMITS.get(need, "waits")
