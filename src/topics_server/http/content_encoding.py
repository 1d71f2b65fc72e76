"""Content types and encodings: gzip in and out. Pure.

Inflating never builds more bytes than the body limit. Called by `api/request_body` and
`api/front_door`, off the event loop for a large body.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

from topics_server.http.error_responses import too_large
from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import GZIP_MEMBERS_MAX, KIB

JSON_TYPE: Final = b"application/json"
MERGE_PATCH_TYPE: Final = b"application/merge-patch+json"
_INFLATE_STEP_BYTES: Final = 256 * KIB
_PACKED_STEP_BYTES: Final = 16 * KIB
_FREED_PARTS: Final = 8
_GZIP_WBITS: Final = 31
_GZIP_LEVEL: Final = 1


def is_json_type(value: bytes | None) -> bool:
    """Whether a Content-Type is JSON, in upper or lower case, with any parameters."""
    if value is None:
        return False
    return value == JSON_TYPE or value.partition(b";")[0].strip().lower() == JSON_TYPE


def is_merge_patch(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a body's Content-Type is JSON merge patch; only PATCH accepts it."""
    value = headers.get(b"content-type") if method == "PATCH" else None
    return value is not None and value.partition(b";")[0].strip().lower() == MERGE_PATCH_TYPE


def inflate(packed: bytes, max_bytes: int) -> bytes:
    """A gzip body (of one or more members), at most `max_bytes` long when inflated."""
    parts: list[bytes] = []
    size = at = members = 0
    view = memoryview(packed)
    try:
        while at < len(view):
            members += 1
            if members > GZIP_MEMBERS_MAX:
                raise invalid(
                    f"the gzip body has more than {GZIP_MEMBERS_MAX} members", "Content-Encoding"
                )
            member = zlib.decompressobj(_GZIP_WBITS)
            while not member.eof:
                # Each step copies the unread rest of its piece, so use small pieces.
                piece = view[at : at + _PACKED_STEP_BYTES]
                part = member.decompress(piece, _INFLATE_STEP_BYTES)
                at += len(piece) - len(member.unconsumed_tail) - len(member.unused_data)
                size += len(part)
                if size > max_bytes:
                    raise too_large(max_bytes)
                if not part and not piece and not member.eof:
                    raise invalid("the gzip body is truncated", "Content-Encoding")
                parts.append(part)
    except zlib.error:
        raise invalid("the body is not gzip", "Content-Encoding") from None
    return joined(parts)


def joined(parts: list[bytes]) -> bytes:
    """Join the parts and empty their list. A thread runs this for large bodies.

    Python joins large parts without the interpreter's lock. The parts are freed a few at a time:
    freeing all in one call would hold the lock for longer than a loop turn may take.
    """
    whole = parts[0] if len(parts) == 1 else b"".join(parts)
    while parts:
        del parts[-_FREED_PARTS:]
    return whole


def inflate_some(packed: bytes, some_bytes: int) -> bytes | None:
    """Inflate a gzip body. Returns None if the body or its content is longer than `max_bytes`.

    Raises the errors of `inflate`, except for a body that is too large.
    """
    if len(packed) > some_bytes:
        return None
    try:
        return inflate(packed, some_bytes)
    except TopicsError as error:
        if error.code is Code.PAYLOAD_TOO_LARGE:
            return None
        raise


def accepts_gzip(value: bytes | None) -> bool:
    """Whether `Accept-Encoding` names gzip with a weight above 0."""
    if value is None or b"gzip" not in (value := value.lower()):
        return False
    for offer in value.split(b","):
        coding, _, parameters = offer.partition(b";")
        if coding.strip() in (b"gzip", b"x-gzip"):
            weight = parameters.strip().removeprefix(b"q=").strip()
            # Only zeros: "0", "0.0", "0.000".
            return not weight or weight.strip(b"0.") != b""
    return False


def deflate(body: bytes) -> bytes:
    """The body as gzip, at the fastest level."""
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WBITS)
    return packer.compress(body) + packer.flush()
