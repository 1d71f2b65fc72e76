"""The boot sequence: restore, replay, judge, make durable.

Newest valid snapshot -> parts restored on their sealed segments -> every later entry applied by
lsn, through the same `apply` as live, and shown to those who observe live. Then the files found are
judged (`inventory`): what is missing or older refuses the start, by name, and nothing was changed.
After that heads jump where an unclean stop demands it, what was found is made durable, flips that
are missing are made, and what is superseded goes. Source marks are collected for `moves`. Bounded
by the un-checkpointed tail. Probes answer meanwhile and see the progress: the journal is read in a
thread, entries are applied on the loop in slices, large appends are decoded in the helper process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from topics_server.engine.background.capture import decode, restore
from topics_server.engine.background.epochs import restore_epochs
from topics_server.engine.commit.projections import NO_PROJECTIONS, Projection, Projections
from topics_server.engine.ports import KeptAppends, Offload, Replay, SealedIndex, SegmentsPort
from topics_server.engine.topic.dedupe import KeyMemory
from topics_server.engine.topic.producers import Producers
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Applied, Topic
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import log
from topics_server.values.copies import ReplayPayloads
from topics_server.values.entries import (
    RESERVED_ID_MIN,
    Entry,
    RecordsAppended,
    RecordsDeleted,
    RouterPut,
    Source,
    TopicDropped,
)
from topics_server.values.errors import StartRefused, StorageError
from topics_server.values.file_inventory import (
    NO_TOPIC,
    Anchor,
    Expected,
    FoundTopic,
    Objection,
    anchor_of,
    judge,
    note_delete,
)
from topics_server.values.limits import MIB
from topics_server.values.model import Durability, LossReason
from topics_server.values.storage_types import EPOCHS_PART, SnapshotImage

# How long the loop applies entries or restores parts before it does something else, ms.
_SLICE_MS: Final = 5.0
# Entries read in one call off the loop: so many, or fewer with so many bytes of appends.
_READ_AT_ONCE: Final = 64
_READ_BYTES: Final = MIB
# Topics whose files are settled in one call off the loop.
_SETTLED_AT_ONCE: Final = 16


class Stop(msgspec.Struct, frozen=True):
    """How the last run ended: with its clean-stop mark, and under the same kernel boot."""

    was_clean: bool
    same_boot: bool


class Recovered(msgspec.Struct):
    """What recovery found, for the report at start."""

    last_lsn: int = 0
    topics: int = 0
    entries: int = 0
    heads_moved: int = 0
    holes: int = 0
    flips: int = 0
    folders_removed: int = 0
    had_snapshot: bool = False


class Recovery:
    """One boot. `progress` is 0.0 to 1.0 while `run` is under way."""

    def __init__(
        self,
        registry: Registry,
        segments: SegmentsPort,
        image: SnapshotImage | None,
        replay: Replay,
        offload: Offload,
        kept_appends: KeptAppends,
        projections: Projections = NO_PROJECTIONS,
        observers: Sequence[Callable[[int, Entry, Applied], None]] = (),
        sources: Collection[int] = (),
    ) -> None:
        """`sources`: topics whose records pages without payloads may name; may grow in replay."""
        self._registry = registry
        self._projections = projections
        self._observers = observers
        self._segments = segments
        self._image = image
        self._replay = replay
        self._offload = offload
        self._kept_appends = kept_appends
        self._turn_ends_ms = 0.0
        self._restored = 0.0
        self._on_disk: set[int] = set()
        # What lies on disk of the topics that were opened, until it is judged.
        self._files: dict[int, FoundTopic] = {}
        # Deletes may be missing from a journal that was repaired.
        self._is_mended = False
        self._dropped: Sequence[int] = ()
        self.found = Recovered()
        # Source marks met in the journal: whoever opens it deletes what they name, if it lives.
        self.marks: list[Source] = []
        self._payloads = ReplayPayloads(sources)
        # Topics with copies of records that were not met, which must turn out to be dropped.
        self._unmet: dict[int, str] = {}

    @property
    def progress(self) -> float:
        """How much of the snapshot and the journal is done."""
        return min(1.0, 0.3 * self._restored + 0.7 * self._replay.progress)

    async def run(self, stop: Stop, begin: Callable[[], None]) -> Recovered:
        """Bring all topics back. Raises `StartRefused`, `Corrupt`: the data cannot be served."""
        start_lsn = await self._restore()
        await self._apply_journal(start_lsn)
        self._judge()
        # From here on a stop is unclean until noted as clean; a refusal above leaves the mark.
        await self._offload.run(begin)
        self._finish_topics(stop)
        await self._settle()
        await self._make_flips()
        await self._remove_dropped()
        self.found.topics = len(self._registry)
        self.found.holes = sum(len(topic.log.holes) for topic in self._registry)
        return self.found

    async def _restore(self) -> int:
        image = self._image
        self._on_disk = set(await self._offload.run(self._segments.topics_on_disk))
        if image is None:
            self._restored = 1.0
            return 1
        self.found.had_snapshot = True
        self.found.last_lsn = image.last_lsn
        self._registry.next_topic_id = image.next_topic_id
        for number, (topic_id, part) in enumerate(image.parts):
            try:
                self._restore_part(topic_id, part)
            except ValueError as error:
                owner = "what is no topic" if topic_id >= RESERVED_ID_MIN else f"topic {topic_id}"
                raise StartRefused(f"the snapshot's part of {owner}: {error}") from None
            self._restored = number / len(image.parts)
            await self._give_way()
        self._restored = 1.0
        return image.start_lsn

    def _restore_part(self, topic_id: int, part: bytes) -> None:
        if topic_id == EPOCHS_PART:
            restore_epochs(self._registry, part)
            return
        if topic_id >= RESERVED_ID_MIN:
            self._projection(topic_id).restore(part)
            return
        decoded = decode(part)
        topic = restore(decoded, self._open(topic_id, anchor_of(decoded)))
        assert topic.topic_id == topic_id
        self._registry.adopt(topic)

    async def _apply_journal(self, start_lsn: int) -> None:
        # A topic created since the snapshot may have sealed segments already: they are attached
        # before its first record is applied, so that sealed records are not taken twice.
        self._registry.sealed_of = self._sealed_of
        entries = self._replay.entries(start_lsn)
        while some := await self._offload.run(partial(_read_some, entries)):
            some.reverse()
            while some:
                # Not kept by the list: one large entry at a time is held twice.
                lsn, entry = some.pop()
                if isinstance(entry, RecordsAppended) and self._kept_appends.takes(entry.body):
                    decoded = await self._kept_appends.decode_kept(entry.body, entry.grammar)
                    entry = msgspec.structs.replace(entry, decoded=decoded)
                self._apply(lsn, entry)
                self.found.last_lsn = max(self.found.last_lsn, lsn)
                self.found.entries += 1
                await self._give_way()
        for topic_id, problem in self._unmet.items():
            if self._registry.get(topic_id) is not None:
                raise StartRefused(problem)
        self._registry.sealed_of = None
        # What was met is in the topics now.
        self._payloads = ReplayPayloads(())

    async def _give_way(self) -> None:
        """Let the loop do something else, if this turn has lasted long enough."""
        if monotonic_ms() >= self._turn_ends_ms:
            await asyncio.sleep(0)
            self._turn_ends_ms = monotonic_ms() + _SLICE_MS

    def _apply(self, lsn: int, entry: Entry) -> None:
        if entry.topic_id >= RESERVED_ID_MIN:
            if isinstance(entry, RouterPut):
                self._note_ids(entry.source_id, entry.dest_id)
            applied = self._projection(entry.topic_id).apply(lsn, entry)
        else:
            if isinstance(entry, RecordsAppended):
                met = self._met(lsn, entry)
                if met is None:
                    return
                entry = met
            if entry.topic_id in self._unmet and not isinstance(entry, TopicDropped):
                return
            if isinstance(entry, RecordsDeleted):
                self._note_delete(lsn, entry)
            elif isinstance(entry, TopicDropped) and entry.topic_id == NO_TOPIC:
                self._is_mended = True
            applied = self._registry.apply(lsn, entry)
        for observer in self._observers:
            observer(lsn, entry, applied)

    def _met(self, lsn: int, entry: RecordsAppended) -> RecordsAppended | None:
        """An append with all that applying it takes; its mark is noted.

        None for a page without payloads whose records lie before the snapshot's start: replay
        begins at the oldest entry that was not applied when the capture began, and that may lie
        between the two. The page was applied then, so the snapshot has its copies, unless their
        topic was dropped before its part was captured: then replay meets that.
        """
        if entry.source is not None:
            self._note_mark(entry.source)
        try:
            return self._payloads.meet(entry)
        except StorageError as error:
            if self._image is None or lsn > self._image.last_lsn:
                raise StartRefused(str(error)) from None
            topic = self._registry.get(entry.topic_id)
            if topic is not None and lsn > topic.applied_lsn:
                self._unmet.setdefault(entry.topic_id, str(error))
            return None

    def _note_mark(self, source: Source) -> None:
        self.marks.append(source)
        self._note_ids(source.topic_id)

    def _note_ids(self, *topic_ids: int) -> None:
        """An entry of another shard may be synced where a topic's creation was not.

        What it names must never be another topic: the ids stay used.
        """
        next_id = max(topic_ids) + 1
        self._registry.next_topic_id = max(self._registry.next_topic_id, next_id)

    def _projection(self, reserved_id: int) -> Projection:
        found = self._projections.get(reserved_id)
        if found is None:
            raise StartRefused(f"id {reserved_id} is not known; was it written by a newer version?")
        return found

    # -- files -----------------------------------------------------------------------------

    def _sealed_of(self, topic_id: int) -> Sequence[SealedIndex]:
        return self._open(topic_id, None)

    def _open(self, topic_id: int, anchor: Anchor | None) -> Sequence[SealedIndex]:
        if topic_id not in self._on_disk:
            return []
        self._files[topic_id], indexes = self._segments.open_topic(topic_id, anchor)
        return indexes

    def _note_delete(self, lsn: int, entry: RecordsDeleted) -> None:
        """A delete that is applied now explains why a segment has more dead rows than anchored."""
        files, topic = self._files.get(entry.topic_id), self._registry.get(entry.topic_id)
        if files is None or not files.suspects or topic is None or lsn <= topic.applied_lsn:
            return
        note_delete(files, entry.firsts, entry.lasts)

    def _judge(self) -> None:
        """Compare what was found with what must be there. Raises `StartRefused`."""
        topics = (
            Expected(topic.topic_id, topic.name, topic.log.head_seq, topic.files.anchor)
            for topic in self._registry
        )
        verdict = judge(
            topics,
            self._files,
            self._on_disk,
            self._registry.next_topic_id,
            self._segments.manifest_path,
        )
        if verdict.objections:
            raise _refusal(verdict.objections)
        self._dropped = verdict.dropped
        for topic in self._registry:
            found = self._files.get(topic.topic_id)
            if found is not None:
                self._adopt_files(topic, found)
            topic.files.anchor = None
            topic.log.replayed_seq = None

    def _adopt_files(self, topic: Topic, found: FoundTopic) -> None:
        """Take over what was found; segments whose flags are not to be trusted are damaged."""
        files = topic.files
        files.generation, files.first_free_id = found.generation, found.first_free_id
        anchored = files.anchor.flags if files.anchor else {}
        for run in topic.log.sealed():
            segment_id = run.segment_id
            digest, suspect = found.flags.get(segment_id), found.suspects.get(segment_id)
            if suspect is not None and self._is_mended:
                suspect.is_touched = True
            if digest is not None and not (suspect and suspect.has_lost_deletes):
                # Damaged flags are no anchor: the right file, put back, must heal the segment.
                if suspect is None or not suspect.has_damaged_flags:
                    files.digests[segment_id] = digest
                continue
            files.untrusted |= {segment_id}
            if segment_id in anchored:
                files.digests[segment_id] = anchored[segment_id]
            count = topic.note_damage(segment_id, 0, run.count - 1)
            log.error(
                "topic %s: %s segment %d (seqs %d to %d) %s, %d records are told as damaged",
                topic.name,
                found.path,
                segment_id,
                run.first_seq,
                run.last_seq,
                "has lost its delete flags"
                if digest is None
                else "has other delete flags than "
                "those that were synced: is its file an older copy?",
                count,
            )
        self._registry.recount(topic)

    async def _settle(self) -> None:
        """Make durable what recovery relies on, in every topic that was opened and is there."""
        topics = [topic for topic in self._registry if topic.topic_id in self._files]
        for first in range(0, len(topics), _SETTLED_AT_ONCE):
            some = [
                (topic.topic_id, topic.files.untrusted)
                for topic in topics[first : first + _SETTLED_AT_ONCE]
            ]
            await self._offload.run(partial(self._settle_some, some))
        for topic in topics:
            topic.files.generation = self._segments.generation_of(topic.topic_id)
        self._files.clear()

    def _settle_some(self, topics: Sequence[tuple[int, frozenset[int]]]) -> None:
        for topic_id, untrusted in topics:
            self._segments.settle(topic_id, untrusted)

    async def _make_flips(self) -> None:
        for topic in self._registry:
            flips = topic.files.due_flips()
            if flips:
                digests = await self._offload.run(
                    partial(self._segments.flip, topic.topic_id, flips)
                )
                topic.flips_done(flips, digests)
                self.found.flips += sum(map(len, flips.values()))

    async def _remove_dropped(self) -> None:
        """A folder goes only if its topic is known to have been dropped, never by ignorance."""
        for topic_id in self._dropped:
            await self._offload.run(partial(self._segments.drop_topic, topic_id))
            self.found.folders_removed += 1

    def _finish_topics(self, stop: Stop) -> None:
        """Skip the seqs that may have been handed out and lost (ARCHITECTURE, Heads)."""
        for topic in self._registry:
            same_boot = stop.same_boot and not self._replay.may_have_lost(topic.topic_id)
            if finish_topic(topic, clean_stop=stop.was_clean, same_boot=same_boot):
                self.found.heads_moved += 1
                self._registry.recount(topic)


def _read_some(entries: Iterator[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
    """*Blocking.* The next entries; none at the end."""
    some: list[tuple[int, Entry]] = []
    size = 0
    for lsn, entry in entries:
        some.append((lsn, entry))
        if isinstance(entry, RecordsAppended):
            size += len(entry.body)
        if len(some) == _READ_AT_ONCE or size >= _READ_BYTES:
            break
    return some


def _refusal(objections: Sequence[Objection]) -> StartRefused:
    """One line that names the first file, and says how many there are."""
    for path, reason in objections:
        log.error("%s: %s", path, reason)
    path, reason = objections[0]
    others = len(objections) - 1
    return StartRefused(f"{reason} (and {others} more)" if others else reason, path)


def finish_topic(topic: Topic, *, clean_stop: bool, same_boot: bool) -> bool:
    """After replay: skip the seqs that may have been handed out and lost. Whether any were.

    After an unclean stop an ephemeral topic's head is its ceiling and all its records are gone;
    that of class memory or disk is only if the machine went down, for after a mere kill nothing is
    missing; class fsync never loses a seq, and behind the end of a closed stream there was none.
    """
    log = topic.log
    is_closed = topic.stream is not None and topic.stream.facts.is_closed
    before = log.head_seq, log.live_count
    if topic.is_ephemeral:
        if not clean_stop:
            log.jump_head(topic.ceiling_seq, LossReason.RESTART)
        if log.live_count:
            log.lose_all(LossReason.RESTART)
        # Who appended what goes with it.
        topic.keys, topic.producers = KeyMemory(), Producers()
    elif not (clean_stop or same_boot or is_closed or topic.config.durability is Durability.FSYNC):
        log.jump_head(topic.ceiling_seq, LossReason.DAMAGED)
    if topic.stream is not None:
        topic.stream.allow_for_uses()
    moved = (log.head_seq, log.live_count) != before
    topic.revision += moved
    return moved
