"""The checks of a request's head that the parser does not make. Pure.

A head that a proxy and this server could read differently is refused, never repaired: a head has
one host, one length, one coding, and a path as its target. `check_target` and `check_fields` raise
`TopicsError`. `Bounds` limits the size of a head. Called by `http/connection`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import KIB

_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
# Headers that may appear only once: of two values, this server might use one and a proxy the other.
_SAID_ONCE: Final = frozenset(
    b"host content-length content-type content-encoding transfer-encoding authorization expect "
    b"idempotency-key if-match last-event-id origin producer-id producer-epoch producer-seq "
    b"sec-fetch-site sec-websocket-key sec-websocket-version upgrade "
    b"stream-closed stream-expires-at stream-fork-offset stream-fork-sub-offset "
    b"stream-forked-from stream-seq stream-ttl "
    b"x-request-id".split()
)
_TRACE: Final = b"traceparent"
_SCHEME: Final = b"http://"
# A path without escapes and without a query, which needs no parsing.
_PLAIN_PATH: Final = re.compile(rb"(?:/[A-Za-z0-9._:-]+)+")
_SOCKET_KEY: Final = re.compile(rb"[A-Za-z0-9+/]{21}[AQgw]==")


class Bounds(msgspec.Struct, frozen=True):
    """Limits of a head: bytes of its target; lines and bytes of its fields."""

    url_bytes: int = 8 * KIB
    header_count: int = 100
    header_bytes: int = 64 * KIB

    @property
    def small_bytes(self) -> int:
        """Input up to this size is within the bounds, except for the number of its fields."""
        return min(self.url_bytes, self.header_bytes)


def too_long_target(bounds: Bounds) -> TopicsError:
    """The error 414."""
    most = bounds.url_bytes
    return TopicsError(
        Code.URI_TOO_LONG,
        f"the request target is longer than {most} bytes",
        {"limit": "max_url_bytes", "max": most},
    )


def too_large_fields(limit: str, most: int) -> TopicsError:
    """The error 431; `limit` names the setting."""
    return TopicsError(
        Code.HEADERS_TOO_LARGE,
        f"the request's header fields exceed the limit of {most}",
        {"limit": limit, "max": most},
    )


def check_size(url: bytes, headers: Sequence[tuple[bytes, bytes]], bounds: Bounds) -> None:
    """Refuse a head that is over a bound."""
    if len(url) > bounds.url_bytes:
        raise too_long_target(bounds)
    if len(headers) > bounds.header_count:
        raise too_large_fields("max_headers", bounds.header_count)
    if size_of(headers) > bounds.header_bytes:
        raise too_large_fields("max_header_bytes", bounds.header_bytes)


def size_of(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """The sent bytes of header fields, without blanks around the values."""
    return sum(len(name) + len(value) + 4 for name, value in headers)


def is_plain_target(url: bytes) -> bool:
    """Whether a target is a path without a query and without escapes."""
    return _PLAIN_PATH.fullmatch(url) is not None


def upgrade_of(fields: Mapping[bytes, bytes]) -> bytes:
    """The protocol that a head's `Upgrade` requests, in lower case; empty if none."""
    tokens = fields.get(b"connection", b"").lower().split(b",")
    if b"upgrade" not in [token.strip() for token in tokens]:
        return b""
    return fields.get(b"upgrade", b"").lower()


@lru_cache(maxsize=64)
def is_host(value: bytes) -> bool:
    """Whether this is a host with or without a port."""
    return _HOST.fullmatch(value) is not None


def no_host() -> TopicsError:
    """The error 400 for a `Host` that is no host, with or without a port.

    The message does not repeat its value.
    """
    return invalid("the Host header does not name a host", "Host")


def check_once(headers: Sequence[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> None:
    """Refuse a head that repeats a field which may appear only once.

    `fields` are the `headers` by name. A `traceparent` that is sent twice is removed from `fields`.
    """
    if len(fields) == len(headers):
        return
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in seen and name in _SAID_ONCE:
            raise invalid(f"{name.decode('latin-1')} is sent twice", "header")
        if name in seen and name == _TRACE:
            fields.pop(name, None)
        seen.add(name)


def check_fields(
    headers: Sequence[tuple[bytes, bytes]], fields: dict[bytes, bytes], version: str
) -> None:
    """Refuse contradictory fields, or fields that leave the request's end open.

    `fields` are the `headers` by name.
    """
    check_once(headers, fields)
    host = fields.get(b"host")
    if host is None and version == "1.1":
        raise invalid("the Host header is missing", "Host")
    if host is not None and not is_host(host):
        raise no_host()
    coding = fields.get(b"transfer-encoding")
    if coding is not None and (version == "1.0" or coding.lower() != b"chunked"):
        raise invalid("Transfer-Encoding must be chunked, in HTTP/1.1", "Transfer-Encoding")


def check_opening(method: bytes, version: str, fields: Mapping[bytes, bytes]) -> None:
    """Refuse a WebSocket opening with an unsupported version, or with another upgrade."""
    if fields.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in fields:
        raise invalid("a WebSocket handshake must not have a body")
    if method != b"GET" or version != "1.1":
        raise invalid("a WebSocket handshake must be a GET in HTTP/1.1")
    if fields.get(b"sec-websocket-version") != b"13":
        raise invalid("Sec-WebSocket-Version must be 13", "Sec-WebSocket-Version")
    if _SOCKET_KEY.fullmatch(fields.get(b"sec-websocket-key", b"")) is None:
        raise invalid("Sec-WebSocket-Key must be 16 bytes in base64", "Sec-WebSocket-Key")


def check_target(url: bytes, version: str, host: bytes | None) -> bytes:
    """The target as path and query; a whole URL must name this host."""
    if version not in ("1.0", "1.1"):
        raise invalid("the protocol must be HTTP/1.1 or HTTP/1.0")
    if b"#" in url:
        raise invalid("the target must not have a fragment")
    if not url.isascii():
        raise invalid("the request target must be ASCII: percent-encode the rest")
    if url[: len(_SCHEME)].lower() == _SCHEME:
        authority, slash, rest = url[len(_SCHEME) :].partition(b"/")
        if host is None or authority.lower() != host.lower():
            raise invalid("the request target and the Host header name different hosts", "Host")
        url = slash + rest
    if url[:1] != b"/":
        raise invalid("the target must be a path")
    return url
