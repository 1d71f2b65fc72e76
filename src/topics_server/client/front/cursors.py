"""Where a reader's position is kept, and when it is saved.

An item is handled when the loop asks for the next one. The position behind the handled items is
saved at the end of each page or event, so before the reader waits for more, and at the end of the
loop; `every_ms` makes it rarer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

# Within a page or an event the position is saved so often while its items are handled.
WITHIN_MS = 1000


class CursorStore(Protocol):
    """Keeps a cursor over restarts of the program. Its calls may block."""

    def load(self) -> str | None:
        """The cursor that was saved last; None: there is none."""

    def save(self, cursor: str) -> None:
        """Keep this cursor in place of the last one."""


class FileCursor:
    """Keeps a cursor in a file. A save is on the disk when it returns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def load(self) -> str | None:
        """The cursor in the file; None if there is no file. Raises `ValueError` for no text."""
        try:
            return self._path.read_text("utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise ValueError(f"{self._path} holds no cursor: it is not UTF-8") from None

    def save(self, cursor: str) -> None:
        """Write the cursor beside the file, sync it, and rename it over the file."""
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
    """Says which item's position to save now; times are milliseconds of any clock.

    `counts` tells the items that have a position; others leave that of the last one.
    """

    def __init__(self, every_ms: int, now_ms: float, counts: Callable[[T], bool]) -> None:
        if every_ms < 0:
            raise ValueError("save_every_ms must be 0 or more")
        self._every_ms = every_ms
        self._saved_ms = now_ms
        self._counts = counts
        self._handled: T | None = None

    def handled(self, item: T, now_ms: float, *, is_last: bool) -> T | None:
        """An item was handled, the last one of its page or event; the item to save now."""
        if self._counts(item):
            self._handled = item
        since_ms = now_ms - self._saved_ms
        is_due = since_ms >= (self._every_ms if is_last else max(self._every_ms, WITHIN_MS))
        return self.rest(now_ms) if is_due else None

    def rest(self, now_ms: float) -> T | None:
        """The last handled item, if its position is not saved."""
        item, self._handled = self._handled, None
        self._saved_ms = now_ms
        return item
