"""Appends: one call makes one entry and one ticket.

Every way to append (a client's call, records moved from another topic, a router's page) checks its
preconditions, decides the entry and submits it; there is no `await` between decide and submit. A
submitted append is a `PendingAppend`: it has one result, whether a task or a callback waits for it.
Called through `store`, and by `stream_writes`; loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import msgspec

from topics_server.engine.answers import Appended
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pending_names import PendingNames
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.repeats import repeated
from topics_server.engine.commit.ticket_waits import check_applied, resolved
from topics_server.engine.commit.transfers import Transfers
from topics_server.engine.ports import Clock
from topics_server.engine.preconditions import Preconditions, disk_nearly_full
from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.producers import StampRepeated
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.append import decide_append, decide_page
from topics_server.engine.topic.writes.condition import ConditionCheck
from topics_server.engine.topic.writes.configure import decide_reservation
from topics_server.values.appends import AppendLimits, DecodedAppend
from topics_server.values.entries import RecordsAppended, RouterPage, Source
from topics_server.values.errors import Code, TopicsError, topic_not_found
from topics_server.values.limits import HEAD_RESERVE_SEQS, MOVE_RECORDS_MAX
from topics_server.values.model import ProducerStamp, TopicConfig
from topics_server.values.record_codecs import decode_copies


class PendingAppend(msgspec.Struct, eq=False):
    """A submitted append; it continues even if nothing waits for it."""

    topic: Topic
    entry: RecordsAppended
    ticket: Ticket

    def when_resolved(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the append is applied or has failed; now if it already is.

        The call happens in the loop turn that commits the append, before readers are notified.
        `callback` must not raise.
        """
        ticket = self.ticket
        if ticket.applied is None is ticket.error:
            ticket.waiters.append(callback)
        else:
            callback()

    def outcome(self, *, created: bool = False, throttle_wait_ms: float = 0.0) -> Appended:
        """The answer; call it once the append is applied or has failed.

        Raises the append's `TopicsError`.
        """
        entry, ticket = self.entry, self.ticket
        if ticket.error is not None:
            check_applied(ticket)
        assert ticket.applied is not None
        assert entry.decoded is not None
        first_seq, seqs = entry.first_seq, None
        last_seq = first_seq + entry.count - 1
        if entry.decoded.known_seqs is not None:
            new_seqs = count(first_seq)
            seqs = [seq or next(new_seqs) for seq in entry.decoded.known_seqs]
            first_seq = min(seqs)
        head_seq = self.topic.log.head_seq
        return Appended(
            first_seq,
            last_seq,
            head_seq if head_seq > last_seq else last_seq,
            created,
            False,
            ticket.write_ms,
            ticket.sync_ms,
            throttle_wait_ms,
            None,
            seqs,
        )


