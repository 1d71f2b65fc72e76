"""All queues' books: the effect of entries, and which of it a restart keeps."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.queue.leases import lease_parts
from topics_server.queue.leases.lease_book import Ask, LeaseBook
from topics_server.queue.leases.lease_table import LeaseTable, live_jobs
from topics_server.values.appends import decode_append
from topics_server.values.entries import (
    Entry,
    Floor,
    FloorMoved,
    HeadReserved,
    LeasesGranted,
    LeasesReleased,
    RecordsAppended,
    RecordsDeleted,
    Source,
    TopicDropped,
    TopicPut,
)
from topics_server.values.limits import U64_MAX
from topics_server.values.model import LossReason, TopicConfig, TopicType
from topics_server.values.storage_types import LeaseImage, LeasesPart, QueueImage

TS = 1_700_000_000_000
SOFT = TopicConfig(type=TopicType.QUEUE)
DURABLE = TopicConfig(type=TopicType.QUEUE, leases_durable=True)


class Desk:
    """A registry and its books; entries of topics are applied as soon as they are made."""

    def __init__(self, *configs: TopicConfig) -> None:
        self.registry = Registry()
        self.lease_table = LeaseTable(1)
        self.journal: list[tuple[int, Entry]] = []
        self.lsn = 0
        for number, config in enumerate(configs, 1):
            self.commit(TopicPut(number, f"t{number}", 1, config, TS))

    def write(self, entry: Entry) -> int:
        self.lsn += 1
        self.journal.append((self.lsn, entry))
        return self.lsn

    def commit(self, entry: Entry) -> None:
        lsn = self.write(entry)
        self.lease_table.observe(lsn, entry, self.registry.apply(lsn, entry))

    def topic(self, queue_id: int = 1) -> Topic:
        topic = self.registry.get(queue_id)
        assert topic is not None
        return topic

    def book(self, queue_id: int = 1) -> LeaseBook:
        book = self.lease_table.find(queue_id)
        assert book is not None
        return book

    def append(
        self,
        body: bytes,
        queue_id: int = 1,
        source: Source | None = None,
        floor: Floor | None = None,
    ) -> None:
        decoded = decode_append(body)
        first = self.topic(queue_id).log.head_seq + 1
        entry = RecordsAppended(queue_id, first, decoded.count, TS, body, source=source)
        self.commit(msgspec.structs.replace(entry, grammar=decoded.grammar, floor=floor))

    def jobs(self, count: int, queue_id: int = 1) -> None:
        self.append(b'{"records":[%b]}' % b",".join([b'{"data":0}'] * count), queue_id)

    def delete(self, *runs: tuple[int, int], queue_id: int = 1) -> None:
        firsts = np.array([first for first, _ in runs], "<u8").tobytes()
        lasts = np.array([last for _, last in runs], "<u8").tobytes()
        self.commit(RecordsDeleted(queue_id, TS, firsts, lasts))

    def decide(self, most: int, queue_id: int = 1, now_ms: int = TS) -> LeasesGranted:
        live = live_jobs(self.topic(queue_id), now_ms)
        claim = self.book(queue_id).decide_claim(now_ms, live, [Ask("a", most, 100)], 0).claims[0]
        assert claim is not None
        return claim.entry

    def claim(self, most: int, queue_id: int = 1, now_ms: int = TS) -> list[int]:
        entry = self.decide(most, queue_id, now_ms)
        if self.topic(queue_id).config.leases_durable:
            lsn = self.write(entry)
            self.lease_table.stage(lsn, entry)
            self.lease_table.commit_staged(lsn)
            self.lease_table.apply(lsn, entry)
        else:
            self.lease_table.apply_soft(entry)
        return [seq for seq, _ in entry.leases]

    def counts(self, queue_id: int = 1, now_ms: int = TS) -> tuple[int, int, int, int]:
        counts = self.lease_table.counts(self.topic(queue_id), now_ms)
        return counts.ready, counts.in_flight, counts.delayed, counts.dead_lettered

    def restarted(self, parts: list[bytes], start_lsn: int = 1, *, was_clean: bool = False) -> Desk:
        """The next run: topics from the whole journal, books from parts and the entries after
        them.
        """
        desk = Desk()
        desk.lsn, desk.journal = self.lsn, list(self.journal)
        for part in parts:
            desk.lease_table.restore(part)
        for lsn, entry in self.journal:
            if isinstance(entry, LeasesGranted | LeasesReleased):
                if lsn >= start_lsn:
                    desk.lease_table.apply(lsn, entry)
                continue
            applied = desk.registry.apply(lsn, entry)
            if lsn >= start_lsn:
                desk.lease_table.observe(lsn, entry, applied)
        desk.lease_table.finish_recovery(TS, was_clean=was_clean, topics=desk.registry)
        return desk


def test_queues_have_a_book_and_logs_have_none() -> None:
    desk = Desk(SOFT, TopicConfig())
    assert len(desk.lease_table) == 1
    assert desk.lease_table.find(2) is None
    creation = TopicPut(3, "t3", 1, SOFT, TS)
    body = b'{"records":[{"data":0,"delay_ms":50}]}'
    decoded = decode_append(body)
    desk.commit(RecordsAppended(3, 1, 1, TS, body, creation=creation, grammar=decoded.grammar))
    assert desk.counts(3) == (0, 0, 1, 0)
    assert desk.counts(3, TS + 50) == (1, 0, 0, 0)
    desk.commit(HeadReserved(3, 99))
    desk.commit(TopicDropped(3, "t3", TS))
    assert desk.lease_table.find(3) is None


def test_lease_ids_go_round_and_are_never_0() -> None:
    lease_table = LeaseTable(U64_MAX - 1)
    assert [lease_table._next_id() for _ in range(3)] == [U64_MAX, 1, 2]


def test_deletes_and_floors_end_leases_and_delays() -> None:
    desk = Desk(SOFT)
    desk.jobs(6)
    assert desk.claim(4) == [1, 2, 3, 4]
    assert list(desk.lease_table.count_in_flight(TS, 1))[-1] == 4
    desk.delete((2, 2), (4, 5))
    assert desk.counts() == (1, 2, 0, 0)
    desk.commit(FloorMoved(1, TS, Floor(2, LossReason.TTL)))
    assert desk.counts() == (1, 1, 0, 0)
    desk.append(b'{"records":[{"data":0}]}', floor=Floor(7, LossReason.CAP))
    assert desk.counts() == (1, 0, 0, 0)
    desk.jobs(1)
    assert desk.claim(9) == [7, 8]
    floor = Floor(8, LossReason.TTL)
    desk.commit(TopicPut(1, "t1", 1, SOFT, TS, 8, created=False, floor=floor))
    assert desk.counts() == (0, 1, 0, 0)


def test_a_job_is_dead_lettered_when_copy_and_delete_are_there() -> None:
    desk = Desk(SOFT, TopicConfig(), SOFT)
    desk.jobs(9)
    desk.append(b'{"records":[{"data":0},{"data":0}]}', 2, Source(1, [2, 3]))
    desk.append(b'{"records":[{"data":0}]}', 2, Source(1, [7]))
    desk.append(b'{"records":[{"data":0}]}', 3, Source(2, [1], is_redrive=True))
    desk.append(b'{"records":[{"data":0}]}', 3, Source(99, [1]))
    desk.append(b'{"records":[{"data":0}]}', 3, Source(1, [8], is_redrive=True))
    assert desk.counts()[3] == 0
    desk.delete((3, 4))
    assert desk.counts()[3] == 1
    desk.delete((5, 5))
    desk.commit(FloorMoved(1, TS, Floor(7, LossReason.CAP)))
    assert desk.counts()[3] == 2
    desk.delete((7, 9))
    assert desk.counts() == (0, 0, 0, 3)
    assert desk.counts(3) == (3, 0, 0, 0)
    assert desk.restarted([]).counts() == (0, 0, 0, 3)
    assert desk.restarted(list(desk.lease_table.capture()), 3).counts()[3] == 3


def test_a_mark_whose_source_is_gone_already_counts_nothing() -> None:
    """The snapshot has the delete of the source, and replay reads the source mark once more."""
    desk = Desk(SOFT, TopicConfig())
    desk.jobs(3)
    desk.append(b'{"records":[{"data":0}]}', 2, Source(1, [2]))
    mark_lsn = desk.lsn
    desk.delete((2, 2))
    parts = list(desk.lease_table.capture())
    again = desk.restarted(parts, mark_lsn)
    assert again.counts()[3] == 1
    assert again.lease_table._marked == {}


def test_a_dropped_queue_is_not_made_again_by_what_was_under_way() -> None:
    desk = Desk(DURABLE)
    desk.jobs(2)
    first, second = desk.decide(1), None
    lsn = desk.write(first)
    desk.lease_table.stage(lsn, first)
    second = desk.decide(1)
    later = desk.write(second)
    desk.lease_table.stage(later, second)
    desk.commit(TopicDropped(1, "t1", TS))
    desk.lease_table.commit_staged(lsn)
    desk.lease_table.apply(lsn, first)
    desk.lease_table.undo_from(later)
    assert desk.lease_table.find(1) is None
    assert len(desk.restarted([]).lease_table) == 0


def test_undone_claims_are_claimed_again() -> None:
    desk = Desk(DURABLE)
    desk.jobs(3)
    lsns = []
    for _ in range(2):
        entry = desk.decide(1)
        lsns.append(desk.write(entry))
        desk.lease_table.stage(lsns[-1], entry)
    assert desk.counts() == (1, 2, 0, 0)
    desk.lease_table.undo_from(lsns[1])
    assert desk.counts() == (2, 1, 0, 0)
    desk.lease_table.undo_from(lsns[0])
    assert desk.claim(9) == [1, 2, 3]


@pytest.mark.parametrize("config", [SOFT, DURABLE])
def test_a_clean_stop_keeps_leases_and_counts(config: TopicConfig) -> None:
    desk = Desk(config)
    desk.jobs(5)
    desk.append(b'{"records":[{"data":0,"delay_ms":70}]}')
    desk.claim(2)
    desk.claim(2, now_ms=TS + 101)
    desk.claim(1, now_ms=TS + 101)
    again = desk.restarted(list(desk.lease_table.capture()), desk.lsn + 1, was_clean=True)
    assert again.counts(now_ms=TS + 101) == desk.counts(now_ms=TS + 101) == (3, 3, 0, 0)
    assert again.book().jobs[1].deliveries == 2
    assert again.claim(9, now_ms=TS + 101) == [4, 5, 6]


def test_after_a_crash_soft_leases_are_gone_and_counts_are_those_of_the_snapshot() -> None:
    desk = Desk(SOFT)
    desk.jobs(4)
    desk.claim(2)
    parts, start_lsn = list(desk.lease_table.capture()), desk.lsn + 1
    desk.claim(1)
    desk.claim(2, now_ms=TS + 101)
    desk.delete((2, 2))
    again = desk.restarted(parts, start_lsn)
    assert again.counts() == (3, 0, 0, 0)
    assert again.claim(9) == [1, 3, 4]
    assert {seq: job.deliveries for seq, job in again.book().jobs.items()} == {1: 2, 3: 1, 4: 1}


def test_durable_leases_outlive_a_crash_without_any_snapshot() -> None:
    desk = Desk(DURABLE)
    desk.jobs(4)
    desk.claim(2)
    entry, _ = desk.book().decide_nack(TS, "a", [1], None, 50)
    assert entry is not None
    lsn = desk.write(entry)
    desk.lease_table.stage(lsn, entry)
    desk.lease_table.commit_staged(lsn)
    desk.lease_table.apply(lsn, entry)
    again = desk.restarted([])
    assert again.counts() == desk.counts() == (2, 1, 1, 0)
    assert again.claim(9, now_ms=TS + 50) == [1, 3, 4]


@pytest.mark.parametrize("is_under_way", [False, True])
def test_leases_keep_their_length_when_the_clock_is_set(is_under_way: bool) -> None:
    """`is_under_way`: the clock is set between the decision about a claim and its effect."""
    desk = Desk(DURABLE)
    desk.jobs(2)
    entry = desk.decide(2)
    lsn = desk.write(entry)
    desk.lease_table.stage(lsn, entry)
    if is_under_way:
        desk.lease_table.shift(1000)
    desk.lease_table.commit_staged(lsn)
    desk.lease_table.apply(lsn, entry)
    if not is_under_way:
        desk.lease_table.shift(1000)
    assert desk.counts(now_ms=TS + 1099) == (0, 2, 0, 0)
    assert desk.counts(now_ms=TS + 1101) == (2, 0, 0, 0)


def test_pieces_may_be_taken_while_things_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_parts, "PIECE_JOBS", 2)
    monkeypatch.setattr("topics_server.queue.leases.lease_table.PIECE_JOBS", 2)
    desk = Desk(DURABLE, DURABLE)
    desk.jobs(8)
    desk.claim(5)
    desk.append(b'{"records":[{"data":0,"delay_ms":70},{"data":0,"delay_ms":70}]}')
    start_lsn = desk.lsn + 1
    parts = desk.lease_table.capture()
    taken = [next(parts)]
    desk.claim(1)
    desk.delete((3, 3))
    desk.claim(9, now_ms=TS + 101)
    desk.commit(TopicDropped(2, "t2", TS))
    taken += parts
    again = desk.restarted(taken, start_lsn)
    assert again.counts(now_ms=TS + 101) == desk.counts(now_ms=TS + 101)
    counts = {seq: job.deliveries for seq, job in desk.book().jobs.items()}
    assert {seq: job.deliveries for seq, job in again.book().jobs.items()} == counts
    assert counts[1] == 2


def test_what_is_under_way_is_captured_as_if_it_were_not() -> None:
    desk = Desk(SOFT)
    desk.jobs(4)
    desk.claim(2)
    entry = desk.decide(1)
    desk.book().stage(entry)
    desk.book().begin_move([4])
    desk.book().jobs[4].at_ms = TS + 9
    again = desk.restarted(list(desk.lease_table.capture()), desk.lsn + 1, was_clean=True)
    assert again.counts() == (1, 2, 1, 0)
    assert again.claim(9, now_ms=TS + 9) == [3, 4]


def test_released_jobs_keep_count_and_delay_over_a_restart() -> None:
    desk = Desk(SOFT)
    desk.jobs(3)
    desk.claim(2)
    entry, _ = desk.book().decide_nack(TS, "a", [1, 2], None, 40)
    assert entry is not None
    desk.lease_table.apply_soft(entry)
    again = desk.restarted(list(desk.lease_table.capture()), desk.lsn + 1)
    assert again.counts() == (1, 0, 2, 0)
    assert again.claim(9, now_ms=TS + 40) == [1, 2, 3]
    assert again.book().jobs[1].deliveries == 2


def test_nothing_is_captured_while_there_is_no_queue() -> None:
    assert list(Desk(TopicConfig()).lease_table.capture()) == []


def test_a_queue_that_no_part_knows_has_a_book_after_recovery() -> None:
    desk = Desk(SOFT)
    desk.jobs(2)
    again = desk.restarted([], desk.lsn + 1)
    assert again.claim(9) == [1, 2]


def part_of(*images: QueueImage, version: int = 1) -> bytes:
    return msgspec.msgpack.encode(LeasesPart(version, 5, list(images)))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (b"", "not a part of the leases"),
        (b"\xc1", "not a part of the leases"),
        (part_of(version=2), "version 2"),
        (
            part_of(QueueImage(1, 5, 3, 0, [], [(1, 0), (1, 0)], [], [(1, 1)], [])),
            "captured twice",
        ),
        (
            part_of(QueueImage(1, 5, 3, 0, [LeaseImage(1, 9, "a", TS, 0, TS, 0)], [], [], [], [])),
            "never assigned",
        ),
    ],
)
def test_what_is_no_part_is_refused(part: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LeaseTable(1).restore(part)
