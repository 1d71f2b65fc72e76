"""The writers' knowledge in a watch chaos run: every record, delete, cap and incarnation of a
topic.

Writers repeat a request after a crash until it has an answer, so a result is unknown only for
records that a crash may lose: those of an ephemeral topic. Such records float: the first reader
that sees one binds its seq. Times are numbers of one counter that the whole run uses. No I/O.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.crash.kills.ledger import Delete, Json

_PAD: Final = "0123456789abcdefghijklmnopqrstuvwxyz" * 1000

# The form of a record to write: node, tag, pad_bytes, has_meta.
Sort = tuple[str | None, str | None, int, bool]


@dataclass(slots=True)
class Written:
    """One record: its content, the time of its append, and the time of its acknowledgement."""

    id: str
    topic: str
    incarnation: int
    node: str | None
    tag: str | None
    pad_bytes: int
    has_meta: bool
    sent: int
    acked: int | None = None

    def data(self) -> Json:
        """Its payload, computed again so that it need not be stored."""
        return {"id": self.id, "pad": _PAD[: self.pad_bytes]}

    def meta(self) -> Json:
        """Its `meta`, where it has one."""
        return {"of": self.id}

    def body(self) -> Json:
        """The record as an append sends it."""
        whole: Json = {"data": self.data()}
        if self.node is not None:
            whole["node"] = self.node
        if self.tag is not None:
            whole["tag"] = self.tag
        if self.has_meta:
            whole["meta"] = self.meta()
        return whole


@dataclass(slots=True)
class Caps:
    """The caps in force from the moment `sent` on; `head_end` is the head when other caps
    followed.
    """

    cap_records: int
    cap_bytes: int
    sent: int
    head_end: int | None = None


@dataclass(slots=True)
class Incarnation:
    """One life of a topic, from its creation to its removal."""

    topic: str
    number: int
    is_ephemeral: bool
    created_sent: int
    record_bytes_max: int
    stops: list[int]
    records: dict[int, Written] = field(default_factory=dict)
    floating: dict[str, Written] = field(default_factory=dict)
    deletes: list[Delete] = field(default_factory=list)
    caps: list[Caps] = field(default_factory=list)
    head_seq: int = 0
    created_acked: int | None = None
    dropped_sent: int | None = None
    dropped_acked: int | None = None
    # Computed after all writers have ended.
    _tops: list[tuple[int, int]] = field(default_factory=list)
    _deleted: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    _seqs: list[int] = field(default_factory=list)

    def bind(self, seq: int, written: Written) -> str | None:
        """Note the record of this seq; the problem if the seq has another one."""
        other = self.records.get(seq)
        if other is not None and other.id != written.id:
            return f"seq {seq} is {other.id} for one and {written.id} for another"
        self.records[seq] = written
        self.head_seq = max(self.head_seq, seq)
        return None

    def is_alive_between(self, first: int, last: int) -> bool:
        """Whether the record may have existed at some time in the span."""
        return self.created_sent < last and (
            self.dropped_acked is None or self.dropped_acked > first
        )

    def may_be_deleted(self, seq: int, at: int) -> bool:
        """Whether a delete sent by then can have removed the record."""
        sent, _ = self._deletes_of(seq)
        return sent is not None and sent < at

    def was_surely_deleted(self, seq: int, at: int) -> bool:
        """Whether a delete of the record was acknowledged by then."""
        _, acked = self._deletes_of(seq)
        return acked is not None and acked < at

    def _deletes_of(self, seq: int) -> tuple[int | None, int | None]:
        """Two times: of the earliest delete that may have hit the seq, and of the earliest that
        surely did.
        """
        # Computed only after all writers have ended, so a result stays true.
        found = self._deleted.get(seq)
        if found is not None:
            return found
        written = self.records.get(seq)
        may: int | None = None
        sure: int | None = None
        for delete in self.deletes if written is not None else ():
            assert written is not None
            if not delete.hits(seq, written.tag):
                continue
            if delete.acked is not None and delete.acked < written.sent:
                continue  # the delete had ended before the record was sent
            may = delete.sent if may is None else min(may, delete.sent)
            if written.acked and written.acked < delete.sent and delete.acked is not None:
                sure = delete.acked if sure is None else min(sure, delete.acked)
        self._deleted[seq] = may, sure
        return may, sure

    def top_at(self, at: int) -> int:
        """The largest seq of a record that was sent by then."""
        if not self._tops:
            top = 0
            for sent, seq in sorted((w.sent, seq) for seq, w in self.records.items()):
                top = max(top, seq)
                self._tops.append((sent, top))
        index = bisect.bisect_left(self._tops, (at, 0))
        return self._tops[index - 1][1] if index else 0

    def evictable_to(self, at: int, head_seq: int) -> int:
        """The largest seq that the caps in force up to `at` can have evicted; 0 if none.

        `head_seq` is the head in the reader's last frame; records not yet sent to the reader evict
        as well.
        """
        head_seq = max(head_seq, self.top_at(at))
        largest = 0
        for caps in self.caps:
            if caps.sent >= at:
                break
            head = head_seq if caps.head_end is None else min(head_seq, caps.head_end)
            if caps.cap_records:
                largest = max(largest, head - caps.cap_records)
            if caps.cap_bytes:
                largest = max(largest, head + 1 - caps.cap_bytes // self.record_bytes_max)
        return largest

    def first_kept(self, first: int, last: int, at: int) -> int | None:
        """The first seq of a range that neither a stop nor a delete can have removed by then."""
        stop = self._last_stop(at)
        # An ephemeral head's jumps have many seqs and no records: walk only the records.
        seqs = range(first, last + 1) if stop is None else self._written_seqs(first, last)
        for seq in seqs:
            is_taken = stop is not None and self.records[seq].sent < stop
            if not is_taken and not self.may_be_deleted(seq, at):
                return seq
        return None

    def is_any_lost_by_stop(self, first: int, last: int, at: int) -> bool:
        """Whether a stop of the server by then can have lost an ephemeral record of a range."""
        stop = self._last_stop(at)
        if stop is None:
            return False
        seqs = self._written_seqs(first, last)
        return len(seqs) <= last - first or any(self.records[seq].sent < stop for seq in seqs)

    def _last_stop(self, at: int) -> int | None:
        """The last stop before a time; it loses all that an earlier one loses."""
        if not self.is_ephemeral:
            return None
        index = bisect.bisect_left(self.stops, at)
        return self.stops[index - 1] if index else None

    def _written_seqs(self, first: int, last: int) -> list[int]:
        if len(self._seqs) != len(self.records):
            self._seqs = sorted(self.records)
        return self._seqs[bisect.bisect_left(self._seqs, first) : bisect.bisect(self._seqs, last)]


class Ledger:
    """All topics of a run. `stops`: the times after which a dead server changes nothing."""

    def __init__(self) -> None:
        self._moments: Iterator[int] = itertools.count(1)
        self.now = 0
        self.stops: list[int] = []
        self.topics: dict[str, list[Incarnation]] = {}
        self.written: dict[str, Written] = {}

    def moment(self) -> int:
        """A number larger than every one before."""
        self.now = next(self._moments)
        return self.now

    def may_be_absent(self, topic: str, first: int, last: int) -> bool:
        """Whether the topic may have been absent at some time in the span."""
        lives: list[Incarnation | None] = [*self.topics[topic], None]
        for life, following in itertools.pairwise(lives):
            assert life is not None
            if life.dropped_sent is None or life.dropped_sent > last:
                continue
            back = following.created_acked if following is not None else None
            if back is None or back > first:
                return True
        return False

    def create(self, topic: str, *, is_ephemeral: bool, record_bytes_max: int) -> Incarnation:
        """The next incarnation, which is about to be created."""
        lives = self.topics.setdefault(topic, [])
        assert not lives or lives[-1].dropped_sent is not None, f"{topic} exists"
        made = Incarnation(
            topic, len(lives) + 1, is_ephemeral, self.moment(), record_bytes_max, self.stops
        )
        lives.append(made)
        return made

    def compose(self, incarnation: Incarnation, number: int, *records: Sort) -> list[Written]:
        """The records of append `number`."""
        sent = self.moment()
        made = [
            Written(f"{number}.{i}", incarnation.topic, incarnation.number, *sort, sent)
            for i, sort in enumerate(records)
        ]
        for written in made:
            self.written[written.id] = written
        return made
