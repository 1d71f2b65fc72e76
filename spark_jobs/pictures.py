"""Charts as SVG text: lines over time and horizontal bars. Pure; no library of its own.

A picture is for a look, with the numbers beside it in Parquet: no more than eight series, the rest
is told as `others`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

COLOURS: Final = (
    *("#2b6cb0", "#c05621", "#2f855a", "#6b46c1"),
    *("#b83280", "#975a16", "#285e61", "#4a5568"),
)
SERIES_MAX: Final = len(COLOURS)
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 90, 210, 56, 48

Points = Sequence[tuple[float, float]]  # (ms since the epoch, value), ascending


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
        parts.append(_text(_LEFT - 8, y + 4, _number(value), "end"))
    for step in range(5):
        t = low + span * step / 4
        x = place(t, 0)[0]
        parts.append(_text(x, height - _BOTTOM + 20, _time(t, span), "middle"))
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
    left = 260
    width = _WIDTH - left - 110
    parts = [_head(title, unit, height)]
    for number, (name, value) in enumerate(values):
        y = _TOP + 24 * number
        parts.append(_text(left - 8, y + 13, _short(name, 34), "end"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{max(value / longest * width, 1):.1f}" height="17" '
            f'rx="2" fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(left + value / longest * width + 8, y + 13, _number(value), "start"))
    if note:
        parts.append(_text(left, height - 10, note, "start"))
    return "\n".join([*parts, "</svg>\n"])


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


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#2d3748">{escape(text)}</text>'
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


def _number(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def _time(t: float, span_ms: float) -> str:
    when = datetime.fromtimestamp(t / 1000, UTC)
    if span_ms > 3 * 86_400_000:
        return when.strftime("%Y-%m-%d")
    return when.strftime("%m-%d %H:%M" if span_ms > 3_600_000 else "%H:%M:%S")
