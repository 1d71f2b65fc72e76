"""Filtered readers at the head of a topic, found by the tags that they wait for.

The tags of an append are looked up once, whatever the number of readers: readers that no tag
concerns share one cursor, which moves past the new records for all of them. A reader that may want
a record leaves with a position before that record, and is then served like any other reader. Loop
thread only. Used by `dispatcher`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from topics_server.engine.log.log import Log
from topics_server.engine.log.runs import OpenBlock, TailBlock
from topics_server.engine.subscribe.cursors import SharedCursor
from topics_server.engine.subscribe.subscription import Subscription
from topics_server.values.limits import SKIPPED_SLOTS_MAX

# The number of blocks that are examined in one step: about a millisecond.
_BLOCKS_AT_ONCE: Final = 64


class TagWatchers(SharedCursor):
    """The readers of one topic whose filters name tags; `seq` is the position of all."""

    __slots__ = ("_by_prefix", "_by_tag", "_lengths", "_reported_seq", "members")

    def __init__(self) -> None:
        super().__init__(0)
        self.members: dict[Subscription, None] = {}
        self._by_tag: dict[str, dict[Subscription, None]] = {}
        self._by_prefix: dict[str, dict[Subscription, None]] = {}
        # The lengths of the prefixes: a tag needs one look-up for each length.
        self._lengths: list[int] = []
        # The lowest position that was last reported to a member's client.
        self._reported_seq = 0

    def add(self, subscription: Subscription) -> bool:
        """Add a reader by its filter's tags; False if it has none or another position."""
        cursor, matcher = subscription.cursor, subscription.options.matcher
        if matcher is None or matcher.tags is None:
            return False
        if not self.members:
            self.seq = self._reported_seq = cursor.seq
        elif cursor.seq != self.seq:
            return False
        self._reported_seq = min(self._reported_seq, subscription.reported_seq)
        self.members[subscription] = None
        for match in matcher.tags:
            table = self._by_prefix if match.is_prefix else self._by_tag
            if match.text not in table:
                table[match.text] = {}
                self._measure(is_prefix=match.is_prefix)
            table[match.text][subscription] = None
        cursor.shared_cursor = self
        return True

    def remove(self, subscription: Subscription) -> None:
        """Remove a reader, which continues alone from the shared position."""
        del self.members[subscription]
        matcher = subscription.options.matcher
        assert matcher is not None
        assert matcher.tags is not None
        for match in matcher.tags:
            table = self._by_prefix if match.is_prefix else self._by_tag
            waiting = table.get(match.text)
            if waiting is not None:
                waiting.pop(subscription, None)
                if not waiting:
                    del table[match.text]
                    self._measure(is_prefix=match.is_prefix)
        subscription.cursor.shared_cursor = None
        subscription.cursor.seq = self.seq

    def _measure(self, *, is_prefix: bool) -> None:
        if is_prefix:
            self._lengths = sorted({*map(len, self._by_prefix)})

    def advance(self, log: Log) -> tuple[list[Subscription], bool]:
        """Move past new records; returns the readers that left, and whether the head is reached.

        A reader leaves before records that may pass its filter, or after so many others that its
        client must get a frame with its position.
        """
        woken: dict[Subscription, None] = {}
        seq, runs = self.seq, log.runs
        if any(hole.last_seq > seq for hole in log.holes):
            return self._all_leave(), True
        is_done = True
        first = log.run_at(seq + 1)
        for run in islice(runs, first, first + _BLOCKS_AT_ONCE):
            if not isinstance(run, OpenBlock | TailBlock):
                return self._all_leave(), True
            tags = run.tags if isinstance(run, OpenBlock) else run.block.tags
            row = max(0, seq + 1 - run.first_seq)
            self._find(set(tags[row : run.count]), woken)
            seq = run.last_seq
        if first + _BLOCKS_AT_ONCE < len(runs):
            is_done = False
        else:
            seq = log.head_seq
        for subscription in woken:
            self.remove(subscription)
        self.seq = seq
        left = list(woken)
        if seq - self._reported_seq >= SKIPPED_SLOTS_MAX:
            left += self._all_leave()
        return left, is_done

    def _find(self, tags: Iterable[str | None], woken: dict[Subscription, None]) -> None:
        """Add the readers that wait for one of these tags."""
        by_tag, by_prefix = self._by_tag, self._by_prefix
        for tag in tags:
            if tag is None:
                continue
            if tag in by_tag:
                woken |= by_tag[tag]
            for length in self._lengths:
                if length > len(tag):
                    break
                found = by_prefix.get(tag[:length])
                if found is not None:
                    woken |= found

    def _all_leave(self) -> list[Subscription]:
        left = list(self.members)
        for subscription in left:
            self.remove(subscription)
        return left
