"""A store in a dict: just enough for tests of the API itself.

It tests no rule of the engine; the real store has its own tests. The next call raises `trouble`,
`gate` holds appends until it is set, `drained` ends waiting reads.
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec import UNSET, UnsetType

from topics_server.engine.answers import (
    Appended,
    BackwardPage,
    BackwardRequest,
    ConsumerState,
    Deleted,
    Gap,
    Page,
    Piece,
    PutOutcome,
    RangeMark,
    ReadRequest,
    TopicPage,
    TopicState,
)
from topics_server.engine.filters import Filter
from topics_server.engine.topic.writes.condition import (
    Condition,
    ConditionCheck,
    ConditionCounts,
)
from topics_server.values.appends import DecodedAppend
from topics_server.values.blocks import make_block
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import (
    ConsumerHold,
    Durability,
    ProducerStamp,
    TagMatch,
    TopicConfig,
    TopicType,
)

T = TypeVar("T")


@dataclasses.dataclass
class FakeRecord:
    seq: int
    data: bytes
    meta: bytes
    tag: str | None
    node: str | None


@dataclasses.dataclass
class FakeTopic:
    config: TopicConfig
    records: list[FakeRecord] = dataclasses.field(default_factory=list)
    head_seq: int = 0
    touched: int = 0
    keys: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    consumers: dict[str, int] = dataclasses.field(default_factory=dict)


TIME_MS = 1_748_450_001_000


class FakeStore:
    def __init__(self) -> None:
        self.topics: dict[str, FakeTopic] = {}
        self.trouble: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.moved = asyncio.Event()
        self.reads_cancelled = 0
        self.gap: Gap | None = None
        self.read_only: list[int] = []
        self.last_read: ReadRequest | None = None
        self.last_delete: tuple[int | None, TagMatch | None] | None = None
        self.damaged_records = 0
        self.condition_counts = ConditionCounts()

    def _topic(self, name: str) -> FakeTopic:
        self._maybe_fail()
        if name not in self.topics:
            raise TopicsError(Code.TOPIC_NOT_FOUND, f'no "{name}"', {"topic": name})
        return self.topics[name]

    def _maybe_fail(self) -> None:
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble

    async def append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        config: TopicConfig | None,
        producer: ProducerStamp | None = None,
        submitted: Callable[[], None] | None = None,
        check: ConditionCheck | None = None,
    ) -> Appended:
        self._maybe_fail()
        assert body
        await self.gate.wait()
        created = name not in self.topics
        if created and decoded.create is False:
            raise TopicsError(Code.TOPIC_NOT_FOUND, "absent", {"topic": name})
        topic = self.topics.setdefault(name, FakeTopic(config or TopicConfig()))
        key = decoded.idempotency_key or header_key
        if key in topic.keys:
            first, last = topic.keys[key]
            return Appended(first, last, topic.head_seq, deduped=True)
        first = topic.head_seq + 1
        topic.records += [
            FakeRecord(first + row, *columns)
            for row, columns in enumerate(
                zip(
                    map(bytes, decoded.datas),
                    decoded.metas,
                    decoded.tags,
                    decoded.nodes,
                    strict=True,
                )
            )
        ]
        topic.head_seq += decoded.count
        if key is not None:
            topic.keys[key] = (first, topic.head_seq)
        self.moved.set()
        return Appended(first, topic.head_seq, topic.head_seq, created, False, 0.25, 0.5)

    def begin_append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        producer: ProducerStamp | None = None,
        flush_now: bool = False,
        check: ConditionCheck | None = None,
    ) -> None:
        """Return None: in this store every append waits."""

    def read_resident(self, name: str, request: ReadRequest) -> None:
        """Return None: this store has nothing in memory."""

    def read_json(self, name: str, request: ReadRequest, shown: int) -> None:
        """Return None, too."""

    async def read_json_from_disk(self, name: str, request: ReadRequest, shown: int) -> None:
        """Return None, too."""

    async def read_backward(
        self, name: str, request: BackwardRequest, wanted: Filter | None
    ) -> BackwardPage:
        """Refuse: no test of a fake reads backwards."""
        raise AssertionError(name)

    async def cursor_of(self, name: str, request: ReadRequest) -> int:
        """Refuse: no test of a fake begins a stream at a time."""
        raise AssertionError(name)

    def upto_seq(self, name: str, request: ReadRequest) -> int:
        """Return the last seq."""
        return self._topic(name).head_seq

    def range_mark(self, name: str, first_seq: int, last_seq: int) -> RangeMark:
        """Refuse: no test of a fake validates a range."""
        raise AssertionError(name)

    def dead_slots(self, name: str) -> tuple[int, int]:
        """Refuse: no test of a fake validates a range."""
        raise AssertionError(name)

    async def read(self, name: str, request: ReadRequest) -> Page:
        self.last_read = request
        page = self._page(self._topic(name), request)
        if page.is_empty and request.wait_ms:
            self.moved.clear()
            try:
                await asyncio.wait_for(self.moved.wait(), request.wait_ms / 1000)
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                self.reads_cancelled += 1
                raise
            page = self._page(self._topic(name), request)
        return page

    def _page(self, topic: FakeTopic, request: ReadRequest) -> Page:
        after = [record for record in topic.records if record.seq > request.from_seq]
        shown = [record for record in after[: request.limit] if record.node not in request.nodes]
        pieces = [
            Piece(
                make_block(
                    record.seq,
                    array("q", [TIME_MS]),
                    [record.data],
                    [record.meta],
                    [record.tag],
                    [record.node],
                ),
                range(1),
            )
            for record in shown
        ]
        last = after[: request.limit][-1].seq if after else topic.head_seq
        next_seq = topic.head_seq if len(after) <= request.limit else last
        earliest = topic.records[0].seq if topic.records else topic.head_seq + 1
        return Page(pieces, next_seq, topic.head_seq, earliest, self.gap, len(after))

    def check_of(self, condition: Condition) -> ConditionCheck:
        return ConditionCheck(condition, self.condition_counts)

    async def decided(self, check: ConditionCheck | None, attempt: Callable[[], Awaitable[T]]) -> T:
        return await attempt()

    async def delete(
        self,
        name: str,
        *,
        before_seq: int | None,
        match: TagMatch | None,
        check: ConditionCheck | None = None,
    ) -> Deleted:
        topic = self._topic(name)
        self.last_delete = (before_seq, match)
        kept = [
            record
            for record in topic.records
            if (before_seq is not None and record.seq >= before_seq)
            or (match is not None and not match.matches(record.tag))
        ]
        count = len(topic.records) - len(kept)
        topic.records = kept
        earliest = kept[0].seq if kept else topic.head_seq + 1
        return Deleted(count, earliest, topic.head_seq, len(kept), 10 * len(kept), 0.1, 0.2)

    async def put_consumer(
        self,
        name: str,
        consumer: str,
        from_seq: int | None,
        hold: ConsumerHold | UnsetType | None = UNSET,
    ) -> tuple[ConsumerState, bool]:
        topic = self._topic(name)
        created = consumer not in topic.consumers
        topic.consumers.setdefault(consumer, topic.head_seq if from_seq is None else from_seq)
        return self.consumer(name, consumer), created

    async def commit_consumer(
        self,
        name: str,
        consumer: str,
        seq: int,
        *,
        rewind: bool = False,
        if_seq: int | None = None,
        topic_id: int | None = None,
    ) -> tuple[ConsumerState, bool]:
        before = self.read_start(name, consumer)
        self._topic(name).consumers[consumer] = seq if rewind else max(seq, before)
        return self.consumer(name, consumer), self.read_start(name, consumer) != before

    async def delete_consumer(self, name: str, consumer: str) -> bool:
        return self._topic(name).consumers.pop(consumer, None) is not None

    def consumer(self, name: str, consumer: str) -> ConsumerState:
        head_seq, seq = self._topic(name).head_seq, self.read_start(name, consumer)
        lag = head_seq - seq
        return ConsumerState(name, consumer, seq, head_seq, 1, lag, 0, TIME_MS, TIME_MS, TIME_MS, 1)

    def read_start(self, name: str, consumer: str) -> int:
        topic = self._topic(name)
        if consumer not in topic.consumers:
            raise TopicsError(Code.CONSUMER_NOT_FOUND, f'no "{consumer}"', {"topic": name})
        return topic.consumers[consumer]

    def list_consumers(
        self, name: str, after: str | None, page_size: int
    ) -> tuple[list[ConsumerState], str | None]:
        names = sorted(each for each in self._topic(name).consumers if each > (after or ""))
        shown = [self.consumer(name, each) for each in names[:page_size]]
        return shown, shown[-1].consumer if len(names) > page_size else None

    def consumer_lags(self) -> list[tuple[str, str, int, int]]:
        return [
            (name, consumer, topic.head_seq - seq, 0)
            for name, topic in self.topics.items()
            for consumer, seq in topic.consumers.items()
        ]

    async def put_topic(
        self,
        name: str,
        config: TopicConfig,
        *,
        keep_type: bool,
        check: ConditionCheck | None = None,
    ) -> PutOutcome:
        self._maybe_fail()
        before = self.topics[name].config if name in self.topics else None
        topic = self.topics.setdefault(name, FakeTopic(config))
        if before is not None and not keep_type and before.type is not config.type:
            raise TopicsError(Code.TOPIC_EXISTS_INCOMPATIBLE, "type", {"topic": name})
        topic.config = config
        return PutOutcome(config, before, 0.1, 0.2)

    async def configure(
        self,
        name: str,
        change: Callable[[TopicConfig | None], TopicConfig],
        *,
        check: ConditionCheck | None = None,
    ) -> PutOutcome:
        self._maybe_fail()
        before = self.topics[name].config if name in self.topics else None
        config = change(before)
        self.topics.setdefault(name, FakeTopic(config)).config = config
        return PutOutcome(config, before, 0.1, 0.2)

    async def drop_topic(
        self, name: str, *, if_empty: bool, check: ConditionCheck | None = None
    ) -> bool:
        self._maybe_fail()
        if if_empty and name in self.topics and self.topics[name].records:
            raise TopicsError(Code.TOPIC_NOT_EMPTY, "not empty", {"topic": name})
        return self.topics.pop(name, None) is not None

    def state(self, name: str, *, touch: bool) -> TopicState:
        topic = self._topic(name)
        topic.touched += touch
        return self._state(name)

    def _state(self, name: str) -> TopicState:
        topic = self.topics[name]
        return TopicState(
            name=name,
            topic_id=1,
            epoch=1,
            config=topic.config,
            head_seq=topic.head_seq,
            earliest_seq=topic.records[0].seq if topic.records else topic.head_seq + 1,
            evict_floor=1,
            count=len(topic.records),
            bytes=sum(len(record.data) for record in topic.records),
            disk_bytes=77,
            effective_priority=topic.config.priority or 0,
            last_write_ts=TIME_MS if topic.records else None,
            last_read_ts=None,
        )

    def list_topics(
        self,
        *,
        prefix: str,
        after: str | None,
        page_size: int,
        touch: bool,
        keep: Callable[[str], bool] | None = None,
    ) -> TopicPage:
        self._maybe_fail()
        names = [n for n in sorted(self.topics) if n.startswith(prefix) and n > (after or "")]
        names = [n for n in names if keep is None or keep(n)]
        for name in names[:page_size]:
            self.topics[name].touched += touch
        more = names[page_size - 1] if len(names) > page_size else None
        return TopicPage([self._state(name) for name in names[:page_size]], more)

    @property
    def topic_count(self) -> int:
        return len(self.topics)

    @property
    def records_live(self) -> int:
        return sum(len(topic.records) for topic in self.topics.values())

    @property
    def bytes_live(self) -> int:
        return 5

    @property
    def queue_topics(self) -> int:
        return sum(topic.config.type is TopicType.QUEUE for topic in self.topics.values())

    def counts_by_class(self) -> dict[Durability, int]:
        return {Durability.DISK: len(self.topics)}

    def read_only_shards(self) -> Sequence[int]:
        return self.read_only
