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

# Flags for the members that a reader gets beside `$seq`, `$ts` and `$node`; they are added.
TAGS: Final = 1
META: Final = 2
DATA: Final = 4

_encode: Final = msgspec.json.Encoder().encode
_COMMA: Final = b","
# The end of an object, and the comma behind it.
_END: Final = b"},"
_SEQ: Final = b'%b{"$seq":' % _END
_TIME: Final = b',"$ts":'


class JsonBlock(msgspec.Struct, frozen=True, gc=False):
    """Consecutive records as JSON, comma-separated.

    The object of `row` starts at `offsets[row]` and ends at `offsets[row + 1] - 1`, where its comma
    is, or the end of the bytes.
    """

    body: bytes | memoryview
    offsets: array[int]

    def rows(self, first: int, last: int) -> bytes | memoryview:
        """The objects of rows `first..last` (inclusive) without a copy."""
        assert 0 <= first <= last < len(self.offsets) - 1
        start, end = self.offsets[first], self.offsets[last + 1] - 1
        if end - start == len(self.body):
            return self.body
        return memoryview(self.body)[start:end]


class PayloadSpans(msgspec.Struct, frozen=True, gc=False):
    """Where the payloads of consecutive records lie in `body`.

    `data` is `starts..splits - 1`, and `meta` is `splits..ends - 1`; each has shape (count,).
    """

    body: bytes
    starts: Array
    splits: Array
    ends: Array


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
    offset of each object and of the end, as in `JsonBlock`.
    """
    stops = np.frombuffer(block.ends, "<u4")[2 * first_row : 2 * end_row].astype("<i8")
    starts = np.empty(end_row - first_row, "<i8")
    starts[0] = block.ends[2 * first_row - 1] if first_row else 0
    starts[1:] = stops[1:-1:2]
    text, lengths = render_payloads(
        block.first_seq + first_row,
        np.frombuffer(block.times, "<i8")[first_row:end_row],
        [(key, values[first_row:end_row]) for key, values in labels],
        PayloadSpans(block.body, starts, stops[::2], stops[1::2]),
        with_data=with_data,
        with_meta=with_meta,
    )
    offsets = array("I", (0,))
    offsets.frombytes(np.cumsum(lengths).astype("<u4").tobytes())
    return text, offsets


def render_payloads(
    first_seq: int,
    times: Array,
    labels: Sequence[tuple[bytes, Sequence[str | None]]],
    payloads: PayloadSpans,
    *,
    with_data: bool,
    with_meta: bool,
) -> tuple[bytes, Array]:
    """The objects of consecutive records, joined by commas, and the length of each with a comma.

    Every record has `data`.
    """
    count = len(times)
    # The members behind `$ts`: columns, each with the text that all objects have before it.
    members: list[tuple[bytes, _Column]] = []
    before = b""
    body, splits, ends = payloads.body, payloads.splits, payloads.ends
    for key, values in labels:
        if values[0] is None and values.count(None) == count:
            continue
        texts = _encoded(values)
        if len(texts) == count:
            members.append((before + b',"%b":"' % key, _column_of(texts)))
            before = b'"'
        else:
            members.append((before, _optional(key, values)))
            before = b""
    if with_data:
        data = _Column(cut(body, payloads.starts, splits), splits - payloads.starts)
        members.append((before + b',"data":', data))
        before = b""
    if with_meta and not np.array_equal(splits, ends):
        metas = [b',"meta":' + meta if meta else b"" for meta in cut(body, splits, ends)]
        members.append((before, _column_of(metas)))
        before = b""
    # Text that follows the head in all objects is part of the head.
    behind = members[0][0] if members else before
    head = _heads(first_seq, times, behind)
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
    return b"".join(pieces), lengths


def render_beside_dead(
    first_seq: int, times: Array, nodes: Sequence[str | None], payloads: PayloadSpans
) -> tuple[bytes, Array]:
    """The result of `render_payloads` with data, `meta` and `$node`, where records may be dead.

    The object of a dead record has only its seq and its time; it has no payload and no node.
    """
    body, data_key, meta_key = payloads.body, b',"data":', b',"meta":'
    members = {name: b"" if name is None else b',"$node":%b' % _encode(name) for name in set(nodes)}
    columns = [payloads.starts.tolist(), payloads.splits.tolist(), payloads.ends.tolist()]
    rows = zip(times.tolist(), nodes, *columns, strict=True)
    objects = [
        b'{"$seq":%d,"$ts":%d%b%b%b%b%b}'
        % (
            seq,
            ts,
            members[node],
            data_key * (start < split),
            body[start:split],
            meta_key * (split < end),
            body[split:end],
        )
        for seq, (ts, node, start, split, end) in enumerate(rows, first_seq)
    ]
    return b",".join(objects), np.fromiter(map(len, objects), "<i8", len(objects)) + len(_COMMA)


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
