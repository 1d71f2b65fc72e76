"""The options of a read and of a live stream, checked. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict, cast

import msgspec

from topics_server.client.calls import QueueAddress, place
from topics_server.client.following.live_events import Option
from topics_server.client.front.cursors import CursorStore
from topics_server.client.front.event_reader import EventReader
from topics_server.client.front.items import (
    GapItem,
    PositionedItem,
    committed_seq,
    recreated,
)
from topics_server.client.front.page_reader import PageReader

# Fields that set where a reader begins without a cursor.
STARTS: Final = ("from_seq", "since", "last", "tail")


class ReadOptions(TypedDict, total=False):
    """The options of `read`.

    `cursor`: the cursor of an item, or a store such as `FileCursor`, which also stores new cursors.
    `consumer`: the reader begins at this consumer's position and commits the handled items; the
    consumer must exist. `from_seq`, `since`, `last`: where to begin without a cursor; default: at
    the first record. `filter_`: see docs/READS.md. `limit`: the most records of a page.
    `save_every_ms`: the shortest time between saves or commits; 0: at the end of each page.
    `patience_ms`: as for `Client`.
    """

    cursor: str | CursorStore | None
    consumer: str | None
    from_seq: int | None
    since: int | str | None
    last: int | None
    filter_: Any
    limit: int | None
    save_every_ms: int
    patience_ms: int | None


class LiveOptions(TypedDict, total=False):
    """The options of `live` and `tail`; `cursor`, `consumer` and `save_every_ms` as for `read`.

    `prefix`: also follow the topics whose names begin with it. The others are the query of
    `GET …/live` in docs/READS.md. `patience_ms`: how long a server may be away; default: an hour.
    """

    prefix: str | Sequence[str] | None
    cursor: str | CursorStore | None
    consumer: str | None
    save_every_ms: int
    patience_ms: int
    from_seq: int | None
    since: int | str | None
    last: int | None
    tail: bool
    tag: str | None
    tag_prefix: str | None
    node: str | None
    filter: Any
    limit: int | None
    heartbeat_ms: int | None
    consistency: str | None
    include_tags: bool
    include_meta: bool
    include_data: bool


class KeepPlan(msgspec.Struct, frozen=True):
    """Where the position of a reader comes from, and where it is stored."""

    cursor: str | CursorStore | None
    consumer: str | None
    save_every_ms: int

    @property
    def store(self) -> CursorStore | None:
        """The store of cursors; None if the caller or the server stores them."""
        return None if self.cursor is None or isinstance(self.cursor, str) else self.cursor

    @property
    def text(self) -> str | None:
        """The cursor that the caller gave as a text."""
        return self.cursor if isinstance(self.cursor, str) else None

    def counts(self, item: PositionedItem) -> bool:
        """Whether a position can be saved after this item; a consumer commits only seqs."""
        return self.consumer is None or committed_seq(item) is not None


class ReadPlan(msgspec.Struct, frozen=True):
    """A read of one topic."""

    where: QueueAddress
    keep: KeepPlan
    start: Mapping[str, Any]
    fields: Mapping[str, Any]
    patience_ms: int | None

    @classmethod
    def of(cls, topic: str, url: str, options: ReadOptions) -> ReadPlan:
        """Raises `ValueError` for options that contradict each other."""
        keep = _keep_plan(cast("Mapping[str, Any]", options))
        start = {name: options.get(name) for name in STARTS} | {"consumer": keep.consumer}
        fields = {
            "filter": options.get("filter_"),
            "limit": options.get("limit"),
            "consumer": keep.consumer,
        }
        return cls(place(topic, url), keep, start, fields, options.get("patience_ms"))

    def reader(self, cursor: str | None) -> PageReader:
        """The reader; `cursor` is the loaded cursor. Raises `ValueError`."""
        return PageReader(self.where, cursor=cursor, start=self.start, fields=self.fields)


class LivePlan(msgspec.Struct, frozen=True):
    """A live stream of topics."""

    topics: tuple[str, ...]
    prefix: str | Sequence[str] | None
    keep: KeepPlan
    query: Mapping[str, Option]
    patience_ms: int

    @classmethod
    def of(cls, topics: str | Sequence[str], patience_ms: int, options: LiveOptions) -> LivePlan:
        """Raises `ValueError` for options that contradict each other."""
        query: dict[str, Any] = dict(options)
        keep = _keep_plan(query)
        prefix = query.pop("prefix", None)
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        if keep.consumer is not None and (len(names) != 1 or prefix):
            raise ValueError("a consumer is of one topic")
        for name in ("cursor", "save_every_ms"):
            query.pop(name, None)
        patience_ms = query.pop("patience_ms", patience_ms)
        return cls(names, prefix, keep, query, patience_ms)

    def begin(self, cursor: str | None) -> tuple[EventReader, str | None]:
        """The reader of the events behind this cursor, and a topic or None.

        A topic is returned if the cursor comes from a read: the caller must request its epoch.
        Raises `ValueError`.
        """
        reader = EventReader(cursor)
        read = reader.read_cursor
        if read is not None and (self.topics != (read.topic,) or self.prefix):
            raise ValueError(f"this is the cursor of a read of {read.topic}")
        return reader, read.topic if read is not None else None

    def behind_read(
        self, reader: EventReader, epoch: int | None
    ) -> tuple[list[GapItem], Mapping[str, Option]]:
        """The first items of a stream that follows a read, and its query.

        `epoch`: the topic's current one.
        """
        read = reader.read_cursor
        assert read is not None, "asked for the cursor of a read only"
        others = {name: value for name, value in self.query.items() if name not in STARTS}
        if read.epoch in (None, epoch):
            return [], {**others, "from_seq": read.seq}
        return [recreated(read.topic, epoch)], {**others, "from_seq": 0}


def _keep_plan(options: Mapping[str, Any]) -> KeepPlan:
    consumer = options.get("consumer")
    others = [name for name in ("cursor", *STARTS) if options.get(name)]
    if consumer is not None and others:
        raise ValueError(f"consumer and {others[0]} are two starts; give one")
    save_every_ms = options.get("save_every_ms", 0)
    if save_every_ms < 0:
        raise ValueError("save_every_ms must be 0 or more")
    return KeepPlan(options.get("cursor"), consumer, save_every_ms)
