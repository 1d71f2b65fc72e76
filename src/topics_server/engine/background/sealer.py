"""Background jobs on sealed data: expire, seal, flip, relocate, drop.

Pure modules decide everything on the loop; packing, writing and unlinking happen off it. Only
records whose frames are synced are sealed. A file is removed only after the entry that made it
useless is synced. A flip stays pending, and in every snapshot, until it is synced (ARCHITECTURE,
Seal). A failed job is logged and tried again later: unsealed data is not lost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeVar

import msgspec

from topics_server.engine.background import seal_plan
from topics_server.engine.background.packing import Packing, size_of
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.ports import Clock, JournalPort, SealedIndex, SegmentsPort
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.delete import decide_expiry
from topics_server.runtime.metrics import log
from topics_server.values.entries import (
    ConsumerDeleted,
    ConsumerMoved,
    Entry,
    RecordsAppended,
    StreamChanged,
    TopicDropped,
    TopicPut,
)
from topics_server.values.errors import StorageError, TopicsError
from topics_server.values.limits import SEAL_BY_AGE_BYTES_MIN, SNAPSHOTS_KEPT
from topics_server.values.storage_types import Offload, PackedSegment, SegmentPlan, TopicFacts

T = TypeVar("T")

# How often topics whose floor moves by itself are checked, and the pause after a failure.
_EXPIRY_INTERVAL_S: Final = 1.0
_RETRY_S: Final = 2.0
# The least time between two flips of one topic, except where other work needs them.
_FLIPS_EVERY_S: Final = 0.2
# Topics examined in one loop turn.
_SLICE: Final = 256


class SealingRules(msgspec.Struct, frozen=True):
    """When a run is sealed and a segment moves to the cold folder (contract README)."""

    max_records: int
    max_bytes: int
    max_age_ms: int
    retain_segments: int
    retain_bytes: int
    has_cold: bool


class Sealer:
    """Observes applied entries, except plain appends to short tails; lists topics with work."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        journal: JournalPort,
        segments: SegmentsPort,
        offload: Offload,
        clock: Clock,
        rules: SealingRules,
        may_seal: Callable[[], bool] = lambda: True,
        check_room: Callable[[int], None] = lambda size: None,
    ) -> None:
        """`may_seal` returns whether the disk has room for new segments.

        `check_room` is blocking; it raises `StorageError` if a segment of so many bytes cannot fit.
        """
        self._registry = registry
        self._commits = commits
        self._journal = journal
        self._segments = segments
        self._offload = offload
        self._clock = clock
        self._rules = rules
        self._may_seal = may_seal
        self._check_room = check_room
        # Topics whose last drop of segments failed after a part of it.
        self._half_dropped: set[int] = set()
        # Topics whose work is tried again a little later.
        self._later: set[int] = set()
        # Topics that were flipped a moment ago; True: more of their sealed records have died since.
        self._flipped: dict[int, bool] = {}
        # The error of each failing topic, until its work succeeds or it is dropped.
        self.failures: dict[int, StorageError] = {}
        # `_due`: topics with work, in order. `_aging`: with a tail that is large enough to seal by
        # age. `_expiring`: with a floor that moves by time. `_dropped`: dropped topics with the
        # lsn. Two are ordered dictionaries, because removing the front of a plain dictionary gets
        # slower each time.
        self._due: OrderedDict[int, None] = OrderedDict()
        self._aging: dict[int, None] = {}
        self._expiring: dict[int, None] = {}
        self._dropped: OrderedDict[int, int] = OrderedDict()
        # Topics with segments that a kept snapshot lists as damaged, although they may be mended.
        self._healed: set[int] = set()
        self._snapshots_taken = 0
        self._packing = Packing(offload, segments, check_room)
        self._woken = asyncio.Event()
        self._one_job = asyncio.Lock()
        self.sealed_count = 0
        self.dropped_count = 0
        self.relocated_count = 0
        self.failed_count = 0
        # Called when a topic changed without an entry.
        self.on_moved: list[Callable[[int], None]] = []
        # Called when the disk refused an operation that frees space.
        self.on_refused: list[Callable[[], None]] = []
        commits.change_observers.append(self.observe)
        commits.delete_observers.append(self.observe_delete)
        commits.tail_observers.append(self.observe)
        commits.watched_tail_records = rules.max_records

    @property
    def is_working(self) -> bool:
        """Whether any topic has work now."""
        return bool(self._due or self._dropped) or self._one_job.locked()

    @property
    def turn(self) -> asyncio.Lock:
        """The lock of the one running job on sealed files; a mend takes it too."""
        return self._one_job

    # --- topics with work ---------------------------------------------------------------

    def is_refused(self, topic_id: int) -> bool:
        """Whether the disk has no room to seal the topic, or refused it the last time."""
        return topic_id in self.failures or not self._may_seal()

    def observe(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Note an applied entry: a change, or an append to a tail that may be sealed."""
        topic_id = entry.topic_id
        if isinstance(entry, TopicDropped):
            self._dropped[topic_id] = lsn
            self.failures.pop(topic_id, None)
            self._half_dropped.discard(topic_id)
            self._healed.discard(topic_id)
            self._due.pop(topic_id, None)
            self._aging.pop(topic_id, None)
            self._expiring.pop(topic_id, None)
            self._woken.set()
            return
        topic = self._registry.get(topic_id)
        if topic is None:
            return  # the topic was dropped meanwhile
        if isinstance(entry, TopicPut | StreamChanged) or (
            isinstance(entry, RecordsAppended) and entry.creation is not None
        ):
            self._note_expiring(topic)
        tail_bytes = topic.log.tail_bytes
        is_long = topic.log.tail_count >= self._rules.max_records
        if is_long or tail_bytes >= SEAL_BY_AGE_BYTES_MIN:
            self._note_aging(topic)
            if is_long or tail_bytes >= self._rules.max_bytes:
                self._enqueue(topic_id)
        if applied.flips or applied.dead_segments:
            self._note_dead(topic_id, applied)
        elif isinstance(entry, ConsumerMoved | ConsumerDeleted):
            if topic.consumers.holding:
                self._expiring[topic_id] = None
            elif topic_id in self._expiring:
                self._note_expiring(topic)

    def observe_delete(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Note an applied delete: it changes segments, and makes no tail longer."""
        if applied.flips or applied.dead_segments:
            self._note_dead(entry.topic_id, applied)

    def _note_dead(self, topic_id: int, applied: Applied) -> None:
        """Enqueue a topic whose sealed records died, unless it was flipped a moment ago.

        A flip syncs the journal and the file of flags, and reads all flags of the segment twice,
        even for one record. So the acks of a moment are flipped together.
        """
        if applied.dead_segments:
            self._enqueue(topic_id)
        elif topic_id in self._flipped:
            self._flipped[topic_id] = True
        else:
            self._begin_flips(topic_id)

    def _begin_flips(self, topic_id: int) -> None:
        self._flipped[topic_id] = False
        self._enqueue(topic_id)
        asyncio.get_running_loop().call_later(_FLIPS_EVERY_S, self._end_flips, topic_id)

    def _end_flips(self, topic_id: int) -> None:
        if self._flipped.pop(topic_id):
            self._begin_flips(topic_id)

    def adopt(self, topic: Topic) -> None:
        """Note a topic that recovery restored; most topics have no work."""
        config, log_ = topic.config, topic.log
        if log_.sealed_count and topic.files.healed:
            self._healed.add(topic.topic_id)
        if config.ttl_ms or topic.consumers.holding:
            self._expiring[topic.topic_id] = None
        if log_.tail_bytes >= SEAL_BY_AGE_BYTES_MIN:
            self._note_aging(topic)
        if log_.sealed_count or config.ttl_ms or config.cap_records or config.cap_bytes:
            self._enqueue(topic.topic_id)

    def snapshot_taken(self) -> None:
        """Note a published snapshot of this run.

        A start may use any kept snapshot. Once this run has published all kept snapshots, none has
        a hole that recovery removed, so spent segments may be dropped.
        """
        self._snapshots_taken += 1
        if self._snapshots_taken < SNAPSHOTS_KEPT:
            return
        for topic_id in self._healed:
            topic = self._registry.get(topic_id)
            if topic is not None:
                topic.files.healed = frozenset()
                self._enqueue(topic_id)
        self._healed.clear()

    def note_mended(self, topic: Topic) -> None:
        """Note a mended segment: the kept snapshots still have its damage hole.

        So does a snapshot that is being written now.
        """
        self._snapshots_taken = -1
        self._healed.add(topic.topic_id)
        self._enqueue(topic.topic_id)

    def _note_expiring(self, topic: Topic) -> None:
        """Note whether a topic's floor moves by itself: it has a TTL, or consumers with a hold."""
        if topic.config.ttl_ms or topic.consumers.holding:
            self._expiring[topic.topic_id] = None
        else:
            self._expiring.pop(topic.topic_id, None)
        self._enqueue(topic.topic_id)

    def _note_aging(self, topic: Topic) -> None:
        """Note a tail that is large enough to seal by age; next, watch for a whole segment."""
        self._aging[topic.topic_id] = None
        topic.watched_tail_bytes = self._rules.max_bytes

    def _enqueue(self, topic_id: int) -> None:
        self._due[topic_id] = None
        self._woken.set()

    def _enqueue_later(self, topic_id: int) -> None:
        """Enqueue the topic later; several failures before that enqueue it only once."""
        if topic_id not in self._later:
            self._later.add(topic_id)
            asyncio.get_running_loop().call_later(_RETRY_S, self._enqueue_again, topic_id)

    def _enqueue_again(self, topic_id: int) -> None:
        self._later.discard(topic_id)
        self._enqueue(topic_id)

    # --- the loop -----------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            await self._run()
        finally:
            self._packing.drop()

    async def _run(self) -> None:
        next_look = 0.0
        while True:
            now_s = self._clock.monotonic_ms() / 1000
            if now_s >= next_look:
                next_look = now_s + _EXPIRY_INTERVAL_S
                await self._look_at_clocks()
            while self._due or self._dropped:
                await self._work_once()
            self._woken.clear()
            try:
                async with asyncio.timeout(_EXPIRY_INTERVAL_S):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _look_at_clocks(self) -> None:
        """Move floors that are due, and find tails to seal by age, in slices."""
        if not self._one_job.locked():
            self._packing.drop_stale(self._registry)
        now_ms = self._clock.now_ms()
        for number, topic_id in enumerate(list(self._expiring)):
            topic = self._registry.get(topic_id)
            if topic is not None:
                self._move_floor(topic, now_ms)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        for topic_id in self._aging:
            self._enqueue(topic_id)

    def expire(self) -> None:
        """Submit every floor that is due, so that a clean stop keeps what readers saw."""
        now_ms = self._clock.now_ms()
        for topic_id in self._expiring:
            topic = self._registry.get(topic_id)
            if topic is not None:
                self._move_floor(topic, now_ms)

    def _move_floor(self, topic: Topic, now_ms: int) -> None:
        if topic.stream is not None and topic.stream.newest.is_copying:
            return  # a fork's placeholders are not deleted yet: its caps apply when it is complete
        try:
            entry = decide_expiry(topic, now_ms)
        except StorageError as error:
            # The next look tries again: an index that is damaged is mended meanwhile.
            log.warning("topic %s: no record expires now: %s", topic.name, error)
            return
        if entry is None:
            return
        try:
            self._commits.submit(entry, gate_of(entry, topic), topic, urgent=True)
        except TopicsError:
            pass  # read-only or full: expired records stay hidden by their age

    async def _work_once(self) -> None:
        if self._dropped:
            topic_id, lsn = next(iter(self._dropped.items()))
            await self._drop_topic(topic_id, lsn)
            return
        topic_id, _ = self._due.popitem(last=False)
        topic = self._registry.get(topic_id)
        if topic is None:
            return
        try:
            await self.tend(topic)
        except StorageError as error:
            self._retry(topic, error)
        except Exception as error:
            # The cause may be an import that found no free descriptor. The work of all topics
            # continues.
            log.error("defect in background work on topic %s", topic.name, exc_info=error)
            self._retry(topic, StorageError(f"an internal error: {error}"))
        else:
            self.failures.pop(topic_id, None)

    def retry_now(self) -> None:
        """Retry the failed work now: the disk has room again."""
        for topic_id in self.failures:
            self._enqueue(topic_id)

    def _retry(self, topic: Topic, error: StorageError) -> None:
        log.warning("background work on topic %s failed: %s", topic.name, error)
        self._note_failure(topic.topic_id, error)
        self._enqueue_later(topic.topic_id)

    def _note_failure(self, topic_id: int, error: StorageError) -> None:
        self.failed_count += 1
        # Without its traceback, which refers to the records of the failed segment.
        self.failures[topic_id] = error.with_traceback(None)

    async def tend(self, topic: Topic, *, force_seal: bool = False) -> None:
        """Do the work of one topic as it is now, in an order that is safe at every step.

        Entries that are applied meanwhile make the topic due again and are not handled here: a
        topic that grows as fast as it is sealed would otherwise delay all other work for ever.
        """
        async with self._one_job:
            head_seq = topic.log.head_seq
            self._move_floor(topic, self._clock.now_ms())
            await self._flip(topic)
            # Do this before sealing, which a full disk refuses: this frees space.
            await self._drop_segments(topic)
            await self._seal_to(topic, head_seq, force=force_seal)
            await self._drop_segments(topic)
            await self._relocate(topic)
            await self._publish_config(topic)

    async def seal_tails(self, min_bytes: int) -> None:
        """Seal every tail of at least `min_bytes` (before a checkpoint)."""
        for topic_id in list(self._aging):
            topic = self._registry.get(topic_id)
            if topic is None or topic.is_ephemeral or topic.log.tail_bytes < min_bytes:
                continue
            try:
                await self.tend(topic, force_seal=True)
            except StorageError as error:
                log.warning("sealing topic %s before a checkpoint failed: %s", topic.name, error)
                self._note_failure(topic_id, error)
                # The requested seal has failed; the topic's own schedule tries again.
                self._enqueue_later(topic_id)

    async def _seal_now(self, topic: Topic, head_seq: int) -> int:
        """Seal the records of a topic up to this seq and publish its manifest.

        Returns how many of these records stay unsealed. Afterwards the files show what a reader
        sees: deletes are flagged and the manifest has the floor. Records of an ephemeral topic, and
        of a read-only shard, stay unsealed. Raises `StorageError`.
        """
        if topic.is_ephemeral:
            return topic.log.live_between(topic.log.sealed_seq + 1, head_seq)[0]
        await self._sync_what_killed(topic)
        async with self._one_job:
            self._move_floor(topic, self._clock.now_ms())
            await self._flip(topic)
            await self._seal_to(topic, head_seq, force=True)
            await self._drop_segments(topic)
            if topic.log.sealed_count and self._registry.get(topic.topic_id) is topic:
                await self._sync_what_killed(topic)
                await self._flip(topic)
                facts = topic.facts()
                await self._offload.run(partial(self._segments.write_manifest, facts))
                self._published(topic)
        return topic.log.live_between(topic.log.sealed_seq + 1, head_seq)[0]

    async def seal_topics(self, names: Iterable[str]) -> tuple[int, int]:
        """Seal the current records of these topics, one topic after the other.

        Records that arrive meanwhile are not included. Returns the numbers of unsealed records and
        of new segments.
        """
        before, left = self.sealed_count, 0
        topics = [topic for name in names if (topic := self._registry.find(name)) is not None]
        heads = [topic.log.head_seq for topic in topics]
        for topic, head_seq in zip(topics, heads, strict=True):
            left += await self._seal_now(topic, head_seq)
        return left, self.sealed_count - before

    # --- jobs ---------------------------------------------------------------------------

    async def _seal_to(self, topic: Topic, head_seq: int, *, force: bool) -> None:
        """Seal the due records up to this seq; the last segment may hold more."""
        while topic.log.sealed_seq < head_seq and await self._seal(topic, force=force):
            await self._flip(topic)

    async def _seal(self, topic: Topic, *, force: bool) -> bool:
        if self._registry.get(topic.topic_id) is not topic:
            return False  # dropped meanwhile
        if not self._may_seal():
            return False
        rules = self._rules
        plan = seal_plan.plan_seal(
            topic,
            self._commits.synced_lsn(topic.topic_id),
            self._clock.now_ms(),
            max_records=rules.max_records,
            max_bytes=rules.max_bytes,
            max_age_ms=rules.max_age_ms,
            force=force,
        )
        if plan is None:
            return False
        due, (plan, packed) = plan, await self._packing.take(plan)
        synced_lsn = self._commits.synced_lsn(topic.topic_id)
        coming = seal_plan.plan_next(topic, due, synced_lsn, rules.max_records, rules.max_bytes)
        if coming is not None:
            self._packing.begin(coming)
        await self._sync_what_killed(topic)
        facts = topic.facts()
        index = await self._offload.run(partial(self._put, plan, facts, packed))
        # Flip the slots that died while the file was written, like those of any later delete.
        topic.mark_sealed(plan, index)
        digest = self._segments.flags_digest(topic.topic_id, index.segment_id)
        topic.files.digests[index.segment_id] = digest
        if topic.log.tail_bytes < SEAL_BY_AGE_BYTES_MIN:
            self._aging.pop(topic.topic_id, None)
            topic.watched_tail_bytes = SEAL_BY_AGE_BYTES_MIN
        self.sealed_count += 1
        self._published(topic)
        return True

    def _put(self, plan: SegmentPlan, facts: TopicFacts, packed: PackedSegment) -> SealedIndex:
        """*Blocking.* Write a segment, unless the disk has no room for it."""
        self._check_room(size_of(plan))
        return self._segments.put(plan, facts, packed)

    async def _sync_what_killed(self, topic: Topic) -> None:
        """Sync the entries that killed a plan's dead records, before the plan is carried out."""
        lsn = topic.applied_lsn
        if self._commits.synced_lsn(topic.topic_id) < lsn:
            try:
                await self._journal.sync_all()
            except StorageError:
                # A failure of another shard does not concern this topic.
                if self._commits.synced_lsn(topic.topic_id) < lsn:
                    raise
        await self._journal.hold_end(topic.topic_id)

    async def _free(self, call: Callable[[], T]) -> T:
        """Run an operation that frees space, off the loop.

        If the disk refuses it, released ballast may help.
        """
        try:
            return await self._offload.run(call)
        except StorageError:
            for callback in self.on_refused:
                callback()
            raise

    async def _flip(self, topic: Topic) -> None:
        """Set the flags that are due now; deletes that are applied meanwhile are handled later."""
        flips = topic.files.due_flips()
        if not flips:
            return
        # A flag must not outlive its delete: the next start compares the two.
        await self._sync_what_killed(topic)
        call = partial(self._segments.flip, topic.topic_id, flips)
        topic.flips_done(flips, await self._free(call))
        self._moved(topic)

    async def _drop_segments(self, topic: Topic) -> None:
        segment_ids = seal_plan.plan_drops(topic)
        if not segment_ids and topic.topic_id not in self._half_dropped:
            return
        # The entries that made these segments useless must be durable before the files are removed.
        await self._sync_what_killed(topic)
        topic.segments_dropped(segment_ids)
        facts = topic.facts()
        # The next drop, even an empty one, also removes the remains of a refused drop.
        self._half_dropped.add(topic.topic_id)
        await self._free(partial(self._segments.drop, topic.topic_id, segment_ids, facts))
        self._half_dropped.discard(topic.topic_id)
        self.dropped_count += len(segment_ids)
        self._published(topic)

    async def _relocate(self, topic: Topic) -> None:
        rules = self._rules
        if not rules.has_cold:
            return
        for segment_id in seal_plan.plan_relocation(
            topic, self._segments.is_cold, rules.retain_segments, rules.retain_bytes
        ):
            facts = topic.facts()
            await self._offload.run(
                partial(self._segments.relocate, topic.topic_id, segment_id, facts)
            )
            self.relocated_count += 1
            self._published(topic)

    async def _publish_config(self, topic: Topic) -> None:
        """Publish a changed configuration, which programs that read the files must apply."""
        published = self._segments.published_config(topic.topic_id)
        if published is None or published == topic.config:
            return
        if self._registry.get(topic.topic_id) is topic:
            await self._sync_what_killed(topic)
            facts = topic.facts()
            await self._offload.run(partial(self._segments.write_manifest, facts))
            self._published(topic)

    def _published(self, topic: Topic) -> None:
        """Note a published manifest: the next snapshot must have the manifest's generation."""
        topic.files.generation = self._segments.generation_of(topic.topic_id)
        self._moved(topic)

    def _moved(self, topic: Topic) -> None:
        for callback in self.on_moved:
            callback(topic.topic_id)

    async def _drop_topic(self, topic_id: int, lsn: int) -> None:
        assert self._commits.synced_lsn(topic_id) >= lsn, "a drop is applied once synced"
        try:
            # Wait for a running job of that topic: it would write files again.
            async with self._one_job:
                await self._free(partial(self._segments.drop_topic, topic_id))
        except StorageError as error:
            log.warning("files of dropped topic %d are still there: %s", topic_id, error)
            self._note_failure(topic_id, error)
            asyncio.get_running_loop().call_later(_RETRY_S, self._drop_again, topic_id, lsn)
        else:
            self.failures.pop(topic_id, None)
        del self._dropped[topic_id]

    def _drop_again(self, topic_id: int, lsn: int) -> None:
        self._dropped[topic_id] = lsn
        self._woken.set()
