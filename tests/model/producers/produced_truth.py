"""Producer requests by the contract's words: the answer to each, and its effect.

A topic is a dict of payloads and four facts: the producers, the seen keys, the last `Stream-Seq`,
and whether it is closed. Written from the producer headers' table of codes, from *Producers on
`/v0`* and *Idempotency keys* in the contract's README and from decision 0035. It contains no
frames, gates or staging. Used by `tests/model/produced`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from topics_server.values.model import ProducerStamp

Answer = tuple[object, ...]
# Requests that changed nothing: the topic is the same as before.
REFUSALS = frozenset({"fenced", "gap", "no beginning", "repeated", "closed", "low"})


@dataclass(slots=True, eq=False)
class Ask:
    """One request. `close` has no body; `datas` of the other two are its records.

    `seq` (`Stream-Seq`) and `closes` are of the streams API, `key` is of `/v0`.
    """

    door: Literal["v0", "stream", "close"]
    datas: list[bytes]
    producer: ProducerStamp | None = None
    key: str | None = None
    in_header: bool = False
    seq: str | None = None
    closes: bool = False

    def __repr__(self) -> str:
        told = [self.door, b"|".join(self.datas).decode("latin-1")]
        stamp = self.producer
        told += [f"{stamp.producer_id}/{stamp.epoch}/{stamp.seq}"] if stamp is not None else []
        told += [f"key={self.key}"] if self.key is not None else []
        told += [f"seq={self.seq}"] if self.seq is not None else []
        return " ".join(told + ["closes"] * self.closes)


@dataclass(slots=True)
class Truth:
    """One topic. `producers`: epoch, seq, first seq and count of the last request accepted."""

    records: dict[int, bytes] = field(default_factory=dict)
    head: int = 0
    producers: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_seq: str | None = None
    is_closed: bool = False
    closed_by: ProducerStamp | None = None

    def copy(self) -> Truth:
        """A copy that may be changed."""
        return dataclasses.replace(
            self,
            records=dict(self.records),
            producers=dict(self.producers),
            keys=dict(self.keys),
        )

    def apply(self, ask: Ask) -> Answer:
        """Apply the request; return its answer."""
        if ask.producer is not None:
            told = self._judge(ask, ask.producer)
            if told is not None:
                return told
        if ask.key is not None and ask.key in self.keys:
            # Nothing is appended, but it still counts as its producer's request (0035).
            first, count = self.keys[ask.key]
            self._accept(ask.producer, first, count)
            return ("deduped", first, count)
        if self.is_closed:
            if ask.door == "close" and ask.producer is None:
                return ("appended", self.head, True)
            return ("closed", self.head) if ask.door != "v0" else ("closed",)
        if ask.seq is not None and self.last_seq is not None and ask.seq <= self.last_seq:
            return ("low", self.last_seq)
        first, count = self.head + 1, len(ask.datas)
        for index, data in enumerate(ask.datas):
            self.records[first + index] = data
        self.head += count
        self.last_seq = self.last_seq if ask.seq is None else ask.seq
        if ask.closes or ask.door == "close":
            self.is_closed, self.closed_by = True, ask.producer
        if ask.key is not None:
            self.keys[ask.key] = (first, count)
        self._accept(ask.producer, first, count)
        if ask.door == "v0":
            return ("appended", first, count)
        return ("appended", self.head, self.is_closed, *_echo(ask.producer))

    def _judge(self, ask: Ask, stamp: ProducerStamp) -> Answer | None:
        """The table of codes; None if the request is its producer's next."""
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
        is_last = stamp.seq == seq
        if ask.door == "v0":
            # A repeat of the last request gets its position, if it has one.
            return ("repeated", epoch, seq, *((first, count) if is_last and count else ()))
        tail = first + count - 1 if is_last and not self.is_closed else self.head
        return ("repeated", epoch, seq, tail, self.is_closed)

    def _accept(self, stamp: ProducerStamp | None, first: int, count: int) -> None:
        if stamp is not None:
            self.producers[stamp.producer_id] = (stamp.epoch, stamp.seq, first, count)

    def forget(self) -> None:
        """Forget all records of an ephemeral topic, whose process has ended; only its head
        remains.
        """
        self.records.clear()
        self.producers.clear()
        self.keys.clear()


def _echo(stamp: ProducerStamp | None) -> tuple[int, ...]:
    return () if stamp is None else (stamp.epoch, stamp.seq)


def is_fact(ask: Ask, answer: Answer) -> bool:
    """Whether a request with this answer has changed something."""
    if answer[0] == "deduped":
        return ask.producer is not None
    return answer[0] not in REFUSALS
