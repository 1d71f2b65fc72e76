"""Codecs of bodies: what was written is read back, and all other bytes are refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.values.appends import (
    GRAMMAR,
    PLAIN_GRAMMAR,
    DecodedAppend,
    decode_append,
    of_columns,
)
from topics_server.values.blocks import BYTES_MARK
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import JSON_DEPTH_MAX
from topics_server.values.record_codecs import (
    BYTES_GRAMMAR,
    COLUMNS_GRAMMAR,
    KEYED_GRAMMAR,
    MESSAGES_GRAMMAR,
    NEWEST_GRAMMAR,
    TRACED_COLUMNS_GRAMMAR,
    body_of,
    bytes_body,
    bytes_meta,
    decode_body,
    decode_bytes,
    decode_copies,
    decode_messages,
    deliver_times,
    keyed_body,
    split_bytes_meta,
    with_grammar,
    with_record_keys,
    with_trace,
)

# The allowed characters of a header: visible ASCII and spaces.
TYPES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
).map(lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False))
SPACES = st.text(" \t\r\n", max_size=3)
TEXTS = st.none() | st.text(min_size=1, max_size=6)
OBJECTS = st.dictionaries(st.text(max_size=5), st.integers(), max_size=3).map(json.dumps)
JSON_RECORDS = st.tuples(VALUES.map(str.encode), st.just(b"") | OBJECTS.map(str.encode))
BYTES_RECORDS = st.tuples(st.binary(max_size=40), TYPES.map(bytes_meta))
Record = tuple[tuple[bytes, bytes], str | None, str | None]


def decoded_of(records: list[Record]) -> DecodedAppend:
    payloads, tags, nodes = (list(column) for column in zip(*records, strict=True))
    datas, metas = (list(column) for column in zip(*payloads, strict=True))
    return of_columns(datas, metas, tags, nodes)


def columns_of(decoded: DecodedAppend) -> tuple[object, ...]:
    datas, metas = map(bytes, decoded.datas), map(bytes, decoded.metas)
    return list(datas), list(metas), decoded.tags, decoded.nodes


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TopicsError) as raised:
        call()
    assert raised.value.code is Code.INVALID_REQUEST
    return raised.value.message


# --- bytes ----------------------------------------------------------------------------------------


@given(TYPES, st.binary(max_size=200))
def test_a_record_of_bytes_is_read_back_from_its_frame(content_type: str, data: bytes) -> None:
    live = decode_bytes(content_type, data)
    again = decode_body(bytes_body(content_type, data), BYTES_GRAMMAR)
    assert again == live
    assert (again.count, again.grammar, bytes(again.datas[0])) == (1, BYTES_GRAMMAR, data)
    assert split_bytes_meta(again.metas[0]) == (content_type, b"")


@given(TYPES, OBJECTS)
def test_the_meta_of_bytes_says_its_type_and_keeps_what_stands_beside(
    content_type: str, beside: str
) -> None:
    meta = bytes_meta(content_type)
    assert meta.startswith(BYTES_MARK + b"{")
    more = beside.encode()[1:-1]
    stamped = meta[:-1] + (b"," + more if more else b"") + b"}"
    kind, left = split_bytes_meta(stamped)
    assert kind == content_type
    assert (json.loads(left) if left else {}) == json.loads(beside)


def test_bytes_end_where_they_end_and_the_first_newline_ends_the_type() -> None:
    decoded = decode_body(b"text/plain\n\nline\n", BYTES_GRAMMAR)
    assert (decoded.datas, decoded.metas) == (
        [b"\nline\n"],
        [b' {"$content_type":"text/plain"}'],
    )
    assert decode_body(b"\n", BYTES_GRAMMAR).datas == [b""]


def test_bytes_without_a_type_or_with_a_strange_one_are_refused() -> None:
    assert "content type" in refusal(lambda: decode_body(b"no newline", BYTES_GRAMMAR))
    assert "ASCII" in refusal(lambda: decode_body("é\nx".encode(), BYTES_GRAMMAR))


# --- messages -------------------------------------------------------------------------------------


@given(st.lists(VALUES, max_size=6), SPACES, SPACES)
def test_an_array_is_its_messages_byte_for_byte(values: list[str], one: str, two: str) -> None:
    inside = f"{one},{two}".join(values)
    body = f"{one}[{two}{inside}{one}]{two}".encode()
    decoded = decode_messages(body)
    assert [bytes(data) for data in decoded.datas] == [value.encode() for value in values]
    assert decode_body(body, decoded.grammar) == decoded
    assert decoded.grammar == MESSAGES_GRAMMAR


@given(VALUES.filter(lambda value: not value.startswith("[")), SPACES, SPACES)
def test_one_value_is_one_message(value: str, before: str, behind: str) -> None:
    decoded = decode_messages((before + value + behind).encode())
    assert decoded.datas == [value.encode()]


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (b"[]", []),
        (b" [ ]\n", []),
        (b"[[]]", [b"[]"]),
        (b"[[1,2], [3]]", [b"[1,2]", b"[3]"]),
        (b"[[[1]]]", [b"[[1]]"]),
        (b"{}", [b"{}"]),
        (b'"[1]"', [b'"[1]"']),
        (b"1e400", [b"1e400"]),
        (b"%d" % 2**70, [b"%d" % 2**70]),
        (b'{"a":1,"a": 2}', [b'{"a":1,"a": 2}']),
        ('["é", "\\u00e9"]'.encode(), ['"é"'.encode(), b'"\\u00e9"']),
    ],
)
def test_one_level_of_an_array_is_taken_off(body: bytes, messages: list[bytes]) -> None:
    assert [bytes(data) for data in decode_messages(body).datas] == messages


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \n",
        b"[",
        b"[1,]",
        b"[,1]",
        b"[1] 2",
        b"[1][2]",
        b"1 2",
        b"nul",
        b"NaN",
        b"Infinity",
        b"01",
        b"-",
        b"+1",
        b"'x'",
        b'"\t"',
        b'"\\x"',
        b'"\\ud800"',
        b'["\\ud800"]',
        b'{"a":"\\udc00"}',
        b'"\xff"',
        b'["\xc3"]',
        b"\xef\xbb\xbf1",
        b"\x0b1",
        b"1\x00",
        b'{"a"}',
        b"{a:1}",
        b"// 1",
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    refusal(lambda: decode_messages(body))


@given(st.binary(max_size=30) | st.text(' \n[]{},:"\\1eEu-.ntfx', max_size=14).map(str.encode))
def test_a_body_is_json_or_refused(body: bytes) -> None:
    try:
        wanted = json.loads(body.decode(), parse_constant=_no_constant)
        "".join(_strings_of(wanted)).encode()
        is_json = not body.startswith(b"\xef\xbb\xbf")
    except (ValueError, RecursionError):
        is_json = False
    try:
        datas = [bytes(data) for data in decode_messages(body).datas]
    except TopicsError:
        assert not is_json, f"refused: {body!r}"
        return
    assert is_json, f"accepted: {body!r}"
    is_array = isinstance(wanted, list)
    assert [json.loads(data) for data in datas] == (wanted if is_array else [wanted])


def _no_constant(name: str) -> object:
    raise ValueError(name)


def _strings_of(value: object) -> list[str]:
    """All strings of a value; a lone surrogate among them cannot be encoded."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in _strings_of(part)]
    return [text for part in value for text in _strings_of(part)] if isinstance(value, list) else []


