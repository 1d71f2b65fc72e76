"""The store over a journal made of lists: which calls wait for what, and the effect of a
refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec
import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import NO_QUOTAS, RULES, Rig
from topics_server.engine.commit.pipeline import DISK_FULL, READ_ONLY
from topics_server.values.entries import HeadReserved, RecordsAppended, RecordsDeleted
from topics_server.values.errors import Code, DiskFull, TopicsError
from topics_server.values.limits import HEAD_RESERVE_SEQS
from topics_server.values.model import Durability, TopicConfig, TopicType

pytestmark = pytest.mark.anyio

FSYNC = TopicConfig(durability=Durability.FSYNC)
EPHEMERAL = TopicConfig(durability=Durability.EPHEMERAL)


async def turns(count: int = 5) -> None:
    """Let all ready tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def refused(call: Awaitable[object], code: Code) -> dict[str, object]:
    """The detail of the refusal with which the call must end."""
    with pytest.raises(TopicsError) as refusal:
        await call
    assert refusal.value.code is code
    return refusal.value.detail


# -- append ---------------------------------------------------------------------------------


async def test_an_append_makes_its_topic_in_one_entry() -> None:
    rig = Rig()
    answer = await rig.append("t", 1, 2)
    assert (answer.first_seq, answer.last_seq, answer.head_seq) == (1, 2, 2)
    assert answer.created
    (entry,) = rig.journal.entries
    assert isinstance(entry, RecordsAppended)
    assert entry.creation is not None
    assert not (await rig.append("t", 3)).created


async def test_an_append_answers_once_its_gate_is_met_and_no_sooner() -> None:
    rig = Rig(is_prompt=False)
    rig.journal.events.clear()
    asked = asyncio.create_task(rig.append("t", 1, config=FSYNC))
    await turns()
    rig.journal.write(1)
    await turns()
    assert not asked.done()
    assert rig.registry.find("t") is None, "nobody sees it before it is committed"
    rig.journal.sync(1)
    answer = await asked
    assert answer.sync_ms == 2.0


async def test_an_append_that_may_not_create_says_the_topic_is_not_there() -> None:
    rig = Rig()
    await refused(rig.append("t", 1, create=False), Code.TOPIC_NOT_FOUND)
    config = TopicConfig(auto_create=False)
    await refused(rig.append("t", 1, config=config), Code.TOPIC_NOT_FOUND)
    assert (await rig.append("t", 1, create=True, config=config)).created
    assert rig.journal.submitted[0].lsn == 1


async def test_an_ephemeral_topic_is_journaled_when_it_is_made_and_its_records_never() -> None:
    rig = Rig()
    await rig.append("e", 1, config=EPHEMERAL)
    await rig.append("e", 2)
    assert len(rig.journal.submitted) == 1
    assert rig.store.state("e", touch=False).head_seq == 2


async def test_of_two_appends_that_would_make_a_topic_one_does() -> None:
    rig = Rig(is_prompt=False)
    both = [asyncio.create_task(rig.append("t", n)) for n in (1, 2)]
    await turns()
    assert len(rig.journal.submitted) == 1, "the second waits before it is decided"
    rig.journal.sync(1)
    await turns()
    rig.journal.write(1)
    answers = [await asked for asked in both]
    assert [(a.first_seq, a.created) for a in answers] == [(1, True), (2, False)]


async def test_a_creation_that_failed_can_be_tried_again() -> None:
    rig = Rig(is_prompt=False)
    asked = asyncio.create_task(rig.append("t", 1))
    await turns()
    rig.journal.fail(1, 1, DISK_FULL)
    assert await refused(asked, Code.THROTTLED) == {"limit": "disk"}
    again = asyncio.create_task(rig.append("t", 1))
    await turns()
    rig.journal.sync_everything()
    assert (await again).first_seq == 1


async def test_a_refused_creation_leaves_no_topic_behind() -> None:
    rig = Rig()
    rig.journal.refusal = TopicsError(Code.THROTTLED, "full", {"limit": "journal_queue"})
    await refused(rig.append("t", 1), Code.THROTTLED)
    await refused(rig.store.put_topic("u", TopicConfig(), keep_type=False), Code.THROTTLED)
    assert not rig.registry.pending
    rig.journal.refusal = None
    assert (await rig.append("t", 1)).created


