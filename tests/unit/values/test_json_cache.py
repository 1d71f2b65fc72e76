"""Rendered blocks: the bytes of records as readers get them, and slices of them."""

from __future__ import annotations

import base64
import json
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.values.blocks import Block, make_block
from topics_server.values.columns.json_rows import JsonBlock
from topics_server.values.json_cache import (
    CACHED_BYTES_MIN,
    CACHED_RECORDS_MIN,
    DATA,
    META,
    TAGS,
    JsonCache,
    render_block,
    render_rows,
)
from topics_server.values.record_codecs import bytes_meta


def block_of(count: int, first_seq: int = 1) -> Block:
    return make_block(
        first_seq,
        array("q", [1000 + row for row in range(count)]),
        [b'{"n": %d}' % row for row in range(count)],
        [b'{"m":%d}' % row if row % 3 == 0 else b"" for row in range(count)],
        [f"tag-{row % 4}" if row % 2 else None for row in range(count)],
        [f"node-{row % 5}" if row % 5 else None for row in range(count)],
    )


def joined(cache: JsonCache, block: Block, rows: list[int] | range, shown: int) -> bytes:
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


TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("shown", range(TAGS + META + DATA + 1))
@pytest.mark.parametrize("picked", [[0], [1], [2], [3], [0, 2], [0, 1, 2, 3]])
def test_a_trace_is_shown_whatever_else_is(shown: int, picked: list[int]) -> None:
    mark = b"\t" + TRACE
    metas = [mark, mark + b'{"m":1}', b'{"m":1}', mark + bytes_meta("image/png")]
    tags: list[str | None] = ["t", None, None, "t"]
    block = make_block(1, array("q", [5] * 4), [b"1", b"2", b"3", b"\x89"], metas, tags, [None] * 4)
    plain = make_block(
        *(1, array("q", [5] * 4), [b"1", b"2", b"3", b"\x89"]),
        *([b"", *metas[2:3], *metas[2:3], bytes_meta("image/png")], tags, [None] * 4),
    )
    told = json.loads("[" + ",".join(render_rows(block, picked, shown)) + "]")
    untraced = json.loads("[" + ",".join(render_rows(plain, picked, shown)) + "]")
    assert [record.pop("$trace", None) for record in told] == [
        None if row == 2 else TRACE.decode() for row in picked
    ]
    assert told == untraced


def test_a_deleted_record_of_any_kind_is_rendered_among_the_others() -> None:
    """Whole blocks are rendered, and a deleted record has kept its kind without its payload."""
    metas = [b"", b"\t" + TRACE, bytes_meta("image/png")]
    block = make_block(1, array("q", [5] * 3), [b"1"] * 3, metas, [None] * 3, [None] * 3)
    emptied = msgspec.structs.replace(block, ends=array("I", [1, 1, 1, 1, 1, 1]), body=b"1")
    assert emptied.kinds == b"\x00\x08\x02"
    assert bytes(render_block(emptied, TAGS | META | DATA).rows(0, 0)) == (
        b'{"$seq":1,"$ts":5,"data":1}'
    )


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
    json_block = render_block(block, META | DATA)
    assert b",".join(bytes(json_block.rows(row, row)) for row in rows) == expected
    cache = JsonCache()
    assert joined(cache, block, rows, META | DATA) == expected
    assert joined(cache, block, rows, META | DATA) == expected


def test_a_whole_block_is_handed_out_without_a_copy() -> None:
    json_block = render_block(block_of(10), META | DATA)
    assert json_block.rows(0, 9) is json_block.body


def test_a_page_of_a_cached_block_renders_nothing_again() -> None:
    cache = JsonCache()
    block = block_of(CACHED_RECORDS_MIN)
    first = cache.slices(block, range(block.count), META | DATA)
    assert len(cache) == 1
    assert cache.slices(block, range(block.count), META | DATA)[0] is first[0]


def test_small_blocks_and_small_parts_are_not_kept() -> None:
    cache = JsonCache()
    joined(cache, block_of(CACHED_RECORDS_MIN - 1), range(CACHED_RECORDS_MIN - 1), META | DATA)
    joined(cache, block_of(200), range(99), META | DATA)
    assert len(cache) == 0
    assert cache.bytes == 0


