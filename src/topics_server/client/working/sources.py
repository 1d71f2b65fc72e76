"""The source of a worker's jobs: a push stream or polling.

Both pass every delivery to `take`, retry after a temporary failure, and end at the first permanent
one. Pushing is preferred: jobs arrive without a round trip, and the leases of a dead worker are
free at once. If a proxy holds streams back, or the server has none, the worker polls from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from topics_server.client.backoff import Backoff
from topics_server.client.effects import Effects
from topics_server.client.errors import (
    ClientError,
    NotFound,
    Refused,
    Unreachable,
    asked_wait_ms,
    passes,
)
from topics_server.client.queue import AsyncQueue
from topics_server.client.values import Job

log = logging.getLogger("topics_server.client")
# An open stream sends a first frame at once. If none arrives in this time, a proxy holds the stream
# back.
OPENING_MS: Final = 5000
OPENING_TRIES: Final = 2
# Short, because a claim is never cancelled: the response may hold jobs.
CLAIM_WAIT_MS: Final = 1000
# Pause between claims that return earlier than their wait.
IDLE: Final = Backoff(base_ms=50, cap_ms=1000)
_NO_STREAM: Final = frozenset({405, 406, 501})


class Room(Protocol):
    """A worker's free slots, and whether the worker takes jobs at all."""

    def is_stopping(self) -> bool:
        """Whether the worker claims no more jobs."""

    def free(self) -> int:
        """The number of jobs that could start now."""

    async def wait_free(self) -> None:
        """Wait until `free` may have grown or the worker stops."""

    async def pause(self, wait_ms: float) -> None:
        """Wait this long, or until the worker stops."""

    def doubt(self) -> None:
        """Every lease may be lost: extend all of them at once, to find out."""


class _NoStream(Exception):
    """Push does not work: the error that shows it."""

    def __init__(self, error: ClientError) -> None:
        super().__init__(str(error))
        self.error = error


class SourceTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a worker's claims."""

    node: str
    concurrency: int
    lease_ms: int
    pauses: Backoff


class JobSource:
    """Fetches jobs until it is cancelled (push) or the worker stops (poll)."""

    def __init__(
        self,
        queue: AsyncQueue,
        terms: SourceTerms,
        room: Room,
        take: Callable[[Job, float], None],
        effects: Effects,
    ) -> None:
        self._queue = queue
        self._terms = terms
        self._room = room
        self._take = take
        self._effects = effects
        self._failures = 0
        # Whether a claim is in flight, which must not be cancelled.
        self.is_asking = False

    async def auto(self) -> None:
        """Push; if that does not work, poll from then on."""
        try:
            await self._push()
        except _NoStream as error:
            log.info("the server sends no stream of jobs (%s); claiming jobs instead", error)
            await self.poll()

    async def push(self) -> None:
        """Push only; raise if that does not work."""
        try:
            await self._push()
        except _NoStream as error:
            raise error.error from None

    # -- pushed ----------------------------------------------------------------------------------

    async def _push(self) -> None:
        """Take the pushed jobs. When a stream ends, the server releases its leases."""
        silences = 0
        while not self._room.is_stopping():
            opened_ms = self._effects.now_ms()
            self._room.doubt()
            try:
                await self._stream()
            except TimeoutError:
                if not await self._is_served():
                    continue
                silences += 1
                silent = Unreachable("the stream of jobs is silent", sent=True)
                if silences == OPENING_TRIES:
                    raise _NoStream(silent) from None
                await self._pause(silent)
            except ClientError as error:
                if _is_no_stream(error):
                    raise _NoStream(error) from None
                if not passes(error):
                    raise
                silences = 0
                if self._effects.now_ms() - opened_ms > self._terms.pauses.cap_ms:
                    self._failures = 0  # the stream worked; a proxy cuts idle ones
                await self._pause(error)
            finally:
                # The server releases the stream's jobs, but may not have noticed the stream's end
                # yet. So check the leases now, for running handlers, and again before the next
                # stream.
                self._room.doubt()

    async def _is_served(self) -> bool:
        """Whether the server serves the queue now. If not, this waits a while.

        During replay a server accepts streams but sends nothing.
        """
        try:
            await self._queue.state()
        except ClientError as error:
            if not passes(error):
                raise
            await self._pause(error)
            return False
        return True

    async def _stream(self) -> None:
        terms = self._terms
        frames = self._queue.work(terms.node, max_jobs=terms.concurrency, lease_ms=terms.lease_ms)
        async with contextlib.aclosing(frames):
            async with asyncio.timeout(OPENING_MS / 1000):
                frame = await anext(frames)
            log.debug("the stream is open")
            while True:
                if isinstance(frame, Job):
                    self._failures = 0
                    self._take(frame, self._effects.now_ms())
                frame = await anext(frames)

    # -- polled -------------------------------------------------------------------------------

    async def poll(self) -> None:
        """Claim as many jobs as there are free slots. Returns when the worker stops."""
        self.is_asking = True
        idle = 0
        while not self._room.is_stopping():
            free = self._room.free()
            if free <= 0:
                await self._room.wait_free()
                continue
            asked_ms = self._effects.now_ms()
            try:
                claimed = await self._queue.claim(
                    self._terms.node,
                    max_jobs=free,
                    lease_ms=self._terms.lease_ms,
                    wait_ms=CLAIM_WAIT_MS,
                )
            except ClientError as error:
                if not passes(error):
                    raise
                await self._pause(error)
                continue
            self._failures = 0
            for job in claimed.jobs:
                self._take(job, asked_ms)
            if claimed.jobs:
                idle = 0
            elif self._effects.now_ms() - asked_ms < CLAIM_WAIT_MS / 2:
                idle += 1
                await self._room.pause(IDLE.wait_ms(idle, self._effects.chance()) + 1)

    async def _pause(self, error: ClientError) -> None:
        self._failures += 1
        wait_ms = self._terms.pauses.wait_ms(self._failures, self._effects.chance())
        wait_ms = max(wait_ms, asked_wait_ms(error), 1)
        if self._failures == 1:
            log.warning("%s; reconnecting", error)
        await self._room.pause(wait_ms)


def _is_no_stream(error: ClientError) -> bool:
    """Whether the error means that the server has no such stream, and not that the queue is
    missing.
    """
    if isinstance(error, NotFound):
        return error.code != "topic_not_found"
    return isinstance(error, Refused) and error.status in _NO_STREAM
