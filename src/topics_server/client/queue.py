"""`AsyncQueue`: one queue of one server, for coroutines.

Requests are in `calls`, errors in `errors`. Every method raises the errors of `errors`;
`Unreachable` after `patience_ms` of failures.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from topics_server.client import calls
from topics_server.client.coroutine_client import CoroutineClient
from topics_server.client.effects import Effects, new_key
from topics_server.client.event_frames import frames_async
from topics_server.client.exchange import CONNECT_MS, PATIENCE_MS, SILENCE_MS, TIMEOUT_MS
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


class Advice(msgspec.Struct, frozen=True):
    """A frame of a stream without a job, which shows that the stream is alive."""


class AsyncQueue(CoroutineClient):
    """A queue by name and `url`, or by its URL alone.

    `token`: the API key. `timeout_ms` limits one request. `patience_ms`: how long `enqueue` tries
    again when the server is away or throttles; 0 means one try. `create`: whether `enqueue` makes a
    missing queue (default: the server's setting). `config`: the configuration of that queue.
    `shared`: a client of the same server, whose connections and key this queue uses.
    """

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
        shared: CoroutineClient | None = None,
    ) -> None:
        self.place = calls.place(queue, url)
        self._create = create
        self._config = dict(config or {})
        super().__init__(self.place.url, token, timeout_ms, patience_ms, effects, shared)

    # -- jobs in ---------------------------------------------------------------------------------

    async def enqueue(
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
        """Store one job; `data` is anything msgspec encodes as JSON.

        `key` makes calls idempotent within the topic's window: a later call with the same key gets
        the first call's seq. Without a key, the tries of one call still store one job. `delay_ms`
        (from now) or `deliver_at_ms` (since 1970) hold the job back. `traceparent`: the trace of
        the request, which workers get as `trace` of the job.

        Raises `QueueFull`, `InvalidRequest`, `NotFound`, `Unauthorized`; `Unreachable`, `Throttled`
        and `Unavailable` after `patience_ms` of failures.
        """
        job = NewJob(data=data, tag=tag, meta=meta, delay_ms=delay_ms, deliver_at_ms=deliver_at_ms)
        return await self.enqueue_many([job], key=key, traceparent=traceparent)

    async def enqueue_many(
        self, jobs: Iterable[NewJob], *, key: str | None = None, traceparent: str | None = None
    ) -> Enqueued:
        """Store jobs with consecutive seqs, all of them or none; raises the errors of `enqueue`."""
        call = calls.enqueue(
            self.place,
            jobs,
            key=key or new_key(),
            create=self._create,
            config=self._config,
            traceparent=traceparent,
        )
        return await self._patiently(call)

    # -- jobs out --------------------------------------------------------------------------------

    async def claim(
        self,
        node: str,
        *,
        max_jobs: int = 1,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        finished: Sequence[Job] = (),
    ) -> Claimed:
        """Lease up to `max_jobs` to `node` for `lease_ms` (default: the queue's setting).

        `wait_ms`: how long to wait for the first job. `finished`: jobs to ack with the same
        request, for a worker that loops; `Claimed.ack` is the result. The request is tried once: if
        the response is lost (`Unreachable` with `sent`), the claimed jobs come back when their
        lease ends, and the finished jobs may or may not be acked.
        """
        return await self._once(
            calls.claim(
                self.place,
                node,
                max_jobs=max_jobs,
                lease_ms=lease_ms,
                wait_ms=wait_ms,
                finished=finished,
            )
        )

    async def ack(self, node: str, jobs: Sequence[Job]) -> Acked:
        """Delete finished jobs for good; jobs with an expired lease are `skipped`."""
        return await self._once(calls.ack(self.place, node, jobs))

    async def nack(
        self, node: str, jobs: Sequence[Job], *, delay_ms: int = 0, error: str | None = None
    ) -> Nacked:
        """Release jobs; they are claimable again after `delay_ms`.

        `error` is the reason; a dead letter holds the last reason.
        """
        return await self._once(calls.nack(self.place, node, jobs, delay_ms=delay_ms, error=error))

    async def extend(
        self,
        node: str,
        jobs: Sequence[Job],
        *,
        lease_ms: int,
        no_more: bool = False,
        timeout_ms: int | None = None,
    ) -> Extended:
        """Extend leases to `lease_ms` from now; `skipped` ones are lost.

        `no_more`: the streams of `work` that delivered these jobs must not deliver more.
        """
        call = calls.extend(self.place, node, jobs, lease_ms=lease_ms, no_more=no_more)
        return await self._once(call, timeout_ms=timeout_ms)

    async def state(self) -> QueueState:
        """Counters and configuration; raises `NotFound` and `NotAQueue`."""
        return await self._patiently(calls.state(self.place))

    async def work(
        self, node: str, *, max_jobs: int = 1, lease_ms: int | None = None
    ) -> AsyncGenerator[Job | Advice, None]:
        """Jobs as the server pushes them, at most `max_jobs` unacked.

        Ends only with an error: `Unreachable` when the stream breaks. At its end the server
        releases every lease that the stream delivered.
        """
        path = calls.work_path(self.place, node, max_jobs=max_jobs, lease_ms=lease_ms)
        connect_s = min(self._timeout_s, CONNECT_MS / 1000)
        timeout = httpx.Timeout(self._timeout_s, connect=connect_s, read=SILENCE_MS / 1000)
        found = frames_async(self._http, self.place.url, path, timeout)
        async with contextlib.aclosing(found) as opened:
            async for frame in opened:
                if frame.event == "job":
                    yield calls.pushed(self.place, frame.data.encode())
                else:
                    yield Advice()
