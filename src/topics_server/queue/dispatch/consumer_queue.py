"""The claimers that wait on one queue, in turn order.

A claimer is a claim or a push stream. A claimer that got a job moves to the end of the line, so
with one job at a time every claimer gets its turn. At most one pass is scheduled: in this loop
turn, or at the end of a coalescing window (§10.2). Another timer waits for jobs that become
claimable by time. This module has no rule of leases. Used by `queue/service`; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from topics_server.engine.commit.pipeline import Ticket
from topics_server.engine.ports import Clock
from topics_server.engine.topic.topic import Topic
from topics_server.queue.dispatch.alarm import Alarm
from topics_server.queue.leases.jobs import Claim
from topics_server.values.errors import TopicsError

# Waiting claimers are served at least this often, because the wall clock may step.
_DUE_MS_MAX: Final = 60_000


class ClaimGrant(msgspec.Struct, frozen=True):
    """Jobs given to a claimer; valid once `ticket`, if any, is applied."""

    topic: Topic
    claim: Claim
    ticket: Ticket | None


class Claimer(Protocol):
    """A claimer of jobs. None of its methods waits."""

    @property
    def node(self) -> str:
        """The node that gets the leases."""
        ...

    @property
    def connection(self) -> int:
        """The push stream's number; 0 for a claim."""
        ...

    @property
    def lease_ms(self) -> int | None:
        """The length of its leases; None: the topic's setting."""
        ...

    def wanted(self, now_ms: int) -> int:
        """The number of jobs that it would accept now."""
        ...

    def take(self, grant: ClaimGrant) -> None:
        """Accept these jobs."""
        ...

    def fail(self, error: TopicsError) -> None:
        """Report that the claim failed with this error."""
        ...

    def passed(self) -> None:
        """Note that a pass is over; a claimer that does not wait ends without jobs."""
        ...

    def lost(self, error: TopicsError) -> None:
        """End: the queue was dropped."""
        ...

    def hold_back(self) -> None:
        """Take no more jobs and keep the leased ones; for push streams only."""
        ...

    def drain(self) -> None:
        """End: the server is shutting down."""
        ...

    def tick(self) -> None:
        """Run the claimer's timer if it is due."""
        ...


