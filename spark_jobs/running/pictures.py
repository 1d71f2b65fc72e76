"""Charts of the jobs, by matplotlib: lines over time, bars, grids of time, strips.

Each function returns a `Figure`; `save` writes it as SVG or PNG. Only `job.finish` and the jobs'
`draw` call this module. A picture gives an overview; the Parquet files have the numbers. To stay
legible with any data, a picture has at most `SERIES_MAX` lines, `GRID_ROWS_MAX` rows of a grid and
`STRIPS_MAX` strips, and states how many it leaves out.

The drawing functions import matplotlib, so jobs without pictures run without it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from spark_jobs.running.installing import how, missing

# Characters that XML cannot contain even when escaped, and those without a glyph in any font.
_UNFIT: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
COLOURS: Final = (
    *("#2b6cb0", "#c05621", "#2f855a", "#6b46c1"),
    *("#b83280", "#975a16", "#285e61", "#4a5568"),
)
SERIES_MAX: Final = len(COLOURS)
GRID_ROWS_MAX: Final = 40
GRID_COLUMNS_MAX: Final = 120
STRIPS_MAX: Final = 30
# A line with more points than this is drawn as means and, with few lines, a band from minimum to
# maximum.
POINTS_MAX: Final = 400
_BANDS_MAX: Final = 2
# More boxes than this are drawn as pixels even in an SVG, which then has kilobytes instead of
# megabytes.
_BOXES_MAX: Final = 1_500
_WIDTH_IN: Final = 9.6
_DPI: Final = 100
_GREY, _DIM, _DARK = "#edf2f7", "#718096", "#1a202c"
_DAY_MS: Final = 86_400_000
# Days since 1970 of the years 2 to 9998: the range that matplotlib's calendar can label, with a
# margin.
_CALENDAR: Final = (-718_700, 2_932_500)
_STYLE: Final = {
    "font.size": 9,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#cbd5e0",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "topics",  # the same picture gives the same file
}

# Labels of a time axis by its unit, from year to second; and labels at the start of a larger unit.
_DATES: Final = {
    "formats": ["%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M", "%H:%M:%S.%f"],
    "zero_formats": ["", "%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M"],
    "offset_formats": ["", "%Y", "%Y", "%Y-%m-%d", "%Y-%m-%d", "%Y-%m-%d"],
}

Points = Sequence[tuple[float, float]]  # (ms since the epoch, value), ascending
Figure = Any  # matplotlib.figure.Figure


class NoPictures(RuntimeError):
    """matplotlib is not installed; the message says how to install it."""

    def __init__(self) -> None:
        super().__init__(how("pictures need", "pictures"))


@dataclass(frozen=True, slots=True)
class GridRow:
    """A row of a grid: for each time, the darkness of its cell (0 to 1), and a text that is shown
    if there is room.

    A row without cells is a heading. `since` marks the start of a row that began after the others.
    """

    name: str
    cells: Mapping[float, tuple[float, str]]
    note: str
    colour: str = COLOURS[0]
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Strip:
    """A bar of a range `first` to `last` (inclusive), in pieces with the share of each colour.

    `pieces`: (first, last, ((colour, count), ...)); `marks`: (first, last), visible at any size.
    """

    name: str
    first: int
    last: int
    pieces: Sequence[tuple[int, int, Sequence[tuple[str, int]]]]
    marks: Sequence[tuple[int, int]]
    words: str
    colour: str


# -- files -------------------------------------------------------------------------------------


def require() -> None:
    """Raise `NoPictures` if matplotlib is not installed, before a job computes anything."""
    if missing("pictures"):
        raise NoPictures


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of its suffix (`.svg`, `.png`). Raises `OSError`."""
    with _style(), warnings.catch_warnings():
        # A character without a glyph in any font is drawn as a box; that needs no warning.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def add_note(figure: Figure, text: str) -> None:
    """Add a line to the note below a figure."""
    with _style():
        figure.set_figheight(figure.get_figheight() + 0.16)
        note = "\n".join([*filter(None, [figure.get_supxlabel()]), shown(text)])
        figure.supxlabel(note, x=0.01, ha="left", fontsize=9)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def _figure(title: str, unit: str, height_in: float, note: str = "") -> tuple[Figure, Any]:
    """A figure of one plot with its title, the measured quantity, and a note below. In `_style`."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.set_title(unit, loc="left", fontsize=9, color=_DIM)
    if note:
        text = "\n".join(map(shown, note.split("\n")))
        figure.supxlabel(text, x=0.01, ha="left", fontsize=9)
    return figure, axes


# -- charts ------------------------------------------------------------------------------------


def lines(title: str, unit: str, series: Mapping[str, Points], height_in: float = 4.2) -> Figure:
    """Values over time: a line for each of the names with the largest sums.

    Few points are drawn as dots.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = dict(sorted(series.items(), key=lambda each: -sum(v for _, v in each[1]))[:SERIES_MAX])
    most = max(map(len, drawn.values()), default=0)
    notes = [] if drawn else ["no records"]
    if len(series) > len(drawn):
        notes.append(f"and {len(series) - len(drawn):,} more, with less")
    has_bands = len(drawn) <= _BANDS_MAX
    if most > POINTS_MAX:
        band = ", its band the least to the largest" if has_bands else ""
        notes.append(f"a line is the mean of every {most / POINTS_MAX:.0f} buckets or so{band}")
    with _style():
        figure, axes = _figure(title, unit, height_in, "; ".join(notes))
        ends = [t for points in drawn.values() for t, _ in points]
        is_dated = _use_calendar(axes, ends)
        for colour, (name, points) in zip(COLOURS, drawn.items(), strict=False):
            times, means, lows, highs = _thinned(points)
            xs = [t / _DAY_MS for t in times] if is_dated else times
            marker = "o" if len(points) <= 60 else ""
            axes.plot(xs, means, color=colour, lw=1.6, marker=marker, ms=4, label=_label(name, 30))
            if len(points) > POINTS_MAX and has_bands:
                axes.fill_between(xs, lows, highs, color=colour, alpha=0.18, lw=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))
        axes.grid(axis="y", color="#e2e8f0")
        axes.set_axisbelow(True)
        if not drawn:
            _hide_frame(axes)
            axes.set_axis_off()
        else:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def bars(title: str, unit: str, values: Sequence[tuple[str, float]], note: str = "") -> Figure:
    """Values by name, with the first at the top."""
    with _style():
        figure, axes = _figure(title, unit, 1.2 + 0.24 * max(len(values), 1), note)
        drawn = axes.barh(range(len(values)), [value for _, value in values], color=COLOURS[0])
        axes.bar_label(drawn, [amount(value) for _, value in values], padding=4)
        axes.set_yticks(range(len(values)), [_label(name, 40) for name, _ in values])
        axes.set_ylim(max(len(values), 1) - 0.5, -0.5)
        axes.margins(x=0.1)
        _hide_frame(axes)
    return figure


