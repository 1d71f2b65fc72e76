"""Where a reader's position is stored, and when it is saved.

An item counts as handled when the loop requests the next item. The position behind the handled
items is saved at the end of each page or event, before the reader waits for more, and at the end of
the loop. `every_ms` makes saves rarer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

# The pause between two saves while the items of one page or event are handled, ms.
WITHIN_MS = 1000


class CursorStore(Protocol):
    """Stores a cursor over restarts of the program. Its calls may block."""

    def load(self) -> str | None:
        """The cursor that was saved last; None without one."""

    def save(self, cursor: str) -> None:
        """Store this cursor in place of the last one."""


class FileCursor:
    """Stores a cursor in a file. A saved cursor is on the disk when `save` returns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def load(self) -> str | None:
        """The cursor in the file; None without a file.

        Raises `ValueError` if the file is not text.
        """
        try:
            return self._path.read_text("utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise ValueError(f"{self._path} holds no cursor: it is not UTF-8") from None

    def save(self, cursor: str) -> None:
        """Write the cursor to a second file, sync that, and rename it over the first."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(cursor)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class SaveTurns(Generic[T]):
    """Decides which item's position to save now. Times are milliseconds of any clock.

    `counts` returns whether an item has a position; an item without one leaves the position of the
    item before.
    """

    def __init__(self, every_ms: int, now_ms: float, counts: Callable[[T], bool]) -> None:
        if every_ms < 0:
            raise ValueError("save_every_ms must be 0 or more")
        self._every_ms = every_ms
        self._saved_ms = now_ms
        self._counts = counts
        self._handled: T | None = None

    def handled(self, item: T, now_ms: float, *, is_last: bool) -> T | None:
        """Call this after an item was handled. `is_last`: it ends a page or event.

        Returns the item to save now.
        """
        if self._counts(item):
            self._handled = item
        since_ms = now_ms - self._saved_ms
        is_due = since_ms >= (self._every_ms if is_last else max(self._every_ms, WITHIN_MS))
        return self.rest(now_ms) if is_due else None

    def rest(self, now_ms: float) -> T | None:
        """The last handled item, if its position is not saved; the caller saves it."""
        item, self._handled = self._handled, None
        self._saved_ms = now_ms
        return item
