"""Twelve rows of one report, as the chart of the README and the table of docs/PERFORMANCE.md. Pure.

Each value comes from a report that `--json` wrote. A row names its figure and series; this module
contains no measured number. `document` writes both files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Final

from benchmarks.cases.compared.postgres import append_name, page_name
from benchmarks.cases.queues import NOTIFIED, TOGETHER
from benchmarks.cases.watch.fanout import POSTGRES as NOTIFY_SIDE
from benchmarks.report.figures import Figure, Report, Series

CASES: Final = (
    "append-1,append-100,diff-1000,fsync-lone,fsync-16,recovery,redis,postgres,fanout,"
    "queue-calls,queue-delivery"
)
OURS: Final = "topics-server"
FLOOR: Final = "bare server"
REDIS: Final = "Redis"
NATS: Final = "NATS"
POSTGRES: Final = "PostgreSQL"
SIDES: Final = (OURS, FLOOR, REDIS, NATS, POSTGRES)
COLOURS: Final = {
    OURS: "#2f7d4f",
    FLOOR: "#9ca3af",
    REDIS: "#b5482f",
    NATS: "#3b6ea5",
    POSTGRES: "#7c5aa6",
}


@dataclass(frozen=True, slots=True)
class Side:
    """A value in the report: the name of its figure and the label of its series."""

    figure: str
    series: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `times` turns requests into records.

    `case`: an older report without this case is shown without the row.
    """

    what: str
    unit: str
    sides: Mapping[str, Side]
    times: int = 1
    is_drawn: bool = True
    case: str = ""


def _appends(count: int, connections: int) -> Mapping[str, Side]:
    records = "one record" if count == 1 else f"{count} records"
    plural = "" if connections == 1 else "s"
    name = f"append of {records}, {connections} connection{plural}"
    xadd = "XADD" if count == 1 else f"{count} XADD piped"
    redis = f"class disk beside {xadd}, appendfsync everysec, {connections} connections"
    return {
        OURS: Side(name, "ours"),
        FLOOR: Side(name, "floor"),
        REDIS: Side(redis, "redis, appendfsync everysec"),
        POSTGRES: Side(
            append_name("off", count, connections), "PostgreSQL, synchronous_commit off"
        ),
    }


def _watchers(count: int) -> Mapping[str, Side]:
    name = f"write to last byte of {count:,} watchers, p50"
    return {
        OURS: Side(name, "ours, p50"),
        FLOOR: Side(name, "floor, p50"),
        REDIS: Side(name, "redis streams, blocked XREAD, p50"),
        NATS: Side(name, "nats-server, core, p50"),
        POSTGRES: Side(name, f"{NOTIFY_SIDE}, p50"),
    }


_PAGE: Final = "diff of 1,000 records, 1 connection"
_FSYNC: Final = "fsync append of one record, alone: p50 above raw write+fdatasync"
_FSYNC_16: Final = "16 writers of 100 records: class disk over class fsync"
_ALWAYS_16: Final = "class fsync beside 100 XADD piped, appendfsync always, 16 connections"
_JOB: Final = "enqueue to delivered on an idle queue, p50"
_RESTART: Final = "1,000,000 records in an un-checkpointed journal, after kill -9"

ROWS: Final = (
    Row("append one record, 1 connection", "records/s", _appends(1, 1)),
    Row("append one record, 16 connections", "records/s", _appends(1, 16)),
    Row("append 100 records, 1 connection", "records/s", _appends(100, 1), 100),
    Row("append 100 records, 16 connections", "records/s", _appends(100, 16), 100, False),
    Row(
        "read a page of 1,000 records",
        "records/s",
        {
            OURS: Side(_PAGE, "ours"),
            FLOOR: Side(_PAGE, "floor"),
            POSTGRES: Side(page_name(1), "PostgreSQL"),
        },
        1000,
    ),
    Row("one record to 100 watchers, p50", "ms", _watchers(100)),
    Row("one record to 1,000 watchers, p50", "ms", _watchers(1000)),
    Row(
        "synced append (`fsync`), one writer, p50",
        "ms",
        {
            OURS: Side(_FSYNC, "ours, p50"),
            FLOOR: Side(_FSYNC, "raw write+fdatasync, p50"),
            POSTGRES: Side(append_name("on", 1, 1), "PostgreSQL, synchronous_commit on, p50"),
        },
        is_drawn=False,
    ),
    Row(
        "synced append of 100, 16 connections",
        "records/s",
        {
            OURS: Side(_FSYNC_16, "class fsync"),
            REDIS: Side(_ALWAYS_16, "redis, appendfsync always"),
            POSTGRES: Side(append_name("on", 100, 16), "PostgreSQL, synchronous_commit on"),
        },
        100,
        case="fsync-16",
    ),
    Row(
        "jobs claimed and acked, 64 a call",
        "jobs/s",
        {
            OURS: Side(TOGETHER, "ours"),
            REDIS: Side(TOGETHER, "redis stream"),
            NATS: Side(TOGETHER, "JetStream"),
            POSTGRES: Side(TOGETHER, "PostgreSQL"),
        },
        case="queue-calls",
    ),
    Row(
        "job to a waiting worker, p50",
        "ms",
        {
            OURS: Side(_JOB, "ours"),
            REDIS: Side(_JOB, "redis stream"),
            NATS: Side(_JOB, "JetStream"),
            POSTGRES: Side(_JOB, NOTIFIED),
        },
    ),
    Row(
        "restart after `kill -9`, 1,000,000 records",
        "s",
        {OURS: Side(_RESTART, "process start to ready")},
        is_drawn=False,
    ),
)


