"""Who calls, and whether they may: 401 and 403 in one place (§0.2).

`api/http` asks before anything else is looked at: before a body is read, before readiness is told,
before a name is. Where no keys are configured, whoever calls is everybody and may do everything. A
name outside the prefixes is refused in the same words whether or not it exists. Handlers ask
`check_name` for names that are not in the path.
"""

from __future__ import annotations

from typing import Final

from topics_server.api.keys import (
    ANY_KEY,
    EVERYBODY,
    PROBE,
    SCOPE_NAMES,
    Caller,
    KeyRing,
    Recalled,
    bearer_token,
)
from topics_server.errors import Code, TopicsError

_NO_KEY: Final = "this server asks for a key: Authorization: Bearer <key>"
_UNKNOWN_KEY: Final = "the key is not one of this server's"


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
            f'"{name}" is outside of the names that the key may touch',
            {"field": field, "name": name},
        )


def unauthorized(message: str) -> TopicsError:
    """401: no key, or none that is known."""
    return TopicsError(Code.UNAUTHORIZED, message)
