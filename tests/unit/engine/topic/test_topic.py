"""One topic: deciding, staging, applying, recovering."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tests.unit.engine.drive import Driver, seqs_of
from topics_server.engine.background.capture import capture
from topics_server.engine.background.recovery import finish_topic
from topics_server.engine.commit import gates
from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.append import decide_append
from topics_server.engine.topic.writes.apply import apply_entry
from topics_server.engine.topic.writes.configure import decide_drop, decide_put, decide_reservation
from topics_server.engine.topic.writes.delete import decide_delete, segments_to_search
from topics_server.values.appends import decode_append
from topics_server.values.entries import (
    Floor,
    FloorMoved,
    HeadReserved,
    RecordsAppended,
    RecordsDeleted,
    TopicPut,
)
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import HEAD_RESERVE_SEQS
from topics_server.values.model import (
    Durability,
    Gate,
    LossReason,
    SeqRun,
    TagMatch,
    TopicConfig,
    TopicType,
)

EPHEMERAL = TopicConfig(durability=Durability.EPHEMERAL)


def appended(driver: Driver, *records: object, key: str | None = None) -> RecordsAppended:
    entry = driver.append(*records, key=key)
    assert isinstance(entry, RecordsAppended)
    return entry


def deleted(topic_id: int, first: int, last: int) -> RecordsDeleted:
    firsts, lasts = np.array([first], "<u8"), np.array([last], "<u8")
    return RecordsDeleted(topic_id, 5, firsts.tobytes(), lasts.tobytes())


# -- append ---------------------------------------------------------------------------------


def test_seqs_start_at_one_and_are_contiguous() -> None:
    driver = Driver()
    assert appended(driver, 1, 2).first_seq == 1
    assert appended(driver, 3).first_seq == 3
    assert driver.topic.log.head_seq == 3


def test_an_empty_append_is_refused() -> None:
    with pytest.raises(TopicsError) as refusal:
        Driver().append()
    assert refusal.value.code is Code.INVALID_REQUEST
    assert refusal.value.detail == {"field": "records"}


def test_time_never_goes_backwards_within_a_topic() -> None:
    driver = Driver()
    first = appended(driver, 1)
    driver.now_ms -= 500
    held = driver.decide(driver.body(2))
    assert isinstance(held, RecordsAppended)
    assert held.ts == first.ts
    driver.now_ms += 600
    ahead = driver.decide(driver.body(2))
    assert isinstance(ahead, RecordsAppended)
    driver.hold(ahead)
    driver.now_ms -= 50
    after = driver.decide(driver.body(3))
    assert isinstance(after, RecordsAppended)
    assert after.ts == ahead.ts > driver.now_ms


def test_a_repeated_key_gets_the_original_seqs() -> None:
    driver = Driver()
    appended(driver, 1, 2, key="k")
    assert driver.append(7, key="k") == Duplicate(1, 2)
    assert driver.topic.log.head_seq == 2
    driver.now_ms += driver.topic.config.idempotency_window_ms
    assert appended(driver, 7, key="k").first_seq == 3


def test_a_key_in_the_body_wins_and_is_the_one_remembered() -> None:
    driver = Driver()
    body = b'{"records":[{"data":1}],"idempotency_key":"inside"}'
    entry = driver.append_body(body, key="header")
    assert isinstance(entry, RecordsAppended)
    assert entry.header_key is None
    assert isinstance(driver.append_body(body), Duplicate)
    assert isinstance(driver.append(1, key="header"), RecordsAppended)


def test_a_key_in_flight_names_the_entry_to_wait_for() -> None:
    driver = Driver()
    entry = driver.decide(driver.body(1, 2), "k")
    assert isinstance(entry, RecordsAppended)
    lsn = driver.hold(entry)
    driver.now_ms += 10**9
    assert driver.decide(driver.body(1, 2), "k") == Duplicate(1, 2, lsn)
    driver.release()
    assert driver.topic.dedupe.find("k", 10**10, driver.now_ms) == Duplicate(1, 2)


def test_an_undone_append_was_never_there() -> None:
    driver = Driver(TopicConfig(cap_records=10))
    appended(driver, 1, 2)
    before = capture(driver.topic)
    lsns = []
    for number in range(5):
        entry = driver.decide(driver.body(*range(4)), f"k{number}")
        assert isinstance(entry, RecordsAppended)
        lsns.append(driver.hold(entry))
    assert driver.topic.staged_seq == 22
    driver.undo(lsns[2])
    assert driver.topic.staged_seq == 10
    driver.undo(lsns[0])
    assert driver.topic.staged_seq == driver.topic.log.head_seq == 2
    assert capture(driver.topic) == before
    again = driver.decide(driver.body(9), "k3")
    assert isinstance(again, RecordsAppended)
    assert (again.first_seq, again.floor) == (3, None)


def test_staged_records_are_not_visible() -> None:
    driver = Driver()
    entry = driver.decide(driver.body(1, 2))
    assert isinstance(entry, RecordsAppended)
    driver.hold(entry)
    assert driver.read().is_empty
    assert driver.topic.log.head_seq == 0
    driver.release()
    assert seqs_of(driver.read()) == [1, 2]


# -- apply, and apply again in replay ---------------------------------------------------------


def test_an_entry_that_is_applied_changes_nothing_again() -> None:
    driver = Driver()
    entry = appended(driver, 1, 2)
    before = capture(driver.topic)
    assert not apply_entry(driver.topic, driver.lsn, entry).notify
    assert capture(driver.topic) == before


def test_replay_decodes_the_body_it_finds() -> None:
    driver = Driver()
    body = driver.body(1, tag="t", node="n")
    topic = driver.topic
    driver.replay(RecordsAppended(1, 1, 1, 50, body, header_key="k"))
    assert topic.dedupe.find("k", 100, 60) == Duplicate(1, 1)
    assert driver.delete(match=TagMatch("t")) == 1


def test_replay_skips_records_up_to_the_head_one_by_one() -> None:
    """The frame's key, floor and time still take effect. [ARCHITECTURE, Recover]"""
    driver = Driver()
    appended(driver, *range(6))
    floor = Floor(3, LossReason.CAP)
    entry = RecordsAppended(1, 5, 4, 2_000, driver.body(0, 0, "new", "er"), "k", None, floor)
    driver.replay(entry)
    log = driver.topic.log
    assert (log.head_seq, log.live_count, log.evict_floor) == (8, 6, 3)
    assert driver.topic.dedupe.find("k", 100, 2_000) == Duplicate(5, 4)
    page = driver.read(6)
    assert [piece.block.data(piece.rows[0]) for piece in page.pieces] == [b'"new"']
    covered = RecordsAppended(1, 1, 3, 2_500, driver.body(1, 1, 1), "k2")
    driver.replay(covered)
    assert log.head_seq == 8
    assert driver.topic.dedupe.find("k2", 100, 2_500) == Duplicate(1, 3)


