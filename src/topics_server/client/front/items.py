"""The items that readers get: records, gaps, and news of topics. Pure.

Each item has its position: a reader that has handled the item continues behind its `cursor`. The
position of an item of a read is `{"topic", "seq", "epoch"}`. That of an item of a live stream is
`{"id", "handled"}`: the id of the last event, and the last handled seq of a topic whose next event
was handled in part. The JavaScript client uses the same two forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from topics_server.client.addresses import checked_header


class PositionedItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of a topic."""

    topic: str
    position: Mapping[str, Any] = msgspec.field(default_factory=dict)

    @property
    def cursor(self) -> str:
        """The position from which a reader continues behind this item: an opaque text to store."""
        return msgspec.json.encode(self.position).decode()


class RecordItem(PositionedItem, frozen=True, kw_only=True):
    """A record. `ts_ms`: when it was committed, since 1970.

    With `encoding` "base64", `data` holds bytes of a stream of this `content_type`. `trace`: the
    `traceparent` of its append.
    """

    kind: ClassVar[str] = "record"
    seq: int
    ts_ms: int
    data: Any = None
    tag: str | None = None
    node: str | None = None
    meta: Mapping[str, Any] = msgspec.field(default_factory=dict)
    encoding: str | None = None
    content_type: str | None = None
    trace: str | None = None


class GapItem(PositionedItem, frozen=True, kw_only=True):
    """Records `from_seq` to `to_seq` are lost, because of `reason`; about `missed` records.

    Reasons are `cap`, `ttl`, `mixed`, `recreated`, `restart`, `damaged`, `source_trim`,
    `from_seq_too_old`, or a reason of a later server. After `recreated` the topic begins anew.
    """

    kind: ClassVar[str] = "gap"
    from_seq: int
    to_seq: int
    reason: str
    missed: int | None = None


class CaughtUpItem(PositionedItem, frozen=True, kw_only=True):
    """Everything up to `head_seq` was delivered; the items that follow are new."""

    kind: ClassVar[str] = "caught-up"
    head_seq: int


class DeletedItem(PositionedItem, frozen=True, kw_only=True):
    """The topic was deleted. If it is created again, a live stream continues with it."""

    kind: ClassVar[str] = "deleted"
    head_seq: int


class NoticeItem(PositionedItem, frozen=True, kw_only=True):
    """Other news of a live stream.

    `name` is `topic-created`, `left-out`, or a name of a later server.
    """

    kind: ClassVar[str] = "notice"
    name: str
    data: Mapping[str, Any]


ReadItem: TypeAlias = RecordItem | GapItem
LiveItem: TypeAlias = RecordItem | GapItem | CaughtUpItem | DeletedItem | NoticeItem


class ReadCursor(msgspec.Struct, frozen=True):
    """The position behind an item of a read."""

    topic: str
    seq: int
    epoch: int | None = None


_READ_CURSOR: Final = msgspec.json.Decoder(ReadCursor)


class LiveCursor(msgspec.Struct, frozen=True):
    """The position behind an item of a live stream."""

    id: str
    handled: dict[str, int] = {}


_LIVE_CURSOR: Final = msgspec.json.Decoder(LiveCursor)


def parsed_cursor(text: str) -> ReadCursor | LiveCursor:
    """The position in the text of a cursor. Raises `ValueError`.

    The id of an event is sent in a header, so it must have characters that a header can carry.
    """
    try:
        return _READ_CURSOR.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        found = _LIVE_CURSOR.decode(text)
        checked_header(found.id, "the id of an event")
    except (msgspec.DecodeError, ValueError):
        raise ValueError("this is not the cursor of an item") from None
    return found


def gap_of(topic: str, tombstone: Mapping[str, Any], position: Mapping[str, Any]) -> GapItem:
    """The gap that a tombstone reports."""
    return GapItem(
        topic=topic,
        from_seq=tombstone["gap_from"],
        to_seq=tombstone["gap_to"],
        reason=tombstone["reason"],
        missed=tombstone.get("missed_estimate"),
        position=position,
    )


def recreated(topic: str, epoch: int | None) -> GapItem:
    """The gap before the first record of a topic that was dropped and made again."""
    position = {"topic": topic, "seq": 0, "epoch": epoch}
    return GapItem(topic=topic, from_seq=1, to_seq=0, reason="recreated", position=position)


def committed_seq(item: PositionedItem) -> int | None:
    """The seq that a consumer commits after an item; None if it commits nothing."""
    if isinstance(item, RecordItem):
        return item.seq
    return item.to_seq or None if isinstance(item, GapItem) else None
