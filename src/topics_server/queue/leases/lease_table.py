"""The leases of all queues: a projection of the journal. Pure.

Lease entries come through the FIFO of the leases; what happens to a queue's records is heard of as
it is applied to its topic, live and in replay. The two are in no order with each other, so each
book notes how far it has got with either. With `leases_durable` off entries are applied at once and
never journaled: only snapshots tell of them. A job that leaves for the dead-letter topic is counted
when it is deleted here after its copy was marked there (ARCHITECTURE, Two topics).

Satisfies `projections.Projection`; called by commits, recovery, the checkpointer (entries) and by
`queue/service` (everything else). Loop thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from topics_server.engine.answers import QueueCounts
from topics_server.engine.topic.topic import Applied, Topic
from topics_server.queue.leases.lease_book import LeaseBook, LiveJobs
from topics_server.queue.leases.lease_parts import PIECE_JOBS, pieces_of, restore_piece
from topics_server.values.appends import deliver_times
from topics_server.values.entries import (
    Entry,
    Floor,
    FloorMoved,
    LeaseEntry,
    RecordsAppended,
    RecordsDeleted,
    TopicDropped,
    TopicPut,
)
from topics_server.values.limits import U64_MAX
from topics_server.values.model import TopicType
from topics_server.values.storage_types import LeasesPart, QueueImage

_VERSION: Final = 1
_NOTHING: Final = Applied()
_DECODER: Final = msgspec.msgpack.Decoder(LeasesPart)


def live_jobs(topic: Topic, now_ms: int) -> LiveJobs:
    """What the topic knows of its jobs now."""
    log = topic.log
    floor_seq = topic.earliest_seq(now_ms)
    return LiveJobs(floor_seq, log.head_seq, topic.live(now_ms)[0], log.next_live)


class LeaseTable:
    """All queues' books, by topic id. `first_lease_id`: random, so that ids are never repeated."""

    def __init__(self, first_lease_id: int) -> None:
        self._books: dict[int, LeaseBook] = {}
        self._last_id = first_lease_id
        # Entries under way, each with how far the clock had been set when it was decided.
        self._staged: deque[tuple[int, LeaseEntry, int]] = deque()
        self._shifted_ms = 0
        self._committed_lsn = 0
        self._committed_shift_ms = 0
        self._applied_lsn = 0
        # Jobs whose copy is in the dead-letter topic and which are not deleted yet, by queue.
        self._marked: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._books)

    def find(self, queue_id: int) -> LeaseBook | None:
        """The book of a queue; None if the topic is none, or gone."""
        return self._books.get(queue_id)

    def counts(self, topic: Topic, now_ms: int) -> QueueCounts:
        """The gauges of a queue (§10.7)."""
        counts = self._books[topic.topic_id].counts(now_ms, live_jobs(topic, now_ms))
        return QueueCounts(counts.ready, counts.in_flight, counts.delayed, counts.dead_lettered)

    def count_in_flight(self, now_ms: int, slice_queues: int) -> Iterator[int]:
        """Leases of all queues that have not expired: a running sum, after so many queues each."""
        total = 0
        books = iter(list(self._books.values()))
        while chunk := list(islice(books, slice_queues)):
            total += sum(book.in_flight(now_ms) for book in chunk)
            yield total

    def _next_id(self) -> int:
        self._last_id = self._last_id % U64_MAX + 1
        return self._last_id

    def _open(self, queue_id: int) -> LeaseBook:
        book = self._books.get(queue_id)
        if book is None:
            book = self._books[queue_id] = LeaseBook(queue_id, self._next_id)
        return book

    def shift(self, by_ms: int) -> None:
        """The wall clock was set by so much; within a process leases and delays do not mind."""
        self._shifted_ms += by_ms
        for book in self._books.values():
            book.shift(by_ms)

    # -- entries of the leases -------------------------------------------------------------

    def apply_soft(self, entry: LeaseEntry) -> None:
        """Take an entry in at once that is not journaled."""
        book = self._books[entry.queue_id]
        book.stage(entry)
        book.apply(0, entry, is_staged=True)

    def stage(self, lsn: int, entry: Entry) -> None:
        """See `projections.Owner`. Its jobs are nobody else's until it is settled."""
        assert isinstance(entry, LeaseEntry), "not an entry of the leases"
        self._staged.append((lsn, entry, self._shifted_ms))
        self._books[entry.queue_id].stage(entry)

    def commit_staged(self, lsn: int) -> None:
        """See `projections.Owner`."""
        staged_lsn, _, shifted_ms = self._staged.popleft()
        assert staged_lsn == lsn, "entries leave in the order in which they came"
        self._committed_lsn = lsn
        self._committed_shift_ms = self._shifted_ms - shifted_ms

    def undo_from(self, lsn: int) -> None:
        """See `projections.Owner`."""
        while self._staged and self._staged[-1][0] >= lsn:
            _, entry, _ = self._staged.pop()
            book = self._books.get(entry.queue_id)
            if book is not None:
                book.undo(entry)

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """See `projections.Projection`. A queue that was dropped meanwhile stays so."""
        assert isinstance(entry, LeaseEntry), "not an entry of the leases"
        if lsn == self._committed_lsn:
            book = self._books.get(entry.queue_id)
            if book is not None:
                shift_ms = self._committed_shift_ms
                book.apply(lsn, entry, is_staged=True, shift_ms=shift_ms)
        else:
            book = self._open(entry.queue_id)
            if lsn > book.leases_lsn:
                book.apply(lsn, entry, is_staged=False)
        self._applied_lsn = max(self._applied_lsn, lsn)
        return _NOTHING

    # -- what happens to topics ------------------------------------------------------------

    def observe(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Hear of an entry that a topic has applied."""
        if isinstance(entry, RecordsAppended):
            if entry.creation is not None:
                self._put(lsn, entry.creation)
            source = entry.source
            if source is not None and not source.is_redrive and source.topic_id in self._books:
                self._marked.setdefault(source.topic_id, set()).update(source.seqs)
            self._appended(lsn, entry)
        elif isinstance(entry, RecordsDeleted):
            self._deleted(lsn, entry)
        elif isinstance(entry, FloorMoved):
            self._hear(lsn, entry.topic_id, entry.floor)
        elif isinstance(entry, TopicPut):
            self._put(lsn, entry)
            self._hear(lsn, entry.topic_id, entry.floor)
        elif isinstance(entry, TopicDropped):
            self._forget_queue(entry.topic_id)

    def _put(self, lsn: int, entry: TopicPut) -> None:
        if entry.config.type is TopicType.QUEUE and entry.topic_id not in self._books:
            # An older entry than the book's first is of no use to it.
            self._open(entry.topic_id).topic_lsn = lsn - 1

    def _appended(self, lsn: int, entry: RecordsAppended) -> None:
        book = self._books.get(entry.topic_id)
        if book is None or lsn <= book.topic_lsn:
            return
        times = deliver_times(entry.body, entry.decoded, entry.grammar, entry.ts)
        for index, at_ms, is_time in times:
            book.delay(entry.first_seq + index, at_ms, is_time=is_time)
        self._hear(lsn, entry.topic_id, entry.floor)

    def _deleted(self, lsn: int, entry: RecordsDeleted) -> None:
        book = self._books.get(entry.topic_id)
        if book is None or lsn <= book.topic_lsn:
            return
        firsts = np.frombuffer(entry.firsts, "<u8").tolist()
        lasts = np.frombuffer(entry.lasts, "<u8").tolist()
        for first_seq, last_seq in zip(firsts, lasts, strict=True):
            book.forget(first_seq, last_seq)
            self._count_dead(book, first_seq, last_seq)
        book.topic_lsn = lsn

    def _hear(self, lsn: int, topic_id: int, floor: Floor | None) -> None:
        book = self._books.get(topic_id)
        if book is None or lsn <= book.topic_lsn:
            return
        book.topic_lsn = lsn
        if floor is not None:
            book.forget_below(floor.seq)
            self._count_dead(book, 1, floor.seq - 1)

    def _count_dead(self, book: LeaseBook, first_seq: int, last_seq: int) -> None:
        """Jobs that are gone from here and have a copy there have arrived."""
        marked = self._marked.get(book.queue_id)
        if not marked:
            return
        if last_seq - first_seq < len(marked):
            arrived = [seq for seq in range(first_seq, last_seq + 1) if seq in marked]
        else:
            arrived = [seq for seq in marked if first_seq <= seq <= last_seq]
        book.dead_lettered += len(arrived)
        marked.difference_update(arrived)
        if not marked:
            del self._marked[book.queue_id]

    def _forget_queue(self, topic_id: int) -> None:
        self._books.pop(topic_id, None)
        self._marked.pop(topic_id, None)

    # -- snapshots and restarts ------------------------------------------------------------

    def capture(self) -> Iterator[bytes]:
        """See `projections.Projection`. Nothing at all while there is no queue."""
        images: list[QueueImage] = []
        job_count = 0
        for queue_id in list(self._books):
            book = self._books.get(queue_id)
            if book is None:
                continue  # dropped while others were captured
            for image in pieces_of(book):
                images.append(image)
                job_count += 1 + len(image.leases) + len(image.returned) + len(image.delayed)
                # A piece is as new as its part says, so nothing may happen between the two.
                if job_count >= PIECE_JOBS:
                    yield self._encode(images)
                    images, job_count = [], 0
        if images:
            yield self._encode(images)

    def _encode(self, images: list[QueueImage]) -> bytes:
        return msgspec.msgpack.encode(LeasesPart(_VERSION, self._applied_lsn, images))

    def restore(self, part: bytes) -> None:
        """See `projections.Projection`."""
        try:
            captured = _DECODER.decode(part)
        except msgspec.DecodeError as error:
            raise ValueError(f"not captured leases: {error}") from None
        if captured.version != _VERSION:
            raise ValueError(f"captured leases have version {captured.version}, not {_VERSION}")
        self._applied_lsn = max(self._applied_lsn, captured.applied_lsn)
        for image in captured.queues:
            if image.queue_id not in self._books:
                # Later pieces are newer; what none of them has is told from here on.
                self._open(image.queue_id).leases_lsn = captured.applied_lsn
            restore_piece(self._books[image.queue_id], image, captured.applied_lsn)

    def finish_recovery(self, now_ms: int, *, was_clean: bool, topics: Iterable[Topic]) -> None:
        """After replay, before anybody is served: judge by the topics there are.

        After an unclean stop only durable leases are kept; of the others the counts are.
        """
        restored, self._books = self._books, {}
        for topic in topics:
            if topic.config.type is not TopicType.QUEUE:
                continue
            book = restored.get(topic.topic_id)
            if book is None:
                self._open(topic.topic_id)
                continue
            self._books[topic.topic_id] = book
            keeps_leases = was_clean or topic.config.leases_durable
            book.finish_recovery(live_jobs(topic, now_ms), keeps_leases=keeps_leases)
            marked = self._marked.get(topic.topic_id, set())
            marked.intersection_update([seq for seq in marked if topic.log.next_live(seq) == seq])
        self._marked = {
            queue_id: marked
            for queue_id, marked in self._marked.items()
            if marked and queue_id in self._books
        }
