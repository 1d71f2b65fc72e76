"""Writes the figures of a report into docs/PERFORMANCE.md, between two markers a group of cases.

The text around the markers is written by hand; what is between them is never edited by hand. A
report replaces the blocks it has something for and leaves the others, so that the figures of one
run of each group stand side by side, each with its own date and machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from benchmarks.cases.registry import (
    LEASE_CASES,
    LIVE_CASES,
    OPERATE_CASES,
    QUEUE_CASES,
    ROUTER_CASES,
    STORE_CASES,
    STREAM_CASES,
)
from benchmarks.figures import Figure, Report, spelled
from benchmarks.terminal import bar_text, spread

BLOCKS: dict[str, Collection[str]] = {
    "figures": STORE_CASES,
    "figures, live": LIVE_CASES,
    "figures, queues": QUEUE_CASES,
    "figures, leases": LEASE_CASES,
    "figures, routers": ROUTER_CASES,
    "figures, operate": OPERATE_CASES,
    "figures, streams": STREAM_CASES,
}
CHART = "performance.svg"  # shown when it lies beside the document
DOCUMENT = Path(__file__).parents[1] / "docs" / "PERFORMANCE.md"


def tables(report: Report) -> str:
    """The figures as Markdown: bars first, then what is stated, then how the run went."""
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
    if (DOCUMENT.parent / CHART).exists():
        lines += [f"![each figure beside its bar]({CHART})", ""]
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
    """What a report says of some cases; None if it says nothing."""
    figures = [figure for figure in report.figures if figure.case in cases]
    errors = {case: why for case, why in report.errors.items() if case in cases}
    skipped = {case: why for case, why in report.skipped.items() if case in cases}
    if not (figures or errors or skipped):
        return None
    return dataclasses.replace(report, figures=figures, errors=errors, skipped=skipped)


def write_document(report: Report, path: Path = DOCUMENT) -> None:
    """Replace what stands between the markers; raises ValueError if they are not there once."""
    text = path.read_text(encoding="utf-8")
    for block, cases in BLOCKS.items():
        about = part(report, cases)
        if about is not None:
            text = replaced(text, block, tables(about))
    path.write_text(text, encoding="utf-8")


def replaced(text: str, block: str, content: str) -> str:
    """The document with another content of one block."""
    begin = f"<!-- {block}: begin (written by `python -m benchmarks --write-docs`) -->"
    end = f"<!-- {block}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{DOCUMENT.name} must contain each marker of `{block}` once")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{content}{end}{after}"
