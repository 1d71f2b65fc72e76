"""Connection timeouts and the limit on connections.

A connection keeps its own times (`http/exchange/deadlines`). This module checks all connections, in
slices, so that ten thousand of them never block the loop, and counts the results. The cap on
connections reserves file descriptors for the store: at the cap, idle connections are closed, and if
none is idle, the newest is refused. `server` runs the checks, from before recovery on;
`api/context` passes this object to connections.
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
# How often all connections are checked, seconds; many connections are checked less often. Checking
# one costs 5 us. The checks take at most `_LOOK_SHARE` of the loop's time, unless a connection
# would then end later than `_LATE_SHARE` of the shortest timeout after its deadline.
_LOOK_S: Final = 1.0
_LOOK_COST_S: Final = 5e-6
_LOOK_SHARE: Final = 0.0025
_LATE_SHARE: Final = 0.25
# The most connections checked in one slice, and the longest slice, ms. Ending a connection takes
# some 40 us.
_SLICE: Final = 128
_SLICE_MS: Final = 0.2
# The clock is read after this many connections.
_LOOKED: Final = 4
# The pause for other tasks between two slices, seconds. A request takes several loop turns, and
# should be delayed by one slice of checks, not by one in each turn.
_PAUSE_S: Final = 0.001
# At the cap, one in this many connections is closed at once.
_EVICTED_SHARE: Final = 16
# A search for idle connections finds nothing new for this long, seconds.
_EVICT_AGAIN_S: Final = 0.1


class TimeoutSettings(msgspec.Struct, frozen=True):
    """Connection timeouts in seconds.

    They limit a head, a body without progress, an idle connection, a client that does not read, and
    a client whose connection is being closed. A body makes progress if `body_bytes_min` more bytes
    arrive in `body_s`.
    """

    header_s: float = 10.0
    body_s: float = 30.0
    keep_alive_s: float = 75.0
    write_s: float = 30.0
    linger_s: float = 3.0
    body_bytes_min: int = 4096


class TimedConnection(Protocol):
    """The methods that the timeouts call on a connection."""

    @property
    def idle_rank(self) -> tuple[bool, float] | None:
        """Whether the connection was ever used, and since when it is idle. None if not idle."""
        ...

    def overdue(self, now: float, limits: TimeoutSettings) -> str | None:
        """The kind of the timeout that the client has exceeded, or None."""
        ...

    def time_out(self, kind: str) -> None:
        """End the connection."""
        ...


class ConnectionTimeouts:
    """The limits of all connections, and counts of the connections that exceeded them.

    `timeouts` counts ended connections by kind, `evicted` counts closed idle ones, and `refused`
    counts refused new ones. `unread_bytes` is the total that clients leave unread. `most` is the
    cap (0: none); `open` is the number of connections at the last check.
    """

    def __init__(
        self, bounds: Bounds | None = None, limits: TimeoutSettings | None = None, most: int = 0
    ) -> None:
        self.bounds = bounds or Bounds()
        self.limits = limits or TimeoutSettings()
        self.most = most
        self.open = 0
        self.timeouts = dict.fromkeys(KINDS, 0)
        self.evicted = 0
        self.refused = 0
        self.unread_bytes = 0
        self._evicted_at = -1.0
        # Connections whose clients do not read, with the unread bytes; the longest waiting first.
        self._stuck: dict[TimedConnection, int] = {}

    def stuck(self, connection: TimedConnection, unread_bytes: int) -> None:
        """Note that a client does not read.

        If too much is unread in total, the connections that wait longest are closed.
        """
        self.flows(connection)
        self._stuck[connection] = unread_bytes
        self.unread_bytes += unread_bytes
        while self.unread_bytes > UNREAD_BYTES_MAX and len(self._stuck) > 1:
            oldest = next(iter(self._stuck))
            self.flows(oldest)
            self.timeouts["write"] += 1
            oldest.time_out("write")

    def flows(self, connection: TimedConnection) -> None:
        """Forget the unread bytes of a client that reads again or is gone."""
        self.unread_bytes -= self._stuck.pop(connection, 0)
        assert self.unread_bytes >= 0

    def crowded(self, connections: Collection[Any], newest: TimedConnection) -> TopicsError | None:
        """At the cap, close idle connections. Returns an error for `newest` if none is idle."""
        self.open = len(connections)
        if not self.most or self.open <= self.most or self._evict(connections, newest):
            return None
        self.refused += 1
        return TopicsError(
            Code.THROTTLED,
            f"the server has reached its limit of {self.most} open connections",
            {"limit": "max_connections", "max": self.most},
        )

    def _evict(self, connections: Iterable[Any], newest: TimedConnection) -> bool:
        """Close idle connections. Returns whether there were any.

        Unused connections are closed first, then those that have been idle for longest.
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
        """Check `connections`, a changing set, until cancelled."""
        while True:
            await asyncio.sleep(self.look_every_s())
            await self.look(connections)

    def look_every_s(self) -> float:
        """The pause between two rounds of checks."""
        limits = self.limits
        shortest_s = min(limits.header_s, limits.body_s, limits.keep_alive_s, limits.write_s)
        thrifty_s = self.open * _LOOK_COST_S / _LOOK_SHARE
        return max(_LOOK_S, min(thrifty_s, _LATE_SHARE * shortest_s))

    async def look(self, connections: Iterable[Any]) -> None:
        """Check each connection once."""
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
        kind = connection.overdue(now, self.limits)
        if kind is not None:
            self.timeouts[kind] += 1
            connection.time_out(kind)
