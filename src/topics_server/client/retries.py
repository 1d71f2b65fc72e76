"""When and how often a call is tried again.

Pure; `queue` and `blocking` do the waiting. Only the pauses count against `total_ms`: each try has
its own timeout.
"""

from __future__ import annotations

from topics_server.client.backoff import Backoff
from topics_server.client.errors import ClientError, asked_wait_ms, passes

PAUSES = Backoff(base_ms=100, cap_ms=5000)


class RetryPolicy:
    """The tries of one call. `total_ms` limits the sum of all pauses."""

    def __init__(self, total_ms: int, pauses: Backoff = PAUSES) -> None:
        self._left_ms = total_ms
        self._pauses = pauses
        self._tries = 0

    def pause_ms(self, error: ClientError, chance: float) -> int | None:
        """The pause before the next try; None to give up with this error.

        If the server names a pause, the next try is not earlier.
        """
        if not passes(error):
            return None
        self._tries += 1
        wait_ms = max(asked_wait_ms(error), self._pauses.wait_ms(self._tries, chance), 1)
        if wait_ms > self._left_ms:
            return None
        self._left_ms -= wait_ms
        return wait_ms
