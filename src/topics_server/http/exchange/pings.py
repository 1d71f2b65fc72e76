"""Pings that check whether the peer of a WebSocket is still there.

A ping is sent some time after the last pong. If no pong arrives in time, the connection ends.
`http/websocket` makes one instance for each open socket.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any


class PeerPings:
    """The pings of one socket. `ping` sends a payload, `give_up` ends the connection.

    Neither is called after `stop`.
    """

    __slots__ = (
        "_answer_s",
        "_every_s",
        "_give_up",
        "_loop",
        "_number",
        "_payload",
        "_ping",
        "_timer",
    )

    def __init__(
        self,
        loop: Any,
        every_s: float | None,
        answer_s: float | None,
        ping: Callable[[bytes], None],
        give_up: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._every_s = every_s
        self._answer_s = answer_s
        self._ping: Callable[[bytes], None] | None = ping
        self._give_up: Callable[[], None] | None = give_up
        self._number = 0
        self._payload: bytes | None = None
        # The timer of the next ping, or of the end of the wait for a pong.
        self._timer: asyncio.TimerHandle | None = None
        self._schedule()

    def take_pong(self, payload: bytes) -> None:
        """Take a pong of the peer. A pong that answers no ping of this object is ignored."""
        if payload == self._payload and self._timer is not None and self._answer_s:
            self._timer.cancel()
            self._payload = None
            self._schedule()

    def stop(self) -> None:
        """Send no more pings, and drop the callbacks."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._ping = self._give_up = None

    def _schedule(self) -> None:
        if self._every_s and self._ping is not None:
            self._timer = self._loop.call_later(self._every_s, self._send)

    def _send(self) -> None:
        self._timer = None
        if self._ping is None:
            return
        self._number += 1
        self._payload = struct.pack("!I", self._number % 2**32)
        self._ping(self._payload)
        if self._answer_s:
            self._timer = self._loop.call_later(self._answer_s, self._end)
        else:
            self._schedule()

    def _end(self) -> None:
        give_up = self._give_up
        self.stop()
        if give_up is not None:
            give_up()
