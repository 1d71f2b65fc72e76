"""One run of a worker: fetches jobs, runs handlers, extends leases.

Owns the tasks and their order at the end. Each delivery is held in `InFlight` and runs in a task of
its own, at most `concurrency` at a time. After a stop, the worker claims nothing more and waits
`grace_ms` for running handlers. It then releases unfinished jobs at once.

An open stream would bring a job for each acked one while the worker stops, and closing it first
would release the leases of running handlers. So the worker asks the server to send no more jobs. A
job that arrives anyway (the request crossed an ack, or an older server does not support it) is not
started. It is released when the stream is closed, after the last ack.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeAlias

import msgspec

from topics_server.client.backoff import Backoff
from topics_server.client.effects import Effects
from topics_server.client.errors import ClientError, asked_wait_ms, passes
from topics_server.client.queue import AsyncQueue
from topics_server.client.values import Job, QueueState, Stats
from topics_server.client.working.acknowledge import RELEASED, Acknowledger
from topics_server.client.working.in_flight import Held, InFlight
from topics_server.client.working.sources import JobSource, SourceTerms
from topics_server.client.working.threads import HandlerExited

log = logging.getLogger("topics_server.client")
# Time for the last acks and releases when a worker stops.
FAREWELL_MS: Final = 5000
# Time for the last claim: its wait, a coalescing window, and a margin.
CLAIM_END_MS: Final = 10_000
# The server frees a stream's jobs when it notices the end of the stream. A job that is released
# earlier, without delay, would be pushed into the same dead connection, and one more delivery would
# be counted.
CLOSING_MS: Final = 100
# An extend is cancelled early enough for another try.
EXTEND_TIMEOUT_MIN_MS: Final = 250
EXTEND_TIMEOUT_MAX_MS: Final = 30_000
EXTEND_PAUSE_MAX_MS: Final = 2000
# Length of an exception's text in a nack; the server keeps 1,024 bytes.
_REASON_CHARS_MAX: Final = 1024

Push: TypeAlias = Literal["auto", "always", "never"]
Call: TypeAlias = Callable[[Job], Awaitable[object]]


class Retry(Exception):
    """Raise it in a handler: try this job again, after `after_ms` (default: the back-off)."""

    def __init__(self, after_ms: int | None = None) -> None:
        super().__init__("try again" if after_ms is None else f"try again after {after_ms} ms")
        if after_ms is not None and after_ms < 0:
            raise ValueError("after_ms must be 0 or more")
        self.after_ms = after_ms


class Drop(Exception):
    """Raise it in a handler: the job needs no work; it is acked, which deletes it."""


class Dead(Drop):
    """Raise it in a handler: the job can never succeed; it is deleted, with an error logged.

    Jobs with `max_deliveries` deliveries move to the queue's dead-letter topic; let a handler fail
    to keep its job there.
    """


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker; `lease_ms` None: the queue's setting."""

    node: str
    concurrency: int
    lease_ms: int | None
    push: Push
    backoff: Backoff
    pauses: Backoff
    grace_ms: int


