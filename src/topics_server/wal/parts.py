"""What a snapshot's part of a topic says, for reading without the engine.

The bytes are those of `engine/capture.py` (docs/FORMATS.md); `tests/storage/test_dump.py` holds
that both agree. Used by `wal/dump.py` and `wal/verifying.py` only: recovery restores parts itself.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from topics_server.blocks import Block, decode_block
from topics_server.errors import Corrupt
from topics_server.model import TopicConfig

_VERSION: Final = 1


class TailPart(msgspec.Struct, frozen=True, array_like=True):
    """An encoded block of the unsealed tail and, one byte a record, which are dead."""

    block: bytes
    dead: bytes
    last_lsn: int


class PartView(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a part, in the order in which they lie there."""

    version: int
    topic_id: int
    name: str
    epoch: int
    config: TopicConfig
    created_ts: int
    applied_lsn: int
    head_seq: int
    ceiling_seq: int
    journaled_seq: int
    evict_floor: int
    last_ts: int
    last_write_ts: int | None
    last_read_ts: int | None
    damaged_records: int
    next_segment_id: int
    holes: list[Any]
    losses: list[Any]
    keys: dict[str, Any]
    flips: dict[int, bytes]
    tail: list[TailPart]

    def blocks(self) -> list[tuple[Block, bytes]]:
        """The tail decoded. Raises `Corrupt`."""
        try:
            found = [(decode_block(kept.block), kept.dead) for kept in self.tail]
        except ValueError as error:
            raise Corrupt(f"tail of topic {self.topic_id}: {error}") from None
        if any(block.count != len(dead) for block, dead in found):
            raise Corrupt(f"tail of topic {self.topic_id}: flags do not fit their block")
        return found

    def flipped_rows(self, segment_id: int) -> list[int]:
        """Rows of a segment that are dead though their flag may not be set yet."""
        rows: list[int] = np.frombuffer(self.flips.get(segment_id, b""), "<u4").tolist()
        return rows


_DECODER: Final = msgspec.msgpack.Decoder(PartView)


def decode_part(encoded: bytes) -> PartView:
    """Raises `Corrupt` for bytes that are no part of a topic."""
    try:
        part = _DECODER.decode(encoded)
    except msgspec.DecodeError as error:
        raise Corrupt(f"not a topic's part: {error}") from None
    if part.version != _VERSION:
        raise Corrupt(f"part of topic {part.topic_id} has version {part.version}, not {_VERSION}")
    return part
