"""Parts of a block as blocks of their own. Pure.

Used by `engine/log/runs` and `engine/background/capture`.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from topics_server.values.blocks import Block


def slice_block(block: Block, first_row: int, end_row: int) -> Block:
    """Rows of a block as a new block."""
    assert 0 <= first_row < end_row <= block.count
    start = block.ends[2 * first_row - 1] if first_row else 0
    part = slice(first_row, end_row)
    ends: Any = np.frombuffer(block.ends, np.uint32)[2 * first_row : 2 * end_row] - np.uint32(start)
    return Block(
        first_seq=block.first_seq + first_row,
        times=block.times[part],
        ends=array("I", ends.tobytes()),
        body=block.body[start : block.ends[2 * end_row - 1]],
        tags=block.tags[part],
        nodes=block.nodes[part],
        kinds=block.kinds[part],
        hops=block.hops[part],
    )
