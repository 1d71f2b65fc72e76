"""What one reader of a topic receives next. Pure.

A `Subscription` is one topic as one stream follows it. `plan` says what to read for it, `settle`
turns the page into a `EventBatch`: events that depend on nothing but where the reader stands and
what it asked for, so that readers standing at the same place share the batch, and what was rendered
of it. The rules of §7.5 are here; the tombstone rule itself is `reading`'s. Called by `feeds`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from topics_server.engine.answers import Page, ReadRequest
from topics_server.engine.read.page import PagePlan, plan_page
from topics_server.engine.subscribe.cursors import Cursor, SharedCursor
from topics_server.engine.topic.topic import Topic
from topics_server.values.json_cache import DATA, META
from topics_server.values.limits import SEQ_MAX
from topics_server.values.model import LossReason

FROM_SEQ_TOO_OLD: Final = "from_seq_too_old"
# What a reader had no part in: told by another name to one who has just come back (§7.5).
_INVOLUNTARY: Final = frozenset((LossReason.CAP, LossReason.TTL, LossReason.MIXED))


class SubscriptionOptions(msgspec.Struct, frozen=True):
    """How a topic is followed (§7.2); readers with equal options share what is rendered.

    `shown`: a sum of `rendered.TAGS`, `META` and `DATA`. `strong`: only what is synced.
    """

    limit: int = 256
    max_bytes: int = 262_144
    nodes: frozenset[str] = frozenset()
    shown: int = META | DATA
    strong: bool = False


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
    """The topic is drained to its head; from now on the reader is live."""

    topic: str
    head_seq: int


class TopicDeleted(msgspec.Struct, frozen=True):
    """The topic is gone; nothing more of it follows on this stream."""

    topic: str
    head_seq: int
    reason: str = "deleted"


Event = Records | Tombstone | CaughtUp | TopicDeleted


class ReaderPosition(NamedTuple):
    """All that decides what a reader is told next, beside the topic itself."""

    topic_id: int
    from_seq: int
    options: SubscriptionOptions
    is_fresh: bool
    is_live: bool


class EventBatch:
    """What a reader at one place is told, and where each event leaves its cursor.

    `seqs[i]` is the cursor behind `events[i]`, `end_seq` the one behind all. `more`: the head is
    not reached. `is_last`: the topic is gone. `rendered`: what connections made of it, by kind of
    connection.
    """

    __slots__ = ("end_seq", "events", "is_last", "more", "rendered", "seqs")

    def __init__(self, events: list[Event], seqs: list[int], end_seq: int, *, more: bool) -> None:
        assert len(events) == len(seqs)
        self.events = events
        self.seqs = seqs
        self.end_seq = end_seq
        self.more = more
        self.is_last = False
        self.rendered: dict[object, Any] = {}


class Subscription:
    """One topic as one stream follows it.

    `topic` is the incarnation that is read, whatever the cursor says it last was. `is_fresh`: the
    reader was away, losses are told as `from_seq_too_old`. `is_live`: it was told caught-up and
    has not fallen behind since. `is_ready`: it waits for its turn. `is_fetching`: what it is told
    next is read from disk; `fetched` is what came of that. `told_ms`: when it was told something
    as one of a cohort, of the monotonic clock.
    """

    __slots__ = (
        "cursor",
        "fetched",
        "is_fetching",
        "is_fresh",
        "is_live",
        "is_ready",
        "options",
        "told_ms",
        "topic",
    )

    def __init__(self, cursor: Cursor, topic: Topic, options: SubscriptionOptions) -> None:
        self.cursor = cursor
        self.topic = topic
        self.options = options
        self.is_fresh = True
        self.is_live = False
        self.is_ready = False
        self.is_fetching = False
        self.fetched: tuple[ReaderPosition, EventBatch] | None = None
        self.told_ms = 0.0

    @property
    def place(self) -> ReaderPosition:
        """Where the reader stands now."""
        cursor, topic = self.cursor, self.topic
        # Of another incarnation nothing was read: beyond any head, as the tombstone rule has it.
        from_seq = cursor.seq if cursor.topic_id == topic.topic_id else SEQ_MAX
        return ReaderPosition(topic.topic_id, from_seq, self.options, self.is_fresh, self.is_live)

    def move(self, batch: EventBatch, seq: int) -> None:
        """The reader was handed what lies up to `seq` of this batch."""
        cursor, topic = self.cursor, self.topic
        cursor.topic_id, cursor.epoch, cursor.seq = topic.topic_id, topic.epoch, seq
        self.is_fresh = False
        self.is_live = not batch.more


class Member(NamedTuple):
    """How one of a cohort is reached.

    `writer` sends bytes to it, past all queues. `wire` gives those of a batch, the same for all.
    """

    writer: Callable[[bytes], object]
    wire: Callable[[Subscription, EventBatch], bytes | None]


class BroadcastGroup(SharedCursor):
    """Readers of one topic that stand at one place and are told the same bytes, in one go.

    All are live, follow with the same `options` and are on connections of one `kind`. Nothing of
    a member is looked at or changed when all are told: where it stands is the cohort's `seq`, and
    whoever cannot be written to any more has left before. `told_ms`: when they were told last.
    """

    __slots__ = ("_writers", "kind", "members", "options", "told_ms")

    def __init__(self, seq: int, options: SubscriptionOptions, kind: object) -> None:
        super().__init__(seq)
        self.options = options
        self.kind = kind
        self.members: dict[Subscription, Member] = {}
        self.told_ms = 0.0
        self._writers: tuple[Callable[[bytes], object], ...] | None = None

    @property
    def writers(self) -> tuple[Callable[[bytes], object], ...]:
        """Who is written to; stays as it is when members leave meanwhile."""
        if self._writers is None:
            self._writers = tuple([member.writer for member in self.members.values()])
        return self._writers

    @property
    def place(self) -> ReaderPosition:
        """Where all of them stand now."""
        topic = next(iter(self.members)).topic
        return ReaderPosition(topic.topic_id, self.seq, self.options, False, True)

    def takes(self, track: Subscription, kind: object) -> bool:
        """Whether the reader may join: it is live, and where the others are."""
        return self.seq == track.cursor.seq and self.options is track.options and self.kind == kind

    def add(self, track: Subscription, member: Member) -> None:
        """From now on the reader is told with the others."""
        assert track.is_live
        assert not track.is_fresh
        self.members[track] = member
        self._writers = None
        track.cursor.spot = self

    def remove(self, track: Subscription) -> None:
        """The reader goes its own way, from where all are."""
        del self.members[track]
        self._writers = None
        track.cursor.spot = None
        track.cursor.seq = self.seq
        track.told_ms = self.told_ms


def plan(topic: Topic, place: ReaderPosition, upto_seq: int, now_ms: int) -> PagePlan:
    """What to read for readers at a place; `upto_seq` bounds those who want only what is synced."""
    options = place.options
    request = ReadRequest(place.from_seq, options.limit, options.max_bytes, options.nodes)
    return plan_page(topic, request, now_ms, upto_seq)


def settle(name: str, place: ReaderPosition, page: Page, upto_seq: int) -> EventBatch:
    """The events of a page, in the order in which they are told."""
    events: list[Event] = []
    seqs: list[int] = []
    seq = place.from_seq
    end_seq = page.next_from_seq
    head_seq = max(min(page.head_seq, upto_seq), end_seq)
    gap = page.gap
    if gap is not None:
        is_late = place.is_fresh and gap.reason in _INVOLUNTARY
        reason = FROM_SEQ_TOO_OLD if is_late else gap.reason.value
        seq = max(gap.gap_to, 0)
        events.append(Tombstone(name, reason, gap.gap_from, seq, page.earliest_seq, head_seq))
        seqs.append(seq)
    if page.pieces:
        options = place.options
        events.append(Records(name, page, options.shown, seq, end_seq, head_seq))
        seqs.append(end_seq)
    more = end_seq < head_seq
    if not more and not place.is_live:
        events.append(CaughtUp(name, head_seq))
        seqs.append(end_seq)
    return EventBatch(events, seqs, end_seq, more=more)


def deleted(name: str, head_seq: int) -> EventBatch:
    """What a reader of a topic that is gone is told."""
    batch = EventBatch([TopicDeleted(name, head_seq)], [head_seq], head_seq, more=False)
    batch.is_last = True
    return batch
