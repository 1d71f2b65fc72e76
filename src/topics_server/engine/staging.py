"""One topic's FIFO of decided, uncommitted entries, and what they will do once applied.

Entries join at the back, are taken from the front when committed, and are undone as a suffix.
Whoever decides sees the visible state plus this. Called by `engine/topic.py`.
"""

from __future__ import annotations

from collections import deque

from topics_server.engine.runs import weigh
from topics_server.entries import (
    Entry,
    Floor,
    HeadReserved,
    RecordsAppended,
    TopicDropped,
    TopicPut,
)


class Staged:
    """One entry under way. `first_seq` and `count` are of an append, else 0."""

    __slots__ = ("count", "entry", "first_seq", "key", "lsn")

    def __init__(self, lsn: int, entry: Entry, key: str | None) -> None:
        self.lsn = lsn
        self.entry = entry
        self.key = key
        self.first_seq = 0
        self.count = 0
        if isinstance(entry, RecordsAppended):
            self.first_seq = entry.first_seq
            self.count = entry.count

    def weight(self) -> int:
        """What its records count in bytes; 0 for anything but an append."""
        if self.count == 0:
            return 0
        assert isinstance(self.entry, RecordsAppended)
        decoded = self.entry.decoded
        assert decoded is not None, "a live append is decoded"
        return weigh(decoded.datas, decoded.metas, decoded.tags, decoded.nodes)

    @property
    def floor(self) -> Floor | None:
        """The floor it will raise, if any."""
        entry = self.entry
        if isinstance(entry, TopicDropped | HeadReserved):
            return None
        return getattr(entry, "floor", None)


class Staging:
    """The FIFO. Empty most of the time for all but busy topics."""

    __slots__ = ("_fifo",)

    def __init__(self) -> None:
        self._fifo: deque[Staged] = deque()

    def __len__(self) -> int:
        return len(self._fifo)

    def push(self, staged: Staged) -> None:
        """Join at the back; lsns ascend."""
        assert not self._fifo or self._fifo[-1].lsn < staged.lsn
        self._fifo.append(staged)

    def pop(self, lsn: int) -> Staged:
        """Take the front, which is the entry of this lsn."""
        staged = self._fifo.popleft()
        assert staged.lsn == lsn, "entries leave in the order in which they came"
        return staged

    def pop_from(self, lsn: int) -> list[Staged]:
        """Take every entry of this lsn or later off the back; oldest first."""
        undone: list[Staged] = []
        while self._fifo and self._fifo[-1].lsn >= lsn:
            undone.append(self._fifo.pop())
        undone.reverse()
        return undone

    def appends(self) -> list[Staged]:
        """The appends under way, oldest first."""
        return [staged for staged in self._fifo if staged.count]

    @property
    def last_seq(self) -> int:
        """The last seq assigned by an entry under way; 0 if none assigns any."""
        for staged in reversed(self._fifo):
            if staged.count:
                return staged.first_seq + staged.count - 1
        return 0

    @property
    def last_ts(self) -> int:
        """The commit time of the newest append under way, ms; 0 if there is none."""
        for staged in reversed(self._fifo):
            if isinstance(staged.entry, RecordsAppended):
                return staged.entry.ts
        return 0

    @property
    def floor_seq(self) -> int:
        """The highest floor under way; 0 if there is none."""
        return max((s.floor.seq for s in self._fifo if s.floor), default=0)

    @property
    def ceiling_seq(self) -> int:
        """The highest ceiling under way; 0 if there is none."""
        found = [s.entry.ceiling_seq for s in self._fifo if isinstance(s.entry, HeadReserved)]
        return max(found, default=0)

    @property
    def has_control(self) -> bool:
        """Whether a create, configure or drop is under way: commands wait before decide."""
        for staged in self._fifo:
            entry = staged.entry
            if isinstance(entry, TopicPut | TopicDropped):
                return True
            if isinstance(entry, RecordsAppended) and entry.creation is not None:
                return True
        return False
