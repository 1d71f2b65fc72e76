"""The state of one topic: its log, its staged entries, and the facts of its files.

`writes/` has the rules: a `decide_*` function reads this state and returns an entry, `apply_entry`
applies it. In this class `stage` notes an entry in flight; `commit_staged` and `undo_from` remove
it again. Invariants: `head_seq <= staged_seq`, `evict_floor <= earliest_seq`. Called by the
registry, by commits, the store, the sealer and recovery; all on the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec import UNSET

from topics_server.engine.log.log import Log
from topics_server.engine.log.mended import readmit
from topics_server.engine.ports import SealedIndex
from topics_server.engine.topic import retention
from topics_server.engine.topic.applied import Flips, RouterCursor
from topics_server.engine.topic.consumers.positions import NO_CONSUMERS, Consumers
from topics_server.engine.topic.dedupe import NO_KEYS, KeyMemory
from topics_server.engine.topic.producers import NO_PRODUCERS, Producers
from topics_server.engine.topic.sealed_files import SealedFiles
from topics_server.engine.topic.staging import IDLE, Staged, Staging
from topics_server.engine.topic.stream_facts import StreamState, plain_facts, stepped
from topics_server.values.entries import (
    ConsumerDeleted,
    ConsumerMoved,
    Entry,
    ProducerMoved,
    RecordsAppended,
    RecordsDeleted,
    StreamChanged,
    TopicPut,
)
from topics_server.values.file_inventory import FlagsDigest
from topics_server.values.limits import HEAD_RESERVE_SEQS, SEAL_BY_AGE_BYTES_MIN
from topics_server.values.model import (
    Durability,
    SeqRun,
    StreamFacts,
    TopicConfig,
)
from topics_server.values.storage_types import SegmentPlan, TopicFacts

# Access to an enum member costs a lookup.
_EPHEMERAL: Final = Durability.EPHEMERAL
_OF_CONSUMERS = (ConsumerMoved, ConsumerDeleted)
_OF_PRODUCERS = (RecordsAppended, ProducerMoved, StreamChanged)


class Topic:
    """One incarnation of a topic. Times in ms; `last_write_ts` and `last_read_ts` None if never.

    `ceiling_seq`: seqs up to it may be assigned without a sync for each. `revision` changes with
    everything that a capture includes. `files`: the state of its sealed files. `journaled_seq`:
    records above it are in no frame and no file. `cursors`: those of the routers into this topic,
    by router id. `stream`: the facts as a stream, if the topic was created or closed as one. The
    sealer is called for plain appends after which the tail has `watched_tail_bytes`.
    """

    __slots__ = (
        "reserve_seqs",
        "applied_lsn",
        "ceiling_seq",
        "config",
        "consumers",
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
        "watched_tail_bytes",
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
        # Shared by all topics until `own_keys` and the like: most topics never have any.
        self.keys = NO_KEYS
        self.producers = NO_PRODUCERS
        self.consumers = NO_CONSUMERS
        self.staging = IDLE
        self.applied_lsn = 0
        self.ceiling_seq = self.reserve_seqs = HEAD_RESERVE_SEQS
        self.last_write_ts: int | None = None
        self.last_read_ts: int | None = None
        self.revision = 0
        self.files = SealedFiles()
        self.journaled_seq = 0
        self.cursors: dict[int, RouterCursor] = {}
        self.stream: StreamState | None = None
        self.watched_tail_bytes = SEAL_BY_AGE_BYTES_MIN

    @classmethod
    def provisional(cls, creation: TopicPut) -> Topic:
        """Make a topic from its creation entry.

        It is visible only after the registry applies that entry.
        """
        topic = cls(creation.topic_id, creation.name, creation.epoch, creation.config, creation.ts)
        if creation.stream is not UNSET:
            topic.stream = StreamState(creation.stream)
        return topic

    # -- facts -----------------------------------------------------------------------------

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

    def facts(self) -> TopicFacts:
        """The topic's facts for the manifest."""
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
        """The topic's facts as a stream, after all entries in flight."""
        return plain_facts(self.name) if self.stream is None else self.stream.newest

    @property
    def is_ephemeral(self) -> bool:
        """Whether the topic's records are never written to disk."""
        return self.config.durability is _EPHEMERAL

    def earliest_seq(self, now_ms: int) -> int:
        """The first seq that is live and not expired; `head_seq + 1` if there is none."""
        return retention.first_unexpired(self.log, self.config.ttl_ms, now_ms)

    def live(self, now_ms: int) -> tuple[int, int]:
        """The number of live, unexpired records, and their bytes."""
        log = self.log
        earliest = self.earliest_seq(now_ms)
        if earliest == log.earliest_seq:
            return log.live_count, log.live_bytes
        count, weight = log.live_between(log.earliest_seq, earliest - 1)
        return log.live_count - count, log.live_bytes - weight

    # -- the parts that topics share until they change -------------------------------------

    def own_keys(self) -> KeyMemory:
        """The idempotency keys, to be changed."""
        if self.keys is NO_KEYS:
            self.keys = KeyMemory()
        return self.keys

    def own_producers(self) -> Producers:
        """The producers, to be changed."""
        if self.producers is NO_PRODUCERS:
            self.producers = Producers()
        return self.producers

    def own_consumers(self) -> Consumers:
        """The consumers, to be changed."""
        if self.consumers is NO_CONSUMERS:
            self.consumers = Consumers()
        return self.consumers

    # -- staging ---------------------------------------------------------------------------

    def stage(self, lsn: int, entry: Entry) -> None:
        """Note that this entry is in flight."""
        if self.staging is IDLE:
            self.staging = Staging()
        if type(entry) is RecordsDeleted:
            self.staging.push(Staged(lsn, entry))
            return
        key = producer_id = None
        if isinstance(entry, RecordsAppended):
            assert entry.first_seq == max(self.log.head_seq, self.staging.last_seq) + 1
            assert entry.decoded is not None
            key = entry.decoded.idempotency_key or entry.header_key
            if key is not None:
                self.own_keys().stage(key, entry.first_seq, entry.count, lsn)
            elif entry.decoded.record_keys:
                self.own_keys().stage_each(entry.decoded.record_keys, entry.first_seq, lsn)
            if entry.step is not None:
                stream = self.as_stream()
                stream.stage(lsn, stepped(stream.newest, entry.step, entry.producer))
        elif isinstance(entry, StreamChanged):
            self.as_stream().stage(lsn, entry.facts)
        elif isinstance(entry, _OF_CONSUMERS):
            self.own_consumers().stage(lsn, entry)
        if isinstance(entry, _OF_PRODUCERS) and entry.producer is not None:
            count = 0 if isinstance(entry, StreamChanged) else entry.count
            self.own_producers().stage(lsn, entry.producer, entry.first_seq, count, entry.ts)
            producer_id = entry.producer.producer_id
        self.staging.push(Staged(lsn, entry, key, producer_id))

    def commit_staged(self, lsn: int) -> None:
        """Remove the front entry; `apply` it in the same turn."""
        self.staging.pop(lsn)

    def undo_from(self, lsn: int) -> None:
        """Forget the entries of this lsn and later: no reader has seen them."""
        for staged in self.staging.pop_from(lsn):
            if staged.key is not None:
                self.keys.undo(staged.key)
            elif isinstance(staged.entry, RecordsAppended):
                assert staged.entry.decoded is not None
                for record_key in staged.entry.decoded.record_keys:
                    self.keys.undo(record_key)
            if staged.producer_id is not None:
                self.producers.undo(staged.producer_id)
            if isinstance(staged.entry, _OF_CONSUMERS):
                self.consumers.unstage(staged.lsn, staged.entry.consumer)
        if self.stream is not None:
            self.stream.undo(lsn)
        assert self.log.head_seq <= self.staged_seq

    # -- applying --------------------------------------------------------------------------

    def as_stream(self) -> StreamState:
        """The stream state; a plain topic gets the facts of a plain stream."""
        if self.stream is None:
            self.stream = StreamState(plain_facts(self.name))
        return self.stream

    def advance_cursor(self, router_id: int, seq: int, copy_count: int = 0) -> None:
        """Note that a router has examined its source up to `seq`; a cursor never moves back.

        Without an entry the move may be lost: nothing was copied, and the records are examined
        again.
        """
        cursor = self.cursors.get(router_id)
        if cursor is None:
            cursor = self.cursors[router_id] = RouterCursor(0)
        cursor.seq = max(cursor.seq, seq)
        cursor.copy_count += copy_count
        self.revision += 1

    # -- sealing and recovery --------------------------------------------------------------

    def mark_sealed(self, plan: SegmentPlan, index: SealedIndex) -> Flips:
        """Replace a plan's run by its segment; records that died since become pending flips."""
        self.revision += 1
        died = self.log.mark_sealed(plan, index)
        flips = {index.segment_id: died} if died else {}
        self.files.add_pending(flips)
        return flips

    def flips_done(
        self, flips: Mapping[int, Sequence[int]], digests: Mapping[int, FlagsDigest]
    ) -> None:
        """Note synced flags: they are no longer pending (see `SealedFiles`)."""
        self.revision += 1
        self.files.flips_done(flips, digests)

    def segments_dropped(self, segment_ids: Collection[int]) -> None:
        """Remove these segments, none of which has a live record."""
        self.revision += 1
        self.log.forget_segments(segment_ids)
        self.files.drop(segment_ids)

    def note_damage(self, segment_id: int, first_row: int, last_row: int) -> int:
        """Note an unreadable sealed range: readers get a tombstone.

        Returns the number of lost records.
        """
        self.revision += 1
        if segment_id not in self.files.untrusted:
            self.files.fragile |= {segment_id}
        return self.log.note_damage(segment_id, first_row, last_row)

    def note_mended(self, index: SealedIndex, flags: bytes) -> int:
        """Note a mended segment; returns the number of records that came back."""
        self.revision += 1
        self.files.mended(index.segment_id)
        return readmit(self.log, index, flags)
