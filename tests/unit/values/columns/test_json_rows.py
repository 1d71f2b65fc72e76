"""Rows that are rendered column by column are the rows that are rendered one by one."""

from __future__ import annotations

import json
from array import array

import pytest

from topics_server.values.blocks import Block, make_block
from topics_server.values.json_cache import DATA, META, TAGS, JsonCache, render_block, render_rows

COUNT = 300
TRACE = b"\t00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def block_of(first_seq: int, times: list[int], tags: list[str | None], *, metas: bool) -> Block:
    return make_block(
        first_seq,
        array("q", times),
        [json.dumps({"n": "x" * (row % 7)}).encode() for row in range(COUNT)],
        [b'{"m":%d}' % row if row % 3 else b"" for row in range(COUNT)] if metas else None,
        tags,
        [None] * COUNT,
    )


@pytest.mark.parametrize("first_seq", [1, 950, 123_456_789])
@pytest.mark.parametrize(
    "times",
    [
        [1_790_000_000_000 + 97 * n for n in range(COUNT)],
        [7] * COUNT,
        [9_900 + n for n in range(COUNT)],
        [n - 5 for n in range(COUNT)],
        [2**63 - 1 - n for n in range(COUNT)],
    ],
)
@pytest.mark.parametrize("metas", [False, True])
@pytest.mark.parametrize(
    "tags",
    [
        [None] * COUNT,
        [f"t-{row}" for row in range(COUNT)],
        ['","', '"', "\\", "\x00\n", "é", ""] * (COUNT // 6),
        [None if row % 2 else '","' for row in range(COUNT)],
        ['",', '"', ",", "", ',"', "\\"] * (COUNT // 6),
        ["," if row else None for row in range(COUNT)],
        [",", None, ",", "a", ","] * (COUNT // 5),
    ],
)
def test_columns_are_rendered_as_rows_are(
    first_seq: int, times: list[int], tags: list[str | None], metas: bool
) -> None:
    block = block_of(first_seq, times, tags, metas=metas)
    for shown in (DATA, TAGS, TAGS | DATA, TAGS | META | DATA):
        alone = [render_rows(block, (row,), shown)[0].encode("latin-1") for row in range(COUNT)]
        found = render_block(block, shown)
        assert found.body == b",".join(alone)
        assert [bytes(found.rows(row, row)) for row in range(COUNT)] == alone
        cache = JsonCache()
        part = cache.slices(block, range(10, 160), shown, is_kept=False)
        assert b",".join(part) == b",".join(alone[10:160])
        assert len(cache) == 0


@pytest.mark.parametrize("meta", [b"\t", TRACE, TRACE + b'{"m":1}'])
def test_rows_with_a_bytes_record_or_a_trace_are_rendered_one_by_one(meta: bytes) -> None:
    metas = [b""] * COUNT
    metas[200] = meta
    block = make_block(
        1, array("q", [7] * COUNT), [b'"AA=="'] * COUNT, metas, [None] * COUNT, [None] * COUNT
    )
    shown = TAGS | META | DATA
    alone = [render_rows(block, (row,), shown)[0].encode("latin-1") for row in range(COUNT)]
    assert render_block(block, shown).body == b",".join(alone)
    part = JsonCache().slices(block, range(100, 260), shown, is_kept=False)
    assert b",".join(part) == b",".join(alone[100:260])


def test_rows_with_holes_are_rendered_without_them() -> None:
    # A bytes record is in each hole.
    metas = [b"" if row % 3 else b"\t" for row in range(COUNT)]
    times, none = array("q", [7] * COUNT), [None] * COUNT
    block = make_block(1, times, [b'"AA=="'] * COUNT, metas, none, none)
    rows = [row for row in range(COUNT) if row % 3]
    part = JsonCache().slices(block, rows, TAGS | DATA, is_kept=False)
    found = json.loads(b"[%b]" % b",".join(part))
    assert [each["$seq"] for each in found] == [row + 1 for row in rows]
