"""`@worker`: a function that processes jobs of a queue until stopped.

Defines the public interface of a worker: its options, its signals and its methods. `worker_run`
does the rest. Plain functions run in threads, coroutine functions on the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Generic, TypedDict, TypeVar, cast

from topics_server.client import calls
from topics_server.client.addresses import checked_token
from topics_server.client.backoff import Backoff
from topics_server.client.effects import NODE_BYTES_MAX, Effects, new_node
from topics_server.client.queue import AsyncQueue
from topics_server.client.values import Job, Stats
from topics_server.client.working.threads import Threads
from topics_server.client.working.worker_run import Push, WorkerPlan, WorkerRun

R = TypeVar("R")


class WorkerOptions(TypedDict, total=False):
    """The options of a worker besides its queue and its server; see `worker`."""

    concurrency: int
    lease_ms: int | None
    node: str | None
    push: Push
    backoff: Backoff
    pauses: Backoff
    grace_ms: int
    effects: Effects | None


Handler = Callable[[Job], R]
GRACE_MS: Final = 20_000
LEASE_MIN_MS: Final = 100
LEASE_MAX_MS: Final = 86_400_000
# Pauses before reconnecting; short, because a restarted server has waiting jobs.
PAUSES: Final = Backoff(base_ms=250, cap_ms=3000)
BACKOFF: Final = Backoff()


class Worker(Generic[R]):
    """A handler and its queue; calling it calls the handler. See `worker` for the options."""

    def __init__(
        self,
        handler: Handler[R],
        queue: str,
        *,
        url: str | None = None,
        token: str | None = None,
        concurrency: int = 8,
        lease_ms: int | None = None,
        node: str | None = None,
        push: Push = "auto",
        backoff: Backoff = BACKOFF,
        pauses: Backoff = PAUSES,
        grace_ms: int = GRACE_MS,
        effects: Effects | None = None,
    ) -> None:
        calls.place(queue, url)  # raise for a bad address now, not in `run`
        token = checked_token(token)
        if not 1 <= concurrency <= calls.CLAIM_MAX:
            raise ValueError(f"concurrency must be 1 to {calls.CLAIM_MAX}")
        if lease_ms is not None and not LEASE_MIN_MS <= lease_ms <= LEASE_MAX_MS:
            raise ValueError(f"lease_ms must be {LEASE_MIN_MS} to {LEASE_MAX_MS}")
        if node is not None and not 0 < len(node.encode()) <= NODE_BYTES_MAX:
            raise ValueError(f"node must have 1 to {NODE_BYTES_MAX} bytes")
        if push not in {"auto", "always", "never"}:
            raise ValueError('push must be "auto", "always" or "never"')
        if grace_ms < 0:
            raise ValueError("grace_ms must be 0 or more")
        self._handler = handler
        self._queue = queue
        self._url = url
        self._token = token
        self._effects = effects or Effects()
        self.plan = WorkerPlan(
            node=node or new_node(),
            concurrency=concurrency,
            lease_ms=lease_ms,
            push=push,
            backoff=backoff,
            pauses=pauses,
            grace_ms=grace_ms,
        )
        self._running: tuple[asyncio.AbstractEventLoop, WorkerRun] | None = None
        # The number of calls of `stop`, before and during the run.
        self._stops = 0
        self._stopping = threading.Lock()

    def __call__(self, job: Job) -> R:
        """The handler's return value for this job."""
        return self._handler(job)

    @property
    def stats(self) -> Stats:
        """The counts of the current run so far."""
        running = self._running
        return Stats() if running is None else running[1].stats

    def run(self) -> Stats:
        """Work until SIGTERM, SIGINT, SIGHUP or `stop`; returns the counts.

        A second signal does not wait for handlers. Only the main thread receives signals. Raises
        `NotFound`, `NotAQueue`, `Unauthorized` or `InvalidRequest` if the server refuses
        permanently. Waits for a server that is away.
        """
        return asyncio.run(self._signalled())

    async def run_async(self) -> Stats:
        """Like `run`, on the caller's loop and without signals."""
        if self._running is not None:
            raise RuntimeError("this worker is running already")
        threads = Threads(self.plan.concurrency, f"worker-{self.plan.node}")
        queue = AsyncQueue(
            self._queue,
            url=self._url,
            token=self._token,
            patience_ms=0,  # the loops of the run wait for a server that is away
            effects=self._effects,
        )
        async with queue:
            engine = WorkerRun(queue, self.plan, self._caller(threads), self._effects)
            with self._stopping:
                self._running = asyncio.get_running_loop(), engine
                stops = self._stops
            for _ in range(stops):
                engine.stop()
            try:
                return await engine.run()
            finally:
                with self._stopping:
                    self._running = None
                    self._stops = 0
                threads.close()

    def stop(self) -> None:
        """Stop from any thread or signal handler; a second call does not wait for handlers."""
        with self._stopping:
            self._stops += 1
            if self._running is not None:
                loop, engine = self._running
                loop.call_soon_threadsafe(engine.stop)

    async def _signalled(self) -> Stats:
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if is_main else ()
        for number in caught:
            loop.add_signal_handler(number, self.stop)
        try:
            return await self.run_async()
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def _caller(self, threads: Threads) -> Callable[[Job], Awaitable[object]]:
        handler = cast("Callable[[Job], Any]", self._handler)
        if _is_async(handler):
            return handler

        async def call(job: Job) -> object:
            return await threads.run(handler, job)

        return call


