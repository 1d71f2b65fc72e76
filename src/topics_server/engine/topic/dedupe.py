"""The idempotency keys of one topic.

A key in flight never expires. After its append is applied, the key is valid until the window has
passed; this is checked when the next append with that key is decided. Bounded by
`DEDUPE_KEYS_PER_TOPIC_MAX`: the oldest keys are removed first. Called by `engine/topic/topic.py`
and `engine/background/capture.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from topics_server.values.limits import DEDUPE_KEYS_PER_TOPIC_MAX

# One call removes at most this many expired keys, plus as many as it adds: after a pause there may
# be a million of them. An expired key has no effect, whether it was removed or not.
_FORGOTTEN_MAX: Final = 256
# The maximum of places of removed keys before the other places.
_GONE_MAX: Final = 1_024


class Duplicate(msgspec.Struct, frozen=True):
    """An earlier append: its seqs; `staged_lsn` is set while it is in flight.

    `seqs`: for a call with a key for each record, the seq of each; they may have gaps.
    """

    first_seq: int
    count: int
    staged_lsn: int | None = None
    seqs: list[int] | None = None


class _Order:
    """Keys in the order of their last use.

    A dictionary has an order too, but finding its first item means passing the places of all items
    that were removed before it: removing n keys would take n * n steps.
    """

    __slots__ = ("_first", "_keys", "_moved")

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = list(keys)
        self._first = 0
        # For keys that were used again: how many of their places are void.
        self._moved: dict[str, int] = {}

    def add(self, key: str, *, is_again: bool) -> None:
        """Note that a key was used last. `is_again`: the key has a place already."""
        self._keys.append(key)
        if is_again:
            self._moved[key] = self._moved.get(key, 0) + 1

    def first(self) -> str:
        """The key whose last use is the oldest; there must be a key."""
        while self._moved and (key := self._keys[self._first]) in self._moved:
            self._moved[key] -= 1
            if not self._moved[key]:
                del self._moved[key]
            self.remove_first()
        return self._keys[self._first]

    def remove_first(self) -> None:
        """Remove the key that `first` returned."""
        keys = self._keys
        keys[self._first] = ""
        self._first += 1
        if self._first > _GONE_MAX and 2 * self._first > len(keys):
            del keys[: self._first]
            self._first = 0


class KeyMemory:
    """The keys of one topic, oldest first. A value is (first_seq, count, commit time in ms)."""

    __slots__ = ("_order", "in_flight", "remembered")

    def __init__(self) -> None:
        self.in_flight: dict[str, Duplicate] = {}
        self.remembered: dict[str, tuple[int, int, int]] = {}
        # None until the first key: most topics have no keys.
        self._order: _Order | None = None

    def restore(self, keys: Mapping[str, tuple[int, int, int]]) -> None:
        """Restore the keys of a snapshot, oldest first; no key is remembered yet."""
        assert not self.remembered
        assert self is not NO_KEYS, "all topics share it"
        if keys:
            self.remembered.update(keys)
            self._order = _Order([*keys])

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
        """Note that the append of this key is in flight."""
        assert key not in self.in_flight
        assert self is not NO_KEYS, "all topics share it"
        self.in_flight[key] = Duplicate(first_seq, count, lsn)

    def undo(self, key: str) -> None:
        """Free the key again: its append has failed."""
        del self.in_flight[key]

    def remember(self, key: str, first_seq: int, count: int, ts: int, window_ms: int) -> None:
        """Remember the key of an applied append; remove keys whose window has passed at `ts`."""
        assert self is not NO_KEYS, "all topics share it"
        self.in_flight.pop(key, None)
        order = self._order
        if order is None:
            order = self._order = _Order([])
        remembered = self.remembered
        # Times ascend, so a key that is used again moves to the end.
        order.add(key, is_again=remembered.pop(key, None) is not None)
        remembered[key] = (first_seq, count, ts)
        self._forget_before(order, key, 1, ts, window_ms)

    def _forget_before(self, order: _Order, key: str, added: int, ts: int, window_ms: int) -> None:
        """Remove keys over the bound and some expired ones, but none that is newer than `key`."""
        remembered = self.remembered
        left = added + _FORGOTTEN_MAX
        while (oldest := order.first()) != key:
            if len(remembered) <= DEDUPE_KEYS_PER_TOPIC_MAX and (
                left == 0 or ts - remembered[oldest][2] < window_ms
            ):
                break
            del remembered[oldest]
            order.remove_first()
            left -= 1

    # -- a key for each record: thousands in one step ------------------------------------------

    def find_each(self, keys: Sequence[str], window_ms: int, now_ms: int) -> tuple[list[int], int]:
        """The seq of each key, 0 if unknown; and the last lsn in flight of these keys, or 0."""
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
        """Note that the append of records with these keys is in flight."""
        assert self is not NO_KEYS, "all topics share it"
        in_flight = self.in_flight
        for seq, key in enumerate(keys, first_seq):
            in_flight[key] = Duplicate(seq, 1, lsn)

    def remember_each(self, keys: Sequence[str], first_seq: int, ts: int, window_ms: int) -> None:
        """Remember the keys of an applied append of records; see `remember`."""
        assert self is not NO_KEYS, "all topics share it"
        order = self._order
        if order is None:
            order = self._order = _Order([])
        in_flight, remembered = self.in_flight, self.remembered
        for seq, key in enumerate(keys, first_seq):
            in_flight.pop(key, None)
            order.add(key, is_again=remembered.pop(key, None) is not None)
            remembered[key] = (seq, 1, ts)
        self._forget_before(order, keys[-1], len(keys), ts, window_ms)


# The keys of every topic that never had one. They never change.
NO_KEYS: Final = KeyMemory()
