"""Background work on sealed data: due jobs, their order, and the effect of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import RULES, Rig, body_of
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.delete import decide_delete
from topics_server.values.entries import Entry, FloorMoved, RecordsAppended
from topics_server.values.errors import StorageError
from topics_server.values.limits import SEAL_BY_AGE_BYTES_MIN
from topics_server.values.model import Durability, TopicConfig

pytestmark = pytest.mark.anyio

COLD = msgspec.structs.replace(RULES, has_cold=True)


def topic_of(rig: Rig, name: str = "t") -> Topic:
    topic = rig.registry.find(name)
    assert topic is not None
    return topic


def commit_now(rig: Rig, topic: Topic, entry: Entry) -> None:
    """The entry is applied and synced before this returns."""
    rig.commits.submit(entry, gate_of(entry, topic), topic)
    rig.journal.sync_everything()


def append_now(rig: Rig, topic: Topic, count: int) -> None:
    """Append this many records within one turn of the loop."""
    body, decoded = body_of(*range(count))
    first_seq = topic.log.head_seq + 1
    commit_now(
        rig,
        topic,
        RecordsAppended(
            topic.topic_id, first_seq, count, rig.clock.now_ms(), body, decoded=decoded
        ),
    )


def delete_now(rig: Rig, topic: Topic, before_seq: int) -> None:
    """Delete within one turn of the loop."""
    entry = decide_delete(topic, before_seq, None, {}, rig.clock.now_ms())
    assert entry is not None
    commit_now(rig, topic, entry)


def at_each_step(rig: Rig, change: Callable[[], None]) -> None:
    """Call `change` in the middle of each of the next 50 jobs on files."""
    left = 50

    def again() -> None:
        nonlocal left
        left -= 1
        change()
        rig.segments.meanwhile = again if left else None

    rig.segments.meanwhile = again


async def worked(rig: Rig) -> None:
    """Let the sealer do its due work, and stop it."""
    task = asyncio.create_task(rig.sealer.run())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done(), "the sealer ended by itself"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# -- seal -----------------------------------------------------------------------------------


async def test_a_full_run_is_sealed_by_itself_and_its_payload_leaves_the_tail() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    await worked(rig)
    log = topic_of(rig).log
    assert (log.sealed_seq, log.tail_count) == (8, 0)
    assert rig.sealer.sealed_count == 1
    assert seqs_of(await rig.read("t")) == list(range(1, 9))


async def test_a_short_run_is_left_alone() -> None:
    rig = Rig()
    await rig.append("t", *range(7))
    await worked(rig)
    assert rig.segments.events == []


async def test_only_synced_records_are_sealed() -> None:
    rig = Rig(is_prompt=False)
    made = asyncio.create_task(rig.store.create_topic("t"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rig.journal.sync(1)
    await made
    asked = asyncio.create_task(rig.append("t", *range(8)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rig.journal.write(1)
    await asked
    await rig.sealer.tend(topic_of(rig))
    assert rig.segments.events == []
    rig.journal.sync(1)
    await rig.sealer.tend(topic_of(rig))
    assert rig.segments.events == ["put 1"]


async def test_a_run_of_some_size_is_sealed_by_age_and_a_small_one_never() -> None:
    rig = Rig(rules=msgspec.structs.replace(RULES, max_records=1_000))
    await rig.append("large", "x" * SEAL_BY_AGE_BYTES_MIN)
    await rig.append("small", "x")
    await worked(rig)
    assert rig.segments.events == []
    rig.clock.move(RULES.max_age_ms)
    await worked(rig)
    assert rig.segments.events == ["put 1"]
    assert topic_of(rig, "large").log.tail_count == 0
    assert topic_of(rig, "small").log.tail_count == 1


async def test_ephemeral_records_are_never_sealed() -> None:
    rig = Rig()
    await rig.append("t", *range(20), config=TopicConfig(durability=Durability.EPHEMERAL))
    await worked(rig)
    await rig.sealer.seal_tails(0)
    assert rig.segments.events == []


async def test_before_a_checkpoint_large_tails_are_sealed_and_small_ones_stay() -> None:
    rig = Rig(rules=msgspec.structs.replace(RULES, max_records=1_000))
    await rig.append("large", "x" * SEAL_BY_AGE_BYTES_MIN, "y" * SEAL_BY_AGE_BYTES_MIN)
    await rig.append("small", "x" * SEAL_BY_AGE_BYTES_MIN)
    await rig.sealer.seal_tails(2 * SEAL_BY_AGE_BYTES_MIN)
    assert topic_of(rig, "large").log.tail_count == 0
    assert topic_of(rig, "small").log.tail_count == 1


async def test_a_failure_before_a_checkpoint_stops_no_checkpoint() -> None:
    rig = Rig(rules=msgspec.structs.replace(RULES, max_records=1_000))
    await rig.append("t", "x" * SEAL_BY_AGE_BYTES_MIN)
    rig.segments.fault = StorageError("no room")
    await rig.sealer.seal_tails(1)
    assert rig.sealer.failed_count == 1
    assert topic_of(rig).log.tail_count == 1


@pytest.mark.parametrize("force_seal", [False, True])
async def test_a_topic_that_grows_as_fast_as_it_is_sealed_keeps_no_other_waiting(
    force_seal: bool,
) -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    await rig.append("u", *range(8))
    topic = topic_of(rig)
    at_each_step(rig, lambda: append_now(rig, topic, 8))
    await rig.sealer.tend(topic, force_seal=force_seal)
    assert rig.segments.events[-1:] == ["put 1"]
    assert topic.log.tail_count == 8
    await worked(rig)
    assert topic_of(rig, "u").log.sealed_seq == 8, "the next in the line"
    assert topic.log.tail_count == 0, "and what it grew by is due again"


async def test_a_requested_seal_ends_while_the_topics_grow() -> None:
    rig = Rig()
    await rig.append("t", *range(12))
    await rig.append("u", *range(12))
    grown = topic_of(rig), topic_of(rig, "u")

    def grow() -> None:
        for topic in grown:
            append_now(rig, topic, 8)

    at_each_step(rig, grow)
    assert await rig.sealer.seal_topics(["t", "u"]) == (0, 4)
    for topic in grown:
        assert 12 <= topic.log.sealed_seq < topic.log.head_seq


async def test_a_requested_seal_of_an_ephemeral_topic_counts_what_it_had() -> None:
    rig = Rig()
    await rig.append("t", *range(12))
    await rig.append("e", *range(3), config=TopicConfig(durability=Durability.EPHEMERAL))
    ephemeral = topic_of(rig, "e")
    rig.segments.meanwhile = lambda: append_now(rig, ephemeral, 8)
    assert await rig.sealer.seal_topics(["t", "e"]) == (3, 2)


# -- flip, drop -----------------------------------------------------------------------------


async def test_what_died_while_its_segment_was_written_is_flipped_after_it() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    topic = topic_of(rig)

    rig.segments.meanwhile = lambda: delete_now(rig, topic, 4)
    await rig.sealer.tend(topic)
    assert rig.segments.events == ["put 1", "flip [1]"]
    assert rig.segments.kept[1][1].disk_flags == bytes([1, 1, 1, 0, 0, 0, 0, 0])
    assert not topic.files.pending


async def test_a_delete_of_sealed_records_is_flipped_by_itself() -> None:
    rig = Rig()
    await rig.append("t", *range(8), tag="a")
    await worked(rig)
    await rig.delete("t", before_seq=3)
    await worked(rig)
    assert rig.segments.kept[1][1].disk_flags[:3] == bytes([1, 1, 0])


async def test_deletes_of_a_moment_are_flipped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one at once, those that follow when the moment is over."""
    monkeypatch.setattr("topics_server.engine.background.sealer._FLIPS_EVERY_S", 0.05)
    rig = Rig()
    await rig.append("t", *range(8))
    await worked(rig)
    rig.segments.events.clear()
    for before_seq in (2, 3, 4, 5):
        await rig.delete("t", before_seq=before_seq)
        await worked(rig)
    assert rig.segments.events == ["flip [1]"]
    topic = topic_of(rig)
    assert topic.files.pending
    for _ in range(1000):
        if not topic.files.pending:
            break
        await asyncio.sleep(0.005)
        await worked(rig)
    assert rig.segments.events == ["flip [1]", "flip [1]"]
    assert rig.segments.kept[1][1].disk_flags == bytes([1, 1, 1, 1, 0, 0, 0, 0])
    await asyncio.sleep(0.2)
    await worked(rig)
    assert len(rig.segments.events) == 2, "nothing died since"