@pytest.mark.parametrize(("open_", "shut"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_message_has_so_many_levels_and_no_more(open_: bytes, shut: bytes) -> None:
    most = open_ * JSON_DEPTH_MAX + b"1" + shut * JSON_DEPTH_MAX
    # The array of an append does not count as a level of nesting of its messages.
    assert decode_messages(b"[%b]" % most).datas == [most]
    assert "deeper" in refusal(lambda: decode_messages(b"[" + open_ + most + shut + b"]"))
    assert "deeper" in refusal(lambda: decode_messages(open_ * 100_000 + b"1" + shut * 100_000))


# --- copies ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(JSON_RECORDS, TEXTS, TEXTS), min_size=1, max_size=6))
def test_copies_of_json_are_an_append_body(records: list[Record]) -> None:
    decoded = decoded_of(records)
    body = body_of(decoded)
    assert columns_of(decode_append(body)) == columns_of(decoded)
    assert columns_of(decode_copies(body)) == columns_of(decoded)
    assert with_grammar(decoded).grammar == PLAIN_GRAMMAR


@given(
    st.lists(st.tuples(JSON_RECORDS | BYTES_RECORDS, TEXTS, TEXTS), max_size=5),
    st.tuples(BYTES_RECORDS, TEXTS, TEXTS),
    st.integers(0, 5),
)
def test_copies_with_bytes_among_them_are_columns(
    records: list[Record], one: Record, at: int
) -> None:
    records.insert(min(at, len(records)), one)
    decoded = decoded_of(records)
    body = body_of(decoded)
    named = with_grammar(decoded)
    assert named.grammar == COLUMNS_GRAMMAR
    for again in (decode_body(body, named.grammar), decode_copies(body)):
        assert columns_of(again) == columns_of(decoded)
        assert again.grammar == COLUMNS_GRAMMAR
        assert again.weight == decoded.weight


TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@given(
    st.lists(st.tuples(JSON_RECORDS | BYTES_RECORDS, TEXTS, TEXTS), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_copies_keep_the_traces_that_some_of_them_have(
    records: list[Record], are_traced: list[bool]
) -> None:
    records = [
        ((data, b"\t" + TRACE + meta if is_traced else meta), tag, node)
        for ((data, meta), tag, node), is_traced in zip(records, are_traced, strict=False)
    ]
    decoded = decoded_of(records)
    named = with_grammar(decoded)
    assert (named.grammar == TRACED_COLUMNS_GRAMMAR) == any(are_traced[: len(records)])
    for again in (decode_body(body_of(decoded), named.grammar), decode_copies(body_of(decoded))):
        assert columns_of(again) == columns_of(decoded)
        assert again.weight == decoded.weight
        assert with_grammar(again).grammar == named.grammar


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        (b'{"records":[{"data":1,"meta":{"m":1}},{"data":2,"tag":"t"}]}', 1),
        (b'{"records":[{"data":1,"delay_ms":5}]}', 2),
        (b"image/png\n\x89P", 3),
        (b'[1, {"a":2}]', 4),
        (b'["k",[1]]\n{"records":[{"data":1},{"data":2}]}', 6),
    ],
)
def test_a_trace_changes_the_meta_of_each_record_and_the_sums(body: bytes, grammar: int) -> None:
    plain, traced = decode_body(body, grammar), decode_body(body, grammar, TRACE)
    assert traced.metas == [b"\t" + TRACE + meta for meta in plain.metas]
    assert traced.weight == plain.weight + 56 * plain.count
    assert traced.payload_bytes == plain.payload_bytes + 56 * plain.count
    assert (traced.trace, traced.has_metas, traced.payloads) == (TRACE, True, ())
    assert (traced.grammar, traced.delays) == (plain.grammar, plain.delays)
    assert traced.record_keys == plain.record_keys
    assert with_trace(plain, b"") is plain
    assert traced.weight == of_columns(*columns_of(traced)).weight  # type: ignore[arg-type]


def test_a_trace_stays_with_the_records_whose_keys_are_unknown() -> None:
    traced = with_trace(decode_append(b'{"records":[{"data":1},{"data":2}]}'), TRACE)
    missing = with_record_keys(traced, "k", [1])
    assert missing.trace == TRACE
    body = keyed_body("k", [1], b'{"records":[{"data":1},{"data":2}]}')
    assert columns_of(decode_body(body, KEYED_GRAMMAR, TRACE)) == columns_of(missing)


@pytest.mark.parametrize(
    "decoded",
    [
        decode_messages(b'[1, {"a": 2}]'),
        decode_messages(b'"x"'),
        decode_bytes("text/plain", b"[1]"),
        decode_append(b'{"records":[{"data":1,"meta":{"m":1},"tag":"t"}]}'),
    ],
    ids=["messages", "one message", "bytes", "append"],
)
def test_copies_name_the_grammar_they_are_written_in(decoded: DecodedAppend) -> None:
    """Whatever codec they came in: replay reads the body by the named one."""
    named = with_grammar(decoded)
    assert columns_of(decode_body(body_of(decoded), named.grammar)) == columns_of(decoded)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x94\x91\x01\x90\x90\x90",
        msgspec.msgpack.encode(([b"1"], [b""], [None])),
        msgspec.msgpack.encode(([b"1"], [b""], [None], [])),
        msgspec.msgpack.encode(([b"1"], [b""], [None], [None, None])),
        msgspec.msgpack.encode(([b"1"], [b""], [1], [None])),
        msgspec.msgpack.encode(([b"1"], [None], [None], [None])),
        msgspec.msgpack.encode(([b"1"], [b""], [None], [None])) + b"\xc0",
    ],
)
def test_what_is_no_columns_is_refused(body: bytes) -> None:
    refusal(lambda: decode_body(body, COLUMNS_GRAMMAR))