def rows_of(report: Report) -> list[Row]:
    """The rows for which the report has the case."""
    return [row for row in ROWS if not row.case or row.case in report.options["only"]]


def values_of(row: Row, report: Report) -> dict[str, float]:
    """Median of each side that was measured, in the unit of the row.

    Raises `ValueError` if the report lacks our own side; peers may be missing if not installed.
    """
    figures = {figure.name: figure for figure in report.figures}
    found = {name: _series(figures, side) for name, side in row.sides.items()}
    if found[OURS] is None:
        raise ValueError(f"the report lacks {row.sides[OURS].figure!r}: run --only {CASES}")
    return {name: one.median * row.times for name, one in found.items() if one is not None}


def _series(figures: Mapping[str, Figure], side: Side) -> Series | None:
    figure = figures.get(side.figure)
    for series in () if figure is None else (figure.judged, *figure.beside):
        if series.label == side.series:
            return series
    return None


def spelled(value: float, unit: str) -> str:
    """A value with three significant digits."""
    if value >= 1e6:
        return f"{value / 1e6:.1f} million" if unit.endswith("/s") else f"{value:,.0f}"
    if value >= 1000:
        return f"{round(value, -2):,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def machine_of(report: Report) -> str:
    """The machine and the way of measuring, as one sentence fragment."""
    machine, options = report.machine, report.options
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['file_system']}, "
        f"{machine['system']}, Python {machine['python']}, {machine['date']}; "
        f"median of {options['rounds']} rounds of {options['seconds']:g} s"
    )


def table(report: Report) -> str:
    """The rows as Markdown."""
    lines = [
        f"{machine_of(report)}. The calibration loop varied by {report.noise_share:.0%}.",
        "",
        f"| | unit | {' | '.join(SIDES)} |",
        "|---|---|" + "---:|" * len(SIDES),
    ]
    for row in rows_of(report):
        values = values_of(row, report)
        cells = [spelled(values[side], row.unit) if side in values else "" for side in SIDES]
        lines.append(f"| {row.what} | {row.unit} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# -- the picture ---------------------------------------------------------------------------------

WIDTH: Final = 860
LEFT: Final = 270  # of the bars
LONGEST: Final = 380
BAR: Final = 13
GAP: Final = 12
TEXT: Final = "#1f2937"
PALE: Final = "#6b7280"
RATES: Final = "Records or jobs a second: longer is better"
TIMES: Final = "Milliseconds: shorter is better"


def picture(report: Report) -> str:
    """The SVG. Each row has its own scale: its longest bar is its largest value."""
    parts = [
        _text(16, 28, "topics-server beside other servers", size=17, weight="bold"),
        _text(16, 48, machine_of(report), size=11, colour=PALE),
    ]
    drawn = [(row, values_of(row, report)) for row in rows_of(report) if row.is_drawn]
    measured = {side for _, values in drawn for side in values}
    x = 16
    for side in (side for side in SIDES if side in measured):
        parts.append(_bar(x, 62, 12, COLOURS[side]))
        parts.append(_text(x + 18, 73, side))
        x += 36 + 8 * len(side)
    y = 104
    for title, is_rate in ((RATES, True), (TIMES, False)):
        parts.append(_text(16, y, title, weight="bold"))
        y += 14
        for row, values in drawn:
            if row.unit.endswith("/s") is is_rate:
                parts.append(_group(row, values, y))
                y += len(values) * BAR + GAP
        y += 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="system-ui, sans-serif" font-size="13">'
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _group(row: Row, values: Mapping[str, float], y: int) -> str:
    """The bars of one row, one below the other."""
    largest = max(values.values())
    parts = [_text(16, y + 11, row.what)]
    for at, (side, value) in enumerate(values.items()):
        top = y + at * BAR
        length = LONGEST * value / largest
        parts.append(_bar(LEFT, top, length, COLOURS[side]))
        shown = f"{spelled(value, row.unit)} {row.unit if row.unit != 'records/s' else ''}"
        parts.append(_text(round(LEFT + length) + 6, top + 10, shown.strip(), size=11))
    return "".join(parts)


def _bar(x: int, y: int, width: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>'


def _text(
    x: int, y: int, text: str, *, size: int = 13, weight: str = "normal", colour: str = TEXT
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
