"""The pages of a read, and their items. No I/O.

`PageReader` is the state between two pages: the driver sends `call()` until it is None, and passes
each answer to `take`. If a page comes from another incarnation of the topic than the position, the
reader reports a gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topics_server.client.calls import Call, QueueAddress
from topics_server.client.front.items import (
    ReadCursor,
    ReadItem,
    RecordItem,
    gap_of,
    parsed_cursor,
    recreated,
)
from topics_server.client.records import topic_calls
from topics_server.client.records.topic_calls import RecordsPage, StoredRecord


class PageReader:
    """A read of one topic up to its head at the start of the read."""

    def __init__(
        self,
        where: QueueAddress,
        *,
        cursor: str | None,
        start: Mapping[str, Any],
        fields: Mapping[str, Any],
    ) -> None:
        """`start`: where to begin without a cursor. `fields`: other fields of each request.

        Raises `ValueError` for a cursor of another topic or of a live stream.
        """
        self._where = where
        self._start = {name: value for name, value in start.items() if value is not None}
        self._fields = fields
        self._seq: int | None = None
        self._epoch: int | None = None
        self._end: int | None = None
        self._is_done = False
        if cursor is not None:
            place = parsed_cursor(cursor)
            if not isinstance(place, ReadCursor) or place.topic != where.name:
                raise ValueError(f"this is not the cursor of a read of {where.name}")
            self._seq, self._epoch = place.seq, place.epoch

    def call(self) -> Call[RecordsPage] | None:
        """The request of the next page; None at the end."""
        if self._is_done:
            return None
        place = self._start if self._seq is None else {"from_seq": self._seq}
        return topic_calls.read(self._where, {**self._fields, **place}, 0)

    def take(self, page: RecordsPage) -> list[ReadItem]:
        """The items of a page."""
        topic, epoch = self._where.name, page.epoch
        is_announced = page.tombstone is not None and page.tombstone["reason"] == "recreated"
        if self._epoch not in (None, epoch) and not is_announced:
            self._seq, self._epoch, self._end = 0, epoch, None
            return [recreated(topic, epoch)]
        items: list[ReadItem] = []
        if page.tombstone is not None:
            seq = 0 if is_announced else page.tombstone["gap_to"]
            items.append(gap_of(topic, page.tombstone, self._position(seq, epoch)))
        items += [self._item(record, epoch) for record in page.records]
        self._seq, self._epoch = page.next_from_seq, epoch
        if self._end is None or is_announced:
            self._end = page.head_seq
        self._is_done = page.caught_up or self._seq >= self._end
        return items

    def _item(self, record: StoredRecord, epoch: int) -> RecordItem:
        return RecordItem(
            topic=self._where.name,
            seq=record.seq,
            ts_ms=record.ts_ms,
            data=record.data,
            tag=record.tag,
            node=record.node,
            meta=record.meta,
            encoding=record.encoding,
            content_type=record.content_type,
            trace=record.trace,
            position=self._position(record.seq, epoch),
        )

    def _position(self, seq: int, epoch: int) -> dict[str, Any]:
        return {"topic": self._where.name, "seq": seq, "epoch": epoch}
