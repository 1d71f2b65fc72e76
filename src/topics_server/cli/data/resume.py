"""Decides how many lines of a file a topic already holds. Pure.

The server keeps no state about loads, so the topic itself shows how many lines are stored. A load
appends line n of the file as the n-th record after its beginning, in whole batches, and nothing
else. `resume` compares lines and records by a fingerprint (a hash) of the bytes of their data and
meta, their tag and node.

Two checks use the *window*, the topic's last records that still exist (deleted and evicted records
leave their seq behind, so positions stay known):

1. `PrefixCheck`: is record n line n, for every record of the window? Then the topic is a beginning
   of the file, and `head_seq` lines are stored. It takes one pass and the memory of the window.
   Repeated lines are not ambiguous, because the position decides and not the content.
2. `TailSearch`, only with --append-anyway, if the topic held other records first. It looks for a
   line k such that the window, read backwards from the head, equals the file, read backwards from
   line k, up to line 1 or to the window's end. With one such k, the load continues after it. With
   none, it appends the whole file. If there are several (a file that repeats itself), or if k rests
   on a few records only and is not the end of a batch (a stopped load always leaves whole batches),
   the answer is not known: then `Unclear` is raised, and the error requests --from-line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

# So many equal records in a row cannot be chance.
CLEAR_RECORDS: Final = 100


class Mismatch(Exception):
    """The topic does not hold a beginning of the file; the message says where they differ."""


class Unclear(Exception):
    """The window fits the file in more than one way, or on too few records."""


class TailRecord(msgspec.Struct, frozen=True):
    """A live record of the window."""

    seq: int
    print: bytes


class TopicTail(msgspec.Struct, frozen=True):
    """The topic's head and its window, seqs ascending."""

    head_seq: int
    records: tuple[TailRecord, ...] = ()


class PrefixCheck:
    """Check 1.

    Takes the fingerprints of lines in order, from line 1, or only of the lines that `wants` names.
    """

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
        """Whether the check compares any of these lines.

        If not, the caller need not compute fingerprints.
        """
        return first_line + count > self._first and first_line <= self._head_seq

    def feed(self, first_line: int, prints: Sequence[bytes]) -> None:
        """Compare lines `first_line…`; raises `Mismatch`."""
        for line, print_ in enumerate(prints, first_line):
            expected = self._wanted.pop(line, None)
            if expected is not None and expected != print_:
                raise Mismatch(f"record {line} of the topic is not line {line} of the file")

    def stored(self, lines_seen: int) -> int:
        """The number of stored lines, after the check got `lines_seen` lines (at least `head_seq`,
        unless the file is shorter).
        """
        if lines_seen < self._head_seq:
            raise Mismatch(
                f"the topic has had {self._head_seq} records, the file has {lines_seen} lines"
            )
        assert not self._wanted, "every record of the window was compared"
        return self._head_seq


class TailSearch:
    """Check 2; takes the fingerprints of every line, batch by batch."""

    def __init__(self, tail: TopicTail) -> None:
        self._tail = tail
        self._span = tail.head_seq - tail.records[0].seq + 1 if tail.records else 0
        # fingerprints of lines up to `_line`, at least `_span` of them
        self._recent: list[bytes] = []
        self._line = 0
        self._found: list[tuple[int, bool]] = []  # (k, whether enough records match)

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
        """How many records of the window fit if line `line` is the head; 0 if it is not."""
        matched = 0
        for record in reversed(self._tail.records):
            behind = self._tail.head_seq - record.seq
            if behind >= line:
                break  # before the file's first line: those records are not from this file
            if self._recent[index - behind] != record.print:
                return 0
            matched += 1
        return matched

    def stored(self) -> int:
        """The number of stored lines, after all lines were fed; 0 if the end of the topic is not
        from the file.
        """
        if not self._found:
            return 0
        k, is_firm = self._found[0]
        if not is_firm:
            raise Unclear(f"the topic's end looks like line {k}, by a few records only")
        return k
