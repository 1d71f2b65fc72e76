"""Reads the parts of a snapshot without the engine.

Their fields are the structs of `handoff`, which the engine writes (docs/FORMATS.md);
`tests/storage/test_dump.py` holds that both sides agree. Used by `wal/tools/dump.py` and
`wal/tools/verify.py` only: recovery restores parts itself.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
import numpy as np

from topics_server.values.blocks import Block, decode_block
from topics_server.values.errors import Corrupt
from topics_server.values.storage_types import LeasesPart, RoutersPart, SessionsPart, TopicPart

Part = TypeVar("Part", SessionsPart, LeasesPart, RoutersPart)

_VERSION: Final = 1
_SESSIONS_VERSION: Final = 1
_LEASES_VERSION: Final = 1
_ROUTERS_VERSION: Final = 1

_DECODER: Final = msgspec.msgpack.Decoder(TopicPart)
_SESSIONS_DECODER: Final = msgspec.msgpack.Decoder(SessionsPart)
_LEASES_DECODER: Final = msgspec.msgpack.Decoder(LeasesPart)
_ROUTERS_DECODER: Final = msgspec.msgpack.Decoder(RoutersPart)


def decode_part(encoded: bytes) -> TopicPart:
    """Raises `Corrupt` for bytes that are no part of a topic."""
    try:
        part = _DECODER.decode(encoded)
    except msgspec.DecodeError as error:
        raise Corrupt(f"not a topic's part: {error}") from None
    if part.version != _VERSION:
        raise Corrupt(f"part of topic {part.topic_id} has version {part.version}, not {_VERSION}")
    return part


def tail_blocks(part: TopicPart) -> list[tuple[Block, bytes]]:
    """The tail decoded: blocks, and which of their records are dead. Raises `Corrupt`."""
    try:
        found = [(decode_block(kept.block), kept.dead) for kept in part.tail]
    except ValueError as error:
        raise Corrupt(f"tail of topic {part.topic_id}: {error}") from None
    if any(block.count != len(dead) for block, dead in found):
        raise Corrupt(f"tail of topic {part.topic_id}: flags do not fit their block")
    return found


def flipped_rows(part: TopicPart, segment_id: int) -> list[int]:
    """Rows of a segment that are dead though their flag may not be set yet."""
    rows: list[int] = np.frombuffer(part.flips.get(segment_id, b""), "<u4").tolist()
    return rows


def decode_sessions(encoded: bytes) -> SessionsPart:
    """Raises `Corrupt` for bytes that are no part of the watch sessions."""
    return _decode(_SESSIONS_DECODER, encoded, _SESSIONS_VERSION, "watch sessions")


def decode_leases(encoded: bytes) -> LeasesPart:
    """Raises `Corrupt` for bytes that are no part of the leases."""
    return _decode(_LEASES_DECODER, encoded, _LEASES_VERSION, "leases")


def decode_routers(encoded: bytes) -> RoutersPart:
    """Raises `Corrupt` for bytes that are no part of the routers."""
    return _decode(_ROUTERS_DECODER, encoded, _ROUTERS_VERSION, "routers")


def _decode(decoder: msgspec.msgpack.Decoder[Part], encoded: bytes, version: int, of: str) -> Part:
    try:
        part = decoder.decode(encoded)
    except msgspec.DecodeError as error:
        raise Corrupt(f"not a part of the {of}: {error}") from None
    if part.version != version:
        raise Corrupt(f"part of the {of} has version {part.version}, not {version}")
    return part