def grid(
    title: str, unit: str, times: Sequence[float], rows: Sequence[GridRow], note: str
) -> Figure:
    """Rows of cells, with a column for each of the ascending times.

    A darker cell means a larger value.
    """
    columns, drawn = list(times[-GRID_COLUMNS_MAX:]), rows[:GRID_ROWS_MAX]
    notes = [note] if note else []
    if len(rows) > len(drawn):
        left = sum(bool(row.cells) for row in rows[len(drawn) :])
        notes.append(f"and {left:,} row{'' if left == 1 else 's'} more")
    if len(times) > len(columns):
        notes.append(f"the last {len(columns)} of {len(times)} times are shown")
    with _style():
        height = 1.1 + 0.22 * max(len(drawn), 1) + 0.16 * len(notes)
        figure, axes = _figure(title, unit, height, "\n".join(notes))
        _mark_times(axes, columns)
        axes.set_yticks(range(len(drawn)), [_label(row.name, 40) for row in drawn])
        axes.set_ylim(max(len(drawn), 1) - 0.5, -0.5)
        side = axes.secondary_yaxis("right")
        side.set_yticks(range(len(drawn)), [_label(row.note, 34) for row in drawn])
        for row, label in zip(drawn, axes.get_yticklabels(), strict=True):
            label.set_fontweight("normal" if row.cells else "bold")
        is_dense = len(drawn) * len(columns) > _BOXES_MAX
        for place, row in enumerate(drawn):
            _draw_cells(axes, place, row, columns, is_dense=is_dense)
        _hide_frame(axes, side)
    return figure


