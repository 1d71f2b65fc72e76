"""`python -m benchmarks`: run the named cases; print, store and draw their results.

Exit code 0 if every case was measured, even if a bar is missed, which is a result. 1 if a case
could not be measured, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.bench import Bench, Options
from benchmarks.cases.registry import CASES
from benchmarks.clients.loader import BenchmarkError
from benchmarks.report import overview
from benchmarks.report.chart import chart
from benchmarks.report.document import write_overview, write_pages
from benchmarks.report.figures import Report, report_from_json
from benchmarks.report.machine import describe, file_system_of
from benchmarks.report.terminal import say, show, summary
from benchmarks.servers.peers import NotInstalled
from benchmarks.servers.process import end_by_sigterm
from benchmarks.servers.server import DEFAULT_COMMAND

ROUNDS, SECONDS = 7, 2.5
ROUNDS_QUICK, SECONDS_QUICK = 2, 0.3
RECORDS, RECORDS_QUICK = 5_000_000, 50_000


def arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the server beside its floor."
    )
    parser.add_argument(
        "--only", default=",".join(CASES), metavar="A,B", help=f"cases: {', '.join(CASES)}"
    )
    parser.add_argument("--rounds", type=int, help=f"interleaved rounds (default {ROUNDS})")
    parser.add_argument(
        "--seconds", type=float, help=f"seconds of a side and round (default {SECONDS})"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small and short, only to see that it runs"
    )
    parser.add_argument(
        "--records",
        type=int,
        help=f"records of memory, find and views-rebuild (default {RECORDS:,})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the report")
    parser.add_argument(
        "--write-docs",
        type=Path,
        metavar="FILE.json",
        help="write a kept report into the pages of docs/performance/",
    )
    parser.add_argument(
        "--write-overview",
        type=Path,
        metavar="FILE.json",
        help=f"write the chart and the table of docs/PERFORMANCE.md; needs --only {overview.CASES}",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="scratch folder on the measured disk",
    )
    parser.add_argument("--server", help="command that starts the server (default: this tree's)")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="ROOT",
        help="the checkout of another build, with its .venv, for the case `builds`",
    )
    given = parser.parse_args(words)
    unknown = set(given.only.split(",")) - set(CASES)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    if (given.rounds or 1) < 1 or (given.seconds or 1) <= 0:
        parser.error("--rounds and --seconds must be positive")
    if given.records is not None and (given.records <= 0 or given.records % 1000):
        parser.error("--records must be a multiple of 1,000")
    if not given.dir.is_dir():
        parser.error(f"no such folder: {given.dir}")
    if given.base is not None and not (given.base / ".venv/bin/python").exists():
        parser.error(f"{given.base} has no .venv; make it with `./run lint` there")
    return given


def options_of(given: argparse.Namespace) -> Options:
    """The options, with the defaults of a full or a quick run."""
    quick = bool(given.quick)
    return Options(
        rounds=given.rounds or (ROUNDS_QUICK if quick else ROUNDS),
        seconds=given.seconds or (SECONDS_QUICK if quick else SECONDS),
        quick=quick,
        folder=given.dir,
        command=tuple(shlex.split(given.server)) if given.server else DEFAULT_COMMAND,
        records=given.records or (RECORDS_QUICK if quick else RECORDS),
        base=base_command(given.base),
    )


def base_command(root: Path | None) -> tuple[str, ...] | None:
    """The command that starts the server of another checkout."""
    if root is None:
        return None
    return (str(root.absolute() / ".venv/bin/python"), "-m", "topics_server", "serve")


def run(names: list[str], options: Options, keep: Path | None) -> Report:
    """Run the cases; a failure ends only its own case. The report is stored after every case."""
    report = Report(
        machine=describe(options.folder),
        options={
            "rounds": options.rounds,
            "seconds": options.seconds,
            "quick": options.quick,
            "records": options.records,
            "only": names,
        },
    )
    for name in (name for name in CASES if name in names):
        say(f"{name}:")
        try:
            with Bench(options, report.noise_ms) as bench:
                figures = CASES[name](bench)
        except NotInstalled as missing:
            report.skipped[name] = str(missing)
            say(f"  skipped: {missing}")
        except (BenchmarkError, OSError, http.client.HTTPException) as error:
            report.errors[name] = str(error)
            say(f"  ERROR: {error}")
        else:
            report.figures += figures
            for figure in figures:
                show(figure)
        if keep is not None:
            keep.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    return report


def main(words: list[str]) -> int:
    """Run, or write a stored report into the document."""
    given = arguments(words)
    if (kept := given.write_docs or given.write_overview) is not None:
        try:
            report = report_from_json(json.loads(kept.read_text()))
        except OSError as error:
            say(f"ERROR: {kept}: {error.strerror}")
            return 1
        except (ValueError, KeyError, TypeError, AssertionError):
            say(f"ERROR: {kept} is not a report of --json")
            return 1
        if given.write_docs is not None:
            write_pages(report)
        else:
            try:
                write_overview(report)
            except ValueError as error:
                say(f"ERROR: {error}")
                return 1
    else:
        options = options_of(given)
        if file_system_of(options.folder) in ("tmpfs", "ramfs"):
            say(f"{options.folder} is in memory: figures about fsync mean nothing; use --dir")
        report = run(given.only.split(","), options, given.json)
        summary(report)
    if given.chart is not None:
        given.chart.write_text(chart(report), encoding="utf-8")
    return 1 if report.errors else 0


if __name__ == "__main__":
    end_by_sigterm()
    sys.exit(main(sys.argv[1:]))
