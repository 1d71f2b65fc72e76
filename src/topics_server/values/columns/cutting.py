"""Cuts a buffer into many pieces, and writes columns of numbers as decimal text. Pure.

`struct` makes all pieces of a buffer in one call: with the parsing of its format, which numpy
writes, a piece takes half the time of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The decimal texts 0000 to 9999, each as four bytes in one number.
_TEXTS: Final = np.frombuffer(b"".join(map(b"%04d".__mod__, range(10_000))), "<u4")
_TEXT_DIGITS: Final = 4
_ZERO: Final = ord("0")
_TEXT_LIMIT: Final = 10**_TEXT_DIGITS


def digits_of(number: int) -> int:
    """How many decimal digits a number has."""
    return len(str(number))


def copies(text: bytes, count: int) -> Array:
    """Copies of a text that can be changed; shape (count, bytes)."""
    return np.frombuffer(bytearray(text * count), "u1").reshape(count, -1)


def write_decimals(texts: Array, end: int, values: Array, width: int) -> None:
    """Write a number into each text, in `width` decimal digits before the byte `end`.

    `texts` has shape (count, bytes) and is contiguous; every text has the decimals of one of the
    values there. The values are at least 0 and have at most `width` digits.
    """
    count, size = texts.shape
    left = values
    while True:
        is_last = width <= _TEXT_DIGITS
        high = left if is_last else left // _TEXT_LIMIT
        low = _TEXTS[left if is_last else left - high * _TEXT_LIMIT]
        if width >= _TEXT_DIGITS:
            # A view of the last four digits of all texts.
            at = np.ndarray((count,), "<u4", texts, end - _TEXT_DIGITS, (size,))
            at[:] = low
        else:
            texts[:, end - width : end] = low.view("u1").reshape(count, -1)[:, -width:]
        # If all numbers have the same other digits, the texts have them.
        if is_last or int(high.min()) == int(high.max()):
            return
        left, end, width = high, end - _TEXT_DIGITS, width - _TEXT_DIGITS


def cut(raw: bytes, starts: Array, ends: Array) -> tuple[bytes, ...]:
    """The pieces `raw[start:end]`, at least one.

    The ranges lie in `raw`, ascend and do not overlap.
    """
    count = len(starts)
    skips = starts.copy()
    skips[1:] -= ends[:-1]
    lengths = ends - starts
    first, skip = int(skips[0]), int(skips[-1])
    has_one_skip = count < 3 or int(skips[1:].min()) == int(skips.max())
    skip_width = digits_of(skip if has_one_skip else int(skips.max()))
    width = max(_TEXT_DIGITS, digits_of(int(lengths.max())))
    text = b"%0*dx%0*ds" % (skip_width, skip, width, lengths[0])
    texts = copies(text, count)
    if not has_one_skip:
        skips[0] = skip
        write_decimals(texts, skip_width, skips, skip_width)
    write_decimals(texts, len(text) - 1, lengths, width)
    texts[0, :skip_width] = _ZERO
    return Struct(texts.tobytes()).unpack_from(raw, first)


def can_cut(raw: bytes, starts: Array, ends: Array) -> bool:
    """Whether `cut` accepts these ranges."""
    return bool(
        starts[0] >= 0
        and ends[-1] <= len(raw)
        and (ends >= starts).all()
        and (starts[1:] >= ends[:-1]).all()
    )


def texts_of(pieces: Sequence[bytes]) -> list[str]:
    """Each piece decoded as UTF-8."""
    # No text in use contains NUL; if one does, decode the pieces one by one.
    texts = b"\0".join(pieces).decode("utf-8").split("\0")
    return texts if len(texts) == len(pieces) else list(map(str, pieces, repeat("utf-8")))
