"""The items of a live stream's events. No I/O.

An event of many records is handled record by record. Between two records the position is the id
before the event, and the last handled seq: the server then sends the event again, and the reader
skips its handled records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topics_server.client.following.live_events import LiveEvent, LiveRecord
from topics_server.client.front.items import (
    CaughtUpItem,
    DeletedItem,
    GapItem,
    LiveCursor,
    LiveItem,
    NoticeItem,
    ReadCursor,
    RecordItem,
    gap_of,
    parsed_cursor,
)


class EventReader:
    """Turns events into items.

    `read_cursor` is set if the start is the cursor of a read; `cursor` is the id of the stream.
    """

    def __init__(self, cursor: str | None) -> None:
        """Raise `ValueError` for a text that is no cursor."""
        place = None if cursor is None else parsed_cursor(cursor)
        self.read_cursor = place if isinstance(place, ReadCursor) else None
        known = place if isinstance(place, LiveCursor) else LiveCursor("")
        self._id = known.id
        self._handled: Mapping[str, int] = known.handled

    @property
    def cursor(self) -> str | None:
        """The id behind which the stream begins."""
        return self._id or None

    def take(self, event: LiveEvent) -> list[LiveItem]:
        """The items of an event."""
        topic, handled = event.topic, self._handled.get(event.topic, 0)
        before = event.cursor_before or self._id
        others = {name: seq for name, seq in self._handled.items() if name != topic}
        # An event that ends before the handled seq does not move that seq back.
        is_past = not (
            (event.kind == "record" and event.data.get("to_seq", 0) < handled)
            or (event.kind == "tombstone" and _is_old(event, handled))
        )
        self._id = event.cursor
        self._handled = others if is_past else self._handled
        after = _position(self._id, self._handled)
        match event.kind:
            case "record":
                return self._records(event, handled, after, (before, others))
            case "tombstone":
                return [_gap(event, handled, after)] if is_past else []
            case "caught-up":
                return [CaughtUpItem(topic=topic, head_seq=event.data["head_seq"], position=after)]
            case "topic-deleted":
                return [DeletedItem(topic=topic, head_seq=event.data["head_seq"], position=after)]
            case _:
                return [NoticeItem(topic=topic, name=event.kind, data=event.data, position=after)]

    def _records(
        self,
        event: LiveEvent,
        handled: int,
        after: Mapping[str, Any],
        before: tuple[str, Mapping[str, int]],
    ) -> list[LiveItem]:
        records = [record for record in event.records if record.seq > handled]
        last = len(records) - 1
        cursor, others = before
        return [
            _item(
                event.topic,
                record,
                after if index == last else _position(cursor, {**others, event.topic: record.seq}),
            )
            for index, record in enumerate(records)
        ]


def _position(cursor: str, handled: Mapping[str, int]) -> dict[str, Any]:
    return {"id": cursor, "handled": handled} if handled else {"id": cursor}


def _is_old(event: LiveEvent, handled: int) -> bool:
    """Whether a tombstone covers only handled records, so that nothing is lost."""
    return event.data["reason"] != "recreated" and int(event.data["gap_to"]) <= handled


def _gap(event: LiveEvent, handled: int, after: Mapping[str, Any]) -> GapItem:
    tombstone = dict(event.data)
    if tombstone["reason"] != "recreated":
        tombstone["gap_from"] = max(tombstone["gap_from"], handled + 1)
    return gap_of(event.topic, tombstone, after)


def _item(topic: str, record: LiveRecord, position: Mapping[str, Any]) -> RecordItem:
    return RecordItem(
        topic=topic,
        seq=record.seq,
        ts_ms=record.ts,
        data=record.data,
        tag=record.tag,
        node=record.node,
        meta=record.meta or {},
        encoding=record.encoding,
        content_type=record.content_type,
        trace=record.trace,
        position=position,
    )
