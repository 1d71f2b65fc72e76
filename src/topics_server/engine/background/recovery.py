"""The boot sequence: restore, replay, check the files, make durable.

The newest valid snapshot is loaded and its parts restored on their sealed segments. Every later
entry is applied in lsn order, through the same `apply` as live, and shown to the live observers.
Then `file_inventory` checks the files: if one is missing or older, the start is refused with its
name, before anything is changed. After that heads jump where an unclean stop requires it, found
data is made durable, missing flips are made, and superseded files are removed. Source marks are
collected for `transfers`. The length of the journal after the checkpoint bounds the time. Probes
are answered meanwhile and show the progress: a thread reads the journal, the loop applies entries
in slices, and the helper process decodes large appends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from topics_server.engine.background.capture import restore
from topics_server.engine.background.epochs import restore_epochs
from topics_server.engine.commit.projections import NO_PROJECTIONS, Projection, Projections
from topics_server.engine.ports import KeptAppends, Replay, SealedIndex, SegmentsPort
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.dedupe import NO_KEYS
from topics_server.engine.topic.producers import NO_PRODUCERS
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
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
    TopicPut,
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
from topics_server.values.storage_types import (
    EPOCHS_PART,
    TOPIC_PARTS,
    EncodedPart,
    KnownPositions,
    Offload,
    SnapshotImage,
)

# How long the loop applies entries or restores parts in one turn, ms.
_SLICE_MS: Final = 5.0
# One call off the loop reads at most this many entries, and stops after this many bytes of appends.
# A call costs as much as ten small entries.
_READ_AT_ONCE: Final = 1024
_READ_BYTES: Final = MIB
# One call off the loop restores at most this many topics, and stops after this many bytes of parts.
_RESTORED_AT_ONCE: Final = 256
# One call off the loop finishes the files of this many topics.
_FINISHED_AT_ONCE: Final = 16


class Stop(msgspec.Struct, frozen=True):
    """How the last run ended: with the clean-stop mark or not, and in this boot or not."""

    was_clean: bool
    same_boot: bool


class Recovered(msgspec.Struct):
    """Recovery's counts, for the report at start."""

    last_lsn: int = 0
    topics: int = 0
    entries: int = 0
    heads_moved: int = 0
    flips: int = 0
    folders_removed: int = 0
    had_snapshot: bool = False


