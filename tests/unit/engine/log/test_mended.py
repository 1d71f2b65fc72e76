"""Rows of a mended segment: which records come back, and which stay deleted."""

from __future__ import annotations

import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import Rig
from topics_server.engine.background.mender import Mender
from topics_server.engine.ports import SealedIndex
from topics_server.engine.topic.topic import Topic
from topics_server.values.errors import StorageError
from topics_server.values.file_inventory import KnownFlags
from topics_server.values.limits import SNAPSHOTS_KEPT

pytestmark = pytest.mark.anyio


async def sealed(rig: Rig, count: int) -> Topic:
    await rig.append("t", *range(count))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic, force_seal=True)
    return topic


async def test_damaged_rows_are_live_again_and_deleted_ones_are_not() -> None:
    rig = Rig()
    topic = await sealed(rig, 8)
    whole = topic.log.live_bytes
    await rig.store.delete_seqs("t", [2])
    assert topic.note_damage(1, 0, 5) == 5
    rig.registry.recount(topic)
    # The record is deleted while it is damaged.
    await rig.store.delete("t", before_seq=3, match=None)
    assert (topic.log.live_count, rig.store.damaged_records) == (2, 5)
    index = rig.segments.kept[1][1]
    came = topic.note_mended(index, bytes(8))
    rig.registry.recount(topic)
    assert came == 4
    assert topic.log.live_count == 6
    assert topic.log.live_bytes == whole - index.record_bytes(0) - index.record_bytes(1)
    assert (topic.log.damaged_records, rig.store.damaged_records) == (1, 1)
    assert topic.log.holes == []
    assert topic.log.earliest_seq == 3
    assert seqs_of(await rig.read("t", 0)) == [3, 4, 5, 6, 7, 8]


async def test_rows_that_the_flags_say_are_dead_stay_dead() -> None:
    rig = Rig()
    topic = await sealed(rig, 8)
    topic.note_damage(1, 0, 7)
    assert topic.note_mended(rig.segments.kept[1][1], bytes([1, 0, 0, 0, 0, 0, 0, 1])) == 6
    assert topic.log.damaged_records == 0
    assert seqs_of(await rig.read("t", 0)) == [2, 3, 4, 5, 6, 7]


async def test_rows_below_the_floor_stay_dead() -> None:
    rig = Rig()
    topic = await sealed(rig, 8)
    topic.note_damage(1, 0, 7)
    topic.log.evict_floor = 4
    topic.log.earliest_seq = 9
    assert topic.note_mended(rig.segments.kept[1][1], bytes(8)) == 5
    assert seqs_of(await rig.read("t", 3)) == [4, 5, 6, 7, 8]


async def test_a_mended_segment_stays_until_no_kept_snapshot_has_its_hole() -> None:
    rig = Rig()
    topic = await sealed(rig, 8)
    topic.note_damage(1, 0, 3)
    topic.note_mended(rig.segments.kept[1][1], bytes(8))
    rig.sealer.note_mended(topic)
    await rig.store.delete_seqs("t", list(range(1, 9)))
    for taken in range(SNAPSHOTS_KEPT + 1):
        await rig.sealer.tend(topic)
        assert 1 in rig.segments.kept[1], taken
        rig.sealer.snapshot_taken()
    await rig.sealer.tend(topic)
    assert 1 not in rig.segments.kept[1]


class Copies:
    """An archive; `fails`: the number of reads that fail."""

    def __init__(self, rig: Rig, fails: int) -> None:
        self.rig = rig
        self.fails = fails
        self.known: list[KnownFlags] = []
        self.discarded = 0

    async def prepare(self, topic_id: int, segment_id: int, known: KnownFlags) -> int:
        self.fails -= 1
        if self.fails >= 0:
            raise StorageError("503")
        self.known.append(known)
        return segment_id

    async def finish(self, files: int, known: KnownFlags) -> tuple[SealedIndex, bytes]:
        assert self.rig.sealer.turn.locked()
        index = self.rig.segments.kept[1][files]
        self.rig.segments.damaged.pop((1, files), None)
        return index, index.flags()

    async def discard(self, files: int) -> None:
        self.discarded += 1


def mender_of(rig: Rig, copies: Copies) -> tuple[Mender[int], list[int]]:
    mended: list[int] = []

    def on_mended(topic: Topic, index: SealedIndex) -> None:
        rig.fetcher.forget(topic.topic_id, index.segment_id)
        mended.append(index.segment_id)

    mender = Mender(rig.registry, rig.sealer, copies, rig.clock, on_mended)
    rig.fetcher.on_damaged.append(mender.note)
    return mender, mended


async def test_damage_that_a_reader_finds_is_mended_at_the_second_try() -> None:
    rig = Rig()
    topic = await sealed(rig, 8)
    mender, mended = mender_of(rig, copies := Copies(rig, 1))
    rig.segments.damaged[1, 1] = (2, 3)
    assert seqs_of(await rig.read("t", 4)) == [5, 6, 7, 8]
    assert mender.metrics().waiting == 1
    await mender._try((1, 1))
    assert (mender.failed, mended) == (1, [])
    await mender._try((1, 1))
    assert (mender.failed, mended) == (0, [1])
    found = mender.metrics()
    assert (found.segments, found.records, found.failures, found.waiting) == (1, 2, 1, 0)
    assert copies.known[0].digest == topic.files.digests[1]
    assert seqs_of(await rig.read("t", 0)) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_a_segment_that_is_damaged_again_and_again_is_given_up() -> None:
    rig = Rig()
    await sealed(rig, 8)
    mender, mended = mender_of(rig, Copies(rig, 0))
    for _ in range(5):
        rig.segments.damaged[1, 1] = (2, 3)
        mender.note(1, 1)
        await mender._try((1, 1))
    assert mended == [1, 1, 1]
    assert (mender.failed, mender.metrics().waiting) == (1, 1)


async def test_flags_that_nobody_knows_are_not_guessed() -> None:
    rig = Rig()
    topic = await sealed(rig, 8)
    mender, mended = mender_of(rig, Copies(rig, 0))
    del topic.files.digests[1]
    mender.note(1, 1)
    await mender._try((1, 1))
    assert (mender.failed, mended) == (1, [])


async def test_a_segment_that_is_dropped_meanwhile_is_no_failure() -> None:
    rig = Rig()
    await sealed(rig, 8)
    mender, mended = mender_of(rig, Copies(rig, 0))
    mender.note(1, 1)
    await rig.store.drop_topic("t", if_empty=False)
    await mender._try((1, 1))
    found = mender.metrics()
    assert (found.failures, found.waiting, mended) == (0, 0, [])


async def test_blank_rows_of_damaged_records_are_in_no_cache_after_a_mend() -> None:
    rig = Rig()
    await sealed(rig, 8)
    mender, _ = mender_of(rig, Copies(rig, 0))
    rig.segments.damaged[1, 1] = (2, 3)
    await rig.read("t", 0)
    reads = rig.segments.reads
    await rig.read("t", 0)
    assert rig.segments.reads == reads, "the block is cached"
    await mender._try((1, 1))
    await rig.read("t", 0)
    assert rig.segments.reads == reads + 1
