"""Reads that wait: which events end a wait, and which do not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.unit.engine.rig import Rig
from topics_server.engine.answers import Moment, ReadRequest, ReadStart
from topics_server.engine.filters import TagLeaf
from topics_server.engine.read.filtered import Search
from topics_server.engine.topic.topic import Topic
from topics_server.values.limits import PAGE_BYTES_MAX
from topics_server.values.model import TagMatch

pytestmark = pytest.mark.anyio

RARE = TagLeaf((TagMatch("rare"),))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def waiting(**more: object) -> ReadRequest:
    return ReadRequest(0, 10, PAGE_BYTES_MAX, wait_ms=30_000, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "request_",
    [
        waiting(before_seq=1),
        waiting(before_seq=4, filter=RARE),
        waiting(until=Moment(1)),
        waiting(until=Moment(1), start=ReadStart(last=3)),
    ],
)
async def test_a_range_that_has_ended_is_not_waited_for(request_: ReadRequest) -> None:
    rig = Rig()
    await rig.append("t", *range(8), tag="a")
    reading = asyncio.create_task(rig.store.read("t", request_))
    await settled()
    assert reading.done(), "it waits for records that cannot come"
    assert (await reading).is_empty


async def test_an_open_range_is_waited_for() -> None:
    rig = Rig()
    await rig.append("t", *range(8), tag="a")
    reading = asyncio.create_task(rig.store.read("t", waiting(filter=RARE, before_seq=100)))
    await settled()
    assert not reading.done()
    await rig.append("t", 1, tag="rare")
    page = await reading
    assert page.next_from_seq == 9
    assert not page.is_empty


@pytest.mark.parametrize("count", [3, 40])
async def test_a_topic_made_again_while_its_start_is_looked_up_has_a_start_of_its_own(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seqs of the old topic's last records have no meaning in the new topic."""
    rig = Rig()
    await rig.append("t", *range(24), tag="rare")
    await rig.sealer.seal_topics(["t"])
    fetcher = rig.store.reads._fetcher
    search = fetcher.search

    async def meanwhile(topic: Topic, segment_ids: Sequence[int], wanted: Search) -> bool:
        monkeypatch.undo()
        await rig.store.drop_topic("t", if_empty=False)
        await rig.append("t", *range(count), tag="rare")
        return await search(topic, segment_ids, wanted)

    monkeypatch.setattr(fetcher, "search", meanwhile)
    asked = ReadRequest(0, 10, PAGE_BYTES_MAX, filter=RARE, start=ReadStart(last=2))
    page = await rig.store.read("t", asked)
    assert page.gap is None
    seqs = [piece.block.first_seq + row for piece in page.pieces for row in piece.rows]
    assert seqs == [count - 1, count]
