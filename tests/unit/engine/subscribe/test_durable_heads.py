"""Synced heads: what strong readers may see, as syncs and appends come in any order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.rig import ListJournal, Rig, body_of
from topics_server.engine.subscribe.durable_heads import SyncedHeads
from topics_server.engine.topic.topic import Topic
from topics_server.values.model import Durability, TopicConfig

pytestmark = pytest.mark.anyio

DISK = TopicConfig(durability=Durability.DISK)
EPHEMERAL = TopicConfig(durability=Durability.EPHEMERAL)


class Strong:
    """One topic on a journal that the test drives, followed strongly."""

    def __init__(self, config: TopicConfig = DISK) -> None:
        self.rig = Rig(is_prompt=False)
        self.config = config
        self.heads = SyncedHeads(self.rig.commits.synced_lsn)
        self.rig.commits.observers.append(
            lambda lsn, entry, applied: self.heads.note(entry.topic_id, lsn)
        )

    @property
    def journal(self) -> ListJournal:
        return self.rig.journal

    async def begin(self) -> Topic:
        await self.put(self.config)
        topic = self.rig.registry.find("t")
        assert topic is not None
        return topic

    async def put(self, config: TopicConfig) -> None:
        putting = asyncio.ensure_future(self.rig.store.put_topic("t", config, keep_type=True))
        await asyncio.sleep(0)
        self.journal.sync_everything()
        await putting

    async def append(self, count: int = 1) -> None:
        """Append and acknowledge: written, but not synced."""
        body, decoded = body_of(*range(count))
        appending = asyncio.ensure_future(
            self.rig.store.append("t", body, decoded, header_key=None, config=None)
        )
        await asyncio.sleep(0)
        for shard in range(self.journal.shard_count):
            self.journal.write(shard)
        await appending


async def test_what_is_written_and_not_synced_is_not_seen() -> None:
    strong = Strong()
    topic = await strong.begin()
    strong.heads.follow(topic)
    assert strong.heads.seq(topic.topic_id) == 0
    await strong.append(3)
    assert (topic.log.head_seq, strong.heads.seq(topic.topic_id)) == (3, 0)
    assert strong.heads.advance() == []
    strong.journal.sync_everything()
    assert strong.heads.advance() == [topic.topic_id]
    assert strong.heads.seq(topic.topic_id) == 3
    assert strong.heads.advance() == []


async def test_a_reader_that_comes_late_sees_what_was_synced_before() -> None:
    strong = Strong()
    topic = await strong.begin()
    await strong.append(300)
    strong.journal.sync_everything()
    await strong.append(2)
    strong.heads.follow(topic)
    # The open block has an unsynced record: none of the block is sent before the sync.
    assert strong.heads.seq(topic.topic_id) in range(302)
    assert strong.heads.seq(topic.topic_id) <= 300
    strong.journal.sync_everything()
    strong.heads.advance()
    assert strong.heads.seq(topic.topic_id) == 302


async def test_ephemeral_records_count_at_once() -> None:
    strong = Strong(EPHEMERAL)
    topic = await strong.begin()
    strong.heads.follow(topic)
    await strong.append(2)
    assert strong.heads.seq(topic.topic_id) == 2


async def test_an_ephemeral_record_waits_behind_one_that_is_to_be_synced() -> None:
    strong = Strong()
    topic = await strong.begin()
    strong.heads.follow(topic)
    await strong.append()
    topic.config = EPHEMERAL  # as during a PUT in flight
    await strong.append()
    assert strong.heads.seq(topic.topic_id) == 0
    strong.journal.sync_everything()
    strong.heads.advance()
    assert strong.heads.seq(topic.topic_id) == 2


async def test_an_entry_applied_by_the_same_sync_hides_no_move() -> None:
    """For example a reservation of seqs notifies no reader, so the sync has to."""
    strong = Strong()
    topic = await strong.begin()
    strong.heads.follow(topic)
    await strong.append()
    strong.journal.sync_everything()
    strong.heads.note(topic.topic_id, strong.rig.commits.next_lsn - 1)
    assert strong.heads.advance() == [topic.topic_id]
    assert strong.heads.seq(topic.topic_id) == 1


async def test_a_topic_nobody_follows_costs_nothing() -> None:
    strong = Strong()
    topic = await strong.begin()
    strong.heads.follow(topic)
    strong.heads.follow(topic)
    strong.heads.unfollow(topic.topic_id)
    assert len(strong.heads) == 1
    strong.heads.unfollow(topic.topic_id)
    assert len(strong.heads) == 0


@given(st.lists(st.sampled_from(["append", "sync", "follow"]), max_size=25))
def test_the_synced_seq_is_never_ahead_and_ends_at_the_head(steps: list[str]) -> None:
    async def run() -> None:
        strong = Strong()
        topic = await strong.begin()
        synced = 0
        followed = False
        for step in steps:
            if step == "append":
                await strong.append(1 + len(steps) % 3)
            elif step == "sync":
                strong.journal.sync_everything()
                strong.heads.advance()
                synced = topic.log.head_seq
            elif not followed:
                strong.heads.follow(topic)
                followed = True
            if followed:
                assert strong.heads.seq(topic.topic_id) <= synced
        if followed:
            strong.journal.sync_everything()
            strong.heads.advance()
            assert strong.heads.seq(topic.topic_id) == topic.log.head_seq

    asyncio.run(run())
