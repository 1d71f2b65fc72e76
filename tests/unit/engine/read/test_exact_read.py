"""Exact seqs: read wherever they are stored, and deleted once however many callers request it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.rig import Rig, throttled
from topics_server.engine.commit.pipeline import DISK_FULL
from topics_server.engine.log.runs import OpenBlock, TailBlock
from topics_server.engine.read import exact_read
from topics_server.engine.read.exact_read import (
    deletable,
    is_live,
    plan_rows,
    tail_columns,
    tail_rows,
)
from topics_server.engine.read.row_columns import RowColumns
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import RecordsDeleted
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.model import Durability, TopicConfig

pytestmark = pytest.mark.anyio


async def stored(*, sealed: int = 8, tail: int = 3) -> tuple[Rig, Topic]:
    """Records from 1 on, the first ones sealed; record n holds n."""
    rig = Rig()
    if sealed:
        await rig.append("t", *range(1, sealed + 1))
        await rig.sealer.tend(topic_of(rig))
    if tail:
        await rig.append("t", *range(sealed + 1, sealed + tail + 1))
    return rig, topic_of(rig)


def topic_of(rig: Rig) -> Topic:
    topic = rig.registry.find("t")
    assert topic is not None
    return topic


async def rows(rig: Rig, *seqs: int) -> dict[int, bytes]:
    found = await rig.store.read_rows(topic_of(rig), seqs)
    return {block.first_seq + row: bytes(block.data(row)) for block, row in found}


async def test_rows_come_from_segments_and_from_the_tail_in_order() -> None:
    rig, topic = await stored()
    assert topic.log.sealed_count == 1
    assert list((await rows(rig, 2, 8, 9, 11)).items()) == [
        (2, b"2"),
        (8, b"8"),
        (9, b"9"),
        (11, b"11"),
    ]
    assert rig.segments.reads == 1
    assert await rows(rig, 10) == {10: b"10"}
    assert rig.segments.reads == 1, "nothing sealed was asked for"


async def test_what_is_gone_or_never_was_is_left_out() -> None:
    rig, _ = await stored()
    await rig.delete("t", before_seq=4)
    await rig.store.delete_seqs("t", [6, 10])
    assert list(await rows(rig, 1, 3, 4, 6, 7, 10, 11, 12, 99)) == [4, 7, 11]
    assert await rows(rig, 99) == {}
    assert await rows(rig) == {}


async def test_damage_takes_only_its_own_rows() -> None:
    rig, _ = await stored()
    rig.segments.damaged[1, 1] = (2, 3)
    assert list(await rows(rig, 1, 3, 5, 9)) == [1, 5, 9]
    assert rig.store.damaged_records == 2
    assert list(await rows(rig, 2, 4, 6)) == [2, 6]


async def test_a_segment_that_cannot_be_read_is_an_error() -> None:
    rig, _ = await stored()
    rig.segments.fault = StorageError("no disk")
    with pytest.raises(StorageError, match="no disk"):
        await rows(rig, 2)
    assert await rows(rig, 9) == {9: b"9"}


@given(st.sets(st.integers(1, 700)), st.sets(st.integers(1, 700)), st.integers(0, 20))
def test_a_plan_has_just_the_live_ones(dead: set[int], asked: set[int], sealed: int) -> None:
    async def run() -> None:
        rig, topic = await stored(sealed=8 * min(sealed, 1), tail=0 if sealed == 20 else 600)
        if dead:
            await rig.store.delete_seqs("t", sorted(dead))
        plan = plan_rows(topic, sorted(asked))
        page = await rig.fetcher.complete(topic, plan)
        assert page is not None
        found = [piece.block.first_seq + row for piece in page.pieces for row in piece.rows]
        count = topic.log.head_seq
        assert found == sorted(seq for seq in asked - dead if seq <= count)
        assert [seq for seq in sorted(asked) if is_live(topic.log, seq)] == found
        assert deletable(topic, sorted(asked)) == found

    asyncio.run(run())


@given(st.sets(st.integers(1, 600), min_size=1), st.integers(1, 600), st.integers(1, 200))
def test_columns_have_what_rows_have(asked: set[int], first: int, count: int) -> None:
    """A tail of frozen blocks and an open one, with gaps and without."""

    async def run() -> None:
        rig, topic = await stored(sealed=0, tail=250)
        await rig.append("t", *("x" * (row % 9) for row in range(250)), tag="t")
        await rig.append("t", *range(100))
        assert {type(run) for run in topic.log.runs} == {TailBlock, OpenBlock}
        for seqs in (sorted(asked), list(range(first, min(601, first + count)))):
            columns = tail_columns(topic.log, seqs)
            assert columns is not None
            assert list(columns.rows()) == tail_rows(topic.log, seqs)

    asyncio.run(run())


async def test_sealed_records_are_read_as_columns_if_they_are_in_memory() -> None:
    rig, topic = await stored(sealed=40, tail=5)
    seqs = list(range(20, 44))
    assert tail_columns(topic.log, seqs) is None
    assert rig.store.resident_rows(topic, seqs) is None
    await rig.store.read_rows(topic, seqs)
    columns = rig.store.resident_rows(topic, seqs)
    assert isinstance(columns, RowColumns)
    assert columns.datas == [b"%d" % seq for seq in seqs]
    few = rig.store.resident_rows(topic, seqs[:15])
    assert isinstance(few, list)
    assert few == list(columns.rows())[:15]


# -- deletes -------------------------------------------------------------------------------


async def test_a_delete_says_which_lived() -> None:
    rig, topic = await stored()
    first = await rig.store.delete_seqs("t", [1, 2, 9, 99])
    assert first.seqs == [1, 2, 9]
    assert (await rig.store.delete_seqs("t", [2, 3, 9])).seqs == [3]
    entries = [entry for entry in rig.journal.entries if isinstance(entry, RecordsDeleted)]
    assert len(entries) == 2
    assert rig.journal.submitted[-1].urgent
    assert (await rig.store.delete_seqs("t", [2])).seqs == []
    assert len(rig.journal.entries) == 4, "nothing to delete is no entry"
    assert topic.log.live_count == 7


async def test_two_deletes_under_way_never_count_a_seq_twice() -> None:
    rig = Rig(is_prompt=False)
    made = asyncio.ensure_future(rig.append("t", *range(5)))
    await asyncio.sleep(0)
    rig.journal.sync_everything()
    await made
    topic = topic_of(rig)
    one = rig.store.start_delete(topic, [1, 2])
    two = rig.store.start_delete(topic, [2, 3])
    none = rig.store.start_delete(topic, [1, 3])
    assert (one.seqs, two.seqs, none.seqs) == ([1, 2], [3], [])
    assert none.ticket is None
    rig.journal.sync_everything()
    told = [await rig.store.finish_delete(delete) for delete in (one, two, none)]
    assert [answer.seqs for answer in told] == [[1, 2], [3], []]
    assert told[0].write_ms > 0
    assert topic.log.live_count == 2


async def test_a_delete_that_fails_leaves_its_seqs_to_the_next() -> None:
    rig = Rig(is_prompt=False)
    made = asyncio.ensure_future(rig.append("t", *range(3)))
    await asyncio.sleep(0)
    rig.journal.sync_everything()
    await made
    topic = topic_of(rig)
    delete = rig.store.start_delete(topic, [1, 2])
    assert delete.ticket is not None
    assert deletable(topic, [1, 2, 3]) == [3]
    rig.journal.fail(1, delete.ticket.lsn, DISK_FULL)
    with pytest.raises(TopicsError) as failed:
        await rig.store.finish_delete(delete)
    assert failed.value.code is Code.THROTTLED
    assert deletable(topic, [1, 2, 3]) == [1, 2, 3]
    rig.journal.refusal = throttled()
    with pytest.raises(TopicsError):
        rig.store.start_delete(topic, [1])
    assert deletable(topic, [1, 2, 3]) == [1, 2, 3], "nothing was staged"


async def test_a_delete_is_as_durable_as_its_topic() -> None:
    for durability, is_synced in ((Durability.FSYNC, True), (Durability.DISK, False)):
        rig = Rig()
        await rig.append("t", 1, config=TopicConfig(durability=durability))
        await rig.store.delete_seqs("t", [1])
        assert rig.journal.submitted[-1].sync is is_synced


async def test_a_delete_waits_for_a_drop_under_way() -> None:
    rig, _ = await stored()
    drop = asyncio.ensure_future(rig.store.drop_topic("t", if_empty=False))
    await asyncio.sleep(0)
    with pytest.raises(TopicsError) as missing:
        await rig.store.delete_seqs("t", [1])
    assert missing.value.code is Code.TOPIC_NOT_FOUND
    await drop
    with pytest.raises(TopicsError):
        rig.store.topic("t")
    with pytest.raises(TopicsError):
        await rig.store.stable_topic("t")
    assert rig.store.topic_of(1) is None


async def test_a_list_of_deleted_seqs_dies_like_arrays_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = []
    for few in (1_000, 0):
        monkeypatch.setattr(exact_read, "FEW_SEQS_MAX", few)
        rig, topic = await stored(sealed=300, tail=900)
        gone = [*range(250, 500), *range(501, 900, 3)]
        assert (await rig.store.delete_seqs("t", gone)).seqs == gone
        entry = rig.journal.entries[-1]
        assert isinstance(entry, RecordsDeleted)
        assert (entry.seqs is None) == (few == 0)
        live = [seq for seq in range(1, 1_201) if is_live(topic.log, seq)]
        assert live == [seq for seq in range(1, 1_201) if seq not in gone]
        states.append((entry.firsts, entry.lasts, topic.log.live_bytes, topic.log.tail_bytes))
    assert states[0] == states[1]
