"""A cache of recently read segment blocks, bounded in bytes. Pure.

The least recently used block is evicted first; a reader that holds a block keeps it alive. Keys are
`(topic id, segment id, group)`, and ids are never reused; the blocks of a mended segment are
removed. So no entry is ever out of date.
"""

from __future__ import annotations

from collections import OrderedDict

from topics_server.values.blocks import Block

BlockKey = tuple[int, int, int]

# Memory of a block in addition to its payload, per record: columns, lists and objects.
_OVERHEAD_BYTES = 48


class BlockCache:
    """LRU of blocks; `max_bytes` counts payloads and a flat overhead per record."""

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes > 0
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._blocks: OrderedDict[BlockKey, Block] = OrderedDict()

    def get(self, key: BlockKey) -> Block | None:
        """The block, which becomes the most recently used one; `None` if it must be read."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def has(self, key: BlockKey) -> bool:
        """Whether the block is cached; from another thread only an estimate."""
        return key in self._blocks

    def put(self, key: BlockKey, block: Block) -> None:
        """Keep a block; a block larger than the whole cache is not kept."""
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


def _cost(block: Block) -> int:
    return len(block.body) + _OVERHEAD_BYTES * block.count
