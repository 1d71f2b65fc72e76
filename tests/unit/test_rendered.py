"""Rendered blocks: the bytes of records as readers get them, and slices of them."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.blocks import Block, make_block
from topics_server.rendered import (
    CACHED_RECORDS_MIN,
    DATA,
    META,
    TAGS,
    RenderCache,
    render_block,
    render_rows,
)


def block_of(count: int, first_seq: int = 1) -> Block:
    return make_block(
        first_seq,
        array("q", [1000 + row for row in range(count)]),
        [b'{"n": %d}' % row for row in range(count)],
        [b'{"m":%d}' % row if row % 3 == 0 else b"" for row in range(count)],
        [f"tag-{row % 4}" if row % 2 else None for row in range(count)],
        [f"node-{row % 5}" if row % 5 else None for row in range(count)],
    )


def joined(cache: RenderCache, block: Block, rows: list[int] | range, shown: int) -> bytes:
    return b",".join(cache.slices(block, rows, shown))


def test_members_stand_in_the_contract_s_order_and_values_are_verbatim() -> None:
    block = make_block(
        7,
        array("q", [1748450001000]),
        [b' [1e400 , "\xc3\xa9"]'.strip()],
        [b'{"a":1, "a":2}'],
        ['t"\\\n\u00e9'],
        ["水"],
    )
    assert render_block(block, TAGS | META | DATA).body == (
        b'{"$seq":7,"$ts":1748450001000,"$node":"\xe6\xb0\xb4","$tag":"t\\"\\\\\\n\xc3\xa9",'
        b'"data":[1e400 , "\xc3\xa9"],"meta":{"a":1, "a":2}}'
    )


def test_absent_members_are_omitted() -> None:
    block = make_block(1, array("q", [5]), [b"null"], [b""], [None], [None])
    assert render_block(block, TAGS | META | DATA).body == b'{"$seq":1,"$ts":5,"data":null}'


@pytest.mark.parametrize("shown", range(TAGS + META + DATA + 1))
def test_tags_meta_and_data_show_only_when_asked_for(shown: int) -> None:
    records = json.loads(b"[" + render_block(block_of(12), shown).body + b"]")
    for row, record in enumerate(records):
        assert ("$tag" in record) == bool(shown & TAGS and row % 2)
        assert ("meta" in record) == bool(shown & META and row % 3 == 0)
        assert record.get("$node") == (f"node-{row % 5}" if row % 5 else None)
        assert record.get("data") == ({"n": row} if shown & DATA else None)


@given(st.integers(1, 60), st.data())
def test_any_rows_are_the_same_whether_sliced_or_rendered_alone(
    count: int, data: st.DataObject
) -> None:
    block = block_of(count, first_seq=90)
    picked = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    rows = sorted(picked)
    expected = ",".join(render_rows(block, rows, META | DATA)).encode("latin-1")
    rendered = render_block(block, META | DATA)
    assert b",".join(bytes(rendered.rows(row, row)) for row in rows) == expected
    cache = RenderCache()
    assert joined(cache, block, rows, META | DATA) == expected
    assert joined(cache, block, rows, META | DATA) == expected


def test_a_whole_block_is_handed_out_without_a_copy() -> None:
    rendered = render_block(block_of(10), META | DATA)
    assert rendered.rows(0, 9) is rendered.body


def test_a_page_of_a_cached_block_renders_nothing_again() -> None:
    cache = RenderCache()
    block = block_of(CACHED_RECORDS_MIN)
    first = cache.slices(block, range(block.count), META | DATA)
    assert len(cache) == 1
    assert cache.slices(block, range(block.count), META | DATA)[0] is first[0]


def test_small_blocks_and_small_parts_are_not_kept() -> None:
    cache = RenderCache()
    joined(cache, block_of(CACHED_RECORDS_MIN - 1), range(CACHED_RECORDS_MIN - 1), META | DATA)
    joined(cache, block_of(200), range(99), META | DATA)
    assert len(cache) == 0
    assert cache.bytes == 0


def test_options_are_kept_apart() -> None:
    cache = RenderCache()
    block = block_of(40)
    with_tags = joined(cache, block, range(40), TAGS)
    without = joined(cache, block, range(40), 0)
    assert b"$tag" in with_tags
    assert b"$tag" not in without
    assert len(cache) == 2


def test_the_cache_drops_the_least_recently_used_beyond_its_bytes() -> None:
    blocks = [block_of(64, first_seq=1 + 64 * number) for number in range(4)]
    probe = RenderCache()
    joined(probe, blocks[0], range(64), META | DATA)
    cache = RenderCache(bytes_max=probe.bytes * 3 + 200)
    for block in blocks[:3]:
        joined(cache, block, range(64), META | DATA)
    kept = cache.slices(blocks[0], range(64), META | DATA)[0]
    joined(cache, blocks[3], range(64), META | DATA)
    assert len(cache) == 3
    assert cache.bytes <= probe.bytes * 3 + 200
    assert cache.slices(blocks[0], range(64), META | DATA)[0] is kept


def test_a_block_larger_than_the_cache_is_served_and_not_kept() -> None:
    cache = RenderCache(bytes_max=100)
    assert json.loads(b"[" + joined(cache, block_of(64), range(64), META | DATA) + b"]")
    assert len(cache) == 0
