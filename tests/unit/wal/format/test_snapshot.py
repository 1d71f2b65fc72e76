"""Bytes of snapshots: a golden vector, one flipped byte gives one verdict, pieces of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.storage_types import ShardSync
from topics_server.wal.format.snapshot import (
    HEADER_BYTES,
    PIECE_BYTES,
    PIECE_PARTS,
    SnapshotHeader,
    check_table,
    decode_header,
    decode_journal,
    decode_parts,
    encode_header,
    encode_journal,
    encode_pieces,
    spans,
)

VECTOR = Path(__file__).parents[3] / "vectors" / "snapshots" / "three_parts-v2.snap"
OLD_VECTOR = VECTOR.with_name("three_parts.snap")
JOURNAL = "93010792940100291e940101cf100000000000000029"
PARTS = [(3, b"three"), (0, b""), (2**40, bytes(range(256)))]


def encode(parts: list[tuple[int, bytes]]) -> bytes:
    pieces = list(encode_pieces(parts))
    body = b"".join(part for bodies, _ in pieces for part in bodies)
    table = np.concatenate([rows for _, rows in pieces]).tobytes() if pieces else b""
    header = SnapshotHeader(41, 99, 12, len(parts), HEADER_BYTES + len(body))
    assert header.file_bytes == HEADER_BYTES + len(body) + len(table)
    return encode_header(header, table) + body + table


def decode(encoded: bytes, piece_bytes: int = 100) -> list[tuple[int, bytes]]:
    header = decode_header(encoded)
    table = check_table(encoded[:HEADER_BYTES], encoded[header.table_offset :])
    parts: list[tuple[int, bytes]] = []
    for first, end, offset, length in spans(table, piece_bytes):
        pieces = decode_parts(encoded[offset : offset + length], table[first:end])
        parts += [(part_id, bytes(part)) for part_id, part in pieces]
    return parts


def test_the_golden_snapshot_is_decoded_and_encoded_again() -> None:
    encoded = VECTOR.read_bytes()
    header = decode_header(encoded)
    assert (header.start_lsn, header.last_lsn, header.next_topic_id) == (41, 99, 12)
    assert decode(encoded) == PARTS
    assert encode(PARTS) == encoded


def test_a_snapshot_of_version_1_is_read() -> None:
    assert decode(OLD_VECTOR.read_bytes()) == PARTS


def test_what_it_knows_of_the_journal_is_decoded_again() -> None:
    shards = [ShardSync(1, 0, 41, 30), ShardSync(1, 1, 2**60, 41)]
    part = decode_journal(encode_journal(7, shards))
    assert (part.run, list(part.shards)) == (7, shards)
    assert encode_journal(7, shards).hex() == JOURNAL


@pytest.mark.parametrize("broken", [b"", b"\x93\x02\x07\x90", b"\x92\x01\x07", b"\xc1"])
def test_what_is_no_part_of_the_journal_is_refused(broken: bytes) -> None:
    with pytest.raises(Corrupt, match="of the journal"):
        decode_journal(broken)


@pytest.mark.parametrize("offset", range(len(VECTOR.read_bytes())))
def test_every_flipped_byte_is_refused(offset: int) -> None:
    broken = bytearray(VECTOR.read_bytes())
    broken[offset] ^= 0x01
    with pytest.raises(StorageError):
        decode(bytes(broken))


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES, 300, 396])
def test_a_short_snapshot_is_corrupt(length: int) -> None:
    with pytest.raises(Corrupt):
        decode(VECTOR.read_bytes()[:length])


def test_a_newer_version_refuses_to_start() -> None:
    broken = bytearray(VECTOR.read_bytes())
    broken[8] = 3
    with pytest.raises(StartRefused, match="newer"):
        decode_header(bytes(broken))


@given(st.lists(st.tuples(st.integers(0, 2**63), st.binary(max_size=300)), max_size=40))
def test_whatever_is_encoded_is_decoded(parts: list[tuple[int, bytes]]) -> None:
    assert decode(encode(parts)) == parts


def test_pieces_are_bounded_in_parts_and_bytes() -> None:
    parts = [(n, b"x" * 3000) for n in range(2000)]
    parts.insert(700, (9, bytes(3 * PIECE_BYTES)))
    sizes = [(len(bodies), sum(map(len, bodies))) for bodies, _ in encode_pieces(parts)]
    assert max(count for count, _ in sizes) <= PIECE_PARTS
    assert all(size <= PIECE_BYTES or count == 1 for count, size in sizes)
    assert sum(count for count, _ in sizes) == len(parts)
