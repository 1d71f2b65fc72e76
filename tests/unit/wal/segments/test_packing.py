"""Packing and unpacking runs, property-based; rebuilding an index from its records."""

from __future__ import annotations

import json
from array import array
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.segments.segment_samples import sample_blocks
from topics_server.engine.log.block_slices import slice_block
from topics_server.values.blocks import Block, decode_block, encode_block, make_block
from topics_server.values.errors import Damaged
from topics_server.values.json_cache import DATA, META, TAGS, render_block
from topics_server.wal.format.segment import decode_data_header, decode_index
from topics_server.wal.format.segment_blocks import (
    unpack_block,
    unpack_json,
    unpack_row,
    unpack_rows,
)
from topics_server.wal.segments.files import entry_of
from topics_server.wal.segments.packing import pack
from topics_server.wal.segments.salvage import rebuild_index

NAMES = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
TRACE = b"\t00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
# Stored forms of `meta`: none, an object, that of a bytes record, and each with a trace.
METAS = st.binary(max_size=5) | st.sampled_from([b' {"c":1}', TRACE, TRACE + b' {"c":1}'])
RECORDS = st.lists(st.tuples(st.binary(max_size=30), METAS, NAMES, NAMES), min_size=1, max_size=40)


def block_of(first_seq: int, records: list[tuple[bytes, bytes, str | None, str | None]]) -> Block:
    datas, metas, tags, nodes = (list(column) for column in zip(*records, strict=True))
    times = array("q", range(len(records)))
    return make_block(first_seq, times, datas, metas, tags, nodes)


@given(RECORDS, RECORDS)
def test_whatever_is_packed_is_unpacked(
    first: list[tuple[bytes, bytes, str | None, str | None]],
    second: list[tuple[bytes, bytes, str | None, str | None]],
) -> None:
    blocks = [block_of(9, first), block_of(9 + len(first), second)]
    data, idx = pack(1, 2, blocks, bytes(len(first) + len(second)))
    columns = decode_index(idx)
    row = 0
    for block in blocks:
        end = row + block.count
        start = int(columns.rows["offset"][row])
        assert unpack_block(data[start : columns.record_end(end - 1)], columns, row, end) == block
        row = end
    entry = entry_of(2, data, idx)
    assert rebuild_index(data, 1, entry) == idx
    metas = [meta for _, meta, _, _ in first + second]
    is_traced = any(meta.startswith(TRACE[:1]) for meta in metas)
    has_bytes = any(meta.startswith(b" ") for meta in metas)
    version = 2 if is_traced else 1 if has_bytes else 4
    assert (data[8], idx[8], decode_data_header(data).version) == (version,) * 3
    for block in blocks:
        assert decode_block(encode_block(block)) == block


@given(RECORDS, st.data())
def test_a_row_alone_is_as_among_the_others(
    records: list[tuple[bytes, bytes, str | None, str | None]], data: st.DataObject
) -> None:
    dead = bytes(data.draw(st.lists(st.sampled_from((0, 1)), min_size=40, max_size=40)))
    packed, idx = pack(1, 2, [block_of(9, records)], dead[: len(records)])
    columns = decode_index(idx)
    for row in range(len(records)):
        start, end = int(columns.rows["offset"][row]), columns.record_end(row)
        raw = packed[start:end]
        alone = unpack_row(raw, columns, row)
        assert alone == unpack_block(raw, columns, row, row + 1)
        assert (alone.count, alone.first_seq) == (1, 9 + row)
    at = data.draw(st.integers(0, len(raw) - 1 - columns.tail_bytes))
    broken = raw[:at] + bytes((raw[at] ^ 0x10,)) + raw[at + 1 :]
    for wrong in (broken, raw[:at]):
        with pytest.raises(Damaged) as caught:
            unpack_row(wrong, columns, row)
        assert caught.value.ranges == ((row, row),)
        blank = unpack_row(wrong, columns, row, [(row, row)])
        assert (blank.data(0), blank.meta(0), blank.tags, blank.nodes) == (b"", b"", [None], [None])