class ConsumerQueue:
    """The claimers of one queue. `serve` is called when a pass is due.

    `stir` is called when something may be claimable; it schedules a pass. `is_listening`: `notify`
    is registered with the notifier. `is_gone`: the queue was dropped, and its claims are ending.
    """

    __slots__ = (
        "_clock",
        "_due",
        "_due_ms",
        "_impatient",
        "_serve",
        "_soon",
        "_stir",
        "_window",
        "claimers",
        "is_gone",
        "is_listening",
        "name",
        "topic_id",
    )

    def __init__(
        self,
        topic_id: int,
        name: str,
        serve: Callable[[ConsumerQueue], None],
        stir: Callable[[int], None],
        clock: Clock,
    ) -> None:
        self.topic_id = topic_id
        self.name = name
        self.claimers: dict[Claimer, None] = {}
        self.is_listening = self.is_gone = False
        self._serve = serve
        self._stir = stir
        self._clock = clock
        self._impatient: list[Claimer] = []
        self._soon: asyncio.Handle | None = None
        self._window: Alarm | None = None
        self._due: asyncio.TimerHandle | None = None
        self._due_ms = 0

    # -- waiting ---------------------------------------------------------------------------

    def join(self, claimer: Claimer) -> None:
        """Add a claimer at the end of the line."""
        assert claimer not in self.claimers
        self.claimers[claimer] = None

    def leave(self, claimer: Claimer) -> None:
        """Remove a claimer that wants no more jobs."""
        self.claimers.pop(claimer, None)
        if claimer in self._impatient:
            self._impatient.remove(claimer)

    def tell_passed(self, claimer: Claimer) -> None:
        """Call this claimer's `passed` after the next pass."""
        self._impatient.append(claimer)

    def hungry(self, now_ms: int, most: int) -> list[tuple[Claimer, int]]:
        """The next claimers and how many jobs each wants; at most `most` of them."""
        found: list[tuple[Claimer, int]] = []
        for claimer in self.claimers:
            wanted = claimer.wanted(now_ms)
            if wanted:
                found.append((claimer, wanted))
                if len(found) >= most:
                    break
        return found

    def served(self, claimer: Claimer) -> None:
        """Move a claimer that got a job to the end of the line."""
        del self.claimers[claimer]
        self.claimers[claimer] = None

    # -- when it is served -----------------------------------------------------------------

    @property
    def has_window(self) -> bool:
        """Whether a coalescing window is open."""
        return self._window is not None

    def serve_soon(self) -> None:
        """Schedule a pass in this loop turn."""
        if self._soon is None and self._window is None:
            self._soon = asyncio.get_running_loop().call_soon(self.serve)

    def open_window(self, jitter_ms: int) -> None:
        """Schedule a pass at the end of the window; has no effect if a window is open."""
        if self._window is None:
            self._window = Alarm(self._clock, jitter_ms, self.serve)

    def serve(self) -> None:
        """Run a pass now; it replaces a scheduled pass."""
        if self._soon is not None:
            self._soon.cancel()
        if self._window is not None:
            self._window.cancel()
        self._soon = self._window = None
        self._serve(self)
        if self.is_gone:
            return
        impatient, self._impatient = self._impatient, []
        for claimer in impatient:
            claimer.passed()

    def look_at(self, due_ms: int | None, now_ms: int) -> None:
        """Call `stir` at `due_ms`, when a job becomes claimable."""
        latest_ms = now_ms + _DUE_MS_MAX
        due_ms = latest_ms if due_ms is None else min(due_ms, latest_ms)
        if self._due is not None:
            if due_ms == self._due_ms:
                return
            self._due.cancel()
            self._due = None
        if not self.claimers:
            return
        self._due_ms = due_ms
        delay_ms = max(due_ms - now_ms, 1)
        self._due = asyncio.get_running_loop().call_later(delay_ms / 1000, self._on_due)

    def _on_due(self) -> None:
        self._due = None
        self.notify()

    def notify(self) -> None:
        """Note that the queue changed."""
        self._stir(self.topic_id)

    def tick(self) -> None:
        """Run the timers whose time is over."""
        for claimer in tuple(self.claimers):
            claimer.tick()
        if self._window is not None:
            self._window.tick()
        if self._due is not None and self._due_ms <= self._clock.now_ms():
            self._due.cancel()
            self._on_due()

    def shift(self, by_ms: int) -> None:
        """The wall clock was set by `by_ms`; the timer uses the loop's own clock."""
        self._due_ms += by_ms

    def close(self) -> None:
        """Stop all timers: the last claimer left."""
        for planned in (self._soon, self._window, self._due):
            if planned is not None:
                planned.cancel()
        self._soon = self._window = self._due = None


class Poll:
    """One claim as a claimer; `outcome` resolves to its jobs, None if it gets none."""

    __slots__ = ("lease_ms", "limit", "max_jobs", "node", "outcome")

    connection: Final = 0

    def __init__(self, node: str, max_jobs: int, lease_ms: int | None) -> None:
        self.node = node
        self.max_jobs = max_jobs
        self.lease_ms = lease_ms
        self.outcome: asyncio.Future[ClaimGrant | None] = asyncio.get_running_loop().create_future()
        # The timer for the end of its wait.
        self.limit: Alarm | None = None

    def wanted(self, now_ms: int) -> int:
        """See `Claimer`, here and below."""
        return 0 if self.outcome.done() else self.max_jobs

    def take(self, grant: ClaimGrant) -> None:
        """Resolve with the jobs; a poll is served once."""
        self.outcome.set_result(grant)

    def fail(self, error: TopicsError) -> None:
        """Raise the error in the claiming task."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def passed(self) -> None:
        """Resolve without jobs: there are none."""
        if not self.outcome.done():
            self.outcome.set_result(None)

    def lost(self, error: TopicsError) -> None:
        """Raise the error in the claiming task."""
        self.fail(error)

    def hold_back(self) -> None:
        """Does nothing: a poll has no connection to hold back."""
        raise AssertionError("a claim is no push stream")

    def drain(self) -> None:
        """Answer with no jobs."""
        self.passed()

    def tick(self) -> None:
        """Run the timer of the wait if it is due."""
        if self.limit is not None:
            self.limit.tick()
