"""Busy polling: the loop asks for the next request of a lone client instead of sleeping.

A sleeping loop must be woken for the next request, and that takes longer than a small answer. So
after an answer the loop polls its sockets for some microseconds, if one client alone sends
requests, and each of its last requests came that soon. A late request, another client, or work on
another thread of the process, which needs the interpreter too, ends the polling.
`docs/decisions/0367-busy-polling.md` has the figures. One instance for all connections, in
`api/context`; called by `api/direct`. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from topics_server.runtime.clock import monotonic_s

# So many requests in a row must come soon before the loop polls for the next one.
_STREAK: Final = 8


def _always() -> bool:
    return True


class BusyPolling:
    """Polls for at most `most_us` microseconds after an answer; 0: never.

    `is_resting` tells whether no other thread of the process works. `streak` counts the requests
    that came soon, one after the other; an answer to another client sets it to 0.
    """

    def __init__(self, most_us: int = 0) -> None:
        self.is_resting: Callable[[], bool] = _always
        self._most_ms: Final = most_us / 1000
        self._answered_ms = self._until_ms = 0.0
        self.streak = 0
        self._is_polling = False

    def answered_again(self, loop: asyncio.AbstractEventLoop, started_ms: float) -> None:
        """Note an answer to the client of the last answer; the request arrived at `started_ms`."""
        now_ms = monotonic_s() * 1000
        is_soon = started_ms - self._answered_ms < self._most_ms
        self.streak = self.streak + 1 if is_soon else 0
        self._answered_ms = now_ms
        if self.streak >= _STREAK:
            self._until_ms = now_ms + self._most_ms
            if not self._is_polling:
                self._is_polling = True
                loop.call_soon(self._poll, loop)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs once in each turn of the loop; a loop with a call that is due does not sleep."""
        if monotonic_s() * 1000 < self._until_ms and self.is_resting():
            loop.call_soon(self._poll, loop)
        else:
            self._is_polling = False
