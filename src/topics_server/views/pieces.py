"""Encodes the records of a page for the apply process, as blocks. Pure.

Each block is encoded by one call of C code, without payloads if `apply` uses none.
`workers/records` makes columns of them. Called by `feed`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from topics_server.engine.answers import Page
from topics_server.engine.log.block_slices import slice_block
from topics_server.values.blocks import Block, encode_block
from topics_server.views.messages import BlockRows


def pieces_of(page: Page, *, with_payloads: bool) -> list[BlockRows]:
    """The encoded records of a page, in seq order."""
    return [_piece_of(piece.block, piece.rows, with_payloads) for piece in page.pieces]


def _piece_of(block: Block, rows: Sequence[int], with_payloads: bool) -> BlockRows:
    first, last = rows[0], rows[-1]
    if not with_payloads:
        ends = array("I", bytes(8 * block.count))
        block = msgspec.structs.replace(block, ends=ends, body=b"")
    if last - first + 1 < block.count:
        block = slice_block(block, first, last + 1)
    is_whole = len(rows) == block.count
    return BlockRows(encode_block(block), None if is_whole else [row - first for row in rows])
