"""Caches the rendered JSON of a block's records and slices it.

A rendered block is the bytes of its records as JSON objects joined by commas, with the offset of
each, so that consecutive rows of a page are one slice. `data` and `meta` are copied verbatim. The
key order is `$seq, $ts, $node, $tag, $trace, data, meta`; absent members are omitted (contract
§0.4, §3). A bytes record has `$encoding` and `$content_type` before its base64 (the contract's
README). The cache is bounded by bytes. Its key is the block's identity, which a strong reference
keeps valid. Called by `api/messages/responses`; the event loop's thread only.
"""

from __future__ import annotations

from array import array
from binascii import b2a_base64
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import Final

import msgspec

from topics_server.values.blocks import BYTES_MARK, TRACE_MARK, Block, split_trace
from topics_server.values.columns.json_rows import DATA as DATA
from topics_server.values.columns.json_rows import META as META
from topics_server.values.columns.json_rows import TAGS as TAGS
from topics_server.values.columns.json_rows import JsonBlock, render_columns
from topics_server.values.limits import MIB
from topics_server.values.model import PayloadKind
from topics_server.values.record_codecs import split_bytes_meta

RENDER_CACHE_BYTES_MAX: Final = 32 * MIB
# Blocks with fewer records and fewer bytes are cheaper to render again than to keep.
CACHED_RECORDS_MIN: Final = 32
CACHED_BYTES_MIN: Final = 65_536
# Fewer rows are rendered faster one by one than column by column.
COLUMNS_ROWS_MIN: Final = 128
# Memory of a cache entry beside its bytes.
_ENTRY_BYTES: Final = 512

_encode: Final = msgspec.json.Encoder().encode
# Access to an enum member costs a lookup.
_JSON: Final = PayloadKind.JSON


def render_block(block: Block, shown: int) -> JsonBlock:
    """Render every record of a block; `shown` is a sum of `TAGS`, `META` and `DATA`."""
    count = len(block.times)
    if _is_for_columns(block, range(count)):
        return JsonBlock(*_render_stretch(block, 0, count, shown))
    texts = render_rows(block, range(block.count), shown)
    # Latin-1 maps each byte to one character, so lengths are byte lengths and no byte is changed.
    body = ",".join(texts).encode("latin-1")
    offsets = array("I", accumulate((len(text) + 1 for text in texts), initial=0))
    assert offsets[-1] == len(body) + 1
    return JsonBlock(body, offsets)


def _is_for_columns(block: Block, rows: Sequence[int]) -> bool:
    """Whether `_render_stretch` renders these ascending rows."""
    count = len(rows)
    if count < COLUMNS_ROWS_MIN or rows[-1] - rows[0] != count - 1:
        return False
    return block.kinds.count(_JSON, rows[0], rows[-1] + 1) == count


def _render_stretch(
    block: Block, first_row: int, end_row: int, shown: int
) -> tuple[bytes, array[int]]:
    """Consecutive rows of plain JSON records, and the offset of each."""
    labels = [(b"$node", block.nodes)]
    if shown & TAGS:
        labels.append((b"$tag", block.tags))
    has_data, has_meta = shown & DATA != 0, shown & META != 0
    return render_columns(block, first_row, end_row, labels, with_data=has_data, with_meta=has_meta)


