"""Blocks: columns in, columns out, the same bytes."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.values.blocks import (
    BYTES_MARK,
    Block,
    decode_block,
    encode_block,
    make_block,
    payloads_of,
    record_bytes,
)
from topics_server.values.limits import MIB, RECORD_FRAMING_BYTES
from topics_server.values.model import PayloadKind

TEXTS = st.none() | st.text(max_size=5)
RECORDS = st.lists(
    st.tuples(st.binary(max_size=20), st.binary(max_size=5), TEXTS, TEXTS), min_size=1, max_size=30
)
Records = list[tuple[bytes, bytes, str | None, str | None]]


def block_of(records: Records) -> Block:
    datas, metas, tags, nodes = (list(column) for column in zip(*records, strict=True))
    return make_block(7, array("q", range(len(records))), datas, metas, tags, nodes)


@given(RECORDS)
def test_a_block_gives_back_what_it_was_made_of(records: Records) -> None:
    block = block_of(records)
    assert (block.count, block.first_seq, block.last_seq) == (len(records), 7, 6 + len(records))
    for row, (data, meta, tag, node) in enumerate(records):
        assert (block.data(row), block.meta(row)) == (data, meta)
        assert (block.tags[row], block.nodes[row]) == (tag, node)
        assert block.payload_bytes(row) == len(data) + len(meta)


@given(RECORDS, st.data())
def test_many_payloads_are_those_of_each_row(records: Records, data: st.DataObject) -> None:
    block = block_of(records)
    rows = sorted(data.draw(st.sets(st.integers(0, block.count - 1), min_size=1)))
    assert block.datas(rows) == [block.data(row) for row in rows]
    assert block.datas(range(block.count)) == [block.data(row) for row in range(block.count)]


@given(RECORDS)
def test_encoding_and_decoding_change_nothing(records: Records) -> None:
    block = block_of(records)
    again = decode_block(encode_block(block))
    assert again == block
    assert decode_block(memoryview(encode_block(block))) == block


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=300))
def test_a_column_without_meta_need_not_be_there(datas: list[bytes]) -> None:
    count = len(datas)
    times = array("q", [5]) * count
    absent: list[str | None] = [None] * count
    block = make_block(1, times, datas, None, absent, absent)
    assert block == make_block(1, times, datas, [b""] * count, absent, absent)
    assert [block.data(row) for row in range(count)] == datas


def test_columns_of_different_length_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        make_block(1, array("q", [1]), [b"1", b"2"], [b""], [None], [None])
    with pytest.raises(AssertionError):
        make_block(1, array("q"), [], [], [], [])


def test_a_record_counts_its_payload_its_texts_and_a_fixed_framing() -> None:
    assert record_bytes(b"123", b"{}", "tag", "node") == 3 + 2 + 3 + 4 + RECORD_FRAMING_BYTES
    assert record_bytes(b"", b"", None, None) == RECORD_FRAMING_BYTES


def changed(position: int, value: object) -> bytes:
    fields = msgspec.msgpack.decode(encode_block(block_of([(b"1", b"", None, None)])))
    fields[position] = value
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("encoded", "says"),
    [
        (b"", "not an encoded block"),
        (b"\x93\x01", "not an encoded block"),
        (changed(1, "seq"), "not an encoded block"),
        (changed(0, 3), "version 3"),
        (changed(3, b"\x00" * 4), "differ in length"),
        (changed(5, ["a", "b"]), "differ in length"),
        (changed(6, []), "differ in length"),
    ],
)
def test_what_is_no_block_is_refused(encoded: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode_block(encoded)


METAS = st.sampled_from([b"", b"{}", b'{"m": 1}', b' {"$content_type":"a/b"}', BYTES_MARK + b"{}"])


@given(st.lists(METAS, min_size=1, max_size=20))
def test_the_kind_of_a_record_is_said_by_its_meta(metas: list[bytes]) -> None:
    """A space before the object marks bytes, because no client's `meta` begins with a space."""
    count = len(metas)
    absent: list[str | None] = [None] * count
    block = make_block(1, array("q", [5]) * count, [b"1"] * count, metas, absent, absent)
    wanted = [PayloadKind.BYTES if meta.startswith(b" ") else PayloadKind.JSON for meta in metas]
    assert list(block.kinds) == wanted
    assert decode_block(encode_block(block)).kinds == block.kinds
    assert [block.meta(row) for row in range(count)] == metas


def test_records_without_meta_are_json() -> None:
    block = make_block(1, array("q", [5, 6]), [b" 1", b"2"], None, [None] * 2, [None] * 2)
    assert block.kinds == bytes([PayloadKind.JSON] * 2)


def test_kinds_and_hops_are_kept_apart() -> None:
    metas = [b"", b" {}", b"{}"]
    block = make_block(
        1, array("q", [5] * 3), [b"1"] * 3, metas, [None] * 3, [None] * 3, hops=b"\x00\x03\x02"
    )
    assert (block.kinds, block.hops) == (b"\x00\x02\x00", b"\x00\x03\x02")


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
def test_a_long_block_is_a_copy_and_keeps_nothing_of_its_encoding(size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    encoded = bytearray(encode_block(block_of([(data[:size], b"m", "t", None)])))
    block = decode_block(memoryview(encoded))
    encoded[:] = bytes(len(encoded))
    assert type(block.body) is bytes
    assert (block.data(0), block.meta(0), block.tags) == (data[:size], b"m", ["t"])


def test_a_long_block_that_is_cut_is_refused() -> None:
    encoded = encode_block(block_of([(b"x" * 2 * MIB, b"", None, None)]))
    with pytest.raises(ValueError, match="not an encoded block"):
        decode_block(encoded[:-1])


@pytest.mark.parametrize("size", [MIB, MIB + 1, 3 * MIB + 7])
@pytest.mark.parametrize("metas", [None, [b" {}"]])
def test_a_long_view_becomes_payloads_that_are_bytes(size: int, metas: list[bytes] | None) -> None:
    data = bytearray(bytes(range(251)) * (size // 251 + 1))[:size]
    expected = bytes(data)
    payloads = payloads_of([memoryview(data)], metas)  # type: ignore[list-item]
    data[:] = bytes(size)
    meta = b"".join(metas or ())
    assert type(payloads.body) is bytes
    assert payloads.body == expected + meta
    assert list(payloads.ends) == [size, size + len(meta)]
