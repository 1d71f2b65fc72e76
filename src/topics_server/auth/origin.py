"""Decides from which web pages a browser may call this server (CSRF rule). Pure.

Any page can make a browser send some requests to any server: an image's GET, a form's POST, a POST
of plain text. A server without keys can distinguish its own pages from foreign ones only by headers
that the browser adds and no page can forge: `Sec-Fetch-Site` and `Origin`. The rule applies to
requests that change something: POST, PUT, PATCH, DELETE, a GET that claims jobs (`/work`), a GET
with `touch=true` or `ack=auto`, and the opening of a WebSocket.

    1  the request has a valid `Authorization`, or its `Origin` is listed     allowed
    2  `Sec-Fetch-Site` is `same-origin` or `none`                            allowed
       `Sec-Fetch-Site` is `cross-site` or `same-site`                        refused
    3  there is an `Origin`       allowed if it is the `Host`'s; `null` never is
    4  there is neither, as from curl and SDKs                                allowed

Called by `api/front_door` for both ways of a request, and by `api/websocket/handlers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import ECHO_BYTES_MAX
from topics_server.values.texts.query_string import parse_query

_CHANGING: Final = frozenset(("POST", "PUT", "PATCH", "DELETE"))
_OWN_SITES: Final = frozenset((b"same-origin", b"none"))
_OTHER_SITES: Final = frozenset((b"cross-site", b"same-site"))
_OWN_PORTS: Final = {b"http": b":80", b"https": b":443"}


def is_allowed(
    origin: bytes | None,
    fetch_site: bytes | None,
    host: bytes | None,
    *,
    allowed: frozenset[bytes],
    is_authorized: bool,
) -> bool:
    """The rule: whether a request that changes something is allowed from this origin."""
    if is_authorized or origin in allowed:
        return True
    if fetch_site in _OWN_SITES:
        return True
    if fetch_site in _OTHER_SITES:
        return False
    return origin is None or (host is not None and _is_same(origin, host))


def is_concerned(method: str, query: bytes, *, claims: bool) -> bool:
    """Whether the rule applies to a request. `claims`: a GET of its path leases jobs.

    Raises `invalid_request` for a malformed query.
    """
    if method in _CHANGING:
        return True
    if method not in ("GET", "HEAD"):
        return False
    # A parameter's name may be escaped, so parse the query if it contains any of these bytes.
    if claims or not (b"touch" in query or b"ack" in query or b"%" in query):
        return claims
    asked = parse_query(query)
    return asked.get("touch") == "true" or asked.get("ack") == "auto"


def check_origin(
    headers: Mapping[bytes, bytes], allowed: frozenset[bytes], *, is_authorized: bool
) -> None:
    """Raise `forbidden` for a request that the rule does not allow."""
    origin, fetch_site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    host = headers.get(b"host")
    if is_allowed(origin, fetch_site, host, allowed=allowed, is_authorized=is_authorized):
        return
    claimed = {"origin": origin, "sec_fetch_site": fetch_site}
    raise TopicsError(
        Code.FORBIDDEN,
        "this origin may not call the server; TOPICS_CORS_ORIGINS lists the origins that may",
        {
            name: sent[:ECHO_BYTES_MAX].decode("latin-1")
            for name, sent in claimed.items()
            if sent is not None
        },
    )


def _is_same(origin: bytes, host: bytes) -> bool:
    """Whether a page's origin is this server, also if a proxy terminates TLS."""
    scheme, _, authority = origin.lower().partition(b"://")
    own_port = _OWN_PORTS.get(scheme)
    if own_port is None or not authority:
        return False
    return authority == host.lower().removesuffix(own_port)
