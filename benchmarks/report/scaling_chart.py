"""The curves of the case `scaling` as one SVG: a small panel for each axis. Pure.

Both scales are logarithmic. A flat line is a cost that does not depend on the size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from benchmarks.report.figures import Report
from benchmarks.report.scaling import AXES, REQUEST, Axis, cpu_values, measured

WIDTH: Final = 860
COLUMNS: Final = 2
PANEL_WIDTH, PANEL_HEIGHT = 414, 218  # with its title and the labels of its axes
LEFT, TOP, RIGHT, BOTTOM = 58, 40, 32, 40  # margins of the plot inside its panel
HEAD: Final = 66
COLOURS: Final = ("#2f7d4f", "#b5482f", "#3b6ea5", "#7c5aa6")
TEXT: Final = "#1f2937"
PALE: Final = "#6b7280"
GRID: Final = "#e5e7eb"


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a panel: size → us."""

    name: str
    costs: Mapping[int, float]


def lines_of(report: Report, axis: Axis) -> list[Line]:
    """The curves of an axis that the report has. Payloads are drawn by the request, too."""
    found: list[Line] = []
    for curve in axis.curves:
        figure = measured(report, axis, curve)
        if figure is None:
            continue
        units = (REQUEST, curve.unit) if axis.is_bytes else (curve.unit,)
        for unit in units:
            name = f"{curve.name}, a {unit}" if axis.is_bytes else curve.name
            found.append(Line(name, cpu_values(figure, axis, unit)))
    return found


def decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around the values: at least two decades, so that noise looks small."""
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    while high - low < 2:
        if math.log10(min(values)) - low < high - math.log10(max(values)):
            low -= 1
        else:
            high += 1
    return low, high


def picture(report: Report) -> str:
    """The SVG text; an axis without a curve has no panel."""
    drawn = [(axis, lines) for axis in AXES if (lines := lines_of(report, axis))]
    rows = -(-len(drawn) // COLUMNS)
    height = HEAD + rows * PANEL_HEIGHT + 10
    parts = [
        text(16, 28, "CPU time of the server for one unit, over size", size=17, weight="bold"),
        text(16, 48, _about(report), size=11, colour=PALE),
    ]
    for number, (axis, lines) in enumerate(drawn):
        x = 16 + number % COLUMNS * PANEL_WIDTH
        y = HEAD + number // COLUMNS * PANEL_HEIGHT
        parts += panel(axis, lines, x, y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13">'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _about(report: Report) -> str:
    machine, options = report.machine, report.options
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}, {machine['date']}; lower quartile of {options['rounds']} "
        "rounds; both scales logarithmic"
    )


def panel(axis: Axis, lines: Sequence[Line], x: int, y: int) -> list[str]:
    """The parts of one panel, whose upper left corner is at (x, y)."""
    sizes = sorted({size for line in lines for size in line.costs})
    low, high = decades([cost for line in lines for cost in line.costs.values()])
    left, right = x + LEFT, x + PANEL_WIDTH - RIGHT
    top, bottom = y + TOP, y + PANEL_HEIGHT - BOTTOM
    span = math.log10(sizes[-1] / sizes[0]) or 1.0

    def across(size: int) -> float:
        return left + (right - left) * math.log10(size / sizes[0]) / span

    def up(cost: float) -> float:
        return bottom - (bottom - top) * (math.log10(cost) - low) / (high - low)

    unit = "unit" if axis.is_bytes else axis.curves[0].unit
    parts = [text(x, y + 12, f"{axis.name[0].upper()}{axis.name[1:]}", weight="bold")]
    parts.append(text(right, y + 12, f"us a {unit}", size=11, colour=PALE, anchor="end"))
    for power in range(low, high + 1):
        at = up(10.0**power)
        parts.append(
            f'<path d="M{left} {at:.1f}H{right}" stroke="{GRID}" stroke-width="1" fill="none"/>'
        )
        parts.append(text(left - 6, at + 4, cost_text(power), size=11, colour=PALE, anchor="end"))
    for size in sizes:
        shown = axis.spelled(size)
        parts.append(text(across(size), bottom + 16, shown, size=10, colour=PALE, anchor="middle"))
    legend = float(left)
    for line, colour in zip(lines, COLOURS, strict=False):
        points = [(across(size), up(cost)) for size, cost in sorted(line.costs.items())]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points
        ]
        if len(lines) > 1:
            parts.append(f'<circle cx="{legend + 4:.1f}" cy="{y + 26}" r="4" fill="{colour}"/>')
            parts.append(text(legend + 12, y + 30, line.name, size=10))
            legend += 22 + 5.4 * len(line.name)
    return parts


def cost_text(power: int) -> str:
    """A power of ten of microseconds."""
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: int = 13,
    weight: str = "normal",
    colour: str = TEXT,
    anchor: str = "start",
) -> str:
    """One line of text."""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}" text-anchor="{anchor}">{escape(content)}</text>'
    )
