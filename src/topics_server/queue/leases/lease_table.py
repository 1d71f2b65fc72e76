"""The leases of all queues: a projection of the journal. Pure.

Lease entries arrive through the FIFO of the leases; the table also observes the entries that are
applied to queues, live and in replay. The two sequences have no common order, so each book stores
its progress in both. With `leases_durable` off, entries are applied at once and never journaled:
only snapshots keep them. A job that moves to the dead-letter topic is counted when it is deleted
here, after its copy was stored there (ARCHITECTURE, Moves between topics).

Satisfies `projections.Projection`; called by commits, recovery, the checkpointer (entries) and by
`queue/service` (everything else). Loop thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from topics_server.engine.answers import QueueCounts
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.topic import Topic
from topics_server.queue.leases.lease_book import LeaseBook, LiveJobs
from topics_server.queue.leases.lease_parts import PIECE_JOBS, pieces_of, restore_piece
from topics_server.queue.leases.rubbish import Rubbish
from topics_server.queue.leases.unclaimed import seqs_in_runs
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
from topics_server.values.record_codecs import deliver_times
from topics_server.values.storage_types import LEASES_PARTS, LeasesPart, QueueImage

_NOTHING: Final = Applied()
_NO_COUNTS: Final = QueueCounts(0, 0, 0, 0)


def live_jobs(topic: Topic, now_ms: int) -> LiveJobs:
    """The topic's live jobs now."""
    log = topic.log
    if not topic.config.ttl_ms:
        return LiveJobs(log.earliest_seq, log.head_seq, log.live_count, log.next_live)
    floor_seq = topic.earliest_seq(now_ms)
    return LiveJobs(floor_seq, log.head_seq, topic.live(now_ms)[0], log.next_live)


