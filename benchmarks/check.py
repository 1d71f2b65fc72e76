"""`./run bench-check`: a short run that finds a server that has become much slower.

Measures the cases beside the floor in short, interleaved rounds and compares the ratio of each row
with the one that `results/floor-ratios.json` keeps for this kind of processor. The floor of large
appends stores each body, too: most of their time is work of the memory and of files, whose speed
differs between machines more than that of processors. Exit code 0 if every row is within its
bounds; 1 if a row is not, could not be measured, or is missing on one side; 2 for wrong arguments.

A case that misses is measured again, up to `TRIES` times in all; a row passes if one try is within
its bounds. Other work on the machine makes a ratio worse, and a slow server is slow every time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.bench import Bench, HasCost, Options, Side, settle
from benchmarks.cases.against_floor import STORING
from benchmarks.cases.registry import STORE_CASES
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.report.floor_ratios import (
    ABOVE_MAX,
    MARGIN,
    FileProblem,
    Kept,
    Known,
    added,
    fairest,
    holds,
    known_ratios,
    parse_file,
    row_problems,
    spelled_file,
    verdict,
)
from benchmarks.report.machine import describe
from benchmarks.report.terminal import say
from benchmarks.servers.process import end_by_sigterm
from benchmarks.servers.server import DEFAULT_COMMAND

KEPT = Path(__file__).parent / "results" / "floor-ratios.json"
CASES = ("append-1", "append-100", "diff-1000")
# Rounds as short as this often pass between two turns of another process.
ROUNDS, SECONDS = 40, 0.05
ROUNDS_WRITTEN = 2 * ROUNDS
TRIES = 3

# The ratio of each row of a case, measured now.
Measure = Callable[[str], dict[str, float]]


class ShortBench(Bench):
    """A `Bench` for rounds of a few hundredths of a second; it keeps their samples."""

    def __init__(self, options: Options, noise_ms: list[float]) -> None:
        super().__init__(options, noise_ms)
        self.taken: list[dict[str, list[Sample]]] = []  # one for each figure of the case
        self._settled: set[HasCost] = set()

    def costed(self, server: HasCost, side: Side) -> Sample:
        """Run one round without measuring its CPU time. Wait until the server is idle only after
        its first round: a wait is longer than a round, and these cases neither seal nor take
        checkpoints.
        """
        sample = side()
        if server not in self._settled:
            self._settled.add(server)
            settle(server)
        return sample

    def interleave(
        self, sides: Mapping[str, Side], *, rounds: int | None = None, warm: bool = True
    ) -> dict[str, list[Sample]]:
        """Like `Bench.interleave`; the samples stay in `taken`."""
        taken = super().interleave(sides, rounds=rounds, warm=warm)
        self.taken.append(taken)
        return taken


def undisturbed_ms(samples: Sequence[Sample]) -> float:
    """The first decile of the rounds' median latencies: neither pauses within a round nor other
    work during most of the rounds changes it much.
    """
    return statistics.quantiles((sample.p50_ms for sample in samples), n=10)[0]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Processes started in the block stay on one core: a wake-up on another core costs more, and
    how often there is one depends on the other work of the machine.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(case: str, options: Options) -> dict[str, float]:
    """The ratio of each row of a case: the floor's latency over ours, which is the ratio of the
    rates, because the one connection sends its next request after the answer to the last one.

    The floor is the storing one where the case has one.
    """
    ratios = {}
    with one_core(), ShortBench(options, []) as bench:
        figures = STORE_CASES[case](bench)
        for figure, taken in zip(figures, bench.taken, strict=True):
            floor = undisturbed_ms(taken.get(STORING, taken["floor"]))
            ratios[f"{case}: {figure.name}"] = floor / undisturbed_ms(taken["ours"])
    return ratios


def compare(known: Mapping[str, Known], measured: Measure) -> int:
    """Print a line for each row; return the number of failed ones."""
    tries: dict[str, list[float]] = {}
    for case in CASES:
        for row, ratio in measured(case).items():
            tries[row] = [ratio]
    for turn in range(2, TRIES + 1):
        for case in CASES:
            rows = [row for row in tries if row.startswith(f"{case}: ") and row in known]
            if all(any(holds(ratio, known[row]) for ratio in tries[row]) for row in rows):
                continue
            say(f"{case} misses, measured again: try {turn} of {TRIES}")
            again = measured(case)
            for row in rows:
                tries[row].append(again[row])
    ratios = {row: fairest(tries[row], known[row]) for row in tries if row in known}
    for row, ratio in ratios.items():
        say(verdict(row, ratio, known[row]))
    missing = row_problems(tries, known)
    for problem in missing:
        say(problem)
    return len(missing) + sum(not holds(ratio, known[row]) for row, ratio in ratios.items())


def write(path: Path, cases: Sequence[str], measured: Measure, options: Options) -> None:
    """Measure every row of these cases once, in more rounds, and keep the ratios.

    The file keeps the ratios of the other cases and of other processors. It may be missing if all
    cases are measured. A ratio that `compare` would refuse on an unknown processor is not kept:
    remove the row from the file to keep it all the same.
    """
    is_new = set(cases) == set(CASES) and not path.exists()
    kept = {} if is_new else parse_file(path.read_text("utf-8"))
    machine = describe(options.folder)
    about = {"rounds": options.rounds, "seconds": options.seconds}
    newest = {case: Kept(machine, about, measured(case)) for case in cases}
    known = known_ratios(kept, processor="")
    for case, each in newest.items():
        for row, ratio in each.ratios.items():
            if row in known and not holds(ratio, known[row]):
                raise FileProblem(f"not kept: {verdict(row, ratio, known[row])}")
        kept[case] = added(kept.get(case, ()), each)
    text = spelled_file(kept)
    parse_file(text)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    for each in newest.values():
        for row, ratio in each.ratios.items():
            say(f"kept {row}: {ratio:.3f}")


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="./run bench-check",
        description="Compare the server's speed beside its floor with the kept ratios; fail below "
        f"{MARGIN} of one, and above {ABOVE_MAX:.0f} times one.",
    )
    parser.add_argument(
        "--write",
        nargs="*",
        choices=CASES,
        metavar="CASE",
        help=f"keep the ratios measured now, of all cases or of these: {', '.join(CASES)}",
    )
    parser.add_argument(
        "--kept", type=Path, default=KEPT, metavar="FILE.json", help="the file of kept ratios"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder for scratch data (default: %(default)s)",
    )
    parser.add_argument("--server", help="command that starts the server (default: this tree's)")
    given = parser.parse_args(words)
    if not given.dir.is_dir():
        parser.error(f"no such folder: {given.dir}")
    try:
        given.server = tuple(shlex.split(given.server)) if given.server else DEFAULT_COMMAND
    except ValueError as error:
        parser.error(f"--server: {error}")
    return given


def options_of(given: argparse.Namespace) -> Options:
    """The options of every case."""
    return Options(
        rounds=ROUNDS if given.write is None else ROUNDS_WRITTEN,
        seconds=SECONDS,
        quick=False,
        folder=given.dir,
        command=given.server,
        records=0,
        steady=True,
    )


def main(words: Sequence[str], measured: Measure | None = None) -> int:
    """Compare, or keep; `measured` stands for the servers in tests."""
    given = arguments(words)
    options = options_of(given)
    measured = measured or (lambda case: measure(case, options))
    try:
        if given.write is not None:
            write(given.kept, given.write or CASES, measured, options)
            return 0
        kept = parse_file(given.kept.read_text("utf-8"))
        processor = str(describe(options.folder)["processor"])
        failed = compare(known_ratios(kept, processor), measured)
    except (FileProblem, UnicodeDecodeError) as error:
        say(f"ERROR: {given.kept}: {error}")
        return 1
    except (BenchmarkError, OSError, http.client.HTTPException) as error:
        say(f"ERROR: {error}")
        return 1
    say(f"bench-check: {failed} failed" if failed else "bench-check: passed")
    return 1 if failed else 0


if __name__ == "__main__":
    end_by_sigterm()
    sys.exit(main(sys.argv[1:]))
