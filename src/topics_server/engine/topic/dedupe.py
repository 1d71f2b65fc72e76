"""The idempotency keys of one topic.

A key in flight never expires; after its append is applied it counts until the window has passed,
judged when the next append with that key is decided. Bounded by `DEDUPE_KEYS_PER_TOPIC_MAX`: the
oldest keys go first. Called by `engine/topic/topic.py` and `engine/background/capture.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._forget_before(key, ts, window_ms)

    def _forget_before(self, key: str, ts: int, window_ms: int) -> None:
        """Remove keys whose window has passed, and those over the bound, but none behind `key`."""
        remembered = self.remembered
        while (oldest := next(iter(remembered))) != key:
            in_window = ts - remembered[oldest][2] < window_ms
            if in_window and len(remembered) <= DEDUPE_KEYS_PER_TOPIC_MAX:
                break
            del remembered[oldest]

    # -- a key for each record: thousands in one step ------------------------------------------

    def find_each(self, keys: Sequence[str], window_ms: int, now_ms: int) -> tuple[list[int], int]:
        """The seq of each key, 0 if it is unknown; and the last lsn of those in flight, or 0."""
        in_flight, remembered = self.in_flight, self.remembered
        seqs: list[int] = []
        last_lsn = 0
        for key in keys:
            seq = 0
            if key in in_flight:
                staged = in_flight[key]
                seq, last_lsn = staged.first_seq, max(last_lsn, staged.staged_lsn or 0)
            elif key in remembered:
                first_seq, _, ts = remembered[key]
                seq = first_seq if now_ms - ts < window_ms else 0
            seqs.append(seq)
        return seqs, last_lsn

    def stage_each(self, keys: Sequence[str], first_seq: int, lsn: int) -> None:
        """The append of records with these keys is in flight."""
        in_flight = self.in_flight
        for seq, key in enumerate(keys, first_seq):
            in_flight[key] = Duplicate(seq, 1, lsn)

    def remember_each(self, keys: Sequence[str], first_seq: int, ts: int, window_ms: int) -> None:
        """The append of records with these keys is applied; see `remember`."""
        in_flight, remembered = self.in_flight, self.remembered
        for seq, key in enumerate(keys, first_seq):
            in_flight.pop(key, None)
            remembered.pop(key, None)
            remembered[key] = (seq, 1, ts)
        self._forget_before(keys[-1], ts, window_ms)