@pytest.mark.parametrize("gap_bytes", [0, 70_000])
@given(RECORDS, st.data())
def test_rows_together_are_as_each_alone(
    gap_bytes: int,
    records: list[tuple[bytes, bytes, str | None, str | None]],
    data: st.DataObject,
) -> None:
    """Rows near each other are read at once; a dead record of `gap_bytes` separates two reads."""
    records = [*records, (b"x" * gap_bytes, b"", None, None), *records]
    packed, idx = pack(1, 2, [block_of(9, records)], bytes(len(records)))
    columns = decode_index(idx)
    reads: list[tuple[int, int]] = []

    def read(length: int, offset: int, source: bytes = packed) -> bytes:
        reads.append((length, offset))
        return source[offset : offset + length]

    rows = sorted(data.draw(st.sets(st.integers(0, len(records) - 1), min_size=1, max_size=6)))
    if data.draw(st.booleans()):
        rows.reverse()
    whole = unpack_block(
        packed[int(columns.rows["offset"][0]) : columns.records_end], columns, 0, len(records)
    )
    found = unpack_rows(read, columns, rows, 1 << 30)
    assert [block.first_seq for block in found] == [9 + row for row in rows]
    for row, block in zip(rows, found, strict=True):
        assert block == slice_block(whole, row, row + 1)
    is_near = not gap_bytes or len({row < len(records) // 2 for row in rows}) == 1
    assert len(reads) <= (1 if is_near and len(records) // 2 not in rows else len(rows))
    # The page ends with the row that reaches the number of bytes.
    sizes = [len(block.body) for block in found]
    most = data.draw(st.integers(1, sum(sizes) + 1))
    taken = len(unpack_rows(read, columns, rows, most))
    assert sum(sizes[: taken - 1]) < most
    assert taken == len(rows) or sum(sizes[:taken]) >= most
    # Damage of a requested row is reported; damage of other rows is not noticed.
    row = data.draw(st.sampled_from(range(len(records))))
    at = int(columns.rows["offset"][row])
    broken = packed[:at] + bytes((packed[at] ^ 0x10,)) + packed[at + 1 :]
    for source in (broken, packed[:at]):
        if source is not broken and row != max(rows):
            continue
        if row in rows:
            with pytest.raises(Damaged) as caught:
                unpack_rows(partial(read, source=source), columns, rows, 1 << 30)
            assert caught.value.ranges == ((row, row),)
        else:
            assert unpack_rows(partial(read, source=source), columns, rows, 1 << 30) == found


def test_counted_bytes_count_names_by_characters() -> None:
    block = make_block(1, array("q", [5]), [b"12345"], [b"{}"], ["äö"], ["n"])
    columns = decode_index(pack(1, 1, [block], bytes(1))[1])
    assert int(columns.rows["counted_bytes"][0]) == 5 + 2 + 24 + 2 + 1


def test_blocks_that_do_not_follow_each_other_are_refused() -> None:
    first, second = sample_blocks(1, 32)
    apart = msgspec.structs.replace(second, first_seq=40)
    with pytest.raises(AssertionError):
        pack(1, 1, [first, apart], bytes(32))


@given(RECORDS, st.data())
def test_an_unwanted_record_that_is_damaged_is_blank_and_the_others_are_as_they_were(
    records: list[tuple[bytes, bytes, str | None, str | None]], draw: st.DataObject
) -> None:
    count = len(records)
    data, idx = pack(1, 2, [block_of(9, records)], bytes(count))
    columns = decode_index(idx)
    row = draw.draw(st.integers(0, count - 1))
    end = columns.record_end(row) - 1 - columns.tail_bytes
    place = draw.draw(st.integers(int(columns.rows["offset"][row]), end))
    changed = bytearray(data)
    changed[place] ^= 0x81
    start = int(columns.rows["offset"][0])
    body = bytes(changed[start : columns.record_end(count - 1)])
    with pytest.raises(Damaged) as damage:
        unpack_block(body, columns, 0, count)
    assert list(damage.value.ranges) == [(row, row)]
    block = unpack_block(body, columns, 0, count, [(row, row)])
    for at, (payload, meta, tag, node) in enumerate(records):
        expected = (b"", b"", None, None) if at == row else (payload, meta, tag, node)
        assert (block.data(at), block.meta(at), block.tags[at], block.nodes[at]) == expected


PLAIN = st.lists(
    st.tuples(
        st.sampled_from([b"1", b'"x"', b'{"a":[1,2]}', b" null ", b"[" + b"7," * 300 + b"8]"]),
        st.sampled_from([b"", b'{"m":1}', b"{}"]),
        NAMES,
        NAMES,
    ),
    min_size=1,
    max_size=600,
)


@given(RECORDS | PLAIN, st.booleans(), st.data())
def test_the_bound_of_bytes_is_no_less_than_the_bytes(
    records: list[tuple[bytes, bytes, str | None, str | None]],
    has_long_names: bool,
    draw: st.DataObject,
) -> None:
    if has_long_names:
        # Objects in `.data` do not have them.
        records = [(data, meta, "t" * 200, "n" * 100) for data, meta, _, _ in records]
    count = len(records)
    columns = decode_index(pack(1, 2, [block_of(9, records)], bytes(count))[1])
    first = draw.draw(st.integers(0, count - 1))
    end = draw.draw(st.integers(first + 1, count))
    weight = int(columns.rows["counted_bytes"][first:end].sum())
    assert weight <= columns.bytes_at_most(first, end)


@given(PLAIN, st.data())
def test_objects_are_the_json_that_is_sent(
    records: list[tuple[bytes, bytes, str | None, str | None]], draw: st.DataObject
) -> None:
    count = len(records)
    block = block_of(9, records)
    dead = bytes(draw.draw(st.lists(st.sampled_from((0, 0, 0, 1)), min_size=count, max_size=count)))
    data, idx = pack(1, 2, [block], dead)
    columns = decode_index(idx)
    assert columns.is_json
    first = int(columns.rows["offset"][0])
    text = data[first : columns.records_end]
    for shown in (DATA, DATA | META, DATA | TAGS, DATA | META | TAGS):
        objects = unpack_json(text, columns, range(count), shown)
        if objects is None:
            live = [record for row, record in enumerate(records) if not dead[row]]
            assert shown == DATA | TAGS
            assert any(tag is not None for _, _, tag, _ in live)
            assert any(meta for _, meta, _, _ in live)
            continue
        sent = render_block(block, shown)
        for row in range(count):
            if dead[row]:
                expected = b'{"$seq":%d,"$ts":%d}' % (9 + row, row)
                assert bytes(objects.rows(row, row)) == expected
            else:
                assert bytes(objects.rows(row, row)) == bytes(sent.rows(row, row))
        json.loads(b"[%b]" % bytes(objects.rows(0, count - 1)))
    assert rebuild_index(data, 1, entry_of(2, data, idx)) == idx
    whole = unpack_block(data[first : columns.records_end], columns, 0, count)
    for row in range(count):
        if not dead[row]:
            assert slice_block(whole, row, row + 1) == slice_block(block, row, row + 1)
        else:
            assert (whole.data(row), whole.meta(row), whole.tags[row]) == (b"", b"", None)


def test_a_run_whose_objects_may_be_too_large_is_packed_as_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = make_block(1, array("q", [5, 6]), [b"1", b"2"], None, ["n", "m"], ["\x01" * 100, None])
    data, idx = pack(1, 1, [block], bytes(2))
    columns = decode_index(idx)
    assert (columns.is_json, len(data) - 2 <= 2 + 6 * 102 + 2 * 128) == (True, True)
    # The bound is one of the names if every character is escaped.
    for most, is_json in ((2 + 6 * 102 + 2 * 128, False), (2 + 6 * 102 + 2 * 128 + 1, True)):
        monkeypatch.setattr("topics_server.wal.segments.packing._FILE_BYTES_MAX", most)
        columns = decode_index(pack(1, 1, [block], bytes(2))[1])
        assert columns.is_json == is_json
