"""Pieces that are cut in one call are the slices of their ranges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.values.columns.cutting import can_cut, copies, cut, texts_of, write_decimals

RAW = bytes(range(256)) * 80
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), min_size=1)


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 200)), min_size=1, max_size=60))
def test_each_piece_is_the_slice_of_its_range(steps: list[tuple[int, int]]) -> None:
    edges = np.cumsum([step for pair in steps for step in pair])
    starts, ends = edges[::2].copy(), edges[1::2].copy()
    assert can_cut(RAW, starts, ends)
    assert list(cut(RAW, starts, ends)) == [
        RAW[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


@pytest.mark.parametrize("size", [1, 9_999, 10_000, 12_345])
def test_a_piece_may_have_any_number_of_digits(size: int) -> None:
    starts, ends = np.array([0, size]), np.array([size, size + 1])
    assert list(cut(RAW, starts, ends)) == [RAW[:size], RAW[size : size + 1]]


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        ([-1, 5], [3, 9]),
        ([0, 5], [3, len(RAW) + 1]),
        ([0, 5], [3, 4]),
        ([0, 5], [6, 9]),
        ([5, 0], [9, 3]),
    ],
)
def test_ranges_outside_descending_or_overlapping_are_not_cut(
    starts: list[int], ends: list[int]
) -> None:
    assert not can_cut(RAW, np.array(starts), np.array(ends))


@given(TEXTS)
def test_texts_are_decoded_one_for_each_piece(texts: list[str]) -> None:
    assert texts_of([text.encode() for text in texts]) == texts


def test_a_text_with_nul_is_one_text() -> None:
    assert texts_of([b"a\0b", b"", b"\0"]) == ["a\0b", "", "\0"]


@given(st.lists(st.integers(0, 10**12 - 1), min_size=1, max_size=30))
def test_decimals_are_written_into_each_text(values: list[int]) -> None:
    texts = copies(b"<%012d>" % values[0], len(values))
    write_decimals(texts, 13, np.array(values), 12)
    assert [row.tobytes() for row in texts] == [b"<%012d>" % value for value in values]