def strips(
    title: str, unit: str, kinds: Sequence[tuple[str, str]], rows: Sequence[Strip], note: str
) -> Figure:
    """One range for each row, over the width of the plot, with its verdict. `kinds`: (name,
    colour).
    """
    from matplotlib.patches import Patch

    drawn = rows[:STRIPS_MAX]
    notes = [note] if note else []
    if len(rows) > len(drawn):
        notes.append(f"and {len(rows) - len(drawn):,} more")
    with _style():
        height = 1.4 + 0.52 * max(len(drawn), 1) + 0.16 * len(notes)
        figure, axes = _figure(title, unit, height, "\n".join(notes))
        axes.set_xlim(0, 1)
        axes.set_ylim(max(len(drawn), 1) - 0.5, -0.5)
        names = []
        is_dense = sum(len(row.pieces) for row in drawn) > _BOXES_MAX
        for place, row in enumerate(drawn):
            ends = f"\n{row.first:,} .. {row.last:,}" if row.pieces else ""
            names.append(_label(row.name, 40) + ends)
            _draw_strip(axes, place, row, is_dense=is_dense)
        axes.set_yticks(range(len(drawn)), names)
        if kinds:
            legend = [Patch(color=colour, label=name) for name, colour in kinds]
            axes.legend(
                handles=legend, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(kinds),
                frameon=False,
            )  # fmt: skip
        _hide_frame(axes)
    return figure


# -- parts of charts ---------------------------------------------------------------------------


def _use_calendar(axes: Any, times: Sequence[float]) -> bool:
    """Label the x axis with dates (UTC) if the calendar has all `times`; else with numbers."""
    from matplotlib import dates
    from matplotlib.ticker import MaxNLocator

    low, high = min(times, default=0.0) / _DAY_MS, max(times, default=0.0) / _DAY_MS
    is_dated = _CALENDAR[0] <= low and high <= _CALENDAR[1]
    if not is_dated:
        axes.set_xlabel("ms since 1970")
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        return False
    locator = dates.AutoDateLocator(tz=UTC, minticks=4, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=UTC, **_DATES))
    if high - low < 1e-9:  # one moment: an hour around it
        axes.set_xlim(low - 1 / 48, low + 1 / 48)
    return True


def _thinned(points: Points) -> tuple[list[float], list[float], list[float], list[float]]:
    """Times, means, minima and maxima; many points are grouped into equal spans."""
    times = [t for t, _ in points]
    if len(points) <= POINTS_MAX:
        values = [v for _, v in points]
        return times, values, values, values
    width = (times[-1] - times[0]) / POINTS_MAX or 1.0
    found: tuple[list[float], list[float], list[float], list[float]] = ([], [], [], [])
    spans = groupby(points, lambda point: min(int((point[0] - times[0]) / width), POINTS_MAX - 1))
    for _, span in spans:
        part = list(span)
        values = [v for _, v in part]
        means = (sum(t for t, _ in part) / len(part), sum(values) / len(part))
        for column, value in zip(found, (*means, min(values), max(values)), strict=True):
            column.append(value)
    return found


