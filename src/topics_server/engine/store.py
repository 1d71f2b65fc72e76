"""The engine's async front: one write path and one read path.

Every call decides against visible plus staged state (pure modules), submits one entry and waits for
its ticket; there is no `await` between decide and submit. A caller that goes away changes nothing:
tickets belong to `commits`. Loop thread only; sealed payloads and tags come through `Offload`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from topics_server.engine.answers import (
    Appended,
    Deleted,
    DeletedSeqs,
    Page,
    PutOutcome,
    QueueCounts,
    ReadRequest,
    TopicPage,
    TopicState,
)
from topics_server.engine.commit.appending import PendingAppend, SeqsDelete
from topics_server.engine.commit.name_waits import NameWaits, ring_or_timeout
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.repeats import applied, repeated
from topics_server.engine.commit.transfers import Transfers, settled
from topics_server.engine.ports import Clock
from topics_server.engine.read.exact_read import decide_delete_seqs, deletable, plan_rows
from topics_server.engine.read.page import PagePlan, plan_page
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.read.topic_states import state_of
from topics_server.engine.topic.admission import AppendLimits
from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.producers import StampRepeated
from topics_server.engine.topic.quotas import Quotas, limit_reached
from topics_server.engine.topic.registry import MayName, Registry
from topics_server.engine.topic.topic import Topic
from topics_server.values.appends import DecodedAppend
from topics_server.values.blocks import Block
from topics_server.values.entries import RecordsAppended, RouterPage, Source, TopicPut
from topics_server.values.errors import Code, TopicsError, topic_not_found
from topics_server.values.limits import HEAD_RESERVE_SEQS, MOVE_RECORDS_MAX
from topics_server.values.model import (
    CREATION_GATE,
    GATE_OF,
    Durability,
    Gate,
    ProducerStamp,
    TagMatch,
    TopicConfig,
    TopicType,
)
from topics_server.values.record_codecs import decode_copies

# How long an append waits for its topic's tail to be sealed before it is refused.
_PARK_MS_MAX: Final = 5_000


class Store:
    """What the API and the services call. See `engine/answers.py` for what comes back."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        hub: Notifier,
        fetcher: Fetcher,
        clock: Clock,
        append_limits: AppendLimits,
        quotas: Quotas,
        moves: Transfers,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._hub = hub
        self._fetcher = fetcher
        self._clock = clock
        self._quotas = quotas
        self._moves = moves
        # Names with a create, configure or drop in flight: others wait until it is settled.
        self.settling = NameWaits()
        self.append_limits = append_limits
        # Set by the space watch: appends are refused, everything that frees space goes on.
        self.is_disk_low = False
        self.is_draining = False
        # Set by the wiring: the jobs of a queue now.
        self.queue_counts: Callable[[Topic], QueueCounts] | None = None

    # --- append -------------------------------------------------------------------------

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
    ) -> Appended:
        """Append the records of one call, all or none (§2).

        `config` is used only if this call creates the topic. `submitted` is told once the records
        have their place in the topic: appends begun from then on come behind them. Raises
        `TopicsError`: `topic_not_found`, `topic_full`, `throttled`, `storage_read_only`, the
        limits' codes and those of `Producers.check`.
        """
        if name in self.settling:
            await self.settling.over(name)
        if self.is_disk_low:
            raise limit_reached("min_free_bytes", "the disk is nearly full")
        topic = self._registry.find(name)
        if topic is None:
            return await self._append_creating(name, body, decoded, header_key, config, producer)
        parked_ms = 0.0
        if self._has_long_tail(topic):
            parked_ms = await self._until_sealed(topic)
            if self._registry.find(name) is not topic or name in self.settling:
                return await self.append(
                    name,
                    body,
                    decoded,
                    header_key=header_key,
                    config=config,
                    producer=producer,
                    submitted=submitted,
                )
        appending = self._begin_append(topic, body, decoded, header_key, producer)
        if not isinstance(appending, PendingAppend):
            return await repeated(self._commits, topic, appending, producer, self._clock.now_ms())
        if submitted is not None:
            submitted()
        if not appending.ticket.is_done:
            await settled(appending.ticket)
        return appending.outcome(parked_ms=parked_ms)

    def append_now(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        producer: ProducerStamp | None = None,
        hurries: bool = False,
    ) -> PendingAppend | None:
        """Begin what `append` does if nothing has to be waited for first; None: nothing was done.

        `hurries`: do not wait for what else comes in this turn. Raises what `append` raises.
        """
        if name in self.settling:
            return None
        if self.is_disk_low:
            raise limit_reached("min_free_bytes", "the disk is nearly full")
        topic = self._registry.find(name)
        if topic is None or self._has_long_tail(topic):
            return None
        begun = self._begin_append(topic, body, decoded, header_key, producer)
        if hurries:
            self._commits.flush(topic.topic_id)
        return begun if isinstance(begun, PendingAppend) else None

    def _begin_append(
        self,
        topic: Topic,
        body: bytes,
        decoded: DecodedAppend,
        header_key: str | None,
        producer: ProducerStamp | None,
    ) -> PendingAppend | Duplicate | StampRepeated:
        now_ms, limits = self._clock.now_ms(), self.append_limits
        entry = topic.decide_append(decoded, body, header_key, now_ms, limits, producer=producer)
        if not isinstance(entry, RecordsAppended):
            return entry
        self.check_total_bytes(decoded)
        return PendingAppend(topic, entry, self.submit_append(topic, entry))

    def _has_long_tail(self, topic: Topic) -> bool:
        """Whether sealing is so far behind that memory would grow with the load."""
        log, quotas = topic.log, self._quotas
        is_long = log.tail_count > quotas.max_tail_records or log.tail_bytes > quotas.max_tail_bytes
        return is_long and not topic.is_ephemeral

    async def _until_sealed(self, topic: Topic) -> float:
        """Park until the tail is shorter; how long that took, ms. Raises `throttled`."""
        began_ms = self._clock.monotonic_ms()
        while self._has_long_tail(topic):
            left_ms = began_ms + _PARK_MS_MAX - self._clock.monotonic_ms()
            if left_ms <= 0:
                raise limit_reached("unsealed", "records come faster than they can be sealed")
            await ring_or_timeout(self._hub, topic.topic_id, left_ms)
        return self._clock.monotonic_ms() - began_ms

    def submit_append(self, topic: Topic, entry: RecordsAppended) -> Ticket:
        """Submit a decided append, with the reservation of seqs it needs."""
        # The reservation goes first: the FIFO makes an append that passes the ceiling wait for it.
        last_seq = entry.first_seq + entry.count - 1
        if topic.ceiling_seq - last_seq < HEAD_RESERVE_SEQS // 2:
            reservation = topic.decide_reservation(entry.count)
            if reservation is not None:
                self._commits.submit(reservation, Gate.SYNCED, topic)
        gate = GATE_OF[topic.config.durability]
        if entry.source is not None and not topic.is_ephemeral:
            gate = Gate.SYNCED
        if entry.creation is not None:
            gate = CREATION_GATE
        elif entry.step is not None and entry.step.closes:
            gate = max(gate, Gate.WRITTEN)
        if entry.floor is not None:
            # What evicts journaled records is journaled, whatever the class is now.
            gate = max(gate, topic.delete_gate)
        return self._commits.submit(entry, gate, topic)

    async def _append_creating(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        header_key: str | None,
        config: TopicConfig | None,
        producer: ProducerStamp | None,
    ) -> Appended:
        config = config or TopicConfig()
        create = config.auto_create if decoded.create is None else decoded.create
        if not create:
            raise topic_not_found(name)
        self._registry.check_free((name,), held=Code.STREAM_GONE)
        self.check_total_bytes(decoded)
        now_ms = self._clock.now_ms()
        topic, creation = self._decide_create(name, config, now_ms)
        try:
            entry = topic.decide_append(
                decoded, body, header_key, now_ms, self.append_limits, creation, producer=producer
            )
            assert isinstance(entry, RecordsAppended), "a new topic has no keys and no producers"
            ticket = self._commits.submit(entry, CREATION_GATE, topic)
        except TopicsError:
            self._registry.abandon(topic.topic_id)
            raise
        await self.settle(name, ticket)
        return PendingAppend(topic, entry, ticket).outcome(created=True)

    async def append_derived(
        self, name: str, body: bytes, source: Source, *, create: bool = True
    ) -> Appended:
        """Move records: append copies, synced, and delete the originals; both before it returns.

        `body` holds one record for each seq of `source`. An ephemeral topic takes the copies as it
        takes all it has: they are gone after a restart. `create`: make the topic if it is absent.
        Raises `OutcomeUnknown` when only a restart tells what was moved; any other `TopicsError`
        says that nothing was, `SourceGone` that some of it is there no more.
        """
        decoded = decode_copies(body)
        assert decoded.count == len(source.seqs) <= MOVE_RECORDS_MAX
        assert decoded.idempotency_key is None
        topic = self._registry.find(name)
        if topic is not None and self._has_long_tail(topic):
            await self._until_sealed(topic)
        await self.settling.over(name)
        if self.is_disk_low:
            raise limit_reached("min_free_bytes", "the disk is nearly full")
        self._moves.check(source)
        topic, creation, now_ms = self._registry.find(name), None, self._clock.now_ms()
        if topic is None:
            if not create:
                raise topic_not_found(name)
            topic, creation = self._decide_create(name, TopicConfig(), now_ms)
        try:
            limits = self.append_limits
            entry = topic.decide_append(decoded, body, None, now_ms, limits, creation, source)
            assert isinstance(entry, RecordsAppended), "what has no key repeats nothing"
            ticket = self.submit_append(topic, entry)
        except TopicsError:
            if creation is not None:
                self._registry.abandon(topic.topic_id)
            raise
        move = self._moves.follow(ticket)
        if creation is not None:
            self.settling.hold(name, ticket)
        await move.finished()
        return PendingAppend(topic, entry, ticket).outcome(created=creation is not None)

    def append_page(
        self, topic: Topic, page: RouterPage, decoded: DecodedAppend, body: Callable[[], bytes]
    ) -> Ticket | None:
        """Submit the copies of a router's page; None while something is settling on the topic.

        `body`: what a frame has to carry. Nothing was staged when it raises `TopicsError`.
        """
        if topic.name in self.settling or topic.staging.has_control:
            return None
        if self.is_disk_low:
            raise limit_reached("min_free_bytes", "the disk is nearly full")
        if self._has_long_tail(topic):
            raise limit_reached("unsealed", "records come faster than they can be sealed")
        self.check_total_bytes(decoded)
        entry = topic.decide_page(page, decoded, b"", self._clock.now_ms())
        if not topic.is_ephemeral or entry.floor is not None:
            entry = msgspec.structs.replace(entry, body=body())
        return self.submit_append(topic, entry)

    def check_total_bytes(self, decoded: DecodedAppend) -> None:
        """Raises `throttled` unless these records may be kept beside all others."""
        self._quotas.check_bytes(self._registry, decoded.payload_bytes)

    # --- read ---------------------------------------------------------------------------

    async def read(self, name: str, request: ReadRequest) -> Page:
        """One page after a cursor; waits up to `wait_ms` while there is nothing to tell (§3)."""
        deadline = self._clock.monotonic_ms() + request.wait_ms
        while True:
            topic = self._existing(name)
            now_ms = self._clock.now_ms()
            topic.last_read_ts = now_ms
            plan = plan_page(topic, request, now_ms)
            page = await self._fetcher.complete(topic, plan)
            if page is None:
                continue  # something moved or was found damaged: plan again
            if not page.is_empty or not request.wait_ms:
                return page
            left_ms = deadline - self._clock.monotonic_ms()
            if left_ms <= 0 or self.is_draining:
                return page
            request = msgspec.structs.replace(request, from_seq=page.next_from_seq)
            if page.caught_up and topic.log.head_seq == page.head_seq:
                await ring_or_timeout(self._hub, topic.topic_id, left_ms)

    def read_now(self, name: str, request: ReadRequest) -> Page | None:
        """The page that `read` gives without waiting for records; None if it is not in memory."""
        topic = self._existing(name)
        now_ms = self._clock.now_ms()
        topic.last_read_ts = now_ms
        return self._fetcher.resident(topic, plan_page(topic, request, now_ms))

    async def complete(self, topic: Topic, plan: PagePlan) -> Page | None:
        """The page of a plan, read from disk where it has to be; None: plan it again."""
        return await self._fetcher.complete(topic, plan)

    def resident(self, topic: Topic, plan: PagePlan) -> Page | None:
        """The page of a plan if nothing of it has to be read from disk."""
        return self._fetcher.resident(topic, plan)

    async def read_rows(self, topic: Topic, seqs: Sequence[int]) -> list[tuple[Block, int]]:
        """The records of these seqs (ascending), each as a block and its row in it.

        What is deleted, lost or found damaged is left out.
        """
        page = None
        while page is None:
            page = await self._fetcher.complete(topic, plan_rows(topic, seqs))
        return [(piece.block, row) for piece in page.pieces for row in piece.rows]

    # --- delete -------------------------------------------------------------------------

    async def delete(self, name: str, *, before_seq: int | None, match: TagMatch | None) -> Deleted:
        """Delete what exists now by seq, tag or both (§5), as durable as the topic's class."""
        assert before_seq is not None or match is not None
        searched: dict[int, Sequence[int]] = {}
        while True:
            await self.settling.over(name)
            topic = self._existing(name)
            if match is None:
                break
            wanted = topic.segments_to_search(before_seq, self._clock.now_ms())
            missing = [segment_id for segment_id in wanted if segment_id not in searched]
            if not missing:
                break
            found = await self._fetcher.find_tags(topic.topic_id, missing, match)
            # A segment dropped meanwhile has no live record left.
            searched.update({segment_id: found.get(segment_id, ()) for segment_id in missing})
        now_ms = self._clock.now_ms()
        entry = topic.decide_delete(before_seq, match, searched, now_ms)
        write_ms = sync_ms = 0.0
        count = 0
        if entry is not None:
            ticket = self._commits.submit(entry, topic.delete_gate, topic, urgent=True)
            await applied(ticket)
            assert ticket.applied is not None
            count, write_ms, sync_ms = ticket.applied.deleted, ticket.write_ms, ticket.sync_ms
        left_count, left_bytes = topic.live(now_ms)
        return Deleted(
            deleted=count,
            earliest_seq=topic.earliest_seq(now_ms),
            head_seq=topic.log.head_seq,
            count=left_count,
            bytes=left_bytes,
            write_ms=write_ms,
            sync_ms=sync_ms,
        )

    def start_delete(self, topic: Topic, seqs: Sequence[int]) -> SeqsDelete:
        """Submit the delete of those of these seqs (ascending) that live, if any; no waiting.

        What another delete under way takes is not among them. Nothing may be settling on the
        topic (`settled_topic`). Raises `TopicsError` when it is refused; then nothing was staged.
        """
        assert not topic.staging.has_control
        live = deletable(topic, seqs)
        if not live:
            return SeqsDelete([], None)
        entry = decide_delete_seqs(topic, live, self._clock.now_ms())
        return SeqsDelete(live, self._commits.submit(entry, topic.delete_gate, topic, urgent=True))

    async def finish_delete(self, delete: SeqsDelete) -> DeletedSeqs:
        """Wait until the delete is as durable as its topic's class. Raises what it failed with."""
        ticket = delete.ticket
        if ticket is None:
            return DeletedSeqs(delete.seqs)
        await applied(ticket)
        return DeletedSeqs(delete.seqs, ticket.write_ms, ticket.sync_ms)

    async def delete_seqs(self, name: str, seqs: Sequence[int]) -> DeletedSeqs:
        """Delete exact seqs (ascending): those that lived, told to one caller only."""
        topic = await self.settled_topic(name)
        return await self.finish_delete(self.start_delete(topic, seqs))

    # --- topics -------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """The topic of a name, for services. Raises `topic_not_found`."""
        return self._existing(name)

    def topic_of(self, topic_id: int) -> Topic | None:
        """The topic of an id."""
        return self._registry.get(topic_id)

    async def settled_topic(self, name: str) -> Topic:
        """The topic of a name once no create, configure or drop of it is in flight."""
        await self.settling.over(name)
        return self._existing(name)

    async def create_topic(self, name: str, beside: Topic | None = None) -> Topic:
        """The topic of a name, durable; made if there is none, on the shard of `beside`."""
        await self.settling.over(name)
        topic = self._registry.find(name)
        while topic is None:
            if beside is not None:
                self._commits.place_beside(beside.topic_id)
            made, entry = self._decide_create(name, TopicConfig(), self._clock.now_ms())
            try:
                ticket = self._commits.submit(entry, Gate.SYNCED, made)
            except TopicsError:
                self._registry.abandon(made.topic_id)
                raise
            await self.settle(name, ticket)
            await self.settling.over(name)
            topic = self._registry.find(name)
        return topic

    def check_room(self, *names: str) -> None:
        """Raises `throttled`, or what `Registry.check_free` raises, unless these may be made."""
        self._quotas.check_topics(self._registry, names)
        self._registry.check_free(names)

    async def put_topic(self, name: str, config: TopicConfig, *, keep_type: bool) -> PutOutcome:
        """Create a topic or replace its configuration (§1.1); durable before it returns."""

        def replaced(old: TopicConfig | None) -> TopicConfig:
            if old is None or not keep_type:
                return config
            return msgspec.structs.replace(config, type=old.type)

        return await self.configure(name, replaced)

    async def configure(
        self, name: str, change: Callable[[TopicConfig | None], TopicConfig]
    ) -> PutOutcome:
        """Give a topic the configuration that `change` makes of its own, None for a new topic.

        `change` is called in the same step that decides, so that no other change is overwritten.
        """
        await self.settling.over(name)
        now_ms = self._clock.now_ms()
        topic = self._registry.find(name)
        before = None if topic is None else topic.config
        config = change(before)
        if topic is None:
            topic, entry = self._decide_create(name, config, now_ms)
        else:
            changed = topic.decide_put(config, now_ms)
            if changed is None:
                return PutOutcome(config=config, before=before)
            entry = changed
        try:
            ticket = self._commits.submit(entry, Gate.SYNCED, topic)
        except TopicsError:
            self._registry.abandon(topic.topic_id)
            raise
        await self.settle(name, ticket)
        return PutOutcome(config, before, ticket.write_ms, ticket.sync_ms)

    async def drop_topic(self, name: str, *, if_empty: bool) -> bool:
        """Remove a topic with all it has (§1.4); durable before it returns. False: not there."""
        while True:
            await self.settling.over(name)
            topic = self._registry.find(name)
            if topic is None:
                return False
            in_flight = self._commits.newest(topic.topic_id)
            if not if_empty or in_flight is None:
                break
            await settled(in_flight)
        entry = topic.decide_drop(self._clock.now_ms(), if_empty=if_empty)
        await self.settle(name, self._commits.submit(entry, Gate.SYNCED, topic, urgent=True))
        return True

    def _decide_create(self, name: str, config: TopicConfig, now_ms: int) -> tuple[Topic, TopicPut]:
        self.check_room(name)
        return self._registry.decide_create(name, config, now_ms)

    def state(self, name: str, *, touch: bool) -> TopicState:
        """Where a topic is (§1.2)."""
        topic = self._existing(name)
        now_ms = self._clock.now_ms()
        if touch:
            topic.last_read_ts = now_ms
        return self._state_of(topic, now_ms)

    def list_topics(
        self, *, prefix: str, after: str | None, page_size: int, touch: bool, keep: MayName = None
    ) -> TopicPage:
        """Topics in name order after `after` (§1.3)."""
        topics, next_after = self._registry.page(prefix, after, page_size, keep)
        now_ms = self._clock.now_ms()
        if touch:
            for topic in topics:
                topic.last_read_ts = now_ms
        return TopicPage([self._state_of(topic, now_ms) for topic in topics], next_after)

    def _state_of(self, topic: Topic, now_ms: int) -> TopicState:
        queue = None
        if topic.config.type is TopicType.QUEUE and self.queue_counts is not None:
            queue = self.queue_counts(topic)
        disk_bytes = self._fetcher.disk_bytes(topic.topic_id)
        return state_of(topic, now_ms, disk_bytes=disk_bytes, queue=queue)

    # --- facts for probes -----------------------------------------------------------------

    @property
    def topic_count(self) -> int:
        """How many topics exist."""
        return len(self._registry)

    @property
    def records_live(self) -> int:
        """Live records of all topics."""
        return self._registry.records_live

    @property
    def bytes_live(self) -> int:
        """Live bytes of all topics."""
        return self._registry.bytes_live

    @property
    def queue_topics(self) -> int:
        """Topics of type queue."""
        return self._registry.queue_topics

    @property
    def damaged_records(self) -> int:
        """Records lost to damage, of all topics."""
        return self._registry.damaged_records

    def counts_by_class(self) -> dict[Durability, int]:
        """Topics by durability class."""
        return self._registry.counts_by_class()

    def read_only_shards(self) -> Sequence[int]:
        """Journal shards that take no writes until a restart."""
        return self._commits.read_only_shards

    def drain(self) -> None:
        """The server is going down: whoever waits for records is answered now."""
        self.is_draining = True
        self._hub.ring_all()

    def _existing(self, name: str) -> Topic:
        """The topic of a name; a fork is there once it is whole."""
        topic = self._registry.find(name)
        if topic is None or (topic.stream is not None and topic.stream.facts.is_copying):
            raise topic_not_found(name)
        return topic

    async def settle(self, name: str, ticket: Ticket) -> Ticket:
        """Hold the name until the ticket is settled, whether or not the caller stays."""
        self.settling.hold(name, ticket)
        await applied(ticket)
        return ticket
