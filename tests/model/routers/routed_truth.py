"""The expected state of one topic after its entries: a second, naive `apply`, for topics with
routers.

`Folded` is a topic as a plain dict of records after a prefix of its FIFO. `Fact` is one submitted
entry and its result. `differs` compares a fold with a recovered or a live topic. Used by
`routed_judge`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np

from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import (
    CursorMoved,
    Entry,
    Floor,
    FloorMoved,
    RecordsAppended,
    RecordsDeleted,
    TopicDropped,
    TopicPut,
)
from topics_server.values.model import Durability, Gate, LossReason, TopicConfig

Fate = Literal["pending", "applied", "failed", "unknown"]
_EPHEMERAL: Final = Durability.EPHEMERAL


class Rec(NamedTuple):
    """A record, which must be read in this form for ever."""

    data: bytes
    meta: bytes
    tag: str | None
    node: str | None
    hops: int
    ts: int


@dataclass(slots=True, eq=False)
class Fact:
    """One submitted entry. `unknown`: its sync failed, a restart decides."""

    lsn: int
    entry: Entry
    gate: Gate
    fate: Fate = "pending"

    @property
    def has_frame(self) -> bool:
        """Whether any part of it was to be written."""
        return self.gate is not Gate.NONE


@dataclass(slots=True)
class Folded:
    """One incarnation of a topic. `records`: the live ones. `unframed`: seqs without a frame.

    `cursors`: by router, its seq and its copies; `vague`: routers whose cursor moved without a
    frame. `slots`: dead slots for losses of a source.
    """

    exists: bool = False
    name: str = ""
    config: TopicConfig = field(default_factory=TopicConfig)
    head: int = 0
    floor: int = 1
    records: dict[int, Rec] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    slots: dict[int, int] = field(default_factory=dict)
    unframed: set[int] = field(default_factory=set)
    cursors: dict[int, tuple[int, int]] = field(default_factory=dict)
    vague: set[int] = field(default_factory=set)
    was_ephemeral: bool = False

    def copy(self) -> Folded:
        """An independent one."""
        other = copy.copy(self)
        other.records, other.slots = dict(self.records), dict(self.slots)
        other.deleted, other.unframed = set(self.deleted), set(self.unframed)
        other.cursors, other.vague = dict(self.cursors), set(self.vague)
        return other

    def apply(self, fact: Fact) -> None:
        """Apply the entry."""
        entry = fact.entry
        if isinstance(entry, TopicPut):
            self._put(entry)
        elif isinstance(entry, RecordsAppended):
            self._append(entry, has_frame=fact.has_frame)
        elif isinstance(entry, RecordsDeleted):
            for seq in seqs_of(entry):
                self.records.pop(seq, None)
                self.deleted.add(seq)
                self.head = max(self.head, seq)
        elif isinstance(entry, FloorMoved):
            self._raise(entry.floor)
        elif isinstance(entry, CursorMoved):
            self._advance(entry.router_id, entry.cursor_seq, 0)
        elif isinstance(entry, TopicDropped):
            self.exists = False

    def _put(self, entry: TopicPut) -> None:
        self.exists, self.name, self.config = True, entry.name, entry.config
        self.head = max(self.head, entry.head_seq)
        if entry.config.durability is _EPHEMERAL:
            # After that the topic's content is no longer guaranteed.
            self.was_ephemeral = True
            self.unframed |= set(self.records)
        if entry.floor is not None:
            self._raise(entry.floor)

    def _append(self, entry: RecordsAppended, *, has_frame: bool) -> None:
        if entry.creation is not None:
            self._put(entry.creation)
        page = entry.page
        if page is not None:
            self._advance(page.router_id, page.cursor_seq, page.copy_count)
            if not has_frame:
                self.vague.add(page.router_id)
            if page.lost:
                self.slots[entry.first_seq] = page.lost
        for seq, rec in records_of(entry):
            self.records[seq] = rec
            if not has_frame or self.config.durability is _EPHEMERAL:
                self.unframed.add(seq)
        self.head = max(self.head, entry.first_seq + entry.count - 1)
        if entry.floor is not None:
            self._raise(entry.floor)

    def _advance(self, router_id: int, seq: int, copies: int) -> None:
        at, count = self.cursors.get(router_id, (0, 0))
        self.cursors[router_id] = (max(at, seq), count + copies)

    def _raise(self, floor: Floor) -> None:
        self.floor = max(self.floor, floor.seq)
        self.head = max(self.head, floor.seq - 1)
        for seq in [seq for seq in self.records if seq < self.floor]:
            del self.records[seq]
        for seq in [seq for seq in self.slots if seq < self.floor]:
            del self.slots[seq]


def seqs_of(entry: RecordsDeleted) -> list[int]:
    """The seqs that a delete names."""
    firsts = np.frombuffer(entry.firsts, "<u8").tolist()
    lasts = np.frombuffer(entry.lasts, "<u8").tolist()
    runs = zip(firsts, lasts, strict=True)
    return [seq for first, last in runs for seq in range(first, last + 1)]


def records_of(entry: RecordsAppended) -> list[tuple[int, Rec]]:
    """The records of an append by seq."""
    decoded = entry.decoded
    assert decoded is not None
    hops = decoded.hops or bytes(decoded.count)
    first_seq = entry.first_seq + entry.slot_count
    return [
        (
            first_seq + row,
            Rec(
                bytes(decoded.datas[row]),
                bytes(decoded.metas[row]),
                decoded.tags[row],
                decoded.nodes[row],
                hops[row],
                entry.ts,
            ),
        )
        for row in range(decoded.count)
    ]


def live_seqs(topic: Topic) -> set[int]:
    """The seqs that live in a topic, whatever their payloads."""
    return {
        run.first_seq + row
        for run in topic.log.runs
        for row in range(len(run.dead))
        if not run.dead[row]
    }


@dataclass(slots=True, frozen=True)
class Leeway:
    """Allowed changes of a restart beside the prefix of entries that it kept."""

    is_restart: bool = False
    may_jump: bool = False
    maybe_gone: frozenset[int] = frozenset()
    cursors: dict[int, int] = field(default_factory=dict)
    # Cursors of other routers have no owner: an entry in flight may note one of a removed router.
    routers: frozenset[int] | None = None


def differs(fold: Folded, topic: Topic | None, leeway: Leeway) -> str | None:
    """The difference between the topic and the fold; None if there is none."""
    if topic is None or not fold.exists:
        return None if (topic is not None) == fold.exists else f"exists: {fold.exists}"
    log = topic.log
    if (topic.name, topic.config) != (fold.name, fold.config):
        return f"is {topic.name} {topic.config}, not {fold.name} {fold.config}"
    is_lost = leeway.is_restart and fold.config.durability is _EPHEMERAL
    live = live_seqs(topic)
    if is_lost:
        if live or log.head_seq < fold.head:
            return f"ephemeral: {sorted(live)} live, head {log.head_seq} not {fold.head}"
        return None
    optional = leeway.maybe_gone | (fold.unframed if leeway.is_restart else set())
    missing = set(fold.records) - live - optional
    if missing or live - set(fold.records):
        return f"{sorted(missing)} are missing, {sorted(live - set(fold.records))} are back"
    is_loose = leeway.is_restart and fold.was_ephemeral
    may_jump = leeway.may_jump or is_loose
    if log.head_seq < fold.head or (log.head_seq > fold.head and not may_jump):
        return f"head {log.head_seq}, not {fold.head}"
    if log.evict_floor != fold.floor and not is_loose:
        return f"floor {log.evict_floor}, not {fold.floor}"
    return _slots_differ(fold, topic, is_loose) or _cursors_differ(fold, topic, leeway)


def _slots_differ(fold: Folded, topic: Topic, is_loose: bool) -> str | None:
    if is_loose:
        return None
    for seq in fold.slots:
        holes = [hole for hole in topic.log.holes if hole.first_seq <= seq <= hole.last_seq]
        if [hole.reason for hole in holes] != [LossReason.SOURCE_TRIM]:
            return f"seq {seq} is no slot of what the source lost: {holes}"
    told = {
        seq
        for hole in topic.log.holes
        if hole.reason is LossReason.SOURCE_TRIM
        for seq in range(hole.first_seq, hole.last_seq + 1)
    }
    strange = told - set(fold.slots)
    return f"seqs {sorted(strange)} say that the source lost something" if strange else None


def _cursors_differ(fold: Folded, topic: Topic, leeway: Leeway) -> str | None:
    for router_id, cursor in topic.cursors.items():
        if leeway.routers is not None and router_id not in leeway.routers:
            continue
        seq, count = fold.cursors.get(router_id, (0, 0))
        if router_id in fold.vague and leeway.is_restart:
            continue
        highest = max(seq, leeway.cursors.get(router_id, cursor.seq))
        if not seq <= cursor.seq <= highest or cursor.copy_count != count:
            return f"router {router_id} is at {cursor}, not {seq}..{highest} with {count} copies"
    return None
