"""`Client`: one server, without an event loop.

The blocking twin of `async_client.AsyncClient`: the same methods, errors and retries. Threads may
share a client, but not its iterators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from topics_server.client.addresses import checked_url
from topics_server.client.blocking import Queue
from topics_server.client.blocking_client import BlockingClient
from topics_server.client.calls import DEFAULT_URL, place
from topics_server.client.effects import Effects, blocking_now_ms, new_key
from topics_server.client.errors import NotFound
from topics_server.client.exchange import LIVE_RETRY_MS, PATIENCE_MS, TIMEOUT_MS
from topics_server.client.following.blocking_live import live
from topics_server.client.front import admin_calls
from topics_server.client.front.admin_calls import TopicDescription
from topics_server.client.front.cursors import SaveTurns
from topics_server.client.front.items import LiveItem, PositionedItem, ReadItem, committed_seq
from topics_server.client.front.plans import (
    KeepPlan,
    LiveOptions,
    LivePlan,
    ReadOptions,
    ReadPlan,
)
from topics_server.client.producing.async_producer import ProducerOptions
from topics_server.client.producing.blocking_producer import IdempotentProducer
from topics_server.client.records import topic_calls
from topics_server.client.records.topic import TopicClient
from topics_server.client.records.topic_calls import AppendResult, ConsumerPlace, NewRecord
from topics_server.client.streaming.durable_stream import DurableStream
from topics_server.client.streaming.stream_requests import JSON
from topics_server.client.viewing.blocking_view import ViewClient
from topics_server.client.working.worker import Handler, Worker, WorkerOptions, worker

T = TypeVar("T", bound=PositionedItem)
R = TypeVar("R")


class Client(BlockingClient):
    """One server.

        with Client("http://127.0.0.1:4000") as client:
            client.append("orders", {"id": 7}, tag="paid")
            for item in client.read("orders"):
                ...

    `token`: the API key. `timeout_ms` limits one request. `patience_ms`: how long a request is
    tried again when the server is away or throttles; the pauses have jitter and are never shorter
    than the server asks for. Every method raises the errors of `errors`. The views, queues and
    streams that methods return use the connections of this client.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
        patience_ms: int = PATIENCE_MS,
        effects: Effects | None = None,
    ) -> None:
        base = url or DEFAULT_URL
        checked_url(base, DEFAULT_URL)
        self.url = base.rstrip("/")
        self._timeout_ms = timeout_ms
        super().__init__(self.url, token, timeout_ms, patience_ms, effects)

    # -- topics ----------------------------------------------------------------------------------

    def topics(self, prefix: str = "") -> Generator[TopicDescription, None, None]:
        """The topics whose names begin with `prefix`, in name order."""
        cursor: str | None = None
        while True:
            page = self._patiently(admin_calls.list_topics(prefix, cursor))
            yield from page.topics
            cursor = page.next_cursor
            if cursor is None:
                return

    def put_topic(self, topic: str, **config: Any) -> TopicDescription:
        """Make a topic, or change its configuration: `put_topic("jobs", type="queue")`."""
        return self._patiently(admin_calls.put(place(topic, self.url), config))

    def topic(self, topic: str) -> TopicDescription:
        """The state and the configuration of a topic. Raises `NotFound`."""
        return self._patiently(admin_calls.state(place(topic, self.url)))

    def drop_topic(self, topic: str) -> None:
        """Drop a topic with all its records. Raises `NotFound`."""
        self._patiently(admin_calls.drop(place(topic, self.url)))

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Any request to the server; returns the JSON.

        A `POST` is sent once, others are tried again.
        """
        return self._patiently(admin_calls.any_call(method, path, body))

    # -- records ---------------------------------------------------------------------------------

    def append(
        self,
        topic: str,
        data: Any,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        if_: Mapping[str, Any] | None = None,
        key: str | None = None,
        create: bool | None = None,
        traceparent: str | None = None,
    ) -> AppendResult:
        """Append one record; with `if_`, only if that condition holds (docs/CONDITIONS.md).

        Each call has an idempotency key, so a repeat after a lost answer stores nothing. Raises
        `ConditionFailed` if another writer was faster.
        """
        record = NewRecord(data, tag, node, meta)
        return self.append_many(
            topic, [record], if_=if_, key=key, create=create, traceparent=traceparent
        )

    def append_many(
        self,
        topic: str,
        records: Sequence[NewRecord],
        *,
        if_: Mapping[str, Any] | None = None,
        key: str | None = None,
        per_record: bool = False,
        create: bool | None = None,
        traceparent: str | None = None,
    ) -> AppendResult:
        """Append records with consecutive seqs, all of them or none.

        With `per_record` the key of record i is `key:i`: only records with an unknown key are
        stored, and the result has the `seqs` of all records. `traceparent`: the trace of the
        request, which readers get as `trace` of each record.
        """
        where = place(topic, self.url)
        return self._patiently(
            topic_calls.append(
                where,
                records,
                if_=if_,
                key=key or new_key(),
                per_record=per_record,
                create=create,
                traceparent=traceparent,
            )
        )

    def delete(
        self,
        topic: str,
        *,
        tag: str | None = None,
        tag_prefix: str | None = None,
        before_seq: int | None = None,
    ) -> int:
        """Delete the records that meet every given condition; returns their number."""
        where = place(topic, self.url)
        return self._patiently(admin_calls.delete(where, tag, tag_prefix, before_seq))

    def read(self, topic: str, **options: Unpack[ReadOptions]) -> Generator[ReadItem, None, None]:
        """The records and gaps of a topic, up to its head at the start of the read.

        After a temporary failure, the read continues from the same position. The options are those
        of `ReadOptions`. An item counts as handled when the loop requests the next item.
        """
        plan = ReadPlan.of(topic, self.url, options)
        return self._kept(self._pages(plan), plan.keep, topic, plan.patience_ms)

    def live(
        self, topics: str | Sequence[str] = (), **options: Unpack[LiveOptions]
    ) -> Generator[LiveItem, None, None]:
        """The records and gaps of topics, then new ones as they arrive, and news of the topics.

        Ends only with an error: a refusal, or `Unreachable` once the server is away for
        `patience_ms`. The options are those of `LiveOptions`. Topics need not exist.
        """
        plan = LivePlan.of(topics, LIVE_RETRY_MS, options)
        name = plan.topics[0] if plan.topics else ""
        return self._kept(self._events(plan), plan.keep, name, plan.patience_ms)

    def tail(
        self, topic: str, n: int = 10, **options: Unpack[LiveOptions]
    ) -> Generator[LiveItem, None, None]:
        """The last `n` records, then new ones as they arrive; see `live`."""
        start: LiveOptions = {"last": n} if n else {"tail": True}
        return self.live(topic, **(start | options))

    def consumer(self, topic: str, name: str, start: int | str = "earliest") -> Consumer:
        """Make a consumer at `earliest`, `head` or a seq; an existing consumer keeps its
        position.
        """
        self._patiently(topic_calls.put_consumer(place(topic, self.url), name, start))
        return Consumer(self, topic, name)

    # -- views, queues, streams ------------------------------------------------------------------

    def view(self, topic: str, view: str) -> ViewClient:
        """A view of a topic, which need not exist yet."""
        return ViewClient(
            topic,
            view,
            url=self.url,
            timeout_ms=self._timeout_ms,
            patience_ms=self._retry_for_ms,
            effects=self._effects,
            shared=self,
        )

    def queue(
        self, queue: str, *, create: bool | None = None, config: Mapping[str, Any] | None = None
    ) -> Queue:
        """A queue: enqueue, claim, ack; for `create` and `config` see `AsyncQueue`."""
        return Queue(
            queue,
            url=self.url,
            timeout_ms=self._timeout_ms,
            patience_ms=self._retry_for_ms,
            create=create,
            config=config,
            effects=self._effects,
            shared=self,
        )

    def worker(
        self, queue: str, **options: Unpack[WorkerOptions]
    ) -> Callable[[Handler[R]], Worker[R]]:
        """Turn a function of one `Job` into the worker of a queue; see `worker`."""
        return worker(queue, url=self.url, token=self._token, **options)

    def producer(
        self, topic: str, producer: str, **options: Unpack[ProducerOptions]
    ) -> IdempotentProducer:
        """A producer that stores each record once and in order, over any number of batches."""
        own: ProducerOptions = {"url": self.url, "token": self._token}
        return IdempotentProducer(topic, producer, **(own | options))

    def stream(self, path: str, content_type: str = JSON) -> DurableStream:
        """A Durable Stream by its path; the stream need not exist yet."""
        return DurableStream(
            path,
            content_type=content_type,
            url=self.url,
            timeout_ms=self._timeout_ms,
            patience_ms=self._retry_for_ms,
            effects=self._effects,
            shared=self,
        )

    # -- reading ---------------------------------------------------------------------------------

    def _topic(self, topic: str) -> TopicClient:
        return TopicClient(
            topic,
            url=self.url,
            timeout_ms=self._timeout_ms,
            patience_ms=self._retry_for_ms,
            effects=self._effects,
            shared=self,
        )

    def _pages(self, plan: ReadPlan) -> Generator[Sequence[ReadItem], None, None]:
        pages = plan.reader(_loaded(plan.keep))
        while (call := pages.call()) is not None:
            yield pages.take(self._patiently(call, plan.patience_ms))

    def _events(self, plan: LivePlan) -> Generator[Sequence[LiveItem], None, None]:
        reader, topic = plan.begin(_loaded(plan.keep))
        query = plan.query
        if topic is not None:
            gaps, query = plan.behind_read(reader, self._epoch(topic, plan.patience_ms))
            yield gaps
        events = live(
            plan.topics,
            prefix=plan.prefix,
            cursor=reader.cursor,
            url=self.url,
            token=self._token,
            patience_ms=plan.patience_ms,
            effects=self._effects,
            **query,
        )
        with contextlib.closing(events):
            for event in events:
                yield reader.take(event)

    def _epoch(self, topic: str, patience_ms: int) -> int | None:
        """The topic's incarnation; None if the topic does not exist."""
        try:
            return self._patiently(admin_calls.state(place(topic, self.url)), patience_ms).epoch
        except NotFound:
            return None

    def _kept(
        self,
        pages: Generator[Sequence[T], None, None],
        keep: KeepPlan,
        topic: str,
        patience_ms: int | None,
    ) -> Generator[T, None, None]:
        """The items. Saves or commits the positions of handled items."""
        turns: SaveTurns[T] = SaveTurns(keep.save_every_ms, blocking_now_ms(), keep.counts)
        with contextlib.closing(pages):
            try:
                for page in pages:
                    last = len(page) - 1
                    for index, item in enumerate(page):
                        yield item
                        now_ms = blocking_now_ms()
                        due = turns.handled(item, now_ms, is_last=index == last)
                        self._keep(due, keep, topic, patience_ms)
            finally:
                # Retry for the usual time, not for an hour: the reader may have ended because
                # the server does not answer.
                self._keep(turns.rest(blocking_now_ms()), keep, topic, None)

    def _keep(
        self, item: PositionedItem | None, keep: KeepPlan, topic: str, patience_ms: int | None
    ) -> None:
        if item is None:
            return
        if keep.store is not None:
            keep.store.save(item.cursor)
        seq = None if keep.consumer is None else committed_seq(item)
        if keep.consumer is not None and seq is not None:
            where = place(topic, self.url)
            call = topic_calls.commit(where, keep.consumer, seq, rewind=False, if_seq=None)
            self._patiently(call, patience_ms)