async def test_a_caller_that_goes_away_changes_nothing() -> None:
    rig = Rig(is_prompt=False)
    asked = asyncio.create_task(rig.append("t", 1))
    await turns()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    rig.journal.sync(1)
    assert rig.store.state("t", touch=False).head_seq == 1
    rig.journal.sync_everything()
    follows = asyncio.create_task(rig.append("t", 2))
    await turns()
    rig.journal.sync_everything()
    assert (await follows).first_seq == 2, "the name is not held by a caller that is gone"


async def test_a_retry_of_an_append_in_flight_is_answered_once_the_first_is_safe() -> None:
    rig = Rig(is_prompt=False)
    made = asyncio.create_task(rig.append("t", 0, config=FSYNC))
    await turns()
    rig.journal.sync(1)
    await made
    both = [asyncio.create_task(rig.append("t", 1, key="k")) for _ in range(2)]
    await turns()
    assert len(rig.journal.submitted) == 2
    assert not any(asked.done() for asked in both)
    rig.journal.sync(1)
    first, second = [await asked for asked in both]
    assert (first.deduped, second.deduped) == (False, True)
    assert (second.first_seq, second.last_seq) == (first.first_seq, first.last_seq)


async def test_a_retry_of_a_failed_append_fails_and_the_key_is_free() -> None:
    rig = Rig(is_prompt=False)
    made = asyncio.create_task(rig.append("t", 0))
    await turns()
    rig.journal.sync(1)
    await made
    both = [asyncio.create_task(rig.append("t", 1, key="k")) for _ in range(2)]
    await turns()
    rig.journal.fail(1, 2, DISK_FULL)
    for asked in both:
        await refused(asked, Code.THROTTLED)
    again = asyncio.create_task(rig.append("t", 1, key="k"))
    await turns()
    rig.journal.write(1)
    assert not (await again).deduped


async def test_a_reservation_goes_ahead_of_the_append_that_passes_the_ceiling() -> None:
    rig = Rig()
    await rig.append("e", 1, config=EPHEMERAL)
    topic = rig.registry.find("e")
    assert topic is not None
    topic.ceiling_seq = 2
    rig.journal.submitted.clear()
    asked = asyncio.create_task(rig.append("e", 2, 3))
    await asyncio.sleep(0)
    assert rig.store.state("e", touch=False).head_seq == 1, "it waits in the FIFO"
    assert (await asked).last_seq == 3
    (reservation,) = rig.journal.submitted
    assert isinstance(reservation.entry, HeadReserved)
    assert reservation.sync
    assert topic.ceiling_seq == 3 + HEAD_RESERVE_SEQS


async def test_a_nearly_full_disk_refuses_appends_and_takes_deletes() -> None:
    rig = Rig()
    await rig.append("t", 1, 2)
    rig.store.is_disk_low = True
    assert await refused(rig.append("t", 3), Code.THROTTLED) == {"limit": "min_free_bytes"}
    assert (await rig.delete("t", before_seq=2)).deleted == 1
    assert await rig.store.drop_topic("t", if_empty=False)
    rig.store.is_disk_low = False
    assert (await rig.append("t", 3)).created


async def test_more_topics_than_allowed_are_refused_also_while_one_is_being_made() -> None:
    rig = Rig(is_prompt=False, quotas=msgspec.structs.replace(NO_QUOTAS, max_topics=1))
    asked = asyncio.create_task(rig.append("t", 1))
    await turns()
    detail = await refused(rig.append("u", 1), Code.THROTTLED)
    assert detail == {"limit": "max_topics", "max": 1}
    rig.journal.sync(1)
    await asked
    detail = await refused(rig.store.put_topic("u", TopicConfig(), keep_type=False), Code.THROTTLED)
    assert detail == {"limit": "max_topics", "max": 1}


async def test_more_bytes_than_allowed_are_refused_and_deletes_make_room() -> None:
    rig = Rig(quotas=msgspec.structs.replace(NO_QUOTAS, max_total_bytes=100))
    await rig.append("t", "x" * 60)
    detail = await refused(rig.append("t", "y" * 60), Code.THROTTLED)
    assert detail == {"limit": "max_total_bytes", "max": 100}
    await rig.delete("t", before_seq=2)
    assert (await rig.append("t", "y" * 60)).first_seq == 2


