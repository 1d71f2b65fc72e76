"""One push stream (§10.8): keeps up to `max` jobs leased to one connection.

It waits in its consumer queue like any claimer, and wants as many jobs as its connection lacks to
`max`: an ack, a nack or an expiry makes room for the next job, unless the stream is held back.
Granted jobs are read and sent in small lots, each after the socket has accepted the lot before.
When the stream ends, its unfinished jobs are released at once. Called by `api/queues/handlers`;
loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from topics_server.engine.topic.topic import Topic
from topics_server.queue.answers import LeasedJob
from topics_server.queue.dispatch.alarm import Alarm
from topics_server.queue.dispatch.consumer_queue import ClaimGrant, ConsumerQueue
from topics_server.queue.service import QueueService
from topics_server.values.errors import Code, StorageError, TopicsError

# The number of jobs that are read and sent at a time.
_LOT_JOBS: Final = 16
# Pause before a stream whose claim failed claims again.
_PAUSE_MS: Final = 1_000


class Push:
    """One connection's claims.

    `deliver` sends jobs and returns when there is room for more; `tell` reports an error and
    whether the stream ends with it.
    """

    def __init__(
        self,
        service: QueueService,
        topic: Topic,
        node: str,
        max_jobs: int,
        lease_ms: int | None,
        *,
        deliver: Callable[[Sequence[LeasedJob]], Awaitable[None]],
        tell: Callable[[TopicsError, bool], None],
    ) -> None:
        self.node = node
        self.lease_ms = lease_ms
        self.connection = service.next_connection()
        self._service = service
        self._topic = topic
        self._max_jobs = max_jobs
        self._deliver = deliver
        self._tell = tell
        self._delivering: asyncio.Task[None] | None = None
        self._pause: Alarm | None = None
        self._line: ConsumerQueue | None = None
        self._is_over = False
        self._is_held_back = False

    def start(self) -> None:
        """Claim jobs from now on."""
        assert self._line is None
        self._line = self._service.attend(self._topic, self)

    def close(self) -> None:
        """Release the jobs at once: the connection is closed. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        if self._pause is not None:
            self._pause.cancel()
        if self._line is not None:
            self._service.leave(self._line, self)
        self._service.release_connection(self._topic, self.connection)
        # Break the cycle: the connection refers to this object.
        self._deliver, self._tell = _deliver_to_nobody, _tell_nobody

    # -- as a claimer ----------------------------------------------------------------------

    def wanted(self, now_ms: int) -> int:
        """See `Claimer`, here and below."""
        if self._is_over or self._is_held_back:
            return 0
        if self._delivering is not None or self._pause is not None:
            return 0
        return self._service.room(self._topic, self.connection, self._max_jobs, now_ms)

    def take(self, grant: ClaimGrant) -> None:
        """Send the jobs, and claim no more until that is done."""
        assert self._delivering is None
        self._delivering = asyncio.get_running_loop().create_task(self._hand_over(grant))

    def fail(self, error: TopicsError) -> None:
        """Report the error and claim again after a pause; end if only a restart helps."""
        if self._is_over:
            return
        if error.code is not Code.THROTTLED:
            self._end(error)
            return
        self._tell(error, False)
        self._pause = self._service.alarm(_PAUSE_MS, self._go_on)

    def passed(self) -> None:
        """Wait: the claim found no job."""

    def lost(self, error: TopicsError) -> None:
        """End: the queue was dropped."""
        self._end(error)

    def hold_back(self) -> None:
        """Claim no more: the worker is stopping and only finishes its jobs."""
        self._is_held_back = True

    def drain(self) -> None:
        """Release the leases; the caller ends the connection."""
        self.close()

    def tick(self) -> None:
        """Run the timer of the pause if it is due."""
        if self._pause is not None:
            self._pause.tick()

    # -- handing over ----------------------------------------------------------------------

    def _go_on(self) -> None:
        self._pause = None
        self._service.stir(self._topic)

    async def _hand_over(self, grant: ClaimGrant) -> None:
        seqs = [job.seq for job in grant.claim.jobs]
        try:
            for start in range(0, len(seqs), _LOT_JOBS):
                jobs = await self._service.read(grant, seqs[start], _LOT_JOBS)
                if self._is_over:
                    # The leases were not durable yet when they were released: release them again.
                    self._service.give_back(grant, seqs[start])
                    return
                if jobs:
                    await self._deliver(jobs)
        except TopicsError as error:
            self._delivering = None
            self.fail(error)
            return
        except StorageError as error:
            self._end(TopicsError(Code.INTERNAL, f"jobs cannot be read: {error}"))
            return
        finally:
            self._delivering = None
        self._service.stir(self._topic)

    def _end(self, error: TopicsError) -> None:
        if not self._is_over:
            tell = self._tell
            self.close()
            tell(error, True)


async def _deliver_to_nobody(_: Sequence[LeasedJob]) -> None:
    raise AssertionError("a stream that is over delivers nothing")


def _tell_nobody(_: TopicsError, is_last: bool) -> None:
    raise AssertionError("a stream that is over reports nothing")
