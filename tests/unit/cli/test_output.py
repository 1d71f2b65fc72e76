"""`cli.output`: values are printed as lines without any change of the value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.cli.output import cell, one_line, show_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=VALUES, indent=st.sampled_from([None, 0, 2, "\t"]))
def test_a_line_is_the_same_value(value: object, indent: int | str | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False).replace("\n", "\r\n").encode()
    line = one_line(text)
    assert b"\n" not in line
    assert b"\r" not in line
    assert json.loads(line) == value
    assert len(line) == len(text)


def test_a_value_on_one_line_is_not_touched() -> None:
    value = b'{ "a":1e400 }'
    assert one_line(value) is value


def test_cells_are_json_but_for_strings() -> None:
    assert [cell(value) for value in ("a", 1, True, None, [1, 2])] == [
        "a",
        "1",
        "true",
        "null",
        "[1,2]",
    ]


def test_json_is_the_answer_itself(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    show_object(b'{"b": 1,\n"performance": {}}', as_json=True)
    assert capfdbinary.readouterr().out == b'{"b": 1, "performance": {}}\n'


def test_a_table_holds_every_field_but_how_long_it_took(
    capfd: pytest.CaptureFixture[str],
) -> None:
    show_object(b'{"topic":"[b]t","config":{"type":"log"},"performance":{"x":1}}', as_json=False)
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines == [["topic", "[b]t"], ["config.type", "log"]]
