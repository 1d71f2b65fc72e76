"""Tickets that open one live stream without a key, and again after each disconnect. Pure.

A ticket is bound to its stream's topics, filters and options, to a key and to a time. It is signed
with a secret that is derived from the key's digest. So the server stores nothing: a ticket stays
valid after a restart, and ends with its key. Called by `api/live/handlers` (issue) and
`auth/authorize` (redeem). Times in ms of the wall clock.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from topics_server.auth.api_keys import Caller, Key, KeyRing
from topics_server.values.texts.query_string import parse_query

LIVE_TICKET_TTL_MS: Final = 3_600_000
_FORM: Final = re.compile(r"live_([0-9a-f]{1,16})_([0-9a-f]{32})_([0-9a-f]{64})")
_SECRET: Final = b"topics live ticket\0"
# Parameters that do not belong to the subscription: the client's proof, and its position.
_ASIDE: Final = frozenset(("ticket", "token", "cursor"))


def subscription_of(topic: str, query: bytes) -> bytes:
    """The subscription of a ticket: the topic of the path, and the query in any order.

    Of a repeated parameter the first value counts, as in the stream's own request.
    """
    pairs = sorted(pair for pair in parse_query(query).items() if pair[0] not in _ASIDE)
    return repr((topic, pairs)).encode("utf-8", "surrogatepass")


def issue(key: Key, subscription: bytes, now_ms: int) -> str:
    """Make a ticket of this key."""
    until_ms = now_ms + LIVE_TICKET_TTL_MS
    return f"live_{until_ms:x}_{key.owner}_{_signature(key, subscription, until_ms)}"


def redeem(key_ring: KeyRing, ticket: str, subscription: bytes, now_ms: int) -> Caller | None:
    """The caller of a ticket; None if it is not valid for this subscription now.

    The ticket stays valid.
    """
    found = _FORM.fullmatch(ticket)
    if found is None:
        return None
    until_ms = int(found[1], 16)
    for key in key_ring.keys:
        if key.owner == found[2]:
            signature = _signature(key, subscription, until_ms)
            is_valid = hmac.compare_digest(signature, found[3]) and now_ms < until_ms
            return key.caller if is_valid else None
    return None


def _signature(key: Key, subscription: bytes, until_ms: int) -> str:
    secret = hashlib.sha256(_SECRET + key.digest).digest()
    return hmac.new(secret, b"%d\0%b" % (until_ms, subscription), "sha256").hexdigest()
