"""`Queue`: one queue of one server, without an event loop.

The blocking twin of `queue.AsyncQueue`: the same calls, errors and retries over a blocking
connection. Threads may share a `Queue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from topics_server.client import calls
from topics_server.client.blocking_client import BlockingClient
from topics_server.client.effects import Effects, new_key
from topics_server.client.exchange import PATIENCE_MS, TIMEOUT_MS
from topics_server.client.values import (
    Acked,
    Claimed,
    Enqueued,
    Extended,
    Job,
    Nacked,
    NewJob,
    QueueState,
)


class Queue(BlockingClient):
    """A queue by name and `url`, or by its URL alone; the fields are those of `AsyncQueue`."""

    def __init__(
        self,
        queue: str,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
        patience_ms: int = PATIENCE_MS,
        create: bool | None = None,
        config: Mapping[str, Any] | None = None,
        effects: Effects | None = None,
        shared: BlockingClient | None = None,
    ) -> None:
        self.place = calls.place(queue, url)
        self._create = create
        self._config = dict(config or {})
        super().__init__(self.place.url, token, timeout_ms, patience_ms, effects, shared)

    def enqueue(
        self,
        data: Any,
        *,
        tag: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
        delay_ms: int | None = None,
        deliver_at_ms: int | None = None,
        traceparent: str | None = None,
    ) -> Enqueued:
        """Store one job; fields and errors as for `AsyncQueue.enqueue`."""
        job = NewJob(data=data, tag=tag, meta=meta, delay_ms=delay_ms, deliver_at_ms=deliver_at_ms)
        return self.enqueue_many([job], key=key, traceparent=traceparent)

    def enqueue_many(
        self, jobs: Iterable[NewJob], *, key: str | None = None, traceparent: str | None = None
    ) -> Enqueued:
        """Store jobs with consecutive seqs, all of them or none."""
        call = calls.enqueue(
            self.place,
            jobs,
            key=key or new_key(),
            create=self._create,
            config=self._config,
            traceparent=traceparent,
        )
        return self._patiently(call)

    def claim(
        self,
        node: str,
        *,
        max_jobs: int = 1,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        finished: Sequence[Job] = (),
    ) -> Claimed:
        """Lease up to `max_jobs` to `node`; see `AsyncQueue.claim`."""
        return self._once(
            calls.claim(
                self.place,
                node,
                max_jobs=max_jobs,
                lease_ms=lease_ms,
                wait_ms=wait_ms,
                finished=finished,
            )
        )

    def ack(self, node: str, jobs: Sequence[Job]) -> Acked:
        """Delete finished jobs for good; jobs with an expired lease are `skipped`."""
        return self._once(calls.ack(self.place, node, jobs))

    def nack(
        self, node: str, jobs: Sequence[Job], *, delay_ms: int = 0, error: str | None = None
    ) -> Nacked:
        """Release jobs; they are claimable again after `delay_ms`.

        `error` is the reason; a dead letter holds the last reason.
        """
        return self._once(calls.nack(self.place, node, jobs, delay_ms=delay_ms, error=error))

    def extend(self, node: str, jobs: Sequence[Job], *, lease_ms: int) -> Extended:
        """Let leases last `lease_ms` from now; `skipped` ones are lost."""
        return self._once(calls.extend(self.place, node, jobs, lease_ms=lease_ms))

    def state(self) -> QueueState:
        """Counters and configuration; raises `NotFound` and `NotAQueue`."""
        return self._patiently(calls.state(self.place))
