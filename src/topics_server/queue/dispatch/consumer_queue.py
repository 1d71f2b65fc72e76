"""The claimers that wait on one queue, in turn order.

A claimer is a claim or a push stream. Whoever got something goes to the end of the line, so with
one job at a time everybody has their turn. At most one pass is due: as soon as the loop comes to it
or at the end of a coalescing window (§10.2); beside it one timer for what becomes claimable by
itself. Knows no rule of leases. Used by `queue/service`; loop thread only.
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

# Whoever waits is looked after so often in any case: the wall clock may have stepped.
_DUE_MS_MAX: Final = 60_000


class ClaimGrant(msgspec.Struct, frozen=True):
    """Jobs given to a claimer; they are its own once `ticket`, if any, is applied."""

    topic: Topic
    claim: Claim
    ticket: Ticket | None


class Claimer(Protocol):
    """Who wants jobs. None of its methods waits."""

    @property
    def node(self) -> str:
        """Whose the leases are."""
        ...

    @property
    def connection(self) -> int:
        """The push stream's own number; 0 for a claim."""
        ...

    @property
    def lease_ms(self) -> int | None:
        """How long they are; None: as the topic says."""
        ...

    def wanted(self, now_ms: int) -> int:
        """How many jobs it would take now."""
        ...

    def take(self, grant: ClaimGrant) -> None:
        """Here they are."""
        ...

    def fail(self, error: TopicsError) -> None:
        """They cannot be given."""
        ...

    def passed(self) -> None:
        """A pass is over; whoever does not wait gets nothing."""
        ...

    def lost(self, error: TopicsError) -> None:
        """The queue is gone."""
        ...

    def hold_back(self) -> None:
        """It wants nothing more and keeps what it has; of push streams only."""
        ...

    def drain(self) -> None:
        """The server is going down."""
        ...

    def tick(self) -> None:
        """Look whether a time is over."""
        ...


class ConsumerQueue:
    """The claimers of one queue. `serve` is called when a pass is due.

    `stir` is called when something may be claimable; it has a pass planned. `has_bell`: `ring` is
    among the topic's bells.
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
        "has_bell",
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
        self.has_bell = False
        self._serve = serve
        self._stir = stir
        self._clock = clock
        self._impatient: list[Claimer] = []
        self._soon: asyncio.Handle | None = None
        self._window: Alarm | None = None
        self._due: asyncio.TimerHandle | None = None
        self._due_ms = 0

    # -- who waits -------------------------------------------------------------------------

    def join(self, claimer: Claimer) -> None:
        """Stand at the end of the line."""
        assert claimer not in self.claimers
        self.claimers[claimer] = None

    def leave(self, claimer: Claimer) -> None:
        """Want nothing any more."""
        self.claimers.pop(claimer, None)
        if claimer in self._impatient:
            self._impatient.remove(claimer)

    def tell_passed(self, claimer: Claimer) -> None:
        """Have one hear of the end of the next pass."""
        self._impatient.append(claimer)

    def hungry(self, now_ms: int, most: int) -> list[tuple[Claimer, int]]:
        """Those whose turn it is and how many jobs each wants; at most `most` of them."""
        found: list[tuple[Claimer, int]] = []
        for claimer in self.claimers:
            wanted = claimer.wanted(now_ms)
            if wanted:
                found.append((claimer, wanted))
                if len(found) >= most:
                    break
        return found

    def served(self, claimer: Claimer) -> None:
        """It got something: the others come first now."""
        del self.claimers[claimer]
        self.claimers[claimer] = None

    # -- when it is served -----------------------------------------------------------------

    @property
    def has_window(self) -> bool:
        """Whether a coalescing window is open."""
        return self._window is not None

    def serve_soon(self) -> None:
        """Have a pass in this turn of the loop, once."""
        if self._soon is None and self._window is None:
            self._soon = asyncio.get_running_loop().call_soon(self.serve)

    def open_window(self, jitter_ms: int) -> None:
        """Have a pass when the window ends; one that is open stays."""
        if self._window is None:
            self._window = Alarm(self._clock, jitter_ms, self.serve)

    def serve(self) -> None:
        """Have a pass now; none is due any more."""
        if self._soon is not None:
            self._soon.cancel()
        if self._window is not None:
            self._window.cancel()
        self._soon = self._window = None
        self._serve(self)
        impatient, self._impatient = self._impatient, []
        for claimer in impatient:
            claimer.passed()

    def look_at(self, due_ms: int | None, now_ms: int) -> None:
        """Stir the line when something becomes claimable, which is at `due_ms`."""
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
        self.ring()

    def ring(self) -> None:
        """Something moved in the queue."""
        self._stir(self.topic_id)

    def tick(self) -> None:
        """Do what the timers would, if their time is over."""
        for claimer in tuple(self.claimers):
            claimer.tick()
        if self._window is not None:
            self._window.tick()
        if self._due is not None and self._due_ms <= self._clock.now_ms():
            self._due.cancel()
            self._on_due()

    def shift(self, by_ms: int) -> None:
        """The wall clock was set by so much; the timer goes by the loop's own time."""
        self._due_ms += by_ms

    def close(self) -> None:
        """Nobody waits any more."""
        for planned in (self._soon, self._window, self._due):
            if planned is not None:
                planned.cancel()
        self._soon = self._window = self._due = None


class Poll:
    """One claim, as a claimer; `outcome` tells what it got, None if nothing."""

    __slots__ = ("lease_ms", "limit", "max_jobs", "node", "outcome")

    connection: Final = 0

    def __init__(self, node: str, max_jobs: int, lease_ms: int | None) -> None:
        self.node = node
        self.max_jobs = max_jobs
        self.lease_ms = lease_ms
        self.outcome: asyncio.Future[ClaimGrant | None] = asyncio.get_running_loop().create_future()
        # How long it waits.
        self.limit: Alarm | None = None

    def wanted(self, now_ms: int) -> int:
        """See `Claimer`; so for all below."""
        return 0 if self.outcome.done() else self.max_jobs

    def take(self, grant: ClaimGrant) -> None:
        """It is served once."""
        self.outcome.set_result(grant)

    def fail(self, error: TopicsError) -> None:
        """Its caller is told."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def passed(self) -> None:
        """Nothing was there."""
        if not self.outcome.done():
            self.outcome.set_result(None)

    def lost(self, error: TopicsError) -> None:
        """Its caller is told."""
        self.fail(error)

    def hold_back(self) -> None:
        """It has no connection to be held back by."""
        raise AssertionError("a claim is no push stream")

    def drain(self) -> None:
        """It is answered with nothing."""
        self.passed()

    def tick(self) -> None:
        """Its time may be over."""
        if self.limit is not None:
            self.limit.tick()
