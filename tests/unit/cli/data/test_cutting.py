"""`cli.data.cutting`: bytes of a line become bytes of a record, unchanged."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.cli.data.cutting import BadLine, Cut, Cutter, Shape, fingerprint, whole_records

WEBHOOKS = Path(__file__).parents[4] / "examples" / "webhooks" / "github-webhooks.jsonl.gz"
ODD = b'{ "b":1e400, "a": [1 ,2],\t"a":3,"\\u0061":"\\u00e9\xc3\xa9", "n":-0.0 }'


class Record(msgspec.Struct):
    """A record of a body, values as bytes."""

    data: msgspec.Raw
    tag: str | None = None
    node: str | None = None


class Body(msgspec.Struct):
    """The body of an append."""

    records: list[Record]
    idempotency_key: str
    create: bool
    node: str | None = None


def test_a_whole_line_is_the_data_byte_for_byte() -> None:
    assert Cutter(Shape()).cut([b"  " + ODD + b" \r"], 1) == [Cut(ODD)]


def test_a_field_is_cut_out_byte_for_byte() -> None:
    line = b'{"event" : "pu\\u0073h" ,"payload": ' + ODD + b' , "x":1}'
    (cut,) = Cutter(Shape(data="payload", tag="event")).cut([line], 1)
    assert cut == Cut(ODD, tag=b'"pu\\u0073h"')
    assert cut.render() == b'{"data":' + ODD + b',"tag":"pu\\u0073h"}'


def test_a_tag_may_be_cut_from_a_line_that_is_stored_whole() -> None:
    line = b'{"kind":"a", "n":1}'
    assert Cutter(Shape(tag="kind")).cut([line], 1) == [Cut(line, tag=b'"a"')]


def test_absent_and_null_parts_are_left_out() -> None:
    cutter = Cutter(Shape(data="d", tag="t", node="n", meta="m"))
    assert cutter.cut([b'{"d":null,"t":null,"n":null,"m":null}', b'{"d":0}'], 1) == [
        Cut(b"null"),
        Cut(b"0"),
    ]


def test_a_record_keeps_all_its_parts() -> None:
    line = b'{"meta":{"k": 1},"node":"n","tag":"t","data":[1, 2],"more":1}'
    (cut,) = Cutter(whole_records()).cut([line], 1)
    assert cut.render() == b'{"data":[1, 2],"tag":"t","node":"n","meta":{"k": 1}}'


@pytest.mark.parametrize(
    ("shape", "line", "words"),
    [
        (Shape(), b"hello", "not JSON"),
        (Shape(), b'1},{"data":2', "not JSON"),
        (Shape(), b"1 2", "not JSON"),
        (Shape(), b'"\xff"', "not UTF-8"),
        (Shape(), b'{"a":"b\tc"}', "not JSON"),
        (Shape(), b"[" * 100_000, "not JSON"),
        (Shape(data="d"), b'{"e":1}', "missing required field `d`"),
        (Shape(data="d"), b"[1]", "Expected `object`"),
        (Shape(data="d", tag="t"), b'{"d":1,"t":5}', "the field 't' is not a string"),
        (Shape(data="d", node="t"), b'{"d":1,"t":[]}', "the field 't' is not a string"),
        (Shape(data="d", meta="m"), b'{"d":1,"m":"x"}', "the field 'm' is not an object"),
    ],
)
def test_a_bad_line_is_named_by_its_number(shape: Shape, line: bytes, words: str) -> None:
    good = b'{"d":1}'
    with pytest.raises(BadLine, match=r"^line 12: ") as caught:
        Cutter(shape).cut([good, good, line, good], 10)
    assert words in str(caught.value)


def test_two_broken_lines_do_not_make_a_whole_one() -> None:
    with pytest.raises(BadLine, match=r"^line 1: "):
        Cutter(Shape()).cut([b"[1,", b"2]", b"3 4"], 1)


@pytest.mark.parametrize("name", ["a\\b", 'a"b', "a\nb"])
def test_a_field_name_that_cannot_be_cut_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a field name must not contain"):
        Cutter(Shape(data=name))


def test_a_field_becomes_one_part_only() -> None:
    with pytest.raises(ValueError, match="one part"):
        Cutter(Shape(data="x", tag="x"))


def test_a_body_holds_the_records_in_order_and_its_key() -> None:
    cutter = Cutter(Shape(), node='n"1')
    body = cutter.body([Cut(ODD), Cut(b"2", tag=b'"t"')], "key", create=False)
    assert b'{"data":' + ODD + b"}," in body
    found = msgspec.json.decode(body, type=Body)
    assert [bytes(record.data) for record in found.records] == [ODD, b"2"]
    assert (found.idempotency_key, found.create, found.node) == ("key", False, 'n"1')


def test_prints_are_of_what_the_server_will_hold() -> None:
    cutter = Cutter(Shape(data="d", tag="t", node="n"), node="default")
    cuts = cutter.cut([b'{"d":[1, 2],"t":"\\u00e9"}', b'{"d":1,"n":"own"}'], 1)
    assert cutter.prints(cuts) == [
        fingerprint(b"[1, 2]", "é", "default", None),
        fingerprint(b"1", None, "own", None),
    ]


texts = st.one_of(st.none(), st.sampled_from(["", "a", "t", "n", "ta"]))
metas = st.one_of(st.none(), st.sampled_from([b"{}", b'{"a":1}']))
parts = st.tuples(st.sampled_from([b"1", b"11", b'"t"']), texts, texts, metas)


@given(one=parts, other=parts)
def test_prints_are_equal_exactly_when_all_parts_are(
    one: tuple[bytes, str | None, str | None, bytes | None],
    other: tuple[bytes, str | None, str | None, bytes | None],
) -> None:
    assert (fingerprint(*one) == fingerprint(*other)) == (one == other)


def test_the_webhook_payloads_are_cut_verbatim() -> None:
    lines = gzip.decompress(WEBHOOKS.read_bytes()).splitlines()
    cuts = Cutter(Shape(data="payload", tag="event")).cut(lines, 1)
    assert len(cuts) == 329
    for line, cut in zip(lines, cuts, strict=True):
        assert cut.tag is not None
        assert line == b'{"event":' + cut.tag + b',"payload":' + cut.data + b"}"
