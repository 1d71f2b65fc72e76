"""The frames of one topic at one watcher, and the verdict: ordered, complete, every gap reported.

A `History` has the received frames in order, mixed with the actions of its watcher (started anew,
resumed). It is cut into segments, each within one incarnation of the topic. For every seq between
two positions of a segment one of these holds: it was delivered, it is of the watcher's own node, it
may have been deleted by then, or a tombstone includes it that the caps (or a stop, for an ephemeral
topic) explain. A watcher that resumes with an id continues exactly there; without an id it may lose
only what was sent to the connection that it left. A frame that the server must not send is also a
problem. No server is involved. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.crash.kills.ledger import Json
from tests.crash.watch.watch_ledger import Incarnation, Ledger, Written

# Losses by caps; on the first page of a connection all have the reason `from_seq_too_old`.
_CAP_REASONS: Final = frozenset({"cap", "mixed", "from_seq_too_old"})
_PROBLEMS_MAX: Final = 5


@dataclass(slots=True, frozen=True)
class Seen:
    """One record of a frame; `id` is None if the watcher asked for no data."""

    seq: int
    id: str | None
    node: str | None


@dataclass(slots=True, frozen=True)
class Start:
    """The watcher asked for everything above `seq` of the current incarnation."""

    at: int
    seq: int


@dataclass(slots=True, frozen=True)
class Resume:
    """A new connection that continues after the first `mark` events; None: after the last one.

    `how` is for the reports: by an `id`, an `older` one, as `cursor` of a new session, `takeover`.
    """

    at: int
    mark: int | None = None
    how: str = "id"


@dataclass(slots=True, frozen=True)
class Loose:
    """A new connection without an id: the old one's buffers may hold what was sent up to `cut`.

    `is_restored`: the server was started in between, so its position may be older.
    """

    at: int
    cut: int
    is_restored: bool


@dataclass(slots=True, frozen=True)
class Records:
    """A `record` frame."""

    at: int
    from_seq: int
    to_seq: int
    head_seq: int
    seen: tuple[Seen, ...]


@dataclass(slots=True, frozen=True)
class Gap:
    """A `tombstone` frame."""

    at: int
    reason: str
    gap_from: int
    gap_to: int
    earliest_seq: int
    head_seq: int


@dataclass(slots=True, frozen=True)
class CaughtUp:
    """A `caught-up` frame."""

    at: int
    head_seq: int


@dataclass(slots=True, frozen=True)
class Gone:
    """A `topic-deleted` frame."""

    at: int
    head_seq: int


Event = Start | Resume | Loose | Records | Gap | CaughtUp | Gone


@dataclass(slots=True)
class History:
    """One watcher, one topic. `position` is the reader's position after the frames."""

    topic: str
    nodes: frozenset[str]
    events: list[Event] = field(default_factory=list)
    position: int = 0
    is_gone: bool = False
    _after: list[tuple[int, bool]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Note what happened and move the position."""
        self._move(event)
        self.events.append(event)
        self._after.append((self.position, self.is_gone))

    def _move(self, event: Event) -> None:
        match event:
            case Start(seq=seq):
                self.position, self.is_gone = seq, False
            case Resume(mark=mark) if mark is not None:
                self.position, self.is_gone = self._after[mark - 1]
            case Records(to_seq=to_seq):
                self.position = to_seq
            case Gap(reason=reason, gap_to=gap_to):
                self.position = gap_to
                self.is_gone = self.is_gone and reason != "recreated"
            case CaughtUp(head_seq=head_seq):
                self.position = head_seq
            case Gone(head_seq=head_seq):
                self.position, self.is_gone = head_seq, True
            case Loose():
                # The news that the topic was recreated may be in the old connection's buffers, too.
                self.is_gone = False
            case Resume():
                pass


@dataclass(slots=True, frozen=True)
class Shown:
    """The parts of its records that a watcher asked for."""

    meta: bool = True
    tags: bool = False
    data: bool = True


def read_record(record: Json, shown: Shown, ledger: Ledger) -> tuple[Seen, str | None]:
    """A record as the history keeps it, and the problem if it differs from the sent one."""
    data = record.get("data")
    seen = Seen(record["$seq"], data["id"] if data else None, record.get("$node"))
    if seen.id is None:
        return seen, f"seq {seen.seq} has no data" if shown.data else None
    written = ledger.written.get(seen.id)
    if written is None:
        return seen, f"seq {seen.seq}: nobody wrote {seen.id}"
    if expected(written, shown) != {k: v for k, v in record.items() if k not in ("$seq", "$ts")}:
        return seen, f"seq {seen.seq}: {seen.id} is not as it was written: {str(record)[:300]}"
    return seen, None


def expected(written: Written, shown: Shown) -> Json:
    """The record as a watcher must get it, without `$seq` and `$ts`."""
    whole: Json = {}
    if written.node is not None:
        whole["$node"] = written.node
    if shown.tags and written.tag is not None:
        whole["$tag"] = written.tag
    if shown.data:
        whole["data"] = written.data()
    if shown.meta and written.has_meta:
        whole["meta"] = written.meta()
    return whole


def bind_sightings(histories: Iterable[History], ledger: Ledger) -> list[str]:
    """Give floating records the seqs at which they were seen; two records at one seq are a
    problem.
    """
    problems: list[str] = []
    for history in histories:
        for event in history.events:
            for seen in event.seen if isinstance(event, Records) else ():
                written = ledger.written.get(seen.id or "")
                if written is None:
                    continue
                if written.topic != history.topic:
                    problems.append(f"{history.topic}: {written.id} is of {written.topic}")
                    continue
                life = ledger.topics[written.topic][written.incarnation - 1]
                if seen.seq not in life.records and written.id not in life.floating:
                    problems.append(f"{life.topic}: {written.id} is seen at seq {seen.seq} as well")
                elif problem := life.bind(seen.seq, written):
                    problems.append(f"{history.topic}: {problem}")
    return problems[:_PROBLEMS_MAX]


def check(history: History, ledger: Ledger, *, is_complete: bool = True) -> list[str]:
    """The problems of a history; `is_complete`: it must reach the head of a living topic."""
    verdict = _Verdict(history, ledger)
    problems = verdict.run()
    if not problems and is_complete:
        problems = verdict.check_end()
    return [f"{history.topic}: {problem}" for problem in problems[:_PROBLEMS_MAX]]


@dataclass(slots=True)
class _Segment:
    """Events within one incarnation; `index` is the place of the first one in the history."""

    opening: Start | Loose | Gap
    index: int
    began: int
    may_repeat: bool = False
    may_go_back: bool = False
    events: list[Event] = field(default_factory=list)

    def has_frames(self) -> bool:
        return any(not isinstance(event, Resume) for event in self.events)


class _Verdict:
    """Cuts a history into segments and finds each one's incarnation."""

    def __init__(self, history: History, ledger: Ledger) -> None:
        self.history = history
        self.ledger = ledger
        self.lives = ledger.topics[history.topic]
        self.number = 0  # the incarnation of the last segment with frames
        self.position = 0
        self.may_go_back = False  # losses allowed in the last segment and not used yet
        self.is_gone = False

    def run(self) -> list[str]:
        segment: _Segment | None = None
        is_limbo = False
        began = 0  # the time of the request for the connection
        may_repeat = False  # an older position was requested: an incarnation may begin again
        for index, event in enumerate(self.history.events):
            problems: list[str] = []
            if isinstance(event, (Start, Resume, Loose)):
                began = event.at
                may_repeat |= isinstance(event, Loose) and event.is_restored
                may_repeat |= isinstance(event, Resume) and event.mark is not None
            is_recreated = isinstance(event, Gap) and event.reason == "recreated"
            if isinstance(event, (Start, Loose)) or is_recreated:
                assert isinstance(event, (Start, Loose, Gap))
                if segment is not None:
                    problems = self._finish(segment)
                goes_back = isinstance(event, Loose) and (event.is_restored or self.may_go_back)
                segment = _Segment(event, index, began, may_repeat, goes_back)
                if isinstance(event, Gap):
                    segment.events.append(event)
                is_limbo = False
            elif segment is None:
                problems = [f"{event} before the start"]
            elif is_limbo and not isinstance(event, (Resume, Gone)):
                problems = [f"after topic-deleted: {_short(event)}"]
            elif not is_limbo:
                segment.events.append(event)
                is_limbo = isinstance(event, Gone)
            if not isinstance(event, (Resume, Loose)):
                may_repeat = False
            if problems:
                return problems
        self.is_gone = is_limbo
        if segment is None:
            return ["nothing ever started"]
        return self._finish(segment, is_last=True)

    def _finish(self, segment: _Segment, *, is_last: bool = False) -> list[str]:
        if not segment.has_frames():
            # An older id moved the session back, whether or not a frame followed.
            went_back = any(isinstance(e, Resume) and e.mark is not None for e in segment.events)
            self.may_go_back = segment.may_go_back or went_back
            if isinstance(segment.opening, Start):
                self.position = segment.opening.seq
                self.number = 0
            return []
        if all(isinstance(event, (Resume, Gone)) for event in segment.events):
            return self._check_gone(segment)
        lives = self._candidates(segment)
        if is_last:
            lives.reverse()
        if not lives:
            return [f"{_short(segment.events[0])}: no incarnation fits (was {self.number})"]
        problems: list[str] = []
        for life in lives:
            walk = _Walk(self.history, life, segment, self._start(segment, life))
            problems = walk.run()
            if not problems:
                self.number, self.position = life.number, walk.position
                self.may_go_back = walk.may_go_back
                return []
        return problems

    def _check_gone(self, segment: _Segment) -> list[str]:
        """Check a lone topic-deleted: its incarnation is unknown, but the topic must have been
        absent.
        """
        self.may_go_back = segment.may_go_back
        if isinstance(segment.opening, Start):
            self.number, self.position = 0, segment.opening.seq
        last = segment.events[-1].at
        if self.ledger.may_be_absent(self.history.topic, segment.began, last):
            return []
        return [f"topic-deleted, but nobody deleted it: {_short(segment.events[-1])}"]

    def _start(self, segment: _Segment, life: Incarnation) -> int:
        match segment.opening:
            case Start(seq=seq):
                return seq
            case Loose() if life.number == self.number:
                return self.position
        return 0

    def _candidates(self, segment: _Segment) -> list[Incarnation]:
        """The possible incarnations of a segment: by a payload, or by the times.

        The oldest comes first: if it fits, all later ones remain for the following segments.
        """
        for event in segment.events:
            if isinstance(event, Records):
                for seen in event.seen:
                    if seen.id is not None and seen.id in self.ledger.written:
                        number = self.ledger.written[seen.id].incarnation
                        fits = number >= self._lowest(segment)
                        return [self.lives[number - 1]] if fits else []
        last = segment.events[-1].at
        return [
            life
            for life in self.lives
            if life.number >= self._lowest(segment) and life.is_alive_between(segment.began, last)
        ]

    def _lowest(self, segment: _Segment) -> int:
        is_next = isinstance(segment.opening, Gap) and not segment.may_repeat
        return self.number + is_next

    def check_end(self) -> list[str]:
        """At the end, without writers: the reader is at the head of the topic."""
        life = self.lives[-1]
        if life.dropped_sent is not None:
            return []
        if self.is_gone or self.number not in (0, life.number):  # 0: it began at the very end
            gone = " after topic-deleted" if self.is_gone else ""
            return [f"ended in incarnation {self.number}{gone}, not in {life.number}"]
        if self.position != life.head_seq:
            return [f"ended at {self.position}, not at the head {life.head_seq}"]
        return []


class _Walk:
    """One segment against one incarnation, event by event."""

    def __init__(self, history: History, life: Incarnation, segment: _Segment, start: int) -> None:
        self.history = history
        self.nodes = history.nodes
        self.life = life
        self.segment = segment
        self.position = start
        self.began = segment.began
        self.cut = 0
        self.may_go_back = segment.may_go_back
        self.problems: list[str] = []
        if isinstance(segment.opening, Loose):
            self.cut = segment.opening.cut
        # After each event: the reader's position, and what was still allowed.
        self.places = {segment.index: (start, self.cut, self.may_go_back)}

    def run(self) -> list[str]:
        # A recreated tombstone opens its segment and is its first event; other openings come before
        # it.
        offset = self.segment.index + (not isinstance(self.segment.opening, Gap))
        for index, event in enumerate(self.segment.events, offset):
            match event:
                case Resume():
                    self._resume(event)
                case Records():
                    self._records(event)
                case Gap():
                    self._gap(event)
                case CaughtUp(at=at, head_seq=head_seq):
                    self._silent(at, head_seq)
                    self._arrive(head_seq, head_seq)
                case Gone(at=at):
                    if self.life.dropped_sent is None or self.life.dropped_sent > at:
                        self._wrong("topic-deleted, but nobody deleted it")
                case Start() | Loose():
                    raise AssertionError("these open a segment")
            if self.problems:
                before = "; ".join(map(_short, self.history.events[max(0, index - 6) : index]))
                return [
                    f"{line} [event {index}: {_short(event)}, behind {before}]"
                    for line in self.problems
                ]
            self.places[index] = (self.position, self.cut, self.may_go_back)
        return []

    def _wrong(self, problem: str) -> None:
        self.problems.append(f"incarnation {self.life.number}: {problem}")

    def _resume(self, event: Resume) -> None:
        self.began = event.at
        if event.mark is None:
            return  # the id includes losses that were allowed and have not been used yet
        place = self.places.get(event.mark - 1)
        if place is not None:
            self.position, self.cut, self.may_go_back = place
        else:
            assert event.mark <= self.segment.index, "no place after an event of this segment"
            self.may_go_back = True  # the id belongs to an earlier segment

    def _arrive(self, seq: int, head_seq: int) -> None:
        """Arrive at `seq`; the allowance of a new connection is used up."""
        if seq > head_seq or head_seq > self.life.head_seq:
            self._wrong(f"at {seq} of head {head_seq}; the head is {self.life.head_seq}")
        self.position = seq
        self.cut = 0
        self.may_go_back = False

    def _silent(self, at: int, upto_seq: int) -> None:
        """The reader moved to `upto_seq`, and no frame named the seqs in between."""
        if upto_seq < self.position:
            if not self.may_go_back:
                self._wrong(f"back at {upto_seq} after {self.position}: told twice")
            self.position = upto_seq
        for seq in range(self.position + 1, upto_seq + 1):
            self._expect_silence(seq, at)

    def _expect_silence(self, seq: int, at: int) -> None:
        written = self.life.records.get(seq)
        if written is None:
            # A record of an unknown writer: only an ephemeral topic may have one, or the tombstone
            # of a restart was on the connection that was left.
            if not self.life.floating and not (self.cut and self.life.is_ephemeral):
                self._wrong(f"silent gap: seq {seq} was given to nobody")
            return
        if written.node in self.nodes or self.life.may_be_deleted(seq, at):
            return
        if written.sent >= self.cut:
            self._wrong(f"missing: seq {seq} ({written.id}), position {self.position}")

    def _records(self, event: Records) -> None:
        self._silent(event.at, event.from_seq)
        self.position = event.from_seq
        self.cut = 0
        last = event.from_seq
        for seen in event.seen:
            if not last < seen.seq <= event.to_seq:
                self._wrong(f"order: seq {seen.seq} after {last} in {_short(event)}")
                return
            for seq in range(last + 1, seen.seq):
                self._expect_silence(seq, event.at)
            self._delivered(seen)
            last = seen.seq
        for seq in range(last + 1, event.to_seq + 1):
            self._expect_silence(seq, event.at)
        if not event.seen:
            self._wrong("a record frame without records")
        self._arrive(event.to_seq, event.head_seq)

    def _delivered(self, seen: Seen) -> None:
        life = self.life
        written = life.records.get(seen.seq)
        if written is None:
            if seen.id is not None or not life.floating:
                self._wrong(f"seq {seen.seq} ({seen.id}) was given to nobody")
            return
        if (written.id, written.node) != (seen.id or written.id, seen.node):
            self._wrong(f"seq {seen.seq} is {written.id} of {written.node}, seen as {seen}")
        if written.node is not None and written.node in self.nodes:
            self._wrong(f"seq {seen.seq} is of node {written.node}, which is filtered out")
        if life.was_surely_deleted(seen.seq, self.began):
            self._wrong(f"seq {seen.seq} ({written.id}) is back after its delete")
        if life.dropped_acked is not None and life.dropped_acked < self.began:
            self._wrong(f"seq {seen.seq} ({written.id}) is of a topic dropped before")

    def _gap(self, event: Gap) -> None:
        is_recreated = event.reason == "recreated"
        if is_recreated:
            self.position = 0
        self._silent(event.at, event.gap_from - 1)
        self.position = event.gap_from - 1
        last, earliest = event.gap_to, event.earliest_seq
        if not event.gap_from <= last + is_recreated <= earliest - (not is_recreated):
            self._wrong("malformed tombstone")
        if event.reason == "restart":
            if self.life.first_kept(event.gap_from, last, event.at) is not None:
                self._wrong("unexplained tombstone: not every record of it was lost by a stop")
        elif is_recreated or event.reason in _CAP_REASONS:
            self._check_evicted(event, is_recreated)
        else:
            self._wrong(f"unexplained tombstone: {event.reason}")
        self._arrive(last, event.head_seq)

    def _check_evicted(self, event: Gap, is_recreated: bool) -> None:
        evictable = self.life.evictable_to(event.at, event.head_seq)
        last = event.gap_to
        if last != event.earliest_seq - 1 and not self.life.is_ephemeral:
            self._wrong(f"tombstone ends at {last}, earliest is {event.earliest_seq}")
        kept = self.life.first_kept(max(event.gap_from, evictable + 1), last, event.at)
        if kept is not None:
            self._wrong(f"unexplained tombstone: seq {kept} cannot be evicted (≤ {evictable})")
            return
        is_by_stop = self.life.is_any_lost_by_stop(event.gap_from, last, event.at)
        if not is_recreated and evictable < event.gap_from and not is_by_stop:
            self._wrong("unexplained tombstone: nothing but deletes")


def compare_with_diff(history: History, live: Mapping[int, str], ledger: Ledger) -> list[str]:
    """Check that every record of a diff from 0 now was delivered, or is older than the start.

    `live` maps seq to id. A watcher that continued without an id may have lost some: not judged
    here.
    """
    life = ledger.topics[history.topic][-1]
    start = 0
    delivered: set[int] = set()
    for event in history.events:
        match event:
            case Start(seq=seq):
                start = seq
            case Gap(reason="recreated"):
                start = 0
            case Loose():
                return []
            case Records(seen=seen):
                delivered.update(s.seq for s in seen if s.id is None or live.get(s.seq) == s.id)
            case _:
                pass
    missed = [seq for seq in live if seq > start and seq not in delivered]
    nodes = {seq: written.node for seq, written in life.records.items()}
    missed = [seq for seq in missed if nodes.get(seq) not in history.nodes]
    return [f"{history.topic}: a diff gives seq {seq}, the watch never did" for seq in missed]


def _short(event: Event) -> str:
    text = repr(event)
    return text if len(text) < 260 else f"{text[:200]} … {text[-50:]}"
