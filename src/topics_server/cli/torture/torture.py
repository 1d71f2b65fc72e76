"""`topics torture DIR`: tests whether a server keeps its promises on this disk.

Exit code 0: it does, as far as a program can find out. 1: it does not. 2: wrong usage. 3: nothing
was lost, but the disk answers syncs faster than a device can.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Final

import click
import msgspec

from topics_server.cli.amounts import size
from topics_server.cli.connection import Failure
from topics_server.cli.output import format_options, note, show_object
from topics_server.cli.torture.cycles import Broken, TortureRun, Totals
from topics_server.cli.torture.own_folder import OwnFolder
from topics_server.cli.torture.sync_times import SyncTimes, device_of, measured, suspicions_of
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.errors import StorageError
from topics_server.values.limits import MIB
from topics_server.wal.fs import OsFs

PASSED: Final = "passed"
FAILED: Final = "failed"
SUSPICIOUS: Final = "suspicious"
STOPPED: Final = "stopped"
EXIT_CODES: Final = {PASSED: 0, STOPPED: 1, FAILED: 1, SUSPICIOUS: 3}
LEAST_LIMIT: Final = 256 * MIB


class TortureVerdict(msgspec.Struct, omit_defaults=True):
    """The findings of a run; `problems` and `suspicions` are sentences."""

    verdict: str
    seconds: int
    totals: Totals
    syncs: SyncTimes | None = None
    problems: list[str] = []
    suspicions: list[str] = []
    kept: str | None = None


HELP: Final = """Kill a server on the disk of DIR again and again, and check what it acknowledged.

DIR must be new or empty. A server of its own runs there: writers append, the server is killed
with SIGKILL, its files are checked, it starts again, and every acknowledged record must be
there once and unchanged. Now and then its disk is full, by a limit and never in truth. Syncs
are timed: a program cannot see whether a disk is honest, but some times are too short for any
device.

\b
passed (0)       nothing was lost
failed (1)       a promise was broken: DIR stays as it is
suspicious (3)   nothing was lost, but syncs are faster than a device can be

A power cut is not tested: only pulling the plug shows what a disk does then.
"""


@click.command("torture", help=HELP)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--minutes",
    type=click.FloatRange(0, 60 * 24 * 31),
    default=5.0,
    show_default=True,
    help="How long; everything is done once at least.",
)
@click.option(
    "--size-limit",
    type=size(LEAST_LIMIT),
    default="1GiB",
    show_default=True,
    help="Most space to take on the disk.",
)
@click.option(
    "--writers",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Writers, each with a topic of its own.",
)
@format_options
@click.pass_context
def command(
    ctx: click.Context,
    directory: Path,
    minutes: float,
    size_limit: int,
    writers: int,
    as_json: bool,
) -> None:
    """Test a server on a disk; see `HELP`."""
    folder = OwnFolder(directory)
    folder.require(size_limit)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    verdict = tortured(folder, minutes * 60_000, writers, size_limit, stop)
    if verdict.verdict == FAILED:
        verdict.kept = str(folder.path)
    else:
        folder.clean_up()
    for problem in verdict.problems:
        note(f"problem: {problem}")
    for suspicion in verdict.suspicions:
        note(f"suspicious: {suspicion}")
    show_object(msgspec.json.encode(verdict), as_json=as_json)
    ctx.exit(EXIT_CODES[verdict.verdict])


def tortured(
    folder: OwnFolder, for_ms: float, writers: int, size_limit: int, stop: threading.Event
) -> TortureVerdict:
    """Run for `for_ms`, or until `stop` is set; run every kind of cycle at least once."""
    began_ms = monotonic_ms()
    run = TortureRun(folder, writers=writers, size_limit=size_limit, stop=stop, report=note)
    verdict = TortureVerdict(PASSED, 0, run.totals)
    try:
        verdict.syncs = measured(OsFs(), str(folder.sync_file))
        device = device_of(folder.path, Path("/proc/self/mountinfo"), Path("/sys/dev/block"))
        verdict.suspicions = suspicions_of(verdict.syncs, device)
        run.run(began_ms + for_ms)
    except Broken as broken:
        verdict.problems = [str(line) for line in broken.args]
    except Failure as failure:
        verdict.problems = [failure.message]
    except StorageError as error:
        verdict.problems = [f"the disk failed: {error}"]
    if verdict.problems:
        verdict.verdict = FAILED
    elif stop.is_set():
        verdict.verdict = STOPPED
    elif verdict.suspicions:
        verdict.verdict = SUSPICIOUS
    verdict.seconds = round((monotonic_ms() - began_ms) / 1000)
    return verdict
