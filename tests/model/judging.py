"""Is the topic that a reader sees one of the states that the model allows? And which one?

`Seen` is a whole topic as read through the store; `differs` compares it with one plain state.
`TopicHistory` keeps a topic's calls since the last check. After a crash it finds the prefix of them
that survived: nothing acknowledged may be missing after a kill, nothing synced after a power loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import msgspec

from tests.model.plain import Answer, Append, Delete, Plain, Put, Rec, Step
from tests.model.world import FakeClock
from topics_server.api.messages.responses import render_page
from topics_server.engine.answers import Gap, JsonPage, Page, ReadRequest
from topics_server.engine.read.block_cache import BlockCache
from topics_server.engine.store import Store
from topics_server.values.errors import Code, TopicsError
from topics_server.values.json_cache import DATA, META, TAGS, JsonCache
from topics_server.values.limits import BLOCK_CACHE_BYTES_MAX
from topics_server.values.model import LossReason, TopicConfig

End = Literal["none", "clean", "kill", "power"]
_TOLD_LOSSES: Final = frozenset({LossReason.CAP, LossReason.TTL, LossReason.MIXED})


@dataclass(slots=True)
class Seen:
    """One topic as a reader sees it from seq 0 on, at one moment."""

    records: dict[int, Rec]
    gaps: list[Gap]
    head: int
    earliest: int
    count: int
    config: TopicConfig
    now_ms: int
    epoch: int
    producers: dict[str, tuple[int, int, int, int]]


async def look(store: Store, name: str, clock: FakeClock) -> Seen | None:
    """Read a whole topic at one moment, page by page; None if there is no such topic."""
    for _ in range(20):
        before = _marks(store, name, clock)
        seen = await _look_once(store, name, clock)
        if _marks(store, name, clock) == before:
            return seen
    raise AssertionError("the clock does not stand still")


def _marks(store: Store, name: str, clock: FakeClock) -> tuple[object, ...]:
    """The facts that change when the clock is set, or when the background evicts records or drops
    dead segments between two pages (which changes the number of examined records).
    """
    moment = clock.now_ms(), clock.steps
    try:
        state = store.state(name, touch=False)
    except TopicsError:
        return moment
    firsts = tuple(run.first_seq for run in store.topic(name).log.runs)
    return (*moment, state.head_seq, state.earliest_seq, state.evict_floor, state.count, firsts)


async def _look_once(store: Store, name: str, clock: FakeClock) -> Seen | None:
    now_ms = clock.now_ms()
    try:
        state = store.state(name, touch=False)
    except TopicsError as error:
        if error.code is not Code.TOPIC_NOT_FOUND:
            raise
        return None
    records: dict[int, Rec] = {}
    gaps: list[Gap] = []
    cursor = 0
    for _ in range(1000):
        page = await read_both_ways(store, name, ReadRequest(cursor, 500, 1 << 22), clock)
        gaps += [page.gap] if page.gap is not None else []
        for piece in page.pieces:
            block = piece.block
            for row in piece.rows:
                seq = block.first_seq + row
                assert seq > max(records, default=0), f"{name}: {seq} comes after a later one"
                rec = Rec(
                    bytes(block.data(row)),
                    bytes(block.meta(row)),
                    block.tags[row],
                    block.nodes[row],
                    block.times[row],
                )
                records[seq] = rec
        if page.caught_up:
            return Seen(
                records,
                gaps,
                page.head_seq,
                page.earliest_seq,
                state.count,
                state.config,
                now_ms,
                store.topic(name).epoch,
                {
                    producer: (last.epoch, last.seq, last.first_seq, last.count)
                    for producer, last in store.topic(name).producers.known.items()
                },
            )
        assert page.next_from_seq > cursor, f"{name}: a page that does not move"
        cursor = page.next_from_seq
    raise AssertionError(f"{name}: 1,000 pages and no end")


async def read_both_ways(store: Store, name: str, request: ReadRequest, clock: FakeClock) -> Page:
    """The page of `Store.read`; one that is read without a wait for the disk must be equal."""
    before = _marks(store, name, clock)
    page = await store.read(name, request)
    # The direct way reads from the files again, which are open now.
    cast(Any, store.read).__self__._fetcher._cache = BlockCache(BLOCK_CACHE_BYTES_MAX)
    direct = store.read_resident(name, request)
    if direct is not None and _marks(store, name, clock) == before:
        assert outside_of(direct) == outside_of(page)
        assert rows_of(direct) == rows_of(page)
    cast(Any, store.read).__self__._fetcher._cache = BlockCache(BLOCK_CACHE_BYTES_MAX)
    for shown in (DATA, DATA | META, DATA | META | TAGS):
        as_json = store.read_json(name, request, shown)
        if as_json is not None and _marks(store, name, clock) == before:
            assert json_of(as_json, shown) == json_of(page, shown)
            soon = await store.read_json_from_disk(name, request, shown)
            if soon is not None and _marks(store, name, clock) == before:
                assert json_of(soon, shown) == json_of(page, shown)
    return page


def json_of(page: Page | JsonPage, shown: int) -> bytes:
    """The page as it is sent."""
    return b"".join(render_page("t", page, shown, JsonCache()))


def outside_of(page: Page) -> Page:
    """A page without its records."""
    return msgspec.structs.replace(page, pieces=[])


def rows_of(page: Page) -> list[tuple[object, ...]]:
    """Everything that a page has about each of its records."""
    found: list[tuple[object, ...]] = []
    for piece in page.pieces:
        block = piece.block
        for row in piece.rows:
            texts = bytes(block.data(row)), bytes(block.meta(row))
            labels = block.tags[row], block.nodes[row], block.kinds[row], block.hops[row]
            found.append((block.first_seq + row, block.times[row], *texts, *labels))
    return found


def covers(gaps: Sequence[Gap], first: int, last: int) -> bool:
    """Whether every seq of a range is in a gap."""
    for gap in sorted(gaps, key=lambda gap: gap.gap_from):
        if gap.gap_from <= first <= gap.gap_to:
            first = gap.gap_to + 1
    return first > last


def differs(plain: Plain, seen: Seen | None, *, may_jump: bool) -> str | None:
    """The difference between `seen` and `plain`; None if there is none."""
    if seen is None or not plain.exists:
        return None if (seen is not None) == plain.exists else f"exists: {plain.exists}"
    if seen.config != plain.config:
        return f"config {seen.config}"
    jumped = seen.head > plain.head
    if seen.head < plain.head or (jumped and not may_jump):
        return f"head {seen.head}, not {plain.head}"
    if jumped and not covers(seen.gaps, plain.head + 1, seen.head):
        return f"seqs {plain.head + 1}..{seen.head} are missing in silence"
    if seen.producers != plain.producers:
        return f"producers {seen.producers}, not {plain.producers}"
    if seen.count != len(seen.records):
        return f"count {seen.count}, but {len(seen.records)} records are read"
    return _records_differ(plain, seen) or _gaps_differ(plain, seen)


def _records_differ(plain: Plain, seen: Seen) -> str | None:
    for seq, rec in seen.records.items():
        expected = plain.records.get(seq)
        if expected is None:
            return f"seq {seq} is there: {rec}"
        if plain.is_ephemeral():
            # The last time is lost with the records; times may begin anew.
            rec = rec._replace(ts=expected.ts)
        if rec != expected:
            return f"seq {seq} is {rec}, not {expected}"
        if plain.is_hidden(seq, seen.now_ms):
            return f"seq {seq} is past its TTL and still read"
        if seq < plain.told_below:
            return f"seq {seq} had expired and is read again"
    for seq in plain.records:
        if seq in seen.records or seq in plain.maybe_gone:
            continue
        if seq >= plain.hidden_below:
            return f"seq {seq} is missing: {plain.records[seq]}"
        if not covers(seen.gaps, seq, seq):
            return f"seq {seq} expired in silence"
    return None


def _gaps_differ(plain: Plain, seen: Seen) -> str | None:
    lost = [(1, plain.floor - 1), *plain.holes]
    for first, last in lost:
        if first <= last and not covers(seen.gaps, first, last):
            return f"seqs {first}..{last} are lost, but only {seen.gaps} are told"
    for gap in seen.gaps:
        if any(gap.gap_from <= seq <= gap.gap_to for seq in seen.records):
            return f"{gap} tells records as lost that are read"
        if gap.reason in _TOLD_LOSSES:
            has_lost = plain.floor > 1 or plain.hidden_below > 1
            if not has_lost or gap.gap_to >= max(seen.earliest, 2):
                return f"{gap}, but nothing was evicted up to there"
        elif not _is_hole(plain, gap):
            return f"{gap}, but there is no such hole"
    return None


def _is_hole(plain: Plain, gap: Gap) -> bool:
    """Whether the range lies in holes, or above the head (which has jumped)."""
    holes = [Gap(a, b, gap.reason, 0) for a, b in (*plain.holes, (1, plain.vague_below - 1))]
    return covers(
        [*holes, Gap(plain.head + 1, gap.gap_to, gap.reason, 0)], gap.gap_from, gap.gap_to
    )


class Ledger:
    """All records that any reader or writer has seen; (name, epoch, seq) must name one record for
    ever.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], tuple[object, ...]] = {}

    def note(self, name: str, epoch: int, seq: int, rec: Rec) -> None:
        """Note that a client has seen this record at this position. The record's time is left out,
        because acks do not contain it.
        """
        told = (rec.data, rec.meta, rec.tag, rec.node)
        known = self._known.setdefault((name, epoch, seq), told)
        assert known == told, f"{name}, epoch {epoch}, seq {seq} was {known}, is now {told}"

    def note_all(self, name: str, seen: Seen | None) -> None:
        """Note that a reader has read the whole topic."""
        if seen is not None:
            for seq, rec in seen.records.items():
                self.note(name, seen.epoch, seq, rec)


