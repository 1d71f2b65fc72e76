"""Counts topics per key prefix.

Owns the counts; which prefixes there are changes with the keys, and `expect` counts anew then. A
topic counts for every prefix that its own path starts with. Held by `engine/topic/registry`, asked
by `engine/topic/quotas`.
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
        """Count these prefixes from now on; `paths`: of all topics there are."""
        self.prefixes = prefixes
        self._counts.clear()
        for path in paths:
            self.note(path, 1)

    def note(self, path: str, step: int) -> None:
        """A topic came (1) or went (-1)."""
        for prefix in self.prefixes:
            if path.startswith(prefix):
                self._counts[prefix] += step
                assert self._counts[prefix] >= 0

    def of(self, prefix: str) -> int:
        """How many there are."""
        return self._counts[prefix]
