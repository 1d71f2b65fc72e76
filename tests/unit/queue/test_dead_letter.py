"""Dead letters: the record stays unchanged, and the stamps are removed again completely."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.queue.dead_letter import (
    Letter,
    Stamps,
    append_body,
    dead_body,
    redriven_body,
    stamp,
    stamps_of,
    unstamp,
)
from topics_server.values.appends import decode_append

STAMPS = Stamps("jobs:eu.1", 5, 480_101)
MEMBERS = (
    b'"$dead_letter_from":"jobs:eu.1","$dead_letter_deliveries":5,"$dead_letter_src_seq":480101'
)

# The stored form: the mark, and the value.
TRACE = b"\t00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["a", '"', ',"$dead_letter_from":"q"', "$dead_letter_from", "$dead_letter_src_seq", "}", " "]
)
METAS = st.builds(
    lambda value, indent: json.dumps(value, indent=indent).encode(),
    st.dictionaries(NAMES | st.text(), JSON, max_size=4),
    st.sampled_from([None, 0, 2]),
)


@pytest.mark.parametrize(
    ("meta", "stamped"),
    [
        (b"", b"{" + MEMBERS + b" }"),
        (b"{}", b"{" + MEMBERS + b"}"),
        (b"{ }", b"{ " + MEMBERS + b"}"),
        (b'{"trace":"z9"}', b'{"trace":"z9",' + MEMBERS + b"}"),
        (b'{ "a" : [1, {}] \n}', b'{ "a" : [1, {}] \n,' + MEMBERS + b"}"),
    ],
)
def test_stamps_are_the_last_members(meta: bytes, stamped: bytes) -> None:
    letter = Letter(b"1e400", "t", "n", meta)
    dead = stamp(letter, STAMPS)
    assert dead == Letter(b"1e400", "t", "n", stamped)
    assert stamps_of(dead.meta) == STAMPS
    assert unstamp(dead) == letter
    json.loads(stamped)


@given(
    st.none() | METAS,
    st.integers(0, 2**62),
    st.integers(1, 2**62),
    st.just("") | NAMES | st.text(),
    st.sampled_from([b"", TRACE]),
)
def test_whatever_meta_was_it_comes_back(
    meta: bytes | None, deliveries: int, src_seq: int, error: str, trace: bytes
) -> None:
    letter = Letter(b"{}", meta=trace + (meta or b""))
    stamps = Stamps("q", deliveries, src_seq, error)
    dead = stamp(letter, stamps)
    assert stamps_of(dead.meta) == stamps
    assert unstamp(dead) == letter
    assert dead.meta.startswith(trace)
    known: dict[str, Any] = json.loads(dead.meta[len(trace) :])
    assert known["$dead_letter_from"] == "q"
    assert known["$dead_letter_deliveries"] == deliveries
    assert known["$dead_letter_src_seq"] == src_seq
    assert known.get("$dead_letter_error", "") == error


@given(METAS)
def test_what_was_never_stamped_stays(meta: bytes) -> None:
    assert stamps_of(meta) is None
    assert unstamp(Letter(b"0", meta=meta)) == Letter(b"0", meta=meta)


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b'{"a":{' + MEMBERS + b"}}",
        b'{"a":{"b":1,' + MEMBERS + b" }}",
        b"{" + MEMBERS + b',"a":1}',
        b'{"a":1,' + MEMBERS + b" }",
        b"{ " + MEMBERS + b" }",
        b"{" + MEMBERS + b',"$dead_letter_error":1}',
        b"{" + MEMBERS + b',"$dead_letter_error":""}',
        b"{" + MEMBERS + b',"$dead_letter_error":"x","a":"y"}',
        b'{"a":"' + MEMBERS.replace(b'"', b'\\"') + b'"}',
        MEMBERS.replace(b'from":"jobs', b'from":"-jobs').join([b"{", b"}"]),
        MEMBERS.replace(b":5,", b":05,").join([b"{", b"}"]),
    ],
)
def test_fields_that_only_look_like_stamps_stay(meta: bytes) -> None:
    assert stamps_of(meta) is None
    assert unstamp(Letter(b"0", meta=meta)) == Letter(b"0", meta=meta)


def test_a_letter_that_dies_again_is_stamped_again() -> None:
    first = stamp(Letter(b"0", meta=b'{"a":1}'), Stamps("jobs", 5, 7))
    second = stamp(first, Stamps("jobs.dlq", 2, 3))
    assert json.loads(second.meta)["$dead_letter_from"] == "jobs.dlq"
    assert unstamp(second) == first
    assert unstamp(unstamp(second)).meta == b'{"a":1}'


@pytest.mark.parametrize(
    ("before", "after"), [("", "x"), ("x", ""), ('",', '\\"'), ('"$dead_letter_from":', "}")]
)
def test_a_letter_that_dies_again_has_the_reasons_of_both(before: str, after: str) -> None:
    first = stamp(Letter(b"0"), Stamps("jobs", 5, 7, before))
    second = stamp(first, Stamps("jobs.dlq", 2, 3, after))
    assert stamps_of(second.meta) == Stamps("jobs.dlq", 2, 3, after)
    assert unstamp(second) == first
    assert unstamp(first) == Letter(b"0")


def test_bodies_are_appends_with_the_same_bytes() -> None:
    letters = [
        Letter(b'{ "x" : 1.0 }', 'é"t', "n1", b'{"m": "\\u0041"}'),
        Letter(b"null"),
    ]
    body = dead_body([(letters[0], STAMPS), (letters[1], Stamps("q", 1, 1))])
    decoded = decode_append(body)
    assert [bytes(data) for data in decoded.datas] == [b'{ "x" : 1.0 }', b"null"]
    assert decoded.tags == ['é"t', None]
    assert decoded.nodes == ["n1", None]
    assert stamps_of(decoded.metas[0]) == STAMPS
    dead = [
        Letter(bytes(data), tag, node, meta)
        for data, tag, node, meta in zip(
            decoded.datas, decoded.tags, decoded.nodes, decoded.metas, strict=True
        )
    ]
    assert redriven_body(dead) == append_body(letters)
    assert decode_append(redriven_body(dead)).metas == [b'{"m": "\\u0041"}', b""]
