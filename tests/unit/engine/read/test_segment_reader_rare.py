"""Pages of rare tags: the rows that they show, and no others, in one call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import RULES, NowOffload, Rig, sealed_topic
from topics_server.engine.answers import BackwardRequest, Page, ReadRequest, ReadStart
from topics_server.engine.filters import Not, TagLeaf
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import Block
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import PAGE_BYTES_MAX
from topics_server.values.model import LossReason, TagMatch

pytestmark = pytest.mark.anyio
T = TypeVar("T")

RECORDS = 1024
RARE = TagLeaf((TagMatch("rare"),))


class CountedOffload(NowOffload):
    """Counts the calls that ran off the loop."""

    def __init__(self) -> None:
        self.calls = 0

    async def run(self, call: Callable[[], T]) -> T:
        self.calls += 1
        return await super().run(call)


class Bench:
    """Sealed records, every hundredth of them rare; notes which rows were read."""

    def __init__(self, segment_records: int) -> None:
        rules = msgspec.structs.replace(RULES, max_records=segment_records)
        self.rig = Rig(rules=rules)
        self.offload = CountedOffload()
        self.rig.fetcher._offload = self.offload
        self.rows: list[tuple[int, int]] = []
        plain = self.rig.segments.read

        def counted(
            topic_id: int,
            segment_id: int,
            first_row: int,
            end_row: int,
            unwanted: Sequence[tuple[int, int]] = (),
        ) -> Block:
            self.rows.append((first_row, end_row))
            return plain(topic_id, segment_id, first_row, end_row, unwanted)

        self.rig.segments.read = counted  # type: ignore[method-assign]

    async def fill(self) -> Topic:
        numbers = range(1, RECORDS + 1)
        tags = ["rare" if n % 100 == 0 else "often" for n in numbers]
        return await sealed_topic(
            self.rig, [{"data": n, "tag": tag} for n, tag in zip(numbers, tags, strict=True)]
        )

    async def read(self, limit: int = 10, from_seq: int = 0) -> Page:
        request = ReadRequest(from_seq, limit, PAGE_BYTES_MAX, filter=RARE)
        return await self.rig.store.read("t", request)


async def test_rare_rows_are_read_alone_and_in_one_call() -> None:
    bench = Bench(RECORDS)
    await bench.fill()
    page = await bench.read()
    assert seqs_of(page) == list(range(100, 1001, 100))
    assert bench.offload.calls == 1, "it searches and reads"
    assert bench.rows == [(seq - 1, seq) for seq in range(100, 1001, 100)]
    # The same holds for a descending read.
    bench.rows.clear()
    asked = BackwardRequest(RECORDS + 1, 0, 3, PAGE_BYTES_MAX)
    found = await bench.rig.store.read_backward("t", asked, RARE)
    assert [piece.block.first_seq + piece.rows[0] for piece in found.pieces] == [800, 900, 1000]
    assert bench.rows == [(999, 1000), (899, 900), (799, 800)]
    assert bench.offload.calls == 2


async def test_rows_of_a_group_in_memory_are_cut_out_of_it() -> None:
    bench = Bench(RECORDS)
    await bench.fill()
    await bench.rig.read("t", 256)
    assert bench.rows == [(256, RECORDS)], "groups that follow each other are one read"
    bench.rows.clear()
    page = await bench.read()
    assert seqs_of(page) == list(range(100, 1001, 100))
    assert bench.rows == [(99, 100), (199, 200)], "the first group was not read before"
    # Reading single rows does not change the cost of other reads.
    bench.rows.clear()
    await bench.rig.read("t")
    assert bench.rows == [(0, 256)]


async def test_many_rows_of_a_group_are_read_with_it() -> None:
    bench = Bench(RECORDS)
    await bench.fill()
    often = ReadRequest(0, 300, PAGE_BYTES_MAX, filter=Not(RARE))
    page = await bench.rig.store.read("t", often)
    assert len(seqs_of(page)) == 300
    assert bench.rows == [(0, 512)]
    bench.rows.clear()
    await bench.rig.store.read("t", often)
    assert bench.rows == [], "it is kept"


async def test_segments_are_searched_as_far_as_there_are_not_enough() -> None:
    bench = Bench(256)
    topic = await bench.fill()
    assert topic.log.sealed_count == 4
    searched: list[int] = []
    plain = bench.rig.segments.find_tags

    def counted(topic_id: int, segment_id: int, match: TagMatch) -> Sequence[int]:
        searched.append(segment_id)
        return plain(topic_id, segment_id, match)

    bench.rig.segments.find_tags = counted  # type: ignore[method-assign]
    assert seqs_of(await bench.read(limit=2)) == [100, 200]
    assert searched == [1]
    searched.clear()
    bench.offload.calls = 0
    assert len(seqs_of(await bench.read())) == 10
    assert searched == [1, 2, 3, 4]
    assert bench.offload.calls == 1, "all of them, with their rows"
    assert [row[0] + 1 for row in bench.rows[-10:]] == [
        each - 256 * ((each - 1) // 256) for each in range(100, 1001, 100)
    ]
    # A descending read ends as early.
    for before, expected in ((RECORDS + 1, [4]), (700, [3, 2])):
        searched.clear()
        asked = BackwardRequest(before, 0, 3, PAGE_BYTES_MAX)
        await bench.rig.store.read_backward("t", asked, RARE)
        assert searched == expected


async def test_damage_among_rare_rows_is_told_as_ever() -> None:
    bench = Bench(RECORDS)
    topic = await bench.fill()
    bench.rig.segments.damaged[topic.topic_id, 1] = (299, 299)
    page = await bench.read()
    assert seqs_of(page) == [100, 200]
    page = await bench.read(from_seq=page.next_from_seq)
    assert page.gap is not None
    assert (page.gap.gap_from, page.gap.gap_to, page.gap.reason) == (300, 300, LossReason.DAMAGED)
    assert seqs_of(page) == list(range(400, 1001, 100))
    # Damage of other records does not affect pages that do not show them.
    bench.rig.segments.damaged[topic.topic_id, 1] = (400, 498)
    page = await bench.read(from_seq=300)
    assert (seqs_of(page), page.gap) == (list(range(400, 1001, 100)), None)
    assert topic.log.damaged_records == 1


async def test_no_more_is_read_with_a_search_than_the_page_may_have() -> None:
    bench = Bench(RECORDS)
    topic = await bench.fill()
    request = ReadRequest(0, 10, 1, filter=RARE)
    assert seqs_of(await bench.rig.store.read("t", request)) == [100]
    assert bench.rows == [(99, 100)]
    # Deleted rows, and rows before the cursor, are not on the page.
    await bench.rig.store.delete_seqs("t", [400])
    bench.rows.clear()
    assert seqs_of(await bench.read(limit=3, from_seq=299)) == [300, 500, 600]
    assert bench.rows == [(299, 300), (499, 500), (599, 600)]
    assert topic.log.damaged_records == 0


class Meddler(CountedOffload):
    """Changes the topic before the first call returns."""

    def __init__(self, meddle: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.meddle: Callable[[], Awaitable[object]] | None = meddle

    async def run(self, call: Callable[[], T]) -> T:
        found = await super().run(call)
        if self.meddle is not None:
            meddle, self.meddle = self.meddle, None
            await meddle()
        return found


@pytest.mark.parametrize("is_backward", [False, True])
async def test_a_topic_that_is_made_again_during_a_search_is_searched_anew(
    is_backward: bool,
) -> None:
    """The new topic's segments have the same ids as the old ones."""
    bench = Bench(RECORDS)
    await bench.fill()

    async def make_again() -> None:
        await bench.rig.store.drop_topic("t", if_empty=False)
        bench.rig.fetcher._offload = NowOffload()
        await bench.rig.append("t", *range(150), tag="often")
        await bench.rig.append("t", 151, tag="rare")
        await bench.rig.sealer.tend(bench.rig.registry.existing("t"), force_seal=True)

    bench.rig.fetcher._offload = Meddler(make_again)
    if is_backward:
        asked = BackwardRequest(RECORDS + 1, 0, 10, PAGE_BYTES_MAX)
        found = await bench.rig.store.read_backward("t", asked, RARE)
        assert [piece.block.first_seq + piece.rows[0] for piece in found.pieces] == [151]
    else:
        assert seqs_of(await bench.read()) == [151]