def _is_async(handler: Callable[[Job], Any]) -> bool:
    is_callable_object = not inspect.isroutine(handler) and not isinstance(handler, partial)
    inner = type(handler).__call__ if is_callable_object else handler
    return inspect.iscoroutinefunction(inspect.unwrap(inner))


def worker(
    queue: str,
    *,
    url: str | None = None,
    token: str | None = None,
    concurrency: int = 8,
    lease_ms: int | None = None,
    node: str | None = None,
    push: Push = "auto",
    backoff: Backoff = BACKOFF,
    pauses: Backoff = PAUSES,
    grace_ms: int = GRACE_MS,
    effects: Effects | None = None,
) -> Callable[[Handler[R]], Worker[R]]:
    """Turn a function of one `Job` into the worker of a queue; `run()` of the result starts it.

        @worker("thumbnails", url="http://127.0.0.1:4000")
        def make(job: Job) -> None:
            ...

        make.run()

    A job whose handler returns is acked, which deletes it. A job whose handler raises is released
    and tried again after a back-off that doubles with its deliveries, with full jitter; `Retry`
    sets the delay, `Drop` and `Dead` delete the job. While a handler runs, its lease is extended.
    If the lease is lost nevertheless, `job.lost` is set and the result is discarded; the job may
    then be processed a second time, so make effects idempotent.

    `queue`: a name on the server at `url`, or the queue's URL. `concurrency`: handlers at a time, 1
    to 1000; plain functions run in as many threads. `lease_ms`: 100 to 86,400,000; default: the
    queue's setting. `node`: this worker's name; default: host, process and a random part. `push`:
    "auto" takes jobs from a stream if that works, and polls otherwise; "always" and "never" allow
    one way only. `backoff`: for failed jobs; `pauses`: for an absent server. `grace_ms`: how long a
    stop waits for handlers before their jobs are released.

    Raises `ValueError` for options out of range.
    """

    def decorate(handler: Handler[R]) -> Worker[R]:
        return Worker(
            handler,
            queue,
            url=url,
            token=token,
            concurrency=concurrency,
            lease_ms=lease_ms,
            node=node,
            push=push,
            backoff=backoff,
            pauses=pauses,
            grace_ms=grace_ms,
            effects=effects,
        )

    return decorate