def test_a_few_large_records_are_rendered_once() -> None:
    cache = JsonCache()
    data = b'"%b"' % (b"x" * (CACHED_BYTES_MIN // 2))
    large = make_block(1, array("q", [1, 2]), [data, data], None, [None, None], [None, None])
    first = cache.slices(large, range(2), META | DATA)
    assert cache.slices(large, range(2), META | DATA)[0] is first[0]
    assert cache.bytes > 2 * CACHED_BYTES_MIN


def test_options_are_kept_apart() -> None:
    cache = JsonCache()
    block = block_of(40)
    with_tags = joined(cache, block, range(40), TAGS)
    without = joined(cache, block, range(40), 0)
    assert b"$tag" in with_tags
    assert b"$tag" not in without
    assert len(cache) == 2


def test_the_cache_drops_the_least_recently_used_beyond_its_bytes() -> None:
    blocks = [block_of(64, first_seq=1 + 64 * number) for number in range(4)]
    probe = JsonCache()
    joined(probe, blocks[0], range(64), META | DATA)
    cache = JsonCache(bytes_max=probe.bytes * 3 + 200)
    for block in blocks[:3]:
        joined(cache, block, range(64), META | DATA)
    kept = cache.slices(blocks[0], range(64), META | DATA)[0]
    joined(cache, blocks[3], range(64), META | DATA)
    assert len(cache) == 3
    assert cache.bytes <= probe.bytes * 3 + 200
    assert cache.slices(blocks[0], range(64), META | DATA)[0] is kept


def test_a_block_larger_than_the_cache_is_served_and_not_kept() -> None:
    cache = JsonCache(bytes_max=100)
    assert json.loads(b"[" + joined(cache, block_of(64), range(64), META | DATA) + b"]")
    assert len(cache) == 0


# --- records of bytes -----------------------------------------------------------------------------

ROUTED = b',"_topics_router":{"source":"s","epoch":1,"seq":2,"key":"r/s/1/2"}}'
DEAD = b',"$dead_letter_from":"q","$dead_letter_deliveries":5,"$dead_letter_src_seq":7}'


def mixed() -> Block:
    """JSON and bytes in turn; one with the stamps of a router, one with those of a dead letter."""
    return make_block(
        3,
        array("q", [10, 20, 30, 40]),
        [b"[1]", b"\x00\xff\n", b'{"a" : 1}', b""],
        [
            b"",
            bytes_meta("image/png")[:-1] + ROUTED,
            b'{"m":1 }',
            bytes_meta('a/b;c="d"')[:-1] + DEAD,
        ],
        [None, "t", "u", None],
        ["n", None, None, "\u00e9"],
    )


def test_bytes_are_base64_and_say_what_they_are() -> None:
    assert bytes(render_block(mixed(), TAGS | META | DATA).body).split(b'},{"$seq"') == [
        b'{"$seq":3,"$ts":10,"$node":"n","data":[1]',
        b':4,"$ts":20,"$tag":"t","$encoding":"base64","$content_type":"image/png","data":"AP8K",'
        b'"meta":{"_topics_router":{"source":"s","epoch":1,"seq":2,"key":"r/s/1/2"}}',
        b':5,"$ts":30,"$tag":"u","data":{"a" : 1},"meta":{"m":1 }',
        b':6,"$ts":40,"$node":"\xc3\xa9","$encoding":"base64","$content_type":"a/b;c=\\"d\\"",'
        b'"data":"","meta":{"$dead_letter_from":"q","$dead_letter_deliveries":5,'
        b'"$dead_letter_src_seq":7}}',
    ]


@pytest.mark.parametrize("shown", range(TAGS + META + DATA + 1))
def test_of_bytes_too_only_what_is_asked_for_is_shown(shown: int) -> None:
    """The type of the bytes is shown with them, and not without them."""
    records = json.loads(b"[" + render_block(mixed(), shown).body + b"]")
    for row, record in enumerate(records):
        is_bytes = row % 2 == 1
        wanted = {"$seq", "$ts"}
        wanted |= {"$node"} if row in (0, 3) else set()
        wanted |= {"$tag"} if shown & TAGS and row in (1, 2) else set()
        wanted |= {"meta"} if shown & META and row else set()
        wanted |= {"data"} if shown & DATA else set()
        wanted |= {"$encoding", "$content_type"} if shown & DATA and is_bytes else set()
        assert record.keys() == wanted
        assert "$content_type" not in record.get("meta", {})


@given(st.binary(max_size=90), st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_any_bytes_of_any_type_are_read_back(data: bytes, content_type: str) -> None:
    block = make_block(1, array("q", [5]), [data], [bytes_meta(content_type)], [None], [None])
    record = json.loads(bytes(render_block(block, TAGS | META | DATA).body))
    assert base64.b64decode(record.pop("data"), validate=True) == data
    assert record == {"$seq": 1, "$ts": 5, "$encoding": "base64", "$content_type": content_type}


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_rows_of_mixed_blocks_are_the_same_sliced_or_alone(
    kinds: list[bool], data: st.DataObject
) -> None:
    count = len(kinds)
    block = make_block(
        5,
        array("q", range(count)),
        [b"%d" % row for row in range(count)],
        [bytes_meta("a/b") if is_bytes else b"" for is_bytes in kinds],
        [None] * count,
        [None] * count,
    )
    rows = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    expected = ",".join(render_rows(block, rows, META | DATA)).encode("latin-1")
    cache = JsonCache()
    for _ in range(2):
        assert joined(cache, block, rows, META | DATA) == expected
    told = json.loads(b"[" + expected + b"]")
    assert ["$encoding" in record for record in told] == [kinds[row] for row in rows]


def test_objects_are_sliced_and_few_of_them_are_copied() -> None:
    count = 100
    datas = [b"%d" % row for row in range(count)]
    names = [None] * count
    block = make_block(1, array("q", [5] * count), datas, None, names, names)
    rendered = render_block(block, DATA)
    objects = JsonBlock(b"%b," % bytes(rendered.body), rendered.offsets)
    cache = JsonCache()
    for rows in (range(count), range(10, 90), [0, 5, 6, 7, *range(20, 90)], [3], [8, 9, 50]):
        parts = cache.slices(objects, rows, DATA)
        assert b",".join(parts) == b",".join(map(objects.rows, rows, rows))
        # A part of few rows must not keep all of them in memory.
        assert all(isinstance(part, bytes) == (len(rows) < 50) for part in parts)
    assert len(cache) == 0
