"""A cache of recently read segment blocks, bounded in bytes. Pure.

A block is evicted least recently used first; a reader that holds one keeps it alive. Keys are
`(topic id, segment id, group)`, and ids are never reused; the blocks of a mended segment are
forgotten. So nothing in here can outlive its meaning.
"""

from __future__ import annotations

from collections import OrderedDict

from topics_server.values.blocks import Block

BlockKey = tuple[int, int, int]

# Memory of a block beside its payload: columns, lists and the objects themselves, per record.
_OVERHEAD_BYTES = 48


class BlockCache:
    """LRU of blocks; `max_bytes` counts payloads and a flat overhead per record."""

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes > 0
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._blocks: OrderedDict[BlockKey, Block] = OrderedDict()

    def get(self, key: BlockKey) -> Block | None:
        """The block, now the most recently used; `None` if it must be read."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def has(self, key: BlockKey) -> bool:
        """Whether the block is there, as far as another thread can tell."""
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
        """Forget the blocks of a segment: its damaged rows are blank in them."""
        for key in [key for key in self._blocks if key[:2] == (topic_id, segment_id)]:
            self.held_bytes -= _cost(self._blocks.pop(key))


def _cost(block: Block) -> int:
    return len(block.body) + _OVERHEAD_BYTES * block.count
