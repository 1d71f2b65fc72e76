"""Forks: a stream that begins as a copy of another.

The copies keep the seqs of the source, and deleted records keep their seqs too, so an offset of the
source means the same in the fork. After that the two streams are independent: appends to and
deletes from one do not appear in the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from topics_server.engine.answers import Page, ReadRequest
from topics_server.engine.commit.ticket_waits import applied
from topics_server.engine.store import Store
from topics_server.engine.stream_writes import StreamWrites
from topics_server.engine.topic.topic import Topic
from topics_server.streams.errors import conflict, not_found
from topics_server.streams.positions import is_json, position_after, same_type
from topics_server.streams.values import ForkAsked
from topics_server.values.appends import DecodedAppend, check_limits, of_columns
from topics_server.values.errors import TopicsError, invalid
from topics_server.values.model import Ancestor, StreamFacts, TopicConfig, TopicType
from topics_server.values.record_codecs import decode_bytes

ANCESTORS_MAX = 64
_PAGE_RECORDS = 1024
_PAGE_BYTES = 1024 * 1024
_PART_BYTES = 1024 * 1024
# Written to the fork for each record that is deleted in the source, and deleted afterwards.
_FILLER = b"null"

Records = tuple[bytes, DecodedAppend]


class _Cut(msgspec.Struct, frozen=True):
    """The end of the copied part: after `upto_seq`, or within the next record."""

    upto_seq: int
    prefix: bytes = b""


class Forks:
    """Makes forks, one at a time for each name."""

    def __init__(self, store: Store, writes: StreamWrites) -> None:
        self._store = store
        self._writes = writes
        self._making: dict[str, asyncio.Future[None]] = {}

    async def over(self, name: str) -> None:
        """Return once no fork of this name is being made."""
        while (making := self._making.get(name)) is not None:
            await asyncio.shield(making)

    async def make(
        self,
        name: str,
        source: Topic,
        asked: ForkAsked,
        facts: StreamFacts,
        records: Records | None,
    ) -> Topic | None:
        """The finished, durable fork; None if its name is taken by now.

        `facts`: the requested facts; missing ones are taken from the source. Raises `TopicsError`.
        """
        now = source.stream_facts
        if not same_type(facts.content_type, now.content_type):
            raise conflict(
                now.path, f"the Content-Type of the source is {now.content_type}", "Content-Type"
            )
        if len(now.ancestors) >= ANCESTORS_MAX:
            raise invalid(
                f"a fork can have at most {ANCESTORS_MAX} ancestors", "Stream-Forked-From"
            )
        if records is not None:
            check_limits(records[1], self._store.append_limits)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._making[name] = done
        try:
            cut = await self._cut(source, asked)
            wanted = _inherit(facts, now, source, asked, cut)
            return await self._make(name, source, cut, wanted, records)
        finally:
            del self._making[name]
            done.set_result(None)

    async def _make(
        self, name: str, source: Topic, cut: _Cut, facts: StreamFacts, records: Records | None
    ) -> Topic | None:
        first_seq = min(source.log.evict_floor, cut.upto_seq + 1)
        unfinished = msgspec.structs.replace(facts, is_copying=True, is_closed=False)
        config = source.config
        if config.type is not TopicType.LOG:
            config = TopicConfig(durability=config.durability)
        topic = await self._writes.create(name, unfinished, config, None, max(first_seq, 1))
        if topic is None:
            return None
        try:
            await self._copy(source, topic, cut.upto_seq)
            if cut.prefix:
                await applied(
                    self._writes.copy(topic, decode_bytes(facts.content_type, cut.prefix))
                )
            if records is not None:
                for part in _parts(records[1]):
                    await applied(self._writes.copy(topic, part))
            await applied(self._writes.change(topic, facts))
        except TopicsError:
            await self._store.drop_topic(name, if_empty=False)
            raise
        return topic

    async def _cut(self, source: Topic, asked: ForkAsked) -> _Cut:
        at, sub_offset = asked.at, asked.sub_offset
        head_seq = source.log.head_seq
        if at is None:
            return _Cut(head_seq)
        if at.seq > head_seq or (at.seq and position_after(source, at.seq) != at):
            raise invalid("Stream-Fork-Offset is outside the source stream", "Stream-Fork-Offset")
        if not sub_offset:
            return _Cut(at.seq)
        if is_json(source.stream_facts.content_type):
            return _Cut(await self._after_messages(source, at.seq, sub_offset))
        page = await self._read(source, at.seq, 1)
        data = page.pieces[0].block.data(page.pieces[0].rows[0]) if page.pieces else b""
        if sub_offset > len(data):
            raise _too_far()
        if sub_offset == len(data):
            return _Cut(page.next_from_seq)
        return _Cut(at.seq, bytes(data[:sub_offset]))

    async def _after_messages(self, source: Topic, seq: int, count: int) -> int:
        """The seq of the message that is `count` messages after `seq`."""
        while count:
            if seq >= source.log.head_seq:
                raise _too_far()
            page = await self._read(source, seq, min(count, _PAGE_RECORDS))
            count -= sum(len(piece.rows) for piece in page.pieces)
            seq = page.next_from_seq
        return seq

    async def _read(self, source: Topic, seq: int, limit: int) -> Page:
        page = await self._store.read(source.name, ReadRequest(seq, limit, _PAGE_BYTES))
        if self._store.topic_of(source.topic_id) is not source:
            raise not_found(source.stream_facts.path)
        return page

    async def _copy(self, source: Topic, topic: Topic, upto_seq: int) -> None:
        seq = topic.log.head_seq
        while seq < upto_seq:
            page = await self._read(source, seq, min(_PAGE_RECORDS, upto_seq - seq))
            end = min(page.next_from_seq, upto_seq)
            decoded, dead = _columns(page, seq + 1, end)
            await applied(self._writes.copy(topic, decoded))
            if dead:
                await self._store.finish_delete(self._store.start_delete(topic, dead))
            seq = end


def _parts(decoded: DecodedAppend) -> Iterator[DecodedAppend]:
    """The records that the fork copies, in parts of about `_PART_BYTES`."""
    first = total = 0
    for row, size in enumerate(map(len, decoded.datas)):
        if row > first and total + size > _PART_BYTES:
            yield _slice(decoded, first, row)
            first, total = row, 0
        total += size
    yield decoded if first == 0 else _slice(decoded, first, decoded.count)


def _slice(decoded: DecodedAppend, first: int, end: int) -> DecodedAppend:
    part = slice(first, end)
    return of_columns(
        decoded.datas[part], decoded.metas[part], decoded.tags[part], decoded.nodes[part]
    )


def _inherit(
    facts: StreamFacts, source_facts: StreamFacts, source: Topic, asked: ForkAsked, cut: _Cut
) -> StreamFacts:
    """The fork's facts: its ancestors, and the source's lifetime unless it has its own."""
    if facts.ttl_s is None and facts.expires_at is None:
        facts = msgspec.structs.replace(
            facts,
            ttl_s=source_facts.ttl_s,
            expires_at=source_facts.expires_at,
            expires_ms=source_facts.expires_ms,
        )
    upto_seq = cut.upto_seq
    above = tuple(
        Ancestor(each.path, each.topic_id, min(each.upto_seq, upto_seq))
        for each in source_facts.ancestors
    )
    at_seq = source.log.head_seq if asked.at is None else asked.at.seq
    return msgspec.structs.replace(
        facts,
        ancestors=(*above, Ancestor(source_facts.path, source.topic_id, upto_seq)),
        fork_at=(at_seq, asked.sub_offset),
    )


def _columns(page: Page, first_seq: int, last_seq: int) -> tuple[DecodedAppend, list[int]]:
    """The records of a page by seq, and the seqs whose records were deleted."""
    count = last_seq - first_seq + 1
    datas, metas = [_FILLER] * count, [b""] * count
    tags: list[str | None] = [None] * count
    nodes: list[str | None] = [None] * count
    dead = set(range(first_seq, last_seq + 1))
    for piece in page.pieces:
        block = piece.block
        for row in piece.rows:
            seq = block.first_seq + row
            if seq > last_seq:
                break
            at = seq - first_seq
            datas[at], metas[at] = block.data(row), block.meta(row)
            tags[at], nodes[at] = block.tags[row], block.nodes[row]
            dead.discard(seq)
    return of_columns(datas, metas, tags, nodes), sorted(dead)


def _too_far() -> TopicsError:
    return invalid(
        "Stream-Fork-Sub-Offset is beyond the end of the source stream", "Stream-Fork-Sub-Offset"
    )
