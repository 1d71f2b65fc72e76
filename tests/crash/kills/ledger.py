"""What the clients of a killed server know of each record (acknowledged, unknown, gone), and the
verdict.

There is one `TopicLedger` for each topic. Between two checks it collects calls (sent, perhaps
acknowledged). A check compares them with all records that a reader sees when nothing is in flight,
reports problems, and starts again from that view: a record that was missing then is gone for good,
and every unknown call is decided. Times are numbers of one counter, so "finished before the other
began" is known. The threads of the writers append to its lists; only the main thread checks, while
no writer runs. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
# Keyed calls that are kept for retries after a crash: a few of each cycle, for some cycles.
_KEYS_PER_CHECK = 12
_KEYS_MAX = 8 * _KEYS_PER_CHECK


@dataclass(slots=True)
class Call:
    """One append: record i of it has the id `<number>.<i>` and the tag `tags[i]`."""

    number: int
    tags: list[str | None]
    body: bytes
    key: str | None
    in_header: bool
    sent: int
    acked: int | None = None
    first_seq: int | None = None

    def id_of(self, index: int) -> str:
        """The unique id in the payload of one of its records."""
        return f"{self.number}.{index}"


@dataclass(slots=True)
class Delete:
    """One delete; `prefix` or `tag` or neither."""

    before_seq: int | None
    tag: str | None
    prefix: str | None
    sent: int
    acked: int | None = None

    def hits(self, seq: int, tag: str | None) -> bool:
        """Whether the predicate matches a record."""
        if self.before_seq is not None and seq >= self.before_seq:
            return False
        if self.tag is not None:
            return tag == self.tag
        return self.prefix is None or (tag is not None and tag.startswith(self.prefix))


@dataclass(slots=True)
class Known:
    """A record whose seq is known. `acked` is None if only a reader saw it."""

    id: str
    tag: str | None
    sent: int
    acked: int | None


@dataclass(slots=True)
class View:
    """Everything a reader got from seq 0 on, and the topic's state, when nothing was in flight."""

    records: list[Json]
    tombstones: list[Json]
    head_seq: int
    earliest_seq: int
    count: int


