"""A connection's last answer, and the bytes that it receives after it.

The answer to a refused request follows those to the requests before it, and is the connection's
last. Then the connection closes its write side, and waits a little for the client to close its own.
Otherwise the kernel would answer late bytes with a reset, which may overtake the error.
`http/connection` makes one instance for each connection that refuses a request.
"""

from __future__ import annotations

from typing import Final

from topics_server.http.exchange.deadlines import Deadlines
from topics_server.http.exchange.joined_writes import JoinedWrites
from topics_server.values.limits import KIB, LINGER_BYTES_MAX, LINGER_MS_MAX

# The most bytes that are read and dropped after a request was refused before its end.
SWALLOWED_BYTES_MAX: Final = 256 * KIB


class ConnectionEnd:
    """The end of one connection. `refusal`: the last answer, until it is sent."""

    __slots__ = ("_deadlines", "_swallowed_bytes", "_swallowed_max", "_transport", "refusal")

    def __init__(self, transport: JoinedWrites, deadlines: Deadlines) -> None:
        self._transport = transport
        self._deadlines = deadlines
        self._swallowed_bytes = 0
        self._swallowed_max = SWALLOWED_BYTES_MAX
        self.refusal: bytes | None = None

    def send_refusal(self, now: float) -> None:
        """Send the refusal, and close the write side."""
        refusal, self.refusal = self.refusal, None
        if refusal is not None and not self._transport.is_closing():
            self._transport.write(refusal)
            self.linger(now)

    def linger(self, now: float) -> None:
        """Close the write side, and wait a little for the client to close its own."""
        if not self._deadlines.lingers_since and not self._transport.is_closing():
            self._deadlines.lingers_since = now
            self._transport.finish()

    def receive_for_a_while(self, now: float) -> None:
        """Keep receiving after an upload was refused, so that its client reads the refusal."""
        self._swallowed_bytes = 0
        self._swallowed_max = LINGER_BYTES_MAX
        self._deadlines.lingers_until = now + LINGER_MS_MAX / 1000

    def begin_request(self) -> None:
        """Another request begins: restart the count of dropped bytes."""
        self._swallowed_bytes = 0

    def swallow(self, count: int, now: float, *, is_idle: bool) -> bool:
        """Drop received bytes, up to a bound.

        Returns whether the connection lingers from now on.
        """
        self._swallowed_bytes += count
        self._deadlines.swallowed_at = now
        if self._swallowed_bytes <= self._swallowed_max:
            return False
        if self._deadlines.lingers_since:
            self._transport.abort()
        elif self.refusal is None and is_idle:
            self.linger(now)
            self._swallowed_bytes = 0
            return True
        return False
