"""The table and the chart of docs/PERFORMANCE.md, made from a report with only some of the
peers.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from benchmarks.report import overview
from benchmarks.report.figures import Figure, Report, Series

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "file_system": "ext4",
    "system": "Linux",
    "python": "3.11",
    "date": "a day",
}


def report(sides: Collection[str]) -> Report:
    """A report in which these sides were measured; the value of each is its index."""
    figures: dict[str, list[Series]] = {}
    for row in overview.ROWS:
        for name, side in row.sides.items():
            if name in sides:
                value = float(overview.SIDES.index(name) + 1)
                figures.setdefault(side.figure, []).append(Series(side.series, "ms", (value,)))
    return Report(
        machine=MACHINE,
        options={"rounds": 1, "seconds": 1, "only": overview.CASES.split(",")},
        figures=[
            Figure("case", name, series[0], None, tuple(series[1:]))
            for name, series in figures.items()
        ],
    )


def cells(text: str, what: str) -> list[str]:
    """The cells of one row of the table, beginning with our server's."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {what} |")]
    return [cell.strip() for cell in line.split("|")[3:-1]]


def test_each_peer_has_its_column() -> None:
    text = overview.table(report(overview.SIDES))
    assert cells(text, "append one record, 16 connections") == ["1.00", "2.00", "3.00", "", "5.00"]
    assert cells(text, "append 100 records, 1 connection") == [
        *("100.0", "200.0", "300.0", "", "500.0")
    ]
    assert cells(text, "jobs claimed and acked, 64 a call") == ["1.00", "", "3.00", "4.00", "5.00"]
    assert cells(text, "one record to 1,000 watchers, p50")[-1] == "5.00"


@pytest.mark.parametrize("peer", [overview.REDIS, overview.NATS, overview.POSTGRES])
def test_a_peer_that_was_not_measured_leaves_its_cells_empty(peer: str) -> None:
    found = report([side for side in overview.SIDES if side != peer])
    at = overview.SIDES.index(peer)
    table = overview.table(found)
    assert {cells(table, row.what)[at] for row in overview.ROWS} == {""}
    colour = overview.COLOURS[peer]
    assert colour not in overview.picture(found)
    assert colour in overview.picture(report(overview.SIDES))


def test_a_report_without_our_own_side_is_refused() -> None:
    with pytest.raises(ValueError, match="run --only"):
        overview.table(report([overview.REDIS]))


def test_a_report_of_fewer_cases_has_fewer_rows() -> None:
    found = report(overview.SIDES)
    whole = overview.table(found)
    found.options["only"].remove("queue-calls")
    found.figures = [figure for figure in found.figures if "claim and ack" not in figure.name]
    lost = set(whole.splitlines()) - set(overview.table(found).splitlines())
    assert [line.split("|")[1].strip() for line in lost] == ["jobs claimed and acked, 64 a call"]
    assert "jobs claimed" not in overview.picture(found)


def test_rates_and_times_are_drawn_apart() -> None:
    drawn = overview.picture(report(overview.SIDES))
    rates, times = drawn.split(overview.TIMES)
    assert "jobs claimed and acked" in rates
    assert "jobs claimed and acked" not in times
    assert "job to a waiting worker" in times