@dataclass(slots=True)
class TopicLedger:
    """One incarnation of one topic. `record_bytes_max`: the largest size of our records."""

    name: str
    cap_records: int = 0
    cap_bytes: int = 0
    record_bytes_max: int = 0
    live: dict[int, Known] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    deletes: list[Delete] = field(default_factory=list)
    keyed: list[Call] = field(default_factory=list)
    head_seq: int = 0
    earliest_seq: int = 1

    def check(self, view: View, now: int) -> list[str]:
        """Compare and start anew; `now` is the time of the check. Returns the problems."""
        wrong = self._check_marks(view)
        known = dict(self.live)
        for call in self.calls:
            if call.first_seq is not None:
                wrong += self._bind(call, known)
        unknown = {
            call.id_of(index): (call, index)
            for call in self.calls
            if call.first_seq is None
            for index in range(len(call.tags))
        }
        seen: dict[int, str] = {}
        for record in view.records:
            wrong += self._check_seen(record, seen, known, unknown)
        for call in self.calls:
            if call.first_seq is not None and call.acked is None:
                wrong += self._bind(call, known)
        wrong += self._check_missing(view, seen, known, unknown)
        for seq in seen:
            record_known = known.get(seq)
            if record_known is not None and self._is_surely_deleted(seq, record_known):
                wrong.append(f"seq {seq} ({record_known.id}) is back after its delete")
        self._start_anew(view, seen, known, now)
        return [f"{self.name}: {line}" for line in wrong]

    def _check_marks(self, view: View) -> list[str]:
        wrong = []
        if view.head_seq < self.head_seq:
            wrong.append(f"the head went back from {self.head_seq} to {view.head_seq}")
        if view.earliest_seq < self.earliest_seq:
            wrong.append(f"earliest went back from {self.earliest_seq} to {view.earliest_seq}")
        if view.count != len(view.records):
            wrong.append(f"count is {view.count}, but {len(view.records)} records are read")
        if self.cap_records and view.count > self.cap_records:
            wrong.append(f"{view.count} records under a cap of {self.cap_records}")
        for stone in view.tombstones:
            if stone["reason"] != "cap" or not (self.cap_records or self.cap_bytes):
                wrong.append(f"unexpected tombstone {stone}")
        return wrong

    def _bind(self, call: Call, known: dict[int, Known]) -> list[str]:
        """Note the seqs of a call; report a seq that belongs to another call, the worst possible
        defect.
        """
        assert call.first_seq is not None
        wrong = []
        for index, tag in enumerate(call.tags):
            seq = call.first_seq + index
            other = known.get(seq)
            if other is not None and other.id != call.id_of(index):
                wrong.append(f"seq {seq} was given to {other.id} and to {call.id_of(index)}")
            if seq <= self.head_seq:
                wrong.append(f"seq {seq} of {call.id_of(index)} was used before the last check")
            known[seq] = Known(call.id_of(index), tag, call.sent, call.acked)
        return wrong

    def _check_seen(
        self,
        record: Json,
        seen: dict[int, str],
        known: dict[int, Known],
        unknown: dict[str, tuple[Call, int]],
    ) -> list[str]:
        seq, record_id = record["$seq"], record["data"]["id"]
        if seen and seq <= next(reversed(seen)):
            return [f"seq {seq} comes after {next(reversed(seen))}"]
        seen[seq] = record_id
        expected = known.get(seq)
        if expected is not None:
            if expected.id != record_id or expected.tag != record.get("$tag"):
                return [f"seq {seq} was {expected.id}, now it is {record_id}"]
            return []
        if record_id not in unknown:
            return [f"seq {seq}: {record_id} is back, or twice, or nobody sent it"]
        call, index = unknown[record_id]
        first_seq = seq - index
        if call.first_seq not in (None, first_seq):
            return [f"{record_id} at {seq} is not in the order of its call"]
        call.first_seq = first_seq
        if seq <= self.head_seq:
            return [f"{record_id} took seq {seq}, which is older than the last check"]
        return []

    def _check_missing(
        self,
        view: View,
        seen: dict[int, str],
        known: dict[int, Known],
        unknown: dict[str, tuple[Call, int]],
    ) -> list[str]:
        wrong = []
        for seq, record in known.items():
            if seq in seen or self._may_be_deleted(seq, record):
                continue
            if not self._may_be_evicted(seq, view):
                acked = "acknowledged" if record.acked is not None else "seen or partly seen"
                wrong.append(f"lost: seq {seq} ({record.id}), {acked}, head {view.head_seq}")
        silent = [s for s in range(self.head_seq + 1, view.head_seq + 1) if s not in known]
        silent = [s for s in silent if s not in seen]
        invisible = sum(call.first_seq is None for call, _ in unknown.values())
        if len(silent) > invisible:
            wrong.append(f"{len(silent)} seqs from {silent[0]} on were never given to anybody")
        top = max(known, default=0)
        if view.head_seq < top:
            wrong.append(f"head {view.head_seq} is below the acknowledged seq {top}")
        return wrong

    def _may_be_deleted(self, seq: int, record: Known) -> bool:
        return any(
            delete.hits(seq, record.tag) and not (delete.acked and delete.acked < record.sent)
            for delete in self.deletes
        )

    def _is_surely_deleted(self, seq: int, record: Known) -> bool:
        return any(
            delete.acked is not None
            and record.acked is not None
            and record.acked < delete.sent
            and delete.hits(seq, record.tag)
            for delete in self.deletes
        )

    def _may_be_evicted(self, seq: int, view: View) -> bool:
        """A tombstone reported the loss, and as many newer seqs exist as the cap keeps records."""
        if not any(t["gap_from"] <= seq <= t["gap_to"] for t in view.tombstones):
            return False
        if self.cap_records:
            return seq <= view.head_seq - self.cap_records
        return bool(self.cap_bytes) and (
            seq <= view.head_seq + 1 - self.cap_bytes // self.record_bytes_max
        )

    def _start_anew(
        self, view: View, seen: dict[int, str], known: dict[int, Known], now: int
    ) -> None:
        tags = {record["$seq"]: record.get("$tag") for record in view.records}
        self.live = {seq: Known(record_id, tags[seq], 0, now) for seq, record_id in seen.items()}
        keyed = [call for call in self.calls if call.key is not None]
        step = max(1, len(keyed) // _KEYS_PER_CHECK)
        chosen = [c for i, c in enumerate(keyed) if i % step == 0 or c.acked is None]
        self.keyed = [*self.keyed, *chosen][-_KEYS_MAX:]
        self.calls = []
        self.deletes = []
        self.head_seq = max(view.head_seq, self.head_seq)
        self.earliest_seq = max(view.earliest_seq, self.earliest_seq)


def bounds(ledgers: Iterable[TopicLedger]) -> str:
    """One line of figures for the report."""
    figures = [f"{t.name} {len(t.live)}/{t.head_seq}" for t in ledgers]
    return "live/head: " + ", ".join(figures)
