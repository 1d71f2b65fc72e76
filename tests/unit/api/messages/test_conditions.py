"""The condition of an append means the same whether it is decoded with its body or by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.api.messages.conditions import condition_of
from topics_server.auth.api_keys import EVERYBODY, Caller
from topics_server.engine.filters import AnyOf, TagLeaf
from topics_server.engine.topic.writes.condition import Condition
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import U64_MAX
from topics_server.values.model import SentCondition, TagMatch
from topics_server.values.texts.key_list import READ, WRITE

WRITER = Caller(None, WRITE, ())
READER_TOO = Caller(None, READ | WRITE, ())
NUMBERS = st.sampled_from(
    (0, 1, 7, U64_MAX, U64_MAX + 1, -1, 2**80, -(2**80), 1.5, "1", True, None)
)
TEXTS = st.sampled_from(
    ("", "a", "a*", "*", "x" * 64, "x" * 65, "ä" * 70, "\ud83d\ude00", "x" * 2000)
)
LEAVES = st.one_of(
    TEXTS,
    st.tuples(
        st.sampled_from(("tag", "node", "data")), st.sampled_from(("Eq", "Glob", "Le")), TEXTS
    ),
    st.tuples(st.sampled_from(("tag", "node")), st.just("In"), st.lists(TEXTS, max_size=3)),
    st.sampled_from((7, 1.5, True, None, {}, {"tag": "a"}, [], ["tag"], ["tag", "Eq", 7])),
)
FILTERS = st.recursive(
    LEAVES,
    lambda part: (
        st.tuples(st.sampled_from(("Or", "And", "Not")), part)
        | st.tuples(st.sampled_from(("Or", "And", "Not")), part, part)
    ),
    max_leaves=6,
)
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "none_match": FILTERS,
        "after": NUMBERS,
        "head_seq": NUMBERS,
        "epoch": NUMBERS,
        "exists": st.sampled_from((True, False, None, 1)),
        "other": st.just(1),
    },
)
ANY = st.one_of(MEMBERS, st.sampled_from((None, 7, "a", [], True)))


def outcome(
    sent: SentCondition | bytes | None, caller: Caller, headers: dict[bytes, bytes]
) -> Condition | tuple[Code, str, dict[str, Any]] | None:
    try:
        return condition_of(sent, headers, caller, 128)
    except TopicsError as error:
        return error.code, error.message, error.detail


def decoded(condition: object, pad: int) -> SentCondition | bytes | None:
    """The `if` decoded from a body that has this many further bytes."""
    body = {"records": [{"data": "x" * pad}], "if": condition}
    return decode_append(json.dumps(body).encode()).condition


@given(
    ANY,
    st.sampled_from((EVERYBODY, WRITER, READER_TOO)),
    st.sampled_from(({}, {b"if-match": b'"1-2"'}, {b"if-match": b"?"})),
)
def test_small_and_large_bodies_have_the_same_conditions(
    condition: object, caller: Caller, headers: dict[bytes, bytes]
) -> None:
    large = decoded(condition, 5000)
    assert large is None or isinstance(large, bytes)
    expected = outcome(large, caller, headers)
    assert outcome(decoded(condition, 1), caller, headers) == expected
    if condition is not None:
        assert outcome(json.dumps(condition).encode(), caller, headers) == expected


@pytest.mark.parametrize("spelling", ["seat", ["tag", "Eq", "seat"], ["tag", "In", ["seat"]]])
def test_one_tag_is_the_same_in_each_spelling(spelling: object) -> None:
    sent = decoded({"none_match": spelling, "after": 7}, 1)
    assert isinstance(sent, SentCondition), "it comes with the body"
    expected = Condition(none_match=TagLeaf((TagMatch("seat"),)), after=7)
    assert condition_of(sent, {}, EVERYBODY, 128) == expected


def test_a_filter_of_several_parts_comes_with_a_small_body() -> None:
    sent = decoded({"none_match": ["Or", "a", ["tag", "Glob", "b*"]]}, 1)
    assert isinstance(sent, SentCondition)
    found = condition_of(sent, {}, EVERYBODY, 128)
    a, b = TagLeaf((TagMatch("a"),)), TagLeaf((TagMatch("b", is_prefix=True),))
    assert found == Condition(none_match=AnyOf((a, b)))
