"""The requests of every HTTP client of this package, and how each reads an answer.

Called by `blocking_client`, `coroutine_client` and the readers of event streams.
"""

from __future__ import annotations

import re
import ssl
from typing import Final, TypeVar

import httpx
import msgspec

from topics_server.client import calls
from topics_server.client.addresses import checked_token
from topics_server.client.calls import Call
from topics_server.client.errors import (
    BadAnswer,
    ClientError,
    NotFound,
    Unavailable,
    Unreachable,
    refusal,
)

T = TypeVar("T")
TIMEOUT_MS: Final = 30_000
PATIENCE_MS: Final = 10_000
# How long a follower waits for a server that is away.
LIVE_RETRY_MS: Final = 3_600_000
# A stream sends something every 15 s. If it is silent for two such intervals, its connection is
# dead.
SILENCE_MS: Final = 35_000
# Shorter than `sources.OPENING_MS`, to tell an absent server from a proxy that holds streams back.
CONNECT_MS: Final = 4000
JSON_BODY: Final = {"Content-Type": "application/json"}
# No limit of connections: calls that wait for the server must not block other calls.
LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=64)


class _Trouble(msgspec.Struct):
    code: int
    error: str = ""
    retry_after_ms: int | None = None


_read_trouble: Final = calls.reader(_Trouble)


def headers(token: str | None) -> dict[str, str]:
    """The headers of every request. Raises `ValueError` for a token that no header can carry."""
    token = checked_token(token)
    # Ask for an uncompressed response: compression would buffer a stream's frames.
    found = {"Accept": "application/json", "Accept-Encoding": "identity"}
    return {**found, "Authorization": f"Bearer {token}"} if token else found


def verified(url: str) -> ssl.SSLContext | bool:
    """The trusted certificates: the machine's, or those of SSL_CERT_FILE.

    False for a URL without TLS; loading certificates takes tens of milliseconds.
    """
    return ssl.create_default_context() if url.startswith("https:") else False


def failure(error: httpx.RequestError, url: str) -> ClientError:
    """The error of a request that got no complete answer."""
    if not isinstance(error, httpx.TransportError):
        return BadAnswer(f"{url}: the answer is not from a topics server: {error}")
    sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    if isinstance(error, httpx.TimeoutException):
        words = f"{url} did not answer" if sent else f"cannot connect to {url}: no answer"
        return Unreachable(f"{words} {_within(error)}", sent=sent)
    reason = re.sub(r"\[Errno -?[0-9]+\] ", "", str(error)) or type(error).__name__
    words = f"the connection to {url} broke" if sent else f"cannot connect to {url}"
    return Unreachable(f"{words}: {reason}", sent=sent)


def _within(error: httpx.TimeoutException) -> str:
    """The exceeded timeout, in words."""
    phases = ((httpx.ConnectTimeout, "connect"), (httpx.WriteTimeout, "write"))
    name = next((name for kind, name in phases if isinstance(error, kind)), "read")
    try:
        seconds = error.request.extensions["timeout"][name]
    except (RuntimeError, KeyError, TypeError):
        seconds = None  # an error without a request, or a transport without timeouts
    return "in time" if seconds is None else f"within {seconds:g} s"


def is_worn(error: httpx.RequestError) -> bool:
    """Whether the error may come from a kept connection that the server had closed."""
    if not isinstance(error, httpx.TransportError):
        return False
    return not isinstance(error, httpx.TimeoutException | httpx.ConnectError)


def answer_of(response: httpx.Response, call: Call[T], *, may_be_done: bool) -> T:
    """The value of a 2xx response; raises the error of any other.

    `may_be_done`: the server may have executed an earlier try of this call.
    """
    if not response.is_success:
        retry_after = response.headers.get("Retry-After")
        error = refusal(response.status_code, retry_after, response.content)
        if may_be_done and call.is_removal and isinstance(error, NotFound):
            return call.read(b"")
        raise error
    if call.read_headers is not None:
        return call.read_headers(response.headers, response.content)
    return call.read(response.content)


def stream_error(payload: bytes, last: ClientError) -> ClientError:
    """The error in a stream's last frame; None for a 429, which is advice and does not end the
    stream.
    """
    trouble = _read_trouble(payload)
    if trouble.code == 429:
        return last
    # Opening the stream again returns the error as an HTTP status.
    code = f"stream_{trouble.code}"
    return Unavailable(trouble.code, code, trouble.error, None, trouble.retry_after_ms)
