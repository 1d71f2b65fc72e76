"""Caches the rendered JSON of a block's records and slices it.

A rendered block is the bytes of its records as JSON objects joined by commas, with the offset of
each, so that unbroken rows of a page are one slice. `data` and `meta` are spliced in verbatim; key
order is `$seq, $ts, $node, $tag, data, meta`, absent ones omitted (contract §0.4, §3); a record of
bytes has `$encoding` and `$content_type` before its base64 (the contract's README). The cache is
bounded by bytes and keyed by the block's identity, which its strong reference keeps meaningful.
Called by `api/messages/responses`; the event loop's thread only.
"""

from __future__ import annotations

from array import array
from binascii import b2a_base64
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import Final

import msgspec

from topics_server.values.blocks import Block
from topics_server.values.limits import MIB
from topics_server.values.model import PayloadKind
from topics_server.values.record_codecs import split_bytes_meta

# What of a record is shown: the sum of these. `$seq`, `$ts` and `$node` always are.
TAGS: Final = 1
META: Final = 2
DATA: Final = 4

RENDER_CACHE_BYTES_MAX: Final = 32 * MIB
# Blocks of fewer records and bytes are cheaper to render again than to keep.
CACHED_RECORDS_MIN: Final = 32
CACHED_BYTES_MIN: Final = 65_536
# What an entry of the cache costs beside its bytes.
_ENTRY_BYTES: Final = 512

_encode: Final = msgspec.json.Encoder().encode


class Rendered(msgspec.Struct, frozen=True, gc=False):
    """The records of one block as JSON, comma-separated.

    `offsets[row]` is where the object of `row` starts; `offsets[row + 1] - 1` is where it ends
    (there stands its comma, or the bytes end).
    """

    body: bytes
    offsets: array[int]

    def rows(self, first: int, last: int) -> bytes | memoryview:
        """The objects of rows `first..last` (inclusive) without a copy."""
        assert 0 <= first <= last < len(self.offsets) - 1
        start, end = self.offsets[first], self.offsets[last + 1] - 1
        if end - start == len(self.body):
            return self.body
        return memoryview(self.body)[start:end]


def render_block(block: Block, shown: int) -> Rendered:
    """Render every record of a block; `shown` is a sum of `TAGS`, `META` and `DATA`."""
    texts = render_rows(block, range(block.count), shown)
    # Latin-1 maps bytes to characters one to one: lengths are byte lengths, nothing is converted.
    body = ",".join(texts).encode("latin-1")
    offsets = array("I", accumulate((len(text) + 1 for text in texts), initial=0))
    assert offsets[-1] == len(body) + 1
    return Rendered(body, offsets)


def render_rows(block: Block, rows: Sequence[int], shown: int) -> list[str]:
    """The objects of some rows, each as Latin-1 text of its UTF-8 bytes."""
    # What is shown of one record, as watchers are mostly told, is cheaper without any lists.
    if len(rows) == 1 or block.kinds.count(PayloadKind.JSON) != block.count:
        return [_render_row(block, row, shown) for row in rows]
    whole = len(rows) == block.count
    starts, splits, ends = _bounds(block, rows, whole)
    # A whole block is decoded at once, a few rows one by one.
    body = block.body.decode("latin-1") if whole else ""
    datas: Iterable[str] = repeat("")
    if shown & DATA:
        datas = [f',"data":{data}' for data in _cut(block, body, starts, splits)]
    metas: Iterable[str] = repeat("")
    if shown & META and splits != ends:
        metas = [f',"meta":{meta}' if meta else "" for meta in _cut(block, body, splits, ends)]
    times = block.times.tolist() if whole else [block.times[row] for row in rows]
    nodes = _labels("$node", block.nodes, rows, whole)
    tags = _labels("$tag", block.tags, rows, whole) if shown & TAGS else repeat("")
    first_seq = block.first_seq
    seqs = range(first_seq, first_seq + len(rows)) if whole else [first_seq + row for row in rows]
    return [
        f'{{"$seq":{seq},"$ts":{ts}{node}{tag}{data}{meta}}}'
        for seq, ts, node, tag, data, meta in zip(  # noqa: B905 - `repeat` has no end
            seqs, times, nodes, tags, datas, metas
        )
    ]


