"""`Receipt`: the result of one produced record.

The receipts of a batch share its future, which `transport` resolves. A thread waits with `result`,
a coroutine with `await`; an unused receipt costs nothing and logs nothing: `flush` and `close`
raise the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future

import msgspec

from topics_server.client.producing.batches import Stored


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """An acknowledged record; its topic's durability class says what that guarantees.

    `seq`: the record's seq on a topic; `offset`: the end of the stream behind its batch. None if
    the server did not report the position, as for some batches that it already had. `epoch` and
    `producer_seq` are the batch's; `repeated`: an earlier copy was stored.
    """

    seq: int | None
    offset: str | None
    epoch: int
    producer_seq: int
    repeated: bool


class Receipt:
    """The result of one record. Raises `Undelivered` for a record that will not be sent again."""

    __slots__ = ("_delivery", "_index")

    def __init__(self, delivery: Future[Stored], index: int) -> None:
        self._delivery = delivery
        self._index = index

    def done(self) -> bool:
        """Whether the result is known."""
        return self._delivery.done()

    def result(self, timeout_s: float | None = None) -> Delivered:
        """Wait for the result in a thread; raise `TimeoutError` after `timeout_s`."""
        return self._delivered(self._delivery.result(timeout_s))

    def __await__(self) -> Generator[object, None, Delivered]:
        stored = yield from asyncio.wrap_future(self._delivery).__await__()
        return self._delivered(stored)

    def _delivered(self, stored: Stored) -> Delivered:
        return Delivered(
            seq=None if stored.first_seq is None else stored.first_seq + self._index,
            offset=stored.offset,
            epoch=stored.epoch,
            producer_seq=stored.seq,
            repeated=stored.repeated,
        )
