"""The positions of one topic's consumers, applied or in flight. Pure.

A consumer is a name with a seq: its reader has finished every record up to that seq. Entries in
flight count when the next one is decided, and are undone as a suffix. Changed by `topic` (staging)
and `changes` (applying).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from topics_server.values.entries import ConsumerDeleted, ConsumerMoved
from topics_server.values.model import ConsumerHold


class ConsumerAt(msgspec.Struct):
    """One consumer; times in ms. `seen_ts`: its last call; None: no call since the start.

    `hold`: the records that caps keep for it.
    """

    seq: int
    created_ts: int
    committed_ts: int
    seen_ts: int | None = None
    hold: ConsumerHold | None = None


class Place(NamedTuple):
    """A consumer's position, and its hold: the records that caps keep for it."""

    seq: int
    hold: ConsumerHold | None


class Consumers:
    """The consumers of a topic by name; `known` are the applied ones.

    `holding`: a superset of the consumers with a hold, applied or in flight.
    """

    __slots__ = ("_staged", "holding", "known")

    def __init__(self) -> None:
        self.known: dict[str, ConsumerAt] = {}
        self.holding: frozenset[str] = frozenset()
        # By name: the lsn and place of each entry in flight, oldest first; place None: a delete.
        self._staged: dict[str, list[tuple[int, Place | None]]] = {}

    def newest(self, name: str) -> Place | None:
        """A consumer's place after all entries in flight; None: it will not exist."""
        staged = self._staged.get(name)
        if staged:
            return staged[-1][1]
        known = self.known.get(name)
        return None if known is None else Place(known.seq, known.hold)

    def holds(self) -> list[tuple[int, ConsumerHold]]:
        """The seq and the hold of each consumer that has a hold, after all entries in flight."""
        found: list[tuple[int, ConsumerHold]] = []
        for name in self.holding:
            place = self.newest(name)
            if place is not None and place.hold is not None:
                found.append((place.seq, place.hold))
        return found

    def staged_lsn(self, name: str) -> int | None:
        """The lsn of a consumer's newest entry in flight."""
        staged = self._staged.get(name)
        return staged[-1][0] if staged else None

    @property
    def count(self) -> int:
        """The number of consumers, including those that are being created."""
        known = self.known
        return len(known) + sum(name not in known for name in self._staged)

    def stage(self, lsn: int, entry: ConsumerMoved | ConsumerDeleted) -> None:
        """Note an entry in flight."""
        assert self is not NO_CONSUMERS, "all topics share it"
        name, place = entry.consumer, None
        if isinstance(entry, ConsumerMoved):
            hold = entry.hold
            if hold is UNSET:
                before = self.newest(name)
                hold = None if before is None else before.hold
            place = Place(entry.seq, hold)
            if hold is not None:
                self.holding |= {name}
        self._staged.setdefault(name, []).append((lsn, place))

    def unstage(self, lsn: int, name: str) -> None:
        """Forget an entry that was applied or has failed; in replay no entry was in flight."""
        staged = [kept for kept in self._staged.get(name, ()) if kept[0] != lsn]
        if staged:
            self._staged[name] = staged
        else:
            self._staged.pop(name, None)
        self.note_hold(name)

    def note_hold(self, name: str) -> None:
        """Note whether a changed consumer has a hold."""
        known = self.known.get(name)
        if known is not None and known.hold is not None:
            self.holding |= {name}
        elif self.holding and name not in self._staged:
            self.holding -= {name}


# The consumers of every topic that never had one. They never change.
NO_CONSUMERS: Final = Consumers()
