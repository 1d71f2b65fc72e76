"""The plain model: a topic as a dict of records, and the effect of each call on it.

Follows the contract's words (§0.8, §0.10, §2, §5) with loops over a dict, not the engine's code.
Where the contract leaves a choice, the model does too: see `Plain.lazy` and `Plain.hidden_below`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

from topics_server.values.model import Discard, Durability, ProducerStamp, TagMatch, TopicConfig

FRAMING_BYTES = 24


class Rec(NamedTuple):
    """A record as a reader gets it."""

    data: bytes
    meta: bytes
    tag: str | None
    node: str | None
    ts: int

    @property
    def weight(self) -> int:
        """Its size under `cap_bytes`."""
        framing = FRAMING_BYTES + len(self.tag or "") + len(self.node or "")
        return len(self.data) + len(self.meta) + framing


@dataclass(slots=True)
class Append:
    """One append at `now_ms`; the latest time of the clock so far is `max_ms`; `records` with
    ts 0.
    """

    records: list[Rec]
    key: str | None
    in_header: bool
    now_ms: int = 0
    max_ms: int = 0
    creates: TopicConfig | None = None
    producer: ProducerStamp | None = None


@dataclass(slots=True)
class Delete:
    """One delete at `now_ms`."""

    before_seq: int | None
    match: TagMatch | None
    now_ms: int = 0
    max_ms: int = 0


@dataclass(slots=True)
class Put:
    """Create or configure."""

    config: TopicConfig
    now_ms: int = 0
    max_ms: int = 0


@dataclass(slots=True)
class Drop:
    """Drop the topic."""

    now_ms: int = 0
    max_ms: int = 0


Step = Append | Delete | Put | Drop
Answer = tuple[object, ...]


@dataclass(slots=True)
class Plain:
    """One topic. `floor`: seqs below it were lost to a cap or a TTL; `holes`: to another cause.

    `lazy`: a cap was lowered and the eviction may be in progress. `hidden_below`: seqs that were
    past their TTL at some time (the clock may have been set back since). `told_below`: seqs that a
    reader saw as expired, in this process. `maybe_gone`: hit by a delete that a power loss took
    from the journal; a flag in a segment may have been written before. `vague_below`: seqs of an
    ephemeral topic that a restart removed; it may not tell deleted from lost ones. `producers`: by
    id, epoch and seq of the last request, first seq and count of its records.
    """

    exists: bool = False
    config: TopicConfig = field(default_factory=TopicConfig)
    records: dict[int, Rec] = field(default_factory=dict)
    head: int = 0
    floor: int = 1
    last_ts: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)
    keys: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    producers: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    lazy: bool = False
    hidden_below: int = 1
    told_below: int = 1
    maybe_gone: frozenset[int] = frozenset()
    vague_below: int = 1

    def copy(self) -> Plain:
        """A copy that may be changed."""
        return dataclasses.replace(
            self,
            records=dict(self.records),
            holes=list(self.holes),
            keys=dict(self.keys),
            producers=dict(self.producers),
        )

    def apply(self, step: Step) -> Answer:
        """Apply the call; return its answer."""
        match step:
            case Append():
                return self._append(step)
            case Delete():
                return self._delete(step)
            case Put():
                return self._put(step)
            case Drop():
                existed = self.exists
                fresh = Plain()
                for each in dataclasses.fields(Plain):
                    setattr(self, each.name, getattr(fresh, each.name))
                return ("dropped", existed)

    def _append(self, step: Append) -> Answer:
        if step.producer is not None:
            told = self._judge(step.producer)
            if told is not None:
                return told
        if not self.exists:
            self.exists = True
            self.config = step.creates or TopicConfig()
        window_ms = self.config.idempotency_window_ms
        known = self.keys.get(step.key) if step.key is not None else None
        if known is not None and step.now_ms - known[2] < window_ms:
            self._move(step.producer, known[0], known[1])
            return ("deduped", known[0], known[1])
        self.expire(step.max_ms)
        added = len(step.records)
        ts = max(step.now_ms, self.last_ts)
        new = [rec._replace(ts=ts) for rec in step.records]
        if self.config.discard is Discard.REJECT and self._is_over(new):
            return ("full",)
        first = self.head + 1
        for index, rec in enumerate(new):
            self.records[first + index] = rec
        self.head += added
        self.last_ts = ts
        self.evict()
        if step.key is not None:
            # Records that expired by the topic's time stay expired when the clock is set back.
            kept = {key: each for key, each in self.keys.items() if ts - each[2] < window_ms}
            self.keys = kept | {step.key: (first, added, ts)}
        self._move(step.producer, first, added)
        return ("appended", first, added)

    def _judge(self, stamp: ProducerStamp) -> Answer | None:
        """The answer to a producer's request, unless it is that producer's next one."""
        last = self.producers.get(stamp.producer_id)
        if last is None:
            return None if stamp.seq == 0 else ("gap", 0)
        epoch, seq, first, count = last
        if stamp.epoch < epoch:
            return ("fenced", epoch)
        if stamp.epoch > epoch:
            return None if stamp.seq == 0 else ("no beginning",)
        if stamp.seq > seq:
            return None if stamp.seq == seq + 1 else ("gap", seq + 1)
        return ("repeated", epoch, seq, *((first, count) if stamp.seq == seq else ()))

    def _move(self, stamp: ProducerStamp | None, first: int, count: int) -> None:
        if stamp is not None:
            self.producers[stamp.producer_id] = (stamp.epoch, stamp.seq, first, count)

    def _is_over(self, new: list[Rec]) -> bool:
        config = self.config
        if config.cap_records and len(self.records) + len(new) > config.cap_records:
            return True
        weight = sum(r.weight for r in self.records.values()) + sum(r.weight for r in new)
        return bool(config.cap_bytes) and weight > config.cap_bytes

    def evict(self) -> None:
        """Remove the oldest until the caps hold; the newest record stays."""
        self.lazy = False
        config = self.config
        if not (config.cap_records or config.cap_bytes) or config.discard is Discard.REJECT:
            return
        weight = sum(rec.weight for rec in self.records.values())
        for seq in sorted(self.records):
            over = config.cap_records and len(self.records) > config.cap_records
            if not over and not (config.cap_bytes and weight > config.cap_bytes):
                return
            if len(self.records) == 1:
                return
            weight -= self.records.pop(seq).weight
            self.floor = seq + 1

    def expire(self, now_ms: int) -> None:
        """Records past their TTL now may be gone for good from now on."""
        if self.config.ttl_ms:
            for seq, rec in self.records.items():
                if rec.ts < now_ms - self.config.ttl_ms:
                    self.hidden_below = max(self.hidden_below, seq + 1)

    def tell(self, now_ms: int) -> None:
        """Note that a reader looks now: records past their TTL stay expired."""
        for seq in self.records:
            if self.is_hidden(seq, now_ms):
                self.told_below = max(self.told_below, seq + 1)

    def is_hidden(self, seq: int, now_ms: int) -> bool:
        """Whether a record is past its TTL now."""
        ttl_ms = self.config.ttl_ms
        return bool(ttl_ms) and self.records[seq].ts < now_ms - ttl_ms

    def hits(self, step: Delete) -> list[int]:
        """The records that a delete matches."""
        last = self.head if step.before_seq is None else step.before_seq - 1
        return [
            seq
            for seq, rec in self.records.items()
            if seq <= last and (step.match is None or step.match.matches(rec.tag))
        ]

    def _delete(self, step: Delete) -> Answer:
        self.expire(step.max_ms)
        hit = self.hits(step)
        # An expired record cannot be deleted any more: it stays a reported loss.
        hit = [seq for seq in hit if not self.is_hidden(seq, step.now_ms)]
        unsure = frozenset(seq for seq in hit if seq < self.hidden_below)
        self.maybe_gone |= unsure
        for seq in hit:
            if seq not in unsure:
                del self.records[seq]
        return ("deleted", None if unsure else len(hit))

    def _put(self, step: Put) -> Answer:
        created = not self.exists
        if self.exists and step.config != self.config:
            # First apply the floor of the old configuration.
            self.expire(step.max_ms)
            for seq in [seq for seq in self.records if self.is_hidden(seq, step.now_ms)]:
                del self.records[seq]
                if seq not in self.maybe_gone:
                    # A possibly deleted record need not be reported as lost.
                    self.floor = max(self.floor, seq + 1)
            self.evict()
        self.exists = True
        self.config = step.config
        before = len(self.records), self.floor
        self.lazy = before != self._evicted_marks()
        return ("put", created)

    def _evicted_marks(self) -> tuple[int, int]:
        other = self.copy()
        other.evict()
        return len(other.records), other.floor

    def is_ephemeral(self) -> bool:
        """Whether the topic's records never outlive the process."""
        return self.config.durability is Durability.EPHEMERAL
