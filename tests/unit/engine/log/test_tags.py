"""Tag -> rows of one block."""

from __future__ import annotations

import pytest

from topics_server.engine.log.tags import TagRows
from topics_server.values.model import TagMatch

TAGS = ["a", None, "a:1", "b", "a", "", "a:2", None, "ab"]


@pytest.mark.parametrize(
    ("text", "is_prefix", "rows"),
    [
        ("a", False, [0, 4]),
        ("a:", False, []),
        ("a", True, [0, 2, 4, 6, 8]),
        ("a:", True, [2, 6]),
        ("", False, [5]),
        ("", True, [0, 2, 3, 4, 5, 6, 8]),
        ("zz", True, []),
        ("b", True, [3]),
    ],
)
def test_rows_ascend_and_agree_with_the_match(text: str, is_prefix: bool, rows: list[int]) -> None:
    match = TagMatch(text, is_prefix)
    assert TagRows(TAGS).rows_of(match) == rows
    assert [row for row, tag in enumerate(TAGS) if match.matches(tag)] == rows


def test_a_block_without_tags_has_no_rows() -> None:
    assert TagRows([None, None]).rows_of(TagMatch("", is_prefix=True)) == []
