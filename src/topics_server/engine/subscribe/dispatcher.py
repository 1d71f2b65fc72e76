"""Wakes readers of many topics and reads their next batch.

One bell per followed topic, not one per reader. What rings within a loop turn is collected; in a
later turn, when whoever appended has its answer, every reader concerned is pumped once, a few
milliseconds at a time. Readers that stand at the same place share one `EventBatch`. Sealed payloads
are fetched off the loop, once for all who wait for them. Loop thread only. Used by
`api/watch/broadcast`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import msgspec

from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.ports import Clock
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.durable_heads import SyncedHeads
from topics_server.engine.subscribe.subscription import (
    BroadcastGroup,
    EventBatch,
    Member,
    ReaderPosition,
    Subscription,
    SubscriptionOptions,
    deleted,
    plan,
    settle,
)
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Applied, Topic
from topics_server.runtime.metrics import log
from topics_server.values.entries import Entry, RecordsAppended, TopicPut
from topics_server.values.errors import StorageError, TopicsError
from topics_server.values.limits import SEQ_MAX

# How long readers are pumped before others have a turn of the loop.
_SLICE_MS: Final = 2.0
_PUMPED_AT_ONCE: Final = 8
# Small: what the first are sent is read by their clients while the others are still gone over.
_TOLD_AT_ONCE: Final = 16
# A cohort is told in one go, in a fraction of a slice: so many members, so many bytes to all.
_COHORT_MAX: Final = 64
_COHORT_BYTES_MAX: Final = 1024 * 1024
# Distinct options of which one object is kept.
_OPTIONS_MAX: Final = 1024
# Of a place that nobody has asked for.
_UNKNOWN: Final = EventBatch([], [], 0, more=False)
# Batches kept while readers at the same places may still come.
_SHARED_MAX: Final = 512


class TopicView(msgspec.Struct, frozen=True):
    """A topic as who subscribes is told of it."""

    topic_id: int
    epoch: int
    head_seq: int
    earliest_seq: int


# What is to be written, and by what: done behind the work that decided on it.
Writes = list[tuple[Callable[[bytes], object], bytes]]


class TopicReader(Protocol):
    """One stream, as the feeds see it."""

    def ring(self, track: Subscription) -> None:
        """The topic of a track moved, or what was fetched for it is here."""
        ...

    def pump(self) -> None:
        """Take what is ready."""
        ...

    def give(self, track: Subscription, batch: EventBatch, now: float, writes: Writes) -> bool:
        """Take a batch at once, if nothing else is to be taken before it; whether it was taken.

        `now`: of the monotonic clock, ms. What is to be sent joins `writes`.
        """
        ...

    def fail(self, track: Subscription, error: TopicsError | StorageError) -> None:
        """What the track stands at cannot be read."""
        ...


def _write(writes: Writes) -> None:
    """Do what was decided, all of it: one that fails keeps nobody else from theirs."""
    left = iter(writes)
    try:
        for writer, wire in left:
            writer(wire)
    finally:
        for writer, wire in left:
            writer(wire)
        writes.clear()


def _write_alike(writers: Iterable[Callable[[bytes], object]], wire: bytes) -> None:
    """Write the same to all: one that fails keeps nobody else from theirs."""
    left = iter(writers)
    try:
        for writer in left:
            writer(wire)
    finally:
        for writer in left:
            writer(wire)


class _Feed:
    """The followers of one topic; its bell. `apart`: those in no cohort, unless they rest."""

    __slots__ = ("apart", "cohorts", "feeds", "is_rung", "members", "topic_id")

    def __init__(self, feeds: SubscriptionDispatcher, topic_id: int) -> None:
        self.feeds = feeds
        self.topic_id = topic_id
        self.members: dict[Subscription, TopicReader] = {}
        self.apart: dict[Subscription, TopicReader] = {}
        self.cohorts: list[BroadcastGroup] = []
        self.is_rung = False

    def ring(self) -> None:
        if not self.is_rung:
            self.is_rung = True
            self.feeds.rung(self)


class SubscriptionDispatcher:
    """All followed topics of one server."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        hub: Notifier,
        fetcher: Fetcher,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._hub = hub
        self._fetcher = fetcher
        self._clock = clock
        self._feeds: dict[int, _Feed] = {}
        self._rung: list[_Feed] = []
        self._waiting: dict[TopicReader, None] = {}
        self._pumped: deque[TopicReader] = deque()
        self._passes: deque[Iterator[int]] = deque()
        self._is_scheduled = False
        self._options: dict[SubscriptionOptions, SubscriptionOptions] = {}
        # Readers of topics that are not there yet, by name.
        self._awaited: dict[str, dict[Cursor, Callable[[], None]]] = {}
        self._shared: dict[tuple[ReaderPosition, int, int], EventBatch] = {}
        self._fetching: dict[
            tuple[ReaderPosition, int], list[tuple[Subscription, TopicReader]]
        ] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._synced = SyncedHeads(commits.synced_lsn)
        self._loop = asyncio.get_running_loop()

    # --- who follows ------------------------------------------------------------------------

    def resolve(self, name: str) -> TopicView | None:
        """The topic of a name as it is now."""
        topic = self._registry.find(name)
        if topic is None:
            return None
        earliest = topic.earliest_seq(self._clock.now_ms())
        return TopicView(topic.topic_id, topic.epoch, topic.log.head_seq, earliest)

    def lag_of(self, cursor: Cursor) -> int:
        """Seqs of its topic behind a cursor; 0 where that topic is gone."""
        topic = self._registry.get(cursor.topic_id)
        return 0 if topic is None else max(0, topic.log.head_seq - cursor.seq)

    def follow(
        self, reader: TopicReader, cursor: Cursor, options: SubscriptionOptions
    ) -> Subscription | None:
        """Tell `reader` of a topic from its cursor on; `None` if there is no such topic.

        It is rung at once, if only to be told that it is caught up.
        """
        topic = self._registry.find(cursor.name)
        if topic is None:
            return None
        if cursor.is_waiting:
            cursor.arrive(topic.topic_id, topic.epoch)
        if len(self._options) >= _OPTIONS_MAX:
            self._options.clear()
        # The same object for equal options: places are compared often.
        track = Subscription(cursor, topic, self._options.setdefault(options, options))
        feed = self._feeds.get(topic.topic_id)
        if feed is None:
            feed = self._feeds[topic.topic_id] = _Feed(self, topic.topic_id)
            self._hub.add(topic.topic_id, feed.ring)
        feed.members[track] = feed.apart[track] = reader
        if options.strong:
            self._follow_synced(topic)
        self._wake(reader, track)
        return track

    def wait(self, cursor: Cursor, arrived: Callable[[], None]) -> None:
        """Have a reader told, in a later turn, that the topic of a waiting cursor is there."""
        if not self._awaited:
            self._commits.observers.append(self._on_created)
        self._awaited.setdefault(cursor.name, {})[cursor] = arrived

    def stop_waiting(self, cursor: Cursor) -> None:
        """The reader is gone, or its topic is there."""
        waiting = self._awaited.get(cursor.name)
        if waiting is None or waiting.pop(cursor, None) is None:
            return
        if not waiting:
            del self._awaited[cursor.name]
        if not self._awaited:
            self._commits.observers.remove(self._on_created)

    def _on_created(self, lsn: int, entry: Entry, applied: Applied) -> None:
        created = entry.creation if isinstance(entry, RecordsAppended) else entry
        if isinstance(created, TopicPut) and created.name in self._awaited:
            self._passes.append(self._arrive(created.name))
            self._schedule()

    def _arrive(self, name: str) -> Iterator[int]:
        """Tell who waited for a topic that it is there; yields now and then."""
        waiting = list(self._awaited.get(name, {}).items())
        for start in range(0, len(waiting), _TOLD_AT_ONCE):
            for cursor, arrived in waiting[start : start + _TOLD_AT_ONCE]:
                # Else it went, or came to wait anew, while others were told.
                if self._awaited.get(name, {}).get(cursor) is arrived:
                    self.stop_waiting(cursor)
                    arrived()
            yield start

    def unfollow(self, track: Subscription) -> None:
        """Nothing more is told of it."""
        topic_id = track.topic.topic_id
        feed = self._feeds[topic_id]
        self.leave(track)
        del feed.members[track]
        feed.apart.pop(track, None)
        track.is_live = False
        if not feed.members:
            del self._feeds[topic_id]
            self._hub.remove(topic_id, feed.ring)
        if track.options.strong:
            self._unfollow_synced(topic_id)

    def join(self, track: Subscription, kind: object, member: Member) -> None:
        """Let a reader be told with those who are alike, until it says `leave`.

        It follows this one topic, and its writer needs no asking: nothing stands before it.
        """
        if track.options.strong:
            return  # where that ends is no matter of bells alone
        feed = self._feeds[track.topic.topic_id]
        for cohort in reversed(feed.cohorts):
            if len(cohort.members) < _COHORT_MAX and cohort.takes(track, kind):
                break
        else:
            cohort = BroadcastGroup(track.cursor.seq, track.options, kind)
            feed.cohorts.append(cohort)
        cohort.add(track, member)
        del feed.apart[track]

    def leave(self, track: Subscription) -> None:
        """The reader goes its own way, if it does not yet."""
        cohort = track.cursor.spot
        if isinstance(cohort, BroadcastGroup):
            feed = self._feeds[track.topic.topic_id]
            cohort.remove(track)
            feed.apart[track] = feed.members[track]
            if not cohort.members:
                feed.cohorts.remove(cohort)

    def rest(self, track: Subscription) -> None:
        """The reader can take nothing: no bell reaches it until it is back. In no cohort."""
        self._feeds[track.topic.topic_id].apart.pop(track, None)

    def back(self, track: Subscription) -> None:
        """The reader can take something again: it is rung if there may be anything."""
        topic = track.topic
        feed = self._feeds[topic.topic_id]
        reader = feed.apart[track] = feed.members[track]
        is_at_head = track.is_live and track.cursor.seq == topic.log.head_seq
        if not is_at_head or self._registry.get(topic.topic_id) is not topic:
            reader.ring(track)

    def forget(self, reader: TopicReader) -> None:
        """The reader is gone; its tracks were unfollowed."""
        self._waiting.pop(reader, None)

    def _follow_synced(self, topic: Topic) -> None:
        if not len(self._synced):
            self._commits.observers.append(self._on_applied)
            self._commits.on_synced.append(self._on_synced)
        self._synced.follow(topic)

    def _unfollow_synced(self, topic_id: int) -> None:
        self._synced.unfollow(topic_id)
        if not len(self._synced):
            self._commits.observers.remove(self._on_applied)
            self._commits.on_synced.remove(self._on_synced)

    def _on_applied(self, lsn: int, entry: Entry, applied: Applied) -> None:
        self._synced.note(entry.topic_id, lsn)

    def _on_synced(self) -> None:
        for topic_id in self._synced.advance():
            self._hub.ring(topic_id)

    # --- turns ------------------------------------------------------------------------------

    def rung(self, feed: _Feed) -> None:
        """A topic moved: its readers are pumped in a turn to come."""
        self._rung.append(feed)
        self._schedule()

    def again(self, reader: TopicReader) -> None:
        """The reader has more to take, or can take more."""
        self._waiting[reader] = None
        self._schedule()

    def _wake(self, reader: TopicReader, track: Subscription) -> None:
        reader.ring(track)
        self.again(reader)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            # Who appended was resolved before the bell and is answered first in the same turn.
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        # First of all: should anything below fail, the next bell begins a turn again.
        self._is_scheduled = False
        until_ms = self._clock.monotonic_ms() + _SLICE_MS
        rung, self._rung = self._rung, []
        for feed in rung:
            feed.is_rung = False
            self._passes.append(self._tell(feed))
        while self._passes and self._clock.monotonic_ms() < until_ms:
            # A few members each; a pass that is done is over.
            if next(self._passes[0], None) is None:
                self._passes.popleft()
        self._pump_waiting(until_ms)
        if self._waiting or self._rung or self._passes:
            self._schedule()
        elif not self._is_scheduled:
            self._shared.clear()

    def _tell(self, feed: _Feed) -> Iterator[int]:
        """Go over the followers of a topic that moved; yields now and then.

        Those who are live and stand together, which is nearly all, are handed the same batch on the
        spot: cohort by cohort, as they are, or, who is in none, one by one. The others are pumped,
        with all that they follow. A few are gone over at a time, and written to behind that: code
        that takes turns with the kernel's finds no cache warm.
        """
        for cohort in tuple(feed.cohorts):
            if cohort.members:  # else all went while others were told
                self._tell_cohort(cohort)
                yield 0
        # Now: among them is who left a cohort that was not told yet.
        members = list(feed.apart.items())
        batches: dict[tuple[int, int], EventBatch | None] = {}
        batch: EventBatch | None = None
        seq, options = -1, None
        now_ms = self._clock.monotonic_ms()
        writes: Writes = []
        for start in range(0, len(members), _TOLD_AT_ONCE):
            try:
                for track, reader in members[start : start + _TOLD_AT_ONCE]:
                    if track.is_live and not track.is_fresh:
                        # Equal options are one object, and most stand where the last one stands.
                        if track.cursor.seq != seq or track.options is not options:
                            seq, options = track.cursor.seq, track.options
                            key = (seq, id(options))
                            batch = batches.get(key, _UNKNOWN)
                            if batch is _UNKNOWN:
                                batch = batches[key] = self._resident(track.topic, track.place)
                        if batch is not None and reader.give(track, batch, now_ms, writes):
                            continue
                    if track in feed.members:  # else it went while others were told
                        reader.ring(track)
                        self._waiting[reader] = None
            finally:
                _write(writes)
            yield start
            now_ms = self._clock.monotonic_ms()

    def _tell_cohort(self, cohort: BroadcastGroup) -> None:
        """Tell all of a cohort what there is; if that cannot be done in one go, it is no more."""
        place = cohort.place
        track, member = next(iter(cohort.members.items()))
        topic = track.topic
        batch = wire = None
        if self._registry.get(topic.topic_id) is topic:
            batch = self._at(topic, place, SEQ_MAX)
        if batch is not None and batch.events:
            wire = member.wire(track, batch)
        size = 0 if wire is None else len(wire) * len(cohort.members)
        if batch is None or batch.more or size > _COHORT_BYTES_MAX:
            for track in tuple(cohort.members):
                self.leave(track)
            return
        # Now: who turns out to be full, or gone, leaves with what it was handed.
        cohort.seq = batch.end_seq
        if wire is not None:
            cohort.told_ms = self._clock.monotonic_ms()
            _write_alike(cohort.writers, wire)

    def _resident(self, topic: Topic, place: ReaderPosition) -> EventBatch | None:
        """What readers at a place are told, if there is anything, in one go and from memory."""
        if self._registry.get(topic.topic_id) is not topic:
            return None
        upto_seq = self._upto_seq(topic, place.options)
        batch = self._at(topic, place, upto_seq)
        return batch if batch is not None and batch.events and not batch.more else None

    def _pump_waiting(self, until_ms: float) -> None:
        """Pump who waits, in order, until the slice is over; who has more waits behind the rest."""
        pumped = self._pumped
        while True:
            if not pumped:
                pumped.extend(self._waiting)
                self._waiting.clear()
                if not pumped:
                    return
            for _ in range(min(len(pumped), _PUMPED_AT_ONCE)):
                pumped.popleft().pump()
            if self._clock.monotonic_ms() > until_ms:
                self._waiting = dict.fromkeys(pumped) | self._waiting
                pumped.clear()
                return

    # --- reading ----------------------------------------------------------------------------

    def read(
        self, reader: TopicReader, track: Subscription, *, may_fetch: bool
    ) -> EventBatch | None:
        """What the track is told next; `None` if that has to be read from disk.

        Then it `is_fetching` and `reader` is rung when it is here, or, unless it `may_fetch`,
        nothing was begun.
        """
        topic = track.topic
        if self._registry.get(topic.topic_id) is not topic:
            return deleted(track.cursor.name, topic.log.head_seq)
        place = track.place
        if track.fetched is not None:
            fetched, track.fetched = track.fetched, None
            if fetched[0] == place:
                return fetched[1]
        upto_seq = self._upto_seq(topic, track.options)
        batch = self._at(topic, place, upto_seq)
        if batch is None and may_fetch:
            self._begin_fetch(reader, track, place, upto_seq)
        return batch

    def _upto_seq(self, topic: Topic, options: SubscriptionOptions) -> int:
        return self._synced.seq(topic.topic_id) if options.strong else SEQ_MAX

    def _at(self, topic: Topic, place: ReaderPosition, upto_seq: int) -> EventBatch | None:
        """The batch of a place, the same for all; `None` if a part of it is not in memory."""
        key = (place, topic.revision, upto_seq)
        batch = self._shared.get(key)
        if batch is not None:
            return batch
        topic.last_read_ts = now_ms = self._clock.now_ms()
        page = self._fetcher.resident(topic, plan(topic, place, upto_seq, now_ms))
        if page is None:
            return None
        if len(self._shared) >= _SHARED_MAX:
            self._shared.clear()
        batch = self._shared[key] = settle(topic.name, place, page, upto_seq)
        return batch

    def _begin_fetch(
        self, reader: TopicReader, track: Subscription, place: ReaderPosition, upto_seq: int
    ) -> None:
        track.is_fetching = True
        key = (place, upto_seq)
        waiting = self._fetching.get(key)
        if waiting is not None:
            waiting.append((track, reader))
            return
        self._fetching[key] = [(track, reader)]
        task = self._loop.create_task(self._fetch(track.topic, place, upto_seq))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, topic: Topic, place: ReaderPosition, upto_seq: int) -> None:
        """Read sealed payloads for everybody who stands at the place."""
        batch: EventBatch | None = None
        error: StorageError | None = None
        try:
            page_plan = plan(topic, place, upto_seq, self._clock.now_ms())
            page = await self._fetcher.complete(topic, page_plan)
            if page is not None:
                batch = settle(topic.name, place, page, upto_seq)
        except StorageError as failed:
            log.error("topic %s cannot be read for its followers: %s", topic.name, failed)
            error = failed
        for track, reader in self._fetching.pop((place, upto_seq)):
            track.is_fetching = False
            feed = self._feeds.get(topic.topic_id)
            if feed is None or track not in feed.members:
                continue  # it went away meanwhile
            if error is not None:
                reader.fail(track, error)
                continue
            if batch is not None:
                track.fetched = (place, batch)
            # Without a batch something moved while it was read: it is planned again.
            self._wake(reader, track)
