"""One log and its two APIs, plainly: a list of records, and each API's view of it.

A record is its bytes and their type. A diff shows it with its seq, and bytes as base64 (the
contract's README, *Bytes in topics*); a stream shows the bytes alone. Deletes are silent in both. A
cap's loss is reported: a diff has a tombstone, a read from an offset gets 410 with the next offset.
The module has no blocks, segments or entries. Used by `tests/model/doors`.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from topics_server.streams.values import BEGINNING, Position
from topics_server.values.errors import Code
from topics_server.values.model import TagMatch

Outcome = tuple[list[int], Position] | tuple[Code, Position | None]


@dataclass(slots=True, frozen=True)
class Rec:
    """A record: `content_type` of bytes, None of JSON; `meta`, `trace` as sent, empty if absent."""

    data: bytes
    content_type: str | None = None
    meta: bytes = b""
    tag: str | None = None
    node: str | None = None
    trace: str = ""

    def shown(self, seq: int) -> dict[str, Any]:
        """The record in a diff with all fields except its time."""
        told: dict[str, Any] = {"$seq": seq}
        if self.node is not None:
            told["$node"] = self.node
        if self.tag is not None:
            told["$tag"] = self.tag
        if self.trace:
            told["$trace"] = self.trace
        if self.content_type is None:
            told["data"] = json.loads(self.data)
        else:
            told |= {"$encoding": "base64", "$content_type": self.content_type}
            told["data"] = base64.b64encode(self.data).decode()
        if self.meta:
            told["meta"] = json.loads(self.meta)
        return told


@dataclass(slots=True, eq=False)
class PlainStream:
    """One topic. `history`: all its records ever; `records`: the live ones; `floor`: lost below it.

    `ancestors`: for a fork, path, topic id and last seq of each stream whose positions it shares.
    """

    path: str
    name: str
    topic_id: int
    content_type: str
    cap_records: int = 0
    history: dict[int, Rec] = field(default_factory=dict)
    records: dict[int, Rec] = field(default_factory=dict)
    head: int = 0
    floor: int = 1
    is_closed: bool = False
    ancestors: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def is_json(self) -> bool:
        return self.content_type == "application/json"

    def append(self, new: list[Rec]) -> None:
        """Append records; over its cap the oldest are lost."""
        for rec in new:
            self.head += 1
            self.history[self.head] = self.records[self.head] = rec
        while self.cap_records and len(self.records) > self.cap_records:
            oldest = min(self.records)
            del self.records[oldest]
            self.floor = oldest + 1

    def hits(self, before_seq: int | None, match: TagMatch | None) -> list[int]:
        """The records that a delete by seq, by tag or by both hits."""
        return [
            seq
            for seq, rec in self.records.items()
            if (before_seq is None or seq < before_seq)
            and (match is None or (rec.tag is not None and match.matches(rec.tag)))
        ]

    def delete(self, seqs: list[int]) -> list[int]:
        """Remove those that are live."""
        hit = [seq for seq in seqs if seq in self.records]
        for seq in hit:
            del self.records[seq]
        return hit

    @property
    def earliest(self) -> int:
        return min(self.records, default=self.head + 1)

    def gap_after(self, seq: int) -> int | None:
        """The end of the reported loss for a reader that has read up to `seq`."""
        return self.earliest - 1 if seq + 1 < self.floor else None

    def position(self, seq: int) -> Position:
        """The position after a seq: up to the fork point that of the source."""
        if seq == 0:
            return BEGINNING
        for _, topic_id, upto_seq in self.ancestors:
            if seq <= upto_seq:
                return Position(seq, topic_id)
        return Position(seq, self.topic_id)

    def after(self, at: Position, *, explicit: bool) -> Outcome:
        """The seqs from here to the end, and the position after them; or the reason for a
        refusal.
        """
        if at.seq and (at.seq > self.head or self.position(at.seq) != at):
            return (Code.STREAM_GONE, None)
        gap_to = self.gap_after(at.seq)
        if gap_to is not None and explicit:
            return (Code.STREAM_GONE, self.position(gap_to))
        return ([seq for seq in self.records if seq > at.seq], self.position(self.head))
