"""The next batch of one reader of a topic. Pure.

A `Subscription` is one topic followed by one stream. `plan` decides what to read for this
subscription; `build_batch` turns the page into an `EventBatch`. A batch depends only on the
reader's position and options, so readers at the same position share the batch and its encoded
frames. This module has the rules of §7.5; the tombstone rule is in `engine/read/page`. Called by
`dispatcher`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from topics_server.engine.answers import Page, ReadRequest
from topics_server.engine.filters import Matcher
from topics_server.engine.read.filtered import Search
from topics_server.engine.read.page import PagePlan, plan_page
from topics_server.engine.subscribe.cursors import Cursor, SharedCursor
from topics_server.engine.topic.topic import Topic
from topics_server.values.json_cache import DATA, META
from topics_server.values.limits import SEQ_MAX, SKIPPED_SLOTS_MAX
from topics_server.values.model import LossReason

FROM_SEQ_TOO_OLD: Final = "from_seq_too_old"
# Losses that no client requested. A reader that was away gets `from_seq_too_old` instead (§7.5).
_INVOLUNTARY: Final = frozenset((LossReason.CAP, LossReason.TTL, LossReason.MIXED))


class SubscriptionOptions(msgspec.Struct, frozen=True):
    """How a topic is followed (§7.2); readers with equal options share encoded frames.

    `shown`: a sum of `json_cache.TAGS`, `META` and `DATA`. `strong`: deliver only synced records.
    `matcher`: deliver only records for which it returns true.
    """

    limit: int = 256
    max_bytes: int = 262_144
    nodes: frozenset[str] = frozenset()
    shown: int = META | DATA
    strong: bool = False
    matcher: Matcher | None = None


class Records(msgspec.Struct, frozen=True):
    """New records of one topic; `to_seq` is the last seq examined, the reader's next cursor."""

    topic: str
    page: Page
    shown: int
    from_seq: int
    to_seq: int
    head_seq: int


class Tombstone(msgspec.Struct, frozen=True):
    """Seqs `gap_from..gap_to` are lost (§3.3, §7.5)."""

    topic: str
    reason: str
    gap_from: int
    gap_to: int
    earliest_seq: int
    head_seq: int


class CaughtUp(msgspec.Struct, frozen=True):
    """The reader has reached the head of the topic; from now on it is live."""

    topic: str
    head_seq: int


class TopicDeleted(msgspec.Struct, frozen=True):
    """The topic was deleted; no more of its events follow on this stream."""

    topic: str
    head_seq: int
    reason: str = "deleted"


Event = Records | Tombstone | CaughtUp | TopicDeleted


class ReaderPosition(NamedTuple):
    """Everything that determines a reader's next batch, except the topic."""

    topic_id: int
    from_seq: int
    options: SubscriptionOptions
    was_away: bool
    is_live: bool


class EventBatch:
    """The next events for readers at one position.

    `seqs[i]` is the cursor after `events[i]`, `end_seq` the cursor after all of them. `more`: the
    batch does not reach the head. `is_last`: the topic was deleted. `encoded`: the batch's frames,
    by kind of connection.
    """

    __slots__ = ("end_seq", "events", "is_last", "more", "encoded", "seqs")

    def __init__(self, events: list[Event], seqs: list[int], end_seq: int, *, more: bool) -> None:
        assert len(events) == len(seqs)
        self.events = events
        self.seqs = seqs
        self.end_seq = end_seq
        self.more = more
        self.is_last = False
        self.encoded: dict[object, Any] = {}

    def before_more(self) -> EventBatch:
        """The batch without `CaughtUp`: it does not reach the head any more."""
        count = len(self.events)
        if count and isinstance(self.events[-1], CaughtUp):
            count -= 1
        return EventBatch(self.events[:count], self.seqs[:count], self.end_seq, more=True)


class Subscription:
    """One topic followed by one stream.

    `topic` is the incarnation that is read; the cursor may still name an older one. `was_away`: the
    reader was disconnected or slow, so losses are reported as `from_seq_too_old`. `is_live`: the
    reader received `CaughtUp` and has not fallen behind since. `is_ready`: the subscription waits
    for its turn. `is_fetching`: its next batch is being read from disk; `fetched` holds the result.
    `group_sent_ms`: when its broadcast group was last sent a batch, in ms of the monotonic clock.
    `reported_seq`: for a filtered subscription, the position that its client received last.
    """

    __slots__ = (
        "cursor",
        "fetched",
        "is_fetching",
        "was_away",
        "is_live",
        "is_ready",
        "options",
        "group_sent_ms",
        "reported_seq",
        "topic",
    )

    def __init__(self, cursor: Cursor, topic: Topic, options: SubscriptionOptions) -> None:
        self.cursor = cursor
        self.topic = topic
        self.options = options
        self.was_away = True
        self.is_live = False
        self.is_ready = False
        self.is_fetching = False
        self.fetched: tuple[ReaderPosition, EventBatch] | None = None
        self.group_sent_ms = 0.0
        self.reported_seq = cursor.seq

    @property
    def position(self) -> ReaderPosition:
        """The reader's position now."""
        cursor, topic = self.cursor, self.topic
        # A cursor of another incarnation counts as a position beyond every head: the tombstone rule
        # applies.
        from_seq = cursor.seq if cursor.topic_id == topic.topic_id else SEQ_MAX
        return ReaderPosition(topic.topic_id, from_seq, self.options, self.was_away, self.is_live)

    def move(self, batch: EventBatch, seq: int) -> None:
        """Move the cursor: the reader received this batch up to `seq`."""
        cursor, topic = self.cursor, self.topic
        cursor.topic_id, cursor.epoch, cursor.seq = topic.topic_id, topic.epoch, seq
        self.was_away = False
        self.is_live = not batch.more

    def must_tell(self, batch: EventBatch) -> bool:
        """Whether the client needs a frame with its new position after this batch.

        Otherwise a reader of rare records would reconnect at a position that was evicted long ago,
        and get tombstones of records that its filter excludes. The threshold is half of the limit:
        when one reader reaches the limit, readers that are checked with it report too, and are not
        due again soon.
        """
        if self.options.matcher is None:
            return False
        if not batch.events and batch.end_seq - self.reported_seq < SKIPPED_SLOTS_MAX // 2:
            return False
        self.reported_seq = batch.end_seq
        return not batch.events