@dataclass(slots=True, eq=False)
class Entry:
    """One call: `answer` once acknowledged; `synced` once it must survive a power loss.

    `is_fact`: it changed something. Other calls get their answer at once and prove nothing about
    earlier ones.
    """

    step: Step
    answer: Answer | None = None
    synced: bool = False
    is_fact: bool = False


@dataclass(slots=True)
class TopicHistory:
    """One topic of a run: the state at the last check, and the calls since."""

    name: str
    config: TopicConfig
    base: Plain = field(default_factory=Plain)
    live: Plain = field(default_factory=Plain)
    entries: list[Entry] = field(default_factory=list)
    # No seq up to this one may ever be assigned again.
    used_head: int = 0

    def settle(self, entry: Entry) -> None:
        """Note that a call of this boot is acknowledged, in the order of the calls."""
        assert entry.answer is not None
        expected = self.live.apply(entry.step)
        assert _fits(entry.answer, expected), (
            f"{self.name}: {entry.step} answered {entry.answer}, not {expected}"
        )
        self.used_head = self.live.head

    def check(self, seen: Seen | None, end: End, max_ms: int, *, was_doubted: bool = False) -> None:
        """Compare after the boot ended in this way; start anew from the present state.

        `max_ms` is the latest time that the clock has shown. `was_doubted`: see `World`.
        """
        closest: list[str] = []
        for count, plain in self._candidates(end):
            plain.expire(max_ms)
            may_jump = end == "power" or (end == "kill" and (was_doubted or plain.is_ephemeral()))
            wrong = differs(plain, seen, may_jump=may_jump)
            if wrong is None:
                self._start_anew(plain, seen)
                return
            closest.append(f"first {count} of {len(self.entries)} calls: {wrong}")
        calls = "\n  ".join(f"{e.step} -> {e.answer} synced={e.synced}" for e in self.entries)
        raise AssertionError(
            f"{self.name} after {end}: no state fits\n "
            + "\n ".join(closest)
            + f"\n seen {seen and sorted(seen.records)}"
            + f"\n gaps {seen and seen.gaps}\n calls:\n  {calls}"
        )

    def _kept_at_least(self, end: End) -> int:
        if end in ("none", "clean"):
            return len(self.entries)
        certain = [
            index + 1
            for index, entry in enumerate(self.entries)
            if entry.is_fact and (entry.synced or end != "power")
        ]
        return max(certain, default=0)

    def _candidates(self, end: End) -> Iterator[tuple[int, Plain]]:
        at_least = self._kept_at_least(end)
        plain = self.base.copy()
        found: list[tuple[int, Plain]] = []
        last_fact = max((i for i, e in enumerate(self.entries) if e.is_fact), default=-1)
        doubtful: Plain | None = None
        for count in range(len(self.entries) + 1):
            if count:
                entry = self.entries[count - 1]
                if entry.answer is None and count - 1 < last_fact:
                    # A read-only shard refused this entry, but a later entry of another
                    # incarnation, on another shard, counts. If that entry is lost, this one may
                    # have taken effect.
                    doubtful = doubtful or plain.copy()
                    doubtful.apply(entry.step)
                    if count >= at_least:
                        found.append((count, doubtful.copy()))
                    continue
                if entry.is_fact:
                    doubtful = None
                answer = plain.apply(entry.step)
                assert not entry.is_fact or _fits(entry.answer, answer), (
                    f"{self.name}: {entry.step} answered {entry.answer}, not {answer}"
                )
            if count >= at_least:
                found.append((count, plain.copy()))
        if not self.live.exists:
            # Creations that read-only shards refused are topics of their own: any of them may exist
            # alone.
            for entry in self.entries[last_fact + 1 :]:
                if entry.answer is None and isinstance(entry.step, Append | Put):
                    alone = Plain()
                    alone.apply(entry.step)
                    found.insert(0, (len(self.entries), alone))
        for count, state in reversed(found):
            if end == "power":
                lost = [entry.step for entry in self.entries[count:]]
                deletes = [step for step in lost if isinstance(step, Delete)]
                state.maybe_gone |= frozenset(s for step in deletes for s in state.hits(step))
            if end != "none" and state.is_ephemeral() and state.exists:
                _lose(state)
            if end in ("kill", "power"):
                # An expiry that was not journaled yet may be reported again.
                state.told_below = 1
            yield count, state
            if state.lazy:
                state = state.copy()
                state.evict()
                yield count, state

    def _start_anew(self, plain: Plain, seen: Seen | None) -> None:
        if seen is not None:
            if seen.head > plain.head:
                plain.holes.append((plain.head + 1, seen.head))
            plain.head = seen.head
            for seq in [seq for seq in plain.records if seq not in seen.records]:
                del plain.records[seq]
                if seq not in plain.maybe_gone:
                    plain.floor = max(plain.floor, seq + 1)
            plain.maybe_gone = frozenset()
            same = any(e.step for e in self.entries) or self.used_head == 0
            assert same or seen.head >= self.used_head
        self.base = plain
        self.live = plain.copy()
        self.entries = []
        self.used_head = plain.head


def _lose(plain: Plain) -> None:
    """An ephemeral topic after the end of its process has only its head. Deleted records may be
    reported as lost.
    """
    plain.holes += [(seq, seq) for seq in plain.records]
    plain.records.clear()
    plain.keys.clear()
    plain.producers.clear()
    plain.lazy = False
    plain.vague_below = plain.head + 1


def _fits(answer: Answer | None, expected: Answer) -> bool:
    assert answer is not None
    if answer[0] == expected[0] == "deleted":
        return expected[1] is None or answer == expected
    return answer == expected
