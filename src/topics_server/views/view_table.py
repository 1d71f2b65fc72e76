"""All views: a projection of the journal. Pure.

The table has definitions only: the results of a view are in its files, which can always be rebuilt.
A view belongs to a topic's *name*: it stays when the topic is dropped, and starts again when the
topic is created again. Loop thread. Satisfies `projections.Projection`; called by commits,
recovery, the checkpointer and `service`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from topics_server.engine.topic.applied import Applied
from topics_server.values.entries import Entry, ViewDeleted, ViewPut
from topics_server.values.model import ViewDefinition
from topics_server.values.storage_types import VIEWS_PARTS, ViewImage, ViewsPart

_PIECE_VIEWS: Final = 64
_NOTHING: Final = Applied()


class ViewRow(msgspec.Struct):
    """The definition of one view."""

    view_id: int
    topic: str
    name: str
    created_ts: int
    definition: ViewDefinition


class ViewTable:
    """All views by topic name and name. `next_view_id`: ids below it may have been used."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[str, ViewRow]] = {}
        self._count = 0
        self._applied_lsn = 0
        self.next_view_id = 1
        # Called with every view that is created, changed or deleted; set when the service starts.
        self.on_put: Callable[[ViewRow], None] | None = None
        self.on_gone: Callable[[ViewRow], None] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ViewRow]:
        return iter([row for rows in self._by_topic.values() for row in rows.values()])

    def find(self, topic: str, name: str) -> ViewRow | None:
        """The view of a topic name and a view name."""
        return self._by_topic.get(topic, {}).get(name)

    def of_topic(self, topic: str) -> list[ViewRow]:
        """The views of a topic's name, in order of their names."""
        rows = self._by_topic.get(topic, {})
        return [rows[name] for name in sorted(rows)]

    # -- journal ---------------------------------------------------------------------------

    def stage(self, lsn: int, entry: Entry) -> None:
        """See `projections.Owner`. One entry at a time: the service waits for each."""

    def commit_staged(self, lsn: int) -> None:
        """See `projections.Owner`."""

    def undo_from(self, lsn: int) -> None:
        """See `projections.Owner`."""

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """See `projections.Projection`."""
        assert isinstance(entry, ViewPut | ViewDeleted), "not an entry of the views"
        if isinstance(entry, ViewPut):
            self.next_view_id = max(self.next_view_id, entry.view_id + 1)
        if lsn <= self._applied_lsn:
            return _NOTHING
        self._applied_lsn = lsn
        row = self.find(entry.topic, entry.name)
        if isinstance(entry, ViewDeleted):
            if row is not None:
                self._remove(row)
            return _NOTHING
        if row is None:
            row = ViewRow(entry.view_id, entry.topic, entry.name, entry.ts, entry.definition)
            self._add(row)
        else:
            row.definition = entry.definition
        if self.on_put is not None:
            self.on_put(row)
        return _NOTHING

    def _add(self, row: ViewRow) -> None:
        self._by_topic.setdefault(row.topic, {})[row.name] = row
        self._count += 1

    def _remove(self, row: ViewRow) -> None:
        rows = self._by_topic[row.topic]
        del rows[row.name]
        if not rows:
            del self._by_topic[row.topic]
        self._count -= 1
        if self.on_gone is not None:
            self.on_gone(row)

    # -- snapshots -------------------------------------------------------------------------

    def capture(self) -> Iterator[bytes]:
        """See `projections.Projection`. Yields nothing if there never was a view."""
        if self.next_view_id == 1:
            return
        applied_lsn, next_id = self._applied_lsn, self.next_view_id
        rows = list(self)
        for start in range(0, max(1, len(rows)), _PIECE_VIEWS):
            images = [
                ViewImage(row.view_id, row.topic, row.name, row.created_ts, row.definition)
                for row in rows[start : start + _PIECE_VIEWS]
            ]
            yield msgspec.msgpack.encode(
                ViewsPart(VIEWS_PARTS.version, applied_lsn, next_id, images)
            )

    def restore(self, part: bytes) -> None:
        """See `projections.Projection`."""
        captured = VIEWS_PARTS.decode(part)
        self._applied_lsn = captured.applied_lsn
        self.next_view_id = max(self.next_view_id, captured.next_view_id)
        for image in captured.views:
            self._add(
                ViewRow(image.view_id, image.topic, image.name, image.created_ts, image.definition)
            )