@pytest.mark.parametrize("kind", ["forward", "backward", "last", "plain"])
async def test_a_topic_that_is_dropped_during_a_read_is_not_found(kind: str) -> None:
    """Its files may be gone by then: that is no failure of the disk."""
    bench = Bench(RECORDS)
    topic = await bench.fill()

    async def drop() -> None:
        await bench.rig.store.drop_topic("t", if_empty=False)
        bench.rig.segments.drop_topic(topic.topic_id)

    bench.rig.fetcher._offload = Early(drop)
    store = bench.rig.store
    last = ReadRequest(0, 10, PAGE_BYTES_MAX, filter=RARE, start=ReadStart(last=3))
    reading: dict[str, Callable[[], Awaitable[object]]] = {
        "forward": bench.read,
        "backward": lambda: store.read_backward(
            "t", BackwardRequest(RECORDS + 1, 0, 10, PAGE_BYTES_MAX), RARE
        ),
        "last": lambda: store.read("t", last),
        "plain": lambda: bench.rig.read("t"),
    }
    with pytest.raises(TopicsError) as refused:
        await reading[kind]()
    assert refused.value.code is Code.TOPIC_NOT_FOUND


class Early(Meddler):
    """Changes the topic before the first call begins."""

    async def run(self, call: Callable[[], T]) -> T:
        if self.meddle is not None:
            meddle, self.meddle = self.meddle, None
            await meddle()
        return await super().run(call)
