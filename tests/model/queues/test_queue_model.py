"""Hypothesis drives the books of a queue against a list of plain jobs, restarts included.

The plain model has no heap, bucket or cursor: it examines every job each time. Entries come as from
commits and recovery: staged, then applied or undone, then replayed if a snapshot, which is taken in
pieces meanwhile, does not have them. Invariants: a job has at most one live lease; an
acked job never returns; no job is lost; delivery counts never decrease while the server runs, nor
over a crash when leases are durable; each job is dead-lettered once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from topics_server.engine.background import capture as topic_capture
from topics_server.engine.topic.deletion import seq_runs
from topics_server.engine.topic.registry import Registry
from topics_server.queue.leases import kept_jobs, lease_book, lease_parts
from topics_server.queue.leases.fair_share import deal, divide
from topics_server.queue.leases.jobs import seqs_of
from topics_server.queue.leases.lease_book import Ask, LeaseBook
from topics_server.queue.leases.lease_table import LeaseTable, live_jobs
from topics_server.values.appends import decode_append
from topics_server.values.entries import (
    LEASES_ID,
    Entry,
    Floor,
    FloorMoved,
    LeaseEntry,
    LeasesExtended,
    LeasesGranted,
    RecordsAppended,
    RecordsDeleted,
    Source,
    TopicPut,
)
from topics_server.values.model import Durability, LossReason, TopicConfig, TopicType
from topics_server.values.storage_types import TOPIC_PARTS

TS = 1_700_000_000_000
QUEUE, DEAD = 1, 2
MAX_DELIVERIES = 3
DEAD_PER_CLAIM = 2

NODES = st.sampled_from(["a", "b"])
WAITS = st.sampled_from([0, 1, 50, 1_000])
LEASES = st.sampled_from([100, 101, 1_000])


@dataclasses.dataclass
class PlainJob:
    """A live job. `at_ms`: claimable from then on; `moving`: whether a move is under way, with or
    without a mark. `untold`: lease and time that a move ended in memory, before the journal has the
    move.
    """

    seq: int
    at_ms: int = 0
    deliveries: int = 0
    lease_id: int = 0
    node: str = ""
    connection: int = 0
    is_acking: bool = False
    moving: str = ""
    untold: tuple[int, str, int] | None = None
    pending: list[LeaseEntry] = dataclasses.field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        return bool(self.pending or self.is_acking or self.moving)

    def is_held(self, now_ms: int) -> bool:
        return self.lease_id != 0 and self.at_ms > now_ms

    def begin_move(self) -> None:
        self.untold = self.untold or (self.lease_id, self.node, self.at_ms)
        self.end_lease()
        self.moving = "begun"

    def end_lease(self) -> None:
        self.lease_id, self.node, self.connection = 0, "", 0


class QueueMachine(RuleBasedStateMachine):
    """One queue, its topic for dead letters, their journal and snapshots."""

    is_durable = False

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = TS
        # The longest delay of any job.
        self.latest_ms = TS + 1_001
        self.registry = Registry()
        self.lease_table = LeaseTable(first_lease_id=2**64 - 40)
        self.journal: list[tuple[int, Entry]] = []
        self.next_lsn = 1
        self.pending: deque[tuple[int, LeaseEntry]] = deque()
        self.jobs: dict[int, PlainJob] = {}
        self.dead_lettered = 0
        self.tokens: list[tuple[int, int]] = []
        # The seqs and tokens of each claim.
        self.claims: list[tuple[list[int], list[int]]] = []
        self.ids_given: set[int] = set()
        self.gone: set[int] = set()
        # Marks whose source is not deleted yet, by the lsn of their append.
        self.marks: dict[int, Source] = {}
        self.capturing: tuple[int, Iterator[bytes], list[bytes], dict[int, int]] | None = None
        self.snapshot: tuple[int, list[bytes], list[bytes]] | None = None
        # Deliveries that a soft queue's last snapshot certainly has.
        self.captured_counts: dict[int, int] = {}
        self.kept_sizes = lease_book.DEAD_JOBS_PER_CLAIM, lease_parts.PIECE_JOBS
        lease_book.DEAD_JOBS_PER_CLAIM = DEAD_PER_CLAIM  # type: ignore[misc]
        lease_parts.PIECE_JOBS = 2  # type: ignore[misc]
        # Claims of two jobs and more share a value, as large claims do in a server.
        self.kept_many = kept_jobs.MANY_JOBS
        lease_book.MANY_JOBS = kept_jobs.MANY_JOBS = 2  # type: ignore[misc]

    def teardown(self) -> None:
        lease_book.DEAD_JOBS_PER_CLAIM, lease_parts.PIECE_JOBS = self.kept_sizes  # type: ignore[misc]
        lease_book.MANY_JOBS = kept_jobs.MANY_JOBS = self.kept_many  # type: ignore[misc]

    @property
    def book(self) -> LeaseBook:
        book = self.lease_table.find(QUEUE)
        assert book is not None
        return book

    # -- the server around it --------------------------------------------------------------

    def journaled(self, entry: Entry) -> int:
        lsn = self.next_lsn
        self.next_lsn += 1
        self.journal.append((lsn, entry))
        return lsn

    def commit(self, entry: Entry) -> int:
        """A topic's entry: written and applied at once."""
        lsn = self.journaled(entry)
        self.lease_table.observe(lsn, entry, self.registry.apply(lsn, entry))
        return lsn

    def submit(self, entry: LeaseEntry) -> None:
        """An entry of the leases: applied now if they are soft, else after the sync."""
        if not self.is_durable:
            self.lease_table.apply_soft(entry)
            self.apply_plain(entry)
            return
        lsn = self.journaled(entry)
        self.lease_table.stage(lsn, entry)
        self.pending.append((lsn, entry))
        for seq in seqs_of(entry):
            self.jobs[seq].pending.append(entry)

    def apply_plain(self, entry: LeaseEntry) -> None:
        for index, seq in enumerate(seqs_of(entry)):
            job = self.jobs.get(seq)
            if job is None:
                continue
            if entry in job.pending:
                job.pending.remove(entry)
            if isinstance(entry, LeasesExtended):
                job.at_ms = entry.deadline_ms + 1
                continue
            job.end_lease()
            job.untold = None
            if isinstance(entry, LeasesGranted):
                job.lease_id = entry.leases[index][1]
                job.node, job.connection = entry.node, entry.connection
                job.at_ms = entry.deadline_ms + 1
                job.deliveries += 1
            else:
                job.at_ms = entry.jobs[index][1]

    @initialize()
    def create(self) -> None:
        config = TopicConfig(
            type=TopicType.QUEUE, leases_durable=self.is_durable, durability=Durability.FSYNC
        )
        self.commit(TopicPut(QUEUE, "q", 1, config, TS))
        self.commit(TopicPut(DEAD, "d", 1, TopicConfig(durability=Durability.FSYNC), TS))

    @property
    def live(self) -> lease_book.LiveJobs:
        topic = self.registry.get(QUEUE)
        assert topic is not None
        return live_jobs(topic, self.now_ms)

    # -- operations on the queue ------------------------------------------------------------

    @rule(delays=st.lists(st.sampled_from([0, 0, 0, 30, 500]), min_size=1, max_size=5))
    def enqueue(self, delays: list[int]) -> None:
        body = b'{"records":[%b]}' % b",".join(
            b'{"data":1,"delay_ms":%d}' % delay_ms for delay_ms in delays
        )
        decoded = decode_append(body)
        topic = self.registry.get(QUEUE)
        assert topic is not None
        first = topic.log.head_seq + 1
        self.commit(
            RecordsAppended(QUEUE, first, len(delays), self.now_ms, body, grammar=decoded.grammar)
        )
        for index, delay_ms in enumerate(delays):
            at_ms = self.now_ms + delay_ms if delay_ms else 0
            self.jobs[first + index] = PlainJob(first + index, at_ms)

    @rule(ms=st.sampled_from([1, 29, 100, 101, 400, 1_000]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.latest_ms = max(self.latest_ms, self.now_ms + 1_001)

    @rule(
        asks=st.lists(
            st.builds(Ask, NODES, st.integers(1, 4), LEASES, st.integers(0, 2)),
            min_size=1,
            max_size=3,
        )
    )
    def claim(self, asks: list[Ask]) -> None:
        limit = sum(ask.max_jobs for ask in asks)
        free = [job for job in self.jobs.values() if not job.is_busy and job.at_ms <= self.now_ms]
        order: list[int] = []
        dead: list[int] = []
        for job in sorted(free, key=lambda job: (job.at_ms, job.seq)):
            if job.deliveries and len(order) < limit and len(dead) < DEAD_PER_CLAIM:
                (dead if job.deliveries >= MAX_DELIVERIES else order).append(job.seq)
        unclaimed = sorted(job.seq for job in free if job.deliveries == 0)
        order += unclaimed[: limit - len(order)]
        wanted = [ask.max_jobs for ask in asks]
        hands = deal(order, divide(len(order), wanted))

        found = self.book.decide_claim(self.now_ms, self.live, asks, MAX_DELIVERIES)
        assert [job.seq for job in found.to_dead_letter] == dead
        lost = {seq for seq in [*order, *dead] if self.jobs[seq].lease_id}
        assert {lease.seq for lease in found.lost} == lost
        for ask, hand, claim in zip(asks, hands, found.claims, strict=True):
            assert [job.seq for job in claim.jobs] == sorted(hand) if claim else not hand
            if claim is None:
                continue
            for claimed in claim.jobs:
                seq, lease_id = claimed.seq, claimed.lease_id
                assert not self.jobs[seq].is_held(self.now_ms), "one live lease at most"
                assert claimed.deliveries == self.jobs[seq].deliveries + 1
                assert seq not in self.gone
                assert lease_id not in self.ids_given
                self.ids_given.add(lease_id)
                self.tokens.append((seq, lease_id))
            assert claim.deadline_ms == self.now_ms + ask.lease_ms
            self.submit(claim.entry)
        assert self.book.begin_move(dead) == dead
        for seq in dead:
            self.jobs[seq].begin_move()

    @precondition(lambda self: not self.is_durable)
    @rule(node=NODES, most=st.integers(1, 4), lease_ms=LEASES)
    def claim_at_once(self, node: str, most: int, lease_ms: int) -> None:
        free = [job for job in self.jobs.values() if not job.is_busy and job.at_ms <= self.now_ms]
        topic = self.registry.get(QUEUE)
        assert topic is not None
        live = self.live
        seqs = self.book.first_unclaimed(self.now_ms, most, live, topic.log.live_from)
        if any(job.deliveries for job in free):
            assert seqs is None, "jobs that came back go first"
            return
        assert seqs == sorted(job.seq for job in free)[:most]
        if not seqs:
            return
        deadline_ms = self.now_ms + lease_ms
        first_id = self.lease_table.reserve_ids(len(seqs))
        self.claims.append((seqs, [*range(first_id, first_id + len(seqs))]))
        self.book.lease_unclaimed(self.now_ms, seqs, first_id, node, deadline_ms)
        for lease_id, seq in enumerate(seqs, first_id):
            job = self.jobs[seq]
            assert lease_id not in self.ids_given
            self.ids_given.add(lease_id)
            self.tokens.append((seq, lease_id))
            job.lease_id, job.node, job.connection = lease_id, node, 0
            job.at_ms, job.deliveries, job.untold = deadline_ms + 1, 1, None
        assert self.book.ready(live) == self.book.counts(self.now_ms, live).ready

    def matched(
        self, node: str, seqs: list[int], lease_ids: list[int] | None
    ) -> tuple[list[int], list[int], list[int]]:
        """Which seqs the holder holds, which are skipped, and which are being acked."""
        hit: list[int] = []
        skipped: list[int] = []
        acking: list[int] = []
        for index, seq in enumerate(seqs):
            job = self.jobs.get(seq)
            is_held = (
                job is not None
                and job.lease_id != 0
                and job.node == node
                and not job.moving
                and all(isinstance(entry, LeasesExtended) for entry in job.pending)
                and (lease_ids is None or lease_ids[index] == job.lease_id)
            )
            if job is None or not is_held or seq in hit or seq in acking:
                skipped.append(seq)
            else:
                (acking if job.is_acking else hit).append(seq)
        # A repeated seq counts once, and is not skipped for the repetition.
        once = [seq for seq in dict.fromkeys(skipped) if seq not in hit and seq not in acking]
        return hit, once, acking

    def asked(self, data: st.DataObject, with_tokens: bool) -> tuple[list[int], list[int] | None]:
        """Seqs as a client may send them, and tokens that are or once were valid."""
        if data.draw(st.booleans()) and self.claims:
            # The jobs of one claim, perhaps without the last one.
            claimed, lease_ids = data.draw(st.sampled_from(self.claims[-3:]))
            count = max(1, len(claimed) - data.draw(st.integers(0, 1)))
            return claimed[:count], lease_ids[:count] if with_tokens else None
        held = [(seq, job.lease_id) for seq, job in self.jobs.items() if job.lease_id]
        if with_tokens and self.tokens:
            known = st.sampled_from(self.tokens)
            pairs = st.lists(st.sampled_from(held) | known if held else known, min_size=1)
            drawn = data.draw(pairs)[:4]
            return [seq for seq, _ in drawn], [lease_id for _, lease_id in drawn]
        seqs = st.integers(1, len(self.jobs) + 4)
        if held:
            seqs = st.sampled_from([seq for seq, _ in held]) | seqs
        return data.draw(st.lists(seqs, min_size=1, max_size=5)), None

    @rule(data=st.data(), node=NODES, with_tokens=st.booleans(), fails=st.booleans())
    def ack(self, data: st.DataObject, node: str, with_tokens: bool, fails: bool) -> None:
        seqs, lease_ids = self.asked(data, with_tokens)
        hit, skipped, joining = self.matched(node, seqs, lease_ids)
        found = self.book.decide_ack(node, seqs, lease_ids)
        assert (found.seqs, found.skipped, found.joining) == (hit, skipped, joining)
        self.book.begin_ack(hit)
        for seq in hit:
            self.jobs[seq].is_acking = True
        self.check()
        if fails:
            self.book.cancel_ack(hit)
            for seq in hit:
                self.jobs[seq].is_acking = False
        elif data.draw(st.booleans()):
            self.delete(sorted(hit))

    @precondition(lambda self: any(job.is_acking for job in self.jobs.values()))
    @rule(is_applied=st.booleans())
    def settle_acks(self, is_applied: bool) -> None:
        acking = [seq for seq, job in self.jobs.items() if job.is_acking]
        if is_applied:
            self.delete(sorted(acking))
        else:
            self.book.cancel_ack(acking)
            for seq in acking:
                self.jobs[seq].is_acking = False

    def delete(self, seqs: list[int]) -> None:
        if not seqs:
            return
        firsts, lasts = seq_runs(np.array(seqs, np.int64))
        # Both forms of one entry: with its seqs, as an ack's is decided, and as it is replayed.
        few = None if len(seqs) % 2 else seqs
        self.commit(RecordsDeleted(QUEUE, self.now_ms, firsts, lasts, few))
        self.forget(seqs)

    def forget(self, seqs: list[int]) -> None:
        for seq in seqs:
            if self.jobs.pop(seq).moving == "marked":
                self.dead_lettered += 1
            self.gone.add(seq)

    @rule(data=st.data(), node=NODES, with_tokens=st.booleans(), delay_ms=WAITS)
    def nack(self, data: st.DataObject, node: str, with_tokens: bool, delay_ms: int) -> None:
        seqs, lease_ids = self.asked(data, with_tokens)
        hit, skipped, acking = self.matched(node, seqs, lease_ids)
        entry, missed = self.book.decide_nack(self.now_ms, node, seqs, lease_ids, delay_ms)
        assert sorted(missed) == sorted(skipped + acking)
        assert (entry.jobs if entry else []) == [(seq, self.now_ms + delay_ms) for seq in hit]
        if entry:
            self.submit(entry)

    @rule(data=st.data(), node=NODES, with_tokens=st.booleans(), lease_ms=LEASES)
    def extend(self, data: st.DataObject, node: str, with_tokens: bool, lease_ms: int) -> None:
        seqs, lease_ids = self.asked(data, with_tokens)
        hit, skipped, acking = self.matched(node, seqs, lease_ids)
        entry, missed = self.book.decide_extend(self.now_ms, node, seqs, lease_ids, lease_ms)
        assert sorted(missed) == sorted(skipped + acking)
        assert (entry.seqs if entry else []) == hit
        if entry:
            assert entry.deadline_ms == self.now_ms + lease_ms
            self.submit(entry)

    @rule(connection=st.integers(1, 2))
    def end_connection(self, connection: int) -> None:
        entry = self.book.decide_release(self.now_ms, connection)
        held = sorted(
            job.seq
            for job in self.jobs.values()
            if job.connection == connection
            and not (job.is_acking or job.moving)
            and all(isinstance(entry, LeasesExtended) for entry in job.pending)
        )
        assert ([seq for seq, _ in entry.jobs] if entry else []) == held
        if entry:
            self.submit(entry)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if not self.tokens:
            return
        seq, lease_id = data.draw(st.sampled_from(self.tokens))
        job = self.jobs.get(seq)
        hits = job is not None and bool(self.matched(job.node, [seq], [lease_id])[0])
        entry = self.book.decide_give_back(self.now_ms, [(seq, lease_id)])
        assert (entry is not None) == hits
        if entry:
            self.submit(entry)

    @rule(first=st.integers(1, 12), count=st.integers(1, 8))
    def delete_range(self, first: int, count: int) -> None:
        self.delete([seq for seq in range(first, first + count) if seq in self.jobs])

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        lost = sorted(self.jobs)[:count]
        if not lost or any(self.jobs[seq].moving for seq in lost):
            return
        floor = Floor(lost[-1] + 1, LossReason.CAP)
        self.commit(FloorMoved(QUEUE, self.now_ms, floor))
        self.forget(lost)

    # -- moves -----------------------------------------------------------------------------

    @rule(data=st.data())
    def begin_move(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.integers(1, len(self.jobs) + 3), max_size=3, unique=True))
        seqs = [seq for seq in seqs if seq in self.jobs]
        free = [
            seq
            for seq in seqs
            if not self.jobs[seq].is_busy and not self.jobs[seq].is_held(self.now_ms)
        ]
        assert self.book.movable(self.now_ms, seqs) == free
        assert self.book.begin_move(free) == free
        assert self.book.begin_move(free) == []
        for seq in free:
            self.jobs[seq].begin_move()

    @precondition(lambda self: any(job.moving == "begun" for job in self.jobs.values()))
    @rule(wait_ms=WAITS, succeeds=st.booleans())
    def end_moves(self, wait_ms: int, succeeds: bool) -> None:
        seqs = [seq for seq, job in self.jobs.items() if job.moving == "begun"]
        if succeeds:
            topic = self.registry.get(DEAD)
            assert topic is not None
            body = b'{"records":[' + b",".join([b'{"data":1}'] * len(seqs)) + b"]}"
            source = Source(QUEUE, seqs)
            first = topic.log.head_seq + 1
            lsn = self.commit(
                RecordsAppended(DEAD, first, len(seqs), self.now_ms, body, source=source)
            )
            self.marks[lsn] = source
            for seq in seqs:
                self.jobs[seq].moving = "marked"
        else:
            self.book.cancel_move(seqs, self.now_ms + wait_ms)
            for seq in seqs:
                job = self.jobs[seq]
                job.moving = ""
                job.at_ms = max(job.at_ms, self.now_ms + wait_ms)

    @precondition(lambda self: self.marks)
    @rule()
    def finish_moves(self) -> None:
        for source in self.marks.values():
            self.delete(sorted(seq for seq in source.seqs if seq in self.jobs))
        self.marks.clear()

    # -- the journal -----------------------------------------------------------------------

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, len(self.pending)))):
            lsn, entry = self.pending.popleft()
            self.lease_table.commit_staged(lsn)
            self.lease_table.apply(lsn, entry)
            self.apply_plain(entry)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        kept = data.draw(st.integers(0, len(self.pending) - 1))
        cut = list(self.pending)[kept:]
        self.lease_table.undo_from(cut[0][0])
        for lsn, entry in reversed(cut):
            self.pending.pop()
            self.journal.remove((lsn, entry))
            for seq in seqs_of(entry):
                if seq in self.jobs:
                    self.jobs[seq].pending.remove(entry)

    # -- snapshots and restarts ------------------------------------------------------------

    def counts(self) -> dict[int, int]:
        return {seq: job.deliveries for seq, job in self.jobs.items()}

    @rule()
    def begin_capture(self) -> None:
        fronts = [lsn for lsn, _ in list(self.pending)[:1]]
        start_lsn = min([*fronts, *self.marks, self.next_lsn])
        self.capturing = start_lsn, self.lease_table.capture(), [], self.counts()
        self.go_on_capturing()

    @precondition(lambda self: self.capturing)
    @rule()
    def go_on_capturing(self) -> None:
        assert self.capturing is not None
        start_lsn, parts, taken, counts = self.capturing
        part = next(parts, None)
        if part is not None:
            taken.append(part)
            return
        topics = [topic_capture.capture(topic) for topic in self.registry]
        self.snapshot = start_lsn, taken, topics
        self.captured_counts = counts
        self.capturing = None

    @precondition(lambda self: self.capturing)
    @rule()
    def finish_capturing(self) -> None:
        while self.capturing:
            self.go_on_capturing()

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Crash: a prefix of the unsynced entries may still exist, because there is one shard."""
        survived = data.draw(st.integers(0, len(self.pending)))
        for lsn, entry in list(self.pending)[survived:]:
            self.journal.remove((lsn, entry))
        before = copy.deepcopy(self.jobs)
        for _, entry in list(self.pending)[:survived]:
            self.apply_plain(entry)
        self.restart(was_clean=False)
        for seq, job in self.jobs.items():
            found = self.book.jobs.get(seq)
            at_ms = found.at_ms if found else self.book.unclaimed.delayed_until.get(seq, 0)
            if not self.is_durable:
                deliveries = found.deliveries if found else 0
                assert self.captured_counts.get(seq, 0) <= deliveries <= before[seq].deliveries
                # The job's time comes from its delay or from a captured nack, or it is past.
                assert at_ms <= self.latest_ms
                job.end_lease()
                job.deliveries, job.at_ms = deliveries, at_ms
            elif job.untold:
                lease = (found.lease_id, found.node) if found else (0, "")
                assert lease == (0, "") or (*lease, at_ms) == job.untold
                (job.lease_id, job.node), job.at_ms = lease, at_ms
            job.untold = None

    @precondition(lambda self: not self.pending)
    @rule()
    def stop_and_start(self) -> None:
        if any(job.is_acking for job in self.jobs.values()):
            self.settle_acks(True)
        parts = list(self.lease_table.capture())
        topics = [topic_capture.capture(topic) for topic in self.registry]
        start_lsn = min([*self.marks, self.next_lsn])
        self.snapshot, self.captured_counts = (start_lsn, parts, topics), self.counts()
        self.restart(was_clean=True)
        for job in self.jobs.values():
            job.untold = None

    def restart(self, *, was_clean: bool) -> None:
        start_lsn, parts, topics = self.snapshot or (1, [], [])
        self.registry = Registry()
        self.lease_table = LeaseTable(first_lease_id=len(self.ids_given) * 2**32 + 1)
        for topic in topics:
            self.registry.adopt(topic_capture.restore(TOPIC_PARTS.decode(topic), []))
        for part in parts:
            self.lease_table.restore(part)
        marks: list[Source] = []
        for lsn, entry in self.journal:
            if lsn < start_lsn:
                continue
            if entry.topic_id == LEASES_ID:
                self.lease_table.apply(lsn, entry)
                continue
            self.lease_table.observe(lsn, entry, self.registry.apply(lsn, entry))
            if isinstance(entry, RecordsAppended) and entry.source is not None:
                marks.append(entry.source)
        self.lease_table.finish_recovery(self.now_ms, was_clean=was_clean, topics=self.registry)
        self.pending.clear()
        self.capturing = None
        for job in self.jobs.values():
            job.pending.clear()
            job.is_acking, job.connection = False, 0
            if job.moving == "begun":
                job.moving = ""
        # These are the steps of a start before it serves requests.
        self.marks.clear()
        for source in marks:
            self.delete(sorted(seq for seq in source.seqs if seq in self.jobs))

    # -- invariants --------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        if self.registry.get(QUEUE) is None:
            return
        live = self.live
        assert live.count == len(self.jobs), "nothing is lost, and nothing comes back"
        ready = in_flight = delayed = moving = 0
        due: list[int] = []
        for job in self.jobs.values():
            is_later = job.at_ms > self.now_ms
            moving += bool(job.moving)
            in_flight += not job.moving and (job.is_busy or job.is_held(self.now_ms))
            delayed += not job.is_busy and is_later and not job.lease_id
            ready += not job.is_busy and not is_later
            if is_later and not job.is_busy:
                due.append(job.at_ms)
        assert max(self.lease_table.count_in_flight(self.now_ms, 2), default=0) == in_flight
        counts = self.book.counts(self.now_ms, live)
        assert (counts.ready, counts.in_flight, counts.delayed, counts.moving) == (
            ready,
            in_flight,
            delayed,
            moving,
        )
        assert counts.dead_lettered == self.dead_lettered, "dead-lettered once"
        assert self.book.next_due_ms(self.now_ms) == min(due, default=None)
        held = [job for job in self.jobs.values() if job.is_held(self.now_ms)]
        views = self.book.leases_after(self.now_ms, 0, 100)
        assert [(view.seq, view.lease_id, view.node, view.deliveries) for view in views] == [
            (job.seq, job.lease_id, job.node, job.deliveries)
            for job in sorted(held, key=lambda job: job.seq)
        ]
        for connection in (1, 2):
            count = sum(job.connection == connection for job in held)
            assert self.book.connection_count(self.now_ms, connection) == count


class DurableMachine(QueueMachine):
    """The same with leases that are journaled."""

    is_durable = True


TestSoftLeases = QueueMachine.TestCase
TestSoftLeases.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestDurableLeases = DurableMachine.TestCase
TestDurableLeases.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
