"""Makes a page of blocks that were read together, and of JSON objects. Pure.

Called by `engine/read/segment_reader`, which reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from topics_server.engine.answers import JsonPage, JsonPiece, Page, Piece
from topics_server.engine.read.page import Fetch, PagePlan, page_of, shifted
from topics_server.values.blocks import Block
from topics_server.values.columns.json_rows import JsonBlock

_AnyPiece = Piece | JsonPiece
# By fetch: the block that it is part of, and the row at which it begins there.
Parts = dict[Fetch, tuple[Block | JsonBlock, int]]


def page_of_parts(plan: PagePlan, fetched: Mapping[Fetch, Block], parts: Parts) -> Page | JsonPage:
    """The page of a plan; `fetched` has the blocks of the fetches that `parts` does not have."""
    pieces = list(_joined(plan, fetched, parts))
    blocks = [piece for piece in pieces if isinstance(piece, Piece)]
    if len(blocks) == len(pieces):
        return page_of(plan, blocks)
    return JsonPage(pieces, page_of(plan, []))


def _joined(plan: PagePlan, fetched: Mapping[Fetch, Block], parts: Parts) -> Iterable[_AnyPiece]:
    """The pieces of a page; rows of one block that follow each other are one piece."""
    last: _AnyPiece | None = None
    for planned in plan.pieces:
        piece: _AnyPiece
        if isinstance(planned, Piece):
            piece = planned
        elif (part := parts.get(planned.fetch)) is None:
            piece = Piece(fetched[planned.fetch], planned.rows)
        else:
            block, first = part
            rows = shifted(planned.rows, -first)
            is_next = last is not None and last.block is block and _follows(last.rows, rows)
            if last is not None and is_next:
                rows = range(last.rows[0], rows[-1] + 1)
            elif last is not None:
                yield last
            if isinstance(block, JsonBlock):
                last = JsonPiece(block, rows)
            else:
                last = Piece(block, rows, is_kept=False)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _follows(before: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether two unbroken ranges of rows are one together."""
    both = isinstance(before, range) and isinstance(rows, range)
    return both and before[-1] + 1 == rows[0]
