"""Decides whether a caller may do what it asks: 401 and 403 (§0.2). Pure.

`api/application` asks before anything else is looked at: before a body is read, before readiness is
told, before a name is. Where no keys are configured, whoever calls is everybody and may do
everything. A name outside the prefixes is refused in the same words whether or not it exists.
Handlers ask `check_name` for names that are not in the path.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Mapping
from typing import Final

from topics_server.auth.api_keys import (
    ANY_KEY,
    EVERYBODY,
    PROBE,
    SCOPE_NAMES,
    Caller,
    KeyRing,
    Recalled,
    bearer_token,
)
from topics_server.auth.tickets import Tickets
from topics_server.values.errors import Code, TopicsError, clipped
from topics_server.values.query_string import parse_query

_NO_KEY: Final = "this server requires a key: send Authorization: Bearer <key>"
_UNKNOWN_KEY: Final = "this server does not know the key"
_UNKNOWN_TICKET: Final = "the ticket has been used, has expired, or is for another session"
# The subprotocol that a WebSocket speaks, and the one that carries a key: it is never selected.
SUBPROTOCOL: Final = "topics.v0"
_KEY_SUBPROTOCOL: Final = "topics.bearer."


def authorized(
    ring: KeyRing, authorization: bytes | None, need: int, recalled: Recalled | None = None
) -> Caller:
    """Who presents this header, if they may do what `need` says.

    `need`: scopes, or `ANY_KEY`, or `PROBE`. Raises `unauthorized`, `forbidden`.
    """
    if not ring.is_on or (need == PROBE and not ring.covers_probes):
        return EVERYBODY
    caller = identified(ring, bearer_token(authorization), recalled)
    check_scopes(caller, max(need, ANY_KEY))
    return caller


def authorized_stream(
    ring: KeyRing,
    tickets: Tickets,
    headers: Mapping[bytes, bytes],
    query: bytes,
    wid: str,
    need: int,
    now_ms: float,
) -> Caller:
    """The same for the GET of a stream, where the query may hold `token` or, of `wid`, `ticket`.

    A header counts before both. Raises `unauthorized`, `forbidden`; `invalid_request` for a query
    that is none.
    """
    authorization = headers.get(b"authorization")
    if not ring.is_on or authorization is not None or not query:
        return authorized(ring, authorization, need)
    asked = parse_query(query)
    ticket = asked.get("ticket") if wid else None
    if ticket is not None:
        caller = tickets.redeem(ticket, wid, now_ms)
        if caller is None or caller.key not in ring.keys:
            raise unauthorized(_UNKNOWN_TICKET)
        caller = caller.key.caller
    else:
        token = asked.get("token", "").encode("utf-8", "surrogatepass")
        caller = identified(ring, token or None)
    check_scopes(caller, need)
    return caller


def authorized_socket(
    ring: KeyRing, headers: Mapping[bytes, bytes], subprotocols: Iterable[str]
) -> Caller:
    """The same for a WebSocket's opening, which a browser sends with a subprotocol only.

    `topics.bearer.<base64url of the key>`. Raises `unauthorized`.
    """
    authorization = headers.get(b"authorization")
    if not ring.is_on or authorization is not None:
        return authorized(ring, authorization, ANY_KEY)
    return identified(ring, _subprotocol_token(subprotocols))


def _subprotocol_token(subprotocols: Iterable[str]) -> bytes | None:
    for offered in subprotocols:
        if offered.startswith(_KEY_SUBPROTOCOL):
            coded = offered.removeprefix(_KEY_SUBPROTOCOL)
            try:
                return urlsafe_b64decode(coded + "=" * (-len(coded) % 4)) or None
            except (binascii.Error, ValueError):
                return None
    return None


def identified(ring: KeyRing, token: bytes | None, recalled: Recalled | None = None) -> Caller:
    """Whose token this is. Raises `unauthorized`."""
    if token is None:
        raise unauthorized(_NO_KEY)
    caller = ring.find(token, recalled)
    if caller is None:
        raise unauthorized(_UNKNOWN_KEY)
    return caller


def check_scopes(caller: Caller, scopes: int) -> None:
    """Raises `forbidden` with the scopes that are missing."""
    if caller.scopes & scopes == scopes:
        return
    missing = [name for name, scope in SCOPE_NAMES.items() if scope & scopes & ~caller.scopes]
    raise TopicsError(
        Code.FORBIDDEN, f"the key lacks the scope {' and '.join(missing)}", {"scopes": missing}
    )


def check_name(caller: Caller, name: str, field: str) -> None:
    """Raises `forbidden` for a name outside the prefixes; `field` says where it was sent."""
    if not caller.may_name(name):
        raise TopicsError(
            Code.FORBIDDEN,
            f'"{clipped(name)}" is outside of the names that the key may touch',
            {"field": field, "name": name},
        )


def unauthorized(message: str) -> TopicsError:
    """401: no key, or none that is known."""
    return TopicsError(Code.UNAUTHORIZED, message)
