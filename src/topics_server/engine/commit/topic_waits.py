"""Waits for a topic's change, with a timeout.

Thousands of readers may wait for one topic. Each wakes a task that answers its client, and waking
all tasks at once would make one long turn of the loop. So a few are woken in each turn, in the
order of arrival. Called by `engine/reads`, `engine/preconditions` and `streams/service`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from topics_server.engine.commit.notifier import Notifier

# The maximum of waits that end in one turn of the loop.
ENDED_MAX: Final = 32


class TopicWaits:
    """The waits of one caller."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        # The number of waits that ended in this turn, and the waits that must end in later turns.
        self._ended = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def change_or_timeout(self, topic_id: int, timeout_ms: float) -> None:
        """Return when the topic changes, or when the time is over."""
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()
        is_in_line = False

        def notify() -> None:
            nonlocal is_in_line
            if not is_in_line:
                is_in_line = True
                self._line.append(changed)
                self._end_some()

        timer = loop.call_later(timeout_ms / 1000, notify)
        self._notifier.add(topic_id, notify)
        try:
            await changed
        finally:
            timer.cancel()
            self._notifier.remove(topic_id, notify)

    def _end_some(self) -> None:
        """End as many waits as this turn allows."""
        while self._line and self._ended < ENDED_MAX:
            changed = self._line.popleft()
            if changed.done():
                continue  # its caller is gone
            changed.set_result(None)
            self._ended += 1
            if self._ended == 1:
                asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._ended = 0
        self._end_some()
