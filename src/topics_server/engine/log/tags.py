"""The tag index of one unsealed block.

An index belongs to its block. It is built at the first look-up and freed when the block is sealed
or dead, so topics without deletes by tag have no index. Invariant: rows ascend, dead ones included.
Called by `engine/log/runs.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from topics_server.values.model import TagMatch


class TagRows:
    """The rows of every tag of one frozen block; the prefix order is built when first needed."""

    __slots__ = ("_names", "_rows")

    def __init__(self, tags: Sequence[str | None]) -> None:
        rows: dict[str, list[int]] = {}
        if tags.count(None) != len(tags):
            for row, tag in enumerate(tags):
                if tag is not None:
                    rows.setdefault(tag, []).append(row)
        self._rows = rows
        self._names: list[str] | None = None

    def rows_of(self, match: TagMatch) -> list[int]:
        """Ascending rows whose tag matches."""
        if not match.is_prefix:
            return self._rows.get(match.text, [])
        if self._names is None:
            self._names = sorted(self._rows)
        found: list[int] = []
        for index in range(bisect_left(self._names, match.text), len(self._names)):
            name = self._names[index]
            if not name.startswith(match.text):
                break
            found += self._rows[name]
        found.sort()
        return found
