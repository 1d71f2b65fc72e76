"""Reads the parts of a snapshot without the engine.

Their fields are the structs of `storage_types`, which the engine writes (docs/FORMATS.md);
`tests/storage/test_dump.py` checks that both sides agree. Used by `wal/tools/dump.py` and
`wal/tools/verify.py` only: recovery restores parts itself.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from topics_server.values.blocks import Block, decode_block
from topics_server.values.errors import Corrupt
from topics_server.values.storage_types import (
    LEASES_PARTS,
    ROUTERS_PARTS,
    SESSIONS_PARTS,
    TOPIC_PARTS,
    VIEWS_PARTS,
    EncodedPart,
    LeasesPart,
    PartDecoder,
    RoutersPart,
    SessionsPart,
    TopicPart,
    ViewsPart,
)

Part = TypeVar("Part", TopicPart, SessionsPart, LeasesPart, RoutersPart, ViewsPart)


def decode_part(encoded: EncodedPart) -> TopicPart:
    """Decode a topic's part. Raises `Corrupt` for invalid bytes."""
    return _decode(TOPIC_PARTS, encoded)


def tail_blocks(part: TopicPart) -> list[tuple[Block, bytes]]:
    """The decoded tail: blocks, and their dead flags. Raises `Corrupt`."""
    try:
        found = [(decode_block(kept.block), kept.dead) for kept in part.tail]
    except ValueError as error:
        raise Corrupt(f"tail of topic {part.topic_id}: {error}") from None
    if any(block.count != len(dead) for block, dead in found):
        raise Corrupt(f"tail of topic {part.topic_id}: flags do not fit their block")
    return found


def flipped_rows(part: TopicPart, segment_id: int) -> list[int]:
    """Dead rows of a segment whose flag may not be set yet."""
    rows: list[int] = np.frombuffer(part.flips.get(segment_id, b""), "<u4").tolist()
    return rows


def decode_sessions(encoded: EncodedPart) -> SessionsPart:
    """Decode a part of the watch sessions. Raises `Corrupt` for invalid bytes."""
    return _decode(SESSIONS_PARTS, encoded)


def decode_leases(encoded: EncodedPart) -> LeasesPart:
    """Decode a part of the leases. Raises `Corrupt` for invalid bytes."""
    return _decode(LEASES_PARTS, encoded)


def decode_routers(encoded: EncodedPart) -> RoutersPart:
    """Decode a part of the routers. Raises `Corrupt` for invalid bytes."""
    return _decode(ROUTERS_PARTS, encoded)


def decode_views(encoded: EncodedPart) -> ViewsPart:
    """Decode a part of the views. Raises `Corrupt` for invalid bytes."""
    return _decode(VIEWS_PARTS, encoded)


def _decode(parts: PartDecoder[Part], encoded: EncodedPart) -> Part:
    try:
        return parts.decode(encoded)
    except ValueError as error:
        raise Corrupt(str(error)) from None
