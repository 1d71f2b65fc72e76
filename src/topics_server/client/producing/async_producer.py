"""`AsyncIdempotentProducer`: stores each record once and in order.

The class documents the promise and its limits; `batches` holds the rules.
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

    `place`: the name of a topic (on the server at `url`), its URL, or the URL of a stream.
    `producer`: the name of this writer, which stays the same over restarts; only one live process
    may use a name. `token`: the API key. `content_type`: for a stream; its records are JSON values
    if it is `application/json` (the default), bytes otherwise.

    `send` puts a record into a batch and returns; it waits only while `buffer_records` or
    `buffer_bytes` are unacknowledged. A batch is sent once it is `linger_ms` old or has
    `batch_records` (500; a server takes `TOPICS_MAX_BATCH_RECORDS`, 10,000 by default, and a larger
    batch ends the producer with an error that names the setting) or `batch_bytes`; up to
    `in_flight` batches are under way at a time. After a lost connection, a 429 or a 5xx the same
    request is sent again, for up to `patience_ms` of consecutive failures (30 s; None: for ever).
    The first failure of a row is logged as a warning with its cause. `timeout_ms` limits one
    request; connecting fails after 4 s.

    **Epochs.** Without `epoch`, the producer asks the server for its current epoch and claims the
    next one, which fences every process that still writes under the name. A given `epoch` is used
    without a change: use the last run's epoch plus one. With `seq` as well, the producer continues
    that epoch at this seq. The server's records of that epoch are taken for this producer's own, so
    the caller must cut the same batches again (for example one record and one `flush` each). When
    another process claims an epoch, the producer is fenced and ends; with `claim` it claims the
    next epoch and sends unacknowledged records again under new numbers. Two live processes that
    both do so fence each other for ever.

    **Failures** are always reported: by the record's receipt, by `flush` and by `close`, as
    `Undelivered`, whose `in_doubt` is true if the server may have the record. The first permanent
    failure ends the producer, so that no later record overtakes a failed one.

    **Duplicates.** A record that this object sends is stored once, even if requests or answers are
    lost, and across claims: on a topic by an idempotency key of each batch, as long as the topic's
    `idempotency_window_ms` is two minutes or more; on a stream a claim that cannot know which
    records are stored ends with `InDoubt`. Across a restart of the program: the next run does not
    know which unacknowledged records were stored. Sent again in a new epoch they may be stored
    twice; continued in the old epoch with `epoch` and `seq` they are not.
    """

    def __init__(self, place: str, producer: str, **options: Unpack[ProducerOptions]) -> None:
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._carrier = ProducerTransport(
            TransportPlan.of(place, producer, options), self._freed.set
        )
        self._running: asyncio.Task[None] | None = None
        self._is_reported = False

    @property
    def epoch(self) -> int | None:
        """The current epoch; None until it is known."""
        return self._carrier.batches.epoch

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
        """Take a record; `tag` and `meta` are for topics only. Waits while the buffer is full.

        Raises `Undelivered` once the producer has ended, `TypeError` for a value that is not a
        record of this target.
        """
        carrier = self._carrier
        carrier.check_process()
        encoded = carrier.encode(record, tag, meta)
        async with self._turn:  # records keep the order of their sends
            carrier.check()
            self._start()
            while not carrier.batches.has_room(len(encoded)):
                self._freed.clear()
                await self._freed.wait()
                carrier.check()
            now_ms = asyncio.get_running_loop().time() * 1000
            receipt, is_news = carrier.add(encoded, now_ms)
        if is_news:
            carrier.look()
        return receipt

    async def flush(self) -> None:
        """Send everything without lingering and wait for it; raises `Undelivered`."""
        self._carrier.check_process()
        deliveries = [batch.delivery for batch in self._carrier.batches.flush()]
        self._carrier.look()
        if deliveries:
            waiting = [asyncio.wrap_future(delivery) for delivery in deliveries]
            await asyncio.gather(*waiting, return_exceptions=True)
        self._raise(self._carrier.outcome(deliveries))

    async def close(self, timeout_ms: float | None = None) -> None:
        """Flush, for `timeout_ms` at most, and end; raises `Undelivered` unless `flush` did."""
        carrier = self._carrier
        if not carrier.is_of_this_process:
            return  # in a child of `fork`: the parent delivers the sent records
        was_reported = self._is_reported
        deliveries = [batch.delivery for batch in carrier.batches.flush()]
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
        if not was_reported:
            self._raise(carrier.outcome(deliveries))

    def _raise(self, outcome: Undelivered | None) -> None:
        if outcome is not None:
            self._is_reported = True
            raise outcome

    def _start(self) -> None:
        if self._running is None:
            self._running = asyncio.create_task(self._carrier.run())
