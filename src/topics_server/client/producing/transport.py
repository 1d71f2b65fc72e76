"""Sends a producer's requests on an event loop.

The batches are used under `lock` only, so that threads may add records while the loop sends; no
code waits while it holds the lock. Programs use `async_producer` and `blocking_producer`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Self

import httpx
import msgspec

from topics_server.client.addresses import checked_token
from topics_server.client.effects import Effects, new_key, process_id
from topics_server.client.errors import (
    ClientError,
    Forked,
    ProducerClosed,
    Undelivered,
    Unreachable,
)
from topics_server.client.exchange import (
    CONNECT_MS,
    TIMEOUT_MS,
    failure,
    headers,
    verified,
)
from topics_server.client.producing.batches import (
    Outgoing,
    ProducerBatches,
    RecordBatch,
    SendTerms,
    Stored,
)
from topics_server.client.producing.receipts import Receipt
from topics_server.client.producing.targets import PRODUCER_CHARS_MAX, Target, Verdict, target

log = logging.getLogger("topics_server.client")


class TransportPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A producer's target, name and options."""

    target: Target
    producer: str
    terms: SendTerms
    epoch: int | None
    seq: int | None
    token: str | None
    timeout_ms: int
    transport: httpx.AsyncBaseTransport | None
    effects: Effects

    def __repr__(self) -> str:
        """Leave the token out: tools that report errors show the values of variables."""
        return f"<{type(self).__name__} of producer {self.producer!r}>"

    @classmethod
    def of(cls, place: str, producer: str, options: Mapping[str, Any]) -> Self:
        """Read a producer's options; raises `ValueError` and `TypeError` for wrong ones."""
        rest = dict(options)
        where = target(place, rest.pop("url", None), rest.pop("content_type", None))
        if not 0 < len(producer) <= PRODUCER_CHARS_MAX or not producer.isprintable():
            raise ValueError(
                f"a producer's id must have 1 to {PRODUCER_CHARS_MAX} printable characters"
            )
        epoch, seq = rest.pop("epoch", None), rest.pop("seq", None)
        for name, number in (("epoch", epoch), ("seq", seq)):
            if number is not None and number < 0:
                raise ValueError(f"{name} must be 0 or more")
        if seq is not None and epoch is None:
            raise ValueError("seq needs an epoch")
        fields = {
            "token": checked_token(rest.pop("token", None)),
            "timeout_ms": rest.pop("timeout_ms", TIMEOUT_MS),
            "transport": rest.pop("transport", None),
            "effects": rest.pop("effects", None) or Effects(),
        }
        # Keys let a topic recognise records that an earlier epoch stored.
        is_keyed = where.is_topic and (epoch is None or bool(rest.get("claim")))
        terms = SendTerms(is_keyed=is_keyed, **rest)
        return cls(target=where, producer=producer, terms=terms, epoch=epoch, seq=seq, **fields)


