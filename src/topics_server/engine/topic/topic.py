"""One topic: `decide_*` makes an entry, `apply` performs it.

`decide_*` looks at the visible state plus all that is staged, changes nothing and returns an entry
or refuses. `stage` notes an entry under way, `commit_staged` and `undo_from` take it off again,
`apply` changes visible state and never fails. Invariants: `head_seq <= staged_seq`,
`evict_floor <= earliest_seq`, an entry with an lsn up to `applied_lsn` is ignored. Called by the
registry, by commits, the store, the sealer and recovery; all on the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import assert_never

from msgspec import UNSET

from topics_server.engine.log.log import Log
from topics_server.engine.ports import SealedIndex
from topics_server.engine.topic import deletion, retention
from topics_server.engine.topic.admission import AppendLimits as AppendLimits
from topics_server.engine.topic.admission import check_key, check_limits
from topics_server.engine.topic.applied import NOTHING, RUNG, Flips
from topics_server.engine.topic.applied import Applied as Applied
from topics_server.engine.topic.applied import RouterCursor as RouterCursor
from topics_server.engine.topic.dedupe import Duplicate as Duplicate
from topics_server.engine.topic.dedupe import KeyMemory
from topics_server.engine.topic.producers import Producers, StampRepeated
from topics_server.engine.topic.sealed_files import SealedFiles
from topics_server.engine.topic.staging import Staged, Staging
from topics_server.engine.topic.stream_facts import StreamState, plain_facts, stepped
from topics_server.values.appends import DecodedAppend
from topics_server.values.entries import (
    CursorMoved,
    Entry,
    Floor,
    FloorMoved,
    HeadReserved,
    LeaseEntry,
    ProducerMoved,
    RecordsAppended,
    RecordsDeleted,
    RouterEntry,
    RouterPage,
    SessionEntry,
    Source,
    StreamChanged,
    TopicDropped,
    TopicPut,
)
from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.file_inventory import FlagsDigest
from topics_server.values.limits import HEAD_RESERVE_SEQS, HEAD_RESERVE_SEQS_MAX
from topics_server.values.model import (
    GATE_OF,
    Durability,
    Gate,
    LossReason,
    ProducerStamp,
    SeqRun,
    StreamFacts,
    TagMatch,
    TopicConfig,
)
from topics_server.values.record_codecs import decode_body
from topics_server.values.storage_types import SegmentPlan, TopicFacts

_OF_PRODUCERS = (RecordsAppended, ProducerMoved, StreamChanged)


class Topic:
    """One incarnation of a topic. Times in ms; `last_write_ts` and `last_read_ts` None if never.

    `ceiling_seq`: seqs up to it may be handed out without each being synced. `revision` changes
    with everything a capture would show. `files`: what is known of its sealed files.
    `journaled_seq`: records above it are in no frame and no file. `cursors`: of the routers into
    this topic, by their ids. `stream`: what it is as a stream, if it was made as one or closed as
    one.
    """

    __slots__ = (
        "_reserve_seqs",
        "applied_lsn",
        "ceiling_seq",
        "config",
        "created_ts",
        "cursors",
        "epoch",
        "files",
        "journaled_seq",
        "keys",
        "last_read_ts",
        "last_write_ts",
        "log",
        "name",
        "producers",
        "revision",
        "staging",
        "stream",
        "topic_id",
    )

    def __init__(
        self, topic_id: int, name: str, epoch: int, config: TopicConfig, created_ts: int
    ) -> None:
        self.topic_id = topic_id
        self.name = name
        self.epoch = epoch
        self.config = config
        self.created_ts = created_ts
        self.log = Log()
        self.keys = KeyMemory()
        self.producers = Producers()
        self.staging = Staging()
        self.applied_lsn = 0
        self.ceiling_seq = self._reserve_seqs = HEAD_RESERVE_SEQS
        self.last_write_ts: int | None = None
        self.last_read_ts: int | None = None
        self.revision = 0
        self.files = SealedFiles()
        self.journaled_seq = 0
        self.cursors: dict[int, RouterCursor] = {}
        self.stream: StreamState | None = None

    @classmethod
    def provisional(cls, creation: TopicPut) -> Topic:
        """A topic as its creation makes it; nobody sees it until the registry applies that."""
        topic = cls(creation.topic_id, creation.name, creation.epoch, creation.config, creation.ts)
        if creation.stream is not UNSET:
            topic.stream = StreamState(creation.stream)
        return topic

    # -- looking ---------------------------------------------------------------------------

    @property
    def dedupe(self) -> KeyMemory:
        """The idempotency keys, in flight and remembered."""
        return self.keys

    @property
    def staged_seq(self) -> int:
        """The last seq assigned, applied or not."""
        return max(self.log.head_seq, self.staging.last_seq)

    @property
    def staged_ceiling_seq(self) -> int:
        """The highest ceiling, applied or not."""
        return max(self.ceiling_seq, self.staging.ceiling_seq)

    @property
    def delete_gate(self) -> Gate:
        """What a delete or a moved floor waits for: what touches journaled records is journaled."""
        if self.is_ephemeral and self.journaled_seq >= self.log.earliest_seq:
            return Gate.WRITTEN
        return GATE_OF[self.config.durability]

    def facts(self) -> TopicFacts:
        """What the manifest says of the topic."""
        log = self.log
        holes = [SeqRun(hole.first_seq, hole.last_seq) for hole in log.holes]
        return TopicFacts(
            topic_id=self.topic_id,
            name=self.name,
            epoch=self.epoch,
            config=self.config,
            head_seq=log.head_seq,
            evict_floor=log.evict_floor,
            holes=holes,
        )

    @property
    def stream_facts(self) -> StreamFacts:
        """What the topic is as a stream, with everything that is under way."""
        return plain_facts(self.name) if self.stream is None else self.stream.newest

    @property
    def is_ephemeral(self) -> bool:
        """Whether records are never written."""
        return self.config.durability is Durability.EPHEMERAL

    def earliest_seq(self, now_ms: int) -> int:
        """The first seq that is live and not expired; `head_seq + 1` if there is none."""
        return retention.first_unexpired(self.log, self.config.ttl_ms, now_ms)

    def live(self, now_ms: int) -> tuple[int, int]:
        """How many records are live and not expired, and what they count in bytes."""
        log = self.log
        earliest = self.earliest_seq(now_ms)
        if earliest == log.earliest_seq:
            return log.live_count, log.live_bytes
        count, weight = log.live_between(log.earliest_seq, earliest - 1)
        return log.live_count - count, log.live_bytes - weight

    # -- deciding --------------------------------------------------------------------------

    def decide_append(
        self,
        decoded: DecodedAppend,
        body: bytes,
        header_key: str | None,
        now_ms: int,
        limits: AppendLimits,
        creation: TopicPut | None = None,
        source: Source | None = None,
        producer: ProducerStamp | None = None,
    ) -> RecordsAppended | Duplicate | StampRepeated:
        """An append with its seqs, time and floor, or the one it repeats.

        `source`: where its records are moved from; they were within the limits once, and what the
        server stamps on them does not count. `producer`: whose request it is; that it repeats one
        counts before its idempotency key does.

        Raises `TopicsError`: invalid_request, batch_too_large, record_too_large, topic_full, and
        those of `Producers.check` and `StreamState.check`.
        """
        if decoded.count == 0:
            raise invalid("records must not be empty", "records")
        key = check_key(decoded.idempotency_key, header_key)
        config = self.config
        if producer is not None:
            repeated = self.producers.check(producer, now_ms)
            if repeated is not None:
                return repeated
        if key is not None:
            known = self.keys.find(key, config.idempotency_window_ms, now_ms)
            if known is not None:
                return known
        if self.stream is not None and creation is None:
            self.stream.check(self.name, decoded.step)
        if source is None:
            check_limits(decoded, limits)
        log, staging = self.log, self.staging
        ts = max(now_ms, log.last_ts, staging.last_ts)
        floor = None
        if config.cap_records or config.cap_bytes:
            name = self.name
            floor = retention.append_floor(log, staging, config, decoded, now_ms, name)
        first_seq = self.staged_seq + 1
        assert floor is None or floor.seq < first_seq + decoded.count, "the newest record stays"
        return RecordsAppended(
            topic_id=self.topic_id,
            first_seq=first_seq,
            count=decoded.count,
            ts=ts,
            body=body,
            header_key=header_key if decoded.idempotency_key is None else None,
            creation=creation,
            floor=floor,
            grammar=decoded.grammar,
            decoded=decoded,
            source=source,
            producer=producer,
            step=decoded.step,
        )

    def decide_page(
        self, page: RouterPage, decoded: DecodedAppend, body: bytes, now_ms: int
    ) -> RecordsAppended:
        """The copies of a router's page with their seqs, time and floor.

        `body` is empty where replay finds the records elsewhere. Raises `topic_full` and what
        `StreamState.check` raises.
        """
        log, config = self.log, self.config
        if self.stream is not None:
            self.stream.check(self.name, None)
        slots = 1 if page.lost else 0
        assert decoded.count == page.copy_count
        assert decoded.count + slots > 0
        floor = None
        if decoded.count and (config.cap_records or config.cap_bytes):
            floor = retention.append_floor(
                log, self.staging, config, decoded, now_ms, self.name, slots
            )
        return RecordsAppended(
            topic_id=self.topic_id,
            first_seq=self.staged_seq + 1,
            count=decoded.count + slots,
            ts=max(now_ms, log.last_ts, self.staging.last_ts),
            body=body,
            floor=floor,
            grammar=decoded.grammar,
            decoded=decoded,
            page=page,
        )

    def segments_to_search(self, before_seq: int | None, now_ms: int) -> list[int]:
        """Segments that a delete by tag has to be searched for, off the loop."""
        first, last = self._delete_range(before_seq, now_ms)
        return deletion.segments_to_search(self.log, first, last)

    def decide_delete(
        self,
        before_seq: int | None,
        match: TagMatch | None,
        hits: Mapping[int, Sequence[int]],
        now_ms: int,
    ) -> RecordsDeleted | None:
        """A delete with its exact seqs, at this point in time; None if it hits nothing.

        `hits`: rows by segment for every segment of `segments_to_search` as it is *now*; unused
        without a `match`.
        """
        assert before_seq is not None or match is not None
        first, last = self._delete_range(before_seq, now_ms)
        if match is None:
            runs = deletion.runs_of_range(self.log, first, last)
        else:
            runs = deletion.runs_of_match(self.log, first, last, match, hits)
        if runs is None:
            return None
        return RecordsDeleted(self.topic_id, now_ms, runs[0], runs[1])

    def _delete_range(self, before_seq: int | None, now_ms: int) -> tuple[int, int]:
        head = self.log.head_seq
        last = head if before_seq is None else min(head, before_seq - 1)
        return self.earliest_seq(now_ms), last

    def decide_put(self, config: TopicConfig, now_ms: int) -> TopicPut | None:
        """A new configuration; None if it is the one there is.

        A changed cap or TTL carries the floor as the old one has it now, so that nothing that is
        lost comes back. Raises `topic_exists_incompatible` for another type.
        """
        old = self.config
        if config.type is not old.type:
            raise TopicsError(
                Code.TOPIC_EXISTS_INCOMPATIBLE,
                f"the topic is a {old.type.value} and stays one",
                {"topic": self.name, "field": "type"},
            )
        if config == old:
            return None
        floor = retention.standing_floor(self.log, self.staging, old, now_ms)
        if floor is None and self.is_ephemeral and self.log.evict_floor > 1:
            # Appends that moved the floor so far left no frame.
            floor = Floor(self.log.evict_floor, self.log.losses.ranges[-1].reason)
        return TopicPut(
            topic_id=self.topic_id,
            name=self.name,
            epoch=self.epoch,
            config=config,
            ts=now_ms,
            head_seq=self.log.head_seq,
            created=False,
            floor=floor,
        )

    def decide_expiry(self, now_ms: int) -> FloorMoved | None:
        """The floor that is due by TTL, or by a cap that was tightened; None if none is."""
        config, log = self.config, self.log
        if log.live_count == 0 or not (config.ttl_ms or config.cap_records or config.cap_bytes):
            return None
        floor = retention.standing_floor(log, self.staging, config, now_ms)
        return None if floor is None else FloorMoved(self.topic_id, now_ms, floor)

    def decide_drop(self, now_ms: int, *, if_empty: bool = False) -> TopicDropped:
        """The end of the topic. Raises `topic_not_empty` if it must be empty and is not."""
        if if_empty:
            count = self.live(now_ms)[0] + self.staged_seq - self.log.head_seq
            if count:
                raise TopicsError(
                    Code.TOPIC_NOT_EMPTY,
                    f'topic "{self.name}" is not empty',
                    {"topic": self.name, "count": count},
                )
        return TopicDropped(self.topic_id, self.name, now_ms)

    def decide_reservation(self, count: int) -> HeadReserved | None:
        """A higher ceiling, when `count` more records come near the last one or pass it.

        To be submitted before their append, which then waits for it in the FIFO if it has to.
        Class fsync needs none: there every head is synced.
        """
        if self.config.durability is Durability.FSYNC:
            return None
        wanted = self.staged_seq + count
        if wanted + HEAD_RESERVE_SEQS // 2 <= self.staged_ceiling_seq:
            return None
        return HeadReserved(self.topic_id, wanted + self._reserve_seqs)

    # -- staging ---------------------------------------------------------------------------

    def stage(self, lsn: int, entry: Entry) -> None:
        """Note that this entry is under way."""
        key = producer_id = None
        if isinstance(entry, RecordsAppended):
            assert entry.first_seq == self.staged_seq + 1
            assert entry.decoded is not None
            key = entry.decoded.idempotency_key or entry.header_key
            if key is not None:
                self.keys.stage(key, entry.first_seq, entry.count, lsn)
            if entry.step is not None:
                stream = self._as_stream()
                stream.stage(lsn, stepped(stream.newest, entry.step, entry.producer))
        elif isinstance(entry, StreamChanged):
            self._as_stream().stage(lsn, entry.facts)
        if isinstance(entry, _OF_PRODUCERS) and entry.producer is not None:
            count = 0 if isinstance(entry, StreamChanged) else entry.count
            self.producers.stage(lsn, entry.producer, entry.first_seq, count, entry.ts)
            producer_id = entry.producer.producer_id
        self.staging.push(Staged(lsn, entry, key, producer_id))

    def commit_staged(self, lsn: int) -> None:
        """Take the front entry off; `apply` it in the same turn."""
        self.staging.pop(lsn)

    def undo_from(self, lsn: int) -> None:
        """Forget the entries of this lsn and later: nobody has seen them."""
        for staged in self.staging.pop_from(lsn):
            if staged.key is not None:
                self.keys.undo(staged.key)
            if staged.producer_id is not None:
                self.producers.undo(staged.producer_id)
        if self.stream is not None:
            self.stream.undo(lsn)
        assert self.log.head_seq <= self.staged_seq

    # -- applying --------------------------------------------------------------------------

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """Change visible state. Never fails; an entry that is in already changes nothing."""
        if lsn <= self.applied_lsn:
            return NOTHING
        applied = NOTHING
        if isinstance(entry, RecordsAppended):
            applied = self._apply_append(lsn, entry)
        elif isinstance(entry, RecordsDeleted):
            applied = self._apply_delete(entry)
        elif isinstance(entry, FloorMoved):
            applied = self._apply_floor(entry.floor)
        elif isinstance(entry, TopicPut):
            applied = self._apply_put(entry)
        elif isinstance(entry, HeadReserved):
            self.ceiling_seq = max(self.ceiling_seq, entry.ceiling_seq)
            self._reserve_seqs = min(2 * self._reserve_seqs, HEAD_RESERVE_SEQS_MAX)
        elif isinstance(entry, CursorMoved):
            self.advance_cursor(entry.router_id, entry.cursor_seq)
        elif isinstance(entry, ProducerMoved):
            self.producers.accept(entry.producer, entry.first_seq, entry.count, entry.ts)
        elif isinstance(entry, StreamChanged):
            applied = self._apply_stream(lsn, entry)
        elif isinstance(entry, TopicDropped):
            applied = RUNG
        else:
            assert not isinstance(entry, SessionEntry | LeaseEntry | RouterEntry), "of no topic"
            assert_never(entry)
        self.applied_lsn = lsn
        self.revision += 1
        assert self.log.evict_floor <= self.log.earliest_seq <= self.log.head_seq + 1
        return applied

    def _apply_append(self, lsn: int, entry: RecordsAppended) -> Applied:
        log = self.log
        decoded = entry.decoded or decode_body(entry.body, entry.grammar)
        first_seq = entry.first_seq
        if entry.page is not None:
            first_seq += self._apply_page(entry, entry.page)
        assert decoded.count == entry.count - (first_seq - entry.first_seq)
        ahead = first_seq - log.head_seq - 1
        if ahead == 0:
            if decoded.count:
                log.append(entry.ts, decoded, lsn)
        else:
            self._replay_records(lsn, entry, decoded, first_seq)
        if entry.creation is not None or not self.is_ephemeral:
            self.journaled_seq = log.head_seq
        if self.last_write_ts is None or self.last_write_ts < entry.ts:
            self.last_write_ts = entry.ts
        key = decoded.idempotency_key
        if key is None:
            key = entry.header_key
        if key is not None:
            window_ms = self.config.idempotency_window_ms
            self.keys.remember(key, entry.first_seq, entry.count, entry.ts, window_ms)
        if entry.producer is not None:
            self.producers.accept(entry.producer, entry.first_seq, entry.count, entry.ts)
        if entry.step is not None:
            stream = self._as_stream()
            stream.apply(lsn, stepped(stream.facts, entry.step, entry.producer))
        if self.stream is not None:
            self.stream.used(entry.ts)
        return RUNG if entry.floor is None else self._apply_floor(entry.floor)

    def _apply_stream(self, lsn: int, entry: StreamChanged) -> Applied:
        if entry.producer is not None:
            self.producers.accept(entry.producer, entry.first_seq, 0, entry.ts)
        stream = self._as_stream()
        was = stream.facts
        stream.apply(lsn, entry.facts)
        is_told = (was.is_closed, was.is_copying) != (entry.facts.is_closed, entry.facts.is_copying)
        return RUNG if is_told else NOTHING

    def _as_stream(self) -> StreamState:
        if self.stream is None:
            self.stream = StreamState(plain_facts(self.name))
        return self.stream

    def _apply_page(self, entry: RecordsAppended, page: RouterPage) -> int:
        """What a page of a router does beside its records; how many seqs have none."""
        self.advance_cursor(page.router_id, page.cursor_seq, page.copy_count)
        if not page.lost:
            return 0
        self.log.jump_head(entry.first_seq - 1, LossReason.DAMAGED)
        self.log.lose_slot(entry.first_seq, page.lost)
        return 1

    def advance_cursor(self, router_id: int, seq: int, copy_count: int = 0) -> None:
        """A router into this topic has examined its source up to `seq`; a cursor never goes back.

        Without an entry this may be forgotten: nothing was copied, and it will be examined again.
        """
        cursor = self.cursors.get(router_id)
        if cursor is None:
            cursor = self.cursors[router_id] = RouterCursor(0)
        cursor.seq = max(cursor.seq, seq)
        cursor.copy_count += copy_count
        self.revision += 1

    def _replay_records(
        self, lsn: int, entry: RecordsAppended, decoded: DecodedAppend, first_seq: int
    ) -> None:
        """Replay: records up to the head are in already; seqs above it are a hole."""
        log = self.log
        log.jump_head(first_seq - 1, LossReason.DAMAGED)
        log.note_replayed(first_seq + decoded.count - 1)
        known = log.head_seq + 1 - first_seq
        if known < decoded.count:
            log.append(max(entry.ts, log.last_ts), decoded.since(known) if known else decoded, lsn)

    def _apply_floor(self, floor: Floor) -> Applied:
        log = self.log
        log.raise_floor(floor)
        # Only the front can have died.
        if log.sealed_count and log.runs[0].live_count == 0:
            return Applied(ring=True, dead_segments=log.dead_segments())
        return RUNG

    def _apply_delete(self, entry: RecordsDeleted) -> Applied:
        log = self.log
        firsts, lasts = deletion.columns_of(entry.firsts, entry.lasts)
        if len(lasts) and int(lasts[-1]) > log.head_seq:
            # The seqs were handed out, even if their records left no frame (class ephemeral).
            log.jump_head(int(lasts[-1]), LossReason.RESTART)
        deleted, flips = log.delete(firsts, lasts)
        self.files.add_pending(flips)
        dead = log.dead_segments() if flips else ()
        return Applied(ring=True, deleted=deleted, flips=flips, dead_segments=dead)

    def _apply_put(self, entry: TopicPut) -> Applied:
        assert entry.topic_id == self.topic_id
        log = self.log
        reason = LossReason.RESTART if self.is_ephemeral else LossReason.DAMAGED
        log.jump_head(entry.head_seq, reason)
        if not self.is_ephemeral or entry.config.durability is not Durability.EPHEMERAL:
            # Without the class ephemeral on either side, captures and segments hold the records.
            self.journaled_seq = log.head_seq
        self.config = entry.config
        return RUNG if entry.floor is None else self._apply_floor(entry.floor)

    # -- sealing and recovery --------------------------------------------------------------

    def mark_sealed(self, plan: SegmentPlan, index: SealedIndex) -> Flips:
        """The plan's run is sealed; what died meanwhile, to be flipped, is pending too."""
        self.revision += 1
        died = self.log.mark_sealed(plan, index)
        flips = {index.segment_id: died} if died else {}
        self.files.add_pending(flips)
        return flips

    def flips_done(
        self, flips: Mapping[int, Sequence[int]], digests: Mapping[int, FlagsDigest]
    ) -> None:
        """The flags of these rows are synced: they are pending no more (see `SealedFiles`)."""
        self.revision += 1
        self.files.flips_done(flips, digests)

    def segments_dropped(self, segment_ids: Collection[int]) -> None:
        """These segments, none with a live record, are no longer the topic's."""
        self.revision += 1
        self.log.forget_segments(segment_ids)
        self.files.drop(segment_ids)

    def note_damage(self, segment_id: int, first_row: int, last_row: int) -> int:
        """A sealed range cannot be read: readers get a tombstone. How many records that costs."""
        self.revision += 1
        if segment_id not in self.files.untrusted:
            self.files.fragile |= {segment_id}
        return self.log.note_damage(segment_id, first_row, last_row)
