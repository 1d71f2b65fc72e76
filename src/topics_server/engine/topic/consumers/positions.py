"""Where the consumers of one topic are, applied or in flight. Pure.

A consumer is a name with a seq: its reader has finished every record up to there. Entries in flight
count when the next one is decided, and are undone as a suffix. Changed by `topic` (staging) and
`changes` (applying).
"""

from __future__ import annotations

import msgspec


class ConsumerAt(msgspec.Struct):
    """One consumer; times in ms. `seen_ts`: its last call; None: none since the start."""

    seq: int
    created_ts: int
    committed_ts: int
    seen_ts: int | None = None


class Consumers:
    """The consumers of a topic by name; `known` are the applied ones."""

    __slots__ = ("_staged", "known")

    def __init__(self) -> None:
        self.known: dict[str, ConsumerAt] = {}
        # By name: lsn and seq of the entries in flight, oldest first; None: it is deleted.
        self._staged: dict[str, list[tuple[int, int | None]]] = {}

    def newest_seq(self, name: str) -> int | None:
        """Where a consumer will be with all that is in flight; None: it will not exist."""
        staged = self._staged.get(name)
        if staged:
            return staged[-1][1]
        known = self.known.get(name)
        return None if known is None else known.seq

    def staged_lsn(self, name: str) -> int | None:
        """The newest entry in flight of a consumer."""
        staged = self._staged.get(name)
        return staged[-1][0] if staged else None

    @property
    def count(self) -> int:
        """How many there are, those included that are being made."""
        known = self.known
        return len(known) + sum(name not in known for name in self._staged)

    def stage(self, lsn: int, name: str, seq: int | None) -> None:
        """Note an entry in flight."""
        self._staged.setdefault(name, []).append((lsn, seq))

    def unstage(self, lsn: int, name: str) -> None:
        """Forget an entry that was applied or has failed; in replay none was in flight."""
        staged = [kept for kept in self._staged.get(name, ()) if kept[0] != lsn]
        if staged:
            self._staged[name] = staged
        else:
            self._staged.pop(name, None)
