"""Measures the depth and size of JSON without decoding it.

Every function reads a text once, in pieces of fixed size, with calls that run in C: time is linear
in the length of the text, and memory is a few times `_PIECE_BYTES`. The caller must have checked
the syntax with a decoder. Limits on depth and on long lists are checked exactly, before any object
is built. A leaf, pure; called by `appends`, `record_codecs` and the request shapes of `api`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from topics_server.values.limits import JSON_DEPTH_MAX, KIB

# Large enough that the cost of a call is small, and small enough for a processor's cache.
_PIECE_BYTES: Final = 64 * KIB
# The codes of structural characters; all other characters are dropped.
_OPENS: Final = 1
_CLOSES: Final = -1
_QUOTE: Final = 2
_COMMA: Final = 3

# Bytes or a view of bytes, `msgspec.Raw` included.
Text = bytes | memoryview | msgspec.Raw
_Marks = npt.NDArray[np.int8]


def _table(marks: dict[int, int]) -> bytes:
    return bytes(marks.get(byte, byte) & 0xFF for byte in range(256))


_MARKS: Final = {
    **dict.fromkeys(b"[{", _OPENS),
    **dict.fromkeys(b"]}", _CLOSES),
    ord('"'): _QUOTE,
    ord(","): _COMMA,
}
_TABLE: Final = _table(_MARKS)
_NOT_MARKS: Final = bytes(byte for byte in range(256) if byte not in _MARKS)
_NOT_DEPTH_MARKS: Final = bytes(byte for byte in range(256) if _MARKS.get(byte, _COMMA) == _COMMA)


def exceeds_depth(value: Text) -> bool:
    """Whether valid JSON nests deeper than `JSON_DEPTH_MAX`; `[]` is one level. Exact."""
    view = memoryview(value)
    # A text of depth n has at least n brackets that open, and as many that close.
    if len(view) <= 2 * JSON_DEPTH_MAX or not _has_many_brackets(view):
        return False
    return any(int(depths.max()) > JSON_DEPTH_MAX for _, depths in _walk(view, _NOT_DEPTH_MARKS))


def _has_many_brackets(view: memoryview) -> bool:
    """Whether there are enough brackets, inside or outside strings, to exceed the depth."""
    left = JSON_DEPTH_MAX
    for start in range(0, len(view), _PIECE_BYTES):
        piece = bytes(view[start : start + _PIECE_BYTES])
        left -= piece.count(b"[") + piece.count(b"{")
        if left < 0:
            return True
    return False


def has_more_items(value: Text, most: int) -> bool:
    """Whether a valid JSON array has more than `most` items, or an object more members; `most` > 0.

    Exact.
    """
    assert most > 0
    view = memoryview(value)
    # An item and the comma after it have at least two bytes.
    if len(view) <= 2 * most:
        return False
    commas = 0
    for marks, depths in _walk(view, _NOT_MARKS):
        commas += int(np.count_nonzero((marks == _COMMA) & (depths == 1)))
        # n items have n - 1 commas between them.
        if commas >= most:
            return True
    return False


def _walk(value: memoryview, dropped: bytes) -> Iterator[tuple[_Marks, npt.NDArray[np.int32]]]:
    """For each piece: the marks outside strings (0 for marks inside), and the depth after each."""
    is_inside, depth = 0, 0
    for piece in _pieces(value):
        marks = np.frombuffer(piece.translate(_TABLE, dropped), np.int8)
        if not len(marks):
            continue
        quotes = marks == _QUOTE
        # The count is kept in a byte and wraps, but its lowest bit stays right.
        inside = np.cumsum(quotes, dtype=np.uint8)
        inside += is_inside
        inside &= 1
        is_inside = int(inside[-1])
        # A closing quote counts as outside, but is not a structural character.
        outside = marks * (1 - inside.view(np.int8))
        outside[quotes] = 0
        depths = np.cumsum(outside * (outside != _COMMA), dtype=np.int32)
        depths += depth
        depth = int(depths[-1])
        yield outside, depths
    assert depth == 0, "brackets of valid JSON balance"


def _pieces(view: memoryview) -> Iterator[bytes]:
    """The text in pieces of bounded size, without escaped backslashes and escaped quotes."""
    start, size = 0, len(view)
    while start < size:
        end = min(start + _PIECE_BYTES, size)
        piece = bytes(view[start:end])
        if end < size and piece.endswith(b"\\"):
            # If the number of backslashes at the end is odd, the last one escapes the first
            # character of the next piece: move it there.
            count = len(piece) - len(piece.rstrip(b"\\"))
            end -= count & 1
            piece = bytes(view[start:end])
        start = end
        if b"\\" in piece:
            # Backslashes are paired from the start of a run, so one remains only if the run is odd:
            # the backslash in front of the escaped character.
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        yield piece