def test_replay_above_the_head_leaves_a_hole_never_a_refusal() -> None:
    driver = Driver()
    appended(driver, 1, 2)
    driver.replay(RecordsAppended(1, 10, 1, 2_000, driver.body("far")))
    page = driver.read()
    assert (seqs_of(page), page.next_from_seq) == ([1, 2], 2)
    page = driver.read(2)
    assert page.gap is not None
    assert (page.gap.gap_from, page.gap.gap_to) == (3, 9)
    assert page.gap.reason is LossReason.DAMAGED
    assert seqs_of(page) == [10]
    assert driver.topic.facts().holes == [SeqRun(3, 9)]


def test_a_head_survives_the_deletion_of_its_records() -> None:
    driver = Driver()
    appended(driver, 1, 2, 3)
    driver.delete(4)
    assert not driver.topic.log.runs
    assert appended(driver, 4).first_seq == 4


def test_replay_of_a_delete_or_floor_above_the_head_moves_the_head() -> None:
    """Records of class ephemeral leave no frame; their seqs were assigned nevertheless."""
    driver = Driver(EPHEMERAL)
    driver.replay(deleted(1, 3, 7))
    assert driver.topic.log.head_seq == 7
    driver.replay(FloorMoved(1, 5, Floor(12, LossReason.TTL)))
    assert (driver.topic.log.head_seq, driver.topic.log.earliest_seq) == (11, 12)


