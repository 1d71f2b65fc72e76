"""Writes a stored report into the documentation: pages of figures, and the overview.

`docs/performance/GROUP.md` has the figures of one group of cases, and no text written by hand: a
report replaces the pages that it has figures for and leaves the others. The page of the case
`scaling` also has a chart, `docs/images/scaling.svg`. The overview is the chart
`docs/images/speed.svg` and the table between the markers of docs/PERFORMANCE.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from benchmarks.cases.registry import (
    FIND_CASES,
    LAYER_CASES,
    LEASE_CASES,
    LIVE_CASES,
    OPERATE_CASES,
    QUEUE_CASES,
    ROUTER_CASES,
    SCALING_CASES,
    STORE_CASES,
    STREAM_CASES,
)
from benchmarks.report import overview, scaling, scaling_chart
from benchmarks.report.figures import Figure, Report, spelled
from benchmarks.report.terminal import bar_text, spread

SCALING = "scaling"  # the page with a chart of its own
PAGES: dict[str, tuple[str, Collection[str]]] = {
    "store": ("Appends, reads, recovery, memory", STORE_CASES),
    "layers": ("The layers of an append", LAYER_CASES),
    "finding": ("Finding and deciding", FIND_CASES),
    "watching": ("Watching", LIVE_CASES),
    "queues": ("Queues", QUEUE_CASES),
    "leases": ("Many jobs and leases", LEASE_CASES),
    "routers": ("Routers", ROUTER_CASES),
    "operate": ("Keys, limits, pressure", OPERATE_CASES),
    "streams": ("Durable Streams", STREAM_CASES),
    SCALING: ("Scaling", SCALING_CASES),
}
DOCS = Path(__file__).parents[2] / "docs"
BEGIN = "<!-- overview: begin (written by `python -m benchmarks --write-overview`) -->"
END = "<!-- overview: end -->"


def tables(report: Report) -> str:
    """The figures as Markdown: judged figures first, then the others, then the conditions of the
    run.
    """
    machine, options = report.machine, report.options
    lines = [
        f"{machine['date']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}, {machine['file_system']}, "
        f"Python {machine['python']}; load average {machine['load_average_at_start']} at the "
        f"start. {options['rounds']} rounds of {options['seconds']} s. The calibration loop varied "
        f"by {report.noise_share:.0%} over the rounds.",
        "",
    ]
    if options["quick"]:
        lines += ["**A quick run on small data: it shows that everything runs, no more.**", ""]
    for title, barred in (("Against a bar", True), ("Stated", False)):
        rows = [figure for figure in report.figures if (figure.bar is not None) is barred]
        if rows:
            lines += [f"**{title}**", ""]
            lines += ["| | what | measured: median (min – max of the rounds) | bar | sides |"]
            lines += ["|---|---|---|---|---|"]
            lines += [_row(figure) for figure in rows]
            lines.append("")
    lines += [f"- {case}: not run, {why}" for case, why in report.skipped.items()]
    lines += [f"- {case}: **failed**, {why}" for case, why in report.errors.items()]
    return "\n".join(lines).strip() + "\n"


def _row(figure: Figure) -> str:
    beside = [f"{series.label} {spelled(series.median, series.unit)}" for series in figure.beside]
    sides = "; ".join([*beside, *figure.notes])
    cells = (
        figure.verdict,
        figure.name,
        f"{figure.judged.label}: {spread(figure.judged)}",
        bar_text(figure),
        sides,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def part(report: Report, cases: Collection[str]) -> Report | None:
    """The part of a report for some cases; None if it has none of them."""
    figures = [figure for figure in report.figures if figure.case in cases]
    errors = {case: why for case, why in report.errors.items() if case in cases}
    skipped = {case: why for case, why in report.skipped.items() if case in cases}
    if not (figures or errors or skipped):
        return None
    return dataclasses.replace(report, figures=figures, errors=errors, skipped=skipped)


def write_pages(report: Report, docs: Path = DOCS) -> None:
    """Replace the pages of the groups for which the report has figures."""
    for name, (title, cases) in PAGES.items():
        about = part(report, cases)
        if about is not None:
            text = scaling_page(about) if name == SCALING else page(title, tables(about))
            (docs / "performance" / f"{name}.md").write_text(text, encoding="utf-8")
            if name == SCALING:
                drawn = scaling_chart.picture(about)
                (docs / "images" / "scaling.svg").write_text(drawn, encoding="utf-8")


def page(title: str, content: str) -> str:
    """A page of figures."""
    return f"# Figures: {title}\n\n{content}"


def scaling_page(report: Report) -> str:
    """The page of the case `scaling`: its chart, a table for each axis, and its figures."""
    title, _ = PAGES[SCALING]
    return page(title, f"{scaling.sections(report)}\n## Rounds\n\n{tables(report)}")


def write_overview(report: Report, docs: Path = DOCS) -> None:
    """Write the chart, and the table of docs/PERFORMANCE.md; the report must have every row."""
    page = docs / "PERFORMANCE.md"
    text = replaced(page.read_text(encoding="utf-8"), overview.table(report))
    (docs / "images" / "speed.svg").write_text(overview.picture(report), encoding="utf-8")
    page.write_text(text, encoding="utf-8")


def replaced(text: str, content: str) -> str:
    """The page with another table.

    Raises `ValueError` unless the page contains both markers once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page must contain {BEGIN!r} and {END!r} once")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{content}{END}{rest.partition(END)[2]}"
