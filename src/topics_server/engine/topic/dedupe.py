"""The idempotency keys of one topic.

A key in flight never expires; after its append is applied it counts until the window has passed,
judged when the next append with that key is decided. Bounded by `DEDUPE_KEYS_PER_TOPIC_MAX`: the
oldest keys go first. Called by `engine/topic/topic.py` and `engine/background/capture.py`.
"""

from __future__ import annotations

import msgspec

from topics_server.values.limits import DEDUPE_KEYS_PER_TOPIC_MAX


class Duplicate(msgspec.Struct, frozen=True):
    """An earlier append: its seqs; `staged_lsn` while it is in flight.

    `seqs`: of a call with a key for each record, the seq of each; others may lie between.
    """

    first_seq: int
    count: int
    staged_lsn: int | None = None
    seqs: list[int] | None = None


class KeyMemory:
    """The keys of one topic, oldest first. A value is (first_seq, count, commit time in ms)."""

    __slots__ = ("in_flight", "remembered")

    def __init__(self) -> None:
        self.in_flight: dict[str, Duplicate] = {}
        self.remembered: dict[str, tuple[int, int, int]] = {}

    def find(self, key: str, window_ms: int, now_ms: int) -> Duplicate | None:
        """The append of this key, in flight or within the window."""
        staged = self.in_flight.get(key)
        if staged is not None:
            return staged
        known = self.remembered.get(key)
        if known is None or now_ms - known[2] >= window_ms:
            return None
        return Duplicate(known[0], known[1])

    def stage(self, key: str, first_seq: int, count: int, lsn: int) -> None:
        """The append of this key is in flight."""
        assert key not in self.in_flight
        self.in_flight[key] = Duplicate(first_seq, count, lsn)

    def undo(self, key: str) -> None:
        """The append of this key failed: the key is free again."""
        del self.in_flight[key]

    def remember(self, key: str, first_seq: int, count: int, ts: int, window_ms: int) -> None:
        """The append of this key is applied; keys whose window has passed at `ts` are removed."""
        self.in_flight.pop(key, None)
        remembered = self.remembered
        # Times ascend, so a key that is used again moves to the end.
        remembered.pop(key, None)
        remembered[key] = (first_seq, count, ts)
        while (oldest := next(iter(remembered))) != key:
            in_window = ts - remembered[oldest][2] < window_ms
            if in_window and len(remembered) <= DEDUPE_KEYS_PER_TOPIC_MAX:
                break
            del remembered[oldest]
