"""Spaces out the decoding of request bodies, so that no loop turn decodes many.

A client can complete hundreds of requests in one turn of the loop: it sends all but the last byte
of each, waits, and sends the rest at once. Each request would decode its body in that turn, up to
20 ms a MiB. So the bodies of one turn have a budget in bytes. A request that does not fit waits for
a later turn, in the order of arrival; a body larger than the budget gets a turn of its own. After a
long turn the next bodies begin a little later: meanwhile the loop serves other requests, and a
small request waits for at most one long body.

Called by `api/front_door`, `api/streams/handlers` and `api/websocket/handlers`. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from topics_server.runtime.clock import monotonic_ms
from topics_server.values.limits import KIB

# The bytes of bodies that begin in one turn of the loop: at worst 2 to 3 ms of decoding.
TURN_BYTES: Final = 128 * KIB
# Added to the size of every body: handling a request costs as much as decoding these bytes.
_BODY_BYTES: Final = 2 * KIB
# A body up to this size never waits for the end of a rest: rests exist for such bodies.
_SMALL_BYTES: Final = 16 * KIB
# After a turn that took longer than `_LONG_MS`, the larger bodies pause for this share of its time.
_LONG_MS: Final = 2.0
_REST_SHARE: Final = 0.25


class BodyTurns:
    """The budget of the current turn, and the bodies that wait for a later one.

    Invariant: while bodies wait, `_end_turn` or `_begin_turn` is scheduled.
    """

    def __init__(self) -> None:
        self._taken_bytes = 0
        self._began_ms = 0.0
        self._is_resting = False
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """The number of bodies that wait."""
        return len(self._waiting)

    def takes(self, size: int) -> bool:
        """Whether a body of `size` bytes may be decoded in this turn; if so, it counts."""
        if size > _SMALL_BYTES and (self._waiting or self._is_resting):
            return False
        if not self._fits(size):
            return False
        if not self._taken_bytes:
            self._began_ms = monotonic_ms()
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._taken_bytes += size + _BODY_BYTES
        return True

    async def turn(self, size: int) -> None:
        """Return in a turn of the loop in which a body of `size` bytes may be decoded."""
        if self.takes(size):
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, waiting))
        await waiting

    def _fits(self, size: int) -> bool:
        return not self._taken_bytes or self._taken_bytes + size + _BODY_BYTES <= TURN_BYTES

    def _end_turn(self) -> None:
        """After the bodies of a turn: start those that wait, after a rest if the turn was long."""
        took_ms = monotonic_ms() - self._began_ms
        self._taken_bytes = 0
        if self._is_resting:
            # The turn was for small bodies, which a rest does not delay. Larger bodies wait
            # until the rest is over.
            return
        if took_ms > _LONG_MS:
            self._is_resting = True
            rest_s = took_ms * _REST_SHARE / 1000
            asyncio.get_running_loop().call_later(rest_s, self._begin_turn)
        else:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._is_resting = False
        waiting, is_begun = self._waiting, self._taken_bytes > 0
        while waiting and self._fits(waiting[0][0]):
            size, future = waiting.popleft()
            # A client that disconnected needs no turn.
            if not future.done():
                self._taken_bytes += size + _BODY_BYTES
                future.set_result(None)
        if self._taken_bytes and not is_begun:
            self._began_ms = monotonic_ms()
            # Schedule this after the tasks that were just woken.
            asyncio.get_running_loop().call_soon(self._end_turn)
