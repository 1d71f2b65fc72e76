"""The append body's grammar: what is taken, verbatim, and what is refused, with its path."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.appends import decode_append, exceeds_depth
from topics_server.errors import Code, TopicsError
from topics_server.limits import JSON_DEPTH_MAX

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
    assert not exceeds_depth(text)
    assert decode_append(one(b"[" + text + b"]")).count == 1
    assert exceeds_depth(b"[" * 513 + b"]" * 513)
    assert not exceeds_depth(b"[" + b"[]," * 1_000 + b"[]]")