class ProducerTransport:
    """One producer's loop.

    `on_finished` is called under the lock when room or state have changed.
    """

    def __init__(self, plan: TransportPlan, on_finished: Callable[[], None]) -> None:
        self.plan = plan
        self.lock = threading.RLock()
        self.batches = ProducerBatches(plan.terms, self._batch_finished, plan.epoch, plan.seq)
        self.is_closing = False
        self._on_finished = on_finished
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._is_woken = False
        self._process_id = process_id()
        # Whether the current row of failures has been logged.
        self._is_failing = False

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made the producer; false in a child of `fork`."""
        return process_id() == self._process_id

    def check_process(self) -> None:
        """Raise `Undelivered` after a `fork`.

        Called before any lock, because the parent may hold it.
        """
        if not self.is_of_this_process:
            reason = Forked(
                f"producer {self.plan.producer} was made before a fork: "
                "make one in each process, after the fork"
            )
            raise Undelivered(reason, in_doubt=False)

    def encode(self, record: Any, tag: str | None, meta: Mapping[str, Any] | None) -> bytes:
        """A record as bytes; raises `TypeError` for a value that the target does not take."""
        return self.plan.target.encode(record, tag, meta)

    def check(self) -> None:
        """Raise `Undelivered` if the producer takes no more records."""
        if self.is_closing:
            raise Undelivered(ProducerClosed("the producer is closed"), in_doubt=False)
        self.batches.check()

    def add(self, record: bytes, now_ms: float) -> tuple[Receipt, bool]:
        """Take a record, under the lock; returns whether the loop has to be woken for it."""
        sealed = self.batches.next_seq
        batch, index = self.batches.add(record, self._key, now_ms)
        is_news = index == 0 or self.batches.next_seq != sealed
        return Receipt(batch.delivery, index), is_news

    def outcome(self, deliveries: list[Future[Stored]]) -> Undelivered | None:
        """The error that `flush` raises once these are finished."""
        failures = [delivery.exception(0) for delivery in deliveries]
        found = [error for error in failures if isinstance(error, Undelivered)]
        reason = found[0].reason if found else self.batches.failure
        if reason is None:
            return None
        return Undelivered(reason, in_doubt=any(error.in_doubt for error in found))

    def wake(self) -> None:
        """Make the loop check the batches; called from another thread."""
        with self.lock:
            if self._is_woken or self._loop is None:
                return
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._changed.set)

    def cancel(self) -> None:
        """Make the loop end and fail the remaining batches; called from another thread."""
        with self.lock:
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    @property
    def is_running(self) -> bool:
        """Whether the loop is running."""
        return self._loop is not None

    def _key(self) -> str:
        return new_key() if self.plan.terms.is_keyed else ""

    def _batch_finished(self, batch: RecordBatch, outcome: Stored | Undelivered) -> None:
        if isinstance(outcome, Undelivered):
            batch.delivery.set_exception(outcome)
        else:
            batch.delivery.set_result(outcome)
        self._on_finished()

    # -- on the loop -------------------------------------------------------------------------------

    def look(self) -> None:
        """Like `wake`, but called on the loop."""
        self._changed.set()

    async def run(self) -> None:
        """Send until the producer is closed and all batches are finished.

        Cancelled, it fails the remaining batches.
        """
        with self.lock:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            self._on_finished()
        tasks: set[asyncio.Task[None]] = set()

        def landed(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self.look()

        try:
            async with self._connect() as http:
                try:
                    await self._send(http, tasks, landed)
                finally:
                    self._end()
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._end()
            with self.lock:
                self._loop = None

    def _end(self) -> None:
        """Take no more records, and fail the remaining batches."""
        with self.lock:
            self.is_closing = True
            if not self.batches.is_idle:
                self.batches.fail(ProducerClosed("the producer was closed before"))
            self._on_finished()

    async def _send(
        self,
        http: httpx.AsyncClient,
        tasks: set[asyncio.Task[None]],
        landed: Callable[[asyncio.Task[None]], None],
    ) -> None:
        while True:
            self._changed.clear()
            with self.lock:
                # A wake from here on starts another round. Earlier wakes are covered by the check
                # below.
                self._is_woken = False
            if self._is_over(tasks):
                return
            with self.lock:
                now_ms = self.now_ms()
                outgoing = self.batches.take(now_ms)
                next_ms = self.batches.next_ms()
            for out in outgoing:
                task = asyncio.create_task(self._carry(http, out))
                tasks.add(task)
                task.add_done_callback(landed)
            await self._wait(None if next_ms is None else next_ms - now_ms)

    def _connect(self) -> httpx.AsyncClient:
        plan = self.plan
        return httpx.AsyncClient(
            base_url=plan.target.url,
            headers=headers(plan.token),
            timeout=httpx.Timeout(
                plan.timeout_ms / 1000, connect=min(plan.timeout_ms, CONNECT_MS) / 1000
            ),
            trust_env=False,
            verify=verified(plan.target.url),
            transport=plan.transport,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    def _is_over(self, tasks: set[asyncio.Task[None]]) -> bool:
        with self.lock:
            if not self.is_closing or tasks:
                return False
            return self.batches.is_idle or self.batches.failure is not None

    def now_ms(self) -> float:
        """The loop's clock, from any thread."""
        assert self._loop is not None, "the loop runs"
        return self._loop.time() * 1000

    async def _wait(self, wait_ms: float | None) -> None:
        try:
            async with asyncio.timeout(None if wait_ms is None else max(wait_ms, 0) / 1000):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _carry(self, http: httpx.AsyncClient, out: Outgoing) -> None:
        plan = self.plan
        verdict: Verdict = Unreachable("the request was broken off", sent=True)
        try:
            verdict = await self._ask(http, out)
        finally:
            with self.lock:
                before = self.batches.epoch, self.batches.failure
                self.batches.answered(out, verdict, self.now_ms(), plan.effects.chance())
                after = self.batches.epoch, self.batches.failure
            if after != before:
                log.info("producer %s: epoch %s", plan.producer, after[0])
                if after[1] is not None:
                    # Not an error here: receipts, flush and close report it.
                    log.info("producer %s stopped sending: %s", plan.producer, after[1])
            if after == before or not isinstance(verdict, ClientError):
                self._tell(verdict)

    def _tell(self, verdict: Verdict) -> None:
        """Log the first of consecutive failures as a warning, the others and the recovery as
        info.
        """
        producer, patience_ms = self.plan.producer, self.plan.terms.patience_ms
        if not isinstance(verdict, ClientError):
            if self._is_failing:
                log.warning("producer %s: the server takes records again", producer)
            self._is_failing = False
            return
        until = "" if patience_ms is None else f" for {patience_ms / 1000:g} s (patience_ms)"
        level = log.info if self._is_failing else log.warning
        level("producer %s: %s; trying again%s", producer, verdict, until)
        self._is_failing = True

    async def _ask(self, http: httpx.AsyncClient, out: Outgoing) -> Verdict:
        where = self.plan.target
        key = None if out.is_probe or not self.plan.terms.is_keyed else out.batch.key
        try:
            response = await http.post(
                where.path,
                content=where.body(out.batch.records, key),
                headers=where.headers(self.plan.producer, out.epoch, out.seq),
            )
        except httpx.RequestError as error:
            return failure(error, where.url)
        return where.verdict(response.status_code, response.headers, response.content)
