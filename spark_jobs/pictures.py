"""Charts as SVG text: lines over time, bars, grids of time, strips. Pure; no library of its own.

A picture is for a look, with the numbers beside it in Parquet: no more than eight series, forty
rows of a grid and thirty strips; of the rest it is told how many there are.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

# What an XML document cannot hold, whatever it is escaped as.
_UNFIT: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
COLOURS: Final = (
    *("#2b6cb0", "#c05621", "#2f855a", "#6b46c1"),
    *("#b83280", "#975a16", "#285e61", "#4a5568"),
)
SERIES_MAX: Final = len(COLOURS)
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 90, 210, 56, 48

GRID_ROWS_MAX: Final = 40
GRID_COLUMNS_MAX: Final = 120
STRIPS_MAX: Final = 30
_SIDE = 260  # where names stand, left of bars, grids and strips
_GREY: Final = "#edf2f7"

Points = Sequence[tuple[float, float]]  # (ms since the epoch, value), ascending


@dataclass(frozen=True, slots=True)
class GridRow:
    """A row of a grid: by time, how dark its cell is (0 to 1) and what stands in it, room given.

    A row without cells is a heading. `since` marks the time a row began behind the others.
    """

    name: str
    cells: Mapping[float, tuple[float, str]]
    note: str
    colour: str = COLOURS[0]
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Strip:
    """A bar of a range `first` to `last` (inclusive), in pieces: what share of each is of a colour.

    `pieces`: (first, last, ((colour, how many), ...)); `marks`: (first, last) seen at any size.
    """

    name: str
    first: int
    last: int
    pieces: Sequence[tuple[int, int, Sequence[tuple[str, int]]]]
    marks: Sequence[tuple[int, int]]
    words: str
    colour: str


def lines(title: str, unit: str, series: Mapping[str, Points], height: int = 420) -> str:
    """Values over time, a line each; single points as dots."""
    shown = dict(sorted(series.items(), key=lambda each: -sum(v for _, v in each[1]))[:SERIES_MAX])
    times = [t for points in shown.values() for t, _ in points] or [0.0]
    low, high = min(times), max(times)
    top = _nice(max([v for points in shown.values() for _, v in points] or [1.0]))
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    span = (high - low) or 1.0

    def place(t: float, v: float) -> tuple[float, float]:
        return _LEFT + (t - low) / span * plot_width, _TOP + plot_height * (1 - v / top)

    parts = [_head(title, unit, height)]
    for step in range(5):
        value = top * step / 4
        y = place(low, value)[1]
        parts.append(_line(_LEFT, y, _LEFT + plot_width, y, "#e2e8f0"))
        parts.append(_text(_LEFT - 8, y + 4, amount(value), "end"))
    for step in range(5):
        t = low + span * step / 4
        x = place(t, 0)[0]
        parts.append(_text(x, height - _BOTTOM + 20, moment(t, span), "middle"))
    for number, (name, points) in enumerate(shown.items()):
        colour = COLOURS[number]
        path = " ".join("{:.1f},{:.1f}".format(*place(t, v)) for t, v in points)
        if len(points) > 1:
            parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>'
            )
        for t, v in points if len(points) <= 60 else ():
            x, y = place(t, v)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>')
        parts += _legend(number, name, colour)
    if len(series) > SERIES_MAX:
        parts += _legend(SERIES_MAX, f"and {len(series) - SERIES_MAX} more", "#a0aec0")
    return "\n".join([*parts, "</svg>\n"])


def bars(title: str, unit: str, values: Sequence[tuple[str, float]], note: str = "") -> str:
    """Values by name, the first at the top."""
    height = _TOP + 24 * max(len(values), 1) + 30
    longest = max([value for _, value in values] or [1.0]) or 1.0
    left = _SIDE
    width = _WIDTH - left - 110
    parts = [_head(title, unit, height)]
    for number, (name, value) in enumerate(values):
        y = _TOP + 24 * number
        parts.append(_text(left - 8, y + 13, _short(name, 34), "end"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{max(value / longest * width, 1):.1f}" height="17" '
            f'rx="2" fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(left + value / longest * width + 8, y + 13, amount(value), "start"))
    if note:
        parts.append(_text(left, height - 10, note, "start"))
    return "\n".join([*parts, "</svg>\n"])


def grid(title: str, unit: str, times: Sequence[float], rows: Sequence[GridRow], note: str) -> str:
    """Rows over the same times, ascending, a column each: the darker a cell, the more of it."""
    columns, shown = times[-GRID_COLUMNS_MAX:], rows[:GRID_ROWS_MAX]
    notes = [note] if note else []
    if len(rows) > len(shown):
        notes.append(f"and {_rest(rows[len(shown) :])} more")
    if len(times) > len(columns):
        notes.append(f"the last {len(columns)} of {len(times)} times are shown")
    top, tall = _TOP + 20, 22
    height = top + tall * max(len(shown), 1) + 14 + 18 * len(notes)
    width = (_WIDTH - _SIDE - _RIGHT) / max(len(columns), 1)
    parts = [_head(title, unit, height)]
    labelled = -1e9
    span = (columns[-1] - columns[0] if columns else 0.0) or 1e9  # a day's name for one alone
    for number, time in enumerate(columns):
        middle = _SIDE + width * (number + 0.5)
        if middle - labelled >= 90:
            parts.append(_text(middle, top - 8, moment(time, span), "middle"))
            labelled = middle
    for line, row in enumerate(shown):
        y = top + tall * line
        if not row.cells:
            parts.append(_text(20, y + 15, _short(row.name, 70), "start", "600"))
            parts.append(_text(_WIDTH - _RIGHT + 12, y + 15, _short(row.note, 29), "start"))
            continue
        parts.append(_text(_SIDE - 8, y + 15, _short(row.name, 34), "end"))
        parts.append(_text(_WIDTH - _RIGHT + 12, y + 15, _short(row.note, 29), "start"))
        for number, time in enumerate(columns):
            if time in row.cells:
                x = _SIDE + width * number
                parts += _cell(x, y, width, row, *row.cells[time], is_new=row.since == time)
    for line, text in enumerate(notes):
        parts.append(_text(_SIDE, height - 10 - 18 * (len(notes) - 1 - line), text, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _cell(
    x: float, y: float, width: float, row: GridRow, share: float, text: str, *, is_new: bool
) -> list[str]:
    """A cell; an empty one is grey. What is there at all is never as pale as nothing."""
    inner = max(width - (1 if width > 4 else 0), 0.5)
    parts = [_box(x, y + 1, inner, 20, _GREY)]
    shade = 0.0 if share <= 0 else 0.2 + 0.8 * min(share, 1.0)
    if shade:
        parts.append(_box(x, y + 1, inner, 20, row.colour, f' fill-opacity="{shade:.2f}"'))
    if is_new:
        parts.append(_box(x, y + 1, min(3, inner), 20, "#1a202c"))
    if text and width >= 6.8 * len(text) + 8:
        colour = "white" if shade > 0.55 else "#2d3748"
        parts.append(_text(x + inner / 2, y + 15, text, "middle", colour=colour))
    return parts


def _rest(rows: Sequence[GridRow]) -> str:
    lines = sum(bool(row.cells) for row in rows)
    return f"{lines:,} row{'' if lines == 1 else 's'}"


def strips(
    title: str, unit: str, kinds: Sequence[tuple[str, str]], rows: Sequence[Strip], note: str
) -> str:
    """A range each, from end to end of the picture, with its verdict. `kinds`: (name, colour)."""
    shown = rows[:STRIPS_MAX]
    notes = [note] if note else []
    if len(rows) > len(shown):
        notes.append(f"and {len(rows) - len(shown):,} more")
    top, tall = _TOP + 24, 56
    height = top + tall * max(len(shown), 1) + 10 + 18 * len(notes)
    width = _WIDTH - _SIDE - 30
    parts = [_head(title, unit, height)]
    for number, (name, colour) in enumerate(kinds):
        parts.append(_box(_SIDE + 110 * number, _TOP - 2, 12, 12, colour, ' rx="2"'))
        parts.append(_text(_SIDE + 110 * number + 18, _TOP + 8, name, "start"))
    for line, row in enumerate(shown):
        y = top + tall * line
        parts.append(_text(_SIDE - 8, y + 15, _short(row.name, 34), "end"))
        scale = width / (row.last - row.first + 1)
        for first, last, shares in row.pieces:
            x, wide = _SIDE + (first - row.first) * scale, (last - first + 1) * scale
            parts += _stacked(x, y, wide, shares)
        end = 0.0
        for first, last in row.marks:
            wide = max((last - first + 1) * scale, 4)
            x = min(_SIDE + (first - row.first) * scale, _SIDE + width - wide)
            if x + wide > end + 1:  # others are within the mark before
                parts.append(_box(x, y - 5, wide, 4, row.colour))
                end = x + wide
        is_drawn = bool(row.pieces)
        if is_drawn:
            ends = f"{row.first:,} .. {row.last:,}"
            parts.append(_text(_SIDE - 8, y + 34, ends, "end", colour="#718096"))
        below = y + (38 if is_drawn else 15)
        parts.append(_text(_SIDE, below, _short(row.words, 95), "start", colour=row.colour))
    for line, text in enumerate(notes):
        parts.append(_text(_SIDE, height - 10 - 18 * (len(notes) - 1 - line), text, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _stacked(x: float, y: float, wide: float, shares: Sequence[tuple[str, int]]) -> list[str]:
    """One piece of a strip, from the top; what is there at all is two pixels high at least."""
    there = [(colour, count) for colour, count in shares if count > 0]
    whole = sum(count for _, count in there)
    free = 22 - 2 * len(there)
    parts = []
    for colour, count in there:
        tall = 2 + free * count / whole
        parts.append(_box(x, y, wide + 0.7, tall, colour))  # no seam to the next piece
        y += tall
    return parts


def escape(text: str) -> str:
    """A text as it stands in XML: what XML cannot hold, such as control characters, is shown."""
    return html.escape(_UNFIT.sub(_shown, text))


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"


def _head(title: str, unit: str, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n'
        f'<text x="20" y="26" font-size="17" font-weight="600">{escape(title)}</text>\n'
        f'<text x="20" y="44" fill="#718096">{escape(unit)}</text>'
    )


def _legend(number: int, name: str, colour: str) -> list[str]:
    x, y = _WIDTH - _RIGHT + 20, _TOP + 20 * number
    mark = f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{colour}"/>'
    return [mark, _text(x + 18, y + 10, _short(name, 26), "start")]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(
    x: float, y: float, text: str, anchor: str, weight: str = "", colour: str = "#2d3748"
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{bold}>'
        f"{escape(text)}</text>"
    )


def _box(x: float, y: float, width: float, height: float, colour: str, more: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
        f'fill="{colour}"{more}/>'
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _nice(value: float) -> float:
    """A round number at or above `value`, for the top of an axis."""
    if value <= 0:
        return 1.0
    step = 1.0
    while step < value:
        step *= 10
    while step > value:
        step /= 10
    return next(step * factor for factor in (1, 2, 4, 5, 8, 10, 20) if step * factor >= value)


def amount(value: float) -> str:
    """A count in few letters."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def moment(t: float, span_ms: float) -> str:
    """A time (ms, UTC) as precisely as the span it is shown in asks for."""
    try:
        when = datetime.fromtimestamp(t / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{t:.0f} ms"  # of a year that no calendar has
    if span_ms > 3 * 86_400_000:
        return when.strftime("%Y-%m-%d")
    return when.strftime("%m-%d %H:%M" if span_ms > 3_600_000 else "%H:%M:%S")
