"""`IdempotentProducer`: the producer for threads.

It runs the same transport on its own event loop, in a daemon thread that starts with the first
record.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from types import TracebackType
from typing import Any, Self, Unpack

from topics_server.client.errors import Undelivered
from topics_server.client.producing.async_producer import ProducerOptions
from topics_server.client.producing.receipts import Receipt
from topics_server.client.producing.transport import ProducerTransport, TransportPlan


class IdempotentProducer:
    """Writes records to a topic or a Durable Stream so that each is stored once, in order.

        with IdempotentProducer("orders", "till-7", url="http://127.0.0.1:4000") as till:
            till.send({"total": 12})

    Options, promises and limits are those of `AsyncIdempotentProducer`. Threads may share one
    producer. A program that ends without `flush` or `close` loses unacknowledged records. A
    producer does not survive `fork` (a preloading web server, `multiprocessing`): in the child
    `send` and `flush` raise `Undelivered` at once; make one producer in each process.
    """

    def __init__(self, place: str, producer: str, **options: Unpack[ProducerOptions]) -> None:
        self._carrier = ProducerTransport(
            TransportPlan.of(place, producer, options), self._batch_finished
        )
        self._changed = threading.Condition(self._carrier.lock)
        self._thread: threading.Thread | None = None
        self._is_reported = False

    @property
    def epoch(self) -> int | None:
        """The current epoch; None until it is known."""
        return self._carrier.batches.epoch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Undelivered as undelivered:
            if error is None:
                raise
            error.add_note(f"and: {undelivered}")

    def send(
        self, record: Any, *, tag: str | None = None, meta: Mapping[str, Any] | None = None
    ) -> Receipt:
        """Take a record; `tag` and `meta` are for topics only. Waits while the buffer is full.

        Raises `Undelivered` once the producer has ended, `TypeError` for a value that is not a
        record of this target.
        """
        carrier = self._carrier
        carrier.check_process()
        encoded = carrier.encode(record, tag, meta)
        with self._changed:
            carrier.check()
            self._start()
            while not carrier.batches.has_room(len(encoded)):
                self._changed.wait()
                carrier.check()
            receipt, is_news = carrier.add(encoded, carrier.now_ms())
        if is_news:
            carrier.wake()
        return receipt

    def flush(self) -> None:
        """Send everything without lingering and wait for it; raises `Undelivered`."""
        self._carrier.check_process()
        with self._changed:
            deliveries = [batch.delivery for batch in self._carrier.batches.flush()]
        self._carrier.wake()
        wait(deliveries)
        self._raise(self._carrier.outcome(deliveries))

    def close(self, timeout_ms: float | None = None) -> None:
        """Flush, for `timeout_ms` at most, and end; raises `Undelivered` unless `flush` did."""
        carrier = self._carrier
        if not carrier.is_of_this_process:
            return  # in a child of `fork`: the parent delivers the sent records
        was_reported = self._is_reported
        with self._changed:
            deliveries = [batch.delivery for batch in carrier.batches.flush()]
            carrier.is_closing = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is None:
            return
        carrier.wake()
        try:
            thread.join(None if timeout_ms is None else timeout_ms / 1000)
        finally:
            if thread.is_alive():
                carrier.cancel()
                thread.join()
        if not was_reported:
            self._raise(carrier.outcome(deliveries))

    def _raise(self, outcome: Undelivered | None) -> None:
        if outcome is not None:
            self._is_reported = True
            raise outcome

    def _batch_finished(self) -> None:
        self._changed.notify_all()

    def _start(self) -> None:
        """Start the loop, under the lock, and wait until it runs."""
        if self._thread is None:
            name = f"producer-{self._carrier.plan.producer}"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()
        while not (self._carrier.is_running or self._carrier.is_closing):
            self._changed.wait()
        self._carrier.check()

    def _serve(self) -> None:
        try:
            asyncio.run(self._carrier.run())
        except asyncio.CancelledError:
            pass  # closed with a time limit that was reached