class WorkerRun:
    """One run of a worker. `call` runs the handler for a job and raises the handler's exception."""

    def __init__(self, queue: AsyncQueue, plan: WorkerPlan, call: Call, effects: Effects) -> None:
        self._queue = queue
        self._plan = plan
        self._call = call
        self._effects = effects
        self._stopping = asyncio.Event()
        self._closing = asyncio.Event()
        self._running: dict[asyncio.Task[None], Held] = {}
        self._room_changed = asyncio.Event()
        self._lease_changed = asyncio.Event()
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._source: JobSource
        # Whether the last extend failed; the failure was logged.
        self._is_deaf = False
        self._stats = Stats()
        self._flight = InFlight(plan.lease_ms or 1)
        self._acknowledger = Acknowledger(
            queue,
            plan.node,
            self._flight,
            self._stats,
            pauses=plan.pauses,
            effects=effects,
        )

    # -- calls by the source --------------------------------------------------------------------

    def is_stopping(self) -> bool:
        """Whether the worker claims no more jobs."""
        return self._stopping.is_set()

    def free(self) -> int:
        """The number of jobs that could start now."""
        return self._plan.concurrency - len(self._running)

    async def wait_free(self) -> None:
        """Wait until a handler ends or the worker stops."""
        self._room_changed.clear()
        if self.free() <= 0 and not self.is_stopping():
            await self._room_changed.wait()

    async def pause(self, wait_ms: float) -> None:
        """Wait this long, or until the worker stops."""
        await self._unless(self._stopping, wait_ms)

    def doubt(self) -> None:
        """Every lease may be lost: extend all of them at once, to find out."""
        self._flight.doubt(self._effects.now_ms())
        self._lease_changed.set()

    @property
    def stats(self) -> Stats:
        """The counts so far."""
        return msgspec.structs.replace(self._stats, lost=self._flight.lost)

    # -- the run ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Claim nothing more; a second call does not wait for handlers either."""
        if self._stopping.is_set():
            self._closing.set()
        self._stopping.set()
        self._room_changed.set()

    async def run(self) -> Stats:
        """Work until `stop`; raises a permanent error of the server, after an orderly stop."""
        state = await self._first_contact()
        if state is None:
            return self.stats
        lease_ms = self._plan.lease_ms or state.lease_ms
        self._flight.lease_ms = lease_ms
        source = self._begin(lease_ms)
        extending = asyncio.create_task(self._extending())
        acknowledging = asyncio.create_task(self._acknowledger.run())
        stopped = asyncio.create_task(self._stopping.wait())
        tasks = {source, extending, acknowledging, stopped}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            self._room_changed.set()
            await self._finish(source, extending)
        finally:
            tasks.update(self._running)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in (source, extending, acknowledging):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return self.stats

    async def _first_contact(self) -> QueueState | None:
        """The queue's state; waits for an absent server. None: stopped."""
        tries = 0
        while not self.is_stopping():
            try:
                return await self._queue.state()
            except ClientError as error:
                if not passes(error):
                    raise
                tries += 1
                wait_ms = self._plan.pauses.wait_ms(tries, self._effects.chance())
                if tries == 1:
                    log.warning("%s; waiting for it", error)
                await self.pause(max(wait_ms, asked_wait_ms(error), 1))
        return None

    def _begin(self, lease_ms: int) -> asyncio.Task[None]:
        terms = SourceTerms(
            node=self._plan.node,
            concurrency=self._plan.concurrency,
            lease_ms=lease_ms,
            pauses=self._plan.pauses,
        )
        source = JobSource(self._queue, terms, self, self._take, self._effects)
        self._source = source
        ways = {"auto": source.auto, "always": source.push, "never": source.poll}
        return asyncio.create_task(ways[self._plan.push]())

    async def _finish(self, source: asyncio.Task[None], extending: asyncio.Task[None]) -> None:
        """End in this order: handlers, their acks, the stream, the remaining jobs."""
        if self._running:
            log.info("stopping: %d jobs are unfinished", len(self._running))
        no_more = asyncio.create_task(self._say_no_more())
        running = asyncio.create_task(self._all_done())
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait(
            {running, closing},
            timeout=self._plan.grace_ms / 1000,
            return_when=asyncio.FIRST_COMPLETED,
        )
        running.cancel()
        closing.cancel()
        await self._within_farewell(self._acknowledger.wait_idle())
        # The request was sent before the acks. Cancelling it half-way would break a connection.
        await asyncio.wait({no_more}, timeout=CLOSING_MS / 1000)
        no_more.cancel()
        for task, held in self._running.items():
            held.job.lost.set()
            task.cancel()
        if self._running:
            # Cancellation ends coroutines; threads keep running.
            await asyncio.wait(self._running, timeout=FAREWELL_MS / 1000)
        delay_ms = 0
        if not self._source.is_asking:
            extending.cancel()  # do not extend leases that end now
            source.cancel()
            delay_ms = CLOSING_MS
        await asyncio.wait({source}, timeout=CLAIM_END_MS / 1000)
        pending = self._acknowledger.pending
        for held in self._flight.all:
            if held not in pending:
                self._acknowledger.nack(held, delay_ms, RELEASED)
        await self._within_farewell(self._acknowledger.wait_idle())

    async def _say_no_more(self) -> None:
        """Ask the server once to send no more jobs. A lost request does little harm."""
        held = self._flight.all[: self._flight.batch_max]
        if held and not self._source.is_asking:
            await self._extend(held, no_more=True)

    async def _all_done(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    async def _within_farewell(self, waiting: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(FAREWELL_MS / 1000):
                await waiting
        except TimeoutError:
            log.error("stopping without telling the server how every job ended")

    # -- one delivery ----------------------------------------------------------------------------

    def _take(self, job: Job, leased_ms: float) -> None:
        held = self._flight.take(job, leased_ms)
        self._lease_changed.set()
        if self.is_stopping():
            if self._source.is_asking:
                self._acknowledger.nack(held, 0, RELEASED)
            return  # not begun
        task = asyncio.create_task(self._work(held))
        self._running[task] = held
        task.add_done_callback(self._through)

    def _through(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._room_changed.set()

    async def _work(self, held: Held) -> None:
        async with self._slots:
            if self.is_stopping() or held not in self._flight:
                return
            job = held.job
            try:
                await self._call(job)
            except Retry as retry:
                delay_ms = retry.after_ms
                self._acknowledger.nack(
                    held, self._backoff_ms(job) if delay_ms is None else delay_ms
                )
            except Drop as drop:
                level = logging.ERROR if isinstance(drop, Dead) else logging.INFO
                log.log(level, "job %d is dropped: %s", job.seq, drop)
                self._acknowledger.ack(held, "dropped")
            except asyncio.CancelledError:
                if self.is_stopping():
                    raise
                log.warning("job %d: its handler was cancelled", job.seq)
                self._failed(held, "the handler was cancelled")
            except SystemExit as exit_:
                # Only this job's handler tried to exit. The worker continues and tries the job
                # again.
                log.warning(
                    "job %d failed, delivery %d: its handler called sys.exit(%r)",
                    job.seq,
                    job.deliveries,
                    exit_.code,
                )
                self._failed(held, f"the handler called sys.exit({exit_.code!r})")
            except Exception as error:
                log.warning(
                    "job %d failed, delivery %d: %r", job.seq, job.deliveries, error, exc_info=error
                )
                self._failed(held, _reason(error))
            else:
                self._acknowledger.ack(held)

    def _failed(self, held: Held, error: str) -> None:
        """Release the job for another try; its dead letter would hold `error`."""
        self._acknowledger.nack(held, self._backoff_ms(held.job), error=error)

    def _backoff_ms(self, job: Job) -> int:
        return self._plan.backoff.wait_ms(max(job.deliveries, 1), self._effects.chance())

    # -- leases ----------------------------------------------------------------------------------

    async def _extending(self) -> None:
        """Extend every lease in time, until cancelled."""
        while True:
            self._lease_changed.clear()
            now_ms = self._effects.now_ms()
            self._flight.warn(now_ms)
            due = self._flight.due(now_ms)[: self._flight.batch_max]
            if due and not await self._extend(due):
                # After the first failed try, two thirds of the lease are left for more tries.
                pause_ms = min(self._flight.lease_ms / 12, EXTEND_PAUSE_MAX_MS)
                await self._effects.sleep_ms(pause_ms)
                continue
            next_ms = self._flight.next_ms()
            if next_ms is None:
                await self._lease_changed.wait()
            elif (wait_ms := next_ms - self._effects.now_ms()) > 0:
                await self._unless(self._lease_changed, wait_ms)

    async def _extend(self, due: list[Held], *, no_more: bool = False) -> bool:
        """Whether the server responded."""
        lease_ms = self._flight.lease_ms
        asked_ms = self._effects.now_ms()
        try:
            answer = await self._queue.extend(
                self._plan.node,
                [held.job for held in due],
                lease_ms=lease_ms,
                no_more=no_more,
                timeout_ms=min(max(lease_ms // 4, EXTEND_TIMEOUT_MIN_MS), EXTEND_TIMEOUT_MAX_MS),
            )
        except ClientError as error:
            if self._flight.shrink(error, len(due)):
                return True
            level = logging.DEBUG if self._is_deaf else logging.WARNING
            log.log(level, "cannot extend %d leases, trying again: %s", len(due), error)
            self._is_deaf = True
            return False
        self._is_deaf = False
        lost = self._flight.extended(due, answer.skipped, asked_ms)
        # A job whose ack crossed this extend is not lost: the response to the ack decides.
        ending = self._acknowledger.pending if lost else []
        for held in lost:
            if held not in ending:
                log.warning("job %d: its lease is lost", held.job.seq)
        return True

    async def _unless(self, event: asyncio.Event, wait_ms: float) -> None:
        """Wait this long, or until the event."""
        waiting = asyncio.create_task(event.wait())
        sleeping = asyncio.create_task(self._effects.sleep_ms(wait_ms))
        try:
            await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (waiting, sleeping):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(waiting, sleeping, return_exceptions=True)


def _reason(error: Exception) -> str:
    """The text of an exception for a dead letter: type and message, at most 1,024 chars."""
    if isinstance(error, HandlerExited):
        return f"the handler raised {error}"
    text = traceback.format_exception_only(error)[-1].strip()
    return text[:_REASON_CHARS_MAX].encode(errors="replace").decode()
