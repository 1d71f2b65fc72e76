"""Tickets: the condition of each gate, the order of applied entries, and the undo of a failure."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.engine.drive import FakeIndex
from tests.unit.engine.rig import ListJournal, body_of, throttled
from topics_server.engine.background.seal_plan import plan_seal
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import (
    DISK_FULL,
    READ_ONLY,
    CommitPipeline,
    Observer,
    Ticket,
)
from topics_server.engine.read.exact_read import decide_delete_seqs
from topics_server.engine.subscribe.sessions import SessionTable
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.append import decide_append
from topics_server.values.appends import AppendLimits
from topics_server.values.entries import (
    SESSIONS_ID,
    Entry,
    RecordsAppended,
    RecordsDeleted,
    SessionOpened,
    SessionOptions,
    Source,
    TopicDropped,
)
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Durability, Gate, TopicConfig, TopicType


class Desk:
    """Commits over a journal that the test drives; topic 1 is on shard 1, topic 2 on 0."""

    def __init__(self, topics: int = 2) -> None:
        self.registry = Registry()
        self.journal = ListJournal()
        self.notifier = Notifier()
        self.sessions = SessionTable()
        self.commits = CommitPipeline(
            self.registry, self.journal, self.notifier, 1, projections={SESSIONS_ID: self.sessions}
        )
        self.topics = [self.create(f"t{n}") for n in range(topics)]

    def create(self, name: str, config: TopicConfig = TopicConfig()) -> Topic:  # noqa: B008
        topic, creation = self.registry.decide_create(name, config, 1)
        self.commits.submit(creation, Gate.SYNCED, topic)
        self.journal.sync(self.journal.shard_of(topic.topic_id))
        return topic

    def decide(self, topic: Topic, *datas: object) -> RecordsAppended:
        body, decoded = body_of(*datas)
        entry = decide_append(topic, decoded, body, None, 1, AppendLimits())
        assert isinstance(entry, RecordsAppended)
        return entry

    def append(self, topic: Topic, gate: Gate, *datas: object) -> Ticket:
        return self.commits.submit(self.decide(topic, *datas), gate, topic)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def code_of(ticket: Ticket) -> Code:
    assert ticket.error is not None
    return ticket.error.code


# -- gates ----------------------------------------------------------------------------------


def test_what_waits_for_nothing_is_applied_at_once_and_never_journaled(desk: Desk) -> None:
    before = len(desk.journal.submitted)
    ticket = desk.append(desk.topics[0], Gate.NONE, 1)
    assert ticket.is_done
    assert desk.topics[0].log.head_seq == 1
    assert len(desk.journal.submitted) == before


def test_a_written_gate_is_met_by_the_write(desk: Desk) -> None:
    ticket = desk.append(desk.topics[0], Gate.WRITTEN, 1)
    assert desk.topics[0].log.head_seq == 0, "nothing uncommitted is visible"
    desk.journal.write(1)
    assert ticket.applied is not None
    assert desk.topics[0].log.head_seq == 1
    assert (ticket.write_ms, ticket.sync_ms) == (0.5, 0.0)


def test_a_synced_gate_is_met_by_the_sync_only(desk: Desk) -> None:
    ticket = desk.append(desk.topics[0], Gate.SYNCED, 1)
    desk.journal.write(1)
    done = [ticket.is_done]
    desk.journal.sync(1)
    assert [*done, ticket.is_done] == [False, True]
    assert (ticket.write_ms, ticket.sync_ms) == (0.5, 2.0)


def test_only_entries_that_need_a_sync_request_one(desk: Desk) -> None:
    desk.append(desk.topics[0], Gate.WRITTEN, 1)
    desk.append(desk.topics[0], Gate.SYNCED, 1)
    assert [item.sync for item in desk.journal.submitted[-2:]] == [False, True]


def test_progress_of_one_shard_meets_nothing_of_another(desk: Desk) -> None:
    ticket = desk.append(desk.topics[1], Gate.WRITTEN, 1)
    desk.journal.written[1] = ticket.lsn + 10
    desk.journal.post(1)
    assert not ticket.is_done
    desk.journal.write(0)
    assert ticket.is_done


def test_a_watermark_meets_only_what_lies_below_it(desk: Desk) -> None:
    first = desk.append(desk.topics[0], Gate.WRITTEN, 1)
    second = desk.append(desk.topics[0], Gate.WRITTEN, 2)
    desk.journal.write(1, first.lsn)
    assert (first.is_done, second.is_done) == (True, False)


# -- order ----------------------------------------------------------------------------------


def test_a_topic_never_applies_an_entry_before_an_earlier_one(desk: Desk) -> None:
    topic = desk.topics[0]
    synced = desk.append(topic, Gate.SYNCED, 1)
    written = desk.append(topic, Gate.WRITTEN, 2)
    nothing = desk.append(topic, Gate.NONE, 3)
    desk.journal.write(1)
    assert topic.log.head_seq == 0, "its class changed in mid-flight, its order did not"
    desk.journal.sync(1)
    assert topic.log.head_seq == 3
    assert synced.is_done
    assert written.is_done
    assert nothing.is_done


def test_topics_do_not_wait_for_each_other(desk: Desk) -> None:
    desk.append(desk.topics[0], Gate.SYNCED, 1)
    other = desk.create("t-on-the-same-shard")
    assert desk.journal.shard_of(other.topic_id) == 1
    assert desk.topics[0].log.head_seq == 1, "its creation's sync was a sync of all before it"
    waiting = desk.append(desk.topics[0], Gate.SYNCED, 2)
    done = desk.append(other, Gate.WRITTEN, 1)
    desk.journal.write(1)
    assert (waiting.is_done, done.is_done) == (False, True)


def test_every_entry_has_an_lsn_of_its_own_ascending(desk: Desk) -> None:
    lsns = [desk.append(topic, Gate.WRITTEN, 1).lsn for topic in desk.topics * 3]
    assert lsns == list(range(lsns[0], lsns[0] + 6))


def test_a_snapshot_starts_at_what_is_held_until_it_is_released(desk: Desk) -> None:
    first, second = desk.commits.next_lsn, desk.commits.next_lsn + 1
    assert desk.commits.start_lsn() == first
    desk.commits.hold(first - 1)
    desk.commits.hold(second)
    assert desk.commits.start_lsn() == first - 1
    assert desk.commits.oldest_pending_lsn() == first
    desk.commits.release(first - 1)
    assert desk.commits.start_lsn() == first, "never behind what is in flight"


def test_the_oldest_pending_lsn_is_the_oldest_that_is_not_applied(desk: Desk) -> None:
    assert desk.commits.oldest_pending_lsn() == desk.commits.next_lsn
    first = desk.append(desk.topics[0], Gate.WRITTEN, 1)
    desk.append(desk.topics[1], Gate.WRITTEN, 1)
    desk.journal.write(0)
    assert desk.commits.oldest_pending_lsn() == first.lsn
    desk.journal.write(1)
    assert desk.commits.oldest_pending_lsn() == desk.commits.next_lsn


def test_a_topic_is_idle_when_nothing_of_it_is_in_flight(desk: Desk) -> None:
    topic = desk.topics[0]
    assert desk.commits.is_idle(topic.topic_id)
    assert desk.commits.newest(topic.topic_id) is None
    first = desk.append(topic, Gate.WRITTEN, 1)
    second = desk.append(topic, Gate.WRITTEN, 2)
    assert not desk.commits.is_idle(topic.topic_id)
    assert desk.commits.newest(topic.topic_id) is second
    assert desk.commits.find(topic.topic_id, first.lsn) is first
    desk.journal.write(1)
    assert desk.commits.find(topic.topic_id, first.lsn) is None
    assert desk.commits.is_idle(topic.topic_id)


# -- notifying ------------------------------------------------------------------------------


def test_a_topic_is_notified_once_for_all_that_one_report_brought(desk: Desk) -> None:
    heard: list[int] = []
    for topic in desk.topics:
        desk.notifier.add(topic.topic_id, lambda topic=topic: heard.append(topic.log.head_seq))  # type: ignore[misc]
    for data in range(3):
        desk.append(desk.topics[0], Gate.WRITTEN, data)
    desk.journal.write(1)
    assert heard == [3], "once, when all of it can be read"


def test_waiters_are_notified_once_when_the_whole_post_is_applied(desk: Desk) -> None:
    seen: list[int] = []
    first = desk.append(desk.topics[0], Gate.WRITTEN, 1)
    desk.append(desk.topics[0], Gate.WRITTEN, 2)
    first.waiters.append(lambda: seen.append(desk.topics[0].log.head_seq))
    desk.journal.write(1)
    desk.journal.sync(1)
    assert seen == [2]


def test_a_block_that_would_be_too_full_is_frozen_once_who_appended_was_told(desk: Desk) -> None:
    topic = desk.topics[0]
    log = topic.log
    for _ in range(2):
        ticket = desk.append(topic, Gate.WRITTEN, *range(100))
        seen: list[bool] = []
        ticket.waiters.append(lambda seen=seen: seen.append(log.open is not None))  # type: ignore[misc]
        desk.journal.write(1)
        assert seen == [True]
    # A third append of this size would not fit.
    assert [type(run).__name__ for run in log.runs] == ["TailBlock"]
    desk.append(topic, Gate.WRITTEN, "one")
    desk.journal.write(1)
    assert [run.count for run in log.runs] == [200, 1]
    desk.commits.flush(topic.topic_id)
    assert desk.journal.events[-1] == "flush 1"


def test_observers_hear_of_every_applied_entry_in_order(desk: Desk) -> None:
    heard: list[tuple[int, Entry]] = []

    def observe(lsn: int, entry: Entry, applied: Applied) -> None:
        heard.append((lsn, entry))

    desk.commits.observers.append(observe)
    tickets = [desk.append(desk.topics[0], gate, 1) for gate in (Gate.WRITTEN, Gate.NONE)]
    assert heard == []
    desk.journal.write(1)
    assert heard == [(ticket.lsn, ticket.entry) for ticket in tickets]


def test_observers_of_changes_hear_of_all_but_deletes_and_plain_appends(desk: Desk) -> None:
    heard: list[type[Entry]] = []
    deleted: list[type[Entry]] = []
    desk.commits.change_observers.append(lambda lsn, entry, applied: heard.append(type(entry)))
    desk.commits.delete_observers.append(lambda lsn, entry, applied: deleted.append(type(entry)))
    topic = desk.topics[0]
    desk.append(topic, Gate.NONE, 1)
    assert heard == deleted == []
    delete = decide_delete_seqs(topic, [topic.log.head_seq], 1)
    desk.commits.submit(delete, Gate.NONE, topic)
    assert (heard, deleted) == ([], [RecordsDeleted])
    moved = msgspec.structs.replace(desk.decide(topic, 2), source=Source(topic.topic_id, [1]))
    desk.commits.submit(moved, Gate.NONE, topic)
    desk.commits.submit(TopicDropped(topic.topic_id, topic.name, 1), Gate.NONE, topic)
    desk.commits.submit(opened("w"), Gate.NONE, desk.sessions)
    assert heard == [RecordsAppended, TopicDropped, SessionOpened]


def test_observers_of_jobs_hear_of_plain_appends_to_queues(desk: Desk) -> None:
    heard: list[int] = []
    desk.commits.job_observers.append(lambda lsn, entry, applied: heard.append(entry.topic_id))
    queue = desk.create("jobs", TopicConfig(type=TopicType.QUEUE))
    desk.append(desk.topics[0], Gate.NONE, 1)
    assert heard == []
    desk.append(queue, Gate.NONE, 1)
    assert heard == [queue.topic_id]


def noting_seqs(heard: list[int]) -> Observer:
    """An observer that notes the first seq of each append that it is called for."""

    def observe(lsn: int, entry: Entry, applied: Applied) -> None:
        assert isinstance(entry, RecordsAppended)
        heard.append(entry.first_seq)

    return observe


@pytest.mark.parametrize(("records", "size"), [(3, 1 << 20), (1 << 20, 60)])
def test_observers_of_tails_hear_of_appends_once_a_tail_is_long(
    desk: Desk, records: int, size: int
) -> None:
    heard: list[int] = []
    topic = desk.topics[0]
    desk.commits.watched_tail_records, topic.watched_tail_bytes = records, size
    desk.commits.tail_observers.append(noting_seqs(heard))
    for _ in range(4):
        desk.append(topic, Gate.NONE, 1)
    assert heard == [3, 4], topic.log.tail_bytes


def test_observers_of_tails_hear_of_an_append_that_evicts(desk: Desk) -> None:
    heard: list[int] = []
    capped = desk.create("capped", TopicConfig(cap_records=2))
    desk.commits.watched_tail_records = capped.watched_tail_bytes = 1 << 20
    desk.commits.tail_observers.append(noting_seqs(heard))
    for _ in range(3):
        desk.append(capped, Gate.NONE, 1)
    assert capped.log.earliest_seq == 2
    assert heard == [], "nothing of it is in a segment"
    plan = plan_seal(capped, 10**6, 1, 65_536, 1 << 30, 1, force=True)
    assert plan is not None
    capped.mark_sealed(plan, FakeIndex(plan))
    for _ in range(2):
        desk.append(capped, Gate.NONE, 1)
    assert heard == [5], "the segment is dead"


def test_background_syncs_move_what_is_known_to_be_synced(desk: Desk) -> None:
    topic = desk.topics[0]
    ticket = desk.append(topic, Gate.WRITTEN, 1)
    desk.journal.write(1)
    assert desk.commits.synced_lsn(topic.topic_id) < ticket.lsn
    desk.journal.sync(1)
    assert desk.commits.synced_lsn(topic.topic_id) == ticket.lsn
    desk.journal.synced[1] -= 1
    desk.journal.post(1)
    assert desk.commits.synced_lsn(topic.topic_id) == ticket.lsn, "it never goes back"


# -- refusals and failures --------------------------------------------------------------------


def test_what_the_journal_refuses_leaves_nothing_behind(desk: Desk) -> None:
    topic = desk.topics[0]
    next_lsn = desk.commits.next_lsn
    desk.journal.refusal = throttled()
    with pytest.raises(TopicsError) as refusal:
        desk.append(topic, Gate.WRITTEN, 1)
    assert refusal.value.code is Code.THROTTLED
    assert (desk.commits.next_lsn, topic.staged_seq) == (next_lsn, 0)
    assert desk.commits.is_idle(topic.topic_id)
    desk.journal.refusal = None
    assert desk.decide(topic, 1).first_seq == 1


def test_a_full_disk_undoes_the_suffix_that_no_reader_has_seen(desk: Desk) -> None:
    topic = desk.topics[0]
    kept = desk.append(topic, Gate.WRITTEN, 1)
    failed = [desk.append(topic, Gate.WRITTEN, n) for n in (2, 3)]
    desk.journal.written[1] = kept.lsn
    desk.journal.fail(1, failed[0].lsn, DISK_FULL)
    assert kept.applied is not None, "what was written in the same post is done"
    assert {code_of(ticket) for ticket in failed} == {Code.THROTTLED}
    assert {ticket.error.detail["limit"] for ticket in failed if ticket.error} == {"disk"}
    assert (topic.log.head_seq, topic.staged_seq) == (1, 1)
    assert desk.journal.reopened == [1]


def test_a_shard_serves_again_after_a_full_disk_with_the_same_seqs_and_new_lsns(
    desk: Desk,
) -> None:
    topic = desk.topics[0]
    failed = desk.append(topic, Gate.WRITTEN, 1)
    desk.journal.fail(1, failed.lsn, DISK_FULL)
    again = desk.append(topic, Gate.WRITTEN, 1)
    assert isinstance(again.entry, RecordsAppended)
    assert again.entry.first_seq == 1
    assert again.lsn > failed.lsn
    desk.journal.write(1)
    assert topic.log.head_seq == 1


def test_a_failure_spares_other_shards(desk: Desk) -> None:
    failed = desk.append(desk.topics[0], Gate.WRITTEN, 1)
    spared = desk.append(desk.topics[1], Gate.WRITTEN, 1)
    desk.journal.fail(1, failed.lsn, READ_ONLY)
    assert not spared.is_done
    desk.journal.write(0)
    assert spared.applied is not None


def test_a_failed_sync_makes_the_shard_read_only_and_is_never_reopened(desk: Desk) -> None:
    topic = desk.topics[0]
    written = desk.append(topic, Gate.WRITTEN, 1)
    desk.journal.write(1)
    failed = desk.append(topic, Gate.SYNCED, 2)
    desk.journal.fail(1, failed.lsn, READ_ONLY)
    assert written.applied is not None
    assert code_of(failed) is Code.STORAGE_READ_ONLY
    assert desk.commits.read_only_shards == [1]
    assert desk.journal.reopened == []
    for gate in Gate:
        with pytest.raises(TopicsError) as refusal:
            desk.append(topic, gate, 3)
        assert refusal.value.code is Code.STORAGE_READ_ONLY
    assert topic.log.head_seq == 1, "reads go on"
    assert desk.append(desk.topics[1], Gate.NONE, 1).is_done, "the other shard goes on"


def test_what_needs_no_disk_fails_with_what_it_stands_behind(desk: Desk) -> None:
    topic = desk.topics[0]
    failed = desk.append(topic, Gate.WRITTEN, 1)
    behind = desk.append(topic, Gate.NONE, 2)
    desk.journal.fail(1, failed.lsn, DISK_FULL)
    assert code_of(behind) is Code.THROTTLED
    assert topic.staged_seq == 0


def test_what_needs_no_disk_stays_when_a_later_entry_fails(desk: Desk) -> None:
    topic = desk.topics[0]
    first = desk.append(topic, Gate.WRITTEN, 1)
    middle = desk.append(topic, Gate.NONE, 2)
    last = desk.append(topic, Gate.WRITTEN, 3)
    desk.journal.fail(1, last.lsn, DISK_FULL)
    assert (first.is_done, middle.is_done) == (False, False)
    desk.journal.write(1)
    assert topic.log.head_seq == 2
    assert code_of(last) is Code.THROTTLED


def test_a_failure_spares_what_the_shard_was_given_before(desk: Desk) -> None:
    other = desk.create("t-on-the-same-shard")
    earlier = desk.append(desk.topics[0], Gate.SYNCED, 1)
    failed = desk.append(other, Gate.WRITTEN, 1)
    desk.journal.fail(1, failed.lsn, DISK_FULL)
    assert code_of(failed) is Code.THROTTLED
    done = [earlier.is_done]
    desk.journal.sync(1)
    assert [*done, earlier.applied is not None] == [False, True]


def test_a_creation_that_failed_leaves_the_name_free_and_its_id_unused(desk: Desk) -> None:
    topic, creation = desk.registry.decide_create("new", TopicConfig(), 1)
    shard = desk.journal.shard_of(topic.topic_id)
    ticket = desk.commits.submit(creation, Gate.SYNCED, topic)
    desk.journal.fail(shard, ticket.lsn, DISK_FULL)
    assert desk.registry.find("new") is None
    assert not desk.registry.pending
    again, _ = desk.registry.decide_create("new", TopicConfig(), 1)
    assert again.topic_id > topic.topic_id


def test_a_waiter_of_a_failed_entry_finds_it_undone_and_may_submit_at_once(desk: Desk) -> None:
    topic = desk.topics[0]
    failed = desk.append(topic, Gate.WRITTEN, 1)
    retried: list[Ticket] = []
    failed.waiters.append(lambda: retried.append(desk.append(topic, Gate.WRITTEN, 1)))
    desk.journal.fail(1, failed.lsn, DISK_FULL)
    desk.journal.write(1)
    assert retried[0].applied is not None
    assert topic.log.head_seq == 1


def test_after_an_apply_that_failed_nothing_is_written_any_more(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(lsn: int, entry: Entry) -> Applied:
        raise ArithmeticError("a defect")

    monkeypatch.setattr(desk.registry, "apply", broken)
    desk.append(desk.topics[0], Gate.WRITTEN, 1)
    with pytest.raises(ArithmeticError):
        desk.journal.write(1)
    assert desk.commits.is_broken
    monkeypatch.undo()
    with pytest.raises(TopicsError) as refusal:
        desk.append(desk.topics[1], Gate.WRITTEN, 1)
    assert refusal.value.code is Code.INTERNAL


def test_an_ephemeral_topic_is_written_to_without_the_journal() -> None:
    desk = Desk(0)
    config = TopicConfig(durability=Durability.EPHEMERAL)
    topic, creation = desk.registry.decide_create("e", config, 1)
    desk.commits.submit(creation, Gate.SYNCED, topic)
    desk.journal.sync(1)
    desk.append(topic, Gate.NONE, 1)
    assert len(desk.journal.submitted) == 1


# # -- entries that belong to no topic --------------------------------------------------------


def opened(wid: str) -> SessionOpened:
    return SessionOpened(wid, 1, SessionOptions([], 1, 1, 1, 4, False), [])


def test_a_projection_has_a_fifo_of_its_own_and_is_told_to_observers(desk: Desk) -> None:
    told: list[tuple[int, Entry]] = []
    desk.commits.observers.append(lambda lsn, entry, applied: told.append((lsn, entry)))
    shard = desk.journal.shard_of(SESSIONS_ID)
    topic = next(t for t in desk.topics if desk.journal.shard_of(t.topic_id) == shard)
    waiting = desk.append(topic, Gate.SYNCED, 1)
    ticket = desk.commits.submit(opened("w"), Gate.WRITTEN, desk.sessions, urgent=True)
    assert desk.commits.newest(SESSIONS_ID) is ticket
    assert desk.commits.oldest_pending_lsn() == waiting.lsn
    desk.journal.write(shard)
    assert ticket.applied is not None, "no topic is in its way"
    assert not waiting.is_done
    assert desk.sessions.find("w") is not None
    assert told == [(ticket.lsn, opened("w"))]
    assert desk.commits.is_idle(SESSIONS_ID)


def test_a_projections_failed_entries_are_undone_and_nothing_else(desk: Desk) -> None:
    shard = desk.journal.shard_of(SESSIONS_ID)
    kept = desk.commits.submit(opened("kept"), Gate.WRITTEN, desk.sessions)
    desk.journal.write(shard)
    failed = [desk.commits.submit(opened(wid), Gate.WRITTEN, desk.sessions) for wid in ("a", "b")]
    assert desk.sessions.opening_count == 2
    desk.journal.fail(shard, failed[0].lsn, DISK_FULL)
    assert kept.applied is not None
    assert {code_of(ticket) for ticket in failed} == {Code.THROTTLED}
    assert (desk.sessions.opening_count, len(desk.sessions)) == (0, 1)
    again = desk.commits.submit(opened("a"), Gate.WRITTEN, desk.sessions)
    desk.journal.write(shard)
    assert again.applied is not None