KEYED = (
    b'{"node":"n","idempotency_key":"other","idempotency":"per_record","records":['
    b'{"data":0,"delay_ms":5},{"data": [1],"tag":"t","meta":{"m":1}},'
    b'{"data":2,"node":"own"},{"data":3,"deliver_at_ms":9000}]}'
)


@pytest.mark.parametrize("indexes", [None, [0], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("base", ["b", 'a "line"\nand ä'])
def test_records_with_keys_come_back_with_them(base: str, indexes: list[int] | None) -> None:
    sent = decode_append(KEYED)
    body = keyed_body(base, indexes, KEYED)
    chosen = range(4) if indexes is None else indexes
    for decoded in (with_record_keys(sent, base, indexes), decode_body(body, KEYED_GRAMMAR)):
        assert decoded.record_keys == tuple(f"{base}:{index}" for index in chosen)
        assert decoded.idempotency_key is None
        assert decoded.grammar == KEYED_GRAMMAR
        assert decoded.count == len(chosen)
        assert list(map(bytes, decoded.datas)) == [bytes(sent.datas[index]) for index in chosen]
        for column in ("metas", "tags", "nodes"):
            picked = [getattr(sent, column)[index] for index in chosen]
            assert list(getattr(decoded, column)) == picked
        again = decode_append(body_of(decoded))
        assert (decoded.weight, decoded.payload_bytes) == (again.weight, again.payload_bytes)
    times = {0: (1_005, False), 3: (9_000, True)}
    delayed = [(at, *times[index]) for at, index in enumerate(chosen) if index in times]
    assert deliver_times(body, None, KEYED_GRAMMAR, 1_000) == delayed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        KEYED,
        b'["b",null]',
        b'["b"]\n' + KEYED,
        b"[5,null]\n" + KEYED,
        b'["b",[]]\n' + KEYED,
        b'["b",[4]]\n' + KEYED,
        b'["b",[-1]]\n' + KEYED,
        b'["b",[1,1]]\n' + KEYED,
        b'["b",[1,0]]\n' + KEYED,
        b'["b",["0"]]\n' + KEYED,
        b'["b",null]\n' + KEYED[:-1],
    ],
)
def test_what_is_no_records_with_keys_is_refused(body: bytes) -> None:
    refusal(lambda: decode_body(body, KEYED_GRAMMAR))


@given(st.binary(max_size=60), st.integers(PLAIN_GRAMMAR, NEWEST_GRAMMAR))
def test_any_body_is_read_or_refused_by_any_grammar(body: bytes, grammar: int) -> None:
    try:
        decoded = decode_body(body, grammar)
    except TopicsError:
        return
    assert decoded.count == len(decoded.metas) == len(decoded.tags) == len(decoded.nodes)


def test_grammars_of_append_bodies_are_those_of_appends() -> None:
    body = b'{"records":[{"data":1,"delay_ms":5}]}'
    assert decode_body(body, PLAIN_GRAMMAR).delays == ()
    assert decode_body(body, GRAMMAR).delays == ((0, 5, False),)
