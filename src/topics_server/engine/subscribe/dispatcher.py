"""Wakes readers of many topics and reads their next batch.

Each followed topic has one listener, not one per reader. The changes of a loop turn are collected.
In a later turn, after the writers got their answers, every affected reader is pumped once, a few
milliseconds at a time. Readers at the same position share one `EventBatch`. Sealed payloads are
fetched off the loop, once for all readers that wait for them. Loop thread only. Used by
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
from topics_server.engine.subscribe.creations import Creations
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.durable_heads import SyncedHeads
from topics_server.engine.subscribe.subscription import (
    BroadcastGroup,
    EventBatch,
    Member,
    ReaderPosition,
    Subscription,
    SubscriptionOptions,
    build_batch,
    deleted,
    plan,
    search_of,
)
from topics_server.engine.subscribe.tag_watchers import TagWatchers
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import log
from topics_server.values.entries import Entry
from topics_server.values.errors import StorageError, TopicsError
from topics_server.values.limits import SEQ_MAX

# How long readers are pumped in one loop turn.
_SLICE_MS: Final = 2.0
# The slice is short, so that the clients of the first readers process their data while the others
# are served.
_DELIVERED_AT_ONCE: Final = 16
# The maximum of members of a broadcast group, and of bytes to all members: a batch is sent to the
# group in one step, within a fraction of a slice.
_GROUP_MAX: Final = 64
_GROUP_BYTES_MAX: Final = 1024 * 1024
# The maximum of distinct options that are kept as shared objects.
_OPTIONS_MAX: Final = 1024
# Marks a position for which no reader has requested a batch.
_UNKNOWN: Final = EventBatch([], [], 0, more=False)
# The maximum of batches that are kept for other readers that reach the same position.
_SHARED_MAX: Final = 512


class TopicView(msgspec.Struct, frozen=True):
    """The facts of a topic for a new subscriber."""

    topic_id: int
    epoch: int
    head_seq: int
    earliest_seq: int


# Bytes and their writers; the writes happen after all decisions of a turn.
Writes = list[tuple[Callable[[bytes], object], bytes]]


class TopicReader(Protocol):
    """The dispatcher's interface to one stream."""

    def notify(self, subscription: Subscription) -> None:
        """The subscription's topic changed, or its fetched batch is ready."""
        ...

    def pump(self) -> None:
        """Take the ready batches."""
        ...

    def give(
        self, subscription: Subscription, batch: EventBatch, now: float, writes: Writes
    ) -> bool:
        """Take a batch at once if nothing comes before it; returns whether it was taken.

        `now`: the time of the monotonic clock, ms. The bytes to send are added to `writes`.
        """
        ...

    def fail(self, subscription: Subscription, error: TopicsError | StorageError) -> None:
        """Report that the subscription's position cannot be read."""
        ...


def _write(writes: Writes) -> None:
    """Make every write; a writer that fails does not stop the others."""
    left = iter(writes)
    try:
        for writer, wire in left:
            writer(wire)
    finally:
        for writer, wire in left:
            writer(wire)
        writes.clear()


def _write_alike(writers: Iterable[Callable[[bytes], object]], wire: bytes) -> None:
    """Write the same bytes to every writer; one that fails does not stop the others."""
    left = iter(writers)
    try:
        for writer in left:
            writer(wire)
    finally:
        for writer in left:
            writer(wire)


class _FollowedTopic:
    """The followers of one topic.

    `apart`: followers in no broadcast group, except resting ones. `tagged`: filtered followers at
    the head; they are in `apart` only while a record may concern them.
    """

    __slots__ = ("apart", "groups", "dispatcher", "is_changed", "members", "tagged", "topic_id")

    def __init__(self, dispatcher: SubscriptionDispatcher, topic_id: int) -> None:
        self.dispatcher = dispatcher
        self.topic_id = topic_id
        self.members: dict[Subscription, TopicReader] = {}
        self.apart: dict[Subscription, TopicReader] = {}
        self.groups: list[BroadcastGroup] = []
        self.tagged = TagWatchers()
        self.is_changed = False

    def notify(self) -> None:
        if not self.is_changed:
            self.is_changed = True
            self.dispatcher.changed(self)


