"""`Receipt`: the result of one produced record.

The receipts of a batch share its future, which `sending` settles. To be waited for by a thread
(`result`) or a coroutine (`await`); one that nobody looks at costs nothing and warns of nothing:
`flush` and `close` raise what went wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future

import msgspec

from topics_server.client.producing.batches import Stored


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """A record that is acknowledged, as the topic's durability class means it.

    `seq`: the record's, on a topic; `offset`: the end of the stream behind its batch. None where
    the server did not tell, as of some batches that it had already. `epoch` and `producer_seq` are
    the batch's; `repeated`: the copy that was stored is an earlier one.
    """

    seq: int | None
    offset: str | None
    epoch: int
    producer_seq: int
    repeated: bool


class Receipt:
    """One record's fate. Raises `Undelivered` for one that is given up."""

    __slots__ = ("_delivery", "_index")

    def __init__(self, delivery: Future[Stored], index: int) -> None:
        self._delivery = delivery
        self._index = index

    def done(self) -> bool:
        """Whether it is known."""
        return self._delivery.done()

    def result(self, timeout_s: float | None = None) -> Delivered:
        """Wait for it in a thread; `TimeoutError` after `timeout_s`, which ends nothing else."""
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
