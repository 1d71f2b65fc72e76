"""Some records of one topic as parallel columns, for answers that render them at once. Pure.

A claim of many jobs reads consecutive records most of the time: then every column is made of
slices. Made by `exact_read` and `engine/reads`; rendered by `api/queues/responses`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from topics_server.engine.log.runs import OpenBlock
from topics_server.values.blocks import MARKS, Block


def _no_times() -> array[int]:
    return array("q")


class RowColumns(msgspec.Struct, gc=False):
    """Columns of equal length. `times`: commit times in ms; an absent `meta` is empty.

    `marks`: not 0 for a record whose `meta` may begin with a mark (`values/blocks`).
    """

    times: array[int] = msgspec.field(default_factory=_no_times)
    nodes: list[str | None] = []
    tags: list[str | None] = []
    datas: list[bytes] = []
    metas: list[bytes] = []
    marks: bytes = b""

    def rows(self) -> Iterator[tuple[int, str | None, str | None, bytes, bytes, bool]]:
        """The records one by one, see `exact_read.Row`."""
        marks = map(bool, self.marks)
        return zip(self.times, self.nodes, self.tags, self.datas, self.metas, marks, strict=True)

    def add_block(self, block: Block, rows: Sequence[int]) -> None:
        """Add ascending rows of a block."""
        count, low, high = len(rows), rows[0], rows[-1] + 1
        if count < high - low:
            for row in rows:
                self.times.append(block.times[row])
                self.nodes.append(block.nodes[row])
                self.tags.append(block.tags[row])
                self.datas.append(block.data(row))
                self.metas.append(block.meta(row))
                self.marks += block.kinds[row : row + 1]
            return
        body, ends = block.body, block.ends
        self.times += block.times[low:high]
        self.nodes += block.nodes[low:high]
        self.tags += block.tags[low:high]
        self.marks += block.kinds[low:high]
        # A record's data starts where the meta of the record before it ends.
        start = ends[2 * low - 1] if low else 0
        splits, stops = ends[2 * low : 2 * high : 2], ends[2 * low + 1 : 2 * high : 2]
        if splits == stops:
            self.datas += [body[start : (start := end)] for end in stops]
            self.metas += [b""] * count
            return
        starts = [start, *stops[:-1]]
        self.datas += [body[start:end] for start, end in zip(starts, splits, strict=True)]
        self.metas += [body[start:end] for start, end in zip(splits, stops, strict=True)]

    def add_open_block(self, block: OpenBlock, rows: Sequence[int]) -> None:
        """`add_block` for the block that takes appends."""
        count, low, high = len(rows), rows[0], rows[-1] + 1
        if count == high - low:
            part = slice(low, high)
            self.times += block.times[part]
            self.nodes += block.nodes[part]
            self.tags += block.tags[part]
            self.datas += block.datas[part]
            metas = block.metas[part]
        else:
            self.times.extend(block.times[row] for row in rows)
            self.nodes += [block.nodes[row] for row in rows]
            self.tags += [block.tags[row] for row in rows]
            self.datas += [block.datas[row] for row in rows]
            metas = [block.metas[row] for row in rows]
        self.metas += metas
        if block.has_metas:
            self.marks += bytes(meta[:1] in MARKS for meta in metas)
        else:
            self.marks += bytes(count)
