"""The records of a batch as columns: only those that `apply` uses.

Each column is made once, when a statement first needs it, with few Python steps for each record.
Runs in the apply process; called by `view_file`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from topics_server.values.blocks import Block, decode_block, has_traces, payload_kinds
from topics_server.values.limits import TRACE_BYTES, TRACED_KIND
from topics_server.values.model import PayloadKind
from topics_server.views.messages import Batch

_BYTES_KIND: Final = PayloadKind.BYTES.value

_Part = tuple[Block, Sequence[int] | None]


class RecordColumns:
    """The records of a batch, in seq order. Raises `ValueError` for an invalid batch."""

    def __init__(self, batch: Batch) -> None:
        self._parts: list[_Part] = [
            (decode_block(piece.block), piece.rows) for piece in batch.pieces
        ]
        self._columns: dict[str, list[Any]] = {}
        self.count = batch.count
        if len(self.column("seq")) != batch.count:
            raise ValueError("a batch has another number of records than it says")

    def column(self, name: str) -> list[Any]:
        """The values of this parameter of `apply`, one for each record. Raises `KeyError`."""
        found = self._columns.get(name)
        if found is None:
            column_of = _COLUMNS[name]
            found = []
            for block, rows in self._parts:
                values = column_of(block)
                found += values if rows is None else [values[row] for row in rows]
            self._columns[name] = found
        return found


def _seqs(block: Block) -> Sequence[int]:
    return range(block.first_seq, block.first_seq + block.count)


def _times(block: Block) -> Sequence[int]:
    return block.times.tolist()


def _nodes(block: Block) -> Sequence[str | None]:
    return block.nodes


def _tags(block: Block) -> Sequence[str | None]:
    return block.tags


def _datas(block: Block) -> Sequence[str | bytes]:
    """The data column: JSON as text, a bytes record as bytes."""
    ends, kinds = block.ends, payload_kinds(block.kinds)
    if _BYTES_KIND in kinds:
        datas = block.datas(range(block.count))
        return [
            data if kind == _BYTES_KIND else data.decode("utf-8", "surrogatepass")
            for data, kind in zip(datas, kinds, strict=True)
        ]
    return _cut(block.body, [0, *ends[1:-1:2]], ends[::2])


def _metas(block: Block) -> Sequence[str | None]:
    ends = block.ends
    starts: Sequence[int] = ends[::2]
    if has_traces(block.kinds):
        # A deleted record still has its kind, but no meta.
        starts = [
            min(start + TRACE_BYTES, end) if kind & TRACED_KIND else start
            for start, end, kind in zip(starts, ends[1::2], block.kinds, strict=True)
        ]
    return [text or None for text in _cut(block.body, starts, ends[1::2])]


def _cut(body: bytes, starts: Sequence[int], stops: Sequence[int]) -> list[str]:
    """The texts of the body from each start to its stop, which are positions in bytes."""
    spans = zip(starts, stops, strict=True)
    if body.isascii():
        text = body.decode("ascii")
        return [text[start:stop] for start, stop in spans]
    return [body[start:stop].decode("utf-8", "surrogatepass") for start, stop in spans]


_COLUMNS: Final[dict[str, Callable[[Block], Sequence[Any]]]] = {
    "seq": _seqs,
    "ts": _times,
    "node": _nodes,
    "tag": _tags,
    "data": _datas,
    "meta": _metas,
}
