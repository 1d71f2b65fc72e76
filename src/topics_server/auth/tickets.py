"""Single-use tickets that open one watch session's stream without a key. Pure.

A browser's `EventSource` cannot send a key in a header, and a key in a URL leaks. So a client that
opens a session can request a ticket for its stream. A ticket is random, and valid once, for one
minute, for that session only, with the rights of the key. Only digests of tickets are kept. Called
by `api/watch/handlers` (issue) and `auth/authorize` (redeem); loop thread only. Times in ms of the
monotonic clock.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from topics_server.auth.api_keys import Caller

TICKET_TTL_MS: Final = 60_000
# The most unused tickets; beyond this number the oldest are dropped.
_TICKETS_MAX: Final = 10_000


class Tickets:
    """The tickets that are not redeemed yet."""

    def __init__(self) -> None:
        # Session id, caller and expiry time by the ticket's digest; the oldest come first.
        self._open: OrderedDict[bytes, tuple[str, Caller, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, ticket: str, wid: str, caller: Caller, now_ms: float) -> None:
        """Store `ticket`, a random text, for the stream of this session."""
        self._forget(now_ms)
        if len(self._open) >= _TICKETS_MAX:
            self._open.popitem(last=False)
        self._open[_digest(ticket)] = (wid, caller, now_ms + TICKET_TTL_MS)

    def redeem(self, ticket: str, wid: str, now_ms: float) -> Caller | None:
        """The caller of a ticket; None if it is not valid for this session. Uses the ticket up."""
        self._forget(now_ms)
        found = self._open.pop(_digest(ticket), None)
        if found is None or found[0] != wid:
            return None
        return found[1]

    def _forget(self, now_ms: float) -> None:
        while self._open:
            digest, (_, _, until_ms) = next(iter(self._open.items()))
            if until_ms > now_ms:
                return
            del self._open[digest]


def _digest(ticket: str) -> bytes:
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).digest()
