"""The bytes of a shard's end mark: how far its journal reaches.

A file of four slots, each in a page of its own. *Notes* use slots 0 and 1 in turn and are not
synced. *Beginnings* use slots 2 and 3 in turn and are synced at once: they name a file before it
gets a group. Each write overwrites the older slot of its pair, so a torn slot never destroys the
newest beginning, and a power cut never restores a mark of an earlier file. Little-endian.

    slot n at n * 4096, each 96 bytes, the rest zeros
    +0  magic "topicsEM"   +8  u32 version    +12 u32 wal set   +16 u32 shard   +20 u32 run
    +24 u64 counter        +32 u64 number     +40 u64 file id
    +48 u64 written end    +56 u64 synced end +64 u64 written lsn  +72 u64 synced lsn
    +80 u32 flags (1: a sync is under way, or has failed)           +84 u32 slot
    +88 u64 XXH3-64 of +0..+88

Of the slots whose checksum holds, the one with the highest counter is valid. `end_mark_file` reads
and writes the file; docs/FORMATS.md shows its layout. Called by `end_mark_file`, `wal_file` and
`anchors`.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import xxhash

from topics_server.values.errors import StartRefused

VERSION: Final = 1
MAGIC: Final = b"topicsEM"
SLOT_BYTES: Final = 96
SLOT_DISTANCE: Final = 4096
NOTES: Final = (0, 1)
BEGINNINGS: Final = (2, 3)
SLOTS: Final = (*NOTES, *BEGINNINGS)
FILE_BYTES: Final = len(SLOTS) * SLOT_DISTANCE

_SLOT: Final = struct.Struct("<8sIIIIQQQQQQQII")
_HASH: Final = struct.Struct("<Q")
_SYNCING: Final = 1

assert _SLOT.size + _HASH.size == SLOT_BYTES <= SLOT_DISTANCE


class EndMark(msgspec.Struct, frozen=True, order=True, gc=False):
    """The mark's facts about the current journal file and the shard's lsns.

    Groups were written below `written_end` and synced below `synced_end`. `written_lsn` and
    `synced_lsn` are the last ones of the shard, whichever file holds them. `is_syncing`: a sync was
    under way, or had failed, when the mark was written. Marks are compared, field by field.
    """

    run: int
    number: int
    file_id: int
    written_end: int
    synced_end: int
    written_lsn: int
    synced_lsn: int
    is_syncing: bool = False


def encode_slot(wal_set: int, shard: int, slot: int, counter: int, mark: EndMark) -> bytes:
    """The bytes of a slot."""
    assert slot in SLOTS
    head = _SLOT.pack(
        MAGIC,
        VERSION,
        wal_set,
        shard,
        mark.run,
        counter,
        mark.number,
        mark.file_id,
        mark.written_end,
        mark.synced_end,
        mark.written_lsn,
        mark.synced_lsn,
        _SYNCING if mark.is_syncing else 0,
        slot,
    )
    return head + _HASH.pack(xxhash.xxh3_64_intdigest(head))


def decode(data: bytes, wal_set: int, shard: int) -> dict[int, tuple[int, EndMark]]:
    """Counter and mark of every slot with a valid checksum.

    Raises `StartRefused` for an unknown version.
    """
    found = {slot: _decode_slot(data, slot, wal_set, shard) for slot in SLOTS}
    return {slot: each for slot, each in found.items() if each is not None}


def _decode_slot(data: bytes, slot: int, wal_set: int, shard: int) -> tuple[int, EndMark] | None:
    at = slot * SLOT_DISTANCE
    if len(data) < at + SLOT_BYTES:
        return None
    (checksum,) = _HASH.unpack_from(data, at + _SLOT.size)
    if checksum != xxhash.xxh3_64_intdigest(data[at : at + _SLOT.size]):
        return None
    magic, version, of_set, of_shard, run, counter, *_ = fields = _SLOT.unpack_from(data, at)
    number, file_id, written_end, synced_end, written_lsn, synced_lsn, flags, of_slot = fields[6:]
    if magic != MAGIC or (of_set, of_shard, of_slot) != (wal_set, shard, slot):
        return None
    if version != VERSION:
        raise StartRefused(f"end mark of version {version}; this server reads {VERSION}")
    is_syncing = bool(flags & _SYNCING)
    return counter, EndMark(
        run, number, file_id, written_end, synced_end, written_lsn, synced_lsn, is_syncing
    )
