"""The bytes of a response's head. Pure.

Most answers share their first lines. The lines that differ come last, so that the first lines can
be cached. Used by `http/connection` and `http/exchange/asgi_exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Final

Header = tuple[bytes, bytes]

# Header fields that differ between answers: a cached head leaves them out.
VARYING: Final = frozenset(
    b"content-length x-request-id "
    b"producer-epoch producer-seq topic-first-seq topic-last-seq "
    b"stream-next-offset stream-cursor etag location".split()
)
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


def head_of(status: int, headers: Sequence[Header]) -> bytes:
    """The head of an answer. Headers that differ between answers come last in `headers`."""
    end = len(headers)
    rest = b"\r\n"
    while end and headers[end - 1][0] in VARYING:
        end -= 1
        rest = b"%b: %b\r\n%b" % (*headers[end], rest)
    return lines_of_head(status, tuple(headers[:end])) + rest


@lru_cache(maxsize=256)
def lines_of_head(status: int, headers: tuple[Header, ...]) -> bytes:
    """The status line and these headers, as lines; cached."""
    return whole_lines(status, headers)


def whole_lines(status: int, headers: Sequence[Header]) -> bytes:
    """The status line and these headers. Raises `ValueError` for a line break in them."""
    head = [b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, "").encode("ascii"))]
    for name, value in headers:
        head += (name, b": ", value, b"\r\n")
    joined = b"".join(head)
    if joined.count(b"\n") != len(headers) + 1 or joined.count(b"\r") != len(headers) + 1:
        raise ValueError("a header of the answer has a line break in it")
    return joined
