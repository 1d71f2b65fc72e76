"""The report as one SVG: each figure's value against its bar, with the spread of its rounds. Pure.

This module draws its few rectangles itself: the picture has only one kind of row, and benchmarks
should not add a plotting library to the lock file.
"""

from __future__ import annotations

from html import escape

from benchmarks.report.figures import Figure, Report, spelled

WIDTH = 1090
LABEL_WIDTH = 460
TRACK_WIDTH = 380
LIMIT_AT = 0.5  # position of the bar on the track; twice the limit is the end of the track
ROW = 30
TOP = 76
GOOD, BAD, LINE, TEXT, PALE = "#2f7d4f", "#b5482f", "#1f2937", "#374151", "#e5e7eb"


def chart(report: Report) -> str:
    """The SVG text. Figures without a bar are only in the document."""
    barred = [figure for figure in report.figures if figure.bar is not None]
    at_least = [f for f in barred if f.bar is not None and f.bar.sense == ">="]
    at_most = [f for f in barred if f.bar is not None and f.bar.sense == "<="]
    rows: list[str] = []
    y = TOP
    for title, group in (
        ("must reach the line", at_least),
        ("must not pass the line", at_most),
    ):
        if not group:
            continue
        rows.append(_text(16, y + 4, title, weight="bold"))
        y += 22
        for figure in group:
            rows.append(_row(figure, y))
            y += ROW
        y += 14
    height = y + 10
    machine = report.machine
    about = (
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, "
        f"{machine['file_system']}, {machine['date']}; machine noise {report.noise_share:.0%}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13">'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    )
    title = _text(16, 28, "Measured against its bar (vertical line)", size=17, weight="bold")
    return "\n".join([head, title, _text(16, 50, about), *rows, "</svg>", ""])


def _row(figure: Figure, y: int) -> str:
    bar = figure.bar
    assert bar is not None
    judged = figure.judged
    left = LABEL_WIDTH + 20

    def place(value: float) -> float:
        share = value / bar.limit * LIMIT_AT if bar.limit else 0.0
        return left + TRACK_WIDTH * min(1.0, max(0.0, share))

    value = bar.value(judged)
    colour = GOOD if bar.holds(judged) else BAD
    end, low, high = place(value), place(judged.low), place(judged.high)
    at_limit = place(bar.limit)
    shown = f"{spelled(value, judged.unit)}  ({bar.sense} {spelled(bar.limit, judged.unit)})"
    name = figure.name if len(figure.name) < 66 else figure.name[:64] + "…"
    return "".join(
        [
            _text(16, y + 4, name),
            f'<rect x="{left}" y="{y - 7}" width="{TRACK_WIDTH}" height="14" fill="{PALE}"/>',
            f'<rect x="{left}" y="{y - 7}" width="{end - left:.1f}" height="14" fill="{colour}"/>',
            f'<path d="M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 4}V{y + 4}M{high:.1f} {y - 4}'
            f'V{y + 4}" stroke="{LINE}" stroke-width="1.2" fill="none"/>',
            f'<path d="M{at_limit:.1f} {y - 11}V{y + 11}" stroke="{LINE}" stroke-width="2"/>',
            _text(left + TRACK_WIDTH + 10, y + 4, shown),
        ]
    )


def _text(x: int, y: int, text: str, *, size: int = 13, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{TEXT}">'
        f"{escape(text)}</text>"
    )