async def test_a_topic_that_loses_records_all_the_time_keeps_no_other_waiting() -> None:
    rig = Rig()
    await rig.append("t", *range(64))
    await worked(rig)
    topic = topic_of(rig)
    delete_now(rig, topic, 2)
    rig.segments.events.clear()
    at_each_step(rig, lambda: delete_now(rig, topic, topic.earliest_seq(rig.clock.now_ms()) + 1))
    await rig.sealer.tend(topic)
    assert rig.segments.events.count("flip [1]") == 1
    rig.segments.meanwhile = None
    await worked(rig)
    assert not topic.files.pending, "what was deleted meanwhile is due again"


async def test_a_delete_is_synced_before_its_flag_is_set() -> None:
    """The next start compares flags with deletes: a flag without its delete counts as damage."""
    rig = Rig(is_prompt=False)
    appended = asyncio.ensure_future(rig.append("t", *range(8)))
    await asyncio.sleep(0)
    rig.journal.sync_everything()
    await appended
    await rig.sealer.tend(topic_of(rig))
    deleted = asyncio.ensure_future(rig.delete("t", before_seq=3))
    await asyncio.sleep(0)
    rig.journal.write(1)
    await deleted
    rig.journal.events.clear()
    rig.journal.holds.clear()
    await rig.sealer.tend(topic_of(rig))
    assert rig.journal.events == ["sync_all", "flip [1]"]
    assert 1 in rig.journal.holds, "the end mark says so as well, before the flag"


