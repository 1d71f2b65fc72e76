"""Finds the rows of a sealed segment, or of a block in memory, that pass a filter.

A segment is searched through its index: every leaf gives rows, which are combined as bits. The
search blocks; `Fetcher.search` runs it off the loop. Pure. Called by `segment_reader`, `page` and
`backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from topics_server.engine.filters import AllOf, AnyOf, Filter, Matcher, NodeLeaf, Not, TagLeaf
from topics_server.engine.log.runs import OpenBlock, Rows, Run, SealedRun, TailBlock
from topics_server.engine.ports import SealedIndex
from topics_server.values.blocks import Block
from topics_server.values.limits import (
    PAGE_LOOKUPS_MAX,
    SEARCHED_AT_ONCE,
    SEARCHED_SEGMENTS_MAX,
)
from topics_server.values.model import TagMatch

# The rows or blocks that one call on a thread reads; other calls may run in between.
READ_TOGETHER: Final = 64

TagSearch = Callable[[TagMatch], Sequence[int]]
# Reads rows of a segment that are read alone, until they have the given number of bytes.
RowsRead = Callable[[int, Sequence[int], int], Iterable[tuple[int, Block]]]
_Bits = NDArray[Any]


def search_segment(index: SealedIndex, wanted: Filter, find_tags: TagSearch) -> Rows:
    """*Blocking.* The rows of a segment that pass. Raises `StorageError` if the index fails."""
    if isinstance(wanted, TagLeaf) and len(wanted.matches) == 1 and not wanted.matches[0].is_prefix:
        # The index has the rows of one tag in this form: the cost depends only on the matches.
        return np.asarray(find_tags(wanted.matches[0]), np.int64)
    rows: Rows = np.flatnonzero(_bits(index, wanted, find_tags)).astype(np.int64)
    return rows


def _bits(index: SealedIndex, wanted: Filter, find_tags: TagSearch) -> _Bits:
    count = index.last_seq - index.first_seq + 1
    match wanted:
        case TagLeaf(matches):
            bits = np.zeros(count, bool)
            for each in matches:
                bits[np.asarray(find_tags(each), np.int64)] = True
            return bits
        case NodeLeaf(nodes):
            hits: _Bits = np.frombuffer(index.node_rows(nodes, 0, count), np.uint8) != 0
            return hits
        case AnyOf(parts):
            bits = np.zeros(count, bool)
            for part in parts:
                bits |= _bits(index, part, find_tags)
            return bits
        case AllOf(parts):
            bits = np.ones(count, bool)
            for part in parts:
                bits &= _bits(index, part, find_tags)
            return bits
        case Not(part):
            others: _Bits = ~_bits(index, part, find_tags)
            return others


class Search:
    """A filter and the results of its search so far, for one page.

    `found` has the rows of each searched segment: ascending, dead ones included. `ahead` has rows
    that were read with the search, by segment and row, each as a block (`expect`).
    """

    def __init__(self, wanted: Filter, matcher: Matcher | None = None) -> None:
        self.wanted = wanted
        self._matcher = matcher
        self.found: dict[int, Rows] = {}
        self.ahead: dict[tuple[int, int], Block] = {}
        self._wanted = self._left = 0, 0
        self._cursor, self._is_backward = 0, False
        self._topic_id: int | None = None
        self._began = 0 if matcher is None else matcher.spent

    @property
    def matcher(self) -> Matcher:
        """Decides records in memory; made when it is first needed."""
        if self._matcher is None:
            self._matcher = Matcher(self.wanted)
        return self._matcher

    def of_topic(self, topic_id: int) -> None:
        """Bind the search to this topic; drop the results of an earlier topic of the same name.

        Segments of both may have the same ids.
        """
        if topic_id != self._topic_id:
            self._topic_id = topic_id
            self.forget()

    def expect(
        self, cursor: int, rows: int, max_bytes: int = 0, *, is_backward: bool = False
    ) -> None:
        """Set how many rows the next page takes, after the cursor or below it.

        A search ends with the segment that completes these rows. It also reads those of them that
        are read alone, until they have `max_bytes`.
        """
        self._cursor, self._is_backward = cursor, is_backward
        if self._wanted != (rows, max_bytes):
            self._wanted = self._left = rows, max_bytes

    def forget(self) -> None:
        """Discard the results: search again for the next page."""
        self.found.clear()
        self.ahead.clear()
        self._left = self._wanted

    def begin(self) -> None:
        """Begin to plan a page."""
        self._began = 0 if self._matcher is None else self._matcher.spent

    @property
    def is_tired(self) -> bool:
        """Whether the page ends here because its filter has used up its time."""
        matcher = self._matcher
        return matcher is not None and matcher.spent - self._began >= PAGE_LOOKUPS_MAX

    @property
    def is_spent(self) -> bool:
        """Whether the page ends before the next unsearched segment."""
        return len(self.found) >= SEARCHED_SEGMENTS_MAX

    @property
    def searched_next(self) -> int:
        """How many segments to search together next: at first one, which often has enough rows."""
        if self._wanted[0]:
            return SEARCHED_AT_ONCE  # the search itself ends once it has enough
        return min(SEARCHED_AT_ONCE, max(1, 2 * len(self.found)))

    def take(self, run: SealedRun, rows: Rows, read: RowsRead) -> bool:
        """*Blocking.* Note the found rows of a segment; return whether the page needs no other one.

        Which rows are live is only a guess, because the loop continues meanwhile: after a wrong
        guess the page searches again and reads the missing rows.
        """
        segment_id = run.segment_id
        left, bytes_left = self._left
        self.found[segment_id] = rows
        if not self._wanted[0]:
            return False
        # Note more rows than are read, because some may be dead.
        most = 2 * min(max(left, 0), READ_TOGETHER)
        if self._is_backward:
            end = int(rows.searchsorted(self._cursor - run.first_seq))
            count, near = end, rows[max(0, end - most) : end]
        else:
            start = int(rows.searchsorted(self._cursor + 1 - run.first_seq))
            count, near = len(rows) - start, rows[start : start + most]
        dead = run.dead
        picked = [row for row in near.tolist() if not dead[row]]
        count -= len(near) - len(picked)
        if self._is_backward:
            picked.reverse()
        picked = picked[: most // 2]
        if picked and bytes_left > 0:
            for row, block in read(segment_id, picked, bytes_left):
                self.ahead[segment_id, row] = block
                bytes_left -= len(block.body)
        self._left = left - count, bytes_left
        return left <= count

    def few_rows(self, run: SealedRun, first_row: int, end_row: int, most: int) -> list[int] | None:
        """The first `most` of the `live_rows` of a searched run, as a list; None: call `live_rows`.

        For pages of a few records; makes no arrays.
        """
        if most > READ_TOGETHER:
            return None
        rows = self.found[run.segment_id]
        start = int(rows.searchsorted(first_row))
        near: list[int] = rows[start : start + most].tolist()
        dead = run.dead
        live = [row for row in near if row < end_row and not dead[row]]
        # Rows that do not pass leave room for others.
        is_all = len(near) < most or len(live) == most or near[-1] >= end_row
        return live if is_all else None

    def live_rows(self, run: Run, first_row: int, end_row: int) -> Rows:
        """The live rows of a range that pass, ascending; a sealed run must be searched before."""
        if isinstance(run, SealedRun):
            rows = self.found[run.segment_id]
            low, high = np.searchsorted(rows, (first_row, end_row))
            return run.live_rows_of(rows[low:high])
        assert isinstance(run, TailBlock | OpenBlock)
        block = run.block if isinstance(run, TailBlock) else run
        tags, nodes, dead, matcher = block.tags, block.nodes, run.dead, self.matcher
        return np.asarray(
            [
                row
                for row in range(first_row, end_row)
                if not dead[row] and matcher(tags[row], nodes[row])
            ],
            np.int64,
        )