# -- delete ---------------------------------------------------------------------------------


def test_a_delete_hits_what_is_visible_when_it_is_decided() -> None:
    driver = Driver()
    appended(driver, 1, 2)
    late = driver.decide(driver.body(3))
    assert isinstance(late, RecordsAppended)
    driver.hold(late)
    entry = decide_delete(driver.topic, 100, None, {}, driver.now_ms)
    assert entry is not None
    driver.hold(entry)
    driver.release()
    assert driver.release().deleted == 2
    assert seqs_of(driver.read()) == [3]


def test_two_deletes_in_flight_count_each_record_once() -> None:
    driver = Driver()
    appended(driver, *range(6))
    driver.delete(4, hold=True)
    driver.delete(6, hold=True)
    assert [driver.release().deleted, driver.release().deleted] == [3, 2]


def test_a_delete_that_hits_nothing_is_no_entry() -> None:
    driver = Driver()
    assert decide_delete(driver.topic, 100, None, {}, 1) is None
    appended(driver, 1)
    assert decide_delete(driver.topic, 1, None, {}, 1) is None
    assert decide_delete(driver.topic, None, TagMatch("t"), {}, 1) is None


def test_a_segment_sealed_since_the_search_must_be_searched_too() -> None:
    driver = Driver()
    driver.append(1, tag="t")
    assert segments_to_search(driver.topic, None, driver.now_ms) == []
    driver.seal()
    assert segments_to_search(driver.topic, None, driver.now_ms) == [1]
    assert driver.topic.log.segment_ids() == (1,)
    with pytest.raises(AssertionError, match="search it too"):
        decide_delete(driver.topic, None, TagMatch("t"), {}, driver.now_ms)
    assert driver.delete(match=TagMatch("t")) == 1
    assert segments_to_search(driver.topic, None, driver.now_ms) == []


def test_a_sealed_delete_is_pending_until_its_flip_is_synced() -> None:
    driver = Driver()
    appended(driver, *range(10))
    driver.seal()
    entry = decide_delete(driver.topic, 4, None, {}, driver.now_ms)
    assert entry is not None
    applied = driver.commit(entry)
    assert {key: list(rows) for key, rows in applied.flips.items()} == {1: [0, 1, 2]}
    flips = driver.topic.files.due_flips()
    driver.delete(6)
    driver.topic.flips_done(flips, {1: driver.indexes[1].digest()})
    assert {key: list(rows) for key, rows in driver.topic.files.pending.items()} == {1: [3, 4]}
    driver.flip()
    assert not driver.topic.files.pending


def test_a_segment_without_a_live_record_is_reported() -> None:
    driver = Driver(TopicConfig(cap_records=3))
    appended(driver, 1, 2, 3)
    driver.seal()
    entry = driver.decide(driver.body(4, 5, 6))
    assert isinstance(entry, RecordsAppended)
    assert driver.commit(entry).dead_segments == [1]
    driver.seal()
    delete = decide_delete(driver.topic, 100, None, {}, driver.now_ms)
    assert delete is not None
    assert driver.commit(delete).dead_segments == [1, 2]


# -- configuration --------------------------------------------------------------------------


def test_an_identical_put_is_no_entry_and_a_changed_type_is_refused() -> None:
    driver = Driver()
    assert decide_put(driver.topic, TopicConfig(), 5) is None
    with pytest.raises(TopicsError) as refusal:
        decide_put(driver.topic, TopicConfig(type=TopicType.QUEUE), 5)
    assert refusal.value.code is Code.TOPIC_EXISTS_INCOMPATIBLE