def _render_row(block: Block, row: int, shown: int) -> str:
    """One object by itself."""
    node, tag = block.nodes[row], block.tags[row]
    told = f'{{"$seq":{block.first_seq + row},"$ts":{block.times[row]}'
    if node is not None:
        told += f',"$node":{_encode(node).decode("latin-1")}'
    if shown & TAGS and tag is not None:
        told += f',"$tag":{_encode(tag).decode("latin-1")}'
    payload = payload_of(block, row)
    if shown & DATA:
        told += f'{payload.kind.decode("latin-1")},"data":{payload.data.decode("latin-1")}'
    if shown & META and payload.meta:
        told += f',"meta":{payload.meta.decode("latin-1")}'
    return told + "}"


class Payload(msgspec.Struct, frozen=True, gc=False):
    """A record's payload as JSON shows it; `kind`: members that say what it is, or nothing."""

    data: bytes
    meta: bytes
    kind: bytes = b""


def payload_of(block: Block, row: int) -> Payload:
    """The payload of a row: as it was sent, or of bytes their base64 (the contract's README)."""
    data, meta = block.data(row), block.meta(row)
    if block.kinds[row] != PayloadKind.BYTES:
        return Payload(data, meta)
    content_type, meta = split_bytes_meta(meta)
    kind = b',"$encoding":"base64","$content_type":%b' % _encode(content_type)
    return Payload(b'"%b"' % b2a_base64(data, newline=False), meta, kind)


def _bounds(
    block: Block, rows: Sequence[int], whole: bool
) -> tuple[list[int], list[int], list[int]]:
    """Offsets in the body: where each row's data starts, where its meta does, and where that ends.

    A row's data starts where the meta of the row before it ends.
    """
    ends = block.ends
    if whole:
        return [0, *ends[1:-1:2]], ends[::2].tolist(), ends[1::2].tolist()
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
    key: str, values: Sequence[str | None], rows: Sequence[int], whole: bool
) -> Iterable[str]:
    """The member `,"key":"value"` of each row, encoded once for each distinct value."""
    picked = values if whole else [values[row] for row in rows]
    distinct = set(picked)
    if distinct == {None}:
        return repeat("")
    members = {
        value: "" if value is None else f',"{key}":{_encode(value).decode("latin-1")}'
        for value in distinct
    }
    return [members[value] for value in picked]


class JsonCache:
    """Rendered blocks, least recently used out first, bounded by bytes with the blocks they pin."""

    def __init__(self, bytes_max: int = RENDER_CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[tuple[int, int], tuple[Block, Rendered, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def slices(self, block: Block, rows: Sequence[int], shown: int) -> list[bytes | memoryview]:
        """The objects of ascending rows as slices to be joined by commas; at least one row."""
        assert len(rows) > 0
        key = (id(block), shown)
        entry = self._entries.get(key)
        if entry is not None:
            assert entry[0] is block
            self._entries.move_to_end(key)
            rendered = entry[1]
        else:
            is_small = block.count < CACHED_RECORDS_MIN and len(block.body) < CACHED_BYTES_MIN
            if is_small or 2 * len(rows) < block.count:
                return [",".join(render_rows(block, rows, shown)).encode("latin-1")]
            rendered = render_block(block, shown)
            self._put(block, shown, rendered)
        if len(rows) == len(rendered.offsets) - 1:
            return [rendered.body]
        return [rendered.rows(first, last) for first, last in _runs(rows)]

    def _put(self, block: Block, shown: int, rendered: Rendered) -> None:
        size = len(rendered.body) + len(block.body) + 4 * len(rendered.offsets) + _ENTRY_BYTES
        if size > self._bytes_max:
            return
        self._entries[(id(block), shown)] = (block, rendered, size)
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