def _mark_times(axes: Any, columns: Sequence[float]) -> None:
    """Write about seven of a grid's times above it."""
    # A single column is as wide as a day.
    span = (columns[-1] - columns[0] if columns else 0.0) or 1e9
    step = max(-(-len(columns) // 7), 1)
    columns_shown = range(0, len(columns), step)
    axes.set_xlim(-0.5, max(len(columns), 1) - 0.5)
    axes.set_xticks(columns_shown, [moment(columns[place], span) for place in columns_shown])
    axes.xaxis.tick_top()


def _draw_cells(
    axes: Any, place: int, row: GridRow, columns: Sequence[float], *, is_dense: bool
) -> None:
    """Draw a row's cells; an empty row is grey. A value above zero is never as pale as zero."""
    from matplotlib.colors import to_rgba

    found = [number for number, time in enumerate(columns) if time in row.cells]
    shades = [row.cells[columns[number]][0] for number in found]
    shades = [0.0 if share <= 0 else 0.2 + 0.8 * min(share, 1.0) for share in shades]
    if not found:
        return
    width = 0.96 if len(columns) <= 60 else 1.0
    colours = [to_rgba(row.colour, shade) if shade else to_rgba(_GREY) for shade in shades]
    spans = [(number - width / 2, width) for number in found]
    axes.broken_barh(spans, (place - 0.45, 0.9), facecolors=colours, lw=0, rasterized=is_dense)
    # Some 70 characters fit next to each other; each column gets an equal share.
    room = 70 / len(columns)
    for number, shade in zip(found, shades, strict=True):
        time = columns[number]
        if row.since == time:
            axes.vlines(number - width / 2, place - 0.45, place + 0.45, color=_DARK, lw=3)
        if (text := row.cells[time][1]) and len(text) <= room:
            colour = "white" if shade > 0.55 else "#2d3748"
            axes.text(number, place, shown(text), ha="center", va="center", color=colour)


def _draw_strip(axes: Any, place: int, row: Strip, *, is_dense: bool) -> None:
    """Draw one strip, its marks above it and its texts below."""
    whole = row.last - row.first + 1
    boxes: dict[tuple[float, float, str], list[tuple[float, float]]] = {}
    for first, last, shares in row.pieces:
        span = ((first - row.first) / whole, (last - first + 1) / whole)
        for low, tall, colour in _stacked(shares):
            boxes.setdefault((place - 0.32 + low, tall, colour), []).append(span)
    for (low, tall, colour), spans in boxes.items():
        axes.broken_barh(spans, (low, tall), facecolors=colour, lw=0, rasterized=is_dense)
    marks: list[tuple[float, float]] = []
    for first, last in row.marks:
        wide = max((last - first + 1) / whole, 0.006)
        start = min((first - row.first) / whole, 1 - wide)
        if not marks or start > sum(marks[-1]):  # skip marks that the mark before covers
            marks.append((start, wide))
    if marks:
        axes.broken_barh(marks, (place - 0.42, 0.07), facecolors=row.colour, lw=0)
    below = place + (0.3 if row.pieces else 0.0)
    axes.text(0, below, _label(row.words, 95), ha="left", va="center", color=row.colour)


def _stacked(shares: Sequence[tuple[str, int]]) -> Iterator[tuple[float, float, str]]:
    """(from, height, colour) of the parts of one piece of a strip, which is 0.44 high.

    A part above zero is at least a tenth high.
    """
    there = [(colour, count) for colour, count in shares if count > 0]
    whole = sum(count for _, count in there)
    low = 0.0
    for colour, count in there:
        tall = 0.044 + (0.44 - 0.044 * len(there)) * count / whole
        yield low, tall, colour
        low += tall


def _hide_frame(*axes: Any) -> None:
    """Remove frame and ticks, which the names and boxes do not need."""
    for each in axes:
        each.tick_params(length=0)
        for spine in each.spines.values():
            spine.set_visible(False)
    axes[0].tick_params(labelbottom=False)


# -- texts -------------------------------------------------------------------------------------


def shown(text: str) -> str:
    """A text that a picture can contain: characters that XML cannot contain are shown by their
    numbers.
    """
    return _UNFIT.sub(_symbol, text)


def _symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else "\ufffd"


def _label(text: str, most: int) -> str:
    """A text as one short line. matplotlib leaves labels that begin with `_` out of a legend."""
    text = shown(text)
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return f"\u200b{text}" if text.startswith("_") else text


def amount(value: float) -> str:
    """A count in few characters."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def moment(t: float, span_ms: float) -> str:
    """A time (ms, UTC), with the precision that the shown span requires."""
    try:
        when = datetime.fromtimestamp(t / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{t:.0f} ms"  # of a year outside the calendar
    if span_ms > 3 * 86_400_000:
        return when.strftime("%Y-%m-%d")
    return when.strftime("%m-%d %H:%M" if span_ms > 3_600_000 else "%H:%M:%S")
