"""The async front of the engine: one write path, one read path. Holds no rule of its own.

Every call decides against visible plus staged state (pure modules), submits one entry and waits for
its ticket; there is no `await` between decide and submit. A caller that goes away changes nothing:
tickets belong to `commits`. Loop thread only; sealed payloads and tags come through `Offload`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from topics_server.appends import DecodedAppend
from topics_server.engine.admission import AppendLimits
from topics_server.engine.answers import (
    Appended,
    Deleted,
    Page,
    PutOutcome,
    ReadRequest,
    TopicPage,
    TopicState,
)
from topics_server.engine.commits import Commits, Ticket
from topics_server.engine.dedupe import Duplicate
from topics_server.engine.fetching import Fetcher
from topics_server.engine.hub import Hub
from topics_server.engine.ports import Clock
from topics_server.engine.priority import effective_priority
from topics_server.engine.reading import plan_page
from topics_server.engine.registry import Registry
from topics_server.engine.topic import Topic
from topics_server.entries import RecordsAppended, TopicPut
from topics_server.errors import Code, TopicsError
from topics_server.limits import HEAD_RESERVE_SEQS
from topics_server.model import GATE_OF, Durability, Gate, TagMatch, TopicConfig

# How long an append waits for its topic's tail to be sealed before it is refused.
_PARK_MS_MAX: Final = 5_000


class Quotas(msgspec.Struct, frozen=True):
    """Bounds over all topics; 0 is unlimited (§11). A longer or larger tail parks appends."""

    max_topics: int
    max_total_bytes: int
    max_tail_records: int
    max_tail_bytes: int


class Store:
    """What the API and the services call. See `engine/answers.py` for what comes back."""

    def __init__(
        self,
        registry: Registry,
        commits: Commits,
        hub: Hub,
        fetcher: Fetcher,
        clock: Clock,
        append_limits: AppendLimits,
        quotas: Quotas,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._hub = hub
        self._fetcher = fetcher
        self._clock = clock
        self._append_limits = append_limits
        self._quotas = quotas
        # Names with a create, configure or drop in flight: others wait until it is settled.
        self._settling: dict[str, Ticket] = {}
        # Set by the space watch: appends are refused, everything that frees space goes on.
        self.is_disk_low = False
        self.is_draining = False

    # --- append -------------------------------------------------------------------------

    async def append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        config: TopicConfig | None,
    ) -> Appended:
        """Append the records of one call, all or none (§2).

        `config` is used only if this call creates the topic. Raises `TopicsError`:
        `topic_not_found`, `topic_full`, `throttled`, `storage_read_only` and the limits' codes.
        """
        if name in self._settling:
            await self._until_settled(name)
        if self.is_disk_low:
            raise _limit_reached("min_free_bytes", "the disk is nearly full")
        topic = self._registry.find(name)
        if topic is None:
            return await self._append_creating(name, body, decoded, header_key, config)
        parked_ms = 0.0
        if self._has_long_tail(topic):
            parked_ms = await self._until_sealed(topic)
            if self._registry.find(name) is not topic or name in self._settling:
                return await self.append(name, body, decoded, header_key=header_key, config=config)
        now_ms = self._clock.now_ms()
        entry = topic.decide_append(decoded, body, header_key, now_ms, self._append_limits)
        if isinstance(entry, Duplicate):
            return await self._duplicate(topic, entry)
        self._check_total_bytes(decoded)
        ticket = self._submit_append(topic, entry)
        if not ticket.is_done:
            await self._wait(ticket)
        last_seq = entry.first_seq + entry.count - 1
        return Appended(
            first_seq=entry.first_seq,
            last_seq=last_seq,
            head_seq=max(last_seq, topic.log.head_seq),
            write_ms=ticket.write_ms,
            sync_ms=ticket.sync_ms,
            parked_ms=parked_ms,
        )

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
                raise _limit_reached("unsealed", "records come faster than they can be sealed")
            await self._ring_or_timeout(topic.topic_id, left_ms)
        return self._clock.monotonic_ms() - began_ms

    def _submit_append(self, topic: Topic, entry: RecordsAppended) -> Ticket:
        # The reservation goes first: the FIFO makes an append that passes the ceiling wait for it.
        last_seq = entry.first_seq + entry.count - 1
        if topic.ceiling_seq - last_seq < HEAD_RESERVE_SEQS // 2:
            reservation = topic.decide_reservation(entry.count)
            if reservation is not None:
                self._commits.submit(reservation, Gate.SYNCED, topic)
        gate = GATE_OF[topic.config.durability]
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
    ) -> Appended:
        config = config or TopicConfig()
        create = config.auto_create if decoded.create is None else decoded.create
        if not create:
            raise topic_not_found(name)
        self._check_total_bytes(decoded)
        now_ms = self._clock.now_ms()
        topic, creation = self._decide_create(name, config, now_ms)
        try:
            entry = topic.decide_append(
                decoded, body, header_key, now_ms, self._append_limits, creation
            )
            assert isinstance(entry, RecordsAppended), "a new topic has no keys"
            # Ephemeral or not, the creation is journaled: the configuration always survives.
            gate = max(GATE_OF[config.durability], Gate.WRITTEN)
            ticket = self._commits.submit(entry, gate, topic)
        except TopicsError:
            self._registry.abandon(topic.topic_id)
            raise
        await self._settle(name, ticket)
        last_seq = entry.first_seq + entry.count - 1
        return Appended(
            first_seq=entry.first_seq,
            last_seq=last_seq,
            head_seq=last_seq,
            created=True,
            write_ms=ticket.write_ms,
            sync_ms=ticket.sync_ms,
        )

    async def _duplicate(self, topic: Topic, duplicate: Duplicate) -> Appended:
        """Answer a retry with the original seqs, once the original is safe."""
        if duplicate.staged_lsn is not None:
            original = self._commits.find(topic.topic_id, duplicate.staged_lsn)
            if original is not None:
                await self._wait(original)
        last_seq = duplicate.first_seq + duplicate.count - 1
        head_seq = max(last_seq, topic.log.head_seq)
        return Appended(duplicate.first_seq, last_seq, head_seq, deduped=True)

    def _check_total_bytes(self, decoded: DecodedAppend) -> None:
        limit = self._quotas.max_total_bytes
        if not limit:
            return
        wanted = sum(map(len, decoded.datas)) + sum(map(len, decoded.metas))
        if self._registry.bytes_live + wanted > limit:
            raise _limit_reached("max_total_bytes", "the server holds all it may", limit)

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
            if page.caught_up:
                await self._wait_for_bell(topic, page.head_seq, left_ms)

    async def _wait_for_bell(self, topic: Topic, head_seq: int, timeout_ms: float) -> None:
        """Return when the topic moved past `head_seq`, was dropped, or the time is over."""
        if topic.log.head_seq == head_seq:
            await self._ring_or_timeout(topic.topic_id, timeout_ms)

    async def _ring_or_timeout(self, topic_id: int, timeout_ms: float) -> None:
        loop = asyncio.get_running_loop()
        rung: asyncio.Future[None] = loop.create_future()

        def ring() -> None:
            if not rung.done():
                rung.set_result(None)

        timer = loop.call_later(timeout_ms / 1000, ring)
        self._hub.add(topic_id, ring)
        try:
            await rung
        finally:
            timer.cancel()
            self._hub.remove(topic_id, ring)

    # --- delete -------------------------------------------------------------------------

    async def delete(self, name: str, *, before_seq: int | None, match: TagMatch | None) -> Deleted:
        """Delete what exists now by seq, tag or both (§5), as durable as the topic's class."""
        assert before_seq is not None or match is not None
        searched: dict[int, Sequence[int]] = {}
        while True:
            await self._until_settled(name)
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
            await self._wait(ticket)
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

    # --- topics -------------------------------------------------------------------------

    async def put_topic(self, name: str, config: TopicConfig, *, keep_type: bool) -> PutOutcome:
        """Create a topic or replace its configuration (§1.1); durable before it returns."""
        await self._until_settled(name)
        now_ms = self._clock.now_ms()
        topic = self._registry.find(name)
        created = topic is None
        if topic is None:
            topic, entry = self._decide_create(name, config, now_ms)
        else:
            if keep_type:
                config = msgspec.structs.replace(config, type=topic.config.type)
            changed = topic.decide_put(config, now_ms)
            if changed is None:
                return PutOutcome(created=False, config=config)
            entry = changed
        try:
            ticket = self._commits.submit(entry, Gate.SYNCED, topic)
        except TopicsError:
            self._registry.abandon(topic.topic_id)
            raise
        await self._settle(name, ticket)
        return PutOutcome(created, config, ticket.write_ms, ticket.sync_ms)

    async def drop_topic(self, name: str, *, if_empty: bool) -> bool:
        """Remove a topic with all it has (§1.4); durable before it returns. False: not there."""
        while True:
            await self._until_settled(name)
            topic = self._registry.find(name)
            if topic is None:
                return False
            in_flight = self._commits.newest(topic.topic_id)
            if not if_empty or in_flight is None:
                break
            await self._settled(in_flight)
        entry = topic.decide_drop(self._clock.now_ms(), if_empty=if_empty)
        await self._settle(name, self._commits.submit(entry, Gate.SYNCED, topic, urgent=True))
        return True

    def _decide_create(self, name: str, config: TopicConfig, now_ms: int) -> tuple[Topic, TopicPut]:
        limit = self._quotas.max_topics
        if limit and len(self._registry) + len(self._registry.pending) >= limit:
            raise _limit_reached("max_topics", "the server holds as many topics as it may", limit)
        return self._registry.decide_create(name, config, now_ms)

    def state(self, name: str, *, touch: bool) -> TopicState:
        """Where a topic is (§1.2)."""
        topic = self._existing(name)
        now_ms = self._clock.now_ms()
        if touch:
            topic.last_read_ts = now_ms
        return self._state_of(topic, now_ms)

    def list_topics(
        self, *, prefix: str, after: str | None, page_size: int, touch: bool
    ) -> TopicPage:
        """Topics in name order after `after` (§1.3)."""
        topics, next_after = self._registry.page(prefix=prefix, after=after, page_size=page_size)
        now_ms = self._clock.now_ms()
        if touch:
            for topic in topics:
                topic.last_read_ts = now_ms
        return TopicPage([self._state_of(topic, now_ms) for topic in topics], next_after)

    def _state_of(self, topic: Topic, now_ms: int) -> TopicState:
        count, live_bytes = topic.live(now_ms)
        config = topic.config
        return TopicState(
            name=topic.name,
            topic_id=topic.topic_id,
            epoch=topic.epoch,
            config=config,
            head_seq=topic.log.head_seq,
            earliest_seq=topic.earliest_seq(now_ms),
            evict_floor=topic.log.evict_floor,
            count=count,
            bytes=live_bytes,
            disk_bytes=self._fetcher.disk_bytes(topic.topic_id),
            effective_priority=effective_priority(config, topic.last_read_ts, now_ms),
            last_write_ts=topic.last_write_ts,
            last_read_ts=topic.last_read_ts,
            damaged_records=topic.log.damaged_records,
        )

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

    def topic_states(self, limit: int) -> tuple[list[TopicState], bool]:
        """At most `limit` topics' states, and whether there are more."""
        page = self.list_topics(prefix="", after=None, page_size=limit, touch=False)
        return page.topics, page.next_after is not None

    def drain(self) -> None:
        """The server is going down: whoever waits for records is answered now."""
        self.is_draining = True
        self._hub.ring_all()

    # --- waiting --------------------------------------------------------------------------

    def _existing(self, name: str) -> Topic:
        topic = self._registry.find(name)
        if topic is None:
            raise topic_not_found(name)
        return topic

    async def _settle(self, name: str, ticket: Ticket) -> Ticket:
        """Hold the name until the ticket is settled, whether or not the caller stays."""
        self._settling[name] = ticket
        if ticket.is_done:
            del self._settling[name]
        else:
            ticket.waiters.append(lambda: self._release(name, ticket))
        await self._wait(ticket)
        return ticket

    async def _until_settled(self, name: str) -> None:
        """Return when no create, configure or drop of the name is in flight."""
        while (settling := self._settling.get(name)) is not None:
            await self._settled(settling)

    def _release(self, name: str, ticket: Ticket) -> None:
        if self._settling.get(name) is ticket:
            del self._settling[name]

    async def _wait(self, ticket: Ticket) -> None:
        """Return when the ticket is applied; raise what it failed with."""
        await self._settled(ticket)
        if ticket.error is not None:
            raise TopicsError(ticket.error.code, ticket.error.message, ticket.error.detail)

    async def _settled(self, ticket: Ticket) -> None:
        if ticket.is_done:
            return
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell() -> None:
            if not settled.done():
                settled.set_result(None)

        ticket.waiters.append(tell)
        await settled


def topic_not_found(name: str) -> TopicsError:
    """404 in the contract's words."""
    return TopicsError(Code.TOPIC_NOT_FOUND, f'topic "{name}" does not exist', {"topic": name})


def _limit_reached(limit: str, message: str, maximum: int | None = None) -> TopicsError:
    detail: dict[str, object] = {"limit": limit}
    if maximum is not None:
        detail["max"] = maximum
    return TopicsError(Code.THROTTLED, message, detail)
