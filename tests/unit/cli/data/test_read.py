"""`cli.data.read`: a record as one line of a terminal."""

from __future__ import annotations

import msgspec

from topics_server.cli.paging import as_row


def row(text: str, width: int = 200) -> str:
    """The line of a record given as JSON."""
    return as_row(msgspec.Raw(text.encode()), width)


def test_a_row_holds_seq_marks_and_data() -> None:
    line = row('{"$seq":7,"$ts":0,"$node":"n","$tag":"a b","data":{"x": [1e400, 2]}}')
    assert line.startswith("        7  ")
    assert line.endswith('  #a b  @n  {"x": [1e400, 2]}')


def test_a_row_fits_its_width() -> None:
    line = row('{"$seq":7,"$ts":0,"data":"' + "x" * 100 + '"}', 60)
    assert len(line) == 60
    assert line.endswith("…")


def test_nothing_in_a_record_can_steer_the_terminal() -> None:
    line = row('{"$seq":1,"$ts":0,"$tag":"\\u001b[31m","data":["\u0085",\n"\u202e"]}')
    assert line.isprintable()