async def test_flips_of_a_damaged_segment_stay_pending() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    await worked(rig)
    topic = topic_of(rig)
    topic.files.untrusted = frozenset({1})
    await rig.delete("t", before_seq=3)
    await rig.sealer.tend(topic)
    assert list(topic.files.pending) == [1]
    assert "flip [1]" not in rig.segments.events
    topic.files.untrusted = frozenset()
    topic.files.flips_done(topic.files.due_flips(), {})
    assert topic.files.untrusted == {1}


async def test_a_healed_segment_is_dropped_after_the_second_snapshot_of_the_run() -> None:
    """Two snapshots are kept, and a start may use either of them."""
    rig = Rig()
    await rig.append("t", *range(8))
    await worked(rig)
    topic = topic_of(rig)
    topic.files.healed = frozenset({1})
    rig.sealer.adopt(topic)
    await rig.delete("t", before_seq=9)
    for _snapshot in range(2):
        await worked(rig)
        assert topic.log.segment_ids() == (1,)
        await rig.checkpointer.take()
    await worked(rig)
    assert topic.log.segment_ids() == ()


async def test_a_changed_configuration_is_published_where_there_is_a_manifest() -> None:
    rig = Rig()
    await rig.append("t", 1)
    await rig.store.put_topic("t", TopicConfig(ttl_ms=60_000), keep_type=False)
    await worked(rig)
    assert "manifest" not in rig.segments.events
    await rig.append("t", *range(8))
    await worked(rig)
    await rig.store.put_topic("t", TopicConfig(ttl_ms=90_000), keep_type=False)
    await worked(rig)
    assert rig.segments.events[-1] == "manifest"
    assert rig.segments.published_config(1) == TopicConfig(ttl_ms=90_000)
    assert topic_of(rig).files.generation == rig.segments.generation_of(1)


async def test_a_flip_stays_pending_until_it_is_made() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    await worked(rig)
    rig.segments.fault = StorageError("failed")
    await rig.delete("t", before_seq=3)
    with pytest.raises(StorageError):
        await rig.sealer.tend(topic_of(rig))
    assert {key: list(v) for key, v in topic_of(rig).files.pending.items()} == {1: [0, 1]}
    rig.segments.fault = None
    await rig.sealer.tend(topic_of(rig))
    assert not topic_of(rig).files.pending


async def test_a_dead_segment_goes_only_when_what_killed_it_is_synced() -> None:
    rig = Rig(is_prompt=False)
    appending = asyncio.create_task(rig.append("t", *range(8)))
    await asyncio.sleep(0)
    rig.journal.sync(1)
    await appending
    await rig.sealer.tend(topic_of(rig))
    deleting = asyncio.create_task(rig.delete("t", before_seq=9))
    await asyncio.sleep(0)
    rig.journal.write(1)  # written, and so acknowledged; not synced
    assert (await deleting).deleted == 8
    rig.journal.events.clear()
    await rig.sealer.tend(topic_of(rig))
    await rig.sealer.tend(topic_of(rig))
    events = rig.journal.events
    assert events.index("sync_all") < events.index("drop [1]")
    assert topic_of(rig).log.segment_ids() == ()
    assert rig.sealer.dropped_count == 1


async def test_a_dropped_topic_loses_its_files_and_is_tended_no_more() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    await worked(rig)
    await rig.store.drop_topic("t", if_empty=False)
    await worked(rig)
    assert rig.segments.events[-1] == "drop topic 1"
    assert 1 not in rig.segments.kept


async def test_files_of_a_dropped_topic_that_cannot_be_removed_stop_nothing() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    await rig.append("u", *range(8))
    await worked(rig)
    await rig.store.drop_topic("t", if_empty=False)
    rig.segments.fault = StorageError("busy")
    await worked(rig)
    assert rig.sealer.failed_count == 1
    rig.segments.fault = None
    await rig.append("u", *range(8))
    await worked(rig)
    assert topic_of(rig, "u").log.sealed_seq == 16


# -- cold -----------------------------------------------------------------------------------