class Recovery:
    """One recovery. `progress` is 0.0 to 1.0 while `run` is under way."""

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
        known: KnownPositions | None = None,
    ) -> None:
        """`sources`: topics to whose records pages without payloads may refer; may grow in replay.

        `known`: the used positions, if a restored store starts for the first time.
        """
        self._known = known
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
        # Topics whose part expects files, until the files are checked.
        self._anchored: set[int] = set()
        # The files found for each opened topic, until they are checked.
        self._files: dict[int, FoundTopic] = {}
        # The opened files and segments of topics whose creation is about to be applied.
        self._opened: dict[int, tuple[FoundTopic | None, Sequence[SealedIndex]]] = {}
        # Whether the journal was repaired: then it may lack deletes.
        self._is_mended = False
        self._dropped: Sequence[int] = ()
        self.found = Recovered()
        # Source marks found in the journal: the records that are still live there are deleted
        # before requests are served.
        self.marks: list[Source] = []
        self._payloads = ReplayPayloads(sources)
        # Topics with copies whose records were not in the replay; a later entry must drop these
        # topics.
        self._unmet: dict[int, str] = {}

    @property
    def progress(self) -> float:
        """The finished part of the snapshot and the journal, 0.0 to 1.0."""
        return min(1.0, 0.3 * self._restored + 0.7 * self._replay.progress)

    async def run(self, stop: Stop, begin: Callable[[], None]) -> Recovered:
        """Recover all topics. Raises `StartRefused`, `Corrupt`: the data cannot be served."""
        start_lsn = await self._restore()
        await self._apply_journal(start_lsn)
        self._judge()
        # From here on a stop is unclean until it is marked as clean. If the start is refused
        # before, the mark stays.
        await self._offload.run(begin)
        self._finish_topics(stop)
        await self._finish_segments()
        await self._make_flips()
        await self._remove_dropped()
        self.found.topics = len(self._registry)
        return self.found

    async def _restore(self) -> int:
        image = self._image
        self._on_disk = set(await self._offload.run(self._segments.topics_on_disk))
        if image is None:
            self._restored = 1.0
            return 1
        # The parts may be as large as all tails together: release each one when it is restored.
        parts = list(image.parts)
        image = self._image = msgspec.structs.replace(image, parts=())
        part_count = len(parts)
        self.found.had_snapshot = True
        self.found.last_lsn = image.last_lsn
        self._registry.next_topic_id = image.next_topic_id
        for some in _some_parts(parts):
            topic_id, part = some[0]
            if topic_id != EPOCHS_PART and topic_id < RESERVED_ID_MIN:
                await self._restore_topics(some)
            else:
                self._restore_other(topic_id, part)
            self._restored = 1.0 - len(parts) / part_count
            if monotonic_ms() >= self._turn_ends_ms:
                await self._give_way()
        self._restored = 1.0
        return image.start_lsn

    def _restore_other(self, part_id: int, encoded: EncodedPart) -> None:
        part = bytes(encoded)
        try:
            if part_id == EPOCHS_PART:
                restore_epochs(self._registry, part)
            else:
                self._projection(part_id).restore(part)
        except ValueError as error:
            raise StartRefused(
                f"a part of the snapshot that belongs to no topic: {error}"
            ) from None

    async def _restore_topics(self, parts: Sequence[tuple[int, EncodedPart]]) -> None:
        """Restore topics off the loop: one may have 60 MB of records, or thousands of segments.

        The caller gives way: to adopt all topics of a call takes less than a millisecond.
        """
        for topic, files in await self._offload.run(partial(self._restored_topics, parts)):
            topic_id = topic.topic_id
            if files is not None:
                self._files[topic_id] = files
            if topic.files.anchor is not None:
                self._anchored.add(topic_id)
            self._registry.adopt(topic)

    def _restored_topics(
        self, parts: Sequence[tuple[int, EncodedPart]]
    ) -> list[tuple[Topic, FoundTopic | None]]:
        """*Blocking.* The topics of some parts, each with its files. Changes nothing else."""
        topics: list[tuple[Topic, FoundTopic | None]] = []
        for topic_id, part in parts:
            try:
                decoded = TOPIC_PARTS.decode(part)
                anchor = anchor_of(decoded) if topic_id in self._on_disk else None
                files, indexes = self._open(topic_id, anchor)
                topic = restore(decoded, indexes)
            except ValueError as error:
                raise StartRefused(f"the snapshot's part of topic {topic_id}: {error}") from None
            assert topic.topic_id == topic_id
            topics.append((topic, files))
        return topics

    async def _apply_journal(self, start_lsn: int) -> None:
        # A topic created since the snapshot may have sealed segments already: attach them before
        # its first record is applied, so that sealed records are not added twice.
        self._registry.sealed_of = self._sealed_of
        entries = self._replay.entries(start_lsn)
        while some := await self._offload.run(partial(_read_some, entries)):
            some.reverse()
            while some:
                # Pop each entry from the list, so that only one large entry at a time is in memory
                # twice.
                lsn, entry = some.pop()
                if isinstance(entry, RecordsAppended) and self._kept_appends.takes(entry.body):
                    decoded = await self._kept_appends.decode_kept(
                        entry.body, entry.grammar, entry.trace
                    )
                    entry = msgspec.structs.replace(entry, decoded=decoded)
                if entry.topic_id in self._on_disk:
                    await self._open_created(entry)
                self._apply(lsn, entry)
                if lsn > self.found.last_lsn:
                    self.found.last_lsn = lsn
                self.found.entries += 1
                if monotonic_ms() >= self._turn_ends_ms:
                    await self._give_way()
        for topic_id, problem in self._unmet.items():
            if self._registry.get(topic_id) is not None:
                raise StartRefused(problem)
        self._registry.sealed_of = None
        # Free these payloads: the topics have the records now.
        self._payloads = ReplayPayloads(())

    async def _give_way(self) -> None:
        """Yield to the loop, and begin a turn."""
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
            applied = Applied() if self._is_stale(lsn, entry) else self._registry.apply(lsn, entry)
        for observer in self._observers:
            observer(lsn, entry, applied)

    def _is_stale(self, lsn: int, entry: Entry) -> bool:
        """Whether the entry creates a topic that the newer snapshot does not have.

        Only a shard that was read-only is replayed from before the snapshot's start. Topics that it
        had acknowledged are in the snapshot or were dropped. A creation that it refused must not
        come back after its name was used again, dropped and forgotten.
        """
        creation = entry.creation if isinstance(entry, RecordsAppended) else entry
        return (
            self._image is not None
            and lsn < self._image.start_lsn
            and isinstance(creation, TopicPut)
            and creation.created
            and self._registry.get(entry.topic_id) is None
        )

    def _met(self, lsn: int, entry: RecordsAppended) -> RecordsAppended | None:
        """Complete an append, so that it can be applied, and collect its source mark.

        None for a page without payloads whose records were journaled before the start of replay.
        Replay begins at the oldest entry that was not applied when the capture began; this may lie
        between the records and the page. The page was applied then, so the snapshot has its copies,
        unless their topic was dropped before its part was captured: then replay finds the drop.
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
        """Mark topic ids as used, so that no other topic gets them.

        An entry on another shard may be synced although the creation of its topic was not.
        """
        next_id = max(topic_ids) + 1
        self._registry.next_topic_id = max(self._registry.next_topic_id, next_id)

    def _projection(self, reserved_id: int) -> Projection:
        found = self._projections.get(reserved_id)
        if found is None:
            raise StartRefused(f"id {reserved_id} is not known; was it written by a newer version?")
        return found

    # -- files -----------------------------------------------------------------------------

    async def _open_created(self, entry: Entry) -> None:
        """Open the segments of a topic that the entry is about to create, off the loop."""
        topic_id = entry.topic_id
        if topic_id not in self._opened and self._registry.creation_by(entry) is not None:
            self._opened[topic_id] = await self._offload.run(partial(self._open, topic_id, None))

    def _sealed_of(self, topic_id: int) -> Sequence[SealedIndex]:
        files, indexes = self._opened.pop(topic_id, (None, ()))
        if files is not None:
            self._files[topic_id] = files
        return indexes

    def _open(
        self, topic_id: int, anchor: Anchor | None
    ) -> tuple[FoundTopic | None, Sequence[SealedIndex]]:
        """*Blocking.* The files of a topic and its segments, if it has any on disk."""
        if topic_id not in self._on_disk:
            return None, ()
        return self._segments.open_topic(topic_id, anchor)

    def _note_delete(self, lsn: int, entry: RecordsDeleted) -> None:
        """An applied delete explains why a segment has more dead rows than its anchor."""
        files, topic = self._files.get(entry.topic_id), self._registry.get(entry.topic_id)
        if files is None or not files.suspects or topic is None or lsn <= topic.applied_lsn:
            return
        note_delete(files, entry.firsts, entry.lasts)

    def _judge(self) -> None:
        """Compare the found files with the expected files. Raises `StartRefused`.

        Looks only at topics that have files or should have some. A store may have 100,000 others,
        and a look at each is a look at memory that no cache has.
        """
        concerned = sorted(self._on_disk | self._anchored)
        topics = [topic for topic in map(self._registry.get, concerned) if topic is not None]
        verdict = judge(
            (
                Expected(topic.topic_id, topic.name, topic.log.head_seq, topic.files.anchor)
                for topic in topics
            ),
            self._files,
            self._on_disk,
            self._registry.next_topic_id,
            self._segments.manifest_path,
        )
        if verdict.objections:
            raise _refusal(verdict.objections)
        self._dropped = verdict.dropped
        self._anchored.clear()
        for topic in topics:
            found = self._files.get(topic.topic_id)
            if found is not None:
                self._adopt_files(topic, found)
            topic.files.anchor = None
            topic.log.replayed_seq = None

    def _adopt_files(self, topic: Topic, found: FoundTopic) -> None:
        """Adopt the found files; segments with untrusted flags count as damaged."""
        files = topic.files
        files.generation, files.first_free_id = found.generation, found.first_free_id
        anchored = files.anchor.flags if files.anchor else {}
        for run in topic.log.sealed():
            segment_id = run.segment_id
            digest, suspect = found.flags.get(segment_id), found.suspects.get(segment_id)
            if suspect is not None and self._is_mended:
                suspect.is_touched = True
            if digest is not None and not (suspect and suspect.has_lost_deletes):
                # Damaged flags must not become the anchor, so that putting the undamaged file back
                # heals the segment.
                if suspect is None or not suspect.has_damaged_flags:
                    files.digests[segment_id] = digest
                continue
            files.untrusted |= {segment_id}
            if segment_id in anchored:
                files.digests[segment_id] = anchored[segment_id]
            count = topic.note_damage(segment_id, 0, run.count - 1)
            log.error(
                "topic %s: %s segment %d (seqs %d to %d) %s, %d records are reported as damaged",
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

    async def _finish_segments(self) -> None:
        """Make durable what recovery relies on, in every topic that was opened and exists."""
        topics = self._topics_with_files()
        for first in range(0, len(topics), _FINISHED_AT_ONCE):
            some = [
                (topic.topic_id, topic.files.untrusted)
                for topic in topics[first : first + _FINISHED_AT_ONCE]
            ]
            await self._offload.run(partial(self._finish_some, some))
        for topic in topics:
            topic.files.generation = self._segments.generation_of(topic.topic_id)

    def _topics_with_files(self) -> list[Topic]:
        topics = map(self._registry.get, self._files)
        return [topic for topic in topics if topic is not None]

    def _finish_some(self, topics: Sequence[tuple[int, frozenset[int]]]) -> None:
        for topic_id, untrusted in topics:
            self._segments.finish_recovery(topic_id, untrusted)

    async def _make_flips(self) -> None:
        for topic in self._topics_with_files():
            flips = topic.files.due_flips() if topic.files.pending else {}
            if flips:
                digests = await self._offload.run(
                    partial(self._segments.flip, topic.topic_id, flips)
                )
                topic.flips_done(flips, digests)
                self.found.flips += sum(map(len, flips.values()))
        self._files.clear()

    async def _remove_dropped(self) -> None:
        """Remove the folders of topics that are known to be dropped."""
        for topic_id in self._dropped:
            await self._offload.run(partial(self._segments.drop_topic, topic_id))
            self.found.folders_removed += 1

    def _finish_topics(self, stop: Stop) -> None:
        """Skip the seqs that may have been assigned and lost (ARCHITECTURE, Heads)."""
        for topic in self._registry:
            same_boot = stop.same_boot and not self._replay.may_have_lost(topic.topic_id)
            if (stop.was_clean or same_boot) and topic.stream is None and not topic.is_ephemeral:
                continue  # Nothing was lost.
            if finish_topic(topic, clean_stop=stop.was_clean, same_boot=same_boot):
                self.found.heads_moved += 1
                self._registry.recount(topic)
        if self._known is not None:
            self._skip_known(self._known)

    def _skip_known(self, known: KnownPositions) -> None:
        """Skip the seqs, ids and epochs that clients of a restored store may know already."""
        self._registry.next_topic_id = max(self._registry.next_topic_id, known.next_topic_id)
        self._registry.raise_epoch_floor(known.epoch)
        for topic in self._registry:
            if skip_seqs(topic, known.heads.get(topic.topic_id, 0)):
                self.found.heads_moved += 1
                self._registry.recount(topic)


def _some_parts(
    parts: list[tuple[int, EncodedPart]],
) -> Iterator[list[tuple[int, EncodedPart]]]:
    """The parts of a snapshot in order: a few topics at a time, other parts alone.

    Empties the list meanwhile.
    """
    some: list[tuple[int, EncodedPart]] = []
    size = 0
    parts.reverse()
    while parts:
        topic_id, part = parts.pop()
        is_topic = topic_id != EPOCHS_PART and topic_id < RESERVED_ID_MIN
        if some and not (is_topic and len(some) < _RESTORED_AT_ONCE and size < _READ_BYTES):
            yield some
            some, size = [], 0
        some.append((topic_id, part))
        size += len(part)
        if not is_topic:
            yield some
            some, size = [], 0
    if some:
        yield some


def _read_some(entries: Iterator[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
    """*Blocking.* The next entries; empty at the end."""
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
    """Describe a refused start in one line: the first file, and the number of files."""
    for path, reason in objections:
        log.error("%s: %s", path, reason)
    path, reason = objections[0]
    others = len(objections) - 1
    return StartRefused(f"{reason} (and {others} more)" if others else reason, path)


def finish_topic(topic: Topic, *, clean_stop: bool, same_boot: bool) -> bool:
    """After replay, skip seqs that may have been assigned and lost.

    Returns whether there were any.

    After an unclean stop an ephemeral topic's head is its ceiling and all its records are lost. In
    a topic of class memory or disk seqs are skipped only if the machine went down: after a mere
    kill nothing is missing. Class fsync never loses a seq, and a closed stream has no seq after its
    end.
    """
    log = topic.log
    is_closed = topic.stream is not None and topic.stream.facts.is_closed
    before = log.head_seq, log.live_count, log.holes
    if topic.is_ephemeral:
        if not clean_stop:
            log.jump_head(topic.ceiling_seq, LossReason.RESTART)
        # Make the hole even without a live record: readers get the same tombstone with and without
        # a snapshot.
        log.lose_all(LossReason.RESTART)
        # The topic's producers and keys are lost with its records.
        topic.keys, topic.producers = NO_KEYS, NO_PRODUCERS
    elif not (clean_stop or same_boot or is_closed or topic.config.durability is Durability.FSYNC):
        log.jump_head(topic.ceiling_seq, LossReason.DAMAGED)
    if topic.stream is not None:
        topic.stream.allow_for_uses()
    moved = (log.head_seq, log.live_count, log.holes) != before
    topic.revision += moved
    return moved


def skip_seqs(topic: Topic, known_seq: int) -> bool:
    """Move the head of a restored topic past every seq that clients may have seen, in any class.

    Returns whether the head moved. A closed stream accepts no records, so nothing followed its end.
    """
    is_closed = topic.stream is not None and topic.stream.facts.is_closed
    before = topic.log.head_seq
    if not is_closed:
        reason = LossReason.RESTART if topic.is_ephemeral else LossReason.DAMAGED
        topic.log.jump_head(max(known_seq, topic.ceiling_seq), reason)
        topic.ceiling_seq = max(topic.ceiling_seq, topic.log.head_seq)
        if topic.stream is not None:
            topic.stream.allow_for_uses()
    moved = topic.log.head_seq != before
    topic.revision += moved
    return moved
