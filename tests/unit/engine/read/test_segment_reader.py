"""Payloads and tags of sealed records: cached, damaged, or gone."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

import pytest

from tests.garbage import nothing_for_the_collector
from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import Rig
from topics_server.engine.answers import ReadRequest
from topics_server.engine.filters import TagLeaf
from topics_server.engine.read import segment_reader
from topics_server.engine.read.filtered import Search
from topics_server.engine.read.page import plan_page
from topics_server.engine.topic.topic import Topic
from topics_server.values.errors import StorageError
from topics_server.values.model import LossReason, TagMatch

pytestmark = pytest.mark.anyio


async def sealed() -> tuple[Rig, Topic]:
    """A topic of eight sealed records with tag `a`."""
    rig = Rig()
    await rig.append("t", *range(8), tag="a")
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    return rig, topic


async def test_a_block_is_read_once_and_then_served_from_memory() -> None:
    rig, _ = await sealed()
    for _ in range(3):
        assert seqs_of(await rig.read("t")) == list(range(1, 9))
    assert rig.segments.reads == 1


async def test_a_page_without_sealed_records_reads_nothing() -> None:
    rig, _ = await sealed()
    await rig.append("t", 9)
    assert seqs_of(await rig.read("t", 8)) == [9]
    assert rig.segments.reads == 0


async def test_damage_is_told_as_a_tombstone_of_exactly_its_rows_and_the_rest_is_served() -> None:
    rig, topic = await sealed()
    rig.segments.damaged[1, 1] = (2, 3)
    page = await rig.read("t")
    assert seqs_of(page) == [1, 2]
    page = await rig.read("t", page.next_from_seq)
    assert page.gap is not None
    assert (page.gap.gap_from, page.gap.gap_to, page.gap.reason) == (3, 4, LossReason.DAMAGED)
    assert seqs_of(page) == [5, 6, 7, 8]
    assert topic.log.damaged_records == 2
    assert rig.store.damaged_records == 2
    assert rig.store.records_live == 6


async def test_damage_of_a_deleted_record_is_told_to_nobody_and_hides_nothing() -> None:
    rig, topic = await sealed()
    await rig.store.delete_seqs("t", [3])
    rig.segments.damaged[1, 1] = (2, 2)
    for _ in range(2):
        page = await asyncio.wait_for(rig.read("t"), 5)
        assert (seqs_of(page), page.gap) == ([1, 2, 4, 5, 6, 7, 8], None)
    assert (topic.log.holes, topic.log.damaged_records) == ([], 0)


async def test_a_damaged_record_that_is_deleted_after_the_plan_asks_for_a_new_plan() -> None:
    """Its row is empty by then: no reader may get it."""
    rig, topic = await sealed()
    plan = plan_page(topic, ReadRequest(0, 100, 1 << 20), rig.clock.now_ms())
    rig.segments.damaged[1, 1] = (2, 2)
    await rig.store.delete_seqs("t", [3])
    assert await rig.fetcher.complete(topic, plan) is None
    again = plan_page(topic, ReadRequest(0, 100, 1 << 20), rig.clock.now_ms())
    assert await rig.fetcher.complete(topic, again) is not None


async def test_damage_moves_the_topic_so_that_its_next_capture_shows_it() -> None:
    rig, _ = await sealed()
    await rig.checkpointer.take()
    rig.segments.damaged[1, 1] = (2, 3)
    await rig.read("t")
    await rig.checkpointer.take()
    first, second = (dict(image.parts)[1] for image in rig.snapshots.images)
    assert first != second


async def test_a_segment_that_went_after_the_plan_asks_for_a_new_plan() -> None:
    rig, topic = await sealed()
    plan = plan_page(topic, ReadRequest(0, 100, 1 << 20), rig.clock.now_ms())
    await rig.delete("t", before_seq=9)
    await rig.sealer.tend(topic)
    assert await rig.fetcher.complete(topic, plan) is None


async def test_damage_of_a_segment_that_went_is_nobodys_loss() -> None:
    rig, topic = await sealed()
    plan = plan_page(topic, ReadRequest(0, 100, 1 << 20), rig.clock.now_ms())
    index = rig.segments.kept[1][1]
    await rig.delete("t", before_seq=9)
    await rig.sealer.tend(topic)
    rig.segments.kept[1][1] = index
    rig.segments.damaged[1, 1] = (0, 7)
    assert await rig.fetcher.complete(topic, plan) is None
    assert topic.log.damaged_records == 0


async def test_a_listed_segment_that_cannot_be_read_is_an_error() -> None:
    rig, _ = await sealed()
    rig.segments.fault = StorageError("input/output error")
    with pytest.raises(StorageError, match="input/output"):
        await rig.read("t")


async def test_tags_of_a_segment_that_is_gone_are_left_out_and_of_a_listed_one_an_error() -> None:
    rig, _ = await sealed()
    assert await rig.fetcher.find_tags(1, [1, 7], TagMatch("a")) == {1: list(range(8))}
    rig.segments.fault = StorageError("input/output error")
    with pytest.raises(StorageError):
        await rig.fetcher.find_tags(1, [1], TagMatch("a"))
    assert await rig.fetcher.find_tags(9, [1], TagMatch("a")) == {}


async def test_bytes_on_disk_count_both_folders() -> None:
    rig, _ = await sealed()
    hot = rig.fetcher.disk_bytes(1)
    rig.segments.cold.add((1, 1))
    assert rig.fetcher.disk_bytes(1) == hot > 0
    assert rig.fetcher.disk_bytes(2) == 0


@pytest.mark.parametrize("call", ["tags", "filter"])
async def test_a_search_that_fails_leaves_nothing_for_the_collector(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, topic = await sealed()

    def fail(*_: object) -> NoReturn:
        raise StorageError("input/output error")

    monkeypatch.setattr(rig.segments, "find_tags", fail)
    monkeypatch.setattr(segment_reader, "search_segment", fail)
    with nothing_for_the_collector(), contextlib.suppress(StorageError):
        if call == "tags":
            await rig.fetcher.find_tags(topic.topic_id, [1], TagMatch("a"))
        else:
            await rig.fetcher.search(topic, [1], Search(TagLeaf((TagMatch("a"),))))
        raise AssertionError("the search failed")
