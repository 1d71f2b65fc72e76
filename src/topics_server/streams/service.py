"""The stream service: create, append, close, read, wait, delete.

Implements the protocol's create, append, close, read, wait, head and delete. Records, producers,
durability, deletes and reads are those of the topic. An expired stream counts as deleted from that
moment; its topic is dropped soon after (`lifetimes`). A deleted record is skipped; a lost record
(`410`) names the offset to continue at. Called by `api/streams/handlers`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from topics_server.engine.answers import Appended, Page, ProducerRepeat, ReadRequest
from topics_server.engine.appends import PendingAppend
from topics_server.engine.background.large_appends import LargeAppends
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.commit.repeats import repeated
from topics_server.engine.commit.ticket_waits import applied
from topics_server.engine.commit.topic_waits import TopicWaits
from topics_server.engine.ports import Clock
from topics_server.engine.store import Store
from topics_server.engine.stream_writes import StreamWrites
from topics_server.engine.topic.producers import StampRepeated
from topics_server.engine.topic.registry import Registry, own_path
from topics_server.engine.topic.topic import Topic
from topics_server.streams.content import Content, in_words_of_streams
from topics_server.streams.errors import conflict, gone, held, lost, not_found
from topics_server.streams.forks import Forks
from topics_server.streams.lifetimes import Lifetimes
from topics_server.streams.offsets import text_of
from topics_server.streams.paths import topic_of
from topics_server.streams.positions import position_after, same_type, view_of
from topics_server.streams.values import (
    AppendAsked,
    CreateAsked,
    Created,
    Position,
    StreamAppended,
    StreamPage,
    StreamView,
)
from topics_server.values.appends import DecodedAppend
from topics_server.values.errors import Code, TopicsError, clipped, invalid
from topics_server.values.model import ProducerStamp, StreamFacts, StreamStep, TopicConfig

DEFAULT_TYPE = "application/octet-stream"
# The maximum of messages in one page; the caller limits its bytes.
_PAGE_RECORDS_MAX = 4096
# How long a page of readers that waited is kept for the others: they are woken within a few turns
# of the loop, and a page may have a message of many MiB.
_SHARED_S = 1.0
_NO_PAGE: tuple[tuple[int, int, int, int], StreamPage | None] = ((0, 0, 0, 0), None)


class Streams:
    """The calls of the Durable Streams API. Each documents the `TopicsError` it raises."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        writes: StreamWrites,
        notifier: Notifier,
        clock: Clock,
        large_appends: LargeAppends,
    ) -> None:
        self._store = store
        self._large_appends = large_appends
        self._registry = registry
        self._writes = writes
        self._waits = TopicWaits(notifier)
        self._clock = clock
        # Readers that wait for more of a topic: the topic counts as used while there are any.
        self._waiting: Counter[int] = Counter()
        # The page that was read last for a reader that had waited, and what it depends on: topic,
        # revision, position, limit.
        self._newest = _NO_PAGE
        self._forks = Forks(store, writes)
        self._lifetimes = Lifetimes(store, registry, clock, self._waiting)

    # --- life -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Drop forks that a crash left unfinished."""
        for topic in self._registry:
            if topic.stream is not None and topic.stream.facts.is_copying:
                await self._store.drop_topic(topic.name, if_empty=False)

    async def run(self) -> None:
        """Drop streams as they expire, for ever."""
        await self._lifetimes.run()

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down: live reads end now."""
        return self._store.is_draining

    # --- create and delete ----------------------------------------------------------------

    async def create(self, path: str, asked: CreateAsked) -> Created:
        """Create a stream, or find one that matches the request; durable before this returns.

        Raises `stream_conflict` if the path has another stream or forks still use it;
        `stream_not_found` and `stream_conflict` for the source of a fork; `invalid_request`.
        """
        name = topic_of(path)
        limits = self._store.append_limits
        content = Content(self._large_appends, asked.body, limits, asked.trace)
        while True:
            await self._forks.over(name)
            await self._store.pending_names.over(name)
            topic = self._registry.find(name)
            if topic is not None:
                if own_path(topic) != path:
                    raise conflict(
                        path, f'the topic of stream "{clipped(path)}" belongs to another stream'
                    )
                if self._is_over(topic):
                    await self._store.drop_topic(name, if_empty=False)
                    continue
                if not self._is_as_asked(topic, asked):
                    raise conflict(
                        path, f'stream "{clipped(path)}" exists with another configuration'
                    )
                return Created(view_of(topic), is_new=False)
            if self._registry.fork_counts[path]:
                raise held(path)
            try:
                made = await self._make(path, name, asked, content)
            except TopicsError as error:
                raise in_words_of_streams(error) from None
            if made is not None:
                self._lifetimes.adopt(made)
                return Created(view_of(made), is_new=True)

    async def _make(
        self, path: str, name: str, asked: CreateAsked, content: Content
    ) -> Topic | None:
        """The stream; None if the caller must look it up again."""
        now_ms = self._clock.now_ms()
        facts = StreamFacts(
            path=path,
            content_type=asked.content_type or DEFAULT_TYPE,
            ttl_s=asked.ttl_s,
            expires_at=asked.expires_at,
            expires_ms=asked.expires_at_ms or 0,
            used_ms=now_ms,
            is_closed=asked.closes,
        )
        if asked.fork is not None:
            source = self._source(asked.fork.source_path)
            if asked.content_type is None:
                facts = msgspec.structs.replace(
                    facts, content_type=source.stream_facts.content_type
                )
            if await content.is_read_off_loop(facts.content_type):
                return None
            records = content.records(facts.content_type)
            return await self._forks.make(name, source, asked.fork, facts, records)
        if await content.is_read_off_loop(facts.content_type):
            return None
        records = content.records(facts.content_type)
        if records is not None and asked.closes:
            # The stream is created closed: append its records while it is open, then close it.
            facts = msgspec.structs.replace(facts, is_closed=False)
            last = msgspec.structs.replace(records[1], step=StreamStep(closes=True))
            records = records[0], last
        return await self._writes.create(name, facts, TopicConfig(), records)

    def _source(self, path: str) -> Topic:
        try:
            return self._topic(path)
        except TopicsError as error:
            if error.code is Code.STREAM_GONE:
                raise conflict(
                    path, f'stream "{clipped(path)}" was deleted and still has forks'
                ) from None
            raise

    def _is_as_asked(self, topic: Topic, asked: CreateAsked) -> bool:
        facts = topic.stream_facts
        fork = asked.fork
        wanted = asked.content_type or (None if fork is not None else DEFAULT_TYPE)
        if wanted is not None and not same_type(wanted, facts.content_type):
            return False
        if asked.closes != facts.is_closed:
            return False
        lives_as_asked = (asked.ttl_s, asked.expires_at) == (facts.ttl_s, facts.expires_at)
        if fork is None:
            return lives_as_asked and not facts.ancestors
        inherits = asked.ttl_s is None and asked.expires_at is None
        if not (lives_as_asked or inherits) or not facts.ancestors or facts.fork_at is None:
            return False
        seq, sub_offset = facts.fork_at
        return (
            facts.ancestors[-1].path == fork.source_path
            and (fork.at is None or fork.at.seq == seq)
            and fork.sub_offset == sub_offset
        )

    async def delete(self, path: str) -> None:
        """Delete a stream; its path stays reserved while it has forks.

        Raises `stream_not_found`, `stream_gone`.
        """
        topic = self._topic(path)
        await self._store.drop_topic(topic.name, if_empty=False)

    # --- append and close -----------------------------------------------------------------

    async def append(self, path: str, body: bytes, asked: AppendAsked) -> StreamAppended:
        """Append the messages of a body, all or none, with the durability of the topic's class.

        Raises `stream_not_found`, `stream_gone`, `stream_conflict` (content type, `Stream-Seq`),
        `stream_closed`, `invalid_request`, `payload_too_large`, the errors of `Producers.check` and
        the errors of any append.
        """
        content = Content(self._large_appends, body, self._store.append_limits, asked.trace)
        await self._store.pending_names.over(topic_of(path))
        topic = self._topic(path)
        self._check_type(topic, asked)
        while await content.is_read_off_loop(topic.stream_facts.content_type):
            await self._store.pending_names.over(topic_of(path))
            topic = self._topic(path)
            self._check_type(topic, asked)
        kept, decoded = self._asked_append(topic, content, asked)
        try:
            done = await self._store.append(
                topic.name,
                kept,
                decoded,
                header_key=asked.key,
                config=None,
                producer=asked.producer,
            )
        except TopicsError as error:
            raise self._stream_error(path, topic, error) from None
        return _appended(topic, done, asked)

    def begin_append(
        self, path: str, body: bytes, asked: AppendAsked, *, flush_now: bool = False
    ) -> StreamAppending | None:
        """Begin what `append` does, without waiting; None if the append must wait.

        After None nothing was done. For callers that do not run in a task. `flush_now`: write now,
        not at the end of this loop turn. Raises the errors of `append`.
        """
        if topic_of(path) in self._store.pending_names or self._large_appends.takes(body):
            return None
        topic = self._topic(path)
        self._check_type(topic, asked)
        content = Content(self._large_appends, body, self._store.append_limits, asked.trace)
        kept, decoded = self._asked_append(topic, content, asked)
        try:
            appending = self._store.begin_append(
                topic.name,
                kept,
                decoded,
                header_key=asked.key,
                producer=asked.producer,
                flush_now=flush_now,
            )
        except TopicsError as error:
            raise self._stream_error(path, topic, error) from None
        return None if appending is None else StreamAppending(topic, appending, asked)

    def _check_type(self, topic: Topic, asked: AppendAsked) -> None:
        """Raise `stream_closed`, or `stream_conflict` for another content type."""
        facts = topic.stream_facts
        if not same_type(asked.content_type, facts.content_type):
            if facts.is_closed:
                raise self._stream_error(
                    facts.path, topic, TopicsError(Code.STREAM_CLOSED, "the stream is closed")
                )
            raise conflict(
                facts.path,
                f"the stream's Content-Type is {facts.content_type}, not {asked.content_type}",
                "Content-Type",
            )

    def _asked_append(
        self, topic: Topic, content: Content, asked: AppendAsked
    ) -> tuple[bytes, DecodedAppend]:
        records = content.records(topic.stream_facts.content_type)
        if records is None:
            raise invalid("an append must contain at least one message")
        kept, decoded = records
        step = StreamStep(asked.seq, asked.closes) if asked.seq or asked.closes else None
        if step is not None or decoded.create is not False:
            decoded = msgspec.structs.replace(decoded, create=False, step=step)
        return kept, decoded

    async def close(self, path: str, producer: ProducerStamp | None) -> StreamAppended:
        """Close a stream: no more appends. Closed before it returns.

        Raises the errors of `append`.
        """
        await self._store.pending_names.over(topic_of(path))
        topic = self._topic(path)
        self._writes.note_use(topic)
        try:
            begun = self._writes.close(topic, producer)
        except TopicsError as error:
            raise self._stream_error(path, topic, error) from None
        if isinstance(begun, StampRepeated):
            done = await repeated(self._writes.commits, topic, begun, producer, 0)
            assert done.repeat is not None
            return _repeated(topic, done, done.repeat)
        if isinstance(begun, Ticket):
            await applied(begun)
        tail = position_after(topic, topic.log.head_seq)
        if producer is None:
            return StreamAppended(tail, True)
        return StreamAppended(tail, True, producer.epoch, producer.seq)

    def _stream_error(self, path: str, topic: Topic, error: TopicsError) -> TopicsError:
        """Translate an error of the engine into the errors of streams."""
        match error.code:
            case Code.STREAM_CLOSED:
                tail = text_of(position_after(topic, topic.staged_seq))
                detail = {"stream": path, "next_offset": tail}
                return TopicsError(error.code, f'stream "{clipped(path)}" is closed', detail)
            case Code.TOPIC_NOT_FOUND:
                return not_found(path)
            case Code.RECORD_TOO_LARGE:
                return in_words_of_streams(error)
            case _:
                return error

    # --- read -----------------------------------------------------------------------------

    def head(self, path: str) -> StreamView:
        """A stream's state; this does not count as a use.

        Raises `stream_not_found`, `stream_gone`.
        """
        return view_of(self._topic(path))

    async def read(self, path: str, at: Position, max_bytes: int, *, explicit: bool) -> StreamPage:
        """The messages after a position: as many as `max_bytes` allow, but at least one.

        Without `explicit` the read starts at the first retained message. Raises `stream_not_found`,
        and `stream_gone` if messages were lost, or for a position of another stream.
        """
        while True:
            topic = self._read_by(path, at)
            page = await self._store.read(
                topic.name, ReadRequest(at.seq, _PAGE_RECORDS_MAX, max_bytes)
            )
            if self._registry.find(topic.name) is topic:
                return self._page(topic, path, page, explicit=explicit)

    def reach(self, path: str, page: StreamPage) -> Position:
        """The last position that a reader of this page reaches before a gap, or the end."""
        log = self._topic(path).log
        hole = log.hole_at_or_after(page.next.seq + 1) if log.holes else None
        last_seq = log.head_seq if hole is None else min(log.head_seq, hole.first_seq - 1)
        return page.view.position_after(last_seq)

    def count(self, path: str, start: Position | None, end: Position) -> int:
        """The number of messages after one position and up to another."""
        first_seq = 1 if start is None else start.seq + 1
        return self._topic(path).log.live_between(first_seq, end.seq)[0]

    def read_resident(
        self, path: str, at: Position, max_bytes: int, *, explicit: bool
    ) -> StreamPage | None:
        """The page that `read` would return; None if it is not in memory.

        For callers that do not run in a task and cannot wait.
        """
        topic = self._read_by(path, at)
        request = ReadRequest(at.seq, _PAGE_RECORDS_MAX, max_bytes)
        page = self._store.read_resident(topic.name, request)
        return None if page is None else self._page(topic, path, page, explicit=explicit)

    def _read_by(self, path: str, at: Position) -> Topic:
        """The topic of a read, which counts as a use. Raises the errors of `read`."""
        topic = self._topic(path)
        self._writes.note_use(topic)
        self._check(topic, path, at)
        return topic

    async def wait(self, path: str, at: Position, max_bytes: int, wait_ms: float) -> StreamPage:
        """The messages after a position, as soon as there are any.

        Returns none only when `wait_ms` are over, the stream is closed, or the server shuts down.
        Raises the errors of `read`.
        """
        deadline_ms = self._clock.monotonic_ms() + wait_ms
        while True:
            topic = self._read_by(path, at)
            left_ms = deadline_ms - self._clock.monotonic_ms()
            if left_ms > 0 and topic.log.head_seq == at.seq and not self._ends(topic):
                await self._until_change(topic, left_ms)
                continue
            page = self._shared_page(topic, at, max_bytes)
            if page is None:
                revision = topic.revision
                page = await self.read(path, at, max_bytes, explicit=True)
                self._share(topic, revision, at, max_bytes, page)
            if page.datas or page.is_closed or self.is_draining:
                return page
            at = page.next
            if page.is_up_to_date and left_ms <= 0:
                return page

    def _ends(self, topic: Topic) -> bool:
        """Whether a reader at the end must not wait: the stream is closed, or the server stops."""
        return self.is_draining or (topic.stream is not None and topic.stream.facts.is_closed)

    def _shared_page(self, topic: Topic, at: Position, max_bytes: int) -> StreamPage | None:
        """The page that another reader at this position has just read, if nothing changed since."""
        key, page = self._newest
        return page if key == (topic.topic_id, topic.revision, at.seq, max_bytes) else None

    def _share(
        self, topic: Topic, revision: int, at: Position, max_bytes: int, page: StreamPage
    ) -> None:
        """Keep a page of new messages for the other readers that waited for them.

        Not where time alone changes what a reader gets.
        """
        if page.datas and page.is_up_to_date and not topic.config.ttl_ms:
            if self._newest is _NO_PAGE:
                # One timer at a time: a timer for each page would keep many pages.
                asyncio.get_running_loop().call_later(_SHARED_S, self._unshare)
            self._newest = (topic.topic_id, revision, at.seq, max_bytes), page

    def _unshare(self) -> None:
        self._newest = _NO_PAGE

    async def _until_change(self, topic: Topic, left_ms: float) -> None:
        topic_id = topic.topic_id
        self._waiting[topic_id] += 1
        try:
            await self._waits.change_or_timeout(topic_id, left_ms)
        finally:
            self._waiting[topic_id] -= 1
            if not self._waiting[topic_id]:
                del self._waiting[topic_id]

    def _check(self, topic: Topic, path: str, at: Position) -> None:
        if at.seq and position_after(topic, at.seq) != at:
            raise gone(path, "the offset is of another stream that was at this path")
        if at.seq > topic.log.head_seq:
            raise gone(path, "the offset is behind the stream's end: what was there is lost")

    def _page(self, topic: Topic, path: str, page: Page, *, explicit: bool) -> StreamPage:
        if page.gap is not None and explicit:
            raise lost(path, page.gap, text_of(position_after(topic, page.gap.gap_to)))
        datas: list[bytes] = []
        seqs: list[int] = []
        for piece in page.pieces:
            datas += piece.block.datas(piece.rows)
            first_seq = piece.block.first_seq
            seqs += [first_seq + row for row in piece.rows]
        view = view_of(topic)
        is_up_to_date = page.next_from_seq >= topic.log.head_seq
        return StreamPage(
            view=view,
            datas=datas,
            seqs=seqs,
            next=position_after(topic, page.next_from_seq),
            is_up_to_date=is_up_to_date,
            is_closed=is_up_to_date and view.is_closed,
        )

    # --- finding --------------------------------------------------------------------------

    def _topic(self, path: str) -> Topic:
        topic = self._registry.find(topic_of(path))
        if (
            topic is None
            or own_path(topic) != path
            or self._is_over(topic)
            or topic.stream_facts.is_copying
        ):
            raise gone(path) if self._registry.fork_counts[path] else not_found(path)
        return topic

    def _is_over(self, topic: Topic) -> bool:
        return self._lifetimes.is_over(topic)


class StreamAppending:
    """A submitted append; it continues even if nothing waits for it."""

    __slots__ = ("_appending", "_asked", "_topic")

    def __init__(self, topic: Topic, appending: PendingAppend, asked: AppendAsked) -> None:
        self._topic = topic
        self._appending = appending
        self._asked = asked

    def when_resolved(self, callback: Callable[[], object]) -> None:
        """See `engine.appends.PendingAppend`."""
        self._appending.when_resolved(callback)

    def outcome(self) -> StreamAppended:
        """The answer, once the append is applied or has failed.

        Raises the append's `TopicsError`.
        """
        return _appended(self._topic, self._appending.outcome(), self._asked)


def _appended(topic: Topic, done: Appended, asked: AppendAsked) -> StreamAppended:
    if done.repeat is not None:
        return _repeated(topic, done, done.repeat)
    if done.deduped:
        return _repeated_key(topic, done, asked.producer)
    tail = position_after(topic, done.last_seq)
    producer = asked.producer
    if producer is None:
        return StreamAppended(tail, asked.closes)
    return StreamAppended(tail, asked.closes, producer.epoch, producer.seq)


def _repeated(topic: Topic, done: Appended, repeat: ProducerRepeat) -> StreamAppended:
    """The answer to a producer's retry: the end of its last request.

    While another request is closing the stream, the answer does not report the stream as closed: a
    crash could undo the close.
    """
    view = view_of(topic)
    is_placed = repeat.is_last and not view.is_closed
    tail = position_after(topic, done.last_seq) if is_placed else view.tail
    return StreamAppended(tail, view.is_closed, repeat.epoch, repeat.seq, is_repeat=True)


def _repeated_key(topic: Topic, done: Appended, producer: ProducerStamp | None) -> StreamAppended:
    """The answer to a repeated idempotency key: the end of the records of the first request.

    A producer's next request with that key advances the producer without records
    (`engine/commit/repeats`).
    """
    view = view_of(topic)
    tail = view.tail if view.is_closed else position_after(topic, done.last_seq)
    if producer is None:
        return StreamAppended(tail, view.is_closed, is_repeat=True)
    return StreamAppended(tail, view.is_closed, producer.epoch, producer.seq, is_repeat=True)
