"""Content types and content codings: what a body is, inflating and deflating it. Pure.

Inflating is bounded: nothing larger than the body limit is ever built. Called by `api/http`, off
the event loop where a body is large.
"""

from __future__ import annotations

import zlib
from typing import Final

from topics_server.api.problems import too_large
from topics_server.errors import invalid
from topics_server.limits import KIB

JSON_TYPE: Final = b"application/json"
_INFLATE_STEP_BYTES: Final = 256 * KIB
_GZIP_WBITS: Final = 31
_GZIP_LEVEL: Final = 1


def is_json_type(value: bytes | None) -> bool:
    """Whether a Content-Type is JSON: in any case, with any parameters."""
    if value is None:
        return False
    return value == JSON_TYPE or value.partition(b";")[0].strip().lower() == JSON_TYPE


def inflate(packed: bytes, max_bytes: int) -> bytes:
    """A gzip body (of one or more members), at most `max_bytes` long when inflated."""
    parts: list[bytes] = []
    size = 0
    rest = packed
    try:
        while rest:
            member = zlib.decompressobj(_GZIP_WBITS)
            while not member.eof:
                part = member.decompress(rest, _INFLATE_STEP_BYTES)
                rest = member.unconsumed_tail
                size += len(part)
                if size > max_bytes:
                    raise too_large(max_bytes)
                if not part and not rest and not member.eof:
                    raise invalid("the gzip body ends too early", "Content-Encoding")
                parts.append(part)
            rest = member.unused_data
    except zlib.error:
        raise invalid("the body is not gzip", "Content-Encoding") from None
    return b"".join(parts)


def accepts_gzip(value: bytes | None) -> bool:
    """Whether gzip is asked for by name, with a weight above 0."""
    if value is None or b"gzip" not in (value := value.lower()):
        return False
    for offer in value.split(b","):
        coding, _, parameters = offer.partition(b";")
        if coding.strip() in (b"gzip", b"x-gzip"):
            weight = parameters.strip().removeprefix(b"q=").strip()
            # Nothing but zeros: "0", "0.0", "0.000".
            return not weight or weight.strip(b"0.") != b""
    return False


def deflate(body: bytes) -> bytes:
    """The body as gzip, at the fastest level."""
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WBITS)
    return packer.compress(body) + packer.flush()
