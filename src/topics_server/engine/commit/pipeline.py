"""Tickets: takes a decided entry to applied state; the only caller of `apply`. Pure.

An entry joins the FIFO of its topic (or of its reserved id) and, unless its gate is NONE, one
shard's queue. The progress of a shard meets gates. When the gate of the entry at the front of a
FIFO is met, the entry is applied and its ticket resolves. So a read never sees an uncommitted
entry, and a topic's entries never overtake each other, even when its class changes in between.

Invariants: the gate of a FIFO's front is never met (the entry would have been applied); a failure
undoes a suffix of each FIFO that no reader has seen; an lsn is used once. Called by `engine/store`
(submit), by the journal (progress) and by `engine/background/recovery` (replay). Loop thread only;
no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.projections import NO_PROJECTIONS, ProjectionOwner, Projections
from topics_server.engine.ports import JournalPort
from topics_server.engine.topic.applied import NOTIFY, Applied
from topics_server.engine.topic.registry import Registry
from topics_server.values.entries import RESERVED_ID_MIN, Entry, RecordsAppended, RecordsDeleted
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Gate, TopicType
from topics_server.values.storage_types import ShardProgress

# For the hottest path: access to an enum member costs a lookup.
_NO_GATE: Final = Gate.NONE
_WRITTEN: Final = Gate.WRITTEN
_SYNCED: Final = Gate.SYNCED
_QUEUE: Final = TopicType.QUEUE

DISK_FULL: Final = "disk_full"
READ_ONLY: Final = "read_only"
# Called after an entry was applied, with its lsn, the entry, and the changes.
Observer = Callable[[int, Entry, Applied], None]


class Ticket(msgspec.Struct, eq=False):
    """One submitted entry. `applied` is set once it is applied, `error` if it has failed."""

    lsn: int
    entry: Entry
    gate: Gate
    owner: ProjectionOwner
    met: bool = False
    applied: Applied | None = None
    error: TopicsError | None = None
    write_ms: float = 0.0
    sync_ms: float = 0.0
    waiters: list[Callable[[], object]] = []

    @property
    def topic_id(self) -> int:
        """The topic or the reserved id of the entry."""
        return self.entry.topic_id

    @property
    def is_done(self) -> bool:
        """Whether the entry was applied or has failed."""
        return self.applied is not None or self.error is not None

    def resolve(self) -> None:
        """Call every waiter, once."""
        assert self.applied is not None or self.error is not None
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()


class CommitPipeline:
    """All FIFOs and all shards' queues of one server."""

    def __init__(
        self,
        registry: Registry,
        journal: JournalPort,
        notifier: Notifier,
        next_lsn: int,
        projections: Projections = NO_PROJECTIONS,
    ) -> None:
        assert next_lsn >= 1
        assert all(reserved_id >= RESERVED_ID_MIN for reserved_id in projections)
        self._registry = registry
        self._projections = projections
        self._journal = journal
        self._notifier = notifier
        self._next_lsn = next_lsn
        self._fifos: dict[int, deque[Ticket]] = {}
        shards = range(journal.shard_count)
        self._unwritten: list[deque[Ticket]] = [deque() for _ in shards]
        self._unsynced: list[deque[Ticket]] = [deque() for _ in shards]
        self._synced_lsn = [next_lsn - 1 for _ in shards]
        # Lsns of applied entries that replay must still read.
        self._held: set[int] = set()
        self.read_only_shards: list[int] = []
        # True while entries are applied. If it is true at any other time, an `apply` has failed: a
        # defect after which memory and journal may differ. Nothing is written any more until a
        # restart.
        self.is_broken = False
        # Called with every applied entry; observers must not raise. Most observers need only few
        # kinds of entries, and calling them would slow every append: they are in the lists below.
        self.observers: list[Observer] = []
        # Called with every entry except deletes and plain appends. Those two neither create a topic
        # nor move records, and they are the most frequent entries: every ack is a delete.
        self.change_observers: list[Observer] = []
        # Called with deletes.
        self.delete_observers: list[Observer] = []
        # Called with plain appends to queues.
        self.job_observers: list[Observer] = []
        # Called with plain appends that evicted records, and with plain appends after which the
        # tail has `watched_tail_records`, or the topic's `watched_tail_bytes`.
        self.tail_observers: list[Observer] = []
        self.watched_tail_records = 0
        # Called when a shard was synced further, after the listeners of the applied entries.
        self.on_synced: list[Callable[[], None]] = []
        journal.listen(self.on_progress)

    @property
    def next_lsn(self) -> int:
        """The lsn of the next entry."""
        return self._next_lsn

    def oldest_pending_lsn(self) -> int:
        """The oldest lsn that is not applied yet; `next_lsn` if nothing is in flight."""
        fronts = [fifo[0].lsn for fifo in self._fifos.values() if fifo]
        return min(fronts, default=self._next_lsn)

    def hold(self, lsn: int) -> None:
        """Keep this entry in the range of replay, applied or not, until it is released."""
        assert lsn not in self._held
        self._held.add(lsn)

    def release(self, lsn: int) -> None:
        """End the `hold` of an entry."""
        self._held.remove(lsn)

    def start_lsn(self) -> int:
        """The first lsn that replay needs for a snapshot whose capture begins now."""
        return min(self.oldest_pending_lsn(), min(self._held, default=self._next_lsn))

    def synced_lsn(self, topic_id: int) -> int:
        """The lsn up to which entries of this topic are synced."""
        return self._synced_lsn[self._journal.shard_of(topic_id)]

    def place_beside(self, topic_id: int) -> None:
        """Put the next new topic on the shard of this one."""
        shard = self._journal.shard_of(topic_id)
        while self._journal.shard_of(self._registry.next_topic_id) != shard:
            self._registry.next_topic_id += 1

    def shard_of(self, topic_id: int) -> int:
        """The shard of the journal for a topic's entries."""
        return self._journal.shard_of(topic_id)

    def same_shard(self, topic_id: int, other_id: int) -> bool:
        """Whether entries of both topics are in the same shard of the journal."""
        return self._journal.shard_of(topic_id) == self._journal.shard_of(other_id)

    def is_idle(self, topic_id: int) -> bool:
        """Whether the topic has nothing in flight."""
        return topic_id not in self._fifos

    def newest(self, topic_id: int) -> Ticket | None:
        """The newest ticket in flight of a topic."""
        fifo = self._fifos.get(topic_id)
        return fifo[-1] if fifo else None

    def find(self, topic_id: int, lsn: int) -> Ticket | None:
        """The ticket of one entry still in flight."""
        for ticket in self._fifos.get(topic_id, ()):
            if ticket.lsn == lsn:
                return ticket
        return None

    def flush(self, topic_id: int) -> None:
        """Write the submitted entries of a topic before this loop turn ends."""
        self._journal.flush(self._journal.shard_of(topic_id))

    def submit(
        self, entry: Entry, gate: Gate, owner: ProjectionOwner, *, urgent: bool = False
    ) -> Ticket:
        """Give the entry its lsn and its place in the FIFO; apply it now if it waits for nothing.

        `owner`: the topic, or the projection of a reserved id. Raises `TopicsError`:
        `storage_read_only` on a read-only shard, `throttled` when the shard's queue or the disk is
        full; then nothing was staged.
        """
        if self.is_broken:
            raise TopicsError(Code.INTERNAL, "a defect was met; restart the server")
        shard = self._journal.shard_of(entry.topic_id)
        if shard in self.read_only_shards:
            raise read_only_error(shard)
        lsn = self._next_lsn
        if gate is not _NO_GATE:
            self._journal.submit(lsn, entry, shard=shard, urgent=urgent, sync=gate is _SYNCED)
        self._next_lsn = lsn + 1
        ticket = Ticket(lsn, entry, gate, owner)
        owner.stage(lsn, entry)
        fifo = self._fifos.get(entry.topic_id)
        if fifo is None:
            fifo = self._fifos[entry.topic_id] = deque()
        fifo.append(ticket)
        if gate is _NO_GATE:
            ticket.met = True
            self._drain([ticket])
        elif gate is _WRITTEN:
            self._unwritten[shard].append(ticket)
        else:
            self._unsynced[shard].append(ticket)
        return ticket

    def on_progress(self, progress: ShardProgress) -> None:
        """Meet gates up to the shard's watermarks; undo failed entries."""
        shard, written_lsn, synced_lsn = progress.shard, progress.written_lsn, progress.synced_lsn
        assert synced_lsn <= written_lsn
        is_synced_further = synced_lsn > self._synced_lsn[shard]
        if is_synced_further:
            self._synced_lsn[shard] = synced_lsn
        met: list[Ticket] = []
        waiting, write_ms = self._unwritten[shard], progress.write_ms
        while waiting and waiting[0].lsn <= written_lsn:
            ticket = waiting.popleft()
            ticket.met, ticket.write_ms = True, write_ms
            met.append(ticket)
        waiting = self._unsynced[shard]
        while waiting and waiting[0].lsn <= synced_lsn:
            ticket = waiting.popleft()
            ticket.met, ticket.write_ms, ticket.sync_ms = True, write_ms, progress.sync_ms
            met.append(ticket)
        if progress.failed_from is not None:
            self._fail(shard, progress.failed_from, progress.error or READ_ONLY)
        self._drain(met)
        if is_synced_further:
            for callback in self.on_synced:
                callback()

    def _drain(self, met: Sequence[Ticket]) -> None:
        """Apply FIFO fronts whose gates are met, resolve, then notify each changed topic once.

        Tickets resolve first, so that writers are answered before readers are notified; other work
        comes last.
        """
        resolved: list[Ticket] = []
        changed: dict[int, None] = {}
        registry = self._registry
        was_broken, self.is_broken = self.is_broken, True
        fifos = self._fifos
        for each in met:
            fifo = fifos.get(each.entry.topic_id)
            while fifo and fifo[0].met:
                ticket = fifo.popleft()
                lsn, entry = ticket.lsn, ticket.entry
                topic_id = entry.topic_id
                ticket.owner.commit_staged(lsn)
                if topic_id < RESERVED_ID_MIN:
                    applied = registry.apply(lsn, entry)
                else:
                    applied = self._projections[topic_id].apply(lsn, entry)
                ticket.applied = applied
                for observer in self.observers:
                    observer(lsn, entry, applied)
                if type(entry) is RecordsDeleted:
                    for observer in self.delete_observers:
                        observer(lsn, entry, applied)
                elif type(entry) is RecordsAppended and entry.creation is None is entry.source:
                    topic = registry.get(topic_id)
                    if topic is not None:
                        if topic.config.type is _QUEUE:
                            for observer in self.job_observers:
                                observer(lsn, entry, applied)
                        tail = topic.log
                        if (
                            applied is not NOTIFY
                            or tail.tail_bytes >= topic.watched_tail_bytes
                            or tail.tail_count >= self.watched_tail_records
                        ):
                            for observer in self.tail_observers:
                                observer(lsn, entry, applied)
                else:
                    for observer in self.change_observers:
                        observer(lsn, entry, applied)
                if applied.notify:
                    changed[topic_id] = None
                resolved.append(ticket)
                if not fifo:
                    del fifos[topic_id]
        self.is_broken = was_broken
        for ticket in resolved:
            ticket.resolve()
        for topic_id in changed:
            if topic_id in self._notifier.listeners:
                self._notifier.notify(topic_id)
            topic = registry.get(topic_id)
            if topic is not None and topic.log.is_crowded:
                # Otherwise the topic's next append would have to do this first.
                topic.log.tidy()

    def _fail(self, shard: int, failed_from: int, error: str) -> None:
        """Undo the shard's entries from `failed_from` on, and those behind them in the FIFOs."""
        if error == READ_ONLY and shard not in self.read_only_shards:
            self.read_only_shards.append(shard)
        affected = [fifo for fifo in self._fifos.values() if self._on_shard(fifo, shard)]
        failed: list[Ticket] = []
        for fifo in affected:
            failed.extend(self._cut(fifo, failed_from))
        for queue in (self._unwritten[shard], self._unsynced[shard]):
            while queue and queue[-1].lsn >= failed_from:
                queue.pop()
        refusal = read_only_error(shard) if error == READ_ONLY else disk_full_error()
        for ticket in failed:
            ticket.error = refusal
        if error != READ_ONLY:
            self._journal.reopen(shard)
        for ticket in failed:
            ticket.resolve()

    def _on_shard(self, fifo: deque[Ticket], shard: int) -> bool:
        return self._journal.shard_of(fifo[0].topic_id) == shard

    def _cut(self, fifo: deque[Ticket], failed_from: int) -> list[Ticket]:
        """Take the suffix that starts at the first failed ticket off a FIFO, and unstage it."""
        kept = 0
        for ticket in fifo:
            # A ticket without a frame fails only behind a failed ticket that has one.
            if ticket.lsn >= failed_from and ticket.gate is not Gate.NONE:
                break
            kept += 1
        cut = list(fifo)[kept:]
        if not cut:
            return cut
        for _ in cut:
            fifo.pop()
        cut[0].owner.undo_from(cut[0].lsn)
        # This has an effect only if the topic was still being created.
        self._registry.abandon(cut[0].topic_id)
        if not fifo:
            del self._fifos[cut[0].topic_id]
        return cut


def read_only_error(shard: int) -> TopicsError:
    """503: a sync of this shard failed; it accepts no writes until the server is restarted."""
    return TopicsError(
        Code.STORAGE_READ_ONLY,
        "a disk sync failed: this topic's storage is read-only until the server restarts",
        {"shard": shard},
    )


def disk_full_error() -> TopicsError:
    """429: the disk refused the write; the call has stored nothing."""
    return TopicsError(
        Code.THROTTLED, "the disk refused the write; nothing was stored", {"limit": "disk"}
    )
