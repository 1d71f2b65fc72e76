"""Consumers: named, durable cursors of readers.

A commit is one entry in the topic's FIFO, behind the records that it covers. It has the gate of the
topic's class, but waits at least for its write. Called through `store`; loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from topics_server.engine.answers import ConsumerState
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pending_names import PendingNames
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.ticket_waits import applied, resolved
from topics_server.engine.ports import Clock
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.consumers.changes import (
    consumer_not_found,
    decide_commit,
    decide_consumer,
    decide_consumer_delete,
    too_many_consumers,
)
from topics_server.engine.topic.consumers.positions import ConsumerAt
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.retention import held_by
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import ConsumerDeleted, ConsumerMoved, Entry, TopicDropped
from topics_server.values.errors import topic_not_found
from topics_server.values.limits import CONSUMERS_MAX
from topics_server.values.model import ConsumerHold


class ConsumerCursors:
    """The consumers of all topics."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        clock: Clock,
        pending_names: PendingNames,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._clock = clock
        self._pending_names = pending_names
        # The number of consumers by topic; None until it is first needed.
        self._counts: dict[int, int] | None = None
        self._total = 0
        self._creating = 0
        commits.change_observers.append(self._count_changes)

    # -- changes ---------------------------------------------------------------------------

    async def put_consumer(
        self,
        name: str,
        consumer: str,
        from_seq: int | None,
        hold: ConsumerHold | UnsetType | None = UNSET,
    ) -> tuple[ConsumerState, bool]:
        """Get or create a consumer, at `from_seq` (None: the head); returns whether it is new.

        An existing consumer keeps its position, and gets the `hold` if that is set. Durable before
        this returns. Raises `topic_not_found`, `throttled`.
        """
        while True:
            await self._pending_names.over(name)
            topic = self._registry.existing(name)
            now_ms = self._clock.now_ms()
            seq = topic.log.head_seq if from_seq is None else from_seq
            is_new = topic.consumers.newest(consumer) is None
            entry = decide_consumer(topic, consumer, seq, now_ms, hold)
            if is_new:
                if self.consumer_count + self._creating >= CONSUMERS_MAX:
                    raise too_many_consumers("max_consumers", CONSUMERS_MAX)
                self._creating += 1
            try:
                await self._submitted(topic, consumer, entry)
            finally:
                if is_new:
                    self._creating -= 1
            if consumer in topic.consumers.known:
                return self._seen(topic, consumer), is_new
            if entry is not None:
                # The consumer was deleted in the turn that made or changed it; report the change
                # anyway.
                done = ConsumerAt(entry.seq, entry.ts, entry.ts)
                done.hold = None if entry.hold is UNSET else entry.hold
                return self._state_of(topic, consumer, done), is_new

    async def commit_consumer(
        self,
        name: str,
        consumer: str,
        seq: int,
        *,
        rewind: bool = False,
        if_seq: int | None = None,
        topic_id: int | None = None,
    ) -> tuple[ConsumerState, bool]:
        """Commit a seq, durable before this returns; returns whether the consumer moved.

        `topic_id`: the topic of the seq; a later topic of the same name raises `topic_not_found`.
        Raises `topic_not_found` and what `decide_commit` raises.
        """
        while True:
            await self._pending_names.over(name)
            topic = self._registry.existing(name)
            if topic_id is not None and topic.topic_id != topic_id:
                raise topic_not_found(name)
            lsn = topic.consumers.staged_lsn(consumer)
            ticket = None if lsn is None else self._commits.find(topic.topic_id, lsn)
            if if_seq is None or ticket is None:
                break
            # A commit in flight may fail: compare with the applied position.
            await resolved(ticket)
        now_ms = self._clock.now_ms()
        entry = decide_commit(topic, consumer, seq, now_ms, rewind=rewind, if_seq=if_seq)
        await self._submitted(topic, consumer, entry)
        return self._seen(topic, consumer), entry is not None

    async def delete_consumer(self, name: str, consumer: str) -> bool:
        """Delete a consumer, durable before this returns; False: there was none."""
        await self._pending_names.over(name)
        topic = self._registry.existing(name)
        entry = decide_consumer_delete(topic, consumer, self._clock.now_ms())
        await self._submitted(topic, consumer, entry)
        return entry is not None

    async def _submitted(
        self, topic: Topic, consumer: str, entry: ConsumerMoved | ConsumerDeleted | None
    ) -> None:
        """Return when the entry is applied, or when the commit that it would repeat is applied."""
        if entry is not None:
            await applied(self._commits.submit(entry, gate_of(entry, topic), topic))
            return
        lsn = topic.consumers.staged_lsn(consumer)
        ticket = None if lsn is None else self._commits.find(topic.topic_id, lsn)
        if ticket is not None:
            await applied(ticket)

    # -- states ----------------------------------------------------------------------------

    def consumer(self, name: str, consumer: str) -> ConsumerState:
        """The state of a consumer. Raises `topic_not_found`, `consumer_not_found`."""
        topic = self._registry.existing(name)
        known = topic.consumers.known.get(consumer)
        if known is None:
            raise consumer_not_found(name, consumer)
        return self._state_of(topic, consumer, known)

    def read_start(self, name: str, consumer: str) -> int:
        """The seq after which a consumer reads; counts as a use. Raises like `consumer`."""
        return self._seen(self._registry.existing(name), consumer).seq

    def list_consumers(
        self, name: str, after: str | None, page_size: int
    ) -> tuple[list[ConsumerState], str | None]:
        """Consumers in name order after `after`, and the name to continue after if more follow."""
        topic = self._registry.existing(name)
        names = sorted(each for each in topic.consumers.known if after is None or each > after)
        shown = names[:page_size]
        states = [self._state_of(topic, each, topic.consumers.known[each]) for each in shown]
        return states, shown[-1] if len(names) > page_size else None

    def consumer_lags(self) -> Iterator[tuple[str, str, int, int]]:
        """Topic, consumer, lag in seqs and held records of every consumer.

        Changes meanwhile may be missed.
        """
        for topic_id in list(self._counted()):
            topic = self._registry.get(topic_id)
            if topic is None:
                continue
            for name, known in list(topic.consumers.known.items()):
                lag = max(0, topic.log.head_seq - known.seq)
                yield topic.name, name, lag, self._held_by(topic, known)

    @property
    def consumer_count(self) -> int:
        """The number of consumers on the server."""
        self._counted()
        return self._total

    def _seen(self, topic: Topic, consumer: str) -> ConsumerState:
        known = topic.consumers.known.get(consumer)
        if known is None:
            raise consumer_not_found(topic.name, consumer)
        known.seen_ts = self._clock.now_ms()
        return self._state_of(topic, consumer, known)

    def _state_of(self, topic: Topic, consumer: str, known: ConsumerAt) -> ConsumerState:
        now_ms, log = self._clock.now_ms(), topic.log
        earliest_seq = topic.earliest_seq(now_ms)
        first = log.next_live(max(known.seq + 1, earliest_seq))
        return ConsumerState(
            topic=topic.name,
            consumer=consumer,
            seq=known.seq,
            head_seq=log.head_seq,
            earliest_seq=earliest_seq,
            lag=max(0, log.head_seq - known.seq),
            lag_ms=0 if first > log.head_seq else max(0, now_ms - log.time_of(first)),
            created_ts=known.created_ts,
            committed_ts=known.committed_ts,
            seen_ts=known.committed_ts if known.seen_ts is None else known.seen_ts,
            epoch=topic.epoch,
            hold=known.hold,
            held_records=self._held_by(topic, known),
        )

    def _held_by(self, topic: Topic, known: ConsumerAt) -> int:
        """The number of records that exist only because a consumer holds them."""
        if known.hold is None:
            return 0
        now_ms = self._clock.now_ms()
        return held_by(topic.log, topic.staging, topic.config, now_ms, known.seq)

    # -- counts ----------------------------------------------------------------------------

    def _counted(self) -> dict[int, int]:
        if self._counts is None:
            self._counts = {
                topic.topic_id: len(topic.consumers.known)
                for topic in self._registry
                if topic.consumers.known
            }
            self._total = sum(self._counts.values())
        return self._counts

    def _count_changes(self, _lsn: int, entry: Entry, _done: Applied) -> None:
        counts = self._counts
        if counts is None or not isinstance(entry, ConsumerMoved | ConsumerDeleted | TopicDropped):
            return
        topic = self._registry.get(entry.topic_id)
        count = 0 if topic is None else len(topic.consumers.known)
        self._total += count - counts.pop(entry.topic_id, 0)
        if count:
            counts[entry.topic_id] = count