class Member(NamedTuple):
    """The connection of one member of a broadcast group.

    `writer` writes bytes directly to the member's socket, past all queues. `wire` encodes a batch;
    the bytes are the same for all members.
    """

    writer: Callable[[bytes], object]
    wire: Callable[[Subscription, EventBatch], bytes | None]


class BroadcastGroup(SharedCursor):
    """Readers of one topic at one position that receive the same bytes together.

    All members are live, have the same `options` and connections of one `kind`. Sending to the
    group neither reads nor changes a member: the group's `seq` is the position of all members, and
    a member whose socket accepts no more data has left before. `group_sent_ms`: when the group was
    last sent a batch.
    """

    __slots__ = ("_writers", "kind", "members", "options", "group_sent_ms")

    def __init__(self, seq: int, options: SubscriptionOptions, kind: object) -> None:
        super().__init__(seq)
        self.options = options
        self.kind = kind
        self.members: dict[Subscription, Member] = {}
        self.group_sent_ms = 0.0
        self._writers: tuple[Callable[[bytes], object], ...] | None = None

    @property
    def writers(self) -> tuple[Callable[[bytes], object], ...]:
        """The members' writers; the tuple does not change when members leave meanwhile."""
        if self._writers is None:
            self._writers = tuple([member.writer for member in self.members.values()])
        return self._writers

    @property
    def position(self) -> ReaderPosition:
        """The position of all members now."""
        topic = next(iter(self.members)).topic
        return ReaderPosition(topic.topic_id, self.seq, self.options, False, True)

    def takes(self, subscription: Subscription, kind: object) -> bool:
        """Whether the reader may join: same position, options and kind of connection."""
        return (
            self.seq == subscription.cursor.seq
            and self.options is subscription.options
            and self.kind == kind
        )

    def add(self, subscription: Subscription, member: Member) -> None:
        """Add a reader, which then receives batches with the group."""
        assert subscription.is_live
        assert not subscription.was_away
        self.members[subscription] = member
        self._writers = None
        subscription.cursor.shared_cursor = self

    def remove(self, subscription: Subscription) -> None:
        """Remove a reader, which continues alone from the group's position."""
        del self.members[subscription]
        self._writers = None
        subscription.cursor.shared_cursor = None
        subscription.cursor.seq = self.seq
        subscription.group_sent_ms = self.group_sent_ms


def search_of(position: ReaderPosition) -> Search | None:
    """The search of sealed segments for readers at a position, if they have a filter."""
    matcher = position.options.matcher
    return None if matcher is None else Search(matcher.wanted, matcher)


def plan(
    topic: Topic,
    position: ReaderPosition,
    upto_seq: int,
    now_ms: int,
    search: Search | None = None,
) -> PagePlan:
    """Plan the read for readers at a position; `upto_seq` is the last synced seq if `strong`.

    `search`: the result of `search_of`, with the results of later searches.
    """
    options = position.options
    request = ReadRequest(position.from_seq, options.limit, options.max_bytes, options.nodes)
    return plan_page(topic, request, now_ms, upto_seq, search)


def build_batch(name: str, position: ReaderPosition, page: Page, upto_seq: int) -> EventBatch:
    """The events of a page, in delivery order."""
    events: list[Event] = []
    seqs: list[int] = []
    seq = position.from_seq
    end_seq = page.next_from_seq
    head_seq = max(min(page.head_seq, upto_seq), end_seq)
    gap = page.gap
    if gap is not None:
        is_late = position.was_away and gap.reason in _INVOLUNTARY
        reason = FROM_SEQ_TOO_OLD if is_late else gap.reason.value
        seq = max(gap.gap_to, 0)
        events.append(Tombstone(name, reason, gap.gap_from, seq, page.earliest_seq, head_seq))
        seqs.append(seq)
    if page.pieces:
        options = position.options
        events.append(Records(name, page, options.shown, seq, end_seq, head_seq))
        seqs.append(end_seq)
    more = end_seq < head_seq
    if not more and not position.is_live:
        events.append(CaughtUp(name, head_seq))
        seqs.append(end_seq)
    return EventBatch(events, seqs, end_seq, more=more)


def deleted(name: str, head_seq: int) -> EventBatch:
    """The batch for a reader of a topic that was deleted."""
    batch = EventBatch([TopicDeleted(name, head_seq)], [head_seq], head_seq, more=False)
    batch.is_last = True
    return batch
