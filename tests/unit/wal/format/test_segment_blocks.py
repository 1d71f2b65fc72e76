"""Damage of a mapped index never changes a record, and no read fails with another error."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from topics_server.values.blocks import Block, make_block
from topics_server.values.errors import StorageError
from topics_server.values.json_cache import DATA, META, TAGS
from topics_server.wal.format.segment import (
    DATA_HEADER_BYTES,
    IDX_HEADER_BYTES,
    ROW,
    SegmentColumns,
    decode_index,
)
from topics_server.wal.format.segment_blocks import (
    unpack_block,
    unpack_json,
    unpack_row,
    unpack_rows,
)
from topics_server.wal.segments.packing import pack

COUNT = 300
GROUPS = (range(256), range(256, COUNT))
# A trace keeps a segment in version 2.
TRACE = b"\t00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

Read = Callable[[SegmentColumns], object]


def files(*, is_json: bool) -> tuple[bytes, bytes]:
    """A segment whose records have tags, nodes and `meta`."""
    metas = [b'{"m":%d}' % row if row % 3 else b"" for row in range(COUNT)]
    if not is_json:
        metas[7] = TRACE
    block = make_block(
        101,
        array("q", range(1_790_000_000_000, 1_790_000_000_000 + COUNT)),
        [b'{"n":"%b"}' % (b"x" * (row % 7)) for row in range(COUNT)],
        metas,
        [f"t-{row % 5}é" if row % 4 else None for row in range(COUNT)],
        [f"node-{row % 2}" if row % 5 else None for row in range(COUNT)],
    )
    return pack(7, 1, [block], bytes(COUNT))


def reads_of(data: bytes, row: int) -> dict[str, Read]:
    """The ways to read the group of a row, and the row."""

    def part(columns: SegmentColumns, first: int, end: int) -> bytes:
        start, stop = columns.span(first, end)
        return data[start:stop]

    span = GROUPS[row >= 256]
    some = range(max(0, row - 2), min(COUNT, row + 3))

    def read(size: int, offset: int) -> bytes:
        return data[offset : offset + size]

    def block(columns: SegmentColumns) -> Block:
        return unpack_block(part(columns, span.start, span.stop), columns, span.start, span.stop)

    def few(columns: SegmentColumns) -> Block:
        return unpack_block(part(columns, some.start, some.stop), columns, some.start, some.stop)

    def objects(columns: SegmentColumns) -> bytes | None:
        with_tags = unpack_json(part(columns, span.start, span.stop), columns, span, TAGS | DATA)
        found = unpack_json(part(columns, span.start, span.stop), columns, span, META | DATA)
        assert with_tags is None, "there are metas to be removed"
        return None if found is None else bytes(found.body) + bytes(found.offsets)

    def tagged(columns: SegmentColumns) -> bytes | None:
        shown = TAGS | META | DATA
        found = unpack_json(part(columns, span.start, span.stop), columns, span, shown)
        return None if found is None else bytes(found.body) + bytes(found.offsets)

    return {
        "a group": block,
        "a part of a group": few,
        "a row": lambda columns: unpack_row(part(columns, row, row + 1), columns, row),
        "rows": lambda columns: unpack_rows(read, columns, [row], 1_000),
        **({"objects": objects, "objects with tags": tagged} if _is_json(data) else {}),
    }


def _is_json(data: bytes) -> bool:
    return data[8] == 4


@pytest.mark.parametrize("is_json", [False, True])
def test_a_damaged_index_is_an_error_of_the_storage(is_json: bool) -> None:
    data, idx = files(is_json=is_json)
    assert data[8] == (4 if is_json else 2)
    assert len(data) > DATA_HEADER_BYTES
    dice = random.Random(1)
    sound = decode_index(idx)
    expected = {
        row: {name: read(sound) for name, read in reads_of(data, row).items()}
        for row in range(COUNT)
    }
    rows_end = IDX_HEADER_BYTES + COUNT * ROW.itemsize
    places = [*range(IDX_HEADER_BYTES, rows_end, 5), *range(rows_end, len(idx))]
    for at in places:
        mapped = bytearray(idx)
        columns = decode_index(memoryview(mapped), verify=False)
        mapped[at] ^= 1 << dice.randrange(8)
        row = (at - IDX_HEADER_BYTES) // ROW.itemsize if at < rows_end else dice.randrange(COUNT)
        for name, read in reads_of(data, row).items():
            try:
                found = read(columns)
            except StorageError:
                continue
            assert found is None or found == expected[row][name], (at, name)