class LeaseTable:
    """The lease books of all queues, by topic id.

    `first_lease_id`: random, so that no id is repeated.
    """

    def __init__(self, first_lease_id: int) -> None:
        self._by_queue: dict[int, LeaseBook] = {}
        self._rubbish = Rubbish()
        self._last_id = first_lease_id
        # Entries in flight, each with the clock's shift at the time of its decision.
        self._staged: deque[tuple[int, LeaseEntry, int]] = deque()
        self._shifted_ms = 0
        self._committed_lsn = 0
        self._committed_shift_ms = 0
        self._applied_lsn = 0
        # By queue: jobs that have a copy in the dead-letter topic and are not deleted yet.
        self._marked: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._by_queue)

    def free_soon(self, soon: Callable[[Callable[[], None]], object]) -> None:
        """Let `soon` schedule the freeing of deleted jobs in later turns of the loop."""
        self._rubbish.soon = soon

    def find(self, queue_id: int) -> LeaseBook | None:
        """The lease book of a queue; None if the topic is not a queue or does not exist."""
        if self._rubbish.has_any:
            self._rubbish.free_some()
        return self._by_queue.get(queue_id)

    def counts(self, topic: Topic, now_ms: int) -> QueueCounts:
        """The gauges of a queue (§10.7); zeros if it was dropped."""
        book = self._by_queue.get(topic.topic_id)
        if book is None:
            return _NO_COUNTS
        counts = book.counts(now_ms, live_jobs(topic, now_ms))
        return QueueCounts(counts.ready, counts.in_flight, counts.delayed, counts.dead_lettered)

    def count_in_flight(self, now_ms: int, slice_queues: int) -> Iterator[int]:
        """Unexpired leases of all queues: a running sum, after every `slice_queues` queues."""
        if self._rubbish.has_any:
            self._rubbish.free_some()
        total = 0
        queues = iter(list(self._by_queue.values()))
        while chunk := list(islice(queues, slice_queues)):
            total += sum(book.in_flight(now_ms) for book in chunk)
            yield total

    def _next_id(self) -> int:
        self._last_id = self._last_id % U64_MAX + 1
        return self._last_id

    def reserve_ids(self, count: int) -> int:
        """Reserve consecutive lease ids; returns the first one."""
        if self._last_id > U64_MAX - count:
            self._last_id = 0
        first_id = self._last_id + 1
        self._last_id += count
        return first_id

    def _open(self, queue_id: int) -> LeaseBook:
        book = self._by_queue.get(queue_id)
        if book is None:
            book = self._by_queue[queue_id] = LeaseBook(queue_id, self._next_id, self._rubbish)
        return book

    def shift(self, by_ms: int) -> None:
        """Adjust times to a wall clock set by `by_ms`; leases and delays keep their length."""
        self._shifted_ms += by_ms
        for book in self._by_queue.values():
            book.shift(by_ms)

    # -- entries of the leases -------------------------------------------------------------

    def apply_soft(self, entry: LeaseEntry) -> None:
        """Apply an entry that is not journaled."""
        book = self._by_queue[entry.queue_id]
        book.stage(entry)
        book.apply(0, entry, is_staged=True)

    def stage(self, lsn: int, entry: Entry) -> None:
        """See `projections.Owner`. Its jobs are busy until the entry is applied or undone."""
        assert isinstance(entry, LeaseEntry), "not an entry of the leases"
        self._staged.append((lsn, entry, self._shifted_ms))
        self._by_queue[entry.queue_id].stage(entry)

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
            book = self._by_queue.get(entry.queue_id)
            if book is not None:
                book.undo(entry)

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """See `projections.Projection`. A queue that was dropped meanwhile stays dropped."""
        assert isinstance(entry, LeaseEntry), "not an entry of the leases"
        if lsn == self._committed_lsn:
            book = self._by_queue.get(entry.queue_id)
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
        """Observe an entry that a topic has applied."""
        if self._rubbish.has_any:
            self._rubbish.free_some()
        if isinstance(entry, RecordsAppended):
            if entry.creation is not None:
                self._put(lsn, entry.creation)
            source = entry.source
            if source is not None and not source.is_redrive and source.topic_id in self._by_queue:
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
        if entry.config.type is TopicType.QUEUE and entry.topic_id not in self._by_queue:
            # Skip entries that are older than the book.
            self._open(entry.topic_id).topic_lsn = lsn - 1

    def _appended(self, lsn: int, entry: RecordsAppended) -> None:
        book = self._by_queue.get(entry.topic_id)
        if book is None or lsn <= book.topic_lsn:
            return
        times = deliver_times(entry.body, entry.decoded, entry.grammar, entry.ts)
        for index, at_ms, is_time in times:
            book.delay(entry.first_seq + index, at_ms, is_time=is_time)
        self._hear(lsn, entry.topic_id, entry.floor)

    def _deleted(self, lsn: int, entry: RecordsDeleted) -> None:
        book = self._by_queue.get(entry.topic_id)
        if book is None or lsn <= book.topic_lsn:
            return
        book.topic_lsn = lsn
        if entry.seqs is not None:
            book.forget_deleted(entry.seqs)
            marked = self._marked.get(book.queue_id)
            if marked:
                self._have_arrived(book, marked, [seq for seq in entry.seqs if seq in marked])
            return
        firsts, lasts = np.frombuffer(entry.firsts, "<u8"), np.frombuffer(entry.lasts, "<u8")
        book.forget_runs(firsts, lasts)
        marked = self._marked.get(book.queue_id)
        if marked:
            self._have_arrived(book, marked, seqs_in_runs(marked, firsts, lasts).tolist())

    def _hear(self, lsn: int, topic_id: int, floor: Floor | None) -> None:
        book = self._by_queue.get(topic_id)
        if book is None or lsn <= book.topic_lsn:
            return
        book.topic_lsn = lsn
        if floor is not None:
            book.forget_below(floor.seq)
            self._count_dead(book, 1, floor.seq - 1)

    def _count_dead(self, book: LeaseBook, first_seq: int, last_seq: int) -> None:
        """Count deleted jobs that have a copy in the dead-letter topic as dead-lettered."""
        marked = self._marked.get(book.queue_id)
        if not marked:
            return
        if last_seq - first_seq < len(marked):
            arrived = [seq for seq in range(first_seq, last_seq + 1) if seq in marked]
        else:
            arrived = [seq for seq in marked if first_seq <= seq <= last_seq]
        self._have_arrived(book, marked, arrived)

    def _have_arrived(self, book: LeaseBook, marked: set[int], arrived: list[int]) -> None:
        book.dead_lettered += len(arrived)
        marked.difference_update(arrived)
        if not marked:
            del self._marked[book.queue_id]

    def _forget_queue(self, topic_id: int) -> None:
        self._by_queue.pop(topic_id, None)
        self._marked.pop(topic_id, None)

    # -- snapshots and restarts ------------------------------------------------------------

    def capture(self) -> Iterator[bytes]:
        """See `projections.Projection`. Yields nothing while there is no queue."""
        images: list[QueueImage] = []
        job_count = 0
        for queue_id in list(self._by_queue):
            book = self._by_queue.get(queue_id)
            if book is None:
                continue  # dropped while others were captured
            for image in pieces_of(book):
                images.append(image)
                job_count += 1 + len(image.leases) + len(image.returned) + len(image.delayed)
                # A piece has the lsn of its part, so no entry may be applied between the two.
                if job_count >= PIECE_JOBS:
                    yield self._encode(images)
                    images, job_count = [], 0
        if images:
            yield self._encode(images)

    def _encode(self, images: list[QueueImage]) -> bytes:
        return msgspec.msgpack.encode(LeasesPart(LEASES_PARTS.version, self._applied_lsn, images))

    def restore(self, part: bytes) -> None:
        """See `projections.Projection`."""
        captured = LEASES_PARTS.decode(part)
        self._applied_lsn = max(self._applied_lsn, captured.applied_lsn)
        for image in captured.queues:
            if image.queue_id not in self._by_queue:
                # Later pieces are newer; from the lsn of this piece on the journal supplies the
                # rest.
                self._open(image.queue_id).leases_lsn = captured.applied_lsn
            restore_piece(self._by_queue[image.queue_id], image, captured.applied_lsn)

    def finish_recovery(self, now_ms: int, *, was_clean: bool, topics: Iterable[Topic]) -> None:
        """After replay, before requests are served: drop books whose topic does not exist.

        After an unclean stop only durable leases are kept; of other leases only the delivery counts
        are kept.
        """
        restored, self._by_queue = self._by_queue, {}
        for topic in topics:
            if topic.config.type is not TopicType.QUEUE:
                continue
            book = restored.get(topic.topic_id)
            if book is None:
                self._open(topic.topic_id)
                continue
            self._by_queue[topic.topic_id] = book
            keeps_leases = was_clean or topic.config.leases_durable
            book.finish_recovery(live_jobs(topic, now_ms), keeps_leases=keeps_leases)
            marked = self._marked.get(topic.topic_id, set())
            marked.intersection_update([seq for seq in marked if topic.log.next_live(seq) == seq])
        self._marked = {
            queue_id: marked
            for queue_id, marked in self._marked.items()
            if marked and queue_id in self._by_queue
        }