class SubscriptionDispatcher:
    """All followed topics of one server."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        notifier: Notifier,
        fetcher: Fetcher,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._notifier = notifier
        self._fetcher = fetcher
        self._clock = clock
        self._followed: dict[int, _FollowedTopic] = {}
        self._changed: list[_FollowedTopic] = []
        self._waiting: dict[TopicReader, None] = {}
        self._pumped: deque[TopicReader] = deque()
        self._passes: deque[Iterator[int]] = deque()
        self._is_scheduled = False
        self._options: dict[SubscriptionOptions, SubscriptionOptions] = {}
        self._shared: dict[tuple[ReaderPosition, int, int], EventBatch] = {}
        self._fetching: dict[
            tuple[ReaderPosition, int], list[tuple[Subscription, TopicReader]]
        ] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._synced = SyncedHeads(commits.synced_lsn)
        self._loop = asyncio.get_running_loop()
        self.creations: Final = Creations(commits, self._begin_pass)

    # --- followers --------------------------------------------------------------------------

    def resolve(self, name: str) -> TopicView | None:
        """The current topic of a name."""
        topic = self._registry.find(name)
        if topic is None:
            return None
        earliest = topic.earliest_seq(self._clock.now_ms())
        return TopicView(topic.topic_id, topic.epoch, topic.log.head_seq, earliest)

    def names(self, prefix: str, count: int, keep: Callable[[str], bool]) -> list[str]:
        """The first `count` topics of a prefix for which `keep` returns true, in name order."""
        topics, _ = self._registry.page(prefix, None, count, keep)
        return [topic.name for topic in topics]

    def name_of(self, topic_id: int) -> str | None:
        """The name of a topic; None if it was dropped."""
        topic = self._registry.get(topic_id)
        return None if topic is None else topic.name

    def lag_of(self, cursor: Cursor) -> int:
        """The number of seqs after a cursor; 0 if the cursor's topic was dropped."""
        topic = self._registry.get(cursor.topic_id)
        return 0 if topic is None else max(0, topic.log.head_seq - cursor.seq)

    def follow(
        self, reader: TopicReader, cursor: Cursor, options: SubscriptionOptions
    ) -> Subscription | None:
        """Deliver a topic to `reader` from its cursor on; `None` if there is no such topic.

        The reader is notified at once, at least to report that it is caught up.
        """
        topic = self._registry.find(cursor.name)
        if topic is None:
            return None
        if cursor.is_waiting:
            cursor.arrive(topic.topic_id, topic.epoch)
        if len(self._options) >= _OPTIONS_MAX:
            self._options.clear()
        # Share one object for equal options: positions are compared often.
        subscription = Subscription(cursor, topic, self._options.setdefault(options, options))
        followed = self._followed.get(topic.topic_id)
        if followed is None:
            followed = self._followed[topic.topic_id] = _FollowedTopic(self, topic.topic_id)
            self._notifier.add(topic.topic_id, followed.notify)
        followed.members[subscription] = followed.apart[subscription] = reader
        if options.strong:
            self._follow_synced(topic)
        self._wake(reader, subscription)
        return subscription

    def unfollow(self, subscription: Subscription) -> None:
        """Stop delivering this subscription."""
        topic_id = subscription.topic.topic_id
        followed = self._followed[topic_id]
        self.leave(subscription)
        del followed.members[subscription]
        followed.apart.pop(subscription, None)
        subscription.is_live = False
        if not followed.members:
            del self._followed[topic_id]
            self._notifier.remove(topic_id, followed.notify)
        if subscription.options.strong:
            self._unfollow_synced(topic_id)

    def join(self, subscription: Subscription, kind: object, member: Member) -> None:
        """Add a reader to a broadcast group of equal readers, until it calls `leave`.

        The reader follows only this topic, and its socket accepts direct writes.
        """
        if subscription.options.strong or subscription.options.matcher is not None:
            return  # its end depends on syncs too, or a batch may hold nothing for it
        followed = self._followed[subscription.topic.topic_id]
        for group in reversed(followed.groups):
            if len(group.members) < _GROUP_MAX and group.takes(subscription, kind):
                break
        else:
            group = BroadcastGroup(subscription.cursor.seq, subscription.options, kind)
            followed.groups.append(group)
        group.add(subscription, member)
        del followed.apart[subscription]

    def leave(self, subscription: Subscription) -> None:
        """Remove a reader from its broadcast group or from the watchers of tags."""
        group = subscription.cursor.shared_cursor
        if isinstance(group, TagWatchers):
            group.remove(subscription)
            followed = self._followed[subscription.topic.topic_id]
            followed.apart[subscription] = followed.members[subscription]
        if isinstance(group, BroadcastGroup):
            followed = self._followed[subscription.topic.topic_id]
            group.remove(subscription)
            followed.apart[subscription] = followed.members[subscription]
            if not group.members:
                followed.groups.remove(group)

    def await_tags(self, subscription: Subscription) -> None:
        """Let a filtered reader that has taken all records wait until a tag may concern it."""
        options = subscription.options
        if options.matcher is None or options.strong or not subscription.is_live:
            return
        followed = self._followed.get(subscription.topic.topic_id)
        # The reader may have left, or may be resting.
        is_apart = followed is not None and subscription in followed.apart
        if followed is not None and is_apart and followed.tagged.add(subscription):
            del followed.apart[subscription]

    def rest(self, subscription: Subscription) -> None:
        """Stop notifying a reader whose socket is full, until `back`; it leaves its group."""
        self.leave(subscription)
        self._followed[subscription.topic.topic_id].apart.pop(subscription, None)

    def back(self, subscription: Subscription) -> None:
        """Notify a reader that can take data again, if there may be any."""
        topic = subscription.topic
        followed = self._followed[topic.topic_id]
        reader = followed.apart[subscription] = followed.members[subscription]
        is_at_head = subscription.is_live and subscription.cursor.seq == topic.log.head_seq
        if not is_at_head or self._registry.get(topic.topic_id) is not topic:
            reader.notify(subscription)

    def forget(self, reader: TopicReader) -> None:
        """Forget a reader that left; its subscriptions were removed before."""
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
            self._notifier.notify(topic_id)

    def _begin_pass(self, calls: Iterator[int]) -> None:
        """Make these calls in later turns, a few at a time."""
        self._passes.append(calls)
        self._schedule()

    # --- turns ------------------------------------------------------------------------------

    def changed(self, followed: _FollowedTopic) -> None:
        """Pump the readers of a changed topic in a later turn."""
        self._changed.append(followed)
        self._schedule()

    def again(self, reader: TopicReader) -> None:
        """Pump a reader again that has more to take, or can take more."""
        self._waiting[reader] = None
        self._schedule()

    def _wake(self, reader: TopicReader, subscription: Subscription) -> None:
        reader.notify(subscription)
        self.again(reader)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            # The append's ticket was resolved before this, so the writer is answered first in this
            # turn.
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        # Reset this first: if the code below fails, the next change starts a turn again.
        self._is_scheduled = False
        until_ms = self._clock.monotonic_ms() + _SLICE_MS
        changed, self._changed = self._changed, []
        for followed in changed:
            followed.is_changed = False
            self._passes.append(self._deliver(followed))
        while self._passes and self._clock.monotonic_ms() < until_ms:
            # Each pass handles a few members; a finished pass is removed.
            if next(self._passes[0], None) is None:
                self._passes.popleft()
        self._pump_waiting(until_ms)
        if self._waiting or self._changed or self._passes:
            self._schedule()
        elif not self._is_scheduled:
            self._shared.clear()

    def _deliver(self, followed: _FollowedTopic) -> Iterator[int]:
        """Deliver to the followers of a changed topic; yields regularly.

        Nearly all followers are live and at the same position. They get the same batch directly:
        each broadcast group as a whole, readers outside a group one by one. The others are pumped,
        with all their subscriptions. A few readers are handled at a time, and the writes to their
        sockets follow: alternating with kernel code would lose the processor's caches.
        """
        for group in tuple(followed.groups):
            if group.members:  # else all left while others were served
                self._send_to_group(group)
                yield 0
        yield from self._wake_tagged(followed)
        # Copy the list only now: it includes readers that left a group before the group was served.
        members = list(followed.apart.items())
        if not members:
            return
        batches: dict[tuple[int, int], EventBatch | None] = {}
        batch: EventBatch | None = None
        seq, options = -1, None
        now_ms = self._clock.monotonic_ms()
        writes: Writes = []
        for start in range(0, len(members), _DELIVERED_AT_ONCE):
            try:
                for subscription, reader in members[start : start + _DELIVERED_AT_ONCE]:
                    if subscription.is_live and not subscription.was_away:
                        # Equal options are one object, and most readers are at the position of the
                        # reader before.
                        at = subscription.cursor.seq
                        if at != seq or subscription.options is not options:
                            seq, options = at, subscription.options
                            key = (seq, id(options))
                            batch = batches.get(key, _UNKNOWN)
                            if batch is _UNKNOWN:
                                batch = batches[key] = self._resident(
                                    subscription.topic, subscription.position
                                )
                        if batch is not None and reader.give(subscription, batch, now_ms, writes):
                            continue
                    if subscription in followed.members:  # else it left while others were served
                        reader.notify(subscription)
                        self._waiting[reader] = None
            finally:
                _write(writes)
            yield start
            now_ms = self._clock.monotonic_ms()

    def _wake_tagged(self, followed: _FollowedTopic) -> Iterator[int]:
        """Find the filtered readers that new records may concern; yields regularly."""
        tagged, is_done = followed.tagged, False
        while tagged.members and not is_done:
            topic = self._registry.get(followed.topic_id)
            if topic is None:
                # Report the deletion to all readers.
                for subscription in tuple(tagged.members):
                    self.leave(subscription)
                return
            woken, is_done = tagged.advance(topic.log)
            for subscription in woken:
                followed.apart[subscription] = followed.members[subscription]
            yield 0

    def _send_to_group(self, group: BroadcastGroup) -> None:
        """Send the next batch to a group; if that is impossible in one step, dissolve the group."""
        position = group.position
        subscription, member = next(iter(group.members.items()))
        topic = subscription.topic
        batch = wire = None
        if self._registry.get(topic.topic_id) is topic:
            batch = self._at(topic, position, SEQ_MAX)
        if batch is not None and batch.events:
            wire = member.wire(subscription, batch)
        size = 0 if wire is None else len(wire) * len(group.members)
        if batch is None or batch.more or size > _GROUP_BYTES_MAX:
            for subscription in tuple(group.members):
                self.leave(subscription)
            return
        # Move the group before the writes: a member that is found to be full or gone leaves after
        # this batch.
        group.seq = batch.end_seq
        if wire is not None:
            group.group_sent_ms = self._clock.monotonic_ms()
            _write_alike(group.writers, wire)

    def _resident(self, topic: Topic, position: ReaderPosition) -> EventBatch | None:
        """The next batch for readers at a position, if there is one and all of it is in memory."""
        if self._registry.get(topic.topic_id) is not topic:
            return None
        upto_seq = self._upto_seq(topic, position.options)
        batch = self._at(topic, position, upto_seq)
        return batch if batch is not None and batch.events and not batch.more else None

    def _pump_waiting(self, until_ms: float) -> None:
        """Pump waiting readers in order until the slice is over; a reader with more waits again."""
        pumped = self._pumped
        while True:
            if not pumped:
                pumped.extend(self._waiting)
                self._waiting.clear()
                if not pumped:
                    return
            pumped.popleft().pump()
            if self._clock.monotonic_ms() > until_ms:
                self._waiting = dict.fromkeys(pumped) | self._waiting
                pumped.clear()
                return

    # --- reading ----------------------------------------------------------------------------

    def read(
        self, reader: TopicReader, subscription: Subscription, *, may_fetch: bool
    ) -> EventBatch | None:
        """The subscription's next batch; `None` if it must be read from disk.

        Then, with `may_fetch`, `is_fetching` is set and `reader` is notified when the batch is
        ready; without it, nothing was started.
        """
        topic = subscription.topic
        self.leave(subscription)
        if self._registry.get(topic.topic_id) is not topic:
            return deleted(subscription.cursor.name, topic.log.head_seq)
        position = subscription.position
        upto_seq = self._upto_seq(topic, subscription.options)
        if subscription.fetched is not None:
            fetched, subscription.fetched = subscription.fetched, None
            if fetched[0] == position:
                read = fetched[1]
                # This reader is not notified of records that are committed while the batch is read.
                is_behind = read.end_seq < min(topic.log.head_seq, upto_seq)
                return read.before_more() if is_behind and not read.more else read
        batch = self._at(topic, position, upto_seq)
        if batch is None and may_fetch:
            self._begin_fetch(reader, subscription, position, upto_seq)
        return batch

    def _upto_seq(self, topic: Topic, options: SubscriptionOptions) -> int:
        return self._synced.seq(topic.topic_id) if options.strong else SEQ_MAX

    def _at(self, topic: Topic, position: ReaderPosition, upto_seq: int) -> EventBatch | None:
        """The batch of a position, shared by all readers; `None` if part of it is not in memory."""
        key = (position, topic.revision, upto_seq)
        batch = self._shared.get(key)
        if batch is not None:
            return batch
        topic.last_read_ts = now_ms = self._clock.now_ms()
        try:
            page_plan = plan(topic, position, upto_seq, now_ms, search_of(position))
        except StorageError:
            return None  # The fetch tells the readers, or the index is mended by then.
        if page_plan.unsearched:
            return None
        page = self._fetcher.resident(topic, page_plan)
        if page is None:
            return None
        if len(self._shared) >= _SHARED_MAX:
            self._shared.clear()
        batch = self._shared[key] = build_batch(topic.name, position, page, upto_seq)
        return batch

    def _begin_fetch(
        self,
        reader: TopicReader,
        subscription: Subscription,
        position: ReaderPosition,
        upto_seq: int,
    ) -> None:
        subscription.is_fetching = True
        key = (position, upto_seq)
        waiting = self._fetching.get(key)
        if waiting is not None:
            waiting.append((subscription, reader))
            return
        self._fetching[key] = [(subscription, reader)]
        task = self._loop.create_task(self._fetch(subscription.topic, position, upto_seq))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, topic: Topic, position: ReaderPosition, upto_seq: int) -> None:
        """Read sealed payloads for all readers at the position."""
        batch: EventBatch | None = None
        error: StorageError | None = None
        try:
            search = search_of(position)
            page_plan = plan(topic, position, upto_seq, self._clock.now_ms(), search)
            while page_plan.unsearched:
                assert search is not None
                if not await self._fetcher.search(topic, page_plan.unsearched, search):
                    break  # the topic was dropped
                page_plan = plan(topic, position, upto_seq, self._clock.now_ms(), search)
            page = None
            if not page_plan.unsearched:
                page = await self._fetcher.complete(topic, page_plan)
            if page is not None:
                batch = build_batch(topic.name, position, page, upto_seq)
        except StorageError as failed:
            log.error("topic %s cannot be read for its followers: %s", topic.name, failed)
            # Without its traceback, which refers to this frame.
            error = failed.with_traceback(None)
        for subscription, reader in self._fetching.pop((position, upto_seq)):
            subscription.is_fetching = False
            followed = self._followed.get(topic.topic_id)
            if followed is None or subscription not in followed.members:
                continue  # the reader left meanwhile
            if error is not None:
                reader.fail(subscription, error)
                continue
            if batch is not None:
                subscription.fetched = (position, batch)
            # If there is no batch, something changed during the read: plan again.
            self._wake(reader, subscription)
