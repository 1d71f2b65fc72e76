"""CORS headers for the listed origins. Pure.

A browser sends its page's `Origin`. The answer to a listed origin repeats that origin, also in
errors and streams, and the page may send the requests that a preflight (`OPTIONS`) allows. Any
other origin gets an answer without CORS headers, which the browser hides from the page. Called by
`api/front_door`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from topics_server.http.error_responses import Headers

# Headers that pages of listed origins may send and read, in addition to the usual ones.
_SENT: Final = (
    b"content-type, authorization, idempotency-key, last-event-id, x-request-id, "
    b"producer-id, producer-epoch, producer-seq, "
    b"if-match, if-none-match, stream-seq, stream-ttl, stream-expires-at, stream-closed, "
    b"stream-forked-from, stream-fork-offset, stream-fork-sub-offset, traceparent"
)
_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"allow, retry-after, x-request-id, producer-epoch, producer-seq, producer-expected-seq, "
    b"producer-received-seq, topic-first-seq, topic-last-seq, "
    b"stream-next-offset, stream-cursor, stream-up-to-date, stream-closed, stream-ttl, "
    b"stream-expires-at, stream-sse-data-encoding, topics-page, topics-tombstone, etag, "
    b"location, content-encoding",
)
# A header of every answer of streams: a page of any site may embed the answers that CORS allows it
# to read.
_EMBEDDABLE: Final = (b"cross-origin-resource-policy", b"cross-origin")
# How long a browser keeps the answer to a preflight.
_MAX_AGE_S: Final = b"600"


def cors_headers(method: str, headers: Mapping[bytes, bytes], answered: Headers) -> Headers:
    """The CORS headers for a page of a listed origin.

    `headers` are those of the request, with `Origin`. `answered` are those of the answer: its
    `Allow` lists the methods of the path.
    """
    cors_lines = ((b"access-control-allow-origin", headers[b"origin"]), (b"vary", b"origin"))
    if method != "OPTIONS" or b"access-control-request-method" not in headers:
        return (*cors_lines, _EXPOSED)
    methods = dict(answered).get(b"allow")
    if methods is None:
        return cors_lines
    return (
        *cors_lines,
        (b"access-control-allow-methods", methods),
        (b"access-control-allow-headers", _SENT),
        (b"access-control-max-age", _MAX_AGE_S),
    )


def stream_headers(method: str, *, is_allowed: bool) -> Headers:
    """The CORS headers below the mount of streams, for every client.

    The preflight of an unlisted origin gets the protocol's headers, but no permission to send
    requests: the official suite sends preflights without an origin.
    """
    if method != "OPTIONS" or is_allowed:
        return (_EMBEDDABLE,)
    return (_EMBEDDABLE, (b"access-control-allow-headers", _SENT))