# -- parking --------------------------------------------------------------------------------


async def test_an_append_parks_while_the_tail_is_too_long_and_goes_on_when_it_is_sealed() -> None:
    rig = Rig(quotas=msgspec.structs.replace(NO_QUOTAS, max_tail_records=8))
    await rig.append("t", *range(9))
    asked = asyncio.create_task(rig.append("t", 9))
    await turns()
    assert not asked.done()
    topic = rig.registry.find("t")
    assert topic is not None
    rig.clock.steady_ms += 7.0
    await rig.sealer.tend(topic)
    answer = await asked
    assert answer.first_seq == 10
    assert answer.throttle_wait_ms == 7.0


@pytest.mark.parametrize("quota", [{"max_tail_records": 8}, {"max_tail_bytes": 100}])
async def test_a_waiting_append_is_refused_when_sealing_does_not_catch_up(
    quota: dict[str, int],
) -> None:
    rig = Rig(quotas=msgspec.structs.replace(NO_QUOTAS, **quota))
    await rig.append("t", *range(9))
    asked = asyncio.create_task(rig.append("t", 9))
    await turns()
    rig.clock.steady_ms += 60_000
    rig.notifier.notify_all()
    assert await refused(asked, Code.THROTTLED) == {"limit": "unsealed"}
    assert rig.store.state("t", touch=False).head_seq == 9


