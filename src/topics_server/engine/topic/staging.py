"""One topic's queue of decided entries that are not applied yet.

Entries join at the back, leave at the front when committed, and are undone as a suffix. A decision
reads the visible state plus these entries. Called by `engine/topic/topic.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from topics_server.values.entries import (
    Entry,
    Floor,
    HeadReserved,
    RecordsAppended,
    RecordsDeleted,
    TopicDropped,
    TopicPut,
)

# Deletes of up to this many seqs are stored seq by seq.
_NAMED_SEQS_MAX: Final = 4096
_Columns = tuple[list[int], list[int]]
# Entries that create, configure or drop the topic.
_CONTROLS: Final = (TopicPut, TopicDropped)
# All topics without a staged entry share this object: even an empty deque has room for 64 entries.
_NOTHING_STAGED: Final[deque[Staged]] = deque(maxlen=0)
# The same for topics without a staged delete.
_NOTHING_DIES: Final[set[int]] = set()
_NOTHING_DIES_AGAIN: Final[dict[int, int]] = {}


class Staged:
    """One entry in flight. `first_seq` and `count` are those of an append's records, else 0.

    `last_seq`: the last seq that the entry assigns; 0 if it assigns none. `weight`: the bytes of
    its records; 0 unless it is an append. `is_control`: whether it creates, configures or drops the
    topic. `key` and `producer_id`: those of the append, if it has them.
    """

    __slots__ = (
        "count",
        "entry",
        "first_seq",
        "is_control",
        "key",
        "last_seq",
        "lsn",
        "producer_id",
        "weight",
    )

    def __init__(
        self, lsn: int, entry: Entry, key: str | None = None, producer_id: str | None = None
    ) -> None:
        self.lsn = lsn
        self.entry = entry
        self.key = key
        self.producer_id = producer_id
        self.first_seq = self.count = self.last_seq = self.weight = 0
        self.is_control = False
        if isinstance(entry, RecordsAppended):
            self.is_control = entry.creation is not None
            self.first_seq = entry.first_seq
            self.count = entry.count
            self.last_seq = entry.first_seq + entry.count - 1
            if entry.page is not None:
                slots = entry.slot_count
                self.first_seq += slots
                self.count -= slots
            if self.count:
                assert entry.decoded is not None, "a live append is decoded"
                self.weight = entry.decoded.weight
        elif isinstance(entry, _CONTROLS):
            self.is_control = True

    @property
    def floor(self) -> Floor | None:
        """The floor that the entry will set, if any."""
        entry = self.entry
        if isinstance(entry, TopicDropped | HeadReserved):
            return None
        return getattr(entry, "floor", None)


class Staging:
    """The FIFO. Empty most of the time for all but busy topics.

    Every append needs most of these facts while a hundred others may be in flight, so they are kept
    up to date and not computed. `records` and `weight` are those of all appends in flight,
    `last_seq` and `last_ts` the last seq and the commit time (ms) of the newest one, else 0.
    `_dying`: the seqs that deletes in flight delete, each once; `_dying_again`: how many further
    deletes delete a seq. Deletes of many seqs are in `_ranges` instead. `_floors` and `_ceilings`:
    for each entry that has one, its lsn and the highest floor or ceiling so far. They may still
    contain applied entries; the caller skips these.
    """

    __slots__ = (
        "_ceilings",
        "_controls",
        "_drops",
        "_dying",
        "_dying_again",
        "_fifo",
        "_floors",
        "_ranges",
        "last_seq",
        "last_ts",
        "records",
        "weight",
    )

    def __init__(self) -> None:
        self.records = 0
        self.weight = 0
        self.last_seq = 0
        self.last_ts = 0
        self._fifo = _NOTHING_STAGED
        self._dying = _NOTHING_DIES
        self._dying_again = _NOTHING_DIES_AGAIN
        self._ranges: list[_Columns] = []
        # Lists, because few entries in flight have a floor or a ceiling.
        self._floors: list[tuple[int, int]] = []
        self._ceilings: list[tuple[int, int]] = []
        self._controls = self._drops = 0

    def __len__(self) -> int:
        return len(self._fifo)

    def push(self, staged: Staged) -> None:
        """Add an entry at the back; lsns ascend."""
        fifo, entry = self._fifo, staged.entry
        if fifo is _NOTHING_STAGED:
            assert self is not IDLE, "all topics share it"
            fifo = self._fifo = deque()
        assert not fifo or fifo[-1].lsn < staged.lsn
        fifo.append(staged)
        if isinstance(entry, RecordsAppended):
            # The body of `_note`, inlined except for a creation, because every append runs this.
            self.records += staged.count
            self.weight += staged.weight
            self._controls += staged.is_control
            self.last_seq, self.last_ts = staged.last_seq, entry.ts
            floor = entry.floor
        elif isinstance(entry, RecordsDeleted):
            if entry.seqs is not None:
                self._add_dying(entry.seqs)
            else:
                self._note_ranges(entry, is_staged=True)
            return
        else:
            self._note(staged, 1)
            floor = staged.floor
        if floor is not None:
            _push_highest(self._floors, staged.lsn, floor.seq)
        if isinstance(entry, HeadReserved):
            _push_highest(self._ceilings, staged.lsn, entry.ceiling_seq)

    def pop(self, lsn: int) -> Staged:
        """Remove the front entry, which has this lsn."""
        staged = self._fifo.popleft()
        assert staged.lsn == lsn, "entries leave in the order in which they came"
        if staged.last_seq:
            self.records -= staged.count
            self.weight -= staged.weight
            self._controls -= staged.is_control
            if staged.last_seq == self.last_seq:
                self.last_seq = self.last_ts = 0
        elif isinstance(entry := staged.entry, RecordsDeleted):
            if entry.seqs is not None:
                self._remove_dying(entry.seqs)
            else:
                self._note_ranges(entry, is_staged=False)
            return staged
        else:
            self._note(staged, -1)
        for highest in (self._floors, self._ceilings):
            if highest and highest[0][0] == lsn:
                del highest[0]
        return staged

    def pop_from(self, lsn: int) -> list[Staged]:
        """Remove every entry of this lsn or later from the back; oldest first."""
        undone: list[Staged] = []
        while self._fifo and self._fifo[-1].lsn >= lsn:
            undone.append(self._fifo.pop())
        undone.reverse()
        for staged in undone:
            self._note(staged, -1)
        newest = next((each for each in reversed(self._fifo) if each.last_seq), None)
        self.last_seq = newest.last_seq if newest is not None else 0
        self.last_ts = newest.entry.ts if newest is not None else 0  # type: ignore[union-attr]
        for highest in (self._floors, self._ceilings):
            while highest and highest[-1][0] >= lsn:
                highest.pop()
        return undone

    def _note(self, staged: Staged, sign: int) -> None:
        """Count an entry that is added (1) or removed (-1)."""
        if staged.count:
            self.records += sign * staged.count
            self.weight += sign * staged.weight
        if staged.is_control:
            self._controls += sign
            self._drops += sign * isinstance(staged.entry, TopicDropped)
        if isinstance(entry := staged.entry, RecordsDeleted):
            # One that leaves: `push` counts the others.
            assert sign < 0
            if entry.seqs is not None:
                self._remove_dying(entry.seqs)
            else:
                self._note_ranges(entry, is_staged=False)

    def _note_ranges(self, entry: RecordsDeleted, *, is_staged: bool) -> None:
        """Count a delete that does not name its seqs."""
        columns = _columns_of(entry)
        firsts, lasts = columns
        if sum(lasts) - sum(firsts) + len(firsts) > _NAMED_SEQS_MAX:
            if is_staged:
                self._ranges.append(columns)
            else:
                self._ranges.remove(columns)
            return
        note = self._add_dying if is_staged else self._remove_dying
        for first, last in zip(firsts, lasts, strict=True):
            note(range(first, last + 1))

    def _add_dying(self, seqs: Sequence[int]) -> None:
        dying = self._dying
        if not dying:
            self._dying = set(seqs)
            return
        if not dying.isdisjoint(seqs):
            again = self._dying_again = dict(self._dying_again)
            for seq in dying.intersection(seqs):
                again[seq] = again.get(seq, 0) + 1
        dying.update(seqs)

    def _remove_dying(self, seqs: Sequence[int]) -> None:
        dying, again = self._dying, self._dying_again
        assert dying.issuperset(seqs)
        if len(dying) == len(seqs) and not again:
            self._dying = _NOTHING_DIES
            return
        dying.difference_update(seqs)
        if again:
            for seq in again.keys() & seqs:
                dying.add(seq)
                again[seq] -= 1
                if not again[seq]:
                    del again[seq]

    def without_dying(self, seqs: list[int]) -> list[int]:
        """The seqs that no delete in flight deletes."""
        if self._ranges:
            return [seq for seq in seqs if not self.is_dying(seq)]
        dying = self._dying
        if not dying or dying.isdisjoint(seqs):
            return seqs
        return [seq for seq in seqs if seq not in dying]

    def is_dying(self, seq: int) -> bool:
        """Whether a delete in flight deletes this seq."""
        if seq in self._dying:
            return True
        for firsts, lasts in self._ranges:
            at = bisect_right(firsts, seq) - 1
            if at >= 0 and seq <= lasts[at]:
                return True
        return False

    def appends(self) -> list[Staged]:
        """The appends in flight that have records, oldest first."""
        return [staged for staged in self._fifo if staged.count]

    def assigning(self) -> Iterator[Staged]:
        """The entries in flight that assign seqs, oldest first."""
        return (staged for staged in self._fifo if staged.last_seq)

    @property
    def first_seq(self) -> int:
        """The first seq of the records in flight; 0 if there are none."""
        for staged in self._fifo:
            if staged.count:
                return staged.first_seq
        return 0

    @property
    def floor_seq(self) -> int:
        """The highest floor in flight; 0 if there is none."""
        return self._floors[-1][1] if self._floors else 0

    @property
    def ceiling_seq(self) -> int:
        """The highest ceiling in flight; 0 if there is none."""
        return self._ceilings[-1][1] if self._ceilings else 0

    @property
    def has_drop(self) -> bool:
        """Whether a drop of the topic is in flight."""
        return self._drops > 0

    @property
    def has_control(self) -> bool:
        """Whether a create, configure or drop is in flight, for which commands must wait."""
        return self._controls > 0


# The staging of every topic without an entry in flight since the start. It never changes.
IDLE: Final = Staging()


def _push_highest(highest: list[tuple[int, int]], lsn: int, seq: int) -> None:
    highest.append((lsn, max(seq, highest[-1][1]) if highest else seq))


def _columns_of(entry: RecordsDeleted) -> _Columns:
    firsts, lasts = (np.frombuffer(column, "<u8") for column in (entry.firsts, entry.lasts))
    return firsts.tolist(), lasts.tolist()