def test_a_put_carries_the_head_and_the_floor_as_of_now() -> None:
    driver = Driver(TopicConfig(ttl_ms=10))
    appended(driver, 1, 2)
    driver.now_ms += 50
    entry = decide_put(driver.topic, TopicConfig(), driver.now_ms)
    assert entry is not None
    assert (entry.head_seq, entry.created, entry.floor) == (2, False, Floor(3, LossReason.TTL))
    driver.commit(entry)
    assert seqs_of(driver.read()) == []
    assert driver.topic.earliest_seq(driver.now_ms) == 3


def test_a_put_that_ends_class_ephemeral_brings_head_and_floor_to_replay() -> None:
    driver = Driver(TopicConfig(durability=Durability.EPHEMERAL, cap_records=2))
    appended(driver, *range(5))
    entry = decide_put(driver.topic, TopicConfig(), driver.now_ms)
    assert entry is not None
    assert entry.floor == Floor(4, LossReason.CAP)
    replayed = Topic(1, "t", 1, EPHEMERAL, 0)
    apply_entry(replayed, 1, entry)
    assert (replayed.log.head_seq, replayed.log.evict_floor) == (5, 4)
    assert replayed.log.holes[0].reason is LossReason.RESTART


def test_dropping_an_empty_topic_only_counts_what_is_under_way() -> None:
    driver = Driver()
    topic = driver.topic
    assert decide_drop(topic, 5, if_empty=True).name == "t"
    entry = driver.decide(driver.body(1))
    assert isinstance(entry, RecordsAppended)
    driver.hold(entry)
    with pytest.raises(TopicsError) as refusal:
        decide_drop(topic, 5, if_empty=True)
    assert refusal.value.code is Code.TOPIC_NOT_EMPTY
    assert decide_drop(topic, 5).topic_id == 1
    driver.release()
    driver.delete(2)
    assert decide_drop(topic, 5, if_empty=True).name == "t"


def gate_of(driver: Driver) -> Gate:
    return gates.gate_of(RecordsDeleted(1, 5, b"", b""), driver.topic)


def test_deletes_of_journaled_records_are_journaled_whatever_the_class() -> None:
    driver = Driver(EPHEMERAL)
    appended(driver, 1)
    assert gate_of(driver) is Gate.NONE
    driver.put(TopicConfig())
    assert gate_of(driver) is Gate.WRITTEN
    appended(driver, 2)
    driver.put(EPHEMERAL)
    appended(driver, 3)
    assert gate_of(driver) is Gate.WRITTEN
    driver.delete(3)
    assert gate_of(driver) is Gate.NONE
    driver.put(TopicConfig(durability=Durability.FSYNC))
    assert gate_of(driver) is Gate.SYNCED


def test_an_append_that_creates_an_ephemeral_topic_is_journaled() -> None:
    driver = Driver(EPHEMERAL)
    creation = TopicPut(1, "t", 1, EPHEMERAL, 5)
    body = driver.body(1)
    decoded = decode_append(body)
    entry = decide_append(driver.topic, decoded, body, None, 5, driver.limits, creation)
    assert isinstance(entry, RecordsAppended)
    driver.commit(entry)
    assert gate_of(driver) is Gate.WRITTEN


# -- heads ----------------------------------------------------------------------------------


