"""`python -m benchmarks`: run the cases that were named, show, keep and draw what they measured.

Exit code 0 when everything was measured, whatever the verdicts: a bar that is missed is a result.
1 when a case could not be measured, 2 for wrong arguments.
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
from benchmarks.chart import chart
from benchmarks.document import write_document
from benchmarks.figures import Report, report_from_json
from benchmarks.loader import BenchmarkError
from benchmarks.machine import describe, file_system_of
from benchmarks.peers import NotInstalled
from benchmarks.server import DEFAULT_COMMAND
from benchmarks.terminal import say, show, summary

ROUNDS, SECONDS = 7, 2.5
ROUNDS_QUICK, SECONDS_QUICK = 2, 0.3
RECORDS, RECORDS_QUICK = 5_000_000, 50_000


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the server beside its floor."
    )
    parser.add_argument(
        "--only", default=",".join(CASES), metavar="A,B", help=f"of: {', '.join(CASES)}"
    )
    parser.add_argument("--rounds", type=int, help=f"interleaved rounds (default {ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"per side and round (default {SECONDS})")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run at all")
    parser.add_argument("--records", type=int, help=f"of the memory case (default {RECORDS:,})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the report")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the report")
    parser.add_argument(
        "--write-docs", type=Path, metavar="FILE.json", help="write a kept report into docs/"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured"
    )
    parser.add_argument("--server", help="another command that serves (default: this tree's)")
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
    return given


def options_of(given: argparse.Namespace) -> Options:
    """The options with the defaults of a full or a quick run."""
    quick = bool(given.quick)
    return Options(
        rounds=given.rounds or (ROUNDS_QUICK if quick else ROUNDS),
        seconds=given.seconds or (SECONDS_QUICK if quick else SECONDS),
        quick=quick,
        folder=given.dir,
        command=tuple(shlex.split(given.server)) if given.server else DEFAULT_COMMAND,
        records=given.records or (RECORDS_QUICK if quick else RECORDS),
    )


def run(names: list[str], options: Options, keep: Path | None) -> Report:
    """Run the cases; each one's failure is its own. The report is kept after every case."""
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
    """Run, or write a kept report into the document."""
    given = arguments(words)
    if given.write_docs is not None:
        report = report_from_json(json.loads(given.write_docs.read_text()))
        write_document(report)
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
    sys.exit(main(sys.argv[1:]))
