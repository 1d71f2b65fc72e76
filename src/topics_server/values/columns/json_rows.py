"""Renders consecutive rows of a block as JSON objects, column by column. Pure.

The objects differ in few bytes beside their payloads: numpy writes `$seq` and `$ts` of all rows,
one call encodes all tags, and one join makes the text. `values/json_cache` decides which rows are
rendered here, and has the same members in the same order for the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from topics_server.values.blocks import Block
from topics_server.values.columns.cutting import Array, copies, cut, digits_of, write_decimals

_encode: Final = msgspec.json.Encoder().encode
# The end of an object, and the comma behind it.
_END: Final = b"},"
_SEQ: Final = b'%b{"$seq":' % _END
_TIME: Final = b',"$ts":'


class _Column(msgspec.Struct, frozen=True, gc=False):
    """One piece of each row, and the length of each piece."""

    pieces: Sequence[bytes]
    lengths: Array


def render_columns(
    block: Block,
    first_row: int,
    end_row: int,
    labels: Sequence[tuple[bytes, Sequence[str | None]]],
    *,
    with_data: bool,
    with_meta: bool,
) -> tuple[bytes, array[int]]:
    """The objects of rows `first_row..end_row - 1` of plain JSON records, joined by commas.

    `labels`: the names and the values of the members before `data`. Returns the text, and the
    offset of each object and of the end, as in `json_cache.JsonBlock`.
    """
    count = end_row - first_row
    stops = np.frombuffer(block.ends, "<u4")[2 * first_row : 2 * end_row].astype("<i8")
    splits, ends = stops[::2], stops[1::2]
    starts = np.empty(count, "<i8")
    starts[0] = block.ends[2 * first_row - 1] if first_row else 0
    starts[1:] = ends[:-1]
    # The members behind `$ts`: columns, each with the text that all objects have before it.
    members: list[tuple[bytes, _Column]] = []
    before = b""
    for key, values in labels:
        part = values[first_row:end_row]
        if part[0] is None and part.count(None) == count:
            continue
        texts = _encoded(part)
        if len(texts) == count:
            members.append((before + b',"%b":"' % key, _column_of(texts)))
            before = b'"'
        else:
            members.append((before, _optional(key, part)))
            before = b""
    if with_data:
        data = _Column(cut(block.body, starts, splits), splits - starts)
        members.append((before + b',"data":', data))
        before = b""
    if with_meta and not np.array_equal(splits, ends):
        metas = [b',"meta":' + meta if meta else b"" for meta in cut(block.body, splits, ends)]
        members.append((before, _column_of(metas)))
        before = b""
    # Text that follows the head in all objects is part of the head.
    behind = members[0][0] if members else before
    times = np.frombuffer(block.times, "<i8")[first_row:end_row]
    head = _heads(block.first_seq + first_row, times, behind)
    parts, lengths = [head.pieces], head.lengths.copy()
    for place, (text, column) in enumerate(members):
        if place and text:
            parts.append([text] * count)
            lengths += len(text)
        parts.append(column.pieces)
        lengths += column.lengths
    if members and before:
        parts.append([before] * count)
        lengths += len(before)
    pieces = [b""] * (count * len(parts))
    for place, part_of_all in enumerate(parts):
        pieces[place :: len(parts)] = part_of_all
    # Each head begins with the end of the object before it.
    pieces[0] = pieces[0][len(_END) :]
    pieces.append(b"}")
    offsets = array("I", (0,))
    offsets.frombytes(np.cumsum(lengths).astype("<u4").tobytes())
    return b"".join(pieces), offsets


def _heads(first_seq: int, times: Array, behind: bytes) -> _Column:
    """The start of each object, up to `$ts` and the text `behind` it."""
    count = len(times)
    last_seq = first_seq + count - 1
    least, most = int(times.min()), int(times.max())
    seq_digits, time_digits = digits_of(first_seq), digits_of(most)
    if least < 0 or digits_of(least) != time_digits or digits_of(last_seq) != seq_digits:
        seqs = range(first_seq, last_seq + 1)
        pairs = zip(seqs, times.tolist(), strict=True)
        return _column_of([b"%b%d%b%d%b" % (_SEQ, seq, _TIME, ts, behind) for seq, ts in pairs])
    # All numbers have as many digits as the first: write them into copies of one text.
    text = b"%b%d%b%d%b" % (_SEQ, first_seq, _TIME, most, behind)
    texts = copies(text, count)
    seq_end = len(_SEQ) + seq_digits
    seqs_column = np.arange(first_seq, last_seq + 1, dtype="<i8")
    write_decimals(texts, seq_end, seqs_column, seq_digits)
    write_decimals(texts, seq_end + len(_TIME) + time_digits, times, time_digits)
    # No text ends with NUL, which numpy would cut off.
    pieces: list[bytes] = texts.view(f"S{len(text)}").ravel().tolist()
    return _Column(pieces, np.full(count, len(text), "<i8"))


def _encoded(values: Sequence[str | None]) -> list[bytes]:
    """The JSON of each string, without its quotes; fewer texts if they must be encoded alone."""
    text = _encode(values)
    # `","` occurs between two strings, and at the end of a string that ends with `",`: its escaped
    # quote, its comma and the quote behind it.
    return [] if b'\\"' in text else text[2:-2].split(b'","')


def _optional(key: bytes, values: Sequence[str | None]) -> _Column:
    """The member of each row, empty where absent; encoded once for each distinct value."""
    members = {
        value: b"" if value is None else b',"%b":%b' % (key, _encode(value))
        for value in set(values)
    }
    return _column_of([members[value] for value in values])


def _column_of(pieces: Sequence[bytes]) -> _Column:
    return _Column(pieces, np.fromiter(map(len, pieces), "<i8", len(pieces)))
