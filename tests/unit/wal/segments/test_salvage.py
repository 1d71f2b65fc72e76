"""An index rebuilt from damaged records: intact ones stay readable, the others are reported."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.storage.segments.segment_samples import sample_block, sample_blocks, with_bytes
from topics_server.values.errors import Damaged
from topics_server.wal.format.json_objects import STAMP_BYTES
from topics_server.wal.format.manifest import SegmentEntry
from topics_server.wal.format.segment import DATA_HEADER_BYTES, SegmentColumns, decode_index
from topics_server.wal.format.segment_blocks import unpack_block
from topics_server.wal.segments.files import entry_of
from topics_server.wal.segments.packing import pack
from topics_server.wal.segments.salvage import rebuild_index

COUNT = 60
VECTORS = Path(__file__).parents[3] / "vectors" / "segments"


Packed = tuple[bytes, bytes, SegmentEntry]


def packed_as(layout: str) -> Packed:
    """The run in a layout: one bytes record keeps a segment from JSON objects."""
    blocks = sample_blocks(5, COUNT)
    data, idx = pack(1, 3, blocks if layout == "objects" else with_bytes(blocks), bytes(COUNT))
    assert decode_index(idx).is_json == (layout == "objects")
    return data, idx, entry_of(3, data, idx)


@pytest.fixture(params=["records", "objects"])
def packed(request: pytest.FixtureRequest) -> Packed:
    """The run in both layouts."""
    return packed_as(request.param)


def readable(data: bytes, columns: SegmentColumns) -> set[int]:
    """Rows that read as before; fails if a row reads as anything else."""
    rows = set[int]()
    for row in range(COUNT):
        start = int(columns.rows["offset"][row])
        try:
            block = unpack_block(data[start : columns.record_end(row)], columns, row, row + 1)
        except Damaged:
            continue
        expected = sample_block(5 + row, 1)
        assert msgspec.structs.replace(block, kinds=expected.kinds) == expected
        rows.add(row)
    return rows


def row_at(columns: SegmentColumns, offset: int) -> int:
    """The row of the record, or of the stamp, to which a byte belongs."""
    if offset >= columns.records_end:
        return (offset - columns.records_end) // STAMP_BYTES
    if offset < int(columns.rows["offset"][0]):
        ends = DATA_HEADER_BYTES + np.cumsum(columns.rows["tag_bytes"])
        return int(np.searchsorted(ends, offset, "right"))
    return sum(int(start) <= offset for start in columns.rows["offset"]) - 1


def test_one_damaged_byte_costs_one_record(packed: Packed) -> None:
    data, idx, entry = packed
    columns = decode_index(idx)
    for offset in range(DATA_HEADER_BYTES, len(data) - COUNT, 3):
        broken = bytearray(data)
        broken[offset] ^= 0x02
        rebuilt = decode_index(rebuild_index(bytes(broken), 1, entry))
        assert readable(bytes(broken), rebuilt) == set(range(COUNT)) - {row_at(columns, offset)}
        # The checksums of its group, of the rows, and of tags and stamps: records are read alone.
        expected = [False, True, False] if rebuilt.is_json else [False, True]
        assert (rebuilt.sums != 0).tolist() == expected


def test_a_damaged_header_of_the_file_costs_nothing(packed: Packed) -> None:
    data, idx, entry = packed
    for offset in range(DATA_HEADER_BYTES):
        broken = bytearray(data)
        broken[offset] ^= 0xFF
        assert rebuild_index(bytes(broken), 1, entry) == idx


@pytest.mark.parametrize("seed", range(20))
def test_damaged_stretches_cost_the_records_they_touch(seed: int, packed: Packed) -> None:
    rng = random.Random(seed)
    data, idx, entry = packed
    columns = decode_index(idx)
    broken, lost = bytearray(data), set[int]()
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(DATA_HEADER_BYTES, len(data) - COUNT)
        end = min(len(data) - COUNT, start + rng.choice((1, 40, 512)))
        broken[start:end] = bytes(byte ^ 0x81 for byte in data[start:end])
        lost |= {row_at(columns, offset) for offset in range(start, end)}
    rebuilt = decode_index(rebuild_index(bytes(broken), 1, entry))
    # Two changes of the same bytes may have restored them.
    assert readable(bytes(broken), rebuilt) >= set(range(COUNT)) - lost
    # With the records back, the index equals the old one.
    assert rebuild_index(data, 1, entry) == idx


def test_lost_rows_have_no_checksum_that_could_hold_and_no_tag(packed: Packed) -> None:
    data, idx, entry = packed
    at = int(decode_index(idx).rows["offset"][7]) + 20
    broken = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    rows = decode_index(rebuild_index(broken, 1, entry)).rows
    assert [row for row in range(COUNT) if not rows["xxh3"][row]] == [7]
    times = rows["ts"].tolist()
    assert times == sorted(times)


@pytest.mark.parametrize("name", ["five", "five-v3", "five-v4"])
def test_the_index_of_a_golden_segment_is_made_again(name: str) -> None:
    data, idx = (VECTORS.joinpath(name + suffix).read_bytes() for suffix in (".data", ".idx"))
    assert rebuild_index(data, 7, entry_of(5, data, idx)) == idx


def test_an_index_is_made_whatever_the_flags_say(packed: Packed) -> None:
    data, idx, entry = packed
    assert rebuild_index(data[:-COUNT] + b"\xff" * COUNT, 1, entry) == idx


@pytest.mark.parametrize("name", ["five-v3", "five-v4"])
def test_a_damaged_header_does_not_change_the_version_of_the_index(name: str) -> None:
    data, idx = (VECTORS.joinpath(name + suffix).read_bytes() for suffix in (".data", ".idx"))
    entry = entry_of(5, data, idx)
    assert rebuild_index(b"?" + data[1:], 7, entry) == idx
