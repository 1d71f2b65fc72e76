"""Offsets: text and back, in the order of positions; other texts are refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.streams.offsets import position_of, text_of
from topics_server.streams.values import BEGINNING, Position
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import SEQ_MAX

SEQS = st.integers(0, SEQ_MAX)
# A seq with more digits than the padding would take 10**16 records.
SMALL = st.integers(0, 10**16 - 2)


@given(SEQS, SEQS)
def test_a_position_is_read_back_from_its_text(seq: int, topic_id: int) -> None:
    text = text_of(Position(seq, topic_id))
    assert position_of(text, "offset") == Position(seq, topic_id)
    # An offset is one token of a URL, and equals neither of the special values.
    assert re.fullmatch(r"[0-9_]{33,256}", text)
    assert text not in ("-1", "now")


@given(SMALL, SMALL, SMALL)
def test_texts_of_one_stream_sort_as_its_positions(one: int, other: int, topic_id: int) -> None:
    first, second = Position(one, topic_id), Position(other, topic_id)
    assert (text_of(first) < text_of(second)) == (first < second)
    assert text_of(BEGINNING) <= text_of(first)


@given(st.integers(0, 10**16 - 2), SMALL, SMALL)
def test_texts_of_a_fork_sort_across_where_it_left_its_source(
    seq: int, source_id: int, fork_id: int
) -> None:
    assert text_of(Position(seq, source_id)) < text_of(Position(seq + 1, fork_id))


def test_the_text_is_this() -> None:
    assert text_of(Position(42, 7)) == "0000000000000042_0000000000000007"
    assert position_of("42_7", "offset") == Position(42, 7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "_",
        "1",
        "1_",
        "_1",
        "1_2_3",
        "-1",
        "-1_2",
        "+1_2",
        " 1_2",
        "1_2\n",
        "1_2 ",
        "1__2",
        "1,2",
        "0x1_2",
        "1.0_2",
        "now",
        "１_２",
        "²_1",
        f"{SEQ_MAX + 1}_1",
        f"1_{SEQ_MAX + 1}",
        "9" * 20 + "_1",
        "0" * 21 + "_1",
        "9" * 5000 + "_1",
    ],
)
def test_anything_else_is_refused_by_the_name_of_its_field(text: str) -> None:
    with pytest.raises(TopicsError) as raised:
        position_of(text, "Stream-Fork-Offset")
    assert raised.value.code is Code.INVALID_REQUEST
    assert raised.value.detail == {"field": "Stream-Fork-Offset"}


@given(st.text(max_size=40))
def test_any_text_is_a_position_or_refused(text: str) -> None:
    try:
        position = position_of(text, "offset")
    except TopicsError:
        return
    assert 0 <= position.seq <= SEQ_MAX
    assert 0 <= position.topic_id <= SEQ_MAX
