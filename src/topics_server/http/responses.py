"""A response of known length.

The lines that differ between answers come last in a head: the answer's own lines, the request's id,
the length of the body. All bytes before them are the same for each kind of answer. `api/front_door`
and `api/direct` both render answers with this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from topics_server.http.content_encoding import JSON_TYPE, accepts_gzip
from topics_server.http.error_responses import Headers
from topics_server.http.request_ids import NAME as REQUEST_ID

# Statuses of answers that have no body, not even an empty one.
BODILESS: Final = (204, 304)
# For smaller bodies, gzip saves too little for its time.
DEFLATED_BYTES_MIN: Final = 256
# Matches `performance` at the very end of an answer, where no member of a record can be.
_PERFORMANCE: Final = re.compile(rb',"performance":\{[^{}]*\}\}\Z')
_PERFORMANCE_BYTES_MAX: Final = 1024
_ID: Final = b"%b" + REQUEST_ID + b": %b"
# The result of `last_lines` for an answer with a body: its own lines, the id, the length.
ID_AND_LENGTH: Final = _ID + b"\r\ncontent-length: %d"


class Response(msgspec.Struct, frozen=True, gc=False):
    """One response. `headers` are those besides content type (empty: none), length and encoding.

    A handler may pass the body as `pieces` instead. `varying`: header lines (`lines_of`) whose
    values differ between answers of this kind.
    """

    status: int
    body: bytes
    headers: Headers = ()
    content_type: bytes = JSON_TYPE
    pieces: Sequence[bytes | memoryview] = ()
    varying: bytes = b""


def as_preferred(response: Response, headers: Mapping[bytes, bytes], raw_path: bytes) -> Response:
    """The answer without `performance`, for a client that prefers `return=minimal` (RFC 7240).

    Only for `/v0`: a stream's content is never changed.
    """
    wanted = headers[b"prefer"].lower().replace(b" ", b"")
    if b"return=minimal" not in wanted.replace(b";", b",").split(b","):
        return response
    if response.content_type != JSON_TYPE or not raw_path.startswith(b"/v0/"):
        return response
    body = b"".join(response.pieces) if response.pieces else response.body
    found = _PERFORMANCE.search(body, max(0, len(body) - _PERFORMANCE_BYTES_MAX))
    if found is None:
        return response
    return msgspec.structs.replace(
        response,
        body=body[: found.start()] + b"}",
        pieces=(),
        headers=(*response.headers, (b"preference-applied", b"return=minimal")),
    )


def lines_of(*headers: tuple[bytes, bytes]) -> bytes:
    """Headers as lines of a head."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def wants_gzip(size: int, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a body of this size is compressed for a client with these headers."""
    return size >= DEFLATED_BYTES_MIN and accepts_gzip(headers.get(b"accept-encoding"))


def tell_of_kind(
    headers: list[tuple[bytes, bytes]], response: Response, *, is_packed: bool
) -> None:
    """Add the headers that describe the kind of body."""
    if response.content_type and response.status not in BODILESS:
        headers.append((b"content-type", response.content_type))
    if is_packed:
        headers += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]


def last_lines(response: Response, size: int, request_id: bytes) -> bytes:
    """The lines that differ between answers: its own lines, the request's id, the body's length.

    The last line has no line break.
    """
    if response.status in BODILESS:
        return _ID % (response.varying, request_id)
    return ID_AND_LENGTH % (response.varying, request_id, size)


def tell_of_body(
    headers: list[tuple[bytes, bytes]],
    response: Response,
    size: int,
    request_id: bytes,
    *,
    is_packed: bool,
) -> None:
    """Add the headers of a body that is sent with `size` bytes."""
    tell_of_kind(headers, response, is_packed=is_packed)
    for line in last_lines(response, size, request_id).split(b"\r\n"):
        name, _, value = line.partition(b": ")
        headers.append((name, value))
