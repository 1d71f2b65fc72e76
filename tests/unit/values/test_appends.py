"""The grammar of append bodies: accepted, verbatim values, and refused ones, with their path."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.values import appends
from topics_server.values.appends import (
    PLAIN_GRAMMAR,
    DecodedAppend,
    decode_append,
    of_columns,
)
from topics_server.values.blocks import record_bytes
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import DELAY_MS_MAX, INLINE_CONFIG_BYTES_MAX, JSON_DEPTH_MAX
from topics_server.values.record_codecs import deliver_times

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def one(data: bytes, rest: bytes = b"") -> bytes:
    return b'{"records":[{"data":' + data + rest + b"}]}"


@pytest.mark.parametrize(
    "data",
    [
        b"null",
        b"1e400",
        b"-0.0",
        b"1180591620717411303424",
        b'{ "a" : 1,\t"a" : 2 }',
        b'"\\ud83d\\ude00 \\u0041 \\/"',
        '"ü€😀"'.encode(),
        b"[]",
        b'"\\\\"',
    ],
)
def test_data_and_meta_stay_the_bytes_that_were_sent(data: bytes) -> None:
    meta = b'{ "k" : ' + data + b" }"
    decoded = decode_append(one(data, b', "meta" : ' + meta))
    assert ([*map(bytes, decoded.datas)], decoded.metas) == ([data], [meta])


@given(JSON_VALUES)
def test_any_json_is_data(value: object) -> None:
    data = json.dumps(value).encode()
    assert [*map(bytes, decode_append(one(data)).datas)] == [data]


TEXTS = st.sampled_from(["", "t", "ünï", "x" * 64, "x" * 65]) | st.text(max_size=8)
RECORD = st.fixed_dictionaries(
    {"data": st.sampled_from([0, "ü", {"a": [1]}])},
    optional={
        "tag": st.none() | TEXTS,
        "node": st.none() | TEXTS,
        "meta": st.sampled_from([None, {}, {"k": 1}]),
        "later": st.just(1),
    },
)
CALL = st.fixed_dictionaries(
    {"records": st.lists(RECORD, max_size=4)},
    optional={
        "node": st.none() | TEXTS,
        "idempotency_key": st.none() | TEXTS,
        "create": st.none() | st.booleans(),
        "config": st.sampled_from([None, {"ttl_ms": 1}]),
        "disable_backpressure": st.none() | st.booleans(),
        "later": st.just(1),
    },
)


def columns(decoded: DecodedAppend) -> tuple[object, ...]:
    """The columns of a call, without its totals."""
    return (
        [*map(bytes, decoded.datas)],
        decoded.metas,
        decoded.tags,
        decoded.nodes,
        decoded.batch_node,
        decoded.idempotency_key,
        decoded.create,
        decoded.config,
        decoded.disable_backpressure,
    )


@given(CALL, st.booleans())
def test_plain_calls_are_read_like_all_others(call: dict[str, object], ascii_only: bool) -> None:
    body = json.dumps(call, ensure_ascii=ascii_only).encode(errors="replace")
    decoded = decode_append(body)
    full = appends._decode_full(body)
    assert columns(decoded) == columns(full)
    assert (decoded.weight, decoded.longest_bytes) == (full.weight, full.longest_bytes)
    assert decoded.tag_chars_max >= full.tag_chars_max


@given(CALL)
def test_sums_are_those_of_the_records(call: dict[str, object]) -> None:
    decoded = decode_append(json.dumps(call).encode())
    records = list(zip(decoded.datas, decoded.metas, decoded.tags, decoded.nodes, strict=True))
    assert decoded.weight == sum(record_bytes(*record) for record in records)
    assert decoded.payload_bytes == sum(len(data) + len(meta) for data, meta, _, _ in records)
    assert decoded.longest_bytes == max((len(data) for data, _, _, _ in records), default=0)
    assert decoded.tag_chars_max >= max((len(tag or "") for tag in decoded.tags), default=0)
    again = of_columns(decoded.datas, decoded.metas, decoded.tags, decoded.nodes)
    assert again.weight == decoded.weight


def test_the_batch_node_is_a_default() -> None:
    body = b'{"records":[{"data":1,"node":"own"},{"data":2},{"data":3,"node":null}],"node":"all"}'
    assert decode_append(body).nodes == ["own", "all", "all"]
    assert decode_append(one(b"1")).nodes == [None]


def test_absent_and_null_are_alike_and_unknown_fields_are_ignored() -> None:
    body = one(b"1", b',"tag":null,"meta":null,"node":null,"later":[1]')
    decoded = decode_append(
        body[:-1] + b',"config":null,"create":null,"idempotency_key":null,"x":1}'
    )
    assert (decoded.metas, decoded.tags, decoded.nodes) == ([b""], [None], [None])
    assert (decoded.config, decoded.create, decoded.idempotency_key) == (None, None, None)
    assert not decoded.disable_backpressure


def test_the_call_has_its_own_fields() -> None:
    body = (
        b'{"records":[],"idempotency_key":"k","create":false,"config":{"ttl_ms":5},'
        b'"disable_backpressure":true}'
    )
    decoded = decode_append(body)
    assert (decoded.count, decoded.idempotency_key, decoded.create) == (0, "k", False)
    assert (decoded.config, decoded.disable_backpressure) == (b'{"ttl_ms":5}', True)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"1", None),
        (b"{}", "records"),
        (b'{"records":{}}', "records"),
        (b'{"records":[1]}', "records[0]"),
        (b'{"records":[{"data":1},{"tag":"t"}]}', "records[1].data"),
        (one(b"1", b',"tag":1'), "records[0].tag"),
        (one(b"1", b',"node":[]'), "records[0].node"),
        (one(b"1", b',"meta":[]'), "records[0].meta"),
        (one(b"1", b',"meta":"x"'), "records[0].meta"),
        (b'{"records":[],"node":1}', "node"),
        (b'{"records":[],"create":"yes"}', "create"),
        (b'{"records":[],"idempotency_key":5}', "idempotency_key"),
        (b'{"records":[],"disable_backpressure":1}', "disable_backpressure"),
        (b'{"records":[{"data":01}]}', None),
        (b'{"records":[{"data":NaN}]}', None),
        (b'{"records":[{"data":"\\ud800"}]}', None),
        (b'{"records":[{"data":"\xff"}]}', None),
        (b'{"records":[{"data":"\xed\xa0\x80"}]}', None),
        (b'\xef\xbb\xbf{"records":[]}', None),
        (b'{"records":[]} x', None),
    ],
)
def test_what_is_refused_names_the_path_where_there_is_one(body: bytes, field: str | None) -> None:
    with pytest.raises(TopicsError) as refusal:
        decode_append(body)
    assert refusal.value.code is Code.INVALID_REQUEST
    assert refusal.value.detail.get("field") == field


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_counted_exactly(opening: bytes, closing: bytes) -> None:
    def nested(depth: int) -> bytes:
        inner = b"1" if closing == b"}" else b""
        return opening * depth + inner + closing * depth

    assert decode_append(one(nested(JSON_DEPTH_MAX))).count == 1
    with pytest.raises(TopicsError) as refusal:
        decode_append(one(nested(JSON_DEPTH_MAX + 1)))
    assert refusal.value.detail == {"field": "records[0].data"}
    if closing == b"}":
        with pytest.raises(TopicsError) as refusal:
            decode_append(one(b"1", b',"meta":' + nested(JSON_DEPTH_MAX + 1)))
        assert refusal.value.detail == {"field": "records[0].meta"}


def test_nesting_without_end_is_refused_and_nothing_breaks() -> None:
    with pytest.raises(TopicsError) as refusal:
        decode_append(one(b"[" * 200_000 + b"]" * 200_000))
    assert refusal.value.code is Code.INVALID_REQUEST


def test_brackets_in_strings_are_no_depth() -> None:
    text = b'"' + b'[{\\"' * (2 * JSON_DEPTH_MAX) + b'"'
    assert decode_append(one(b"[" + text + b"]")).count == 1


# -- bounds --------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [b'{"data":1}', b'{"data":1,"node":"n"}', b'{"data":[{},{}]}'])
def test_too_many_records_are_refused_before_they_are_built(record: bytes) -> None:
    def body(count: int) -> bytes:
        return b'{"records":[' + b",".join([record] * count) + b'],"other":[1,2,{},{}]}'

    assert decode_append(body(40), max_records=40).count == 40
    # Without a limit, as in replay, the same body is accepted.
    assert decode_append(body(41)).count == 41
    with pytest.raises(TopicsError) as refusal:
        decode_append(body(41), max_records=40)
    assert refusal.value.code is Code.BATCH_TOO_LARGE
    assert refusal.value.detail == {"field": "records", "max_batch_records": 40}


def test_a_million_records_take_no_memory_to_be_refused() -> None:
    body = b'{"records":[' + b",".join([b'{"data":1}'] * 1_000_000) + b"]}"
    tracemalloc.start()
    try:
        with pytest.raises(TopicsError):
            decode_append(body, max_records=10_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(body) // 4


def test_what_is_wrong_with_a_long_body_is_told_as_of_a_short_one() -> None:
    wrong = b'{"records":{' + b'"a":{},' * 100 + b'"b":1}}'
    with pytest.raises(TopicsError) as refusal:
        decode_append(wrong, max_records=10)
    assert refusal.value.code is Code.INVALID_REQUEST
    assert refusal.value.detail == {"field": "records"}


def test_a_long_inline_configuration_is_refused() -> None:
    long = b'{"x":"' + b"y" * INLINE_CONFIG_BYTES_MAX + b'"}'
    with pytest.raises(TopicsError) as refusal:
        decode_append(one(b"1")[:-1] + b',"config":' + long + b"}")
    assert refusal.value.detail == {"field": "config"}


@pytest.mark.parametrize("text", ["\u00e4", "\u20ac", "\U0001f600", "a\u20ac"])
def test_utf8_is_checked_piece_by_piece(text: str) -> None:
    for shift in range(4):
        data = ("x" * shift + text * 100_000).encode()
        assert bytes(decode_append(one(b'"' + data + b'"')).datas[0]) == b'"' + data + b'"'
        at = len(data) - 1
        with pytest.raises(TopicsError) as refusal:
            decode_append(one(b'"' + data[:at] + b'\xff"'))
        assert "UTF-8" in refusal.value.message


# -- delays --------------------------------------------------------------------------------


def delayed(fields: bytes) -> bytes:
    return b'{"records":[{"data":1},{"data":2,' + fields + b"}]}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b'"delay_ms":500', [(1, 1_500, False)]),
        (b'"deliver_at_ms":7000', [(1, 7_000, True)]),
        (b'"d\\u0065lay_ms":500', [(1, 1_500, False)]),
        (b'"delay_ms":0', []),
        (b'"deliver_at_ms":1000', []),
        (b'"delay_ms":null,"deliver_at_ms":null', []),
        (b'"delay_ms":null,"deliver_at_ms":7000', [(1, 7_000, True)]),
        (b'"delay_ms":18446744073709551615', [(1, 1_000 + DELAY_MS_MAX, False)]),
        (b'"deliver_at_ms":18446744073709551615', [(1, 1_000 + DELAY_MS_MAX, True)]),
    ],
)
def test_a_record_may_say_when_it_is_to_be_had(
    fields: bytes, expected: list[tuple[int, int, bool]]
) -> None:
    body = delayed(fields)
    decoded = decode_append(body)
    assert deliver_times(body, decoded, decoded.grammar, 1_000) == expected
    # Replay has the body and its grammar only.
    assert deliver_times(body, None, decoded.grammar, 1_000) == expected
    assert [*map(bytes, decoded.datas)] == [b"1", b"2"]


def test_only_delays_need_the_newer_grammar() -> None:
    assert decode_append(delayed(b'"delay_ms":1')).grammar == 2
    assert decode_append(delayed(b'"delay_ms":null')).grammar == 1
    assert decode_append(delayed(b'"tag":"delay_ms"')).grammar == 1
    assert decode_append(one(b'{"delay_ms":"x"}')).grammar == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (b'"delay_ms":"5"', "records[1].delay_ms"),
        (b'"delay_ms":5.5', "records[1].delay_ms"),
        (b'"delay_ms":true', "records[1].delay_ms"),
        (b'"delay_ms":-1', "records[1].delay_ms"),
        (b'"delay_ms":18446744073709551616', "records[1].delay_ms"),
        (b'"deliver_at_ms":[]', "records[1].deliver_at_ms"),
        (b'"deliver_at_ms":-1', "records[1].deliver_at_ms"),
        (b'"deliver_at_ms":99999999999999999999999', "records[1].deliver_at_ms"),
        (b'"delay_ms":1,"deliver_at_ms":1', "records[1].delay_ms"),
        (b'"delay_ms":0,"deliver_at_ms":0', "records[1].delay_ms"),
    ],
)
def test_a_wrong_delay_is_refused_with_its_path(fields: bytes, field: str) -> None:
    with pytest.raises(TopicsError) as refused:
        decode_append(delayed(fields))
    assert refused.value.code is Code.INVALID_REQUEST
    assert refused.value.detail == {"field": field}


@pytest.mark.parametrize("fields", [b'"delay_ms":"soon"', b'"delay_ms":1,"deliver_at_ms":[]'])
def test_a_frame_of_the_first_grammar_stays_readable_whatever_it_says(fields: bytes) -> None:
    decoded = decode_append(delayed(fields), PLAIN_GRAMMAR)
    assert (decoded.count, decoded.delays, decoded.grammar) == (2, (), 1)
    assert deliver_times(delayed(fields), None, PLAIN_GRAMMAR, 1_000) == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"records":[{"d3\xa7\xc2\xb1ataata":1}]}',
        b'{"records":[{"data":1,"\xe1":2}]}',
        b'{"rec\xe1":1,"records":[{"data":1}]}',
    ],
)
def test_a_field_s_name_that_is_not_utf8_is_refused_like_any_text(body: bytes) -> None:
    with pytest.raises(TopicsError) as caught:
        decode_append(body)
    assert caught.value.code is Code.INVALID_REQUEST
