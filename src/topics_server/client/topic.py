"""`TopicClient`: records and consumers of one topic, without an event loop.

Appends are safe to repeat: each has an idempotency key, and a condition that was met once gets the
same answer again. Every method raises the kinds of `errors`: `ConditionFailed` if somebody was
faster. Threads may share one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from topics_server.client import topic_calls
from topics_server.client.calls import Call, place
from topics_server.client.effects import Effects, new_key
from topics_server.client.errors import ClientError
from topics_server.client.queue import (
    JSON_BODY,
    PATIENCE_MS,
    TIMEOUT_MS,
    answer_of,
    headers,
    unreachable,
    verified,
)
from topics_server.client.retries import RetryPolicy
from topics_server.client.topic_calls import AppendResult, ConsumerPlace, NewRecord, RecordsPage

T = TypeVar("T")


class TopicClient:
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
    ) -> None:
        self.place = place(topic, url)
        self._retry_for_ms = patience_ms
        self._effects = effects or Effects()
        self._timeout_s = timeout_ms / 1000
        self._http = httpx.Client(
            base_url=self.place.url,
            headers=headers(token),
            timeout=self._timeout_s,
            trust_env=False,
            verify=verified(self.place.url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

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
    ) -> AppendResult:
        """Append one record; with `if_` only if that condition holds (`docs/CONDITIONS.md`)."""
        record = NewRecord(data, tag, node, meta)
        return self.append_many([record], if_=if_, key=key, create=create)

    def append_many(
        self,
        records: Sequence[NewRecord],
        *,
        if_: Mapping[str, Any] | None = None,
        key: str | None = None,
        create: bool | None = None,
    ) -> AppendResult:
        """Append records with consecutive seqs, all of them or none."""
        return self._do(
            topic_calls.append(self.place, records, if_=if_, key=key or new_key(), create=create)
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
        """The records behind `from_seq`, or behind the consumer's seq."""
        fields = {
            "from_seq": from_seq,
            "limit": limit,
            "filter": filter_,
            "consumer": consumer,
            "ack": ack,
        }
        return self._do(topic_calls.read(self.place, fields, wait_ms))

    def put_consumer(self, consumer: str, start: int | str = "earliest") -> ConsumerPlace:
        """Make a consumer at `earliest`, `head` or a seq; one that exists stays where it is."""
        return self._do(topic_calls.put_consumer(self.place, consumer, start))

    def consumer(self, consumer: str) -> ConsumerPlace:
        """Where a consumer is; raises `NotFound`."""
        return self._do(topic_calls.get_consumer(self.place, consumer))

    def commit(
        self, consumer: str, seq: int, *, rewind: bool = False, if_seq: int | None = None
    ) -> ConsumerPlace:
        """Commit a seq: every record up to it is finished."""
        return self._do(topic_calls.commit(self.place, consumer, seq, rewind=rewind, if_seq=if_seq))

    def delete_consumer(self, consumer: str) -> bool:
        """Forget a consumer; whether there was one."""
        return self._do(topic_calls.delete_consumer(self.place, consumer))

    def _do(self, call: Call[T]) -> T:
        retries = RetryPolicy(self._retry_for_ms)
        while True:
            try:
                return self._once(call)
            except ClientError as error:
                pause_ms = retries.pause_ms(error, self._effects.chance())
                if pause_ms is None or not call.repeatable:
                    raise
            threading.Event().wait(pause_ms / 1000)

    def _once(self, call: Call[T]) -> T:
        try:
            response = self._http.request(
                call.method,
                call.path,
                content=call.body,
                headers=JSON_BODY if call.body is not None else None,
                timeout=self._timeout_s + call.wait_ms / 1000,
            )
        except httpx.TransportError as error:
            raise unreachable(error, self.place.url) from None
        return answer_of(response, call)