async def test_all_but_the_newest_segments_move_to_the_cold_folder() -> None:
    rig = Rig(rules=COLD)
    for _ in range(3):
        await rig.append("t", *range(8))
        await worked(rig)
    assert rig.segments.cold == {(1, 1), (1, 2)}
    assert rig.sealer.relocated_count == 2
    assert seqs_of(await rig.read("t")) == list(range(1, 25))


async def test_nothing_moves_without_a_cold_folder() -> None:
    rig = Rig()
    for _ in range(3):
        await rig.append("t", *range(8))
    await worked(rig)
    assert rig.segments.cold == set()
    assert rig.sealer.sealed_count == 3


# -- expiry ---------------------------------------------------------------------------------


async def test_what_is_past_its_ttl_becomes_a_floor_that_is_journaled() -> None:
    rig = Rig()
    await rig.append("t", 1, 2, config=TopicConfig(ttl_ms=100))
    rig.clock.move(101)
    await worked(rig)
    last = rig.journal.submitted[-1]
    assert isinstance(last.entry, FloorMoved)
    assert last.entry.floor.seq == 3
    assert last.urgent, "a full disk does not keep expired records"
    before = len(rig.journal.submitted)
    rig.clock.move(2_000)
    await worked(rig)
    assert len(rig.journal.submitted) == before, "said once"


async def test_an_expired_segment_is_dropped_after_its_floor() -> None:
    rig = Rig()
    await rig.append("t", *range(8), config=TopicConfig(ttl_ms=100))
    await worked(rig)
    rig.clock.move(101)
    await worked(rig)
    rig.clock.move(2_000)
    await worked(rig)
    assert rig.segments.events[-1] == "drop [1]"
    page = await rig.read("t")
    assert page.gap is not None
    assert (page.gap.gap_from, page.gap.gap_to) == (1, 8)


async def test_a_damaged_index_delays_expiry_and_ends_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    await rig.append("t", *range(8), config=TopicConfig(ttl_ms=100))
    await worked(rig)

    def refuse(topic: Topic, now_ms: int) -> None:
        raise StorageError("the index of segment 1 is damaged")

    rig.clock.move(101)
    with monkeypatch.context() as patch:
        patch.setattr("topics_server.engine.background.sealer.decide_expiry", refuse)
        await worked(rig)
        assert not any(event.startswith("drop") for event in rig.segments.events)
    for _ in range(2):
        rig.clock.move(2_000)
        await worked(rig)
    assert rig.segments.events[-1] == "drop [1]"


async def test_a_topic_whose_ttl_was_lifted_expires_no_more() -> None:
    rig = Rig()
    await rig.append("t", 1, config=TopicConfig(ttl_ms=100))
    await rig.store.put_topic("t", TopicConfig(), keep_type=True)
    rig.clock.move(1_000)
    await worked(rig)
    assert seqs_of(await rig.read("t")) == [1]
    assert not isinstance(rig.journal.entries[-1], FloorMoved)


async def test_expiry_on_a_shard_that_takes_no_writes_hides_records_all_the_same() -> None:
    rig = Rig()
    await rig.append("t", 1, config=TopicConfig(ttl_ms=100))
    rig.journal.fail(1, 1_000, "read_only")
    rig.clock.move(101)
    await worked(rig)
    page = await rig.read("t")
    assert seqs_of(page) == []
    assert page.gap is not None


# -- failures and start -----------------------------------------------------------------------


async def test_a_failed_seal_is_counted_and_tried_again_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topics_server.engine.background.sealer._RETRY_S", 0.0)
    rig = Rig()
    await rig.append("t", *range(8))
    rig.segments.fault = StorageError("no room")
    task = asyncio.create_task(rig.sealer.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert rig.sealer.failed_count > 0
    assert seqs_of(await rig.read("t")) == list(range(1, 9))
    rig.segments.fault = None
    for _ in range(200):
        await asyncio.sleep(0.001)
        if topic_of(rig).log.sealed_seq == 8:
            break
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert topic_of(rig).log.sealed_seq == 8


async def test_adopted_topics_are_looked_at_for_what_the_last_run_left() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    topic = topic_of(rig)
    await rig.sealer.tend(topic)
    await rig.delete("t", before_seq=9)
    fresh = Rig()
    fresh.segments.kept = rig.segments.kept
    fresh.registry.adopt(topic)
    fresh.sealer.adopt(topic)
    await worked(fresh)
    assert fresh.segments.events[-1] == "drop [1]"


async def test_a_reader_hears_of_a_seal() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    heard: list[int] = []
    rig.notifier.add(1, lambda: heard.append(topic_of(rig).log.sealed_seq))
    await rig.sealer.tend(topic_of(rig))
    assert 8 in heard, "an append that parked goes on"
