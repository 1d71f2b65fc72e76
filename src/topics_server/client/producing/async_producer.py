"""`AsyncIdempotentProducer`: stores each record once and in order.

What is promised, and where a promise ends, stands at the class; `sending` holds the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import httpx

from topics_server.client.backoff import Backoff
from topics_server.client.effects import Effects
from topics_server.client.errors import Undelivered
from topics_server.client.producing.receipts import Receipt
from topics_server.client.producing.transport import ProducerTransport, TransportPlan

log = logging.getLogger("topics_server.client")


class ProducerOptions(TypedDict, total=False):
    """The options of a producer; see `AsyncIdempotentProducer`."""

    url: str | None
    token: str | None
    content_type: str | None
    epoch: int | None
    seq: int | None
    claim: bool
    linger_ms: float
    batch_records: int
    batch_bytes: int
    in_flight: int
    buffer_records: int
    buffer_bytes: int
    patience_ms: float | None
    pauses: Backoff
    timeout_ms: int
    transport: httpx.AsyncBaseTransport | None
    effects: Effects


class AsyncIdempotentProducer:
    """Writes records to a topic or a Durable Stream so that each is stored once, in order.

        async with AsyncIdempotentProducer("orders", "till-7", url="http://127.0.0.1:4000") as till:
            receipt = await till.send({"total": 12})
            print((await receipt).seq)

    `place`: a topic by name (on the server at `url`) or by URL, or the URL of a stream. `producer`:
    who writes, a name that this process keeps over restarts; one live process a name. `token`: the
    key to present. `content_type`: a stream's; its records are JSON values if it is
    `application/json` (the default), bytes if it is anything else.

    `send` puts a record into a batch and returns; it waits only while `buffer_records` or
    `buffer_bytes` are unacknowledged. A batch goes once it is `linger_ms` old or has
    `batch_records` (500; a server takes `TOPICS_MAX_BATCH_RECORDS`, 10,000 by default, and a
    larger batch ends the producer with what to set) or `batch_bytes`; up to `in_flight` are under
    way at a time. A lost connection, a 429 and a 5xx are tried again with the same numbers, for up
    to `patience_ms` of failures in a row (30 s; None: for ever), and the first failure of a row is
    logged as a warning with its cause. `timeout_ms` is of one request; a connection is made within
    4 s of it or has failed.

    **Epochs.** Left out, the server is asked where the producer stands and the next epoch is
    claimed, which fences any process that still writes under the name. A given `epoch` is used as
    it is: one more than the last life's. With `seq` too, that epoch is gone on with at this seq;
    what of it the server has is taken for this producer's own, so the caller must cut the same
    batches again (one record and `flush` each, say). When somebody else claims an epoch, the
    producer is fenced and ends; with `claim` it claims the next one and sends what was not
    acknowledged again, under new numbers; two live processes that both do so fence each other for
    ever.

    **What fails** is told, never passed over: by the record's receipt, by `flush` and by `close`,
    as `Undelivered`, whose `in_doubt` says whether the server may have it. The first failure for
    good ends the producer, so that nothing overtakes what failed.

    **What may be doubled.** Nothing that this object sends is stored twice, whatever is lost on the
    way, also over claims: on a topic by an idempotency key of each batch, as long as the topic's
    `idempotency_window_ms` is two minutes or more; on a stream a claim that cannot know what was
    stored ends with `InDoubt`. Over a restart of the program: records that were sent and not
    acknowledged are unknown to the next life. If it sends them again in a new epoch they may be
    there twice; if it goes on in the old one with `epoch` and `seq`, they are not.
    """

    def __init__(self, place: str, producer: str, **options: Unpack[ProducerOptions]) -> None:
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._carrier = ProducerTransport(
            TransportPlan.of(place, producer, options), self._freed.set
        )
        self._running: asyncio.Task[None] | None = None
        self._is_told = False

    @property
    def epoch(self) -> int | None:
        """The epoch that goes on; None until it is known."""
        return self._carrier.book.epoch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except Undelivered as undelivered:
            if error is None:
                raise
            error.add_note(f"and: {undelivered}")

    async def send(
        self, record: Any, *, tag: str | None = None, meta: Mapping[str, Any] | None = None
    ) -> Receipt:
        """Take a record; `tag` and `meta` are a topic's. Waits while the buffer is full.

        Raises `Undelivered` once the producer has ended, `TypeError` for what is no record here.
        """
        carrier = self._carrier
        carrier.check_process()
        encoded = carrier.encode(record, tag, meta)
        async with self._turn:  # records stay in the order in which they were sent
            carrier.check()
            self._start()
            while not carrier.book.has_room(len(encoded)):
                self._freed.clear()
                await self._freed.wait()
                carrier.check()
            now_ms = asyncio.get_running_loop().time() * 1000
            receipt, is_news = carrier.add(encoded, now_ms)
        if is_news:
            carrier.look()
        return receipt

    async def flush(self) -> None:
        """Send what lingers and wait for all that was sent; raises `Undelivered`."""
        self._carrier.check_process()
        deliveries = [batch.delivery for batch in self._carrier.book.flush()]
        self._carrier.look()
        if deliveries:
            waiting = [asyncio.wrap_future(delivery) for delivery in deliveries]
            await asyncio.gather(*waiting, return_exceptions=True)
        self._raise(self._carrier.outcome(deliveries))

    async def close(self, timeout_ms: float | None = None) -> None:
        """Flush, for `timeout_ms` at most, and end; raises `Undelivered` unless `flush` did."""
        carrier = self._carrier
        if not carrier.is_of_this_process:
            return  # what was sent is the parent's to deliver
        was_told = self._is_told
        deliveries = [batch.delivery for batch in carrier.book.flush()]
        carrier.is_closing = True
        carrier.look()
        self._freed.set()
        running, self._running = self._running, None
        if running is None:
            return
        try:
            await asyncio.wait({running}, timeout=None if timeout_ms is None else timeout_ms / 1000)
        finally:
            running.cancel()
            await asyncio.wait({running})
        if not running.cancelled():
            running.result()
        if not was_told:
            self._raise(carrier.outcome(deliveries))

    def _raise(self, outcome: Undelivered | None) -> None:
        if outcome is not None:
            self._is_told = True
            raise outcome

    def _start(self) -> None:
        if self._running is None:
            self._running = asyncio.create_task(self._carrier.run())
