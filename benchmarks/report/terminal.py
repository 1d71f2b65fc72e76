"""The runner's standard output: plain lines, readable in a log. Called by `__main__`."""

from __future__ import annotations

import sys

from benchmarks.report.figures import Figure, Report, Series, spelled


def say(text: str = "") -> None:
    """Print one line without delay."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def spread(series: Series) -> str:
    """`median (min–max)`."""
    low, high = spelled(series.low, series.unit), spelled(series.high, series.unit)
    return f"{spelled(series.median, series.unit)} ({low} – {high})"


def bar_text(figure: Figure) -> str:
    """The bar in words; empty without a bar."""
    if figure.bar is None:
        return ""
    what = "" if figure.bar.of == "median" else "highest "
    return f"{what}{figure.bar.sense} {spelled(figure.bar.limit, figure.judged.unit)}"


def show(figure: Figure) -> None:
    """A figure with its sides and its verdict."""
    verdict = figure.verdict
    bar = bar_text(figure)
    say(f"  {verdict:<8} {bar:<20} {figure.name}")
    say(f"           {figure.judged.label}: {spread(figure.judged)}")
    for series in figure.beside:
        say(f"             {series.label}: {spread(series)}")
    for note in figure.notes:
        say(f"             {note}")


def summary(report: Report) -> None:
    """The last lines: every bar once, noise, errors."""
    barred = [figure for figure in report.figures if figure.bar is not None]
    passed = sum(figure.verdict == "PASS" for figure in barred)
    say()
    say(f"machine noise: calibration loop varied by {report.noise_share:.0%} over the rounds")
    for figure in barred:
        value = spelled(figure.bar.value(figure.judged), figure.judged.unit) if figure.bar else ""
        say(f"{figure.verdict:<8} {value:>12}  {bar_text(figure):<20} {figure.case}: {figure.name}")
    for case, why in report.skipped.items():
        say(f"skipped  {case}: {why}")
    for case, why in report.errors.items():
        say(f"ERROR    {case}: {why}")
    say(f"{passed} of {len(barred)} bars reached, {len(report.errors)} errors")