def render_rows(block: Block, rows: Sequence[int], shown: int) -> list[str]:
    """The objects of some rows, each as Latin-1 text of its UTF-8 bytes."""
    # One record, the common case for watchers, is cheaper to render without lists.
    count, row_count = len(rows), len(block.times)
    if count == 1:
        return [_render_row(block, rows[0], shown).decode("latin-1")]
    if block.kinds.count(_JSON) != row_count:
        return [_render_row(block, row, shown).decode("latin-1") for row in rows]
    first, last = rows[0], rows[-1]
    is_stretch = last - first + 1 == count
    starts, splits, ends = _bounds(block, rows, is_stretch)
    # Decode a whole block at once, but a few rows one by one.
    body = block.body.decode("latin-1") if count == row_count else ""
    datas: Iterable[str] = repeat("")
    if shown & DATA:
        datas = [f',"data":{data}' for data in _cut(block, body, starts, splits)]
    metas: Iterable[str] = repeat("")
    if shown & META and splits != ends:
        metas = [f',"meta":{meta}' if meta else "" for meta in _cut(block, body, splits, ends)]
    first_seq = block.first_seq
    seqs: Sequence[int]
    if is_stretch:
        times = block.times[first : last + 1].tolist()
        seqs = range(first_seq + first, first_seq + last + 1)
    else:
        times = [block.times[row] for row in rows]
        seqs = [first_seq + row for row in rows]
    nodes = _labels("$node", block.nodes, rows, is_stretch)
    tags = _labels("$tag", block.tags, rows, is_stretch) if shown & TAGS else repeat("")
    return [
        f'{{"$seq":{seq},"$ts":{ts}{node}{tag}{data}{meta}}}'
        for seq, ts, node, tag, data, meta in zip(  # noqa: B905 - `repeat` has no end
            seqs, times, nodes, tags, datas, metas
        )
    ]


def _render_row(block: Block, row: int, shown: int) -> bytes:
    """The object of one row."""
    node, tag = block.nodes[row], block.tags[row]
    if block.kinds[row] == _JSON:
        kind, trace, data, meta = b"", b"", block.data(row), block.meta(row)
    else:
        payload = payload_of(block, row)
        kind, trace, data, meta = payload.kind, payload.trace, payload.data, payload.meta
    return b'{"$seq":%d,"$ts":%d%b%b%b%b%b%b%b}' % (
        block.first_seq + row,
        block.times[row],
        b"" if node is None else b',"$node":' + _encode(node),
        b',"$tag":' + _encode(tag) if shown & TAGS and tag is not None else b"",
        trace,
        kind if shown & DATA else b"",
        b',"data":' if shown & DATA else b"",
        data if shown & DATA else b"",
        b',"meta":' + meta if shown & META and meta else b"",
    )


class Payload(msgspec.Struct, frozen=True, gc=False):
    """A record's payload as JSON; `kind`: the members with the type of a bytes record, or empty.

    `trace`: the member `$trace`, or empty.
    """

    data: bytes
    meta: bytes
    kind: bytes = b""
    trace: bytes = b""


def payload_of(block: Block, row: int) -> Payload:
    """The payload of a row: the bytes that were sent, or the base64 of a bytes record."""
    data, meta = block.data(row), block.meta(row)
    if block.kinds[row] == _JSON:
        return Payload(data, meta)
    return marked_payload(data, meta)


def marked_payload(data: bytes, meta: bytes) -> Payload:
    """The payload of a record whose `meta` begins with a mark, as JSON."""
    found, meta = split_trace(meta)
    trace = b',"$trace":"%b"' % found[len(TRACE_MARK) :] if found else b""
    if meta[:1] != BYTES_MARK:
        return Payload(data, meta, trace=trace)
    content_type, meta = split_bytes_meta(meta)
    kind = b',"$encoding":"base64","$content_type":%b' % _encode(content_type)
    return Payload(b'"%b"' % b2a_base64(data, newline=False), meta, kind, trace)


def _bounds(
    block: Block, rows: Sequence[int], is_stretch: bool
) -> tuple[list[int], list[int], list[int]]:
    """Offsets in the body: each row's start of data, start of meta, end of meta.

    A row's data starts where the meta of the row before it ends.
    """
    ends = block.ends
    if is_stretch:
        low, high = 2 * rows[0], 2 * rows[-1] + 2
        starts = [ends[low - 1] if low else 0, *ends[low + 1 : high - 1 : 2]]
        return starts, ends[low:high:2].tolist(), ends[low + 1 : high : 2].tolist()
    return (
        [ends[2 * row - 1] if row else 0 for row in rows],
        [ends[2 * row] for row in rows],
        [ends[2 * row + 1] for row in rows],
    )