class Appends:
    """The appends of all topics."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        clock: Clock,
        checks: Preconditions,
        pending_names: PendingNames,
        limits: AppendLimits,
        transfers: Transfers,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._clock = clock
        self._checks = checks
        self._pending_names = pending_names
        self._transfers = transfers
        self.append_limits = limits

    async def append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        config: TopicConfig | None,
        producer: ProducerStamp | None = None,
        submitted: Callable[[], None] | None = None,
        check: ConditionCheck | None = None,
    ) -> Appended:
        """Append the records of one call, all or none (§2).

        `config` is used only if this call creates the topic. `submitted` is called once the order
        of the records in the topic is fixed: later appends come after them. Raises `TopicsError`:
        `topic_not_found`, `topic_full`, `throttled`, `storage_read_only`, the limits' codes and
        those of `Producers.check`; with `check` also its errors, before anything is staged.
        """
        throttle_wait_ms = 0.0
        while (begun := self._begin(name, body, decoded, header_key, producer, check)) is None:
            if name in self._pending_names:
                await self._pending_names.over(name)
                continue
            topic = self._registry.find(name)
            if topic is None:
                return await self._append_creating(
                    name, body, decoded, header_key, config, producer, check
                )
            throttle_wait_ms += await self._checks.until_sealed(topic)
        if not isinstance(begun, PendingAppend):
            topic = self._registry.find(name)
            assert topic is not None, "it repeats an append to this topic"
            return await repeated(self._commits, topic, begun, producer, self._clock.now_ms())
        if submitted is not None:
            submitted()
        if not begun.ticket.is_done:
            await resolved(begun.ticket)
        return begun.outcome(throttle_wait_ms=throttle_wait_ms)

    def begin_append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        producer: ProducerStamp | None = None,
        flush_now: bool = False,
        check: ConditionCheck | None = None,
    ) -> PendingAppend | None:
        """Begin what `append` does, without waiting; None if the append must wait.

        After None nothing was done: something must be waited for first, or the append repeats an
        earlier one. For callers that do not run in a task. `flush_now`: write immediately instead
        of grouping with later appends of this loop turn. Raises what `append` raises.
        """
        begun = self._begin(name, body, decoded, header_key, producer, check)
        if not isinstance(begun, PendingAppend):
            return None
        if flush_now:
            self._commits.flush(begun.topic.topic_id)
        return begun

    def _begin(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        header_key: str | None,
        producer: ProducerStamp | None,
        check: ConditionCheck | None,
    ) -> PendingAppend | Duplicate | StampRepeated | None:
        """Check the preconditions, decide and submit; a repeated append returns the original.

        None, with nothing done, if the name is being changed, the tail is too long, or there is no
        topic.
        """
        if name in self._pending_names.tickets:
            return None
        if self._checks.is_disk_low:
            raise disk_nearly_full()
        topic = self._registry.find(name)
        if topic is None or self._checks.has_long_tail(topic):
            return None
        entry = decide_append(
            topic,
            decoded,
            body,
            header_key,
            self._clock.now_ms(),
            self.append_limits,
            producer=producer,
            check=check,
        )
        if not isinstance(entry, RecordsAppended):
            return entry
        self._checks.check_bytes(decoded.payload_bytes)
        return PendingAppend(topic, entry, self.submit_append(topic, entry))

    def submit_append(self, topic: Topic, entry: RecordsAppended) -> Ticket:
        """Submit a decided append, with the reservation of seqs it needs."""
        # Submit the reservation first: the FIFO makes an append beyond the ceiling wait for it.
        last_seq = entry.first_seq + entry.count - 1
        if topic.ceiling_seq - last_seq < HEAD_RESERVE_SEQS // 2:
            reservation = decide_reservation(topic, entry.count)
            if reservation is not None:
                self._commits.submit(reservation, gate_of(reservation, topic), topic)
        return self._commits.submit(entry, gate_of(entry, topic), topic)

    async def _append_creating(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        header_key: str | None,
        config: TopicConfig | None,
        producer: ProducerStamp | None,
        check: ConditionCheck | None,
    ) -> Appended:
        config = config or TopicConfig()
        create = config.auto_create if decoded.create is None else decoded.create
        if not create:
            raise topic_not_found(name)
        self._registry.check_free((name,), held=Code.STREAM_GONE)
        if check is not None:
            check.decide_absent(name)
        self._checks.check_bytes(decoded.payload_bytes)
        now_ms = self._clock.now_ms()
        self._checks.check_topics((name,))
        topic, creation = self._registry.decide_create(name, config, now_ms)
        try:
            entry = decide_append(
                topic,
                decoded,
                body,
                header_key,
                now_ms,
                self.append_limits,
                creation,
                producer=producer,
            )
            assert isinstance(entry, RecordsAppended), "a new topic has no keys and no producers"
            ticket = self._commits.submit(entry, gate_of(entry, topic), topic)
        except TopicsError:
            self._registry.abandon(topic.topic_id)
            raise
        await self._pending_names.hold_until_resolved(name, ticket)
        return PendingAppend(topic, entry, ticket).outcome(created=True)

    async def append_derived(
        self, name: str, body: bytes, source: Source, *, create: bool = True
    ) -> Appended:
        """Move records: append synced copies and delete the originals; returns after both.

        `body` holds one record for each seq of `source`. In an ephemeral topic the copies are lost
        in a restart, like all its records. `create`: make the topic if it is absent. Raises
        `OutcomeUnknown` if only a restart can find out what was moved. After any other
        `TopicsError` nothing was moved; `SourceGone`: some originals no longer exist.
        """
        decoded = decode_copies(body)
        assert decoded.count == len(source.seqs) <= MOVE_RECORDS_MAX
        assert decoded.idempotency_key is None
        topic = self._registry.find(name)
        if topic is not None and self._checks.has_long_tail(topic):
            await self._checks.until_sealed(topic)
        await self._pending_names.over(name)
        if self._checks.is_disk_low:
            raise disk_nearly_full()
        self._transfers.check(source)
        topic, creation, now_ms = self._registry.find(name), None, self._clock.now_ms()
        if topic is None:
            if not create:
                raise topic_not_found(name)
            self._checks.check_topics((name,))
            topic, creation = self._registry.decide_create(name, TopicConfig(), now_ms)
        try:
            limits = self.append_limits
            entry = decide_append(topic, decoded, body, None, now_ms, limits, creation, source)
            assert isinstance(entry, RecordsAppended), "what has no key repeats nothing"
            ticket = self.submit_append(topic, entry)
        except TopicsError:
            if creation is not None:
                self._registry.abandon(topic.topic_id)
            raise
        transfer = self._transfers.follow(ticket)
        if creation is not None:
            self._pending_names.hold(name, ticket)
        await transfer.finished()
        return PendingAppend(topic, entry, ticket).outcome(created=creation is not None)

    def append_page(
        self, topic: Topic, page: RouterPage, decoded: DecodedAppend, body: Callable[[], bytes]
    ) -> Ticket | None:
        """Submit the copies of a router's page; None while the topic is being changed.

        `body`: the body for the frame. Nothing was staged when it raises `TopicsError`.
        """
        if topic.name in self._pending_names or topic.staging.has_control:
            return None
        if self._checks.is_disk_low:
            raise disk_nearly_full()
        if self._checks.has_long_tail(topic):
            raise self._checks.tail_too_long(topic)
        self._checks.check_bytes(decoded.payload_bytes)
        entry = decide_page(topic, page, decoded, b"", self._clock.now_ms())
        if not topic.is_ephemeral or entry.floor is not None:
            entry = msgspec.structs.replace(entry, body=body())
        return self.submit_append(topic, entry)