@pytest.mark.parametrize("has_room", [False, True])
async def test_a_refused_append_names_a_disk_that_refuses_to_seal(
    monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    rig = Rig(quotas=msgspec.structs.replace(NO_QUOTAS, max_tail_records=8))
    await rig.append("t", *range(9))
    topic = rig.registry.find("t")
    assert topic is not None
    monkeypatch.setattr(rig.sealer, "_may_seal", lambda: has_room)
    if has_room:
        rig.sealer.failures[topic.topic_id] = DiskFull("no space")
    rig.store.checks.is_seal_refused = rig.sealer.is_refused
    asked = asyncio.create_task(rig.append("t", 9))
    await turns()
    rig.clock.steady_ms += 60_000
    rig.notifier.notify_all()
    with pytest.raises(TopicsError, match="the disk is full") as caught:
        await asked
    assert caught.value.detail == {"limit": "unsealed"}


async def test_an_append_whose_topic_was_replaced_while_it_waited_is_decided_anew() -> None:
    rig = Rig(quotas=msgspec.structs.replace(NO_QUOTAS, max_tail_records=8))
    await rig.append("t", *range(9))
    asked = asyncio.create_task(rig.append("t", "later"))
    await turns()
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.store.drop_topic("t", if_empty=False)
    topic.log.tail_count = 0
    rig.notifier.notify_all()
    answer = await asked
    assert (answer.first_seq, answer.created) == (1, True)


async def test_the_tail_of_an_ephemeral_topic_delays_no_append() -> None:
    rig = Rig(quotas=msgspec.structs.replace(NO_QUOTAS, max_tail_records=8))
    await rig.append("e", *range(20), config=EPHEMERAL)
    assert (await rig.append("e", 20)).first_seq == 21


# -- read -----------------------------------------------------------------------------------


async def test_a_read_waits_for_new_records_and_is_notified() -> None:
    rig = Rig()
    await rig.append("t", 1)
    waiting = asyncio.create_task(rig.read("t", 1, wait_ms=60_000))
    await turns()
    assert not waiting.done()
    await rig.append("t", 2)
    assert seqs_of(await waiting) == [2]
    assert rig.notifier.listener_count == 0


async def test_a_read_that_waits_in_vain_answers_empty_when_its_time_is_over() -> None:
    rig = Rig()
    await rig.append("t", 1)
    waiting = asyncio.create_task(rig.read("t", 1, wait_ms=1))
    await turns()
    rig.clock.steady_ms += 1.0
    page = await waiting
    assert page.is_empty
    assert page.caught_up


async def test_a_draining_store_answers_waiting_calls() -> None:
    rig = Rig()
    await rig.append("t", 1)
    waiting = asyncio.create_task(rig.read("t", 1, wait_ms=60_000))
    await turns()
    rig.store.drain()
    assert (await waiting).is_empty
    assert (await rig.read("t", 1, wait_ms=60_000)).is_empty, "and nobody waits any more"


async def test_a_reader_hears_that_its_topic_was_dropped() -> None:
    rig = Rig()
    await rig.append("t", 1)
    waiting = asyncio.create_task(rig.read("t", 1, wait_ms=60_000))
    await turns()
    await rig.store.drop_topic("t", if_empty=False)
    await refused(waiting, Code.TOPIC_NOT_FOUND)


async def test_a_reader_that_is_gone_leaves_no_listener() -> None:
    rig = Rig()
    await rig.append("t", 1)
    waiting = asyncio.create_task(rig.read("t", 1, wait_ms=60_000))
    await turns()
    assert rig.notifier.listener_count == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert rig.notifier.listener_count == 0


async def test_a_read_spans_sealed_and_unsealed_records() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.append("t", 8)
    assert topic.log.sealed_seq == 8
    assert seqs_of(await rig.read("t")) == list(range(1, 10))


async def test_reading_and_touching_count_as_interest_and_looking_does_not() -> None:
    rig = Rig()
    await rig.append("t", 1)
    assert rig.store.state("t", touch=False).last_read_ts is None
    listed = rig.store.list_topics(prefix="", after=None, page_size=10, touch=False)
    assert listed.topics[0].last_read_ts is None
    times: list[int | None] = []
    for step in range(3):
        rig.clock.move(5)
        if step == 0:
            rig.store.state("t", touch=True)
        elif step == 1:
            rig.store.list_topics(prefix="t", after=None, page_size=10, touch=True)
        else:
            await rig.read("t")
        times.append(rig.store.state("t", touch=False).last_read_ts)
    assert times == [rig.clock.wall_ms - 10, rig.clock.wall_ms - 5, rig.clock.wall_ms]


# -- delete ---------------------------------------------------------------------------------


async def test_a_delete_is_urgent_and_as_durable_as_its_topic() -> None:
    rig = Rig()
    await rig.append("t", 1, 2, config=FSYNC)
    answer = await rig.delete("t", before_seq=2)
    assert (answer.deleted, answer.count, answer.earliest_seq, answer.head_seq) == (1, 1, 2, 2)
    last = rig.journal.submitted[-1]
    assert isinstance(last.entry, RecordsDeleted)
    assert (last.urgent, last.sync) == (True, True)


async def test_a_delete_that_hits_nothing_writes_nothing() -> None:
    rig = Rig()
    await rig.append("t", 1, tag="a")
    before = len(rig.journal.submitted)
    assert (await rig.delete("t", tag="b")).deleted == 0
    assert len(rig.journal.submitted) == before


async def test_a_tag_is_found_in_sealed_and_unsealed_records() -> None:
    rig = Rig()
    for tag in ("a", "b"):
        await rig.append("t", *range(4), tag=tag)
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.append("t", 9, tag="a")
    assert (await rig.delete("t", tag="a")).deleted == 5
    assert seqs_of(await rig.read("t")) == [5, 6, 7, 8]


async def test_a_segment_that_was_sealed_during_the_search_is_searched_too() -> None:
    rig = Rig(rules=msgspec.structs.replace(RULES, max_records=4))
    await rig.append("t", *range(4), tag="a")
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.append("t", *range(4), tag="a")

    def seal_the_rest() -> None:
        sealing = rig.sealer.tend(topic).__await__()
        with pytest.raises(StopIteration):
            next(sealing)

    rig.segments.meanwhile = seal_the_rest
    assert (await rig.delete("t", tag="a")).deleted == 8
    searches = [event for event in rig.segments.events if event.startswith("find")]
    assert searches == ["find 1", "find 2"]
    assert seqs_of(await rig.read("t")) == []


async def test_a_read_only_shard_refuses_writes_and_serves_reads() -> None:
    rig = Rig()
    await rig.append("t", 1)
    rig.journal.fail(1, 1_000, READ_ONLY)
    detail = await refused(rig.append("t", 2), Code.STORAGE_READ_ONLY)
    assert detail == {"shard": 1}
    assert seqs_of(await rig.read("t")) == [1]
    assert list(rig.store.read_only_shards()) == [1]


# -- topics ---------------------------------------------------------------------------------


async def test_a_put_is_synced_before_it_is_answered_whatever_the_class() -> None:
    rig = Rig(is_prompt=False)
    asked = asyncio.create_task(rig.store.put_topic("e", EPHEMERAL, keep_type=False))
    await turns()
    rig.journal.write(1)
    await turns()
    assert not asked.done()
    rig.journal.sync(1)
    assert (await asked).created


async def test_a_put_that_changes_nothing_writes_nothing() -> None:
    rig = Rig()
    await rig.store.put_topic("t", FSYNC, keep_type=False)
    before = len(rig.journal.submitted)
    outcome = await rig.store.put_topic("t", FSYNC, keep_type=False)
    assert (outcome.created, outcome.config) == (False, FSYNC)
    assert len(rig.journal.submitted) == before


async def test_a_put_that_leaves_the_type_out_keeps_it() -> None:
    rig = Rig()
    await rig.store.put_topic("q", TopicConfig(type=TopicType.QUEUE), keep_type=False)
    outcome = await rig.store.put_topic("q", TopicConfig(ttl_ms=5), keep_type=True)
    assert outcome.config == TopicConfig(type=TopicType.QUEUE, ttl_ms=5)
    await refused(
        rig.store.put_topic("q", TopicConfig(), keep_type=False), Code.TOPIC_EXISTS_INCOMPATIBLE
    )
    assert rig.store.queue_topics == 1


async def test_an_append_waits_for_a_drop_in_flight_and_makes_the_next_epoch() -> None:
    rig = Rig(is_prompt=False)
    made = asyncio.create_task(rig.append("t", 1))
    await turns()
    rig.journal.sync(1)
    await made
    dropping = asyncio.create_task(rig.store.drop_topic("t", if_empty=False))
    await turns()
    asked = asyncio.create_task(rig.append("t", 2))
    await turns()
    assert len(rig.journal.submitted) == 2
    for _ in range(3):
        rig.journal.sync_everything()
        await turns()
    assert await dropping
    answer = await asked
    assert (answer.first_seq, answer.created) == (1, True)
    assert rig.store.state("t", touch=False).epoch == 2


async def test_a_drop_of_an_empty_topic_waits_for_what_would_fill_it() -> None:
    rig = Rig(is_prompt=False)
    made = asyncio.create_task(rig.store.put_topic("t", TopicConfig(), keep_type=False))
    await turns()
    rig.journal.sync(1)
    await made
    filling = asyncio.create_task(rig.append("t", 1))
    await turns()
    dropping = asyncio.create_task(rig.store.drop_topic("t", if_empty=True))
    await turns()
    assert len(rig.journal.submitted) == 2, "it is not decided yet"
    rig.journal.write(1)
    await filling
    await refused(dropping, Code.TOPIC_NOT_EMPTY)


async def test_dropping_an_absent_topic_is_reported() -> None:
    rig = Rig()
    assert not await rig.store.drop_topic("t", if_empty=False)
    await refused(rig.read("t"), Code.TOPIC_NOT_FOUND)
    await refused(rig.delete("t", before_seq=1), Code.TOPIC_NOT_FOUND)


async def test_topics_are_listed_in_pages_by_name() -> None:
    rig = Rig()
    for name in ("b", "a", "c"):
        await rig.append(name, 1)
    page = rig.store.list_topics(prefix="", after=None, page_size=2, touch=False)
    assert ([state.name for state in page.topics], page.next_after) == (["a", "b"], "b")


async def test_the_figures_are_those_of_all_topics() -> None:
    rig = Rig()
    await rig.append("t", 1, 2)
    await rig.append("e", 3, config=EPHEMERAL)
    assert (rig.store.topic_count, rig.store.records_live) == (2, 3)
    assert rig.store.bytes_live == rig.registry.bytes_live > 0
    assert rig.store.counts_by_class()[Durability.EPHEMERAL] == 1
    assert rig.store.damaged_records == 0
    assert (await rig.delete("t", before_seq=3)).count == 0
    assert rig.store.records_live == 1
