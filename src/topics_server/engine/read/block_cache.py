"""A cache of recently read segment blocks, bounded in bytes. Pure.

The least recently used block is evicted first; a reader that holds a block keeps it alive. Keys are
`(topic id, segment id, group)`, and ids are never reused; the blocks of a mended segment are
removed. So no entry is ever out of date.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from topics_server.engine.log.block_slices import slice_block
from topics_server.values.blocks import Block

BlockKey = tuple[int, int, int]


class BlockPart(msgspec.Struct, frozen=True, gc=False):
    """Rows `first_row .. end_row - 1` of a block that was read for a page."""

    block: Block
    first_row: int
    end_row: int

    def cut(self) -> Block:
        """The rows as a block of their own."""
        return slice_block(self.block, self.first_row, self.end_row)

    def cost(self) -> int:
        """See `_cost`."""
        ends, first = self.block.ends, self.first_row
        start = ends[2 * first - 1] if first else 0
        return ends[2 * self.end_row - 1] - start + _OVERHEAD_BYTES * (self.end_row - first)


# Memory of a block in addition to its payload, per record: columns, lists and objects.
_OVERHEAD_BYTES = 48


class BlockCache:
    """LRU of blocks; `max_bytes` counts payloads and a flat overhead per record."""

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes > 0
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._blocks: OrderedDict[BlockKey, Block | BlockPart] = OrderedDict()

    def get(self, key: BlockKey) -> Block | None:
        """The block, which becomes the most recently used one; `None` if it must be read."""
        block = self._blocks.get(key)
        if block is None:
            return None
        if isinstance(block, BlockPart):
            block = self._blocks[key] = block.cut()
        self._blocks.move_to_end(key)
        return block

    def has(self, key: BlockKey) -> bool:
        """Whether the block is cached; from another thread only an estimate."""
        return key in self._blocks

    def put(self, key: BlockKey, block: Block | BlockPart) -> None:
        """Keep a block; a block larger than the whole cache is not kept.

        A part is cut out of its block when it is first used: a reader that walks through a topic
        uses few parts again. Put all parts of a block one after the other.
        """
        if key in self._blocks or _cost(block) > self.max_bytes:
            return
        self._blocks[key] = block
        self.held_bytes += _cost(block)
        while self.held_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.held_bytes -= _cost(oldest)
        assert self.held_bytes >= 0

    def forget(self, topic_id: int, segment_id: int) -> None:
        """Remove the blocks of a segment, in which its damaged rows are blank."""
        for key in [key for key in self._blocks if key[:2] == (topic_id, segment_id)]:
            self.held_bytes -= _cost(self._blocks.pop(key))


def _cost(block: Block | BlockPart) -> int:
    if isinstance(block, BlockPart):
        return block.cost()
    return len(block.body) + _OVERHEAD_BYTES * block.count
