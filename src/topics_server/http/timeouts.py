"""Connection timeouts and the limit on connections.

A connection knows its own times (`api/framing`); here is who asks it, in slices, so that ten
thousand of them never hold the loop up, and who counts what came of it. The cap on connections
keeps file descriptors for the store: at the cap the idle make room, and where none is idle the
newest is refused. `server` runs it, from before recovery on; `api/context` hands it to
connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any, Final, Protocol

import msgspec

from topics_server.http.request_head import Bounds
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import UNREAD_BYTES_MAX

KINDS: Final = ("header", "body", "idle", "write", "linger")
# How often all connections are looked at, seconds. Many less often: a look costs 5 us each, and
# what it takes of the loop's time is to stay below this share, as long as nobody is ended later
# than this part of the shortest wait after that is over.
_LOOK_S: Final = 1.0
_LOOK_COST_S: Final = 5e-6
_LOOK_SHARE: Final = 0.0025
_LATE_SHARE: Final = 0.25
# Connections looked at in one go, at most, and for how long, ms; to end one takes some 40 us.
_SLICE: Final = 128
_SLICE_MS: Final = 0.2
# So many, then a look at the clock.
_LOOKED: Final = 4
# What others have the loop for between two slices, seconds: a request takes several turns, and is
# to meet one slice of a crowd, not as many as it takes turns.
_PAUSE_S: Final = 0.001
# Of the cap, what is let go at once where it is reached: a part in so many.
_EVICTED_SHARE: Final = 16
# A look for idle connections finds nothing new for so long, seconds.
_EVICT_AGAIN_S: Final = 0.1


class TimeoutSettings(msgspec.Struct, frozen=True):
    """Patience in seconds: with a head, a body that does not get on, a connection between two
    requests, a client that does not read, and one that was told to leave.

    A body gets on if `body_bytes_min` more bytes come in `body_s`.
    """

    header_s: float = 10.0
    body_s: float = 30.0
    keep_alive_s: float = 75.0
    write_s: float = 30.0
    linger_s: float = 3.0
    body_bytes_min: int = 4096


class TimedConnection(Protocol):
    """What is asked of a connection."""

    @property
    def idle_rank(self) -> tuple[bool, float] | None:
        """Whether it was ever used, and since when it waits for a request; None if it does not."""
        ...

    def overdue(self, now: float, waits: TimeoutSettings) -> str | None:
        """What its client has kept us waiting for too long."""
        ...

    def time_out(self, kind: str) -> None:
        """End it."""
        ...


class ConnectionTimeouts:
    """The bounds of all connections, and what became of those that went beyond.

    `timeouts` counts ended connections by kind, `evicted` idle ones that made room, `refused` new
    ones that found none; `unread_bytes` is what clients leave unread; `most` is the cap (0: none),
    `open` how many there were at the last look.
    """

    def __init__(
        self, bounds: Bounds | None = None, waits: TimeoutSettings | None = None, most: int = 0
    ) -> None:
        self.bounds = bounds or Bounds()
        self.waits = waits or TimeoutSettings()
        self.most = most
        self.open = 0
        self.timeouts = dict.fromkeys(KINDS, 0)
        self.evicted = 0
        self.refused = 0
        self.unread_bytes = 0
        self._evicted_at = -1.0
        # Who holds what is not read, since the longest first.
        self._stuck: dict[TimedConnection, int] = {}

    def stuck(self, connection: TimedConnection, unread_bytes: int) -> None:
        """Note that a client does not take what is sent; too much of it, and the oldest go."""
        self.flows(connection)
        self._stuck[connection] = unread_bytes
        self.unread_bytes += unread_bytes
        while self.unread_bytes > UNREAD_BYTES_MAX and len(self._stuck) > 1:
            oldest = next(iter(self._stuck))
            self.flows(oldest)
            self.timeouts["write"] += 1
            oldest.time_out("write")

    def flows(self, connection: TimedConnection) -> None:
        """Note that it does again, or is gone."""
        self.unread_bytes -= self._stuck.pop(connection, 0)
        assert self.unread_bytes >= 0

    def crowded(self, connections: Collection[Any], newest: TimedConnection) -> TopicsError | None:
        """Make room for the newest of these connections, or say why it is refused."""
        self.open = len(connections)
        if not self.most or self.open <= self.most or self._evict(connections, newest):
            return None
        self.refused += 1
        return TopicsError(
            Code.THROTTLED,
            f"there are {self.most} open connections already",
            {"limit": "max_connections", "max": self.most},
        )

    def _evict(self, connections: Iterable[Any], newest: TimedConnection) -> bool:
        """Close idle connections, whether there were any.

        Those that were never used first, then those that have been idle for longest.
        """
        now = asyncio.get_running_loop().time()
        if now - self._evicted_at < _EVICT_AGAIN_S:
            return False
        self._evicted_at = now
        idle: list[tuple[tuple[bool, float], int, TimedConnection]] = []
        for number, connection in enumerate(connections):
            rank = getattr(connection, "idle_rank", None)
            if rank is not None and connection is not newest:
                idle.append((rank, number, connection))
        idle.sort()
        leaving = idle[: max(1, self.most // _EVICTED_SHARE)]
        for _, _, connection in leaving:
            connection.time_out("idle")
        self.evicted += len(leaving)
        return bool(leaving)

    async def run(self, connections: Iterable[Any]) -> None:
        """Look at `connections`, a set that changes, until cancelled."""
        while True:
            await asyncio.sleep(self.look_every_s())
            await self.look(connections)

    def look_every_s(self) -> float:
        """How long after one look at all connections the next one begins."""
        waits = self.waits
        shortest_s = min(waits.header_s, waits.body_s, waits.keep_alive_s, waits.write_s)
        thrifty_s = self.open * _LOOK_COST_S / _LOOK_SHARE
        return max(_LOOK_S, min(thrifty_s, _LATE_SHARE * shortest_s))

    async def look(self, connections: Iterable[Any]) -> None:
        """Look at each connection once."""
        found = list(connections)
        self.open = len(found)
        now = asyncio.get_running_loop().time()
        began_ms = monotonic_ms()
        for number, connection in enumerate(found, 1):
            if hasattr(connection, "overdue"):
                self._ask(connection, now)
            is_over = number % _LOOKED == 0 and monotonic_ms() - began_ms > _SLICE_MS
            if is_over or number % _SLICE == 0:
                await asyncio.sleep(_PAUSE_S)
                began_ms = monotonic_ms()

    def _ask(self, connection: TimedConnection, now: float) -> None:
        kind = connection.overdue(now, self.waits)
        if kind is not None:
            self.timeouts[kind] += 1
            connection.time_out(kind)
