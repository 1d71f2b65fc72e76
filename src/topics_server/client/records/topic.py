"""`TopicClient`: records and consumers of one topic, without an event loop.

Appends are safe to repeat: each has an idempotency key, so a repeated append gets the first answer,
even if its condition no longer holds. Every method raises the errors of `errors`, such as
`ConditionFailed` if another writer was faster. Threads may share a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from topics_server.client.blocking_client import BlockingClient
from topics_server.client.calls import place
from topics_server.client.effects import Effects, new_key
from topics_server.client.exchange import PATIENCE_MS, TIMEOUT_MS
from topics_server.client.records import topic_calls
from topics_server.client.records.topic_calls import (
    AppendResult,
    ConsumerPlace,
    Hold,
    NewRecord,
    RecordsPage,
)


class TopicClient(BlockingClient):
    """A topic by name and `url`, or by its URL alone."""

    def __init__(
        self,
        topic: str,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
        patience_ms: int = PATIENCE_MS,
        effects: Effects | None = None,
        shared: BlockingClient | None = None,
    ) -> None:
        self.place = place(topic, url)
        super().__init__(self.place.url, token, timeout_ms, patience_ms, effects, shared)

    def append(
        self,
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
        """Append one record; with `if_`, only if that condition holds (`docs/CONDITIONS.md`)."""
        record = NewRecord(data, tag, node, meta)
        return self.append_many([record], if_=if_, key=key, create=create, traceparent=traceparent)

    def append_many(
        self,
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
        return self._patiently(
            topic_calls.append(
                self.place,
                records,
                if_=if_,
                key=key or new_key(),
                per_record=per_record,
                create=create,
                traceparent=traceparent,
            )
        )

    def read(
        self,
        from_seq: int | None = None,
        *,
        limit: int | None = None,
        filter_: Any = None,
        consumer: str | None = None,
        ack: str | None = None,
        wait_ms: int = 0,
    ) -> RecordsPage:
        """One page of records behind `from_seq`, or behind the consumer's seq."""
        fields = {
            "from_seq": from_seq,
            "limit": limit,
            "filter": filter_,
            "consumer": consumer,
            "ack": ack,
        }
        return self._patiently(topic_calls.read(self.place, fields, wait_ms))

    def put_consumer(
        self,
        consumer: str,
        start: int | str = "earliest",
        *,
        hold: Hold | UnsetType | None = UNSET,
    ) -> ConsumerPlace:
        """Make a consumer at `earliest`, `head` or a seq; an existing consumer keeps its position.

        With `hold`, the topic keeps records beyond its caps for this consumer
        (`docs/CONSUMERS.md`); None ends that.
        """
        return self._patiently(topic_calls.put_consumer(self.place, consumer, start, hold))

    def consumer(self, consumer: str) -> ConsumerPlace:
        """The state of a consumer; raises `NotFound`."""
        return self._patiently(topic_calls.get_consumer(self.place, consumer))

    def commit(
        self, consumer: str, seq: int, *, rewind: bool = False, if_seq: int | None = None
    ) -> ConsumerPlace:
        """Commit a seq: every record up to it is finished."""
        return self._patiently(
            topic_calls.commit(self.place, consumer, seq, rewind=rewind, if_seq=if_seq)
        )

    def delete_consumer(self, consumer: str) -> bool:
        """Forget a consumer; returns whether it existed."""
        return self._patiently(topic_calls.delete_consumer(self.place, consumer))
