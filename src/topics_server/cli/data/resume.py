"""Decides how many lines of a file a topic already holds. Pure.

The server keeps no state about loads, so the topic itself is the evidence. A load puts line n of
the file at the n-th place after where it began, in whole batches, and nothing else. Lines and
records are compared by a print (a hash) of the bytes of their data and meta, their tag and node.

Two questions are asked, both about the *window*, the topic's last records that are still there
(deleted and evicted ones leave their seq behind, so places stay known):

1. `PrefixCheck`: is record n line n, for every record of the window? Then the topic is a beginning
   of the file and `head_seq` lines are stored. One pass, memory of the window. Repeated lines are
   no ambiguity here, because the place decides, not the content.
2. `TailSearch`, only with --append-anyway, where something else was in the topic first: which
   line k is such that the window, read backwards from the head, is the file read backwards from
   line k, up to line 1 or to the window's end? One such k: the load goes on after it. None: the
   whole file goes behind what is there. Several (a file that repeats itself), or one that rests
   on a few records only and is not the end of a batch (which a stopped load always leaves):
   nobody can know, `Unclear` says so and the caller asks for --from-line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

# So many equal records in a row are not taken for chance.
CLEAR_RECORDS: Final = 100


class Mismatch(Exception):
    """The topic is not a beginning of the file; says where."""


class Unclear(Exception):
    """The window fits the file in more than one way, or too weakly."""


class TailRecord(msgspec.Struct, frozen=True):
    """A live record of the window."""

    seq: int
    print: bytes


class TopicTail(msgspec.Struct, frozen=True):
    """The topic's head and its window, seqs ascending."""

    head_seq: int
    records: tuple[TailRecord, ...] = ()


class PrefixCheck:
    """Question 1; fed with the prints of lines in order, from line 1 on or only where asked."""

    def __init__(self, tail: TopicTail) -> None:
        assert all(record.seq <= tail.head_seq for record in tail.records)
        self._head_seq = tail.head_seq
        self._wanted = {record.seq: record.print for record in tail.records}
        self._first = tail.records[0].seq if tail.records else tail.head_seq + 1
        if tail.head_seq and not tail.records:
            raise Mismatch(
                f"the topic has had {tail.head_seq} records, but none is left to compare with"
            )

    def wants(self, first_line: int, count: int) -> bool:
        """Whether any of these lines is to be compared; if not, their prints need not be made."""
        return first_line + count > self._first and first_line <= self._head_seq

    def feed(self, first_line: int, prints: Sequence[bytes]) -> None:
        """Compare lines `first_line…`; raises `Mismatch`."""
        for line, print_ in enumerate(prints, first_line):
            expected = self._wanted.pop(line, None)
            if expected is not None and expected != print_:
                raise Mismatch(f"record {line} of the topic is not line {line} of the file")

    def stored(self, lines_seen: int) -> int:
        """Lines stored, once `lines_seen` lines (at least `head_seq` if there are) were offered."""
        if lines_seen < self._head_seq:
            raise Mismatch(
                f"the topic has had {self._head_seq} records, the file has {lines_seen} lines"
            )
        assert not self._wanted, "every record of the window was compared"
        return self._head_seq


class TailSearch:
    """Question 2; fed with the prints of every line, batch by batch."""

    def __init__(self, tail: TopicTail) -> None:
        self._tail = tail
        self._span = tail.head_seq - tail.records[0].seq + 1 if tail.records else 0
        self._recent: list[bytes] = []  # prints of lines up to `_line`, at least `_span` of them
        self._line = 0
        self._found: list[tuple[int, bool]] = []  # (k, rests on firm ground)

    def feed(self, prints: Sequence[bytes]) -> None:
        """Take the next batch of lines; raises `Unclear` at a second fit."""
        before = len(self._recent)
        self._recent.extend(prints)
        for index in range(before, len(self._recent)):
            matched = self._matched(index, self._line + 1 + index - before)
            if not matched:
                continue
            ends_batch = index == len(self._recent) - 1
            k = self._line + 1 + index - before
            self._found.append((k, ends_batch or matched >= CLEAR_RECORDS))
            if len(self._found) > 1:
                first = self._found[0][0]
                raise Unclear(f"the topic's end looks like line {first} and like line {k}")
        self._line += len(prints)
        del self._recent[: max(0, len(self._recent) - self._span)]

    def _matched(self, index: int, line: int) -> int:
        """How many records of the window fit if the head is `line`; 0: it is not."""
        matched = 0
        for record in reversed(self._tail.records):
            behind = self._tail.head_seq - record.seq
            if behind >= line:
                break  # before the file's first line: whatever was there is not ours
            if self._recent[index - behind] != record.print:
                return 0
            matched += 1
        return matched

    def stored(self) -> int:
        """Lines stored, after the whole file was fed; 0 if the end of the topic is not from it."""
        if not self._found:
            return 0
        k, is_firm = self._found[0]
        if not is_firm:
            raise Unclear(f"the topic's end looks like line {k}, by a few records only")
        return k