def test_seqs_are_reserved_before_the_head_comes_near_the_ceiling() -> None:
    driver = Driver()
    topic = driver.topic
    assert topic.ceiling_seq == HEAD_RESERVE_SEQS
    assert decide_reservation(topic, HEAD_RESERVE_SEQS // 2) is None
    entry = decide_reservation(topic, HEAD_RESERVE_SEQS // 2 + 1)
    assert entry is not None
    assert entry.ceiling_seq == HEAD_RESERVE_SEQS // 2 + 1 + HEAD_RESERVE_SEQS
    driver.hold(entry)
    assert decide_reservation(topic, HEAD_RESERVE_SEQS // 2 + 1) is None
    driver.release()
    assert topic.ceiling_seq == entry.ceiling_seq
    driver.replay(HeadReserved(1, 5))
    assert topic.ceiling_seq == entry.ceiling_seq


def test_a_busy_topic_reserves_more_each_time_up_to_a_bound() -> None:
    topic = Driver().topic
    gained = []
    for lsn in range(100, 110):
        entry = decide_reservation(topic, topic.ceiling_seq)
        assert entry is not None
        gained.append((entry.ceiling_seq - topic.ceiling_seq) // HEAD_RESERVE_SEQS)
        apply_entry(topic, lsn, entry)
    assert gained == [1, 2, 4, 8, 16, 32, 64, 64, 64, 64]


def test_class_fsync_reserves_nothing() -> None:
    topic = Driver(TopicConfig(durability=Durability.FSYNC)).topic
    assert decide_reservation(topic, 10**9) is None


@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("clean_stop", [True, False])
@pytest.mark.parametrize("same_boot", [True, False])
def test_heads_jump_when_seqs_may_be_lost(
    durability: Durability, clean_stop: bool, same_boot: bool
) -> None:
    driver = Driver(TopicConfig(durability=durability))
    appended(driver, 1, 2)
    moved = finish_topic(driver.topic, clean_stop=clean_stop, same_boot=same_boot)
    log = driver.topic.log
    if durability is Durability.EPHEMERAL:
        assert moved
        assert log.live_count == 0
        assert log.head_seq == (2 if clean_stop else HEAD_RESERVE_SEQS)
        assert [(h.first_seq, h.last_seq, h.reason) for h in log.holes] == [
            (1, log.head_seq, LossReason.RESTART)
        ]
    elif durability is Durability.FSYNC or clean_stop or same_boot:
        assert not moved
        assert (log.head_seq, log.live_count, log.holes) == (2, 2, [])
    else:
        assert moved
        assert (log.head_seq, log.live_count) == (HEAD_RESERVE_SEQS, 2)
        assert log.holes[0].first_seq == 3
        assert log.holes[0].reason is LossReason.DAMAGED
    assert appended(driver, 3).first_seq == log.head_seq


def test_a_restart_tells_all_of_an_ephemeral_topic_whatever_the_journal_still_knows() -> None:
    """The topic's first append is journaled, and so is a delete of it; a snapshot reports seqs 1 to
    the head as lost.
    """
    driver = Driver(TopicConfig(durability=Durability.EPHEMERAL))
    appended(driver, 1)
    assert driver.delete(before_seq=2) == 1
    assert finish_topic(driver.topic, clean_stop=False, same_boot=True)
    log = driver.topic.log
    assert [(h.first_seq, h.last_seq, h.reason) for h in log.holes] == [
        (1, HEAD_RESERVE_SEQS, LossReason.RESTART)
    ]


def test_a_recovered_head_at_its_ceiling_does_not_jump_again() -> None:
    driver = Driver()
    assert finish_topic(driver.topic, clean_stop=False, same_boot=False)
    assert not finish_topic(driver.topic, clean_stop=False, same_boot=False)


def test_expired_records_are_not_counted_as_live() -> None:
    driver = Driver(TopicConfig(ttl_ms=100))
    appended(driver, 1, 2)
    driver.now_ms += 60
    appended(driver, 3)
    weight = driver.topic.log.live_bytes
    assert driver.topic.live(driver.now_ms) == (3, weight)
    driver.now_ms += 60
    assert driver.topic.live(driver.now_ms) == (1, weight // 3)
    assert driver.topic.earliest_seq(driver.now_ms) == 3


def test_dropping_segments_forgets_their_pending_flips() -> None:
    driver = Driver()
    appended(driver, 1)
    driver.seal()
    driver.delete(2)
    driver.topic.segments_dropped([1])
    assert not driver.topic.files.pending
    driver.topic.flips_done({1: [0]}, {})
    assert not driver.topic.files.pending


def test_an_idle_topic_is_small() -> None:
    """A store may have a hundred thousand topics, so parts that few topics need are created on
    demand.
    """
    config = TopicConfig()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    topics = [Topic(number, "name", 1, config, 0) for number in range(1, 101)]
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(topics) == 100
    # 1.8 KB in Python 3.11; an empty deque alone has 0.6.
    assert (after - before) / len(topics) < 2_500