def _cut(block: Block, body: str, firsts: list[int], ends: list[int]) -> list[str]:
    if body:
        return [body[first:end] for first, end in zip(firsts, ends, strict=True)]
    raw = block.body
    return [raw[first:end].decode("latin-1") for first, end in zip(firsts, ends, strict=True)]


def _labels(
    key: str, values: Sequence[str | None], rows: Sequence[int], is_stretch: bool
) -> Iterable[str]:
    """The member `,"key":"value"` of each row, encoded once for each distinct value."""
    picked = values[rows[0] : rows[-1] + 1] if is_stretch else [values[row] for row in rows]
    distinct = set(picked)
    if distinct == {None}:
        return repeat("")
    members = {
        value: "" if value is None else f',"{key}":{_encode(value).decode("latin-1")}'
        for value in distinct
    }
    return [members[value] for value in picked]


class JsonCache:
    """An LRU cache of rendered blocks, bounded by their bytes and those of their blocks."""

    def __init__(self, bytes_max: int = RENDER_CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[tuple[int, int], tuple[Block, JsonBlock, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def slices(
        self, block: Block | JsonBlock, rows: Sequence[int], shown: int, *, is_kept: bool = True
    ) -> list[bytes | memoryview]:
        """The objects of ascending rows (at least one), as slices to be joined by commas.

        `is_kept`: whether the JSON of most of a block is kept. A `JsonBlock` has the members.
        """
        assert len(rows) > 0
        if isinstance(block, JsonBlock):
            parts = [block.rows(first, last) for first, last in _runs(rows)]
            # A slow client must not hold a whole group in memory for a few of its records.
            is_part = 2 * sum(map(len, parts)) < len(block.body)
            return [bytes(part) for part in parts] if is_part else parts
        key = (id(block), shown)
        entry = self._entries.get(key)
        if entry is not None:
            assert entry[0] is block
            self._entries.move_to_end(key)
            json_block = entry[1]
        else:
            row_count = len(block.times)
            is_small = row_count < CACHED_RECORDS_MIN and len(block.body) < CACHED_BYTES_MIN
            if is_small or not is_kept or 2 * len(rows) < row_count:
                if len(rows) == 1:
                    return [_render_row(block, rows[0], shown)]
                if len(rows) >= COLUMNS_ROWS_MIN and _is_for_columns(block, rows):
                    return [_render_stretch(block, rows[0], rows[-1] + 1, shown)[0]]
                return [",".join(render_rows(block, rows, shown)).encode("latin-1")]
            json_block = render_block(block, shown)
            self._put(block, shown, json_block)
        if len(rows) == len(json_block.offsets) - 1:
            return [json_block.body]
        return [json_block.rows(first, last) for first, last in _runs(rows)]

    def _put(self, block: Block, shown: int, json_block: JsonBlock) -> None:
        size = len(json_block.body) + len(block.body) + 4 * len(json_block.offsets) + _ENTRY_BYTES
        if size > self._bytes_max:
            return
        self._entries[(id(block), shown)] = (block, json_block, size)
        self.bytes += size
        while self.bytes > self._bytes_max:
            _, (_, _, dropped) = self._entries.popitem(last=False)
            self.bytes -= dropped
        assert self.bytes >= 0


def _runs(rows: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Unbroken runs `(first, last)` of ascending rows."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return ((rows[0], rows[-1]),)
    runs: list[tuple[int, int]] = []
    first = last = rows[0]
    for row in rows[1:]:
        assert row > last, "rows of a page ascend"
        if row != last + 1:
            runs.append((first, last))
            first = row
        last = row
    runs.append((first, last))
    return runs
