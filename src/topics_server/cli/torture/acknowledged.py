"""Acknowledged records of one topic, and a check that a reader finds exactly these.

One writer owns the topic. Its records are numbered, and a record's content follows from its number,
so a check of the whole topic detects a lost, doubled, changed or reordered record. A call
whose answer was lost is unknown: all its records are stored, or none. Called by `writers` while the
server runs and by `cycles` after each restart. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

PAD: Final = "abcdefghijklmnopqrstuvwxyz0123456789" * 64
# The most wrong records that are reported one by one.
REPORTED_MAX: Final = 10


class Found(msgspec.Struct, frozen=True):
    """A record that a reader found."""

    seq: int
    data: Any


class Unknown(msgspec.Struct, frozen=True):
    """A call whose answer was lost; repeated with the same key, it must be stored once."""

    number: int
    count: int
    key: str


class _Run(msgspec.Struct):
    """Acknowledged records with consecutive numbers and seqs."""

    number: int
    seq: int
    count: int


def content(number: int) -> dict[str, Any]:
    """The data of the record with this number."""
    return {"n": number, "pad": PAD[: number * 7919 % 1500]}


class AcknowledgedTopic:
    """The state of one topic; see the module."""

    def __init__(self, name: str, durability: str) -> None:
        self.name = name
        self.durability = durability
        self.next_number = 1
        self.unknown: Unknown | None = None
        # Records below this seq are deleted, or perhaps deleted.
        self.deleted_below = 1
        self.delete_sent = 1
        self.head_seq = 0
        self._runs: list[_Run] = []

    def records(self, call: Unknown) -> list[dict[str, Any]]:
        """The records of a call."""
        return [{"data": content(call.number + index)} for index in range(call.count)]

    def send(self, count: int) -> Unknown:
        """The next call; its result is unknown until `acknowledge`."""
        assert self.unknown is None
        self.unknown = Unknown(self.next_number, count, f"c{self.next_number}")
        return self.unknown

    def acknowledge(self, first_seq: int) -> None:
        """The server has stored the unknown call, its first record under `first_seq`."""
        call = self.unknown
        assert call is not None
        self.unknown = None
        self.next_number = call.number + call.count
        self.head_seq = first_seq + call.count - 1
        last = self._runs[-1] if self._runs else None
        if (
            last is not None
            and last.number + last.count == call.number
            and last.seq + last.count == first_seq
        ):
            last.count += call.count
        else:
            self._runs.append(_Run(call.number, first_seq, call.count))

    def refuse(self) -> None:
        """The server has refused the call: none of its records is stored."""
        self.unknown = None

    def delete_acknowledged(self) -> None:
        """The server has deleted everything below `delete_sent`."""
        self.deleted_below = self.delete_sent
        while self._runs and self._runs[0].seq + self._runs[0].count <= self.deleted_below:
            del self._runs[0]

    def seq_of(self, number: int) -> int | None:
        """The acknowledged seq of a record."""
        for run in reversed(self._runs):
            if run.number <= number < run.number + run.count:
                return run.seq + number - run.number
        return None

    def check(self, found: Sequence[Found], head_seq: int) -> list[str]:
        """Compare the topic with all records that a reader finds; return the problems.

        The unknown call stays unknown; `stored_at` returns its seq.
        """
        wrong: list[str] = []
        if head_seq < self.head_seq:
            wrong.append(f"the head went back from {self.head_seq} to {head_seq}")
        wanted = self._wanted()
        last_seq = 0
        last_number: int | None = None
        unknown_found = 0
        for record in found:
            number = record.data.get("n") if isinstance(record.data, dict) else None
            if not isinstance(number, int) or record.data != content(number):
                wrong.append(f"record {record.seq} has other data than were sent")
                continue
            if record.seq <= last_seq:
                wrong.append(f"record {record.seq} follows record {last_seq}")
            if last_number is not None and number != last_number + 1:
                wrong.append(f"record {record.seq} is number {number}, behind {last_number}")
            last_seq, last_number = record.seq, number
            seq = wanted.pop(number, None)
            if record.seq < self.deleted_below:
                wrong.append(f"record {record.seq} is back after its delete")
            elif seq is not None and seq != record.seq:
                wrong.append(
                    f"number {number} was acknowledged as {seq} and is record {record.seq}"
                )
            elif seq is None and not self._is_unknown(number) and self.seq_of(number) is None:
                wrong.append(f"record {record.seq} (number {number}) was never sent")
            unknown_found += self._is_unknown(number)
        for number, seq in wanted.items():
            if seq >= self.delete_sent:
                wrong.append(f"record {seq} (number {number}) was acknowledged and is lost")
        if self.unknown is not None and unknown_found not in (0, self.unknown.count):
            wrong.append(
                f"{unknown_found} of the {self.unknown.count} records of one call are stored"
            )
        more = len(wrong) - REPORTED_MAX
        shown = wrong[:REPORTED_MAX] + ([f"and {more} more"] if more > 0 else [])
        return [f"{self.name}: {line}" for line in shown]

    def stored_at(self, found: Sequence[Found]) -> int | None:
        """The first seq of the unknown call, if it is stored."""
        assert self.unknown is not None
        for record in found:
            if isinstance(record.data, dict) and record.data.get("n") == self.unknown.number:
                return record.seq
        return None

    def _wanted(self) -> dict[int, int]:
        """The acknowledged records that are not deleted: number and seq."""
        return {
            run.number + index: run.seq + index
            for run in self._runs
            for index in range(run.count)
            if run.seq + index >= self.deleted_below
        }

    def _is_unknown(self, number: int) -> bool:
        call = self.unknown
        return call is not None and call.number <= number < call.number + call.count
