"""Counts topics per key prefix.

Owns the counts. When the prefixes of the keys change, `expect` counts again. A topic counts for
every prefix of its own path. Owned by `engine/topic/registry`; read by `engine/topic/quotas`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PrefixCounts:
    """Counts of paths by prefix."""

    def __init__(self) -> None:
        self.prefixes: frozenset[str] = frozenset()
        self._counts: Counter[str] = Counter()

    def expect(self, prefixes: frozenset[str], paths: Iterable[str]) -> None:
        """Count these prefixes from now on; `paths`: the own paths of all topics."""
        self.prefixes = prefixes
        self._counts.clear()
        for path in paths:
            self.note(path, 1)

    def note(self, path: str, step: int) -> None:
        """Count a created topic (1) or a dropped one (-1)."""
        for prefix in self.prefixes:
            if path.startswith(prefix):
                self._counts[prefix] += step
                assert self._counts[prefix] >= 0

    def of(self, prefix: str) -> int:
        """The number of topics with a prefix."""
        return self._counts[prefix]
