"""Transfers between topics over a journal that the test drives: order, refusals, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence

import pytest

from tests.garbage import nothing_for_the_collector
from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import ListJournal, Rig, throttled
from topics_server.engine.answers import Appended
from topics_server.engine.commit.pipeline import DISK_FULL, READ_ONLY
from topics_server.engine.commit.transfers import OutcomeUnknown, SourceGone
from topics_server.engine.topic.quotas import Quotas
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import RecordsAppended, RecordsDeleted, Source, TopicPut
from topics_server.values.errors import Code, StartRefused, TopicsError
from topics_server.values.limits import MOVE_RECORDS_MAX
from topics_server.values.model import Discard, Durability, TopicConfig, TopicType

pytestmark = pytest.mark.anyio

JOBS, DEAD = 1, 2
JOBS_SHARD, DEAD_SHARD = 1, 0


def copies(*datas: object, meta: dict[str, object] | None = None) -> bytes:
    more = {} if meta is None else {"meta": meta}
    return json.dumps({"records": [{"data": data, **more} for data in datas]}).encode()


async def made(config: TopicConfig | None = None, *, has_dead: bool = True) -> Rig:
    """Topics `jobs` with three records and `dead`, on different shards; nothing in flight."""
    rig = Rig(is_prompt=False)
    jobs = TopicConfig(type=TopicType.QUEUE)
    await done(rig, rig.append("jobs", 1, 2, 3, config=jobs))
    if has_dead:
        await done(rig, rig.store.put_topic("dead", config or TopicConfig(), keep_type=False))
    rig.journal.submitted.clear()
    return rig


async def done(rig: Rig, work: object) -> object:
    """Run while the disk works."""
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]
    while not task.done():
        await asyncio.sleep(0)
        rig.journal.sync_everything()
    return task.result()


async def begun(rig: Rig, seqs: Sequence[int] = (1, 3)) -> asyncio.Task[Appended]:
    """A transfer whose append was submitted."""
    body = copies(*seqs)
    task = asyncio.ensure_future(rig.store.append_derived("dead", body, Source(JOBS, [*seqs])))
    await asyncio.sleep(0)
    return task


def topic_of(rig: Rig, name: str) -> Topic:
    topic = rig.registry.find(name)
    assert topic is not None
    return topic


async def live(rig: Rig, name: str) -> list[int]:
    return [] if rig.registry.find(name) is None else seqs_of(await rig.read(name))


def kinds(journal: ListJournal) -> list[type]:
    return [type(entry) for entry in journal.entries]


async def test_the_source_is_deleted_in_the_turn_in_which_its_copy_is_synced() -> None:
    rig = await made()
    task = await begun(rig)
    rig.journal.write(DEAD_SHARD)
    assert kinds(rig.journal) == [RecordsAppended], "written is not synced, whatever the class"
    assert await live(rig, "dead") == []
    rig.journal.sync(DEAD_SHARD)
    assert kinds(rig.journal) == [RecordsAppended, RecordsDeleted]
    assert rig.journal.submitted[1].urgent
    assert (await live(rig, "jobs"), await live(rig, "dead")) == ([1, 2, 3], [1, 2])
    assert not task.done()
    rig.journal.write(JOBS_SHARD)
    answer = await task
    assert (answer.first_seq, answer.last_seq, answer.created) == (1, 2, False)
    assert (await live(rig, "jobs"), await live(rig, "dead")) == ([2], [1, 2])
    assert rig.moves.open_count == 0


async def test_no_snapshot_starts_behind_an_open_mark() -> None:
    rig = await made()
    task = await begun(rig)
    lsn = rig.journal.submitted[0].lsn
    rig.journal.sync(DEAD_SHARD)
    assert rig.commits.oldest_pending_lsn() == lsn + 1, "its append is applied"
    assert rig.commits.start_lsn() == lsn
    await done(rig, task)
    assert rig.commits.start_lsn() == rig.commits.next_lsn
    await rig.checkpointer.take()
    assert rig.snapshots.images[-1].start_lsn == lsn + 2


async def test_a_checkpoint_in_the_middle_of_a_move_starts_at_its_append() -> None:
    rig = await made()
    rig.journal.refusal = None
    task = await begun(rig)
    lsn = rig.journal.submitted[0].lsn
    rig.journal.refusal = throttled()
    rig.journal.sync(DEAD_SHARD)
    await rig.checkpointer.take()
    assert rig.snapshots.images[-1].start_lsn == lsn
    rig.journal.refusal = None
    await done(rig, task)


async def test_a_cancelled_caller_changes_nothing() -> None:
    rig = await made()
    task = await begun(rig)
    task.cancel()
    await asyncio.sleep(0)
    rig.journal.sync(DEAD_SHARD)
    rig.journal.write(JOBS_SHARD)
    assert (await live(rig, "jobs"), await live(rig, "dead")) == ([2], [1, 2])
    assert rig.moves.open_count == 0


async def test_a_delete_that_is_refused_is_tried_again() -> None:
    rig = await made()
    task = await begun(rig)
    rig.journal.refusal = throttled()
    rig.journal.sync(DEAD_SHARD)
    assert kinds(rig.journal) == [RecordsAppended]
    assert rig.moves.open_count == 1
    rig.journal.refusal = None
    await done(rig, task)
    assert await live(rig, "jobs") == [2]


async def test_a_delete_whose_write_fails_is_tried_again() -> None:
    rig = await made()
    task = await begun(rig)
    rig.journal.sync(DEAD_SHARD)
    rig.journal.fail(JOBS_SHARD, rig.journal.submitted[1].lsn, DISK_FULL)
    assert await live(rig, "jobs") == [1, 2, 3]
    await done(rig, task)
    assert await live(rig, "jobs") == [2]


async def test_an_append_that_fails_for_sure_leaves_the_source_as_it_was() -> None:
    rig = await made()
    task = await begun(rig)
    rig.journal.fail(DEAD_SHARD, rig.journal.submitted[0].lsn, DISK_FULL)
    with pytest.raises(TopicsError) as failed:
        await task
    assert not isinstance(failed.value, OutcomeUnknown)
    assert (failed.value.code, rig.moves.open_count) == (Code.THROTTLED, 0)
    assert rig.commits.start_lsn() == rig.commits.next_lsn
    assert (await live(rig, "jobs"), await live(rig, "dead")) == ([1, 2, 3], [])


@pytest.mark.parametrize("half", ["append", "delete"])
async def test_a_failed_sync_leaves_the_mark_open_until_a_restart(half: str) -> None:
    rig = await made()
    task = await begun(rig)
    lsn = rig.journal.submitted[0].lsn
    if half == "append":
        rig.journal.fail(DEAD_SHARD, lsn, READ_ONLY)
    else:
        rig.journal.sync(DEAD_SHARD)
        rig.journal.fail(JOBS_SHARD, lsn + 1, READ_ONLY)
    with pytest.raises(OutcomeUnknown) as failed:
        await task
    assert failed.value.code is Code.STORAGE_READ_ONLY
    assert rig.moves.open_count == 1
    assert rig.commits.start_lsn() == lsn


async def test_a_shard_that_takes_nothing_refuses_before_anything_is_staged() -> None:
    rig = await made()
    rig.journal.fail(DEAD_SHARD, rig.commits.next_lsn, READ_ONLY)
    with pytest.raises(TopicsError) as refused:
        await rig.store.append_derived("dead", copies(1), Source(JOBS, [1]))
    assert not isinstance(refused.value, OutcomeUnknown)
    assert rig.moves.open_count == 0


async def test_an_ephemeral_topic_takes_a_copy_as_it_takes_all_it_has() -> None:
    rig = await made(TopicConfig(durability=Durability.EPHEMERAL))
    task = await begun(rig)
    assert kinds(rig.journal) == [RecordsDeleted], "a copy without a frame"
    await done(rig, task)
    assert (await live(rig, "jobs"), await live(rig, "dead")) == ([2], [1, 2])


async def test_an_absent_topic_is_made_unless_it_must_not_be() -> None:
    rig = await made(has_dead=False)
    with pytest.raises(TopicsError) as refused:
        await rig.store.append_derived("dead", copies(1), Source(JOBS, [1]), create=False)
    assert refused.value.code is Code.TOPIC_NOT_FOUND
    task = await begun(rig)
    entry = rig.journal.entries[0]
    assert isinstance(entry, RecordsAppended)
    assert isinstance(entry.creation, TopicPut)
    assert rig.journal.submitted[0].sync
    answer = await done(rig, task)
    assert isinstance(answer, Appended)
    assert answer.created
    assert topic_of(rig, "dead").config == TopicConfig()


async def test_a_creation_that_is_refused_leaves_no_pending_topic() -> None:
    rig = await made(has_dead=False)
    rig.journal.refusal = throttled()
    with pytest.raises(TopicsError):
        await rig.store.append_derived("dead", copies(1), Source(JOBS, [1]))
    assert (rig.registry.pending, rig.moves.open_count) == ({}, 0)


async def test_the_limits_of_appends_are_not_those_of_moves() -> None:
    rig = await made()
    body = copies(1, meta={"stamp": "x" * 70_000})
    await done(rig, rig.store.append_derived("dead", body, Source(JOBS, [1])))
    body = copies(2, meta={f"key-{number}": number for number in range(67)})
    await done(rig, rig.store.append_derived("dead", body, Source(JOBS, [2])))
    assert await live(rig, "dead") == [1, 2]


async def test_a_move_waits_while_sealing_is_far_behind() -> None:
    quotas = Quotas(max_topics=0, max_total_bytes=0, max_tail_records=2, max_tail_bytes=1 << 40)
    rig = Rig(quotas=quotas)
    await rig.append("jobs", 1, config=TopicConfig(type=TopicType.QUEUE))
    await rig.append("dead", *range(8))
    move = asyncio.ensure_future(rig.store.append_derived("dead", copies(1), Source(JOBS, [1])))
    for _ in range(5):
        await asyncio.sleep(0)
    assert rig.moves.open_count == 0, "nothing is under way yet"
    assert not move.done()
    await rig.sealer.tend(topic_of(rig, "dead"))
    assert (await move).first_seq == 9


async def test_a_mark_of_the_most_records_and_the_largest_seqs_fits_its_frame() -> None:
    from topics_server.wal.format.frames import encode_entry

    source = Source(2**63, [2**63 - 1] * MOVE_RECORDS_MAX)
    put = TopicPut(1, "x" * 255, 1, TopicConfig(dead_letter="y" * 255), 1)
    entry = RecordsAppended(1, 1, 1, 1, b"", "k" * 256, put, source=source)
    assert len(b"".join(encode_entry(1, entry))) > 9 * MOVE_RECORDS_MAX


async def test_a_full_topic_refuses_and_nothing_is_moved() -> None:
    rig = await made(TopicConfig(cap_records=1, discard=Discard.REJECT))
    with pytest.raises(TopicsError) as refused:
        await rig.store.append_derived("dead", copies(1, 3), Source(JOBS, [1, 3]))
    assert refused.value.code is Code.TOPIC_FULL
    assert await live(rig, "jobs") == [1, 2, 3]


# -- changes at the source meanwhile --------------------------------------------------------


async def test_only_live_records_are_moved() -> None:
    rig = await made()
    await done(rig, rig.delete("jobs", before_seq=2))
    for seqs in ([1], [1, 2], [4], [2, 9]):
        with pytest.raises(SourceGone):
            await rig.store.append_derived("dead", copies(*seqs), Source(JOBS, seqs))
    with pytest.raises(SourceGone):
        await rig.store.append_derived("dead", copies(1), Source(77, [1]))
    rig.store.start_delete(topic_of(rig, "jobs"), [2])
    with pytest.raises(SourceGone):
        await rig.store.append_derived("dead", copies(2), Source(JOBS, [2]))
    assert await live(rig, "dead") == []


async def test_nothing_is_moved_out_of_a_topic_that_is_being_dropped() -> None:
    rig = await made()
    drop = asyncio.ensure_future(rig.store.drop_topic("jobs", if_empty=False))
    await asyncio.sleep(0)
    with pytest.raises(SourceGone):
        await rig.store.append_derived("dead", copies(1), Source(JOBS, [1]))
    await done(rig, drop)


async def test_a_source_that_is_dropped_meanwhile_ends_the_move() -> None:
    rig = await made()
    task = await begun(rig)
    drop = asyncio.ensure_future(rig.store.drop_topic("jobs", if_empty=False))
    await asyncio.sleep(0)
    rig.journal.sync(DEAD_SHARD)
    assert not task.done()
    await done(rig, drop)
    await task
    assert kinds(rig.journal).count(RecordsDeleted) == 0
    assert await live(rig, "dead") == [1, 2]


async def test_the_delete_waits_for_a_configuration_under_way() -> None:
    rig = await made()
    task = await begun(rig)
    fsync = TopicConfig(type=TopicType.QUEUE, durability=Durability.FSYNC)
    put = asyncio.ensure_future(rig.store.put_topic("jobs", fsync, keep_type=True))
    await asyncio.sleep(0)
    rig.journal.sync(DEAD_SHARD)
    assert RecordsDeleted not in kinds(rig.journal)
    rig.journal.sync(JOBS_SHARD)
    await put
    assert kinds(rig.journal)[-1] is RecordsDeleted
    assert rig.journal.submitted[-1].sync, "with the gate of the new class"
    await done(rig, task)
    assert await live(rig, "jobs") == [2]


async def test_a_failed_delete_of_another_caller_is_repeated() -> None:
    rig = await made()
    task = await begun(rig)
    other = rig.store.start_delete(topic_of(rig, "jobs"), [1, 2, 3])
    assert other.ticket is not None
    rig.journal.sync(DEAD_SHARD)
    assert kinds(rig.journal).count(RecordsDeleted) == 1, "all of it is being deleted"
    rig.journal.fail(JOBS_SHARD, other.ticket.lsn, DISK_FULL)
    await done(rig, task)
    assert await live(rig, "jobs") == [2]


# -- after a restart -----------------------------------------------------------------------


async def test_open_marks_are_completed_and_others_change_nothing() -> None:
    rig = await made()
    marks = [Source(JOBS, [3]), Source(JOBS, [1, 3]), Source(JOBS, [9]), Source(77, [1])]
    assert await done(rig, rig.moves.complete(marks)) == 2
    assert await live(rig, "jobs") == [2]
    assert kinds(rig.journal) == [RecordsDeleted], "one a topic"
    assert await rig.moves.complete(marks) == 0


async def test_a_start_that_cannot_complete_its_marks_is_refused() -> None:
    rig = await made()
    rig.journal.refusal = throttled()
    with pytest.raises(StartRefused, match="1 records of topic jobs were moved"):
        await rig.moves.complete([Source(JOBS, [1])])
    rig.journal.refusal = None
    task = asyncio.ensure_future(rig.moves.complete([Source(JOBS, [1])]))
    await asyncio.sleep(0)
    rig.journal.fail(JOBS_SHARD, rig.journal.submitted[-1].lsn, READ_ONLY)
    with pytest.raises(StartRefused, match="sync failed"):
        await task


@pytest.mark.parametrize("reason", [READ_ONLY, DISK_FULL])
async def test_a_move_that_fails_leaves_nothing_for_the_collector(reason: str) -> None:
    rig = await made()
    with nothing_for_the_collector():
        task = await begun(rig)
        rig.journal.fail(DEAD_SHARD, rig.journal.submitted[0].lsn, reason)
        with contextlib.suppress(TopicsError):
            await task
            raise AssertionError("the move fails")
        rig.journal.submitted.clear()
        del task
        await asyncio.sleep(0)