class Consumer:
    """One consumer of a topic: a position that the server keeps (docs/CONSUMERS.md)."""

    def __init__(self, client: Client, topic: str, name: str) -> None:
        self.topic = topic
        self.name = name
        self._client = client
        self._calls = client._topic(topic)

    def read(self, **options: Unpack[ReadOptions]) -> Generator[ReadItem, None, None]:
        """The items behind the consumer's position, up to the head. Commits the handled items."""
        own: ReadOptions = {"consumer": self.name}
        return self._client.read(self.topic, **(options | own))

    def live(self, **options: Unpack[LiveOptions]) -> Generator[LiveItem, None, None]:
        """The items behind the consumer's position, then new ones. Commits the handled items."""
        own: LiveOptions = {"consumer": self.name}
        return self._client.live(self.topic, **(options | own))

    def place(self) -> ConsumerPlace:
        """The consumer's position and its lag. Raises `NotFound`."""
        return self._calls.consumer(self.name)

    def commit(self, seq: int, *, if_seq: int | None = None) -> ConsumerPlace:
        """Commit all records up to `seq`; with `if_seq`, only if the consumer's position is that
        seq.
        """
        return self._calls.commit(self.name, seq, if_seq=if_seq)

    def rewind(self, seq: int, *, if_seq: int | None = None) -> ConsumerPlace:
        """Set the consumer back."""
        return self._calls.commit(self.name, seq, rewind=True, if_seq=if_seq)

    def delete(self) -> bool:
        """Forget the consumer; returns whether it existed."""
        return self._calls.delete_consumer(self.name)


def _loaded(keep: KeepPlan) -> str | None:
    """The cursor at which the reader begins."""
    return keep.store.load() if keep.store is not None else keep.text
