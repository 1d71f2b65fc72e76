"""The bytes of a snapshot.

Pure. `wal/snapshots/store.py` writes and reads snapshots in pieces, so that a hundred thousand
parts neither hold the interpreter lock for long nor are in memory twice. docs/FORMATS.md shows
their full layout.

    header: magic 8 | version u16 | 0 u16 | 0 u32 | start_lsn u64 | last_lsn u64
            | next_topic_id u64 | parts u64 | table offset u64 | checksum u64          (64 bytes)
    parts, one behind the other, from byte 64
    table: (topic id u64 | length u64 | XXH3-64 of the part u64) a part

The checksum covers the header before it and the table, and so, through the table, every part.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from topics_server.values.errors import Corrupt, StartRefused
from topics_server.values.limits import MIB
from topics_server.values.storage_types import EncodedPart, JournalPart, ShardSync

VERSION: Final = 2
# Snapshots of this version have no journal part.
_VERSION_WITHOUT_JOURNAL: Final = 1
MAGIC: Final = b"topicsSN"
_HEADER: Final = struct.Struct("<8sHHIQQQQQ")
_HASH: Final = struct.Struct("<Q")
HEADER_BYTES: Final = 64
# The size of a piece: it is joined and hashed before the write releases the interpreter's lock.
PIECE_BYTES: Final = MIB
PIECE_PARTS: Final = 512
ROW: Final = np.dtype([("topic_id", "<u8"), ("length", "<u8"), ("xxh3", "<u8")])
Table = npt.NDArray[Any]
_JOURNAL_VERSION: Final = 1
_JOURNAL_ENCODER: Final = msgspec.msgpack.Encoder()
_JOURNAL_DECODER: Final = msgspec.msgpack.Decoder(JournalPart)

assert _HEADER.size + _HASH.size == HEADER_BYTES
assert ROW.itemsize == 24


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The first 64 bytes; `storage_types.SnapshotImage` explains the lsns."""

    start_lsn: int
    last_lsn: int
    next_topic_id: int
    part_count: int
    table_offset: int

    @property
    def table_bytes(self) -> int:
        """Size of the table, which ends the file."""
        return self.part_count * ROW.itemsize

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.table_offset + self.table_bytes


def encode_header(header: SnapshotHeader, table: bytes) -> bytes:
    """64 bytes; `decode_header` and `check_table` are the inverse."""
    assert len(table) == header.table_bytes
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        0,
        0,
        header.start_lsn,
        header.last_lsn,
        header.next_topic_id,
        header.part_count,
        header.table_offset,
    )
    return fields + _HASH.pack(_checksum(fields, table))


def _checksum(fields: bytes, table: bytes) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(table)
    return digest.intdigest()


def decode_header(encoded: bytes) -> SnapshotHeader:
    """The fields, which `check_table` verifies. Raises `Corrupt`, `StartRefused` (newer)."""
    if len(encoded) < HEADER_BYTES:
        raise Corrupt("shorter than a snapshot's header")
    magic, version, _, _, *fields = _HEADER.unpack_from(encoded)
    if magic != MAGIC:
        raise Corrupt(f"does not start with {MAGIC!r}")
    if version > VERSION:
        raise StartRefused(f"snapshot format {version} is newer than {VERSION}")
    if version not in (VERSION, _VERSION_WITHOUT_JOURNAL):
        raise Corrupt(f"unknown snapshot format {version}")
    return SnapshotHeader(*fields)


def check_table(encoded_header: bytes, table: bytes) -> Table:
    """The table's rows; raises `Corrupt` if header and table fail the checksum."""
    header = decode_header(encoded_header)
    expected: int = _HASH.unpack_from(encoded_header, _HEADER.size)[0]
    if len(table) != header.table_bytes or expected != _checksum(
        encoded_header[: _HEADER.size], table
    ):
        raise Corrupt("checksum of the snapshot's header and table fails")
    rows = np.frombuffer(table, ROW)
    if HEADER_BYTES + int(rows["length"].sum()) != header.table_offset:
        raise Corrupt("the snapshot's parts do not fill it")
    return rows


def encode_pieces(
    parts: Sequence[tuple[int, EncodedPart]],
) -> Iterator[tuple[list[EncodedPart], Table]]:
    """Pieces of the parts, one for each write, with their rows of the table.

    A piece is at most `PIECE_PARTS` parts and, unless it is one large part, `PIECE_BYTES`.
    """
    for at in range(0, len(parts), PIECE_PARTS):
        few = parts[at : at + PIECE_PARTS]
        bodies = [body for _, body in few]
        rows = np.empty(len(few), ROW)
        rows["topic_id"] = [topic_id for topic_id, _ in few]
        rows["length"] = np.fromiter(map(len, bodies), "<u8", len(few))
        ends = np.cumsum(rows["length"])
        first = 0
        while first < len(few):
            base = int(ends[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(ends, base + PIECE_BYTES, side="right")))
            piece = bodies[first:end]
            rows["xxh3"][first:end] = np.fromiter(
                map(xxhash.xxh3_64_intdigest, piece), "<u8", end - first
            )
            yield piece, rows[first:end]
            first = end


def spans(table: Table, piece_bytes: int = 4 * MIB) -> Iterator[tuple[int, int, int, int]]:
    """`(first part, end part, offset, bytes)` of consecutive parts to read in one call."""
    ends = np.cumsum(table["length"], dtype="<u8")
    first = 0
    while first < len(table):
        base = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, base + piece_bytes, side="right")))
        yield first, end, HEADER_BYTES + base, int(ends[end - 1]) - base
        first = end


def encode_journal(run: int, shards: Sequence[ShardSync]) -> bytes:
    """The part that holds the snapshot's knowledge of the journal."""
    return _JOURNAL_ENCODER.encode(JournalPart(_JOURNAL_VERSION, run, shards))


def decode_journal(encoded: EncodedPart) -> JournalPart:
    """The inverse of `encode_journal`. Raises `Corrupt`."""
    try:
        part = _JOURNAL_DECODER.decode(encoded)
    except msgspec.DecodeError as error:
        raise Corrupt(f"not a part of the journal: {error}") from None
    if part.version != _JOURNAL_VERSION:
        raise Corrupt(f"part of the journal has version {part.version}, not {_JOURNAL_VERSION}")
    return part


def decode_parts(chunk: bytes, rows: Table) -> list[tuple[int, memoryview]]:
    """The parts of one span as views of it, every checksum verified. Raises `Corrupt`.

    Copies of 100,000 parts would cost more time than everything else here.
    """
    lengths = rows["length"].astype("<i8")
    ends = np.cumsum(lengths)
    if not len(ends) or len(chunk) != int(ends[-1]):
        raise Corrupt("the snapshot ends within its parts")
    view = memoryview(chunk)
    bodies = list(map(view.__getitem__, map(slice, (ends - lengths).tolist(), ends.tolist())))
    found = np.fromiter(map(xxhash.xxh3_64_intdigest, bodies), "<u8", len(bodies))
    wrong = np.flatnonzero(found != rows["xxh3"])
    if len(wrong):
        raise Corrupt(f"checksum of the part of topic {int(rows['topic_id'][wrong[0]])} fails")
    return list(zip(rows["topic_id"].tolist(), bodies, strict=True))
