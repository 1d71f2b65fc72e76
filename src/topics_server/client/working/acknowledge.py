"""Sends acks and nacks, gathered into few requests.

Owns the deliveries whose handler has finished, until the server has stored the result. Their leases
are extended meanwhile, so an absent server costs only time. An ack waits `LINGER_MS` for others,
and while a request is under way, the next acks are gathered. Every request carries lease ids. A
`skipped` job had lost its lease: its result is discarded and counted as lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import msgspec

from topics_server.client.backoff import Backoff, rounded_ms
from topics_server.client.effects import Effects
from topics_server.client.errors import ClientError, asked_wait_ms, passes
from topics_server.client.queue import AsyncQueue
from topics_server.client.values import Acked, Nacked, Stats
from topics_server.client.working.in_flight import Held, InFlight

log = logging.getLogger("topics_server.client")
LINGER_MS: Final = 2
# The field of `Stats` for unfinished jobs that are released.
RELEASED: Final = "released"
# Concurrent requests of one round.
ROUND_MAX: Final = 8


class _Ending(msgspec.Struct):
    """The end of one delivery: acked (None) or released for `delay_ms`, and the count that it
    increases.

    `error`: why the handler failed.
    """

    held: Held
    delay_ms: int | None
    count: str
    error: str | None = None


class Acknowledger:
    """Collects the ends of deliveries, until `run` is cancelled."""

    def __init__(
        self,
        queue: AsyncQueue,
        node: str,
        flight: InFlight,
        stats: Stats,
        *,
        pauses: Backoff,
        effects: Effects,
    ) -> None:
        self._queue = queue
        self._node = node
        self._flight = flight
        self._stats = stats
        self._pauses = pauses
        self._effects = effects
        self._todo: list[_Ending] = []
        self._sending: list[_Ending] = []
        self._tries = 0  # consecutive failures
        self._came = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def ack(self, held: Held, count: str = "done") -> None:
        """Ack the job; `count` is the field of `Stats` to increase."""
        self._add(_Ending(held, None, count))

    def nack(
        self, held: Held, delay_ms: int, count: str = "failed", error: str | None = None
    ) -> None:
        """Release the job for another try after `delay_ms`; `error` is the reason of the
        failure.
        """
        self._add(_Ending(held, rounded_ms(delay_ms), count, error))

    @property
    def pending(self) -> list[Held]:
        """The deliveries whose result the server does not have yet."""
        return [ending.held for ending in [*self._todo, *self._sending]]

    async def wait_idle(self) -> None:
        """Wait until the server has every result."""
        await self._idle.wait()

    def _add(self, ending: _Ending) -> None:
        if ending.held not in self._flight:
            self._note_lost(ending.held)
            return
        self._todo.append(ending)
        self._idle.clear()
        self._came.set()

    async def run(self) -> None:
        """Send acks and nacks as they come; after a partial failure, try again after a pause."""
        while True:
            await self._came.wait()
            # No other delivery is held, so no further ack can join this request.
            if len(self._todo) < min(self._flight.batch_max, len(self._flight)):
                await self._effects.sleep_ms(LINGER_MS)
            self._came.clear()
            self._sending, self._todo = self._todo, []
            failures = [error for error in await self._round(self._sending) if error is not None]
            self._sending = []
            if failures:
                self._tries += 1
                self._came.set()
                asked_ms = max(map(asked_wait_ms, failures))
                pause_ms = self._pauses.wait_ms(self._tries, self._effects.chance())
                await self._effects.sleep_ms(max(asked_ms, pause_ms, 1))
                continue
            self._tries = 0
            if not self._todo:
                self._idle.set()

    async def _round(self, endings: Sequence[_Ending]) -> list[ClientError | None]:
        groups: dict[tuple[int | None, str | None], list[_Ending]] = {}
        for ending in endings:
            if ending.held in self._flight:
                groups.setdefault((ending.delay_ms, ending.error), []).append(ending)
            else:
                self._note_lost(ending.held)
        slots = asyncio.Semaphore(ROUND_MAX)

        async def one(group: list[_Ending]) -> ClientError | None:
            async with slots:
                return await self._send(group)

        size = self._flight.batch_max
        requests: list[Coroutine[Any, Any, ClientError | None]] = [
            one(group[first : first + size])
            for group in groups.values()
            for first in range(0, len(group), size)
        ]
        return await asyncio.gather(*requests)

    async def _send(self, group: list[_Ending]) -> ClientError | None:
        """Send one ack or nack for a group of jobs; return the error if it is temporary."""
        delay_ms, error_text = group[0].delay_ms, group[0].error
        jobs = [ending.held.job for ending in group]
        answer: Acked | Nacked
        try:
            if delay_ms is None:
                answer = await self._queue.ack(self._node, jobs)
            else:
                answer = await self._queue.nack(
                    self._node, jobs, delay_ms=delay_ms, error=error_text
                )
        except ClientError as error:
            if self._flight.shrink(error, len(jobs)):
                self._todo.extend(group)
                self._came.set()
                return None
            if passes(error):
                level = logging.DEBUG if self._tries else logging.WARNING
                log.log(
                    level,
                    "the server does not know yet how %d jobs ended, trying again: %s",
                    len(jobs),
                    error,
                )
                self._todo.extend(group)
                return error
            log.error("the server does not know yet how %d jobs ended: %s", len(jobs), error)
            for ending in group:
                self._note_lost(ending.held)
            return None
        gone = set(answer.skipped)
        for ending in group:
            # A released job counts as released, by this request or by the end of the stream.
            if ending.held.job.seq in gone and ending.count != RELEASED:
                self._note_lost(ending.held)
            else:
                self._flight.ended(ending.held)
                done = getattr(self._stats, ending.count) + 1
                setattr(self._stats, ending.count, done)
        return None

    def _note_lost(self, held: Held) -> None:
        self._flight.lose(held)
        log.warning("job %d: its lease was lost, its result is discarded", held.job.seq)
