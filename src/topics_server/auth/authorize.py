"""Decides whether a caller has the rights for a request: 401 and 403 (§0.2). Pure.

`api/front_door` calls it first, before it reads a body, checks readiness or checks a name.
Without configured keys every caller may do everything. A name outside the prefixes gets the same
error whether or not it exists. Handlers call `check_name` for names that are not in the path.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Mapping
from typing import Final

from topics_server.auth import live_tickets
from topics_server.auth.api_keys import (
    ANY_KEY,
    EVERYBODY,
    PROBE,
    Caller,
    KeyRing,
    Recalled,
    bearer_token,
)
from topics_server.auth.tickets import Tickets
from topics_server.values.errors import Code, TopicsError, clipped
from topics_server.values.texts.key_list import SCOPE_NAMES
from topics_server.values.texts.query_string import parse_query

_NO_KEY: Final = "this server requires a key: send Authorization: Bearer <key>"
_UNKNOWN_KEY: Final = "this server does not know the key"
_UNKNOWN_TICKET: Final = "the ticket has been used, has expired, or is for another session"
_UNKNOWN_LIVE_TICKET: Final = (
    "the ticket has expired, its key was revoked, or it is for another stream"
)
# The subprotocol of WebSockets. The second one only carries a key, and is never selected.
SUBPROTOCOL: Final = "topics.v0"
_KEY_SUBPROTOCOL: Final = "topics.bearer."


def authorized(
    key_ring: KeyRing, authorization: bytes | None, need: int, recalled: Recalled | None = None
) -> Caller:
    """The caller of this `Authorization` header, if it has the rights that `need` names.

    `need`: scopes, or `ANY_KEY`, or `PROBE`. Raises `unauthorized`, `forbidden`.
    """
    if not key_ring.is_on or (need == PROBE and not key_ring.covers_probes):
        return EVERYBODY
    caller = identified(key_ring, bearer_token(authorization), recalled)
    check_scopes(caller, max(need, ANY_KEY))
    return caller


def authorized_stream(
    key_ring: KeyRing,
    tickets: Tickets,
    headers: Mapping[bytes, bytes],
    query: bytes,
    wid: str,
    need: int,
    now_ms: float,
) -> Caller:
    """The caller of a stream's GET, whose query may hold `token` or, for session `wid`, `ticket`.

    A header wins over both. Raises `unauthorized`, `forbidden`, or `invalid_request` for a
    malformed query.
    """
    authorization = headers.get(b"authorization")
    if not key_ring.is_on or authorization is not None or not query:
        return authorized(key_ring, authorization, need)
    asked = parse_query(query)
    ticket = asked.get("ticket") if wid else None
    if ticket is not None:
        caller = tickets.redeem(ticket, wid, now_ms)
        if caller is None or caller.key not in key_ring.keys:
            raise unauthorized(_UNKNOWN_TICKET)
        caller = caller.key.caller
    else:
        token = asked.get("token", "").encode("utf-8", "surrogatepass")
        caller = identified(key_ring, token or None)
    check_scopes(caller, need)
    return caller


def authorized_live(
    key_ring: KeyRing,
    headers: Mapping[bytes, bytes],
    query: bytes,
    topic: str,
    need: int,
    now_ms: int,
) -> Caller:
    """The caller of a live stream's GET, whose query may hold `token` or `ticket`.

    `topic` is the topic in the path; `now_ms` is by the wall clock. A header wins over both. Raises
    `unauthorized`, `forbidden`, or `invalid_request` for a malformed query.
    """
    authorization = headers.get(b"authorization")
    if not key_ring.is_on or authorization is not None or not query:
        return authorized(key_ring, authorization, need)
    asked = parse_query(query)
    if "ticket" in asked:
        subscription = live_tickets.subscription_of(topic, query)
        caller = live_tickets.redeem(key_ring, asked["ticket"], subscription, now_ms)
        if caller is None:
            raise unauthorized(_UNKNOWN_LIVE_TICKET)
    else:
        token = asked.get("token", "").encode("utf-8", "surrogatepass")
        caller = identified(key_ring, token or None)
    check_scopes(caller, need)
    return caller


def authorized_socket(
    key_ring: KeyRing, headers: Mapping[bytes, bytes], subprotocols: Iterable[str]
) -> Caller:
    """The caller of a WebSocket's opening; a browser sends its key as a subprotocol.

    The subprotocol is `topics.bearer.<base64url of the key>`. Raises `unauthorized`.
    """
    authorization = headers.get(b"authorization")
    if not key_ring.is_on or authorization is not None:
        return authorized(key_ring, authorization, ANY_KEY)
    return identified(key_ring, _subprotocol_token(subprotocols))


def _subprotocol_token(subprotocols: Iterable[str]) -> bytes | None:
    for offered in subprotocols:
        if offered.startswith(_KEY_SUBPROTOCOL):
            coded = offered.removeprefix(_KEY_SUBPROTOCOL)
            try:
                return urlsafe_b64decode(coded + "=" * (-len(coded) % 4)) or None
            except (binascii.Error, ValueError):
                return None
    return None


def identified(key_ring: KeyRing, token: bytes | None, recalled: Recalled | None = None) -> Caller:
    """The rights of this token. Raises `unauthorized`."""
    if token is None:
        raise unauthorized(_NO_KEY)
    caller = key_ring.find(token, recalled)
    if caller is None:
        raise unauthorized(_UNKNOWN_KEY)
    return caller


def check_scopes(caller: Caller, scopes: int) -> None:
    """Raise `forbidden` with the missing scopes."""
    if caller.scopes & scopes == scopes:
        return
    missing = [name for name, scope in SCOPE_NAMES.items() if scope & scopes & ~caller.scopes]
    raise TopicsError(
        Code.FORBIDDEN, f"the key lacks the scope {' and '.join(missing)}", {"scopes": missing}
    )


def check_name(caller: Caller, name: str, field: str) -> None:
    """Raise `forbidden` for a name outside the prefixes; `field` names its source."""
    if not caller.may_name(name):
        raise TopicsError(
            Code.FORBIDDEN,
            f'the key gives no access to "{clipped(name)}"',
            {"field": field, "name": name},
        )


def unauthorized(message: str) -> TopicsError:
    """The error 401: no key, or an unknown key."""
    return TopicsError(Code.UNAUTHORIZED, message)
