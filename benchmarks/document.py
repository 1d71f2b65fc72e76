"""Writes the figures of a report into docs/PERFORMANCE.md, between its two markers.

The text around the markers is written by hand; what is between them is never edited by hand.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import Figure, Report, spelled
from benchmarks.terminal import bar_text, spread

BEGIN = "<!-- figures: begin (written by `python -m benchmarks --write-docs`) -->"
END = "<!-- figures: end -->"
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


def write_document(report: Report, path: Path = DOCUMENT) -> None:
    """Replace what stands between the markers; raises ValueError if they are not there once."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{path.name} must contain each marker once")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{tables(report)}{END}{after}", encoding="utf-8")
