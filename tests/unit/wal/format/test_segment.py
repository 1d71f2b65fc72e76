"""Bytes of segments: golden vectors, and one flipped byte gives one verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.segments.segment_samples import sample_blocks
from topics_server.values.errors import Corrupt, Damaged, StartRefused, StorageError
from topics_server.wal.format.segment import (
    DATA_HEADER_BYTES,
    DEAD,
    IDX_HEADER_BYTES,
    SegmentColumns,
    bad_rows,
    damaged_flags,
    decode_data_header,
    decode_index,
    encode_data_header,
    padded,
)
from topics_server.wal.format.segment_blocks import unpack_block
from topics_server.wal.segments.packing import pack

VECTORS = Path(__file__).parents[3] / "vectors" / "segments"
COUNT = 40
FIRST_SEQ = 101
DEAD_ROWS = (3, 17)


# Versions 1, 3 and 4.
NAMES = ("five", "five-v3", "five-v4")


def vector(name: str = NAMES[-1]) -> tuple[bytes, bytes]:
    """Topic 7, segment 5: 40 records from seq 101, rows 3 and 17 packed dead."""
    return (VECTORS / f"{name}.data").read_bytes(), (VECTORS / f"{name}.idx").read_bytes()


def dead_rows() -> bytes:
    return bytes(row in DEAD_ROWS for row in range(COUNT))


def span(columns: SegmentColumns, first_row: int, end_row: int) -> slice:
    return slice(int(columns.rows["offset"][first_row]), columns.record_end(end_row - 1))


def test_packing_the_sample_makes_the_golden_bytes() -> None:
    assert pack(7, 5, sample_blocks(FIRST_SEQ, COUNT), dead_rows()) == vector()


@pytest.mark.parametrize("name", NAMES)
def test_golden_header_is_decoded_and_encoded_again(name: str) -> None:
    data, _ = vector(name)
    header = decode_data_header(data)
    assert (header.topic_id, header.segment_id, header.record_count) == (7, 5, COUNT)
    assert header.first_seq == FIRST_SEQ
    assert header.file_bytes == len(data)
    assert encode_data_header(header) == data[:DATA_HEADER_BYTES]


@pytest.mark.parametrize("name", NAMES)
def test_flags_end_the_file_and_name_the_rows_packed_dead(name: str) -> None:
    data, _ = vector(name)
    flags = data[decode_data_header(data).flags_offset :]
    assert [row for row, flag in enumerate(flags) if flag == DEAD] == list(DEAD_ROWS)
    assert set(flags) == {0, DEAD}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("first_row", "end_row"), [(0, 16), (16, 32), (5, 6), (30, 40), (4, 17)])
def test_rows_come_back_as_they_were_packed(first_row: int, end_row: int, name: str) -> None:
    data, idx = vector(name)
    columns = decode_index(idx)
    block = unpack_block(data[span(columns, first_row, end_row)], columns, first_row, end_row)
    (whole,) = sample_blocks(FIRST_SEQ, COUNT, step=COUNT)
    assert block.first_seq == FIRST_SEQ + first_row
    assert block.count == end_row - first_row
    for row in range(block.count):
        at = first_row + row
        assert block.times[row] == whole.times[at]
        if at in DEAD_ROWS:
            assert (block.data(row), block.meta(row), block.tags[row]) == (b"", b"", None)
            continue
        assert (block.data(row), block.meta(row)) == (whole.data(at), whole.meta(at))
        assert (block.tags[row], block.nodes[row]) == (whole.tags[at], whole.nodes[at])
        assert (block.kinds[row], block.hops[row]) == (whole.kinds[at], whole.hops[at])


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_byte_of_a_record_is_damage_of_that_row(name: str) -> None:
    data, idx = vector(name)
    columns = decode_index(idx)
    where = span(columns, 0, COUNT)
    for row in (0, 3, 20, COUNT - 1):
        record = span(columns, row, row + 1)
        # The record's own copy of the checksum, or the comma; `verify` compares it.
        for offset in range(record.start, record.stop - columns.tail_bytes):
            broken = bytearray(data)
            broken[offset] ^= 0x40
            with pytest.raises(Damaged) as caught:
                unpack_block(bytes(broken[where]), columns, 0, COUNT)
            assert (caught.value.first_row, caught.value.last_row) == (row, row)
            assert bad_rows(bytes(broken[where]), columns, 0, COUNT) == [row]


def test_a_range_that_ends_early_is_damaged_from_there_on() -> None:
    data, idx = vector()
    columns = decode_index(idx)
    where = span(columns, 0, COUNT)
    cut = data[where.start : int(columns.rows["offset"][30]) + 4]
    with pytest.raises(Damaged) as caught:
        unpack_block(cut, columns, 0, COUNT)
    assert (caught.value.first_row, caught.value.last_row) == (30, COUNT - 1)


@pytest.mark.parametrize("offset", range(DATA_HEADER_BYTES))
def test_a_flipped_byte_of_the_header_is_refused(offset: int) -> None:
    data, _ = vector()
    broken = bytearray(data)
    broken[offset] ^= 0x01
    with pytest.raises(StorageError):
        decode_data_header(bytes(broken))


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_byte_of_the_index_is_refused(name: str) -> None:
    _, idx = vector(name)
    for offset in range(len(idx)):
        broken = bytearray(idx)
        broken[offset] ^= 0x10
        with pytest.raises((Corrupt, StartRefused)):
            decode_index(bytes(broken))


def test_an_index_of_version_3_gets_checksums_of_its_rows() -> None:
    _, idx = vector("five-v3")
    mapped = bytearray(idx)
    columns = decode_index(memoryview(mapped), verify=False)
    assert columns.sums.tolist() == decode_index(vector("five-v4")[1]).sums.tolist()
    columns.check_rows(range(COUNT))
    mapped[IDX_HEADER_BYTES + 5] ^= 1
    with pytest.raises(Corrupt, match="damaged"):
        columns.check_rows(range(COUNT))
    # Nothing tells which rows were damaged before.
    with pytest.raises(Corrupt, match="checksum"):
        decode_index(memoryview(mapped), verify=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_search_for_a_tag_finds_exactly_its_rows_or_a_damaged_index(name: str) -> None:
    _, idx = vector(name)
    sound = decode_index(idx)
    wanted = [(sound.tags[number], False) for number in range(len(sound.tags))]
    wanted += [(b"", True), (sound.tags[0][:1], True), (b"no such tag", False)]
    expected = [sound.tag_range(tag, is_prefix=prefix).tolist() for tag, prefix in wanted]
    assert sum(map(len, expected)) > len(wanted)
    for at in range(_section(sound, 1)[0], _section(sound, 4)[1]):
        for bit in (0, 3, 7):
            mapped = bytearray(idx)
            columns = decode_index(memoryview(mapped))
            mapped[at] ^= 1 << bit
            for (tag, prefix), rows in zip(wanted, expected, strict=True):
                try:
                    found = columns.tag_range(tag, is_prefix=prefix).tolist()
                except Corrupt:
                    continue
                assert found == rows, (at, bit, tag)


def _section(columns: SegmentColumns, number: int) -> tuple[int, int]:
    """Where a section of the index begins and ends: 0 rows, 1 offsets of tags, and so on."""
    parts = (
        columns.rows.nbytes,
        columns.tags.offsets.nbytes,
        columns.tag_starts.nbytes,
        columns.tag_rows.nbytes,
        len(columns.tags.text),
    )
    start = IDX_HEADER_BYTES + sum(map(padded, parts[:number]))
    return start, start + parts[number]


@pytest.mark.parametrize("length", [0, 10, IDX_HEADER_BYTES - 1, IDX_HEADER_BYTES, 500])
def test_a_short_index_is_corrupt(length: int) -> None:
    with pytest.raises(Corrupt):
        decode_index(vector()[1][:length])


def test_a_newer_version_refuses_to_start_instead_of_reading_as_damage() -> None:
    data, idx = (bytearray(part) for part in vector())
    data[8] = idx[8] = 5
    with pytest.raises(StartRefused, match="newer"):
        decode_data_header(bytes(data))
    with pytest.raises(StartRefused, match="newer"):
        decode_index(bytes(idx))


@pytest.mark.parametrize("value", [0x01, 0x7F, 0xFE])
def test_a_flag_that_is_neither_live_nor_dead_is_damage(value: int) -> None:
    assert damaged_flags(bytes([0, DEAD, value, 0])).tolist() == [2]


def test_dictionaries_ascend_by_their_bytes_and_know_their_rows() -> None:
    columns = decode_index(vector()[1])
    tags = [columns.tags[number] for number in range(len(columns.tags))]
    assert tags == sorted(set(tags))
    assert "ähre".encode() in tags
    (whole,) = sample_blocks(FIRST_SEQ, COUNT, step=COUNT)
    for tag in tags:
        rows = columns.tag_range(tag, is_prefix=False).tolist()
        assert rows == [
            row for row in range(COUNT) if whole.tags[row] == tag.decode() and row not in DEAD_ROWS
        ]
    assert columns.tag_range(b"absent", is_prefix=False).tolist() == []
    assert columns.tag_range(b"zz", is_prefix=True).tolist() == []
